"""The page of ``serve``: the list of runs, which follows them, and a report on those that are chosen."""

# ruff: noqa: E501

STYLE = """
:root { color-scheme: light dark; --ground: #fff; --ink: #1a202c; --soft: #566173; --line: #dfe4ea; --wash: #f5f7f9; --mark: #e6f0fb; --on: #14713d; --bad: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --ground: #14181d; --ink: #e6eaef; --soft: #a3adba; --line: #323a44; --wash: #20262e; --mark: #22344a; --on: #6fd596; --bad: #f28b82; } }
* { box-sizing: border-box; }
html, body { height: 100%; margin: 0; }
body { display: flex; flex-direction: column; background: var(--ground); color: var(--ink); font: 14px/1.45 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; }
header { display: flex; gap: 1rem; align-items: center; padding: .6rem 1rem; border-bottom: 1px solid var(--line); }
h1 { font-size: 1.05rem; margin: 0; }
input[type=search] { font: inherit; padding: .2rem .5rem; border: 1px solid var(--line); border-radius: 5px; background: var(--ground); color: var(--ink); min-width: 16rem; }
#said { color: var(--soft); margin-left: auto; }
#list { max-height: 38vh; overflow: auto; border-bottom: 1px solid var(--line); flex: none; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .28rem .8rem; border-bottom: 1px solid var(--line); white-space: nowrap; }
thead th { position: sticky; top: 0; background: var(--wash); color: var(--soft); font-weight: 600; z-index: 1; }
tbody tr { cursor: pointer; }
tbody tr:hover { background: var(--wash); }
tbody tr.chosen { background: var(--mark); }
tbody tr[hidden] { display: none; }
td.path { font-weight: 500; max-width: 34rem; overflow: hidden; text-overflow: ellipsis; }
.going { color: var(--on); font-weight: 600; }
.ended-badly { color: var(--bad); }
#report { flex: 1; position: relative; min-height: 0; }
iframe { position: absolute; inset: 0; width: 100%; height: 100%; border: 0; background: var(--ground); }
iframe.next { visibility: hidden; }
#none { padding: 2rem 1rem; color: var(--soft); }
"""

SCRIPT = r"""
"use strict";
(() => {
const body = document.querySelector("tbody"), said = document.getElementById("said"), report = document.getElementById("report");
const none = document.getElementById("none"), search = document.querySelector("input[type=search]");
const FIELDS = ["path", "recipe", "state", "steps", "metric", "time"];
const rows = new Map(), chosen = new Set();
let shown = "", before = 0;
const looks = (state) => state === "still going on" ? "going" : /^(done|stopped|sweep|\d)/.test(state) ? "" : "ended-badly";
const make = (path) => {
  const row = document.createElement("tr"), cell = document.createElement("td"), box = document.createElement("input");
  box.type = "checkbox"; box.setAttribute("aria-label", "beside others: " + path);
  cell.append(box); row.append(cell);
  for (const field of FIELDS) { const td = document.createElement("td"); td.className = field; row.append(td); }
  row.tabIndex = 0;
  box.addEventListener("change", () => { if (box.checked) chosen.add(path); else chosen.delete(path); show(); });
  row.addEventListener("click", (event) => { if (event.target !== box) { chosen.clear(); chosen.add(path); show(); } });
  row.addEventListener("keydown", (event) => { if (event.key === "Enter") { chosen.clear(); chosen.add(path); show(); } });
  return { row, box, cells: [...row.children].slice(1), version: "" };
};
const matches = (data) => FIELDS.some((field) => data[field].toLowerCase().includes(search.value.toLowerCase()));
const render = (list) => {
  const there = new Set(list.map((data) => data.path));
  for (const [path, own] of rows) if (!there.has(path)) { own.row.remove(); rows.delete(path); chosen.delete(path); }
  list.forEach((data, i) => {
    if (!rows.has(data.path)) rows.set(data.path, make(data.path));
    const own = rows.get(data.path);
    own.data = data; own.version = data.version; own.row.hidden = !matches(data);
    FIELDS.forEach((field, k) => { if (own.cells[k].textContent !== data[field]) own.cells[k].textContent = data[field]; });
    own.cells[2].className = "state " + looks(data.state); own.cells[0].title = data.path;
    if (body.children[i] !== own.row) body.insertBefore(own.row, body.children[i] || null);
  });
  if (!chosen.size && list.length) chosen.add(list[0].path);
  none.hidden = list.length > 0;
  show();
};
// what was unfolded and switched stays so
const alter = (next, before) => {
  for (const what of ["details", "[aria-pressed]"]) {
    const [now, then] = [next, before].map((page) => [...page.querySelectorAll(what)]);
    if (now.length === then.length) now.forEach((part, i) => {
      if (what === "details") part.open = then[i].open;
      else if (part.ariaPressed !== then[i].ariaPressed) part.click();
    });
  }
};
const show = () => {
  for (const [path, own] of rows) { own.row.classList.toggle("chosen", chosen.has(path)); own.box.checked = chosen.has(path); }
  const paths = [...rows.keys()].filter((path) => chosen.has(path));
  const key = paths.map((path) => path + "\n" + rows.get(path).version).join("\n\n");
  if (!paths.length || key === shown) return;
  const coming = report.querySelector("iframe.next");
  if (coming && coming.dataset.paths === paths.join("\n")) return;  // a newer one begins when it is there
  shown = key;
  report.querySelectorAll("iframe.next").forEach((frame) => frame.remove());
  const before = report.querySelector("iframe"), frame = document.createElement("iframe");
  frame.className = "next"; frame.title = "report"; frame.dataset.paths = paths.join("\n");
  frame.src = "page?" + paths.map((path) => "path=" + encodeURIComponent(path)).join("&");
  frame.addEventListener("load", () => {
    if (frame.className !== "next") return;
    if (before && before.dataset.paths === frame.dataset.paths) {
      alter(frame.contentDocument, before.contentDocument);
      frame.contentWindow.scrollTo(0, before.contentWindow.scrollY);
    }
    frame.className = "";
    if (before) before.remove();
    show();
  });
  report.append(frame);
};
const look = async () => {
  try {
    const answer = await fetch("runs");
    const list = await answer.json();
    render(list);
    const going = list.filter((data) => data.state === "still going on").length;
    said.textContent = `${list.length} runs and sweeps, ${going} going on`;
  } catch (error) {
    said.textContent = "the server does not answer";
  }
  const first = rows.size !== before;  // the server is still reading
  before = rows.size;
  setTimeout(look, first || !before ? 200 : 2000);
};
search.addEventListener("input", () => { for (const own of rows.values()) own.row.hidden = !matches(own.data); });
look();
})();
"""

LIST_PAGE = f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>ddptrain: runs</title>
<link rel="icon" href="data:,">
<style>{STYLE}</style>
</head>
<body>
<header><h1>Runs</h1><input type="search" placeholder="search" aria-label="search"><span id="said"></span></header>
<div id="list"><table><thead><tr><th></th><th>run</th><th>recipe</th><th>state</th><th>steps</th><th>metric</th><th>time</th></tr></thead><tbody></tbody></table></div>
<div id="report"><p id="none" hidden>There is no run below this folder yet.</p></div>
<script>{SCRIPT}</script>
</body>
</html>
"""
