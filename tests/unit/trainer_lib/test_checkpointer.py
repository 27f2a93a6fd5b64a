from __future__ import annotations

import logging
import os
import threading
import time

import pytest
import torch
from torch import nn

import backstay
from backstay import checkpointer as module
from backstay.durability import Reached
from backstay.errors import MisuseError, RestoreFailed, UnsupportedValue
from backstay_protocol import slots
from backstay_protocol.control import ControlBlock, State, Word
from backstay_protocol.ids import CheckpointId
from backstay_protocol.manifest import FORCED, SCHEDULE
from backstay_protocol.messages import (
    FAILED,
    AgentStatus,
    Decision,
    RestoreReply,
    TierState,
)
from support.fake_sidecar import ATTEMPT, FakeSidecar, checkpoint_status, fresh_reply, load_reply


def make_state():
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters()), "epoch": 0}


def train(state) -> None:
    state["optimizer"].zero_grad()
    state["model"](torch.ones(2, 4)).sum().backward()
    state["optimizer"].step()


@pytest.fixture(autouse=True)
def environment(monkeypatch, tmp_path):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "BACKSTAY", "BACKSTAY_FAULTS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("BACKSTAY_VOLUME", str(tmp_path))


@pytest.fixture
def sidecar(tmp_path):
    with FakeSidecar(str(tmp_path)) as fake:
        yield fake


@pytest.fixture
def orders(sidecar):
    """The sidecar's side of the control block, once the rank has attached."""
    blocks = []

    def _open() -> ControlBlock:
        blocks.append(ControlBlock(sidecar.memory.control(0), create=False))
        return blocks[-1]

    yield _open
    for block in blocks:
        block.close()


def saved(sidecar) -> dict[int, str]:
    """Step -> reason of what is published in the slots."""
    found = [slots.peek(sidecar.memory, 0, slot) for slot in (0, 1)]
    return {manifest.step: manifest.reason for manifest in found if manifest}


# --- what it offers ----------------------------------------------------------------------------


def test_the_public_names_are_few_and_listed() -> None:
    assert backstay.__all__ == [
        "BackstayError",
        "Checkpointer",
        "MisuseError",
        "RestoreFailed",
        "RestorePoint",
        "SaveResult",
        "UnsupportedValue",
    ]
    assert all(getattr(backstay, name).__doc__ for name in backstay.__all__)
    methods = {name for name in vars(backstay.Checkpointer) if not name.startswith("_")}
    assert methods == {"restore", "step", "save", "wait", "close"}


# --- off -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["outside", "switched-off"])
def test_it_says_once_that_it_is_off_and_does_nothing(monkeypatch, caplog, tmp_path, how) -> None:
    monkeypatch.setattr(module, "_said_off", set())
    if how == "outside":
        monkeypatch.delenv("BACKSTAY_VOLUME")
    else:
        monkeypatch.setenv("BACKSTAY", "off")
    for _ in range(2):
        with backstay.Checkpointer(make_state()) as checkpointer:
            point = checkpointer.restore()
            checkpointer.step(1)
            assert not checkpointer.save().published
            assert checkpointer.wait(tier="remote", timeout=0)
        assert (point.step, point.fresh) == (0, True)

    assert [r.getMessage() for r in caplog.records if "checkpoints are off" in r.getMessage()]
    assert len(caplog.records) == 1
    assert os.listdir(tmp_path) == []


def test_only_one_rank_says_that_it_is_off(monkeypatch, caplog) -> None:
    monkeypatch.setattr(module, "_said_off", set())
    monkeypatch.delenv("BACKSTAY_VOLUME")
    monkeypatch.setenv("RANK", "3")

    backstay.Checkpointer({}).restore()

    assert caplog.records == []


# --- restore -------------------------------------------------------------------------------------


def test_a_fresh_start_is_step_zero_and_the_control_block_says_that_it_trains(
    sidecar, orders
) -> None:
    with backstay.Checkpointer(make_state()) as checkpointer:
        point = checkpointer.restore()
        assert checkpointer.point is point
        block = orders()
        words = [block[w] for w in (Word.ATTEMPT, Word.STATE, Word.STEP, Word.PID)]
        assert words == [ATTEMPT, State.TRAINING, 0, os.getpid()]

    assert (point.step, point.attempt, point.fresh) == (0, ATTEMPT, True)
    assert (sidecar.joined[0].last_step, sidecar.joined[0].last_attempt) == (-1, 0)


