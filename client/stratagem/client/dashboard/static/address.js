// The address: what the page shows stands behind "#", so that it can be passed on.

/** What is shown: "runs/ID", "compare/ID,ID" or "workers", and how, behind "?". */
export function here() {
  const [path, query = ""] = location.hash.slice(2).split("?");
  const [kind = "", id = ""] = path.split("/");
  return { path, kind, id, view: new URLSearchParams(query) };
}

/**
 * Keeps in the address how something is shown, and shows nothing anew.
 * @param {URLSearchParams} view
 */
export function keep(view) {
  const query = view.toString();
  history.replaceState(null, "", `#/${here().path}${query && `?${query}`}`);
}

/** @param {string[]} ids */
export function comparison(ids) {
  return `#/compare/${ids.map(encodeURIComponent).join(",")}`;
}
