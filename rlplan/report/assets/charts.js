/* Common parts of all charts: colours of the page, one tooltip, zoom, pan and keys over uPlot.
   Left out: drawing (timeline.js, curves.js), tables of the page (page.js). */
"use strict";
const charts = { figures: [], made: 0, family: 'system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif' };

charts.css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
charts.font = (size) => `${size * uPlot.pxRatio}px ${charts.family}`;

charts.element = (tag, attributes = {}, ...children) => {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value != null) made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
};

charts.key = (color) => {
  const key = charts.element("i", { class: "key" });
  key.style.background = color;
  return key;
};

/* Formats: the same as in rlplan/units.py. */
charts.bytes = (value) => {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let size = Math.abs(value), unit = 0;
  while (size >= 1024 && unit < 4) { size /= 1024; unit += 1; }
  return `${value < 0 ? "−" : ""}${unit ? Number(size.toPrecision(3)) : size} ${units[unit]}`;
};
charts.exactly = (value) => `${charts.bytes(value)} (${Math.round(value).toLocaleString("en")} B)`;
charts.seconds = (value) => {
  if (!value) return "0 s";
  const size = Math.abs(value), sign = value < 0 ? "−" : "";
  if (size < 1e-3) return `${sign}${Number((1e6 * size).toPrecision(3))} µs`;
  if (size < 1) return `${sign}${Number((1e3 * size).toPrecision(3))} ms`;
  if (size < 60) return `${sign}${Number(size.toPrecision(3))} s`;
  if (size < 3600) return `${sign}${Math.floor(size / 60)} min ${Math.round(size % 60)} s`;
  return `${sign}${Math.floor(size / 3600)} h ${Math.round((size % 3600) / 60)} min`;
};

/* Steps between ticks of seconds: decimal up to a minute, then minutes and hours. */
charts.ticks = [...[1e-6, 1e-5, 1e-4, 1e-3, 0.01, 0.1, 1].flatMap((unit) => [unit, 2 * unit, 5 * unit]), 10, 20, 30,
  ...[60, 3600].flatMap((unit) => [1, 2, 5, 10, 20, 30].map((many) => many * unit)), 86400, 864000];

charts.tickWords = (value) => charts.seconds(value).replace(/ 0 (s|min)$/, "");

/* One tooltip for the whole page. rows: [colour or null, name, value, source or ""]. */
charts.tip = charts.element("div", { class: "tip", role: "status", hidden: true });
charts.showTip = (x, y, title, rows, notes = []) => {
  const body = charts.element("table", {}, ...rows.map(([color, name, value, source]) => charts.element("tr", {},
    charts.element("td", {}, ...(color ? [charts.key(color)] : []), name), charts.element("td", { class: "n" }, value),
    charts.element("td", { class: "muted" }, source || ""))));
  charts.tip.replaceChildren(charts.element("b", {}, title), ...notes.map((one) => charts.element("div", {}, one)), body);
  charts.tip.hidden = false;
  const { offsetWidth: width, offsetHeight: height } = charts.tip;
  const left = x + 14 + width < innerWidth ? x + 14 : Math.max(4, x - width - 14);
  charts.tip.style.left = `${Math.min(left, Math.max(4, innerWidth - width - 4))}px`;
  charts.tip.style.top = `${Math.max(4, Math.min(y + 12, innerHeight - height - 6))}px`;
};
charts.hideTip = () => { charts.tip.hidden = true; };

/* Black or white, whichever can be read on a colour. */
charts.inkOn = (color) => {
  const [r, g, b] = [1, 3, 5].map((at) => parseInt(color.slice(at, at + 2), 16));
  return 0.299 * r + 0.587 * g + 0.114 * b > 140 ? "#10161c" : "#ffffff";
};

charts.axis = (more) => ({
  stroke: () => charts.css("--muted"), grid: { stroke: () => charts.css("--line"), width: 1 },
  ticks: { show: false }, font: `11px ${charts.family}`, ...more,
});

charts.bytesAxis = (more = {}) => charts.axis({
  size: 62, values: (_, ticks) => ticks.map((tick) => (tick ? charts.bytes(tick) : "0")),
  splits: (u, _, low, high) => {
    let step = 1;
    while (high > 5 * step) step *= 2;
    return Array.from({ length: Math.floor(high / step) + 1 }, (_, index) => index * step);
  }, ...more,
});

