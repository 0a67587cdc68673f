"""A headless Chromium for the tests of the page: its console, and the document after the script."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

needs_browser = pytest.mark.skipif(BROWSER is None, reason="no chromium, chromium-browser or google-chrome here")

_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-quic",
    "--no-first-run",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--enable-logging=stderr",
    "--v=0",
)


def visit(page: Path, *, width: int = 1280, dark: bool = False) -> tuple[str, list[str]]:
    """The document after its script ran, and the lines of the console."""
    assert BROWSER is not None
    with tempfile.TemporaryDirectory(prefix="browser-", ignore_cleanup_errors=True) as profile:
        done = subprocess.run(
            [
                BROWSER,
                *_FLAGS,
                f"--user-data-dir={profile}",
                f"--blink-settings=preferredColorScheme={int(not dark)}",
                f"--window-size={width},900",
                "--dump-dom",
                page.as_uri(),
            ],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
    return done.stdout, [line for line in done.stderr.splitlines() if re.search(r"\bCONSOLE\b", line)]


def opened(page: Path, script: str) -> Path:
    """A copy of the page without its policy that also runs a script, which acts as the mouse."""
    text = page.read_text(encoding="utf-8")
    lifted = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", text, count=1)
    assert lifted != text
    copy = page.with_name("opened.html")
    copy.write_text(lifted.replace("</body>", f"<script>{script}</script></body>"), encoding="utf-8")
    return copy
