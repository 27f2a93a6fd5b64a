"""The S3 server that tests use leaves nothing behind, whatever happens to the tests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

_TESTS = Path(__file__).resolve().parents[1]
_STARTER = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from support.s3 import running_s3
with running_s3(Path(sys.argv[2])) as server:
    print(server.pid, flush=True)
    time.sleep(600)
"""


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"


def test_the_server_dies_with_a_test_run_that_is_killed_with_9(tmp_path: Path) -> None:
    starter = subprocess.Popen(
        [sys.executable, "-c", _STARTER, str(_TESTS), str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
    )
    with starter:
        assert starter.stdout is not None
        server = int(starter.stdout.readline())
        assert alive(server)
        os.kill(starter.pid, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while alive(server):
        assert time.monotonic() < deadline, "the server outlived its test run"
        time.sleep(0.01)
