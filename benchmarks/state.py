"""The state that is saved and restored, and a training step that changes all of it.

200 fp32 parameters of many sizes with AdamW's state: 800 tensors. Forward and backward are played
by matrix products for as long as is asked for: they touch no state, as a compute-bound model.
"""

from __future__ import annotations

import math
import time

import torch
from torch import nn

TENSORS_A_PARAMETER = 4  # itself, exp_avg, exp_avg_sq, step
SPREAD = 8000.0  # the largest parameter is so many times the smallest: biases to embeddings


class State:
    """Parameters and an optimizer whose state exists."""

    def __init__(self, mib: int, num_tensors: int) -> None:
        self.model = nn.Module()
        for index, count in enumerate(_sizes(mib, num_tensors // TENSORS_A_PARAMETER)):
            parameter = nn.Parameter(torch.full((count,), 0.01 * index))
            self.model.register_parameter(f"p{index}", parameter)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        self._product = torch.randn(384, 384)
        for parameter in self.model.parameters():
            parameter.grad = torch.full_like(parameter, 1e-3)

    @property
    def entries(self) -> dict[str, object]:
        return {"model": self.model, "optimizer": self.optimizer}

    def compute(self, seconds: float) -> None:
        """Forward and backward."""
        deadline = time.perf_counter() + seconds
        while time.perf_counter() < deadline:
            self._product = (self._product @ self._product).clamp_(-1, 1)

    def step(self, seconds: float = 0.0) -> None:
        """Forward, backward and the optimizer's step."""
        self.compute(seconds)
        self.optimizer.step()

    def tensors(self) -> dict[str, torch.Tensor]:
        found = {f"model.{name}": p.detach() for name, p in self.model.named_parameters()}
        for index, state in enumerate(self.optimizer.state.values()):
            found |= {f"optimizer.{index}.{key}": value for key, value in state.items()}
        return found

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors().values())


def _sizes(mib: int, num_parameters: int) -> list[int]:
    """Elements of each parameter, spread evenly over orders of magnitude."""
    last = max(num_parameters - 1, 1)
    shares = [math.exp(math.log(SPREAD) * i / last) for i in range(num_parameters)]
    elements = (mib << 20) / 3 / 4
    return [max(1, round(elements * share / sum(shares))) for share in shares]
