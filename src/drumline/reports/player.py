"""Pages that play step by step: controls, their style and their script. Without JavaScript all steps are a list."""

from __future__ import annotations

from .markup import Content, Html, tag
from .page_script import SCRIPT
from .page_style import STYLE, html_document

PLAYER_STYLE = (
    STYLE
    + """
.player { display: flex; flex-wrap: wrap; align-items: center; gap: .4rem; position: sticky; top: 0; z-index: 2;
  padding: .6rem 0; background: var(--paper); border-bottom: 1px solid var(--line); }
.player input { flex: 1 1 10rem; min-width: 6rem; accent-color: var(--link); }
.player output { min-width: 7.5rem; font-size: .88rem; color: var(--soft); font-variant-numeric: tabular-nums; }
.player button[aria-pressed="true"] { background: var(--mark); border-color: var(--link); }
ol.steps { list-style: none; margin: 1rem 0 0; padding: 0; }
.step { margin: 0 0 1.6rem; } .step h3 { margin-top: .6rem; }
.sends { font: .88rem/1.6 ui-monospace, SFMono-Regular, Menlo, Consolas, "Liberation Mono", monospace; }
text { font: 11px/1 system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", Arial, sans-serif;
  fill: var(--soft); } text.strong { fill: var(--ink); font-weight: 600; }
.cell { fill: var(--idle); } .have { fill: var(--forward); } .full { fill: var(--optimizer); }
text.what { font-size: 10.5px; fill: var(--ink); text-anchor: middle; }
svg text.act { fill: var(--on-light); font-size: 10.5px; text-anchor: middle; pointer-events: none; }
svg text.act.k-backward, svg text.act.k-gradients, svg text.act.k-optimizer { fill: var(--on-dark); }
.got { fill: none; stroke: var(--communication); stroke-width: 2.4px; }
.sent { fill: none; stroke: var(--soft); stroke-width: 1.2px; stroke-dasharray: 3 2; }
.move { fill: none; stroke: var(--communication); stroke-width: 1.8px; stroke-dasharray: 1; }
.head { fill: var(--communication); }
.later { opacity: .45; } .now rect { stroke: var(--ink); stroke-width: 2px; }
.clock { stroke: var(--poor); stroke-width: 2px; visibility: hidden; } .playing-page .clock { visibility: visible; }
.pan > svg.fixed { width: auto; min-width: 0; }
@media (prefers-reduced-motion: no-preference) {
  .playing .move { animation: send .55s ease-out; }
  @keyframes send { from { stroke-dashoffset: 1; } to { stroke-dashoffset: 0; } }
}
@media print { .player { display: none; } .step[hidden] { display: block !important; } .later { opacity: 1; } }
"""
)

PLAYER_SCRIPT = (
    SCRIPT
    + """
(() => {
  "use strict";
  const all = (selector) => [...document.querySelectorAll(selector)];
  const steps = all(".step"), player = document.querySelector(".player"), bar = player.querySelector("input");
  const output = player.querySelector("output"), play = player.querySelector("[data-play]");
  const spans = all("[data-start]"), clock = document.querySelector(".clock");
  let at = 0, timer = 0;

  const show = (k) => {
    at = Math.max(0, Math.min(steps.length - 1, k));
    steps.forEach((step, i) => { step.hidden = i !== at; });
    bar.value = at;
    output.textContent = steps[at].dataset.name;
    bar.setAttribute("aria-valuetext", steps[at].dataset.name);
    const now = Number(steps[at].dataset.time);
    for (const span of spans) {
      const start = Number(span.dataset.start), end = Number(span.dataset.end);
      span.classList.toggle("later", start > now);
      span.classList.toggle("now", start <= now && now < end);
    }
    if (clock) {
      for (const end of ["x1", "x2"]) clock.setAttribute(end, steps[at].dataset.x);
      const pan = clock.closest(".pan");
      pan.scrollLeft = Number(steps[at].dataset.x) - pan.clientWidth / 2;
    }
  };
  const stop = () => {
    clearInterval(timer);
    timer = 0;
    play.textContent = "Play";
    play.setAttribute("aria-pressed", "false");
    document.body.classList.remove("playing");
  };
  const start = () => {
    if (at === steps.length - 1) show(0);
    timer = setInterval(() => { if (at < steps.length - 1) show(at + 1); else stop(); }, 1000);
    play.textContent = "Pause";
    play.setAttribute("aria-pressed", "true");
    document.body.classList.add("playing");
  };
  const go = { first: () => 0, back: () => at - 1, next: () => at + 1, last: () => steps.length - 1 };

  play.addEventListener("click", () => { if (timer) stop(); else start(); });
  for (const button of all("button[data-go]")) {
    button.addEventListener("click", () => { stop(); show(go[button.dataset.go]()); });
  }
  bar.addEventListener("input", () => { stop(); show(Number(bar.value)); });
  const keys = { ArrowLeft: "back", ArrowRight: "next", Home: "first", End: "last" };
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target === bar || event.target.closest(".pan")) return;
    if (event.key === " " && !event.target.closest("button, summary, a")) {
      event.preventDefault();
      if (timer) stop(); else start();
    } else if (keys[event.key]) {
      event.preventDefault();
      stop();
      show(go[keys[event.key]]());
    }
  });
  document.body.classList.add("playing-page");
  player.hidden = false;
  show(0);
})();
"""
)


def player_page(title: str, lead: Content, facts: Content, figure: Content, steps: list[Html], footer: str) -> Html:
    """A page with the controls, one figure for all steps (or none), and the steps."""
    controls = tag(
        "div",
        tag("button", "Play", type="button", data_play=True, aria_pressed="false"),
        *(
            tag("button", sign, type="button", data_go=key, aria_label=label)
            for key, sign, label in (
                ("first", "\u00ab", "First step"),
                ("back", "\u25c0", "Back"),
                ("next", "\u25b6", "Forward"),
                ("last", "\u00bb", "Last step"),
            )
        ),
        tag("input", type="range", min=0, max=len(steps) - 1, value=0, aria_label="Step"),
        tag("output", ""),
        class_="player",
        hidden=True,
    )
    header = tag("header", tag("h1", tag("b", title)), tag("p", lead, class_="verdict"), facts)
    keys = "Space plays and pauses, the arrow keys go back and forward, Home and End go to the first and last step."
    main = tag("main", controls, figure, tag("ol", *steps, class_="steps"), tag("p", keys, class_="note"))
    foot = tag("footer", tag("p", footer))
    return html_document(title, header, main, foot, style=PLAYER_STYLE, script=PLAYER_SCRIPT)
