"""What training waits for is copied by several threads, whole, and none of them stays."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from backstay import copying
from backstay.copying import Copy, Streams, Transfer, batches


@pytest.fixture(autouse=True)
def one_torch_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(copying, "GROUP_TENSORS", 2)
    monkeypatch.setattr(copying, "_spare_threads", lambda: 1)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_the_early_set_is_whole_when_start_returns() -> None:
    sources = [torch.full((1000 + i,), float(i), requires_grad=True) for i in range(41)]
    copies = [Copy(torch.zeros(len(source)), source) for source in sources]
    before = threading.active_count()
    Transfer(Streams(), batches(copies), ()).start()
    assert threading.active_count() == before
    assert all(torch.equal(copy.destination, copy.source) for copy in copies)
    assert not any(copy.destination.requires_grad for copy in copies)


def test_a_copy_that_fails_in_any_thread_fails_the_save() -> None:
    copies = [Copy(torch.zeros(10), torch.ones(10)) for _ in range(20)]
    for place in (0, 19):
        bad = [*copies[:place], Copy(torch.zeros(3), torch.ones(10)), *copies[place + 1 :]]
        with pytest.raises(RuntimeError):
            Transfer(Streams(), batches(bad), ()).start()
