"""What every rank learns of the others through the process group's store, and when it gives up."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist

from backstay import gathering
from backstay.gathering import GatherFailed, StoreGathers, World

NAME = "1000001/10"


def stores(kind: str, folder: Path, size: int) -> list[dist.Store]:
    """One connection for each rank."""
    if kind == "hash":
        return [dist.HashStore()] * size
    if kind == "file":
        return [dist.FileStore(str(folder / "store"), size) for _ in range(size)]
    first = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    others = [dist.TCPStore("127.0.0.1", first.port, is_master=False) for _ in range(size - 1)]
    return [first, *others]


def ranks(some: Sequence[dist.Store], seconds: float = 30.0) -> list[StoreGathers]:
    worlds = [World(store, rank, len(some)) for rank, store in enumerate(some)]
    return [StoreGathers(lambda world=world: world, seconds) for world in worlds]  # type: ignore[misc]


def gathered(ranks: Sequence[StoreGathers], name: str, given: Sequence[bytes]) -> list[list[bytes]]:
    with ThreadPoolExecutor(len(ranks)) as threads:
        return list(threads.map(lambda rank, data: give(rank, name, data), ranks, given))


def give(rank: StoreGathers, name: str, data: bytes) -> list[bytes]:
    gather = rank(name)
    assert gather is not None
    return gather(data)


@pytest.mark.parametrize("kind", ["tcp", "file", "hash"])
def test_every_rank_gets_every_ranks_bytes_in_order(kind: str, tmp_path: Path) -> None:
    given = [b"same", b"same", b"other", b"", b"same"]
    world = ranks(stores(kind, tmp_path, len(given)))
    assert gathered(world, NAME, given) == [given] * len(given)
    again = [b"%d" % rank for rank in range(len(given))]
    assert gathered(world, "1000001/20", again) == [again] * len(given)


def test_the_answer_does_not_grow_with_the_ranks_that_agree(tmp_path: Path) -> None:
    sizes = []
    for size in (2, 12):
        store = dist.HashStore()
        gathered(ranks([store] * size), NAME, [b"x" * 32] * size)
        sizes.append(len(store.get(f"{NAME}/all")))
    assert sizes[1] <= sizes[0] + 1


@pytest.mark.parametrize("kind", ["tcp", "file", "hash"])
def test_a_rank_that_does_not_come_is_named_and_the_others_go_on(kind: str, tmp_path: Path) -> None:
    world = ranks(stores(kind, tmp_path, 3), seconds=0.3)
    with ThreadPoolExecutor(2) as threads:
        some = [threads.submit(give, rank, NAME, b"x") for rank in world[:2]]
        for waiting in some:
            with pytest.raises(GatherFailed, match=r"ranks \[2\] did not come"):
                waiting.result()


def test_without_rank_0_the_others_give_up_and_it_does_not_wait_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = dist.HashStore()
    monkeypatch.setattr(gathering, "ANSWER_SECONDS", 0.1)
    world = ranks([store] * 2, seconds=0.1)
    with pytest.raises(GatherFailed, match="rank 0 gave no answer"):
        give(world[1], NAME, b"x")
    with pytest.raises(GatherFailed, match=r"ranks \[1\] waited in vain"):
        give(world[0], NAME, b"x")


def test_after_one_that_failed_the_next_gather_is_whole(tmp_path: Path) -> None:
    world = ranks(stores("tcp", tmp_path, 2), seconds=0.1)
    with pytest.raises(GatherFailed):
        give(world[0], NAME, b"x")
    world = ranks(stores("tcp", tmp_path, 2))
    assert gathered(world, "1000001/20", [b"a", b"b"]) == [[b"a", b"b"]] * 2


def test_a_store_that_is_gone_is_said_to_be(tmp_path: Path) -> None:
    first, second = stores("tcp", tmp_path, 2)
    rank = ranks([first, second])[1]
    del first  # its server ends with it
    with pytest.raises(GatherFailed, match="out of reach"):
        give(rank, NAME, b"x")


def test_rank_0_keeps_no_more_than_the_last_gather(tmp_path: Path) -> None:
    store = dist.HashStore()
    world = ranks([store] * 2)
    counts = []
    for step in range(4):
        gathered(world, f"1000001/{step}", [b"a", b"b"])
        counts.append(store.num_keys())
    assert counts[1:] == counts[:1] * 3


def test_a_store_that_hangs_holds_up_training_for_no_longer_than_the_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """TCPStore's check has no time-out: a server that was paused is waited for without end."""
    monkeypatch.setattr(gathering, "ANSWER_SECONDS", 0.1)
    code = (
        "import time, torch.distributed as dist\n"
        "store = dist.TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)\n"
        "print(store.port, flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as server:
        try:
            assert server.stdout is not None
            port = int(server.stdout.readline())
            store = dist.TCPStore("127.0.0.1", port, is_master=False)
            rank = ranks([store] * 2, seconds=0.1)[1]
            server.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, server.pid, os.WSTOPPED)
            with ThreadPoolExecutor(1) as threads:
                waiting = threads.submit(give, rank, NAME, b"x")
                try:
                    error = waiting.exception(timeout=20)
                finally:
                    server.kill()  # whoever still waits hears of it
            assert isinstance(error, GatherFailed)
            assert "does not answer" in str(error)
        finally:
            server.kill()


