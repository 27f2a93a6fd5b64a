from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from backstay.control_thread import must_leave
from backstay_protocol.control import ControlBlock, Word
from backstay_protocol.names import EXIT_LEAVE, EXIT_ORPHAN

SCRIPT = """
import signal, sys, ctypes
from backstay.control_thread import ControlThread
from backstay_protocol.control import ControlBlock, Word
block = ControlBlock(sys.argv[1], create=True, rank=0)
block[Word.ATTEMPT] = 7
{before}
thread = ControlThread(block, exit_with_parent={with_parent}, warn=lambda w: print(w, flush=True))
thread.start()
print("ready", flush=True)
{body}
"""
HANG_IN_C = "ctypes.CDLL(None).sleep(600)"
LAUNCHER = (
    "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', *sys.argv[1:]]); p.wait()"
)


def script(body: str, before: str = "", with_parent: bool = False) -> str:
    return SCRIPT.format(body=body, before=textwrap.dedent(before), with_parent=with_parent)


def popen(command: list[str]) -> subprocess.Popen[bytes]:
    """Started, and its control thread at work. Unbuffered: a line read takes nothing after it."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0)
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line == b"ready\n", process.communicate()
    return process


@pytest.fixture
def start(tmp_path):
    processes = []

    def _start(code: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", code, f"{tmp_path}/control"]
        process = popen(command)
        processes.append(process)
        return process

    yield _start
    for process in processes:
        process.kill()
        process.communicate()


def test_the_word_to_leave_ends_a_process_whose_main_thread_hangs_in_c(start, tmp_path) -> None:
    process = start(script(HANG_IN_C))
    block = ControlBlock(f"{tmp_path}/control", create=False)
    block[Word.LEAVE_ATTEMPT] = 7

    assert process.wait(20) == EXIT_LEAVE
    assert "told this rank to leave" in process.stderr.read().decode()
    assert block[Word.LEAVE_SEEN] == 7
    block.close()


HANG_IN_GLOO = """
import threading, torch, torch.distributed as dist
store = dist.FileStore(sys.argv[2], 2)
dist.init_process_group("gloo", store=store, rank=int(sys.argv[3]), world_size=2)
dist.barrier()
threading.Timer(0.5, print, ["hangs"], {"flush": True}).start()
if sys.argv[3] == "0":
    dist.all_reduce(torch.zeros(1))
signal.pause()
"""


@pytest.mark.parametrize("orphaned", [False, True], ids=["leave", "orphan"])
def test_a_rank_that_hangs_in_a_collective_leaves(tmp_path, orphaned) -> None:
    """Rank 0 waits in gloo for rank 1, which never comes and keeps the connection."""
    control = f"{tmp_path}/control"
    command = [sys.executable, "-c", script(HANG_IN_GLOO, with_parent=orphaned)]
    other = [sys.executable, "-c", script(HANG_IN_GLOO), f"{control}-1", f"{tmp_path}/store", "1"]
    command += [control, f"{tmp_path}/store", "0"]
    if orphaned:
        command = [sys.executable, "-c", LAUNCHER, *command[2:]]
    with ended(command) as rank, ended(other):
        assert rank.stdout.readline() == b"ready\n"
        assert rank.stdout.readline() == b"hangs\n", rank.stderr.read()
        if orphaned:
            rank.send_signal(signal.SIGKILL)
        else:
            block = ControlBlock(control, create=False)
            block[Word.LEAVE_ATTEMPT] = 7
            block.close()

        # Both ends of its pipes close only when the rank is gone, not just its launcher.
        said = rank.stderr.read().decode()

    assert f"(exit code {EXIT_ORPHAN if orphaned else EXIT_LEAVE})" in said


@contextmanager
def ended(command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdout=pipe, stderr=pipe, bufsize=0)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_full_pipe_behind_stderr_does_not_hold_a_rank_that_must_leave(start, tmp_path) -> None:
    fill = """
        import os
        os.set_blocking(2, False)
        try:
            while True: os.write(2, b"x" * 4096)
        except BlockingIOError: os.set_blocking(2, True)
    """
    process = start(script(HANG_IN_C, before=fill))
    block = ControlBlock(f"{tmp_path}/control", create=False)
    block[Word.LEAVE_ATTEMPT] = 7
    block.close()

    assert process.wait(20) == EXIT_LEAVE


@pytest.mark.parametrize(
    ("leave", "attempt", "expected"),
    [(7, 7, True), (6, 7, False), (8, 7, False), (0, 0, False)],
    ids=["mine", "an-older-one", "a-newer-one", "nothing"],
)
def test_the_word_to_leave_counts_for_its_own_attempt_only(leave, attempt, expected) -> None:
    assert must_leave({Word.LEAVE_ATTEMPT: leave, Word.ATTEMPT: attempt}) is expected


def test_a_rank_leaves_when_its_launcher_is_gone(tmp_path) -> None:
    code = script(HANG_IN_C, with_parent=True)
    launcher = popen([sys.executable, "-c", LAUNCHER, code, f"{tmp_path}/control"])
    launcher.send_signal(signal.SIGKILL)

    # Both ends of its pipes close only when the orphan is gone too.
    _, said = launcher.communicate(timeout=20)
    assert f"the launcher of this rank is gone (exit code {EXIT_ORPHAN})" in said.decode()


def test_a_sigterm_handler_of_the_script_is_warned_of_once_and_left_alone(start) -> None:
    process = start(
        script(
            "import time; time.sleep(3); thread.stop(); print(signal.getsignal(15).__name__)",
            before="def mine(*_): pass\nsignal.signal(15, mine)",
        )
    )

    out, _ = process.communicate(timeout=30)
    assert out.count(b"SIGTERM handler") == 1
    assert out.endswith(b"mine\n")


def test_stopping_ends_the_thread(start) -> None:
    process = start(script("thread.stop(); thread.stop(); block.close(); print('over')"))

    assert process.communicate(timeout=30)[0] == b"over\n"
    assert process.returncode == 0
