/** Which figures of a run are bad, and what its console warned of. */

import { count, isNumber, percent } from "./format.js";

/** @typedef {Record<string, any>} Line of training_metrics.jsonl */

/** A share of trained episodes below which, and of answers cut off from which, a figure is bad. */
export const [FEW_TRAINED, OFTEN_CUT] = [0.5, 0.1];

/** The share of an epoch's episodes, or pairs, that were trained. @param {Line | undefined} line */
export const trainedShare = (line) => (line?.num_trajectories ? line.filtered_trajectories / line.num_trajectories : null);

/** What is wrong with the figures of an epoch, a sentence each. @param {Line | undefined} line @returns {string[]} */
function badFigures(line) {
  if (!line) return [];
  const found = [];
  const [trained, cut] = [trainedShare(line), line.completions_clipped_ratio];
  if (isNumber(trained) && trained < FEW_TRAINED) found.push(`${percent(trained)} of what has a reward was trained`);
  if (isNumber(cut) && cut >= OFTEN_CUT) found.push(`${percent(cut)} of the answers were cut off at max_tokens or the model's limit`);
  if (isNumber(line.frac_reward_zero_std) && line.frac_reward_zero_std > 0.5)
    found.push(`${percent(line.frac_reward_zero_std)} of the groups have equal rewards, which teach nothing`);
  if (line.greedy_groups) found.push(`${count(line.greedy_groups)} of ${count(line.num_groups)} groups were sampled at temperature 0`);
  return found;
}

/** Those of the last epoch, and what the console said of it and the one before. @param {Line[]} epochs @returns {string[]} */
export function warnings(epochs) {
  const said = epochs.slice(-2).flatMap((line) => (line.warnings ?? []).map((/** @type {string} */ text) => `epoch ${line.epoch}: ${text}`));
  const last = epochs.at(-1);
  return [...badFigures(last).map((text) => `epoch ${last?.epoch}: ${text}`), ...said];
}