def test_while_a_call_to_the_store_hangs_no_other_is_begun() -> None:
    store = Broken(hangs=True)
    rank = ranks([store, store], seconds=0.1)[1]
    for _ in range(2):
        with pytest.raises(GatherFailed, match="does not answer"):
            give(rank, NAME, b"x")
    assert store.calls == 1
    store.released.set()


@pytest.mark.parametrize(
    "error", [RuntimeError("no such file"), ConnectionError("reset"), ValueError("what")]
)
@pytest.mark.parametrize("rank", [0, 1])
def test_whatever_a_store_raises_is_one_kind_of_error(error: Exception, rank: int) -> None:
    store = Broken(error)
    world = ranks([store, store], seconds=0.1)
    with pytest.raises(GatherFailed, match=f"out of reach: {error}"):
        give(world[rank], NAME, b"x")


def test_a_store_that_fails_when_the_mark_is_left_does_not_matter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gathering, "ANSWER_SECONDS", 0.1)
    store = Broken(dist.DistNetworkError("reset"), after=1)
    with pytest.raises(GatherFailed, match="rank 0 gave no answer"):
        give(ranks([store, store], seconds=0.1)[1], NAME, b"x")


def test_a_store_that_can_delete_nothing_still_gathers() -> None:
    store = Broken(RuntimeError("not implemented"), deletes_only=True)
    world = ranks([store, store])
    for step in range(3):
        assert gathered(world, f"1000001/{step}", [b"a", b"b"]) == [[b"a", b"b"]] * 2


def test_an_answer_to_others_than_these_ranks_counts_as_none(tmp_path: Path) -> None:
    """Left by an earlier job under the same attempt: a file that was used again, say."""
    store = dist.HashStore()
    gathered(ranks([store] * 2), NAME, [b"a", b"old"])
    world = ranks([store] * 2, seconds=0.3)
    with pytest.raises(GatherFailed, match="another"):
        give(world[1], NAME, b"new")


def test_ranks_that_the_process_group_counts_otherwise_plan_alone_all_of_them() -> None:
    """Owners are named by ranks of the process group, files by those of the environment."""
    store = dist.HashStore()
    counted = [(0, 0), (1, 2), (2, 1)]
    worlds = [World(store, group, 3, counted_as=own) for group, own in counted]
    world = [StoreGathers(lambda world=world: world, 30.0) for world in worlds]  # type: ignore[misc]
    with ThreadPoolExecutor(3) as threads:
        for waiting in [threads.submit(give, rank, NAME, b"x") for rank in world]:
            with pytest.raises(GatherFailed, match="RANK"):
                waiting.result()


class Broken(dist.Store):
    """A store in a dict that raises, or hangs."""

    def __init__(
        self,
        error: Exception | None = None,
        *,
        after: int = 0,
        hangs: bool = False,
        deletes_only: bool = False,
    ) -> None:
        """`after` so many writes."""
        super().__init__()
        self.error, self.left, self.hangs = error, after, hangs
        self.deletes_only = deletes_only
        self.calls = 0
        self.released = threading.Event()
        self.kept: dict[str, bytes] = {}

    def set(self, key: str, value: str) -> None:  # type: ignore[override]
        self.calls += 1
        if self.hangs:
            self.released.wait(60)
        self.left -= 1
        if self.error is not None and not self.deletes_only and self.left < 0:
            raise self.error
        self.kept[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self.kept[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.kept for key in keys)

    def delete_key(self, key: str) -> bool:
        assert self.error is not None
        raise self.error
