"""Capture in one process: a slot holds the state at the step, whatever comes right after."""

import copy
import os
import resource
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.optim.swa_utils import get_ema_multi_avg_fn as averaging

from backstay import copying, objects
from backstay.capture import ABSENT_GRADIENTS_KEY, RNG_KEY, SaveResult
from backstay.errors import UnsupportedValue
from backstay.structure import walk
from backstay_protocol import faults, slots
from backstay_protocol.control import Word
from backstay_protocol.manifest import FORCED
from support.capturing import (
    ATTEMPT,
    PATIENCE_SECONDS,
    FillOptimizer,
    Rank,
    attached,
    index_of,
    shard_bytes,
    wrong_values,
)

torch.set_num_threads(1)


class Net(nn.Module):
    """Everything that changes outside of an optimizer's step."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(9, 6, max_norm=0.5)
        self.norm = nn.BatchNorm1d(6)
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 5))
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.spectral(self.drop(self.norm(self.emb(x)))).square().sum()


class Training:
    """A model, its average, an optimizer, a schedule and a bare tensor."""

    def __init__(self, optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW) -> None:
        torch.manual_seed(0)
        self.model = Net()
        self.ema = AveragedModel(self.model, multi_avg_fn=averaging(0.9))
        self.optimizer = optimizer(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.bag = torch.zeros(3)
        self.entries: dict[str, Any] = {
            "model": self.model,
            "ema": self.ema,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "bag": self.bag,
            "epoch": 0,
        }

    def forward_and_backward(self) -> None:
        self.model(torch.randint(0, 9, (8,))).backward()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)
        self.scheduler.step()

    def change_all_else(self) -> None:
        """By hand, with nothing that announces it."""
        self.ema.update_parameters(self.model)
        for parameter in self.ema.parameters():
            parameter.data.mul_(1.5)
        self.bag.add_(1)
        self.entries["epoch"] += 1

    def now(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        structure = walk(self.entries)
        tensors = {t.name: t.local.clone() for t in structure.tensors}
        return tensors, copy.deepcopy(structure.objects())


class Log:
    """A Stateful with more tensors at each save."""

    def __init__(self) -> None:
        self.seen: list[list[torch.Tensor]] = []
        self.text = ""

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "text": self.text}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


@pytest.fixture
def slow_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy thread stops after the first of many groups."""
    monkeypatch.setattr(copying, "GROUP_TENSORS", 1)
    monkeypatch.setattr(faults, "_faults", faults._parse("capture.mid_copy=hang:0.02@*"))


@pytest.mark.usefixtures("slow_copies")
@pytest.mark.parametrize("fused", [False, True], ids=["foreach AdamW", "fused AdamW"])
def test_a_slot_holds_the_state_at_the_step_whatever_changes_right_after(
    tmp_path: Path, fused: bool
) -> None:
    training = Training(lambda p, lr: torch.optim.AdamW(p, lr=lr, fused=fused, foreach=not fused))
    published = 0
    with attached(tmp_path, training.entries) as rank:
        for step in range(1, 11):
            training.forward_and_backward()
            training.update()
            tensors, values = training.now()
            state = torch.get_rng_state()
            result = rank.engine.save(step, ATTEMPT, metadata={"step": step})
            training.change_all_else()
            training.forward_and_backward()
            training.update()
            rank.engine.wait()
            rank.confirm(step)
            if not result.published:
                assert "model.emb.weight" in result.why, "only max_norm changes a late tensor"
                continue
            published += 1
            stored = rank.tensors(step)
            assert [n for n, t in tensors.items() if not torch.equal(t, stored[n])] == []
            manifest, data = shard_bytes(rank.memory, 0, step)
            assert manifest.metadata == {"step": step}
            blob = data[slice(*index_of(data).objects)]
            back = objects.decode(blob, stored)
            assert torch.equal(back.pop(RNG_KEY)["torch"], state)
            assert back == values
    assert published == 9, "the first one is given up, and from then on emb.weight is early"


