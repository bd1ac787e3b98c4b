// SPDX-License-Identifier: Apache-2.0
// The embedded data. The overview is read at once, the tables of single cases when the first case is opened.

const overview = JSON.parse(document.getElementById("overview").textContent);

const cases = readCases(overview.cases);
const caseByNumber = new Map(cases.map((row) => [row.n, row]));

function readCases(columns) {
  const text = (name) => {
    const { texts, index } = columns[name];
    return (at) => texts[index[at]];
  };
  const [id, mode, settings, trace, executor, status, reason] =
    ["id", "mode", "settings", "trace", "executor", "status", "reason"].map(text);
  const numbers = ["ratio", "kl_mean", "kl_max", "first_token_kl", "same_top1", "bits_per_byte", "task_accuracy", "memory_ratio", "seconds"];
  return columns.n.map((n, at) => {
    const row = {
      n, mode: mode(at), settings: settings(at), trace: trace(at), executor: executor(at), status: status(at), reason: reason(at),
      flips: columns.flips[at], unexplained: columns.unexplained[at], detailed: columns.detailed[at] === 1,
    };
    row.id = id(at) || `${row.mode}/${row.settings}/${row.trace}`;
    for (const name of numbers) row[name] = toNumber(columns[name][at]);
    return row;
  });
}

let details = null;

// The tables of one case, with texts in place of their numbers; null where the page has none.
function detailsOf(n) {
  details ??= JSON.parse(document.getElementById("details").textContent);
  return details.cases[n] ?? null;
}

function detailText(index) {
  return details.texts[index];
}

// A dense baseline first, then in the order of the report.
function isDense(settings) {
  return settings.split(":")[0] === "t0s0q0";
}
