/** The groups and the episodes of a run as long tables with filters. */

import { get } from "./api.js";
import { debounce, fill, h } from "./dom.js";
import { ABSENT, count, duration, score } from "./format.js";
import { episodeLabel, remember, toEpisode, toGroup } from "./links.js";
import { choice, indexing, outcomeBadge, select } from "./parts.js";
import { sideTags } from "./pairs.js";
import { bar, rewardDots } from "./sparkline.js";
import { LongTable } from "./table.js";

/** @typedef {Record<string, any>} Row */

/** @param {string | null} text */
const quoted = (text) => (text == null ? ABSENT : h("span", { title: text }, text));

/** @param {{groups: number, of: number} | undefined} searched @param {string} text */
const searching = (searched, text) =>
  text && searched && searched.groups < searched.of
    ? ` · searched ${count(searched.groups)} of ${count(searched.of)} groups so far`
    : "";

/** What of a run is listed; it is also what the address of the page keeps. */
export class Lists {
  /**
   * @param {string} run @param {URLSearchParams} parameters @param {AbortSignal} signal
   * @param {(collected: {epoch: number | null, episodes: number | null}) => void} onCollected
   */
  constructor(run, parameters, signal, onCollected) {
    this.run = run;
    this.onCollected = onCollected;
    this.signal = signal;
    /** The newest epoch of which a group is recorded. */
    this.newest = 0;
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
      text: parameters.get("text") ?? "",
    };
    this.order = {
      sort: parameters.get("sort") ?? "recorded",
      descending: parameters.get("descending") !== "0",
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
    if (list !== this.view.list) {
      this.view.list = list;
      this.order = { sort: "recorded", descending: true };
      this.keep();
    }
    this.table?.close();
    this.table = list === "episodes" ? this.episodes() : this.groups();
    fill(this.box, this.table.node);
    this.drawControls();
    void this.table.refresh();
  }

  /** @param {string[]} reasons @param {[number, number]} range of rewards */
  update(reasons, range) {
    this.range = range;
    this.offer(this.newest, reasons);
    return this.table?.refresh();
  }

  /** What can be chosen. @param {number} newest @param {string[]} reasons */
  offer(newest, reasons) {
    const changed = newest !== this.newest || reasons.join() !== this.reasons.join();
    [this.newest, this.reasons] = [newest, reasons];
    if (changed && !this.controls.contains(document.activeElement)) this.drawControls();
  }

  /** Shows one epoch. @param {string} epoch */
  choose(epoch) {
    this.view.epoch = epoch;
    this.drawControls();
    this.filtered();
    this.node.scrollIntoView({ behavior: "smooth", block: "start" });
  }

  filtered(step = true) {
    this.keep(step);
    void this.table?.reset();
  }

  /** Puts what is listed, and how, into the address. @param {boolean} [step] */
  keep(step = true) {
    const { sort, descending } = this.order;
    const list = this.view.list === "groups" ? "" : this.view.list;
    remember(
      { ...this.view, list, sort: sort === "recorded" ? "" : sort, descending: descending ? "" : "0" },
      step,
    );
  }

  /** The rows of the list from an offset. @param {import("./table.js").Order} order @param {number} offset @param {number} limit */
  async fetch(order, offset, limit) {
    const { list, ...all } = this.view;
    const { epoch, row, text } = all;
    const filters = list === "groups" ? { epoch, row, text } : all;
    const { sort, descending } = order;
    const asked = { run: this.run, ...filters, sort, descending: Number(descending), offset, limit };
    const answer = await get(list, asked, this.signal);
    this.onCollected(answer.collected);
    this.offer(answer.collected.epoch ?? 0, this.reasons);
    return { ...answer, rows: answer[list] };
  }

