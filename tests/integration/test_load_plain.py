"""One plain process: every source, every kind of state, every kind of damage."""

from __future__ import annotations

import os
import random

import pytest
import torch
from torch import nn

from backstay import structure
from backstay.capture import ABSENT_GRADIENTS_KEY
from backstay.errors import StructureMismatch
from backstay.load import Loader, LoadSettings
from backstay.plan import make_plan
from backstay.shard_reader import Reach
from backstay_protocol.layout import DiskLayout, MemoryLayout
from support import shards
from support.range_server import RangeServer


class Sampler:
    def __init__(self) -> None:
        self.state = {"epoch": 0, "order": torch.arange(4)}

    def state_dict(self):
        return self.state

    def load_state_dict(self, state) -> None:
        self.state = state


class Net(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, width), nn.BatchNorm1d(width), nn.Linear(width, 16))
        self.head = nn.Linear(16, 16, bias=False).to(torch.bfloat16)
        self.register_buffer("strided", torch.zeros(8, 6).t())

    def forward(self, x):
        return self.head(self.body(x).bfloat16()).float()


def make(seed: int, width: int = 64):
    torch.manual_seed(seed)
    model = Net(width)
    decay = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decay}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "data": Sampler(),
        "extra": torch.zeros(3),
        "epoch": 0,
    }


def train(state, steps: int) -> None:
    for _ in range(steps):
        state["optimizer"].zero_grad()
        state["model"](torch.randn(8, 16)).square().mean().backward()
        state["optimizer"].step()
        state["scheduler"].step()
        state["model"].strided += random.random()
        state["data"].state["epoch"] += 1
        state["extra"] += 1
        state["epoch"] += 1


def tensors(state) -> dict[str, torch.Tensor]:
    return {t.name: t.now().clone() for t in structure.walk(state).tensors}


def assert_equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


class Saved:
    """A checkpoint of a trained state in a folder and in a slot."""

    def __init__(self, root: str) -> None:
        self.state = make(1)
        random.seed(5)
        train(self.state, 3)
        walked = structure.walk(self.state)
        plan = make_plan(walked, 0, 1)
        self.file = shards.shard_bytes(walked, plan, 0)
        self.manifest = shards.sealed(self.file, 0, 1, plan.id, metadata={"loss": 1.5})
        self.folder = f"{root}/disk"
        self.memory = MemoryLayout(f"{root}/volume")
        shards.write_shard(self.folder, self.file, self.manifest)
        shards.write_slot(self.memory, 1, self.file, self.manifest)
        train(self.state, 3)
        self.later = tensors(self.state)

    @property
    def path(self) -> str:
        return DiskLayout.shard(self.folder, shards.CHECKPOINT, 0)

    def decide(self, *sources):
        return shards.decide([self.manifest], {0: list(sources)})

    def loader(self, state, **walk) -> Loader:
        reach = Reach(memory=self.memory)
        settings = LoadSettings(rank=0, world_size=1, reach=reach)
        return Loader(lambda: structure.walk(state, **walk), settings)

    def by_file(self):
        return shards.by_file(self.folder, self.manifest)

    def by_slot(self):
        return shards.by_slot(self.memory, 1, self.manifest)


@pytest.fixture
def saved(tmp_path) -> Saved:
    return Saved(str(tmp_path))


@pytest.fixture
def server(saved):
    with RangeServer(saved.folder) as running:
        yield running


@pytest.mark.parametrize("tier", ["memory", "local", "remote"])
def test_training_goes_on_bit_for_bit_from_any_source(saved, server, tier) -> None:
    sources = {
        "memory": saved.by_slot(),
        "local": saved.by_file(),
        "remote": shards.by_url(server.url + "/", saved.manifest),
    }
    state = make(2)
    random.seed(99)
    loader = saved.loader(state)

    loaded = loader(saved.decide(sources[tier]))

    assert loaded.ok, (loaded.error, loaded.bad)
    assert list(loaded.bytes_by_tier) == [tier]
    assert loaded.metadata == {"loss": 1.5}
    assert loader.notes == []
    assert (state["epoch"], state["data"].state["epoch"]) == (3, 3)
    assert torch.equal(state["data"].state["order"], torch.arange(4))
    assert state["scheduler"].last_epoch == 3
    train(state, 3)
    assert_equal(tensors(state), saved.later)


