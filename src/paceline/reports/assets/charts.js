// Draws the chart specs of a page (reports/charts.py) as SVG. Text is set only through textContent: the name of a run
// cannot become markup.
"use strict";

// --- Elements

const SVG = "http://www.w3.org/2000/svg";

function make(tag, attributes, ...children) {
  const isHtml = /^(b|i|em|div|span|button|table|thead|tbody|tr|th|td)$/.test(tag);
  const node = isHtml ? document.createElement(tag) : document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes || {})) if (value !== undefined) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

const pen = document.createElement("canvas").getContext("2d");

function textWidth(text, size = 12) {
  pen.font = `${size}px system-ui, sans-serif`;
  return pen.measureText(text).width;
}

function shorten(text, width) {
  if (textWidth(text) <= width) return text;
  let end = text.length;
  while (end > 1 && textWidth(text.slice(0, end) + "…") > width) end -= 1;
  return text.slice(0, end) + "…";
}

// --- Numbers

const UNITS = {
  percent: [[0, 0.01, "%"]],
  seconds: [[0, 1e-6, " µs"], [1e-3, 1e-3, " ms"], [1, 1, " s"], [120, 60, " min"], [7200, 3600, " h"]],
  bytes: [[0, 1, " B"], [2 ** 10, 2 ** 10, " KiB"], [2 ** 20, 2 ** 20, " MiB"], [2 ** 30, 2 ** 30, " GiB"]],
  number: [[0, 1, ""]],
  axis: [[0, 1, ""], [1e4, 1e3, "k"], [1e6, 1e6, "M"], [1e9, 1e9, "G"]],
};

function unitOf(kind, size) {
  const [, factor, suffix] = UNITS[kind].filter(([from]) => size >= from).pop();
  return size === 0 && kind === "seconds" ? { factor: 1, suffix: " s" } : { factor, suffix };
}

function plain(value, decimals) {
  return value.toLocaleString("en-US", { minimumFractionDigits: 0, maximumFractionDigits: decimals });
}

// A value as shown in a tooltip: about five significant digits.
function say(value, kind = "number") {
  if (value === null || value === undefined) return "–";
  if (typeof value === "string") return value;
  const { factor, suffix } = unitOf(kind, Math.abs(value));
  const scaled = value / factor;
  const size = Math.abs(scaled);
  if (kind === "percent") return plain(scaled, 2) + suffix;
  if (size !== 0 && (size < 1e-4 || size >= 1e15)) return scaled.toExponential(3) + suffix;
  return plain(scaled, size === 0 ? 0 : Math.max(0, 4 - Math.floor(Math.log10(size)))) + suffix;
}

function niceStep(span, count) {
  const rough = span / Math.max(count, 1);
  const power = 10 ** Math.floor(Math.log10(rough));
  return power * [1, 2, 2.5, 5, 10].find((factor) => factor * power >= rough * 0.999);
}

// --- Axes: a domain, its ticks, and their labels

function linearAxis(low, high, { count, kind = "number", whole = false }) {
  const { factor, suffix } = unitOf(kind === "number" ? "axis" : kind, Math.max(Math.abs(low), Math.abs(high)));
  let step = niceStep((high - low) / factor, count);
  if (whole && step * factor < 1) step = 1 / factor;
  const decimals = Math.max(0, -Math.floor(Math.log10(step) + 1e-9), step % 1 ? Math.ceil(-Math.log10(step % 1)) : 0);
  const ticks = [];
  for (let n = Math.ceil(low / factor / step - 1e-9); n * step <= high / factor + step * 1e-9; n += 1) {
    const hasUnit = n !== 0 || !"kMG".includes(suffix);
    ticks.push({ value: n * step * factor, text: plain(n * step || 0, decimals) + (hasUnit ? suffix : "") });
  }
  return { low, high, ticks, share: (value) => (value - low) / (high - low), back: (share) => low + share * (high - low) };
}

function logAxis(low, high, { count, kind = "number" }) {
  const [from, to] = [Math.log10(low), Math.log10(high)];
  const every = Math.max(1, Math.ceil((to - from) / count));
  const factors = to - from > 3 ? [1] : to - from > 1.3 ? [1, 3] : [1, 2, 5];
  const ticks = [];
  for (let power = Math.floor(from); power <= Math.ceil(to); power += every) {
    for (const factor of factors) {
      const value = factor * 10 ** power;
      const unit = unitOf(kind === "number" ? "axis" : kind, value);
      const text = value < 1e-3 && kind === "number" ? value.toExponential(0) : plain(value / unit.factor, 6) + unit.suffix;
      if (value >= low * 0.999 && value <= high * 1.001) ticks.push({ value, text });
    }
  }
  // Less than a factor of two: a logarithmic axis would have too few ticks.
  const linear = linearAxis(low, high, { count, kind });
  return {
    low, high, ticks: ticks.length > 1 ? ticks : linear.ticks,
    share: (value) => (Math.log10(value) - from) / (to - from), back: (share) => 10 ** (from + share * (to - from)),
  };
}

