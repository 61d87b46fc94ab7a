/** Small drawings within a line of text: a curve, the rewards of a group, a bar. */

import { h, style, svg } from "./dom.js";
import { isNumber, score, signed } from "./format.js";

const WIDTH = 84;
const HEIGHT = 20;

/**
 * A curve with a dot at its end.
 * @param {[number, number][]} points @param {string} label what it shows @param {string} [colour]
 */
export function sparkline(points, label, colour = "--blue") {
  const known = points.filter(([, y]) => isNumber(y));
  if (!known.length) return null;
  const [xs, ys] = [known.map(([x]) => x), known.map(([, y]) => y)];
  const [x, y] = [scale(xs, 2, WIDTH - 4), scale(ys, HEIGHT - 4, 4)];
  const path = known.map(([a, b], i) => `${i ? "L" : "M"}${x(a).toFixed(1)} ${y(b).toFixed(1)}`).join("");
  const last = known[known.length - 1];
  const node = svg(
    "svg",
    {
      class: "sparkline",
      viewBox: `0 0 ${WIDTH} ${HEIGHT}`,
      role: "img",
      "aria-label": `${label}: ${score(ys[0])} to ${score(last[1])}`,
    },
    svg("path", { d: path }),
    svg("circle", { cx: x(last[0]), cy: y(last[1]), r: 2.4 }),
  );
  return style(node, { "--series": `var(${colour})` });
}

/** @param {number[]} values @param {number} from @param {number} to */
function scale(values, from, to) {
  const [low, high] = [Math.min(...values), Math.max(...values)];
  return (/** @type {number} */ value) =>
    high === low ? (values.length > 1 ? (from + to) / 2 : from) : from + ((value - low) / (high - low)) * (to - from);
}

/**
 * A dot for each reward on a line from the lowest to the highest of `range`, and a mark at the mean.
 * @param {number[]} rewards @param {[number, number]} range
 */
export function rewardDots(rewards, range) {
  if (!rewards.length) return null;
  const [low, high] = range[0] === range[1] ? [range[0] - 0.5, range[1] + 0.5] : range;
  const x = (/** @type {number} */ value) => 4 + ((value - low) / (high - low)) * (WIDTH - 8);
  const counts = new Map();
  for (const reward of rewards) counts.set(reward, (counts.get(reward) ?? 0) + 1);
  const mean = rewards.reduce((sum, reward) => sum + reward, 0) / rewards.length;
  const dots = [...counts].map(([reward, n]) =>
    svg("circle", {
      cx: x(reward).toFixed(1),
      cy: HEIGHT / 2,
      r: (1.7 + 3.6 * Math.sqrt(n / rewards.length)).toFixed(1),
    }),
  );
  return svg(
    "svg",
    {
      class: "dots",
      viewBox: `0 0 ${WIDTH} ${HEIGHT}`,
      role: "img",
      "aria-label": `rewards from ${score(Math.min(...rewards))} to ${score(Math.max(...rewards))}`,
    },
    svg("line", { x1: 2, x2: WIDTH - 2, y1: HEIGHT / 2, y2: HEIGHT / 2 }),
    dots,
    svg("path", { class: "mean", d: `M${x(mean).toFixed(1)} 2V${HEIGHT - 2}` }),
  );
}

/** A number with a bar to the left or right of zero. @param {any} value @param {number} bound */
export function divergingBar(value, bound) {
  if (!isNumber(value)) return null;
  const share = Math.min(Math.abs(value) / (bound || 1), 1);
  const bar = style(h("i", { class: value < 0 ? "down" : "up" }), { "--share": share });
  return h("span", { class: "diverging", "aria-hidden": "true", title: signed(value) }, bar);
}

/** A bar from zero. @param {any} value @param {number} bound @param {string} [kind] */
export function bar(value, bound, kind = "") {
  if (!isNumber(value)) return null;
  return style(h("span", { class: `meter ${kind}`, "aria-hidden": "true" }, h("i", {})), {
    "--share": Math.max(0, Math.min(value / (bound || 1), 1)),
  });
}
