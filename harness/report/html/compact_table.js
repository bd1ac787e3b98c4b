// SPDX-License-Identifier: Apache-2.0
// Tables whose cells are texts already, as the terminal shows them.

const COMPACT_ROWS = 24;

// Null where there are no rows.
function compactTable(content, caption) {
  if (content.rows.length === 0) return null;
  const columns = content.header.map((head, at) => ({ head, class: at === 0 ? undefined : "number", cell: (row) => (at === 0 ? code(row[0]) : row[at]) }));
  return limited(content.rows, COMPACT_ROWS, "row", (list) => scrollable(caption, table(columns, list, { class: "list", caption })));
}

function handoffsSection() {
  const node = compactTable(overview.handoffs, "Handoffs by setting");
  return node && section("handoffs", "Handoffs", `${overview.handoffs.title}.`, node);
}
