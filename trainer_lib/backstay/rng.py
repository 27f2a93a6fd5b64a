"""State of every random number generator that training draws from.

Python, NumPy's global one (only where the script imported NumPy), torch on the CPU, every CUDA
device.
Called by capture at each save and by restore, last, when nothing draws from them any more.
"""

from __future__ import annotations

import random
import sys
from array import array
from typing import Any

import torch


def capture() -> dict[str, Any]:
    """The states now, as values that the objects blob can carry."""
    states: dict[str, Any] = {"python": _python_state(), "torch": torch.get_rng_state()}
    numpy_random = _numpy_random()
    if numpy_random is not None:
        states["numpy"] = numpy_random.get_state(legacy=False)
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def restore(states: dict[str, Any]) -> tuple[str, ...]:
    """Put the states back. Returns a sentence for each that has no place here."""
    untouched = []
    _set_python_state(states["python"])
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


def _python_state() -> dict[str, Any]:
    """Its 625 words as one tensor: as single values they cost a third of a whole `step()`."""
    version, words, gauss = random.getstate()
    packed = array("Q", words).tobytes()  # bytes of this machine's order; all have the same
    return {
        "version": version,
        "words": torch.frombuffer(bytearray(packed), dtype=torch.uint8),
        "gauss": gauss,
    }


def _set_python_state(state: dict[str, Any]) -> None:
    words = array("Q", state["words"].numpy().tobytes())
    random.setstate((state["version"], tuple(words), state["gauss"]))


def _numpy_random() -> Any:
    return getattr(sys.modules.get("numpy"), "random", None)
