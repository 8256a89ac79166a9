// The requests: those of the next step, the queue behind them, and the last to have ended.

import { colorsOf } from "./colors.js";
import { choose, focused } from "./focus.js";
import { $, make, visible } from "./markup.js";

const rows = new Map(); // elements by uid
const body = $("#batch tbody");

export function drawBatch(state) {
  const ended = state.requests.filter((request) => request.finished);
  const live = state.requests.filter((request) => !request.finished);
  const running = live.filter((request) => request.pages);
  const shown = [...running, ...live.filter((request) => !request.pages), ...ended.reverse()];
  const cut = state.num_running + state.num_waiting - live.length;
  $("#batch .legend").replaceChildren(
    ...[["cached", "from the cache"], ["prompt", "prompt"], ["new", "generated"]].map(([kind, text]) =>
      make("span", { className: `key ${kind}` }, text),
    ),
    ...(cut > 0 ? [make("span", {}, `and ${cut} more`)] : []),
  );
  $("#batch table").classList.toggle("no-drafts", state.drafts.drafted === undefined);
  const uid = focused(state);
  const elements = shown.map((request) => show(request, request.uid === uid));
  if (elements.some((element, index) => body.children[index] !== element) || body.children.length !== elements.length) {
    body.replaceChildren(...elements);
  }
  for (const uid of rows.keys()) if (!shown.some((request) => request.uid === uid)) rows.delete(uid);
}

function show(request, isFocused) {
  let row = rows.get(request.uid);
  if (!row) {
    row = make("tr", {}, ...Array.from({ length: 6 }, () => make("td")));
    row.dataset.uid = request.uid;
    row.children[0].append(make("span", { className: "tag" }, `r${request.uid}`));
    row.children[2].append(make("span", { className: "bar" }, make("i"), make("i"), make("i")), make("span"));
    row.children[5].append(make("span"));
    const [fill, ink] = colorsOf(request.uid);
    row.style.setProperty("--request", fill);
    row.style.setProperty("--on-request", ink);
    rows.set(request.uid, row);
  }
  row.className = `${request.finished ? "ended" : request.state}${isFocused ? " focused" : ""}`;
  const [, stateCell, tokens, pages, drafts, text] = row.children;
  stateCell.textContent = said(request);
  const [cached, prompt, generated] = tokens.firstChild.children;
  const all = request.prompt + request.room;
  cached.style.width = `${(100 * request.cached) / all}%`;
  prompt.style.width = `${(100 * (request.prompt - request.cached)) / all}%`;
  generated.style.width = `${(100 * request.generated) / all}%`;
  tokens.lastChild.textContent = `${request.prompt} + ${request.generated}`;
  tokens.title =
    `${request.prompt} tokens of prompt, ${request.cached} of them from the cache; ` +
    `${request.generated} of up to ${request.room} generated`;
  pages.textContent = request.pages || "";
  pages.title = `${request.pages} pages, ${request.shared} of them read by others as well`;
  const drafted = request.accepted + request.rejected;
  drafts.textContent = drafted ? `${request.accepted} / ${drafted}` : "";
  drafts.title = `${request.accepted} of ${drafted} drafts accepted`;
  text.firstChild.textContent = visible(request.text);
  return row;
}

/** Where a request is, in a word or two. */
function said(request) {
  if (request.finished) return request.reason;
  const again = request.preemptions ? ` (${request.preemptions}× preempted)` : "";
  return request.state + again;
}

export function listenToBatch() {
  body.addEventListener("pointerover", (event) => {
    const row = event.target.closest("tr");
    if (row) choose(Number(row.dataset.uid));
  });
  body.addEventListener("pointerleave", () => choose(null));
}
