"""Envelopes for the store: a value is of a rank of this run, or is named as not.

Anybody who reaches the store's port can write into it. So every value of ours carries a keyed
digest of its key and itself, made with the run's secret (the environment variable KVPACT_SECRET,
the same on every rank). Without a secret the digest still tells damage and accidents, but not a
stranger who knows how it is made. And whatever is decoded comes from here, so that a value that
makes no sense is one error with a name.

What gloo itself writes while a group forms is not signed; and an old value of the same key, put
back, is not told from a new one.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from typing import TYPE_CHECKING, TypeVar

import msgspec

from kvpact.consensus.core.errors import StoreForged

if TYPE_CHECKING:  # it brings torch, which is not needed here
    from kvpact.consensus.transport.store import Store

__all__ = ["SECRET_VARIABLE", "SignedStore", "decode", "scope_of", "secret_of_run"]

T = TypeVar("T")

SECRET_VARIABLE = "KVPACT_SECRET"
MAC_BYTES = 16
_KEY_BYTES_MAX = 64  # of blake2b


def secret_of_run() -> bytes:
    """The secret from the environment; empty: there is none."""
    return os.environ.get(SECRET_VARIABLE, "").encode()


def scope_of(name: str, secret: bytes) -> str:
    """Return the prefix of a replica's keys: runs with different secrets do not meet."""
    if not secret:
        return name
    return f"{name}.{hashlib.blake2b(b'scope', key=_key(secret), digest_size=6).hexdigest()}"


class SignedStore:
    """A store whose values are proven to be of this run; any thread may use it.

    Every call may raise :class:`StoreForged` naming the key whose value is not.
    """

    def __init__(self, store: Store, secret: bytes) -> None:
        self._store = store
        self._secret = _key(secret)

    def get(self, key: str) -> bytes | None:
        """See :meth:`Store.get`."""
        sealed = self._store.get(key)
        return None if sealed is None else self._open(key, sealed)

    def set(self, key: str, value: bytes) -> None:
        """See :meth:`Store.set`."""
        self._store.set(key, self._seal(key, value))

    def compare_set(self, key: str, expected: bytes | None, value: bytes) -> bytes:
        """See :meth:`Store.compare_set`."""
        before = None if expected is None else self._seal(key, expected)
        stands = self._store.compare_set(key, before, self._seal(key, value))
        return self._open(key, stands) if stands else b""

    def delete(self, key: str) -> None:
        """See :meth:`Store.delete`."""
        self._store.delete(key)

    def _seal(self, key: str, value: bytes) -> bytes:
        return self._mac(key, value) + value

    def _open(self, key: str, sealed: bytes) -> bytes:
        mac, value = sealed[:MAC_BYTES], sealed[MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(key, value)):
            raise StoreForged(f"what stands at '{key}' in the store was not written by this run")
        return value

    def _mac(self, key: str, value: bytes) -> bytes:
        name = key.encode()
        digest = hashlib.blake2b(key=self._secret, digest_size=MAC_BYTES)
        digest.update(len(name).to_bytes(4, "little") + name)
        digest.update(value)
        return digest.digest()


def decode(key: str, value: bytes, kind: type[T]) -> T:
    """Decode ``value`` of ``key``; :class:`StoreForged` where it is nothing of that kind.

    Its size is bounded by what a store takes, its depth by ``kind``.
    """
    try:
        return msgspec.msgpack.decode(value, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError) as error:
        text = " ".join(str(error).split())[:200]
        raise StoreForged(f"what stands at '{key}' in the store cannot be read: {text}") from None


def _key(secret: bytes) -> bytes:
    return secret if len(secret) <= _KEY_BYTES_MAX else hashlib.sha256(secret).digest()
