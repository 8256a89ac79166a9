// The page pool: a cell a page.

import { clean, rem } from "./canvas.js";
import { colorsOf } from "./colors.js";
import { choose, focused } from "./focus.js";
import { $, counted, make, style } from "./markup.js";
import { hush, tell } from "./tip.js";

const LARGEST = 2.6; // rem
const SMALLEST_WITH_TEXT = 1.2;

const canvas = $("#pool .picture");
let grid = null; // {columns, size, cells, state}
let cursor = 0; // cell that the keyboard is at

export function drawPool(state) {
  const cells = state.cells.flatMap((run) => Array(run.count).fill(run));
  const counts = count(state, cells);
  $("#pool .legend").replaceChildren(...legend(state, counts));
  $("#pool .caption").replaceChildren(...caption(state));
  const spoken = counts.map(([, name, number]) => `${name} ${number}`);
  canvas.setAttribute("aria-label", `${state.num_pages} pages: ${spoken.join(", ")}`);
  grid = { ...fit(cells.length), cells, state };
  paint(focused(state));
}

function count(state, cells) {
  const read = cells.filter((cell) => cell.use === "cached" && cell.number).length;
  const idle = cells.filter((cell) => cell.use === "cached" && !cell.number).length;
  const exact = state.stride === 1;
  return [
    ["free", "free", state.free],
    ["private", "private", state.num_pages - state.free - state.cached],
    ["read", "cached, read", exact ? read : state.cached - state.evictable],
    ["idle", "cached, idle", exact ? idle : state.evictable],
  ];
}

function legend(state, counts) {
  return counts.map(([kind, name, number]) => make("span", { className: `key ${kind}` }, `${name} ${number}`));
}

function caption(state) {
  let text =
    `A page is the KV of ${counted(state.page_size, "token")}. In a request’s colour: its own; ` +
    "dark or bright: cached and read by as many requests as it says; grey: kept for later requests.";
  if (state.stride > 1) text += ` One page in ${state.stride} of ${state.num_pages.toLocaleString("en")} is shown.`;
  return [text, " ", make("b", {}, "Chapter 4, Paged KV")];
}

/** Columns and size of the cells, as large as they can be. */
function fit(number) {
  const { clientWidth: width, clientHeight: height } = canvas;
  let columns = Math.max(Math.ceil(width / (LARGEST * rem())), 1);
  while (Math.ceil(number / columns) * (width / columns) > height && width / columns > 2) columns += 1;
  return { columns, size: width / columns };
}

function paint(uid) {
  const { pen } = clean(canvas);
  const { columns, size, cells, state } = grid;
  const own = new Set(pagesOfPath(state, uid));
  const gap = size > 8 ? 2 : size > 4 ? 1 : 0;
  const colors = Object.fromEntries(["ink", "paper", "line", "idle", "accent"].map((name) => [name, style(name)]));
  pen.font = `600 ${Math.min(size * 0.46, rem())}px system-ui, sans-serif`;
  pen.textAlign = "center";
  pen.textBaseline = "middle";
  cells.forEach((cell, index) => {
    const x = (index % columns) * size;
    const y = Math.floor(index / columns) * size;
    const [fill, ink, label] = look(cell, colors);
    if (fill) {
      pen.fillStyle = fill;
      pen.fillRect(x, y, size - gap, size - gap);
    } else if (size > 4) {
      pen.strokeStyle = colors.line;
      pen.lineWidth = 1;
      pen.strokeRect(x + 0.5, y + 0.5, size - gap - 1, size - gap - 1);
    }
    if (label && size >= SMALLEST_WITH_TEXT * rem()) {
      pen.fillStyle = ink;
      pen.fillText(label, x + (size - gap) / 2, y + (size - gap) / 2, size - gap - 3);
    }
    if (own.has(index) || (cell.use === "private" && cell.number === uid)) {
      pen.strokeStyle = colors.accent;
      pen.lineWidth = size > 12 ? 3 : 1.5;
      pen.strokeRect(x + 1, y + 1, size - gap - 2, size - gap - 2);
    }
  });
}

/** Fill, ink and label of a cell. Colour is never the only sign. */
function look(cell, colors) {
  if (cell.use === "free") return [null, null, ""];
  if (cell.use === "private") return [...colorsOf(cell.number), `r${cell.number}`];
  return cell.number ? [colors.ink, colors.paper, `${cell.number}×`] : [colors.idle, colors.ink, ""];
}

/** Cached pages that a request reads: those of its nodes. */
function pagesOfPath(state, uid) {
  const nodes = new Map(state.nodes.map((node) => [node.uid, node]));
  const pages = [];
  let node = nodes.get(state.requests.find((request) => request.uid === uid)?.node);
  while (node) {
    pages.push(...node.pages.filter((page) => page % state.stride === 0).map((page) => page / state.stride));
    node = nodes.get(node.parent);
  }
  return pages;
}

function describe(index) {
  const { cells, state } = grid;
  const cell = cells[index];
  const page = index * state.stride;
  const lines = [`page ${page}, slots ${page * state.page_size} to ${(page + 1) * state.page_size - 1}`];
  if (cell.use === "free") lines.push("free");
  if (cell.use === "private") lines.push(`private to request r${cell.number}`);
  if (cell.use === "cached" && cell.number) lines.push(`cached, read by ${counted(cell.number, "running request")}`);
  if (cell.use === "cached" && !cell.number) lines.push("cached, read by none: it can be evicted");
  const node = state.nodes.find((each) => each.pages.includes(page));
  if (node) lines.push(`in the node “${node.text.slice(0, 40)}”`);
  return lines;
}

function pointOut(index) {
  const { columns, size, cells } = grid;
  const { left, top } = canvas.getBoundingClientRect();
  tell(left + ((index % columns) + 0.5) * size, top + (Math.floor(index / columns) + 0.5) * size, describe(index));
  choose(cells[index].use === "private" ? cells[index].number : null);
}

export function listenToPool() {
  canvas.addEventListener("pointermove", (event) => {
    if (!grid) return;
    const column = Math.floor(event.offsetX / grid.size);
    const index = Math.floor(event.offsetY / grid.size) * grid.columns + column;
    if (column < grid.columns && index < grid.cells.length) pointOut(index);
    else hush();
  });
  const leave = () => {
    hush();
    choose(null);
  };
  canvas.addEventListener("pointerleave", leave);
  canvas.addEventListener("blur", leave);
  canvas.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -grid?.columns, ArrowDown: grid?.columns }[event.key];
    if (!grid || !step) return;
    event.preventDefault();
    cursor = Math.min(Math.max(cursor + step, 0), grid.cells.length - 1);
    pointOut(cursor);
  });
}
