/* Curves over steps, and points of step time and cost. spec: see rlplan/report/drawn/curves.py. */
"use strict";
charts.formats = {
  share: (value) => `${Number((100 * value).toPrecision(3))} %`,
  number: (value) => (value !== 0 && Math.abs(value) < 1e-3 ? value.toExponential(1) : Number(value.toPrecision(4)).toLocaleString("en", { maximumSignificantDigits: 4 })),
  dollars: (value) => `$${Number(value.toPrecision(3)).toLocaleString("en")}`,
  seconds: charts.seconds,
};

/* Labels beside the last points, without overlap. */
charts.nameEnds = (u, series, format) => {
  const { ctx, bbox } = u, unit = uPlot.pxRatio, gap = 12 * unit, named = [];
  series.forEach((one, index) => {
    const values = u.data[index + 1], at = values.findLastIndex((value) => value != null);
    if (one.names_end && at >= 0 && u.series[index + 1].show) named.push({ one, at: u.valToPos(values[at], "y", true), text: format(values[at]) });
  });
  named.sort((a, b) => a.at - b.at);
  let floor = bbox.top;
  for (const name of named) { name.y = Math.max(name.at, floor); floor = name.y + gap; }
  const over = Math.max(0, floor - gap - (bbox.top + bbox.height));
  Object.assign(ctx, { textAlign: "left", textBaseline: "middle", font: charts.font(10.5) });
  for (const { one, y, text } of named) {
    ctx.fillStyle = charts.css(one.color);
    ctx.fillText(text, bbox.left + bbox.width + 5 * unit, y - over);
  }
};

charts.curves = (box, spec) => {
  const grid = charts.element("div", { class: "grid" }), off = new Set(), all = [];
  const names = spec.runs.map((run, index) => charts.element("li", {}, charts.toggle(run.label, true, (on) => {
    if (on) off.delete(index); else off.add(index);
    for (const { plot, panel } of all) panel.series.forEach((one, at) => plot.setSeries(at + 1, { show: !off.has(one.run) }));
  }, charts.css(run.color)), ...(run.note ? [charts.element("span", { class: "muted" }, run.note)] : [])));
  box.append(charts.element("ul", { class: "legend" }, ...names), grid);
  for (const panel of spec.panels) {
    const format = charts.formats[panel.format];
    const tell = (u, _, cursor) => [`step ${u.data[0][cursor.idx]}`, panel.series.map((one, at) => [charts.css(one.color), one.name,
      u.data[at + 1][cursor.idx] == null ? "not recorded" : format(u.data[at + 1][cursor.idx]),
      u.data[at + 1][cursor.idx] == null ? "" : String(u.data[at + 1][cursor.idx])]).filter((_, at) => !off.has(panel.series[at].run))];
    const host = charts.element("div", { class: "plot", role: "img", "aria-label": panel.title });
    const cell = charts.element("div", { class: panel.is_wide ? "wide" : "" }, charts.element("b", {}, panel.title), host);
    grid.append(cell);
    const first = panel.x[0], last = Math.max(panel.x[panel.x.length - 1], first + 1);
    const figure = new charts.Figure(cell, [first, last], tell);
    const log = panel.is_log ? { distr: 3 } : {};
    const isNothing = !panel.is_log && panel.series.every((one) => one.values.every((value) => !value));
    const range = panel.range || (isNothing ? [0, 1] : null);
    const plot = figure.add(host, { height: panel.is_wide ? 266 : 186, padding: [10, panel.names_ends ? 60 : 10, 0, 0],
      scales: { y: { ...log, ...(range ? { range: () => range } : {}) } },
      axes: [charts.axis({ size: 42, space: 60, label: "step", labelSize: 16, labelFont: `11px ${charts.family}`, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 5000] }),
        charts.axis({ size: 56, space: 34, values: (_, ticks) => ticks.map((tick) => (tick == null ? "" : format(tick))) })],
      series: [{}, ...panel.series.map((one) => ({ stroke: () => charts.css(one.color), width: one.is_faint ? 0 : one.is_main ? 2.4 : 1.4, dash: one.dash,
        spanGaps: true, points: { show: one.has_points || one.values.filter((value) => value != null).length < 4, size: 5 } }))],
      bands: panel.band ? [{ series: panel.band.map((at) => at + 1), fill: () => `${charts.css(panel.series[0].color)}2a` }] : [],
      hooks: { draw: [(u) => panel.names_ends && charts.nameEnds(u, panel.series, format)] } }, [panel.x, ...panel.series.map((one) => one.values)]);
    all.push({ plot, panel });
  }
};

