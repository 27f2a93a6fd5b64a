"""Real trainers, sidecars and a real S3 server: a job begins from another run's checkpoint, or from
nothing although it has history, once per change, and again while it has saved nothing itself.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from backstay_protocol import codec
from backstay_protocol.layout import RemoteLayout
from backstay_protocol.messages import RestorePreview, RestoreView
from backstay_protocol.names import LOCAL, REMOTE, URL_RESTORE_PREVIEW
from backstay_protocol.records import AttemptRecord
from backstay_protocol.topology import ManualChoice, RestoreOptions
from support.s3 import S3Server
from support.training_job import TrainingJob, assert_equal, every_tier

pytestmark = pytest.mark.timeout(240)

A_STEPS, B_STEPS, EVERY = 6, 60, 4
A = "test/run"
FROM_A = ManualChoice(token="one", run=A)


def job_on(
    folder: Path,
    server: S3Server,
    bucket: str,
    *,
    steps: int,
    choice: ManualChoice | None = None,
    namespace: str = "other",
    step_seconds: float = 0.05,
) -> TrainingJob:
    tiers = every_tier(
        folder / "disk", every=EVERY, endpoint=server.endpoint, bucket=bucket, keep_last=4
    )
    return TrainingJob(
        folder,
        steps=steps,
        step_seconds=step_seconds,
        tiers=tiers,
        s3_keys=(server.access_key, server.secret_key),
        restore=RestoreOptions(barrier_seconds=60, choice=choice),
        namespace=namespace,
        run_name="run" if namespace == "test" else "fine-tuned",
    )


@pytest.fixture(scope="module")
def run_a(
    tmp_path_factory: pytest.TempPathFactory, s3_server: S3Server
) -> tuple[str, dict[str, torch.Tensor]]:
    """A finished run: its bucket and its last state."""
    bucket = s3_server.make_bucket()
    folder = tmp_path_factory.mktemp("a")
    with job_on(folder, s3_server, bucket, steps=A_STEPS, namespace="test") as job:
        job.start()
        job.finish()
        return bucket, job.final()


def preview(job: TrainingJob, query: str = "") -> RestorePreview:
    answer = job.sidecars.request(0, "GET", f"{URL_RESTORE_PREVIEW}{query}", timeout=60)
    found: RestorePreview = answer.read(RestorePreview)
    return found


def objects(server: S3Server, bucket: str, layout: RemoteLayout) -> dict[str, bytes]:
    client = server.client()
    names = [
        str(item.object_name)
        for item in client.list_objects(bucket_name=bucket, prefix=layout.root, recursive=True)
    ]
    found = {}
    for name in names:
        if name.startswith(layout.attempts):
            reply = client.get_object(bucket_name=bucket, object_name=name)
            found[name] = reply.data
            reply.close()
            reply.release_conn()
        else:
            found[name] = b""
    return found


def die_and_restore(job: TrainingJob, after_step: int) -> tuple[int, int]:
    """Every rank has made that step; one is killed; (step, attempt) that all begin from."""
    job.wait_step(after_step)
    lives = len(job.events(0, "restored"))
    job.kill_rank(1)
    job.wait(
        lambda: all(len(job.events(r, "restored")) > lives for r in range(job.world_size)),
        "the next restore",
    )
    return job.assert_same_restore()


def test_another_runs_checkpoint_is_begun_from_bit_for_bit_and_then_is_the_jobs_own(
    run_a: tuple[str, dict[str, torch.Tensor]], tmp_path: Path, s3_server: S3Server
) -> None:
    bucket, expected = run_a
    of_a = RemoteLayout("jobs", A)
    before = objects(s3_server, bucket, of_a)
    with job_on(tmp_path, s3_server, bucket, steps=A_STEPS, choice=FROM_A) as job:
        job.start()
        job.finish()
        step, attempt = job.assert_same_restore()
        assert step == A_STEPS
        assert job.tiers_read() == {REMOTE}
        assert_equal(job.final(), expected)
        view = job.job().restores[-1]
        assert (view.base, view.outcome, view.step) == (None, "origin", A_STEPS)
        assert view.origin.endswith(f"of run {A}")
        assert [c.run for c in view.candidates if c.taken] == [A]
        own = RemoteLayout("jobs", "other/fine-tuned")
        kept = objects(s3_server, bucket, own)
        record = codec.loads(AttemptRecord, kept[own.base(attempt)])
        assert (record.base, record.chain, record.choice) == (None, (), "one")
        assert record.origin is not None
        assert record.origin.run == A
        told = codec.loads(RestoreView, kept[own.explanation(attempt)])
        assert told.candidates == view.candidates
        newest = job.job().newest_durable
        assert newest is not None  # the job's end made it its own
        assert (newest.step, newest.attempt) == (A_STEPS, attempt)
        assert preview(job).checkpoint == newest
    assert objects(s3_server, bucket, of_a) == before  # only ever read


def test_given_contents_are_given_again_until_the_job_has_saved_and_once_per_change(
    run_a: tuple[str, dict[str, torch.Tensor]], tmp_path: Path, s3_server: S3Server
) -> None:
    bucket, _ = run_a
    with job_on(
        tmp_path, s3_server, bucket, steps=B_STEPS, choice=FROM_A, namespace="third",
        step_seconds=0.4,
    ) as job:  # fmt: skip
        job.start()
        first, _ = die_and_restore(job, A_STEPS + 1)
        assert first == A_STEPS  # nothing of its own yet: from A again
        job.wait_complete(LOCAL, A_STEPS + 2)
        own, attempt = die_and_restore(job, A_STEPS + 3)
        assert own == A_STEPS + 2  # step 8, a multiple of EVERY
        told = preview(job, f"?run={A}")
        assert (told.outcome, told.checkpoint_run) == ("origin", A)
        assert preview(job).outcome == "base"

        job.choose_again(ManualChoice(token="two", run=A))
        lives = len(job.events(0, "restored"))
        job.wait(lambda: len(job.events(0, "restored")) > lives, "a restore")
        job.wait(lambda: len(job.events(1, "restored")) > lives, "a restore")
        step, again = job.assert_same_restore()
        assert step == A_STEPS
        assert again > attempt

        job.choose_again(ManualChoice(token="three", fresh=True))
        lives = len(job.events(0, "restored"))
        job.wait(lambda: len(job.events(0, "restored")) > lives, "a fresh start")
        job.wait(lambda: len(job.events(1, "restored")) > lives, "a fresh start")
        step, _ = job.assert_same_restore()
        assert step == 0
        lives = len(job.events(0, "restored"))
        job.kill_rank(1)  # long before its first save
        job.wait(lambda: len(job.events(0, "restored")) > lives, "another restore")
        job.wait(lambda: len(job.events(1, "restored")) > lives, "another restore")
        assert job.assert_same_restore()[0] == 0
        assert job.job().restores[-1].origin.startswith("nothing")
        job.wait_complete(LOCAL, EVERY)
        job.wait(
            lambda: any(
                c.checkpoint.step == EVERY and c.on_lineage and LOCAL in c.complete_in
                for c in job.checkpoints()
            ),
            "its own first checkpoint since",
        )
        job.kill_rank(0)
        lives = len(job.events(0, "restored"))
        job.wait(lambda: len(job.events(0, "restored")) > lives, "its own")
        assert job.events(0, "restored")[-1]["step"] >= EVERY
