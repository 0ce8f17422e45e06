// Several runs beside each other: how they stand, their curves in one frame, and in what their jobs
// differ. What is chosen stands in the address.

import { comparison, here, keep } from "./address.js";
import { curveTools } from "./curves.js";
import { arrange, el, exact, fill, measured, say, table } from "./dom.js";
import { drawingWidth, frame, showFigures } from "./figures.js";
import { share } from "./format.js";
import { ask, Stream } from "./net.js";

const PAUSE_MS = 2000;
const ALL = "all series";

/** @param {HTMLElement} place @param {string[]} ids @param {Record<string, (value: any) => void>} common */
export async function showComparison(place, ids, common) {
  const series = /** @type {HTMLSelectElement} */ (el("select", { id: "series", change: choose }));
  const pictures = el("section", { class: "pictures", "aria-label": "Curves" });
  const curves = curveTools(pictures, () => refresh(0));
  const runs = el("tbody"), fields = el("section", { "aria-label": "Jobs" });
  const none = el("p", { class: "quiet", hidden: true }, "None of them has a value yet.");
  /** @type {Map<string, HTMLElement>} */
  const rows = new Map();
  let width = 0, newest = 0, asking = 0, isOld = false, isClosed = false;
  let answer = await asked();
  document.title = `${ids.join(", ")} · Stratagem`;
  fill(place, el("div", { class: "tools" }, el("h1", {}, "Comparison"), el("label", { class: "hidden", for: "series" }, "Series"), series),
    table("Runs", ["Run", "Strategy", "Phase", "Progress", "Metrics", ...(ids.length > 2 ? ["Selection"] : [])], runs), curves.element, none, pictures, fields);

  function asked() {
    width = place.isConnected && pictures.isConnected ? drawingWidth(pictures) : 0;
    return ask(`/api/compare?runs=${ids.map(encodeURIComponent).join(",")}${width ? frame(pictures) : "&width=720"}${curves.query()}`);
  }

  function choose() {
    const { view } = here();
    if (series.value === ALL) view.delete("series");
    else view.set("series", series.value);
    keep(view);
    drawCurves();
    refresh(0); // one picture alone is wider
  }

  function drawCurves() {
    const turn = (newest += 1);
    if (answer.num_read < answer.num_events) refresh(); // the events of long runs are still being read
    const titles = answer.panels.map((/** @type {any} */ panel) => panel.title);
    const wanted = here().view.get("series") ?? ALL;
    const chosen = titles.includes(wanted) ? wanted : ALL;
    if (series.dataset.of !== String(titles)) fill(series, ...[ALL, ...titles].map((title) => el("option", { value: title }, title)));
    series.dataset.of = String(titles);
    series.value = chosen;
    curves.show(answer.panels);
    none.hidden = titles.length > 0;
    pictures.classList.toggle("one", chosen !== ALL || titles.length === 1);
    const panels = answer.panels.filter((/** @type {any} */ panel) => chosen === ALL || panel.title === chosen);
    return showFigures(pictures, panels, () => turn === newest && !isClosed);
  }

  function drawFields() {
    const of = JSON.stringify(answer.differences);
    if (fields.dataset.of === of) return;
    fields.dataset.of = of;
    const body = el("tbody", {}, ...answer.differences.map((/** @type {any} */ each) => el("tr", {}, el("th", { scope: "row" }, el("code", {}, each.key)),
      ...each.values.map((/** @type {unknown} */ value, /** @type {number} */ at) => el("td", { "data-name": answer.runs[at] }, shown(value))))));
    fill(fields, el("h2", {}, "In what their jobs differ"),
      answer.differences.length ? table("In what their jobs differ", ["Field", ...answer.runs], body) : el("p", { class: "quiet" }, "Their jobs are the same."));
  }

  /** @param {number} [after_ms] */
  function refresh(after_ms = PAUSE_MS) {
    isOld = true;
    if (asking) return;
    asking = setTimeout(async () => {
      isOld = false;
      try {
        answer = await asked();
        drawFields();
        await drawCurves();
      } catch (error) { /* the banner says what it is */ }
      asking = 0;
      if (isOld && !isClosed) refresh();
    }, after_ms);
  }

  drawFields();
  drawCurves().catch(() => undefined);
  refresh(0); // for the width that there is now
  const stream = new Stream("", 0, {
    ...common,
    runs: (change) => {
      const known = change.runs.filter((/** @type {any} */ run) => ids.includes(run.run_id));
      for (const run of known) rows.set(run.run_id, line(run, ids, rows.get(run.run_id)));
      arrange(runs, ids.flatMap((id) => rows.get(id) ?? []));
      if (known.length) refresh();
    },
  });
  const resized = () => { if (Math.abs(drawingWidth(pictures) - width) > 20) refresh(0); };
  addEventListener("resize", resized);
  return { close: () => { isClosed = true; stream.close(); clearTimeout(asking); removeEventListener("resize", resized); } };
}

/** @param {unknown} value */
function shown(value) {
  if (value === null) return el("span", { class: "quiet" }, "not set");
  return typeof value === "string" ? value : typeof value === "number" ? exact(value) : el("code", {}, JSON.stringify(value));
}

/** @param {any} run @param {string[]} ids @param {HTMLElement} [row] */
function line(run, ids, row) {
  const name = run.run_id, others = ids.filter((id) => id !== name);
  row ??= el("tr", {}, el("th", { scope: "row" }, el("a", { href: `#/runs/${encodeURIComponent(name)}` }, name)), el("td", { "data-name": "Strategy" }, run.strategy),
    el("td", { "data-name": "Phase" }, el("span", { class: "phase" })), el("td", { "data-name": "Progress" }, el("progress", { max: 1, "aria-label": `progress of ${name}` })), el("td", { "data-name": "Metrics" }),
    ...(others.length > 1 ? [el("td", {}, el("a", { href: comparison(others), "aria-label": `leave out ${name}` }, "leave out"))] : []));
  const [, , phase, progress, metrics] = row.children;
  const word = /** @type {HTMLElement} */ (phase.firstElementChild);
  word.dataset.phase = run.phase;
  say(word, run.phase.toLowerCase());
  /** @type {HTMLProgressElement} */ (progress.firstElementChild).value = share(run.progress?.num_steps ? run.progress : run);
  fill(metrics, measured({ ...run.metrics, ...(run.progress?.loss ? { "train.loss": run.progress.loss } : {}) }));
  return row;
}
