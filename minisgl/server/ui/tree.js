// The prefix cache: a box is a run of tokens that is kept once, and what follows it stands to its right.

import { rem } from "./canvas.js";
import { colorsOf } from "./colors.js";
import { choose, focused } from "./focus.js";
import { $, counted, make, visible } from "./markup.js";
import { hush, tell } from "./tip.js";

const LEAST_WIDTH = 1.5; // in doublings of tokens
const WIDEST = 5; // rem a doubling
const LOWEST = 1.35; // rem
const HIGHEST = 4.4;
const LOW = 3; // below this height, a box has one line

const KINDS = {
  radix: ["Radix tree", "Chapter 6, The radix tree"],
  "block-hash": ["Hashed blocks", "Chapter 7, Prefix caching by block hashes"],
};

const SAID = {
  radix:
    "Tokens that several prompts begin with are computed and kept once. A box stands to the right of what comes " +
    "before it; it grows with the logarithm of its tokens.",
  "block-hash":
    "Full pages, found by the hash of all tokens up to their end. A box is a chain of them; what can follow it " +
    "stands to its right.",
  none: "This engine has no prefix cache: it computes every prompt from its first token.",
  empty: "Nothing is cached yet. Ask something, or let a class ask.",
};

const boxes = new Map(); // elements by uid
const picture = $("#tree .picture");
let placed = []; // what is drawn: {node, depth, x, y, w, h}

export function drawTree(state) {
  const [name, chapter] = KINDS[state.cache] ?? ["Prefix cache", "Chapters 6 and 7"];
  $("#tree h2").textContent = name;
  $("#tree .legend").replaceChildren(...legend(state));
  $("#tree .caption").replaceChildren(...caption(state, chapter));
  placed = layout(state.nodes);
  const uid = focused(state);
  const path = pathTo(state, uid);
  const alive = new Set();
  for (const place of placed) {
    alive.add(place.node.uid);
    show(place, state, path, uid);
  }
  for (const [uid, box] of boxes) {
    if (alive.has(uid)) continue;
    box.remove();
    boxes.delete(uid);
  }
  if (!picture.contains(document.activeElement)) {
    placed.forEach(({ node }, index) => (boxes.get(node.uid).tabIndex = index ? -1 : 0)); // the way in for the Tab key
  }
}

function legend(state) {
  const locked = state.nodes.filter((node) => node.locks).length;
  const entries = [
    ["locked", `locked ${locked}`],
    ["idle", `can be evicted ${state.nodes.length - locked}`],
    ["path", "newest request"],
  ];
  return entries.map(([kind, text]) => make("span", { className: `key ${kind}` }, text));
}

function caption(state, chapter) {
  let text = SAID[state.nodes.length ? state.cache : state.cache === "none" ? "none" : "empty"] ?? "";
  const cut = state.num_nodes - state.nodes.length;
  if (cut > 0) text += ` ${counted(cut, "node")} more are not shown.`;
  return [text, " ", make("b", {}, chapter)];
}

/** uids of the nodes that a request reads. */
function pathTo(state, uid) {
  const parents = new Map(state.nodes.map((node) => [node.uid, node.parent]));
  const path = new Set();
  let node = state.requests.find((request) => request.uid === uid)?.node ?? 0;
  while (node) {
    path.add(node);
    node = parents.get(node) ?? 0;
  }
  return path;
}

/** A box for each node: leaves have a line each, and what they share is as high as they are together. */
function layout(nodes) {
  const children = new Map();
  for (const node of nodes) children.set(node.parent, [...(children.get(node.parent) ?? []), node]);
  const first = new Map(); // the oldest node below, so that a split leaves the order as it was
  for (const node of [...nodes].reverse()) {
    first.set(node.uid, Math.min(node.uid, ...(children.get(node.uid) ?? []).map((child) => first.get(child.uid))));
  }
  const places = [];
  let leaves = 0;
  const place = (node, depth, x, common) => {
    const it = { node, depth, x, common, w: LEAST_WIDTH + Math.log2(node.tokens), top: leaves };
    places.push(it);
    const below = (children.get(node.uid) ?? []).sort((a, b) => first.get(a.uid) - first.get(b.uid));
    const alike = commonLength(below.map((child) => child.text));
    for (const child of below) place(child, depth + 1, x + it.w, alike);
    if (!below.length) leaves += 1;
    it.lines = leaves - it.top;
  };
  for (const node of (children.get(0) ?? []).sort((a, b) => first.get(a.uid) - first.get(b.uid))) place(node, 0, 0, 0);
  const line = Math.min(Math.max(picture.clientHeight / (leaves || 1), LOWEST * rem()), HIGHEST * rem());
  const unit = Math.min(picture.clientWidth / Math.max(...places.map((it) => it.x + it.w), 1), WIDEST * rem());
  for (const it of places) Object.assign(it, { x: it.x * unit, w: it.w * unit, y: it.top * line, h: it.lines * line });
  return places;
}

