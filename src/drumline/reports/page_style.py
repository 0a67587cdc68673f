"""Style and frame of the HTML pages."""

from __future__ import annotations

from collections.abc import Iterable

from .markup import Content, Html, join, tag
from .page_script import SCRIPT, policy

COLOURS = """
:root {
  color-scheme: light dark;
  --paper: #fdfdfb; --panel: #f5f5f1; --ink: #1d2126; --soft: #59616b; --line: #dfdfd9; --rule: #c3c4be;
  --link: #1f5f99; --mark: #eef3f9; --idle: #e9e9e3; --hatch: #d3d3cb;
  --good: #1b6295; --fair: #8a5a00; --poor: #a8330d;
  --forward: #7fb2dc; --backward: #27588e; --recompute: #a9b8c8; --communication: #e39a2d; --optimizer: #25806e;
  --overhead: #a7a69d; --data: #b99ac4; --parameters: #7fb2dc; --gradients: #27588e; --activations: #cc8fb0;
  --other: #a7a69d; --on-light: #14212e; --on-dark: #ffffff;
  --heat0: #1b4f86; --heat1: #2d67a2; --heat2: #639ac9; --heat3: #8fb7db; --heat4: #b6d0e8; --heat5: #d5e4f1;
  --heat6: #e9f0f7; --heat-ink0: #ffffff; --heat-ink1: #ffffff; --heat-ink2: #0c1a27; --heat-ink3: #0c1a27;
  --heat-ink4: #0c1a27; --heat-ink5: #0c1a27; --heat-ink6: #0c1a27;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #15181c; --panel: #1d2126; --ink: #e6e7e4; --soft: #a2a9b1; --line: #2e343a; --rule: #4a525a;
    --link: #8cc0ee; --mark: #1f2c3a; --idle: #22272c; --hatch: #3d454d;
    --good: #7fbdf0; --fair: #e5b454; --poor: #f59a78;
    --forward: #8bbbe2; --backward: #4176af; --recompute: #8292a3; --communication: #e0a044; --optimizer: #298270;
    --overhead: #8b8c86; --data: #b79cc1; --parameters: #8bbbe2; --gradients: #4176af; --activations: #cf97b5;
    --other: #8b8c86;
    --heat0: #b3d6f7; --heat1: #8cbfee; --heat2: #69a3d4; --heat3: #3b6d99; --heat4: #305a80; --heat5: #284a69;
    --heat6: #233c53; --heat-ink0: #0c1a27; --heat-ink1: #0c1a27; --heat-ink2: #0c1a27; --heat-ink3: #ffffff;
    --heat-ink4: #ffffff; --heat-ink5: #ffffff; --heat-ink6: #ffffff;
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
rect.s.hatch { fill: url(#idle); }
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
p { margin: 0 0 .8rem; max-width: 46rem; overflow-wrap: anywhere; }
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
.facts ul { margin: 0; padding-left: 1.1em; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(15rem, 1fr)); gap: 1px; margin: 1.1rem 0 1.4rem;
  background: var(--line); border: 1px solid var(--line); border-radius: 6px; overflow: hidden; }
.card { background: var(--paper); padding: .85rem 1.1rem .9rem; }
.card h3 { margin: 0 0 .3rem; color: var(--soft); font-weight: 500; font-size: .85rem; }
.card .big { font-size: 1.6rem; line-height: 1.2; font-weight: 600; letter-spacing: -.01em; }
.card p { margin: .2rem 0 0; font-size: .88rem; color: var(--soft); }
.big, td, tfoot th, .facts, svg { font-variant-numeric: tabular-nums lining-nums; }
.level { font-weight: 600; white-space: nowrap; } .card .level { display: inline-block; white-space: normal; }
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
.heat { fill: var(--k); } svg text.heat-text { fill: var(--i); pointer-events: none; }
svg text.heat-text.unfit { fill: var(--soft); paint-order: stroke; stroke: var(--idle); stroke-width: 3px; }
.best { fill: none; stroke: var(--poor); stroke-width: 2.5px; pointer-events: none; }
.h0 { --k: var(--heat0); --i: var(--heat-ink0); } .h1 { --k: var(--heat1); --i: var(--heat-ink1); }
.h2 { --k: var(--heat2); --i: var(--heat-ink2); } .h3 { --k: var(--heat3); --i: var(--heat-ink3); }
.h4 { --k: var(--heat4); --i: var(--heat-ink4); } .h5 { --k: var(--heat5); --i: var(--heat-ink5); }
.h6 { --k: var(--heat6); --i: var(--heat-ink6); }
.point { fill: var(--k); fill-opacity: .8; stroke: var(--paper); stroke-width: 1px; }
.point.chosen { fill-opacity: 1; stroke: var(--ink); stroke-width: 2px; }
.path { fill: none; stroke: var(--k, var(--ink)); stroke-width: 1.7px; stroke-linejoin: round; }
.path.dashed { stroke-dasharray: 6 4; }
.key.dashed { border-top-style: dashed; } .key.point { width: .8em; height: .8em; border: 0; border-radius: 50%; }
.key.k-line { border-top-color: var(--k); } .key.point { background: var(--k); }
.fault { stroke: var(--poor); stroke-width: 2px; } .fault-mark { fill: var(--poor); }
pre { font: .85em/1.45 ui-monospace, SFMono-Regular, Menlo, Consolas, "Liberation Mono", monospace; overflow-x: auto; }
td ul { margin: .2rem 0 0; padding-left: 1.1em; }
.data { margin: 0 0 1rem; } .data > button { float: right; margin: -1.5rem 0 0; }
.bars { width: 42%; } .edges { display: flex; justify-content: space-between; }
table.narrow { width: auto; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr)); gap: 1.4rem 2.5rem; }
.curve { fill: none; stroke: var(--backward); stroke-width: 1.6px; stroke-linejoin: round; }
.dot, svg text.dot { fill: var(--backward); } .faint { stroke-opacity: .45; }
.guess { stroke: var(--communication); stroke-width: 1.5px; stroke-dasharray: 6 4; }
.guess.solid { stroke: var(--ink); stroke-width: 2px; stroke-dasharray: none; }
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
  :root { --heat0: #1b4f86; --heat1: #2d67a2; --heat2: #639ac9; --heat3: #8fb7db; --heat4: #b6d0e8; --heat5: #d5e4f1;
    --heat6: #e9f0f7; --heat-ink0: #fff; --heat-ink1: #fff; --heat-ink2: #000; --heat-ink3: #000; --heat-ink4: #000;
    --heat-ink5: #000; --heat-ink6: #000; --good: #1b6295; --fair: #8a5a00; --poor: #a8330d;
    --paper: #fff; --panel: #fff; --ink: #000; --soft: #444; --line: #ccc; --rule: #999; --idle: #eee;
    --hatch: #ccc; --mark: #f2f2f2; --link: #000; color-scheme: light; }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
  body { font-size: 10pt; }
  nav, .tools, #tip, .data > button { display: none; }
  section { margin-top: 1.6rem; }
  figure, .cards, tr, h2, h3 { break-inside: avoid; }
  h2, h3 { break-after: avoid; }
  .scroll, .pan { overflow: visible; }
  details::details-content { content-visibility: visible; block-size: auto; } summary { display: none; }
}
"""
)


