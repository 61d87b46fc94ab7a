/** What the page of an episode says around its dialogue: its reward, cost and failure, its scores and its answer. */

import { h } from "./dom.js";
import { ABSENT, count, duration, isNumber, plain, plural, score, signed } from "./format.js";
import { episodeLabel, link, rowLabel, toEpisode, toGroup } from "./links.js";
import { longJson, longText } from "./longtext.js";
import { aboutRow, sideTags } from "./pairs.js";
import { definitions, fact, failure, outcomeBadge, problems } from "./parts.js";
import { rewardDots } from "./sparkline.js";

/** @typedef {Record<string, any>} Answer the answer of /api/episode */

/** @param {string} run @param {Answer} answer */
export function head(run, answer) {
  const { record } = answer;
  const step = (/** @type {string | null} */ target, /** @type {string} */ text, /** @type {string} */ label) =>
    target
      ? link(toEpisode(run, target), { class: "button", "aria-label": label, title: label }, text)
      : h("span", { class: "button off", "aria-hidden": "true" }, text);
  return h(
    "header",
    { class: "page-head" },
    h(
      "div",
      { class: "title-line" },
      h("h1", {}, rowLabel(record.row_id, "Row"), h("span", { class: "muted" }, `, ${episodeLabel(record)}`)),
      h(
        "nav",
        { class: "steps", "aria-label": "Other episodes" },
        step(answer.previous, "‹ episode", "Previous episode (k)"),
        step(answer.next, "episode ›", "Next episode (j)"),
        step(answer.previous_epoch, "‹ epoch", "The same row in the previous epoch ([)"),
        step(answer.next_epoch, "epoch ›", "The same row in the next epoch (])"),
      ),
    ),
    record.outcome === "failed"
      ? failure(`The episode failed: ${record.reason ?? "no reason is recorded"}`, record.error)
      : record.error
        ? failure(`No reward: ${record.reason ?? "no reason is recorded"}`, record.error)
        : null,
    problems(answer.problems),
    aboutRow(answer.row),
    h(
      "dl",
      { class: "facts" },
      fact("Reward", score(record.reward), comparedWithGroup(answer)),
      answer.sides?.length
        ? fact("Trained as", sideTags(answer.sides).length ? sideTags(answer.sides) : ABSENT, trainedText(answer))
        : fact("Advantage", advantage(answer), trainedText(answer)),
      fact("Outcome", outcomeBadge({ ...record, dropped: answer.dropped }), answer.status ?? null),
      fact(
        "Calls",
        count(record.calls),
        record.failed_requests && Object.keys(record.failed_requests).length
          ? Object.entries(record.failed_requests)
              .map(([reason, n]) => `${n} failed: ${reason}`)
              .join(", ")
          : null,
      ),
      fact("Sampled tokens", count(record.sampled_tokens), `after ${plural(record.prompt_tokens, "prompt token")}`),
      fact(
        "Time",
        duration(record.seconds),
        `weights ${(record.policy_versions ?? []).map((/** @type {any} */ version) => `v${version}`).join(", ") || "unknown"}`,
      ),
    ),
  );
}

/** @param {Answer} answer */
function comparedWithGroup(answer) {
  const rewards = (answer.group?.episodes ?? []).map((/** @type {any} */ each) => each.reward).filter(isNumber);
  if (!rewards.length) return null;
  const mean =
    rewards.reduce((/** @type {number} */ sum, /** @type {number} */ each) => sum + each, 0) / rewards.length;
  return [rewardDots(rewards, [Math.min(...rewards), Math.max(...rewards)]), `group mean ${score(mean)}`];
}

/** @param {Answer} answer */
function advantage(answer) {
  const values = answer.calls
    .map((/** @type {any} */ call) => call.advantage)
    .filter((/** @type {any} */ value) => value != null);
  if (!values.length) return ABSENT;
  const [low, high] = [Math.min(...values), Math.max(...values)];
  return low === high ? signed(low) : `${signed(low, 2)} … ${signed(high, 2)}`;
}

/** @param {Answer} answer */
function trainedText(answer) {
  const trained = answer.calls.filter((/** @type {any} */ call) => call.trained).length;
  return (
    answer.training ?? (answer.calls.length ? `${trained} of ${plural(answer.calls.length, "call")} trained` : null)
  );
}

/** @param {string} run @param {Answer} answer */
export function side(run, answer) {
  const { record } = answer;
  const scores = Object.entries(record.scores ?? {});
  const rescores = answer.rescores ?? [];
  return [
    scores.length || record.reasoning != null
      ? h(
          "section",
          { "aria-label": "Scores" },
          h("h2", {}, "Scores"),
          scores.length ? definitions(scores.map(([name, value]) => [name, score(value)])) : null,
          record.reasoning != null
            ? h(
                "div",
                { class: "judgement" },
                h("span", { class: "small muted" }, "The evaluator's reasoning"),
                typeof record.reasoning === "string"
                  ? longText(record.reasoning, "text", record.$cut?.reasoning)
                  : longJson(record.reasoning),
              )
            : null,
        )
      : null,
    rescores.length
      ? h(
          "section",
          { "aria-label": "Scored later" },
          h("h2", {}, "Scored later"),
          definitions(rescores.map((/** @type {any} */ each) => [each.evaluator, each.error ?? score(each.score)])),
        )
      : null,
    record.output != null
      ? h(
          "section",
          { "aria-label": "Answer" },
          h("h2", {}, "Answer"),
          typeof record.output === "string" ? longText(record.output, "text", record.$cut?.output) : longJson(record.output),
        )
      : null,
    record.candidates?.length
      ? h(
          "section",
          { "aria-label": "Candidates" },
          h("h2", {}, `Candidates (${record.candidates.length})`),
          candidates(record.candidates),
        )
      : null,
    h(
      "section",
      { "aria-label": "Name" },
      h("h2", {}, "Episode"),
      h("p", { class: "mono small break" }, record.episode),
      record.source
        ? h("p", { class: "small" }, "recorded in ", h("span", { class: "mono break" }, record.source))
        : null,
      h("p", {}, link(toGroup(run, record), {}, "Compare with its group"), " · ", copyLink()),
    ),
  ];
}

/** @param {any[]} all */
function candidates(all) {
  return h(
    "ol",
    { class: "candidates" },
    all
      .slice(0, 200)
      .map((each) =>
        h(
          "li",
          {},
          h("span", { class: "num" }, score(each.score)),
          " ",
          h("span", { class: "muted" }, `turn ${each.turn_index ?? each.turn_id}`),
          " ",
          h("span", { class: "mono" }, plain(each.response)),
        ),
      ),
  );
}

function copyLink() {
  const button = h(
    "button",
    {
      type: "button",
      class: "as-link",
      onclick: async () => {
        await navigator.clipboard?.writeText(location.href);
        button.textContent = "Copied";
      },
    },
    "Copy the link",
  );
  return button;
}