/** Length of what all texts begin with, if there are several: pages are whole, so siblings may begin alike. */
function commonLength(texts) {
  if (texts.length < 2) return 0;
  const signs = texts.map((text) => [...text]);
  const differing = signs[0].findIndex((sign, index) => signs.some((other) => other[index] !== sign));
  return differing < 0 ? 0 : signs[0].slice(0, differing).join("").length;
}

function show({ node, x, y, w, h, common }, state, path, uid) {
  let box = boxes.get(node.uid);
  if (!box) {
    box = make("div", { className: "node", tabIndex: -1 }, make("b"), make("span"));
    box.dataset.uid = node.uid;
    boxes.set(node.uid, box);
    picture.append(box);
  }
  const onPath = path.has(node.uid);
  box.classList.toggle("locked", node.locks > 0);
  box.classList.toggle("path", onPath);
  box.classList.toggle("low", h < LOW * rem());
  Object.assign(box.style, { left: `${x}px`, top: `${y}px`, width: `${w - 3}px`, height: `${h - 3}px` });
  box.style.setProperty("--request", onPath ? colorsOf(uid)[0] : "");
  setText(box.firstChild, `${node.tokens}${node.locks > 1 ? ` · ${node.locks}×` : ""}`);
  setText(box.lastChild, (common ? "…" : "") + visible(node.text.slice(common)));
  box.setAttribute("aria-label", describe(node, state).join("; "));
}

function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function describe(node, state) {
  const { num_pages: number, pages, locks } = node;
  const named = `${pages.slice(0, 8).join(", ")}${number > 8 ? " …" : ""}`;
  const lines = [
    `“${visible(node.text)}${node.tokens > node.head.length ? " …" : ""}”`,
    `${counted(node.tokens, "token")} in ${counted(number, "page")}: ${named}`,
    locks ? `locked by ${counted(locks, "request")}: it cannot be evicted` : "no request reads it: it can be evicted",
  ];
  const age = state.clock - node.last_used;
  if (node.last_used) lines.push(`last used ${counted(age, "tick")} of the cache’s clock ago`);
  return lines;
}

/** What is at an element, told beside it. */
function tellAbout(box, state) {
  const place = placed.find(({ node }) => node.uid === Number(box.dataset.uid));
  if (!place) return;
  const { left, bottom } = box.getBoundingClientRect();
  tell(left, bottom - 8, describe(place.node, state));
}

/** The box that an arrow key leads to: up to the parent, down to a child, or to a neighbour. */
function neighbour(uid, key) {
  const index = placed.findIndex(({ node }) => node.uid === uid);
  const { node, depth } = placed[index];
  switch (key) {
    case "ArrowLeft":
      return node.parent;
    case "ArrowRight":
      return placed.find((it) => it.node.parent === uid)?.node.uid;
    case "ArrowUp":
      return placed.slice(0, index).findLast((it) => it.depth === depth)?.node.uid;
    case "ArrowDown":
      return placed.slice(index + 1).find((it) => it.depth === depth)?.node.uid;
  }
}

/** Let pointer and keys ask about nodes; `shown` gives the state that is drawn. */
export function listenToTree(shown) {
  const readers = (box) => {
    const on = shown()?.requests.filter((request) => request.node === Number(box.dataset.uid));
    choose(on?.length ? on.at(-1).uid : null);
  };
  for (const kind of ["pointerover", "focusin"]) {
    picture.addEventListener(kind, (event) => {
      const box = event.target.closest(".node");
      if (!box || !shown()) return;
      tellAbout(box, shown());
      readers(box);
    });
  }
  for (const kind of ["pointerleave", "focusout"]) {
    picture.addEventListener(kind, () => {
      hush();
      choose(null);
    });
  }
  picture.addEventListener("keydown", (event) => {
    const box = event.target.closest(".node");
    const next = box && boxes.get(neighbour(Number(box.dataset.uid), event.key));
    if (!next) return;
    event.preventDefault();
    box.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  });
}
