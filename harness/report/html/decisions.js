// SPDX-License-Identifier: Apache-2.0
// Discrete decisions that differ from the reference. A flip is explained when its margin is at most the difference that the same element
// shows between the executors: below the diagonal of the plot.

const FLIP_COLUMNS = ["request", "position", "loop", "layer", "head"];

function flipPlace(flip, offset) {
  return FLIP_COLUMNS.map((name, at) => (flip[at + offset] < 0 ? null : `${name} ${flip[at + offset]}`)).filter(Boolean).join(", ");
}

function decisionsSection() {
  if (overview.decisions.length === 0) return null;
  const blocks = overview.decisions.map((group) => {
    const columns = [
      { head: "case", cell: (flip) => caseLink(flip[0]) },
      { head: "where", cell: (flip) => flipPlace(flip, 1) },
      { head: "margin", class: "number", cell: (flip) => formatNumber(flip[6]) },
      { head: "difference", class: "number", cell: (flip) => formatNumber(flip[7]) },
      { head: "explained", cell: (flip) => (flip[8] ? (flip[9] ? "yes" : "by an earlier flip") : el("strong", { class: "bad" }, "no")) },
      { head: "decisions", class: "wide", cell: (flip) => el("span", { class: "untrusted" }, flip[10]) },
    ];
    return el("figure", { class: "flips" },
      el("figcaption", null, el("h3", null, el("span", { class: "untrusted" }, group.kind), el("small", null, ` ${group.executor}`)),
        el("p", null, `${plural(group.flips, "flip")} in ${plural(group.cases, "case")}, ${plural(group.roots, "root")}, `,
          group.unexplained > 0 ? el("strong", { class: "bad" }, `${formatInteger(group.unexplained)} unexplained`) : "all explained",
          `, widest explained margin ${formatNumber(group.widest)}`)),
      flipPlot(group),
      unfold(group.listed.length < group.flips ? `The ${group.listed.length} that matter most` : `All ${plural(group.flips, "flip")}`,
        () => scrollable(`Flips of ${group.kind}`, table(columns, group.listed, { class: "list", caption: `Flips of ${group.kind}` }))));
  });
  return section("decisions", "Decisions that flipped",
    "Selected tokens, selected keys, top-1 tokens and exits that differ from the reference when its tokens are forced. A flip is explained when its margin is within the difference that this very element shows, or when an explained flip lies in its causal past. Reports list root flips and all that are unexplained.",
    legend([["flip", "dot", "explained"], ["flip unexplained", "diamond", "unexplained"], ["guide", "line", "margin = difference"]]),
    el("div", { class: "multiples wide-multiples" }, blocks));
}

function flipPlot(group) {
  const width = 320, height = 200, left = 58, bottom = 34, right = 10, top = 8;
  const points = group.points.map(([margin, difference, explained, n]) => ({ margin: toNumber(margin), difference: toNumber(difference), explained, n }))
    .filter((point) => !Number.isNaN(point.margin) && !Number.isNaN(point.difference));
  const x = logScale(points.map((point) => point.difference)), y = logScale(points.map((point) => point.margin));
  if (!x || !y) return null;
  const px = (value) => left + x(value) * (width - left - right), py = (value) => height - bottom - y(value) * (height - top - bottom);
  const node = svg("svg", { class: "figure", viewBox: `0 0 ${width} ${height}`, role: "img",
    "aria-label": `Margin against difference of ${plural(points.length, "flip")} of ${group.kind}, ${group.unexplained} unexplained` });
  for (const tick of x.ticks) node.append(svg("line", { class: "grid", x1: px(tick), x2: px(tick), y1: top, y2: height - bottom }), svg("text", { x: px(tick), y: height - bottom + 13, "text-anchor": "middle" }, formatDecade(tick)));
  for (const tick of y.ticks) node.append(svg("line", { class: "grid", x1: left, x2: width - right, y1: py(tick), y2: py(tick) }), svg("text", { x: left - 5, y: py(tick) + 4, "text-anchor": "end" }, formatDecade(tick)));
  // The diagonal where both axes have it.
  const low = Math.max(x.ticks[0], y.ticks[0]), high = Math.min(10 ** Math.ceil(Math.log10(x.ticks.at(-1))), 10 ** Math.ceil(Math.log10(y.ticks.at(-1))));
  if (low < high) node.append(svg("line", { class: "span guide", x1: px(low), y1: py(low), x2: px(high), y2: py(high) }));
  for (const point of points.sort((a, b) => b.explained - a.explained)) {
    const title = svg("title", null, `margin ${formatNumber(point.margin)}, difference ${formatNumber(point.difference)}, ${point.explained ? "explained" : "unexplained"}: ${caseByNumber.get(point.n)?.id ?? ""}`);
    node.append(point.explained ? svg("circle", { class: "mark flip", cx: px(point.difference), cy: py(point.margin), r: 3 }, title)
      : svg("g", { transform: `translate(${px(point.difference)} ${py(point.margin)})` }, svg("path", { class: "mark flip unexplained", d: SHAPES.diamond }, title)));
  }
  node.append(svg("text", { class: "label", x: (left + width - right) / 2, y: height - 4, "text-anchor": "middle" }, "difference between the executors"),
    svg("text", { class: "label", x: 9, y: (height - bottom) / 2, "text-anchor": "middle", transform: `rotate(-90 9 ${(height - bottom) / 2})` }, "margin"));
  return node;
}
