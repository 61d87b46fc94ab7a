/** The settings and history of a run, folded at the end of its page. */

import { h } from "./dom.js";
import { ABSENT, count, duration, isNumber, number, plain, when } from "./format.js";
import { definitions } from "./parts.js";

/** @param {Record<string, any>} run the answer of /api/run */
export function about(run) {
  return [
    part("settings", `Settings of the file (${Object.keys(run.settings ?? {}).length})`, settings(run)),
    part("recorded", "How advantages and losses are computed", recorded(run)),
    run.config ? part("config", "All settings", filtered(flatten(run.config))) : null,
    run.epochs.length ? part("numbers", "All numbers of the epochs", epochTable(run.epochs)) : null,
    run.collections?.length ? part("collections", "What was collected", epochTable(run.collections)) : null,
    run.final_metrics ? part("final", "Result of the job", definitions(flatten(run.final_metrics))) : null,
    run.validations.length
      ? part("validations", `Validations (${run.validations.length})`, validationTable(run.validations))
      : null,
    part("history", "History", history(run)),
  ];
}

/** @param {string} id @param {string} title @param {...any} children */
function part(id, title, ...children) {
  return h("details", { class: "about-part", id: `part-${id}` }, h("summary", {}, h("h2", {}, title)), children);
}

/** @param {Record<string, any>} run */
function settings(run) {
  const source = run.source ? h("p", { class: "sub mono" }, run.source) : null;
  return [source, filtered(Object.entries(run.settings ?? {}))];
}

/** @param {Record<string, any>} run */
function recorded(run) {
  const keys = [
    "advantages",
    "credit",
    "discount",
    "on_failure",
    "targets",
    "training",
    "episodes_from",
    "dataset",
    "seed",
  ];
  return definitions(flatten(Object.fromEntries(keys.filter((key) => run[key] != null).map((key) => [key, run[key]]))));
}

/** Keys and values with a field to filter them. @param {[string, any][]} entries */
function filtered(entries) {
  const list = definitions(entries);
  if (entries.length < 12) return list;
  const input = /** @type {HTMLInputElement} */ (
    h("input", {
      type: "search",
      placeholder: "key or value",
      oninput: () => {
        for (const row of /** @type {Iterable<HTMLElement>} */ (list.children))
          row.hidden = !row.textContent?.toLowerCase().includes(input.value.toLowerCase());
      },
    })
  );
  return [h("label", { class: "field" }, h("span", {}, "Filter"), input), list];
}

/** Dotted keys. @param {any} value @param {string} [prefix] @returns {[string, any][]} */
export function flatten(value, prefix = "") {
  if (value === null || typeof value !== "object" || Array.isArray(value) || !Object.keys(value).length)
    return [[prefix, value]];
  return Object.entries(value).flatMap(([key, inner]) => flatten(inner, prefix ? `${prefix}.${key}` : key));
}

/** @param {any[]} epochs */
function epochTable(epochs) {
  const lines = epochs.map((line) => new Map(flatten(line)));
  const keys = [...new Set(lines.flatMap((line) => [...line.keys()]))].filter(
    (key) => key !== "run_id" && key !== "timestamp",
  );
  return wide(
    keys,
    lines.map((line) =>
      keys.map((key) =>
        key === "epoch" ? count(line.get(key)) : isNumber(line.get(key)) ? number(line.get(key)) : plain(line.get(key)),
      ),
    ),
  );
}

/** @param {any[]} validations */
function validationTable(validations) {
  const keys = ["epoch", "policy_version", "score", "95 % interval", "rows and repetitions", "seconds", "left out"];
  return wide(
    keys,
    validations.map((each) =>
      each.error != null
        ? [
            count(each.epoch),
            count(each.policy_version),
            h("span", { class: "bad" }, `failed: ${each.error}`),
            ABSENT,
            ABSENT,
            duration(each.seconds),
            ABSENT,
          ]
        : [
            count(each.epoch),
            count(each.policy_version),
            each.note
              ? h("span", { title: each.note }, `${number(each.avg_reward)} (not comparable)`)
              : number(each.avg_reward),
            each.ci95 ? `${number(each.ci95[0])} to ${number(each.ci95[1])}` : ABSENT,
            count(each.num_examples),
            duration(each.seconds),
            Object.entries(each.dropped ?? {})
              .map(([reason, n]) => `${n} ${reason}`)
              .join(", ") || ABSENT,
          ],
    ),
  );
}

/** @param {string[]} keys @param {any[][]} rows */
function wide(keys, rows) {
  return h(
    "div",
    { class: "scroll-x", tabindex: "0", role: "region", "aria-label": "A wide table" },
    h(
      "table",
      { class: "plain wide" },
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          keys.map((key) => h("th", { scope: "col", class: "n" }, key)),
        ),
      ),
      h(
        "tbody",
        {},
        rows.map((cells) =>
          h(
            "tr",
            {},
            cells.map((cell) => h("td", { class: "n num" }, cell)),
          ),
        ),
      ),
    ),
  );
}

/** @param {Record<string, any>} run */
function history(run) {
  return [
    h("p", {}, h("code", {}, "insitu finetune --resume"), " ", run.resume),
    h(
      "ol",
      { class: "events" },
      run.events.map((/** @type {any} */ event) => {
        const { time, event: what, ...rest } = event;
        const known = Object.entries(rest).filter(([, value]) => value != null);
        return h(
          "li",
          {},
          h("time", { datetime: time, title: time }, when(time)),
          " ",
          h("strong", {}, what),
          " ",
          h("span", { class: "muted pre" }, known.map(([key, value]) => `${key}: ${plain(value)}`).join("  ")),
        );
      }),
    ),
  ];
}
