"""Style, script and frame of the HTML pages. Constants, so that the page can state the script's digest."""

from __future__ import annotations

import base64
import hashlib

from .markup import Content, Html, join, tag

COLOURS = """
:root {
  color-scheme: light dark;
  --paper: #fdfdfb; --panel: #f5f5f1; --ink: #1d2126; --soft: #59616b; --line: #dfdfd9; --rule: #c3c4be;
  --link: #1f5f99; --mark: #eef3f9; --idle: #e9e9e3; --hatch: #d3d3cb;
  --good: #1b6295; --fair: #8a5a00; --poor: #a8330d;
  --forward: #7fb2dc; --backward: #27588e; --recompute: #a9b8c8; --communication: #e39a2d; --optimizer: #25806e;
  --overhead: #a7a69d; --data: #b99ac4; --parameters: #7fb2dc; --gradients: #27588e; --activations: #cc8fb0;
  --other: #a7a69d; --on-light: #14212e; --on-dark: #ffffff;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #15181c; --panel: #1d2126; --ink: #e6e7e4; --soft: #a2a9b1; --line: #2e343a; --rule: #4a525a;
    --link: #8cc0ee; --mark: #1f2c3a; --idle: #22272c; --hatch: #3d454d;
    --good: #7fbdf0; --fair: #e5b454; --poor: #f59a78;
    --forward: #8bbbe2; --backward: #4176af; --recompute: #8292a3; --communication: #e0a044; --optimizer: #298270;
    --overhead: #8b8c86; --data: #b79cc1; --parameters: #8bbbe2; --gradients: #4176af; --activations: #cf97b5;
    --other: #8b8c86;
  }
}
"""
"""Custom properties, for light and dark screens."""

DRAWING = """svg { display: block; overflow: hidden; }
svg text { font: 11px/1 system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", Arial, sans-serif;
  fill: var(--soft); }
svg .strong { fill: var(--ink); font-weight: 600; }
svg .rule { stroke: var(--rule); } svg .grid { stroke: var(--line); }
svg.inline { display: inline-block; vertical-align: middle; }
.pair { display: flex; } .pair > :first-child { flex: none; } .pair > :last-child { flex: 1; min-width: 0; }
.pan { overflow-x: auto; overflow-y: hidden; }
.pan > svg { width: calc(100% * var(--zoom, 1)); min-width: 100%; }
.paper { fill: var(--paper); }
.lane { fill: var(--idle); } .hatch { fill: url(#idle); } #idle path { stroke: var(--hatch); }
.s { fill: var(--k, var(--overhead)); }
rect.s.room { stroke: var(--paper); stroke-width: 1px; }
svg text.in { fill: var(--on-light); font-size: 10.5px; pointer-events: none; }
svg text.in.k-backward, svg text.in.k-gradients, svg text.in.k-optimizer { fill: var(--on-dark); }
.end { stroke: var(--ink); stroke-width: 1px; stroke-dasharray: 3 3; opacity: .75; }
.minor { display: none; } .zoomed .minor { display: inline; }
.k-forward { --k: var(--forward); } .k-backward { --k: var(--backward); } .k-recompute { --k: var(--recompute); }
.k-communication { --k: var(--communication); } .k-optimizer { --k: var(--optimizer); } .k-data { --k: var(--data); }
.k-overhead { --k: var(--overhead); } .k-parameters { --k: var(--parameters); }
.k-gradients { --k: var(--gradients); } .k-activations { --k: var(--activations); } .k-other { --k: var(--other); }
.swatch.k-idle { background: repeating-linear-gradient(135deg, var(--hatch) 0 1.5px, var(--idle) 1.5px 4px); }
"""
"""Rules of the SVG drawings; they also style a drawing in a file of its own."""

