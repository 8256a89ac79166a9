// Requests to the server that this page comes from.

import { $ } from "./markup.js";

let key = "";

/** Fetch, with the API key if there is one; asks for it when the server does. An error has the server's own words. */
export async function ask(path, options = {}) {
  for (;;) {
    const used = key;
    const headers = { "Content-Type": "application/json", ...(used && { Authorization: `Bearer ${used}` }) };
    const response = await fetch(path, { ...options, headers }).catch((error) => {
      throw error.name === "AbortError" ? error : new Error("the server does not answer");
    });
    if (response.ok) return response;
    if (response.status !== 401) throw new Error(await complaint(response));
    if (key === used) await newKey();
  }
}

async function complaint(response) {
  const body = await response.json().catch(() => null);
  return body?.error?.message ?? `the server answered with status ${response.status}`;
}

let asking = null;

/** Show the form and wait until it is sent. Many requests may wait for one answer. */
function newKey() {
  asking ??= new Promise((resolve) => {
    const form = $("#key");
    form.hidden = false;
    $("#secret").focus();
    form.onsubmit = (event) => {
      event.preventDefault();
      key = $("#secret").value;
      form.reset();
      form.hidden = true;
      asking = null;
      resolve();
    };
  });
  return asking;
}

/** Server-sent events of a response, parsed; "[DONE]" ends them, and an error among them is thrown. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const blocks = (rest + value).split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) {
        const data = block.startsWith("data: ") ? block.slice(6) : "";
        if (data === "[DONE]") return;
        if (!data) continue;
        const event = JSON.parse(data);
        if (event.error) throw new Error(event.error.message);
        yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // it may have failed already
  }
}
