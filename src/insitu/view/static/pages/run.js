/** One run, or several compared: how it does, its curves, what was left out, its episodes and its settings. */

import { get } from "../api.js";
import { compareWith, comparison, differences } from "../comparison.js";
import { Curves } from "../curves.js";
import { fill, h } from "../dom.js";
import { ABSENT, compact, count, duration, isNumber, percent, score, signed, when } from "../format.js";
import { OFTEN_CUT, trainedShare, trainsFew, warnings } from "../figures.js";
import { Lists } from "../lists.js";
import { remember } from "../links.js";
import { arrow, choice, fact, failure, problems, section, stateBadge } from "../parts.js";
import { jobSeconds } from "../metrics.js";
import { about } from "../settings.js";
import { bar, sparkline } from "../sparkline.js";

/** @typedef {import("../curves.js").Details} Details */

/** @param {import("../app.js").Context} context @returns {Promise<import("../app.js").Page>} */
export async function runPage({ parameters, signal, go }) {
  const name = parameters.get("run") ?? ".";
  const compared = parameters.getAll("compare").filter((other) => other !== name);
  const read = () => Promise.all([name, ...compared].map((run) => get("run", { run }, signal)));
  let [runs, others] = await Promise.all([read(), get("runs", {}, signal)]);
  const progress = h("span");
  let collected = /** @type {{epoch: number | null, episodes: number | null}} */ ({ epoch: null, episodes: null });
  const lists = compared.length
    ? null
    : new Lists(name, parameters, signal, (now) => {
        collected = now;
        fill(progress, withinEpoch(runs[0], collected));
      });
  const curves = new Curves((epoch) => epoch > 0 && lists?.choose(String(epoch)), parameters.get("smooth") ?? "0");
  const smoothing = choice("Smoothing of the curves", curves.smoothing, [...SMOOTHING], (smooth) => {
    remember({ smooth: smooth === "0" ? "" : smooth });
    curves.smooth(smooth, runs);
  });
  fill(curves.controls, h("span", { class: "field" }, h("span", {}, "Smoothing"), smoothing));
  const head = h("div");
  const dropped = h("div");
  const foot = h("div");
  let drawn = "";
  const draw = () => {
    const now = JSON.stringify(runs);
    if (now !== drawn) {
      drawn = now;
      const [run] = runs;
      const adding = compareWith(name, compared, others.runs, go);
      fill(head, compared.length ? comparison(runs, adding) : header(run, adding, progress));
      fill(progress, withinEpoch(run, collected));
      curves.update(runs);
      fill(dropped, compared.length ? differences(runs) : leftOut(run));
      if (compared.length) return;
      const opened = [...foot.querySelectorAll("details[open]")].map((each) => each.id);
      fill(foot, about(run));
      for (const id of opened) foot.querySelector(`#${id}`)?.setAttribute("open", "");
    }
    void lists?.update(Object.keys(runs[0].dropped ?? {}), rewardRange(runs[0].epochs));
  };
  draw();
  return {
    title: compared.length ? `${runs.length} runs` : runs[0].summary.name,
    crumbs: [
      ["Runs", "/runs"],
      [compared.length ? "Comparison" : runs[0].summary.name, null],
    ],
    node: h("div", { class: "page" }, head, curves.node, lists?.node, curves.further, dropped, foot),
    runs: [name, ...compared],
    update: async () => {
      runs = await read();
      draw();
    },
    shortcuts: [
      { keys: ["j"], what: "next row of the list", run: () => lists?.table?.move(1) },
      { keys: ["k"], what: "previous row of the list", run: () => lists?.table?.move(-1) },
      { keys: ["g"], what: "list the groups", run: () => lists?.show("groups") },
      { keys: ["e"], what: "list the episodes", run: () => lists?.show("episodes") },
      { keys: ["u"], what: "all runs", run: () => go("/runs") },
    ],
    close: () => {
      curves.close();
      lists?.close();
    },
  };
}

/** @type {[string, string, string?][]} */
const SMOOTHING = [
  ["0", "none"],
  ["0.6", "some", "an exponential moving average: each point keeps 60 % of the average so far"],
  ["0.9", "much", "an exponential moving average: each point keeps 90 % of the average so far"],
];

