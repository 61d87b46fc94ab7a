/** Curves over epochs, drawn by uPlot in the colours of the stylesheet. */

import { fill, h, style } from "./dom.js";
import { isNumber, number, score } from "./format.js";
import uPlot from "./vendor/uPlot.esm.js";

/**
 * A curve. `colour` is a custom property of the stylesheet; `band` has a lower and an upper bound for each x, and `sparse`
 * curves have points at some epochs only, which a line connects.
 * @typedef {{label: string, colour: string, points: [number, number | null][], band?: [number, number, number][], sparse?: boolean,
 *   dashed?: boolean, faint?: boolean}} Series
 */

/**
 * `from_zero` keeps 0 in view, `format` prints a value, `pick` is called with the epoch that was clicked.
 * @typedef {{title: string, help?: string, series: Series[], format?: (value: any) => string, from_zero?: boolean, tall?: boolean,
 *   pick?: (epoch: number) => void}} Chart
 */

const SYNC = "epochs";
const MANY = 2;

/** @param {string} property */
const colour = (property) => getComputedStyle(document.documentElement).getPropertyValue(property).trim();

/** A chart that can be given other curves. */
export class ChartCard {
  /** @param {Chart} chart */
  constructor(chart) {
    this.chart = chart;
    this.values = h("span", { class: "values" });
    this.plot = h("div", { class: "plot", role: "img" });
    this.node = h(
      "figure",
      { class: chart.tall ? "chart tall" : "chart" },
      h("figcaption", {}, h("span", { class: "title", title: chart.help }, chart.title), this.values),
      this.plot,
    );
    /** @type {uPlot | null} */
    this.uplot = null;
    this.drawn = "";
    /** @type {[number, number] | null} */
    this.span = null;
    this.resizing = new ResizeObserver(() => this.resize());
    this.resizing.observe(this.plot);
    this.scheme = matchMedia("(prefers-color-scheme: dark)");
    this.redraw = () => this.draw();
    this.scheme.addEventListener("change", this.redraw);
  }

  /** @param {Series[]} series @param {[number, number] | null} [span] the planned epochs */
  update(series, span = null) {
    const text = JSON.stringify([series, span]);
    if (text === this.drawn) return;
    this.drawn = text;
    this.span = span;
    this.chart.series = series;
    this.plot.setAttribute("aria-label", summary(this.chart, this.span));
    if (this.uplot) this.draw();
  }

  resize() {
    const { clientWidth: width, clientHeight: height } = this.plot;
    if (!width || !height) return;
    if (!this.uplot) this.draw();
    else if (this.uplot.width !== width) this.uplot.setSize({ width, height });
  }

  draw() {
    const { clientWidth: width, clientHeight: height } = this.plot;
    if (!width || !height) return;
    this.uplot?.destroy();
    const { data, series, bands } = columns(this.chart.series);
    /** @type {any} */
    const options = { width, height, series, bands, ...this.options() };
    this.uplot = new uPlot(options, /** @type {any} */ (data), this.plot);
    this.show(null);
    const { pick } = this.chart;
    if (pick)
      this.uplot.over.addEventListener("click", () => {
        const index = this.uplot?.cursor.idx;
        if (index != null) pick(data[0][index]);
      });
  }

  /** What all charts have in common. @returns {any} */
  options() {
    const [ink, rule, font] = [colour("--muted"), colour("--rule"), '11px system-ui, "Segoe UI", sans-serif'];
    const format = this.chart.format ?? number;
    return {
      legend: { show: false },
      padding: [6, 10, 0, 0],
      cursor: { y: false, drag: { x: false, y: false }, sync: { key: SYNC, scales: ["x", null] }, points: { size: 7 } },
      scales: {
        x: {
          time: false,
          range: (/** @type {any} */ _, /** @type {number} */ min, /** @type {number} */ max) =>
            this.span
              ? [Math.min(min ?? this.span[0], this.span[0]), Math.max(max ?? this.span[1], this.span[1], this.span[0] + 1)]
              : min === max
                ? [min - 1, max + 1]
                : [min, max],
        },
        y: {
          range: (/** @type {any} */ _, /** @type {number} */ min, /** @type {number} */ max) =>
            padded(min, max, this.chart.from_zero),
        },
      },
      axes: [
        {
          stroke: ink,
          font,
          size: 22,
          gap: 3,
          grid: { show: false },
          ticks: { stroke: rule, size: 4 },
          incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000],
          space: 36,
        },
        {
          stroke: ink,
          font,
          size: 52,
          gap: 4,
          grid: { stroke: rule, width: 1 },
          ticks: { show: false },
          space: 25,
          values: (/** @type {any} */ _, /** @type {number[]} */ splits) => splits.map(tick(splits, format)),
        },
      ],
      hooks: { setCursor: [(/** @type {uPlot} */ plot) => this.show(plot.cursor.idx ?? null)] },
    };
  }

  /** Shows the values at an index, or the last ones. @param {number | null} index */
  show(index) {
    const format = this.chart.format ?? number;
    const { series } = this.chart;
    const xs = this.uplot?.data[0] ?? [];
    const x = index == null ? null : xs[index];
    const shown = series
      .filter((each) => !each.faint)
      .map((each) => ({ each, value: at(each, x) }))
      .filter(({ value }) => value != null);
    const parts =
      index == null && series.length > MANY
        ? []
        : shown.map(({ each, value }) =>
            style(h("span", { class: "value", title: each.label }, format(value)), {
              "--series": `var(${each.colour})`,
            }),
          );
    fill(this.values, x == null ? null : h("span", { class: "at" }, `epoch ${x}`), parts);
  }

  close() {
    this.resizing.disconnect();
    this.scheme.removeEventListener("change", this.redraw);
    this.uplot?.destroy();
  }
}

