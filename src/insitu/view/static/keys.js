/** Keys of the page in view, and the dialogue that lists them. */

import { h } from "./dom.js";

/** @typedef {{keys: string[], what: string, run: () => void}} Shortcut */

/** @type {Shortcut[]} */
let shortcuts = [];

/** Replaces the keys. @param {Shortcut[]} of */
export function setShortcuts(of) {
  shortcuts = of;
}

export function listenForKeys() {
  document.addEventListener("keydown", (event) => {
    const target = /** @type {HTMLElement} */ (event.target);
    if (
      event.defaultPrevented ||
      event.ctrlKey ||
      event.metaKey ||
      event.altKey ||
      target.closest("input, select, textarea, dialog[open]")
    )
      return;
    if (event.key === "?") return showKeys();
    const shortcut = shortcuts.find((each) => each.keys.includes(event.key));
    if (!shortcut) return;
    event.preventDefault();
    shortcut.run();
  });
}

export function showKeys() {
  const rows = [...shortcuts, { keys: ["?"], what: "show these keys" }];
  const close = h("button", { type: "button", onclick: () => dialog.close() }, "Close");
  const dialog = /** @type {HTMLDialogElement} */ (
    h(
      "dialog",
      { class: "keys", "aria-label": "Keys", onclose: () => dialog.remove() },
      h("h2", {}, "Keys"),
      h(
        "dl",
        {},
        rows.map((row) => [
          h(
            "dt",
            {},
            row.keys.flatMap((key, i) => [i ? " or " : null, h("kbd", {}, named(key))]),
          ),
          h("dd", {}, row.what),
        ]),
      ),
      close,
    )
  );
  document.body.append(dialog);
  dialog.showModal();
}

/** @param {string} key */
function named(key) {
  return { ArrowLeft: "←", ArrowRight: "→", Escape: "Esc" }[key] ?? key;
}
