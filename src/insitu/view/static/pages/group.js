/** The episodes of one row in one epoch: rewards, advantages, what differs, and the row through the epochs. */

import { get } from "../api.js";
import { fill, h } from "../dom.js";
import { ABSENT, compact, count, duration, isNumber, score, signed } from "../format.js";
import { address, episodeLabel, link, rowLabel, toEpisode, toGroup, toRun } from "../links.js";
import { loadParts } from "../longtext.js";
import { contentText, oneLine } from "../messages.js";
import { aboutRow, pairList, sideTags } from "../pairs.js";
import { fact, outcomeBadge, problems } from "../parts.js";
import { rowHistory } from "../rowhistory.js";
import { messagesOf, sideBySide } from "../sidebyside.js";
import { bar, divergingBar, rewardDots } from "../sparkline.js";

/** @typedef {Record<string, any>} Answer the answer of /api/group */

const MOST_COLUMNS = 6;

/** @param {import("../app.js").Context} context @returns {Promise<import("../app.js").Page>} */
export async function groupPage({ parameters, signal, go }) {
  const run = parameters.get("run") ?? ".";
  const key = { epoch: Number(parameters.get("epoch")), row_id: parameters.get("row") ?? "" };
  const read = () => get("group", { run, epoch: key.epoch, row: key.row_id }, signal);
  let answer = await read();
  loadParts((path, offset) =>
    get("part", { run, epoch: key.epoch, row: key.row_id, path: JSON.stringify(path), offset }, signal),
  );
  let drawn = JSON.stringify(answer);
  let chosen = chosenAtFirst(answer.episodes, parameters.getAll("show"));
  let focused = -1;
  const head = h("div");
  const list = h("div");
  const pairs = h("div");
  const beside = h("section", { class: "section", "aria-label": "Side by side" });

  const drawBeside = () => {
    const episodes = chosen
      .map((name) => answer.episodes.find((/** @type {any} */ each) => each.episode === name))
      .filter(Boolean);
    fill(
      beside,
      h("h2", {}, episodes.length > 1 ? "Side by side" : "Dialogue"),
      episodes.length
        ? sideBySide(run, episodes, bounds(answer.episodes).advantage)
        : h("p", { class: "empty" }, "Choose episodes in the list to compare them."),
    );
  };
  const choose = (/** @type {string} */ name, /** @type {boolean} */ on) => {
    chosen = on ? [...chosen, name].slice(-MOST_COLUMNS) : chosen.filter((each) => each !== name);
    const show = chosen.map((each) => generation(answer, each));
    history.pushState({}, "", address("/group", { run, epoch: key.epoch, row: key.row_id, show }));
    drawList();
    drawBeside();
  };
  const drawList = () => fill(list, episodeTable(run, answer, chosen, choose));
  const draw = () => {
    fill(head, header(run, key, answer));
    fill(pairs, pairList(run, answer.pairs));
    drawList();
    drawBeside();
  };
  draw();
  const move = (/** @type {number} */ by) => {
    const links = /** @type {HTMLElement[]} */ ([...list.querySelectorAll("tbody a")]);
    focused = Math.max(0, Math.min(links.length - 1, focused + by));
    links[focused]?.focus();
  };
  const to = (/** @type {any} */ target) => () => target && go(toGroup(run, target));
  return {
    title: `${rowLabel(key.row_id, "Row")}, epoch ${key.epoch}`,
    crumbs: [
      ["Runs", "/runs"],
      [run === "." ? "run" : run, toRun(run)],
      [`epoch ${key.epoch}`, address("/run", { run, epoch: key.epoch })],
      [rowLabel(key.row_id), null],
    ],
    runs: [run],
    node: h("div", { class: "page" }, head, list, pairs, beside),
    update: async () => {
      answer = await read();
      const now = JSON.stringify(answer);
      if (now !== drawn) draw();
      drawn = now;
    },
    shortcuts: [
      { keys: ["j"], what: "next episode in the list", run: () => move(1) },
      { keys: ["k"], what: "previous episode in the list", run: () => move(-1) },
      { keys: ["J", "n"], what: "next group", run: () => to(answer.next)() },
      { keys: ["K", "p"], what: "previous group", run: () => to(answer.previous)() },
      { keys: ["]"], what: "the same row in the next epoch", run: () => to(nearEpoch(answer, key, 1))() },
      { keys: ["["], what: "the same row in the previous epoch", run: () => to(nearEpoch(answer, key, -1))() },
      { keys: ["u"], what: "the run", run: () => go(toRun(run)) },
    ],
  };
}

