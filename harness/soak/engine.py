"""The scheduler model of a soak: a trace that goes round until it is told to stop.

As :class:`kvpact.harness.replay.engine.Engine`, with what a long run under faults needs besides:
loads that are late, clients that leave, and bounds on how long nothing may come to an end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, overload

import msgspec

from kvpact.cache.hierarchical_cache import StepResult
from kvpact.cache.memory.hashes import page_hashes
from kvpact.cache.tree.node import Tier
from kvpact.consensus.core.errors import ProgressLost
from kvpact.consensus.step.progress import MAX_DESCRIBED, describe
from kvpact.harness.rank.rank import Rank
from kvpact.harness.rank.sim import Pause, Program
from kvpact.harness.replay.engine import Engine, Lane, Phase
from kvpact.harness.trace.mooncake import TraceRequest
from kvpact.harness.verify.content import fill_pages

__all__ = ["Rounds", "SoakEngine"]

#: A round repeats the prompts of the round so many rounds before: some are still cached, some not.
ROUNDS_APART: Final = 3
#: Every so many requests one is aborted by its client.
ABORT_EVERY: Final = 17
#: A load that a fault withholds is not waited for: its request is told later that it was void.
LAYER_WAIT_S: Final = 1.0
EVERYTHING: Final = 1 << 24


class Rounds(Sequence[TraceRequest]):
    """``requests`` over and over, numbered on; ends when :meth:`stop` says so."""

    def __init__(self, requests: Sequence[TraceRequest]) -> None:
        self._requests = requests
        self._shift = 1 + max(max(request.hash_ids) for request in requests)
        self._end = 2**40
        self.num_given = 0

    def stop(self) -> None:
        """No further request."""
        self._end = self.num_given

    def __len__(self) -> int:
        return self._end

    @overload
    def __getitem__(self, index: int) -> TraceRequest: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[TraceRequest]: ...
    def __getitem__(self, index: int | slice) -> TraceRequest | Sequence[TraceRequest]:
        """The request with number ``index``."""
        if isinstance(index, slice):
            return [self[one] for one in range(*index.indices(self._end))]
        turn, place = divmod(index, len(self._requests))
        self.num_given = max(self.num_given, index + 1)
        shift = turn % ROUNDS_APART * self._shift
        request = self._requests[place]
        return msgspec.structs.replace(
            request, index=index, hash_ids=tuple(block + shift for block in request.hash_ids)
        )


class SoakEngine(Engine):
    """One rank's scheduler. ``before_step(step)`` comes before each step, ``drained()`` when all
    is over and before everything is evicted, so that what then remains has leaked.

    Requests with an even number wait until what they load has ended on all ranks, and every byte
    that they read is checked; those with an odd number compute on top of a load that is under way,
    as an engine that overlaps copies with the forward pass does, and count on being told when that
    was void. Raises :class:`ProgressLost` where no request finishes for ``patience_s``, or the end
    does not drain within ``drain_s``, of the agreed clock.
    """

    def __init__(
        self,
        rank: Rank,
        rounds: Rounds,
        *,
        lanes: int,
        before_step: Callable[[int], None],
        after_step: Callable[[StepResult], None],
        drained: Callable[[], None],
        patience_s: float,
        drain_s: float,
    ) -> None:
        super().__init__(
            rank,
            rounds,
            lanes=lanes,
            settle_copies=self._enter,
            after_step=self._leave,
        )
        self.rounds = rounds
        self.num_left = 0
        self.num_left_loading = 0
        self.drain_steps = 0
        self.num_resets = 0
        self._clock_ms = 0
        self._epoch_began_ms = 0
        self._before = before_step
        self._after = after_step
        self._drained = drained
        self._patience_ms = patience_s * 1000
        self._drain_ms = drain_s * 1000
        self._finished_ms = 0
        self._num_finished = 0
        self._loads_then = (0, 0, 0)
        self._is_draining = False

    @property
    def num_waiting(self) -> int:
        """Requests that wait for pages or loads."""
        return sum(lane.phase is Phase.WAITS for lane in self._lanes)

    @property
    def now_ms(self) -> int:
        """The agreed clock since the start, over all epochs."""
        return self._epoch_began_ms + self._clock_ms

    @property
    def iteration(self) -> int:
        """The scheduler's own number of the step."""
        return self._iteration

    def drain(self) -> None:
        """No further requests: from now on everything must come to an end."""
        self.rounds.stop()
        self._is_draining = True
        self._finished_ms = self.now_ms
        self._loads_then = self._loads

    def program(self) -> Program:
        """Requests until :meth:`drain`, then steps until nothing is pending and nothing is left."""
        yield from super().program()
        self._drained()
        # Write-back moves down what is evicted, a level of the tree at a time: that takes steps.
        # Each sweep moves or frees pages, and the watch over progress bounds them all.
        while sum(self.cache.evict(tier, EVERYTHING) for tier in (Tier.DEVICE, Tier.HOST)):
            yield from super().program()
            yield from self._one_step()

    def _one_step(self) -> Program:
        self._iteration += 1
        self._enter()
        self.cache.begin_step(self._iteration)
        while (result := self.cache.poll_step()) is None:
            yield Pause()
        self._leave(result)

    def _enter(self) -> None:
        # Clients that leave: agreed, since every rank sees the same requests in the same phases.
        for lane in self._lanes:
            if lane.request is None or lane.phase is not Phase.WAITS:
                continue
            if lane.request.index % ABORT_EVERY == ABORT_EVERY - 1:
                live = self.cache.core.requests.get(lane.name)
                is_loading = live is not None and self.cache.core.load_back.is_asked(live)
                self.num_left += 1
                self.num_left_loading += int(is_loading)
                self.cache.abort(lane.name)
                lane.phase, lane.request = Phase.FREE, None
        self._before(self.iteration)

    def _leave(self, result: StepResult) -> None:
        for lane in self._lanes:
            # After a reset nothing that waited can come any more.
            starts_anew = result.was_reset and lane.phase is Phase.WAITS
            if lane.phase is not Phase.FREE and (lane.name in result.lost or starts_anew):
                self._give_up(lane)
        self.num_resets += int(result.was_reset)
        # The agreed clock begins anew with each epoch.
        if result.was_reset:
            self._epoch_began_ms += self._clock_ms
        self._clock_ms = self.cache.core.manager.clock_ms
        self._watch_progress()
        self._after(result)

    def _watch_progress(self) -> None:
        now_ms = self.now_ms
        if self._is_draining:
            self.drain_steps += 1
            waited_ms = now_ms - self._finished_ms
            if waited_ms > self._drain_ms:
                raise ProgressLost(
                    f"after the load had ended, not everything drained within"
                    f" {self._drain_ms / 1000:g} s: {self.num_waiting} requests wait",
                    step=self.cache.core.manager.step,
                    story=self._who_waits(),
                )
        elif self.totals.requests + self.num_left != self._num_finished:
            self._num_finished = self.totals.requests + self.num_left
            self._finished_ms = now_ms
            self._loads_then = self._loads
        elif now_ms - self._finished_ms > self._patience_ms:
            manager = self.cache.core.manager
            raise ProgressLost(
                f"all ranks step, but no request has finished for {self._patience_ms / 1000:g} s:"
                f" {self.num_waiting} wait, {manager.ledger.usable('device')} device pages"
                " are usable on every rank",
                step=manager.step,
                story=self._who_waits(),
            )

    @property
    def _loads(self) -> tuple[int, int, int]:
        load = self.cache.core.load_back
        return load.num_commits, load.num_failed, load.num_aborts

    def _who_waits(self) -> list[str]:
        """Why nobody gets on, as lines for a person: agreed, but for what has ended here."""
        core = self.cache.core
        waiting = [lane for lane in self._lanes if lane.phase is Phase.WAITS]
        lines = [
            f"{lane.name}: {lane.phase.value}, {lane.admission.state.value}"
            for lane in waiting[:MAX_DESCRIBED]
            if lane.admission is not None
        ]
        lines += [f"in line: {name}: {lacks}" for name, lacks in core.waits().items()]
        lines += [f"open: {line}" for line in describe(core.manager)]
        commits, failed, aborts = (
            now - then for now, then in zip(self._loads, self._loads_then, strict=True)
        )
        since = "since the load ended" if self._is_draining else "since a request last finished"
        lines.append(
            f"loads {since}: {commits} committed, of which {failed} did not arrive whole on every"
            f" rank, and {aborts} aborted"
        )
        return lines

    def _forward(self, lane: Lane) -> None:
        is_loading = bool(self.cache.start_loading([lane.name]))
        if not is_loading:
            super()._forward(lane)
        elif lane.request is not None and lane.request.index % 2:
            self._compute_on_top(lane)
        # Else it waits for the load to end everywhere, which all ranks see in the same step.

    def _compute_on_top(self, lane: Lane) -> None:
        """The forward pass runs while its load may still be under way: its bytes prove nothing."""
        cache = self.cache
        loads = cache.start_loading([lane.name])
        for layer in range(cache.config.kv_shape.layers):
            cache.wait_layer(layer, loads, LAYER_WAIT_S)
        live = cache.core.requests.require(lane.name)
        hashes = page_hashes(lane.tokens, cache.config.page_size)
        own = hashes[live.held_pages : live.held_pages + len(live.private)]
        fill_pages(self.rank.tensors[Tier.DEVICE], live.private, own, cache.rank)
        lane.phase = Phase.RUNS
