// Numbers and times as people read them.

/** @param {unknown} value @returns {string} */
export function number(value) {
  if (typeof value !== "number") return value === null || value === undefined ? "" : String(value);
  if (Number.isInteger(value)) return value.toLocaleString("en-US");
  const size = Math.abs(value);
  return size !== 0 && (size < 1e-3 || size >= 1e6) ? value.toExponential(3) : String(Number(value.toPrecision(4)));
}

/** @param {number | null | undefined} seconds @returns {string} */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "";
  const whole = Math.max(0, Math.round(seconds));
  const [days, hours] = [Math.floor(whole / 86400), Math.floor((whole % 86400) / 3600)];
  const [minutes, rest] = [Math.floor((whole % 3600) / 60), whole % 60];
  const two = (/** @type {number} */ n) => String(n).padStart(2, "0");
  if (days) return `${days} d ${hours} h`;
  return hours ? `${hours}:${two(minutes)}:${two(rest)}` : `${minutes}:${two(rest)}`;
}

/** The time of day here, after the day where that is another than today. @param {number} time_s @returns {string} */
export function clock(time_s) {
  const at = new Date(time_s * 1000);
  const two = (/** @type {number} */ n) => String(n).padStart(2, "0");
  const day = `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())} `;
  return (at.toDateString() === new Date().toDateString() ? "" : day) + at.toTimeString().slice(0, 8);
}

/** @param {number} bytes @returns {string} */
export function bytes(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  for (; bytes >= 1024 && at < units.length - 1; at += 1) bytes /= 1024;
  return `${Number(bytes.toPrecision(3))} ${units[at]}`;
}

/** @param {{step: number, num_steps: number}} of @returns {number} */
export function share(of) {
  return of.num_steps ? Math.min(1, of.step / of.num_steps) : 0;
}

/**
 * What of the metrics fits a line.
 * @param {Record<string, unknown>} metrics
 * @returns {string[]} their names
 */
export function foremost(metrics) {
  const isShown = (/** @type {string} */ name) => name === "train.loss" || !/^train\.|\.client_(min|p10|median|p90|max)$/.test(name);
  const names = Object.keys(metrics).filter(isShown);
  return names.sort().reverse().slice(0, 3);
}

/** @param {number} count @param {string} one @returns {string} */
export function plural(count, one) {
  return `${number(count)} ${one}${count === 1 ? "" : "s"}`;
}

/** What of a run is counted, before its progress says so. @param {string} strategy @returns {string} */
export function unitOf(strategy) {
  return strategy.startsWith("Federated") ? "rounds" : strategy.startsWith("PopulationBased") ? "generations" : "steps";
}

/**
 * Which pass over the rows a run is in, and how many it makes: "4 of 5", as in a terminal.
 * @param {{epoch: number, step: number, num_steps: number}} progress
 * @returns {string}
 */
export function epochOf(progress) {
  if (!(progress.epoch > 0) || !progress.step || !progress.num_steps) return "";
  const passes = (/** @type {number} */ epochs) => Math.ceil(Number(epochs.toFixed(6))); // a quotient may be a last bit too large
  return `${passes(progress.epoch)} of ${passes(progress.epoch * progress.num_steps / progress.step)}`;
}
