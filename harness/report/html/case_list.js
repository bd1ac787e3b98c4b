// SPDX-License-Identifier: Apache-2.0
// Every row of the report (or as many as the page holds): filters, order, pages. A page holds 100 rows, however many there are.

const PAGE_ROWS = 100;
const CASE_FILTERS = ["status", "executor", "mode", "settings"];

const caseList = {
  filters: { q: "", status: "", executor: "", mode: "", settings: "" },
  sort: { key: null, descending: false },
  page: 0,
  nodes: {},
};

const CASE_COLUMNS = [
  { key: "status", head: "status", cell: (row) => badge(row.status), order: (row) => STATUS_ORDER.indexOf(row.status) },
  { key: "id", head: "case", cell: (row) => [caseLink(row.n), row.reason ? el("p", { class: "reason" }, row.reason) : null], order: (row) => row.id },
  { key: "executor", head: "executor", cell: (row) => el("span", { class: "untrusted" }, row.executor), order: (row) => row.executor },
  { key: "ratio", head: "error / bound", number: true, cell: (row) => formatNumber(row.ratio) },
  { key: "unexplained", head: "flips", number: true, cell: (row) => (row.flips + row.unexplained > 0 ? `${row.flips}${row.unexplained ? `, ${row.unexplained} unexplained` : ""}` : DASH), order: (row) => row.unexplained * 1e6 + row.flips },
  { key: "kl_mean", head: "KL mean", number: true, cell: (row) => formatNumber(row.kl_mean) },
  { key: "first_token_kl", head: "first token KL", number: true, wide: true, cell: (row) => formatNumber(row.first_token_kl) },
  { key: "same_top1", head: "same top-1", number: true, cell: (row) => formatPercent(row.same_top1) },
  { key: "bits_per_byte", head: "bits/byte", number: true, wide: true, cell: (row) => formatNumber(row.bits_per_byte, 4) },
  { key: "task_accuracy", head: "accuracy", number: true, wide: true, cell: (row) => formatPercent(row.task_accuracy, 0) },
  { key: "memory_ratio", head: "dense / this", number: true, wide: true, cell: (row) => formatNumber(row.memory_ratio) },
  { key: "seconds", head: "time", number: true, wide: true, cell: (row) => formatSeconds(row.seconds) },
];

// Columns that say something in this report.
function usedCaseColumns() {
  return CASE_COLUMNS.filter((column) => !column.number || cases.some((row) => (column.order ? column.order(row) > 0 : !Number.isNaN(row[column.key]))));
}

function filteredCases() {
  const { filters, sort } = caseList;
  const words = filters.q.toLowerCase().split(/\s+/).filter(Boolean);
  const statuses = filters.status ? filters.status.split(",") : null;
  const list = cases.filter((row) => {
    if (statuses && !statuses.includes(row.status)) return false;
    if (filters.executor && row.executor !== filters.executor) return false;
    if (filters.mode && row.mode !== filters.mode) return false;
    if (filters.settings && row.settings !== filters.settings) return false;
    if (words.length === 0) return true;
    row.text ??= `${row.id} ${row.executor} ${row.reason}`.toLowerCase();
    return words.every((word) => row.text.includes(word));
  });
  if (sort.key === null) {
    // The most severe first, then the nearest to a bound, then in the order of the report.
    const rank = (row) => (Number.isNaN(row.ratio) ? -1 : row.ratio);
    const severity = (row) => Math.min(STATUS_ORDER.indexOf(row.status), 2);
    return list.sort((a, b) => severity(a) - severity(b) || rank(b) - rank(a) || a.n - b.n);
  }
  const column = CASE_COLUMNS.find((entry) => entry.key === sort.key);
  const order = column.order ?? ((row) => row[column.key]);
  const sign = sort.descending ? -1 : 1;
  return list.sort((a, b) => {
    const left = order(a), right = order(b);
    // Values that do not apply come last in either direction.
    const leftMissing = Number.isNaN(left), rightMissing = Number.isNaN(right);
    if (leftMissing || rightMissing) return leftMissing - rightMissing || a.n - b.n;
    return left < right ? -sign : left > right ? sign : a.n - b.n;
  });
}