def test_a_tensor_that_changes_by_hand_is_told_by_name_and_early_from_then_on(
    tmp_path: Path, slow_copies: None, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Linear(4, 4)
    optimizer = FillOptimizer(model.parameters())
    results = []
    with attached(tmp_path, {"model": model, "optimizer": optimizer}) as rank:
        for step in range(1, 4):
            optimizer.step()
            results.append(rank.engine.save(step, ATTEMPT))
            with torch.no_grad():
                model.bias.add_(100)
            rank.engine.wait()
            optimizer.at = step
            rank.confirm(step)
        assert [result.published for result in results] == [False, True, True]
        assert wrong_values(rank.tensors(3), 3) == []
    assert "model.bias changed while being copied" in results[0].why
    assert "model.bias" in caplog.text
    assert [notice.published for notice in rank.notices] == [False, True, True]


def test_an_optimizer_that_was_never_seen_to_step_is_not_trusted(
    tmp_path: Path, slow_copies: None
) -> None:
    model = nn.Linear(4, 4)
    optimizer = FillOptimizer(model.parameters(), 1)
    with attached(tmp_path, {"model": model, "optimizer": optimizer}) as rank:
        result = rank.engine.save(1, ATTEMPT)
        for parameter in model.parameters():
            parameter.data.fill_(9)
        assert result.result(PATIENCE_SECONDS)
        assert wrong_values(rank.tensors(1), 1) == []


def test_without_overlap_a_save_is_over_when_it_returns(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    optimizer = FillOptimizer(model.parameters())
    with attached(tmp_path, {"model": model, "optimizer": optimizer}, overlap=False) as rank:
        optimizer.step()
        result = rank.engine.save(1, ATTEMPT, reason=FORCED, chain=((5, 3),))
        assert result.published
        assert result.done.is_set()
        manifest, _ = shard_bytes(rank.memory, 0, 1)
        assert (manifest.reason, manifest.chain) == (FORCED, ((5, 3),))
        assert (manifest.run, manifest.step, manifest.attempt) == ("team/run", 1, ATTEMPT)
        assert rank.control[Word.PUBLISHED_STEP] == 1
        assert rank.control[Word.SAVES] == 1
        assert rank.control[Word.STALL_NS] > 0


def test_gradients_are_saved_on_request_and_absent_ones_are_listed(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with attached(tmp_path, {"model": model}, gradients=True, overlap=False) as rank:
        rank.engine.save(1, ATTEMPT)
        model(torch.ones(2)).sum().backward()
        model.bias.grad = None
        rank.engine.save(2, ATTEMPT)
        absent = []
        for step in (1, 2):
            _, data = shard_bytes(rank.memory, 0, step)
            blob = data[slice(*index_of(data).objects)]
            absent.append(objects.decode(blob, rank.tensors(step))[ABSENT_GRADIENTS_KEY])
        assert absent[0] == ["__backstay__.grad.model.weight", "__backstay__.grad.model.bias"]
        assert absent[1] == ["__backstay__.grad.model.bias"]
        stored = rank.tensors(2)["__backstay__.grad.model.weight"]
        assert torch.equal(stored, model.weight.grad)


def test_a_changed_structure_is_planned_anew_in_one_process(tmp_path: Path) -> None:
    entries: dict[str, Any] = {"model": nn.Linear(2, 2)}
    with attached(tmp_path, entries, overlap=False) as rank:
        rank.engine.save(1, ATTEMPT)
        entries["more"] = torch.full((200_000,), 3.0)
        assert rank.engine.save(2, ATTEMPT).published
        assert bool((rank.tensors(2)["more"] == 3).all())
        plans = {shard_bytes(rank.memory, 0, step)[0].plan for step in (1, 2)}
    assert len(plans) == 2


def test_values_that_grow_find_room(tmp_path: Path) -> None:
    log = Log()
    with attached(tmp_path, {"model": nn.Linear(2, 2), "log": log}, overlap=False) as rank:
        for step in range(1, 6):
            log.seen.append([torch.full((400,), float(step)) for _ in range(60)])
            log.text = "x" * (500_000 * step)
            result = rank.engine.save(step, ATTEMPT)
            assert result.published, result.why
            rank.confirm(step)
        stored = rank.tensors(5)
        assert bool((stored["log.seen.4.59"] == 5).all())


def test_what_cannot_be_saved_is_known_before_training(tmp_path: Path) -> None:
    with attached(tmp_path, {"model": nn.Linear(2, 2), "when": object()}) as rank:
        with pytest.raises(UnsupportedValue, match="when"):
            rank.engine.check()
        result = rank.engine.save(1, ATTEMPT)
        assert not result.published
        assert "when" in result.why


def test_metadata_that_is_no_json_gives_up_the_save_not_the_training(tmp_path: Path) -> None:
    with attached(tmp_path, {"model": nn.Linear(2, 2)}, overlap=False) as rank:
        assert "metadata" in rank.engine.save(1, ATTEMPT, metadata={"x": object()}).why
        assert rank.engine.save(2, ATTEMPT, metadata={"x": 1}).published


def test_trouble_in_the_copy_thread_is_told_and_the_next_save_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with attached(tmp_path, {"model": nn.Linear(2, 2)}, overlap=False) as rank:
        monkeypatch.setattr(faults, "_faults", faults._parse("capture.before_publish=raise@1"))
        result = rank.engine.save(1, ATTEMPT)
        assert "fault point" in result.why
        assert rank.engine.save(2, ATTEMPT).published
        assert rank.control[Word.SKIPPED] == 1


# --- slots -------------------------------------------------------------------------------------


def save(rank: Rank, step: int, **options: Any) -> SaveResult:
    return rank.engine.save(step, ATTEMPT, overlap=False, **options)


def test_a_step_that_all_ranks_have_stays_until_a_newer_one_is_confirmed(tmp_path: Path) -> None:
    with attached(tmp_path, {"model": nn.Linear(2, 2)}) as rank:
        save(rank, 1)
        rank.confirm(1)
        for step in (2, 3, 4):  # no word about these
            assert save(rank, step).published
            assert rank.steps() == [1, step]
        rank.confirm(4)
        save(rank, 5)
        assert rank.steps() == [4, 5]


def test_the_base_of_an_attempt_stays_until_a_newer_step_is_confirmed(tmp_path: Path) -> None:
    entries = {"model": nn.Linear(2, 2)}
    with attached(tmp_path, entries) as rank:
        for step in (1, 2):
            save(rank, step)
    with attached(tmp_path, entries) as rank:
        chain = ((ATTEMPT, 1),)  # back to step 1: step 2 never happened
        rank.control[Word.SIDECAR_TIME] = 1
        for step in (2, 3):
            rank.engine.save(step, ATTEMPT + 1, chain=chain, overlap=False)
            assert rank.steps() == [1, step]
        rank.confirm(3)
        rank.engine.save(4, ATTEMPT + 1, chain=chain, overlap=False)
        assert rank.steps() == [3, 4]


def test_a_slot_that_is_being_read_is_left_alone_and_the_save_skipped(tmp_path: Path) -> None:
    with attached(tmp_path, {"model": nn.Linear(2, 2)}) as rank:
        save(rank, 1)
        save(rank, 2)
        rank.confirm(2)
        with slots.reading(rank.memory, 0, 0) as manifest:
            assert manifest is not None
            assert manifest.step == 1
            result = save(rank, 3)
            assert not result.published
            assert "still reading" in result.why
            assert rank.steps() == [1, 2]
        assert save(rank, 4).published


def test_a_single_slot_waits_for_its_step_to_be_safe_elsewhere(tmp_path: Path) -> None:
    with attached(tmp_path, {"model": nn.Linear(2, 2)}, num_slots=1) as rank:
        save(rank, 1)
        assert "in no other tier yet" in save(rank, 2).why
        assert rank.steps() == [1]
        rank.control[Word.SAFE_STEP] = 1
        assert save(rank, 3).published
        assert rank.steps() == [3]


def test_a_copy_that_the_sidecar_struck_out_frees_its_slot(tmp_path: Path) -> None:
    with attached(tmp_path, {"model": nn.Linear(2, 2)}) as rank:
        save(rank, 1)
        save(rank, 2)
        with slots.reading(rank.memory, 0, 1):
            slots.strike(rank.memory, 0, 1)
        save(rank, 3)
        assert rank.steps() == [1, 3]


@pytest.fixture
def file_limit() -> Iterator[int]:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    yield 1 << 20
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_no_room_for_slots_skips_saves_and_training_goes_on(
    tmp_path: Path, file_limit: int
) -> None:
    entries = {"x": torch.zeros(file_limit)}
    with attached(tmp_path, entries) as rank:
        rank.engine.check()
        result = save(rank, 1)
        assert not result.published
        assert "no slot of" in result.why
        resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))
        assert save(rank, 2).published, "room came back"
        assert rank.control[Word.SKIPPED] == 1
    assert [notice.published for notice in rank.notices] == [False, True]


# --- processes ---------------------------------------------------------------------------------


def test_a_forked_worker_neither_waits_nor_saves(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    optimizer = FillOptimizer(model.parameters())
    with attached(tmp_path, {"model": model, "optimizer": optimizer}) as rank:
        optimizer.step()
        rank.engine.save(1, ATTEMPT)  # on probation: the manifest waits for the next step
        child = os.fork()
        if child == 0:
            signal.alarm(10)
            optimizer.step()
            given_up = "forked" in rank.engine.save(2, ATTEMPT).why
            os._exit(0 if given_up else 1)
        assert os.waitpid(child, 0)[1] == 0
        optimizer.step()
        rank.engine.wait()
        assert rank.steps() == [1]


def test_200_saves_leave_memory_descriptors_threads_and_files_flat(tmp_path: Path) -> None:
    training = Training()
    with attached(tmp_path, training.entries) as rank:

        def run(first: int, last: int) -> None:
            for step in range(first, last):
                training.forward_and_backward()
                training.update()
                rank.engine.save(step, ATTEMPT)
                training.change_all_else()
                rank.confirm(step)
            rank.engine.wait()

        def held() -> tuple[int, int, list[str]]:
            files = sorted(os.listdir(rank.memory.rank_folder(0)))
            return len(os.listdir("/proc/self/fd")), threading.active_count(), files

        def resident() -> int:
            return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

        run(1, 30)
        before, memory = held(), resident()
        run(30, 230)
        assert held() == before
        assert resident() - memory < 8 << 20
        assert rank.control[Word.SAVES] >= 225


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_stock_dcp_reads_a_slot_that_was_cut_to_its_size(tmp_path: Path) -> None:
    training = Training()
    training.forward_and_backward()
    training.update()
    with attached(tmp_path / "memory", training.entries, overlap=False) as rank:
        rank.engine.save(1, ATTEMPT)
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "00000.safetensors").write_bytes(shard_bytes(rank.memory, 0, 1)[1])
        expected, _ = training.now()
        state = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
        reader = dcp.HuggingFaceStorageReader(str(tmp_path / "out"))
        dcp.load(state, storage_reader=reader, no_dist=True)
        assert [n for n, t in expected.items() if not torch.equal(t, state[n])] == []


def test_the_first_save_finds_slots_that_are_large_enough(tmp_path: Path) -> None:
    model = nn.Linear(400, 400)
    optimizer = torch.optim.AdamW(model.parameters())
    with attached(tmp_path, {"model": model, "optimizer": optimizer}) as rank:
        rank.engine.check()
        for _ in range(2):  # its state is there from the second step on
            model(torch.ones(400)).sum().backward()
            optimizer.step()
        rank.engine._slots.join(PATIENCE_SECONDS)
        before = [slot.mapping for slot in rank.engine._slots.slots]
        assert save(rank, 2).published
        assert [slot.mapping for slot in rank.engine._slots.slots] == before
