// SPDX-License-Identifier: Apache-2.0
// Scales and marks. A plot in a table cell uses percentages for x, so that it takes the width it gets while marks and type keep their size.
// The numbers stand beside it in the same row, so the drawing itself is hidden from screen readers.

// Positive numbers on a logarithmic axis from decade to decade, zero and less at its left end.
function logScale(values, include = []) {
  const positive = [...values, ...include].filter((value) => Number.isFinite(value) && value > 0);
  if (positive.length === 0) return null;
  let least = Infinity, most = 0;
  for (const value of positive) {
    least = Math.min(least, value);
    most = Math.max(most, value);
  }
  const begin = Math.floor(Math.log10(least)), end = Math.max(begin + 1, Math.ceil(Math.log10(most)));
  const scale = (value) => {
    if (!(value > 0)) return 0;
    if (!Number.isFinite(value)) return 1;
    return 0.03 + 0.94 * Math.min(1, Math.max(0, (Math.log10(value) - begin) / (end - begin)));
  };
  const step = Math.ceil((end - begin) / 4);
  scale.ticks = [];
  for (let decade = begin; decade <= end; decade += step) scale.ticks.push(10 ** decade);
  return scale;
}

// From zero to the first tick at or above the largest value, in at most four steps: powers of two for bytes, else 1, 2, 2.5 or 5 times a
// power of ten.
function linearScale(most, binary = false) {
  if (!(most > 0)) return null;
  const magnitude = 10 ** Math.floor(Math.log10(most));
  const step = binary ? 2 ** Math.ceil(Math.log2(most / 4)) : [0.25, 0.5, 1, 2, 2.5, 5].map((factor) => factor * magnitude).find((size) => most / size <= 4);
  const steps = Math.ceil(most / step);
  const scale = (value) => Math.min(1, Math.max(0, value / (steps * step)));
  scale.ticks = Array.from({ length: steps + 1 }, (_, at) => at * step);
  return scale;
}

function percentOf(fraction) {
  return `${Number((100 * fraction).toFixed(3))}%`;
}

const PLOT_HEIGHT = 22;

// One row of a plot; `lines` are values marked through all rows.
function plotRow(scale, marks, { lines = [], height = PLOT_HEIGHT } = {}) {
  const node = svg("svg", { class: "plot", width: "100%", height, "aria-hidden": "true", focusable: "false" });
  for (const tick of scale.ticks) node.append(svg("line", { class: "grid", x1: percentOf(scale(tick)), x2: percentOf(scale(tick)), y1: 0, y2: height }));
  for (const line of lines) node.append(svg("line", { class: "limit", x1: percentOf(scale(line)), x2: percentOf(scale(line)), y1: 0, y2: height }));
  node.append(...marks.flat().filter(Boolean));
  return node;
}

function plotAxis(scale, format, label) {
  const node = svg("svg", { class: "plot axis", width: "100%", height: 18, "aria-hidden": "true", focusable: "false" });
  for (const tick of scale.ticks) {
    const at = scale(tick);
    node.append(svg("text", { x: percentOf(at), y: 13, "text-anchor": at < 0.06 ? "start" : at > 0.94 ? "end" : "middle" }, format(tick)));
  }
  return el("div", { class: "axis-head" }, el("span", null, label), node);
}

function dot(scale, value, kind, title, y = PLOT_HEIGHT / 2) {
  if (Number.isNaN(value)) return null;
  return svg("circle", { class: `mark ${kind}`, cx: percentOf(scale(value)), cy: y, r: 4.5 }, svg("title", null, title));
}

// A hollow diamond, square or triangle: shapes that can be told apart without colour. Nested so that x can be a percentage.
const SHAPES = { diamond: "M0,-5.5 5.5,0 0,5.5 -5.5,0Z", square: "M-4,-4H4V4H-4Z", triangle: "M0,-5 5,4 -5,4Z", bar: "M0,-8V8" };

function shape(scale, value, kind, name, title, y = PLOT_HEIGHT / 2) {
  if (Number.isNaN(value)) return null;
  return svg("svg", { x: percentOf(scale(value)), y, overflow: "visible", width: 1, height: 1 },
    svg("path", { class: `mark ${kind}`, d: SHAPES[name] }, svg("title", null, title)));
}

function span(scale, low, high, kind, title, y = PLOT_HEIGHT / 2) {
  if (Number.isNaN(low) || Number.isNaN(high)) return null;
  return svg("line", { class: `span ${kind}`, x1: percentOf(scale(low)), x2: percentOf(scale(high)), y1: y, y2: y }, svg("title", null, title));
}

// What the marks mean: [kind, shape or "dot" or "line", words].
function legend(entries) {
  return el("ul", { class: "legend" }, entries.map(([kind, name, words]) => {
    const icon = svg("svg", { width: 18, height: 16, "aria-hidden": "true", focusable: "false" });
    if (name === "dot") icon.append(svg("circle", { class: `mark ${kind}`, cx: 9, cy: 8, r: 4.5 }));
    else if (name === "line") icon.append(svg("line", { class: `span ${kind}`, x1: 1, x2: 17, y1: 8, y2: 8 }));
    else if (name === "limit") icon.append(svg("line", { class: "limit", x1: 9, x2: 9, y1: 0, y2: 16 }));
    else if (name === "fill") icon.append(svg("rect", { class: kind, x: 3, y: 2, width: 12, height: 12 }));
    else icon.append(svg("g", { transform: "translate(9 8)" }, svg("path", { class: `mark ${kind}`, d: SHAPES[name] })));
    return el("li", null, icon, words);
  }));
}
