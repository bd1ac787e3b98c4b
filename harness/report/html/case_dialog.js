// SPDX-License-Identifier: Apache-2.0
// One case: status, checks, distances with their floors, flips, drift, and the commands that reproduce it.

function openCase(n) {
  const row = caseByNumber.get(n);
  const dialog = document.getElementById("case");
  if (!row) {
    announce(`Row ${n} is not on this page.`);
    return;
  }
  const own = detailsOf(n);
  const close = el("button", { type: "button", class: "close", "aria-label": "Close", onclick: () => dialog.close() }, "\u2715");
  dialog.replaceChildren(el("article", null,
    el("header", null, el("h2", { id: "case-title" }, badge(row.status), " ", code(row.id)), close),
    el("p", { class: "lead" }, `${row.executor}, row ${n} of the report`),
    row.reason ? el("p", { class: "why" }, row.reason) : null,
    el("div", { class: "commands" }, command(`loopgauge explain ${shellWord(row.id)}`), command(`loopgauge run ${shellWord(row.id)} --dump case.h5`)),
    headlines(row), ...(own ? caseTables(own) : [el("p", { class: "notice" }, `The tables of this case are not on this page, whose size is limited. They are in the report: loopgauge report FILE --json, group /case/${n} of the file.`)])));
  dialog.scrollTop = 0;
  if (!dialog.open) dialog.showModal();
}

