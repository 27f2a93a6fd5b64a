"""What a check says: one line each."""

from __future__ import annotations

from dataclasses import dataclass

OK = "ok"
PROBLEM = "problem"
UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of `backstay validate`; `-o json` prints them."""

    verdict: str
    """ok, problem or unknown (it could not be checked)."""
    where: str
    """`file:line`, or what was looked at."""
    text: str
    """What was found, and what to do about it."""
    missing_file: bool = False


def ok(where: str, text: str) -> Finding:
    """Checked, and right."""
    return Finding(verdict=OK, where=where, text=text)


def problem(where: str, text: str) -> Finding:
    """Checked, and wrong."""
    return Finding(verdict=PROBLEM, where=where, text=text)


def unknown(where: str, text: str) -> Finding:
    """Not checked; why not."""
    return Finding(verdict=UNKNOWN, where=where, text=text)
