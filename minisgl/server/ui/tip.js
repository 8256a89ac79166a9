// One small box that tells about what the pointer or the keyboard is at.

import { $, make } from "./markup.js";

const GAP = 14;

/** Say these lines beside a point of the window. */
export function tell(x, y, lines) {
  const tip = $("#tip");
  tip.replaceChildren(...lines.map((line) => make("div", {}, line)));
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(Math.min(x + GAP, innerWidth - width - GAP), 0)}px`;
  tip.style.top = `${y + GAP + height > innerHeight ? y - GAP - height : y + GAP}px`;
}

export const hush = () => ($("#tip").hidden = true);
