/** The stream of changes of runs, read with `fetch` because EventSource cannot send the token. */

import { authorization } from "./api.js";
import { address } from "./links.js";

/** @typedef {{run: string, files: string[]}} Change */

const RETRY = 1000;
/** Until the server watches the runs of a new connection; what has changed before is read then. */
const WATCHED = 1000;
const LONGEST_RETRY = 15000;

/**
 * Calls `onChange` for every change of the runs (of all if there are none), and once after each connection, with null.
 * Stops when the signal is aborted.
 * @param {string[]} runs
 * @param {(change: Change | null) => void} onChange
 * @param {(connected: boolean) => void} onState
 * @param {AbortSignal} signal
 */
export async function follow(runs, onChange, onState, signal) {
  let wait = RETRY;
  while (!signal.aborted) {
    try {
      const response = await fetch(address("/api/events", { run: runs }), { headers: authorization(), signal });
      if (!response.ok || !response.body) throw new Error(`events: ${response.status}`);
      onState(true);
      setTimeout(() => !signal.aborted && onChange(null), WATCHED);
      wait = RETRY;
      await readEvents(response.body, (event, data) => event === "changed" && onChange(JSON.parse(data)));
    } catch {
      if (signal.aborted) return;
    }
    onState(false);
    await new Promise((resolve) => setTimeout(resolve, wait));
    wait = Math.min(wait * 2, LONGEST_RETRY);
  }
}

/** @param {ReadableStream<Uint8Array>} body @param {(event: string, data: string) => void} onEvent */
async function readEvents(body, onEvent) {
  const decoder = /** @type {any} */ (new TextDecoderStream());
  const reader = body.pipeThrough(decoder).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const blocks = (rest + value).replaceAll("\r\n", "\n").split("\n\n");
    rest = blocks.pop() ?? "";
    for (const block of blocks) {
      let [event, data] = ["message", ""];
      for (const line of block.split("\n")) {
        if (line.startsWith("event:")) event = line.slice(6).trim();
        else if (line.startsWith("data:")) data += line.slice(5).trim();
      }
      if (data) onEvent(event, data);
    }
  }
}
