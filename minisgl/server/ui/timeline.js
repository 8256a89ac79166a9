// The last half minute: a lane for each request, and the steps below.

import { clean, rem } from "./canvas.js";
import { colorsOf } from "./colors.js";
import { choose } from "./focus.js";
import { $, counted, make, style } from "./markup.js";
import { hush, tell } from "./tip.js";

const SPAN = 30; // seconds
const LANE = 1.7; // rem, at most
const LEAST_LANE = 0.5;
const LEAST_LABEL = 0.8;
const TOP = 4; // pixels
const STEPS = 0.2; // of the height

const canvas = $("#timeline .picture");
let drawn = null; // {lanes, x, laneTop, laneHeight, slices, from, to}
let spoken = "";

/** Draw what was known at a time. */
export function drawTimeline(history, time) {
  const from = time - SPAN;
  const slices = [...history.slices.values()].filter((slice) => slice.end > from && slice.start < time);
  const { pen, width, height } = clean(canvas);
  const left = 3.2 * rem();
  const x = (at) => left + ((Math.min(Math.max(at, from), time) - from) / SPAN) * (width - left);
  const axis = 1.3 * rem();
  const stepsTop = height - axis - height * STEPS;
  const all = lanesIn(history, from, time);
  const room = Math.max(Math.floor((stepsTop - 2 * TOP) / (LEAST_LANE * rem())), 1);
  const lanes = all.slice(-room);
  const laneHeight = Math.min((stepsTop - 2 * TOP) / Math.max(lanes.length, 1), LANE * rem());
  const colors = Object.fromEntries(["ink", "muted", "line", "accent", "idle"].map((name) => [name, style(name)]));
  drawn = { lanes, laneHeight, slices, from, left, width, stepsTop };
  drawAxis(pen, { x, time, from, left, width, height, axis, stepsTop, colors });
  drawLanes(pen, { lanes, laneHeight, slices, x, time, left, colors });
  drawSteps(pen, { slices, x, top: stepsTop, bottom: height - axis, left, colors });
  say(all.length - lanes.length, slices);
}

function lanesIn(history, from, time) {
  return [...history.requests.values()]
    .filter((request) => request.arrived < time && (!request.finished || request.finished > from))
    .sort((a, b) => a.uid - b.uid);
}

function drawAxis(pen, { x, time, from, left, width, height, axis, stepsTop, colors }) {
  pen.font = `${0.8 * rem()}px system-ui, sans-serif`;
  pen.textBaseline = "alphabetic";
  pen.textAlign = "center";
  pen.strokeStyle = colors.line;
  pen.fillStyle = colors.muted;
  pen.lineWidth = 1;
  for (let ago = 0; ago <= SPAN; ago += 5) {
    const at = x(time - ago);
    pen.globalAlpha = 0.6;
    pen.beginPath();
    pen.moveTo(at, 0);
    pen.lineTo(at, height - axis);
    pen.stroke();
    pen.globalAlpha = 1;
    pen.textAlign = ago === 0 ? "right" : ago === SPAN ? "left" : "center";
    pen.fillText(ago ? `−${ago} s` : "now", at, height - 2);
  }
  pen.beginPath();
  pen.moveTo(left, stepsTop);
  pen.lineTo(width, stepsTop);
  pen.stroke();
}

function drawLanes(pen, { lanes, laneHeight, slices, x, time, left, colors }) {
  const full = Math.max(laneHeight - 3, 3);
  const middle = (index) => TOP + index * laneHeight + laneHeight / 2;
  const index = new Map(lanes.map((request, place) => [request.uid, place]));
  pen.textBaseline = "middle";
  pen.textAlign = "right";
  pen.font = `600 ${Math.min(0.9 * rem(), Math.max(laneHeight, LEAST_LABEL * rem()) * 0.9)}px system-ui, sans-serif`;
  const labelled = Math.ceil((LEAST_LABEL * rem()) / laneHeight); // every lane, or every second, …
  lanes.forEach((request, place) => {
    pen.fillStyle = colors.ink;
    if (place % labelled === 0) pen.fillText(`r${request.uid}`, left - 6, middle(place));
    pen.setLineDash([3, 4]);
    pen.strokeStyle = colors.muted;
    line(pen, x(request.arrived), x(request.finished || time), middle(place)); // what no step covers is waiting
    pen.setLineDash([]);
  });
  for (const slice of slices) {
    const [from, to] = [x(slice.start), Math.max(x(slice.end), x(slice.start) + 1)];
    for (const [uid, prefill] of slice.rows) {
      if (!index.has(uid)) continue;
      const tall = prefill ? full : full * 0.4;
      pen.fillStyle = colorsOf(uid)[0];
      pen.fillRect(from, middle(index.get(uid)) - tall / 2, to - from, tall);
    }
    pen.textAlign = "center";
    pen.fillStyle = colors.ink;
    for (const uid of slice.preempted) if (index.has(uid)) pen.fillText("×", from, middle(index.get(uid)));
  }
  pen.fillStyle = colors.ink;
  lanes.forEach(({ finished }, place) => {
    if (finished && finished < time) pen.fillRect(x(finished), middle(place) - full / 2, 2.5, full);
  });
}

