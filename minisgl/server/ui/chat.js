// Conversations with the model. Each message is a request, and several conversations may wait for answers at once.

import { Exchange, generate, newCard, newName } from "./exchange.js";
import { $ } from "./markup.js";

class Conversation {
  #messages = [];
  #card = null;
  busy = false;

  async say(text, maxTokens) {
    this.#card ??= newCard();
    this.busy = true;
    const user = newName();
    const exchange = new Exchange(this.#card, text, user);
    const messages = [...this.#messages, { role: "user", content: text }];
    let reason = "";
    try {
      await generate("v1/chat/completions", { messages, max_tokens: maxTokens, user }, (choice) => {
        exchange.grow(choice.delta.content ?? "");
        reason = choice.finish_reason ?? reason;
      });
      this.#messages = [...messages, { role: "assistant", content: exchange.text }];
      exchange.end(reason === "length" ? "the limit of tokens is reached" : "");
    } catch (error) {
      exchange.end(error.message); // the next message begins where the last whole answer ended
    }
    this.busy = false;
  }
}

export function listenToChat() {
  let current = new Conversation();
  $("#composer").addEventListener("submit", (event) => {
    event.preventDefault();
    const text = $("#message").value.trim();
    if (!text) return;
    if (current.busy) current = new Conversation(); // a question beside the one that is being answered
    $("#message").value = "";
    current.say(text, Number($("#limit").value));
  });
  $("#message").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    $("#composer").requestSubmit();
  });
  $("#fresh").addEventListener("click", () => {
    current = new Conversation();
    $("#message").focus();
  });
}
