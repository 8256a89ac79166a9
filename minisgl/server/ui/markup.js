// Elements, texts and numbers. Text becomes a text node and nothing else, whoever has written it.

export const $ = (selector, within = document) => within.querySelector(selector);

/** A new element with some properties, classes and children; a child that is no node is text. */
export function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

/** "1 page", "2 pages" */
export const counted = (count, noun) => `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;

/** A text in which one can see the ends of lines, and nothing that is not printable. */
export const visible = (text) => text.replace(/\s*\n\s*/g, " ↵ ").replace(/[\p{Cc}\p{Cf}\p{Co}\p{Cn}]/gu, "�");

/** A value of the style sheet. */
export const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