function line(pen, from, to, y) {
  pen.beginPath();
  pen.moveTo(from, y);
  pen.lineTo(to, y);
  pen.stroke();
}

/** Tokens a step; their square root, so that a decode step can be seen beside a prefill. */
function drawSteps(pen, { slices, x, top, bottom, left, colors }) {
  const tokens = (slice) => (slice.prefill + slice.decode) / slice.steps;
  const most = Math.max(...slices.map(tokens), 4);
  const height = (count) => ((bottom - top - 8) * Math.sqrt(count)) / Math.sqrt(most);
  pen.textAlign = "right";
  pen.fillStyle = colors.muted;
  pen.font = `${0.8 * rem()}px system-ui, sans-serif`;
  pen.textBaseline = "middle";
  pen.fillText(Math.round(most), left - 6, top + 12);
  pen.fillText("tokens", left - 6, (top + bottom) / 2 + 4);
  for (const slice of slices) {
    const [from, to] = [x(slice.start), x(slice.end)];
    const wide = Math.max(to - from - (to - from > 4 ? 1 : 0), 1);
    const all = height(tokens(slice));
    const decode = all * (slice.decode / Math.max(slice.prefill + slice.decode, 1));
    pen.fillStyle = colors.ink;
    pen.fillRect(from, bottom - all, wide, all - decode);
    pen.fillStyle = colors.idle;
    pen.fillRect(from, bottom - decode, wide, decode);
  }
}

function say(cut, slices) {
  const entries = [
    make("span", { className: "key prompt" }, "prefill"),
    make("span", { className: "key idle" }, "decode"),
    make("span", {}, "┄ waits"),
    make("span", {}, "× preempted"),
    make("span", {}, "▏ends"),
  ];
  if (cut > 0) entries.push(make("span", {}, `${counted(cut, "earlier request")} not shown`));
  $("#timeline .legend").replaceChildren(...entries);
  const steps = slices.reduce((sum, slice) => sum + slice.steps, 0);
  const text = `${counted(steps, "step")} in the last ${SPAN} seconds`;
  if (text !== spoken) canvas.setAttribute("aria-label", (spoken = text));
}

/** What the slice at a point was. */
function describe(slice) {
  const many = slice.steps > 1;
  const time = ((slice.end - slice.start) * 1000) / slice.steps;
  const lines = [many ? `${slice.steps} steps of ${time.toFixed(1)} ms each` : `a step of ${time.toFixed(1)} ms`];
  lines.push(`${counted(slice.prefill, "token")} of prefill, ${slice.decode} of decode`);
  const named = slice.rows.slice(0, 12).map(([uid, prefill]) => `r${uid}${prefill ? ` (${prefill})` : ""}`);
  lines.push(`${named.join(", ")}${slice.rows.length > 12 ? " …" : ""}`);
  if (slice.preempted.length) lines.push(`preempted: ${slice.preempted.map((uid) => `r${uid}`).join(", ")}`);
  return lines;
}

export function listenToTimeline() {
  canvas.addEventListener("pointermove", (event) => {
    if (!drawn) return;
    const { left, width, from, slices, lanes, laneHeight, stepsTop } = drawn;
    const time = from + ((event.offsetX - left) / (width - left)) * SPAN;
    const slice = slices.find((each) => each.start <= time && time <= each.end);
    const lane = event.offsetY < stepsTop ? lanes[Math.floor((event.offsetY - TOP) / laneHeight)] : undefined;
    choose(lane ? lane.uid : null);
    if (slice) tell(event.clientX, event.clientY, describe(slice));
    else hush();
  });
  canvas.addEventListener("pointerleave", () => {
    hush();
    choose(null);
  });
}
