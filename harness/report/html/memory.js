// SPDX-License-Identifier: Apache-2.0
// Bytes by category as stacked bars, dense first, steady and peak.

const CATEGORY_ORDER = ["BF16 planes", "BF16 tail", "base payload", "residual payload", "parameters", "activity maps", "inherited references", "padding",
  "attention reference state", "hidden rows", "graphs", "workspace", "conversion scratch", "transfer buffers", "weights"];
const MEMORY_ROWS = 24;

function memorySection() {
  const { bars, trace } = overview.memory;
  if (bars.length === 0) return null;
  const settings = [...new Set(bars.map((bar) => bar.settings))].sort((a, b) => isDense(b) - isDense(a));
  const sources = [...new Set(bars.map((bar) => (bar.executor ? `${bar.source}, ${bar.executor}` : bar.source)))];
  const hasKv = bars.some((bar) => bar.categories.some((category) => category[3] === 1));
  const state = { scope: hasKv ? "kv" : "all", size: "physical" };
  const host = el("div");
  const draw = () => host.replaceChildren(...sources.map((source) => {
    const own = bars.filter((bar) => (bar.executor ? `${bar.source}, ${bar.executor}` : bar.source) === source);
    return el("div", null, el("h3", null, source === "predicted" ? "Predicted by the accounting model" : `Measured: ${source.replace("measured, ", "")}`), memoryTable(own, settings, state));
  }));
  draw();
  return section("memory", "Memory",
    [el("span", null, "Trace "), code(trace), ", the one with most bytes. The thick bar is steady state, the thin one below it the peak. The factor compares with dense in the same phase."],
    el("div", { class: "controls" },
      choice("memory-scope", "Categories", [["kv", "K/V cache"], ["all", "everything"]], state.scope, (value) => { state.scope = value; draw(); }),
      choice("memory-size", "Bytes", [["physical", "physical, with padding"], ["logical", "logical"]], state.size, (value) => { state.size = value; draw(); })),
    host);
}

function memoryTable(bars, settings, state) {
  const bytesOf = (category) => (state.size === "physical" ? category[2] : category[1]);
  const shown = (bar) => (bar?.categories ?? []).filter((category) => (state.scope === "all" || category[3] === 1) && bytesOf(category) > 0)
    .sort((a, b) => orderOf(a[0]) - orderOf(b[0]));
  const total = (bar) => shown(bar).reduce((sum, category) => sum + bytesOf(category), 0);
  const rows = settings.map((name) => ({
    name, steady: bars.find((bar) => bar.settings === name && bar.phase === "steady"), peak: bars.find((bar) => bar.settings === name && bar.phase === "peak"),
  })).filter((row) => row.steady || row.peak);
  const most = Math.max(...rows.flatMap((row) => [total(row.steady), total(row.peak)]));
  const scale = linearScale(most, true);
  if (!scale) return el("p", null, "No bytes of this kind.");
  const dense = rows.find((row) => isDense(row.name));
  const factor = (row, phase) => (dense && row !== dense && total(row[phase]) > 0 && total(dense[phase]) > 0 ? `${formatNumber(total(dense[phase]) / total(row[phase]))}\u00d7` : DASH);
  const used = CATEGORY_ORDER.filter((name) => rows.some((row) => [row.steady, row.peak].some((bar) => shown(bar).some((category) => category[0] === name))));
  const others = rows.some((row) => [row.steady, row.peak].some((bar) => shown(bar).some((category) => !CATEGORY_ORDER.includes(category[0]))));
  const stack = (bar, y, height) => {
    let at = 0;
    return shown(bar).map((category) => {
      const begin = scale(at), end = scale(at + bytesOf(category));
      at += bytesOf(category);
      return svg("rect", { class: `segment ${categoryClass(category[0])}`, x: percentOf(begin), y, width: percentOf(end - begin), height },
        svg("title", null, `${bar.phase}, ${category[0]}: ${formatBytes(bytesOf(category))}`));
    });
  };
  const columns = [
    { head: "setting", cell: (row) => code(row.name) },
    { head: plotAxis(scale, formatBytes, "bytes"), label: "bytes", class: "plot-cell", cell: (row) => plotRow(scale, [stack(row.steady, 2, 14), stack(row.peak, 18, 6)], { height: 26 }) },
    { head: "steady", class: "number", cell: (row) => formatBytes(total(row.steady)) },
    { head: "dense / this", class: "number", cell: (row) => factor(row, "steady") },
    { head: "peak", class: "number", cell: (row) => formatBytes(total(row.peak)) },
    { head: "dense / this, peak", class: "number wide", cell: (row) => factor(row, "peak") },
  ];
  const numbers = [{ head: "setting", cell: (line) => code(line.row.name) }, { head: "phase", cell: (line) => line.phase },
    ...used.map((name) => ({ head: name, class: "number", cell: (line) => {
      const category = shown(line.row[line.phase]).find((entry) => entry[0] === name);
      return category ? formatInteger(bytesOf(category)) : DASH;
    } })), { head: "total", class: "number", cell: (line) => formatInteger(total(line.row[line.phase])) }];
  return el("div", null,
    legend([...used.map((name) => [`segment ${categoryClass(name)}`, "fill", name]), ...(others ? [["segment category-other", "fill", "other"]] : [])]),
    limited(rows, MEMORY_ROWS, "setting", (list) => scrollable("Bytes by setting", table(columns, list, { class: "plot-table", caption: "Bytes by setting" }))),
    unfold("Bytes by category", () => scrollable("Bytes by category", table(numbers, rows.flatMap((row) => ["steady", "peak"].filter((phase) => row[phase]).map((phase) => ({ row, phase }))), { class: "list", caption: "Bytes by category" }))));
}

function orderOf(name) {
  const at = CATEGORY_ORDER.indexOf(name);
  return at < 0 ? CATEGORY_ORDER.length : at;
}

function categoryClass(name) {
  const at = CATEGORY_ORDER.indexOf(name);
  return at < 0 ? "category-other" : `category-${at}`;
}
