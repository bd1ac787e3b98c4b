// SPDX-License-Identifier: Apache-2.0
// What a setting does to the model: distance from dense on the same executor and tokens, by setting and by position.

const DRIFT_ROWS = 40;
const DRIFT_MULTIPLES = 16;

function driftSection() {
  if (overview.drift.length === 0) return null;
  const executors = [...new Set(overview.drift.map((row) => row.executor))];
  const hasNoise = overview.drift.some((row) => !Number.isNaN(toNumber(row.noise_p99)));
  const host = el("div");
  const draw = (executor) => host.replaceChildren(...driftOf(overview.drift.filter((row) => row.executor === executor)));
  const chosen = executors.includes("optimized") ? "optimized" : executors[0];
  draw(chosen);
  return section("drift", "Drift from dense",
    "A property of the method, not a failure: KL(dense \u2016 setting) in nats on the same executor and the same forced tokens, pooled over all serial rows. The first generated token stands apart, because token-sparse prefill moves it most." +
      (hasNoise ? "" : " The noise floor (a second order of additions) is measured where an optimized column runs; this report has none."),
    executors.length > 1 ? choice("drift-executor", "Executor", executors.map((name) => [name, name]), chosen, draw) : null, host);
}

function driftOf(rows) {
  const numbers = (name) => rows.flatMap((row) => (Array.isArray(row[name]) ? row[name][0] : row[name])).map(toNumber);
  const scale = logScale(["kl", "kl_p99", "first_token_kl", "noise_p99"].flatMap(numbers).filter((value) => !(value < 1e-7)));
  if (!scale) return [el("p", null, "No setting of this report moves the model: every row equals dense.")];
  const hasNoise = rows.some((row) => !Number.isNaN(toNumber(row.noise_p99)));
  return [legend([["worst", "dot", "KL mean"], ["interval", "line", "95 % interval"], ["p99", "bar", "99th percentile"], ["first", "diamond", "first token, mean"], ...(hasNoise ? [["floor", "triangle", "noise floor, 99th percentile"]] : [])]),
    el("h3", null, "By setting"),
    limited(rows, DRIFT_ROWS, "setting", (shown) => driftTable(shown, scale, hasNoise)),
    driftByPosition(rows)].filter(Boolean).flat();
}

function driftTable(rows, scale, hasNoise) {
  const columns = [
    { head: "setting", cell: (row) => code(row.settings) },
    { head: plotAxis(scale, formatDecade, "KL, nats"), label: "KL, nats", class: "plot-cell", cell: (row) => driftPlot(scale, row) },
    { head: "KL mean (95 %)", class: "number", cell: (row) => withInterval(row.kl) },
    { head: "p99", class: "number", cell: (row) => formatNumber(row.kl_p99) },
  ];
  if (hasNoise) columns.push({ head: "noise p99", class: "number", cell: (row) => formatNumber(row.noise_p99) });
  columns.push(
    { head: "max", class: "number extra", cell: (row) => el("span", { title: row.kl_max_where }, formatNumber(row.kl_max)) },
    { head: "first token (95 %)", class: "number", cell: (row) => withInterval(row.first_token_kl) },
    { head: "same top-1 (95 %)", class: "number", cell: (row) => withInterval(row.same_top1, formatPercent) },
    { head: "bits/byte", class: "number wide", cell: (row) => formatNumber(row.bits_per_byte, 4) },
    { head: "accuracy", class: "number wide", cell: (row) => (row.answers > 0 ? [formatPercent(row.task_accuracy), el("small", { class: "interval" }, `of ${row.answers}`)] : DASH) },
    { head: "rows", class: "number extra", cell: (row) => formatInteger(row.rows) });
  return scrollable("Drift from dense by setting", table(columns, rows, { class: "plot-table", caption: "Drift from dense by setting" }));
}

function driftPlot(scale, row) {
  const [mean, low, high] = row.kl.map(toNumber);
  const [first, firstLow, firstHigh] = row.first_token_kl.map(toNumber);
  return plotRow(scale, [
    span(scale, firstLow, firstHigh, "first", `first token, 95 % interval ${formatInterval(row.first_token_kl)}`),
    span(scale, low, high, "interval", `95 % interval ${formatInterval(row.kl)}`),
    shape(scale, toNumber(row.noise_p99), "floor", "triangle", `noise floor, 99th percentile ${formatNumber(row.noise_p99)}`),
    shape(scale, toNumber(row.kl_p99), "p99", "bar", `99th percentile ${formatNumber(row.kl_p99)}`),
    shape(scale, first, "first", "diamond", `first token ${formatNumber(first)}`),
    dot(scale, mean, "worst", `KL mean ${formatNumber(mean)}`),
  ]);
}