/** The best and the worst episode, or those of the address by generation. @param {any[]} episodes @param {string[]} asked */
function chosenAtFirst(episodes, asked) {
  const found = episodes.filter((each) => asked.includes(String(each.generation))).map((each) => each.episode);
  if (found.length) return found;
  const { best, worst } = ends(episodes);
  return best ? [best, worst].filter(Boolean).map((each) => each.episode) : episodes.slice(0, 1).map((each) => each.episode);
}

/** By advantage, as far as it is known, or else by reward. @param {any} a @param {any} b */
const better = (a, b) =>
  isNumber(a.advantage) && isNumber(b.advantage) && a.advantage !== b.advantage
    ? b.advantage - a.advantage
    : (b.reward ?? -Infinity) - (a.reward ?? -Infinity) || a.generation - b.generation;

/** The episodes with the highest and the lowest advantage, or else reward. @param {any[]} episodes */
function ends(episodes) {
  const trained = episodes.filter((each) => isNumber(each.advantage));
  const scored = (trained.length > 1 ? trained : episodes.filter((each) => isNumber(each.reward))).toSorted(better);
  return { best: scored[0] ?? null, worst: scored.length > 1 ? scored[scored.length - 1] : null };
}

/** @param {Answer} answer @param {string} name */
const generation = (answer, name) =>
  answer.episodes.find((/** @type {any} */ each) => each.episode === name)?.generation;

/** @param {Answer} answer @param {{epoch: number, row_id: string}} key @param {number} by */
function nearEpoch(answer, key, by) {
  const epochs = answer.epochs.map((/** @type {any} */ each) => each.epoch);
  const epoch = epochs[epochs.indexOf(key.epoch) + by];
  return epoch == null ? null : { epoch, row_id: key.row_id };
}

/** @param {any[]} episodes */
function bounds(episodes) {
  const rewards = episodes.map((each) => each.reward).filter(isNumber);
  const advantages = episodes.map((each) => Math.abs(each.advantage ?? 0));
  return {
    low: Math.min(0, ...rewards),
    high: Math.max(...rewards, 0),
    advantage: Math.max(1, ...advantages),
    rewards,
  };
}

/** @param {string} run @param {{epoch: number, row_id: string}} key @param {Answer} answer */
function header(run, key, answer) {
  const { rewards } = bounds(answer.episodes);
  const mean = rewards.length ? rewards.reduce((sum, each) => sum + each, 0) / rewards.length : null;
  const std =
    mean == null || rewards.length < 2
      ? null
      : Math.sqrt(rewards.reduce((sum, each) => sum + (each - mean) ** 2, 0) / (rewards.length - 1));
  const step = (/** @type {any} */ target, /** @type {string} */ text, /** @type {string} */ label) =>
    target
      ? link(toGroup(run, target), { class: "button", "aria-label": label, title: label }, text)
      : h("span", { class: "button off", "aria-hidden": "true" }, text);
  const dropped = answer.episodes.filter((/** @type {any} */ each) => each.status === "dropped").length;
  return [
    h(
      "header",
      { class: "page-head" },
      h(
        "div",
        { class: "title-line" },
        h("h1", {}, rowLabel(key.row_id, "Row"), h("span", { class: "muted" }, `, epoch ${key.epoch}`)),
        h(
          "nav",
          { class: "steps", "aria-label": "Other groups" },
          step(answer.previous, "‹ group", "Previous group (K)"),
          step(answer.next, "group ›", "Next group (J)"),
          step(nearEpoch(answer, key, -1), "‹ epoch", "The same row in the previous epoch ([)"),
          step(nearEpoch(answer, key, 1), "epoch ›", "The same row in the next epoch (])"),
        ),
      ),
    ),
    problems(answer.problems),
    aboutRow(answer.row),
    h(
      "div",
      { class: "group-head" },
      h(
        "dl",
        { class: "facts" },
        fact(
          "Mean reward",
          score(mean),
          rewards.length
            ? rewardDots(rewards, [Math.min(...rewards), Math.max(...rewards)])
            : "no episode has a reward",
        ),
        fact("Deviation", score(std), std === 0 ? "equal rewards teach nothing" : null),
        fact(
          "Episodes",
          count(answer.episodes.length),
          dropped ? `${dropped} left out of training` : "all of them trainable",
        ),
      ),
      answer.epochs?.length > 1
        ? h(
            "figure",
            { class: "history" },
            h("figcaption", {}, "This row through the epochs"),
            rowHistory(run, key.row_id, answer.epochs, key.epoch),
          )
        : null,
    ),
  ];
}