/* Plots below each other with a common range of x: they share zoom, pan, keys and the tooltip. */
charts.Figure = class {
  constructor(box, extent, tell) {
    Object.assign(this, { box, extent, tell, plots: [], view: extent, key: `f${charts.made++}` });
    charts.figures.push(this);
    new ResizeObserver(() => this.resize()).observe(box);
  }

  add(host, options, data) {
    const own = options.hooks || {};
    const plot = new uPlot({
      width: Math.max(host.clientWidth, 240), legend: { show: false }, ...options,
      cursor: { y: false, drag: { x: true, y: false }, points: { show: false }, sync: { key: this.key }, ...options.cursor },
      scales: { ...options.scales, x: { time: false, range: (_, low, high) => [low, high], ...(options.scales || {}).x } },
      hooks: { ...own, setScale: [(u, key) => key === "x" && this.show(u.scales.x.min, u.scales.x.max, u)],
        setCursor: [(u) => this.point(u)] },
    }, data, host);
    plot.host = host;
    this.plots.push(plot);
    this.listen(plot);
    return plot;
  }

  /* Show x from low to high in every plot. */
  show(low, high, from) {
    if (low == null) return;
    const [first, last] = this.extent, width = Math.min(high - low, last - first), near = 1e-9 * (last - first);
    const start = Math.max(first, Math.min(low, last - width)), end = start + width;
    const is_at = (a, b) => Math.abs(a - start) <= near && Math.abs(b - end) <= near;
    if (from && is_at(...this.view) && is_at(low, high)) return;   // uPlot tells of every change, also of ours
    this.view = [start, end];
    for (const plot of this.plots) if (plot !== from || !is_at(low, high)) plot.setScale("x", { min: start, max: end });
    if (this.onview) this.onview(this.view);
  }

  zoom(factor, middle = (this.view[0] + this.view[1]) / 2) {
    this.show(middle - (middle - this.view[0]) * factor, middle + (this.view[1] - middle) * factor);
  }

  pan(part) {
    const by = part * (this.view[1] - this.view[0]);
    this.show(this.view[0] + by, this.view[1] + by);
  }

  point(u) {
    if (u.cursor.left < 0 || u.cursor.idx == null) {
      if (charts.pointed === u) charts.hideTip();
      return;
    }
    if (charts.pointed !== u) return;
    const place = u.over.getBoundingClientRect(), told = this.tell(u, u.posToVal(u.cursor.left, "x"), u.cursor);
    if (told) charts.showTip(place.left + u.cursor.left, place.top + Math.max(u.cursor.top, 0), ...told);
    else charts.hideTip();
  }

  listen(plot) {
    const area = plot.over, pointers = new Map();
    plot.root.tabIndex = 0;
    area.addEventListener("pointerenter", () => { charts.pointed = plot; });
    area.addEventListener("pointerleave", charts.hideTip);
    area.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey) return;
      event.preventDefault();
      this.zoom(event.deltaY < 0 ? 0.8 : 1.25, plot.posToVal(event.offsetX, "x"));
    }, { passive: false });
    area.addEventListener("pointerdown", (event) => {
      charts.pointed = plot;
      if (event.pointerType !== "touch") return;
      pointers.set(event.pointerId, event.clientX);
      plot.setCursor({ left: event.offsetX, top: event.offsetY });
    });
    area.addEventListener("pointermove", (event) => {
      if (!pointers.has(event.pointerId)) return;
      const before = [...pointers.values()];
      pointers.set(event.pointerId, event.clientX);
      const now = [...pointers.values()], wide = (at) => Math.abs(at[0] - at[1]) || 1;
      if (now.length > 1) this.zoom(wide(before) / wide(now));
      else this.pan((before[0] - now[0]) / area.clientWidth);
    });
    for (const name of ["pointerup", "pointercancel"]) area.addEventListener(name, (event) => pointers.delete(event.pointerId));
    plot.root.addEventListener("keydown", (event) => this.press(plot, event));
    plot.root.addEventListener("blur", charts.hideTip);
  }

  press(plot, event) {
    const away = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    const does = { "+": () => this.zoom(0.7), "=": () => this.zoom(0.7), "-": () => this.zoom(1 / 0.7),
      0: () => this.show(...this.extent), Home: () => this.show(...this.extent), Escape: charts.hideTip }[event.key];
    if (!away && !does || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    if (does) does();
    else if (event.shiftKey) this.pan(0.2 * away);
    else {
      charts.pointed = plot;
      const spots = plot.data[0].map((mark, at, all) => (plot.stepped ? (mark + (all[at + 1] ?? mark)) / 2 : mark))
        .filter((spot) => spot >= this.view[0] && spot <= this.view[1]);
      if (!spots.length) return;
      const now = plot.cursor.left >= 0 ? plot.posToVal(plot.cursor.left, "x") : null, near = 1e-3 * (this.view[1] - this.view[0]);
      const beyond = spots.filter((spot) => now == null || (spot - now) * away > near);
      const next = (away > 0 ? beyond[0] : beyond[beyond.length - 1]) ?? (away > 0 ? spots[spots.length - 1] : spots[0]);
      plot.setCursor({ left: plot.valToPos(next, "x"), top: plot.over.clientHeight / 3 });
    }
  }

  resize(width = 0) {
    for (const plot of this.plots) {
      const wanted = width || plot.host.clientWidth;
      if (wanted > 0 && Math.abs(wanted - plot.width) > 1) plot.setSize({ width: wanted, height: plot.height });
    }
  }

  /* The window and uPlot keep references to a plot until it is destroyed. */
  close() { for (const plot of this.plots) plot.destroy(); }

  redraw() { for (const plot of this.plots) plot.redraw(false, true); }
};

charts.redraw = () => charts.figures.forEach((one) => one.redraw());
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", charts.redraw);
addEventListener("beforeprint", () => {
  document.documentElement.dataset.print = "";
  charts.figures.forEach((one) => one.resize(Math.min(one.box.clientWidth, 660)));
  charts.redraw();
});
addEventListener("afterprint", () => {
  delete document.documentElement.dataset.print;
  charts.figures.forEach((one) => one.resize());
  charts.redraw();
});

/* A checkbox. key: id of what it switches, where that differs from its name. */
charts.toggle = (name, on, does, color, key = name) => charts.element("label", {},
  charts.element("input", { type: "checkbox", "data-key": key, checked: on, onchange: (event) => does(event.target.checked) }),
  ...(color ? [charts.key(color)] : []), name);
