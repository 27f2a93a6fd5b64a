"""What people are warned of in GET /v1/job."""

from __future__ import annotations

from typing import Any

from backstay_protocol.control import State
from backstay_protocol.messages import ProgressRequest, RankProgress
from backstay_protocol.records import AttemptRecord
from backstay_sidecar.restore.duties import Duties
from backstay_sidecar.restore.views import _warnings
from support.restore_fakes import topology

ATTEMPT = 7_000_001


def warnings_when(**rank: Any) -> tuple[str, ...]:
    job = topology(1)
    duties = Duties(job, 1)
    duties.begin(AttemptRecord(attempt=ATTEMPT, base=None, world_size=1, replicas=1), 0.0)
    progress = RankProgress(
        rank=0, step=50, step_time=0.0, attempt=ATTEMPT, state=State.TRAINING, **rank
    )
    request = ProgressRequest(replica=0, generation=7, attempt=ATTEMPT, ranks=(progress,))
    assert duties.take(request, 1.0)
    return _warnings(duties, job)


def test_a_rank_that_skips_its_saves_is_named_with_the_step_that_it_still_has() -> None:
    found = warnings_when(published_step=4, saves=2, skipped=20)
    assert any("rank 0 skipped 20 of 22 saves" in w and "step 4" in w for w in found), found


def test_a_few_skipped_saves_worry_nobody() -> None:
    assert not any("skipped" in w for w in warnings_when(published_step=48, saves=20, skipped=2))
