"""Settings of the documentation site: `make docs` builds it into build/docs.

The pages stay plain Markdown that reads well on a code host. Two things are added while the site is built: the table of
contents, from the links of docs/index.md, and the API reference, from the docstrings (docs/site_sources.py).
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import site_sources

import drumline

project = "Drumline"
author = "The Drumline authors"
project_copyright = author
version = release = drumline.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc"]
source_suffix = {".md": "markdown"}
root_doc = "index"
exclude_patterns = ["_build"]

myst_heading_anchors = 4  # links such as page.md#heading, as code hosts form them
nitpicky = True
nitpick_ignore_regex = [(r"py:.*", r".*")]  # types in signatures that have no page of their own, such as torch's

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_class_signature = "mixed"
suppress_warnings = ["ref.python"]  # a field called `bytes` is no rival of the type
python_use_unqualified_type_names = True
add_module_names = False
maximum_signature_line_length = 88

html_theme = "furo"
html_title = f"Drumline {version}"
html_show_sphinx = False
html_copy_source = False
html_show_sourcelink = False


def setup(app: object) -> dict[str, bool]:
    """Add the contents and the API reference to the pages, and read docstrings as the plain text that they are."""
    app.connect("source-read", site_sources.complete_page)  # type: ignore[attr-defined]
    app.connect("autodoc-process-docstring", site_sources.docstring_to_rst)  # type: ignore[attr-defined]
    return {"parallel_read_safe": True, "parallel_write_safe": True}
