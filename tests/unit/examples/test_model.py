"""Shapes of the small GPT, and that randomness and tying are as the demo needs them."""

from __future__ import annotations

import pytest
import torch

from examples.char_gpt.model import GPT, GPTConfig

SMALL = GPTConfig(vocabulary_size=11, context_length=8, num_layers=2, num_heads=2, width=16)


@pytest.fixture
def gpt() -> GPT:
    torch.manual_seed(3)
    return GPT(SMALL)


@pytest.mark.parametrize("time", [1, 5, 8])
def test_there_is_one_logit_for_each_character_at_each_place(gpt: GPT, time: int) -> None:
    assert gpt(torch.zeros(3, time, dtype=torch.int64)).shape == (3, time, 11)


def test_more_characters_than_the_context_are_refused(gpt: GPT) -> None:
    with pytest.raises(ValueError, match="9 characters given; this model sees 8"):
        gpt(torch.zeros(1, 9, dtype=torch.int64))


def test_a_place_sees_nothing_of_what_comes_after_it(gpt: GPT) -> None:
    gpt.eval()
    one = torch.tensor([[1, 2, 3, 4]])
    other = torch.tensor([[1, 2, 9, 9]])
    assert torch.equal(gpt(one)[:, :2], gpt(other)[:, :2])
    assert not torch.equal(gpt(one)[:, 2:], gpt(other)[:, 2:])


def test_training_depends_on_the_random_state(gpt: GPT) -> None:
    characters = torch.zeros(1, 8, dtype=torch.int64)
    state = torch.get_rng_state()
    first = gpt(characters)
    assert not torch.equal(gpt(characters), first)
    torch.set_rng_state(state)
    assert torch.equal(gpt(characters), first)


def test_the_tied_weight_has_two_names_and_counts_once(gpt: GPT) -> None:
    assert gpt.head.weight is gpt.characters.weight
    assert {"head.weight", "characters.weight"} <= gpt.state_dict().keys()
    assert gpt.num_parameters() == sum(p.numel() for p in set(gpt.parameters()))


def test_the_model_of_the_demo_has_a_few_million_parameters() -> None:
    assert 2e6 < GPT(GPTConfig(vocabulary_size=103)).num_parameters() < 5e6


def test_writing_text_leaves_mode_and_random_state_alone(gpt: GPT) -> None:
    before = torch.get_rng_state()
    texts = [gpt.continue_text([1], 20, torch.Generator().manual_seed(5)) for _ in range(2)]
    assert texts[0] == texts[1]
    assert len(texts[0]) == 21
    assert gpt.training
    assert torch.equal(torch.get_rng_state(), before)


def test_a_width_that_heads_cannot_share_is_refused() -> None:
    with pytest.raises(ValueError, match="width 10 is not a multiple of num_heads 3"):
        GPTConfig(vocabulary_size=5, width=10, num_heads=3)
