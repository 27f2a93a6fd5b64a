"""Reading a manifest field by field, so that every mistake is told at once, one line each.

A line names the path, what was got, what was expected and what to write. A field that could not
be read yields a stand-in, so that the rest is still checked; `read_job` never returns a job that
had a problem.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from backstay_operator.api.names import REASON_INVALID, REASON_NOT_ALLOWED
from backstay_operator.api.quantity import parse_quantity

_SHOWN = 60
_MOST_SECONDS = 31_536_000.0  # a year


@dataclass(frozen=True)
class Problem:
    """One mistake in a manifest, in one line."""

    path: str
    """`spec.checkpoint.memory.slots`."""
    text: str
    reason: str = REASON_INVALID
    """`NotAllowed` where only an administrator's setting stands against it."""

    def __str__(self) -> str:
        return f"{self.path}: {self.text}"


class InvalidJob(ValueError):
    """A manifest that is not a TrainingJob; all problems, in the order of the fields."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        """At least one problem."""
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = tuple(problems)

    @property
    def reason(self) -> str:
        """`NotAllowed` if nothing else is wrong, else `Invalid`."""
        allowed = all(problem.reason == REASON_NOT_ALLOWED for problem in self.problems)
        return REASON_NOT_ALLOWED if allowed else REASON_INVALID


def show(value: object) -> str:
    """A value in a message: short, on one line."""
    text = repr(value) if isinstance(value, str) else str(value)
    text = " ".join(text.split())
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


class Section:
    """One mapping of the manifest. Every field that is asked for counts as known."""

    def __init__(self, value: object, path: str, problems: list[Problem]) -> None:
        """`value` should be a mapping; if it is not, that is the one problem told of it."""
        self.path = path
        self._problems = problems
        self._known: list[str] = []
        self._is_mapping = isinstance(value, Mapping)
        self._value: Mapping[str, Any] = value if isinstance(value, Mapping) else {}
        if not self._is_mapping:
            self.problem("", f"got {show(value)}; expected fields, one `name: value` a line")

    # --- telling --------------------------------------------------------------------------------

    def path_of(self, name: str) -> str:
        """Full path of a field; the section itself for an empty name."""
        return ".".join(part for part in (self.path, name) if part)

    def problem(self, name: str, text: str, reason: str = REASON_INVALID) -> None:
        """Tell a mistake of one field."""
        self._problems.append(Problem(self.path_of(name), text, reason))

    def wrong(self, name: str, expected: str, write: str) -> None:
        """Tell that a field's value is none that is possible."""
        value = self._value.get(name)
        got = "missing" if value is None else f"got {show(value)}"
        self.problem(name, f"{got}; expected {expected}; write {write}")

    def good(self, *names: str) -> bool:
        """Whether nothing was wrong with these fields so far (a check across fields asks this)."""
        told = {problem.path for problem in self._problems}
        return self._is_mapping and not told & {self.path_of(name) for name in names}

    def refuse_unknown(self) -> None:
        """Tell every field that nobody asked for: it would be ignored silently otherwise."""
        for name in self._value:
            if name in self._known:
                continue
            near = difflib.get_close_matches(str(name), self._known, n=1, cutoff=0.6)
            do = f"did you mean {near[0]}?" if near else f"remove it; known: {self._listing()}"
            self.problem(str(name), f"unknown field; {do}")

    def _listing(self) -> str:
        return ", ".join(sorted(self._known))

    # --- reading --------------------------------------------------------------------------------

    def has(self, name: str) -> bool:
        """Whether the field is given."""
        return self._value.get(name) is not None

    def raw(self, name: str) -> Any:
        """The field as it is; None if it is not given."""
        self._known.append(name)
        return self._value.get(name)

    def names(self) -> tuple[str, ...]:
        """Names of the fields that are given."""
        return tuple(str(name) for name in self._value)

    def section(self, name: str) -> Section | None:
        """A mapping in a field, or None if the field is not given at all."""
        self._known.append(name)
        if name not in self._value:
            return None
        value = self._value[name]
        return Section({} if value is None else value, self.path_of(name), self._problems)

    def sections(self, name: str) -> list[Section]:
        """A list of mappings in a field; none if it is not given."""
        value = self.raw(name)
        if value is None:
            return []
        if not isinstance(value, list):
            self.wrong(name, "a list", f"`{name}: []`")
            return []
        path = self.path_of(name)
        return [Section(item, f"{path}[{i}]", self._problems) for i, item in enumerate(value)]

    def texts(self, name: str, pattern: str, default: tuple[str, ...]) -> tuple[str, ...]:
        """A list of strings that each match `pattern` as a whole."""
        value = self.raw(name)
        if value is None:
            return default
        if isinstance(value, list) and all(
            isinstance(item, str) and re.fullmatch(pattern, item) for item in value
        ):
            return tuple(value)
        self.wrong(name, f"a list of strings of the form {pattern}", f"`{name}: []`")
        return default

    def required_section(self, name: str, example: str) -> Section:
        """A mapping that must be there; an empty one that asks nothing stands in for it."""
        found = self.section(name)
        if found is not None:
            return found
        self.problem(name, f"missing; write {example}")
        lost = Section({}, self.path_of(name), [])
        lost._is_mapping = False
        return lost

    def integer(self, name: str, low: int, high: int, default: int | None, example: int) -> int:
        """A whole number from `low` to `high`; `default` None: it must be given."""
        value = self.raw(name)
        if value is None and default is not None:
            return default
        if isinstance(value, int) and not isinstance(value, bool) and low <= value <= high:
            return value
        self.wrong(name, f"a whole number from {low} to {high}", f"`{name}: {example}`")
        return example

    def seconds(
        self, name: str, low: float, default: float, example: float, high: float = _MOST_SECONDS
    ) -> float:
        """A number of seconds from `low` to `high`."""
        value = self.raw(name)
        if value is None:
            return default
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if is_number and low <= value <= high:
            return float(value)
        bounds = f"{low:g} or more, at most {high:g}"
        self.wrong(name, f"a number of seconds, {bounds}", f"`{name}: {example:g}`")
        return default

    def boolean(self, name: str, default: bool) -> bool:
        """`true` or `false`."""
        value = self.raw(name)
        if value is None:
            return default
        if isinstance(value, bool):
            return value
        self.wrong(name, "true or false", f"`{name}: {str(not default).lower()}`")
        return default

    def choice(self, name: str, options: Sequence[str], default: str) -> str:
        """One of a few words."""
        value = self.raw(name)
        if value is None:
            return default
        if value in options:
            return str(value)
        near = difflib.get_close_matches(str(value), options, n=1, cutoff=0.5)
        self.wrong(name, f"one of {', '.join(options)}", f"`{name}: {(near or [default])[0]}`")
        return default

    def text(
        self,
        name: str,
        pattern: str,
        expected: str,
        example: str,
        default: str | None,
        most: int = 253,
    ) -> str:
        """A string that matches `pattern` as a whole; `default` None: it must be given."""
        value = self.raw(name)
        if value is None and default is not None:
            return default
        if isinstance(value, str) and len(value) <= most and re.fullmatch(pattern, value):
            return value
        self.wrong(name, expected, f"`{name}: {example}`")
        return example

    def quantity_bytes(self, name: str, example: str, what: str) -> int:
        """A number of bytes, as a Kubernetes quantity; must be given."""
        value = self.raw(name)
        parsed = None if isinstance(value, float) else parse_quantity(value)
        if parsed is not None and parsed >= 1 and str(value)[-1] not in "mun":
            return int(parsed)
        self.wrong(name, f"{what}, a size such as 512Mi or 2Gi", f"`{name}: {example}`")
        return int(parse_quantity(example) or 1)
