"""What a restore considered: from the leader, else after the fact from the bucket or the disks.

Used by `explain-restore`. The leader tells of its last restores; each is also kept beside the
attempt's base record in the remote tier, and on the replicas' disks.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from backstay_cli.buckets import RunBucket
from backstay_cli.client import SidecarClient
from backstay_cli.errors import NotFound
from backstay_protocol import codec
from backstay_protocol.errors import BackstayError, ProtocolError
from backstay_protocol.layout import EXPLANATION_SUFFIX, RESTORES_FILE
from backstay_protocol.messages import JobView, RestoreView
from backstay_protocol.names import URL_JOB

_SHOWN = 5


@dataclass(frozen=True, kw_only=True)
class Told:
    """One restore; `-o json` prints it."""

    run: str
    source: str
    """Who tells of it."""
    restore: RestoreView


class Search:
    """Asks one source after the other; what each lacks is told if none has it."""

    def __init__(self, attempt: int) -> None:
        """`attempt`: which restore; 0: the last one."""
        self._attempt = attempt
        self._lacks: list[str] = []
        self._errors: list[BackstayError] = []
        self.found: Told | None = None

    def leader(self, leader: SidecarClient) -> None:
        """GET /v1/job."""
        if self.found is not None:
            return
        try:
            view = leader.get(JobView, URL_JOB)
        except BackstayError as error:
            self.cannot(error)
        else:
            self._take(view.run, "the leader", view.restores)

    def bucket(self, found: RunBucket) -> None:
        """`attempts/<A>.restore.json`."""
        if self.found is not None:
            return
        try:
            keys = [key for key, _ in found.bucket.list(found.layout.attempts)]
            names = sorted(key for key in keys if key.endswith(EXPLANATION_SUFFIX))
            if self._attempt:
                names = [key for key in names if key == found.layout.explanation(self._attempt)]
            told = [_read(found.bucket.get(key)) for key in names[-1:]]
        except BackstayError as error:
            self.cannot(error)
        else:
            self._take(found.run, str(found.bucket), [one for one in told if one is not None])

    def disks(self, run: str, folders: Iterable[Path]) -> None:
        """What replicas keep of restores on their disks."""
        kept = [one for folder in folders for one in _kept(folder)]
        self._take(run, "the job's disks", kept)

    def result(self) -> Told:
        """Raises NotFound, or the error that stood in the way."""
        if self.found is not None:
            return self.found
        if self._errors and not self._lacks:
            raise self._errors[0]
        which = f"a restore of attempt {self._attempt}" if self._attempt else "any restore"
        told = "".join(f"\n  {line}" for line in [*self._lacks, *map(str, self._errors)])
        raise NotFound(f"nobody tells of {which}{told}")

    def cannot(self, error: BackstayError) -> None:
        """A source could not even be named."""
        if self.found is None:
            self._errors.append(error)

    def _take(self, run: str, source: str, restores: Iterable[RestoreView]) -> None:
        if self.found is not None:
            return
        known = sorted(restores, key=lambda one: one.attempt)
        fitting = [one for one in known if self._attempt in (0, one.attempt)]
        if fitting:
            self.found = Told(run=run, source=source, restore=fitting[-1])
            return
        others = ", ".join(str(one.attempt) for one in known[-_SHOWN:])
        self._lacks.append(f"known by {source}: {others or 'none'}")


def _read(data: bytes | None) -> RestoreView | None:
    if data is None:
        return None
    try:
        return codec.loads(RestoreView, data)
    except ProtocolError:
        return None


def _kept(folder: Path) -> list[RestoreView]:
    """A replica's `restores.json`; what can't be read of it is passed over."""
    found = []
    with contextlib.suppress(OSError, ValueError, ProtocolError):
        tree = json.loads((folder / RESTORES_FILE).read_bytes())
        found = [codec.from_plain(RestoreView, one) for one in tree]
    return found
