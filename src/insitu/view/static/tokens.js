/** Sampled tokens in colour: by log-probability or by advantage. */

import { fill, h, style } from "./dom.js";
import { ABSENT, isNumber, number, signed } from "./format.js";

/** @typedef {{text: string | null, id: number, logprob: number | null, advantage: number | null}} Token */
/** @typedef {"none" | "logprob" | "advantage"} Colour */

/** Probabilities below which a token is coloured one step stronger. */
const SURPRISE = [0.9, 0.5, 0.2, 0.05, 0.01];
const STEPS = 5;

/** The largest advantage, by which the others are coloured; at least 1. @param {{tokens?: Token[] | null, advantage?: number | null}[]} calls */
export function advantageBound(calls) {
  let bound = 1;
  for (const call of calls) {
    bound = Math.max(bound, Math.abs(call.advantage ?? 0));
    for (const token of call.tokens ?? []) bound = Math.max(bound, Math.abs(token.advantage ?? 0));
  }
  return bound;
}

/**
 * The class of a token's colour; empty without one.
 * @param {Token} token @param {Colour} colour @param {number} bound
 */
export function tokenClass(token, colour, bound) {
  if (colour === "logprob" && isNumber(token.logprob)) {
    const probability = Math.exp(token.logprob);
    return `q${SURPRISE.filter((limit) => probability < limit).length}`;
  }
  if (colour === "advantage") return advantageClass(token.advantage, bound);
  return "";
}

/** @param {number | null | undefined} advantage @param {number} bound */
export function advantageClass(advantage, bound) {
  if (!isNumber(advantage)) return "";
  if (advantage === 0) return "even";
  return `${advantage < 0 ? "down" : "up"}${Math.max(1, Math.ceil((Math.abs(advantage) / bound) * STEPS - 1e-9))}`;
}

/** What the colours mean. @param {Colour} colour @param {number} bound */
export function legend(colour, bound) {
  const swatch = (/** @type {string} */ name, /** @type {string} */ text = "") =>
    h("span", { class: `swatch ${name}` }, text);
  if (colour === "logprob") {
    const labels = ["≥ 90 %", "≥ 50 %", "≥ 20 %", "≥ 5 %", "≥ 1 %", "< 1 %"];
    return h(
      "p",
      { class: "scale" },
      h("span", {}, "probability when sampled"),
      labels.map((label, index) => swatch(`q${index}`, label)),
    );
  }
  if (colour !== "advantage") return null;
  const steps = [5, 4, 3, 2, 1];
  return h(
    "p",
    { class: "scale" },
    h("span", {}, `made less likely, ${number(-bound).replace("-", "−")}`),
    h(
      "span",
      { class: "swatches", "aria-hidden": "true" },
      steps.map((step) => swatch(`down${step}`)),
      swatch("even"),
      steps.toReversed().map((step) => swatch(`up${step}`)),
    ),
    h("span", {}, `+${number(bound)}, made more likely`),
  );
}

/**
 * The tokens of a call as elements, drawn when they come near the view; before, and without a colour, they are plain text.
 * @param {Token[]} tokens @param {() => {colour: Colour, bound: number}} view
 */
export class TokenText {
  /** @param {Token[]} tokens @param {{colour: Colour, bound: number}} view @param {string} label */
  constructor(tokens, view, label) {
    this.tokens = tokens;
    this.view = view;
    this.drawn = false;
    this.node = h(
      "div",
      { class: "tokens", tabindex: "0", role: "group", "aria-label": label },
      tokens.map((token) => token.text ?? "").join(""),
    );
    this.node.addEventListener("keydown", (event) => this.step(event));
    this.node.addEventListener("blur", () => hideTip());
    this.cursor = -1;
    owners.set(this.node, this);
    near.observe(this.node);
  }

  draw() {
    if (this.drawn) return;
    this.drawn = true;
    const { colour, bound } = this.view;
    fill(
      this.node,
      this.tokens.map((token) =>
        h("span", { class: `t ${tokenClass(token, colour, bound)}` }, token.text ?? `⟨${token.id}⟩`),
      ),
    );
  }

  /** Draws the tokens again in another colour. */
  recolour() {
    if (!this.drawn) return;
    const { colour, bound } = this.view;
    this.tokens.forEach(
      (token, index) => (this.node.children[index].className = `t ${tokenClass(token, colour, bound)}`),
    );
  }

  /** Moves from token to token with the arrow keys. @param {KeyboardEvent} event */
  step(event) {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!by) return;
    event.preventDefault();
    this.draw();
    this.cursor = Math.max(0, Math.min(this.tokens.length - 1, this.cursor + by));
    showTip(/** @type {HTMLElement} */ (this.node.children[this.cursor]), this.tokens[this.cursor]);
  }
}

/** @type {WeakMap<Element, TokenText>} */
const owners = new WeakMap();

const near = new IntersectionObserver(
  (entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting) continue;
      owners.get(entry.target)?.draw();
      near.unobserve(entry.target);
    }
  },
  { rootMargin: "600px" },
);

/** Shows the numbers of tokens that are pointed at within an element. @param {HTMLElement} element */
export function watchTokens(element) {
  element.addEventListener("pointerover", (event) => {
    const token = /** @type {HTMLElement} */ (event.target);
    const owner = token.classList.contains("t") && token.parentElement ? owners.get(token.parentElement) : null;
    if (!owner) return hideTip();
    showTip(token, owner.tokens[[...owner.node.children].indexOf(token)]);
  });
  element.addEventListener("pointerleave", hideTip);
}

/** @param {HTMLElement} element @param {Token} token */
function showTip(element, token) {
  const tip = /** @type {HTMLElement} */ (document.getElementById("tip"));
  document.querySelector(".t.current")?.classList.remove("current");
  element.classList.add("current");
  const rows = [
    [
      "token",
      h(
        "span",
        { class: "mono" },
        JSON.stringify(token.text ?? ""),
        h("span", { class: "muted" }, ` ${token.id ?? ABSENT}`),
      ),
    ],
    ["probability", isNumber(token.logprob) ? `${number(Math.exp(token.logprob) * 100)} %` : ABSENT],
    ["log-probability", isNumber(token.logprob) ? signed(token.logprob, 4) : ABSENT],
    ["advantage", isNumber(token.advantage) ? signed(token.advantage, 4) : "not trained"],
  ];
  fill(
    tip,
    h(
      "dl",
      {},
      rows.map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]),
    ),
  );
  tip.hidden = false;
  const box = element.getClientRects()[0] ?? element.getBoundingClientRect();
  const left = Math.max(8, Math.min(box.left, innerWidth - tip.offsetWidth - 8));
  const below = box.bottom + 6 + tip.offsetHeight < innerHeight;
  style(tip, { left: `${left}px`, top: `${below ? box.bottom + 6 : box.top - tip.offsetHeight - 6}px` });
}

export function hideTip() {
  const tip = document.getElementById("tip");
  if (tip) tip.hidden = true;
  document.querySelector(".t.current")?.classList.remove("current");
}