function widen(values, { log, fromZero, kind }) {
  if (!values.length) return log ? [1, 10] : [0, 1];
  let low = values.reduce((a, b) => Math.min(a, b)), high = values.reduce((a, b) => Math.max(a, b));
  if (log) {
    const room = low === high ? 2 : (high / low) ** 0.05;
    return [low / room, high * room];
  }
  const [least, most] = [low, high];
  const room = low === high ? Math.abs(low) * 0.1 || 1 : (high - low) * 0.06;
  low -= room;
  high += room;
  if (kind === "percent" && most <= 1) high = Math.min(high, Math.max(1, most));
  if (least >= 0 && (fromZero || low < 0)) low = 0;
  if (most <= 0 && (fromZero || high > 0)) high = 0;
  return low === high ? [low, low + 1] : [low, high];
}

// --- The frame and axes of every chart

function openFrame(spec, width, height, { x, y, right = 14, bottom = 40 }) {
  const left = Math.ceil(Math.max(18, ...y.ticks.map((tick) => textWidth(tick.text)))) + 10;
  const box = { left, top: 30, right: width - right, bottom: height - bottom };
  const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, tabindex: 0, role: "img" });
  const toX = (value) => box.left + x.share(value) * (box.right - box.left);
  const toY = (value) => box.bottom - y.share(value) * (box.bottom - box.top);
  svg.append(make("text", { x: 0, y: 12 }, spec.y_label));
  for (const tick of y.ticks) {
    const level = toY(tick.value).toFixed(1);
    svg.append(make("line", { class: "grid", x1: box.left, x2: box.right, y1: level, y2: level }));
    svg.append(make("text", { x: box.left - 7, y: level, "text-anchor": "end", "dominant-baseline": "central" }, tick.text));
  }
  svg.append(make("line", { class: "axis", x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom }));
  const label = make("text", { x: (box.left + box.right) / 2, y: height - 5, "text-anchor": "middle" }, spec.x_label);
  svg.append(label);
  return { svg, box, toX, toY, width, height };
}

function drawXTicks({ svg, box, toX, width }, ticks) {
  let free = -Infinity;
  for (const tick of ticks) {
    const at = toX(tick.value), half = textWidth(tick.text) / 2;
    const middle = Math.min(Math.max(at, half), width - half);
    svg.append(make("line", { class: "axis", x1: at.toFixed(1), x2: at.toFixed(1), y1: box.bottom, y2: box.bottom + 4 }));
    if (middle - half < free) continue;
    svg.append(make("text", { x: middle.toFixed(1), y: box.bottom + 16, "text-anchor": "middle" }, tick.text));
    free = middle + half + 8;
  }
}

const SHAPES = [
  (x, y, r) => `M${x - r} ${y}a${r} ${r} 0 1 0 ${2 * r} 0a${r} ${r} 0 1 0 ${-2 * r} 0`,
  (x, y, r) => `M${x - r} ${y - r}h${2 * r}v${2 * r}h${-2 * r}z`,
  (x, y, r) => `M${x} ${y - 1.3 * r}l${1.3 * r} ${2.3 * r}h${-2.6 * r}z`,
  (x, y, r) => `M${x} ${y - 1.4 * r}l${1.4 * r} ${1.4 * r}l${-1.4 * r} ${1.4 * r}l${-1.4 * r} ${-1.4 * r}z`,
];
const DASHES = ["", "9 3", "2 4", "9 3 2 3"];

function shapeAt(series, x, y, radius = 3.4) {
  return make("path", { class: `point c${series.colour}`, d: SHAPES[series.shape](+x.toFixed(1), +y.toFixed(1), radius) });
}

function dashOf(series) {
  return series.is_dashed ? "5 5" : DASHES[series.round % DASHES.length] || undefined;
}

// --- Lines

function isDrawable(value, log) {
  return typeof value === "number" && (!log || value > 0);
}

