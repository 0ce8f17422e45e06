// The page: shows what its address names, and in the banner how the coordinator is.

import { el, fill, say } from "./dom.js";
import { duration } from "./format.js";
import { ask, Refused } from "./net.js";
import { showRun } from "./run.js";
import { showRuns } from "./runs.js";
import { showWorkers } from "./workers.js";

const main = /** @type {HTMLElement} */ (document.getElementById("main"));
const banner = /** @type {HTMLElement} */ (document.getElementById("banner"));
const WORDS = {
  live: "live",
  connecting: "connecting",
  reconnecting: "reconnecting to the page’s server",
  away: "coordinator away",
  standby: "no coordinator leads yet",
  denied: "not allowed",
  version: "the coordinator has another version",
};

/** Where the page stands with its server and the coordinator. */
const state = { word: "connecting", why: "", since: Date.now(), silent: 0 };

/** @param {keyof typeof WORDS} word @param {string} [why] @param {number} [silent] */
function tell(word, why = "", silent = 0) {
  if (state.word !== word) state.since = Date.now();
  Object.assign(state, { word, why, silent });
  const age = word === "live" || word === "connecting" ? "" : ` for ${duration(silent || (Date.now() - state.since) / 1000)}`;
  banner.dataset.state = word;
  banner.title = why;
  say(banner, WORDS[word] + age);
  main.classList.toggle("stale", word !== "live" && word !== "connecting");
}

setInterval(() => {
  const word = /** @type {keyof typeof WORDS} */ (state.word);
  if (word !== "live" && word !== "connecting") tell(word, state.why, state.silent && state.silent + 1);
}, 1000);

/** What every stream of the page listens to besides its own. */
const common = {
  beat: (/** @type {{state: keyof typeof WORDS, why: string, silent_s: number}} */ beat) => tell(beat.state, beat.why, beat.silent_s),
  lost: () => tell("reconnecting"),
};

/** @type {{close(): void} | undefined} */
let shown;
let told = { operates: false, version: "", coordinator: "" };

async function route() {
  shown?.close();
  shown = undefined;
  const [, kind = "", id = ""] = location.hash.split("/");
  for (const [name, is] of /** @type {[string, boolean][]} */ ([["nav-runs", kind !== "workers"], ["nav-workers", kind === "workers"]])) {
    const link = /** @type {HTMLElement} */ (document.getElementById(name));
    if (is) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  try {
    const place = el("div", { class: "page" }, el("p", { class: "quiet" }, "asking the coordinator …"));
    fill(main, place);
    if (kind === "runs" && id) shown = await showRun(place, decodeURIComponent(id), told, common);
    else if (kind === "workers") shown = await showWorkers(place, common);
    else shown = await showRuns(place, common);
  } catch (error) {
    if (error instanceof Refused) fill(main, door());
    else fill(main, el("p", { class: "problem", role: "alert" }, error instanceof Error ? error.message : String(error)), el("p", {}, el("a", { href: "#/" }, "All runs")));
  }
}

function door() {
  tell("denied", "this browser has not shown the token");
  const field = /** @type {HTMLInputElement} */ (el("input", { type: "password", id: "token", autocomplete: "off", required: true }));
  const wrong = el("p", { class: "problem", role: "alert" });
  const enter = async (/** @type {Event} */ event) => {
    event.preventDefault();
    try {
      await begin(field.value);
      await start();
    } catch (error) {
      say(wrong, error instanceof Error ? error.message : String(error));
    }
  };
  return el("form", { class: "door", submit: enter },
    el("h1", {}, "This page needs its token"),
    el("p", {}, "Open the address that “stratagem dashboard” has printed, or enter the token here."),
    el("label", { for: "token" }, "Token"), field, el("button", {}, "Open"), wrong);
}

/** @param {string} token */
async function begin(token) {
  await ask("/api/session", { method: "POST", body: token });
}

async function start() {
  told = await ask("/api/me");
  document.body.dataset.operates = String(told.operates);
  await route();
}

addEventListener("hashchange", () => location.hash.startsWith("#/") && route());
try {
  const token = new URLSearchParams(location.hash.slice(1)).get("token");
  if (token) {
    history.replaceState(null, "", "#/");
    await begin(token);
  }
  await start();
} catch (error) {
  fill(main, door());
}
