/** What the numbers of `training_metrics.jsonl` mean, and how they are drawn. */

import { compact, duration, isNumber, number, percent, score } from "./format.js";

/**
 * `read` takes the value from a line; `format` prints it.
 * @typedef {{key: string, title: string, help: string, sparse?: boolean, read: (line: any) => number | null, format: (value: any) => string, from_zero?: boolean}} Metric
 */

/** @param {any} value */
const perSecond = (value) => `${compact(value)}/s`;
/** @param {any} value */
const inTokens = (value) => number(value);

const IMPLICIT =
  "beta x log-ratio of the policy to the reference, mean over the pairs (KTO: over the episodes of this side); not the reward that the evaluator gave";

/** @type {[string, [string, string, string, ((value: any) => string)?, boolean?][]][]} */
const GROUPS = [
  [
    "Training",
    [
      ["loss", "Loss", "mean over the optimizer steps of the epoch's job"],
      [
        "kl",
        "KL to the start, nats per token",
        "divergence from the reference policy, by the configured estimator (KTO: the reference point of its loss, of whole answers). In the first epochs of a run that learns well it may be in the tens: a few tokens that a job has made all but impossible dominate the mean",
      ],
      [
        "reference_gap",
        "Distance from the start, nats per token",
        "mean absolute difference of the log-probabilities to those of the starting weights: beside KL, a figure that no single token dominates",
      ],
      ["teacher_kl", "KL to the teacher, nats per token", "rollout minus teacher, mean over the trained tokens"],
      ["entropy", "Entropy, nats per token", "of the policy's distribution; towards 0 it stops exploring"],
      ["grad_norm", "Gradient norm", "before clipping, mean over the steps", number, true],
      [
        "clip_fraction",
        "Clip fraction",
        "share of trained tokens whose ratio lies outside the bounds of the objective",
        percent,
        true,
      ],
      ["learning_rate", "Learning rate", "of the last step", number, true],
      ["ratio_mean", "Mean ratio at the first step", "learner compared with sampler; should be 1"],
      ["effective_sample_size", "Effective sample size", "of the first step, as a share of its tokens", percent, true],
      ["masked_share", "Masked share", "trained tokens whose loss a mask made 0", percent, true],
      [
        "logprob_gap",
        "Log-probability gap",
        "learner compared with sampler at the first step; should be near 0",
        number,
        true,
      ],
    ],
  ],
  [
    "Preferences",
    [
      ["rewards/margins", "Implicit reward, margin", "that of the chosen side minus that of the rejected side"],
      [
        "rewards/accuracies",
        "Implicit reward, accuracy",
        "share of the pairs whose chosen side has the higher implicit reward",
        percent,
        true,
      ],
      ["rewards/chosen", "Implicit reward, chosen", IMPLICIT],
      ["rewards/rejected", "Implicit reward, rejected", IMPLICIT],
      ["logps/chosen", "Log-probability, chosen", "of a side, mean"],
      ["logps/rejected", "Log-probability, rejected", "of a side, mean"],
      ["sft_loss", "SFT loss", "per token of the chosen sides"],
      ["pairs", "Pairs", "of the epoch's job", number, true],
    ],
  ],
  [
    "Episodes",
    [
      ["reward_std", "Reward deviation within a group", "standard deviation, averaged over the groups", number, true],
      [
        "frac_reward_zero_std",
        "Groups that teach nothing",
        "all their advantages are 0, or, for pairs, all rewards of their episodes are equal",
        percent,
        true,
      ],
      ["completions_mean_length", "Answer length, tokens", "mean of the trained answers", inTokens, true],
      ["completions_clipped_ratio", "Answers cut off", "at max_tokens or the model's limit", percent, true],
      ["num_episodes", "Episodes with a reward", "of the epoch", compact, true],
      ["curriculum_percentile", "Share of the curriculum", "of the examples that are included", percent, true],
    ],
  ],
];

/** With those during a streamed collection. @param {any} line */
export const jobSeconds = (line) => (line.seconds?.train ? line.seconds.train + (line.seconds.ahead ?? 0) : null);

