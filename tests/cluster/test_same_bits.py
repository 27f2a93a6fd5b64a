"""A run that is hurt in every way, its operator killed again and again, ends with the same bits.

One job trains through, another is hurt; the last checkpoints of both are taken from the store as
plain files and compared bit by bit, tensor by tensor.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.installed_chart import Chart
from cluster.kube import is_true
from cluster.machine import Cluster
from cluster.object_store import Store
from cluster.training import RECOVER_SECONDS, START_SECONDS, Job, node_number
from examples.char_gpt.compare import compare_folders

NUM_STEPS = int(os.environ.get("BACKSTAY_TEST_STEPS", "2500"))
KILLS_EACH = 4
"""After each of five injuries: twenty in all."""
MOST_SECONDS_BETWEEN_KILLS = 4.0
SEED = int(os.environ.get("BACKSTAY_TEST_SEED", "0")) or time.time_ns() % 1_000_000


@pytest.mark.timeout(1500, func_only=True)
def test_a_job_that_is_hurt_while_its_operator_is_killed_ends_with_the_same_bits(
    make_job: Callable[..., Job], store: Store, chart: Chart, breakable: Cluster, tmp_path: Path
) -> None:
    print(f"\nBACKSTAY_TEST_SEED={SEED}")
    chance = random.Random(SEED)
    calm = make_job("calm", num_steps=NUM_STEPS)
    calm.apply()
    calm.wait("it succeeds", lambda: is_true(calm.tree, "Succeeded"), 600)
    assert calm.status["restarts"] == 0

    hurt = make_job("hurt", num_steps=NUM_STEPS)
    hurt.apply()
    hurt.wait_training(timeout=START_SECONDS)
    lost: list[str] = []

    def lose_a_node() -> None:
        lost.append(hurt.node(hurt.replica_away_from(chart.node())))
        breakable.node_kill(node_number(lost[-1]))

    injuries: list[Callable[[], None]] = [
        lambda: hurt.kill_rank(1),
        lambda: hurt.kube.delete("pod", hurt.pod_name(0), hurt.namespace, "--wait=false"),
        lose_a_node,
        lambda: hurt.end_container(2, "trainer"),
        lambda: hurt.kube.delete("pod", hurt.pod_name(1), hurt.namespace, "--wait=false"),
    ]
    kills = 0
    for injury in injuries:
        before = hurt.running_attempt()
        injury()
        for _ in range(KILLS_EACH):
            time.sleep(chance.uniform(0, MOST_SECONDS_BETWEEN_KILLS))
            chart.kill()
            kills += 1
        hurt.wait("a newer attempt trains", lambda old=before: hurt.running_attempt() > old, 300)
        while lost:
            breakable.node_start(node_number(lost.pop()))
    assert kills == KILLS_EACH * len(injuries)
    assert not is_true(hurt.tree, "Succeeded"), "it was hurt to the end; give it more steps"
    hurt.wait("it succeeds", lambda: is_true(hurt.tree, "Succeeded"), 600)
    assert hurt.status["durableStep"] == NUM_STEPS
    assert len(hurt.status["recoveries"]) >= 3

    found = [_pull(store, job, tmp_path / job.name) for job in (calm, hurt)]
    verdict = compare_folders(*found)
    print({part.title: part.num_values for part in verdict.parts})
    assert verdict.equal, "\n".join(verdict.differences[:20])
    for job in (calm, hurt):
        job.delete()
    hurt.wait("nothing of it is left", lambda: not hurt.objects(), RECOVER_SECONDS)


def _pull(store: Store, job: Job, folder: Path) -> Path:
    """The shards of the last step's committed checkpoint, as a stock client reads them."""
    run = f"{job.namespace}/{job.name}/checkpoints/"
    names = store.names(f"{run}{NUM_STEPS:012d}-")
    (commit,) = [name for name in names if name.endswith("/commit.json")]
    shards = [name for name in names if name.startswith(commit.removesuffix("commit.json"))]
    with store.client() as client:
        for name in shards:
            if name.endswith(".safetensors"):
                path = folder / name.rpartition("/")[2]
                client.fget_object(bucket_name=store.bucket, object_name=name, file_path=str(path))
    return folder
