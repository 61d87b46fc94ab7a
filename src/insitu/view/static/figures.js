/** Which figures of a run are bad, and what its console warned of. */

import { count, isNumber, percent } from "./format.js";

/** @typedef {Record<string, any>} Line of training_metrics.jsonl */

/** A share of trained episodes below which, and of answers cut off from which, a figure is bad. */
const FEW_TRAINED = 0.5;
export const OFTEN_CUT = 0.1;
/** Why the settings of a run leave episodes or pairs out, with which nothing is wrong. */
const BY_CHOICE = ["not_best", "max_pairs", "curriculum", "subsample"];

/** The share of an epoch's episodes, or pairs, that were trained. @param {Line | undefined} line */
export const trainedShare = (line) => (line?.num_trajectories ? line.filtered_trajectories / line.num_trajectories : null);

/** Whether few of the episodes, or pairs, were trained that the settings do not leave out. @param {Line | undefined} line */
export function trainsFew(line) {
  const chosen = BY_CHOICE.map((reason) => line?.dropped?.[reason] ?? 0);
  const meant = (line?.num_trajectories ?? 0) - chosen.reduce((sum, each) => sum + each, 0);
  return meant > 0 && line?.filtered_trajectories / meant < FEW_TRAINED;
}

/**
 * What is wrong with the figures of an epoch, a sentence each. Warnings of an epoch that trained nothing say why.
 * @param {Line | undefined} line @param {boolean} marked with those that the page of a run marks @returns {string[]}
 */
function badFigures(line, marked) {
  if (!line || (line.filtered_trajectories === 0 && line.warnings?.length)) return [];
  const found = [];
  const [cut, equal] = [line.completions_clipped_ratio, line.frac_reward_zero_std];
  if (isNumber(equal) && equal > 0.5) found.push(`${percent(equal)} of the groups have equal rewards, which teach nothing`);
  else if (marked && trainsFew(line))
    found.push(`${percent(trainedShare(line))} of the ${line.pairs == null ? "episodes with a reward" : "pairs"} were trained`);
  if (marked && isNumber(cut) && cut >= OFTEN_CUT) found.push(`${percent(cut)} of the answers were cut off at max_tokens or the model's limit`);
  if (line.greedy_groups) found.push(`${count(line.greedy_groups)} of ${count(line.num_groups)} groups were sampled at temperature 0`);
  return found;
}

/**
 * Those of the last epoch, and what the console said of it and the one before, each once.
 * @param {Line[]} epochs @param {boolean} [marked] @returns {string[]}
 */
export function warnings(epochs, marked = true) {
  const last = epochs.at(-1);
  /** @type {Map<string, number[]>} */
  const found = new Map(badFigures(last, marked).map((text) => [text, [last?.epoch]]));
  for (const line of epochs.slice(-2))
    for (const text of line.warnings ?? []) found.set(text, [...(found.get(text) ?? []), line.epoch]);
  return [...found].map(([text, of]) => `${of.length > 1 ? "epochs" : "epoch"} ${of.join(" and ")}: ${text}`);
}
