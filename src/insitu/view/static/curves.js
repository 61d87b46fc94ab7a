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
  "kl",
  "entropy",
  "frac_reward_zero_std",
  "completions_mean_length",
  "loss",
  "grad_norm",
];

/** The charts of a page. */
export class Curves {
  /** @param {(epoch: number) => void} pick */
  constructor(pick) {
    this.pick = pick;
    this.node = h("div", { class: "curves" });
    /** @type {Map<string, ChartCard>} */
    this.cards = new Map();
    this.layout = "";
  }

  /** @param {Details[]} runs the first is the run of the page */
  update(runs) {
    const several = runs.length > 1;
    const groups = metricGroups(runs.flatMap((run) => run.epochs));
    const layout = JSON.stringify([
      runs.map((run) => run.run),
      groups.map(([name, metrics]) => [name, metrics.map(({ key }) => key)]),
      hasScores(runs),
    ]);
    if (layout !== this.layout) this.build(layout, runs, groups);
    this.cards.get("score")?.update(several ? heldOut(runs) : scoreAndReward(runs[0]));
    this.cards.get("reward")?.update(rewards(runs));
    for (const metric of groups.flatMap(([, metrics]) => metrics)) {
      this.cards.get(metric.key)?.update(
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
        this.card("score", several ? "Held-out score" : "Held-out score and training reward", {
          help: "The band is the 95 % confidence interval of the held-out score.",
          format: score,
          tall: true,
        }),
      );
    if (several || !hasScores(runs))
      lead.push(
        this.card("reward", "Training reward", {
          help: "mean over the episodes of an epoch",
          format: score,
          tall: true,
        }),
      );
    const closed = { Other: true };
    fill(
      this.node,
      several ? runLegend(runs) : scoreLegend(runs[0]),
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

/** @param {Details[]} runs */
function hasScores(runs) {
  return runs.some((run) => run.validations.some((/** @type {any} */ each) => isNumber(each.avg_reward)));
}

/** @param {Details} run @returns {Series} */
function scores(run) {
  const scored = run.validations.filter((/** @type {any} */ each) => isNumber(each.avg_reward));
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

/** @param {Details} run */
const scoreAndReward = (run) => [reward(run), scores(run)];

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
    entry("--amber", "training reward"),
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
