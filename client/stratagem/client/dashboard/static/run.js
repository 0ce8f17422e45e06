// One run: how it stands, live; its pictures, events, log, commits and job.

import { el, fill, picture, say, table } from "./dom.js";
import { clock, duration, metrics as metricsText, number, share } from "./format.js";
import { ask, Stream } from "./net.js";

const EVENTS = 100;
const LINES = 200;
const ENDED = new Set(["COMPLETED", "FAILED", "CANCELLED"]);
const CHANGES = new Set(["SegmentFinished", "SegmentCommitted", "Evaluated", "RoundClosed", "GenerationClosed", "MembersFormed",
  "UpdateReceived", "UpdateRejected", "MemberEvolved", "RunCompleted", "StoppedEarly", "RunFailed", "RunCancelled", "RunResumed"]);

/**
 * @param {HTMLElement} place
 * @param {string} id
 * @param {{operates: boolean}} told
 * @param {Record<string, (value: any) => void>} common
 */
export async function showRun(place, id, told, common) {
  const query = `run=${encodeURIComponent(id)}`;
  let run = await ask(`/api/runs/${encodeURIComponent(id)}`);
  document.title = `${id} · Stratagem`;
  const head = el("section", { class: "head", "aria-label": "State" });
  const numbers = el("dl", { class: "numbers", "aria-label": "Latest values" });
  const problem = el("section", { class: "problem", role: "alert", hidden: true });
  const pictures = el("section", { class: "pictures", "aria-label": "Pictures" });
  const events = eventList(query);
  const log = logView(query);
  const details = el("section", { "aria-label": "Commits and job" });
  fill(place, head, problem, numbers, pictures, events.element, log.element, details);

  /** @type {any} */
  let latest = null;
  let asking = 0, drawing = 0, width = 0;

  function drawHead() {
    const phase = el("span", { class: "phase", "data-phase": run.phase }, run.phase.toLowerCase() + (run.strategy_phase ? ` · ${run.strategy_phase.toLowerCase()}` : ""));
    const facts = [run.strategy, run.engine, run.reproducible ? "reproducible" : "replayable, not reproducible", run.submitted_by && `by ${run.submitted_by}`, run.data_plane && `data plane ${run.data_plane}`];
    fill(head, el("div", { class: "tools" }, el("h1", {}, run.run_id), phase, ...buttons(run, told, refresh)),
      run.reason && !run.error ? el("p", { class: "why" }, run.reason) : "",
      el("p", { class: "quiet" }, facts.filter(Boolean).join("  ·  ")));
    problem.hidden = !run.error;
    if (run.error) {
      fill(problem, el("h2", {}, `${run.error.type}: ${run.error.message}`),
        el("p", {}, `raised by your code on ${run.error.worker_id}, ${run.error.activity}`),
        run.error.traceback ? el("pre", { tabindex: "0" }, run.error.traceback) : "");
    } else if (run.phase === "FAILED") {
      problem.hidden = false;
      fill(problem, el("h2", {}, "The run failed"), el("p", {}, run.reason));
    }
    fill(details, commits(run), el("details", {}, el("summary", {}, "Job"), el("pre", { tabindex: "0" }, JSON.stringify(run.job, null, 2))));
  }

  function drawNumbers() {
    const of = latest && latest.num_steps ? latest : run;
    const unit = latest?.unit || "steps";
    const ended = ENDED.has(run.phase);
    const values = /** @type {[string, string][]} */ ([
      [unit === "steps" ? "step" : unit.slice(0, -1), of.num_steps ? `${number(of.step)} of ${number(of.num_steps)}` : number(of.step)],
      ["epoch", latest?.epoch ? latest.epoch.toFixed(2) : ""],
      ["loss", latest && !ended ? number(latest.loss) : number(run.metrics["train.loss"])],
      ["learning rate", latest?.lr ? number(latest.lr) : ""],
      ["gradient norm", latest?.grad_norm ? number(latest.grad_norm) : ""],
      ["rows per second", latest?.rows_per_s && !ended ? number(Math.round(latest.rows_per_s)) : ""],
      ["left", latest && latest.eta_s !== null && !ended ? (latest.may_end_early ? "at most " : "") + duration(latest.eta_s) : ""],
      ["clients", latest?.num_clients ? `${latest.num_clients_done} of ${latest.num_clients} done, ${latest.num_clients_late} late, ${latest.num_clients_rejected} rejected` : ""],
      ["best", latest && latest.best !== null && latest.best !== undefined ? `${number(latest.best)} (member ${latest.best_member}), ${latest.num_copied} copied` : ""],
      ["skipped steps", latest?.num_skipped_steps ? number(latest.num_skipped_steps) : ""],
      [ended ? "took" : "running for", duration((run.ended_at_s || Date.now() / 1000) - run.submitted_at_s)],
      ...Object.entries({ ...run.metrics, ...(latest?.metrics || {}) }).filter(([name]) => name !== "train.loss").sort().map(([name, value]) => [name, number(value)]),
    ]);
    const bar = el("progress", { max: 1, value: ended && run.phase === "COMPLETED" ? 1 : share(of), "aria-label": "progress" });
    fill(numbers, bar, ...values.filter(([, text]) => text !== "").map(([name, text]) => el("div", {}, el("dt", {}, name), el("dd", {}, text))));
  }

  async function drawPictures() {
    width = pictures.clientWidth || 720;
    const panels = await ask(`/api/panels?${query}&width=${Math.min(Math.max(Math.round(width) - 34, 280), 1600)}`);
    fill(pictures, ...panels.map((/** @type {any} */ panel) =>
      el("figure", {}, el("figcaption", {}, panel.title), picture(panel.svg), panel.note ? el("p", { class: "quiet" }, panel.note) : "", numbersOf(panel))));
  }

  /** Draws again what facts have changed: soon, and not for each of many. */
  function refresh() {
    clearTimeout(asking);
    asking = setTimeout(async () => {
      try {
        run = await ask(`/api/runs/${encodeURIComponent(id)}`);
        drawHead();
        drawNumbers();
        await drawPictures();
      } catch (error) { /* the banner says what it is */ }
    }, 300);
  }

  drawHead();
  drawNumbers();
  await events.older();
  drawPictures().catch(() => undefined);
  log.newer().catch(() => undefined);
  const stream = new Stream(id, events.next(), {
    ...common,
    fact: (event) => {
      events.add(event);
      if (CHANGES.has(event.kind) || event.phase !== run.phase) refresh();
    },
    progress: (item) => {
      latest = item.reason ? null : item;
      cancelAnimationFrame(drawing);
      drawing = requestAnimationFrame(drawNumbers);
    },
    end: refresh,
    gone: (gone) => { problem.hidden = false; fill(problem, el("h2", {}, gone.why)); },
  });
  const tick = setInterval(() => { if (!document.hidden && !ENDED.has(run.phase)) { drawNumbers(); log.newer().catch(() => undefined); } }, 2000);
  const resized = () => { if (Math.abs(pictures.clientWidth - width) > 40) drawPictures().catch(() => undefined); };
  addEventListener("resize", resized);
  return { close: () => { stream.close(); clearInterval(tick); clearTimeout(asking); removeEventListener("resize", resized); document.title = "Stratagem"; } };
}

