from __future__ import annotations

from collections import defaultdict

import pytest

from backstay.client import SidecarClient
from backstay.durability import wait_for_others, wait_for_tier
from backstay_protocol.control import State, Word
from backstay_protocol.errors import Unreachable
from backstay_protocol.ids import CheckpointId
from backstay_protocol.messages import AgentStatus, JobView, RankProgress, ReplicaView, TierState
from support.fake_sidecar import FakeSidecar, checkpoint_status

STEP = CheckpointId(40, 1_000_001)


class SteppedClock:
    """Time passes only while somebody sleeps; `after` runs at its moment."""

    def __init__(self) -> None:
        self.now = 0.0
        self.after: dict[float, object] = {}

    def time(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        for moment in [m for m in self.after if m <= self.now]:
            self.after.pop(moment)()


@pytest.fixture
def sidecar(tmp_path):
    with FakeSidecar(str(tmp_path)) as fake:
        fake.complete_at_once = False
        yield fake


def wait(sidecar, tier: str, seconds: float = 30.0, words=None, clock=None, said=None):
    client = SidecarClient(sidecar.memory.socket)
    words = words if words is not None else defaultdict(int)
    tell = (said if said is not None else []).append
    return wait_for_tier(client, words, STEP, tier, seconds, tell, clock or SteppedClock())


def test_it_ends_when_the_checkpoint_is_complete_in_the_tier(sidecar) -> None:
    clock = SteppedClock()
    sidecar.checkpoints[STEP] = checkpoint_status(STEP, ("memory",))

    def arrive() -> None:
        sidecar.checkpoints[STEP] = checkpoint_status(STEP, ("memory", "local"))

    clock.after[5.0] = arrive

    assert wait(sidecar, "memory").reached
    assert wait(sidecar, "local", clock=clock).reached
    assert 5 <= clock.now < 8


def test_complete_in_the_store_is_not_yet_durable(sidecar) -> None:
    status = checkpoint_status(STEP, ("remote",))
    sidecar.checkpoints[STEP] = type(status)(**{**vars(status), "durable": False})

    assert not wait(sidecar, "remote").reached


@pytest.mark.parametrize(("durable", "reached"), [(39, False), (40, True), (60, True)])
def test_the_word_in_the_control_block_is_enough(sidecar, durable, reached) -> None:
    words = defaultdict(int, {Word.DURABLE_STEP: durable})

    assert wait(sidecar, "remote", words=words).reached is reached


def test_it_says_what_it_waits_for_now_and_then_and_why_it_gave_up(sidecar) -> None:
    states = (TierState(tier="remote", ok=False, message="503 from the store"),)
    sidecar.status = AgentStatus(run="team/run", replica=0, tiers=states)
    said: list[str] = []

    result = wait(sidecar, "remote", 35.0, said=said)

    assert (result.reached, result.why) == (False, "503 from the store")
    assert said[0] == "waiting for step 40 to be complete in remote: 503 from the store"
    assert 3 <= len(said) <= 4


def test_a_sidecar_that_is_away_is_waited_for(tmp_path) -> None:
    gone = FakeSidecar(str(tmp_path))

    result = wait(gone, "local", 3.0)

    assert not result.reached
    assert "the sidecar does not answer" in result.why


def test_a_sidecar_that_hangs_does_not_stretch_a_short_wait(tmp_path) -> None:
    asked: list[float] = []

    class Hanging(SidecarClient):
        def get(self, url, reply, timeout_seconds):
            asked.append(timeout_seconds)
            raise Unreachable("no answer")

    client = Hanging(str(tmp_path / "socket"))
    for seconds in (0.01, 4.0, 600.0):
        asked.clear()
        wait_for_tier(client, defaultdict(int), STEP, "local", seconds, print, SteppedClock())
        assert asked[0] == {0.01: 1.0, 4.0: 2.0, 600.0: 5.0}[seconds]


def test_ranks_beside_the_leader_stay_until_all_others_have_finished(sidecar, monkeypatch) -> None:
    clock = SteppedClock()
    states = {0: State.FINISHED, 1: State.FINISHING}

    def job() -> JobView:
        replicas = tuple(
            ReplicaView(
                replica=rank,
                generation=0,
                address="",
                seen_seconds_ago=0.0,
                ranks=(
                    RankProgress(
                        rank=rank,
                        step=9,
                        step_time=0.0,
                        published_step=9,
                        attempt=1,
                        state=int(state),
                    ),
                ),
            )
            for rank, state in states.items()
        )
        return JobView(run="r", attempt=1, phase="Training", message="", step=9, replicas=replicas)

    sidecar.job = job
    clock.after[4.0] = lambda: states.update({1: State.FINISHED})

    wait_for_others(SidecarClient(sidecar.memory.socket), 30.0, clock)
    assert 4 <= clock.now < 6

    states[1] = State.FINISHING
    wait_for_others(SidecarClient(sidecar.memory.socket), 10.0, clock)
    assert clock.now < 20
