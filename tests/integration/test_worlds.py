"""FSDP2 saved by two ranks: restored by two and by one; pulled, it loads in stock readers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import HuggingFaceStorageReader

from backstay_protocol.names import ENV_TOKEN, PORT_API
from support.s3 import S3Server
from support.sidecar import TOKEN
from support.training_job import TrainingJob, assert_equal, every_tier

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def two_ranks(
    tmp_path_factory: pytest.TempPathFactory,
    s3_server: S3Server,
) -> tuple[str, dict[str, torch.Tensor], Path]:
    """A finished FSDP2 run of two ranks: its bucket, its last state, its pulled checkpoint."""
    bucket = s3_server.make_bucket()
    folder = tmp_path_factory.mktemp("two")
    pulled = folder / "pulled"
    tiers = every_tier(folder / "disk", endpoint=s3_server.endpoint, bucket=bucket)
    keys = (s3_server.access_key, s3_server.secret_key)
    with TrainingJob(folder, kind="fsdp", steps=6, tiers=tiers, s3_keys=keys) as job:
        job.start()
        job.finish()
        address = f"{job.sidecars.host(0)}:{PORT_API}"
        command = [
            sys.executable, "-m", "backstay_cli.main", "pull", "--address", address,
            "--step", "latest", "--out", str(pulled),
        ]  # fmt: skip
        subprocess.run(command, check=True, env={**os.environ, ENV_TOKEN: TOKEN})
        return bucket, job.final(), pulled


@pytest.mark.parametrize("replicas", [1, 2])
def test_fsdp_state_of_two_ranks_goes_on_in(
    replicas: int,
    two_ranks: tuple[str, dict[str, torch.Tensor], Path],
    tmp_path: Path,
    s3_server: S3Server,
) -> None:
    bucket, expected, _ = two_ranks
    folder = tmp_path / f"again-{replicas}"
    tiers = every_tier(
        folder / "disk", endpoint=s3_server.endpoint, bucket=bucket, neighbor=replicas > 1
    )
    with TrainingJob(
        folder,
        replicas=replicas,
        kind="fsdp",
        steps=6,
        tiers=tiers,
        s3_keys=(s3_server.access_key, s3_server.secret_key),
        arguments=("--on-world-change", "reset") if replicas == 1 else (),
    ) as job:
        job.start()
        job.finish()
        assert job.restored()[0]["step"] == 6
        names = [n for n in expected if n.startswith(("model.", "optimizer."))]
        final = job.final()
        assert_equal({n: final[n] for n in names}, {n: expected[n] for n in names})


def test_a_pulled_checkpoint_is_read_by_stock_safetensors(
    two_ranks: tuple[str, dict[str, torch.Tensor], Path],
) -> None:
    _, expected, pulled = two_ranks
    pieces: dict[str, list[torch.Tensor]] = {}
    for path in sorted(pulled.glob("*.safetensors")):
        for name, tensor in load_file(path).items():
            pieces.setdefault(name, []).append(tensor)
    for name in (n for n in expected if n.startswith("model.")):
        assert torch.equal(torch.cat(pieces[name]), expected[name]), name


READER = """
import json, os, sys, torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor, Shard
from safetensors.torch import save_file

torch.set_num_threads(1)
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
shapes = json.loads(sys.argv[2])
wanted = {
    name: distribute_tensor(torch.zeros(shape), mesh, [Shard(0)]) for name, shape in shapes.items()
}
dcp.load(wanted, storage_reader=HuggingFaceStorageReader(sys.argv[1]))
whole = {name: tensor.full_tensor() for name, tensor in wanted.items()}
if dist.get_rank() == 0:
    save_file(whole, sys.argv[3])
dist.destroy_process_group()
"""


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_pulled_checkpoint_is_read_by_the_stock_reader_in(
    num_ranks: int,
    two_ranks: tuple[str, dict[str, torch.Tensor], Path],
    tmp_path: Path,
) -> None:
    _, expected, pulled = two_ranks
    names = [n for n in expected if n.startswith("model.") and expected[n].is_floating_point()]
    shapes = {n: list(expected[n].shape) for n in names}
    script, out = tmp_path / "reader.py", tmp_path / "read.safetensors"
    script.write_text(READER)
    command = [
        sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone",
        "--nproc-per-node", str(num_ranks), str(script), str(pulled), json.dumps(shapes), str(out),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert_equal(load_file(out), {n: expected[n] for n in names})


def test_the_stock_reader_sees_every_name(
    two_ranks: tuple[str, dict[str, torch.Tensor], Path],
) -> None:
    _, expected, pulled = two_ranks
    metadata = HuggingFaceStorageReader(str(pulled)).read_metadata()
    assert {n for n in expected if n.startswith("model.")} <= metadata.state_dict_metadata.keys()