/** @type {[string, string, (line: any) => number | null, (value: any) => string][]} */
const SPEED = [
  ["Collecting", "seconds of the epoch", (line) => line.seconds?.collect ?? null, duration],
  ["Training", "seconds of the epoch's job, after a streamed collection", (line) => line.seconds?.train ?? null, duration],
  ["Validating", "seconds that the epoch waited for it", (line) => line.seconds?.validate || null, duration],
  [
    "Episodes collected per second",
    "with a reward",
    (line) => ratio(line.num_episodes ?? line.num_trajectories, line.seconds?.collect),
    perSecond,
  ],
  ["Tokens trained per second", "of the epoch's job", (line) => ratio(line.tokens, jobSeconds(line)), perSecond],
  ["Sampler idle", "of the epoch, without a model call", (line) => line.seconds?.idle?.sampler ?? null, duration],
  ["Learner idle", "of the epoch, without a training job", (line) => line.seconds?.idle?.learner ?? null, duration],
  [
    "Groups in flight",
    "of later epochs, when the epoch's job was submitted",
    (line) => line.seconds?.groups_in_flight ?? null,
    compact,
  ],
  ["Age of the episodes", "mean, in training jobs since their weights were the newest", meanAge, number],
];

const KNOWN = new Set([
  ...GROUPS.flatMap(([, metrics]) => metrics.map(([key]) => key)),
  "epoch",
  "avg_reward",
  "min_reward",
  "max_reward",
  "num_trajectories",
  "num_groups",
  "greedy_groups",
  "stray_completions",
  "abandoned_attempts",
  "filtered_trajectories",
  "filtered_groups",
  "policy_version",
  "sampled_version",
  "tokens",
  "rows",
  "steps",
  "episodes",
]);

/** @param {any} line */
function meanAge(line) {
  const ages = Object.entries(line.age ?? {}).map(([age, episodes]) => [Number(age), Number(episodes)]);
  const episodes = ages.reduce((sum, [, count]) => sum + count, 0);
  return ratio(
    ages.reduce((sum, [age, count]) => sum + age * count, 0),
    episodes,
  );
}

/** @param {any} amount @param {any} seconds */
function ratio(amount, seconds) {
  return isNumber(amount) && seconds ? amount / seconds : null;
}

/**
 * The metrics that at least one of the lines has, in groups.
 * @param {any[]} lines @returns {[string, Metric[]][]}
 */
export function metricGroups(lines) {
  const has = (/** @type {Metric} */ metric) => lines.some((line) => isNumber(metric.read(line)));
  const groups = GROUPS.map(
    ([name, metrics]) =>
      /** @type {[string, Metric[]]} */ ([
        name,
        metrics.map(([key, title, help, format, from_zero]) => ({
          key,
          title,
          help,
          format: format ?? number,
          from_zero,
          read: (line) => line[key] ?? null,
        })),
      ]),
  );
  const evaluators = [...new Set(lines.flatMap((line) => Object.keys(line.scores ?? {})))];
  const scores =
    evaluators.length > 1
      ? evaluators.map((name) => ({
          key: `scores.${name}`,
          title: `Score: ${name}`,
          help: "mean of an evaluator over the training episodes",
          format: score,
          read: (/** @type {any} */ line) => line.scores?.[name] ?? null,
        }))
      : [];
  groups[2][1].unshift(...scores);
  groups.push([
    "Speed",
    SPEED.map(([title, help, read, format]) => ({
      key: title,
      title,
      help,
      read,
      format,
      from_zero: true,
      sparse: title === "Validating",
    })),
  ]);
  const others = [
    ...new Set(lines.flatMap((line) => Object.keys(line).filter((key) => isNumber(line[key]) && !KNOWN.has(key)))),
  ];
  groups.push([
    "Other",
    others.map((key) => ({ key, title: key, help: "", format: number, read: (line) => line[key] ?? null })),
  ]);
  return groups
    .map(([name, metrics]) => /** @type {[string, Metric[]]} */ ([name, metrics.filter(has)]))
    .filter(([, metrics]) => metrics.length);
}
