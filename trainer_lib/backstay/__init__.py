"""Backstay for training scripts: checkpoints that cost nothing to take and survive what fails.

A script needs `Checkpointer` and nothing else; the other names are what it returns and raises.
"""

from __future__ import annotations

from backstay.capture import SaveResult
from backstay.checkpointer import Checkpointer
from backstay.errors import MisuseError, RestoreFailed, UnsupportedValue
from backstay.restore import RestorePoint
from backstay_protocol.errors import BackstayError

__all__ = [
    "BackstayError",
    "Checkpointer",
    "MisuseError",
    "RestoreFailed",
    "RestorePoint",
    "SaveResult",
    "UnsupportedValue",
]
