"""What every rank learns of the others through the process group's store, and when it gives up."""

from __future__ import annotations

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
