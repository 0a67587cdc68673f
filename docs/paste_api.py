"""Write the tables of public names in the pages of the Python interface anew, from the docstrings.

python docs/paste_api.py
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from site_sources import API_BLOCK, api_table

PAGES = ("api.md", "api-messages.md", "api-theory.md")


def pasted(text: str) -> str:
    """The page with the tables that the docstrings make."""
    return API_BLOCK.sub(
        lambda block: f"<!-- api: {block[1]} -->\n{api_table(importlib.import_module(block[1]))}<!-- /api -->", text
    )


if __name__ == "__main__":
    for name in PAGES:
        page = Path(__file__).with_name(name)
        page.write_text(pasted(page.read_text(encoding="utf-8")), encoding="utf-8")
