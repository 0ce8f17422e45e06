// The parts of a run's page that are drawn anew when facts have changed them. What stays keeps its
// elements: whoever reads a table or stands on a button is not thrown out.

import { arrange, el, exact, fill, measured, picture, table } from "./dom.js";

const WINDOW = 100;

/** The commits that are kept, the newest ones in a window that grows on demand. */
export function commitTable() {
  const body = el("tbody");
  const none = el("p", { class: "quiet" }, "Nothing is committed yet.");
  const more = el("button", { class: "plain", hidden: true, click: () => { limit += WINDOW; draw(); } }, "Older commits");
  const whole = el("div", {}, el("h2", {}, "Commits"), table("Commits", ["Segment", "Step", "Kept as", "Metrics", "Digest"], body), more);
  let limit = WINDOW, shown = "", commits = /** @type {any[]} */ ([]);
  /** @param {any} run */
  function show(run) {
    commits = run.commits;
    none.hidden = commits.length > 0;
    whole.hidden = !none.hidden;
    draw();
  }
  function draw() {
    const window_ = commits.slice(-limit), of = JSON.stringify(window_);
    if (of === shown) return;
    shown = of;
    more.hidden = commits.length <= limit;
    fill(body, ...window_.map(line));
  }
  const line = (/** @type {any} */ commit) => el("tr", {},
    el("th", { scope: "row" }, exact(commit.segment)), el("td", { "data-name": "Step" }, exact(commit.step)),
    el("td", { "data-name": "Kept as" }, [commit.is_best && "best", commit.is_final && "final", commit.member !== null && `member ${commit.member}`].filter(Boolean).join(", ")),
    el("td", { "data-name": "Metrics" }, measured(commit.metrics)), el("td", { "data-name": "Digest" }, el("code", {}, commit.digest.slice(0, 16))));
  return { element: el("section", {}, none, whole), show };
}

/** How wide a column of pictures is, without their frame. @param {Element} place */
export function drawingWidth(place) {
  const [column] = columns(place);
  return Math.max(Math.round(parseFloat(column) || 720) - 34, 280);
}

/** For which place pictures are asked for. @param {Element} place */
export function frame(place) {
  return `&width=${drawingWidth(place)}&columns=${columns(place).length}`;
}

/** @param {Element} place */
function columns(place) {
  return getComputedStyle(place).gridTemplateColumns.split(" ");
}

/**
 * Shows pictures, each with the table of its numbers; those that were there are changed in place.
 * @param {Element} place
 * @param {{title: string, note: string, svg: string, steps: number[] | null, headings: string[], rows: string[][]}[]} panels
 * @param {() => boolean} isWanted whether nothing newer is shown by now
 */
export async function showFigures(place, panels, isWanted) {
  const known = new Map([...place.children].map((each) => [each.getAttribute("data-name"), each]));
  const shown = panels.map((panel) => known.get(panel.title) ?? newFigure(panel.title));
  arrange(place, shown);
  for (const [at, panel] of panels.entries()) {
    showFigure(shown[at], panel);
    await new Promise((resume) => setTimeout(resume)); // whoever types or scrolls comes in between
    if (!isWanted()) return;
  }
}

/** What each figure shows: one that has not changed is not read again. */
const drawn = /** @type {WeakMap<Element, string>} */ (new WeakMap());

/** @param {Element} figure @param {{title: string, note: string, svg: string, steps: number[] | null, headings: string[], rows: string[][]}} panel */
function showFigure(figure, panel) {
  if (drawn.get(figure) === panel.svg) return;
  drawn.set(figure, panel.svg);
  const [, drawing, note, numbers] = figure.children;
  if (panel.steps) /** @type {HTMLElement} */ (drawing).dataset.steps = panel.steps.join(" ");
  fill(drawing, picture(panel.svg));
  note.textContent = panel.note;
  /** @type {HTMLElement} */ (numbers).hidden = !panel.rows.length;
  const fillTable = () => {
    const opened = /** @type {HTMLDetailsElement} */ (numbers).open;
    const body = el("tbody", {}, ...(opened ? panel.rows : []).map((row) => el("tr", {}, el("th", { scope: "row" }, row[0]), ...row.slice(1).map((text) => el("td", {}, text)))));
    const before = numbers.querySelector(".scroll");
    const after = table(`${panel.title}: numbers`, panel.headings, body);
    if (before) {
      const at = before.scrollTop, focused = before === document.activeElement;
      before.replaceWith(after);
      after.scrollTop = at;
      if (focused) after.focus();
    } else numbers.append(after);
  };
  /** @type {HTMLDetailsElement} */ (numbers).ontoggle = fillTable;
  fillTable();
}

/** @param {string} title */
function newFigure(title) {
  return el("figure", { "data-name": title }, el("figcaption", {}, title), el("div", { class: "drawing" }),
    el("p", { class: "quiet" }), el("details", { class: "table" }, el("summary", {}, "The same as numbers")));
}