/** @param {any} run @param {{operates: boolean}} told @param {() => void} refresh */
function buttons(run, told, refresh) {
  if (!told.operates) return [];
  const ended = ENDED.has(run.phase);
  const button = (/** @type {string} */ action, /** @type {string} */ question) => el("button", {
    class: action === "delete" ? "danger" : "", click: async () => {
      if (!confirm(question)) return;
      try {
        await ask(`/api/runs/${encodeURIComponent(run.run_id)}/${action}`, { method: "POST" });
        if (action === "delete") location.hash = "#/";
        else refresh();
      } catch (error) { alert(error instanceof Error ? error.message : String(error)); }
    },
  }, action);
  if (!ended) return [button("stop", `Stop ${run.run_id}? Its last commit stays.`)];
  const resume = run.phase === "COMPLETED" ? [] : [button("resume", `Go on with ${run.run_id} from its last commit?`)];
  return [...resume, button("delete", `Delete ${run.run_id} with its states? This cannot be undone.`)];
}

/** @param {any} run */
function commits(run) {
  if (!run.commits.length) return el("p", { class: "quiet" }, "Nothing is committed yet.");
  const rows = run.commits.map((/** @type {any} */ commit) => el("tr", {},
    el("th", { scope: "row" }, number(commit.segment)), el("td", { "data-name": "Step" }, number(commit.step)),
    el("td", { "data-name": "Kept as" }, [commit.is_best && "best", commit.is_final && "final", commit.member !== null && `member ${commit.member}`].filter(Boolean).join(", ")),
    el("td", { "data-name": "Metrics" }, metricsText(commit.metrics)), el("td", { "data-name": "Digest" }, el("code", {}, commit.digest.slice(0, 16)))));
  return el("div", {}, el("h2", {}, "Commits"), table("Commits", ["Segment", "Step", "Kept as", "Metrics", "Digest"], el("tbody", {}, ...rows)));
}

