/** One episode: why it got its reward, its dialogue, and what training made of every token. */

import { get } from "../api.js";
import { conversation, failedCalls } from "../chat.js";
import { append, fill, h } from "../dom.js";
import { head, side } from "../episodefacts.js";
import { address, episodeLabel, rowLabel, toEpisode, toGroup, toRun } from "../links.js";
import { pairList } from "../pairs.js";
import { loadParts } from "../longtext.js";
import { choice } from "../parts.js";
import { timeline } from "../timeline.js";
import { advantageBound, hideTip, legend, watchTokens } from "../tokens.js";

/** @typedef {Record<string, any>} Answer the answer of /api/episode */

/** @param {import("../app.js").Context} context @returns {Promise<import("../app.js").Page>} */
export async function episodePage({ parameters, signal, go }) {
  const run = parameters.get("run") ?? ".";
  const name = parameters.get("episode") ?? "";
  const asked = parameters.get("colour");
  const answer = await get("episode", { run, episode: name }, signal);
  withAdvantages(answer);
  const { record } = answer;
  loadParts((path, offset) => get("part", { run, episode: name, path: JSON.stringify(path), offset }, signal));
  const trained = answer.calls.some((/** @type {any} */ call) => call.advantage != null);
  const view = {
    colour: /** @type {import("../tokens.js").Colour} */ (asked ?? (trained ? "advantage" : "logprob")),
    bound: advantageBound(answer.calls),
  };
  let called = parameters.get("call");
  const here = (/** @type {number | string | null} */ call) =>
    toEpisode(run, name, {
      colour: asked || view.colour !== (trained ? "advantage" : "logprob") ? view.colour : null,
      call: /** @type {any} */ (call),
    });

  const texts = /** @type {import("../tokens.js").TokenText[]} */ ([]);
  const key = h("div", { class: "colour-legend" });
  const dialogues = h("div", { class: "dialogues" });
  const recolour = (/** @type {string} */ colour) => {
    view.colour = /** @type {import("../tokens.js").Colour} */ (colour);
    history.replaceState(history.state, "", toEpisode(run, name, { colour, call: /** @type {any} */ (called) }));
    dialogues.dataset.colour = view.colour;
    for (const text of texts) text.recolour();
    fill(key, legend(view.colour, view.bound));
  };
  const openCall = (/** @type {number} */ index, smooth = true) => {
    called = String(index);
    history.replaceState(history.state, "", here(called));
    const message = document.getElementById(`call-${index}`);
    document.querySelector(".message.at")?.classList.remove("at");
    message?.classList.add("at");
    if (message) void reveal(message, smooth);
    document.querySelector(".span[aria-current]")?.removeAttribute("aria-current");
    document.querySelector(`.span[data-call="${index}"]`)?.setAttribute("aria-current", "true");
  };
  const step = (/** @type {number} */ by) => {
    const indices = answer.calls.map((/** @type {any} */ call) => call.index);
    const at = called == null ? (by > 0 ? -1 : 0) : indices.indexOf(Number(called));
    const next = indices[at + by];
    if (next != null) openCall(next);
  };
  dialogues.dataset.colour = view.colour;
  append(
    dialogues,
    answer.conversations.map((/** @type {any} */ messages, /** @type {number} */ index) =>
      conversation(messages, {
        answer,
        view,
        request: (/** @type {number} */ call) => get("request", { run, episode: name, call }, signal),
        title:
          answer.conversations.length > 1
            ? `Conversation ${index + 1} of ${answer.conversations.length}`
            : "Conversation",
        href: here,
        texts,
      }),
    ),
  );
  append(dialogues, [failedCalls(answer.calls)]);
  fill(key, legend(view.colour, view.bound));
  watchTokens(dialogues);
  const colours = choice(
    "Colour of the sampled tokens",
    view.colour,
    [
      ["advantage", "advantage", "what training pushed up and down"],
      ["logprob", "probability", "how likely each token was when it was sampled"],
      ["none", "none"],
    ],
    recolour,
  );
  const calls = answer.calls.length;
  return {
    title: `${rowLabel(record.row_id, "Row")}, ${episodeLabel(record)}`,
    crumbs: crumbs(run, record),
    runs: [run],
    node: h(
      "div",
      { class: "page episode-page" },
      head(run, answer),
      pairList(run, answer.pairs, name),
      calls ? timeline(answer.calls, view.bound, here, openCall) : null,
      h(
        "div",
        { class: "episode-body" },
        h(
          "div",
          { class: "dialogue-column" },
          calls
            ? h(
                "div",
                { class: "controls sticky" },
                h("span", { class: "field" }, h("span", {}, "Tokens by"), colours),
                key,
              )
            : null,
          calls ? dialogues : h("p", { class: "empty" }, "This episode made no model call."),
        ),
        h("aside", { "aria-label": "About this episode" }, side(run, answer)),
      ),
    ),
    shortcuts: [
      ...moves(run, answer, go),
      { keys: ["l"], what: "next call", run: () => step(1) },
      { keys: ["h"], what: "previous call", run: () => step(-1) },
    ],
    shown: () => {
      if (called != null) openCall(Number(called), false);
    },
    close: hideTip,
  };
}

/**
 * Scrolls to a message. Those on the way get their true height when they are drawn, so it takes several steps.
 * @param {HTMLElement} message @param {boolean} smooth
 */
async function reveal(message, smooth) {
  const top = message.getBoundingClientRect().top;
  const near = Math.abs(top) < 2 * innerHeight;
  message.scrollIntoView({ behavior: smooth && near ? "smooth" : "instant", block: "center" });
  for (let step = 0, last = top; !near && step < 10; step++) {
    await new Promise(requestAnimationFrame);
    const now = message.getBoundingClientRect().top;
    if (now === last) return;
    last = now;
    message.scrollIntoView({ behavior: "instant", block: "center" });
  }
}

/** Gives the tokens of a trained call its advantage. @param {Answer} answer */
function withAdvantages(answer) {
  for (const call of answer.calls)
    for (const token of call.tokens ?? []) token.advantage ??= call.trained ? call.advantage : null;
}

/** @param {string} run @param {any} record @returns {[string, string | null][]} */
function crumbs(run, record) {
  return [
    ["Runs", "/runs"],
    [run === "." ? "run" : run, toRun(run)],
    [`epoch ${record.epoch}`, address("/run", { run, epoch: record.epoch })],
    [rowLabel(record.row_id), toGroup(run, record)],
    [episodeLabel(record), null],
  ];
}

/** @param {string} run @param {Answer} answer @param {(href: string) => void} go @returns {import("../keys.js").Shortcut[]} */
function moves(run, answer, go) {
  const colour = () => new URLSearchParams(location.search).get("colour");
  const to = (/** @type {string | null} */ target) => () => target && go(toEpisode(run, target, { colour: colour() }));
  return [
    { keys: ["j", "ArrowRight"], what: "next episode", run: to(answer.next) },
    { keys: ["k", "ArrowLeft"], what: "previous episode", run: to(answer.previous) },
    { keys: ["J", "n"], what: "next group", run: to(answer.next_group) },
    { keys: ["K", "p"], what: "previous group", run: to(answer.previous_group) },
    { keys: ["]"], what: "the same row in the next epoch", run: to(answer.next_epoch) },
    { keys: ["["], what: "the same row in the previous epoch", run: to(answer.previous_epoch) },
    { keys: ["u"], what: "the group of this episode", run: () => go(toGroup(run, answer.record)) },
  ];
}