STYLE = (
    COLOURS
    + """* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; text-size-adjust: 100%; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.55 system-ui, -apple-system, "Segoe UI",
  Roboto, "Helvetica Neue", "Liberation Sans", Arial, sans-serif; }
main, header, footer { max-width: 68rem; margin: 0 auto; padding: 0 1.5rem; }
header { padding-top: 2.75rem; }
h1 { font-size: 1.05rem; font-weight: 600; color: var(--soft); margin: 0; letter-spacing: .01em;
  overflow-wrap: anywhere; }
h1 b { color: var(--ink); }
.verdict { font-size: clamp(1.45rem, 1rem + 2.1vw, 2.15rem); line-height: 1.22; font-weight: 600; margin: .6rem 0 .9rem;
  letter-spacing: -.012em; max-width: 34em; text-wrap: balance; }
h2 { font-size: 1.3rem; line-height: 1.3; font-weight: 650; letter-spacing: -.008em; margin: 0 0 .35rem; }
h3 { font-size: .95rem; font-weight: 650; margin: 1.5rem 0 .45rem; }
h3 small { font-size: 1em; font-weight: 400; color: var(--soft); }
section { margin: 3.1rem 0 0; padding-top: 1.5rem; border-top: 1px solid var(--line); }
p { margin: 0 0 .8rem; max-width: 46rem; }
.lead, .note, figcaption { color: var(--soft); }
.note, figcaption { font-size: .85rem; line-height: 1.5; margin: .5rem 0 0; max-width: 46rem; }
a { color: var(--link); text-underline-offset: .15em; }
nav { display: flex; flex-wrap: wrap; gap: .25rem 1.2rem; margin: 1.4rem 0 0; font-size: .88rem; }
code { font: .9em/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, "Liberation Mono", monospace;
  overflow-wrap: break-word; }
.facts { display: grid; grid-template-columns: max-content minmax(0, 1fr); gap: .2rem 1.1rem; margin: 1rem 0 0;
  font-size: .9rem; }
.facts dt { color: var(--soft); }
.facts dd { margin: 0; overflow-wrap: anywhere; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(15rem, 1fr)); gap: 1px; margin: 1.1rem 0 1.4rem;
  background: var(--line); border: 1px solid var(--line); border-radius: 6px; overflow: hidden; }
.card { background: var(--paper); padding: .85rem 1.1rem .9rem; }
.card h3 { margin: 0 0 .3rem; color: var(--soft); font-weight: 500; font-size: .85rem; }
.card .big { font-size: 1.6rem; line-height: 1.2; font-weight: 600; letter-spacing: -.01em; }
.card p { margin: .2rem 0 0; font-size: .88rem; color: var(--soft); }
.big, td, tfoot th, .facts, svg { font-variant-numeric: tabular-nums lining-nums; }
.level { font-weight: 600; white-space: nowrap; }
.good { color: var(--good); } .fair { color: var(--fair); } .poor { color: var(--poor); }
.scroll { overflow-x: auto; margin: .6rem 0 .4rem; background:
  linear-gradient(to right, var(--paper) 50%, transparent) left / 3rem 100% no-repeat local,
  linear-gradient(to left, var(--paper) 50%, transparent) right / 3rem 100% no-repeat local,
  linear-gradient(to right, var(--rule), transparent) left / .6rem 100% no-repeat,
  linear-gradient(to left, var(--rule), transparent) right / .6rem 100% no-repeat; }
table { border-collapse: collapse; width: 100%; font-size: .88rem; line-height: 1.4; }
th, td { text-align: left; vertical-align: top; padding: .36rem .9rem .36rem 0; border-bottom: 1px solid var(--line);
  font-weight: 400; }
th:last-child, td:last-child { padding-right: 0; }
thead th { color: var(--soft); font-size: .8rem; vertical-align: bottom; white-space: nowrap;
  border-bottom: 1px solid var(--rule); }
tfoot th, tfoot td { font-weight: 600; border-bottom: 0; border-top: 1px solid var(--rule); }
th.num, td.num { text-align: right; white-space: nowrap; }
td.tight, th.tight { white-space: nowrap; }
td.wide { min-width: 15rem; color: var(--soft); }
th.plan, td.plan { min-width: 11rem; max-width: 24rem; }
tr.marked > * { background: var(--mark); }
tr.marked th:first-child { box-shadow: inset 3px 0 var(--link); padding-left: .6rem; }
.swatch { display: inline-block; width: .72em; height: .72em; border-radius: 2px; margin-right: .5em;
  background: var(--k, var(--other)); }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1.1rem; font-size: .82rem; color: var(--soft); margin: .6rem 0 0;
  padding: 0; list-style: none; }
.cut { border-bottom: 1px dotted var(--rule); cursor: help; }
.unseen { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); white-space: nowrap; }
figure { margin: 0; }
"""
    + DRAWING
    + """.bar { fill: var(--rule); } .over { fill: var(--good); } .under { fill: var(--poor); }
.bars { width: 42%; } .edges { display: flex; justify-content: space-between; }
table.narrow { width: auto; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr)); gap: 1.4rem 2.5rem; }
.curve { fill: none; stroke: var(--backward); stroke-width: 1.6px; stroke-linejoin: round; }
.dot, svg text.dot { fill: var(--backward); } .faint { stroke-opacity: .45; }
.guess { stroke: var(--communication); stroke-width: 1.5px; stroke-dasharray: 6 4; }
.middle { stroke: var(--ink); stroke-width: 1px; }
.limit { stroke: var(--poor); stroke-width: 2px; }
.cursor { stroke: var(--ink); visibility: hidden; }
.key { display: inline-block; width: 1.5em; height: 0; border-top: 2px solid var(--ink); vertical-align: middle;
  margin-right: .5em; }
.key.guess { border-top: 2px dashed var(--communication); } .key.curve { border-top-color: var(--backward); }
.row { display: flex; justify-content: space-between; align-items: flex-start; gap: 1rem; }
.tools { display: flex; flex: none; gap: .3rem; }
button { font: inherit; font-size: .85rem; line-height: 1; min-width: 2.1rem; padding: .45rem .6rem; color: var(--ink);
  background: var(--panel); border: 1px solid var(--line); border-radius: 5px; cursor: pointer; }
button:hover { border-color: var(--rule); }
:focus-visible { outline: 2px solid var(--link); outline-offset: 2px; }
#tip { position: fixed; z-index: 9; max-width: min(22rem, calc(100vw - 1rem)); padding: .4rem .6rem; font-size: .8rem;
  line-height: 1.4; color: var(--paper); background: var(--ink); border-radius: 4px; pointer-events: none;
  white-space: pre-line; overflow-wrap: anywhere; }
[hidden] { display: none !important; }
details > summary { cursor: pointer; color: var(--link); font-size: .88rem; margin: .8rem 0 0; }
footer { margin-top: 3rem; padding-top: 1.1rem; padding-bottom: 3rem; color: var(--soft); font-size: .82rem; }
footer p { max-width: none; border-top: 1px solid var(--line); padding-top: 1.1rem; }
@media (max-width: 40rem) {
  body { font-size: 15px; }
  main, header, footer { padding-left: 1rem; padding-right: 1rem; }
  header { padding-top: 1.6rem; }
  section { margin-top: 2.3rem; }
  table { font-size: .8rem; }
  th, td { padding-right: .5rem; }
  td.wide, th.plan, td.plan { min-width: 0; }
  .bars, .extra { display: none; }
  .stack thead { display: none; }
  .stack tr { display: grid; grid-template-columns: auto minmax(0, 1fr) auto; column-gap: .7rem;
    padding: .45rem 0; border-bottom: 1px solid var(--line); }
  .stack tr.marked { background: var(--mark); box-shadow: inset 3px 0 var(--link); padding-left: .6rem; }
  .stack tr > * { border: 0; padding: 0; }
  .stack tr.marked > *, .stack tr.marked th:first-child { background: none; box-shadow: none; padding: 0; }
  .stack td.right { grid-area: 2 / 3; } .stack td.fit { grid-area: 2 / 2; }
  .stack td.wide { grid-column: 2 / -1; }
  .stack.two tr { grid-template-columns: minmax(0, 1fr) auto; } .stack.two td.wide { grid-column: 1 / -1; }
  header .facts { grid-template-columns: minmax(0, 1fr); gap: 0; }
  header .facts dt { font-size: .8rem; margin-top: .5rem; }
}
@media print {
  :root { --paper: #fff; --panel: #fff; --ink: #000; --soft: #444; --line: #ccc; --rule: #999; --idle: #eee;
    --hatch: #ccc; --mark: #f2f2f2; --link: #000; color-scheme: light; }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
  body { font-size: 10pt; }
  nav, .tools, #tip { display: none; }
  section { margin-top: 1.6rem; }
  figure, .cards, tr, h2, h3 { break-inside: avoid; }
  h2, h3 { break-after: avoid; }
  .scroll, .pan { overflow: visible; }
}
"""
)

