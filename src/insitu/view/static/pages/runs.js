/** The runs of a folder: how each is doing, sorted and filtered, several to compare. */

import { get } from "../api.js";
import { fill, h } from "../dom.js";
import { warnings } from "../figures.js";
import { ABSENT, compact, count, duration, isNumber, plural, score, when } from "../format.js";
import { remember as keep, link, runName, toRun } from "../links.js";
import { arrow, select, stateBadge } from "../parts.js";
import { bar, sparkline } from "../sparkline.js";

/** @typedef {{run: string, [key: string]: any}} Run */

/** Title, what it is sorted by, whether large values come first. @type {[string, (run: Run) => any, boolean, string][]} */
const COLUMNS = [
  ["Run", (run) => runName(run), false, "name"],
  ["State", (run) => run.status, false, "state"],
  ["Held-out score", (run) => run.best_score, true, "score"],
  ["Training reward", (run) => run.rewards?.at(-1)?.[1], true, "reward"],
  ["Epochs", (run) => run.epoch, true, "epochs"],
  ["Trained tokens", (run) => run.tokens, true, "tokens"],
  ["Time", (run) => run.seconds, true, "time"],
  ["Started", (run) => run.started, true, "started"],
];

/** @param {import("../app.js").Context} context @returns {Promise<import("../app.js").Page>} */
export async function runsPage({ parameters, signal, go }) {
  let answer = await get("runs", {}, signal);
  if (location.pathname === "/" && answer.runs.length === 1 && answer.runs[0].run === ".") {
    queueMicrotask(() => go(toRun("."), true));
  }
  const view = {
    text: parameters.get("filter") ?? "",
    state: parameters.get("state") ?? "",
    sort: parameters.get("sort") ?? "",
    descending: parameters.get("descending") !== "0",
  };
  const chosen = new Set();
  const head = h("thead");
  const body = h("tbody");
  const compare = h("p", { class: "compare-bar", role: "status" });
  const heading = h("h1");

  const draw = () => {
    drawHead();
    const runs = visible(answer.runs, view);
    fill(heading, "Runs");
    fill(
      body,
      runs.length
        ? runs.map((run) => row(run, chosen, drawCompare))
        : h("tr", {}, h("td", { colspan: COLUMNS.length + 1, class: "empty" }, emptyText(answer))),
    );
    drawCompare();
  };
  const drawHead = () =>
    fill(
      head,
      h(
        "tr",
        {},
        h("th", { class: "tick" }, h("span", { class: "sr" }, "Compare")),
        COLUMNS.map(([title, , descending, key]) => {
          const sorted = view.sort === key;
          const sort = () => {
            [view.descending, view.sort] = [sorted ? !view.descending : descending, key];
            remember();
            draw();
          };
          return h(
            "th",
            {
              scope: "col",
              class: `c-${key}`,
              "aria-sort": sorted ? (view.descending ? "descending" : "ascending") : null,
            },
            h("button", { type: "button", onclick: sort }, title, sorted ? (view.descending ? " ↓" : " ↑") : ""),
          );
        }),
      ),
    );
  const drawCompare = () => {
    const names = [...chosen];
    const open =
      names.length > 1
        ? link(toRun(names[0], names.slice(1)), { class: "button" }, `Compare ${names.length} runs`)
        : null;
    const clear = () => {
      chosen.clear();
      draw();
    };
    fill(
      compare,
      names.length
        ? [open ?? "Choose another run to compare it with.", h("button", { type: "button", onclick: clear }, "Clear")]
        : null,
    );
  };
  const remember = (step = true) => {
    const descending = view.sort && !view.descending ? "0" : "";
    keep({ filter: view.text, state: view.state, sort: view.sort, descending }, step);
  };
  const filter = /** @type {HTMLInputElement} */ (
    h("input", {
      type: "search",
      value: view.text,
      placeholder: "name, model, method",
      oninput: () => {
        view.text = filter.value;
        remember(false);
        draw();
      },
    })
  );
  const states = select(
    "State",
    view.state,
    [
      ["", "any"],
      ...["running", "completed", "failed", "interrupted", "killed", "forked"].map(
        (state) => /** @type {[string, string]} */ ([state, state === "killed" ? "died" : state]),
      ),
    ],
    (state) => {
      view.state = state;
      remember();
      draw();
    },
  );
  const move = (/** @type {number} */ by) => {
    const links = /** @type {HTMLElement[]} */ ([...body.querySelectorAll("th a")]);
    links[
      Math.max(0, Math.min(links.length - 1, links.indexOf(/** @type {HTMLElement} */ (document.activeElement)) + by))
    ]?.focus();
  };
  draw();
  const node = h(
    "div",
    { class: "page" },
    h("header", { class: "page-head" }, heading, h("p", { class: "sub mono" }, answer.folder)),
    h(
      "div",
      { class: "controls" },
      h("label", { class: "field grow" }, h("span", {}, "Filter"), filter),
      states,
      compare,
    ),
    h("table", { class: "runs" }, head, body),
  );
  return {
    title: "Runs",
    crumbs: [],
    node,
    update: async () => {
      answer = await get("runs", {}, signal);
      draw();
    },
    shortcuts: [
      { keys: ["j"], what: "next run", run: () => move(1) },
      { keys: ["k"], what: "previous run", run: () => move(-1) },
      { keys: ["/"], what: "filter the runs", run: () => filter.focus() },
    ],
  };
}

