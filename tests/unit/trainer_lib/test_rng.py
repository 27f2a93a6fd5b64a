"""Random state: everything that training draws from goes on where it was."""

import random

import numpy as np
import torch

from backstay import objects, rng


def test_random_numbers_go_on_where_they_were() -> None:
    encoded = objects.encode({"rng": rng.capture()})
    tensors = {name: tensor.clone() for name, tensor in encoded.tensors}
    drawn = numbers()
    assert rng.restore(objects.decode(encoded.json, tensors)["rng"]) == ()
    assert numbers() == drawn


def numbers() -> tuple[object, ...]:
    """Two Gaussians of Python: it makes them in pairs and keeps the second."""
    return (
        *(random.random(), random.gauss(0, 1), random.getrandbits(200), random.gauss(0, 1)),
        *(np.random.rand(), np.random.randn(), torch.rand(3).tolist()),
    )


def test_a_gaussian_that_python_keeps_for_the_next_call_is_kept() -> None:
    random.gauss(0, 1)
    states = rng.capture()
    drawn = random.gauss(0, 1)
    rng.restore(states)
    assert random.gauss(0, 1) == drawn


def test_state_of_a_device_that_is_not_here_is_named_not_dropped_in_silence() -> None:
    states = rng.capture()
    states["cuda"] = [torch.zeros(16, dtype=torch.uint8)] * (torch.cuda.device_count() + 1)
    here = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if here == 0:
        assert rng.restore(states) == ("random state of 1 CUDA devices was saved, here are 0",)