/** @param {{headings: string[], rows: string[][]}} panel */
function numbersOf(panel) {
  if (!panel.rows.length) return "";
  const body = el("tbody", {}, ...panel.rows.map((row) => el("tr", {}, el("th", { scope: "row" }, row[0]), ...row.slice(1).map((text) => el("td", {}, text)))));
  return el("details", { class: "table" }, el("summary", {}, "The same as numbers"), table("Numbers of the picture", panel.headings, body));
}

/** The events, the newest first, in a window that grows on demand. @param {string} query */
function eventList(query) {
  const list = el("ol", { class: "events", reversed: true, tabindex: "0", "aria-label": "Events, the newest first" });
  const kinds = /** @type {HTMLInputElement} */ (el("input", { type: "search", id: "kinds", placeholder: "kind, such as RoundClosed", change: () => again() }));
  const more = el("button", { class: "plain", click: () => older() }, "Older events");
  let oldest = 0, newest = -1, num = 0;
  const line = (/** @type {any} */ event) => el("li", { "data-kind": event.kind, value: event.index },
    el("time", { datetime: new Date(event.time_s * 1000).toISOString() }, clock(event.time_s)), el("b", {}, event.kind), el("span", {}, event.sentence));

  async function older() {
    const wanted = kinds.value.trim() ? `&kinds=${encodeURIComponent(kinds.value.trim())}` : "";
    const found = await ask(`/api/events?${query}&newest&limit=${EVENTS}&before=${oldest}${wanted}`);
    if (found.length) {
      newest = Math.max(newest, found[0].index);
      oldest = found[found.length - 1].index;
    }
    num += found.length;
    more.hidden = found.length < EVENTS || oldest === 0;
    list.append(...found.map(line));
  }
  function again() { oldest = 0; num = 0; fill(list); older().catch((error) => { fill(list, el("li", { class: "problem" }, error.message)); more.hidden = true; }); }
  /** @param {any} event */
  function add(event) {
    if (event.index <= newest) return;
    newest = event.index;
    if (kinds.value.trim() && !kinds.value.split(",").includes(event.kind)) return;
    list.prepend(line(event));
    num += 1;
    for (; num > 5 * EVENTS && list.lastElementChild; num -= 1) { list.lastElementChild.remove(); oldest = Number(list.lastElementChild?.getAttribute("value")); more.hidden = false; }
  }
  const element = el("section", { "aria-label": "Events" }, el("div", { class: "tools" }, el("h2", {}, "Events"), el("label", { class: "hidden", for: "kinds" }, "Only of a kind"), kinds), list, more);
  return { element, older, add, next: () => newest + 1 };
}

/** The end of the run's log, which grows as it does. @param {string} query */
function logView(query) {
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
