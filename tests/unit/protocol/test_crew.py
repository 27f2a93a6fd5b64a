from __future__ import annotations

import threading

import pytest

from backstay_protocol.crew import Crew
from backstay_protocol.errors import Cancelled, Unreachable


class Blocking:
    """Something that blocks until it is interrupted."""

    def __init__(self) -> None:
        self.interrupted = threading.Event()

    def interrupt(self) -> None:
        self.interrupted.set()


def block(crew: Crew) -> None:
    with crew.interruptible(Blocking()) as blocking:
        assert blocking.interrupted.wait(30)


def threads_left() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name == "backstay-crew"]


def test_all_workers_do_their_part() -> None:
    done: list[int] = []
    Crew("x").run(lambda: done.append(1), 5)
    assert done == [1] * 5


def test_the_first_failure_interrupts_the_others_and_is_raised() -> None:
    crew, turn = Crew("x"), iter(range(3))

    def work() -> None:
        if next(turn) == 2:
            raise FileNotFoundError("gone")
        block(crew)

    with pytest.raises(FileNotFoundError, match="gone"):
        crew.run(work, 3)
    assert crew.stopped.is_set()
    assert threads_left() == []


def test_cancel_interrupts_what_blocks() -> None:
    crew, cancel = Crew("the thing"), threading.Event()

    def work() -> None:
        cancel.set()
        block(crew)

    with pytest.raises(Cancelled, match="the thing: told to stop"):
        crew.run(work, 2, cancel=cancel)
    assert threads_left() == []


def test_the_deadline_interrupts_what_blocks() -> None:
    crew = Crew("the thing")
    with pytest.raises(Unreachable, match=r"the thing: not finished in 0\.05 s"):
        crew.run(lambda: block(crew), 2, deadline=0.05)
    assert threads_left() == []


def test_a_worker_that_begins_to_block_after_the_stop_is_interrupted_too() -> None:
    crew = Crew("x")
    first = threading.Event()
    turn = iter([True, False])

    def work() -> None:
        if next(turn):
            first.set()
            raise OSError("broke")
        first.wait()
        crew.stopped.wait()
        block(crew)

    with pytest.raises(OSError, match="broke"):
        crew.run(work, 2)
    assert threads_left() == []
