/** Builds elements. What comes from a run only ever becomes a text node or an attribute's value, never markup. */

/** @typedef {Node | string | number | null | undefined | false} Leaf */
/** @typedef {Leaf | Leaf[] | Leaf[][]} Child what an element contains; null, undefined, false and empty texts are left out */

const SVG = "http://www.w3.org/2000/svg";

/**
 * An element: `h("a", {href, class: "x", onclick: f}, "text", child)`. Attributes that are null, undefined or false are left out.
 * @param {string} tag
 * @param {Record<string, any>} [attributes]
 * @param {...(Child | Child[])} children
 * @returns {HTMLElement}
 */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  setAttributes(element, attributes);
  append(element, children);
  return element;
}

/**
 * An SVG element, otherwise as `h`.
 * @param {string} tag
 * @param {Record<string, any>} [attributes]
 * @param {...(Child | Child[])} children
 * @returns {SVGElement}
 */
export function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  setAttributes(element, attributes);
  append(element, children);
  return element;
}

/** @param {Element} element @param {Record<string, any>} attributes */
function setAttributes(element, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value == null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
}

/** @param {Node} parent @param {(Child | Child[])[]} children */
export function append(parent, children) {
  for (const child of children.flat(Infinity)) {
    if (child == null || child === false || child === "") continue;
    parent.appendChild(child instanceof Node ? child : document.createTextNode(String(child)));
  }
}

/**
 * Replaces what an element contains. The focus stays on the element that says the same as before, and what was unfolded
 * stays so.
 * @param {Element} element @param {...(Child | Child[])} children
 */
export function fill(element, ...children) {
  const fragment = document.createDocumentFragment();
  append(fragment, children);
  const focused = element.contains(document.activeElement) && element !== document.activeElement ? focusMark() : null;
  const opened = [...element.querySelectorAll("details[open] > summary")].map((each) => each.textContent);
  element.replaceChildren(fragment);
  for (const summary of opened.length ? element.querySelectorAll("details:not([open]) > summary") : [])
    if (opened.includes(summary.textContent)) summary.parentElement?.setAttribute("open", "");
  if (focused) focusMarked(focused, element);
}

/** @typedef {{tag: string, says: string, place: number}} FocusMark */

/** What tells an element from others after it was made again. @param {Element} element */
const identity = (element) =>
  element.getAttribute("href") || element.id || element.getAttribute("aria-label") || (element.textContent ?? "");

/** Where the focus is. @returns {FocusMark | null} */
export function focusMark() {
  const element = document.activeElement;
  if (!element || element === document.body || element.id === "main") return null;
  const alike = [...document.querySelectorAll(element.tagName)].filter((each) => identity(each) === identity(element));
  return { tag: element.tagName, says: identity(element), place: alike.indexOf(element) };
}

/** Focuses the element of a mark, if it is there. @param {FocusMark} mark @param {ParentNode} [within] @returns {boolean} */
export function focusMarked(mark, within = document) {
  const alike = [...document.querySelectorAll(mark.tag)].filter((each) => identity(each) === mark.says);
  const found = alike[mark.place] ?? alike.find((each) => within.contains(each));
  /** @type {HTMLElement | undefined} */ (found)?.focus({ preventScroll: true });
  return found != null;
}

/**
 * Sets CSS custom properties, which the policy of the page allows from scripts.
 * @template {HTMLElement | SVGElement} E
 * @param {E} element @param {Record<string, string | number>} properties
 * @returns {E}
 */
export function style(element, properties) {
  for (const [name, value] of Object.entries(properties)) element.style.setProperty(name, String(value));
  return element;
}

/** Calls a function once after the last of several calls. @param {() => void} run @param {number} milliseconds */
export function debounce(run, milliseconds) {
  let timer = 0;
  return () => {
    clearTimeout(timer);
    timer = window.setTimeout(run, milliseconds);
  };
}
