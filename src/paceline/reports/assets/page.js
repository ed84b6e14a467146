// Puts the charts into the page and makes them interactive: tooltip, legend, zoom, data table; theme; sortable tables.

const COLOURS = 8;
const MOST_ROWS = 14;

// --- A chart in its figure

class Figure {
  constructor(node, spec, number) {
    this.node = node;
    this.spec = { marks: [], x_ticks: [], ...spec, number };
    this.plot = node.querySelector(".plot");
    this.series = this.spec.series ? colourSeries(this.spec.series) : [];
    this.hidden = new Set();
    this.zoom = null;
    this.stop = -1;
    this.tip = make("div", { class: "tip", role: "status", hidden: "" });
    this.addLegend();
    this.addTable();
    this.reset = node.querySelector(".reset");
    this.reset.addEventListener("click", () => this.zoomTo(null));
  }

  draw(width) {
    const { spec } = this;
    const visible = this.series.filter((series) => !this.hidden.has(series));
    const height = width < 480 ? 250 : spec.wide ? 340 : 290;
    if (spec.kind === "matrix") this.drawing = drawMatrix(spec, width);
    else if (spec.kind === "line") this.drawing = drawLines(spec, visible, width, height, this.zoom);
    else this.drawing = drawBars(spec, visible, width, height);
    const { svg } = this.drawing;
    const id = `describes-${spec.number}`;
    svg.setAttribute("aria-label", spec.title);  // a <title> would show a second tooltip
    svg.setAttribute("aria-describedby", id);
    svg.prepend(make("desc", { id }, inWords(spec, visible)));
    this.cursor = make("g", { "aria-hidden": "true" });
    svg.append(this.cursor);
    this.listen(svg);
    this.plot.replaceChildren(svg, this.tip);
    this.width = width;
    this.hide();
  }

  redraw() {
    this.draw(this.width);
  }

  zoomTo(range) {
    this.zoom = range;
    this.reset.hidden = !range;
    this.redraw();
  }

  // --- Pointer and keys

  listen(svg) {
    svg.addEventListener("pointermove", (event) => this.point(event));
    svg.addEventListener("pointerleave", () => this.drag || this.hide());
    svg.addEventListener("pointerdown", (event) => this.press(event));
    svg.addEventListener("pointerup", (event) => this.release(event));
    svg.addEventListener("pointercancel", () => this.hide());
    svg.addEventListener("dblclick", () => this.zoom && this.zoomTo(null));
    svg.addEventListener("keydown", (event) => this.key(event));
    svg.addEventListener("blur", () => this.hide());
  }

  place(event) {
    const edges = this.drawing.svg.getBoundingClientRect();
    return [((event.clientX - edges.left) * this.width) / edges.width, ((event.clientY - edges.top) * this.width) / edges.width];
  }

  point(event) {
    const [x, y] = this.place(event);
    if (this.drag) {
      this.drag.to = x;
      const { box } = this.drawing, [a, b] = this.dragged();
      const area = { x: a, y: box.top, width: b - a, height: box.bottom - box.top };
      this.cursor.replaceChildren(make("rect", { class: "selection", ...area }));
      this.tip.hidden = true;
      return;
    }
    this.show(this.drawing.stops ? this.drawing.hit(x, y) : -1);
  }

  press(event) {
    if (event.pointerType !== "mouse" || event.button !== 0) this.point(event);
    else if (this.spec.kind === "line") {
      const [x] = this.place(event);
      this.drag = { from: x, to: x };
      this.drawing.svg.setPointerCapture(event.pointerId);
    }
  }

  dragged() {
    const { left, right } = this.drawing.box;
    return [this.drag.from, this.drag.to].map((x) => Math.min(Math.max(x, left), right)).sort((a, b) => a - b);
  }

  release(event) {
    if (!this.drag) return;
    const { box, x } = this.drawing;
    const [a, b] = this.dragged();
    this.drag = null;
    if (b - a > 8) this.zoomTo([a, b].map((at) => x.back((at - box.left) / (box.right - box.left))));
    else this.point(event);
  }

