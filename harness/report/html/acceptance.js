// SPDX-License-Identifier: Apache-2.0
// Speculation: how many drafted tokens were kept, and how many tokens a round gave.

function acceptanceSection() {
  if (overview.acceptance.length === 0) return null;
  const scale = linearScale(1);
  const blocks = overview.acceptance.map((group) => {
    const rounds = group.positions.reduce((sum, position) => sum + position[3], 0);
    const divergences = group.positions.reduce((sum, position) => sum + position[4], 0);
    const columns = [
      { head: "place in the round", cell: (_, at) => at + 1 },
      { head: plotAxis(scale, (tick) => formatPercent(tick, 0), "accepted"), label: "accepted", class: "plot-cell", cell: ([drafted, accepted, rate]) => {
        const [value, low, high] = rate.map(toNumber);
        return plotRow(scale, [span(scale, low, high, "interval", "95 % interval"), dot(scale, value, "worst", `${accepted} of ${drafted} accepted`)]);
      } },
      { head: "accepted (95 %)", class: "number", cell: ([, , rate]) => withInterval(rate, formatPercent) },
      { head: "accepted / drafted", class: "number", cell: ([drafted, accepted]) => (drafted > 0 ? `${formatInteger(accepted)} / ${formatInteger(drafted)}` : "no candidate") },
      { head: "rounds that ended here", class: "number", cell: ([, , , count]) => `${formatInteger(count)}${rounds > 0 ? ` (${formatPercent(count / rounds, 0)})` : ""}` },
      { head: "requests diverge here", class: "number", cell: ([, , , , count]) => (count > 0 ? el("strong", { class: "bad" }, formatInteger(count)) : "0") },
    ];
    return el("div", null, el("h3", null, code(group.mode), el("small", null, ` ${group.executor}, ${plural(group.cases, "case")}, ${formatNumber(group.mean_emitted)} tokens a round${group.seconds_per_token.length > 0 ? `, on the device ${group.seconds_per_token.map(formatSeconds).join(" + ")} a token in draft + verification + acceptance` : ""}`)),
      divergences > 0 ? el("p", { class: "notice" },
        `${plural(divergences, "request")} ${divergences === 1 ? "comes" : "come"} to a token that differs from serial execution.`) : null,
      scrollable(`Acceptance of ${group.mode}`, table(columns, group.positions, { class: "plot-table", caption: `Acceptance of ${group.mode}` })));
  });
  return section("acceptance", "Acceptance", "Drafted tokens that verification kept, by place in the round and timing of the encoding, with Wilson intervals.", ...blocks,
    overview.encodings.rows.length > 0 ? el("div", null, el("h3", null, "By timing of the encoding"), el("p", null, `${overview.encodings.title}.`),
      compactTable(overview.encodings, "Speculation by timing of the encoding")) : null);
}
