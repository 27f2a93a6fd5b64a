"""The sampler stops and goes on anywhere; the text is cut as it should be."""

from __future__ import annotations

import pytest
import torch

from examples.char_gpt.data import ResumableSampler, Text

NUM_WINDOWS, BATCH_SIZE, WORLD_SIZE = 50, 4, 3
BATCHES_PER_EPOCH = 4


def sampler(rank: int = 0, seed: int = 7) -> ResumableSampler:
    return ResumableSampler(NUM_WINDOWS, BATCH_SIZE, rank=rank, world_size=WORLD_SIZE, seed=seed)


@pytest.mark.parametrize("stop_after", range(2 * BATCHES_PER_EPOCH + 2))
@pytest.mark.parametrize("rank", range(WORLD_SIZE))
def test_a_sampler_goes_on_exactly_from_every_position(rank: int, stop_after: int) -> None:
    straight = sampler(rank)
    expected = [straight.next() for _ in range(3 * BATCHES_PER_EPOCH)]
    first = sampler(rank)
    drawn = [first.next() for _ in range(stop_after)]
    second = sampler(rank, seed=99)  # its own seed comes with the state
    second.load_state_dict(first.state_dict())
    drawn += [second.next() for _ in range(len(expected) - stop_after)]
    assert drawn == expected
    assert second.state_dict() == straight.state_dict()


def test_a_sampler_that_is_set_back_draws_the_same_again() -> None:
    one = sampler()
    one.next()
    state = one.state_dict()
    drawn = [one.next() for _ in range(6)]  # over the end of the epoch
    one.load_state_dict(state)
    assert [one.next() for _ in range(6)] == drawn


def test_ranks_never_draw_the_same_window_in_an_epoch() -> None:
    samplers = [sampler(rank) for rank in range(WORLD_SIZE)]
    drawn = [w for _ in range(BATCHES_PER_EPOCH) for s in samplers for w in s.next()]
    assert len(drawn) == len(set(drawn)) == BATCHES_PER_EPOCH * WORLD_SIZE * BATCH_SIZE
    assert all(0 <= window < NUM_WINDOWS for window in drawn)


def test_each_epoch_has_an_order_of_its_own() -> None:
    one = sampler()
    epochs = [[one.next() for _ in range(BATCHES_PER_EPOCH)] for _ in range(2)]
    assert epochs[0] != epochs[1]
    assert one.state_dict() == {"epoch": 1, "position": BATCHES_PER_EPOCH, "seed": 7}


def test_the_order_does_not_depend_on_the_random_state_of_the_process() -> None:
    torch.manual_seed(1)
    first = sampler().next()
    before = torch.get_rng_state()
    assert sampler().next() == first
    assert torch.equal(torch.get_rng_state(), before)


def test_too_little_text_for_one_batch_is_refused_with_the_numbers() -> None:
    with pytest.raises(ValueError, match="11 windows do not fill one batch of 4 on each of 3"):
        ResumableSampler(11, 4, rank=0, world_size=3, seed=1)


def test_targets_are_the_inputs_one_character_on() -> None:
    text = Text("abcdefghij", context_length=3)
    inputs, targets = text.batch([0, 2])
    assert len(text) == 3
    assert [text.decode(row.tolist()) for row in inputs] == ["abc", "ghi"]
    assert [text.decode(row.tolist()) for row in targets] == ["bcd", "hij"]


def test_every_python_has_the_text() -> None:
    text = Text.python_manual(64)
    assert len(text) > 5000
    assert text.decode(text.encode("The Python")) == "The Python"
