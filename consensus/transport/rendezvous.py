"""How the ranks of a group meet in the store before they connect to each other."""

from __future__ import annotations

from typing import Any

from kvpact.consensus.core.errors import Misuse, PeerLost, StoreSilent
from kvpact.consensus.transport.collective import ProcessGroup, RawStore, first_line

__all__ = ["absent", "address", "announce", "forget", "not_met"]


def address(store: Any) -> str:
    """The store as an error names it."""
    return f"{store.host}:{store.port}" if hasattr(store, "port") else type(store).__name__


def announce(store: RawStore, group: ProcessGroup) -> None:
    """This rank has come; Misuse where it wants another shape than the first that came."""
    name, rank = group.name, group.rank
    shape = f"width={group.width} ranks={','.join(map(str, group.ranks))}"
    try:
        stands = store.compare_set(f"{name}/shape", "", shape).decode()
        if stands != shape:
            raise Misuse(
                f"group {name}: this rank wants [{shape}], the first that came [{stands}]:"
                " give every rank the same configuration",
                rank=rank,
            )
        store.set(f"{name}/here/{rank}", "1")
    except RuntimeError as error:
        raise _store_failed(store, error) from None


def not_met(store: RawStore, group: ProcessGroup, reason: str) -> PeerLost | StoreSilent:
    """The error for a group that was not formed, naming who did not come."""
    try:
        missing = absent(store, group)
    except RuntimeError as silent:
        return _store_failed(store, silent)
    who = f"ranks {missing} did not come" if missing else "all came, one left"
    return PeerLost(f"group {group.name} not formed: {who}: {reason}", ranks=missing)


def absent(store: RawStore, group: ProcessGroup) -> list[int]:
    """The ranks that have not come yet."""
    return [rank for rank in group.ranks if not store.check([f"{group.name}/here/{rank}"])]


def _store_failed(store: RawStore, error: RuntimeError) -> StoreSilent:
    return StoreSilent(f"store {address(store)} failed: {first_line(error)}")


def forget(store: RawStore, group: ProcessGroup) -> None:
    """Delete what meeting left in the store; gloo itself leaves one key a rank, of its device 0."""
    keys = [f"{group.name}/shape"]
    for index, rank in enumerate(group.ranks):
        keys += [f"{group.name}/here/{rank}", f"{group.name}/0/{index}"]
    try:
        for key in keys:
            store.delete_key(key)
    except RuntimeError as error:
        raise _store_failed(store, error) from None