def test_memory_of_live_tensors_stays_where_it_is(saved) -> None:
    state = make(2)
    before = {n: p.data_ptr() for n, p in state["model"].state_dict().items()}
    extra = state["extra"].data_ptr()

    assert saved.loader(state)(saved.decide(saved.by_slot())).ok

    assert {n: p.data_ptr() for n, p in state["model"].state_dict().items()} == before
    assert state["extra"].data_ptr() == extra


def test_optimizer_state_is_created_without_a_step(saved) -> None:
    state = make(2)
    stepped = []
    state["optimizer"].register_step_pre_hook(lambda *_: stepped.append(1))

    assert saved.loader(state)(saved.decide(saved.by_file())).ok

    assert stepped == []
    parameter = state["model"].body[0].weight
    values = state["optimizer"].state[parameter]
    assert list(values) == ["step", "exp_avg", "exp_avg_sq"]
    assert values["step"] == 3
    assert not values["exp_avg"].requires_grad
    assert type(values["exp_avg"]) is torch.Tensor


def test_bad_bytes_are_found_and_the_chunk_is_named(saved) -> None:
    middle = len(saved.file) // 2
    with open(saved.path, "r+b") as file:
        file.seek(middle)
        file.write(bytes([saved.file[middle] ^ 1]))

    loaded = saved.loader(make(2))(saved.decide(saved.by_file()))

    assert not loaded.ok
    (bad,) = loaded.bad
    assert (bad.shard_rank, bad.tier, bad.holder, bad.proven) == (0, "local", 0, True)
    assert f"chunk {middle // shards.CHUNK} of {saved.path}" in bad.detail


