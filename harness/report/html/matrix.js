// SPDX-License-Identifier: Apache-2.0
// Execution mode by setting, a matrix per executor.

const MATRIX_ROWS = 40;

function worstStatus(counts) {
  const [passed, failed, error, skipped, notRun] = counts;
  return error ? "error" : failed ? "failed" : notRun ? "not_run" : skipped ? "skipped" : passed ? "passed" : "not_run";
}

function countWords([passed, failed, error, skipped, notRun]) {
  return [[error, "error"], [failed, "failed"], [notRun, "not run"], [skipped, "skipped"], [passed, "passed"]]
    .filter(([count]) => count > 0).map(([count, word]) => `${count} ${word}`).join(", ");
}

function casesLink(filters) {
  return `#cases?${new URLSearchParams(filters)}`;
}

function matrixCell(matrix, settings, mode, [, , counts, ratio, row]) {
  const status = worstStatus(counts);
  const total = counts.reduce((sum, count) => sum + count, 0);
  const [passed, failed, error, skipped, notRun] = counts;
  const bad = failed + error;
  const value = toNumber(ratio);
  // One case: straight to it. Several: the list of them, which starts with the worst.
  const href = total === 1 ? `#case-${row}` : casesLink({ executor: matrix.executor, settings, mode });
  const near = value > 1 ? "over" : value > 0.9 ? "near" : "far";
  return el("a", { class: "cell", href, "data-status": status, title: countWords(counts), "aria-label": `${settings}, ${mode}: ${countWords(counts)}` +
      (Number.isNaN(value) ? "" : `, worst error over bound ${formatNumber(value)}`) },
    el("span", { class: "sign", "aria-hidden": "true" }, STATUS[status].sign),
    el("span", { class: "count" }, bad > 0 && bad < total ? `${bad}/${total}` : notRun > 0 && notRun < total ? `${passed}/${total}` : `${total}`),
    Number.isNaN(value) ? null : el("span", { class: `ratio ${near}` }, formatNumber(value, 2)));
}

function matrixTable(matrix) {
  const byPlace = new Map(matrix.cells.map((cell) => [`${cell[0]} ${cell[1]}`, cell]));
  let rows = matrix.settings.map((settings, s) => ({ settings, s }));
  if (rows.length > MATRIX_ROWS) {
    const rank = new Map(matrix.settings.map((_, s) => [s, 4]));
    for (const cell of matrix.cells) rank.set(cell[0], Math.min(rank.get(cell[0]), STATUS_ORDER.indexOf(worstStatus(cell[2]))));
    rows = rows.map((row) => ({ ...row, rank: rank.get(row.s) })).sort((a, b) => a.rank - b.rank || a.s - b.s);
  }
  const columns = [{ head: "setting", cell: (row) => code(row.settings) }];
  matrix.modes.forEach((mode, m) => columns.push({
    head: code(mode), label: mode,
    cell: (row) => {
      const cell = byPlace.get(`${row.s} ${m}`);
      return cell ? matrixCell(matrix, row.settings, mode, cell) : el("span", { class: "none", title: "no case in this sweep" }, "\u00b7");
    },
  }));
  return limited(rows, MATRIX_ROWS, "setting", (shown) => scrollable(`Matrix of ${matrix.executor}`,
    table(columns, shown, { class: "matrix", caption: `${matrix.executor}: settings by execution mode` })));
}

// Why rows were left out, each reason once.
function leftOut(executor) {
  const reasons = new Map();
  for (const row of cases) {
    if (row.executor !== executor || (row.status !== "not_run" && row.status !== "skipped")) continue;
    const key = JSON.stringify([row.status, row.reason]);
    reasons.set(key, (reasons.get(key) ?? 0) + 1);
  }
  const list = [...reasons].sort((a, b) => b[1] - a[1]);
  if (list.length === 0) return null;
  const item = ([key, count]) => {
    const [status, reason] = JSON.parse(key);
    return el("li", null, badge(status), " ", el("span", { class: "untrusted" }, reason), ` (${plural(count, "row")})`);
  };
  return [el("ul", { class: "reasons" }, list.slice(0, 3).map(item)),
    list.length > 3 ? unfold(`${list.length - 3} more reasons`, () => el("ul", { class: "reasons" }, list.slice(3, 103).map(item))) : null];
}

function matrixSection() {
  if (overview.matrices.length === 0) return null;
  const ratios = overview.matrices.some((matrix) => matrix.cells.some((cell) => !Number.isNaN(toNumber(cell[3]))));
  return section("matrix", "Mode by setting", null, legendOfMatrix(ratios), el("div", { class: "matrix-blocks" }, overview.matrices.map((matrix) => {
    const total = [0, 0, 0, 0, 0];
    for (const cell of matrix.cells) cell[2].forEach((count, at) => { total[at] += count; });
    const ran = total[0] + total[1] + total[2] > 0;
    return el("div", { class: "matrix-block" },
      el("h3", null, el("span", { class: "untrusted" }, matrix.executor), el("small", null, ` ${countWords(total)}`)),
      leftOut(matrix.executor), ran ? matrixTable(matrix) : null);
  })));
}

function legendOfMatrix(ratios) {
  return el("p", { class: "lead" }, "A cell counts the traces of one setting in one execution mode and opens them.",
    ratios ? " The smaller number is the worst error over its bound: at most 1 passes, and what creeps towards 1 shows erosion before it fails." : null);
}
