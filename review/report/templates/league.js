// Search and sort; the table is readable without it. Own rows stay on top and visible.
const table = document.querySelector("table"), body = table.tBodies[0], heads = [...table.tHead.rows[0].cells];
const own = [...body.querySelectorAll(".own")], others = [...body.querySelectorAll("tr:not(.own)")];
const tools = document.querySelector(".tools"), [search, order] = tools.querySelectorAll("input, select");
const value = (row, column) => {
  const cell = row.cells[column], shown = cell.dataset.key ?? cell.textContent.trim(), number = parseFloat(shown.replaceAll(",", ""));
  return shown === "-" ? [2, 0] : /^[\d.,]+[%*]?$/.test(shown) ? [0, number] : [1, shown];
};
const compare = (a, b) => a[0] - b[0] || (a[0] === 1 ? a[1].localeCompare(b[1]) : a[1] - b[1]);
const sort = (column, side) => {
  others.sort((a, b) => {
    const [left, right] = [value(a, column), value(b, column)];
    return left[0] === 2 || right[0] === 2 ? compare(left, right) : side * compare(left, right);
  });
  body.append(...own, ...others);
  heads.forEach((head, at) => at === column && head.setAttribute("aria-sort", side > 0 ? "ascending" : "descending"));
  heads.forEach((head, at) => at === column || head.removeAttribute("aria-sort"));
  order.value = column;
};
heads.forEach((head, column) => {
  order.add(new Option(head.textContent, column));
  const button = document.createElement("button");
  button.append(...head.childNodes);
  const side = Number(head.dataset.side ?? 1), before = side > 0 ? "ascending" : "descending";
  button.addEventListener("click", () => sort(column, head.getAttribute("aria-sort") === before ? -side : side));
  head.append(button);
});
order.addEventListener("change", () => sort(Number(order.value), Number(heads[order.value].dataset.side ?? 1)));
search.addEventListener("input", () => {
  const words = search.value.toLowerCase().split(/\s+/);
  for (const row of others) row.hidden = !words.every((word) => row.textContent.toLowerCase().includes(word));
});
heads[0].setAttribute("aria-sort", "ascending");
tools.hidden = false;
