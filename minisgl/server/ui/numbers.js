// The figures in the page's head.

import { $, make } from "./markup.js";

const WINDOW = 2; // seconds

export function drawNumbers(state, history, time) {
  const recent = [...history.slices.values()].filter((slice) => slice.end > time - WINDOW && slice.end <= time);
  const rate = (kind) => Math.round(recent.reduce((sum, slice) => sum + slice[kind], 0) / WINDOW);
  const seen = [...history.requests.values()].filter((request) => request.admitted && request.admitted <= time);
  const prompt = seen.reduce((sum, request) => sum + request.prompt, 0);
  const cached = seen.reduce((sum, request) => sum + request.cached, 0);
  const used = state.num_pages - state.free - state.evictable;
  const { wanted, restored } = state.store;
  const fromStore = ["of the rest in the store", wanted ? `${Math.round((100 * restored) / wanted)} %` : "–"];
  const { drafted, accepted, paused } = state.drafts;
  const ofDrafts = drafted ? `${Math.round((100 * accepted) / drafted)} %${paused ? `, ${paused} paused` : ""}` : "–";
  show([
    ["running", state.num_running],
    ["waiting", state.num_waiting],
    ["pages in use", `${used} / ${state.num_pages}`],
    ["prefill", `${rate("prefill")} tok/s`],
    ["decode", `${rate("decode")} tok/s`],
    ["of prompts cached", prompt ? `${Math.round((100 * cached) / prompt)} %` : "–"],
    ...(wanted === undefined ? [] : [fromStore]),
    ...(drafted === undefined ? [] : [["of drafts accepted", ofDrafts]]),
  ]);
}

function show(figures) {
  const list = $("#numbers");
  if (!list.children.length) list.append(...figures.map(([name]) => make("div", {}, make("dt", {}, name), make("dd"))));
  figures.forEach(([, value], index) => {
    list.children[index].lastChild.textContent = value;
  });
}
