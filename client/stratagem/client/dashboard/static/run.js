// One run: how it stands, live; its pictures, events, log, commits and job.

import { actions } from "./banner.js";
import { curveTools } from "./curves.js";
import { el, exact, fill, pairs, say } from "./dom.js";
import { commitTable, drawingWidth, frame, showFigures } from "./figures.js";
import { duration, epochOf, number, share, unitOf } from "./format.js";
import { eventList, logView } from "./lists.js";
import { ask, Stream } from "./net.js";

const ENDED = new Set(["COMPLETED", "FAILED", "CANCELLED"]);
const CHANGES = new Set(["SegmentFinished", "SegmentCommitted", "Evaluated", "RoundClosed", "GenerationClosed", "MembersFormed",
  "SegmentVerified", "SegmentRefuted", "UpdateReceived", "UpdateRejected", "MemberEvolved", "RunCompleted", "StoppedEarly", "RunFailed", "RunCancelled", "RunResumed"]);

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
  const phase = el("span", { class: "phase" }), tools = actions();
  const why = el("p", { class: "why" }), facts = el("p", { class: "quiet" });
  const heading = el("h1", { tabindex: "-1" }, id);
  const head = el("section", { class: "head", "aria-label": "State" },
    el("div", { class: "tools" }, heading, phase, tools), why, facts);
  const bar = /** @type {HTMLProgressElement} */ (el("progress", { max: 1, "aria-label": "progress" }));
  const values = el("dl");
  const numbers = el("section", { class: "numbers", "aria-label": "Latest values" }, bar, values);
  const problem = el("section", { class: "problem", role: "alert", hidden: true });
  const reading = el("p", { class: "quiet", role: "status" });
  const pictures = el("section", { class: "pictures", "aria-label": "Pictures" });
  const curves = curveTools(pictures, () => drawPictures().catch(() => undefined));
  const events = eventList(query);
  const log = logView(query);
  const commits = commitTable();
  const job = el("details", {}, el("summary", {}, "Job"), el("pre", { tabindex: "0", "aria-label": "Job", role: "region" }, JSON.stringify(run.job, null, 2)));
  fill(place, head, problem, numbers, reading, curves.element, pictures, events.element, log.element, commits.element, job);

  /** @type {any} The newest progress of a run that goes on. */
  let progress = null;
  let asking = 0, drawing = 0, width = 0, newest = 0, isOld = false, isClosed = false, isAway = false;

  function drawHead() {
    say(phase, run.phase.toLowerCase() + (run.strategy_phase ? ` · ${run.strategy_phase.toLowerCase()}` : ""));
    if (phase.dataset.phase !== run.phase) exchange(tools, buttons(run, told, refresh), heading);
    head.dataset.phase = phase.dataset.phase = run.phase;
    say(why, run.error ? "" : run.reason);
    say(facts, [run.strategy, run.engine, run.reproducible ? "reproducible" : "replayable, not reproducible", run.verification, run.submitted_by && `by ${run.submitted_by}`, run.data_plane && `data plane ${run.data_plane}`].filter(Boolean).join("  ·  "));
    const failure = run.error || (run.phase === "FAILED" && { type: "The run failed", message: run.reason });
    if (JSON.stringify(failure) !== problem.dataset.of) {
      problem.dataset.of = JSON.stringify(failure);
      problem.hidden = !failure;
      fill(problem, failure && el("h2", {}, `${failure.type}: ${failure.message}`),
        failure.activity && el("p", {}, `raised by your code on ${failure.worker_id}, ${failure.activity}`),
        failure.traceback && el("pre", { tabindex: "0", "aria-label": "Traceback", role: "region" }, failure.traceback));
    }
    commits.show(run);
  }

  function drawNumbers() {
    const ended = ENDED.has(run.phase), latest = ended ? null : progress;
    const of = latest && latest.num_steps ? latest : run;
    const unit = latest?.unit || unitOf(run.strategy);
    const whole = of.num_steps ? [exact(of.step), " of ", exact(of.num_steps)] : [exact(of.step)];
    const shown = { ...run.metrics, ...(latest?.metrics || {}) };
    const loss = latest ? latest.loss : run.metrics["train.loss"];
    const known = (/** @type {any} */ value) => (value === null || value === undefined || value === 0 ? "" : exact(value));
    bar.value = ended && run.phase === "COMPLETED" ? 1 : share(of);
    pairs(values, [
      [run.phase === "FAILED" && unit === "steps" ? "committed to step" : unit.slice(0, -1), el("span", {}, ...whole)],
      ["failed in step", failedIn(run)],
      ["epoch", latest ? epochOf(latest) : ""],
      ["loss", loss === null || loss === undefined ? "" : exact(loss)],
      ["learning rate", known(latest?.lr)],
      ["gradient norm", known(latest?.grad_norm)],
      ["rows per second", latest?.rows_per_s ? number(Math.round(latest.rows_per_s)) : ""],
      ["left", latest && latest.eta_s !== null ? (latest.may_end_early ? "at most " : "") + duration(latest.eta_s) : ""],
      ["clients", latest?.num_clients ? `${latest.num_clients_done} of ${latest.num_clients} done, ${latest.num_clients_late} late, ${latest.num_clients_rejected} rejected` : ""],
      ["best", latest && latest.best !== null && latest.best !== undefined ? `${number(latest.best)} (member ${latest.best_member}), ${latest.num_copied} copied` : ""],
      ["skipped steps", known(latest?.num_skipped_steps)],
      [ended ? "took" : "running for", duration((run.ended_at_s || Date.now() / 1000) - run.submitted_at_s)],
      ...Object.keys(shown).filter((name) => name !== "train.loss").sort().map((name) => /** @type {[string, Node]} */ ([name, exact(shown[name])])),
    ]);
  }

  async function drawPictures() {
    const turn = (newest += 1);
    width = drawingWidth(pictures);
    const answer = await ask(`/api/panels?${query}${frame(pictures)}${curves.query()}`);
    if (turn !== newest || isClosed) return;
    const isWhole = answer.num_read >= answer.num_events;
    say(reading, isWhole ? "" : `Pictures of ${number(answer.num_read)} of ${number(answer.num_events)} events; the others are being read.`);
    curves.show(answer.panels);
    await showFigures(pictures, answer.panels, () => turn === newest && !isClosed);
    if (!isWhole && !isClosed) refresh();
  }

  /** Draws again what facts have changed: soon, not for each of many, and never twice at once. */
  function refresh() {
    isOld = true;
    if (asking) return;
    asking = setTimeout(async () => {
      if (document.hidden) { asking = 0; return; } // nobody looks; it is asked for when the tab is shown
      isOld = false;
      try {
        run = await ask(`/api/runs/${encodeURIComponent(id)}`);
        if (ENDED.has(run.phase)) progress = null; // of steps that may not have been committed
        drawHead();
        drawNumbers();
        if (document.hidden) isOld = true;
        else await drawPictures();
      } catch (error) { /* the banner says what it is */ }
      asking = 0;
      if (isOld && !isClosed) refresh();
    }, 300);
  }

  drawHead();
  drawNumbers();
  await events.older();
  drawPictures().catch(() => undefined);
  log.newer().catch(() => undefined);
  let saidWhy = "";
  const stream = new Stream(id, events.next(), {
    ...common,
    fact: (event) => {
      events.add(event);
      if (CHANGES.has(event.kind) || event.phase !== run.phase) refresh();
    },
    progress: (item) => {
      progress = item.reason ? null : item;
      if (item.reason !== saidWhy) refresh(); // the status says it
      saidWhy = item.reason;
      cancelAnimationFrame(drawing);
      drawing = requestAnimationFrame(drawNumbers);
    },
    beat: (beat) => {
      common.beat(beat);
      if (beat.state === "live" && isAway) refresh(); // nobody has answered what was asked meanwhile
      isAway = beat.state !== "live";
    },
    lost: (nothing) => {
      common.lost(nothing);
      isAway = true;
    },
    end: refresh,
    gone: (gone) => { problem.hidden = false; fill(problem, el("h2", {}, gone.why)); },
  });
  const tick = setInterval(() => { if (!document.hidden && !isAway && !ENDED.has(run.phase)) { drawNumbers(); log.newer().catch(() => undefined); } }, 2000);
  const resized = () => { if (Math.abs(drawingWidth(pictures) - width) > 20) drawPictures().catch(() => undefined); };
  const shown = () => { if (!document.hidden && isOld) refresh(); };
  addEventListener("resize", resized);
  document.addEventListener("visibilitychange", shown);
  return {
    close: () => {
      isClosed = true;
      stream.close();
      clearInterval(tick);
      clearTimeout(asking);
      removeEventListener("resize", resized);
      document.removeEventListener("visibilitychange", shown);
    },
  };
}

/**
 * Puts buttons in place of others; whoever stands on one stands on the same afterwards, on resume
 * after stop and on stop after resume, else on the heading, and on delete only where it was.
 * @param {HTMLElement} tools
 * @param {HTMLElement[]} after
 * @param {HTMLElement} heading
 */
function exchange(tools, after, heading) {
  const on = tools.contains(document.activeElement) ? document.activeElement : null;
  fill(tools, ...after);
  if (!on) return;
  const safe = on.className ? undefined : after.find((each) => !each.className);
  (after.find((each) => each.textContent === on.textContent) ?? safe ?? heading).focus();
}

/** Which step the error of a failed run was raised in, if it names one. @param {any} run */
function failedIn(run) {
  const found = run.phase === "FAILED" && /training step (\d+)/.exec(run.error?.activity ?? "");
  return found ? exact(Number(found[1])) : "";
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
