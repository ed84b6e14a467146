// Bars over labels, side by side or stacked, and the confusion matrix.

function barLabels(spec) {
  return [...new Set(spec.series.flatMap((series) => (series.x.length ? series.x.map(String) : series.y.map((_, n) => String(n + 1)))))];
}

function barValues(series, labels) {
  const at = new Map(series.y.map((y, n) => [series.x.length ? String(series.x[n]) : String(n + 1), n]));
  return labels.map((label) => {
    const n = at.get(label);
    const value = n === undefined ? null : series.y[n];
    return { value, low: series.low[n] ?? null, high: series.high[n] ?? null };
  });
}

function drawBars(spec, visible, width, height) {
  const labels = barLabels(spec), isStacked = spec.kind === "stacked-bar";
  const bars = visible.map((series) => ({ series, cells: barValues(series, labels) }));
  const sums = labels.map((_, n) => bars.reduce((sum, { cells }) => sum + Math.max(cells[n].value ?? 0, 0), 0));
  const singles = bars.flatMap(({ cells }) => cells.flatMap((cell) => [cell.value, cell.low, cell.high])).filter((v) => v !== null);
  const levels = (isStacked ? sums : singles).filter((value) => !spec.y_log || value > 0);
  const [bottom, top] = widen(levels, { log: spec.y_log, fromZero: !spec.y_log, kind: spec.y_format });
  const y = (spec.y_log ? logAxis : linearAxis)(bottom, top, { count: height / 55, kind: spec.y_format });
  const slot = (width - 60) / Math.max(labels.length, 1);
  const isSlanted = labels.some((label) => textWidth(label) > slot - 6);
  const longest = Math.min(Math.max(0, ...labels.map((label) => textWidth(label))), 110);
  const x = { share: (n) => (n + 0.5) / labels.length };
  const bottomRoom = isSlanted ? Math.ceil(longest * 0.7) + 42 : 40;
  const frame = openFrame(spec, width, height + (isSlanted ? bottomRoom - 40 : 0), { x, y, bottom: bottomRoom });
  drawBarLabels(frame, labels, isSlanted);
  const step = (frame.box.right - frame.box.left) / Math.max(labels.length, 1);
  const each = isStacked ? Math.min(step * 0.7, 56) : Math.min((step * 0.78) / Math.max(bars.length, 1), 46);
  const layout = { ...frame, each, bottom, isStacked, count: bars.length };
  labels.forEach((_, n) => drawBarGroup(layout, bars, n));
  const { svg, box, toX } = frame;
  if (isStacked) sums.forEach((sum, n) => drawBarValue(layout, toX(n), sum, spec, step - 4));
  else if (bars.length === 1) bars[0].cells.forEach(({ value, high }, n) => drawBarValue(layout, toX(n), high ?? value, spec, step - 4, value));
  return {
    ...frame, svg, stops: labels.length,
    hit: (px) => Math.min(labels.length - 1, Math.max(0, Math.floor((px - box.left) / step))),
    tip(n) {
      const rows = bars.filter(({ cells }) => cells[n].value !== null).map(({ series, cells }) => {
        const { value, low, high } = cells[n];
        const interval = low === null || high === null ? "" : ` (${say(low, spec.y_format)} to ${say(high, spec.y_format)})`;
        return { colour: series.colour, name: series.name, value: say(value, spec.y_format) + interval };
      });
      if (isStacked && rows.length > 1) rows.push({ colour: 7, name: "together", value: say(sums[n], spec.y_format) });
      const edges = { x: toX(n) - step / 2, y: box.top, width: step, height: box.bottom - box.top };
      return { head: labels[n], rows, x: toX(n), y: box.top + 4, cursor: [make("rect", { class: "selection", ...edges })] };
    },
  };
}

function drawBarLabels({ svg, box, toX }, labels, isSlanted) {
  const every = Math.ceil(labels.length / Math.max(1, (box.right - box.left) / 15));
  labels.forEach((label, n) => {
    if (isSlanted && n % every) return;
    const x = toX(n).toFixed(1), y = box.bottom + (isSlanted ? 12 : 16);
    const turn = isSlanted ? { transform: `rotate(-40 ${x} ${y})`, "text-anchor": "end" } : { "text-anchor": "middle" };
    const room = Math.min(110, (toX(n) - 4) / Math.cos((40 * Math.PI) / 180)); // the first labels end at the left edge
    svg.append(make("text", { x, y, ...turn }, shorten(label, isSlanted ? room : 400)));
  });
}

