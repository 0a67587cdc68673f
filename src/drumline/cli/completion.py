"""Shell completion: keys and values of plans, models of the zoo, clusters of the catalogue, and files."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

_SHELL = "_DRUMLINE_COMPLETE"
"""Set by the completion script of a shell, to `complete_bash` by bash's."""
_COUNTS = ("1", "2", "4", "8", "16", "32", "64")
_GLUE = re.compile(r"\s*\n([=:])(?:\n|$)")


@contextmanager
def bash_words() -> Iterator[None]:
    """Rejoin words that bash split at `=` and `:` (`dp=2`, `gpt:7b`), and return only the suffixes that it expects."""
    if os.environ.get(_SHELL) != "complete_bash":
        yield
        return
    words = os.environ.get("COMP_WORDS", "").split("\n")
    current = int(os.environ.get("COMP_CWORD", "0"))
    joined = _GLUE.sub(r"\1", "\n".join(words[: current + 1])).split("\n")
    os.environ["COMP_WORDS"] = "\n".join(joined)
    os.environ["COMP_CWORD"] = str(len(joined) - 1)
    word = joined[-1].partition("=")[2] if joined[-1].startswith("--") else joined[-1]
    cut = max(word.rfind("="), word.rfind(":")) + 1
    answer = io.StringIO()
    try:
        with redirect_stdout(answer):
            yield
    finally:
        print("\n".join(line[cut:] for line in answer.getvalue().splitlines()))


def complete_job(incomplete: str) -> list[str]:
    """Python files, profiles and folders here, and the models of the zoo."""
    from ..models import zoo

    return _matching((*_files(incomplete, ".py", ".json"), *zoo.names()), incomplete)


def complete_job_file(incomplete: str) -> list[str]:
    """Python files and folders here."""
    return _matching(_files(incomplete, ".py"), incomplete)


def complete_cluster(incomplete: str) -> list[str]:
    """Cluster files and folders here, and the clusters of the catalogue."""
    from ..clusters.catalogue import catalogue

    return _matching((*_files(incomplete, ".toml"), *catalogue()), incomplete)


def complete_plan(incomplete: str) -> list[str]:
    """The next key of a plan, or the values of the last one; also `auto` and plan files."""
    from ..plans.plan import KEYS

    before, comma, last = incomplete.rpartition(",")
    start, used = before + comma, {pair.partition("=")[0] for pair in before.split(",")}
    name, equals, _ = last.partition("=")
    if equals:
        return _matching((f"{start}{name}={value}" for value in _values(name)), incomplete)
    keys = [key for key in KEYS if key.startswith(name) and key not in used]
    # the values of a key that is certain, so that the shell adds no space after its `=`
    single = [f"{start}{key}={value}" for key in keys for value in _values(key)] if len(keys) == 1 else []
    whole = () if comma else ("auto", *_files(incomplete, ".toml"))
    return _matching((*whole, *(single or [f"{start}{key}=" for key in keys])), incomplete)


def _values(name: str) -> tuple[str, ...]:
    """The usual values of a key of a plan."""
    from ..plans.keys import ChoiceKey, CountKey, FlagKey
    from ..plans.plan import KEYS

    key = KEYS.get(name)
    if key is None:
        return ()
    if isinstance(key.type, ChoiceKey):
        return tuple(map(str, key.type.choices))
    if isinstance(key.type, FlagKey):
        return ("true", "false")
    if isinstance(key.type, CountKey):
        return _COUNTS
    return tuple(map(str, key.tested or ()))


def _files(incomplete: str, *endings: str) -> Iterator[str]:
    """Files with these endings, and folders, that begin as the incomplete word does."""
    folder, slash, begin = incomplete.rpartition("/")
    try:
        entries = sorted(Path(folder + slash or ".").iterdir())
    except OSError:
        return
    for path in entries:
        if path.name.startswith(begin) and not path.name.startswith("."):
            if path.is_dir():
                yield f"{folder}{slash}{path.name}/"
            elif path.name.endswith(endings):
                yield f"{folder}{slash}{path.name}"


def _matching(candidates: Iterable[str], incomplete: str) -> list[str]:
    """Those that begin as the incomplete word does."""
    return [c for c in candidates if c.startswith(incomplete)]