  key(event) {
    const { stops, columns = 1 } = this.drawing;
    const moves = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns };
    if (event.key === "Escape") return this.zoom ? this.zoomTo(null) : this.hide();
    if (!stops || (columns === 1 && /Up|Down/.test(event.key))) return undefined;
    const ends = { Home: 0, End: stops - 1 };
    if (event.key in ends) this.show(ends[event.key]);
    else if (event.key in moves) this.show(Math.min(stops - 1, Math.max(0, this.stop < 0 ? 0 : this.stop + moves[event.key])));
    else return undefined;
    event.preventDefault();
    return undefined;
  }

  show(stop) {
    if (stop < 0) return this.hide();
    if (stop === this.stop && !this.tip.hidden) return undefined;
    this.stop = stop;
    const { head, rows, x, y, cursor } = this.drawing.tip(stop);
    this.cursor.replaceChildren(...cursor);
    const lines = rows.slice(0, MOST_ROWS).map((row) =>
      make("div", {}, make("span", {}, make("i", { class: `c${row.colour}` }), row.name), make("em", {}, row.value)));
    if (rows.length > MOST_ROWS) lines.push(make("div", {}, `and ${rows.length - MOST_ROWS} more`));
    this.tip.replaceChildren(make("b", {}, head), ...lines);
    this.tip.hidden = false;
    const scale = this.plot.clientWidth / this.width, at = x * scale, room = this.tip.offsetWidth + 14;
    const left = at + room <= this.plot.clientWidth ? at + 14 : Math.max(0, at - room);
    this.tip.style.left = `${left}px`;
    this.tip.style.top = `${y * scale}px`;
    return undefined;
  }

  hide() {
    this.stop = -1;
    this.tip.hidden = true;
    this.cursor.replaceChildren();
  }

  // --- Legend, zoom and data table

  addLegend() {
    const legend = this.node.querySelector(".legend");
    if (this.series.length < 2) return;
    for (const series of this.series) {
      const button = make("button", { type: "button", "aria-pressed": "true" }, swatch(series, this.spec.kind), make("span", {}, series.name));
      button.addEventListener("click", () => {
        const isShown = this.hidden.delete(series) || (this.hidden.add(series), false);
        button.setAttribute("aria-pressed", String(isShown));
        this.redraw();
      });
      legend.append(button);
    }
  }

  addTable() {
    const details = this.node.querySelector("details");
    details.addEventListener("toggle", () => {
      if (details.open && !details.querySelector("table")) details.querySelector(".scroll").append(dataTable(this.spec, this.series));
    });
  }
}

function colourSeries(all) {
  const groups = new Map();
  return all.map((series, n) => {
    const key = series.group || series.name;
    if (!groups.has(key)) groups.set(key, groups.size);
    const number = series.colour ?? groups.get(key);
    return { ...series, colour: number % COLOURS, round: Math.floor(number / COLOURS), shape: n % SHAPES.length };
  });
}

function swatch(series, kind) {
  const svg = make("svg", { viewBox: "0 0 22 12", "aria-hidden": "true" });
  if (kind !== "line") svg.append(make("rect", { class: `bar c${series.colour}`, x: 5, y: 0, width: 12, height: 12, rx: 2 }));
  else svg.append(make("path", { class: `line c${series.colour}`, d: "M1 6H21", "stroke-dasharray": dashOf(series) }));
  if (kind === "line" && series.has_points) svg.append(shapeAt(series, 11, 6));
  return svg;
}

// The text of a chart for screen readers.
function inWords(spec, visible) {
  if (spec.kind === "matrix") return `A table of counts, ${spec.y_label} by ${spec.x_label}, ${spec.labels.length} classes.`;
  const parts = visible.map((series) => {
    const numbers = series.y.filter((value) => value !== null);
    if (!numbers.length) return `${series.name}: no values`;
    const [first, last] = [numbers[0], numbers[numbers.length - 1]].map((value) => say(value, spec.y_format));
    return numbers.length === 1 ? `${series.name}: ${first}` : `${series.name}: from ${first} to ${last}, ${numbers.length} values`;
  });
  return `${spec.y_label} by ${spec.x_label}. ${parts.join("; ")}.`;
}

