// Which steps of curves are shown, and whether on a logarithmic axis: chosen with fields, or with the
// pointer on a curve, kept in the address, and asked for again.

import { here, keep } from "./address.js";
import { el } from "./dom.js";

const MIN_PIXELS = 8;

/**
 * Makes the tools, which act on all curves of a place.
 * @param {HTMLElement} pictures where the curves are; a figure's data-steps names its first and last
 *   step, and where in the picture they are
 * @param {() => void} changed
 */
export function curveTools(pictures, changed) {
  const { view } = here();
  const log = /** @type {HTMLInputElement} */ (el("input", { type: "checkbox", id: "log", change: choose }));
  const number = (/** @type {string} */ id, /** @type {string} */ hint) =>
    /** @type {HTMLInputElement} */ (el("input", { type: "number", id, min: 1, step: 1, placeholder: hint, change: choose }));
  const from = number("from", "first"), to = number("to", "last");
  const whole = el("button", { click: () => zoom("", "") }, "all steps");
  log.checked = view.has("log");
  zoomed(view.get("from") ?? "", view.get("to") ?? "");

  const chosen = () => [["from", from.value], ["to", to.value], ["log", log.checked ? "1" : ""]];

  /** @param {string} first @param {string} last */
  function zoomed(first, last) {
    from.value = first;
    to.value = last;
    whole.hidden = !first && !last;
  }

  /** @param {string} first @param {string} last */
  function zoom(first, last) {
    zoomed(first, last);
    choose();
  }

  function choose() {
    to.setCustomValidity(from.value && to.value && Number(to.value) <= Number(from.value) ? "The last step is behind the first one." : "");
    if (![from, to].every((each) => each.reportValidity())) return;
    const now = here().view;
    for (const [name, value] of chosen()) {
      if (value) now.set(name, value);
      else now.delete(name);
    }
    keep(now);
    zoomed(from.value, to.value);
    changed();
  }

  drag(pictures, zoom);
  const element = el("div", { class: "tools curves", role: "group", "aria-label": "Curves" },
    el("label", {}, log, " log scale"), el("label", { for: "from" }, "steps"), from, el("label", { for: "to" }, "to"), to, whole,
    el("span", { class: "quiet" }, "or draw over a curve"));
  /** What is asked for besides. */
  const query = () => chosen().filter(([, value]) => value).map(([name, value]) => `&${name}=${value}`).join("");
  /** Shows the tools where there are curves, or were before steps were chosen. */
  const show = (/** @type {{steps: number[] | null}[]} */ panels) => { element.hidden = !query() && panels.every((panel) => !panel.steps); };
  show([]);
  return { element, query, show };
}

/** Chooses steps with the pointer. @param {HTMLElement} pictures @param {(first: string, last: string) => void} zoom */
function drag(pictures, zoom) {
  pictures.addEventListener("pointerdown", (down) => {
    const drawing = /** @type {HTMLElement | null} */ (/** @type {Element} */ (down.target).closest("[data-steps]"));
    const svg = drawing?.querySelector("svg");
    if (!drawing || !svg || down.button !== 0 || down.pointerType === "touch") return;
    const [first, last, left, right] = (drawing.dataset.steps ?? "").split(" ").map(Number);
    const band = document.createElementNS("http://www.w3.org/2000/svg", "rect");
    band.setAttribute("class", "band");
    band.setAttribute("height", "100%");
    svg.append(band);
    const within = (/** @type {PointerEvent} */ at) => {
      const box = svg.getBoundingClientRect();
      return Math.min(Math.max((at.clientX - box.left) * svg.viewBox.baseVal.width / box.width, left), right);
    };
    const began = within(down);
    let ends = [began, began];
    const move = (/** @type {PointerEvent} */ at) => {
      ends = [Math.min(began, within(at)), Math.max(began, within(at))];
      band.setAttribute("x", String(ends[0]));
      band.setAttribute("width", String(ends[1] - ends[0]));
    };
    const over = (/** @type {Event} */ event) => {
      for (const kind of ["pointermove", "pointerup", "pointercancel"]) removeEventListener(kind, /** @type {any} */ (kind === "pointermove" ? move : over));
      band.remove();
      if (event.type !== "pointerup" || ends[1] - ends[0] < MIN_PIXELS) return;
      const [from, to] = ends.map((at) => first + (last - first) * (at - left) / (right - left));
      zoom(String(Math.max(Math.floor(from), 1)), String(Math.max(Math.ceil(to), Math.floor(from) + 2)));
    };
    addEventListener("pointermove", move);
    addEventListener("pointerup", over);
    addEventListener("pointercancel", over);
  });
}
