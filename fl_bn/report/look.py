"""The page's style sheet and its script: a dozen lines that sort tables, without which the page is whole."""

CSS = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1d1e21; --soft: #5c6068; --rule: #d9dbdf;
  --tint: #f4f5f7; --link: #0b5cad; --bad: #a4262c; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #16181c; --ink: #e8e9eb; --soft: #a4a9b1; --rule: #3a3e46; --tint: #1f2228; --link: #7db7f5; --bad: #ff9a94; }
}
* { box-sizing: border-box; }
html { scroll-padding-top: 1rem; -webkit-text-size-adjust: 100%; }
body { margin: 0 auto; padding: 1.5rem clamp(.9rem, 4vw, 2.5rem) 4rem; max-width: 68rem; background: var(--paper); color: var(--ink);
  font: 1rem/1.55 system-ui, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; overflow-wrap: break-word; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: .5rem 0 .4rem; text-wrap: balance; }
h2 { font-size: 1.2rem; margin: 2.6rem 0 .7rem; padding-bottom: .25rem; border-bottom: 1px solid var(--rule); }
p { max-width: 46rem; margin: .5rem 0; }
a { color: var(--link); }
.meta, figcaption { color: var(--soft); font-size: .9rem; }
.notes { white-space: pre-line; }
nav ul { display: flex; flex-wrap: wrap; gap: .2rem 1.1rem; padding: 0; margin: .8rem 0 0; list-style: none; font-size: .92rem; }
.wide { overflow-x: auto; max-width: 100%; }
.wide:focus-visible { outline: 2px solid var(--link); outline-offset: 2px; }
table { border-collapse: separate; border-spacing: 0; font-variant-numeric: tabular-nums;
  font-size: 15px; line-height: 23px; /* whole pixels, or the lines below sticky cells go astray */ }
th, td { padding: 5px 11px; text-align: right; vertical-align: baseline; border-bottom: 1px solid var(--rule); }
td { white-space: nowrap; }
th { font-weight: 600; }
thead th { vertical-align: bottom; min-width: 4.5rem; max-width: 14rem; }
thead tr:last-child th { border-bottom: 2px solid var(--ink); }
th:first-child, td:first-child, .text td, .text th { text-align: left; }
tbody th { position: sticky; left: 0; background: var(--paper); max-width: 18rem; font-weight: 500; }
thead .of { text-align: center; font-weight: 400; color: var(--soft); }
.text td { white-space: normal; min-width: 5rem; vertical-align: top; }
.text th { vertical-align: top; }
.compared td { white-space: nowrap; }
tbody tr:hover > * { background: var(--tint); }
.std, .count { color: var(--soft); font-size: 13px; line-height: 1; }
.paper { color: var(--soft); font-style: italic; }
.none { color: var(--bad); }
.left-out { color: var(--soft); }
td strong { font-weight: 750; }
th button { all: unset; cursor: pointer; }
th button:focus-visible { outline: 2px solid var(--link); outline-offset: 2px; }
th button::after { content: "\\2195"; color: var(--soft); padding-left: .35em; font-weight: 400; font-size: .85em; }
th[aria-sort=ascending] button::after { content: "\\2191"; color: var(--ink); }
th[aria-sort=descending] button::after { content: "\\2193"; color: var(--ink); }
figure { margin: 1.6rem 0 2.2rem; }
figure svg { display: block; width: 100%; height: auto; }
figcaption { margin-top: .4rem; max-width: 46rem; }
pre, code { font: .86rem/1.5 ui-monospace, "Cascadia Mono", "DejaVu Sans Mono", monospace; }
pre { background: var(--tint); padding: .7rem .9rem; border-radius: 5px; overflow-x: auto; margin: .5rem 0; }
pre.error { white-space: pre-wrap; overflow-wrap: anywhere; margin: 0; padding: .4rem .6rem; }
details { margin: .7rem 0; }
summary { cursor: pointer; font-weight: 600; }
section.experiment { border-top: 3px solid var(--ink); margin-top: 3rem; }
section.experiment h2 { border: 0; margin-top: .8rem; font-size: 1.35rem; }
@media (max-width: 34rem) { th, td { padding: 5px 8px; } tbody th { max-width: 9rem; } h1 { font-size: 1.4rem; } }
@media print {
  :root { --paper: #fff; --ink: #000; --soft: #444; --rule: #bbb; --tint: #f4f4f4; --link: #000; --bad: #000; color-scheme: light; }
  body { max-width: none; padding: 0; font-size: 10pt; }
  nav, th button::after { display: none; }
  h2 { break-after: avoid; }
  figure, tr { break-inside: avoid; }
  figure svg { min-width: 0 !important; max-height: 23cm; }
  .wide { overflow: visible; }
  tbody th { position: static; }
  pre { white-space: pre-wrap; }
}
"""

SCRIPT = """
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0], heads = [...table.tHead.rows[table.tHead.rows.length - 1].cells];
  const key = (row, n) => row.cells[n].dataset.value ?? row.cells[n].textContent.trim();
  const order = (a, b) => a === "" || b === "" ? (a === "") - (b === "") : isNaN(a) || isNaN(b) ? a.localeCompare(b, "en") : a - b;
  heads.forEach((head, n) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.onclick = () => {
      const up = head.getAttribute("aria-sort") === "descending" || (n === 0 && !head.hasAttribute("aria-sort"));
      heads.forEach(other => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const rows = [...body.rows].map(row => [key(row, n), row]);
      rows.sort(([a], [b]) => a === "" || b === "" ? order(a, b) : (up ? 1 : -1) * order(a, b));
      body.append(...rows.map(([, row]) => row));
    };
  });
}
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach(one => one.open = true));
"""
