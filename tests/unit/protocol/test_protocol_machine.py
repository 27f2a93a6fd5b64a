"""The protocol's real code in a simulated cluster, driven through random interleavings.

Every rule below is one message, one write or one fault; the judge looks after each (invariants 1 to
4 of the design, and: never a silent fresh start, never a refusal of what is there). Two drivers use
the same cluster: hypothesis, which shrinks what it finds, and seeded walks, which go deeper.
BACKSTAY_HYPOTHESIS_PROFILE=soak makes both go on for much longer.
"""

from __future__ import annotations

import os
import random
from collections import defaultdict

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from support.protocol_cluster import Action
from support.protocol_judge import Judge, Violation
from support.protocol_rules import without
from support.protocol_sim import Sim

SOAK = os.environ.get("BACKSTAY_HYPOTHESIS_PROFILE") == "soak"
PICK = st.integers(min_value=0, max_value=1 << 16)

ROUND = ("join", "deliver", "load", "go", "hear", "tick")
MOVES = ("copy", "upload", "commit", "claim")
FAULTS = (
    "trainer dies",
    "sidecar dies",
    "pod dies",
    "node lost",
    "cut off",
    "replaced alive",
    "ghost dies",
    "remote",
    "lose",
    "corrupt",
)


class ClusterMachine(RuleBasedStateMachine):
    """One cluster; each rule picks among what is enabled just then."""

    def __init__(self) -> None:
        super().__init__()
        self.sim = Sim(1)
        self._enabled: dict[str, list[Action]] | None = None

    @initialize(
        replicas=st.integers(1, 3),
        per_replica=st.sampled_from((1, 1, 2)),
        has_remote=st.sampled_from((True, True, True, False)),
        steps=st.integers(0, 2),
        durable=st.booleans(),
        disk_full=st.booleans(),
        wishes=st.sampled_from((0, 0, 2)),
    )
    def begin(
        self,
        replicas: int,
        per_replica: int,
        has_remote: bool,
        steps: int,
        durable: bool,
        disk_full: bool,
        wishes: int,
    ) -> None:
        self.sim = Sim(replicas, per_replica, has_remote=has_remote)
        self.sim.disk_full = disk_full
        self.sim.most_wishes = wishes
        Judge(self.sim)
        self.sim.start()
        self.sim.train(steps, *(MOVES if durable else ()))
        self._enabled = None

    def enabled(self, *kinds: str) -> list[Action]:
        if self._enabled is None:
            self._enabled = defaultdict(list)
            for action in self.sim.actions():
                self._enabled[action[0]].append(action)
        return [action for kind in kinds for action in self._enabled.get(kind, ())]

    def do_one(self, pick: int, *kinds: str) -> None:
        actions = self.enabled(*kinds)
        self.sim.do(actions[pick % len(actions)])
        self._enabled = None

    # --- one step each ----------------------------------------------------------------------------

    @precondition(lambda self: self.enabled("join"))
    @rule(pick=PICK)
    def a_rank_joins(self, pick: int) -> None:
        self.do_one(pick, "join")

    @precondition(lambda self: self.enabled("deliver"))
    @rule(pick=PICK)
    def a_message_arrives(self, pick: int) -> None:
        self.do_one(pick, "deliver")

    @precondition(lambda self: self.enabled("load", "go", "hear"))
    @rule(pick=PICK)
    def a_rank_goes_on(self, pick: int) -> None:
        self.do_one(pick, "load", "go", "hear")

    @precondition(lambda self: self.enabled("tick"))
    @rule(pick=PICK)
    def time_passes(self, pick: int) -> None:
        self.do_one(pick, "tick")

    @precondition(lambda self: self.enabled("save"))
    @rule(pick=PICK)
    def a_rank_saves(self, pick: int) -> None:
        self.do_one(pick, "save")

    @precondition(lambda self: self.enabled(*MOVES))
    @rule(pick=PICK)
    def a_shard_moves(self, pick: int) -> None:
        self.do_one(pick, *MOVES)

    @precondition(lambda self: self.enabled("delete", "thin"))
    @rule(pick=PICK)
    def retention_goes_a_step(self, pick: int) -> None:
        self.do_one(pick, "delete", "thin")

    @precondition(lambda self: self.enabled(*FAULTS))
    @rule(pick=PICK)
    def something_fails(self, pick: int) -> None:
        kinds = [kind for kind in FAULTS if self.enabled(kind)]
        kind = kinds[pick % len(kinds)]
        self.do_one(pick // len(kinds), kind)

    @rule(replicas=st.integers(1, 3))
    def the_job_is_applied_again_with_another_size(self, replicas: int) -> None:
        if len(self.sim.pods) < 8:
            self.sim.do(("resize", f"resize to {replicas}", lambda: self.sim.resize(replicas)))
            self._enabled = None

    @precondition(lambda self: self.enabled("wish", "other deletes"))
    @rule(pick=PICK)
    def a_person_chooses_what_to_begin_from(self, pick: int) -> None:
        self.do_one(pick, "wish", "other deletes")

    # --- whole walks, to get deep -----------------------------------------------------------------

    @rule()
    def rounds_settle(self) -> None:
        self.sim.settle(*ROUND[1:5], limit=60)
        self._enabled = None

    @rule()
    def the_current_pods_restore_undisturbed(self) -> None:
        pods = [p for p in self.sim.current_pods() if p.replica < self.sim.settings.replicas]
        if all(pod.alive and not pod.cut for pod in pods) and self.sim.remote.up:
            self.sim.start()
        self._enabled = None

    @rule(durable=st.booleans())
    def everything_is_saved(self, durable: bool) -> None:
        self.sim.settle("save", *(MOVES if durable else ("copy",)), limit=60)
        self._enabled = None


TestCluster = pytest.mark.timeout(0 if SOAK else 120)(ClusterMachine.TestCase)
TestCluster.settings = settings(
    max_examples=2000 if SOAK else 40,
    stateful_step_count=80 if SOAK else 50,
    database=None,
)


# --- seeded walks ---------------------------------------------------------------------------------

WEIGHTS = dict.fromkeys(FAULTS, 0.04) | {
    "tick": 0.3,
    "join": 1.5,
    "corrupt": 0.01,
    "wish": 0.1,
    "other deletes": 0.005,
}


def walk(seed: int, length: int, wishes: int = 0) -> Sim:
    """One walk of so many steps; faults are rarer than progress."""
    rng = random.Random(seed)
    sim = Sim(rng.choice((1, 1, 2, 2, 3)), has_remote=rng.random() < 0.85)
    sim.disk_full = rng.random() < 0.3
    sim.most_wishes = wishes
    Judge(sim)
    try:
        _walk(sim, rng, length)
    except Violation as error:
        steps = "\n".join(f"{number:4} {line}" for number, line in enumerate(sim.log, 1))
        raise AssertionError(f"seed {seed}: {error}\n{steps}") from error
    return sim


def _walk(sim: Sim, rng: random.Random, length: int) -> None:
    sim.start()
    sim.train(rng.choice((0, 1, 2)), *(MOVES if rng.random() < 0.5 else ()))
    for _ in range(length):
        chance = rng.random()
        if chance < 0.003:
            size = rng.choice((1, 2, 3))
            sim.do(("resize", f"resize to {size}", lambda n=size: sim.resize(n)))  # type: ignore[misc]
            continue
        if chance < 0.02:
            sim.settle(*ROUND[1:5], limit=60)
            continue
        enabled = defaultdict(list)
        for action in sim.actions():
            enabled[action[0]].append(action)
        kinds = list(enabled)
        kind = rng.choices(kinds, [WEIGHTS.get(kind, 1.0) for kind in kinds])[0]
        sim.do(rng.choice(enabled[kind]))


def walks(count: int, length: int, wishes: int = 0) -> int:
    """So many walks; returns how many worlds began in them."""
    sims = (walk(seed, length, wishes) for seed in range(count))
    return sum(1 for sim in sims for world in sim.worlds if world.order)


@pytest.mark.timeout(0 if SOAK else 120)
def test_no_random_walk_breaks_an_invariant() -> None:
    count, length = (4000, 300) if SOAK else (40, 150)
    assert walks(count, length) > count  # they do get somewhere


@pytest.mark.timeout(0 if SOAK else 120)
def test_no_random_walk_with_choices_by_hand_breaks_an_invariant() -> None:
    count, length = (4000, 300) if SOAK else (60, 150)
    assert walks(count, length, wishes=3) > count


@pytest.mark.parametrize("rule_name", ["once", "origin", "apart"])
def test_random_walks_find_what_a_missing_rule_of_choices_lets_through(
    monkeypatch: pytest.MonkeyPatch, rule_name: str
) -> None:
    without(monkeypatch, rule_name)
    with pytest.raises(AssertionError, match=r"seed \d+: I\d"):
        walks(60, 150, wishes=3)


@pytest.mark.parametrize("rules", [("fence",), ("intent",), ("further",), ("freshlist", "known b")])
def test_random_walks_find_what_a_missing_rule_lets_through(
    monkeypatch: pytest.MonkeyPatch, rules: tuple[str, ...]
) -> None:
    without(monkeypatch, *rules)
    with pytest.raises(AssertionError, match=r"seed \d+: I\d"):
        walks(60, 150)
