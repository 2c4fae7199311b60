/* Memory over time and timeline by role: lanes of bars, and below them scenes of bytes stacked by kind.
   spec: see rlplan/report/drawn/scenes.py. */
"use strict";
charts.timeline = (box, spec) => {
  const off = new Set(), edges = spec.edges, last = edges.length - 1;
  const extent = [edges[0], edges[last]];
  const spread = (changes) => {   /* [index, value, index, value ...] to one value an interval, and the last once more */
    if (!changes) return null;
    const values = new Array(last + 1);
    for (let at = 0; at < changes.length; at += 2) values.fill(changes[at + 1], changes[at]);
    return values;
  };
  const scenes = spec.scenes.map((scene) => ({ ...scene, hidden: scene.hidden,
    kinds: scene.kinds.map((kind) => ({ ...kind, values: spread(kind.changes) })),
    low: spread(scene.low), high: spread(scene.high), measured: spread(scene.measured) }));
  const windowAt = (x) => spec.windows.find((one) => x >= one.start && x <= one.end) || { title: "", timed: true };

  const running = (x) => {
    const found = new Map();
    for (const lane of spec.lanes) for (const [action, start, end] of lane.bars) {
      if (start <= x && x < end) found.set(action, [...(found.get(action) || []), lane.process]);
    }
    return [...found].map(([action, who]) => `${spec.actions[action].name}${spec.actions[action].note
      ? ` (${spec.actions[action].note})` : ""} on ${who.length > 3 ? `${who.length} processes` : who.join(", ")}`);
  };

  const tell = (u, x, cursor) => {
    const block = spec.blocks.find(([, , start, end]) => start <= x && x < end), window = windowAt(x);
    const step = block && block[1] > 0 && spec.numbers_steps ? `, step ${block[1]}` : "";
    const title = `${window.timed ? `at ${charts.seconds(x)}` : `${window.title || "in order"}, not in seconds`}${block ? `: ${spec.phases[block[0]].name}${step}` : ""}`;
    if (!u.scene) {
      const lane = spec.lanes[Math.floor(u.posToVal(cursor.top, "y"))];
      const bar = lane && lane.bars.find(([, start, end]) => start <= x && x < end);
      if (!bar) return null;
      const action = spec.actions[bar[0]], rows = [[spec.phases[action.phase].color, action.name, "", ""],
        [null, "process", lane.process, lane.group]];
      if (window.timed) rows.push([null, "start, end", `${charts.seconds(bar[1])} – ${charts.seconds(bar[2])}`, ""],
        [null, spec.origin, charts.seconds(bar[2] - bar[1]), `${(bar[2] - bar[1]).toPrecision(6)} s`]);
      if (action.predicted != null) rows.push([null, "predicted", charts.seconds(action.predicted), `${action.predicted.toPrecision(6)} s`]);
      if (action.note) rows.push([null, "bound by", action.note, ""]);
      return [`${spec.phases[action.phase].name}`, rows];
    }
    let at = cursor.idx;
    if (edges[at] > x && at > 0) at -= 1;
    const scene = u.scene, rows = [], shown = scene.kinds.filter((kind) => !off.has(kind.kind) && kind.values[at] > 0);
    for (const kind of [...shown].reverse()) rows.push([kind.color, kind.name, charts.exactly(kind.values[at]), kind.source]);
    const total = shown.reduce((sum, kind) => sum + kind.values[at], 0);
    if (!off.has("predicted")) rows.push([null, "predicted", charts.exactly(total), ""]);
    if (scene.low && !off.has("interval")) rows.push([null, "interval", `${charts.bytes(scene.low[at])} – ${charts.bytes(scene.high[at])}`, ""]);
    if (scene.measured && !off.has("measured")) rows.push([charts.css("--ink"), "measured", charts.exactly(scene.measured[at]), "the operating system"]);
    return [title, rows, running(x).slice(0, 4)];
  };
  const figure = new charts.Figure(box, extent, tell);

  /* ------------------------------------------------------------------ drawing over uPlot's axes */
  const clipped = (u, draw) => {
    const { ctx, bbox } = u;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    draw(ctx, bbox, (x) => u.valToPos(x, "x", true), (y) => u.valToPos(y, "y", true));
    ctx.restore();
  };
  const write = (ctx, text, left, top, width, color, size = 11) => {
    ctx.font = charts.font(size);
    if (ctx.measureText(text).width > width - 6 * uPlot.pxRatio) return false;
    Object.assign(ctx, { fillStyle: color, textAlign: "center", textBaseline: "middle" });
    ctx.fillText(text, left + width / 2, top);
    return true;
  };
  const shade = (u) => clipped(u, (ctx, area, px) => {
    for (const [phase, , start, end] of spec.blocks) {
      ctx.globalAlpha = 0.16;
      ctx.fillStyle = spec.phases[phase].color;
      ctx.fillRect(px(start), area.top, px(end) - px(start), area.height);
    }
    ctx.globalAlpha = 1;
  });
  const drawLanes = (u) => clipped(u, (ctx, area, px, py) => {
    const unit = uPlot.pxRatio, high = py(1) - py(0);
    spec.lanes.forEach((lane, row) => {
      const top = py(row) + 15 * unit, height = high - 18 * unit;
      for (const [action, start, end] of lane.bars) {
        const left = px(start), width = Math.max(px(end) - left, unit), { name, note, phase } = spec.actions[action];
        if (left > area.left + area.width || left + width < area.left) continue;
        ctx.fillStyle = spec.phases[phase].color;
        ctx.fillRect(left, top, width, height);
        ctx.strokeStyle = charts.css("--paper");
        ctx.strokeRect(left, top, width, height);
        const from = Math.max(left, area.left), room = Math.min(left + width, area.left + area.width) - from;
        const seconds = windowAt((start + end) / 2).timed ? charts.seconds(end - start) : "";
        for (const text of [`${name}  ${[seconds, note].filter(Boolean).join(", ")}`, `${name}  ${seconds}`, name, seconds]) {
          if (text && write(ctx, text, from, top + height / 2, room, "#10161c", 10.5)) break;
        }
      }
      Object.assign(ctx, { font: charts.font(10.5), fillStyle: charts.css("--muted"), textAlign: "left", textBaseline: "middle" });
      ctx.fillText(`${lane.process}${lane.group ? ` · ${lane.group}` : ""}`, area.left + 2 * unit, py(row) + 8 * unit);
    });
  });
  const drawScene = (u) => clipped(u, (ctx, area, px, py) => {
    const unit = uPlot.pxRatio, { scene } = u, floor = new Array(last + 1).fill(0);
    for (const kind of scene.kinds) {
      if (off.has("predicted") || off.has(kind.kind)) continue;
      let best = null;
      for (let at = 0; at < last;) {
        let until = at + 1;
        while (until < last && kind.values[until] === kind.values[at] && floor[until] === floor[at]) until += 1;
        const left = Math.max(px(edges[at]), area.left), width = Math.min(px(edges[until]), area.left + area.width) - left;
        const high = py(floor[at]) - py(floor[at] + kind.values[at]);
        if (width > 0 && high >= 13 * unit && (!best || width > best.width)) best = { left, width, middle: py(floor[at] + kind.values[at] / 2) };
        at = until;
      }
      if (best) write(ctx, kind.name, best.left, best.middle, best.width, charts.inkOn(kind.color));
      kind.values.forEach((value, at) => { floor[at] += value; });
    }
    if (scene.points && !off.has("measured")) {
      ctx.fillStyle = charts.css("--ink");
      ctx.strokeStyle = charts.css("--paper");
      scene.points[0].forEach((x, index) => {
        ctx.beginPath();
        ctx.arc(px(x), py(scene.points[1][index]), 2.6 * unit, 0, 7);
        ctx.fill();
        ctx.stroke();
      });
    }
    if (!scene.capacity) return;
    const y = Math.max(py(scene.capacity), area.top + 0.05 * area.height);
    const far = py(scene.capacity) < area.top ? `, ${(scene.capacity / scene.top).toPrecision(2)} times the peak, not to scale` : "";
    Object.assign(ctx, { strokeStyle: charts.css("--bad"), fillStyle: charts.css("--bad"), lineWidth: 1.3 * unit, textAlign: "right",
      textBaseline: far ? "top" : "bottom", font: charts.font(10.5) });
    ctx.setLineDash([5 * unit, 3 * unit]);
    ctx.beginPath();
    ctx.moveTo(area.left, y);
    ctx.lineTo(area.left + area.width, y);
    ctx.stroke();
    ctx.fillText(`capacity ${charts.bytes(scene.capacity)}${far}`, area.left + area.width - 4 * unit, y + (far ? 3 : -2) * unit);
  });
  const drawPhases = (u) => {
    const { ctx, bbox } = u, unit = uPlot.pxRatio;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, 0, bbox.width, bbox.top);
    ctx.clip();
    for (const [at, [phase, step, start, end]] of spec.blocks.entries()) {
      const left = Math.max(u.valToPos(start, "x", true), bbox.left), next = spec.blocks[at + 1];
      const until = Math.min(end, next && next[2] > start ? next[2] : end);   // phases of an asynchronous run overlap
      const width = Math.min(u.valToPos(until, "x", true), bbox.left + bbox.width) - left;
      if (width <= 0) continue;
      const { name, color } = spec.phases[phase];
      ctx.fillStyle = color;
      ctx.fillRect(left, bbox.top - 17 * unit, width, 14 * unit);
      write(ctx, spec.numbers_steps && step > 0 ? `${name} ${step}` : name, left, bbox.top - 9.5 * unit, width, "#10161c", 10)
        || write(ctx, name, left, bbox.top - 9.5 * unit, width, "#10161c", 10);
    }
    ctx.restore();
  };

  /* ------------------------------------------------------------------ plots */
  const xAxis = () => charts.axis({ size: 30, space: 70, grid: { show: false }, incrs: charts.ticks,
    values: (u, ticks) => ticks.map((tick) => (windowAt(tick).timed ? charts.tickWords(tick) : "")) });
  const stacked = (scene) => {
    const sum = new Array(last + 1).fill(0), levels = [];
    for (const kind of scene.kinds) {
      if (!off.has(kind.kind)) kind.values.forEach((value, at) => { sum[at] += value; });
      levels.push(sum.slice());
    }
    return [edges, ...levels.reverse(), ...(scene.low ? [scene.high, scene.low] : []), ...(scene.measured ? [scene.measured] : [])];
  };
  const step = uPlot.paths.stepped({ align: 1 });
  const rows = [];
  const laneRow = charts.element("div", { class: "row" });
  const laneHost = charts.element("div", { class: "plot", role: "img", "aria-label": "Timeline by role" });
  const phaseList = charts.element("ul", { class: "legend" }, ...spec.phases.map(({ name, color }) =>
    charts.element("li", {}, charts.key(color), name)));
  if (spec.lanes.length) {
    laneRow.append(laneHost, charts.element("div", { class: "words" }, charts.element("b", {}, "Timeline by role"), phaseList));
    box.append(laneRow);
  }
  scenes.forEach((scene) => {
    scene.host = charts.element("div", { class: "plot", role: "img", "aria-label": `${scene.title}: memory over time` });
    const said = charts.element("div", { class: "muted" }, ...scene.words.map((line) => charts.element("div", {}, line)));
    const kinds = charts.element("ul", { class: "legend" }, ...[...scene.kinds].reverse().map((kind) => charts.element("li",
      { class: kind.at_peak ? "" : "muted" }, charts.toggle(kind.name, !off.has(kind.kind), (on) => switchKind(kind.kind, on), kind.color, kind.kind),
      charts.element("span", { class: "n" }, kind.at_peak ? charts.bytes(kind.at_peak) : `up to ${charts.bytes(kind.most)}`))));
    scene.row = charts.element("div", { class: "row" }, scene.host,
      charts.element("div", { class: "words" }, charts.element("b", {}, scene.title), said, kinds));
    rows.push(scene.row);
    box.append(scene.row);
  });
  const switchKind = (kind, on) => {
    if (on) off.delete(kind); else off.add(kind);
    for (const input of box.querySelectorAll(`input[data-key="${CSS.escape(kind)}"]`)) input.checked = on;
    scenes.forEach((scene) => scene.plot && refresh(scene));
  };
  const refresh = (scene) => {
    const { plot } = scene, count = scene.kinds.length;
    plot.batch(() => {
      plot.setData(stacked(scene), false);
      scene.kinds.forEach((kind, index) => plot.setSeries(count - index, { show: !off.has(kind.kind) && !off.has("predicted") }));
      if (scene.low) [1, 2].forEach((at) => plot.setSeries(count + at, { show: !off.has("interval") }));
      if (scene.measured) plot.setSeries(plot.series.length - 1, { show: !off.has("measured") });
      plot.redraw(false, true);
    });
  };
  const draw = (scene) => {
    const far = scene.capacity > 1.6 * scene.top, top = scene.capacity ? (far ? 1.27 * scene.top : 1.1 * Math.max(scene.capacity, scene.top)) : 1.12 * scene.top;
    const dashed = { stroke: () => charts.css("--ink"), width: 1, dash: [2, 3], paths: step, points: { show: false } };
    const options = { height: scene.height, padding: [20, 8, 0, 0], scales: { y: { range: () => [0, top || 1] } },
      axes: [xAxis(), charts.bytesAxis()],
      series: [{}, ...[...scene.kinds].reverse().map((kind) => ({ fill: kind.color, stroke: () => charts.css("--paper"), width: 0.6, paths: step, points: { show: false } })),
        ...(scene.low ? [dashed, dashed] : []),
        ...(scene.measured ? [{ stroke: () => charts.css("--ink"), width: 1.8, paths: step, points: { show: false } }] : [])],
      hooks: { drawClear: [shade], draw: [drawPhases, drawScene] } };
    scene.plot = figure.add(scene.host, options, stacked(scene));
    Object.assign(scene.plot, { scene, stepped: true });
  };
  if (spec.lanes.length) {
    const plot = figure.add(laneHost, { height: 34 * spec.lanes.length + 48, padding: [20, 8, 0, 0],
      scales: { y: { range: () => [0, spec.lanes.length], dir: -1 } },
      axes: [xAxis(), charts.axis({ size: 62, values: () => [], grid: { show: false } })],
      series: [{}, { show: true, points: { show: false }, paths: () => null }], hooks: { draw: [drawPhases, drawLanes] } },
    [edges, edges.map(() => 0)]);
    plot.stepped = true;
  }
  const begin = spec.windows[spec.first] || { start: extent[0], end: extent[1] };
  const open = (scene) => {
    scene.row.hidden = scene.hidden;
    if (scene.hidden || scene.plot) return;
    const view = figure.view;
    draw(scene);
    figure.show(...view);
  };
  scenes.forEach(open);
  figure.show(begin.start, begin.end);

  /* ------------------------------------------------------------------ tools */
  const button = (text, does, title) => charts.element("button", { type: "button", title: title || text, "aria-label": title || text, onclick: does }, text);
  const ranges = spec.windows.length > 1 ? [["Whole", extent], ...spec.windows.map((one) => [one.title, [one.start, one.end]])] : [];
  const buttons = ranges.map(([title, range]) => [button(title, () => figure.show(...range)), range]);
  figure.onview = (view) => buttons.forEach(([one, range]) => one.setAttribute("aria-pressed", String(range.every((end, at) => Math.abs(end - view[at]) < 1e-9))));
  const has = (name) => scenes.some((scene) => scene[name]);
  const parts = [["predicted", "predicted", true], ["interval", "prediction interval (dotted)", has("low")],
    ["measured", "measured (line, dots)", has("measured") || has("points")]].filter(([, , there]) => there);
  box.prepend(charts.element("div", { class: "tools" }, charts.element("span", {}, ...buttons.map(([one]) => one)),
    charts.element("span", {}, button("−", () => figure.zoom(1 / 0.7), "zoom out"), button("+", () => figure.zoom(0.7), "zoom in"),
      button("‹", () => figure.pan(-0.3), "pan left"), button("›", () => figure.pan(0.3), "pan right")),
    charts.element("span", {}, ...(parts.length > 1 ? parts.map(([key, name]) => charts.toggle(name, true, (on) => switchKind(key, on), null, key)) : [])),
    charts.element("span", { class: "scenes" }, ...(scenes.length > 1 ? scenes.map((scene) => charts.toggle(scene.title, !scene.hidden, (on) => {
      scene.hidden = !on;
      open(scene);
      figure.resize();
    })) : []))));
  figure.onview(figure.view);
};
