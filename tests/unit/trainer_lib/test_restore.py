from __future__ import annotations

import pytest

from backstay.client import SidecarClient
from backstay.errors import RestoreFailed, SidecarSilent, StructureMismatch
from backstay.restore import Loaded, Messages, Round
from backstay.settings import Settings
from backstay_protocol.ids import CheckpointId
from backstay_protocol.messages import (
    AGAIN,
    FAILED,
    GO,
    WAIT,
    BadSource,
    ConfirmReply,
    Decision,
    RestoreReply,
)
from support.fake_sidecar import FakeSidecar, error_reply, load_reply

BASE = CheckpointId(40, 1_000_001)
BAD = BadSource(shard_rank=1, tier="local", holder=2, proven=True, detail="chunk 3: digest")


def decision(serial: int = 1, base: CheckpointId | None = BASE) -> Decision:
    return Decision(round="r", serial=serial, attempt=1_000_002, base=base, reason="the newest")


@pytest.fixture
def sidecar(tmp_path):
    with FakeSidecar(str(tmp_path)) as fake:
        yield fake


def make_round(sidecar: FakeSidecar, said: list[str] | None = None, **settings) -> Round:
    return Round(
        SidecarClient(sidecar.memory.socket),
        Settings(volume=sidecar.memory.root, rank=1, world_size=2, **settings),
        last_step=44,
        last_attempt=1_000_001,
        say=(said if said is not None else []).append,
    )


def test_a_rank_joins_loads_confirms_and_goes_on(sidecar) -> None:
    sidecar.restores.extend([RestoreReply(status=WAIT, message="rank 0"), load_reply(decision())])
    sidecar.confirms.extend(
        [
            ConfirmReply(status=WAIT),
            ConfirmReply(status=GO, bytes_by_tier={"memory": 9}, lost_steps=4, bad=("copy x",)),
        ]
    )

    joined = make_round(sidecar).run(
        lambda _: Loaded(bytes_by_tier={"memory": 3}, metadata={"loss": 2})
    )

    point = joined.point
    assert (point.step, point.attempt, point.fresh, point.checkpoint) == (
        40,
        1_000_002,
        False,
        BASE,
    )
    assert (point.sources, point.sources_of_all) == ({"memory": 3}, {"memory": 9})
    assert (point.metadata, point.lost_steps, point.bad) == ({"loss": 2}, 4, ("copy x",))
    assert joined.reply.tiers == ("memory", "local", "remote")
    first, second = sidecar.joined
    assert first == second
    assert (first.rank, first.world_size, first.last_step) == (1, 2, 44)
    assert [v.ok for v in sidecar.verdicts] == [True, True]


def test_a_fresh_start_is_step_zero(sidecar) -> None:
    point = make_round(sidecar).run(lambda _: Loaded()).point

    assert (point.step, point.fresh, point.checkpoint) == (0, True, None)


def test_a_bad_source_is_told_and_the_next_decision_is_loaded(sidecar) -> None:
    sidecar.restores.extend([load_reply(decision(1)), load_reply(decision(2))])
    sidecar.confirms.extend([ConfirmReply(status=AGAIN), ConfirmReply(status=GO)])
    loads: list[int] = []

    def load(what: Decision) -> Loaded:
        loads.append(what.serial)
        return Loaded(bad=(BAD,)) if what.serial == 1 else Loaded()

    make_round(sidecar).run(load)

    assert loads == [1, 2]
    assert [(v.serial, v.ok, v.bad) for v in sidecar.verdicts] == [
        (1, False, (BAD,)),
        (2, True, ()),
    ]


def test_a_load_that_worked_is_done_again_when_another_ranks_did_not(sidecar) -> None:
    sidecar.restores.extend([load_reply(decision(1)), load_reply(decision(2))])
    sidecar.confirms.extend([ConfirmReply(status=AGAIN), ConfirmReply(status=GO)])
    loads: list[int] = []

    make_round(sidecar).run(lambda what: loads.append(what.serial) or Loaded())

    assert loads == [1, 2]


def test_what_can_not_be_loaded_is_told_to_all_and_raised_here(sidecar) -> None:
    sidecar.restores.append(load_reply(decision()))
    sidecar.confirms.append(ConfirmReply(status=FAILED, message="rank 1: no such tensor"))

    with pytest.raises(StructureMismatch, match="model\\.x is missing"):
        make_round(sidecar).run(lambda _: Loaded(error=StructureMismatch("model.x is missing")))

    assert (sidecar.verdicts[0].ok, sidecar.verdicts[0].error) == (False, "model.x is missing")


@pytest.mark.parametrize("where", ["join", "confirm"])
def test_a_round_that_failed_says_why(sidecar, where) -> None:
    if where == "join":
        sidecar.restores.append(RestoreReply(status=FAILED, message="ranks 2, 3 did not come"))
    else:
        sidecar.confirms.append(ConfirmReply(status=FAILED, message="ranks 2, 3 did not come"))

    with pytest.raises(RestoreFailed, match="ranks 2, 3 did not come"):
        make_round(sidecar).run(lambda _: Loaded())


def test_a_refusal_is_final_and_says_what_the_sidecar_said(sidecar) -> None:
    sidecar.restores.append((409, error_reply("WrongWorld", "this pod has ranks 4 and 5")))

    with pytest.raises(RestoreFailed, match="refused rank 1: this pod has ranks 4 and 5"):
        make_round(sidecar).run(lambda _: Loaded())


def test_a_sidecar_that_never_answers_ends_the_wait_with_a_hint(tmp_path) -> None:
    lonely = FakeSidecar(str(tmp_path))

    with pytest.raises(SidecarSilent, match="BACKSTAY=off"):
        make_round(lonely, silent_seconds=0.3).run(lambda _: Loaded())


class SteppedClock:
    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_people_are_told_at_most_every_ten_seconds() -> None:
    clock, said = SteppedClock(), []
    messages = Messages(said.append, clock)
    for second in range(25):
        clock.now = float(second)
        messages(f"waiting {second}")

    assert said == ["waiting 2", "waiting 12", "waiting 22"]
