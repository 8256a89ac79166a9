// The page: states come in, all panels draw the one that is shown.

import { drawBatch, listenToBatch } from "./batch.js";
import { listenToChat } from "./chat.js";
import { listenToClass } from "./classroom.js";
import { listenToExchanges, tagQuestions, useModel } from "./exchange.js";
import { History } from "./history.js";
import { $ } from "./markup.js";
import { drawNumbers } from "./numbers.js";
import { drawPool, listenToPool } from "./pool.js";
import { ask, events } from "./server.js";
import { drawTimeline, listenToTimeline } from "./timeline.js";
import { drawTree, listenToTree } from "./tree.js";

const FRAME = 80; // milliseconds: more often would take time from an engine on the same machine
const RETRY = 2000; // milliseconds
const SILENCE = 1.5; // seconds after which the page says that it waits
const SHARE = 0.05; // of the engine's time that looks may take: it answers less often where they take long

const history = new History();
let trouble = "";

async function follow() {
  for (;;) {
    try {
      const { data } = await (await ask("v1/models")).json();
      useModel(data[0].id);
      $("#model").textContent = data[0].id;
      for await (const state of events(await ask("ui/events"))) {
        trouble = "";
        history.add(state);
      }
      trouble = "the server has closed the connection";
    } catch (error) {
      trouble = error.message;
    }
    await new Promise((resolve) => setTimeout(resolve, RETRY));
  }
}

function status() {
  if (trouble) return `Trying again: ${trouble}`;
  if (!history.shown) return "Waiting for the engine …";
  const { cost } = history.shown;
  if (history.silence > SILENCE + cost / SHARE) return `The engine has been busy for ${Math.round(history.silence)} s.`;
  return `A look costs the engine ${(cost * 1000).toFixed(1)} ms`;
}

function drawPlayer() {
  $("#pause").textContent = history.paused ? "Go on" : "Pause";
  $("#pause").setAttribute("aria-pressed", history.paused);
  const ago = history.ago;
  if (document.activeElement !== $("#moment")) $("#moment").value = -ago;
  $("#ago").textContent = ago ? `−${ago.toFixed(1)} s` : "now";
  document.body.classList.toggle("past", ago > 0);
}

function draw() {
  $("#status").textContent = status();
  if (!history.shown || document.hidden) return;
  history.tick();
  const { shown: state, time } = history;
  drawPlayer();
  drawNumbers(state, history, time);
  drawTree(state);
  drawPool(state);
  drawBatch(state);
  drawTimeline(history, time);
  tagQuestions(state);
}

function listenToPlayer() {
  const toggle = () => (history.paused ? history.play(history.speed) : history.goBack(history.ago));
  $("#pause").addEventListener("click", toggle);
  $("#speed").addEventListener("change", (event) => history.play(Number(event.target.value)));
  $("#moment").addEventListener("input", (event) => history.goBack(-event.target.value));
  document.addEventListener("keydown", (event) => {
    const writes = event.target.closest("input, textarea, select, summary");
    if (event.key === "p" && !writes && !event.ctrlKey && !event.metaKey && !event.altKey) toggle();
  });
}

listenToPlayer();
listenToExchanges();
listenToChat();
listenToClass();
listenToTree(() => history.shown);
listenToPool();
listenToBatch();
listenToTimeline();
follow();
setInterval(draw, FRAME);
