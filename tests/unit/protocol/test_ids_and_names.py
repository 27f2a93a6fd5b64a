from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backstay_protocol import errors, names
from backstay_protocol.clock import SYSTEM_CLOCK
from backstay_protocol.ids import (
    CheckpointId,
    attempt_for_people,
    first_attempt_of,
    format_attempt,
    format_rank,
    generation_of,
)

POINTS = st.builds(CheckpointId, st.integers(0, 10**12 - 1), st.integers(0, 10**18 - 1))


@given(POINTS)
def test_a_checkpoint_is_named_by_step_and_attempt(point: CheckpointId) -> None:
    assert CheckpointId.parse(str(point)) == point
    assert CheckpointId.parse(f"{point.step}-{point.attempt}") == point


@given(POINTS, POINTS)
def test_names_sort_as_numbers_do(one: CheckpointId, other: CheckpointId) -> None:
    assert (one < other) == (str(one) < str(other))


NO_NAMES = ["", "5", "5-", "-5", "a-b", "5-6-7", " 5-6", "5-6\n", "1" * 13 + "-1"]


@pytest.mark.parametrize("text", NO_NAMES)
def test_what_is_no_name_is_refused_with_the_text(text: str) -> None:
    with pytest.raises(ValueError, match="not a checkpoint name"):
        CheckpointId.parse(text)


def test_a_newer_generation_outranks_every_number_of_an_older_one() -> None:
    assert first_attempt_of(2) > first_attempt_of(1) + 900_000
    assert generation_of(first_attempt_of(7)) == 7
    assert generation_of(5) == 0


def test_people_see_generations_counted_from_the_jobs_first() -> None:
    first = 1_700_000_000
    assert attempt_for_people(first_attempt_of(first), first) == "1.1"
    assert attempt_for_people(first_attempt_of(first + 2) + 4, first) == "3.5"


def test_padded_numbers() -> None:
    assert format_rank(7) == "00007"
    assert format_attempt(7) == "0" * 17 + "7"


def test_web_frameworks_read_and_document_a_checkpoint_as_its_name() -> None:
    pydantic = pytest.importorskip("pydantic")
    adapter = pydantic.TypeAdapter(CheckpointId)
    assert adapter.validate_python("5-6") == CheckpointId(5, 6)
    assert adapter.validate_python(CheckpointId(5, 6)) == CheckpointId(5, 6)
    assert adapter.dump_json(CheckpointId(5, 6)).decode() == f'"{CheckpointId(5, 6)}"'
    assert adapter.json_schema() == {"pattern": r"^\d{1,12}-\d{1,18}$", "type": "string"}
    with pytest.raises(pydantic.ValidationError):
        adapter.validate_python("five")


@pytest.mark.parametrize(
    ("version", "talks", "reads"),
    [
        ("1.7", True, True),
        ("1.6", True, True),
        ("1.8", True, True),
        ("1.5", False, True),
        ("1.0", False, True),
        ("1.9", False, False),
        ("2.7", False, False),
        ("0.7", False, False),
        ("x", False, False),
        ("1", False, False),
        ("1.7.0", False, False),
    ],
)
def test_neighbouring_minors_talk_and_what_older_ones_kept_is_read(
    monkeypatch: pytest.MonkeyPatch, version: str, talks: bool, reads: bool
) -> None:
    monkeypatch.setattr(names, "PROTOCOL_MINOR", 7)
    assert (names.works_with(version), names.can_read(version)) == (talks, reads)


def test_reserved_names_in_shard_files() -> None:
    assert names.rank_name(3, "rng") == "__backstay__.rank.3.rng"
    assert names.objects_name(3) == "__backstay__.objects.3"
    assert names.TIERS == ("memory", "local", "neighbor", "remote")


def test_a_refusal_keeps_its_parts() -> None:
    refused = errors.Refused(409, "Busy", "the slot is busy", "try again")
    assert (refused.status, refused.code, refused.hint) == (409, "Busy", "try again")
    assert str(refused) == "the slot is busy (try again)"
    assert str(errors.Refused(404, "Gone", "gone")) == "gone"


def test_the_systems_clock_moves_forward() -> None:
    before = SYSTEM_CLOCK.monotonic()
    SYSTEM_CLOCK.sleep(0.001)
    assert SYSTEM_CLOCK.monotonic() > before
    assert SYSTEM_CLOCK.time() > 1.6e9


PURE = (
    "history",
    "completeness",
    "choice",
    "commit",
    "retention",
    "schedules",
    "ring",
    "rounds",
    "round_events",
    "round_state",
    "round_steps",
    "round_load",
    "promises",
)
BANNED = {
    "os",
    "time",
    "random",
    "asyncio",
    "threading",
    "logging",
    "socket",
    "subprocess",
    "datetime",
}


@pytest.mark.parametrize("module", PURE)
def test_pure_modules_import_nothing_that_acts(module: str) -> None:
    source = Path(names.__file__).with_name(f"{module}.py").read_text()
    imported = {
        (node.module or "") if isinstance(node, ast.ImportFrom) else alias.name
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    assert not {name.split(".")[0] for name in imported} & BANNED


def test_the_protocol_needs_the_standard_library_only() -> None:
    folder = Path(names.__file__).parent
    modules = sorted(f"backstay_protocol.{path.stem}" for path in folder.glob("[!_]*.py"))
    code = f"import sys; sys.path.insert(0, {str(folder.parent)!r}); import {', '.join(modules)}"
    subprocess.run([sys.executable, "-S", "-c", code], check=True, timeout=30)