/** @param {Run[]} runs @param {{text: string, state: string, sort: string, descending: boolean}} view */
function visible(runs, view) {
  const text = view.text.toLowerCase();
  const found = runs.filter(
    (run) =>
      (!view.state || run.status === view.state) &&
      `${run.run} ${run.model ?? ""} ${run.method ?? ""}`.toLowerCase().includes(text),
  );
  const column = COLUMNS.find(([, , , key]) => key === view.sort);
  if (!column) return found.toSorted(newestFirst);
  const sign = view.descending ? -1 : 1;
  const value = column[1];
  return found.toSorted((a, b) => {
    const [x, y] = [value(a), value(b)];
    if (x == null || y == null) return Number(x == null) - Number(y == null);
    return sign * (typeof x === "string" ? x.localeCompare(y, "en", { numeric: true }) : x - y);
  });
}

/** Running ones, then the newest. @param {Run} a @param {Run} b */
const newestFirst = (a, b) =>
  Number(b.status === "running") - Number(a.status === "running") ||
  (b.started ?? b.written ?? "").localeCompare(a.started ?? a.written ?? "");

/** @param {Run} run @param {Set<string>} chosen @param {() => void} changed */
function row(run, chosen, changed) {
  const tick = /** @type {HTMLInputElement} */ (
    h("input", {
      type: "checkbox",
      checked: chosen.has(run.run),
      "aria-label": `Compare ${runName(run)}`,
      onchange: () => {
        if (tick.checked) chosen.add(run.run);
        else chosen.delete(run.run);
        changed();
      },
    })
  );
  const about = [run.method, run.model?.split("/").slice(-2).join("/")].filter(Boolean).join(" · ");
  const reward = run.rewards?.at(-1)?.[1];
  const warned = warnings(run.last_epochs ?? []);
  return h(
    "tr",
    {},
    h("td", { class: "tick" }, tick),
    h(
      "th",
      { scope: "row", class: "c-name" },
      link(toRun(run.run), {}, runName(run)),
      h("span", { class: "about" }, about),
      run.error ? h("span", { class: "about bad", title: run.error }, run.error) : null,
      run.problems?.length
        ? h(
            "span",
            { class: "about warn", title: run.problems.join("\n") },
            `⚠ ${plural(run.problems.length, "problem")} with its files`,
          )
        : null,
      warned.length ? h("span", { class: "about warn", title: warned.join("\n") }, `⚠ ${warned[0]}`) : null,
    ),
    h("td", { class: "c-state" }, stateBadge(run.status)),
    h("td", { class: "c-score", "data-label": "held-out score" }, scoreCell(run)),
    h(
      "td",
      { class: "c-reward", "data-label": "training reward" },
      sparkline(run.rewards ?? [], "training reward", "--amber"),
      h("span", { class: "num" }, score(reward)),
    ),
    h(
      "td",
      { class: "c-epochs", "data-label": "epochs" },
      h("span", { class: "num" }, `${count(run.epoch)} / ${count(run.epochs)}`),
      bar(run.epoch, run.epochs ?? 0),
    ),
    h("td", { class: "c-tokens num", "data-label": "tokens" }, compact(run.tokens)),
    h("td", { class: "c-time num", "data-label": "time" }, duration(run.seconds)),
    h(
      "td",
      { class: "c-started num", "data-label": "started" },
      h("time", { datetime: run.started, title: run.started }, when(run.started)),
    ),
  );
}

/** @param {Run} run */
function scoreCell(run) {
  if (!isNumber(run.best_score)) return h("span", { class: "num" }, ABSENT);
  const improved = run.best_epoch !== run.scores?.[0]?.[0];
  const where =
    isNumber(run.best_epoch) && run.best_epoch !== run.scores?.at(-1)?.[0] ? `best, epoch ${run.best_epoch}` : null;
  return [
    sparkline(run.scores ?? [], "held-out score"),
    h(
      "span",
      { class: "num" },
      improved ? arrow(score(run.first_score), score(run.best_score)) : h("strong", {}, score(run.best_score)),
    ),
    where && h("span", { class: "about" }, where),
  ];
}

/** @param {{runs: Run[], folder: string, note?: string | null}} answer */
function emptyText(answer) {
  if (answer.runs.length) return "No run matches the filter.";
  return answer.note
    ? answer.note
    : `There is no run in ${answer.folder} yet. It appears here when \`insitu finetune\` starts one.`;
}