function drawCases() {
  const list = filteredCases();
  const pages = Math.max(1, Math.ceil(list.length / PAGE_ROWS));
  caseList.page = Math.min(caseList.page, pages - 1);
  const shown = list.slice(caseList.page * PAGE_ROWS, (caseList.page + 1) * PAGE_ROWS);
  const columns = caseList.columns.map((column) => ({
    head: el("button", { type: "button", class: "sort", "data-key": column.key, onclick: () => sortCases(column) }, column.head,
      el("span", { "aria-hidden": "true" }, caseList.sort.key !== column.key ? "" : caseList.sort.descending ? " \u2193" : " \u2191")),
    label: column.head,
    ariaSort: caseList.sort.key !== column.key ? null : caseList.sort.descending ? "descending" : "ascending",
    class: [column.number ? "number" : "", column.wide ? "wide" : "", `column-${column.key}`].join(" ").trim(),
    cell: column.cell,
  }));
  const focused = document.activeElement?.closest(".sort")?.getAttribute("data-key");
  caseList.nodes.table.replaceChildren(list.length === 0 ? el("p", { class: "notice" }, "No row matches these filters.")
    : scrollable("List of cases", table(columns, shown, { class: "list cases", caption: "Cases" })));
  if (focused) caseList.nodes.table.querySelector(`.sort[data-key="${focused}"]`)?.focus();
  const from = list.length === 0 ? 0 : caseList.page * PAGE_ROWS + 1;
  const text = `${formatInteger(from)} to ${formatInteger(caseList.page * PAGE_ROWS + shown.length)} of ${plural(list.length, "row")}` +
    (list.length < cases.length ? ` that match, ${formatInteger(cases.length)} in all` : "");
  caseList.nodes.count.textContent = text;
  const button = (label, page, enabled) => el("button", { type: "button", disabled: !enabled, "aria-label": label, onclick: () => {
    caseList.page = page;
    drawCases();
    caseList.nodes.section.scrollIntoView();
  } }, label);
  caseList.nodes.pager.replaceChildren(...(pages === 1 ? [] : [
    button("First", 0, caseList.page > 0), button("Previous", caseList.page - 1, caseList.page > 0),
    el("span", null, `page ${caseList.page + 1} of ${pages}`),
    button("Next", caseList.page + 1, caseList.page + 1 < pages), button("Last", pages - 1, caseList.page + 1 < pages)]));
}

function sortCases(column) {
  const same = caseList.sort.key === column.key;
  // Numbers start with the largest, words with the first; the third click restores the order of severity.
  const first = Boolean(column.number);
  caseList.sort = !same ? { key: column.key, descending: first } : caseList.sort.descending === first ? { key: column.key, descending: !first } : { key: null, descending: false };
  caseList.page = 0;
  drawCases();
}

function setFilters(filters) {
  for (const name of Object.keys(caseList.filters)) caseList.filters[name] = filters[name] ?? "";
  caseList.nodes.q.value = caseList.filters.q;
  for (const name of CASE_FILTERS) {
    const select = caseList.nodes[name], value = caseList.filters[name];
    if (![...select.options].some((option) => option.value === value)) select.append(el("option", { value }, value.replaceAll(",", " or ").replaceAll("_", " ")));
    select.value = value;
  }
  caseList.page = 0;
  drawCases();
}

function casesSection() {
  if (cases.length === 0) return null;
  caseList.columns = usedCaseColumns();
  const { nodes } = caseList;
  const changed = () => {
    caseList.page = 0;
    drawCases();
    announce(nodes.count.textContent);
  };
  let pending = 0;
  nodes.q = el("input", { type: "search", id: "cases-q", placeholder: "words of the id or the reason", oninput: () => {
    caseList.filters.q = nodes.q.value;
    clearTimeout(pending);
    pending = setTimeout(changed, 120);
  } });
  const selects = CASE_FILTERS.map((name) => {
    const values = [...new Set(cases.map((row) => row[name]))];
    nodes[name] = el("select", { id: `cases-${name}`, onchange: () => { caseList.filters[name] = nodes[name].value; changed(); } },
      el("option", { value: "" }, "all"), values.map((value) => el("option", { value }, name === "status" ? statusWord(value) : value)));
    return values.length > 1 ? el("label", { for: `cases-${name}` }, name === "settings" ? "setting" : name, nodes[name]) : null;
  });
  nodes.count = el("p", { class: "count" });
  nodes.pager = el("div", { class: "pager", role: "group", "aria-label": "Pages of the list" });
  nodes.table = el("div", { class: "case-table" });
  const notes = [];
  if (cases.length < overview.rows) notes.push(`The list holds ${formatInteger(cases.length)} of ${formatInteger(overview.rows)} rows, failures first; loopgauge report FILE --csv has all. Everything above counts all rows.`);
  const detailed = cases.filter((row) => row.detailed).length;
  if (detailed < cases.length) notes.push(`Tables of single cases are here for ${formatInteger(detailed)} rows: failures, then the nearest to their bound. loopgauge report FILE --json has all.`);
  nodes.section = section("cases", "Cases", null,
    notes.map((note) => el("p", { class: "lead" }, note)),
    el("form", { class: "filters", role: "search", "aria-label": "Filter cases", onsubmit: (event) => event.preventDefault() },
      el("label", { for: "cases-q" }, "search", nodes.q), selects,
      el("button", { type: "button", onclick: () => setFilters({}) }, "Reset")),
    nodes.count, nodes.table, nodes.pager);
  drawCases();
  return nodes.section;
}
