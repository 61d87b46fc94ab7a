/** The conversations of an episode as a chat: messages of the context, and completions with their tokens and rewards. */

import { h, style } from "./dom.js";
import { ABSENT, count, duration, isNumber, plain, plural, signed } from "./format.js";
import { copyButton, curl, messageJson } from "./copying.js";
import { cutsOf, foldLong } from "./longtext.js";
import { contentOf, contentText, furtherFields, reasoningOf, toolCallsOf, toolResult } from "./messages.js";
import { sideTags } from "./pairs.js";
import { definitions, folded } from "./parts.js";
import { advantageClass, TokenText } from "./tokens.js";

/**
 * @typedef {{answer: Record<string, any>, view: {colour: import("./tokens.js").Colour, bound: number}, title: string,
 *   href: (call: number) => string, request: (call: number) => Promise<any>, texts: TokenText[]}} Shown
 */

/** @param {Record<string, any>[]} messages @param {Shown} shown */
export function conversation(messages, shown) {
  const calls = new Map(shown.answer.calls.map((/** @type {any} */ call) => [call.index, call]));
  const sampled = messages.filter((message) => message.call != null).length;
  return h(
    "section",
    { class: "conversation", "aria-label": shown.title },
    h(
      "h2",
      {},
      shown.title,
      h("span", { class: "muted" }, ` ${plural(messages.length, "message")}, ${sampled} sampled`),
    ),
    messages.map((message) => {
      const call = message.call == null ? null : calls.get(message.call);
      const node = call ? completion(message, call, shown) : context(message);
      return style(node, { "--height": `${likelyHeight(node.textContent ?? "")}px` });
    }),
  );
}

/** About how high a message is, for the scroll bar while it is not drawn. @param {string} text */
function likelyHeight(text) {
  const lines = text.split("\n").reduce((sum, line) => sum + Math.max(1, Math.ceil(line.length / 80)), 0);
  return 50 + 22 * Math.min(lines, 24);
}

/** A message that this conversation's calls were given. @param {Record<string, any>} message */
function context(message) {
  const role = String(message.role ?? "unknown");
  const tool = role === "tool" || role === "function";
  return h(
    "article",
    { class: `message role-${known(role)}` },
    h(
      "header",
      {},
      h("span", { class: "role" }, role),
      message.name ? h("span", { class: "mono muted" }, message.name) : null,
      h("span", { class: "spacer" }),
      copyMessage(message),
    ),
    reasoningOf(message),
    tool ? toolResult(message) : contentOf(message),
    toolCallsOf(message),
    furtherFields(message),
  );
}

/** @param {string} role */
function known(role) {
  return ["system", "developer", "user", "assistant", "tool", "function"].includes(role) ? role : "other";
}

/** A message that a call sampled. @param {Record<string, any>} message @param {Record<string, any>} call @param {Shown} shown */
function completion(message, call, shown) {
  const head = h(
    "header",
    {},
    h("span", { class: "role" }, String(message.role ?? "assistant")),
    h("a", { class: "call-link", href: shown.href(call.index), title: "a link to this call" }, `call ${call.index}`),
    call.functions?.length && !(call.functions.length === 1 && call.functions[0] === "<workflow>")
      ? h(
          "span",
          { class: "mono muted" },
          call.functions.filter((/** @type {string} */ name) => name !== "<workflow>").join(" › "),
        )
      : null,
    call.llm && severalModels(shown.answer) ? h("span", { class: "muted" }, call.llm) : null,
    call.finish_reason === "length"
      ? h("span", { class: "tag bad", title: "cut off at the limit of tokens" }, "cut off")
      : null,
    h("span", { class: "spacer" }),
    call.step_reward != null
      ? h("span", { class: "tag reward", title: "step reward" }, `reward ${signed(call.step_reward)}`)
      : null,
    call.sides?.length ? sideTags(call.sides) : call.trained
      ? h(
          "span",
          { class: `tag adv ${advantageClass(call.advantage, shown.view.bound)}`, title: "advantage" },
          call.advantage == null ? "trained by the server" : `advantage ${signed(call.advantage, 2)}`,
        )
      : h("span", { class: "tag quiet" }, "not trained"),
    copyMessage(message),
  );
  return h(
    "article",
    { class: `message role-assistant sampled${call.trained ? " trained" : ""}`, id: `call-${call.index}` },
    head,
    body(message, call, shown),
    furtherFields(message),
    callDetails(call, shown),
  );
}

