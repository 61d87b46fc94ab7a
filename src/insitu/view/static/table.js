/** A table of any length: rows are fetched by offset as they come into view, and only those in view are elements. */

import { fill, h, style } from "./dom.js";
import { count } from "./format.js";

/**
 * A column. `sort` is the server's name of the order, `rank` the importance: columns of rank 2 and 3 are hidden where there is little room.
 * @template Row
 * @typedef {{title: string, cell: (row: Row) => import("./dom.js").Child | import("./dom.js").Child[], width: string, sort?: string,
 *   number?: boolean, rank?: 1 | 2 | 3, help?: string}} Column
 */

/** @typedef {{sort: string, descending: boolean}} Order */

const ROW = 30;
const PAGE = 100;
const AROUND = 8;

/** @template Row */
export class LongTable {
  /**
   * `fetchRows` returns rows from an offset and the total; `href` is where a row leads.
   * @param {{label: string, columns: Column<Row>[], order: Order, sorted?: (order: Order) => void, href: (row: Row) => string, note?: (answer: any) => string,
   *   fetchRows: (order: Order, offset: number, limit: number) => Promise<{total: number, rows: Row[]}>, empty: string}} table
   */
  constructor(table) {
    this.table = table;
    this.order = table.order;
    this.total = 0;
    /** @type {Map<number, Row[]>} */
    this.pages = new Map();
    /** @type {Set<number>} */
    this.asked = new Set();
    this.generation = 0;
    this.frame = 0;
    this.header = h("div", { role: "row", class: "tr th" });
    this.body = h("div", { role: "rowgroup", class: "tbody" });
    this.status = h("p", { class: "table-note", role: "status" });
    this.scroller = h(
      "div",
      { class: "scroller", tabindex: "0", role: "region", "aria-label": table.label, onscroll: () => this.schedule() },
      h(
        "div",
        { class: "long-table", role: "table", "aria-label": table.label },
        h("div", { role: "rowgroup", class: "thead" }, this.header),
        this.body,
      ),
    );
    this.node = h("div", { class: "table-box" }, this.scroller, this.status);
    style(this.node, { "--columns": table.columns.map(({ width }) => width).join(" ") });
    for (const rank of [1, 2])
      style(this.node, {
        [`--columns-${rank}`]: table.columns
          .filter((column) => (column.rank ?? 1) <= rank)
          .map(({ width }) => width)
          .join(" "),
      });
    this.resizing = new ResizeObserver(() => this.schedule());
    this.resizing.observe(this.scroller);
    this.drawHeader();
  }

  drawHeader() {
    fill(
      this.header,
      this.table.columns.map((column) => {
        const sorted = column.sort === this.order.sort;
        const direction = sorted ? (this.order.descending ? "descending" : "ascending") : null;
        const text = column.sort
          ? h(
              "button",
              { type: "button", onclick: () => this.sortBy(column) },
              column.title,
              sorted ? (this.order.descending ? " ↓" : " ↑") : "",
            )
          : column.title;
        return h(
          "div",
          { role: "columnheader", class: classes(column), "aria-sort": direction, title: column.help },
          text,
        );
      }),
    );
  }

  /** @param {Column<Row>} column */
  sortBy(column) {
    const sort = column.sort ?? "";
    const same = sort === this.order.sort;
    this.order = { sort, descending: same ? !this.order.descending : Boolean(column.number) };
    this.table.sorted?.(this.order);
    this.drawHeader();
    this.reset();
  }

  /** Shows the rows of another filter from the first. */
  reset() {
    this.scroller.scrollTop = 0;
    return this.refresh();
  }

  /** Reads the rows in view again and forgets the others. */
  async refresh() {
    this.generation += 1;
    this.asked.clear();
    const page = Math.floor(this.scroller.scrollTop / ROW / PAGE);
    try {
      await this.load(page, true);
    } catch (error) {
      this.asked.delete(page);
      if (error instanceof Error && error.name !== "AbortError") this.status.textContent = error.message;
    }
    this.schedule();
  }

  /** @param {number} page @param {boolean} [fresh] */
  async load(page, fresh = false) {
    if (this.asked.has(page)) return;
    this.asked.add(page);
    const { generation } = this;
    const answer = await this.table.fetchRows(this.order, page * PAGE, PAGE);
    if (generation !== this.generation) return;
    if (fresh) this.pages.clear();
    this.pages.set(page, answer.rows);
    this.total = answer.total;
    style(this.body, { height: `${this.total * ROW}px` });
    this.scroller.classList.toggle("short", this.total * ROW < 420);
    this.scroller.querySelector("[role=table]")?.setAttribute("aria-rowcount", String(this.total + 1));
    const note = this.table.note?.(answer) ?? "";
    this.status.textContent = this.total
      ? `${count(this.total)} ${this.total === 1 ? "row" : "rows"}${note}`
      : note || this.table.empty;
    this.schedule();
  }

  /** Moves the focus to another row. @param {number} by */
  move(by) {
    const focused = this.body.contains(document.activeElement)
      ? Number(document.activeElement?.closest(".tr")?.getAttribute("aria-rowindex")) - 2
      : -1;
    const index = Math.max(0, Math.min(this.total - 1, focused + by));
    const { scrollTop, clientHeight } = this.scroller;
    const room = clientHeight - 2 * ROW;
    if (index * ROW < scrollTop || index * ROW > scrollTop + room)
      this.scroller.scrollTop = index * ROW - (by > 0 ? room : 0);
    this.draw();
    /** @type {HTMLElement | null} */ (this.body.querySelector(`[aria-rowindex="${index + 2}"] a`))?.focus({
      preventScroll: true,
    });
  }

  schedule() {
    this.frame ||= requestAnimationFrame(() => {
      this.frame = 0;
      this.draw();
    });
  }

  draw() {
    const first = Math.max(0, Math.floor(this.scroller.scrollTop / ROW) - AROUND);
    const last = Math.min(this.total, Math.ceil((this.scroller.scrollTop + this.scroller.clientHeight) / ROW) + AROUND);
    const focused = this.body.contains(document.activeElement)
      ? document.activeElement?.closest(".tr")?.getAttribute("aria-rowindex")
      : null;
    const rows = [];
    for (let index = first; index < last; index++) rows.push(this.row(index));
    fill(this.body, rows);
    if (focused) {
      /** @type {HTMLElement | null} */ (this.body.querySelector(`[aria-rowindex="${focused}"] a`))?.focus({
        preventScroll: true,
      });
    }
    for (let page = Math.floor(first / PAGE); page * PAGE < last; page++)
      if (!this.pages.has(page)) void this.load(page).catch(() => this.asked.delete(page));
  }

  /** @param {number} index */
  row(index) {
    const row = this.pages.get(Math.floor(index / PAGE))?.[index % PAGE];
    const element = style(h("div", { role: "row", class: row ? "tr" : "tr waiting", "aria-rowindex": index + 2 }), {
      top: `${index * ROW}px`,
    });
    if (!row) return element;
    this.table.columns.forEach((column, position) => {
      const content = column.cell(row);
      element.append(
        h(
          "div",
          { role: "cell", class: classes(column) },
          position ? content : h("a", { class: "row-link", href: this.table.href(row) }, content),
        ),
      );
    });
    return element;
  }

  close() {
    this.resizing.disconnect();
  }
}

/** @param {Column<any>} column */
function classes(column) {
  return `td rank-${column.rank ?? 1}${column.number ? " n" : ""}`;
}
