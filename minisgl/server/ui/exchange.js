// A question and its answer in the list of conversations, and the requests that make answers grow.

import { $, make } from "./markup.js";
import { ask, events } from "./server.js";

const TEMPERATURE = 0.6;

const talk = $("#talk");
const running = new Set(); // AbortControllers
let count = 0;
let model = "";
let following = true; // the end of the list, until somebody scrolls up

export const useModel = (name) => (model = name);

/** A name for a request, by which its number in the engine is found again. */
export const newName = () => `page-${crypto.getRandomValues(new Uint32Array(1))[0].toString(36)}-${(count += 1)}`;

/** One question with room for its answer, at the end of a card. */
export class Exchange {
  text = "";

  /** `name` is that of the request, and `place` which of its prompts this is. */
  constructor(card, question, name, place = 0) {
    const tag = make("span", { className: "tag", hidden: true });
    tag.dataset.name = name;
    tag.dataset.place = place;
    this.answer = make("p", { className: "answer growing" });
    card.append(make("p", { className: "question" }, tag, question), this.answer);
    follow();
  }

  grow(text) {
    this.text += text;
    this.answer.append(text);
    follow();
  }

  /** The answer has ended; `why` is said unless that is how answers should end. */
  end(why = "") {
    this.answer.classList.remove("growing");
    if (why) this.answer.append(make("em", {}, ` (${why})`));
  }
}

export const newCard = () => talk.appendChild(make("article"));

function follow() {
  if (following) talk.scrollTop = talk.scrollHeight;
}

/** Send a request that streams, and hand each choice of its chunks to `take`. Throws what went wrong, in words. */
export async function generate(path, fields, take) {
  const controller = new AbortController();
  running.add(controller);
  const body = JSON.stringify({ model, stream: true, temperature: TEMPERATURE, ...fields });
  try {
    const response = await ask(path, { method: "POST", body, signal: controller.signal });
    for await (const chunk of events(response)) chunk.choices.forEach(take);
  } catch (error) {
    throw error.name === "AbortError" ? new Error("stopped") : error;
  } finally {
    running.delete(controller);
  }
}

/** Put the engine's number of each request before its question. The prompts of one request have numbers in a row. */
export function tagQuestions(state) {
  const firsts = new Map();
  for (const { user, uid } of state.requests) firsts.set(user, Math.min(uid, firsts.get(user) ?? uid));
  for (const tag of talk.querySelectorAll(".tag[hidden]")) {
    const first = firsts.get(tag.dataset.name);
    if (first === undefined) continue;
    const uid = first + Number(tag.dataset.place);
    tag.textContent = `r${uid}`;
    tag.classList.add(`request-${uid % 6}`);
    tag.hidden = false;
  }
}

export function listenToExchanges() {
  $("#stop").addEventListener("click", () => running.forEach((controller) => controller.abort()));
  talk.addEventListener("scroll", () => (following = talk.scrollHeight - talk.scrollTop - talk.clientHeight < 40));
}
