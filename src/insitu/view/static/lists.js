/** The groups and the episodes of a run as long tables with filters. */

import { get } from "./api.js";
import { fill, h } from "./dom.js";
import { ABSENT, count, duration, score } from "./format.js";
import { episodeLabel, toEpisode, toGroup } from "./links.js";
import { choice, indexing, outcomeBadge, select } from "./parts.js";
import { bar, rewardDots } from "./sparkline.js";
import { LongTable } from "./table.js";

/** @typedef {Record<string, any>} Row */

/** What of a run is listed; it is also what the address of the page keeps. */
export class Lists {
  /**
   * @param {string} run @param {URLSearchParams} parameters @param {AbortSignal} signal
   */
  constructor(run, parameters, signal) {
    this.run = run;
    this.signal = signal;
    this.epochs = 0;
    this.timer = 0;
    /** @type {[number, number]} */
    this.range = [0, 1];
    this.view = {
      list: parameters.get("list") ?? "groups",
      epoch: parameters.get("epoch") ?? "",
      outcome: parameters.get("outcome") ?? "",
      row: parameters.get("row") ?? "",
      min_reward: parameters.get("min_reward") ?? "",
      max_reward: parameters.get("max_reward") ?? "",
    };
    this.reasons = /** @type {string[]} */ ([]);
    this.controls = h("div", { class: "controls" });
    this.box = h("div");
    this.node = h(
      "section",
      { class: "section", "aria-label": "Groups and episodes", id: "episodes" },
      h("h2", {}, "Groups and episodes"),
      this.controls,
      this.box,
    );
    this.show(this.view.list);
  }

  /** @param {string} list */
  show(list) {
    this.view.list = list;
    this.table?.close();
    this.table = list === "episodes" ? this.episodes() : this.groups();
    fill(this.box, this.table.node);
    this.drawControls();
    void this.table.refresh();
  }

  /** @param {number} epochs the last complete one @param {string[]} reasons @param {[number, number]} range of rewards */
  update(epochs, reasons, range) {
    const changed = epochs !== this.epochs || reasons.join() !== this.reasons.join();
    [this.epochs, this.reasons, this.range] = [epochs, reasons, range];
    if (changed && !this.controls.contains(document.activeElement)) this.drawControls();
    return this.table?.refresh();
  }

  /** Shows one epoch. @param {string} epoch */
  choose(epoch) {
    this.view.epoch = epoch;
    this.drawControls();
    this.filtered();
    this.node.scrollIntoView({ behavior: "smooth", block: "start" });
  }

  filtered() {
    const query = new URLSearchParams(location.search);
    for (const [name, value] of Object.entries(this.view)) {
      if (value && !(name === "list" && value === "groups")) query.set(name, value);
      else query.delete(name);
    }
    history.replaceState(history.state, "", `${location.pathname}?${query}`);
    void this.table?.reset();
  }

  drawControls() {
    const { view } = this;
    const set = (/** @type {string} */ name) => (/** @type {string} */ value) => {
      view[/** @type {keyof typeof view} */ (name)] = value;
      this.filtered();
    };
    const input = (
      /** @type {string} */ label,
      /** @type {"row" | "min_reward" | "max_reward"} */ name,
      /** @type {Record<string, any>} */ attributes,
    ) => {
      const element = /** @type {HTMLInputElement} */ (
        h("input", { ...attributes, value: view[name], onchange: () => set(name)(element.value.trim()) })
      );
      return h("label", { class: "field" }, h("span", {}, label), element);
    };
    const epochs = Array.from({ length: Math.max(this.epochs + 1, Number(view.epoch) || 0) }, (_, index) =>
      String(index + 1),
    );
    const outcomes = [
      ...new Set([
        "ok",
        "failed",
        "trained",
        "sent",
        "dropped",
        "not trained yet",
        ...this.reasons,
        ...(view.outcome ? [view.outcome] : []),
      ]),
    ];
    fill(
      this.controls,
      choice(
        "List",
        view.list,
        [
          ["groups", "Groups"],
          ["episodes", "Episodes"],
        ],
        (list) => {
          this.view.list = list;
          this.filtered();
          this.show(list);
        },
      ),
      select(
        "Epoch",
        view.epoch,
        [["", "all"], ...epochs.map((epoch) => /** @type {[string, string]} */ ([epoch, epoch]))],
        set("epoch"),
      ),
      view.list === "episodes"
        ? [
            select(
              "Outcome",
              view.outcome,
              [["", "any"], ...outcomes.map((outcome) => /** @type {[string, string]} */ ([outcome, outcome]))],
              set("outcome"),
            ),
            input("Row", "row", { type: "search", size: 12, placeholder: "id" }),
            input("Reward from", "min_reward", { type: "number", step: "any", class: "short" }),
            input("to", "max_reward", { type: "number", step: "any", class: "short" }),
          ]
        : input("Row", "row", { type: "search", size: 12, placeholder: "id" }),
    );
  }