function linePoints(spec, series) {
  return series.y.map((y, n) => {
    const x = series.x.length ? series.x[n] : n + 1;
    const isThere = isDrawable(y, spec.y_log) && isDrawable(x, spec.x_log);
    const low = series.low.length ? series.low[n] : null, high = series.high.length ? series.high[n] : null;
    const hasInterval = isThere && isDrawable(low, spec.y_log) && isDrawable(high, spec.y_log);
    return { x, y: isThere ? y : null, low: hasInterval ? low : null, high: hasInterval ? high : null };
  });
}

// Groups of consecutive points without a gap.
function stretches(points, isThere) {
  const found = [];
  let open = null;
  for (const point of points) {
    if (!isThere(point)) open = null;
    else if (open) open.push(point);
    else found.push((open = [point]));
  }
  return found;
}

function drawLines(spec, visible, width, height, zoom) {
  for (const series of visible) series.points ||= linePoints(spec, series);
  const all = visible.flatMap((series) => series.points.filter((point) => isDrawable(point.x, spec.x_log)));
  const xs = [...all.map((point) => point.x), ...spec.marks.map((mark) => mark.x)];
  let [low, high] = zoom || [Math.min(...spec.x_ticks, ...xs.length ? [xs.reduce((a, b) => Math.min(a, b))] : [1]),
    Math.max(...spec.x_ticks, ...xs.length ? [xs.reduce((a, b) => Math.max(a, b))] : [spec.x_log ? 10 : 1])];
  if (low === high) [low, high] = spec.x_log ? [low / 2, high * 2] : [low - 0.5, high + 0.5];
  const inside = all.filter((point) => point.y !== null && point.x >= low && point.x <= high);
  const levels = inside.flatMap((point) => [point.y, point.low ?? point.y, point.high ?? point.y]);
  const [bottom, top] = widen(levels, { log: spec.y_log, fromZero: spec.y_from_zero, kind: spec.y_format });
  const y = (spec.y_log ? logAxis : linearAxis)(bottom, top, { count: height / 55, kind: spec.y_format });
  const hasEndLabels = width >= 460 && visible.length > 1 && visible.length <= 6;
  const names = hasEndLabels ? Math.min(150, Math.max(...visible.map((series) => textWidth(series.name) + 4))) : 0;
  const right = 14 + (names ? names + 8 : 0);
  const whole = all.every((point) => Number.isInteger(point.x));
  const x = (spec.x_log ? logAxis : linearAxis)(low, high, { count: width / 75, whole });
  if (spec.x_ticks.length) x.ticks = spec.x_ticks.filter((t) => t >= low && t <= high).map((value) => ({ value, text: plain(value, 4) }));
  const frame = openFrame(spec, width, height, { x, y, right });
  const { svg, box, toX, toY } = frame;
  drawXTicks(frame, x.ticks);

  const clip = `clip-${spec.number}`;
  const area = { x: box.left - 5, y: box.top - 5, width: box.right - box.left + 10, height: box.bottom - box.top + 10 };
  svg.append(make("defs", {}, make("clipPath", { id: clip }, make("rect", area))));
  const layer = make("g", { "clip-path": `url(#${clip})` });
  svg.append(layer);
  drawMarks(spec, frame, layer, low, high);
  for (const series of visible) drawSeries(series, layer, toX, toY);
  if (hasEndLabels) drawEndLabels(visible, frame, high, names);
  return { ...frame, x, ...lineStops(spec, visible, frame, low, high) };
}

function drawMarks(spec, { svg, box, toX }, layer, low, high) {
  let free = -Infinity;
  for (const mark of spec.marks.filter(({ x }) => x >= low && x <= high)) {
    const at = toX(mark.x);
    layer.append(make("line", { class: "mark", x1: at, x2: at, y1: box.top, y2: box.bottom }));
    const text = shorten(mark.label, 140), wide = textWidth(text, 11);
    const start = Math.min(Math.max(at - wide / 2, box.left), box.right - wide);
    if (start > free) {
      svg.append(make("text", { class: "mark-label", x: start.toFixed(1), y: box.top - 3 }, text));
      free = start + wide + 8;
    }
  }
}

