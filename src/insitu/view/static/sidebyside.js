/** Dialogues of a group side by side: what they share once, and from where they differ message by message. */

import { diffWords } from "./diff.js";
import { h, style } from "./dom.js";
import { plural, score, signed } from "./format.js";
import { episodeLabel, link, toEpisode } from "./links.js";
import { foldLong } from "./longtext.js";
import { contentOf, messageText, reasoningOf, toolCallsOf, toolResult } from "./messages.js";
import { outcomeBadge } from "./parts.js";
import { advantageClass } from "./tokens.js";

/** @typedef {Record<string, any>} Episode of /api/group */

const LONGEST = 20000;

/** All messages of an episode; the first of each further conversation is marked. @param {Episode} episode */
export function messagesOf(episode) {
  const messages = episode.dialogue ?? [];
  return messages.map((/** @type {any} */ message, /** @type {number} */ index) => ({
    ...message,
    begins: index > 0 && message.conversation !== messages[index - 1].conversation,
  }));
}

/**
 * The first episode is what the others are compared with.
 * @param {string} run @param {Episode[]} episodes @param {number} bound the largest advantage
 */
export function sideBySide(run, episodes, bound) {
  const dialogues = episodes.map(messagesOf);
  const texts = dialogues.map((messages) =>
    messages.map((/** @type {any} */ message) => `${message.role}\n${messageText(message)}`),
  );
  const shortest = Math.min(...texts.map((each) => each.length));
  let shared = 0;
  while (shared < shortest && texts.every((each) => each[shared] === texts[0][shared])) shared++;
  const length = Math.max(...texts.map((each) => each.length));
  const rows = [];
  for (let index = shared; index < length; index++) {
    rows.push(
      dialogues.map((messages, column) => {
        const message = messages[index];
        if (!message) return h("div", { class: "cell absent" }, index === messages.length ? "ended" : "");
        const other = column ? dialogues[0][index] : episodes.length === 2 ? dialogues[1][index] : null;
        return cell(message, other, column === 0);
      }),
    );
  }
  const grid = style(
    h(
      "div",
      { class: "side-by-side", role: "region", tabindex: "0", "aria-label": "Dialogues side by side" },
      episodes.map((episode, index) => columnHead(run, episode, bound, index === 0 && episodes.length > 1)),
      rows,
    ),
    { "--count": episodes.length },
  );
  return [shared ? sharedStart(dialogues[0].slice(0, shared), episodes.length) : null, grid];
}

/** @param {any[]} messages @param {number} of */
function sharedStart(messages, of) {
  const size = messages.reduce((sum, message) => sum + messageText(message).length, 0);
  return h(
    "details",
    { class: "shared", open: size < 1200 },
    h(
      "summary",
      {},
      `${plural(messages.length, "message")} at the start, the same in ${of === 1 ? "this episode" : `these ${of} episodes`}`,
    ),
    messages.map((message) => cell(message, null, true)),
  );
}

/** @param {string} run @param {Episode} episode @param {number} bound @param {boolean} reference */
function columnHead(run, episode, bound, reference) {
  return h(
    "header",
    { class: "column-head" },
    link(toEpisode(run, episode.episode), { class: "strong" }, episodeLabel(/** @type {any} */ (episode))),
    h(
      "span",
      { class: "num" },
      episode.reward == null ? outcomeBadge(episode) : ["reward ", h("strong", {}, score(episode.reward))],
    ),
    episode.advantage == null
      ? null
      : h("span", { class: `tag adv ${advantageClass(episode.advantage, bound)}` }, signed(episode.advantage, 2)),
    reference ? h("span", { class: "muted small" }, "the others are compared with this one") : null,
  );
}

/** @param {any} message @param {any} other @param {boolean} isReference */
function cell(message, other, isReference) {
  const text = messageText(message);
  const known = ["system", "user", "assistant", "tool"].includes(message.role) ? message.role : "other";
  const differs = other && other.role === message.role && messageText(other) !== text;
  const same = other && !differs && other.role === message.role;
  const long = text.length + (other ? messageText(other).length : 0) > LONGEST;
  const content =
    differs && !long
      ? [marked(text, messageText(other))]
      : [
          reasoningOf(message),
          ...(message.role === "tool" ? toolResult(message) : contentOf(message)),
          ...toolCallsOf(message),
        ];
  return h(
    "div",
    { class: `cell role-${known}${same ? " same" : ""}${message.begins ? " begins" : ""}` },
    h(
      "span",
      { class: "role" },
      String(message.role),
      message.call == null ? null : h("span", { class: "muted" }, ` call ${message.call}`),
      same && !isReference ? h("span", { class: "muted" }, " · same") : null,
    ),
    content,
  );
}

/** A text with what it has and the other has not. @param {string} text @param {string} other */
function marked(text, other) {
  const pieces = diffWords(other, text).filter((piece) => piece.kind !== "removed");
  return foldLong(
    h(
      "div",
      { class: "text" },
      pieces.map((piece) => (piece.kind === "same" ? piece.text : h("mark", {}, piece.text))),
    ),
    text,
  );
}
