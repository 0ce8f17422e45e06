// The list of runs: one line each, as they change; those in view only.

import { comparison } from "./address.js";
import { arrange, el, exact, fill, measured, say, table } from "./dom.js";
import { clock, duration, share, unitOf } from "./format.js";
import { Stream } from "./net.js";

const WINDOW = 100;
const MAX_MARKED = 8;
const ACTIVE = new Set(["PENDING", "PLACING", "RUNNING", "RECOVERING"]);

/** The runs that are marked to be compared, for as long as the page is open. */
const marked = /** @type {Set<string>} */ (new Set());

/** @param {HTMLElement} place @param {Record<string, (value: any) => void>} common */
export async function showRuns(place, common) {
  /** @type {Map<string, any>} */
  const runs = new Map();
  /** @type {Map<string, {brief: any, row: HTMLElement}>} */
  const rows = new Map();
  let limit = WINDOW, fresh = new Set(), due = 0;
  const body = el("tbody");
  const filter = /** @type {HTMLInputElement} */ (el("input", { type: "search", id: "filter", placeholder: "name, id or strategy", input: draw }));
  const phase = /** @type {HTMLSelectElement} */ (el("select", { id: "phase", change: draw },
    ...["all phases", "active", "COMPLETED", "FAILED", "CANCELLED"].map((text) => el("option", { value: text }, text.toLowerCase()))));
  const count = el("p", { class: "quiet", role: "status" });
  const more = el("button", { class: "plain", hidden: true, click: () => { limit += WINDOW; draw(); } }, "Show more");
  const chosen = el("span", { role: "status" }), compare = el("a", { class: "button" }, "compare");
  const marks = el("div", { class: "marks", hidden: true }, chosen, compare, el("button", { class: "plain", click: () => { marked.clear(); drawMarks(); } }, "clear"));
  body.addEventListener("change", (event) => {
    const box = /** @type {HTMLInputElement} */ (event.target);
    if (box.checked) marked.add(box.value);
    else marked.delete(box.value);
    drawMarks();
  });
  body.addEventListener("keydown", (event) => {
    const on = /** @type {HTMLElement} */ (event.target);
    if (event.key === "Enter" && on instanceof HTMLInputElement && marked.size > 1) location.hash = comparison([...marked]);
  });
  fill(place, el("div", { class: "tools" }, el("h1", {}, "Runs"),
    el("label", { class: "hidden", for: "filter" }, "Filter"), filter,
    el("label", { class: "hidden", for: "phase" }, "Phase"), phase, count),
  marks,
  table("Runs", ["Run", "Strategy", "Phase", "Progress", "Metrics", "Time", "Begun", "By"], body), more);

  function wanted() {
    const text = filter.value.trim().toLowerCase();
    const of = (/** @type {any} */ run) => phase.value === "all phases" || (phase.value === "active" ? ACTIVE.has(run.phase) : run.phase === phase.value);
    return [...runs.values()]
      .filter((run) => of(run) && (!text || `${run.run_id} ${run.name} ${run.strategy}`.toLowerCase().includes(text)))
      .sort((a, b) => b.submitted_at_s - a.submitted_at_s || (a.run_id < b.run_id ? -1 : 1));
  }

  function drawMarks() {
    marks.hidden = marked.size === 0;
    say(chosen, marked.size === 1 ? "1 run marked; mark another one to compare them" : `${marked.size} runs marked${marked.size < MAX_MARKED ? "" : ", which is the most"}`);
    compare.hidden = marked.size < 2;
    compare.setAttribute("href", comparison([...marked]));
    for (const each of body.querySelectorAll("input")) {
      each.checked = marked.has(each.value);
      each.disabled = !each.checked && marked.size >= MAX_MARKED;
    }
  }

  function draw() {
    cancelAnimationFrame(due);
    due = requestAnimationFrame(() => {
      const found = wanted(), window_ = found.slice(0, limit);
      say(count, runs.size ? `${found.length} of ${runs.size}` : "no runs yet: stratagem run JOB.yaml");
      more.hidden = found.length <= limit;
      const shown = window_.map((brief) => {
        const known = rows.get(brief.run_id);
        if (known && known.brief === brief) return known.row;
        const row = line(brief, known?.row);
        rows.set(brief.run_id, { brief, row });
        return row;
      });
      arrange(body, shown);
      drawMarks();
    });
  }

  const stream = new Stream("", 0, {
    ...common,
    runs: (change) => {
      if (change.is_first) fresh = new Set();
      for (const run of change.runs) { runs.set(run.run_id, run); fresh?.add(run.run_id); }
      for (const id of change.deleted) { runs.delete(id); marked.delete(id); }
      if (change.is_complete && fresh) {
        for (const id of [...runs.keys()]) if (!fresh.has(id)) runs.delete(id);
        fresh = /** @type {any} */ (undefined);
      }
      for (const id of [...rows.keys()]) if (!runs.has(id)) rows.delete(id);
      draw();
    },
  });
  return stream;
}

/** @param {any} run */
function newRow(run) {
  return el("tr", {}, el("th", { scope: "row" },
    el("label", { class: "mark" }, el("input", { type: "checkbox", value: run.run_id }), el("span", { class: "hidden" }, `compare ${run.run_id}`)),
    el("a", { href: `#/runs/${encodeURIComponent(run.run_id)}` }, run.run_id), run.name === run.run_id ? "" : el("span", { class: "quiet" }, run.name)));
}

/** Shows a run in its row, whose heading stays: one may stand on it. @param {any} run @param {HTMLElement} [row] */
function line(run, row = newRow(run)) {
  const progress = run.progress;
  const of = progress && progress.num_steps ? progress : run;
  const unit = ` ${progress?.unit || unitOf(run.strategy)}`;
  const bar = /** @type {HTMLProgressElement} */ (el("progress", { max: 1, value: share(of), "aria-label": `progress of ${run.run_id}` }));
  const left = progress && progress.eta_s !== null ? `${progress.may_end_early ? "at most " : ""}${duration(progress.eta_s)} left`
    : run.ended_at_s ? `took ${duration(run.ended_at_s - run.submitted_at_s)}` : "";
  const why = run.phase === "RUNNING" ? progress?.reason : run.phase === "COMPLETED" ? "" : run.reason;
  while (row.children.length > 1) row.lastElementChild?.remove();
  row.append(
    cell("Strategy", run.strategy),
    cell("Phase", el("span", { class: "phase", "data-phase": run.phase }, run.phase.toLowerCase()), why ? el("span", { class: "quiet why" }, why) : ""),
    cell("Progress", run.num_steps || of.num_steps ? bar : "", of.num_steps ? el("span", { class: "quiet" }, exact(of.step), " of ", exact(of.num_steps), unit) : ""),
    cell("Metrics", measured({ ...run.metrics, ...(progress?.loss ? { "train.loss": progress.loss } : {}) })),
    cell("Time", left),
    cell("Begun", clock(run.submitted_at_s)),
    cell("By", run.submitted_by));
  return row;
}

/** @param {string} name @param {...(Node | string)} children */
function cell(name, ...children) {
  return el("td", { "data-name": name }, ...children);
}
