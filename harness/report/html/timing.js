// SPDX-License-Identifier: Apache-2.0
// Times with their spread, and the floor of the same bytes or FLOPs where it was measured.

function timingSection() {
  if (overview.timing.length === 0) return null;
  const rows = overview.timing.map((row) => ({ ...row, median: toNumber(row.median), least: toNumber(row.least), most: toNumber(row.most), floor: toNumber(row.floor), ratio: toNumber(row.ratio_to_floor) }));
  const scale = logScale(rows.flatMap((row) => [row.least, row.median, row.most, row.floor]));
  if (!scale) return null;
  const hasFloor = rows.some((row) => !Number.isNaN(row.floor));
  const groups = new Map();
  for (const row of rows) {
    const key = JSON.stringify([row.executor, row.phase]);
    groups.set(key, [...(groups.get(key) ?? []), row]);
  }
  const columns = [
    { head: "setting", cell: (row) => code(row.settings) },
    { head: plotAxis(scale, formatSeconds, "time"), label: "time", class: "plot-cell", cell: (row) => plotRow(scale, [
      span(scale, row.least, row.most, "interval", `${formatSeconds(row.least)} to ${formatSeconds(row.most)}`),
      shape(scale, row.floor, "floor", "triangle", `floor ${formatSeconds(row.floor)}`), dot(scale, row.median, "worst", `median ${formatSeconds(row.median)}`)]) },
    { head: "median", class: "number", cell: (row) => formatSeconds(row.median) },
    { head: "least to most", class: "number", cell: (row) => `${formatSeconds(row.least)} to ${formatSeconds(row.most)}` },
    ...(hasFloor ? [{ head: "floor", class: "number", cell: (row) => formatSeconds(row.floor) }, { head: "time / floor", class: "number", cell: (row) => formatNumber(row.ratio) }] : []),
    { head: "cases", class: "number wide", cell: (row) => formatInteger(row.cases) },
    { head: "total", class: "number wide", cell: (row) => formatSeconds(row.total) },
  ];
  return section("timing", "Time",
    "Wall time of serial cases, over traces and repetitions: the spread is mostly that of their lengths." + (hasFloor ? " The floor is what the same bytes or FLOPs need at the ceilings measured in the same run." : "") +
      " The reference is written to be read; its times say nothing about the method.",
    legend([["worst", "dot", "median"], ["interval", "line", "least to most"], ...(hasFloor ? [["floor", "triangle", "floor"]] : [])]),
    [...groups.values()].map((group) => el("div", null, el("h3", null, el("span", { class: "untrusted" }, group[0].executor), el("small", null, ` ${group[0].phase}, ${formatSeconds(group.reduce((sum, row) => sum + toNumber(row.total), 0))} in all`)),
      limited(group, 20, "setting", (list) => scrollable(`Time of ${group[0].executor}`, table(columns, list, { class: "plot-table", caption: `Time of ${group[0].executor}` }))))));
}
