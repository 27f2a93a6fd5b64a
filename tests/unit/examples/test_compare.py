"""Two checkpoints are equal only if every name, type, shape and byte is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from examples.char_gpt import compare as compare_module
from examples.char_gpt.compare import compare_folders

OBJECTS = {"scheduler": {"last_epoch": 4}, "data": {"epoch": 0, "position": 4}, "list": [1, 2.5]}


def write(folder: Path, objects: Any = OBJECTS, **changed: Any) -> Path:
    """A checkpoint of one rank, with some tensors replaced, or removed by None."""
    folder.mkdir(parents=True)
    tensors = {
        "model.emb.weight": np.arange(12, dtype=np.float32).reshape(3, 4),
        "optimizer.state.emb.weight.exp_avg": np.zeros((3, 4), np.float32),
        "optimizer.state.emb.weight.step": np.array(4, np.float32),
        "__backstay__.rank.0.rng.torch": np.arange(16, dtype=np.uint8),
        "__backstay__.objects.0": np.frombuffer(json.dumps(objects).encode(), np.uint8),
    }
    tensors |= {name.replace("__", "."): value for name, value in changed.items()}
    save_file({n: t for n, t in tensors.items() if t is not None}, folder / "00000.safetensors")
    return folder


def test_equal_checkpoints_are_equal_and_counted_by_kind(tmp_path: Path) -> None:
    found = compare_folders(write(tmp_path / "a"), write(tmp_path / "b"))
    assert found.equal
    assert {p.title: (p.num_values, p.num_different) for p in found.parts} == {
        "Parameters and buffers": (1, 0),
        "Optimizer state": (2, 0),
        "Learning-rate schedule": (1, 0),
        "Data position": (2, 0),
        "Random number generators": (1, 0),
        "Other": (1, 0),
    }


def test_one_changed_bit_is_found_and_named(tmp_path: Path) -> None:
    weight = np.arange(12, dtype=np.float32).reshape(3, 4)
    weight.view(np.uint32)[1, 1] ^= 1
    other = write(tmp_path / "b", model__emb__weight=weight)
    found = compare_folders(write(tmp_path / "a"), other)
    assert not found.equal
    assert found.differences == ("model.emb.weight: 1 of 48 bytes differ",)


def test_padding_between_tensors_does_not_count(tmp_path: Path) -> None:
    padding = {"__backstay__.pad.0": np.ones(7, np.uint8)}
    folder = write(tmp_path / "b")
    tensors = load_file(folder / "00000.safetensors")
    save_file(tensors | padding, folder / "00000.safetensors")
    assert compare_folders(write(tmp_path / "a"), folder).equal


def test_minus_zero_is_not_zero(tmp_path: Path) -> None:
    moments = -np.zeros((3, 4), np.float32)
    other = write(tmp_path / "b", optimizer__state__emb__weight__exp_avg=moments)
    assert not compare_folders(write(tmp_path / "a"), other).equal


def test_a_missing_name_and_another_type_are_said(tmp_path: Path) -> None:
    changed = {"model__emb__weight": np.zeros((3, 4), np.float64), "model__new": np.zeros(1)}
    other = write(tmp_path / "b", **changed)
    assert compare_folders(write(tmp_path / "a"), other).differences == (
        "model.emb.weight: F32 3x4 in the first, F64 3x4 in the second",
        "model.new: only in the second",
    )


def test_a_changed_value_is_shown_with_its_path(tmp_path: Path) -> None:
    objects = OBJECTS | {"data": {"epoch": 1, "position": 4}}
    found = compare_folders(write(tmp_path / "a"), write(tmp_path / "b", objects))
    assert found.differences == ("rank 0: data.epoch: 0 in the first, 1 in the second",)
    assert [p.title for p in found.parts if p.num_different] == ["Data position"]


def test_a_folder_without_shards_is_an_error_not_equality(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="was the checkpoint pulled"):
        compare_folders(write(tmp_path / "a"), tmp_path / "empty")


def test_nothing_is_not_equal_to_nothing() -> None:
    assert not compare_module.compare({}, {}).equal
