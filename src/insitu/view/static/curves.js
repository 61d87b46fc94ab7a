/** The curves of one run, or of several over one another. */

import { ChartCard } from "./charts.js";
import { fill, h, style } from "./dom.js";
import { isNumber, score } from "./format.js";
import { link, runName, toRun } from "./links.js";
import { metricGroups } from "./metrics.js";

/** @typedef {import("./charts.js").Series} Series */
/** @typedef {{run: string, [key: string]: any}} Details the answer of /api/run */

const COLOURS = ["--blue", "--vermilion", "--green", "--purple", "--amber", "--sky", "--brown", "--ink"];

/** The metrics beside the score: the first four that the run has. */
const FIRST = [
  "rewards/margins",
  "rewards/accuracies",
  "teacher_kl",
  "kl",
  "reference_gap",
  "entropy",
  "frac_reward_zero_std",
  "completions_mean_length",
  "loss",
  "grad_norm",
];

/** The charts of a page. */
export class Curves {
  /** @param {(epoch: number) => void} pick @param {string} smoothing the share of the average that each point keeps */
  constructor(pick, smoothing) {
    this.pick = pick;
    this.smoothing = smoothing;
    this.node = h("div", { class: "curves" });
    this.controls = h("div", { class: "controls" });
    /** The charts that are less important than the episodes. */
    this.further = h("div", { class: "curves" });
    /** @type {Map<string, ChartCard>} */
    this.cards = new Map();
    this.layout = "";
  }

  /** @param {string} smoothing @param {Details[]} runs */
  smooth(smoothing, runs) {
    this.smoothing = smoothing;
    this.update(runs);
  }

  /** @param {string} key @param {Details[]} runs @param {Series[]} series */
  draw(key, runs, series) {
    const planned = Math.max(...runs.map((run) => run.summary.epochs ?? 0));
    const first = Math.min(...series.flatMap((each) => each.points.map(([x]) => x)), 1);
    this.cards.get(key)?.update(smoothed(series, Number(this.smoothing)), planned ? [first, planned] : null);
  }

  /** @param {Details[]} runs the first is the run of the page */
  update(runs) {
    const several = runs.length > 1;
    const groups = metricGroups(runs.flatMap((run) => run.epochs));
    this.node.hidden = this.further.hidden = !(groups.length || hasScores(runs) || hasRewards(runs));
    const layout = JSON.stringify([
      runs.map((run) => run.run),
      groups.map(([name, metrics]) => [name, metrics.map(({ key }) => key)]),
      hasScores(runs),
      hasRewards(runs),
    ]);
    if (layout !== this.layout) this.build(layout, runs, groups);
    this.draw("score", runs, several ? heldOut(runs) : scoreAndReward(runs[0]));
    this.draw("reward", runs, rewards(runs));
    for (const metric of groups.flatMap(([, metrics]) => metrics)) {
      this.draw(
        metric.key,
        runs,
        runs.map((run, index) => ({
          label: runName(run),
          colour: COLOURS[index % COLOURS.length],
          sparse: metric.sparse,
          points: run.epochs.map((/** @type {any} */ line) => [
            line.epoch,
            isNumber(metric.read(line)) ? metric.read(line) : null,
          ]),
        })),
      );
    }
  }

  /** @param {string} layout @param {Details[]} runs @param {[string, import("./metrics.js").Metric[]][]} groups */
  build(layout, runs, groups) {
    this.close();
    this.layout = layout;
    const several = runs.length > 1;
    const metrics = groups.flatMap(([, all]) => all);
    const first = FIRST.map((key) => metrics.find((metric) => metric.key === key))
      .filter((metric) => metric != null)
      .slice(0, 4);
    const lead = [];
    if (hasScores(runs))
      lead.push(
        this.card("score", several || !hasRewards(runs) ? "Held-out score" : "Held-out score and training reward", {
          help: "The band is the 95 % confidence interval of the held-out score.",
          format: score,
          tall: true,
        }),
      );
    if (hasRewards(runs) && (several || !hasScores(runs)))
      lead.push(
        this.card("reward", "Training reward", {
          help: "mean over the episodes of an epoch; over its pairs if these are candidates of a turn, which have scores",
          format: score,
          tall: true,
        }),
      );
    const closed = { Other: true };
    fill(
      this.node,
      h("div", { class: "title-line" }, (several ? runLegend(runs) : scoreLegend(runs[0])) ?? h("span"), this.controls),
      h(
        "div",
        { class: "lead" },
        lead,
        h(
          "div",
          { class: "first" },
          first.map((metric) => this.card(metric.key, metric.title, metric)),
        ),
      ),
    );
    fill(
      this.further,
      groups
        .map(([name, all]) => ({ name, all: all.filter((metric) => !first.includes(metric)) }))
        .filter(({ all }) => all.length)
        .map(({ name, all }) =>
          h(
            "details",
            { class: "chart-group", open: !(name in closed) || several },
            h("summary", {}, h("h2", {}, name)),
            h(
              "div",
              { class: "charts" },
              all.map((metric) => this.card(metric.key, metric.title, metric)),
            ),
          ),
        ),
    );
  }

