"use strict";
(() => {
  const WIDTH = 2000, HEIGHT = 1000, NEAR = 0.04, LONGEST_SMOOTHING = 0.08, SPARSE = 40;
  document.documentElement.classList.add("js");
  const parse = (box) => JSON.parse(box.querySelector('script[type="application/json"]').textContent);
  const clocks = parse(document.getElementById("page-data")).clocks;
  const tip = document.querySelector(".tip"), spoken = document.querySelector(".spoken");
  const hidden = new Set();
  let across = "step", smoothing = Number(document.getElementById("smooth")?.defaultValue ?? 0) / 100, isChosen = false;

  const isHidden = (line) => hidden.has(line.t) && !line.keep;
  const clamp = (value) => Math.min(1, Math.max(0, value));

  function number(value) {
    if (value !== 0 && Math.abs(value) < 1e-4) return value.toPrecision(4);
    return value.toLocaleString("en-US", { maximumSignificantDigits: 6 });
  }

  // Interpolates seconds or bytes at a step, between the points that the page holds.
  function onClock(clock, key, step) {
    const from = clock.step, to = clock[key];
    if (!from.length) return null;
    let low = 0, high = from.length - 1;
    if (step <= from[0]) return to[0];
    if (step >= from[high]) return to[high];
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (from[middle] <= step) low = middle; else high = middle;
    }
    return to[low] + (to[high] - to[low]) * (step - from[low]) / (from[high] - from[low]);
  }

  const charts = [...document.querySelectorAll("figure.chart")].filter((box) => box.querySelector('script[type="application/json"]')).map((box) => {
    const chart = { box, ...parse(box), plot: box.querySelector(".plot"), at: 0 };
    chart.paths = [...box.querySelectorAll("path.l:not(.mean)")];
    return chart;
  });

  const layout = (chart) => (across in (chart.x || {}) ? across : Object.keys(chart.x)[0]);

  function placeX(chart, line, x) {
    const key = layout(chart), [low, high] = chart.x[key];
    const value = key === "seconds" || key === "bytes" ? onClock(clocks[line.t], key, x) : x;
    return value === null ? null : clamp((value - low) / (high - low));
  }

  function placeY(chart, y) {
    const [low, high] = chart.y[chart.scale];
    return clamp(chart.scale === "log" ? Math.log(y / low) / Math.log(high / low) : (y - low) / (high - low));
  }

  const isShown = (chart, y) => y !== null && (chart.scale !== "log" || y > 0);

  function path(chart, line, xs, ys) {
    let d = "", drawn = 0;
    const end = () => { if (drawn === 1 && line.k !== "dots") d += "h0"; drawn = 0; };
    xs.forEach((x, i) => {
      const at = placeX(chart, line, x);
      if (at === null || !isShown(chart, ys[i])) { end(); return; }
      const px = Math.round(WIDTH * at), py = HEIGHT - Math.round(HEIGHT * placeY(chart, ys[i]));
      if (line.k === "dots") d += `M${px} ${py}h0`;
      else if (!drawn) d += `M${px} ${py}`;
      else d += line.k === "steps" ? `H${px}V${py}` : `L${px} ${py}`;
      drawn += 1;
    });
    end();
    return d;
  }

  // Running sums from the left, weighted by how near the points are in steps; a gap starts a new sum.
  function gathered(xs, ys, reach) {
    let sum = 0, weight = 0, before = null;
    return ys.map((y, i) => {
      if (y === null) { sum = weight = 0; before = null; return null; }
      const keep = before === null ? 0 : Math.exp(-Math.abs(xs[i] - before) / reach);
      sum = sum * keep + y; weight = weight * keep + 1; before = xs[i];
      return [sum, weight];
    });
  }

  // A mean over both sides: one over the past alone would lag behind the line.
  function smoothed(xs, ys, reach) {
    const past = gathered(xs, ys, reach), coming = gathered([...xs].reverse(), [...ys].reverse(), reach).reverse();
    return ys.map((y, i) => (y === null ? null : (past[i][0] + coming[i][0] - y) / (past[i][1] + coming[i][1] - 1)));
  }

  function draw(chart) {
    if (chart.strip) return;
    const key = layout(chart);
    chart.box.querySelectorAll(".xt[data-x]").forEach((one) => { one.hidden = one.dataset.x !== key; });
    chart.box.querySelectorAll(".yt[data-y]").forEach((one) => { one.hidden = one.dataset.y !== chart.scale; });
    chart.box.querySelectorAll(".grid").forEach((one) => { one.style.display = one.dataset.y === chart.scale ? "" : "none"; });
    chart.box.querySelectorAll(".legend li[data-track]").forEach((one) => { one.classList.toggle("off", hidden.has(Number(one.dataset.track))); });
    const button = chart.box.querySelector("button.log");
    if (button) button.setAttribute("aria-pressed", String(chart.scale === "log"));
    chart.box.querySelectorAll(".mean").forEach((one) => one.remove());
    if (chart.fixed) return;
    const [low, high] = chart.x[Object.keys(chart.x)[0]];
    const reach = smoothing * smoothing * LONGEST_SMOOTHING * (high - low);
    chart.lines.forEach((line, i) => {
      const element = chart.paths[i], isOff = isHidden(line), isSparse = line.x.length <= SPARSE;
      const isSmooth = chart.smooth && line.k === "line" && (reach > 0 || line.mx) && (isChosen || !isSparse);
      element.style.display = isOff ? "none" : "";
      element.setAttribute("d", path(chart, line, line.x, line.y));
      element.classList.toggle("faint", isSmooth);
      if (isSparse && !isOff && line.k === "line") {  // the points themselves: a line alone would hide how few they are
        const points = element.cloneNode();
        points.classList.remove("dashed"); points.classList.add("dots", "mean");
        points.setAttribute("d", path(chart, { ...line, k: "dots" }, line.x, line.y));
        element.parentNode.append(points);
      }
      if (isSmooth && !isOff) {
        const xs = line.mx || line.x, copy = element.cloneNode();
        copy.classList.remove("faint"); copy.classList.add("mean");
        copy.setAttribute("d", path(chart, line, xs, reach > 0 ? smoothed(xs, line.my || line.y, reach) : line.my));
        element.parentNode.append(copy);
      }
    });
    chart.box.querySelectorAll(".mark").forEach((mark) => {
      mark.style.left = 100 * placeX(chart, chart.lines[0], Number(mark.dataset.at)) + "%";
    });
  }

  // --- reading out ---------------------------------------------------------------------------------------------------------

  function nearest(chart, line, share) {
    let found = null;
    line.x.forEach((x, i) => {
      const at = placeX(chart, line, x);
      if (at === null || !isShown(chart, line.y[i])) return;
      const far = Math.abs(at - share);
      if (found === null || far < found.far) found = { i, at, far, x, y: line.y[i], line };
    });
    return found;
  }

  function show(chart, rows, title, share, marker) {
    tip.replaceChildren();
    const head = document.createElement("b");
    head.textContent = title;
    tip.append(head);
    for (const [name, text, colour] of rows) {
      const row = document.createElement("div");
      if (colour) { const key = document.createElement("i"); key.className = colour; row.append(key); }
      row.append(name ? `${name}: ${text}` : text);
      tip.append(row);
    }
    tip.hidden = false;
    const box = chart.plot.getBoundingClientRect(), x = box.left + share * box.width;
    const left = x + tip.offsetWidth + 20 > innerWidth ? x - tip.offsetWidth - 12 : x + 12;
    tip.style.left = Math.max(4, left) + "px";
    tip.style.top = Math.max(4, Math.min(box.top + 8, innerHeight - tip.offsetHeight - 4)) + "px";
    clearMarker();
    chart.plot.append(marker);
    return [title, ...rows.map(([name, text]) => `${name} ${text}`)].join(", ");
  }

  function clearMarker() { document.querySelectorAll(".rule, .cell").forEach((one) => one.remove()); }
  function hide() { tip.hidden = true; clearMarker(); }

  function readLines(chart, share) {
    const found = chart.lines.filter((line) => chart.fixed || !isHidden(line)).map((line) => nearest(chart, line, share)).filter((one) => one);
    if (!found.length) { hide(); return ""; }
    const first = found.reduce((a, b) => (b.far < a.far ? b : a)), key = layout(chart);
    const near = found.filter((one) => Math.abs(one.at - first.at) <= NEAR);
    const [unit, unitFactor] = chart.unit;
    const isByStep = key === "step" || key === "in_step", [low, high, factor, caption] = chart.x[key];
    const rows = near.map((one) => [one.line.n, `${number(one.y / unitFactor)}${unit ? " " + unit : ""}${isByStep ? "" : `, step ${number(one.x)}`}`,
      "q" in one.line ? `key box q${one.line.q}` : `key c${one.line.c}`]);
    const place = Number(((low + first.at * (high - low)) / factor).toPrecision(4));
    const title = key === "step" ? `step ${number(first.x)}` : `${number(place)} ${caption.replace(/^.*\(|\)$/g, "")}`;
    const rule = document.createElement("div");
    rule.className = "rule"; rule.style.left = 100 * first.at + "%";
    chart.at = first.at;
    return show(chart, rows, title, first.at, rule);
  }

  function readStrip(chart, share, down) {
    const rows = chart.names.length, columns = chart.steps.length;
    const row = Math.min(rows - 1, Math.floor(clamp(down) * rows)), column = Math.min(columns - 1, Math.floor(clamp(share) * columns));
    const value = chart.cells[row][column], cell = document.createElement("div");
    cell.className = "cell";
    Object.assign(cell.style, { left: 100 * column / columns + "%", top: 100 * row / rows + "%", width: 100 / columns + "%", height: 100 / rows + "%" });
    chart.row = row; chart.column = column;
    return show(chart, [["", value === null ? "not logged" : number(value)]], `${chart.names[row]}, step ${number(chart.steps[column])}`, share, cell);
  }

  function onMove(chart, event) {
    const box = chart.plot.getBoundingClientRect(), share = clamp((event.clientX - box.left) / box.width);
    if (chart.strip) readStrip(chart, share, (event.clientY - box.top) / box.height); else readLines(chart, share);
  }

  // Finds the next point of any line, left or right of the one read out last.
  function neighbour(chart, direction) {
    let found = null;
    for (const line of chart.lines) {
      if (!chart.fixed && isHidden(line)) continue;
      line.x.forEach((x, i) => {
        const at = isShown(chart, line.y[i]) ? placeX(chart, line, x) : null;
        if (at === null || (at - chart.at) * direction <= 1e-9) return;
        if (found === null || (at - found) * direction < 0) found = at;
      });
    }
    return found === null ? chart.at : found;
  }

  function onKey(chart, event) {
    if (event.key === "Escape") { hide(); return; }
    const sideways = { ArrowLeft: -1, ArrowRight: 1 }[event.key] || 0, down = { ArrowUp: -1, ArrowDown: 1 }[event.key] || 0;
    const end = { Home: 0, End: 1 }[event.key];
    if (!sideways && end === undefined && !(chart.strip && down)) return;
    event.preventDefault();
    if (chart.strip) {
      const rows = chart.names.length, columns = chart.steps.length;
      const column = end === undefined ? Math.min(columns - 1, Math.max(0, (chart.column ?? -sideways) + sideways)) : end * (columns - 1);
      const row = Math.min(rows - 1, Math.max(0, (chart.row ?? -down) + down));
      spoken.textContent = readStrip(chart, (column + 0.5) / columns, (row + 0.5) / rows);
    } else {
      spoken.textContent = readLines(chart, end === undefined ? neighbour(chart, sideways) : end);
    }
  }

  for (const chart of charts) {
    chart.plot.addEventListener("pointermove", (event) => onMove(chart, event));
    chart.plot.addEventListener("pointerdown", (event) => onMove(chart, event));
    chart.plot.addEventListener("pointerleave", hide);
    chart.plot.addEventListener("blur", hide);
    chart.plot.addEventListener("keydown", (event) => onKey(chart, event));
    const button = chart.box.querySelector("button.log");
    if (button) button.addEventListener("click", () => { chart.scale = chart.scale === "log" ? "lin" : "log"; draw(chart); });
  }

  // --- controls ------------------------------------------------------------------------------------------------------------

  const redraw = () => charts.forEach(draw);
  const onChange = (selector, event, act) => document.querySelectorAll(selector).forEach((one) => one.addEventListener(event, () => act(one)));
  onChange(".chip input", "change", (box) => {
    if (box.checked) hidden.delete(Number(box.dataset.track)); else hidden.add(Number(box.dataset.track));
    redraw();
  });
  onChange("#smooth", "input", (slider) => { smoothing = Number(slider.value) / 100; isChosen = true; redraw(); });
  onChange("#across", "change", (choice) => { across = choice.value; redraw(); });
  onChange("#all-log", "change", (box) => {
    charts.forEach((chart) => { if (chart.y) chart.scale = box.checked && "log" in chart.y ? "log" : "lin"; });
    redraw();
  });
  // Resets the controls: a browser that reloads the page may restore their values.
  document.querySelectorAll(".controls input, .controls select").forEach((one) => {
    if (one.type === "checkbox") one.checked = one.defaultChecked; else if (one.type === "range") one.value = one.defaultValue; else one.selectedIndex = 0;
  });
  redraw();
})();
