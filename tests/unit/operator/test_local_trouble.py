"""The local runner's own trouble, a full disk above all, is told, and stops no training."""

from __future__ import annotations

import asyncio
import errno
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from backstay_cli.local import kubelet, runner
from backstay_cli.local.events import Event, Notice
from backstay_cli.local.kubelet import Host, Pod, PodPlan
from backstay_cli.local.processes import ProcessSpec
from backstay_cli.local.runner import LocalRunner, RunOptions
from backstay_cli.local.state import LocalStatus, StateFolder
from backstay_operator.api import TrainingJob
from backstay_operator.decide import CreatePod, Outcome, Plan
from backstay_operator.settings import RestartSettings
from backstay_protocol.clock import SYSTEM_CLOCK
from backstay_protocol.topology import PodIdentity

FULL = OSError(errno.ENOSPC, "No space left on device")


class Disk(StateFolder):
    """One that may be full."""

    full = False

    def write(self, status: LocalStatus) -> None:
        if self.full:
            raise FULL
        super().write(status)


class Trouble:
    """A runner without processes: what it would carry out and what it tells."""

    def __init__(self, job: TrainingJob, folder: Path) -> None:
        memory = replace(job.spec.checkpoint.memory, size_limit_bytes=1 << 20)
        checkpoint = replace(job.spec.checkpoint, memory=memory)
        small = replace(job, spec=replace(job.spec, checkpoint=checkpoint))
        self.disk = Disk(folder)
        self.told: list[Event] = []
        self.plans: list[Plan] = []
        made: Any = LocalRunner(
            small, folder / "job.yaml", self.disk, RunOptions(), self.told.append, SYSTEM_CLOCK
        )
        self.runner = made
        self.runner._leader = SimpleNamespace(facts=lambda: None)
        self.runner._carry_out = self.carry_out

    async def carry_out(self, plan: Plan) -> None:
        self.plans.append(plan)

    def reconcile(self) -> Outcome | None:
        found: Outcome | None = asyncio.run(self.runner._reconcile())
        return found

    @property
    def notices(self) -> list[str]:
        return [event.text for event in self.told if isinstance(event, Notice)]


@pytest.fixture
def trouble(job: TrainingJob, tmp_path: Path) -> Trouble:
    return Trouble(job, tmp_path)


def test_pods_wait_until_their_record_is_durable(trouble: Trouble) -> None:
    trouble.disk.full = True
    for _ in range(3):
        assert trouble.reconcile() is None
    assert trouble.plans == []
    assert len(trouble.notices) == 1
    assert "No space left" in trouble.notices[0]
    trouble.disk.full = False
    trouble.reconcile()
    assert any(isinstance(action, CreatePod) for action in trouble.plans[0].actions)
    written = trouble.disk.read()
    assert written is not None
    assert written.record == trouble.plans[0].record


def test_conditions_that_can_t_be_written_hold_nothing_back_and_are_written_later(
    trouble: Trouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = trouble.runner._status.record
    plan = Plan(record=record, reason="AllTraining", message="all replicas train")
    monkeypatch.setattr(runner, "decide", lambda *_: plan)
    trouble.disk.full = True
    for _ in range(3):
        trouble.reconcile()
    assert len(trouble.plans) == 3
    assert len(trouble.notices) == 1
    trouble.disk.full = False
    trouble.reconcile()
    written = trouble.disk.read()
    assert written is not None
    assert written.conditions == trouble.runner._status.conditions != ()


def test_a_plan_that_can_t_be_carried_out_is_told_and_made_anew(trouble: Trouble) -> None:
    outcome = Outcome(succeeded=True, reason="Completed", message="done")
    tries: list[OSError | Outcome] = [FULL, FULL, outcome]

    async def reconcile() -> Outcome:
        found = tries.pop(0)
        trouble.runner._wake.set()
        if isinstance(found, OSError):
            raise found
        return found

    async def run() -> Outcome | None:
        trouble.runner._wake, trouble.runner._stop = asyncio.Event(), asyncio.Event()
        found: Outcome | None = await trouble.runner._reconcile_until_over()
        return found

    trouble.runner._reconcile = reconcile
    assert asyncio.run(run()) == outcome
    assert len(trouble.notices) == 1


def test_a_look_that_fails_is_not_the_last(
    trouble: Trouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "_BUSY_SECONDS", 0.0)
    looks: list[int] = []

    async def look() -> None:
        looks.append(1)
        if len(looks) < 3:
            raise FULL
        raise asyncio.CancelledError

    async def run() -> None:
        trouble.runner._wake = asyncio.Event()
        await trouble.runner._look_again_and_again()

    trouble.runner._look = look
    trouble.runner._leader.view = None
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(run())
    assert len(looks) == 3
    assert len(trouble.notices) == 1


def test_a_store_that_can_t_be_started_again_is_tried_until_it_can(
    trouble: Trouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "_STORE_AGAIN_SECONDS", 0.01)
    starts: list[int] = []

    async def run() -> None:
        up = asyncio.Event()

        def start() -> None:
            starts.append(1)
            if len(starts) < 3:
                raise FULL
            up.set()

        trouble.runner._store = SimpleNamespace(start=start, stopping=False)
        trouble.runner._store_ended()
        await asyncio.wait_for(up.wait(), 10)

    asyncio.run(run())
    assert sum("could not be started" in text for text in trouble.notices) == 1


def host(told: list[Event]) -> Host:
    return Host(
        emit=told.append,
        wake=lambda: None,
        ended=lambda *_: None,
        node_alive=lambda _: True,
        settings=RestartSettings(),
        clock=SYSTEM_CLOCK,
    )


def test_a_container_that_can_t_be_started_is_told_once_and_tried_until_it_can(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kubelet, "_AGAIN_SECONDS", 0.01)
    told: list[Event] = []
    tries: list[int] = []
    specs = tuple(
        ProcessSpec(name=name, argv=("true",), env={}, cwd="/", log="/dev/null")
        for name in ("backstay-sidecar", "trainer")
    )

    async def run() -> None:
        up = asyncio.Event()

        def process(*_: object) -> object:
            tries.append(1)
            if len(tries) < 3:
                raise FULL
            up.set()
            return SimpleNamespace(ended=asyncio.Event())

        monkeypatch.setattr(kubelet, "Process", process)
        plan = PodPlan(
            name="gpt-0-1",
            identity=PodIdentity(replica=0, generation=1, current={0: 1}),
            node="node-0",
            host="127.0.0.1",
            manifest={},
            containers=specs,
        )
        pod = Pod(plan, host(told))
        pod._start_container(specs[1])
        await asyncio.wait_for(up.wait(), 10)
        assert pod.process("trainer") is not None
        assert pod.state().trainer.running

    asyncio.run(run())
    notices = [event.text for event in told if isinstance(event, Notice)]
    assert len(notices) == 1
    assert "trainer could not be started" in notices[0]


def test_a_helper_that_fails_is_told() -> None:
    told: list[Event] = []

    async def fail() -> None:
        raise FULL

    async def run() -> None:
        task = host(told).spawn(fail())
        await asyncio.wait([task])
        await asyncio.sleep(0)

    asyncio.run(run())
    assert ["No space left" in event.text for event in told if isinstance(event, Notice)] == [True]
