"""The operator's errors.

BackstayError
└── Unbuildable     a valid job that can't be carried out here (the message says what to change)
"""

from __future__ import annotations

from backstay_protocol.errors import BackstayError


class Unbuildable(BackstayError):
    """A valid job that this cluster or machine can't carry out."""
