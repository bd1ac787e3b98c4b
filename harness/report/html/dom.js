// SPDX-License-Identifier: Apache-2.0
// Elements. Text only ever enters as a text node or an attribute value: nothing of a report is parsed as markup.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

function el(tag, attributes, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

function svg(tag, attributes, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

const STATUS = {
  passed: { word: "passed", sign: "\u2713" },
  failed: { word: "failed", sign: "\u2715" },
  error: { word: "error", sign: "!" },
  skipped: { word: "skipped", sign: "\u2013" },
  not_run: { word: "not run", sign: "\u25cb" },
};
const STATUS_ORDER = ["error", "failed", "not_run", "skipped", "passed"];  // most severe first

function statusWord(status) {
  return STATUS[status]?.word ?? status;
}

function badge(status) {
  return el("span", { class: "badge", "data-status": status },
    el("span", { "aria-hidden": "true" }, STATUS[status]?.sign ?? "?"), ` ${statusWord(status)}`);
}

// A section with its heading; `lead` says in a sentence what the reader sees.
function section(id, title, lead, ...children) {
  return el("section", { id, "aria-labelledby": `${id}-title` }, el("h2", { id: `${id}-title` }, title),
    lead ? el("p", { class: "lead" }, lead) : null, ...children);
}

// Code that may break after the separators of an id, and elsewhere only when it must.
function code(text) {
  const parts = String(text).split(/(?<=[:/,_])/);
  return el("code", null, parts.flatMap((part, at) => (at === 0 ? [part] : [el("wbr"), part])));
}

// A value, its interval small below it.
function withInterval([value, low, high], format = formatNumber) {
  if (Number.isNaN(toNumber(low))) return format(value);
  return [format(value), el("small", { class: "interval" }, `${format(low)} to ${format(high)}`)];
}

// A table; columns are {head, cell(row), class, sort}. Explicit roles, since small screens lay the rows out as blocks.
function table(columns, rows, options = {}) {
  const head = el("tr", { role: "row" }, columns.map((column) =>
    el("th", { role: "columnheader", scope: "col", class: column.class, "aria-sort": column.ariaSort }, column.head)));
  const body = rows.map((row, index) => el("tr", { role: "row" }, columns.map((column, at) => {
    const attributes = { class: column.class, "data-label": typeof column.head === "string" ? column.head : column.label };
    return at === 0 ? el("th", { role: "rowheader", scope: "row", ...attributes }, column.cell(row, index))
      : el("td", { role: "cell", ...attributes }, column.cell(row, index));
  })));
  return el("table", { role: "table", class: options.class },
    options.caption ? el("caption", { class: options.showCaption ? null : "visually-hidden" }, options.caption) : null,
    el("thead", { role: "rowgroup" }, head), el("tbody", { role: "rowgroup" }, body));
}

// A box that scrolls sideways when its content is too wide, and only then is a stop of the keyboard.
const scrollObserver = new ResizeObserver((entries) => {
  for (const { target } of entries) {
    if (target.scrollWidth > target.clientWidth) target.setAttribute("tabindex", "0");
    else target.removeAttribute("tabindex");
  }
});

function scrollable(label, ...children) {
  const node = el("div", { class: "scroll", role: "group", "aria-label": label }, ...children);
  scrollObserver.observe(node);
  return node;
}

function unfold(summary, make) {
  const node = el("details", { class: "unfold" }, el("summary", null, summary));
  node.addEventListener("toggle", () => {
    if (node.open && node.children.length === 1) node.append(...[make()].flat());
  });
  return node;
}

// A group of exclusive choices; calls change(value) at each choice.
function choice(name, legend, values, chosen, change) {
  return el("fieldset", { class: "choice" }, el("legend", { class: "visually-hidden" }, legend),
    values.map(([value, label]) => el("label", null,
      el("input", { type: "radio", name, value, checked: value === chosen, onchange: () => change(value) }), el("span", null, label))));
}

// Draws the first `limit` of `items`, with a button for the others.
function limited(items, limit, noun, draw) {
  const host = el("div");
  const show = (count) => {
    host.replaceChildren(draw(items.slice(0, count)));
    if (count < items.length) {
      host.append(el("button", { type: "button", class: "more", onclick: () => show(items.length) },
        `Show all ${plural(items.length, noun)}`));
    }
  };
  show(limit);
  return host;
}

function announce(text) {
  document.getElementById("status").textContent = text;
}

function copyButton(text, label) {
  const button = el("button", { type: "button", class: "copy", "aria-label": `Copy: ${label}` }, "copy");
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = "copied";
      announce(`Copied ${label}`);
      setTimeout(() => { button.textContent = "copy"; }, 1500);
    } catch {
      // No clipboard here: the text beside the button is selected instead.
      getSelection().selectAllChildren(button.previousElementSibling);
    }
  });
  return button;
}

function command(text) {
  return el("div", { class: "command" }, el("pre", null, code(text)), copyButton(text, text));
}