def test_how_a_run_begins_is_told_in_one_line(sidecar, capfd) -> None:
    with backstay.Checkpointer(make_state()) as checkpointer:
        checkpointer.restore()

    assert "backstay: begins at step 0: nothing is there\n" in capfd.readouterr().err


def test_what_an_earlier_process_reached_is_told_to_the_leader(sidecar) -> None:
    with backstay.Checkpointer(make_state()) as checkpointer:
        checkpointer.restore()
        checkpointer.step(7)

    with backstay.Checkpointer(make_state()) as checkpointer:
        checkpointer.restore()

    assert (sidecar.joined[1].last_step, sidecar.joined[1].last_attempt) == (7, ATTEMPT)


@pytest.mark.parametrize("method", ["step", "save"])
def test_nothing_comes_before_restore(method) -> None:
    checkpointer = backstay.Checkpointer(make_state())

    with pytest.raises(MisuseError, match=r"before restore\(\)"):
        getattr(checkpointer, method)(1)


def test_restore_twice_is_a_mistake(sidecar) -> None:
    with backstay.Checkpointer(make_state()) as checkpointer:
        checkpointer.restore()
        with pytest.raises(MisuseError, match="twice"):
            checkpointer.restore()


def test_what_can_not_be_saved_is_told_before_the_others_are_asked(sidecar) -> None:
    state = {**make_state(), "callback": print}

    with (
        pytest.raises(UnsupportedValue, match="callback"),
        backstay.Checkpointer(state) as checkpointer,
    ):
        checkpointer.restore()

    assert sidecar.joined == []


def test_a_failed_restore_leaves_no_thread_and_no_mapping(sidecar) -> None:
    sidecar.restores.append(RestoreReply(status=FAILED, message="rank 3 did not come"))
    checkpointer = backstay.Checkpointer(make_state())

    with pytest.raises(RestoreFailed, match="rank 3 did not come"):
        checkpointer.restore()

    left = [t.name for t in threading.enumerate() if t.name.startswith("backstay")]
    assert left == []
    with open("/proc/self/maps") as maps:
        assert sidecar.memory.root not in maps.read()


def test_a_volume_that_is_not_there_is_named(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("BACKSTAY_VOLUME", f"{tmp_path}/missing")

    with pytest.raises(MisuseError, match=r"missing.*no such folder"):
        backstay.Checkpointer(make_state()).restore()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"on_world_change": "ignore"}, "on_world_change is 'ignore'"),
        ({"exit_timeout_seconds": -1}, "exit_timeout_seconds is -1"),
    ],
    ids=["on_world_change", "exit_timeout_seconds"],
)
def test_a_wrong_option_is_named(options, says) -> None:
    with pytest.raises(MisuseError, match=says):
        backstay.Checkpointer({}, **options)


def test_metadata_that_is_no_json_is_refused_when_it_is_given() -> None:
    with pytest.raises(UnsupportedValue, match=r"^metadata\.tags: a value of type set"):
        backstay.Checkpointer({}, metadata={"tags": {"a"}})


def test_a_job_without_a_remote_tier_is_warned_once(sidecar, caplog) -> None:
    sidecar.restores.append(fresh_reply(tiers=("memory", "local")))
    with backstay.Checkpointer(make_state()) as checkpointer:
        checkpointer.restore()

    assert sum("nothing is durable" in r.getMessage() for r in caplog.records) == 1


# --- step and save -------------------------------------------------------------------------------


def test_steps_are_saved_when_the_control_block_says_so(sidecar, orders) -> None:
    state = make_state()
    with backstay.Checkpointer(state, metadata={"run": "a"}) as checkpointer:
        checkpointer.restore()
        block = orders()
        block[Word.EVERY_STEPS] = 2
        for step in range(1, 4):
            train(state)
            checkpointer.step(step, metadata={"loss": step / 2})
        assert checkpointer.wait()
        assert saved(sidecar) == {2: SCHEDULE}
        manifest = slots.peek(sidecar.memory, 0, 0) or slots.peek(sidecar.memory, 0, 1)
        block[Word.SAVE_AT_STEP] = -5
        checkpointer.step(4)
        checkpointer.step(5)
        assert checkpointer.wait()
        assert saved(sidecar)[5] == FORCED
        assert block[Word.STEP] == 5

    assert manifest.metadata == {"run": "a", "loss": 1.0}
    assert (manifest.attempt, manifest.run) == (ATTEMPT, "team/run")
    told = [notice.step for notice in sidecar.captures]
    assert told[-1] == 5
    assert set(told) <= {2, 4, 5}  # a newer notice may take an older one's place