// Quoted where a shell would read it otherwise.
function shellWord(text) {
  return /^[\w./:=,@%+-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`;
}

function headlines(row) {
  const entries = [
    ["error / bound", formatNumber(row.ratio)], ["KL mean", formatNumber(row.kl_mean)], ["KL max", formatNumber(row.kl_max)], ["first token KL", formatNumber(row.first_token_kl)],
    ["same top-1", formatPercent(row.same_top1)], ["bits/byte", formatNumber(row.bits_per_byte)], ["accuracy", formatPercent(row.task_accuracy)],
    ["dense / this", formatNumber(row.memory_ratio)], ["time", formatSeconds(row.seconds)],
  ].filter(([, value]) => value !== DASH);
  return entries.length === 0 ? null : el("dl", { class: "facts" }, entries.map(([name, value]) => el("div", null, el("dt", null, name), el("dd", null, value))));
}

function caseTables(own) {
  const parts = [];
  const add = (title, ...nodes) => parts.push(el("h3", null, title), ...nodes);
  if (own.checks) {
    add("Checks", el("ul", { class: "checks" }, own.checks.map(([name, status, detail]) =>
      el("li", null, badge(detailText(status)), " ", code(detailText(name)), detail ? el("p", { class: "reason" }, detail) : null))));
  }
  if (own.tolerance) {
    const { rows, of } = own.tolerance;
    add(rows.length < of ? `Distances from the reference, the ${rows.length} nearest to their bound of ${of}` : "Distances from the reference",
      scrollable("Distances from the reference", table([
        { head: "metric", cell: (row) => [el("span", { class: "untrusted" }, detailText(row[1])), row[2] < 0 ? null : ` loop ${row[2]}`] },
        { head: "level", cell: (row) => detailText(row[0]).replaceAll("_", " ") },
        { head: "error / bound", class: "number", cell: (row) => el("span", { class: detailText(row[3]) === "failed" ? "bad" : null }, detailText(row[3]) === "not judged" ? "not judged" : formatNumber(row[4])) },
        { head: "ulps", class: "number", cell: (row) => formatNumber(row[5]) },
        { head: "largest", class: "number", cell: (row) => formatNumber(row[6]) },
        { head: "noise: other order", class: "number", cell: (row) => formatNumber(row[7]) },
        { head: "noise: double", class: "number", cell: (row) => formatNumber(row[8]) },
        { head: "limit", class: "number", cell: (row) => formatNumber(row[9]) },
        { head: "values", class: "number", cell: (row) => formatInteger(row[10]) },
        { head: "NaN, Inf", class: "number", cell: (row) => (row[11] > 0 ? el("strong", { class: "bad" }, formatInteger(row[11])) : "0") },
        { head: "where", cell: (row) => el("span", { class: "untrusted" }, detailText(row[12])) },
      ], rows, { class: "list", caption: "Distances from the reference" })));
  }
  if (own.decisions) {
    add(own.decisions_of ? `Decisions that flipped, ${own.decisions.length} of ${own.decisions_of}` : "Decisions that flipped",
      scrollable("Decisions that flipped", table([
        { head: "kind", cell: (flip) => el("span", { class: "untrusted" }, detailText(flip[0])) },
        { head: "where", cell: (flip) => flipPlace(flip, 1) },
        { head: "margin", class: "number", cell: (flip) => formatNumber(flip[6]) },
        { head: "difference", class: "number", cell: (flip) => formatNumber(flip[7]) },
        { head: "explained", cell: (flip) => (flip[8] ? (flip[9] ? "yes" : "by an earlier flip") : el("strong", { class: "bad" }, "no")) },
        { head: "decisions", cell: (flip) => el("span", { class: "untrusted" }, flip[10]) },
      ], own.decisions, { class: "list", caption: "Decisions that flipped" })));
  }
  if (own.drift) add("Drift by position", caseDrift(own.drift));
  if (own.summary) {
    parts.push(unfold("Drift of this trace with its uncertainty", () => scrollable("Drift of this trace", table([
      { head: "metric", cell: (row) => detailText(row[0]).replaceAll("_", " ") },
      { head: "rows", cell: (row) => detailText(row[1]).replaceAll("_", " ") },
      { head: "value", class: "number", cell: (row) => formatNumber(row[2], 4) },
      { head: "95 % interval", class: "number", cell: (row) => (Number.isNaN(toNumber(row[3])) ? DASH : `${formatNumber(row[3])} to ${formatNumber(row[4])}`) },
      { head: "samples", class: "number", cell: (row) => formatInteger(row[5]) },
      { head: "method", cell: (row) => detailText(row[6]) },
    ], own.summary, { class: "list", caption: "Drift of this trace" }))));
  }
  if (own.divergence) {
    const [rows, mean, most, same] = own.divergence;
    add("Distance from the serial plan", el("p", null, `Execution-dependent timing: mean KL ${formatNumber(mean)}, largest ${formatNumber(most)}, same top-1 in ${formatInteger(same)} of ${plural(rows, "row")}.`));
  }
  if (own.counters) {
    add("Counters", el("dl", { class: "facts" }, own.counters.map(([name, value]) => el("div", null, el("dt", null, detailText(name).replaceAll("_", " ")), el("dd", null, formatInteger(value))))));
  }
  if (own.configuration !== undefined) {
    parts.push(unfold("Configuration", () => el("pre", null, code(prettyJson(detailText(own.configuration))))));
  }
  if (own.digest) add("Digest of all tensors", el("p", null, code(own.digest)));
  return parts;
}

function prettyJson(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

// [request, row, position, mean, max, rows, same] of groups of consecutive rows.
function caseDrift(groups) {
  const width = 900, height = 190, left = 48, bottom = 32, right = 10, top = 10;
  const scale = logScale(groups.flatMap((group) => [group[3], group[4]].map(toNumber)).filter((value) => value > 1e-9));
  if (!scale) return el("p", null, "Every row equals dense.");
  const first = Math.min(...groups.map((group) => group[2])), last = Math.max(...groups.map((group) => group[2] + group[5]));
  const x = (position) => left + ((position - first) / Math.max(1, last - first)) * (width - left - right);
  const y = (value) => height - bottom - scale(toNumber(value)) * (height - top - bottom);
  const node = svg("svg", { class: "figure", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `KL by position, from ${formatNumber(Math.min(...groups.map((group) => toNumber(group[3]))))} to ${formatNumber(Math.max(...groups.map((group) => toNumber(group[4]))))}` });
  for (const tick of scale.ticks) {
    node.append(svg("line", { class: "grid", x1: left, x2: width - right, y1: y(tick), y2: y(tick) }), svg("text", { x: left - 5, y: y(tick) + 4, "text-anchor": "end" }, formatDecade(tick)));
  }
  node.append(svg("text", { x: left, y: height - bottom + 14 }, first), svg("text", { x: width - right, y: height - bottom + 14, "text-anchor": "end" }, last - 1),
    svg("text", { class: "label", x: (left + width - right) / 2, y: height - 3, "text-anchor": "middle" }, "position"));
  for (const [request, row, position, mean, most, rows, same] of groups) {
    const at = x(position + (rows - 1) / 2);
    const title = svg("title", null, `request ${request}, position ${position}${rows > 1 ? ` to ${position + rows - 1}` : ""}: mean KL ${formatNumber(mean)}, max ${formatNumber(most)}, same top-1 in ${same} of ${plural(rows, "row")}${row === 0 ? ", first generated token" : ""}`);
    if (rows > 1) node.append(svg("line", { class: "span interval", x1: at, x2: at, y1: y(mean), y2: y(most) }));
    node.append(row === 0 ? svg("g", { transform: `translate(${at} ${y(mean)})` }, svg("path", { class: "mark first", d: SHAPES.diamond }, title))
      : svg("circle", { class: same < rows ? "mark worst changed" : "mark worst", cx: at, cy: y(mean), r: 3.2 }, title));
  }
  return el("figure", null, node, legend([["worst", "dot", "mean KL"], ["worst changed", "dot", "top-1 changed in a row of the group"], ["interval", "line", "up to the largest"], ["first", "diamond", "first token after a prompt"]]));
}