function drawBarGroup({ svg, toX, toY, each, bottom, isStacked, count }, bars, n) {
  let reached = 0;
  bars.forEach(({ series, cells }, number) => {
    const { value, low, high } = cells[n];
    if (value === null || (value <= 0 && (isStacked || bottom > 0))) return;
    const left = isStacked ? toX(n) - each / 2 : toX(n) + (number - count / 2) * each;
    const from = isStacked ? reached || bottom : Math.max(bottom, 0) || bottom;
    const [a, b] = [toY(isStacked ? reached + value : value), toY(Math.min(from, Math.max(bottom, from)))];
    reached += value;
    const bar = { x: left.toFixed(1), y: Math.min(a, b).toFixed(1), width: Math.max(each - (isStacked ? 0 : 1.5), 1).toFixed(1) };
    svg.append(make("rect", { class: `bar c${series.colour}`, ...bar, height: Math.max(Math.abs(b - a), 0.5).toFixed(1), rx: isStacked ? 0 : 1.5 }));
    if (low !== null && high !== null) drawWhisker({ colour: 7 }, svg, left + each / 2, toY(low), toY(high));
  });
}

// The number on top of a bar, if it fits.
function drawBarValue({ svg, toY, box }, x, level, spec, room, value = level) {
  if (value === null || (spec.y_log && level <= 0)) return;
  const text = say(value, spec.y_format);
  if (textWidth(text, 11) > room) return;
  const y = Math.max(toY(level) - 5, box.top - 2);
  svg.append(make("text", { class: "value-label", x: x.toFixed(1), y: y.toFixed(1), "text-anchor": "middle" }, text));
}

// --- The confusion matrix: correct and wrong predictions in two colours, by their share of the row

function drawMatrix(spec, width) {
  const count = spec.labels.length;
  const longest = Math.min(Math.max(...spec.labels.map((label) => textWidth(label)), 10), width < 480 ? 64 : 130);
  const left = longest + 30, top = 8;
  const size = Math.max(2, Math.min((Math.min(width, 640) - left - 4) / count, 46));
  const edge = size * count, slant = Math.ceil(longest * 0.72) + 12;
  const height = Math.ceil(top + edge + slant + 22);
  const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, tabindex: 0, role: "img" });
  const sums = spec.values.map((row) => row.reduce((a, b) => a + b, 0));
  const gap = size > 8 ? 1 : 0;
  svg.append(make("rect", { class: "cell-empty", x: left, y: top, width: edge, height: edge }));
  spec.values.forEach((row, r) => row.forEach((value, c) => {
    if (!value) return;
    const share = value / sums[r];
    const place = { x: (left + c * size).toFixed(1), y: (top + r * size).toFixed(1), width: (size - gap).toFixed(1), height: (size - gap).toFixed(1) };
    // With the square root, one wrong prediction in a hundred is still visible.
    svg.append(make("rect", { class: `cell c${r === c ? 0 : 1}`, ...place, "fill-opacity": (0.12 + 0.88 * Math.sqrt(share)).toFixed(3) }));
    const text = plain(value, 0);
    if (textWidth(text, 11) > size - 4 || size < 15) return;
    const middle = { x: (left + (c + 0.5) * size - gap / 2).toFixed(1), y: (top + (r + 0.5) * size).toFixed(1) };
    svg.append(make("text", { class: `cell-text${share > 0.5 ? " on" : ""}`, ...middle }, text));
  }));
  drawMatrixLabels(spec, svg, { left, top, size, edge, longest, height });
  return { svg, width, height, box: { left, top, right: left + edge, bottom: top + edge }, ...matrixStops(spec, { left, top, size, sums }) };
}

function drawMatrixLabels(spec, svg, { left, top, size, edge, longest, height }) {
  const every = Math.ceil(13 / size);
  spec.labels.forEach((label, n) => {
    if (n % every) return;
    const middle = (n + 0.5) * size, text = shorten(label, longest);
    svg.append(make("text", { x: left - 6, y: top + middle, "text-anchor": "end", "dominant-baseline": "central" }, text));
    const x = left + middle + 4, y = top + edge + 13;
    svg.append(make("text", { x, y, "text-anchor": "end", transform: `rotate(-40 ${x} ${y})` }, text));
  });
  svg.append(make("text", { x: left + edge / 2, y: height - 4, "text-anchor": "middle" }, spec.x_label));
  const y = top + edge / 2;
  svg.append(make("text", { x: 11, y, "text-anchor": "middle", transform: `rotate(-90 11 ${y})` }, spec.y_label));
}

function matrixStops(spec, { left, top, size, sums }) {
  const count = spec.labels.length;
  return {
    stops: count * count, columns: count,
    hit(px, py) {
      const c = Math.floor((px - left) / size), r = Math.floor((py - top) / size);
      return c >= 0 && r >= 0 && c < count && r < count ? r * count + c : -1;
    },
    tip(stop) {
      const r = Math.floor(stop / count), c = stop % count, value = spec.values[r][c];
      const rows = [
        { colour: r === c ? 0 : 1, name: `${spec.x_label} ${spec.labels[c]}`, value: plain(value, 2) },
        { colour: 7, name: `of ${plain(sums[r], 2)}`, value: sums[r] ? say(value / sums[r], "percent") : "–" },
      ];
      const halo = make("rect", { class: "halo", x: left + c * size, y: top + r * size, width: size, height: size });
      return { head: `${spec.y_label} ${spec.labels[r]}`, rows, x: left + (c + 1) * size, y: top + r * size, cursor: [halo] };
    },
  };
}
