"""The example's manifest is a valid TrainingJob that keeps checkpoints in all four tiers."""

from __future__ import annotations

from pathlib import Path

import yaml

from backstay_operator.api import read_job
from examples.char_gpt import demo


def test_the_manifest_has_three_replicas_and_four_tiers() -> None:
    job = read_job(yaml.safe_load(demo.MANIFEST.read_text()))
    checkpoint = job.spec.checkpoint
    assert (job.spec.replicas, job.spec.processes_per_replica) == (3, 1)
    assert checkpoint.local is not None
    assert checkpoint.neighbor is not None
    assert checkpoint.remote is not None
    assert checkpoint.remote.embedded
    assert checkpoint.memory.schedule.every_steps == 5


def test_the_reference_differs_in_its_name_alone(tmp_path: Path) -> None:
    main = yaml.safe_load(demo.MANIFEST.read_text())
    path = demo.write_reference(tmp_path)
    other = yaml.safe_load(path.read_text())
    read_job(other)
    assert other["metadata"]["name"] == "char-gpt-undisturbed"
    trainer = other["spec"]["podTemplate"]["spec"]["containers"][0]
    assert (path.parent / trainer["workingDir"]).resolve() == demo.ROOT
    trainer["workingDir"] = "../.."
    other["metadata"]["name"] = main["metadata"]["name"]
    assert other == main
