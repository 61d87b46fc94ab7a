/** Shows the page that the address names, and keeps it up to date while its runs are written. */

import { ApiError, setToken, takeToken } from "./api.js";
import { debounce, fill, focusMark, focusMarked, h } from "./dom.js";
import { listenForKeys, setShortcuts, showKeys } from "./keys.js";
import { follow } from "./live.js";
import { link } from "./links.js";
import { episodePage } from "./pages/episode.js";
import { groupPage } from "./pages/group.js";
import { runPage } from "./pages/run.js";
import { runsPage } from "./pages/runs.js";

/**
 * What a page's function returns. `update` reads the data again, `runs` are those it shows (all if absent).
 * @typedef {{title: string, crumbs: [string, string | null][], node: Node, runs?: string[], update?: () => Promise<void>,
 *   shortcuts?: import("./keys.js").Shortcut[], shown?: () => void, close?: () => void}} Page
 */

/** @typedef {{parameters: URLSearchParams, signal: AbortSignal, go: (href: string, replace?: boolean) => void}} Context */

/** @type {Record<string, (context: Context) => Promise<Page>>} */
const PAGES = { "/": runsPage, "/runs": runsPage, "/run": runPage, "/group": groupPage, "/episode": episodePage };

const main = /** @type {HTMLElement} */ (document.getElementById("main"));
const crumbs = /** @type {HTMLElement} */ (document.getElementById("crumbs"));
const live = /** @type {HTMLElement} */ (document.getElementById("live"));

let leave = new AbortController();
/** @type {Page | null} */
let current = null;
let shownBefore = false;

/** @typedef {{scroll?: number, list?: number, focus?: import("./dom.js").FocusMark | null}} Place where a page was left */

/** @param {Place} [place] */
async function show(place = {}) {
  leave.abort();
  leave = new AbortController();
  const { signal } = leave;
  const build = PAGES[location.pathname] ?? noPage;
  const slow = setTimeout(() => main.setAttribute("aria-busy", "true"), 150);
  try {
    const page = await build({ parameters: new URLSearchParams(location.search), signal, go });
    if (signal.aborted) return page.close?.();
    current?.close?.();
    current = page;
    display(page, place, signal);
    const update = refresher(page, signal);
    follow(page.runs ?? [], update, showLive, signal);
  } catch (error) {
    if (!signal.aborted) showProblem(error);
  } finally {
    clearTimeout(slow);
    if (!signal.aborted) main.removeAttribute("aria-busy");
  }
}

/** @param {Page} page @param {Place} place @param {AbortSignal} signal */
function display(page, place, signal) {
  document.title = `${page.title} · insitu`;
  fill(
    crumbs,
    page.crumbs.map(([text, href]) => (href ? link(href, {}, text) : h("span", { "aria-current": "page" }, text))),
  );
  fill(main, page.node);
  setShortcuts(page.shortcuts ?? []);
  window.scrollTo(0, place.scroll ?? 0);
  if (shownBefore) comeBack(place, signal);
  shownBefore = true;
  page.shown?.();
}

/**
 * Goes back to where a page was left, as soon as its lists have come. The focus of a new page is at its start.
 * @param {Place} place @param {AbortSignal} signal
 */
function comeBack(place, signal) {
  main.focus({ preventScroll: true });
  const again = () => {
    const scroller = main.querySelector(".scroller");
    if (place.list && (!scroller || scroller.scrollHeight < place.list + scroller.clientHeight)) return false;
    if (place.list && scroller) scroller.scrollTop = place.list;
    window.scrollTo(0, place.scroll ?? 0);
    return !place.focus || focusMarked(place.focus);
  };
  if (again()) return;
  const changes = new MutationObserver(() => again() && changes.disconnect());
  changes.observe(main, { childList: true, subtree: true, attributes: true, attributeFilter: ["style"] });
  for (const event of ["keydown", "pointerdown", "wheel"])
    addEventListener(event, () => changes.disconnect(), { once: true, capture: true, signal });
  setTimeout(() => changes.disconnect(), 5000);
}