function dataTable(spec, series) {
  if (spec.kind === "matrix") {
    return makeTable([`${spec.y_label} \\ ${spec.x_label}`, ...spec.labels], spec.values.map((row, n) => [spec.labels[n], ...row]));
  }
  const xOf = (one, n) => (one.x.length ? one.x[n] : n + 1);
  const maps = series.map((one) => new Map(one.y.map((y, n) => [xOf(one, n), n])));
  const keys = [...new Set(maps.flatMap((map) => [...map.keys()]))];
  if (spec.kind === "line") keys.sort((a, b) => a - b);
  const cell = (one, n) => {
    if (n === undefined || one.y[n] === null) return "";
    const interval = one.low.length && one.low[n] !== null ? ` (${say(one.low[n], spec.y_format)} to ${say(one.high[n], spec.y_format)})` : "";
    return say(one.y[n], spec.y_format) + interval;
  };
  const rows = keys.map((key) => [say(key), ...series.map((one, s) => cell(one, maps[s].get(key)))]);
  return makeTable([spec.x_label, ...series.map((one) => one.name)], rows);
}

function makeTable(columns, rows) {
  const head = make("thead", {}, make("tr", {}, ...columns.map((name) => make("th", { scope: "col" }, name))));
  const line = (cells) => make("tr", {}, ...cells.map((value, n) => make(n ? "td" : "th", n ? { class: "number" } : { scope: "row" }, String(value))));
  return make("table", {}, head, make("tbody", {}, ...rows.map(line)));
}

// --- Tables that can be sorted

function makeSortable(table) {
  const body = table.tBodies[0], original = [...body.rows];
  [...table.tHead.rows[0].cells].forEach((cell, column) => {
    const button = make("button", { type: "button" }, ...cell.childNodes);
    cell.append(button);
    button.addEventListener("click", () => {
      const next = { none: "descending", descending: "ascending", ascending: "none" }[cell.getAttribute("aria-sort") || "none"];
      for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
      if (next !== "none") cell.setAttribute("aria-sort", next);
      const sign = next === "ascending" ? 1 : -1;
      const rows = next === "none" ? original : [...original].sort((a, b) => sign * compareCells(a.cells[column], b.cells[column]));
      body.append(...rows);
    });
  });
}

function compareCells(a, b) {
  const [x, y] = [a.dataset.value, b.dataset.value];
  if (x !== undefined && y !== undefined) return Number(x) - Number(y);
  if (x !== undefined || y !== undefined) return x === undefined ? -1 : 1;
  return a.textContent.localeCompare(b.textContent, "en");
}

// --- Frames of which one is visible

function setUpSlider(node) {
  const label = node.querySelector("label"), input = label.querySelector("input");
  const frames = [...node.children].filter((child) => child.classList.contains("frame"));
  const show = () => frames.forEach((frame, n) => (frame.hidden = n !== Number(input.value)));
  input.addEventListener("input", show);
  label.hidden = frames.length < 2;
  show();
}

// --- The page

function setUpTheme() {
  const root = document.documentElement, button = document.querySelector(".theme");
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : dark.matches);
  const tell = () => (button.textContent = isDark() ? "Light" : "Dark");
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    tell();
  });
  dark.addEventListener("change", tell);
  button.hidden = false;
  tell();
}

function drawPage() {
  const specs = JSON.parse(document.getElementById("chart-specs").textContent);
  const figures = [...document.querySelectorAll("figure.chart")].map((node, n) => new Figure(node, specs[n], n));
  const widths = new ResizeObserver((entries) => {
    for (const { target } of entries) {
      const figure = figures.find(({ plot }) => plot === target);
      const width = Math.max(240, Math.round(target.clientWidth));
      // A closed block has no width, so nothing can be drawn.
      if (target.clientWidth && width !== figure.width) figure.draw(width);
    }
  });
  for (const figure of figures) {
    if (figure.plot.clientWidth) figure.draw(Math.max(240, Math.round(figure.plot.clientWidth)));
    widths.observe(figure.plot);
  }
  document.querySelectorAll("table.sortable").forEach(makeSortable);
  document.querySelectorAll(".slider").forEach(setUpSlider);
  setUpTheme();
  return figures;
}

const figures = drawPage();