function drawSeries(series, layer, toX, toY) {
  const at = ({ x, y }) => `${toX(x).toFixed(1)} ${toY(y).toFixed(1)}`;
  const hasBand = !series.has_points;
  for (const run of stretches(series.points, (point) => point.low !== null)) {
    if (hasBand && run.length > 1) {
      const there = run.map((p) => at({ x: p.x, y: p.high })), back = run.map((p) => at({ x: p.x, y: p.low })).reverse();
      layer.append(make("path", { class: `band c${series.colour}`, d: `M${[...there, ...back].join("L")}Z` }));
    } else for (const point of run) drawWhisker(series, layer, toX(point.x), toY(point.low), toY(point.high));
  }
  const runs = stretches(series.points, (point) => point.y !== null);
  const d = runs.filter((run) => run.length > 1).map((run) => `M${run.map(at).join("L")}`).join("");
  const isDense = series.points.length > 400;
  if (d) layer.append(make("path", { class: `line${isDense ? " thin" : ""} c${series.colour}`, d, "stroke-dasharray": dashOf(series) }));
  for (const run of runs) {
    const room = (toX(run[run.length - 1].x) - toX(run[0].x)) / (run.length - 1);
    if (run.length === 1 || (series.has_points && room > 9)) for (const p of run) layer.append(shapeAt(series, toX(p.x), toY(p.y)));
  }
}

function drawWhisker(series, layer, x, low, high) {
  const d = `M${x - 3} ${low}h6m-3 0V${high}m-3 0h6`;
  layer.append(make("path", { class: `whisker c${series.colour}`, d }));
}

// Names at the ends of lines, moved apart if lines end close to each other.
function drawEndLabels(visible, { svg, box, toY }, high, width) {
  const ends = visible
    .map((series) => ({ series, last: series.points.findLast((point) => point.y !== null && point.x <= high) }))
    .filter((end) => end.last)
    .map((end) => ({ ...end, level: Math.min(Math.max(toY(end.last.y), box.top), box.bottom) }))
    .sort((a, b) => a.level - b.level);
  for (let n = 1; n < ends.length; n += 1) ends[n].level = Math.max(ends[n].level, ends[n - 1].level + 14);
  for (let n = ends.length - 1, floor = box.bottom - 5; n >= 0; n -= 1, floor -= 14) ends[n].level = Math.min(ends[n].level, floor);
  for (const { series, level } of ends) {
    const text = shorten(series.name, width);
    svg.append(make("text", { class: `end-label c${series.colour}`, x: box.right + 8, y: level.toFixed(1), "dominant-baseline": "central" }, text));
  }
}

function nearest(points, x) {
  let from = 0, to = points.length - 1;
  while (to - from > 1) {
    const middle = (from + to) >> 1;
    if (points[middle].x < x) from = middle;
    else to = middle;
  }
  return points.length && Math.abs(points[from].x - x) <= Math.abs(points[to].x - x) ? points[from] : points[to];
}

function lineStops(spec, visible, { box, toX, toY }, low, high) {
  const sorted = visible.map((series) => ({
    series,
    points: series.points.filter((p) => p.y !== null && p.x >= low && p.x <= high).sort((a, b) => a.x - b.x),
  }));
  const stops = [...new Set(sorted.flatMap(({ points }) => points.map((point) => point.x)))].sort((a, b) => a - b);
  const places = stops.map((x) => ({ x }));
  return {
    stops: stops.length,
    hit: (x) => (stops.length ? stops.indexOf(nearestPlace(places, toX, x)) : -1),
    tip(stop) {
      const here = stops[stop];
      const near = sorted
        .map(({ series, points }) => ({ series, point: nearest(points, here) }))
        .filter(({ point }) => point && Math.abs(toX(point.x) - toX(here)) <= 8);
      const rows = near.map(({ series, point }) => ({
        colour: series.colour,
        name: series.name + (point.x === here ? "" : ` (at ${say(point.x)})`),
        value: say(point.y, spec.y_format) + (point.low === null ? "" : ` (${say(point.low, spec.y_format)} to ${say(point.high, spec.y_format)})`),
      }));
      const marks = spec.marks.filter((mark) => Math.abs(toX(mark.x) - toX(here)) <= 4);
      for (const mark of marks) rows.push({ colour: 1, name: mark.label, value: "" });
      const x = toX(here);
      const halos = near.map(({ series, point }) => shapeAt(series, toX(point.x), toY(point.y), 4.5));
      const cursor = [make("line", { class: "cursor", x1: x, x2: x, y1: box.top, y2: box.bottom }), ...halos];
      return { head: `${spec.x_label} ${say(here)}`, rows, x, y: box.top + 4, cursor };
    },
  };
}

function nearestPlace(places, toX, x) {
  const onScreen = places.map((place) => ({ x: toX(place.x), value: place.x }));
  return nearest(onScreen, x).value;
}
