"use strict";
// Draws the description in #data: facts, a table that sorts and filters, charts. Text from files is only ever set as textContent.

const content = JSON.parse(document.getElementById("data").textContent);
const at = (id) => document.getElementById(id);
const PAGE = window.innerWidth > 640 ? 500 : 30; // rows in the document at once, the rest on request; on a phone each is a card
const COLOURS = ["var(--c0)", "var(--c1)", "var(--c2)", "var(--c3)", "var(--c4)"];

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function drawn(name, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let place = 0;
  while (count >= 1024 && place < units.length - 1) { count /= 1024; place += 1; }
  return `${place ? count.toFixed(1) : count} ${units[place]}`;
}

const number = (value) => (value === 0 ? "0" : Math.abs(value) >= 1e5 || Math.abs(value) < 1e-3 ? value.toExponential(1) : value.toPrecision(3));
const shape = (value) => (value ? value.join("×") || "scalar" : "");
const FORMATS = { bytes, number, shape, count: (value) => value.toLocaleString("en"), percent: (value) => (value ? `${(100 * value).toPrecision(3)} %` : "0 %") };

// the table

const state = { key: null, descending: false, limit: PAGE };

function sortable(row, column) {
  const value = row[column.key];
  if (column.type === "shape") return value.reduce((product, size) => product * size, 1);
  return value === undefined || value === null || value === "" ? null : value;
}

