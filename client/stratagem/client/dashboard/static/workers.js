// The workers: whether each lives, what it is, and what it works on; asked for again at intervals.

import { arrange, el, fill, say, table } from "./dom.js";
import { bytes, duration, plural } from "./format.js";
import { ask, Stream } from "./net.js";

const PAUSE_MS = 3000;
const WINDOW = 100;
const STATES = ["busy", "idle", "draining", "quarantined", "lost", "refused"];

/** @param {HTMLElement} place @param {Record<string, (value: any) => void>} common */
export async function showWorkers(place, common) {
  const grid = el("div", { class: "grid", role: "img", "aria-label": "no worker" });
  const legend = el("p", { class: "legend" });
  const body = el("tbody");
  const count = el("p", { class: "quiet", role: "status" });
  const filter = /** @type {HTMLInputElement} */ (el("input", { type: "search", id: "filter", placeholder: "name, state, run or tag", input: draw }));
  const more = el("button", { class: "plain", hidden: true, click: () => { limit += WINDOW; draw(); } }, "Show more");
  /** @type {any[]} */
  let workers = [];
  let limit = WINDOW;
  /** @type {Map<string, {of: string, row: HTMLElement}>} */
  let rows = new Map();
  fill(place, el("div", { class: "tools" }, el("h1", {}, "Workers"), el("label", { class: "hidden", for: "filter" }, "Filter"), filter, count),
    el("div", { class: "states" }, grid, legend),
    table("Workers", ["Worker", "State", "Runs", "Device", "Memory", "Tags", "Data plane", "Address"], body), more);

  function draw() {
    const alive = workers.filter((worker) => worker.is_alive).length;
    const refused = workers.filter((worker) => worker.is_refused).length;
    say(count, workers.length ? `${alive} of ${workers.length - refused} alive${refused ? `, ${refused} refused` : ""}` : "no worker is registered: stratagem worker --coordinator …");
    drawGrid();
    const text = filter.value.trim().toLowerCase();
    const found = workers.filter((worker) => !text || [worker.worker_id, told(worker), ...worker.run_ids, ...worker.tags].join(" ").toLowerCase().includes(text));
    more.hidden = found.length <= limit;
    const known = rows;
    rows = new Map(found.slice(0, limit).map((worker) => {
      const of = JSON.stringify({ ...worker, silent_s: told(worker) });
      const key = `${worker.is_refused ? "refused " : ""}${worker.worker_id}`;
      const before = known.get(key);
      return [key, before?.of === of ? before : { of, row: line(worker, before?.row) }];
    }));
    const shown = [...rows.values()].map((each) => each.row);
    arrange(body, shown);
  }

  function drawGrid() {
    const counts = STATES.map((state) => /** @type {[string, number]} */ ([state, workers.filter((worker) => stateOf(worker) === state).length])).filter(([, many]) => many);
    const words = counts.map(([state, many]) => `${many} ${state}`).join(", ");
    grid.setAttribute("aria-label", words || "no worker");
    if (legend.dataset.of !== words) fill(legend, ...counts.map(([state, many]) => el("span", {}, el("span", { class: "dot", "data-state": state }), `${many} ${state}`)));
    legend.dataset.of = words;
    for (; grid.children.length > workers.length;) grid.lastElementChild?.remove();
    for (; grid.children.length < workers.length;) grid.append(el("span", { class: "dot" }));
    workers.forEach((worker, at) => {
      const dot = /** @type {HTMLElement} */ (grid.children[at]);
      const title = `${worker.worker_id}: ${told(worker)}`;
      if (dot.title !== title) dot.title = title;
      if (dot.dataset.state !== stateOf(worker)) dot.dataset.state = stateOf(worker);
    });
  }

  const asked = async () => { workers = (await ask("/api/workers")).map((/** @type {any} */ each) => ({ ...BLANK, ...each })); draw(); };
  await asked();
  const timer = setInterval(() => !document.hidden && asked().catch(() => undefined), PAUSE_MS);
  const stream = new Stream("", 0, common);
  return { close: () => { clearInterval(timer); stream.close(); } };
}

/** Fields that a worker without registration does not have. */
const BLANK = { run_ids: [], tags: [], device: "", device_name: "", num_threads: 0, memory_bytes: 0, data_plane: "" };

/** @param {any} worker */
function stateOf(worker) {
  if (worker.is_refused) return "refused";
  if (worker.quarantine) return "quarantined";
  if (!worker.is_alive) return "lost";
  return worker.reason ? "draining" : worker.run_ids.length ? "busy" : "idle";
}

/** @param {any} worker */
function told(worker) {
  const silent = worker.silent_s > 3 ? `, silent for ${duration(worker.silent_s)}` : "";
  const why = worker.quarantine || worker.reason;
  return stateOf(worker) + (why ? `: ${why}` : "") + silent;
}

/** @param {any} worker @param {HTMLElement} [row] */
function line(worker, row = el("tr")) {
  const cell = (/** @type {string} */ name, /** @type {any} */ ...children) => el("td", { "data-name": name }, ...children);
  const runs = worker.run_ids.map((/** @type {string} */ id) => el("a", { href: `#/runs/${encodeURIComponent(id)}` }, id));
  fill(row, el("th", { scope: "row" }, worker.worker_id),
    cell("State", el("span", { class: "phase", "data-phase": stateOf(worker) }, told(worker))),
    cell("Runs", ...runs.flatMap((/** @type {Node} */ each, /** @type {number} */ at) => (at ? [", ", each] : [each]))),
    cell("Device", worker.device_name || worker.device, " ", worker.is_refused ? "" : el("span", { class: "quiet" }, plural(worker.num_threads, "thread"))),
    cell("Memory", worker.memory_bytes ? bytes(worker.memory_bytes) : ""),
    cell("Tags", worker.tags.join(", ")), cell("Data plane", worker.data_plane), cell("Address", worker.address || (worker.is_refused ? "" : "tunnel")));
  return row;
}
