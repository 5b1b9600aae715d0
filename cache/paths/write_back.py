"""Write-back: nothing is backed up at insert; victims of the device are demoted to the host.

Who needs device pages waits while agreed victims are reserved on the host, voted in one ballot and
moved in one merged copy; only then are their device pages used again. What the host refuses on any
rank is deleted on all. A low-water mark demotes ahead of need, so that waiting is rare.

    make_room -> demote -> vote, copy -> ended on all: on HOST, device page free
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from kvpact.cache.paths.backup import Backup
from kvpact.cache.paths.insert_voted import Insertion
from kvpact.cache.residency.tiers import Tiers
from kvpact.cache.residency.withdrawal import Withdrawal
from kvpact.cache.tree.node import Carriage, Node, Tier
from kvpact.consensus.core.participant import Intent
from kvpact.consensus.core.transaction import State

__all__ = ["WriteBack"]


class WriteBack(Backup):
    """Participant for demotions; the tiers ask it when room on the device has to be made."""

    kind = "back_up"

    def __init__(
        self,
        tiers: Tiers,
        insertion: Insertion,
        withdrawal: Withdrawal,
        *,
        low_water_pages: int,
        on_backed_up: Callable[[list[Node]], None] | None = None,
    ) -> None:
        super().__init__(tiers, insertion, on_backed_up)
        self._withdrawal = withdrawal
        self._low_water_pages = low_water_pages
        self._underway: Counter[str] = Counter()  # by pool
        self._held_up_at = (-1, -1)
        tiers.demoter = self

    def underway(self, pool: str) -> int:
        """Pages of a device pool that come free when what is being demoted has ended."""
        return self._underway[pool]

    @property
    def is_held_up(self) -> bool:
        """A demotion found no slot since the last step."""
        manager = self._tiers.manager
        return self._held_up_at == (manager.epoch, manager.step)

    @property
    def num_queued(self) -> int:
        """Demotions begin when room is needed: nothing waits for a step."""
        return 0

    def plan(self) -> None:
        """Keep the agreed free pages of the device above the low-water mark."""
        device = Tier.DEVICE.value
        free = self._tiers.manager.room(device) + self._underway[device]
        self._tiers.evict(Tier.DEVICE, self._low_water_pages - free)

    def demote(self, node: Node) -> bool:
        """Begin to move ``node`` to the host; False: there is no slot, try again next step.

        Where no room on the host can be planned it is deleted, everywhere.
        """
        tiers = self._tiers
        num_pages = node.num_pages
        carriage = Carriage(Tier.HOST, [node], None)
        carriage.side_wanted = tiers.side.wanted([node], Tier.DEVICE)
        side = tiers.side.need(carriage)
        if not tiers.make_room(Tier.HOST, num_pages, side):
            self.num_no_room += 1
            tiers.manager.note("no room", Tier.HOST.value, node.node_id)
            self._delete(node)
            return True
        need = {Tier.HOST.value: num_pages, **side}
        intent = tiers.manager.open(self.kind, node.node_id, need, self)
        if intent is None:
            tiers.tree.order[Tier.DEVICE].offer(node)
            self._held_up_at = (tiers.manager.epoch, tiers.manager.step)
            return False
        self._carry(intent, carriage)
        self._underway.update(_leaving(intent))
        return True

    def _delete(self, node: Node) -> None:
        """The victim goes, and what only the host has below it could not be reached any more."""
        self._withdrawal.retract_host(node)
        self._tiers.evict_node(node, Tier.DEVICE)
        self._tiers.prune()

    # -- participant -----------------------------------------------------------------------------

    def ended(self, intent: Intent) -> None:
        """Moved, or deleted; a node that somebody has come to need meanwhile stays."""
        carriage = self._carriages.pop(intent.serial)
        tiers = self._tiers
        self._underway.subtract(_leaving(intent))
        is_moved = intent.state is State.DONE
        if not is_moved:
            for node in carriage.nodes:
                self._withdrawal.retract_host(node)
        for node in reversed(self._detach(carriage, has_arrived=is_moved)):
            if tiers.tree.order[Tier.DEVICE].is_candidate(node):
                tiers.evict_node(node, Tier.DEVICE)

    def clear(self) -> None:
        """The epoch is over: nothing of it is open any more."""
        super().clear()
        self._underway.clear()


def _leaving(intent: Intent) -> dict[str, int]:
    """Pages per device pool that what ``intent`` moves has there."""
    host, device = Tier.HOST.value, Tier.DEVICE.value
    return {pool.removesuffix(host) + device: pages for pool, pages in intent.need.items()}
