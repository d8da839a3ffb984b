"use strict";
(function () {
  // A cell sorts by its data-value where its column holds numbers, else by its text; what is not there stays at the end.
  function keyOf(row, column, numeric) {
    const cell = row.cells[column];
    if (!numeric) return cell.textContent.trim();
    return cell.dataset.value === undefined ? null : Number(cell.dataset.value);
  }

  function sortBy(table, header, column) {
    const ascending = header.getAttribute("aria-sort") !== "ascending";
    const numeric = header.dataset.sort === "number";
    const sign = ascending ? 1 : -1;
    const body = table.tBodies[0];
    const rows = Array.from(body.rows, (row) => [keyOf(row, column, numeric), row]);
    rows.sort(function ([a], [b]) {
      if (a === null || b === null) return (a === null) - (b === null);
      return sign * (numeric ? a - b : a.localeCompare(b, "en"));
    });
    for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
    header.setAttribute("aria-sort", ascending ? "ascending" : "descending");
    body.append(...rows.map(([, row]) => row));
  }

  for (const table of document.querySelectorAll("table")) {
    Array.from(table.tHead.rows[0].cells).forEach(function (header, column) {
      const button = document.createElement("button");
      button.type = "button";
      const words = header.querySelector("span");
      words.replaceWith(button);
      button.append(words);
      button.addEventListener("click", () => sortBy(table, header, column));
    });
  }

  const controls = document.querySelector(".controls");
  if (controls) {
    const rows = Array.from(document.querySelectorAll("#cells tbody tr"));
    const selects = Array.from(controls.querySelectorAll("select"));
    const count = controls.querySelector("output");
    const filter = function () {
      let shown = 0;
      for (const row of rows) {
        row.hidden = selects.some((select) => select.value && row.dataset[select.dataset.filter] !== select.value);
        shown += row.hidden ? 0 : 1;
      }
      count.textContent = shown + " of " + rows.length + " rows";
    };
    for (const select of selects) select.addEventListener("change", filter);
    filter();
    controls.hidden = false;
  }

  // On paper nothing can be opened.
  window.addEventListener("beforeprint", function () {
    for (const part of document.querySelectorAll("details")) part.open = true;
  });
})();
