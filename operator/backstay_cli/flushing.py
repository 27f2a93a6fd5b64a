"""Asking the leader for one common save until it is safe in the outermost tier.

Used by `backstay flush`. It changes nothing but by POST /v1/flush, which may be repeated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from backstay_cli.client import SidecarClient
from backstay_cli.leader import SILENT_SECONDS
from backstay_protocol.clock import Clock
from backstay_protocol.errors import Refused, Unreachable
from backstay_protocol.messages import FlushReply, JobView
from backstay_protocol.names import REMOTE, URL_FLUSH, URL_JOB

_PAUSE_SECONDS = 0.5


@dataclass(frozen=True, kw_only=True)
class Flushed:
    """How a flush ended; `-o json` prints it."""

    run: str
    tier: str
    """The outermost that the job has."""
    step: int
    """Of the common save; 0: none was announced."""
    done: bool
    """It is complete in that tier."""
    durable_step: int | None
    """The newest step that is complete in that tier now; null: none."""
    seconds: float
    why: tuple[str, ...] = ()
    """What stands in the way, if it is not done."""

    @property
    def durable(self) -> bool:
        """Whether the outermost tier is the remote one."""
        return self.tier == REMOTE


def flush(
    leader: SidecarClient, timeout: float, clock: Clock, tell: Callable[[str], None]
) -> Flushed:
    """Ask until it is done or `timeout` seconds are over. `tell`: each new word of progress.

    A leader that is away for a moment is asked again; one that never answered is Unreachable.
    """
    start = clock.monotonic()
    reply: FlushReply | None = None
    trouble, told = "", ""
    while True:
        try:
            reply, trouble = leader.post(FlushReply, URL_FLUSH), ""
        except (Unreachable, Refused) as error:
            if isinstance(error, Refused) and error.status < 500:
                raise
            trouble = str(error)
        over = clock.monotonic() - start >= timeout
        if over or (reply is not None and reply.durable and not trouble):
            break
        if (words := trouble or _progress(reply)) != told:
            tell(words)
            told = words
        clock.sleep(min(_PAUSE_SECONDS, max(0.0, start + timeout - clock.monotonic())))
    if reply is None:
        raise Unreachable(trouble)
    return _outcome(leader, reply, trouble, clock.monotonic() - start)


def _progress(reply: FlushReply | None) -> str:
    if reply is None:
        return ""
    wanted = f"step {reply.step} is being saved; " if reply.step else "no step is announced yet; "
    return wanted + reply.message


def _outcome(leader: SidecarClient, reply: FlushReply, trouble: str, seconds: float) -> Flushed:
    done = reply.durable and not trouble
    try:
        view = leader.get(JobView, URL_JOB)
    except (Unreachable, Refused) as error:
        view = None
        trouble = trouble or str(error)
    tier = view.tiers[-1].tier if view is not None and view.tiers else ""
    newest = view.tiers[-1].newest if view is not None and view.tiers else None
    safe = newest.step if newest is not None else None
    if done:  # the view may be older by a moment
        safe = max(safe or 0, reply.step)
    return Flushed(
        run=view.run if view is not None else "",
        tier=tier,
        step=reply.step,
        done=done,
        durable_step=safe,
        seconds=round(seconds, 1),
        why=() if done else _why(view, reply, trouble),
    )


def _why(view: JobView | None, reply: FlushReply, trouble: str) -> tuple[str, ...]:
    """What a person should look at, the likeliest first."""
    found = [trouble] if trouble else []
    if not reply.step:
        found.append(reply.message)
    if view is None:
        return tuple(found)
    if view.phase != "Training" and view.message:
        found.append(f"the job is {view.phase}: {view.message}")
    silent = [r.replica for r in view.replicas if r.seen_seconds_ago > SILENT_SECONDS]
    if silent:
        found.append(f"the leader does not hear of replicas {', '.join(map(str, silent))}")
    found += [f"tier {t.tier}: {t.message or 'not well'}" for t in view.tiers if not t.ok]
    found += [f"{t.backlog} shards wait for {t.tier}" for t in view.tiers if t.ok and t.backlog]
    if view.step < reply.step:
        found.append(f"ranks are at step {view.step}: step {reply.step} is not reached yet")
    found += view.warnings
    return tuple(dict.fromkeys(found)) or (reply.message,)
