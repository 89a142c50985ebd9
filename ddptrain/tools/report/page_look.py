"""How a report looks: the page's style, which stands in the page itself."""

# ruff: noqa: E501
# a rule a line

STYLE = """
:root {
  color-scheme: light dark;
  --ground: #ffffff; --panel: #ffffff; --ink: #1a202c; --soft: #566173; --line: #dfe4ea; --wash: #f5f7f9;
  --mark: #fff4cf; --good: #14713d; --grid: #e8ecf0;
  --c0: #2b6cb0; --c1: #c7570f; --c2: #26844a; --c3: #8a3fb5; --c4: #c02b3e;
  --c5: #117f8c; --c6: #8a6d00; --c7: #b8358b; --c8: #5b6472; --c9: #6b4f2f; --c10: #7a9a01;
  --c11: #c3cad3;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ground: #14181d; --panel: #1a1f26; --ink: #e6eaef; --soft: #a3adba; --line: #323a44; --wash: #20262e;
    --mark: #4a3f14; --good: #6fd596; --grid: #2a313a;
    --c0: #6aaef0; --c1: #f39a55; --c2: #66c98a; --c3: #c797ea; --c4: #f0808d;
    --c5: #5cc8d4; --c6: #d9bd4e; --c7: #ee8fcb; --c8: #a9b3c1; --c9: #c9a77f; --c10: #b5d66b;
    --c11: #4b5563;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; padding: 1.5rem clamp(.8rem, 3vw, 2.5rem) 4rem; max-width: 88rem;
  background: var(--ground); color: var(--ink); font: 15px/1.5 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif;
}
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 2.4rem 0 .7rem; padding-bottom: .3rem; border-bottom: 1px solid var(--line); }
h3 { font-size: .95rem; margin: 0; overflow-wrap: anywhere; }
p { margin: .4rem 0; max-width: 75ch; overflow-wrap: anywhere; }
.soft, figcaption { color: var(--soft); font-size: .87rem; }
header { margin-bottom: 1rem; }
.scroll { width: fit-content; max-width: 100%; overflow-x: auto; border: 1px solid var(--line); border-radius: 6px; background: var(--panel); }
table { border-collapse: collapse; font-size: .87rem; font-variant-numeric: tabular-nums; }
th, td { padding: .4rem .75rem; text-align: left; vertical-align: top; border-bottom: 1px solid var(--line); }
tr:last-child > * { border-bottom: 0; }
thead th { color: var(--soft); font-weight: 600; background: var(--wash); white-space: nowrap; }
tbody th { font-weight: 500; position: sticky; left: 0; background: var(--panel); min-width: 6rem; max-width: 22rem; overflow-wrap: break-word; }
td { max-width: 26rem; overflow-wrap: break-word; }
td.number { text-align: right; white-space: nowrap; }
th.number { text-align: right; }
td.differs { background: var(--mark); } td.fact { white-space: nowrap; }
.best { color: var(--good); font-weight: 700; }
.best::after { content: " ★"; }
.key { display: inline-block; width: .8em; height: .8em; border-radius: 2px; margin-right: .45em; vertical-align: -.05em; }
.verdict { border-left: 3px solid var(--c0); padding: .1rem 0 .1rem .8rem; margin: .8rem 0; }
.note { border-left: 3px solid var(--c1); padding: .1rem 0 .1rem .8rem; }
.controls { position: sticky; top: 0; z-index: 2; background: var(--ground); padding: .5rem 0; display: flex; flex-wrap: wrap; gap: .4rem; align-items: center; }
button {
  font: inherit; font-size: .84rem; color: var(--ink); background: var(--panel); border: 1px solid var(--line);
  border-radius: 5px; padding: .2rem .65rem; cursor: pointer; max-width: 100%; overflow-wrap: anywhere; text-align: left;
}
button:hover { border-color: var(--soft); }
button:focus-visible, summary:focus-visible { outline: 2px solid var(--c0); outline-offset: 2px; }
button[aria-pressed="true"].switch { background: var(--wash); border-color: var(--soft); }
button.run[aria-pressed="false"] { opacity: .55; text-decoration: line-through; }
.panels { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fill, minmax(min(100%, 22rem), 1fr)); }
figcaption { padding: .3rem 0 .2rem; }
figure { margin: 0; border: 1px solid var(--line); border-radius: 6px; padding: .7rem .8rem .4rem; background: var(--panel); position: relative; min-width: 0; break-inside: avoid; }
.panel-head { display: flex; justify-content: space-between; align-items: center; gap: .5rem; min-height: 1.8rem; }
svg { display: block; width: 100%; height: auto; }
svg { overflow: visible; }
svg text { fill: var(--soft); font-size: 12.5px; font-family: inherit; }
.grid { stroke: var(--grid); stroke-width: 1; }
.cross { stroke: var(--soft); stroke-width: 1; stroke-dasharray: 2 3; }
.series polyline { fill: none; stroke: currentColor; stroke-width: 1.6; stroke-linejoin: round; stroke-linecap: round; }
.series.train polyline { stroke-width: 1.1; opacity: .75; }
.series circle { fill: currentColor; }
.series.train circle { opacity: .75; }
.d1 polyline { stroke-dasharray: 6 3; } .d2 polyline { stroke-dasharray: 2 3; }
.reading {
  position: absolute; top: calc(100% - .4rem); z-index: 3; pointer-events: none; padding: .35rem .6rem; max-width: 85%; font-size: .8rem; line-height: 1.4;
  background: var(--panel); border: 1px solid var(--soft); border-radius: 5px; font-variant-numeric: tabular-nums;
}
.reading div { overflow-wrap: anywhere; }
pre { margin: 0; padding: .8rem; overflow: auto; max-height: 32rem; font: .8rem/1.45 ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; white-space: pre-wrap; overflow-wrap: anywhere; background: var(--wash); border-radius: 5px; }
.command { display: flex; gap: .6rem; align-items: flex-start; margin: .4rem 0 .8rem; } .command pre { flex: 1; min-width: 0; }
details { margin: .7rem 0; } summary { cursor: pointer; color: var(--soft); font-size: .9rem; padding: .15rem 0; } details > *:not(summary) { margin-top: .5rem; }
.pictures { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fill, minmax(min(100%, 28rem), 1fr)); align-items: start; margin-bottom: 1rem; }
.pictures img { width: 100%; height: auto; display: block; border-radius: 3px; background: #fff; }
.split { display: grid; grid-template-columns: minmax(6rem, 14rem) 1fr; gap: .35rem .8rem; align-items: center; margin-bottom: .6rem; font-size: .87rem; overflow-wrap: anywhere; }
.split.alone { grid-template-columns: 1fr; }
.split svg { height: 1.3rem; border-radius: 3px; }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1.1rem; font-size: .84rem; margin: .3rem 0 .8rem; }
.script-only { display: none; } .with-script .script-only { display: initial; } .with-script .controls.script-only { display: flex; }
@media (max-width: 40rem) {
  tbody th { max-width: 9rem; } th, td { padding: .35rem .5rem; } .controls { position: static; }
  .split { grid-template-columns: 1fr; gap: .15rem; } .split svg { margin-bottom: .4rem; }
}
@media print {
  :root { --ground: #fff; --panel: #fff; --ink: #000; --soft: #444; --line: #bbb; --wash: #fff; --grid: #ddd; --mark: #fff4cf; }
  body { padding: 0; font-size: 11px; max-width: none; } .with-script .controls.script-only, button, .reading { display: none !important; }
  .scroll { overflow: visible; } pre { max-height: none; } h2 { break-after: avoid; } tr { break-inside: avoid; }
}
""" + "".join(
    f".c{i} {{ color: var(--c{i}); }} .k{i} {{ background: var(--c{i}); }} .f{i} {{ fill: var(--c{i}); }}\n"
    for i in range(12)
)
