// The workers: whether each lives, what it is, and what it works on; asked for again at intervals.

import { el, fill, say, table } from "./dom.js";
import { bytes, duration } from "./format.js";
import { ask, Stream } from "./net.js";

const PAUSE_MS = 3000;

/** @param {HTMLElement} place @param {Record<string, (value: any) => void>} common */
export async function showWorkers(place, common) {
  const grid = el("div", { class: "grid", role: "img" });
  const body = el("tbody");
  const count = el("p", { class: "quiet", role: "status" });
  fill(place, el("div", { class: "tools" }, el("h1", {}, "Workers"), count), grid,
    table("Workers", ["Worker", "State", "Runs", "Device", "Memory", "Tags", "Data plane", "Address"], body));

  async function draw() {
    const workers = await ask("/api/workers");
    const alive = workers.filter((/** @type {any} */ worker) => worker.is_alive).length;
    say(count, workers.length ? `${alive} of ${workers.length} alive` : "no worker is registered: stratagem worker --coordinator …");
    grid.setAttribute("aria-label", `${alive} workers alive, ${workers.length - alive} lost`);
    fill(grid, ...workers.slice(0, 2000).map((/** @type {any} */ worker) =>
      el("span", { class: "dot", "data-state": stateOf(worker), title: `${worker.worker_id}: ${told(worker)}` })));
    fill(body, ...workers.slice(0, 500).map(line));
  }

  await draw();
  const timer = setInterval(() => !document.hidden && draw().catch(() => undefined), PAUSE_MS);
  const stream = new Stream("", 0, common);
  return { close: () => { clearInterval(timer); stream.close(); } };
}

/** @param {any} worker */
function stateOf(worker) {
  if (!worker.is_alive) return "lost";
  return worker.reason ? "draining" : worker.run_ids.length ? "busy" : "idle";
}

/** @param {any} worker */
function told(worker) {
  const silent = worker.silent_s > 3 ? `, silent for ${duration(worker.silent_s)}` : "";
  return stateOf(worker) + (worker.reason ? `: ${worker.reason}` : "") + silent;
}

/** @param {any} worker */
function line(worker) {
  const cell = (/** @type {string} */ name, /** @type {any} */ ...children) => el("td", { "data-name": name }, ...children);
  const runs = worker.run_ids.map((/** @type {string} */ id) => el("a", { href: `#/runs/${encodeURIComponent(id)}` }, id));
  return el("tr", {}, el("th", { scope: "row" }, worker.worker_id),
    cell("State", el("span", { class: "phase", "data-phase": stateOf(worker) }, told(worker))),
    cell("Runs", ...runs),
    cell("Device", worker.device_name || worker.device, el("span", { class: "quiet" }, ` ${worker.num_threads} threads`)),
    cell("Memory", worker.memory_bytes ? bytes(worker.memory_bytes) : ""),
    cell("Tags", worker.tags.join(", ")), cell("Data plane", worker.data_plane), cell("Address", worker.address));
}
