"""The documentation site: it builds without a warning, every link and anchor leads somewhere, every public name is in it."""

from __future__ import annotations

import html.parser
import importlib
import importlib.util
import inspect
import pkgutil
import re
import subprocess
import sys
import zlib
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote, urlsplit

import pytest

import drumline.theory

pytestmark = pytest.mark.timeout(1500)  # seconds on an idle machine, minutes on an overloaded one
ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PUBLIC = (
    "drumline",
    "drumline.core.errors",
    "drumline.clusters",
    "drumline.plans",
    "drumline.models",
    "drumline.costs",
    "drumline.planner",
    "drumline.datasets",
    "drumline.comm",
    "drumline.schedules",
    "drumline.simulator",
    *(f"drumline.theory.{m.name}" for m in pkgutil.iter_modules(drumline.theory.__path__)),
)


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def build(source: Path, target: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", "-d", str(target / "trees")]
    return subprocess.run(
        [*command, *options, str(source), str(target / "html")], capture_output=True, text=True, timeout=1200
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pages in Sphinx's own theme: the same content and the same checks in half of the time."""
    target = tmp_path_factory.mktemp("site")
    done = build(DOCS, target, "-D", "html_theme=basic")
    assert done.returncode == 0, done.stderr
    return target / "html"


def test_every_page_is_built_and_every_link_leads_somewhere(site: Path) -> None:
    pages = {p.relative_to(DOCS).with_suffix(".html") for p in DOCS.rglob("*.md")}
    built = {p.relative_to(site) for p in site.rglob("*.html")}
    assert pages <= built
    assert html_faults(site) == []


def test_every_public_name_is_in_the_reference(site: Path) -> None:
    raw = (site / "objects.inv").read_bytes().split(b"\n", 4)
    entries = {line.split()[0] for line in zlib.decompress(raw[4]).decode().splitlines()}
    names = script("site_sources").documented_names
    missing = [f"{m}.{n}" for m in PUBLIC for n, _ in names(importlib.import_module(m)) if f"{m}.{n}" not in entries]
    assert missing == []
    assert {f"drumline.{name}" for name in drumline.__all__} <= entries
    page = (site / "api.html").read_text()
    assert "samples per optimizer step" in page.lower()  # a field of Job with its docstring


def test_every_public_name_has_a_docstring_and_a_row() -> None:
    paste, rows = script("paste_api"), ""
    for name in paste.PAGES:
        text = (DOCS / name).read_text()
        assert paste.pasted(text) == text, "run: python docs/paste_api.py"
        rows += text
    assert set(re.findall(r"<!-- api: (\S+) -->", rows)) == set(PUBLIC)
    bare = []
    for module in map(importlib.import_module, PUBLIC):
        for name, value in script("site_sources").documented_names(module):
            if inspect.isclass(value) or inspect.isroutine(value):
                own = vars(value).get("__doc__") if inspect.isclass(value) else value.__doc__
                if not own or own.startswith(f"{name}("):  # the text that `dataclass` writes
                    bare.append(f"{module.__name__}.{name}")
    assert bare == []


def test_contents_follow_the_links_of_the_index() -> None:
    contents = script("site_sources").contents
    text = "# T\n\n[a](a.md), [up](../x.md)\n\n## Use\n\n| [b](b.md#x) | [a](a.md) |\n```sh\n[c](c.md)\n```\n[d](log/d.md)\n"
    first, second = contents(text, captions=True).split("```\n\n")
    assert first.splitlines()[1:] == ["```{toctree}", ":hidden:", "", "a"]
    assert second.splitlines() == ["```{toctree}", ":hidden:", ":caption: Use", "", "b", "log/d", "```"]


@pytest.mark.parametrize(
    ("page", "fault"),
    [
        ("[here](#missing)\n", "missing"),
        ("[there](other.md)\n", "other"),
        ("```{eval-rst}\n.. nothing::\n```\n", "nothing"),
    ],
)
def test_faults_of_a_page_stop_the_build(page: str, fault: str, tmp_path: Path) -> None:
    source = tmp_path / "docs"
    source.mkdir()
    for name in ("conf.py", "site_sources.py"):
        (source / name).write_text((DOCS / name).read_text())
    (source / "index.md").write_text(f"# Title\n\n{page}")
    done = build(source, tmp_path, "-D", "html_theme=basic")
    assert done.returncode == 1 and fault in done.stderr


def test_dead_links_of_built_pages_are_found(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<a href="b.html#x">1</a> <a href="b.html#y">2</a> <img src="c.svg"> <a href="d.html">'
    )
    (tmp_path / "b.html").write_text('<p id="x"> <a href="https://x.org/y">')
    assert html_faults(tmp_path) == ["a.html: b.html#y", "a.html: c.svg", "a.html: d.html"]


@pytest.mark.slow
def test_the_site_in_its_own_theme(tmp_path: Path) -> None:
    done = build(DOCS, tmp_path)
    assert done.returncode == 0, done.stderr
    assert html_faults(tmp_path / "html") == []
    assert "first-hour.html" in (tmp_path / "html" / "faults.html").read_text()  # the contents are next to every page


def test_external_links_are_well_formed() -> None:
    """Their syntax only: the tests use no network."""
    for page in [*ROOT.glob("*.md"), *DOCS.rglob("*.md")]:
        for link in re.findall(r"\]\((\w+:[^)\s]*)\)|<(https?:[^>\s]*)>", page.read_text()):
            parts = urlsplit(link[0] or link[1])
            assert parts.scheme in ("https", "mailto"), f"{page.name}: {link}"
            assert parts.scheme == "mailto" or re.fullmatch(r"[\w-]+(\.[\w-]+)+(:\d+)?", parts.netloc), (
                f"{page.name}: {link}"
            )


class _Links(html.parser.HTMLParser):
    """Identifiers of a page, and what it links to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.targets: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for key, value in attrs:
            if key == "id" and value:
                self.ids.add(value)
            elif key in ("href", "src") and value:
                self.targets.append(value)


def html_faults(site: Path) -> list[str]:
    """Links of built pages to files or anchors that do not exist."""
    pages = {p: _Links(p.read_text()) for p in sorted(site.rglob("*.html"))}
    faults = []
    for page, links in pages.items():
        for target in links.targets:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                continue
            path = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            path = path / "index.html" if path.is_dir() else path
            anchor_exists = not parts.fragment or path not in pages or unquote(parts.fragment) in pages[path].ids
            if not path.exists() or not anchor_exists:
                faults.append(f"{page.relative_to(site)}: {target}")
    return faults
