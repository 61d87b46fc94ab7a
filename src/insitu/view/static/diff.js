/** What differs between two texts, by words (Myers' algorithm). */

/** @typedef {{text: string, kind: "same" | "added" | "removed"}} Piece */

const WORDS = /\s+|[\p{L}\p{N}_]+|[^\s\p{L}\p{N}_]/gu;
const MOST_EDITS = 1200;

/**
 * The pieces that turn `before` into `after`. Texts that differ in more than a thousand words are replaced as a whole,
 * but for their common start and end.
 * @param {string} before @param {string} after @returns {Piece[]}
 */
export function diffWords(before, after) {
  const [a, b] = [before.match(WORDS) ?? [], after.match(WORDS) ?? []];
  let start = 0;
  while (start < a.length && start < b.length && a[start] === b[start]) start++;
  let end = 0;
  while (end < a.length - start && end < b.length - start && a[a.length - 1 - end] === b[b.length - 1 - end]) end++;
  const pieces = /** @type {Piece[]} */ ([]);
  add(pieces, "same", a.slice(0, start));
  const [left, right] = [a.slice(start, a.length - end), b.slice(start, b.length - end)];
  const steps = edits(left, right);
  if (steps) for (const [kind, word] of steps) add(pieces, kind, [word]);
  else {
    add(pieces, "removed", left);
    add(pieces, "added", right);
  }
  add(pieces, "same", a.slice(a.length - end));
  return pieces;
}

/** @param {Piece[]} pieces @param {Piece["kind"]} kind @param {string[]} words */
function add(pieces, kind, words) {
  if (!words.length) return;
  const last = pieces.at(-1);
  if (last?.kind === kind) last.text += words.join("");
  else pieces.push({ kind, text: words.join("") });
}

/**
 * The shortest list of edits; null if it is too long to look for.
 * @param {string[]} a @param {string[]} b @returns {[Piece["kind"], string][] | null}
 */
function edits(a, b) {
  const [n, m] = [a.length, b.length];
  const most = Math.min(n + m, MOST_EDITS);
  let reach = new Map([[1, 0]]);
  const trace = [];
  for (let d = 0; d <= most; d++) {
    trace.push(new Map(reach));
    for (let k = -d; k <= d; k += 2) {
      const down = k === -d || (k !== d && (reach.get(k - 1) ?? -1) < (reach.get(k + 1) ?? -1));
      let x = down ? (reach.get(k + 1) ?? 0) : (reach.get(k - 1) ?? 0) + 1;
      let y = x - k;
      while (x < n && y < m && a[x] === b[y]) [x, y] = [x + 1, y + 1];
      reach.set(k, x);
      if (x >= n && y >= m) return walkBack(trace, a, b);
    }
  }
  return null;
}

/** @param {Map<number, number>[]} trace @param {string[]} a @param {string[]} b */
function walkBack(trace, a, b) {
  const found = /** @type {[Piece["kind"], string][]} */ ([]);
  let [x, y] = [a.length, b.length];
  for (let d = trace.length - 1; d >= 0; d--) {
    const reach = trace[d];
    const k = x - y;
    const down = k === -d || (k !== d && (reach.get(k - 1) ?? -1) < (reach.get(k + 1) ?? -1));
    const before = down ? k + 1 : k - 1;
    const fromX = reach.get(before) ?? 0;
    const fromY = fromX - before;
    while (x > fromX && y > fromY && x > 0 && y > 0) (found.push(["same", a[--x]]), y--);
    if (d === 0) break;
    if (down) found.push(["added", b[--y]]);
    else found.push(["removed", a[--x]]);
  }
  return found.reverse();
}