  /** Saves all rows that are listed, as JSON lines. */
  async download() {
    const lines = [];
    for (let offset = 0, total = 1; offset < total; offset += 1000) {
      const answer = await this.fetch(this.order, offset, 1000);
      total = answer.total;
      lines.push(...answer.rows.map((/** @type {Row} */ row) => `${JSON.stringify(row)}\n`));
    }
    const href = URL.createObjectURL(new Blob(lines, { type: "application/x-ndjson" }));
    h("a", { href, download: `${this.view.list}.jsonl` }).click();
    setTimeout(() => URL.revokeObjectURL(href), 10_000);
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
    const epochs = Array.from({ length: Math.max(this.newest, Number(view.epoch) || 0) }, (_, index) => String(index + 1));
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
        (list) => this.show(list),
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
      this.search(),
      h("button", { type: "button", onclick: () => void this.download().catch(() => {}) }, "Download"),
    );
  }

  search() {
    const later = debounce(() => this.filtered(false), 300);
    const element = /** @type {HTMLInputElement} */ (
      h("input", {
        type: "search",
        size: 16,
        value: this.view.text,
        placeholder: "in messages and answers",
        oninput: () => {
          this.view.text = element.value;
          later();
        },
      })
    );
    return h("label", { class: "field" }, h("span", {}, "Search"), element);
  }

  groups() {
    const { run } = this;
    return new LongTable({
      label: "Groups",
      ...this.shared(),
      empty: "No group has been completed yet.",
      href: (/** @type {Row} */ row) => toGroup(run, /** @type {any} */ (row)),
      columns: [
        { title: "Row", width: "minmax(7rem, 2fr)", sort: "row", cell: (row) => row.row_id },
        { title: "Question", width: "minmax(8rem, 4fr)", rank: 2, cell: (row) => quoted(row.question) },
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
          width: "minmax(8rem, 3fr)",
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
      ...this.shared(),
      empty: "No episode matches.",
      href: (/** @type {Row} */ row) => toEpisode(run, row.episode),
      columns: [
        {
          title: "Row",
          width: "minmax(7rem, 2fr)",
          sort: "row",
          cell: (row) => [row.row_id, h("span", { class: "muted" }, `, ${episodeLabel(/** @type {any} */ (row))}`)],
        },
        { title: "Epoch", width: "4.5rem", sort: "epoch", number: true, cell: (row) => count(row.epoch) },
        { title: "Question", width: "minmax(7rem, 3fr)", rank: 3, cell: (row) => quoted(row.question) },
        { title: "Answer", width: "minmax(7rem, 3fr)", rank: 2, cell: (row) => quoted(row.answer) },
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
        { title: "Outcome", width: "minmax(7rem, 2fr)", sort: "outcome", rank: 2, cell: (row) => [outcomeBadge(row), " ", sideTags(row.sides?.split(", "))] },
        { title: "Calls", width: "4.5rem", sort: "calls", number: true, rank: 2, cell: (row) => count(row.calls) },
        {
          title: "Prompt tokens",
          width: "8rem",
          sort: "prompt_tokens",
          number: true,
          rank: 3,
          cell: (row) => count(row.prompt_tokens),
        },
        {
          title: "Sampled tokens",
          width: "8.5rem",
          sort: "sampled_tokens",
          number: true,
          rank: 3,
          cell: (row) => count(row.sampled_tokens),
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

  /** What both tables have in common. */
  shared() {
    return {
      order: this.order,
      sorted: (/** @type {import("./table.js").Order} */ order) => {
        this.order = order;
        this.keep();
      },
      note: (/** @type {any} */ answer) => indexing(answer.indexed) + searching(answer.searched, this.view.text),
      fetchRows: async (/** @type {import("./table.js").Order} */ order, /** @type {number} */ offset, /** @type {number} */ limit) => {
        const answer = await this.fetch(order, offset, limit);
        this.askAgain(this.view.list === "episodes" ? answer.indexed : null, answer.searched);
        return answer;
      },
    };
  }

  /** While the server still reads the run, its lists are incomplete. @param {...({groups: number, of: number} | null)} read */
  askAgain(...read) {
    clearTimeout(this.timer);
    if (read.some((each) => each && each.groups < each.of) && !this.signal.aborted)
      this.timer = window.setTimeout(() => void this.table?.refresh().catch(() => {}), 500);
  }

  close() {
    clearTimeout(this.timer);
    this.table?.close();
  }
}
