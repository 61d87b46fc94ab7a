/** Texts that are folded if they are long, and loaded in parts if they are very long: nothing is cut off. */

import { h } from "./dom.js";
import { count } from "./format.js";

/** Where the rest of a value is that an answer only begins. @typedef {{path: (string | number)[], length: number, digest?: string}} Cut */

const LONG = 1500;
const LINES = 24;

/** @type {(path: (string | number)[], offset: number) => Promise<string>} */
let readPart = () => Promise.reject(new Error("The rest is not on this page."));

/** Sets how the page in view reads the rest of long texts. @param {typeof readPart} read */
export function loadParts(read) {
  readPart = read;
}

/** What is left out of a value. @param {any} value @returns {Cut[]} */
export function cutsOf(value) {
  if (value === null || typeof value !== "object") return [];
  return Object.entries(value).flatMap(([key, each]) => (key === "$cut" ? Object.values(each) : cutsOf(each)));
}

/** How many characters a text has, as the server counts them: one of two UTF-16 units, such as an emoji, once. @param {string} text */
const characters = (text) => [...text].length;

/** A value as JSON, with those of its texts below it that are only beginnings. @param {any} value */
export function longJson(value) {
  /** @type {HTMLElement[]} */
  const texts = [];
  /** @this {any} @param {string} key @param {any} each */
  function short(key, each) {
    if (key === "$cut") return undefined;
    const cut = this.$cut?.[key];
    if (!cut || typeof each !== "string") return each;
    texts.push(longText(each, "code", cut));
    return `(${count(cut.length)} characters, below)`;
  }
  return [longText(JSON.stringify(value, short, 2), "code"), ...texts];
}

/** A text that is folded if it is long. @param {string} text @param {string} [kind] @param {Cut} [cut] */
export function longText(text, kind = "text", cut) {
  return foldLong(h("div", { class: kind }, text), text, cut);
}

/**
 * Folds an element with a long text. A button shows all of it, or the next part.
 * @param {HTMLElement} body @param {string} text @param {Cut} [cut]
 */
export function foldLong(body, text, cut) {
  const lines = text.split("\n", LINES + 1).length;
  if (!cut && text.length <= LONG && lines <= LINES) return body;
  body.classList.add("clamped");
  let shown = characters(text);
  const all = cut?.length ?? shown;
  const label = () => {
    if (body.classList.contains("clamped"))
      return shown < all ? `Show the first ${count(shown)} of ${count(all)} characters` : `Show all ${count(all)} characters`;
    return shown < all ? `Show more: ${count(shown)} of ${count(all)} characters are shown` : "Show less";
  };
  const press = async () => {
    if (body.classList.contains("clamped") || shown >= all) body.classList.toggle("clamped");
    else if (cut) {
      button.disabled = true;
      try {
        const part = await readPart(cut.path, shown);
        const more = shown + characters(part) < all ? part.slice(0, part.lastIndexOf("\n") + 1) || part : part;
        body.append(h("span", { class: "part" }, more));
        shown += characters(more);
      } finally {
        button.disabled = false;
      }
    }
    button.textContent = label();
    button.setAttribute("aria-expanded", String(!body.classList.contains("clamped")));
  };
  const button = /** @type {HTMLButtonElement} */ (
    h("button", { type: "button", class: "more", "aria-expanded": "false", onclick: press }, label())
  );
  return h("div", { class: "foldable" }, body, button);
}
