"""The text that the example learns, and a sampler that can stop and go on at any batch.

Used by train.py. The text is `pydoc_data.topics`, the language reference behind Python's `help()`,
which every installation has: nothing is downloaded. It must not know of Backstay: the sampler only
has `state_dict` and `load_state_dict`, as any stateful object of PyTorch has.
"""

from __future__ import annotations

from pydoc_data import topics
from typing import Any

import torch


class Text:
    """A text as character numbers, cut into windows of `context_length` + 1 characters."""

    def __init__(self, text: str, context_length: int) -> None:
        if len(text) <= context_length:
            raise ValueError(
                f"the text has {len(text)} characters; expected more than {context_length}, "
                "the length of one window"
            )
        self.alphabet = sorted(set(text))
        self._number = {character: i for i, character in enumerate(self.alphabet)}
        self._context_length = context_length
        self._characters = torch.tensor(self.encode(text), dtype=torch.int64)

    @classmethod
    def python_manual(cls, context_length: int) -> Text:
        """The help topics of the running Python, in the order of their names."""
        return cls(
            "\n\n".join(topics.topics[name] for name in sorted(topics.topics)), context_length
        )

    def __len__(self) -> int:
        """Number of windows; they start `context_length` characters apart."""
        return (len(self._characters) - 1) // self._context_length

    def encode(self, text: str) -> list[int]:
        """Characters to numbers."""
        return [self._number[character] for character in text]

    def decode(self, numbers: list[int]) -> str:
        """Numbers to characters."""
        return "".join(self.alphabet[number] for number in numbers)

    def batch(self, windows: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets, [len(windows), context_length] each; targets are one further on."""
        length = self._context_length
        rows = torch.stack(
            [self._characters[w * length : w * length + length + 1] for w in windows]
        )
        return rows[:, :-1], rows[:, 1:]


class ResumableSampler:
    """Draws windows without replacement, in another order each epoch, disjoint between ranks.

    Its whole state is three numbers. `position` counts the batches that were *drawn*: save it only
    where each drawn batch has been trained on. A loader that reads ahead would have to count what
    it handed out instead.
    """

    def __init__(
        self, num_windows: int, batch_size: int, *, rank: int, world_size: int, seed: int
    ) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank is {rank}; expected 0 to {world_size - 1}")
        self.batches_per_epoch = num_windows // (batch_size * world_size)
        if not self.batches_per_epoch:
            raise ValueError(
                f"{num_windows} windows do not fill one batch of {batch_size} on each of "
                f"{world_size} ranks; give more text or a smaller batch"
            )
        self._num_windows = num_windows
        self._batch_size = batch_size
        self._rank = rank
        self._world_size = world_size
        self._order: tuple[int, int, torch.Tensor] | None = None
        self.seed = seed
        self.epoch = 0
        self.position = 0

    def next(self) -> list[int]:
        """Draw the next batch: window numbers, other ones on each rank."""
        if self.position == self.batches_per_epoch:
            self.epoch += 1
            self.position = 0
        start = (self.position * self._world_size + self._rank) * self._batch_size
        self.position += 1
        return self._epoch_order()[start : start + self._batch_size].tolist()

    def state_dict(self) -> dict[str, Any]:
        """Where it stands."""
        return {"epoch": self.epoch, "position": self.position, "seed": self.seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.epoch = int(state["epoch"])
        self.position = int(state["position"])
        self.seed = int(state["seed"])

    def _epoch_order(self) -> torch.Tensor:
        """All windows, shuffled by a generator of its own that depends on seed and epoch alone."""
        if self._order is None or self._order[:2] != (self.seed, self.epoch):
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
            order = torch.randperm(self._num_windows, generator=generator)
            self._order = (self.seed, self.epoch, order)
        return self._order[2]
