"""What a save in trouble may cost the training loop."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from backstay.capture import Bounds
from backstay.copying import Transfer
from backstay.savejob import NewestThread
from backstay_protocol.messages import CaptureNotice
from support.capturing import attached

ATTEMPT = 1_000_001


@pytest.fixture
def stuck_copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Copies that don't go on before the event is set."""
    go_on = threading.Event()
    run_late = Transfer.run_late

    def late(transfer: Transfer, *args: object) -> None:
        go_on.wait()
        run_late(transfer, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Transfer, "run_late", late)
    yield go_on
    go_on.set()


def test_a_save_that_was_given_up_is_not_waited_for_again(
    tmp_path: Path, stuck_copies: threading.Event
) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attached(tmp_path, {"model": model}, bounds=Bounds(copy_seconds=0.5)) as rank:
        given_up = rank.engine.save(1, ATTEMPT)
        optimizer.step()
        begun = time.monotonic()
        for step in range(2, 12):
            optimizer.step()
            assert "still under way" in rank.engine.save(step, ATTEMPT).why
        assert time.monotonic() - begun < 0.5
        stuck_copies.set()
        assert given_up.done.wait(10)
        assert "took too long" in given_up.why
        assert rank.engine.save(12, ATTEMPT).result(10)


def test_a_sidecar_that_hangs_delays_neither_saves_nor_the_end(tmp_path: Path) -> None:
    x = torch.zeros(4)
    go_on, hangs = threading.Event(), threading.Event()
    told: list[int] = []

    def hang(notice: CaptureNotice) -> None:
        told.append(notice.step)
        hangs.set()
        go_on.wait()

    with attached(tmp_path, {"x": x}) as rank:
        rank.engine._notify = hang
        for step in range(1, 6):
            assert rank.engine.save(step, ATTEMPT).result(10), "no notice is waited for"
            rank.confirm(step)
            assert hangs.wait(10)
        begun = time.monotonic()
        rank.engine.close()
        assert time.monotonic() - begun < 5
        assert told == [1]
        go_on.set()
        thread = rank.engine._notices._thread
        assert thread is not None
        thread.join(10)
        assert not thread.is_alive()
        assert told == [1], "what was pending when the time was up is dropped"


def test_of_notices_that_wait_the_newest_is_told_at_the_end() -> None:
    begun, go_on = threading.Event(), threading.Event()
    done: list[int] = []

    def first() -> None:
        begun.set()
        go_on.wait()
        done.append(1)

    notices = NewestThread("notices")
    notices.run(first)
    assert begun.wait(10)
    notices.run(lambda: done.append(2))
    notices.run(lambda: done.append(3))
    go_on.set()
    notices.stop(10)
    notices.run(lambda: done.append(4))
    assert done == [1, 3]