function visible() {
  const words = at("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
  const kind = at("kind").value;
  const rows = content.rows.filter((row) => {
    if ((kind && row.kind !== kind) || (at("problems").checked && !row.problems)) return false;
    const text = [row.name, row.kind, row.dtype, row.what, shape(row.shape), row.problems].join(" ").toLowerCase();
    return words.every((word) => text.includes(word));
  });
  const column = content.columns.find((item) => item.key === state.key);
  if (!column) return rows;
  const sign = state.descending ? -1 : 1;
  return rows.map((row) => [sortable(row, column), row]).sort(([a], [b]) => {
    if (a === null || b === null) return (a === null) - (b === null); // what has no value comes last, both ways
    return sign * (typeof a === "string" ? a.localeCompare(b, undefined, { numeric: true }) : a - b);
  }).map(([, row]) => row);
}

function cell(row, column) {
  const value = row[column.key];
  const made = element("td", { class: column.key === "name" ? "name" : column.type, "data-label": column.label });
  if (value === undefined || value === null || value === "") return made;
  if (column.type === "histogram") made.append(sparkline(value));
  else made.textContent = FORMATS[column.type] ? FORMATS[column.type](value) : value;
  if (["bytes", "count", "percent"].includes(column.type)) made.className = "number";
  return made;
}

function sparkline(counts) {
  const top = Math.max(...counts, 1);
  const svg = drawn("svg", { class: "spark", width: 3 * counts.length, height: 22, role: "img", "aria-label": `histogram ${counts.join(" ")}` });
  counts.forEach((count, place) => {
    const height = count ? Math.max(1, (22 * count) / top) : 0;
    svg.append(drawn("rect", { x: 3 * place, y: 22 - height, width: 2.4, height }));
  });
  return svg;
}

function show() {
  const rows = visible();
  const body = document.createDocumentFragment();
  for (const row of rows.slice(0, state.limit)) {
    body.append(element("tr", row.problems ? { class: "bad" } : {}, ...content.columns.map((column) => cell(row, column))));
  }
  document.querySelector("#tensors tbody").replaceChildren(body);
  at("shown").textContent = `${rows.length} of ${content.rows.length}`;
  at("more").hidden = rows.length <= state.limit;
  at("more").textContent = `Show all ${rows.length}`;
  document.querySelectorAll("#tensors th").forEach((head, place) => {
    const chosen = content.columns[place].key === state.key;
    head.setAttribute("aria-sort", chosen ? (state.descending ? "descending" : "ascending") : "none");
  });
}

function sortBy(key, descending) {
  Object.assign(state, { key, descending });
  at("order").value = key ? `${key} ${descending ? "down" : "up"}` : "";
  show();
}

function prepareTable() {
  const order = at("order");
  order.append(element("option", { value: "" }, "sort: as stored"));
  for (const column of content.columns) {
    const button = element("button", { type: "button" }, column.label);
    document.querySelector("#tensors thead tr").append(element("th", { "aria-sort": "none", class: column.type }, button));
    if (column.type === "histogram") { button.disabled = true; continue; }
    const largest = column.type !== "text"; // of numbers the largest are looked for first
    button.addEventListener("click", () => sortBy(column.key, state.key === column.key ? !state.descending : largest));
    for (const way of ["up", "down"]) order.append(element("option", { value: `${column.key} ${way}` }, `${column.label} ${way === "up" ? "▲" : "▼"}`));
  }
  order.addEventListener("change", () => sortBy(order.value.split(" ")[0] || null, order.value.endsWith("down")));
  for (const kind of new Set(content.rows.map((row) => row.kind))) at("kind").append(element("option", { value: kind }, kind));
  for (const id of ["filter", "kind", "problems"]) at(id).addEventListener("input", () => { state.limit = PAGE; show(); });
  at("controls").addEventListener("submit", (event) => event.preventDefault());
  at("more").addEventListener("click", () => { state.limit = Infinity; show(); });
  at("problems").parentElement.hidden = !content.rows.some((row) => row.problems);
}

// layers: a tree by the parts of the names, whose branches are made when they are opened

function leaves(node) {
  return node.row ? [node.row] : [...node.children.values()].flatMap(leaves);
}

function grown() {
  const root = { children: new Map() };
  for (const row of content.rows) {
    const parts = row.name.split(".");
    let node = root;
    for (const part of parts.slice(0, -1)) {
      if (!node.children.has(part)) node.children.set(part, { children: new Map() });
      node = node.children.get(part);
    }
    node.children.set(`${parts.at(-1)}\u0000${row.kind}`, { row });
  }
  return root;
}

function branches(node) {
  return [...node.children].map(([key, child]) => {
    let name = key.split("\u0000")[0];
    while (child.children && child.children.size === 1) { // a chain without a fork is one line
      const [[next, only]] = child.children;
      name += `.${next.split("\u0000")[0]}`;
      child = only;
    }
    return branch(name, child);
  });
}

function branch(name, node) {
  const rows = leaves(node), { size, measure, against, label } = content.tree;
  const total = (key) => Math.hypot(...rows.map((row) => row[key] || 0));
  const measured = rows.some((row) => typeof row[measure] === "number");
  const value = against ? total(measure) / total(against) : total(measure);
  const bad = rows.filter((row) => row.problems || row.units).length;
  const line = element("span", { class: "line" }, element("b", {}, name), element("span", {}, bytes(rows.reduce((sum, row) => sum + row[size], 0))),
    element("span", {}, measured && Number.isFinite(value) ? `${label} ${number(value)}` : ""));
  if (node.row) {
    line.append(element("span", {}, `${node.row.kind} ${shape(node.row.shape)}`));
    if (node.row.histogram) line.append(sparkline(node.row.histogram));
    if (bad) line.append(element("span", { class: "problem" }, [node.row.problems, node.row.units].filter(Boolean).join(", ")));
    return element("div", { class: "leaf" }, line);
  }
  line.append(element("span", {}, `${rows.length} tensors`));
  if (bad) line.append(element("span", { class: "problem" }, `${bad} marked`));
  const summary = element("summary", {}, line), made = element("details", {}, summary);
  summary.addEventListener("click", () => { if (made.children.length === 1) made.append(...branches(node)); });
  return made;
}

function prepareTree() {
  at("layers").hidden = false;
  at("tree").append(...branches(grown()));
}

// charts

function palette(values) {
  const names = [...new Set(values)];
  return { names, colour: (name) => (names.includes(name) ? COLOURS[names.indexOf(name) % COLOURS.length] : "transparent") };
}

function legend(names, colour) {
  return element("ul", { class: "legend" }, ...names.map((name) => element("li", {}, element("i", { style: `background:${colour(name)}` }), name)));
}

function bars(chart, width) {
  const known = content.rows.filter((row) => typeof row[chart.value] === "number");
  if (content.sort === chart.value) known.sort((a, b) => b[chart.value] - a[chart.value]);
  const positive = known.map((row) => row[chart.value]).filter((value) => value > 0);
  const top = positive.reduce((a, b) => Math.max(a, b), 0) || 1, least = positive.reduce((a, b) => Math.min(a, b), top);
  const decades = top / least > 100 ? Math.ceil(Math.log10(top / least)) + 1 : 0; // a logarithmic scale where a linear one would hide most
  const part = (value) => (value <= 0 ? 0 : decades ? 1 + Math.log10(value / top) / decades : value / top);
  const { names, colour } = palette(known.map((row) => row.kind));
  const left = Math.min(260, width * 0.42);
  const svg = drawn("svg", { width, height: 20 * known.length + 4, role: "img", "aria-label": chart.title });
  known.forEach((row, place) => {
    const room = Math.floor(left / 6.6);
    const name = row.name.length > room ? `…${row.name.slice(1 - room)}` : row.name;
    const length = Math.max(1, (width - left - 78) * part(row[chart.value]));
    const label = drawn("text", { x: left - 6, y: 20 * place + 15, "text-anchor": "end" });
    label.textContent = name;
    const value = drawn("text", { x: left + length + 5, y: 20 * place + 15 });
    value.textContent = number(row[chart.value]);
    const title = drawn("title");
    title.textContent = `${row.name}: ${number(row[chart.value])}`;
    svg.append(drawn("g", { class: "bar" }, label, drawn("rect", { x: left, y: 20 * place + 3, width: length, height: 15, style: `fill:${colour(row.kind)}` }), value, title));
  });
  return [known.length, legend(decades ? [...names, "logarithmic scale"] : names, colour), svg];
}

function scatter(chart, width) {
  const points = content.rows.flatMap((row) => chart.ys.filter((y) => row[y] > 0 && row[chart.x] > 0).map((y) => ({ row, series: y, x: Math.log10(row[chart.x]), y: Math.log10(row[y]) })));
  if (!points.length) return [0];
  const { names, colour } = palette(chart.ys);
  const height = 320, left = 52, bottom = 44;
  const range = (key) => {
    const values = points.map((point) => point[key]);
    const low = Math.floor(values.reduce((a, b) => Math.min(a, b)));
    return [low, Math.max(Math.ceil(values.reduce((a, b) => Math.max(a, b))), low + 1)];
  };
  const [x0, x1] = range("x"), [y0, y1] = range("y");
  const px = (x) => left + ((width - left - 14) * (x - x0)) / (x1 - x0);
  const py = (y) => height - bottom - ((height - bottom - 12) * (y - y0)) / (y1 - y0);
  const svg = drawn("svg", { width, height, role: "img", "aria-label": chart.title });
  const tick = (x, y, text, anchor) => { const made = drawn("text", { x, y, "text-anchor": anchor }); made.textContent = text; svg.append(made); };
  for (let x = x0; x <= x1; x += Math.ceil((x1 - x0) / 6)) { svg.append(drawn("line", { class: "axis", x1: px(x), x2: px(x), y1: 12, y2: height - bottom })); tick(px(x), height - bottom + 16, `1e${x}`, "middle"); }
  for (let y = y0; y <= y1; y += Math.ceil((y1 - y0) / 6)) { svg.append(drawn("line", { class: "axis", x1: left, x2: width - 14, y1: py(y), y2: py(y) })); tick(left - 6, py(y) + 4, `1e${y}`, "end"); }
  tick(width / 2, height - 8, `${chart.xlabel} → (up: ${chart.ylabel})`, "middle");
  for (const point of points) {
    const title = drawn("title");
    title.textContent = `${point.row.name}, ${point.series}: ${number(point.row[chart.x])}, ${number(point.row[point.series])}`;
    svg.append(drawn("circle", { cx: px(point.x), cy: py(point.y), r: 5, style: `fill:${colour(point.series)};fill-opacity:.75` }, title));
  }
  return [points.length, legend(chart.ys.length > 1 ? names : [], colour), svg];
}

function lines(chart, width) {
  const all = chart.series.flatMap((series) => series.points);
  if (!all.length) return [0];
  const { names, colour } = palette(chart.series.map((series) => series.name));
  const height = 240, left = 62, bottom = 38;
  const range = (place) => {
    const values = all.map((point) => point[place]), low = values.reduce((a, b) => Math.min(a, b)), high = values.reduce((a, b) => Math.max(a, b));
    return low < high ? [low, high] : [low - 1, high + 1];
  };
  const [x0, x1] = range(0), [y0, y1] = range(1);
  const px = (x) => left + ((width - left - 14) * (x - x0)) / (x1 - x0);
  const py = (y) => height - bottom - ((height - bottom - 12) * (y - y0)) / (y1 - y0);
  const svg = drawn("svg", { width, height, role: "img", "aria-label": chart.title });
  const tick = (x, y, text, anchor) => { const made = drawn("text", { x, y, "text-anchor": anchor }); made.textContent = text; svg.append(made); };
  for (let place = 0; place <= 4; place += 1) {
    const y = y0 + ((y1 - y0) * place) / 4, x = x0 + ((x1 - x0) * place) / 4;
    svg.append(drawn("line", { class: "axis", x1: left, x2: width - 14, y1: py(y), y2: py(y) }));
    tick(left - 6, py(y) + 4, String(Number(y.toPrecision(4))), "end");
    if (place % 2 === 0) tick(px(x), height - bottom + 16, String(Math.round(x)), place === 4 ? "end" : "middle");
  }
  tick(width / 2, height - 6, "step", "middle");
  for (const series of chart.series) {
    svg.append(drawn("polyline", { class: "curve", points: series.points.map(([x, y]) => `${px(x)},${py(y)}`).join(" "), style: `stroke:${colour(series.name)}` }));
    for (const [x, y] of series.points) {
      const title = drawn("title");
      title.textContent = `${series.name}, step ${x}: ${number(y)}`;
      svg.append(drawn("circle", { cx: px(x), cy: py(y), r: 3.5, style: `fill:${colour(series.name)}` }, title));
    }
  }
  return [all.length, legend(chart.series.length > 1 ? names : [], colour), svg];
}

function treemap(chart, width) {
  const all = content.rows.filter((row) => row[chart.size] > 0).sort((a, b) => b[chart.size] - a[chart.size]);
  const items = all.slice(0, 200).map((row) => ({ name: row.name, size: row[chart.size], group: row[chart.colour] }));
  if (all.length > 200) items.push({ name: `${all.length - 200} smaller ones`, size: all.slice(200).reduce((sum, row) => sum + row[chart.size], 0), group: "" });
  const { names, colour } = palette(items.map((item) => item.group));
  const height = 300, total = items.reduce((sum, item) => sum + item.size, 0);
  const svg = drawn("svg", { width, height, role: "img", "aria-label": chart.title });
  for (const { item, x, y, w, h } of tiles(items, width, height, total)) {
    const title = drawn("title");
    title.textContent = `${item.name}: ${bytes(item.size)}`;
    const tile = drawn("g", { class: "tile" }, drawn("rect", { x: x + 1, y: y + 1, width: Math.max(w - 2, 0.5), height: Math.max(h - 2, 0.5), rx: 2, style: `fill:${colour(item.group)}` }), title);
    if (w > 46 && h > 18) {
      const room = Math.floor((w - 10) / 7.6), text = drawn("text", { x: x + 6, y: y + 16 });
      text.textContent = item.name.length > room ? `…${item.name.slice(1 - room)}` : item.name;
      tile.append(text);
    }
    svg.append(tile);
  }
  return [items.length, legend(names.filter(Boolean), colour), svg];
}

// Squarified: a row of tiles along the shorter side takes the next item as long as its worst proportion improves.
function tiles(items, width, height, total) {
  const scale = (width * height) / total, placed = [];
  let x = 0, y = 0, w = width, h = height, place = 0;
  while (place < items.length) {
    const side = Math.min(w, h);
    const worst = (row, sum) => Math.max(...row.map((area) => Math.max((side * side * area) / (sum * sum), (sum * sum) / (side * side * area))));
    let row = [items[place].size * scale], sum = row[0];
    while (place + row.length < items.length) {
      const next = items[place + row.length].size * scale;
      if (worst([...row, next], sum + next) > worst(row, sum)) break;
      row.push(next);
      sum += next;
    }
    const depth = sum / side;
    let along = 0;
    row.forEach((area, offset) => {
      const length = area / depth;
      placed.push({ item: items[place + offset], x: w < h ? x + along : x, y: w < h ? y : y + along, w: w < h ? length : depth, h: w < h ? depth : length });
      along += length;
    });
    if (w < h) { y += depth; h -= depth; } else { x += depth; w -= depth; }
    place += row.length;
  }
  return placed;
}

function drawCharts() {
  const boxes = content.charts.map((chart) => element("div", { class: "chart" }));
  const sections = content.charts.map((chart, place) => element("section", { "data-chart": chart.type }, element("h2", {}, chart.title), boxes[place]));
  at("charts").replaceChildren(...sections); // all of them first: they share the width
  const width = boxes.length ? boxes[0].clientWidth - 18 : 0;
  content.charts.forEach((chart, place) => {
    const [count, ...parts] = { bars, lines, scatter, treemap }[chart.type](chart, width);
    if (count) boxes[place].append(...parts);
    else sections[place].remove();
  });
}

function plainTable({ title, columns, rows }) {
  const head = element("tr", {}, ...columns.map((name) => element("th", {}, name)));
  const body = rows.map((row) => element("tr", {}, ...row.map((value) => element("td", {}, String(value)))));
  const table = element("table", { class: "plain" }, element("thead", {}, head), element("tbody", {}, ...body));
  return element("section", {}, element("h2", {}, title), element("div", { class: "wide" }, table));
}

document.title = `${content.title} · torch-ort-ckpt`;
at("title").textContent = content.title;
at("subtitle").textContent = content.subtitle;
at("facts").append(...content.facts.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value))));
at("tables").append(...content.tables.map(plainTable));
if (content.charts_first) document.querySelector("main").prepend(at("charts"));
at("noun").textContent = content.noun || "Tensors";
prepareTable();
sortBy(content.sort || null, true);
if (content.tree && content.rows.length > 1) prepareTree();
drawCharts();
let width = window.innerWidth;
window.addEventListener("resize", () => { if (window.innerWidth !== width) { width = window.innerWidth; drawCharts(); } });
