"""DeepSpeed's way to name checkpoints: `folder/tag`, a file `latest` with the newest tag, and the caller's own state.

What is in `folder/tag` is an ordinary checkpoint (checkpoint/) and the file `client_state.pt`, which is read without
running code from it.
"""

from __future__ import annotations

import io
import logging
import os
import pickle
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ...core import files
from ...core.errors import CorruptFile, DrumlineError, InputError, JobError
from ..checkpoint.folder import find_checkpoints
from ..core.agreement import broadcast_text, raise_together
from ..engine import Engine
from ..state.prebuilt import NoDataset

LATEST, CLIENT = "latest", "client_state.pt"
_TAG = re.compile(r"[\w.+=-][\w.+= -]{0,199}")
_OF_DEEPSPEED = "*_model_states.pt"
_LOG = logging.getLogger("drumline")


@dataclass(frozen=True, slots=True)
class ClientState:
    """The caller's own state in a checkpoint, and the engine's own counts."""

    values: Mapping[str, Any] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)


def save(engine: Engine, folder: Path, tag: str, state: ClientState, *, latest: bool) -> None:
    """Save to `folder/tag`, all ranks together; a tag that exists is replaced."""
    _check_tag(tag)
    data = _encode(state)
    engine.save(folder / tag, keep=2)  # a tag that is saved again leaves the one before it
    engine.finish_saves()
    error: DrumlineError | None = None
    if engine.rank == 0:
        try:
            _write(folder / tag / CLIENT, data)
            if latest:
                files.write_text(folder / LATEST, tag)
        except DrumlineError as e:
            error = e
    raise_together(engine, error)


def load(
    engine: Engine, folder: Path, tag: str | None, *, weights_only: bool, strict: bool
) -> tuple[Path, ClientState] | None:
    """Load from `folder/tag`, all ranks together. None if there is no tag, with a warning."""
    tag = tag if tag is not None else _newest_tag(engine, folder)
    if tag is None:
        if engine.rank == 0:
            _LOG.warning("load_checkpoint: no file %s: nothing is loaded; give a tag if there is one", folder / LATEST)
        return None
    _check_tag(tag)
    path = folder / tag
    if path.is_dir() and any(path.glob(_OF_DEEPSPEED)):
        raise InputError(
            f"{path} is a checkpoint of DeepSpeed",
            rule="its optimizer states fit DeepSpeed only; its weights fit any tool",
            fix="run the zero_to_fp32.py that is in the folder, and engine.engine.load_weights() what it writes",
        )
    state = _decode(path / CLIENT)
    if weights_only:
        engine.load_weights(find_checkpoints(path)[0], strict=strict)
    else:
        own_batches = isinstance(engine.stream.dataset, NoDataset)  # then a position in our data means nothing
        engine.load(path, other_data=own_batches)
    return path, state


def _newest_tag(engine: Engine, folder: Path) -> str | None:
    """The tag in `latest`, as rank 0 reads it."""
    text, error = "", None
    if engine.rank == 0:
        try:
            text = (folder / LATEST).read_text().strip()
        except (FileNotFoundError, NotADirectoryError):
            text = ""
        except (OSError, UnicodeDecodeError) as e:
            error = InputError(f"{folder / LATEST} cannot be read: {e}")
    raise_together(engine, error)
    return broadcast_text(engine, text) or None


def _check_tag(tag: str) -> None:
    if not _TAG.fullmatch(tag) or tag in (".", ".."):
        raise InputError(f"the tag {tag[:80]!r}", rule="a tag is the name of a folder: letters, digits and . _ + = -")


def _encode(state: ClientState) -> bytes:
    """The state as a file that can be read without running code from it; anything else is refused."""
    buffer = io.BytesIO()
    try:
        torch.save({"client_state": dict(state.values), "counts": dict(state.counts)}, buffer)
        buffer.seek(0)
        torch.load(buffer, map_location="cpu", weights_only=True)
    except (pickle.PicklingError, pickle.UnpicklingError, AttributeError, TypeError) as e:
        first = re.search(r"GLOBAL ([\w.]+)", str(e))
        raise JobError(
            f"client_state has a {first[1]}" if first else f"client_state cannot be stored: {str(e)[:200]}",
            rule="numbers, strings, tensors, lists and dicts, so that loading a checkpoint runs no code",
            fix="store its values: vars(args), scheduler.state_dict()",
        ) from None
    return buffer.getvalue()


def _decode(path: Path) -> ClientState:
    try:
        values = torch.load(path, map_location="cpu", weights_only=True)
        return ClientState(values["client_state"], values["counts"])
    except FileNotFoundError:
        return ClientState()  # saved by engine.engine.save()
    except (OSError, RuntimeError, EOFError, KeyError, TypeError, ValueError, pickle.UnpicklingError) as e:
        raise CorruptFile(f"{path} is damaged: {str(e)[:200]}", where=str(path)) from None


def write_weights(path: Path, state: Mapping[str, torch.Tensor]) -> None:
    """Write a state dict: safetensors by its suffix, else torch's format."""
    if path.suffix == ".safetensors":
        from safetensors.torch import save as to_bytes

        data = to_bytes({name: t.contiguous().cpu().clone() for name, t in state.items()})
    else:
        buffer = io.BytesIO()
        torch.save({name: t.cpu() for name, t in state.items()}, buffer)
        data = buffer.getvalue()
    _write(path, data)


def _write(path: Path, data: bytes) -> None:
    """The whole file or nothing."""
    temporary = path.with_name(f".{path.name[:100]}.{secrets.token_hex(8)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(data)
        os.replace(temporary, path)
    except OSError as e:
        temporary.unlink(missing_ok=True)
        raise InputError(f"{path} cannot be written: {e.strerror}") from None
