"""The script of the HTML pages, and the policy that allows a script and nothing else."""

from __future__ import annotations

import base64
import hashlib

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
    const texts = all("text.in");
    // All sizes are read before anything is changed: thousands of layouts would take seconds.
    const hidden = texts.map((text) => {
      if (!lengths.has(text)) lengths.set(text, text.getComputedTextLength());
      return lengths.get(text) + 2 * text.x.baseVal[0].value > text.ownerSVGElement.width.baseVal.value;
    });
    texts.forEach((text, i) => text.setAttribute("visibility", hidden[i] ? "hidden" : "inherit"));
  };

  // The timelines zoom and scroll together.
  const pans = all(".pan");
  let zoom = 1;
  const rescale = (factor, at) => {
    const before = zoom;
    zoom = factor ? Math.max(1, Math.min(64, zoom * factor)) : 1;
    for (const pan of pans) {
      const fixed = at === undefined ? pan.clientWidth / 2 : at;
      const place = (pan.scrollLeft + fixed) / before;
      pan.style.setProperty("--zoom", zoom);
      pan.classList.toggle("zoomed", zoom >= 4);
      pan.scrollLeft = place * zoom - fixed;
    }
    fit();
  };
  for (const pan of pans) {
    pan.addEventListener("scroll", () => {
      for (const other of pans) if (other.scrollLeft !== pan.scrollLeft) other.scrollLeft = pan.scrollLeft;
    });
  }
  for (const tools of all(".tools, button[data-copy]")) tools.hidden = false;
  for (const button of all("button[data-zoom]")) {
    button.addEventListener("click", () => rescale(Number(button.dataset.zoom)));
  }
  const keys = { "+": 2, "=": 2, "-": 0.5, "0": 0 };
  for (const pan of pans) {
    pan.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey || !(event.key in keys)) return;
      rescale(keys[event.key]);
      event.preventDefault();
    });
    // With Ctrl, as on maps: without it the wheel scrolls the page.
    pan.addEventListener("wheel", (event) => {
      if (!event.ctrlKey || !event.deltaY) return;
      rescale(event.deltaY < 0 ? 1.25 : 0.8, event.clientX - pan.getBoundingClientRect().left);
      event.preventDefault();
    }, { passive: false });
    pan.addEventListener("dblclick", (event) => rescale(2, event.clientX - pan.getBoundingClientRect().left));
  }

  // A table is copied with tabs between its cells, as spreadsheets paste it.
  for (const button of all("button[data-copy]")) {
    button.addEventListener("click", async () => {
      const table = button.parentNode.querySelector("table");
      const text = all("tr", table).map((row) => [...row.cells].map((cell) => {
        const whole = cell.querySelector("[data-tip]");
        return (whole && cell.children.length === 1 ? whole.dataset.tip : cell.textContent).trim();
      }).join("\\t")).join("\\n");
      try {
        await navigator.clipboard.writeText(text);
        button.textContent = "Copied";
      } catch {
        getSelection().selectAllChildren(table);
        button.textContent = "Selected: press Ctrl+C";
      }
    });
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


def policy(script: str) -> str:
    """The content security policy: the page may run its own script and nothing else, and fetch nothing."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'; "
        f"script-src 'sha256-{digest}'"
    )


POLICY = policy(SCRIPT)
"""Content security policy of pages with the common script."""