  groups() {
    const { run } = this;
    return new LongTable({
      label: "Groups",
      order: { sort: "recorded", descending: true },
      empty: "No group has been completed yet.",
      href: (/** @type {Row} */ row) => toGroup(run, /** @type {any} */ (row)),
      fetchRows: async (order, offset, limit) => {
        const { epoch, row } = this.view;
        const answer = await get(
          "groups",
          { run, epoch, row, sort: order.sort, descending: Number(order.descending), offset, limit },
          this.signal,
        );
        return { ...answer, rows: answer.groups };
      },
      columns: [
        { title: "Row", width: "minmax(7rem, 2fr)", sort: "row", cell: (row) => row.row_id },
        { title: "Epoch", width: "5rem", sort: "epoch", number: true, cell: (row) => count(row.epoch) },
        {
          title: "Rewards",
          width: "7rem",
          cell: (row) => rewardDots(row.rewards, this.range),
          help: "a dot for each reward, larger where several are equal; the line is their mean",
        },
        { title: "Mean", width: "5rem", sort: "mean", number: true, cell: (row) => score(row.mean) },
        {
          title: "Deviation",
          width: "6rem",
          sort: "std",
          number: true,
          rank: 2,
          cell: (row) => score(row.std),
          help: "standard deviation of the rewards; a group without any teaches nothing",
        },
        {
          title: "Episodes",
          width: "6rem",
          sort: "num_episodes",
          number: true,
          rank: 2,
          cell: (row) => count(row.num_episodes),
        },
        {
          title: "Left out",
          width: "minmax(8rem, 5fr)",
          sort: "dropped",
          rank: 3,
          cell: (row) =>
            Object.entries(row.dropped ?? {})
              .map(([reason, n]) => `${n} ${reason}`)
              .join(", ") || ABSENT,
        },
      ],
    });
  }

  episodes() {
    const { run } = this;
    return new LongTable({
      label: "Episodes",
      order: { sort: "recorded", descending: true },
      empty: "No episode matches.",
      href: (/** @type {Row} */ row) => toEpisode(run, row.episode),
      note: (answer) => indexing(answer.indexed),
      fetchRows: async (order, offset, limit) => {
        const { list: _, ...filters } = this.view;
        const answer = await get(
          "episodes",
          { run, ...filters, sort: order.sort, descending: Number(order.descending), offset, limit },
          this.signal,
        );
        this.askAgain(answer.indexed);
        return { ...answer, rows: answer.episodes };
      },
      columns: [
        {
          title: "Row",
          width: "minmax(7rem, 2fr)",
          sort: "row",
          cell: (row) => [row.row_id, " ", h("span", { class: "muted" }, episodeLabel(/** @type {any} */ (row)))],
        },
        { title: "Epoch", width: "4.5rem", sort: "epoch", number: true, cell: (row) => count(row.epoch) },
        {
          title: "Reward",
          width: "9.5rem",
          sort: "reward",
          number: true,
          cell: (row) => [
            bar(
              row.reward == null ? null : row.reward - Math.min(this.range[0], 0),
              this.range[1] - Math.min(this.range[0], 0),
            ),
            score(row.reward),
          ],
        },
        { title: "Outcome", width: "minmax(7rem, 2fr)", sort: "outcome", rank: 2, cell: (row) => outcomeBadge(row) },
        { title: "Calls", width: "4.5rem", sort: "calls", number: true, rank: 2, cell: (row) => count(row.calls) },
        {
          title: "Prompt",
          width: "6rem",
          sort: "prompt_tokens",
          number: true,
          rank: 3,
          cell: (row) => count(row.prompt_tokens),
          help: "tokens",
        },
        {
          title: "Sampled",
          width: "6rem",
          sort: "sampled_tokens",
          number: true,
          rank: 3,
          cell: (row) => count(row.sampled_tokens),
          help: "tokens",
        },
        {
          title: "Time",
          width: "5.5rem",
          sort: "seconds",
          number: true,
          rank: 3,
          cell: (row) => duration(row.seconds),
        },
      ],
    });
  }

  /** While the server still reads the run, its list of episodes is incomplete. @param {{groups: number, of: number} | undefined} indexed */
  askAgain(indexed) {
    clearTimeout(this.timer);
    if (indexed && indexed.groups < indexed.of && !this.signal.aborted)
      this.timer = window.setTimeout(() => void this.table?.refresh().catch(() => {}), 500);
  }

  close() {
    clearTimeout(this.timer);
    this.table?.close();
  }
}