/** @returns {Promise<Page>} */
async function noPage() {
  const node = h(
    "section",
    { class: "page problem", role: "alert" },
    h("h1", {}, "There is no such page"),
    h("p", {}, h("code", { class: "break" }, location.pathname), " is none of the pages of insitu view."),
    h("p", {}, link("/runs", {}, "All runs")),
  );
  return { title: "No such page", crumbs: [], node };
}

/** At most one update at a time, and one more if something changed meanwhile. @param {Page} page @param {AbortSignal} signal */
function refresher(page, signal) {
  let running = false;
  let again = false;
  const update = async () => {
    if (signal.aborted || !page.update) return;
    if (running) return void (again = true);
    running = true;
    try {
      await page.update();
    } catch (error) {
      if (!signal.aborted) console.warn(error);
    } finally {
      running = false;
      if (again) {
        again = false;
        later();
      }
    }
  };
  const later = debounce(update, 200);
  return later;
}

/** @param {boolean} connected */
function showLive(connected) {
  live.className = connected ? "on" : "off";
  live.textContent = connected ? "live" : "reconnecting";
  live.title = connected ? "This page follows the files of the run." : "The server does not answer.";
}

/** @param {unknown} error */
function showProblem(error) {
  current?.close?.();
  current = null;
  document.title = "insitu view";
  fill(crumbs);
  setShortcuts([]);
  if (!(error instanceof ApiError)) console.error(error);
  const message = error instanceof Error ? error.message : String(error);
  if (error instanceof ApiError && error.status === 401) return fill(main, tokenForm());
  fill(
    main,
    h(
      "section",
      { class: "problem", role: "alert" },
      h("h1", {}, "This cannot be shown"),
      h("p", { class: "pre" }, message),
      h(
        "p",
        {},
        link("/runs", {}, "All runs"),
        " · ",
        h("button", { type: "button", onclick: () => show() }, "Try again"),
      ),
    ),
  );
}

function tokenForm() {
  const input = /** @type {HTMLInputElement} */ (
    h("input", { id: "token", type: "password", autocomplete: "off", required: true })
  );
  const submit = (/** @type {Event} */ event) => {
    event.preventDefault();
    setToken(input.value.trim());
    show();
  };
  return h(
    "form",
    { class: "problem", onsubmit: submit },
    h("h1", {}, "This server needs its token"),
    h(
      "p",
      {},
      "Open the link that ",
      h("code", {}, "insitu view"),
      " printed, or paste the token here. It is kept until the tab is closed.",
    ),
    h("p", { class: "field" }, h("label", { for: "token" }, "Token"), input, h("button", { type: "submit" }, "Open")),
  );
}

/** Keeps where the page is left, for Back. */
function leavePlace() {
  const list = main.querySelector(".scroller")?.scrollTop ?? 0;
  history.replaceState({ scroll: window.scrollY, list, focus: focusMark() }, "");
}

/** Opens an address without loading the page anew. @param {string} href @param {boolean} [replace] */
function go(href, replace = false) {
  leavePlace();
  if (replace) history.replaceState({}, "", href);
  else history.pushState({}, "", href);
  show();
}

document.addEventListener("click", (event) => {
  const anchor = /** @type {HTMLElement} */ (event.target).closest?.("a");
  const modified = event.button || event.ctrlKey || event.metaKey || event.shiftKey || event.altKey;
  if (!anchor || modified || event.defaultPrevented || anchor.origin !== location.origin || !(anchor.pathname in PAGES))
    return;
  if (anchor.hash) return;
  event.preventDefault();
  go(anchor.pathname + anchor.search);
});
window.addEventListener("popstate", (event) => show(event.state ?? {}));
window.addEventListener("hashchange", () => {
  if (!location.hash.startsWith("#token=")) return;
  takeToken();
  show();
});
document.getElementById("help")?.addEventListener("click", showKeys);
history.scrollRestoration = "manual";
listenForKeys();
takeToken();
show();
