/** Copies what the page shows: a message as JSON, or the request of a call as JSON or as a command. */

import { h } from "./dom.js";

/** @param {string} label @param {() => any} text what is copied, or a promise of it */
export function copyButton(label, text) {
  const button = h("button", { type: "button", class: "as-link copy" }, label);
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(await text());
      button.textContent = "Copied";
    } catch (error) {
      button.textContent = "Cannot copy";
      button.title = error instanceof Error ? error.message : String(error);
    }
    setTimeout(() => (button.textContent = label), 2000);
  });
  return button;
}

/** A message as it was sent, without what the page adds. @param {Record<string, any>} message */
export function messageJson(message) {
  const { call: _, conversation: __, ...own } = message;
  return JSON.stringify(own, null, 2);
}

/** A shell command that sends a request. @param {Record<string, any>} request */
export function curl(request) {
  const body = JSON.stringify(request, null, 2).replaceAll("'", "'\\''");
  return [
    'curl "$OPENAI_BASE_URL/chat/completions"',
    "  -H 'Content-Type: application/json'",
    '  -H "Authorization: Bearer $OPENAI_API_KEY"',
    `  -d '${body}'`,
  ].join(" \\\n");
}
