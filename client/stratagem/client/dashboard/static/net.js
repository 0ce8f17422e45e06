// What the page asks of its server: answers once, and one event stream per tab.

/** The stream ended because nobody may read it: the session is gone. */
export class Refused extends Error {}

/**
 * @param {string} path
 * @param {RequestInit} [how]
 * @returns {Promise<any>}
 */
export async function ask(path, how) {
  const response = await fetch(path, { credentials: "same-origin", ...how });
  if (response.status === 401) throw new Refused(await response.text());
  const answer = (response.headers.get("content-type") || "").includes("json") ? await response.json() : {};
  if (!response.ok) throw new Error(answer.error || `the page's server answered ${response.status}`);
  return answer;
}

/**
 * An event stream that a hidden tab closes (browsers keep six connections to a server, for all
 * tabs together), and that goes on behind the last event when it is shown again.
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
    this.onHidden = () => (document.hidden ? this.pause() : this.open());
    document.addEventListener("visibilitychange", this.onHidden);
    if (!document.hidden) this.open();
  }

  open() {
    if (this.source) return;
    const source = new EventSource(`/api/stream?run=${encodeURIComponent(this.run)}&from=${this.next}`);
    this.source = source;
    for (const [kind, handle] of Object.entries(this.handlers)) {
      if (kind === "lost" || kind === "opened") continue;
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
    source.addEventListener("open", () => this.handlers.opened?.(null));
    source.addEventListener("error", () => {
      this.handlers.lost?.(null);
      if (source.readyState === EventSource.CLOSED) {
        this.pause();
        this.retry = setTimeout(() => !document.hidden && this.open(), 3000);
      }
    });
  }

  /** The run is gone: nothing more will come, but the beat goes on. */
  rest() {
    this.handlers = { beat: this.handlers.beat, lost: this.handlers.lost, opened: this.handlers.opened };
  }

  pause() {
    clearTimeout(this.retry);
    this.source?.close();
    this.source = undefined;
  }

  close() {
    document.removeEventListener("visibilitychange", this.onHidden);
    this.pause();
  }
}
