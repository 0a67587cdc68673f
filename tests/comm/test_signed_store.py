"""Entries of the ranks' store: what another program writes is an error, wherever a rank reads it (S5)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

from drumline.comm import signed_store, store_handshake
from drumline.comm.call_check import CallSignature, CallSite
from drumline.comm.process_group.call_comparison import CallComparison
from drumline.comm.signed_store import AlteredStore, KeyExchange, SignedStore, use_secret
from drumline.comm.store_handshake import agree
from drumline.launchers.channel import StoreChannel


@pytest.fixture(autouse=True)
def no_secret() -> Iterator[None]:
    use_secret(b"")
    yield
    use_secret(b"")


def test_what_another_program_writes_is_refused() -> None:
    use_secret(b"s" * 32)
    plain = dist.HashStore()
    store = SignedStore(plain)
    store.set("task", "train")
    store.set("record", b"\0\1\xff")
    assert store.get("task") == b"train" and store.get("record") == b"\0\1\xff"
    signed = plain.get("task")
    for value in (b"train", b"", signed[:-1] + b"x", signed[:-1], b"0" * 32 + b"train"):
        plain.set("task", value)
        with pytest.raises(AlteredStore, match="'task' of the ranks' store was not written by a rank"):
            store.get("task")
    plain.set("other", signed)
    with pytest.raises(AlteredStore):
        store.get("other")


def test_another_secret_is_refused() -> None:
    store = SignedStore(dist.HashStore())
    use_secret(b"a" * 32)
    store.set("task", "train")
    use_secret(b"b" * 32)
    with pytest.raises(AlteredStore):
        store.get("task")


def test_without_a_secret_entries_are_plain() -> None:
    plain = dist.HashStore()
    SignedStore(plain).set("task", "train")
    assert plain.get("task") == b"train" == SignedStore(plain).get("task")


def test_a_channel_refuses_what_was_replaced() -> None:
    use_secret(b"s" * 32)
    plain = dist.HashStore()
    channel = StoreChannel(plain)
    channel.put("task/1", "a text " * 1000)
    assert channel.get("task/1") == "a text " * 1000
    use_secret(b"f" * 32)
    StoreChannel(plain).put("task/1", "another")
    use_secret(b"s" * 32)
    with pytest.raises(AlteredStore):
        channel.get("task/1")


def test_an_answer_that_was_forged_is_refused() -> None:
    """A rank asks what the other calls, and another program answers as that rank would."""
    use_secret(b"s" * 32)
    plain = dist.HashStore()
    comparison = CallComparison(plain, 0, 2, 5.0, lambda mine: [mine, mine])
    usual, other, site = CallSignature("usual", 1), CallSignature("other", 2), CallSite("a.py:1", 3)
    for _ in range(200):
        comparison.enter(usual, site)
    answer = threading.Timer(0.2, lambda: plain.set("call/201/1", plain.get("call/201/0")))
    answer.start()
    with pytest.raises(AlteredStore, match="call/201/1"):
        comparison.enter(other, site)
    answer.join()


def handshake(stores: list[dist.Store]) -> dict[int, Any]:
    """What two ranks get; each with the secret that it would use, as threads of one process share one."""
    results: dict[int, Any] = {}

    def one(rank: int) -> None:
        try:
            results[rank] = agree(stores[rank], rank, 2, 10.0)
        except Exception as e:
            results[rank] = e

    threads = [threading.Thread(target=one, args=(rank,), name=f"rank {rank}") for rank in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return results


def test_ranks_agree_on_a_secret_that_the_store_does_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[bytes] = []
    monkeypatch.setattr(store_handshake, "use_secret", lambda secret: (used.append(secret), use_secret(secret)))
    plain = dist.HashStore()
    results = handshake([plain, plain])
    assert all(isinstance(store, dist.Store) for store in results.values()), results
    first, second = used
    assert first == second and len(first) == 32
    shown = [plain.get(key) for key in plain.list_keys()] if hasattr(plain, "list_keys") else []
    assert not any(first.hex().encode() in entry for entry in shown)


def test_only_the_two_sides_of_an_exchange_have_its_secret() -> None:
    mine, theirs, secret = KeyExchange(), KeyExchange(), b"k" * 32
    masked = mine.mask(secret, theirs.public, "once")
    assert theirs.mask(masked, mine.public, "once") == secret != masked
    assert theirs.mask(masked, mine.public, "twice") != secret
    assert KeyExchange().mask(masked, mine.public, "once") != secret
    for bad in ("0", "1", f"{signed_store._PRIME - 1:x}", f"{signed_store._PRIME:x}"):
        with pytest.raises(AlteredStore):
            mine.mask(secret, bad, "once")


def test_a_forged_answer_is_noticed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another program gives rank 1 a secret of its own: rank 0 has signed with the real one."""
    plain, forger = dist.HashStore(), KeyExchange()
    real = store_handshake.KeyExchange.mask

    def mask(self: KeyExchange, secret: bytes, public: str, token: str) -> bytes:
        if threading.current_thread().name == "rank 1":
            return forger.public[:32].encode()  # what rank 1 decrypts is not what rank 0 has sent
        return real(self, secret, public, token)

    secrets_of = threading.local()
    monkeypatch.setattr(store_handshake.KeyExchange, "mask", mask)
    monkeypatch.setattr(store_handshake, "use_secret", lambda secret: setattr(secrets_of, "own", secret))
    monkeypatch.setattr(signed_store, "_code", lambda key, value: (secrets_of.own.hex() * 2)[:32].encode())
    monkeypatch.setattr(signed_store, "_secret", b"there is one")
    results = handshake([plain, plain])
    assert isinstance(results[1], AlteredStore) and "'secret'" in str(results[1])
