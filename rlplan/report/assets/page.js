/* The page around the charts: sortable tables, tooltips of bars, and the first drawing of each chart. */
"use strict";
charts.sortable = (table) => {
  const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0];
  const names = heads.map((head) => head.innerText.replace(/\s+/g, " ").trim());
  const value = (row, at) => row.cells[at]?.dataset.v ?? row.cells[at]?.textContent.trim() ?? "";
  const compare = (a, b) => {
    const [x, y] = [parseFloat(a), parseFloat(b)];
    if (a === "" || b === "" || a === "–" || b === "–") return (a === "" || a === "–") - (b === "" || b === "–");
    return Number.isNaN(x) || Number.isNaN(y) ? a.localeCompare(b, "en", { numeric: true }) : x - y;
  };
  const sort = (at) => {
    const up = heads[at].getAttribute("aria-sort") !== "ascending";
    heads.forEach((head) => head.removeAttribute("aria-sort"));
    heads[at].setAttribute("aria-sort", up ? "ascending" : "descending");
    const groups = [[]];   // rows stay below the line that heads them
    for (const row of [...body.rows]) {
      if (row.classList.contains("head")) groups.push([row]);
      else groups[groups.length - 1].push(row);
    }
    for (const group of groups) {
      const head = group.filter((row) => row.classList.contains("head")), rows = group.slice(head.length);
      rows.sort((a, b) => (up ? 1 : -1) * compare(value(a, at), value(b, at)));
      body.append(...head, ...rows);
    }
  };
  heads.forEach((head, at) => {
    if (!head.textContent.trim()) return;
    const button = charts.element("button", { type: "button", title: "sort", onclick: () => sort(at) });
    button.append(...head.childNodes);
    head.append(button);
  });
  for (const row of body.rows) {   // a phone shows a row as a card, each cell with the name of its column
    if (!row.classList.contains("head")) [...row.cells].forEach((cell, at) => { cell.dataset.label = names[at]; });
  }
};

/* Show the first rows of a long table, whatever its order, and a button for the others. page.css has the same number. */
charts.cut = (body) => {
  if (body.rows.length <= 60) return;
  body.classList.add("cut");
  const button = charts.element("button", { type: "button", onclick: () => { body.classList.remove("cut"); button.remove(); } },
    `Show all ${body.rows.length} rows`);
  body.parentElement.after(button);
};

charts.tips = (root) => {
  for (const one of root.querySelectorAll("[data-tip]")) {
    const show = () => {
      const place = one.getBoundingClientRect(), [title, ...lines] = one.dataset.tip.split("\n");
      charts.showTip(place.left + Math.min(place.width, 60), place.bottom - 6, title, [], lines);
    };
    one.tabIndex = 0;
    for (const name of ["pointerenter", "focus"]) one.addEventListener(name, show);
    for (const name of ["pointerleave", "blur"]) one.addEventListener(name, charts.hideTip);
  }
};

/* Draw the charts of a part of the page: when it is loaded, and again when it is replaced (rlplan ui). */
charts.open = (root) => {
  charts.hideTip();
  for (const one of charts.figures) if (!one.box.isConnected) one.close();
  charts.figures = charts.figures.filter((one) => one.box.isConnected);
  for (const figure of root.querySelectorAll("figure[data-chart]")) {
    const spec = JSON.parse(figure.querySelector("script").textContent), box = figure.querySelector(".chart");
    if (!spec.others) { charts[spec.type](box, spec); continue; }
    const views = spec.others.map((one, index) => {
      const view = charts.element("div", { hidden: index > 0 });
      return { name: one.name, view, draw: () => { charts[one.type](view, one); view.drawn = true; } };
    });
    const chosen = charts.element("div", { class: "tools" }, ...views.map(({ name, view, draw }, index) => charts.element("button",
      { type: "button", "aria-pressed": String(index === 0), onclick: (event) => {
        views.forEach((other) => { other.view.hidden = other.view !== view; });
        for (const button of chosen.children) button.setAttribute("aria-pressed", String(button === event.currentTarget));
        if (!view.drawn) draw();
      } }, name)));
    box.append(chosen, ...views.map(({ view }) => view));
    views[0].draw();
  }
  root.querySelectorAll("table").forEach((table) => table.tHead && charts.sortable(table));
  charts.tips(root);
};
addEventListener("DOMContentLoaded", () => {
  document.body.append(charts.tip);
  charts.open(document);
  if (matchMedia("(max-width: 720px)").matches) {   // on a phone, parts with long tables are folded, and a long table is cut
    document.querySelectorAll("details.fold").forEach((part) => { part.open = false; });
    document.querySelectorAll("tbody").forEach(charts.cut);
  }
  document.documentElement.dataset.drawn = "";
});
