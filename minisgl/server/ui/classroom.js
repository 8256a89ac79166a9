// A class at work: many prompts that begin with the same text, so that the tree has something to share. They are one
// request to the server, because a browser opens six connections to it and no more.

import { Exchange, generate, newCard, newName } from "./exchange.js";
import { $ } from "./markup.js";

const TEXT = `The town library will be closed from Friday to Sunday, because the old heating is being replaced. It \
opens again on Monday at nine. Books that are due on these days can be returned a week later, and nobody pays a fee. \
The reading room in the school next door is open to all until then. Please bring your library card. Children under ten \
come with an adult. On Monday, there is tea for everybody who helps to carry the chairs back.`;

const QUESTIONS = `Why is the library closed?
When does it open again?
What happens to books that are due?
Where can I read in the meantime?
What should I bring with me?
Who needs to come with an adult?
Is there anything to drink on Monday?
How long is the library closed?
What is the note about, in one sentence?
What is being replaced?
On which day would you go there?
Who is allowed to use the reading room?`;

// Long enough to fill a page of its own: what is shorter is never cached.
const ending = (question) => `\n\nQuestion: ${question} Answer in two or three whole sentences.\nAnswer:`;

async function ask(text, questions, maxTokens) {
  const user = newName();
  const exchanges = questions.map((question, place) => new Exchange(newCard(), question, user, place));
  const unfinished = new Set(exchanges);
  const prompt = questions.map((question) => text + ending(question));
  const fields = { prompt, max_tokens: maxTokens, stop: ["\nQuestion"], user };
  try {
    await generate("v1/completions", fields, (choice) => {
      const exchange = exchanges[choice.index];
      exchange.grow(choice.text);
      if (!choice.finish_reason) return;
      exchange.end(choice.finish_reason === "length" ? "the limit of tokens is reached" : "");
      unfinished.delete(exchange);
    });
  } catch (error) {
    unfinished.forEach((exchange) => exchange.end(error.message));
  }
}

export function listenToClass() {
  $("#text").value = TEXT;
  $("#questions").value = QUESTIONS;
  $("#class").addEventListener("submit", (event) => {
    event.preventDefault();
    const given = $("#questions").value.split("\n").filter((line) => line.trim());
    if (!given.length) return;
    const students = Number($("#students").value);
    const questions = Array.from({ length: students }, (_, student) => given[student % given.length]);
    ask($("#text").value, questions, Number($("#limit").value));
  });
}