const DRIFT_AXES = [["after_prompt", "tokens after the prompt"], ["by_position", "absolute position"]];

function binLabel([begin, end]) {
  return end - begin === 1 ? `${begin}` : `${begin}\u2013${end - 1}`;
}

function driftByPosition(all) {
  const moved = all.filter((row) => row.after_prompt.some((bin) => toNumber(bin[3][0]) > 0));
  if (moved.length === 0) return null;
  const host = el("div");
  const draw = (axis) => {
    const values = moved.flatMap((row) => row[axis].map((bin) => toNumber(bin[3][0])));
    const scale = logScale(values.filter((value) => value > 1e-7));
    const begins = [...new Set(moved.flatMap((row) => row[axis].map((bin) => bin[0])))].sort((a, b) => a - b);
    host.replaceChildren(limited(moved, DRIFT_MULTIPLES, "setting", (rows) => el("div", { class: "multiples" },
      rows.map((row) => positionFigure(row, moved, axis, scale, begins)))));
  };
  draw("after_prompt");
  return [el("h3", null, "By position"),
    el("p", { class: "lead" }, "Mean KL with its 95 % interval in bins of doubling width; the other settings in grey behind."),
    choice("drift-axis", "Horizontal axis", DRIFT_AXES, "after_prompt", draw), host];
}

function positionFigure(row, others, axis, scale, begins) {
  const width = 260, height = 150, left = 40, bottom = 30, right = 8, top = 8;
  const step = (width - left - right) / Math.max(1, begins.length);
  const at = new Map(begins.map((begin, index) => [begin, left + (index + 0.5) * step]));
  const y = (value) => height - bottom - scale(value) * (height - top - bottom);
  const line = (bins) => bins.map((bin) => `${at.get(bin[0])},${y(toNumber(bin[3][0]))}`).join(" ");
  const axisName = DRIFT_AXES.find(([name]) => name === axis)[1];
  const node = svg("svg", { class: "figure", viewBox: `0 0 ${width} ${height}`, role: "img",
    "aria-label": `Mean KL of ${row.settings} by ${axisName}: ` + row[axis].map((bin) => `${binLabel(bin)}: ${formatNumber(bin[3][0])}`).join("; ") });
  for (const tick of scale.ticks) {
    node.append(svg("line", { class: "grid", x1: left, x2: width - right, y1: y(tick), y2: y(tick) }),
      svg("text", { x: left - 5, y: y(tick) + 4, "text-anchor": "end" }, formatDecade(tick)));
  }
  const labelled = Math.ceil(begins.length / 6);
  begins.forEach((begin, index) => {
    if (index % labelled === 0) node.append(svg("text", { x: at.get(begin), y: height - bottom + 13, "text-anchor": "middle" }, begin));
  });
  node.append(svg("text", { class: "label", x: (left + width - right) / 2, y: height - 3, "text-anchor": "middle" }, axisName));
  if (others.length <= 60) {
    for (const other of others) if (other !== row) node.append(svg("polyline", { class: "other", points: line(other[axis]) }));
  }
  for (const bin of row[axis]) {
    const [, low, high] = bin[3].map(toNumber);
    if (!Number.isNaN(low)) node.append(svg("line", { class: "span interval", x1: at.get(bin[0]), x2: at.get(bin[0]), y1: y(low), y2: y(high) }));
  }
  node.append(svg("polyline", { class: "own", points: line(row[axis]) }));
  for (const bin of row[axis]) {
    node.append(svg("circle", { class: "mark worst", cx: at.get(bin[0]), cy: y(toNumber(bin[3][0])), r: 3 },
      svg("title", null, `${axisName} ${binLabel(bin)}: KL ${formatInterval(bin[3])}, max ${formatNumber(bin[4])}, same top-1 ${formatPercent(bin[5][0])}, ${plural(bin[2], "row")}`)));
  }
  return el("figure", null, el("figcaption", null, code(row.settings)), node,
    unfold("numbers", () => scrollable(`Drift of ${row.settings} by ${axisName}`, table([
      { head: axisName, cell: binLabel },
      { head: "KL mean (95 %)", class: "number", cell: (bin) => formatInterval(bin[3]) },
      { head: "max", class: "number", cell: (bin) => formatNumber(bin[4]) },
      { head: "same top-1", class: "number", cell: (bin) => formatPercent(bin[5][0]) },
      { head: "rows", class: "number", cell: (bin) => formatInteger(bin[2]) },
    ], row[axis], { class: "list", caption: `Drift of ${row.settings} by ${axisName}` }))));
}
