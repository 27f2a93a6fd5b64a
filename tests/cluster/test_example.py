"""The example's own manifest, changed only where docs/kubernetes.md tells its reader to."""

from __future__ import annotations

import json
from collections.abc import Callable

import yaml

from cluster.built_images import ROOT, Image
from cluster.kube import is_true
from cluster.object_store import Store
from cluster.training import RECOVER_SECONDS, SECRET, START_SECONDS, Job, mount_torch

EXAMPLE = ROOT / "examples/char_gpt/trainingjob.yaml"
COLUMNS = ["NAME", "READY", "STEP", "DURABLE", "AGE", "RESTARTS", "REASON"]


def test_the_example_trains_to_its_end_and_get_shows_how_far_it_is(
    make_job: Callable[..., Job], images: dict[str, Image], store: Store, torch_folder: str
) -> None:
    plain = make_job("char-gpt")
    tree = yaml.safe_load(EXAMPLE.read_text())
    pod = tree["spec"]["podTemplate"]["spec"]
    (trainer,) = pod["containers"]
    trainer["image"] = images["backstay-example-trainer"].reference
    remote = tree["spec"]["checkpoint"]["remote"]
    remote |= {"endpoint": store.endpoint, "bucket": store.bucket, "credentialsSecret": SECRET}
    if torch_folder:  # the image is built without torch
        mount_torch(pod, torch_folder)
    trainer["resources"]["requests"] = {"cpu": "100m", "memory": "1Gi"}
    trainer["command"][-1] = "--num-steps=160"

    job = Job(plain.kube, plain.namespace, tree)
    job.apply()
    job.wait("its durable step shows", lambda: int(_shown(job)["DURABLE"]) > 0, START_SECONDS)
    assert _shown(job)["READY"] == "3/3"
    job.wait("it succeeds", lambda: is_true(job.tree, "Succeeded"), RECOVER_SECONDS)
    shown = _shown(job)
    assert (shown["STEP"], shown["DURABLE"]) == ("160", "160")
    assert shown["REASON"] == "AllReplicasCompleted"
    tiers = job.status["tiers"]
    assert {"memory", "local", "neighbor", "remote"} == set(tiers), json.dumps(tiers)
    job.delete()
    job.wait("nothing of it is left", lambda: not job.objects(), RECOVER_SECONDS)


def _shown(job: Job) -> dict[str, str]:
    """The row of `kubectl get tj`; AssertionError while a column is still empty."""
    header, row = job.kube.run("get", "tj", job.name, "-n", job.namespace).splitlines()
    assert header.split() == COLUMNS
    assert len(row.split()) == len(COLUMNS), row
    return dict(zip(COLUMNS, row.split(), strict=True))
