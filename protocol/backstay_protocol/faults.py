"""Fault points: named places at which a test makes a process die, fail or hang. Off by default.

`BACKSTAY_FAULTS="capture.before_publish=kill@3,local.after_data=hang:5"`: at the third passage
of the first point the process kills itself (SIGKILL); at the first of the second it sleeps 5 s.
Actions: `kill`, `raise` (OSError), `hang:<seconds>`. `@n` is the passage (default 1), `@*` all.
With `BACKSTAY_FAULTS` unset a point costs one truth test.
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass

from backstay_protocol.clock import SYSTEM_CLOCK
from backstay_protocol.names import ENV_FAULTS


@dataclass
class _Fault:
    action: str
    passage: int | None
    seen: int = 0


def _parse(text: str) -> dict[str, _Fault]:
    faults = {}
    for item in filter(None, text.split(",")):
        point, equals, action = item.partition("=")
        action, _, passage = action.partition("@")
        if not equals or action.partition(":")[0] not in ("kill", "raise", "hang"):
            raise ValueError(f"{ENV_FAULTS}: {item!r}; expected point=kill|raise|hang:<s>[@n]")
        faults[point] = _Fault(action, None if passage == "*" else int(passage or 1))
    return faults


_faults = _parse(os.environ.get(ENV_FAULTS, ""))


def arm(text: str) -> None:
    """Put other fault points in force (a test's process that was forked, not started)."""
    _faults.clear()
    _faults.update(_parse(text))


def fault(point: str) -> None:
    """A named point in save, commit or restore."""
    if _faults:
        _pass(point)


def _pass(point: str) -> None:
    planned = _faults.get(point)
    if planned is None:
        return
    planned.seen += 1
    if planned.passage is not None and planned.seen != planned.passage:
        return
    if planned.action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if planned.action == "raise":
        raise OSError(f"fault point {point}")
    SYSTEM_CLOCK.sleep(float(planned.action.partition(":")[2] or 60))
