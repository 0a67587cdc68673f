"""A store whose entries only the ranks of this job can write: each carries a code made with their common secret.

Any program that reaches the port of torch's TCPStore can read, list and overwrite its entries. The ranks agree on a
secret when they meet (store_handshake.py), so an entry that another program has written is an error instead of a task,
a result or a status. In a file of Drumline's own launcher, which no other user can open, entries have no code.

Not covered: what torch's C++ code writes when a process group is made, counters, and a program that is connected before
the ranks meet and answers in their place.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Sequence

import torch.distributed as dist

from ..core.errors import GaveUp

_CODE = 32
"""Hexadecimal digits of a code."""
_PRIME = int(
    "FFFFFFFFFFFFFFFFC90FDAA22168C234C4C6628B80DC1CD129024E088A67CC74020BBEA63B139B22514A08798E3404DD"
    "EF9519B3CD3A431B302B0A6DF25F14374FE1356D6D51C245E485B576625E7EC6F44C42E9A637ED6B0BFF5CB6F406B7ED"
    "EE386BFB5A899FA5AE9F24117C4B1FE649286651ECE45B3DC2007CB8A163BF0598DA48361C55D39A69163FA8FD24CF5F"
    "83655D23DCA3AD961C62F356208552BB9ED529077096966D670C354E4ABC9804F1746C08CA18217C32905E462E36CE3B"
    "E39E772C180E86039B2783A2EC07A28FB5C55DF06F4C52C9DE2BCBF6955817183995497CEA956AE515D2261898FA0510"
    "15728E5A8AACAA68FFFFFFFFFFFFFFFF",
    16,
)
"""The 2048-bit group of RFC 3526, for the exchange of a key between two ranks."""


class AlteredStore(GaveUp):
    """An entry of the store that no rank of this job has written."""


class SignedStore:
    """The entries of a store, with codes if the ranks have a secret."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store

    def set(self, key: str, value: str | bytes) -> None:
        """Write an entry."""
        data = value if isinstance(value, bytes) else value.encode()
        self._store.set(key, _code(key, data) + data)  # type: ignore[arg-type]  # takes bytes too

    def get(self, key: str) -> bytes:
        """Read an entry that is there; AlteredStore if no rank of this job has written it."""
        data: bytes = self._store.get(key)
        if not _secret:
            return data
        code, value = data[:_CODE], data[_CODE:]
        if not hmac.compare_digest(code, _code(key, value)):
            raise AlteredStore(
                f"the entry {key!r} of the ranks' store was not written by a rank of this job",
                rule="another program is connected to the store, which torch opens to every program that reaches it",
                fix="see which programs run on these hosts; keep the ranks' port to a private network",
            )
        return value

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all of the entries are there."""
        return bool(self._store.check(list(keys)))

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, which has no code; its new value."""
        return int(self._store.add(key, amount))

    def delete_key(self, key: str) -> None:
        """Delete an entry."""
        self._store.delete_key(key)


_secret = b""


def use_secret(secret: bytes) -> None:
    """Sign and check all entries from now on."""
    global _secret
    _secret = secret


def _code(key: str, value: bytes) -> bytes:
    if not _secret:
        return b""
    return hmac.new(_secret, key.encode() + b"\0" + value, hashlib.sha256).hexdigest()[:_CODE].encode()


class KeyExchange:
    """One side of a Diffie-Hellman exchange, by which rank 0 sends the secret to each other rank."""

    def __init__(self) -> None:
        self._private = secrets.randbits(256)
        self.public = f"{pow(2, self._private, _PRIME):x}"

    def mask(self, secret: bytes, public: str, token: str) -> bytes:
        """Encrypt 32 bytes for the side that has sent `public`, or decrypt what it has sent; `token` is used once."""
        other = int(public, 16)
        if not 1 < other < _PRIME - 1:
            raise AlteredStore("a rank's key in the store is not one", rule="see drumline.comm.signed_store")
        shared = pow(other, self._private, _PRIME).to_bytes(256, "big")
        stream = hashlib.sha256(b"drumline store" + token.encode() + shared).digest()
        return bytes(a ^ b for a, b in zip(secret, stream, strict=True))