/* Seconds to the right, dollars upwards; a label beside each point where there is room. */
charts.money = (box, spec) => {
  const host = charts.element("div", { class: "plot", role: "img", "aria-label": spec.title });
  box.append(charts.element("b", {}, spec.title), host);
  const points = spec.points, xs = points.map((one) => one.seconds);
  const tell = (u, _, cursor) => {
    const one = points[cursor.idx];
    return one && [one.name, [[null, "a step", charts.seconds(one.seconds), `${one.seconds.toPrecision(6)} s`],
      [null, "costs", charts.formats.dollars(one.dollars), "a step"]], one.is_on_front ? ["nothing else is as fast and cheaper"] : []];
  };
  const name = (u) => {
    const { ctx, bbox } = u, unit = uPlot.pxRatio, taken = [];
    ctx.font = charts.font(11);
    ctx.textBaseline = "middle";
    const spots = points.map((one) => ({ one, x: u.valToPos(one.seconds, "x", true), y: u.valToPos(one.dollars, "y", true) }));
    for (const { x, y } of spots) taken.push([x - 5 * unit, y - 5 * unit, x + 5 * unit, y + 5 * unit]);
    for (const { one, x, y } of spots.sort((a, b) => b.one.is_on_front - a.one.is_on_front)) {
      const color = charts.css(one.is_on_front ? "--accent" : "--muted"), width = ctx.measureText(one.name).width, half = 7 * unit;
      ctx.fillStyle = color;
      ctx.beginPath();
      ctx.arc(x, y, (one.is_on_front ? 5 : 4) * unit, 0, 7);
      ctx.fill();
      const tries = [0, -14, 14, -28, 28, -42, 42, -56].flatMap((up) => [[9 * unit, up * unit], [-9 * unit - width, up * unit]]);
      const boxes = tries.map(([dx, dy]) => [x + dx, y + dy - half, x + dx + width, y + dy + half]).filter((one) => one[0] > bbox.left && one[2] < bbox.left + bbox.width && one[1] > 0 && one[3] < bbox.top + bbox.height);
      const free = boxes.find((a) => !taken.some((b) => a[0] < b[2] && b[0] < a[2] && a[1] < b[3] && b[1] < a[3]));
      if (!free) continue;   // the table has it, and so has the tooltip
      taken.push(free);
      ctx.textAlign = "left";
      ctx.fillText(one.name, free[0], (free[1] + free[3]) / 2);
    }
  };
  const low = Math.min(...xs) / 1.4, high = Math.max(...xs) * 1.6;
  const figure = new charts.Figure(box, [low, high], tell);
  figure.add(host, { height: 330, padding: [14, 14, 0, 0],
    scales: { x: { distr: 3 }, y: { range: () => [0, 1.15 * Math.max(...points.map((one) => one.dollars))] } },
    axes: [charts.axis({ size: 44, space: 70, label: "step time, log scale", labelSize: 16, labelFont: `11px ${charts.family}`, values: (_, ticks) => ticks.map((tick) => (tick == null ? "" : charts.seconds(tick))) }),
      charts.axis({ size: 62, values: (_, ticks) => ticks.map(charts.formats.dollars) })],
    series: [{}, { points: { show: false }, paths: () => null }], hooks: { draw: [name] } }, [xs, points.map((one) => one.dollars)]);
  figure.show(low, high);
};
