"""Times as the Kubernetes API writes them; for observers and the applier. Pure."""

from __future__ import annotations

from datetime import UTC, datetime


def seconds(text: object) -> float:
    """Seconds since the epoch of an RFC 3339 time; 0 where there is none."""
    if not isinstance(text, str) or not text:
        return 0.0
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return 0.0


def text_of(at: float) -> str:
    """RFC 3339 in whole seconds, UTC, as metav1.Time wants it."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def micro_text_of(at: float) -> str:
    """RFC 3339 with microseconds, as metav1.MicroTime wants it."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
