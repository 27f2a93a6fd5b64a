"""Reading a TrainingJob manifest from a YAML file, with the line of each mistake."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from backstay_cli.errors import NotFound, UsageError
from backstay_operator.api import InvalidJob, Problem, TrainingJob, read_job

_MOST_BYTES = 1 << 20
_MOST_NODES = 50_000  # aliases can make a small file a huge tree
_MOST_DEPTH = 50
STANDARD_INPUT = "standard input"
_INDEX = re.compile(r"\[(\d+)\]")


@dataclass(frozen=True)
class Document:
    """One YAML document of a file."""

    source: str
    """The file, for people."""
    node: yaml.Node | None

    def tree(self) -> Any:
        """Plain values. Raises UsageError (keys given twice, too much nesting)."""
        return _Plain(self.node, self.source).tree()

    @property
    def line(self) -> int:
        """Where it begins."""
        return self.node.start_mark.line + 1 if self.node is not None else 1

    def line_of(self, problem: Problem) -> int:
        """The line of a field, or of the nearest enclosing one that is there."""
        line, node = self.line, self.node
        for part in _INDEX.sub(r".\1", problem.path).split("."):
            found = _child(node, part)
            if found is None:
                break
            line, node = found
        return line


def load_job(path: Path) -> TrainingJob:
    """Raises UsageError with one line for every mistake (`file:line: field: ...`), or NotFound."""
    documents = read_documents(path)
    if len(documents) != 1:
        raise UsageError(f"{path}: has {len(documents)} documents; expected one TrainingJob")
    document = documents[0]
    try:
        return read_job(document.tree())
    except InvalidJob as error:
        lines = [f"{path}:{document.line_of(p)}: {p}" for p in error.problems]
        count = f"{len(lines)} mistake{'s' if len(lines) > 1 else ''} in the manifest:"
        raise UsageError("\n".join([count, *lines])) from error


def read_documents(path: Path) -> list[Document]:
    """All of a file; `-`: of standard input. Raises UsageError or NotFound."""
    source = STANDARD_INPUT if str(path) == "-" else str(path)
    text = _read(path, source)
    if len(text) > _MOST_BYTES:
        raise UsageError(f"{source}: longer than {_MOST_BYTES >> 20} MiB; expected one TrainingJob")
    try:
        nodes = list(yaml.compose_all(text, Loader=yaml.SafeLoader))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"{source}: not YAML: {' '.join(str(error).split())}") from error
    return [Document(source, node) for node in nodes]


def _read(path: Path, source: str) -> bytes:
    try:
        if source == STANDARD_INPUT:
            return sys.stdin.buffer.read(_MOST_BYTES + 1)
        with open(path, "rb") as file:
            return file.read(_MOST_BYTES + 1)
    except FileNotFoundError as error:
        raise NotFound(f"{source}: there is no such file") from error
    except OSError as error:
        raise UsageError(f"{source}: can't be read: {error.strerror}") from error


class _Plain:
    """A YAML node to plain values; a key that is given twice is a mistake, not the last one."""

    def __init__(self, node: yaml.Node | None, path: str) -> None:
        self._node = node
        self._path = path
        self._constructor = yaml.SafeLoader("")
        self._count = 0

    def tree(self) -> Any:
        if self._node is None:
            return None
        self._refuse_twins(self._node, "", 0)
        try:
            return self._constructor.construct_document(self._node)
        except yaml.YAMLError as error:
            raise UsageError(f"{self._path}: {' '.join(str(error).split())}") from error

    def _refuse_twins(self, node: yaml.Node, where: str, depth: int) -> None:
        self._count += 1
        if self._count > _MOST_NODES or depth > _MOST_DEPTH:
            raise UsageError(f"{self._path}: too much nesting (aliases?); expected one TrainingJob")
        if isinstance(node, yaml.SequenceNode):
            for index, item in enumerate(node.value):
                self._refuse_twins(item, f"{where}[{index}]", depth + 1)
        if not isinstance(node, yaml.MappingNode):
            return
        seen: dict[str, int] = {}
        for key, value in node.value:
            name, line = str(key.value), key.start_mark.line + 1
            inner = f"{where}.{name}" if where else name
            if name in seen:
                raise UsageError(
                    f"{self._path}:{line}: {inner}: given twice (before in line {seen[name]}); "
                    "remove one of the two"
                )
            seen[name] = line
            self._refuse_twins(value, inner, depth + 1)


def _child(node: yaml.Node | None, part: str) -> tuple[int, yaml.Node] | None:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if str(key.value) == part:
                return key.start_mark.line + 1, value
    if isinstance(node, yaml.SequenceNode) and part.isdigit() and int(part) < len(node.value):
        item = node.value[int(part)]
        return item.start_mark.line + 1, item
    return None
