"""State of every random number generator that training draws from.

Python, NumPy's global one (only where the script imported NumPy), torch on the CPU, every CUDA
device.
Called by capture at each save and by restore, last, when nothing draws from them any more.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import torch


def capture() -> dict[str, Any]:
    """The states now, as values that the objects blob can carry."""
    states: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    numpy_random = _numpy_random()
    if numpy_random is not None:
        states["numpy"] = numpy_random.get_state(legacy=False)
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def restore(states: dict[str, Any]) -> tuple[str, ...]:
    """Put the states back. Returns a sentence for each that has no place here."""
    untouched = []
    random.setstate(states["python"])
    torch.set_rng_state(states["torch"])
    if "numpy" in states:
        import numpy

        numpy.random.set_state(states["numpy"])
    saved_cuda = states.get("cuda", [])
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for device, state in enumerate(saved_cuda[:devices]):
        torch.cuda.set_rng_state(state, device)
    if len(saved_cuda) > devices:
        untouched.append(
            f"random state of {len(saved_cuda)} CUDA devices was saved, here are {devices}"
        )
    return tuple(untouched)


def _numpy_random() -> Any:
    return getattr(sys.modules.get("numpy"), "random", None)
