// Sorts a table by the column whose heading is clicked: by the first number of a cell, or else by its text.
"use strict";
for (const table of document.querySelectorAll("table")) {
  const headings = [...table.tHead.rows[0].cells];
  const body = table.tBodies[0];
  headings.forEach((heading, column) => {
    heading.querySelector("button").addEventListener("click", () => {
      const direction = heading.ariaSort === "ascending" ? -1 : 1;
      for (const other of headings) other.ariaSort = null;
      heading.ariaSort = direction === 1 ? "ascending" : "descending";
      const rows = [...body.rows].map((row) => [key(row.cells[column].textContent), row]);
      rows.sort(([a], [b]) => order(a, b, direction));
      body.append(...rows.map(([, row]) => row));
    });
  });
}

function key(text) {
  const number = parseFloat(text.replaceAll(",", ""));
  return text.trim() === "" ? null : Number.isNaN(number) ? text : number;
}

// empty cells are last in both directions, and numbers before words
function order(a, b, direction) {
  if (a === null || b === null) return (a === null) - (b === null);
  if (typeof a !== typeof b) return typeof a === "number" ? -1 : 1;
  return direction * (typeof a === "number" ? a - b : a.localeCompare(b));
}
