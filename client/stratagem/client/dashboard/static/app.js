// The page: shows what its address names.

import { here } from "./address.js";
import { tell } from "./banner.js";
import { showComparison } from "./compare.js";
import { el, fill, say } from "./dom.js";
import { ask, Refused, Stream, Unanswered } from "./net.js";
import { showRun } from "./run.js";
import { showRuns } from "./runs.js";
import { showWorkers } from "./workers.js";

const WRONG = "The token in the address is not the one that the page was started with.";
const MISSING = "This browser has not shown the token that the page was started with.";
const AGAIN_MS = 1000;

const main = /** @type {HTMLElement} */ (document.getElementById("main"));

/** What every stream of the page listens to besides its own. */
const common = {
  beat: (/** @type {{state: import("./banner.js").Word, why: string, silent_s: number}} */ beat) => tell(beat.state, beat.why, beat.silent_s),
  lost: () => tell("reconnecting", "The dashboard has ended, or cannot be reached; the last picture stays."),
  refused: () => door(MISSING),
};

/** @type {{close(): void} | undefined} */
let shown;
let turns = 0;
let told = { operates: false, version: "", coordinator: "" };

async function route() {
  const turn = leave();
  const { kind, id } = here();
  for (const [name, is] of /** @type {[string, boolean][]} */ ([["nav-runs", kind !== "workers"], ["nav-workers", kind === "workers"]])) {
    const link = /** @type {HTMLElement} */ (document.getElementById(name));
    if (is) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  const place = el("div", { class: "page" }, el("p", { class: "quiet" }, "asking the coordinator …"));
  fill(main, place);
  // Nobody may answer for long: the banner says so meanwhile.
  const waiting = setTimeout(() => { if (turn === turns) shown = new Stream("", 0, common); }, AGAIN_MS);
  try {
    const opened = await show(place, kind, id);
    if (turn === turns) shown?.close();
    if (turn === turns) shown = opened;
    else opened.close(); // something else was wanted meanwhile
  } catch (error) {
    if (turn === turns) fail(place, error);
  } finally {
    clearTimeout(waiting);
  }
}

/** Ends what is shown; returns the number of what comes next. */
function leave() {
  shown?.close();
  shown = undefined;
  document.title = "Stratagem";
  return (turns += 1);
}

/** @param {HTMLElement} place @param {string} kind @param {string} id @returns {Promise<{close(): void}>} */
async function show(place, kind, id) {
  if (kind === "runs" && id) return showRun(place, decodeURIComponent(id), told, common);
  if (kind === "compare") return showComparison(place, id.split(",").filter(Boolean).map(decodeURIComponent), common);
  return kind === "workers" ? showWorkers(place, common) : showRuns(place, common);
}

/** @param {HTMLElement} place @param {unknown} error */
function fail(place, error) {
  shown?.close();
  if (error instanceof Refused) return door(MISSING);
  const text = error instanceof Error ? error.message : String(error);
  fill(place, el("p", { class: "problem", role: "alert" }, text), el("p", {}, el("a", { href: "#/" }, "All runs")));
  // What was refused for as long as the coordinator was away is asked again once it is back.
  const turn = turns;
  let isDue = error instanceof Unanswered;
  const again = (/** @type {any} */ beat) => {
    common.beat(beat);
    if (beat.state !== "live") isDue = true;
    else if (isDue) setTimeout(() => turn === turns && start().catch((next) => fail(main, next)), AGAIN_MS);
  };
  shown = new Stream("", 0, { ...common, beat: again });
}

/** @param {string} why */
function door(why) {
  leave();
  tell("denied", why);
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
  fill(main, el("form", { class: "door", submit: enter },
    el("h1", {}, "This page needs its token"), el("p", {}, why),
    el("p", { class: "quiet" }, "Open the address that “stratagem dashboard” has printed, or enter the token here."),
    el("label", { for: "token" }, "Token"), field, el("button", {}, "Open"), wrong));
}

/** @param {string} token */
async function begin(token) {
  await ask("/api/session", { method: "POST", body: token });
}

async function start() {
  tell("connecting");
  told = await ask("/api/me");
  await route();
}

/** Goes to what the address names; a token in it leaves it, and is exchanged for a session. */
async function enter() {
  const token = new URLSearchParams(location.hash.slice(1)).get("token");
  let why = MISSING;
  try {
    if (token) {
      history.replaceState(null, "", "#/");
      await begin(token).catch((error) => {
        if (error instanceof Unanswered) throw error;
        why = WRONG; // whoever has a session does not need it
      });
    }
    await start();
  } catch (error) {
    if (error instanceof Refused) door(why);
    else fail(main, error);
  }
}

addEventListener("hashchange", () => (location.hash.startsWith("#token=") ? enter() : location.hash.startsWith("#/") && route()));
enter();
