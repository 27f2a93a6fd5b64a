from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3] / "protocol"


def run(faults: str, code: str) -> subprocess.CompletedProcess[str]:
    program = f"from backstay_protocol.faults import fault\n{code}"
    return subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": str(ROOT), "BACKSTAY_FAULTS": faults},
        capture_output=True,
        text=True,
        timeout=30,
    )


def test_points_do_nothing_unless_asked_for() -> None:
    assert run("", "fault('a.b'); print('ok')").stdout == "ok\n"
    assert run("other=kill", "fault('a.b'); print('ok')").stdout == "ok\n"


def test_kill_is_a_real_kill_at_the_passage_that_was_named() -> None:
    done = run("a.b=kill@3", "for i in range(5): print(i, flush=True); fault('a.b')")
    assert done.returncode == -signal.SIGKILL
    assert done.stdout == "0\n1\n2\n"


def test_the_first_passage_is_the_default_and_a_star_means_every_one() -> None:
    code = (
        "for i in range(3):\n"
        "    try: fault('a.b'); print('-')\n"
        "    except OSError as error: print(error)"
    )
    assert run("a.b=raise", code).stdout == "fault point a.b\n-\n-\n"
    assert run("a.b=raise@*", code).stdout == "fault point a.b\n" * 3


def test_hanging_takes_the_seconds_that_were_named() -> None:
    begin = time.monotonic()
    assert run("x=kill,a.b=hang:0.5", "fault('a.b'); print('ok')").stdout == "ok\n"
    assert time.monotonic() - begin >= 0.5


@pytest.mark.parametrize("text", ["a.b", "a.b=explode", "a.b=kill@x"])
def test_what_is_not_a_plan_is_refused_at_start(text: str) -> None:
    done = run(text, "")
    assert done.returncode == 1
    assert "ValueError" in done.stderr
