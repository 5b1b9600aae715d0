"""Promises of one rank that a count of pages does not show, checked from outside after each step.

Publication waits for its verdict, what is present is closed towards the root, open intents are not
older than their bound, queues are bounded, and a step makes one collective.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvpact.cache.hierarchical_cache import HierarchicalCache, Match
from kvpact.cache.paths.buffer_flush import BufferFlush
from kvpact.cache.paths.write_back import WriteBack
from kvpact.cache.tree.node import STORAGE, Node, Residency, Tier
from kvpact.consensus.core.participant import Intent
from kvpact.consensus.core.transaction import State

__all__ = ["broken_promises", "incomplete", "leftovers"]


_TIERS = tuple(Tier)


def broken_promises(cache: HierarchicalCache, nodes: Iterable[Node] | None = None) -> list[str]:
    """What does not hold on this rank right after a step, as lines that name rank and step.

    ``nodes`` are all nodes of its tree, where the caller has them already.
    """
    walked = cache.core.tree.nodes() if nodes is None else nodes
    found = [line for node in walked for line in _node(cache, node)]
    found += [line for intent in cache.core.manager.open_intents for line in _intent(cache, intent)]
    found += _held(cache)
    found += _bounds(cache)
    if cache.stepper.rests and not cache.core.is_at_rest():
        found.append("its next ballot would repeat the last, though something waits or runs")
    where = f"rank {cache.rank}, after step {cache.core.manager.step}"
    return [f"{where}: {line}" for line in found]


def leftovers(cache: HierarchicalCache) -> list[str]:
    """What is still there although nothing is pending."""
    found: list[str] = []
    if isinstance(cache.core.backup, WriteBack):
        leaving = {
            pool: cache.core.backup.underway(pool) for pool in cache.core.manager.schema.pools
        }
        found += [f"{num} pages of {pool} count as leaving" for pool, num in leaving.items() if num]
    if isinstance(cache.core.backup, BufferFlush):
        staging = cache.core.tiers.pools[Tier.HOST]
        if staging.num_out:
            found.append(f"{staging.num_out} staging pages are out")
    if cache.core.storage is not None and cache.core.manager.ledger.charged(STORAGE):
        found.append(f"{cache.core.manager.ledger.charged(STORAGE)} places in the storage's queue")
    if not len(cache.core.requests) and cache.core.orphans.pages:
        found.append(
            f"device pages {cache.core.orphans.pages} are orphaned, but no request is live"
        )
    return [f"rank {cache.rank}: nothing is pending, but {line}" for line in found]


def _node(cache: HierarchicalCache, node: Node) -> list[str]:
    found: list[str] = []
    staged = node.host
    is_idle = staged.is_published and not staged.pins and not staged.num_children
    if cache.config.mode == "buffer_only" and is_idle:
        found.append(f"{node!r} is on HOST, which is staging, and no load needs it")
    for tier in _TIERS:
        presence = node.at(tier)
        if presence.state is Residency.ABSENT:
            continue
        intent = presence.carriage.intent if presence.carriage is not None else None
        if presence.is_published and intent is not None and not intent.is_committed:
            found.append(f"{node!r} is published in {tier.value}, but {intent!r} is not committed")
        if presence.state is Residency.RESERVED and (intent is None or not intent.is_undecided):
            found.append(f"{node!r} is reserved in {tier.value}, but nobody decides that")
        if presence.state is Residency.COPYING and intent is None:
            found.append(f"{node!r} is copying to {tier.value}, but no copy runs")
        above = node.parent
        if above is None or above.is_root:
            continue
        over = above.at(tier).state
        if tier is Tier.HOST and cache.config.mode == "write_back":
            over = max(over, above.device.state)  # leaves are demoted first
        is_doomed = intent is not None and _is_doomed(intent)
        if not is_doomed and over < min(presence.state, Residency.COPYING):
            found.append(f"{node!r} is in {tier.value}, but above it {above!r} is not")
    is_nowhere = node.device.state is Residency.ABSENT and node.host.state is Residency.ABSENT
    if is_nowhere and not node.children:
        found.append(f"{node!r} is a leaf in no tier")
    return found


def incomplete(cache: HierarchicalCache, match: Match) -> list[str]:
    """States in side pools that are missing of what ``match``, just made, promises to serve."""
    found: list[str] = []
    path = [] if match.node is None else match.node.path()
    for spec in cache.config.side_pools:
        has_state: list[bool] = []
        for node in path:
            # A load brings what is on HOST only: of a node on DEVICE its state must be there.
            used = node.device if node.device.is_published else node.host
            positions = {position for position, _ in used.side.get(spec.name, [])}
            has_state += [position in positions for position in range(node.num_pages)]
        needed = {"per_page": len(has_state), "per_node": 1, "window": spec.window_pages}[spec.need]
        first = max(0, len(has_state) - needed)
        missing = [at for at in range(first, len(has_state)) if not has_state[at]]
        if missing:
            found.append(f"a match serves {len(has_state)} pages, {spec.name} lacks {missing}")
    return [f"rank {cache.rank}: {line}" for line in found]


def _held(cache: HierarchicalCache) -> list[str]:
    """Requests that pin nodes of a tree that is gone."""
    return [
        f"request {request.name} holds {request.held!r}, which is not in the tree"
        for request in cache.core.requests
        if request.held is not None
        and request.held.is_alive
        and not cache.core.tree.has(request.held)
    ]


def _is_doomed(intent: Intent) -> bool:
    """It is not decided yet, but everyone knows that it will be refused."""
    lost = any(not (parent.is_undecided or parent.is_committed) for parent in intent.parents)
    return intent.is_undecided and (intent.withdrawn or lost)


def _intent(cache: HierarchicalCache, intent: Intent) -> list[str]:
    manager = cache.core.manager
    found: list[str] = []
    waited = manager.settled_step - intent.opened_step
    if intent.is_undecided and intent.opened_step <= manager.settled_step:
        found.append(f"{intent!r} is undecided {waited} steps after its ballot was settled")
    age_ms = manager.clock_ms - intent.decided_ms
    if not intent.is_undecided and age_ms > cache.config.copy_timeout_s * 1000:
        found.append(f"{intent!r} is open for {age_ms} ms, longer than its timeout")
    if intent.state is State.PROPOSED and intent.opened_step <= manager.step:
        found.append(f"{intent!r} was proposed before the step and is not reserved")
    return found


def _bounds(cache: HierarchicalCache) -> list[str]:
    config, manager, stepper = cache.config, cache.core.manager, cache.stepper
    found: list[str] = []
    if stepper.num_collectives != stepper.num_steps:
        found.append(f"{stepper.num_collectives} collectives in {stepper.num_steps} steps")
    unsettled = sum(1 for one in stepper.in_flight if one.epoch == manager.epoch)
    if manager.step - manager.settled_step != unsettled or unsettled > config.lag:
        found.append(f"settled through step {manager.settled_step} with lag {config.lag}")
    if stepper.num_in_flight > config.lag:
        found.append(f"{stepper.num_in_flight} ballots in flight with lag {config.lag}")
    bounds = {
        "open intents": (len(manager.open_intents), config.num_slots),
        "nodes to back up": (cache.core.backup.num_queued, config.write_queue_nodes_max),
        "loads that wait": (cache.core.load_back.num_waiting, config.waiting_tickets_max),
        "inserts that wait": (cache.core.insert_line.num_waiting, config.waiting_tickets_max),
        "requests that wait": (cache.core.admission.num_waiting, config.waiting_tickets_max),
        "page tickets that wait": (cache.core.engine_pages.num_waiting, config.waiting_tickets_max),
    }
    found += [f"{name}: {size} > {most}" for name, (size, most) in bounds.items() if size > most]
    waiting, fates = len(cache.core.backup.waiting_nodes()), cache.core.backup.fates
    if cache.core.tree.num_marked != waiting + sum(fates.values()):
        found.append(
            f"{cache.core.tree.num_marked} nodes were queued, {waiting} wait, and of the others is"
            f" known {fates}"
        )
    if isinstance(cache.core.backup, WriteBack):
        leaving = sum(carriage.num_pages for carriage in cache.core.backup.held())
        counted = cache.core.backup.underway(Tier.DEVICE.value)
        if leaving != counted:
            found.append(f"{counted} pages count as being demoted, {leaving} are")
    for tier in Tier:
        ledger, name = manager.ledger, tier.value
        most = cache.config.device_pages if tier is Tier.DEVICE else cache.config.host_pages
        if ledger.usable(name) > most:
            found.append(f"{name}: {ledger.usable(name)} usable of {most} pages")
    return found
