// What the page asks of its server: answers once, and one event stream per tab.

/** There is no session, or it is gone. */
export class Refused extends Error {}

/** Nobody has answered: neither the page's server nor, for it, the coordinator. */
export class Unanswered extends Error {}

/**
 * @param {string} path
 * @param {RequestInit} [how]
 * @returns {Promise<any>}
 */
export async function ask(path, how) {
  // Past the browser's cache, where a question waits for the answer to an equal one before it.
  const response = await fetch(path, { credentials: "same-origin", cache: "no-store", ...how }).catch(() => {
    throw new Unanswered("the page’s server does not answer");
  });
  if (response.status === 401) throw new Refused(await response.text());
  const answer = (response.headers.get("content-type") || "").includes("json") ? await response.json() : {};
  if (!response.ok) throw new (response.status === 503 ? Unanswered : Error)(answer.error || `the page’s server answered ${response.status}`);
  return answer;
}

/** Browsers keep six connections to a server, for all tabs together: two are left to questions. */
const SLOTS = 4;
const GLANCE_MS = 2000;
const PAUSE_MS = 3000;

/**
 * Takes one of the connections that streams of all tabs may hold.
 * @returns {Promise<(() => void) | undefined>} what gives it back; undefined when all are taken
 */
async function slot() {
  if (!navigator.locks) return () => undefined; // neither this machine nor TLS: a proxy has more connections
  for (let at = 0; at < SLOTS; at += 1) {
    /** @type {(() => void) | undefined} */
    const taken = await new Promise((resolve) => {
      navigator.locks.request(`stratagem-stream-${at}`, { ifAvailable: true }, (lock) =>
        lock ? new Promise((release) => resolve(() => release(undefined))) : resolve(undefined)).catch(() => resolve(undefined));
    });
    if (taken) return taken;
  }
  return undefined;
}

/**
 * An event stream that a hidden tab closes, and that goes on behind the last event when it is shown
 * again. A tab that finds all places taken looks now and then instead, and misses nothing.
 */
export class Stream {
  /**
   * @param {string} run
   * @param {number} from
   * @param {Record<string, (value: any) => void>} handlers
   */
  constructor(run, from, handlers) {
    this.run = run;
    this.next = from;
    this.handlers = handlers;
    /** @type {EventSource | undefined} */
    this.source = undefined;
    /** @type {object | undefined} What a call of open() has to find when its place is there. */
    this.turn = undefined;
    /** @type {(() => void) | undefined} */
    this.release = undefined;
    /** @type {number | undefined} */
    this.timer = undefined;
    this.onHidden = () => (document.hidden ? this.pause() : this.open());
    document.addEventListener("visibilitychange", this.onHidden);
    if (!document.hidden) this.open();
  }

  async open() {
    if (this.source) return;
    const turn = (this.turn = {});
    const release = await slot();
    if (turn !== this.turn) {
      release?.();
      return;
    }
    this.release = release;
    if (!release) this.again(GLANCE_MS, () => { this.pause(); this.again(PAUSE_MS, () => this.open()); });
    const source = new EventSource(`/api/stream?run=${encodeURIComponent(this.run)}&from=${this.next}`);
    this.source = source;
    for (const [kind, handle] of Object.entries(this.handlers)) {
      if (kind === "lost" || kind === "refused") continue;
      source.addEventListener(kind, (event) => {
        if (event.lastEventId) {
          const index = Number(event.lastEventId);
          if (kind === "fact") {
            if (index < this.next) return;
            this.next = index + 1;
          }
        }
        handle(JSON.parse(/** @type {MessageEvent} */ (event).data));
        if (kind === "gone") this.rest();
      });
    }
    source.addEventListener("error", () => {
      this.handlers.lost?.(null);
      if (source.readyState !== EventSource.CLOSED) return;
      this.pause();
      this.again(PAUSE_MS, () => this.open());
      // A stream does not tell why it is refused: a page that was started anew has another token.
      ask("/api/me").catch((error) => error instanceof Refused && this.handlers.refused?.(null));
    });
  }

  /** The run is gone: nothing more will come, but the beat goes on. */
  rest() {
    this.handlers = { beat: this.handlers.beat, lost: this.handlers.lost, refused: this.handlers.refused };
  }

  /** @param {number} after_ms @param {() => void} act */
  again(after_ms, act) {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => !document.hidden && act(), after_ms);
  }

  pause() {
    clearTimeout(this.timer);
    this.turn = undefined;
    this.source?.close();
    this.source = undefined;
    this.release?.();
    this.release = undefined;
  }

  close() {
    document.removeEventListener("visibilitychange", this.onHidden);
    this.pause();
  }
}
