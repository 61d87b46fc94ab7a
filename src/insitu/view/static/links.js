/** The addresses of the pages. They hold everything a page shows, so that they can be sent to someone. */

import { h } from "./dom.js";

/** @param {string} path @param {Record<string, any>} [parameters] */
export function address(path, parameters = {}) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters)) {
    for (const each of Array.isArray(value) ? value : [value])
      if (each != null && each !== "") query.append(name, each);
  }
  return query.size ? `${path}?${query}` : path;
}

/**
 * Puts other parameters into the address. What was chosen is a step that Back undoes, what is typed is none.
 * @param {Record<string, string | number | null>} changes null or "": without the parameter @param {boolean} [step]
 */
export function remember(changes, step = true) {
  const query = new URLSearchParams(location.search);
  for (const [name, value] of Object.entries(changes)) {
    if (value == null || value === "") query.delete(name);
    else query.set(name, String(value));
  }
  const now = query.size ? `${location.pathname}?${query}` : location.pathname;
  if (now === location.pathname + location.search) return;
  if (step) history.pushState({}, "", now);
  else history.replaceState(history.state, "", now);
}

/** What a run is called: its path below the opened folder. @param {{run: string, name?: string, summary?: {name: string}}} run */
export const runName = (run) => (run.run === "." ? (run.name ?? run.summary?.name ?? "run") : run.run);

/** @param {string} run @param {string[]} [compare] */
export const toRun = (run, compare = []) => address("/run", { run, compare });

/** @param {string} run @param {{epoch: number, row_id: string}} group */
export const toGroup = (run, group) => address("/group", { run, epoch: group.epoch, row: group.row_id });

/** @param {string} run @param {string} episode @param {{colour?: string | null, call?: number | null}} [view] */
export const toEpisode = (run, episode, view = {}) => address("/episode", { run, episode, ...view });

/**
 * @param {string} href @param {Record<string, any>} attributes @param {...any} children
 * @returns {HTMLElement}
 */
export function link(href, attributes, ...children) {
  return h("a", { href, ...attributes }, ...children);
}

/** `row 3`; the id alone if it says that it is a row. @param {string} id @param {string} [word] */
export const rowLabel = (id, word = "row") => (/^row/i.test(id) ? id : `${word} ${id}`);

/** What tells an episode from others of its group. @param {{generation: number, attempt?: number}} record */
export const episodeLabel = (record) =>
  `episode ${record.generation}${record.attempt ? `, attempt ${record.attempt + 1}` : ""}`;