@pytest.mark.parametrize("metadata", [{"tags": {"a"}}, [1]], ids=["set", "list"])
def test_metadata_that_is_no_json_costs_neither_training_nor_the_save(
    sidecar, orders, caplog, metadata
) -> None:
    with backstay.Checkpointer(make_state(), metadata={"run": "a"}) as checkpointer:
        checkpointer.restore()
        orders()[Word.EVERY_STEPS] = 1
        checkpointer.step(1, metadata=metadata)
        assert checkpointer.wait()
        assert checkpointer.save(2, metadata=metadata).result()
        manifests = [slots.peek(sidecar.memory, 0, slot) for slot in (0, 1)]

    assert {m.step: m.metadata for m in manifests} == {1: {"run": "a"}, 2: {"run": "a"}}
    told = [r.getMessage() for r in caplog.records if "without the metadata" in r.getMessage()]
    assert len(told) == 1
    assert told[0].startswith(
        "backstay: step 1 is saved without the metadata of its call: metadata"
    )


def test_the_first_step_must_be_beyond_the_restored_one(sidecar) -> None:
    with backstay.Checkpointer(make_state()) as checkpointer:
        checkpointer.restore()
        with pytest.raises(MisuseError, match=r"first one here is 1 .*step \+ 1"):
            checkpointer.step(0)


def test_later_a_step_back_is_told_once_and_ignored(sidecar, orders, caplog) -> None:
    with backstay.Checkpointer(make_state()) as checkpointer:
        checkpointer.restore()
        checkpointer.step(5)
        checkpointer.step(4)
        checkpointer.step(4)
        assert orders()[Word.STEP] == 5

    assert sum("steps only grow" in r.getMessage() for r in caplog.records) == 1


def test_a_sidecar_that_dies_does_not_disturb_training(tmp_path) -> None:
    state = make_state()
    checkpointer = backstay.Checkpointer(state, exit_timeout_seconds=0.5)
    with FakeSidecar(str(tmp_path)) as sidecar:
        checkpointer.restore()

    for step in (1, 2):
        train(state)
        checkpointer.step(step)
        assert checkpointer.save() is not None
    assert checkpointer.wait()
    checkpointer.__exit__(None, None, None)

    assert saved(sidecar) == {1: FORCED, 2: FORCED}


def test_a_step_that_was_saved_by_schedule_is_persisted_rather_than_saved_twice(
    sidecar, orders
) -> None:
    with backstay.Checkpointer(make_state()) as checkpointer:
        checkpointer.restore()
        orders()[Word.EVERY_STEPS] = 1
        checkpointer.step(1)
        first = checkpointer.save()
        assert checkpointer.save() is first
        assert checkpointer.wait(tier="remote", timeout=10)

    assert [notice.step for notice in sidecar.captures] == [1]
    assert sidecar.persisted == [CheckpointId(1, ATTEMPT)]


def test_the_result_of_a_save_can_be_waited_for_before_the_next_step(sidecar) -> None:
    state = make_state()
    with backstay.Checkpointer(state) as checkpointer:
        checkpointer.restore()
        for step in range(1, 7):
            train(state)
            checkpointer.step(step)
            assert checkpointer.save().result(timeout=60)


def test_save_with_a_step_reports_it(sidecar, orders) -> None:
    with backstay.Checkpointer(make_state()) as checkpointer:
        checkpointer.restore()
        checkpointer.save(9)
        assert orders()[Word.STEP] == 9
        assert "is over" in checkpointer.save(8).why


def test_a_script_that_only_calls_save_plans_anew_when_all_shall(sidecar, orders) -> None:
    with backstay.Checkpointer(make_state()) as checkpointer:
        checkpointer.restore()
        checkpointer.save(4)
        words = orders()
        words[Word.REPLAN_WANTED], words[Word.REPLAN_AT_STEP] = 1, 7
        checkpointer.save(6)
        assert words[Word.REPLAN_WANTED] == 1
        assert checkpointer.save(8).result(timeout=60)
        assert words[Word.REPLAN_WANTED] == 0


def test_waiting_for_a_tier_that_the_job_does_not_have_is_a_mistake(sidecar) -> None:
    with backstay.Checkpointer(make_state()) as checkpointer:
        checkpointer.restore()
        with pytest.raises(MisuseError, match=r"this job has memory, local, remote.*neighbor"):
            checkpointer.wait(tier="neighbor")


