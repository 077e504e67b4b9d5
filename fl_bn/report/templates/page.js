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
