// Elements from plain text: whatever a run, a worker or a log says is shown as text and never read
// as markup.

import { foremost, number } from "./format.js";

/**
 * Makes an element; children are nodes or text.
 * @param {string} tag
 * @param {Record<string, string | boolean | number | EventListener>} [attributes]
 * @param {...(Node | string | number | null | undefined | false)} children
 * @returns {HTMLElement}
 */
export function el(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name, value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== undefined) element.setAttribute(name, String(value));
  }
  fill(element, ...children);
  return element;
}

/**
 * Replaces what is in an element.
 * @param {Element} element
 * @param {...(Node | string | number | null | undefined | false)} children
 */
export function fill(element, ...children) {
  const shown = children.filter((child) => child !== null && child !== undefined && child !== false);
  element.replaceChildren(...shown.map((child) => (child instanceof Node ? child : String(child))));
}

/**
 * Puts elements into a place in their order; what is in place already is not touched, so that it
 * keeps the focus of whoever stands on it.
 * @param {Element} place
 * @param {Element[]} shown
 */
export function arrange(place, shown) {
  const wanted = new Set(shown);
  for (const each of [...place.children]) if (!wanted.has(each)) each.remove();
  let next = place.firstElementChild;
  for (const each of shown) {
    if (each === next) next = next.nextElementSibling;
    else place.insertBefore(each, next);
  }
}

/**
 * Sets the text of an element where it is another one: a live page must not redraw what stays.
 * @param {Element} element
 * @param {string} text
 */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/**
 * Makes a number as people read it, which holds the number itself.
 * @param {unknown} value
 */
export function exact(value) {
  return el("data", { value: String(value) }, number(value));
}

/**
 * Shows names and values, and keeps the elements of those that were there.
 * @param {Element} place
 * @param {[string, Node | string][]} values
 */
export function pairs(place, values) {
  const known = new Map([...place.children].map((each) => [/** @type {HTMLElement} */ (each).dataset.name, each]));
  const shown = values.filter(([, value]) => value !== "").map(([name, value]) => {
    const pair = known.get(name) ?? el("div", { "data-name": name }, el("dt", {}, name), el("dd"));
    const field = /** @type {Element} */ (pair.lastElementChild);
    const is = value instanceof HTMLElement ? value.outerHTML : value;
    if ((value instanceof Node ? field.innerHTML : field.textContent) !== is) fill(field, value);
    return pair;
  });
  arrange(place, shown);
}

/** @type {{createHTML(text: string): unknown} | undefined} */
let policy;

/**
 * Reads a picture of our own server; the one place where text becomes elements.
 * @param {string} text
 * @returns {Element}
 */
export function picture(text) {
  const types = /** @type {any} */ (window).trustedTypes;
  policy ??= types ? types.createPolicy("pictures", { createHTML: (/** @type {string} */ svg) => svg }) : undefined;
  const source = /** @type {string} */ (policy ? policy.createHTML(text) : text);
  const root = new DOMParser().parseFromString(source, "image/svg+xml").documentElement;
  if (root.nodeName !== "svg") throw new Error("the server sent no picture");
  for (const each of root.querySelectorAll("script, foreignObject")) each.remove();
  return document.importNode(root, true);
}

/**
 * Makes a line of metrics.
 * @param {Record<string, unknown>} metrics
 */
export function measured(metrics) {
  return el("span", { class: "metrics" }, ...foremost(metrics).map((name) => el("span", {}, el("span", { class: "quiet" }, name), " ", exact(metrics[name]))));
}

/**
 * Makes a table with headings.
 * @param {string} caption
 * @param {string[]} headings
 * @param {HTMLElement} body
 */
export function table(caption, headings, body) {
  const head = el("thead", {}, el("tr", {}, ...headings.map((text) => el("th", { scope: "col" }, text))));
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    el("table", {}, el("caption", { class: "hidden" }, caption), head, body));
}
