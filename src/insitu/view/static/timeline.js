/** The calls of an episode on a line of time; those that ran in parallel are below one another. */

import { h, style } from "./dom.js";
import { duration, plural } from "./format.js";
import { advantageClass } from "./tokens.js";

const LANES = 8;

/**
 * @param {Record<string, any>[]} calls @param {number} bound the largest advantage
 * @param {(index: number) => string} href @param {(index: number) => void} open
 */
export function timeline(calls, bound, href, open) {
  const timed = calls.filter((call) => call.started != null && call.ended != null);
  if (!timed.length) return null;
  const end = Math.max(...timed.map((call) => call.ended), 1e-9);
  const ends = /** @type {number[]} */ ([]);
  const bars = timed
    .toSorted((a, b) => a.started - b.started)
    .map((call) => {
      let lane = ends.findIndex((busy) => busy <= call.started + 1e-6);
      if (lane < 0) lane = ends.length < LANES ? ends.length : ends.indexOf(Math.min(...ends));
      ends[lane] = call.ended;
      const kind = call.error ? "error" : call.trained ? advantageClass(call.advantage, bound) || "even" : "context";
      const label = `call ${call.index}, ${call.llm ?? call.model ?? "model"}, ${duration(call.started)} to ${duration(call.ended)}${call.error ? `, failed: ${call.error}` : ""}`;
      const bar = h(
        "a",
        {
          class: `span ${kind}`,
          href: href(call.index),
          title: label,
          "aria-label": label,
          "data-call": call.index,
          onclick: (/** @type {Event} */ event) => {
            event.preventDefault();
            open(call.index);
          },
        },
        timed.length <= 40 ? String(call.index) : "",
      );
      return style(bar, { "--from": call.started / end, "--to": call.ended / end, "--lane": lane });
    });
  const steps = [0, 0.25, 0.5, 0.75, 1];
  const axis = h(
    "div",
    { class: "ticks", "aria-hidden": "true" },
    steps.map((share) => style(h("span", {}, share ? duration(end * share) : "0"), { "--from": share })),
  );
  return h(
    "section",
    { class: "timeline", "aria-label": `Timeline of ${plural(timed.length, "call")}` },
    h("span", { class: "small muted" }, `${plural(timed.length, "call")} over time`),
    style(h("div", { class: "lanes" }, bars), { "--lanes": ends.length }),
    axis,
  );
}
