// A click on a heading sorts its table by this column, a second click the other way round.
for (const head of document.querySelectorAll("table.sortable th")) head.onclick = () => {
  const table = head.closest("table"), rows = [...table.rows].slice(1), column = head.cellIndex;
  const value = row => row.cells[column].textContent.replaceAll(",", "");
  const order = head.dataset.order = head.dataset.order === "1" ? "-1" : "1";
  rows.sort((a, b) => order * value(a).localeCompare(value(b), undefined, {numeric: true}));
  table.tBodies[0].append(...rows);
};
