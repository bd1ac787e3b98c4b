// SPDX-License-Identifier: Apache-2.0
// Puts the sections together. Those without data are absent. Links are fragments: #case-N opens a case, #cases?filters sets the list.

function build() {
  const host = document.getElementById("sections");
  for (const make of [matrixSection, conformanceSection, decisionsSection, driftSection, acceptanceSection, handoffsSection,
    memorySection, timingSection, casesSection]) {
    const node = make();
    if (node) host.append(node);
  }
  const nav = document.getElementById("nav");
  for (const node of document.querySelectorAll("main > [id].verdict, main section[id]")) {
    const title = node.id === "verdict" ? "Verdict" : node.querySelector("h2").textContent;
    nav.append(el("a", { href: `#${node.id}` }, title));
  }
  const commandText = document.querySelector("#provenance .command code");
  if (commandText) commandText.parentElement.after(copyButton(commandText.textContent, "the command"));
}

function route() {
  const fragment = location.hash.slice(1);
  const opened = /^case-(\d+)$/.exec(fragment);
  const dialog = document.getElementById("case");
  if (opened) {
    openCase(Number(opened[1]));
    return;
  }
  if (dialog.open) dialog.close();
  if (fragment.startsWith("cases?") && caseList.nodes.section) {
    setFilters(Object.fromEntries(new URLSearchParams(fragment.slice("cases?".length))));
    caseList.nodes.section.scrollIntoView();
    announce(caseList.nodes.count.textContent);
  }
}

build();
addEventListener("hashchange", route);
const caseDialog = document.getElementById("case");
// The fragment goes with the dialog, so that the same link opens it again and a reload shows what is seen.
caseDialog.addEventListener("close", () => {
  if (/^#case-\d+$/.test(location.hash)) history.replaceState(null, "", location.pathname + location.search);
});
caseDialog.addEventListener("click", (event) => {
  if (event.target === caseDialog) caseDialog.close();
});
route();
document.documentElement.dataset.ready = "true";