@pytest.mark.parametrize("tier", ["memory", "local", "remote"])
@pytest.mark.parametrize("where", ["header", "data", "objects"])
def test_a_flipped_bit_anywhere_in_any_source_is_proven_bad(saved, server, tier, where) -> None:
    at = {"header": 40, "data": len(saved.file) // 2, "objects": len(saved.file) - 9}[where]
    slot = saved.memory.slot(0, 1)
    for path in (saved.path, slot):
        with open(path, "r+b") as file:
            file.seek(at)
            file.write(bytes([saved.file[at] ^ 4]))
    sources = {
        "memory": saved.by_slot(),
        "local": saved.by_file(),
        "remote": shards.by_url(server.url + "/", saved.manifest),
    }

    loaded = saved.loader(make(2))(saved.decide(sources[tier]))

    assert loaded.error is None
    assert [(b.tier, b.proven) for b in loaded.bad] == [(tier, True)]


def test_where_a_copy_is_bad_the_next_serves_and_the_bad_one_is_told(saved) -> None:
    with open(saved.memory.slot(0, 1), "r+b") as file:
        file.seek(len(saved.file) // 2)
        file.write(b"\0\1\2\3\4\5\6\7")
    state = make(2)
    loader = saved.loader(state)

    first = loader(saved.decide(saved.by_slot(), saved.by_file()))
    assert not first.ok
    assert [(b.tier, b.proven) for b in first.bad] == [("memory", True)]

    assert loader(saved.decide(saved.by_file())).ok
    train(state, 3)
    assert_equal(tensors(state), saved.later)


def test_a_source_out_of_reach_is_passed_over_and_proves_nothing(saved) -> None:
    away = shards.by_url("http://127.0.0.1:1/", saved.manifest)
    state = make(2)

    loaded = saved.loader(state)(saved.decide(away, saved.by_file()))
    assert loaded.ok
    assert list(loaded.bytes_by_tier) == ["local"]

    alone = saved.loader(make(2))(saved.decide(away))
    assert not alone.ok
    assert [(b.tier, b.proven) for b in alone.bad] == [("remote", False)]


def test_a_file_that_is_gone_is_proven_gone(saved) -> None:
    os.unlink(saved.path)

    loaded = saved.loader(make(2))(saved.decide(saved.by_file()))

    assert [b.proven for b in loaded.bad] == [True]


def test_a_file_cut_short_is_proven_bad(saved) -> None:
    os.truncate(saved.path, len(saved.file) - 1)

    assert [b.proven for b in saved.loader(make(2))(saved.decide(saved.by_file())).bad] == [True]


def test_a_slot_that_holds_another_step_by_now_is_not_read(saved) -> None:
    os.unlink(saved.memory.slot_manifest(0, 1))

    loaded = saved.loader(make(2))(saved.decide(saved.by_slot()))

    assert [(b.proven, "does not hold it any more" in b.detail) for b in loaded.bad] == [
        (True, True)
    ]


def test_another_manifest_than_was_decided_is_proven_bad(saved) -> None:
    decision = shards.with_fingerprint(saved.decide(saved.by_file()), 0, "0" * 32)

    assert [b.proven for b in saved.loader(make(2))(decision).bad] == [True]


def test_what_does_not_fit_is_named_all_at_once(saved) -> None:
    state = make(2, width=32)
    state["more"] = nn.Linear(2, 2)
    state["fresh"] = state.pop("extra")

    loaded = saved.loader(state)(saved.decide(saved.by_file()))

    assert isinstance(loaded.error, StructureMismatch)
    text = str(loaded.error)
    assert "in the script but not in the checkpoint (3): " in text
    assert "more.weight (2, 2)" in text
    assert "in the checkpoint but not in the script (1): extra" in text
    assert "model.body.0.weight: saved (64, 16) float32, here (32, 16) float32" in text
    assert "spec.checkpoint.runName" in text


def test_another_dtype_is_named(saved) -> None:
    state = make(2)
    state["model"].head.float()

    error = saved.loader(state)(saved.decide(saved.by_file())).error

    assert "model.head.weight: saved (16, 16) bfloat16, here (16, 16) float32" in str(error)


def test_a_fresh_start_touches_nothing(saved) -> None:
    state = make(2)
    before = tensors(state)
    decision = shards.decide([saved.manifest], {0: [saved.by_file()]})

    loaded = saved.loader(state)(type(decision)(round="r", serial=1, attempt=3, base=None))

    assert loaded.ok
    assert_equal(tensors(state), before)
    assert len(state["optimizer"].state) == 0


def test_gradients_come_back_where_they_were_saved(tmp_path) -> None:
    state = make(1)
    train(state, 1)
    state["model"].head.weight.grad = None
    walked = structure.walk(state, gradients=True)
    present = [t for t in walked.tensors if t.now() is not None]
    walked.tensors = tuple(present)
    plan = make_plan(walked, 0, 1)
    file = shards.shard_bytes(walked, plan, 0)
    manifest = shards.sealed(file, 0, 1, plan.id)
    shards.write_shard(str(tmp_path), file, manifest)
    other = make(2)
    other["model"].head.weight.grad = torch.ones_like(other["model"].head.weight)
    settings = LoadSettings(rank=0, world_size=1, reach=Reach(memory=MemoryLayout(str(tmp_path))))
    loader = Loader(lambda: structure.walk(other, gradients=True), settings)

    loaded = loader(shards.decide([manifest], {0: [shards.by_file(str(tmp_path), manifest)]}))

    assert loaded.ok, loaded.error
    assert other["model"].head.weight.grad is None
    for a, b in zip(
        state["model"].body.parameters(), other["model"].body.parameters(), strict=True
    ):
        assert torch.equal(a.grad, b.grad)


GRADIENTS = ["__backstay__.grad.model.weight", "__backstay__.grad.model.bias"]


def accumulating(tmp_path, absent: dict[int, list[str]], on_world_change: str):
    """One process loads what two ranks saved between two backward passes."""
    manifests, sources = [], {}
    for rank in (0, 1):
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        model(torch.full((2, 4), 1.0 + rank)).sum().backward()
        for name in absent[rank]:
            getattr(model, name.rpartition(".")[2]).grad = None
        walked = structure.walk(
            {"model": model}, gradients=True, rank=rank, world_size=2, replicated=["model"]
        )
        plan = make_plan(walked, rank, 2, lambda mine: [mine, mine])
        file = shards.shard_bytes(walked, plan, rank, {ABSENT_GRADIENTS_KEY: absent[rank]})
        manifests.append(shards.sealed(file, rank, 2, plan.id))
        shards.write_shard(str(tmp_path), file, manifests[-1])
        sources[rank] = [shards.by_file(str(tmp_path), manifests[-1])]
    state = {"model": nn.Linear(4, 3)}
    settings = LoadSettings(
        rank=0,
        world_size=1,
        reach=Reach(memory=MemoryLayout(str(tmp_path))),
        on_world_change=on_world_change,
    )
    loader = Loader(lambda: structure.walk(state, gradients=True), settings)
    return loader(shards.decide(manifests, sources)), loader.notes, state["model"]


def test_gradients_that_each_rank_kept_do_not_fit_another_world(tmp_path) -> None:
    loaded, _, _ = accumulating(tmp_path, {0: [], 1: GRADIENTS[1:]}, "error")

    assert isinstance(loaded.error, StructureMismatch)
    assert "kept by each of 2 ranks for itself, here are 1 ranks (2)" in str(loaded.error)
    assert all(name in str(loaded.error) for name in GRADIENTS)
    assert 'on_world_change="reset"' in str(loaded.error)


def test_gradients_that_each_rank_kept_are_dropped_on_request_and_told(tmp_path) -> None:
    loaded, notes, model = accumulating(tmp_path, {0: [], 1: []}, "reset")

    assert loaded.ok, loaded.error
    assert [model.weight.grad, model.bias.grad] == [None, None]
    assert [n for n in notes if "gradients" in n] == [
        "gradients of 2 parameters (model.weight ...): kept per rank, dropped"
    ]


def test_gradients_that_no_rank_had_are_no_obstacle(tmp_path) -> None:
    loaded, notes, model = accumulating(tmp_path, {0: GRADIENTS, 1: GRADIENTS}, "error")

    assert loaded.ok, loaded.error
    assert (model.weight.grad, model.bias.grad, notes) == (None, None, [])


def test_loading_needs_no_second_copy_of_the_state(tmp_path) -> None:
    state = {"model": nn.Linear(2048, 4096, bias=False)}
    walked = structure.walk(state)
    plan = make_plan(walked, 0, 1)
    file = shards.shard_bytes(walked, plan, 0)
    manifest = shards.sealed(file, 0, 1, plan.id)
    shards.write_shard(str(tmp_path), file, manifest)
    expected = state["model"].weight.detach().clone()
    source = shards.by_file(str(tmp_path), manifest)
    size = len(file)
    del file, walked, plan
    nn.init.zeros_(state["model"].weight)
    settings = LoadSettings(rank=0, world_size=1, reach=Reach(memory=MemoryLayout(str(tmp_path))))
    loader = Loader(lambda: structure.walk(state), settings)
    with open("/proc/self/clear_refs", "w") as refs:
        refs.write("5")
    before = _status("VmRSS")

    assert loader(shards.decide([manifest], {0: [source]})).ok

    assert torch.equal(state["model"].weight, expected)
    assert _status("VmHWM") - before < size / 4


def _status(name: str) -> int:
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024
