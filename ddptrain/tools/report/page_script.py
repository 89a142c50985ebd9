"""What can be done with a report's curves: the page's script, which stands in the page itself.

It draws them as `curves.as_svg` does, and again when a run is switched off, an axis changes, or to read
values.
"""

# ruff: noqa: E501

SCRIPT = r"""
"use strict";
(() => {
const data = JSON.parse(document.getElementById("data").textContent);
const W = data.width, H = data.height, L = 52, R = 12, T = 10, B = 42, FEW = 30;
const shown = data.runs.map(() => true);
let across = "step";
const make = (name, attributes, parent, text) => {
  const node = document.createElementNS(parent.namespaceURI, name);
  for (const key in attributes) node.setAttribute(key, attributes[key]);
  if (text !== undefined) node.textContent = text;
  parent.append(node);
  return node;
};
const short = (v) => {
  const size = Math.abs(v);
  for (const [limit, letter] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]])
    if (size >= limit && size < 1e12) return +(v / limit).toPrecision(4) + letter;
  if ((size > 0 && size < 1e-3) || size >= 1e12) return (+v.toPrecision(4)).toExponential().replace("e+", "e");
  return String(+v.toPrecision(6));
};
const linearTicks = (low, high) => {
  const span = high - low, unit = 10 ** Math.floor(Math.log10(span / 4));
  const step = [1, 2, 5, 10].map((k) => unit * k).find((s) => span / s <= 6) || unit * 10;
  const first = Math.ceil(low / step), ticks = [];
  for (let k = 0; k < 8 && (first + k) * step <= high + step * 1e-9; k++) ticks.push((first + k) * step);
  return ticks;
};
const logTicks = (low, high) => {
  const ticks = [], a = Math.floor(Math.log10(low)), b = Math.ceil(Math.log10(high));
  const every = Math.max(1, Math.ceil((b - a) / 6)), parts = b - a <= 1 ? [1, 1.5, 2, 3, 5, 7] : b - a <= 3 ? [1, 2, 5] : [1];
  for (let e = a; e <= b; e += every) for (const k of parts) {
    const tick = k * 10 ** e;
    if (tick >= low * 0.999 && tick <= high * 1.001) ticks.push(tick);
  }
  return ticks;
};
const axis = (values, start, end, log) => {
  let low = Infinity, high = -Infinity;
  for (const v of values) { if (v < low) low = v; if (v > high) high = v; }
  if (low === high) {
    const room = Math.abs(low) * 0.05 || 1;
    [low, high] = log ? [low / 2, high * 2] : [low - room, high + room];
  }
  const f = log ? Math.log10 : (v) => v, from = f(low), span = f(high) - from || 1;
  return { at: (v) => start + ((f(v) - from) / span) * (end - start), ticks: log ? logTicks(low, high) : linearTicks(low, high) };
};
const looks = (s) => {
  const colour = data.runs.length > 1 ? s.run : +(s.split === "valid");
  return `c${colour % 10} d${Math.floor(colour / 10) % 3} ${s.split === "valid" ? "valid" : "train"}`;
};
const drawings = data.panels.map((panel, i) => {
  const figure = document.getElementById("panel-" + i);
  return { panel, figure, svg: figure.querySelector("svg"), log: false, visible: [] };
});
const usable = (v, log) => v !== null && (!log || v > 0);
const draw = (d) => {
  const log = d.log, ys = [];
  d.visible = d.panel.series.filter((s) => shown[s.run]);
  for (const s of d.visible) s.value.forEach((v, i) => {
    if (usable(v, log) && s[across][i] !== null) ys.push(v);
  });
  d.svg.replaceChildren();
  if (!ys.length) { make("text", { x: W / 2, y: H / 2, "text-anchor": "middle" }, d.svg, "nothing to show"); d.x = null; return; }
  const x = (d.x = axis(extent, L, W - R, false)), y = (d.y = axis(ys, H - B, T, log));
  for (const tick of y.ticks) {
    const at = y.at(tick).toFixed(1);
    make("line", { class: "grid", x1: L, x2: W - R, y1: at, y2: at }, d.svg);
    make("text", { x: L - 6, y: +at + 4, "text-anchor": "end" }, d.svg, short(tick));
  }
  for (const tick of x.ticks) make("text", { x: x.at(tick).toFixed(1), y: H - 24, "text-anchor": "middle" }, d.svg, short(tick));
  make("text", { x: (L + W - R) / 2, y: H - 6, "text-anchor": "middle" }, d.svg, across);
  for (const s of d.visible) {
    const pieces = [[]];
    s.value.forEach((v, i) => {
      if (!usable(v, log) || s[across][i] === null) pieces.push([]);
      else pieces[pieces.length - 1].push([x.at(s[across][i]).toFixed(1), y.at(v).toFixed(1)]);
    });
    const group = make("g", { class: "series " + looks(s) }, d.svg), marked = s.value.length <= FEW;
    for (const piece of pieces) {
      if (piece.length > 1) make("polyline", { points: piece.map((p) => p.join(",")).join(" ") }, group);
      if (marked || piece.length === 1) for (const [cx, cy] of piece) make("circle", { cx, cy, r: 2.2 }, group);
    }
  }
  d.cross = make("line", { class: "cross", y1: T, y2: H - B, visibility: "hidden" }, d.svg);
};
let extent = [];
const measure = () => {  // all panels show the same stretch
  let low = Infinity, high = -Infinity;
  for (const panel of data.panels) for (const s of panel.series) if (shown[s.run]) for (const v of s[across]) {
    if (v !== null && v < low) low = v;
    if (v !== null && v > high) high = v;
  }
  extent = [low, high];
};
const drawAll = () => { measure(); drawings.forEach(draw); };
const nearest = (s, at, d) => {
  let best = -1, distance = Infinity;
  for (let i = 0; i < s.value.length; i++) {
    if (s[across][i] === null) continue;
    const gap = Math.abs(d.x.at(s[across][i]) - at);
    if (gap < distance) { distance = gap; best = i; }
  }
  return best;
};
const read = (d, event) => {
  const box = d.svg.getBoundingClientRect(), at = ((event.clientX - box.left) / box.width) * W;
  if (!d.x || at < L - 8 || at > W) return leave(d);
  const rows = d.visible.map((s) => ({ s, i: nearest(s, at, d) })).filter((row) => row.i >= 0);
  if (!rows.length) return leave(d);
  const gap = (row) => Math.abs(d.x.at(row.s[across][row.i]) - at), first = rows.reduce((a, b) => (gap(b) < gap(a) ? b : a));
  const here = first.s[across][first.i], x = d.x.at(here), height = ((event.clientY - box.top) / box.height) * H;
  const far = (row) => { const v = row.s.value[row.i]; return usable(v, d.log) ? Math.abs(d.y.at(v) - height) : Infinity; };
  d.cross.setAttribute("x1", x); d.cross.setAttribute("x2", x); d.cross.setAttribute("visibility", "visible");
  d.reading.replaceChildren();
  const line = (text, className) => {
    const row = document.createElement("div");
    if (className) { const key = document.createElement("span"); key.className = "key " + className; row.append(key); }
    row.append(text); d.reading.append(row);
  };
  line(`${across} ${short(here)}`);
  const near = rows.map((row) => ({ row, far: far(row) })).sort((a, b) => a.far - b.far).slice(0, 8).map((each) => each.row);
  for (const { s, i } of near.sort((a, b) => a.s.run - b.s.run || a.s.split.localeCompare(b.s.split))) {
    const colour = data.runs.length > 1 ? s.run : +(s.split === "valid"), v = s.value[i];
    const who = data.runs.length > 1 ? `${data.runs[s.run]} ${s.split}` : s.split;
    const where = s[across][i] === here ? "" : ` (${across} ${short(s[across][i])})`;
    line(`${who}: ${v === null ? "not finite" : +v.toPrecision(5)}${where}`, "k" + (colour % 10));
  }
  if (rows.length > near.length) line(`and ${rows.length - near.length} more`);
  d.reading.hidden = false;
  const left = event.clientX - d.figure.getBoundingClientRect().left, wide = d.reading.offsetWidth;
  const right = left + 14 + wide > d.figure.clientWidth;
  d.reading.style.left = Math.max(4, right ? left - wide - 14 : left + 14) + "px";
};
const leave = (d) => { d.reading.hidden = true; if (d.cross) d.cross.setAttribute("visibility", "hidden"); };
for (const d of drawings) {
  d.reading = document.createElement("div");
  d.reading.className = "reading"; d.reading.hidden = true;
  d.figure.append(d.reading);
  d.svg.addEventListener("pointermove", (event) => read(d, event));
  d.svg.addEventListener("pointerdown", (event) => read(d, event));
  d.svg.addEventListener("pointerleave", () => leave(d));
  const log = d.figure.querySelector("button.log");
  log.addEventListener("click", () => { d.log = !d.log; log.setAttribute("aria-pressed", d.log); draw(d); });
}
for (const button of document.querySelectorAll("button.run")) button.addEventListener("click", () => {
  const run = +button.dataset.run;
  shown[run] = !shown[run];
  button.setAttribute("aria-pressed", shown[run]);
  drawAll();
});
for (const button of document.querySelectorAll("button.across")) button.addEventListener("click", () => {
  across = button.dataset.across;
  for (const each of document.querySelectorAll("button.across")) each.setAttribute("aria-pressed", each === button);
  drawAll();
});
for (const button of document.querySelectorAll("button.copy")) button.addEventListener("click", async () => {
  const text = button.parentElement.querySelector("pre");
  const announce = () => { button.textContent = "copied"; setTimeout(() => { button.textContent = "copy"; }, 1500); };
  try { await navigator.clipboard.writeText(text.textContent); announce(); }
  catch { getSelection().selectAllChildren(text); if (document.execCommand("copy")) announce(); }
});
drawAll();
document.documentElement.classList.add("with-script");
})();
"""