/** @param {Record<string, any>} message */
const copyMessage = (message) =>
  cutsOf(message).length ? null : copyButton("Copy JSON", () => messageJson(message));

/** @param {Record<string, any>} answer */
function severalModels(answer) {
  return new Set(answer.calls.map((/** @type {any} */ call) => call.llm ?? call.model)).size > 1;
}

/** @param {Record<string, any>} message @param {Record<string, any>} call @param {Shown} shown */
function body(message, call, shown) {
  const tokens = call.tokens ?? [];
  if (!tokens.length || call.$cut?.tokens || tokens.some((/** @type {any} */ token) => token.text == null)) {
    const content = [reasoningOf(message), ...contentOf(message), ...toolCallsOf(message)].filter(Boolean);
    return h(
      "div",
      { class: `whole ${advantageClass(call.advantage, shown.view.bound)}` },
      content.length ? content : h("p", { class: "muted" }, "an empty answer"),
    );
  }
  const text = new TokenText(
    tokens,
    shown.view,
    `${plural(tokens.length, "sampled token")} of call ${call.index}; the arrow keys go from token to token`,
  );
  shown.texts.push(text);
  return [
    foldLong(text.node, tokens.map((/** @type {any} */ token) => token.text).join("")),
    toolCallsOf(message),
    differentContent(message, tokens),
  ];
}

/** The message as the server returned it, if that is not the text of its tokens. @param {Record<string, any>} message @param {any[]} tokens */
function differentContent(message, tokens) {
  const content = contentText(message).trim();
  const sampled = tokens.map((token) => token.text).join("");
  if (!content || sampled.includes(content)) return null;
  return folded(
    h("span", { class: "muted" }, "the message as the agent received it"),
    reasoningOf(message),
    contentOf(message),
  );
}

/** @param {Record<string, any>} call @param {Shown} [shown] */
function callDetails(call, shown) {
  const usage = `${count(call.prompt_tokens ?? call.usage?.prompt_tokens)} prompt + ${count(call.sampled_tokens ?? call.usage?.completion_tokens)} sampled tokens`;
  const time = isNumber(call.ended) ? duration(call.ended - call.started) : ABSENT;
  const summary = h(
    "span",
    { class: "muted" },
    `${usage} · ${time}${call.policy_version == null ? "" : ` · weights v${call.policy_version}`}`,
  );
  return h(
    "details",
    { class: "call-details" },
    h("summary", {}, summary),
    definitions(
      /** @type {[string, any][]} */ ([
        ["model", call.llm && call.llm !== call.model ? `${call.llm} (${call.model})` : call.model],
        ["functions", call.functions?.join(" › ")],
        ["time", `${duration(call.started)} to ${duration(call.ended)} after the first call began`],
        ["finish reason", call.finish_reason],
        [
          "sampling",
          call.sampling &&
            Object.entries(call.sampling)
              .map(([name, value]) => `${name} ${plain(value)}`)
              .join(", "),
        ],
        [
          "tools",
          call.tools
            ?.map((/** @type {any} */ tool) => (typeof tool === "string" ? tool : (tool.function?.name ?? plain(tool))))
            .join(", "),
        ],
        [
          "usage",
          call.usage &&
            Object.entries(call.usage)
              .map(([name, value]) => `${name} ${plain(value)}`)
              .join(", "),
        ],
      ]).filter(([, value]) => value != null && value !== ""),
    ),
    shown
      ? h(
          "p",
          { class: "copies" },
          copyButton("Copy the request as JSON", async () => JSON.stringify(await shown.request(call.index), null, 2)),
          " · ",
          copyButton("Copy the request as curl", async () => curl(await shown.request(call.index))),
        )
      : null,
  );
}

/** Calls without a completion, which no conversation has. @param {Record<string, any>[]} calls */
export function failedCalls(calls) {
  const failed = calls.filter((call) => call.error);
  if (!failed.length) return null;
  return h(
    "section",
    { class: "conversation", "aria-label": "Calls without an answer" },
    h("h2", {}, "Calls without an answer"),
    failed.map((call) =>
      h(
        "article",
        { class: "message failed-call", id: `call-${call.index}` },
        h(
          "header",
          {},
          h("span", { class: "role" }, `call ${call.index}`),
          h("span", { class: "muted" }, call.llm ?? call.model),
        ),
        h("p", { class: "pre bad" }, call.error),
        callDetails(call),
      ),
    ),
  );
}