/** The value at an epoch, or the last one. @param {Series} series @param {number | null} x */
function at(series, x) {
  if (x != null) return series.points.find(([epoch]) => epoch === x)?.[1];
  return series.points.findLast(([, value]) => value != null)?.[1];
}

/** @param {Series[]} curves */
function columns(curves) {
  const xs = [...new Set(curves.flatMap((curve) => curve.points.map(([x]) => x)))].sort((a, b) => a - b);
  const position = new Map(xs.map((x, index) => [x, index]));
  const data = [xs];
  const series = [{}];
  const bands = [];
  const column = (/** @type {[number, number | null][]} */ points) => {
    const values = new Array(xs.length).fill(null);
    for (const [x, value] of points) if (isNumber(value)) values[position.get(x) ?? 0] = value;
    return values;
  };
  for (const curve of curves) {
    const stroke = colour(curve.colour);
    const few = curve.sparse || curve.points.length <= 40;
    const common = { spanGaps: curve.sparse ?? false };
    if (curve.band?.length) {
      bands.push({
        series: [series.length, series.length + 1],
        fill: `color-mix(in srgb, ${stroke} 16%, transparent)`,
      });
      for (const bound of [2, 1]) {
        data.push(column(curve.band.map((each) => [each[0], each[bound]])));
        series.push({ ...common, points: { show: false }, stroke: "transparent" });
      }
    }
    data.push(column(curve.points));
    series.push({
      ...common,
      stroke: curve.faint ? `color-mix(in srgb, ${stroke} 35%, transparent)` : stroke,
      width: curve.faint ? 1 : 1.75,
      dash: curve.dashed ? [5, 4] : undefined,
      points: { show: few && !curve.faint, size: curve.sparse ? 6 : 4, fill: stroke, stroke },
    });
  }
  return { data, series, bands };
}

/** @param {number | null} min @param {number | null} max @param {boolean} [from_zero] */
function padded(min, max, from_zero) {
  if (min == null || max == null) return [0, 1];
  const low = from_zero ? Math.min(min, 0) : min;
  const least = Math.abs(max) * (max === low ? 0.1 : 1e-3); // a curve that hardly changes is drawn flat
  const room = max - low < least ? least : (max - low) * 0.08 || 1;
  return [from_zero && low === 0 ? 0 : low - room, max + room];
}

/** Prints the numbers of an axis with equally many decimals. @param {number[]} splits @param {(value: any) => string} format */
function tick(splits, format) {
  if (format !== number && format !== score) return format;
  const step = Math.abs((splits[1] ?? 1) - (splits[0] ?? 0));
  if (step < 1e-4) return number;
  let decimals = 0;
  while (decimals < 5 && Math.abs(step * 10 ** decimals - Math.round(step * 10 ** decimals)) > 1e-6) decimals += 1;
  return decimals > 4 || Math.abs(splits[0]) >= 1000
    ? number
    : (/** @type {number} */ value) => value.toFixed(decimals).replace("-", "−");
}

/** What a chart shows in a sentence, for those who do not see it. @param {Chart} chart @param {[number, number] | null} planned */
function summary(chart, planned) {
  const format = chart.format ?? number;
  const span = planned ? ` Planned: epochs ${planned[0]} to ${planned[1]}.` : "";
  const curves = chart.series.filter((each) => !each.faint).map(({ label, points }) => {
    const known = points.filter(([, value]) => value != null);
    if (!known.length) return `${label}: no values`;
    const [first, last] = [known[0], known[known.length - 1]];
    return `${label}: ${format(first[1])} at epoch ${first[0]}, ${format(last[1])} at epoch ${last[0]}`;
  });
  return `${chart.title}. ${curves.join("; ")}.${span}`;
}
