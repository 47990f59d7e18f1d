/* SPDX-License-Identifier: LGPL-2.1-or-later */
"use strict";
for (const table of document.querySelectorAll("table")) {
  const body = table.tBodies[0];
  const original = [...body.rows];
  const value = (row, at) => {
    const cell = row.cells[at];
    return cell.dataset.value === undefined ? cell.textContent : Number(cell.dataset.value);
  };
  const known = (row, at) => row.cells[at].dataset.none === undefined;
  [...table.tHead.rows[0].cells].forEach((head, at) => {
    head.querySelector("button").addEventListener("click", () => {
      const now = head.getAttribute("aria-sort");
      const first = head.dataset.first;
      const other = first === "descending" ? "ascending" : "descending";
      const next = now === null ? first : now === first ? other : null;
      for (const cell of table.tHead.rows[0].cells) cell.removeAttribute("aria-sort");
      let rows = original;
      if (next !== null) {
        head.setAttribute("aria-sort", next);
        const way = next === "ascending" ? 1 : -1;
        rows = original.slice().sort((a, b) => {
          // What has no value comes last, in either order.
          if (known(a, at) !== known(b, at)) return known(a, at) ? -1 : 1;
          const one = value(a, at), two = value(b, at);
          return one < two ? -way : one > two ? way : 0;
        });
      }
      body.append(...rows);
    });
  });
  const filter = table.closest("section").querySelector("input");
  if (filter !== null) {
    filter.addEventListener("input", () => {
      const words = filter.value.toLowerCase().split(/\s+/);
      for (const row of original) {
        const text = row.textContent.toLowerCase();
        row.classList.toggle("hidden", !words.every((word) => text.includes(word)));
      }
    });
  }
}