  /** @param {string} key @param {string} title @param {Partial<import("./charts.js").Chart>} options */
  card(key, title, options) {
    const card = new ChartCard({
      title,
      series: [],
      help: options.help,
      format: options.format,
      from_zero: options.from_zero,
      tall: options.tall,
      pick: this.pick,
    });
    this.cards.set(key, card);
    return card.node;
  }

  close() {
    for (const card of this.cards.values()) card.close();
    this.cards.clear();
  }
}

/** Curves, the original behind the smoothed one. Held-out scores are few, and stay as they are. @param {Series[]} series @param {number} keep @returns {Series[]} */
function smoothed(series, keep) {
  if (!keep) return series;
  return series.flatMap((each) => {
    if (each.sparse) return [each];
    let average = /** @type {number | null} */ (null);
    const points = each.points.map(([x, y]) => {
      if (y != null) average = average == null ? y : keep * average + (1 - keep) * y;
      return /** @type {[number, number | null]} */ ([x, y == null ? null : average]);
    });
    return [
      { ...each, faint: true },
      { ...each, points, label: `${each.label}, smoothed` },
    ];
  });
}

/** @param {Details[]} runs */
function hasScores(runs) {
  return runs.some((run) => run.validations.some((/** @type {any} */ each) => isNumber(each.avg_reward)));
}

/** @param {Details[]} runs */
function hasRewards(runs) {
  return runs.some((run) => run.epochs.some((/** @type {any} */ line) => isNumber(line.avg_reward)));
}

/** The held-out scores that are comparable with the latest. @param {Details} run @returns {Series} */
function scores(run) {
  const scored = run.validations.filter((/** @type {any} */ each) => isNumber(each.avg_reward) && !each.note);
  return {
    label: "held-out score",
    colour: "--blue",
    sparse: true,
    points: scored.map((/** @type {any} */ each) => [each.epoch, each.avg_reward]),
    band: scored
      .filter((/** @type {any} */ each) => each.ci95)
      .map((/** @type {any} */ each) => [each.epoch, each.ci95[0], each.ci95[1]]),
  };
}

/** @param {Details} run @returns {Series} */
function reward(run) {
  return {
    label: "training reward",
    colour: "--amber",
    points: run.epochs.map((/** @type {any} */ line) => [line.epoch, line.avg_reward ?? null]),
  };
}

/** A curve for each set of rows and evaluator before the latest. @param {Details} run @returns {Series[]} */
function otherScores(run) {
  const others = run.validations.filter((/** @type {any} */ each) => each.note);
  return [...new Set(others.map((/** @type {any} */ each) => each.scored_by))].map((by) => ({
    label: "held-out score, other rows or evaluator",
    colour: "--blue",
    sparse: true,
    dashed: true,
    points: others
      .filter((/** @type {any} */ each) => each.scored_by === by)
      .map((/** @type {any} */ each) => [each.epoch, each.avg_reward]),
  }));
}

/** @param {Details} run */
const scoreAndReward = (run) => [reward(run), ...otherScores(run), scores(run)];

/** @param {Details[]} runs @returns {Series[]} */
const heldOut = (runs) =>
  runs.map((run, index) => ({ ...scores(run), label: runName(run), colour: COLOURS[index % COLOURS.length] }));

/** @param {Details[]} runs @returns {Series[]} */
const rewards = (runs) =>
  runs.map((run, index) => ({
    ...reward(run),
    label: runName(run),
    colour: runs.length > 1 ? COLOURS[index % COLOURS.length] : "--amber",
  }));

/** @param {Details} run */
function scoreLegend(run) {
  if (!hasScores([run])) return null;
  return h(
    "p",
    { class: "legend" },
    entry("--blue", "held-out score, with its 95 % interval"),
    hasRewards([run]) ? entry("--amber", "training reward") : null,
  );
}

/** @param {Details[]} runs */
function runLegend(runs) {
  const names = runs.map((run) => run.run);
  return h(
    "ul",
    { class: "legend" },
    runs.map((run, index) => {
      const others = names.filter((name) => name !== run.run);
      return h(
        "li",
        {},
        entry(COLOURS[index % COLOURS.length], link(toRun(run.run), {}, runName(run))),
        link(
          toRun(others[0], others.slice(1)),
          { class: "remove", "aria-label": `Remove ${runName(run)} from the comparison`, title: "Remove" },
          "×",
        ),
      );
    }),
  );
}

/** @param {string} colour @param {import("./dom.js").Child} text */
function entry(colour, text) {
  return style(h("span", { class: "entry" }, text), { "--series": `var(${colour})` });
}
