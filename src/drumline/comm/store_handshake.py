"""The first words between ranks in a store that may contain keys of an earlier run.

torchrun keeps one store over its restarts, and a file stays where a run was killed. So rank 0 offers a random prefix;
every other rank takes the offer with a random token; rank 0 answers each token. An old offer is never answered, and a
rank that took one takes the next. The same exchange compares what ranks must agree about: size and versions. With its
answer, rank 0 sends every rank the secret by which they sign what they write (signed_store.py), masked for that rank.
"""

from __future__ import annotations

import json
import secrets
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..core.errors import GaveUp, InputError
from .signed_store import KeyExchange, SignedStore, use_secret

_PAUSE = 0.01
_LINGER = 5.0
"""Seconds for which rank 0 goes on refusing ranks that come late, or have not read the refusal."""
_NAMES = {"size": "WORLD_SIZE", "torch": "torch"}


def agree(store: dist.Store, rank: int, size: int, timeout: float) -> dist.Store:
    """The store under a fresh prefix, once all ranks are there. All ranks call it."""
    facts = {"rank": rank, "size": size, "torch": torch.__version__}
    end = time.monotonic() + timeout
    nonce = _offer(store, facts, end, timeout) if rank == 0 else _take(store, facts, end, timeout)
    agreed = dist.PrefixStore(nonce, store)
    if rank == 0:
        SignedStore(agreed).set("secret", "known")
    else:
        agreed.wait(["secret"], timedelta(seconds=timeout))
        SignedStore(agreed).get("secret")  # whoever changed the answer did not know it
    return agreed


def _offer(store: dist.Store, facts: dict[str, Any], end: float, timeout: float) -> str:
    """Rank 0: offer a prefix, wait until every other rank has taken it, answer all."""
    nonce, size = secrets.token_hex(8), facts["size"]
    store.set("offer", nonce)
    answered: dict[str, int] = {}
    publics: dict[str, str] = {}
    problem = ""
    while len(answered) < size - 1 or problem:
        taken = store.add(f"{nonce}/taken", 0)
        for i in range(len(answered) + 1, taken + 1):
            other = json.loads(store.get(f"{nonce}/take/{i}"))
            problem = problem or _difference(facts, other, list(answered.values()))
            answered[other["token"]], publics[other["token"]] = other["rank"], other["public"]
            if problem:
                end = min(end, time.monotonic() + _LINGER)
        if problem:
            for token in answered:
                store.set(f"{nonce}/answer/{token}", json.dumps({"problem": problem}))
            everyone = len(answered) >= size - 1 and store.add(f"{nonce}/read", 0) >= len(answered)
            if time.monotonic() > end or everyone:
                raise _refusal(problem)
        elif time.monotonic() > end:
            missing = sorted(set(range(1, size)) - set(answered.values()))
            raise GaveUp(f"ranks {missing} of {size} have not joined within {timeout:g} s")
        time.sleep(_PAUSE)
    secret, keys = secrets.token_bytes(32), KeyExchange()
    for token, public in publics.items():
        masked = keys.mask(secret, public, token).hex()
        store.set(f"{nonce}/answer/{token}", json.dumps({"problem": "", "public": keys.public, "secret": masked}))
    use_secret(secret)
    return nonce


def _take(store: dist.Store, facts: dict[str, Any], end: float, timeout: float) -> str:
    """Another rank: take the newest offer, and wait for the answer to it."""
    nonce, answer, token, keys = "", "", "", KeyExchange()
    while time.monotonic() < end:
        if store.check(["offer"]) and (newest := store.get("offer").decode()) != nonce:
            nonce, token = newest, secrets.token_hex(8)
            number = store.add(f"{nonce}/takers", 1)
            store.set(f"{nonce}/take/{number}", json.dumps({**facts, "token": token, "public": keys.public}))
            store.add(f"{nonce}/taken", 1)
            answer = f"{nonce}/answer/{token}"
        if nonce and store.check([answer]):
            message = json.loads(store.get(answer))
            if message["problem"]:
                store.add(f"{nonce}/read", 1)
                raise _refusal(message["problem"])
            use_secret(keys.mask(bytes.fromhex(message["secret"]), message["public"], token))
            return nonce
        time.sleep(_PAUSE)
    raise GaveUp(f"rank {facts['rank']} waited {timeout:g} s for rank 0")


def _difference(first: dict[str, Any], other: dict[str, Any], ranks: list[int]) -> str:
    """The point in which rank 0 and another rank differ; empty if they agree."""
    for key, name in _NAMES.items():
        if first[key] != other[key]:
            return f"{name} is {first[key]} on rank 0 and {other[key]} on rank {other['rank']}"
    if other["rank"] in (*ranks, 0):
        return f"two ranks have RANK={other['rank']}"
    return ""


def _refusal(problem: str) -> InputError:
    return InputError(
        problem,
        where="environment",
        rule="all ranks of a job have the same WORLD_SIZE and torch, and each its own RANK",
    )
