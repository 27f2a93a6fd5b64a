"""Random state: everything that training draws from goes on where it was."""

import random

import numpy as np
import torch

from backstay import objects, rng


def test_random_numbers_go_on_where_they_were() -> None:
    encoded = objects.encode({"rng": rng.capture()})
    tensors = {name: tensor.clone() for name, tensor in encoded.tensors}
    drawn = (random.random(), np.random.rand(), np.random.randn(), torch.rand(3).tolist())
    assert rng.restore(objects.decode(encoded.json, tensors)["rng"]) == ()
    again = (random.random(), np.random.rand(), np.random.randn(), torch.rand(3).tolist())
    assert again == drawn


def test_state_of_a_device_that_is_not_here_is_named_not_dropped_in_silence() -> None:
    states = rng.capture()
    states["cuda"] = [torch.zeros(16, dtype=torch.uint8)] * (torch.cuda.device_count() + 1)
    here = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if here == 0:
        assert rng.restore(states) == ("random state of 1 CUDA devices was saved, here are 0",)
