"""How the library speaks to people: warnings through logging, progress on stderr.

Used by checkpointer.py and running.py. One rank of a pod tells progress, so that a large job stays
readable; warnings come from whichever rank has them.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable

from backstay.settings import Settings

logger = logging.getLogger("backstay")


def warn(message: str) -> None:
    """Something that people should act on."""
    logger.warning("backstay: %s", message)


def teller(settings: Settings) -> Callable[[str], None]:
    """What tells the progress of a wait."""
    return _tell if settings.local_rank == 0 else logger.debug


def _tell(message: str) -> None:
    print(f"backstay: {message}", file=sys.stderr, flush=True)
