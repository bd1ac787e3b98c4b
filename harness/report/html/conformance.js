// SPDX-License-Identifier: Apache-2.0
// How near each operation and metric came to its bound, with the noise floor of the same case beside it.

const LEVELS = {
  operation: "Operation by operation, on equal inputs",
  decision_forced: "Whole runs with the reference's tokens and decisions",
  teacher_forced: "Whole runs with the reference's tokens, own decisions",
};

function conformanceSection() {
  if (overview.conformance.length === 0) return null;
  // A row per operation, a dot per loop.
  const groups = new Map();
  for (const item of overview.conformance) {
    const key = JSON.stringify([item.executor, item.level, item.operation]);
    if (!groups.has(key)) groups.set(key, { executor: item.executor, level: item.level, operation: item.operation, loops: [] });
    groups.get(key).loops.push({ ...item, median: toNumber(item.median), worst: toNumber(item.worst), reordered: toNumber(item.reordered), exact: toNumber(item.double) });
  }
  const executors = new Set(overview.conformance.map((item) => item.executor));
  const all = overview.conformance.flatMap((item) => [item.worst, item.reordered, item.double, item.median].map(toNumber));
  const scale = logScale(all.filter((value) => !(value < 1e-4)), [0.1, 1]);
  const levels = [...new Set([...groups.values()].map((group) => group.level))];
  const blocks = levels.map((level) => {
    const rows = [...groups.values()].filter((group) => group.level === level).map((group) => {
      const worst = group.loops.reduce((a, b) => (b.worst > a.worst || Number.isNaN(a.worst) ? b : a));
      return { ...group, worst, judged: group.loops.reduce((sum, loop) => sum + loop.judged, 0), failed: group.loops.reduce((sum, loop) => sum + loop.failed, 0) };
    });
    rows.sort((a, b) => (b.worst.worst || 0) - (a.worst.worst || 0));
    const hasFloor = rows.some((row) => !Number.isNaN(row.worst.reordered) || !Number.isNaN(row.worst.exact));
    const columns = [
      { head: level === "operation" ? "operation" : "metric", cell: (row) => [el("span", { class: "name" }, row.operation), executors.size > 1 ? el("small", null, ` ${row.executor}`) : null] },
      { head: plotAxis(scale, formatDecade, "error / bound"), label: "error / bound", class: "plot-cell", cell: (row) => conformancePlot(scale, row) },
      { head: "worst", class: "number", cell: (row) => el("span", { class: row.failed > 0 ? "bad" : null }, formatNumber(row.worst.worst)) },
      { head: "loop", class: "number", cell: (row) => (row.worst.loop < 0 ? DASH : row.worst.loop) },
    ];
    if (hasFloor) {
      columns.push({ head: "other order", class: "number", cell: (row) => formatNumber(row.worst.reordered) },
        { head: "double", class: "number", cell: (row) => formatNumber(row.worst.exact) });
    }
    columns.push({ head: "failed / judged", class: "number wide", cell: (row) => `${row.failed} / ${formatInteger(row.judged)}` },
      { head: "where", class: "wide where", cell: (row) => caseLink(row.worst.row) });
    return el("div", null, el("h3", null, LEVELS[level] ?? level),
      limited(rows, 30, "row", (shown) => scrollable(LEVELS[level] ?? level, table(columns, shown, { class: "plot-table", caption: LEVELS[level] ?? level }))));
  });
  return section("conformance", "Distance from the reference",
    "The largest error over its bound, over all cases: at most 1 passes. The noise floor is what the same case does under a second legitimate order of additions, and in double precision, over the same bound; operations have none, their bounds follow from the declared rounding.",
    legend([["worst", "dot", "worst case of a loop"], ["median", "bar", "median case"], ["floor", "triangle", "noise: other order of additions"], ["floor", "square", "noise: double precision"], ["", "limit", "bound"]]),
    ...blocks);
}

function conformancePlot(scale, row) {
  const marks = [];
  for (const loop of row.loops) {
    const name = loop.loop < 0 ? "" : `loop ${loop.loop}, `;
    marks.push(shape(scale, loop.median, "median", "bar", `${name}median ${formatNumber(loop.median)}`));
  }
  marks.push(shape(scale, row.worst.reordered, "floor", "triangle", `other order of additions ${formatNumber(row.worst.reordered)}`),
    shape(scale, row.worst.exact, "floor", "square", `double precision ${formatNumber(row.worst.exact)}`));
  for (const loop of [...row.loops].sort((a, b) => a.worst - b.worst)) {
    const name = loop.loop < 0 ? "" : `loop ${loop.loop}, `;
    marks.push(dot(scale, loop.worst, loop.failed > 0 ? "worst failed" : "worst", `${name}worst ${formatNumber(loop.worst)}, ${loop.failed} of ${loop.judged} failed`));
  }
  return plotRow(scale, marks, { lines: [1] });
}

function caseLink(n, text) {
  const row = caseByNumber.get(n);
  return el("a", { class: "case-link", href: `#case-${n}` }, code(text ?? row?.id ?? `row ${n}`));
}
