// The banner: how the page stands with its server, and that with the coordinator. Whatever acts on
// the coordinator is in a fieldset of actions(), which rests while the coordinator is away.

import { el, say } from "./dom.js";
import { duration } from "./format.js";

const WORDS = {
  live: "live",
  connecting: "connecting",
  reconnecting: "reconnecting to the page’s server",
  away: "coordinator away",
  standby: "another coordinator leads",
  denied: "not allowed",
  version: "the coordinator has another version",
  broken: "this page has a defect",
};
/** In these the page shows what is, or nothing yet. */
const CALM = new Set(["live", "connecting"]);

/** @typedef {keyof typeof WORDS} Word */

const banner = /** @type {HTMLElement} */ (document.getElementById("banner"));
const main = /** @type {HTMLElement} */ (document.getElementById("main"));
const cause = /** @type {HTMLElement} */ (document.getElementById("cause"));
// The age is not read aloud: it changes each second.
const word = el("span"), age = el("span", { "aria-hidden": "true" });
banner.replaceChildren(word, age);
const state = { word: /** @type {Word} */ ("connecting"), since: Date.now() };

/**
 * Says how it stands.
 * @param {Word} now
 * @param {string} [why] as a sentence
 * @param {number} [silent] seconds since the coordinator has answered, where that is known
 */
export function tell(now, why = "", silent = 0) {
  if (state.word !== now || silent) state.since = Date.now() - 1000 * silent;
  state.word = now;
  banner.dataset.state = now;
  say(word, WORDS[now]);
  say(cause, CALM.has(now) ? "" : why);
  main.classList.toggle("stale", !CALM.has(now) && now !== "denied");
  for (const each of main.querySelectorAll("fieldset.buttons")) /** @type {HTMLFieldSetElement} */ (each).disabled = now !== "live";
  tick();
}

function tick() {
  say(age, CALM.has(state.word) || state.word === "denied" ? "" : ` for ${duration((Date.now() - state.since) / 1000)}`);
}
setInterval(tick, 1000);
tell("connecting");

/** Makes a place for buttons that act on the coordinator. */
export function actions() {
  return /** @type {HTMLFieldSetElement} */ (el("fieldset", { class: "buttons", disabled: state.word !== "live" }));
}