def section(key: str, title: str, *inside: Content) -> Html:
    """A section of a page; its anchor is the key in small letters."""
    name = f"title-{key.lower()}"
    return tag("section", tag("h2", title, id=name), *inside, id=key.lower(), aria_labelledby=name)


def navigation(keys: Iterable[str]) -> Html:
    """Links to the sections."""
    return tag("nav", *(tag("a", key, href=f"#{key.lower()}") for key in keys), aria_label="Sections")


def data_table(table: Html, *, title: str = "As a table") -> Html:
    """The table behind a picture: folded, opened by keyboard, with a button that copies it."""
    button = tag("button", "Copy", type="button", data_copy=True, hidden=True)
    return tag("details", tag("summary", title), button, table, class_="data")


def html_document(title: str, *body: Content, style: str = STYLE, script: str = SCRIPT) -> Html:
    """A self-contained HTML page with the style, the script and the tooltip."""
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        Html(f'<meta http-equiv="Content-Security-Policy" content="{policy(script)}">'),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", title),
        tag("link", rel="icon", href="data:,"),
        tag("style", Html(style)),
    )
    end = (tag("div", id="tip", role="status", hidden=True), tag("script", Html(script)))
    return join(Html("<!doctype html>\n"), tag("html", head, tag("body", *body, *end), lang="en"), Html("\n"))
