/** Several runs beside one another: how each does, and the settings in which they differ. */

import { h } from "./dom.js";
import { ABSENT, compact, count, duration, score } from "./format.js";
import { link, runName, toRun } from "./links.js";
import { arrow, problems, section, select, stateBadge } from "./parts.js";
import { flatten } from "./settings.js";

/** @typedef {import("./curves.js").Details} Details */

/** @param {Details[]} runs @param {Node | null} adding a control to add another */
export function comparison(runs, adding) {
  const rows = [
    ["State", (/** @type {Details} */ run) => stateBadge(run.summary.status)],
    [
      "Held-out score, first → best",
      (/** @type {Details} */ run) => arrow(score(run.summary.first_score), score(run.summary.best_score)),
    ],
    ["Training reward, last", (/** @type {Details} */ run) => score(run.epochs.at(-1)?.avg_reward)],
    ["Epochs", (/** @type {Details} */ run) => `${count(run.summary.epoch)} / ${count(run.summary.epochs)}`],
    ["Trained tokens", (/** @type {Details} */ run) => compact(run.summary.tokens)],
    ["Time", (/** @type {Details} */ run) => duration(run.summary.seconds)],
  ];
  return [
    h("header", { class: "page-head title-line" }, h("h1", {}, `${runs.length} runs compared`), adding),
    runs.map((run) => problems(run.problems, run.summary.run_dir)),
    h(
      "div",
      { class: "scroll-x" },
      h(
        "table",
        { class: "plain compared" },
        h(
          "thead",
          {},
          h(
            "tr",
            {},
            h("th", {}, h("span", { class: "sr" }, "Figure")),
            runs.map((run) => h("th", { scope: "col" }, link(toRun(run.run), {}, runName(run)))),
          ),
        ),
        h(
          "tbody",
          {},
          rows.map(([title, value]) =>
            h(
              "tr",
              {},
              h("th", { scope: "row" }, /** @type {string} */ (title)),
              runs.map((run) => h("td", {}, /** @type {any} */ (value)(run))),
            ),
          ),
        ),
      ),
    ),
  ];
}

/** The settings with different values, defaults included, unless no file states them and a run has no such part. @param {Details[]} runs */
export function differences(runs) {
  const values = runs.map((run) => new Map(flatten(run.config ?? run.settings ?? {}).map(([key, value]) => [key, JSON.stringify(value)])));
  const keys = [...new Set(values.flatMap((each) => [...each.keys()]))].filter(
    (key) =>
      new Set(values.map((each) => each.get(key))).size > 1 &&
      (runs.some((run) => key in (run.settings ?? {})) || values.every((each) => each.has(key))),
  );
  if (!keys.length) return null;
  return section(
    "Settings that differ",
    h(
      "div",
      { class: "scroll-x" },
      h(
        "table",
        { class: "plain compared" },
        h(
          "thead",
          {},
          h(
            "tr",
            {},
            h("th", { scope: "col" }, "Key"),
            runs.map((run) => h("th", { scope: "col" }, runName(run))),
          ),
        ),
        h(
          "tbody",
          {},
          keys.map((key) =>
            h(
              "tr",
              {},
              h("th", { scope: "row", class: "mono" }, key),
              values.map((each) => h("td", { class: "mono" }, each.get(key) ?? ABSENT)),
            ),
          ),
        ),
      ),
    ),
  );
}

/** @param {string} run @param {string[]} compared @param {Details[]} runs @param {(href: string) => void} go */
export function compareWith(run, compared, runs, go) {
  const others = runs.filter((each) => each.run !== run && !compared.includes(each.run));
  if (!others.length) return null;
  const options = others.map((each) => /** @type {[string, string]} */ ([each.run, each.run]));
  return h(
    "div",
    { class: "controls" },
    select(
      compared.length ? "Add to the comparison" : "Compare with",
      "",
      [["", "choose a run"], ...options],
      (other) => other && go(toRun(run, [...compared, other])),
    ),
  );
}
