// Which request all panels point out: the one that somebody looks at, else the newest that runs.

let chosen = null;

/** Point out a request; null leaves the choice to the page. */
export const choose = (uid) => (chosen = uid);

/** uid of the request to point out in a state; null if none runs. */
export function focused(state) {
  const running = state.requests.filter((request) => request.pages > 0).map((request) => request.uid);
  return running.includes(chosen) ? chosen : running.length ? Math.max(...running) : null;
}
