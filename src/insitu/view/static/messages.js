/** A message of a dialogue: text, parts, reasoning and tool calls. Long ones are folded, never cut off. */

import { h } from "./dom.js";
import { count, plain, pretty } from "./format.js";
import { cutsOf, longJson, longText } from "./longtext.js";
import { folded } from "./parts.js";

/** @typedef {Record<string, any>} Message */

const IMAGE = /^data:image\/(png|jpeg|gif|webp);base64,[A-Za-z0-9+/=\s]+$/;

/** The text of a message's content, parts that are not text by their type. @param {Message} message */
export function contentText(message) {
  const { content } = message;
  if (content == null) return "";
  if (!Array.isArray(content)) return plain(content);
  return content
    .map((part) =>
      typeof part === "string" ? part : typeof part?.text === "string" ? part.text : `[${part?.type ?? "part"}]`,
    )
    .join("\n");
}

/** Everything a message says in one text, for comparisons. @param {Message} message */
export function messageText(message) {
  const reasoning = message.reasoning_content ?? message.reasoning;
  const calls = (message.tool_calls ?? []).map(
    (/** @type {any} */ call) => `${call.function?.name ?? call.type}(${plain(call.function?.arguments ?? "")})`,
  );
  return [reasoning, contentText(message), ...calls, ...cutsOf(message).map((cut) => cut.digest)].filter(Boolean).join("\n");
}

/** The content of a message. @param {Message} message */
export function contentOf(message) {
  const { content } = message;
  if (content == null || content === "") return [];
  if (!Array.isArray(content)) return [longText(plain(content), "text", message.$cut?.content)];
  return content.map((part) => {
    if (typeof part === "string") return longText(part);
    if (typeof part?.text === "string") return longText(part.text, "text", part.$cut?.text);
    return partOf(part);
  });
}

/** A part that is not text: an image that the message contains, or its JSON. Nothing is loaded from elsewhere. @param {any} part */
function partOf(part) {
  const source =
    part?.image_url?.url ??
    part?.image_url ??
    (part?.source?.data ? `data:${part.source.media_type};base64,${part.source.data}` : null);
  if (typeof source === "string" && IMAGE.test(source))
    return h("img", { class: "image", src: source, alt: "image of this message" });
  if (typeof source === "string")
    return h(
      "p",
      { class: "part" },
      h("span", { class: "tag" }, "image"),
      " ",
      h("span", { class: "mono" }, source.length > 200 ? `${source.slice(0, 200)} …` : source),
    );
  return folded(
    [
      h("span", { class: "tag" }, String(part?.type ?? "part")),
      ` ${count(JSON.stringify(part ?? null).length)} characters`,
    ],
    longJson(part),
  );
}

/** @param {Message} message */
export function reasoningOf(message) {
  const text = message.reasoning_content ?? message.reasoning;
  if (typeof text !== "string" || !text) return null;
  return h(
    "details",
    { class: "reasoning", open: text.length < 600 },
    h("summary", {}, `reasoning, ${count(text.length)} characters`),
    longText(text, "text", message.$cut?.reasoning_content ?? message.$cut?.reasoning),
  );
}

/** The tools that a message calls. @param {Message} message */
export function toolCallsOf(message) {
  return (message.tool_calls ?? []).map((/** @type {any} */ call) => {
    const name = call.function?.name ?? call.name ?? call.type ?? "tool";
    const given = call.function?.arguments ?? call.arguments ?? "";
    const text = plain(given);
    return h(
      "details",
      { class: "tool-call", open: text.length < 200 && text.length > 60 },
      h(
        "summary",
        {},
        h("span", { class: "tag" }, "calls"),
        " ",
        h("span", { class: "mono" }, h("strong", {}, name), `(${oneLine(text, 60)})`),
      ),
      call.function?.$cut ? longText(text, "code", call.function.$cut.arguments) : h("pre", {}, pretty(text)),
      call.id ? h("p", { class: "muted small mono" }, call.id) : null,
    );
  });
}

/** What a tool returned, folded. @param {Message} message */
export function toolResult(message) {
  const text = contentText(message);
  const name = message.name ?? message.tool_call_id ?? "";
  if (
    Array.isArray(message.content) &&
    message.content.some((part) => typeof part === "object" && (typeof part?.text !== "string" || part.$cut))
  )
    return contentOf(message);
  if (text.length < 240 && !text.includes("\n")) return [h("div", { class: "text mono" }, text)];
  return [
    h(
      "details",
      { class: "tool-result" },
      h(
        "summary",
        {},
        h("span", { class: "mono" }, oneLine(text, 90)),
        h("span", { class: "muted" }, ` ${count(message.$cut?.content?.length ?? text.length)} characters ${name ? `· ${name}` : ""}`),
      ),
      message.$cut ? longText(text, "code", message.$cut.content) : h("pre", {}, pretty(text)),
    ),
  ];
}

/** @param {string} text @param {number} limit */
export function oneLine(text, limit) {
  const line = text.replace(/\s+/g, " ").trim();
  return line.length > limit ? `${line.slice(0, limit)}…` : line;
}

/** Fields of a message that are shown nowhere else. @param {Message} message */
export function furtherFields(message) {
  const shown = new Set([
    "role",
    "content",
    "tool_calls",
    "reasoning",
    "reasoning_content",
    "call",
    "conversation",
    "name",
    "tool_call_id",
    "$cut",
  ]);
  const rest = Object.entries(message).filter(
    ([key, value]) => !shown.has(key) && value != null && !(Array.isArray(value) && !value.length),
  );
  return rest.length
    ? folded(
        h("span", { class: "muted" }, rest.map(([key]) => key).join(", ")),
        longJson({ ...Object.fromEntries(rest), $cut: message.$cut }),
      )
    : null;
}