/** @param {string} run @param {Answer} answer @param {string[]} chosen @param {(name: string, on: boolean) => void} choose */
function episodeTable(run, answer, chosen, choose) {
  const { low, high, advantage } = bounds(answer.episodes);
  const sorted = answer.episodes.toSorted(better);
  const { best, worst } = ends(answer.episodes);
  const rows = sorted.map((/** @type {any} */ episode) => {
    const tick = /** @type {HTMLInputElement} */ (
      h("input", {
        type: "checkbox",
        checked: chosen.includes(episode.episode),
        "aria-label": `Show episode ${episode.generation} side by side`,
        onchange: () => choose(episode.episode, tick.checked),
      })
    );
    return h(
      "tr",
      {},
      h("td", { class: "tick" }, tick),
      h(
        "th",
        { scope: "row" },
        link(toEpisode(run, episode.episode), {}, episodeLabel(episode)),
        worst && (episode === best || episode === worst)
          ? h("span", { class: "muted small" }, episode === best ? " best" : " worst")
          : null,
      ),
      h(
        "td",
        { class: "n" },
        isNumber(episode.reward)
          ? [bar(episode.reward - low, high - low), h("span", { class: "num" }, score(episode.reward))]
          : h("span", { class: "num" }, ABSENT),
      ),
      h(
        "td",
        { class: "n" },
        isNumber(episode.advantage)
          ? [divergingBar(episode.advantage, advantage), h("span", { class: "num" }, signed(episode.advantage, 2))]
          : h("span", { class: "num" }, ABSENT),
      ),
      h("td", { class: "w-2" }, outcomeBadge(episode), " ", sideTags(episode.sides)),
      h("td", { class: "n num w-2" }, count(episode.calls)),
      h("td", { class: "n num w-2" }, compact(episode.sampled_tokens)),
      h("td", { class: "n num w-3" }, duration(episode.seconds)),
      h("td", { class: "ending w-3" }, ending(episode)),
    );
  });
  return h(
    "div",
    { class: rows.length > 12 ? "scroll-y" : "" },
    h(
      "table",
      { class: "plain episodes" },
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          h("th", { class: "tick" }, h("span", { class: "sr" }, "Side by side")),
          h("th", { scope: "col" }, "Episode"),
          h("th", { scope: "col", class: "n" }, "Reward"),
          h("th", { scope: "col", class: "n", title: "mean over its trained tokens" }, "Advantage"),
          h("th", { scope: "col", class: "w-2" }, "Outcome"),
          h("th", { scope: "col", class: "n w-2" }, "Calls"),
          h("th", { scope: "col", class: "n w-2" }, "Tokens"),
          h("th", { scope: "col", class: "n w-3" }, "Time"),
          h("th", { scope: "col", class: "w-3" }, "Ends with"),
        ),
      ),
      h("tbody", {}, rows),
    ),
  );
}

/** What the episode's last completion says. @param {any} episode */
function ending(episode) {
  if (episode.outcome === "failed") return h("span", { class: "bad" }, oneLine(episode.error ?? "", 120));
  const last = messagesOf(episode).findLast(
    (/** @type {any} */ message) => message.call != null || message.role === "assistant",
  );
  return last ? oneLine(contentText(last), 120) : "";
}
