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
