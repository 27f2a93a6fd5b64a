"""What the library is told by its environment, read once when a Checkpointer is made.

Operator or runner set the Backstay variables (protocol names.py), the launcher the ranks
(`RANK`, `LOCAL_RANK`, `WORLD_SIZE`). Called by checkpointer.py. It reads; it starts nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from backstay.errors import MisuseError
from backstay_protocol.names import ENV_EXIT_WITH_PARENT, ENV_S3_CA_FILE, ENV_SWITCH, ENV_VOLUME


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One rank's place in the job, and the bounds on how long Backstay may hold it."""

    volume: str
    """The memory volume that this pod's trainer and sidecar share."""
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    """Ranks of this pod; they share the volume and the cores."""
    s3_ca_file: str = ""
    """Certificates that the object store may be signed by; empty: the public authorities' alone."""
    exit_with_parent: bool = False
    """Leave when the launcher that started this process is gone."""
    silent_seconds: float = 300.0
    """How long restore() waits for a sidecar that does not answer at all."""
    notice_seconds: float = 2.0
    """Bound of one best-effort message to the sidecar."""

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise MisuseError(
                f"RANK is {self.rank} and WORLD_SIZE is {self.world_size}; expected "
                "0 <= RANK < WORLD_SIZE. Start the script with torchrun, or set both"
            )


def why_off(environ: Mapping[str, str]) -> str:
    """Why the library does nothing in this environment; empty when it works."""
    if environ.get(ENV_SWITCH, "").lower() == "off":
        return f"{ENV_SWITCH}=off"
    if not environ.get(ENV_VOLUME):
        return f"{ENV_VOLUME} is not set: this process was not started by Backstay"
    return ""


def read_settings(environ: Mapping[str, str]) -> Settings:
    """Settings inside a Backstay environment. Raises MisuseError naming the variable."""
    return Settings(
        volume=environ[ENV_VOLUME],
        rank=_number(environ, "RANK", 0),
        local_rank=_number(environ, "LOCAL_RANK", 0),
        world_size=_number(environ, "WORLD_SIZE", 1),
        local_world_size=_number(environ, "LOCAL_WORLD_SIZE", 1),
        s3_ca_file=environ.get(ENV_S3_CA_FILE, ""),
        exit_with_parent=environ.get(ENV_EXIT_WITH_PARENT) == "1",
    )


def _number(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name, str(default))
    try:
        return int(text)
    except ValueError as error:
        raise MisuseError(f"{name} is {text!r}; expected an integer") from error