/** How far the epoch is that a run collects. @param {Details} run @param {{epoch: number | null, episodes: number | null}} collected */
function withinEpoch(run, collected) {
  const { summary } = run;
  const epoch = (summary.epoch ?? 0) + 1;
  if (summary.status !== "running" || (summary.epochs && epoch > summary.epochs)) return null;
  const done = collected.epoch === epoch ? (collected.episodes ?? 0) : 0;
  const planned = run.budget ? null : run.episodes_per_epoch; // which saves some, and replaces others
  if (planned && done >= planned) return `epoch ${epoch}: all ${count(planned)} episodes collected, training`;
  return [
    `epoch ${epoch}: ${count(done)} ${planned ? `of ${count(planned)} ` : ""}episodes`,
    planned ? bar(done, planned) : null,
  ];
}

/** @param {Details} run @param {Node | null} adding a control to compare it with another @param {Node} progress of the epoch */
function header(run, adding, progress) {
  const { summary } = run;
  const last = run.epochs.at(-1);
  const warned = warnings(run.epochs, false);
  const cut = last?.completions_clipped_ratio;
  const origin = [
    summary.method,
    summary.model,
    summary.started && `started ${when(summary.started)}`,
    summary.written && `last written ${when(summary.written)}`,
  ]
    .filter(Boolean)
    .join(" · ");
  return [
    h(
      "header",
      { class: "page-head" },
      h("div", { class: "title-line" }, h("h1", {}, summary.name, " ", stateBadge(summary.status)), adding),
      h("p", { class: "sub" }, origin),
    ),
    summary.error
      ? failure(summary.status === "interrupted" ? "The run was interrupted" : "The run failed", summary.error)
      : null,
    summary.status === "killed"
      ? failure("The process of this run ended without recording why", `insitu finetune --resume: ${run.resume}`)
      : null,
    problems(run.problems, summary.run_dir),
    h(
      "dl",
      { class: "facts" },
      scoreFact(run),
      fact(
        "Training reward",
        score(last?.avg_reward),
        last
          ? [
              sparkline(
                run.epochs.map((/** @type {any} */ line) => [line.epoch, line.avg_reward]),
                "training reward",
                "--amber",
              ),
              `epoch ${last.epoch}`,
            ]
          : "no epoch is complete",
      ),
      fact("Epochs", `${count(summary.epoch ?? (last ? last.epoch : null))} / ${count(summary.epochs)}`, [
        bar(summary.epoch ?? 0, summary.epochs ?? 0),
        remaining(run),
        progress,
      ]),
      fact("Trained tokens", compact(summary.tokens), throughput(run)),
      fact("Time", duration(summary.seconds), "of complete epochs"),
      marked(
        trainsFew(last),
        fact(
          last?.pairs == null ? "Trained episodes" : "Trained pairs",
          percent(trainedShare(last)),
          last ? `of those ${last.pairs == null ? "with a reward" : "made"}, epoch ${last.epoch}` : null,
        ),
      ),
      isNumber(cut) && cut > 0
        ? marked(cut >= OFTEN_CUT, fact("Cut off", percent(cut), `of the answers, epoch ${last?.epoch}`))
        : null,
    ),
    warned.length
      ? h(
          "div",
          { class: "callout warn", role: "status" },
          h("strong", {}, "What the last epochs warn of"),
          h(
            "ul",
            {},
            warned.map((text) => h("li", { class: "pre" }, text)),
          ),
        )
      : null,
  ];
}

