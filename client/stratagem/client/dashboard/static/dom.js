// Elements from plain text: whatever a run, a worker or a log says is shown as text and never read
// as markup.

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
 * Sets the text of an element where it is another one: a live page must not redraw what stays.
 * @param {Element} element
 * @param {string} text
 */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
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
