/** Numbers, durations and times as text. An absent value is a dash, never a zero. */

export const ABSENT = "–";

const integers = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });

/** @param {any} value @returns {value is number} */
export function isNumber(value) {
  return typeof value === "number" && Number.isFinite(value);
}

/** Four significant digits; integers in full. @param {any} value */
export function number(value) {
  if (!isNumber(value)) return ABSENT;
  if (Number.isInteger(value)) return integers.format(value);
  const size = Math.abs(value);
  if (size >= 1000) return integers.format(value);
  if (size < 0.001) return value.toExponential(2).replace("e-", "e−").replace(/^-/, "−");
  return minus(
    size >= 100 ? value.toFixed(1) : size >= 10 ? value.toFixed(2) : size >= 1 ? value.toFixed(3) : trimmed(value),
  );
}

/** @param {number} value */
function trimmed(value) {
  return value.toPrecision(3);
}

/** A score or reward, with three decimals. @param {any} value */
export function score(value) {
  if (!isNumber(value)) return ABSENT;
  return Math.abs(value) >= 1000 ? number(value) : minus(value.toFixed(3));
}

/** With its sign. @param {any} value @param {number} [digits] */
export function signed(value, digits = 3) {
  if (!isNumber(value)) return ABSENT;
  const text = value.toFixed(digits);
  if (Number(text) === 0) return text.replace("-", "");
  return value > 0 ? `+${text}` : minus(text);
}

/** @param {string} text */
function minus(text) {
  return text.replace(/^-/, "−");
}

/** 12,345 @param {any} value */
export function count(value) {
  return isNumber(value) ? integers.format(value) : ABSENT;
}

/** 12.3K @param {any} value */
export function compact(value) {
  if (!isNumber(value)) return ABSENT;
  return Math.abs(value) < 10000 ? number(value) : short.format(value);
}

/** @param {any} value */
export function percent(value) {
  if (!isNumber(value)) return ABSENT;
  const share = value * 100;
  return `${share !== 0 && Math.abs(share) < 1 ? share.toFixed(2) : share.toFixed(share % 1 && share < 10 ? 1 : 0)} %`;
}

/** `3 calls` @param {any} value @param {string} noun @param {string} [nouns] */
export function plural(value, noun, nouns = `${noun}s`) {
  return `${count(value)} ${value === 1 ? noun : nouns}`;
}

/** @param {any} seconds */
export function duration(seconds) {
  if (!isNumber(seconds)) return ABSENT;
  if (seconds === 0) return "0 s";
  if (seconds < 0.01) return `${(seconds * 1000).toFixed(1)} ms`;
  if (seconds < 1) return `${(seconds * 1000).toFixed(0)} ms`;
  if (seconds < 60) return `${seconds.toFixed(seconds < 10 ? 2 : 1)} s`;
  const whole = Math.round(seconds);
  const [days, hours, minutes] = [
    Math.floor(whole / 86400),
    Math.floor(whole / 3600) % 24,
    Math.floor(whole / 60) % 60,
  ];
  if (days) return `${days} d ${hours} h`;
  return hours ? `${hours} h ${minutes} min` : `${minutes} min ${whole % 60} s`;
}

/** Local time, with the date unless it is today. @param {any} iso */
export function when(iso) {
  const time = new Date(iso);
  if (!iso || Number.isNaN(time.getTime())) return ABSENT;
  const clock = time.toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit" });
  const today = new Date().toDateString() === time.toDateString();
  return today
    ? clock
    : `${time.toLocaleDateString("en-GB", { day: "numeric", month: "short", year: "numeric" })} ${clock}`;
}

/** A value of a file as text: strings as they are, everything else as JSON. @param {any} value */
export function plain(value) {
  if (value == null) return ABSENT;
  return typeof value === "string" ? value : JSON.stringify(value);
}

/** Indented JSON if the text is JSON of an object or a list, or else the text. @param {string} text */
export function pretty(text) {
  if (!/^\s*[[{]/.test(text)) return text;
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}
