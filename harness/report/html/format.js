// SPDX-License-Identifier: Apache-2.0
// Numbers as text. null and NaN read as a dash: the value does not apply.

const DASH = "\u2013";

function toNumber(value) {
  return value === null || value === undefined ? NaN : Number(value);
}

function formatNumber(value, digits = 3) {
  value = toNumber(value);
  if (Number.isNaN(value)) return DASH;
  if (!Number.isFinite(value)) return value > 0 ? "\u221e" : "-\u221e";
  if (value === 0) return "0";
  const magnitude = Math.abs(value);
  if (magnitude >= 1e6 || magnitude < 1e-4) {
    const [mantissa, exponent] = value.toExponential(digits - 1).split("e");
    return `${Number(mantissa)}e${Number(exponent)}`;
  }
  return String(Number(value.toPrecision(magnitude >= 1000 ? Math.max(digits, 4) : digits)));
}

// A power of ten on an axis, as short as it gets.
function formatDecade(value) {
  const exponent = Math.round(Math.log10(value));
  return exponent < -2 || exponent > 4 ? `1e${exponent}` : String(Number(value.toPrecision(1)));
}

function formatInteger(value) {
  return Number(value).toLocaleString("en-US");
}

function formatPercent(fraction, decimals = 1) {
  fraction = toNumber(fraction);
  return Number.isNaN(fraction) ? DASH : `${(100 * fraction).toFixed(decimals)} %`;
}

// "0.014 (0.012 to 0.017)", for titles and descriptions.
function formatInterval([value, low, high], format = formatNumber) {
  if (Number.isNaN(toNumber(low))) return format(value);
  return `${format(value)} (${format(low)} to ${format(high)})`;
}

function formatBytes(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (bytes >= 1024 && unit + 1 < units.length) {
    bytes /= 1024;
    ++unit;
  }
  return `${unit === 0 ? bytes : Number(bytes.toPrecision(3))} ${units[unit]}`;
}

function formatSeconds(seconds) {
  seconds = toNumber(seconds);
  if (Number.isNaN(seconds)) return DASH;
  if (seconds === 0 || seconds >= 1) return `${formatNumber(seconds)} s`;
  if (seconds >= 1e-3) return `${formatNumber(seconds * 1e3)} ms`;
  return `${formatNumber(seconds * 1e6)} \u00b5s`;
}

function plural(count, word, many = `${word}s`) {
  return `${formatInteger(count)} ${count === 1 ? word : many}`;
}
