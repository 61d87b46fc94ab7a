/** The rewards of one row through the epochs: a dot for each episode, a line through the means, a link to each group. */

import { style, svg } from "./dom.js";
import { score } from "./format.js";
import { toGroup } from "./links.js";

const [WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM] = [560, 150, 44, 14, 12, 24];

/** @param {string} run @param {string} row @param {{epoch: number, rewards: number[], mean: number | null}[]} epochs @param {number} current */
export function rowHistory(run, row, epochs, current) {
  const rewards = epochs.flatMap((each) => each.rewards);
  if (!rewards.length) return null;
  let [low, high] = [Math.min(...rewards), Math.max(...rewards)];
  if (low === high) [low, high] = [low - 0.5, high + 0.5];
  const [first, last] = [epochs[0].epoch, epochs[epochs.length - 1].epoch];
  const x = (/** @type {number} */ epoch) =>
    first === last
      ? (LEFT + WIDTH - RIGHT) / 2
      : LEFT + 10 + ((epoch - first) / (last - first)) * (WIDTH - LEFT - RIGHT - 20);
  const y = (/** @type {number} */ reward) => TOP + ((high - reward) / (high - low)) * (HEIGHT - TOP - BOTTOM);
  const means = epochs.filter((each) => each.mean != null);
  const every = Math.ceil(epochs.length / 14);
  const bandWidth = Math.max(12, Math.min(40, (WIDTH - LEFT - RIGHT) / epochs.length));
  const columns = epochs.map((each, index) =>
    svg(
      "a",
      {
        href: toGroup(run, { epoch: each.epoch, row_id: row }),
        class: each.epoch === current ? "current" : null,
        "aria-label": `epoch ${each.epoch}, mean reward ${score(each.mean)}`,
        "aria-current": each.epoch === current ? "page" : null,
      },
      svg("title", {}, `epoch ${each.epoch}: mean ${score(each.mean)} of ${each.rewards.length}`),
      svg("rect", { x: x(each.epoch) - bandWidth / 2, y: 0, width: bandWidth, height: HEIGHT }),
      dots(each.rewards, x(each.epoch), y),
      index % every === 0 || each.epoch === current
        ? svg("text", { x: x(each.epoch), y: HEIGHT - 7, "text-anchor": "middle" }, each.epoch)
        : null,
    ),
  );
  return svg(
    "svg",
    {
      class: "row-history",
      viewBox: `0 0 ${WIDTH} ${HEIGHT}`,
      role: "group",
      "aria-label": "The rewards of this row through the epochs",
    },
    [low, (low + high) / 2, high]
      .map((value) => [
        svg("line", { class: "rule", x1: LEFT, x2: WIDTH - RIGHT, y1: y(value), y2: y(value) }),
        svg("text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, score(value)),
      ])
      .flat(),
    svg("path", {
      class: "means",
      d: means
        .map(
          (each, index) =>
            `${index ? "L" : "M"}${x(each.epoch).toFixed(1)} ${y(/** @type {number} */ (each.mean)).toFixed(1)}`,
        )
        .join(""),
    }),
    columns,
  );
}

/** A dot for each reward, larger where several are equal. @param {number[]} rewards @param {number} x @param {(reward: number) => number} y */
function dots(rewards, x, y) {
  const counts = new Map();
  for (const reward of rewards) counts.set(reward, (counts.get(reward) ?? 0) + 1);
  return [...counts].map(([reward, n]) =>
    style(
      svg("circle", {
        cx: x.toFixed(1),
        cy: y(reward).toFixed(1),
        r: (2 + 3.5 * Math.sqrt(n / rewards.length)).toFixed(1),
      }),
      {},
    ),
  );
}
