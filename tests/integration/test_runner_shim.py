"""Nothing of a program stays, whatever it forked and however it or the runner ends."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from backstay_cli.local import tree
from backstay_cli.local.processes import Exit, Process, ProcessSpec
from support.local_job import ENV_MARK, survivors, wait_until

# A program with every kind of descendant: children, a background job, a daemon that forked twice
# and left the session, one that ignores SIGTERM, one with no open descriptors.
FAMILY = textwrap.dedent(
    """
    sleep 1000 &
    setsid sh -c 'sleep 1001 & (setsid sleep 1002 &) ; sleep 1003' &
    sh -c 'trap "" TERM; sleep 1004; sleep 1005' &
    (setsid sleep 1006 <&- >&- 2>&- &)
    echo ready
    """
)
FAMILY_SIZE = 8  # living processes besides the program itself


@pytest.fixture
def mark() -> Iterator[str]:
    value = uuid.uuid4().hex
    yield value
    for line in survivors(value):
        os.kill(int(line.split()[0]), signal.SIGKILL)


def spec(tmp_path: Path, mark: str, script: str) -> ProcessSpec:
    return ProcessSpec(
        name="it",
        argv=("sh", "-c", script),
        env={**os.environ, ENV_MARK: mark},
        cwd=str(tmp_path),
        log=str(tmp_path / "it.log"),
    )


async def run_until(process_spec: ProcessSpec, do: str) -> Exit:
    ends: list[Exit] = []
    process = Process(process_spec, ends.append)
    if do != "nothing":
        await asyncio.to_thread(wait_until, lambda: "ready" in Path(process_spec.log).read_text())
        getattr(process, do)()
    await asyncio.wait_for(process.ended.wait(), 30)
    return ends[0]


async def test_when_the_program_ends_its_leftovers_end_with_it(tmp_path: Path, mark: str) -> None:
    end = await run_until(spec(tmp_path, mark, f"{FAMILY} exit 7"), "nothing")
    assert (end.code, end.signal, end.reason) == (7, 0, "Error")
    assert survivors(mark) == []


async def test_kill_ends_the_whole_family_at_once(tmp_path: Path, mark: str) -> None:
    end = await run_until(spec(tmp_path, mark, f"{FAMILY} sleep 1007"), "kill")
    assert (end.code, end.signal) == (137, 9)
    assert survivors(mark) == []


async def test_terminate_lets_the_program_end_by_itself(tmp_path: Path, mark: str) -> None:
    script = f"trap 'echo saved; exit 3' TERM; {FAMILY} while :; do sleep 0.1; done"
    end = await run_until(spec(tmp_path, mark, script), "terminate")
    assert end.code == 3
    assert "saved" in (tmp_path / "it.log").read_text()
    assert survivors(mark) == []


async def test_a_program_killed_by_a_signal_is_told_as_such(tmp_path: Path, mark: str) -> None:
    end = await run_until(spec(tmp_path, mark, "kill -SEGV $$"), "nothing")
    assert (end.code, end.signal) == (128 + signal.SIGSEGV, signal.SIGSEGV)
    assert "SIGSEGV" in end.reason


async def test_a_program_that_does_not_exist_is_told_in_its_log(tmp_path: Path, mark: str) -> None:
    missing = ProcessSpec(
        name="it",
        argv=("/no/such/program",),
        env={ENV_MARK: mark},
        cwd=str(tmp_path),
        log=str(tmp_path / "it.log"),
    )
    end = await run_until(missing, "nothing")
    assert end.code == 127
    assert "can't start /no/such/program: No such file" in (tmp_path / "it.log").read_text()


async def test_programs_find_the_signals_as_a_shell_would_give_them(
    tmp_path: Path, mark: str
) -> None:
    script = f"exec {sys.executable} -S -c 'print(open(\"/proc/self/status\").read())'"
    await run_until(spec(tmp_path, mark, script), "nothing")
    fields = dict(
        line.split(":\t", 1)
        for line in (tmp_path / "it.log").read_text().splitlines()
        if ":\t" in line
    )
    assert int(fields["SigBlk"], 16) == 0
    pipe_and_file_size = 1 << (signal.SIGPIPE - 1) | 1 << (signal.SIGXFSZ - 1)
    # Python ignores these two itself; what the shell saw is proven by its pipes below
    inherited = sum(  # under nohup, say: a shell passes that on, too
        1 << (number - 1)
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM)
        if signal.getsignal(number) is signal.SIG_IGN
    )
    assert int(fields["SigIgn"], 16) & ~pipe_and_file_size & ~inherited == 0
    await run_until(spec(tmp_path, mark, "yes | head -1 > /dev/null; echo done"), "nothing")
    assert "done" in (tmp_path / "it.log").read_text()
    assert "Broken pipe" not in (tmp_path / "it.log").read_text()


# A "runner" of its own process: starts families under shims and says their shims' pids.
RUNNER = textwrap.dedent(
    """
    import asyncio, os, sys
    from backstay_cli.local import tree
    from backstay_cli.local.processes import Process, ProcessSpec

    async def main():
        tree.become_subreaper()
        processes = [
            Process(
                ProcessSpec(
                    name=f"p{i}",
                    argv=("sh", "-c", sys.argv[2]),
                    env=dict(os.environ),
                    cwd=sys.argv[1],
                    log=f"{sys.argv[1]}/p{i}.log",
                ),
                lambda end: print("ended", end.code, flush=True),
            )
            for i in range(2)
        ]
        print(*(p.shim_pid for p in processes), flush=True)
        for process in processes:
            await process.ended.wait()
        print("strays", tree.kill_strays(set()), flush=True)
        for _ in range(200):
            if not tree.kill_strays(set()):
                break
            await asyncio.sleep(0.01)
        print("done", flush=True)

    asyncio.run(main())
    """
)


@pytest.fixture
def runner(tmp_path: Path, mark: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", RUNNER, str(tmp_path), f"{FAMILY} sleep 1008"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, ENV_MARK: mark},
    )
    yield process
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def both_ready(tmp_path: Path, mark: str) -> bool:
    logs = [tmp_path / f"p{i}.log" for i in range(2)]
    # 1 runner, and per family: shim, shell, its `sleep 1008`, the rest
    whole = len(survivors(mark)) >= 1 + 2 * (FAMILY_SIZE + 2)
    return whole and all(log.exists() and "ready" in log.read_text() for log in logs)


def test_kill_9_of_the_runner_leaves_nothing(
    tmp_path: Path, mark: str, runner: subprocess.Popen[str]
) -> None:
    wait_until(lambda: both_ready(tmp_path, mark))
    runner.kill()
    runner.wait()
    wait_until(lambda: survivors(mark) == [])


def test_kill_9_of_the_runner_while_it_starts_leaves_nothing(
    tmp_path: Path, mark: str, runner: subprocess.Popen[str]
) -> None:
    assert runner.stdout is not None
    runner.stdout.readline()  # the shims were just forked
    runner.kill()
    runner.wait()
    wait_until(lambda: survivors(mark) == [])


def test_kill_9_of_a_shim_leaves_nothing_either(
    tmp_path: Path, mark: str, runner: subprocess.Popen[str]
) -> None:
    assert runner.stdout is not None
    shims = [int(pid) for pid in runner.stdout.readline().split()]
    wait_until(lambda: both_ready(tmp_path, mark))
    for shim in shims:
        os.kill(shim, signal.SIGKILL)
    assert runner.stdout.readline() == "ended 137\n"
    assert runner.stdout.readline() == "ended 137\n"
    assert runner.wait(timeout=30) == 0
    assert survivors(mark) == []


def test_a_process_that_has_gone_is_not_killed_by_its_number() -> None:
    child = subprocess.Popen(["sleep", "1009"])
    (found,) = [c for c in tree.children_by_parent()[os.getpid()] if c.pid == child.pid]
    older = tree.ProcessId(found.pid, found.started - 1)
    assert not tree.kill(older)
    assert child.poll() is None
    assert tree.kill(found)
    child.wait()
    assert not tree.kill(found)
