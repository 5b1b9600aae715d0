"""The live requests: each with a pinned path, pages of its own, and what was found for it."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import xxhash

from kvpact.cache.tree.node import Node, Tier, Tokens
from kvpact.cache.tree.radix_tree import RadixTree
from kvpact.consensus.core.ballot import MASK62
from kvpact.consensus.core.errors import Misuse

__all__ = ["Request", "RequestReport", "RequestTable"]


class RequestReport(msgspec.Struct, frozen=True):
    """A request's account, in pages: of its prompt, hit per tier, computed."""

    request: str
    prompt_pages: int
    device_hit_pages: int
    host_hit_pages: int
    computed_pages: int
    why: str


class Request:
    """One live request, the ``number``-th since the start.

    ``held`` is the deepest node of the path it pins on the device.

    ``private`` are its own device pages, in the order of the prompt, that follow the held path.
    ``orphans`` are device pages that it held when an earlier epoch ended, ``side_orphans`` those
    of side pools, by name.
    """

    __slots__ = (
        "device_hit_pages",
        "held",
        "host_hit_pages",
        "must_recompute",
        "name",
        "number",
        "orphans",
        "private",
        "prompt_pages",
        "side_orphans",
        "why",
    )

    def __init__(self, name: str, number: int) -> None:
        self.name = name
        self.number = number
        self.held: Node | None = None
        self.private: list[int] = []
        self.orphans: list[int] = []
        self.side_orphans: list[tuple[str, int]] = []
        self.prompt_pages = 0
        self.device_hit_pages = 0
        self.host_hit_pages = 0
        self.must_recompute = False
        self.why = ""

    def requires(self, tokens: Tokens, namespace: str, verb: str = "inserts") -> None:
        """Raise :class:`Misuse` unless ``tokens`` continue, or are part of, the prefix it holds."""
        position = 0
        for node in [] if self.held is None else self.held.path():
            part = tokens[position : position + len(node.tokens)]
            position += len(node.tokens)
            same = part.tobytes() == node.tokens[: len(part)].tobytes()
            if not same or node.namespace != namespace:
                raise Misuse(
                    f"request {self.name!r} {verb} other tokens than those of the prefix it holds:"
                    " hand in its whole prompt, in the namespace in which it was matched, or end it"
                    " first"
                )

    @property
    def held_pages(self) -> int:
        """Pages of the path it pins."""
        return 0 if self.held is None else sum(node.num_pages for node in self.held.path())


class RequestTable:
    """The live requests. Their digest rides every ballot, so all ranks have the same."""

    def __init__(self, tree: RadixTree) -> None:
        self._tree = tree
        self._live: dict[str, Request] = {}
        self.digest = 0
        self.num_opened = 0
        #: Of the requests that have ended: pages of their prompts, and how many were found.
        self.prompt_pages = self.device_hit_pages = self.host_hit_pages = 0

    def __iter__(self) -> Iterator[Request]:
        return iter(self._live.values())

    def __len__(self) -> int:
        return len(self._live)

    def get(self, name: str) -> Request | None:
        """The live request of this name."""
        return self._live.get(name)

    def open(self, name: str) -> Request:
        """The live request of this name; made where there is none."""
        request = self._live.get(name)
        if request is None:
            self.num_opened += 1
            request = Request(name, self.num_opened)
            self._live[name] = request
            self.digest = (self.digest + _digest(name)) & MASK62
        return request

    def require(self, name: str) -> Request:
        """The live request of this name. Raises :class:`Misuse` where there is none."""
        request = self._live.get(name)
        if request is None:
            raise Misuse(f"request {name!r} is not live: match its prompt first")
        return request

    def close(self, request: Request) -> None:
        """Unpin the path of a request that is over, and forget it; it owns no pages any more."""
        self.hold(request, None)
        self.forget(request)

    def forget(self, request: Request) -> None:
        """Count ``request`` as ended; what it holds is somebody else's care."""
        del self._live[request.name]
        self.prompt_pages += request.prompt_pages
        self.device_hit_pages += request.device_hit_pages
        self.host_hit_pages += request.host_hit_pages
        self.digest = (self.digest - _digest(request.name)) & MASK62

    def start_anew(self) -> None:
        """Forget what was found for the live requests: ranks may have found different."""
        for request in self._live.values():
            request.prompt_pages = request.device_hit_pages = request.host_hit_pages = 0
            request.why = ""

    def hold(self, request: Request, node: Node | None) -> None:
        """Move its pin to the path of ``node``; the new path is pinned before the old is let go."""
        self._tree.pin_path(node, Tier.DEVICE)
        self._tree.unpin_path(request.held, Tier.DEVICE)
        request.held = node

    def void(self, gone: Node) -> list[str]:
        """The bytes of ``gone`` are void: requests that hold it, or anything below, recompute.

        Their pin moves up to the parent of ``gone``. Returns their names.
        """
        names: list[str] = []
        for request in self._live.values():
            if request.held is None or gone not in request.held.path():
                continue
            request.must_recompute = True
            self.hold(request, gone.parent if gone.parent and gone.parent.parent else None)
            names.append(request.name)
        return names


def _digest(name: str) -> int:
    return xxhash.xxh3_64_intdigest(name.encode()) & MASK62
