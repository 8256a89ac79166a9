// Okabe and Ito's palette, which stays distinct under the common kinds of colour blindness, and a legible ink on each.
// A request has the same colour here and in the book.

const PALETTE = [
  ["#0072b2", "#ffffff"],
  ["#e69f00", "#000000"],
  ["#009e73", "#000000"],
  ["#cc79a7", "#000000"],
  ["#56b4e9", "#000000"],
  ["#d55e00", "#000000"],
];

/** Fill and ink of a request; they repeat after six. */
export const colorsOf = (uid) => PALETTE[uid % PALETTE.length];
