"""The whole cache at random, with faults of single ranks, against a twin of what may be matched."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from kvpact.cache.requests.ticket import Ticket, TicketState
from kvpact.cache.tree.node import Tier
from kvpact.consensus.core.participant import OutcomeKind
from tests.cache_world import PAGE_SIZE, World, outcome

DEVICE, HOST = Tier.DEVICE, Tier.HOST
PENDING = TicketState.PENDING

TEXTS = st.text(alphabet="ab", min_size=1, max_size=5)
NAMES = st.sampled_from(["p", "q"])
FAULTS = st.sampled_from(
    [
        ("device.reserve", "refuse"),
        ("host.reserve", "refuse"),
        ("write", "fail"),
        ("write", "hang"),
        ("write", "corrupt"),
        ("load", "fail"),
        ("load", "hang"),
        ("load", "corrupt"),
    ]
)


class Machine(RuleBasedStateMachine):
    """Two ranks with faults of their own; ``committed`` is the twin: what may be matched at all."""

    @initialize(lag=st.integers(0, 2), whole=st.booleans(), pages=st.integers(5, 10))
    def begin(self, lag: int, whole: bool, pages: int) -> None:
        self.world = World(
            device_pages=[pages, pages + 1],
            host_pages=[pages + 2, pages],
            lag=lag,
            evicts_whole_nodes=whole,
            copy_timeout_s=0.06,
            num_slots=16,
        )
        self.committed: set[str] = set()
        self.proposed: dict[int, str] = {}
        self.running: dict[str, tuple[str, list[Ticket]]] = {}

    @rule(text=TEXTS)
    def put(self, text: str) -> None:
        if self.world.put(text):
            for intent in self.world.caches[0].core.manager.open_intents:
                if intent.kind == "insert":
                    self.proposed.setdefault(intent.serial, text)

    @rule(text=TEXTS, name=NAMES)
    def admit(self, text: str, name: str) -> None:
        if name not in self.running:
            self.running[name] = (text, self.world.load(text, name))

    @rule(name=NAMES)
    def compute(self, name: str) -> None:
        """Go on with a request: pages first, then its tokens."""
        text, tickets = self.running.get(name, ("", []))
        if not text or outcome(tickets)[0] is PENDING:
            return
        live = self.world.caches[0].core.requests.require(name)
        missing = len(text) - live.held_pages - len(live.private)
        if missing > 0:
            pages = self.world.each(lambda cache: cache.request_pages(name, missing))
            self.running[name] = (text, pages)
            return
        self.world.compute(text, name)
        end = self.world.caches[0].core.requests.require(name).held_pages
        self.world.insert(text, name)
        if self.world.caches[0].core.requests.require(name).held_pages > end:
            self.commit(text)

    @rule(name=NAMES, ends_well=st.booleans())
    def end(self, name: str, ends_well: bool) -> None:
        if self.running.pop(name, None) is not None:
            (self.world.finish if ends_well else self.world.abort)(name)

    @rule(tier=st.sampled_from(list(Tier)), num_pages=st.integers(1, 4))
    def evict(self, tier: Tier, num_pages: int) -> None:
        self.world.evict(tier, num_pages)

    @rule(rank=st.integers(0, 1), fault=FAULTS, after=st.integers(0, 2))
    def fault(self, rank: int, fault: tuple[str, str], after: int) -> None:
        self.world.fault(rank, *fault, after=after)

    @rule()
    def heal(self) -> None:
        self.world.heal()

    @rule(times=st.integers(1, 3))
    def step(self, times: int) -> None:
        for _ in range(times):
            results = self.world.step()
            assert results[0].must_recompute == results[1].must_recompute
            for result in results[0].outcomes:
                if result.kind is OutcomeKind.COMMIT and result.intent.kind == "insert":
                    self.commit(self.proposed[result.intent.serial])
            for name in results[0].must_recompute:
                if self.running.pop(name, None) is not None:
                    self.world.abort(name)
            self.look()

    def commit(self, text: str) -> None:
        self.committed |= {text[:end] for end in range(1, len(text) + 1)}

    def look(self) -> None:
        """Nothing can be matched that no verdict has ever published."""
        for node in self.world.caches[0].core.tree.nodes():
            text = "".join(
                chr(n.tokens[PAGE_SIZE * i]) for n in node.path() for i in range(n.num_pages)
            )
            usable = self.world.peek(text)["usable"]
            assert usable == 0 or text[:usable] in self.committed

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        self.world.heal()
        for name in self.running:
            self.world.abort(name)
        self.world.drain()
        self.world.step_all(2 + self.world.caches[0].config.lag)
        self.world.is_empty()
        for tier in (HOST, DEVICE, HOST):
            self.world.evict(tier, 100)
        assert not list(self.world.caches[0].core.tree.nodes())
        self.world.check()


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=30, stateful_step_count=25)
