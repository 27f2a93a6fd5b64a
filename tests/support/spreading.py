"""How pytest-xdist divides the slow tests among its processes (tests/conftest.py asks).

Each test goes to whichever process is free; only the tests of modules that make something costly
for all of them stay together, in their order. Node ids stay what they are, so that what failed can
be run again alone (xdist's own groups would rename the tests).
"""

from __future__ import annotations

from xdist.scheduler.loadscope import LoadScopeScheduling

TOGETHER = frozenset(
    f"tests/integration/test_{name}.py"
    for name in (
        "capture_kill",
        "capture_ranks",
        "load_worlds",
        "main_job",
        "rounds",
        "sidecar_http",
        "worlds",
    )
)


class Spreading(LoadScopeScheduling):
    """Given out one by one, except for what belongs together."""

    def _split_scope(self, nodeid: str) -> str:
        module = nodeid.partition("::")[0]
        return module if module in TOGETHER else nodeid
