// The parts of a run's page that grow: its events and its log.

import { el, fill } from "./dom.js";
import { clock } from "./format.js";
import { ask } from "./net.js";

const EVENTS = 100;
const LINES = 200;

/** The events, the newest first, in a window that grows on demand. @param {string} query */
export function eventList(query) {
  const list = el("ol", { class: "events", reversed: true, tabindex: "0", "aria-label": "Events, the newest first" });
  const kinds = /** @type {HTMLInputElement} */ (el("input", { type: "search", id: "kinds", placeholder: "kind, such as RoundClosed", change: () => again() }));
  const more = el("button", { class: "plain", click: () => older() }, "Older events");
  let oldest = 0, newest = -1, num = 0;
  const line = (/** @type {any} */ event) => el("li", { "data-kind": event.kind, value: event.index },
    el("time", { datetime: new Date(event.time_s * 1000).toISOString() }, clock(event.time_s)), el("b", {}, event.kind), el("span", {}, event.sentence));

  /** What only verifies the run is left out, unless its kind is asked for. @param {any} event */
  const isOfRun = (event) => kinds.value.trim() || event.payload.party !== "verifier";

  async function older() {
    const wanted = kinds.value.trim() ? `&kinds=${encodeURIComponent(kinds.value.trim())}` : "";
    const found = await ask(`/api/events?${query}&newest&limit=${EVENTS}&before=${oldest}${wanted}`);
    if (found.length) {
      newest = Math.max(newest, found[0].index);
      oldest = found[found.length - 1].index;
    }
    num += found.length;
    more.hidden = found.length < EVENTS || oldest === 0;
    list.append(...found.filter(isOfRun).map(line));
  }
  function again() { oldest = 0; num = 0; fill(list); older().catch((error) => { fill(list, el("li", { class: "problem" }, error.message)); more.hidden = true; }); }
  /** @param {any} event */
  function add(event) {
    if (event.index <= newest) return;
    newest = event.index;
    if (!isOfRun(event)) return;
    if (kinds.value.trim() && !kinds.value.split(",").includes(event.kind)) return;
    list.prepend(line(event));
    num += 1;
    for (; num > 5 * EVENTS && list.lastElementChild; num -= 1) { list.lastElementChild.remove(); oldest = Number(list.lastElementChild?.getAttribute("value")); more.hidden = false; }
  }
  const element = el("section", { "aria-label": "Events" }, el("div", { class: "tools" }, el("h2", {}, "Events"), el("label", { class: "hidden", for: "kinds" }, "Only of a kind"), kinds), list, more);
  return { element, older, add, next: () => newest + 1 };
}

/** The end of the run's log, which grows as it does. @param {string} query */
export function logView(query) {
  const pre = el("pre", { class: "log", tabindex: "0", "aria-label": "Log" });
  let next = -LINES, num = 0;
  async function newer() {
    const lines = await ask(`/api/logs?${query}&from_line=${next}`);
    if (!lines.length) return;
    const atEnd = pre.scrollTop + pre.clientHeight >= pre.scrollHeight - 8;
    for (const line of lines) {
      pre.append(el("span", { "data-level": line.level }, `${clock(line.time_s)} ${line.worker_id || "coordinator"}  ${line.text}\n`));
      next = line.line + 1;
      num += 1;
    }
    for (; num > 10 * LINES && pre.firstElementChild; num -= 1) pre.firstElementChild.remove();
    if (atEnd) pre.scrollTop = pre.scrollHeight;
  }
  return { element: el("details", {}, el("summary", {}, "Log"), pre), newer };
}
