/** Parts that several pages are made of. */

import { h } from "./dom.js";
import { ABSENT, count, plain } from "./format.js";

/** @type {Record<string, [string, string]>} a sign and a word for each state of a run */
const STATES = {
  running: ["●", "running"],
  completed: ["✓", "completed"],
  failed: ["✕", "failed"],
  interrupted: ["‖", "interrupted"],
  killed: ["†", "died"],
  forked: ["⑂", "forked"],
};

/** @param {any} status */
export function stateBadge(status) {
  const [sign, word] = STATES[status] ?? ["?", String(status ?? "unknown")];
  return h(
    "span",
    { class: `state state-${status in STATES ? status : "unknown"}` },
    h("span", { "aria-hidden": "true" }, sign),
    word,
  );
}

/** @param {{outcome?: string, dropped?: string | null, reason?: string | null}} record */
export function outcomeBadge(record) {
  if (record.outcome === "failed") return h("span", { class: "outcome bad" }, "✕ ", record.reason ?? "failed");
  if (record.dropped)
    return h("span", { class: "outcome left-out", title: "left out of training" }, "○ ", record.dropped);
  if (record.reason) return h("span", { class: "outcome left-out" }, "○ ", record.reason);
  return h("span", { class: "outcome" }, "ok");
}

/**
 * A figure with its name above and a remark below.
 * @param {string} name @param {import("./dom.js").Child | import("./dom.js").Child[]} value @param {import("./dom.js").Child | import("./dom.js").Child[]} [remark]
 */
export function fact(name, value, remark) {
  return h(
    "div",
    { class: "fact" },
    h("dt", {}, name),
    h("dd", {}, h("span", { class: "figure" }, value), remark && h("span", { class: "remark" }, remark)),
  );
}

/** @param {string} title @param {...any} children */
export function section(title, ...children) {
  return h("section", { class: "section", "aria-label": title }, h("h2", {}, title), children);
}

/** A folded part. @param {import("./dom.js").Child | import("./dom.js").Child[]} summary @param {...any} children */
export function folded(summary, ...children) {
  return h("details", {}, h("summary", {}, summary), children);
}

const FEW = 4;

/** @param {string[] | undefined} texts what is wrong with the files of a run @param {string} [folder] where they are, which is left out */
export function problems(texts, folder) {
  if (!texts?.length) return null;
  const items = texts.map((text) => h("li", { class: "pre" }, folder ? text.replaceAll(`${folder}/`, "") : text));
  const rest = items.splice(texts.length > FEW + 1 ? FEW : texts.length);
  return h(
    "div",
    { class: "callout warn", role: "alert" },
    h(
      "strong",
      {},
      texts.length === 1 ? "A file of this run is missing or damaged" : "Files of this run are missing or damaged",
    ),
    h("ul", {}, items),
    rest.length ? folded(`${rest.length} more`, h("ul", {}, rest)) : null,
  );
}

/** Why something failed. @param {string} title @param {any} text */
export function failure(title, text) {
  return h(
    "div",
    { class: "callout bad", role: "alert" },
    h("strong", {}, title),
    text ? h("p", { class: "pre" }, text) : null,
  );
}

/** Keys and values. @param {[string, any][]} entries */
export function definitions(entries) {
  return h(
    "dl",
    { class: "definitions" },
    entries.map(([key, value]) =>
      h("div", {}, h("dt", {}, key), h("dd", {}, value instanceof Node ? value : plain(value))),
    ),
  );
}

/** @param {string} label @param {string} value @param {[string, string][]} options value and text @param {(value: string) => void} change */
export function select(label, value, options, change) {
  const element = /** @type {HTMLSelectElement} */ (
    h(
      "select",
      { onchange: () => change(element.value) },
      options.map(([key, text]) => h("option", { value: key, selected: key === value }, text)),
    )
  );
  return h("label", { class: "field" }, h("span", {}, label), element);
}

/**
 * Buttons of which one is chosen.
 * @param {string} label @param {string} value @param {[string, string, string?][]} options value, text and explanation @param {(value: string) => void} change
 */
export function choice(label, value, options, change) {
  const buttons = options.map(([key, text, help]) =>
    h(
      "button",
      { type: "button", "aria-pressed": String(key === value), title: help, onclick: () => choose(key) },
      text,
    ),
  );
  const choose = (/** @type {string} */ key) => {
    buttons.forEach((button, index) => button.setAttribute("aria-pressed", String(options[index][0] === key)));
    change(key);
  };
  return h("div", { class: "choice", role: "group", "aria-label": label }, buttons);
}

/** `first → last`, as far as they are known. @param {string} first @param {string} last */
export function arrow(first, last) {
  if (first === ABSENT && last === ABSENT) return ABSENT;
  return [h("span", { class: "before" }, first), h("span", { class: "to" }, " → "), h("strong", {}, last)];
}

/** How much of a run is indexed, while it is less than all. @param {{groups: number, of: number | null} | undefined} indexed */
export function indexing(indexed) {
  if (!indexed || indexed.of == null || indexed.groups >= indexed.of) return "";
  return ` · reading the run: ${count(indexed.groups)} of ${count(indexed.of)} groups so far`;
}
