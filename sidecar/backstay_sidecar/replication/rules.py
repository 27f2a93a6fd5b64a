"""By which schedules this sidecar moves shards: the leader's word, kept over its own restarts.

Used by the agent. A small file in the memory volume; what the topology says counts only until the
leader has said anything. It decides nothing.
"""

from __future__ import annotations

import contextlib

from backstay_protocol import codec
from backstay_protocol.errors import ProtocolError
from backstay_protocol.files import read_small, write_atomically
from backstay_protocol.messages import Policies, ProgressReply
from backstay_protocol.policies import at, of_tiers
from backstay_protocol.topology import Schedule, Tiers


class Rules:
    """One per sidecar. `recall` and `save` block (on memory)."""

    def __init__(self, path: str, tiers: Tiers) -> None:
        """Reads nothing yet."""
        self._path = path
        self._own = of_tiers(tiers)
        self.told = Policies()
        """By the leader, at last; empty: nothing."""

    def recall(self) -> None:
        """What an earlier process wrote down; nonsense is nothing."""
        with contextlib.suppress(OSError, ProtocolError):
            found = codec.loads(Policies, read_small(self._path))
            if self._fits(found):
                self.told = found

    def heed(self, word: ProgressReply) -> bool:
        """Follow a word of the leader that counts; whether anything changed."""
        if not self._fits(word.policies) or word.policies == self.told:
            return False
        self.told = word.policies
        return True

    def save(self) -> None:
        """Write it down. Raises OSError."""
        write_atomically(self._path, codec.dumps(self.told))

    def schedule(self, tier: str, step: int) -> Schedule:
        """By which the tier takes a checkpoint of this step."""
        tiers = at(self.told.entries, step) if self.told.entries else self._own
        return tiers[tier].schedule

    def _fits(self, policies: Policies) -> bool:
        """Each of the tiers here must be in each entry."""
        return bool(policies.entries) and all(
            self._own.keys() <= policy.tiers.keys() for policy in policies.entries
        )