SCRIPT = """
(() => {
  "use strict";
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  const tip = document.getElementById("tip");

  const show = (text, x, y) => {
    tip.textContent = text;
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    tip.style.left = Math.max(8, Math.min(x + 12, innerWidth - box.width - 8)) + "px";
    tip.style.top = (y + 18 + box.height > innerHeight ? Math.max(8, y - box.height - 10) : y + 18) + "px";
  };
  const hide = () => { tip.hidden = true; };

  // The browser's own tooltips are slow, and absent on phones.
  for (const title of all(".s > title")) {
    title.parentNode.dataset.tip = title.textContent;
    title.remove();
  }
  for (const cut of all(".cut")) {
    cut.dataset.tip = cut.title;
    cut.setAttribute("aria-label", cut.title);
    cut.removeAttribute("title");
    cut.tabIndex = 0;
    cut.addEventListener("focus", () => {
      const box = cut.getBoundingClientRect();
      show(cut.dataset.tip, box.left, box.bottom - 12);
    });
    cut.addEventListener("blur", hide);
  }
  const point = (event) => {
    const target = event.target.closest("[data-tip]");
    if (target) show(target.dataset.tip, event.clientX, event.clientY);
    else if (!event.target.closest("[data-points]")) hide();
  };
  document.addEventListener("pointermove", point);
  document.addEventListener("pointerdown", point);
  document.addEventListener("scroll", hide, true);
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") hide(); });

  // A name wider than its span is shown in the tooltip only.
  const lengths = new WeakMap();
  const fit = () => {
    for (const text of all("text.in")) {
      if (!lengths.has(text)) lengths.set(text, text.getComputedTextLength());
      const room = text.ownerSVGElement.width.baseVal.value;
      text.setAttribute("visibility", lengths.get(text) + 2 * text.x.baseVal[0].value > room ? "hidden" : "inherit");
    }
  };

  // The timelines zoom and scroll together.
  const pans = all(".pan");
  let zoom = 1;
  const rescale = (factor) => {
    const before = zoom;
    zoom = factor ? Math.max(1, Math.min(64, zoom * factor)) : 1;
    for (const pan of pans) {
      const middle = (pan.scrollLeft + pan.clientWidth / 2) / before;
      pan.style.setProperty("--zoom", zoom);
      pan.classList.toggle("zoomed", zoom >= 4);
      pan.scrollLeft = middle * zoom - pan.clientWidth / 2;
    }
    fit();
  };
  for (const pan of pans) {
    pan.addEventListener("scroll", () => {
      for (const other of pans) if (other.scrollLeft !== pan.scrollLeft) other.scrollLeft = pan.scrollLeft;
    });
  }
  for (const tools of all(".tools")) tools.hidden = false;
  for (const button of all("button[data-zoom]")) {
    button.addEventListener("click", () => rescale(Number(button.dataset.zoom)));
  }

  // A chart shows the values of the step under the pointer.
  for (const chart of all("[data-points]")) {
    const points = JSON.parse(chart.dataset.points);
    const cursor = chart.querySelector(".cursor");
    const follow = (event) => {
      const box = chart.getBoundingClientRect();
      const at = 100 * (event.clientX - box.left) / box.width;
      let best = points[0];
      for (const p of points) if (Math.abs(p[0] - at) < Math.abs(best[0] - at)) best = p;
      cursor.setAttribute("x1", best[0] + "%");
      cursor.setAttribute("x2", best[0] + "%");
      cursor.style.visibility = "visible";
      show(best[1], event.clientX, event.clientY);
    };
    chart.addEventListener("pointermove", follow);
    chart.addEventListener("pointerdown", follow);
    chart.addEventListener("pointerleave", () => { cursor.style.visibility = "hidden"; hide(); });
  }

  new ResizeObserver(fit).observe(document.querySelector("main"));
  fit();
  document.documentElement.dataset.ready = "yes";
})();
"""

POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'; "
    f"script-src 'sha256-{base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()}'"
)
"""The page may run its own script and nothing else, and fetch nothing."""


def html_document(title: str, *body: Content, style: str = STYLE) -> Html:
    """A self-contained HTML page with the style, the script and the tooltip."""
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        Html(f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", title),
        tag("link", rel="icon", href="data:,"),
        tag("style", Html(style)),
    )
    end = (tag("div", id="tip", role="status", hidden=True), tag("script", Html(SCRIPT)))
    return join(Html("<!doctype html>\n"), tag("html", head, tag("body", *body, *end), lang="en"), Html("\n"))
