/** Preference pairs: the chosen and the rejected completion side by side, and by how much the chosen one is better. */

import { h, style } from "./dom.js";
import { plural, score, signed } from "./format.js";
import { link, toEpisode } from "./links.js";
import { contentOf, oneLine, reasoningOf, toolCallsOf } from "./messages.js";

/** @typedef {Record<string, any>} Pair of /api/group and /api/episode */

const FIRST = 20;

/** @param {string} run @param {Pair[]} pairs @param {string} [here] the episode that the page is about */
export function pairList(run, pairs, here) {
  if (!pairs?.length) return null;
  const trained = pairs.filter((pair) => !pair.dropped).length;
  const rest = pairs.slice(FIRST);
  return h(
    "section",
    { class: "section pairs", "aria-label": "Preference pairs" },
    h("h2", {}, "Preference pairs ", h("span", { class: "muted" }, `${trained} of ${plural(pairs.length, "pair")} trained`)),
    pairs.slice(0, FIRST).map((pair) => drawn(run, pair, here)),
    rest.length
      ? h("details", {}, h("summary", {}, `${rest.length} more`), rest.map((pair) => drawn(run, pair, here)))
      : null,
  );
}

/** @param {string} run @param {Pair} pair @param {string} [here] */
function drawn(run, pair, here) {
  const number = pair.pair.split("/").at(-1);
  const compared = pair.chosen.episode === pair.rejected.episode ? "score" : "reward"; // candidates of a turn, or episodes
  return h(
    "article",
    { class: `pair${pair.dropped ? " left-out" : ""}`, id: pairId(pair.pair), "aria-label": number },
    h(
      "header",
      {},
      h("strong", {}, number),
      h("span", { class: "num" }, `difference in ${compared} ${signed(pair.margin)}`),
      pair.dropped ? h("span", { class: "outcome left-out" }, `○ ${pair.dropped}`) : null,
    ),
    style(
      h("div", { class: "side-by-side", tabindex: "0", role: "region", "aria-label": `${number}, side by side` }, [
        side(run, "chosen", pair.chosen, compared, here),
        side(run, "rejected", pair.rejected, compared, here),
      ]),
      { "--count": 2 },
    ),
  );
}

/** @param {string} run @param {string} name @param {any} of @param {string} compared what its score is @param {string} [here] */
function side(run, name, of, compared, here) {
  const [call] = of.calls;
  const generation = of.episode.split("/").at(-2);
  const label = [here === of.episode ? null : `episode ${generation}`, call == null ? null : `call ${of.calls.join(", ")}`];
  return h(
    "div",
    { class: `cell ${name}` },
    h(
      "span",
      { class: "role" },
      h("span", { class: `tag ${name}` }, name),
      " ",
      link(toEpisode(run, of.episode, { call }), {}, label.filter(Boolean).join(", ") || "this episode"),
      h("span", { class: "num muted" }, ` ${compared} ${score(of.score)}`),
    ),
    of.messages.length
      ? of.messages.map((/** @type {any} */ message) => [reasoningOf(message), contentOf(message), toolCallsOf(message)])
      : h("p", { class: "muted" }, "as text, of no recorded call"),
  );
}

/** @param {string} pair */
const pairId = (pair) => `pair-${pair.split("/").slice(-4).join("-").replaceAll(" ", "-")}`;

/** What a call or an episode is trained as. @param {string[] | any[] | undefined} sides names, or entries with `side` */
export function sideTags(sides) {
  const kept = (sides ?? []).filter((each) => !each.dropped).map((each) => each.side ?? each);
  return [...new Set(kept)].map((name) => h("span", { class: `tag ${name}` }, name));
}

/** The question and the expected answer of a dataset row. @param {{question?: string | null, expected?: string | null} | undefined} row */
export function aboutRow(row) {
  if (row?.question == null && row?.expected == null) return null;
  const entry = (/** @type {string} */ name, /** @type {string | null | undefined} */ text) =>
    text == null
      ? null
      : h(
          "div",
          {},
          h("dt", {}, name),
          h("dd", { class: "pre" }, text.length > 400 ? h("details", {}, h("summary", {}, oneLine(text, 200)), text) : text),
        );
  return h("dl", { class: "about-row" }, entry("Question", row.question), entry("Expected", row.expected));
}