/** @param {Details} run */
function scoreFact(run) {
  const { summary } = run;
  const best =
    run.best ??
    run.validations.findLast(
      (/** @type {any} */ each) =>
        isNumber(each.avg_reward) && each.epoch === summary.best_epoch && each.avg_reward === summary.best_score,
    );
  if (!best) {
    const failed = run.validations.at(-1)?.error;
    return fact("Held-out score", ABSENT, failed ? `the validation failed: ${failed}` : "no validation");
  }
  const interval = best.ci95 ? `95 %: ${score(best.ci95[0])} to ${score(best.ci95[1])}` : "";
  const [epoch, first] = summary.scores?.[0] ?? []; // of those that are comparable with the last
  const gain = epoch < best.epoch
    ? `${signed(best.avg_reward - first)} since epoch ${epoch}`
    : best.epoch
      ? null
      : "before training";
  return h(
    "div",
    { class: "fact lead-fact" },
    h("dt", {}, "Held-out score"),
    h(
      "dd",
      {},
      h(
        "span",
        { class: "figure" },
        epoch < best.epoch ? arrow(score(first), score(best.avg_reward)) : score(best.avg_reward),
      ),
      h(
        "span",
        { class: "remark" },
        [best.epoch ? `best, epoch ${best.epoch}` : null, gain].filter(Boolean).join(" · "),
        interval && h("br"),
        interval,
      ),
    ),
  );
}

/** @param {Details} run */
function remaining(run) {
  const { summary, epochs } = run;
  if (summary.status !== "running" || !epochs.length || !summary.epochs)
    return summary.status === "running" ? "collecting" : null;
  const seconds = epochs.slice(-5).map((/** @type {any} */ line) => total(line.seconds));
  const each =
    seconds.reduce((/** @type {number} */ sum, /** @type {number} */ value) => sum + value, 0) / seconds.length;
  const left = (summary.epochs - epochs.at(-1).epoch) * each;
  return left > 0 ? `about ${duration(Math.round(left))} left` : "finishing";
}

/** @param {Record<string, number> | undefined} seconds */
const total = (seconds) =>
  ["collect", "train", "validate"].reduce((sum, phase) => sum + (seconds?.[phase] ?? 0), 0);

/** @param {Details} run */
function throughput(run) {
  const trained = run.epochs.filter((/** @type {any} */ line) => isNumber(line.tokens) && jobSeconds(line));
  if (!trained.length) return null;
  const last = trained.at(-1);
  return `${compact(last.tokens / jobSeconds(last))}/s in the job, epoch ${last.epoch}`;
}

/** Marks a figure that is bad. @param {boolean} bad @param {HTMLElement} figure */
function marked(bad, figure) {
  if (bad) {
    figure.classList.add("is-bad");
    figure.querySelector(".figure")?.prepend(h("span", { "aria-label": "bad: ", role: "img" }, "⚠ "));
  }
  return figure;
}

/** @param {any[]} epochs @returns {[number, number]} */
function rewardRange(epochs) {
  const low = epochs.map((line) => line.min_reward).filter(isNumber);
  const high = epochs.map((line) => line.max_reward).filter(isNumber);
  return low.length && high.length ? [Math.min(...low), Math.max(...high)] : [0, 1];
}

/** @param {Details} run */
function leftOut(run) {
  const entries = Object.entries(run.dropped ?? {});
  if (!entries.length) return null;
  const most = Math.max(...entries.map(([, n]) => n));
  return h(
    "section",
    { class: "section", "aria-label": "Left out" },
    h("h2", {}, "Left out of training"),
    h(
      "div",
      { class: "scroll-x" },
      h(
        "table",
        { class: "plain left-out-table" },
        h(
          "thead",
          {},
          h(
            "tr",
            {},
            h("th", { scope: "col" }, "Reason"),
            h("th", { scope: "col", class: "n" }, "Count"),
            h("th", {}, h("span", { class: "sr" }, "Share")),
            h("th", { scope: "col" }, "By epoch"),
          ),
        ),
        h(
          "tbody",
          {},
          entries.map(([reason, n]) =>
            h(
              "tr",
              {},
              h("th", { scope: "row", class: "mono" }, reason),
              h("td", { class: "n num" }, count(n)),
              h("td", { class: "bar-cell" }, bar(n, most, "warn")),
              h(
                "td",
                {},
                sparkline(
                  run.epochs.map((/** @type {any} */ line) => [line.epoch, line.dropped?.[reason] ?? 0]),
                  `${reason} by epoch`,
                  "--vermilion",
                ),
              ),
            ),
          ),
        ),
      ),
    ),
  );
}
