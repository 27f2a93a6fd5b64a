"""What every part of a restore round does: wait, give up, ask again, stand down.

Used by rounds.py and round_load.py only.
"""

from __future__ import annotations

from dataclasses import replace

from backstay_protocol.ids import generation_of
from backstay_protocol.round_events import (
    MEMBER_AWAY,
    REMOTE_AWAY,
    STOOD_DOWN,
    Effect,
    GiveUp,
    Waiting,
)
from backstay_protocol.round_state import Phase, Round, RoundSettings

RETRY_SECONDS = 1.0

Step = tuple[Round, tuple[Effect, ...]]


def outranked(current: Round, attempt: int) -> bool:
    """Rule `fence`: a greater generation exists, so this world was replaced."""
    return 0 < current.generation < generation_of(attempt)


def stand_down(current: Round, attempt: int) -> Step:
    """End the round: a newer world exists."""
    why = (
        f"attempt {attempt} belongs to generation {generation_of(attempt)} and this world's newest "
        f"pod is of generation {current.generation}: it was replaced and stands down"
    )
    return give_up(current, STOOD_DOWN, why, retry=False)


def remote_is_away(current: Round) -> Round:
    """Note since when the remote tier does not answer."""
    if current.remote_away_since is not None:
        return current
    return replace(current, remote_away_since=current.now)


def remote_waited_out(current: Round, settings: RoundSettings) -> bool:
    """Whether a start has waited for the remote tier as long as it may."""
    since = current.now if current.remote_away_since is None else current.remote_away_since
    return current.now - since > settings.restore.remote_wait_seconds


def wait_for_remote(current: Round, why: str, settings: RoundSettings) -> Step:
    """Try the claim again later; the promises stay as they are."""
    if remote_waited_out(current, settings):
        return remote_away(current, why, settings)
    again = current.now + settings.ask_again_seconds
    current = replace(current, phase=Phase.CLAIM, ask_remote_at=again, decision=None)
    return wait(current, f"waiting for the remote tier: {why}")


def remote_away(current: Round, why: str, settings: RoundSettings) -> Step:
    """End the round: the remote tier stayed away."""
    waited = settings.restore.remote_wait_seconds
    text = f"the remote tier could not be reached for {waited:.0f} s: {why}"
    return give_up(current, REMOTE_AWAY, text, retry=False)


def silence(current: Round, replica: int, why: str, settings: RoundSettings) -> Step:
    """A member did not answer: ask again, within bounds; silence proves nothing."""
    since, _ = current.silent.get(replica, (current.now, 0.0))
    if current.now - since > settings.member_patience_seconds:
        text = f"the sidecar of replica {replica} does not answer: {why}"
        return give_up(current, MEMBER_AWAY, text, retry=True, after=RETRY_SECONDS)
    again = current.now + settings.ask_again_seconds
    current = replace(current, silent={**current.silent, replica: (since, again)})
    return wait(current, f"waiting for the sidecar of replica {replica}: {why}")


def heard(current: Round, replica: int) -> Round:
    """Forget that a member was silent."""
    silent = {member: when for member, when in current.silent.items() if member != replica}
    return replace(current, silent=silent)


def wait(current: Round, message: str) -> Step:
    """Change nothing but what people are told."""
    return replace(current, message=message), (Waiting(message),)


def give_up(current: Round, code: str, why: str, *, retry: bool, after: float = 0.0) -> Step:
    """End the round without an attempt."""
    given_up = GiveUp(code=code, why=why, retry=retry, after_seconds=after)
    ended = replace(current, phase=Phase.ENDED, give_up=given_up, message=why)
    return ended, (given_up,)