def test_a_wait_that_ends_too_early_leaves_the_copy_under_way(sidecar) -> None:
    copies_may_begin = threading.Event()
    with backstay.Checkpointer(make_state()) as checkpointer:
        checkpointer.restore()
        checkpointer._begun._engine._thread.run(copies_may_begin.wait)
        saved = checkpointer.save(1)
        assert not checkpointer.wait(timeout=0.05)
        assert not checkpointer.wait(tier="memory", timeout=0.05)
        assert not saved.result(timeout=0.05)
        copies_may_begin.set()
        assert checkpointer.wait()
        assert saved.published


def test_a_wait_without_a_timeout_has_no_bound(sidecar, monkeypatch) -> None:
    asked = []
    with backstay.Checkpointer(make_state()) as checkpointer:
        checkpointer.restore()
        saved = checkpointer.save(1)
        wait = saved.done.wait
        monkeypatch.setattr(saved.done, "wait", lambda timeout: asked.append(timeout) or wait())
        assert checkpointer.wait()

    assert asked == [None]


def test_copy_and_tier_share_one_timeout(sidecar, monkeypatch) -> None:
    left = []
    with backstay.Checkpointer(make_state()) as checkpointer:
        checkpointer.restore()
        checkpointer.save(1).result()
        begun = checkpointer._begun
        monkeypatch.setattr(begun._engine, "wait", lambda _: time.sleep(0.3) or True)
        monkeypatch.setattr(begun, "_wait_for", lambda *at: left.append(at[2]) or Reached(True))
        assert checkpointer.wait(tier="local", timeout=10)
        monkeypatch.undo()

    assert left[0] <= 9.7


def test_waiting_for_a_tier_ends_in_time(sidecar) -> None:
    sidecar.complete_at_once = False
    with backstay.Checkpointer(make_state(), exit_timeout_seconds=0) as checkpointer:
        checkpointer.restore()
        checkpointer.save(1)
        assert not checkpointer.wait(tier="local", timeout=0.2)


# --- the end -------------------------------------------------------------------------------------


def test_the_end_saves_the_last_step_for_every_tier_and_waits(sidecar, orders) -> None:
    state = make_state()
    with backstay.Checkpointer(state) as checkpointer:
        checkpointer.restore()
        block = orders()
        train(state)
        checkpointer.step(3)

    assert saved(sidecar) == {3: FORCED}
    assert block[Word.STATE] == State.FINISHED


def test_the_end_asks_all_tiers_for_a_last_step_that_was_saved_by_schedule(sidecar, orders) -> None:
    with backstay.Checkpointer(make_state()) as checkpointer:
        checkpointer.restore()
        orders()[Word.EVERY_STEPS] = 3
        checkpointer.step(3)

    assert saved(sidecar) == {3: SCHEDULE}
    assert [notice.step for notice in sidecar.captures] == [3]


def test_an_exception_in_the_block_makes_no_last_save(sidecar) -> None:
    def script() -> None:
        with backstay.Checkpointer(make_state()) as checkpointer:
            checkpointer.restore()
            checkpointer.step(3)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        script()

    assert saved(sidecar) == {}


def test_a_last_step_that_gets_nowhere_ends_the_wait_and_says_why(sidecar, caplog) -> None:
    sidecar.status = AgentStatus(
        run="team/run",
        replica=0,
        tiers=(TierState(tier="remote", ok=False, message="no such bucket: demo"),),
    )
    step = CheckpointId(1, ATTEMPT)
    sidecar.checkpoints[step] = checkpoint_status(step, ("memory", "local"))
    with backstay.Checkpointer(make_state(), exit_timeout_seconds=0.3) as checkpointer:
        checkpointer.restore()
        checkpointer.step(1)

    text = caplog.records[-1].getMessage()
    assert "step 1 did not reach the remote tier within 0 s: no such bucket: demo" in text


def test_a_job_that_trained_nothing_more_waits_for_what_it_was_restored_from(sidecar) -> None:
    base = CheckpointId(8, 1_000_000)
    first = load_reply(Decision(round="r", serial=1, attempt=ATTEMPT, base=None))
    sidecar.restores.append(first)
    with backstay.Checkpointer({"epoch": 1}) as checkpointer:
        checkpointer.restore()
        checkpointer._begun._base = base

    assert sidecar.persisted == [base]
    assert saved(sidecar) == {}


def test_nothing_is_logged_where_all_is_well(sidecar, caplog) -> None:
    caplog.set_level(logging.WARNING)
    state = make_state()
    with backstay.Checkpointer(state) as checkpointer:
        checkpointer.restore()
        for step in range(1, 4):
            train(state)
            checkpointer.step(step)

    assert [r.getMessage() for r in caplog.records] == []
