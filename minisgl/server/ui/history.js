// What the server has sent in the last minute, and which moment of it is shown. The engine itself never waits.

const KEPT = 60; // seconds

export class History {
  #states = []; // oldest first
  #cursor = null; // engine time of the moment that is shown; null is now
  #received = 0; // when the newest state came, by the page's clock
  #ticked = 0;
  speed = 1;
  paused = false;
  slices = new Map(); // by their numbers
  requests = new Map(); // the newest news of each, by uid

  add(state) {
    if (this.#states.length && this.#newest.started !== state.started) this.#forget();
    this.#states.push(state);
    this.#received = performance.now();
    for (const slice of state.slices) this.slices.set(slice.number, slice);
    for (const request of state.requests) this.requests.set(request.uid, request);
    this.#drop(state);
  }

  get #newest() {
    return this.#states.at(-1);
  }

  #forget() {
    this.#states = [];
    this.#cursor = null;
    this.slices.clear();
    this.requests.clear();
  }

  #drop(newest) {
    const before = newest.time - KEPT;
    while (this.#states[0].time < before) this.#states.shift();
    for (const [number, slice] of this.slices) {
      if (slice.end >= before - KEPT) break;
      this.slices.delete(number);
    }
    const present = new Set(newest.requests.map((request) => request.uid));
    for (const [uid, request] of this.requests) {
      const last = request.finished || (present.has(uid) ? newest.time : request.arrived);
      if (last < before - KEPT) this.requests.delete(uid);
    }
  }

  /** Engine time of now: it goes on while the engine is busy with a step and says nothing. */
  get #now() {
    return this.#newest.time + (performance.now() - this.#received) / 1000;
  }

  /** Engine time of what is shown. */
  get time() {
    return this.#cursor ?? this.#now;
  }

  /** The state that is shown; undefined before the first has come. */
  get shown() {
    if (this.#cursor === null) return this.#newest;
    return this.#states.findLast((state) => state.time <= this.#cursor) ?? this.#states[0];
  }

  /** Seconds since the shown moment. */
  get ago() {
    return this.#cursor === null ? 0 : this.#now - this.#cursor;
  }

  /** Seconds since the server sent something. */
  get silence() {
    return (performance.now() - this.#received) / 1000;
  }

  /** Show the moment of so many seconds ago, and stay there. */
  goBack(seconds) {
    if (!this.#newest) return;
    this.#cursor = Math.max(this.#now - seconds, this.#states[0].time);
    this.paused = true;
  }

  /** Go on from the moment that is shown; at full speed, from now. */
  play(speed) {
    this.speed = speed;
    this.paused = false;
    if (speed === 1) this.#cursor = null;
    else if (this.#newest) this.#cursor ??= this.#newest.time;
  }

  /** Move what is shown, whenever it is drawn. */
  tick() {
    const now = performance.now();
    if (this.#cursor !== null && !this.paused) this.#cursor += ((now - this.#ticked) / 1000) * this.speed;
    this.#ticked = now;
    if (this.#cursor !== null) this.#cursor = Math.max(this.#cursor, this.#states[0].time);
  }
}
