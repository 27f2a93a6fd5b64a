"""The command as people call it: help, exit codes, pulls from disks, buckets and sidecars."""

from __future__ import annotations

import json
import os
import re
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.numpy import load_file

from backstay_protocol import codec
from backstay_protocol.control import Word
from backstay_protocol.ids import CheckpointId
from backstay_protocol.layout import DiskLayout, RemoteLayout
from backstay_protocol.manifest import FORCED
from backstay_protocol.messages import Candidate, RestoreView
from support.calling import call
from support.plain_run import (
    CHECKPOINTS,
    DEAD,
    LIVE,
    RUN,
    PlainRun,
    flip,
    manifest,
    put,
    shard,
    tensors,
    upload,
)
from support.s3 import S3Server
from support.sidecar import TOKEN, SidecarJob

COMMANDS = [
    [],
    ["local"],
    ["local", "run"],
    ["local", "fail"],
    ["local", "list"],
    ["local", "clean"],
    ["agent"],
    ["status"],
    ["checkpoints"],
    ["pull"],
    ["verify"],
    ["flush"],
    ["validate"],
    ["support-bundle"],
    ["restore"],
    ["explain-restore"],
]


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BACKSTAY_HOME", str(tmp_path / "home"))
    for name in list(os.environ):
        if name.startswith(("BACKSTAY_S3", "BACKSTAY_TOKEN", "AWS_")):
            monkeypatch.delenv(name)


@pytest.fixture
def plain(tmp_path: Path) -> PlainRun:
    return PlainRun(tmp_path)


def at(run: PlainRun) -> tuple[str, str]:
    return ("--state-dir", str(run.state.root))


# --- help and usage -------------------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_helps_with_exit_codes_and_examples(command: list[str]) -> None:
    result = call(*command, "--help")
    assert result.exit_code == 0
    if command != ["local"]:
        assert "Exit codes: 0 done" in re.sub(r"\s+", " ", result.output)
        assert "Examples:" in result.output
        assert re.search(r"^    backstay|^    export", result.output, re.MULTILINE)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["pull"], 2, ["--out"]),
        (["pull", "--out", "x", "--bucket", "b"], 2, ["--bucket needs --endpoint and --run"]),
        (["pull", "--out", "x", "--address", "h", "--job", "j"], 2, ["exclude each other"]),
        (["pull", "--out", "x", "--address", "127.0.0.1:1"], 2, ["no token", "BACKSTAY_TOKEN"]),
        (["pull", "--out", "x", "--job", "nope"], 3, ["no local job named nope"]),
        (["status", "--job", "nope"], 3, ["no local job named nope"]),
        (["checkpoints", "--state-dir", "/nowhere"], 3, ["no local job was run there"]),
        (["verify", "/nowhere"], 3, ["no checkpoint is there"]),
        (["verify", "x", "--step", "latest"], 2, ["not both"]),
        (["local", "run", "/nowhere.yaml"], 3, ["no such file"]),
        (["local", "fail", "trainer", "--job", "nope"], 3, ["no running local job named nope"]),
        (["local", "fail", "nothing"], 2, ["trainer"]),
        (
            ["checkpoints", "--bucket", "b", "--endpoint", "http://127.0.0.1:1", "--run", "a/b"],
            2,
            ["no credentials", "AWS_ACCESS_KEY_ID"],
        ),
        (
            ["checkpoints", "--bucket", "b", "--endpoint", "http://h", "--run", "ab"],
            2,
            ["NAMESPACE/RUN NAME"],
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_wrong_use_ends_with_its_code_and_says_what_to_do(
    arguments: list[str], code: int, words: list[str]
) -> None:
    result = call(*arguments)
    assert result.exit_code == code, result.output
    for word in words:
        assert word in result.output
    assert "Traceback" not in result.output


def test_what_does_not_answer_is_unreachable(tmp_path: Path) -> None:
    out = ("--out", str(tmp_path / "out"))
    silent = call("pull", *out, "--address", "127.0.0.1:1", BACKSTAY_TOKEN="x" * 20)
    assert silent.exit_code == 5
    assert "127.0.0.1:1" in silent.output
    keys = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    bucket = ("--bucket", "models", "--endpoint", "http://127.0.0.1:1", "--run", RUN)
    silent = call("pull", *out, *bucket, **keys)
    assert silent.exit_code == 5
    assert "bucket models at http://127.0.0.1:1" in silent.output


def test_a_manifest_with_mistakes_ends_with_one_line_each_and_their_place(tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text("apiVersion: backstay.dev/v1alpha1\nkind: TrainingJob\nspec:\n  replicas: x\n")
    result = call("local", "run", str(job))
    assert result.exit_code == 2
    assert f"{job}:4: spec.replicas: got 'x'; expected a whole number" in result.output


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [", "not YAML"),
        ("a: 1\n---\nb: 2\n", "has 2 documents"),
        ("", "has 0 documents"),
        (
            "spec:\n  replicas: 1\n  replicas: 2\n",
            ":3: spec.replicas: given twice (before in line 2)",
        ),
        ("a: \x01\xe9\n", "not YAML"),
        (
            "x: &a [1]\ny: &b [*a,*a,*a,*a,*a,*a,*a,*a,*a]\n"
            + "z: &c [*b,*b,*b,*b,*b,*b,*b,*b,*b]\n"
            "w: &d [*c,*c,*c,*c,*c,*c,*c,*c,*c]\nv: &e [*d,*d,*d,*d,*d,*d,*d,*d,*d]\n"
            "u: &f [*e,*e,*e,*e,*e,*e,*e,*e,*e]\n",
            "too much nesting",
        ),
    ],
    ids=["broken", "two documents", "empty", "twice", "binary", "billion laughs"],
)
def test_what_is_no_manifest_is_told_in_a_line(tmp_path: Path, text: str, words: str) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(text, encoding="latin-1")
    result = call("local", "run", str(job))
    assert result.exit_code == 2
    assert words in result.output
    assert len(result.output.strip().splitlines()) == 1


# --- a stopped job's disks ------------------------------------------------------------------------


def assert_pulled(folder: Path, step: int) -> None:
    """Exactly the shards, of exact size, read by stock safetensors."""
    names = {path.name for path in folder.iterdir()}
    assert names == {
        *("00000.safetensors", "00001.safetensors", "00000.json", "00001.json"),
        "checkpoint.json",
    }
    for rank in range(2):
        path = folder / f"0000{rank}.safetensors"
        assert path.read_bytes() == shard(step, rank)
        (name, expected), *_ = tensors(step, rank).items()
        assert np.array_equal(load_file(path)[name], expected)


def test_checkpoints_of_a_stopped_job_are_listed_with_their_lineage(plain: PlainRun) -> None:
    found = json.loads(call("checkpoints", *at(plain), "-o", "json").stdout)
    assert (found["run"], found["attempt"]) == (RUN, LIVE)
    listed = {c["checkpoint"]: c for c in found["checkpoints"]}
    assert list(listed) == [str(c) for c in sorted(CHECKPOINTS, reverse=True)]
    on = {name for name, checkpoint in listed.items() if checkpoint["on_lineage"]}
    assert on == {str(c) for c in CHECKPOINTS if c != CheckpointId(30, DEAD)}
    assert listed[str(CHECKPOINTS[0])]["complete_in"] == ["local", "neighbor"]
    text = call("checkpoints", *at(plain)).stdout
    assert re.search(rf"30 +{DEAD} .*off", text)


def test_latest_is_the_newest_on_the_lineage(plain: PlainRun, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = call("pull", *at(plain), "--out", str(out), "-o", "json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["checkpoint"] == str(CheckpointId(35, LIVE))
    assert told["bytes_by_tier"] == {"local": sum(len(shard(35, rank)) for rank in range(2))}
    assert told["metadata"] == {"epoch": 35}
    assert_pulled(out, 35)
    assert told == json.loads((out / "checkpoint.json").read_text())


def test_a_step_off_the_lineage_is_pulled_only_by_its_full_name(
    plain: PlainRun, tmp_path: Path
) -> None:
    refused = call("pull", *at(plain), "--step", "30", "--out", str(tmp_path / "a"))
    assert refused.exit_code == 3
    assert f"--step 30-{DEAD}" in refused.output
    assert not (tmp_path / "a").exists()
    named = call("pull", *at(plain), "--step", f"30-{DEAD}", "--out", str(tmp_path / "b"))
    assert named.exit_code == 0, named.output
    assert_pulled(tmp_path / "b", 30)
    older = call("pull", *at(plain), "--step", "10", "--out", str(tmp_path / "c"))
    assert older.exit_code == 0
    assert_pulled(tmp_path / "c", 10)


@pytest.mark.parametrize(("step", "code"), [("99", 3), (f"10-{LIVE}", 3), ("newest", 2)])
def test_a_checkpoint_that_is_not_there_is_told_with_what_there_is(
    plain: PlainRun, tmp_path: Path, step: str, code: int
) -> None:
    result = call("pull", *at(plain), "--step", step, "--out", str(tmp_path / "out"))
    assert result.exit_code == code
    if code == 3:
        assert f"there is: 35-{LIVE}, 30-{DEAD}" in result.output


def test_pull_writes_into_a_new_or_empty_folder_only(plain: PlainRun, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    assert call("pull", *at(plain), "--out", str(out)).exit_code == 0
    again = call("pull", *at(plain), "--out", str(out))
    assert again.exit_code == 2
    assert "is not an empty folder" in again.output
    assert_pulled(out, 35)


def test_a_corrupt_copy_is_passed_over_and_told(plain: PlainRun, tmp_path: Path) -> None:
    checkpoint = CheckpointId(35, LIVE)
    flip(Path(DiskLayout.shard(plain.disk(0).shards, checkpoint, 0)))
    out = tmp_path / "out"
    result = call("pull", *at(plain), "--out", str(out))
    assert result.exit_code == 0, result.output
    assert "a corrupt copy was passed over" in result.output
    assert "chunk 2 (from byte 8192)" in result.output
    assert_pulled(out, 35)
    told = json.loads((out / "checkpoint.json").read_text())
    assert set(told["bytes_by_tier"]) == {"local", "neighbor"}


def test_with_every_copy_corrupt_nothing_is_left_in_the_folder(
    plain: PlainRun, tmp_path: Path
) -> None:
    checkpoint = CheckpointId(35, LIVE)
    flip(Path(DiskLayout.shard(plain.disk(0).shards, checkpoint, 0)))
    flip(Path(DiskLayout.shard(plain.disk(1).replicas, checkpoint, 0)), 100)
    before = set(tmp_path.iterdir())
    result = call("pull", *at(plain), "--out", str(tmp_path / "out"))
    assert result.exit_code == 4
    assert "every copy in reach is bad or gone" in result.output
    assert set(tmp_path.iterdir()) == before


@pytest.mark.parametrize("how", ["short", "manifest", "fingerprint", "unsealed"])
def test_every_way_in_which_a_copy_can_be_bad_is_found(
    plain: PlainRun, tmp_path: Path, how: str
) -> None:
    checkpoint = CheckpointId(35, LIVE)
    area = plain.disk(1).shards
    data = Path(DiskLayout.shard(area, checkpoint, 1))
    described = Path(DiskLayout.manifest(area, checkpoint, 1))
    tree = json.loads(described.read_text())
    if how == "short":
        data.write_bytes(data.read_bytes()[:-1])
    elif how == "manifest":
        described.write_bytes(manifest(CheckpointId(25, LIVE), 1).to_json())
    elif how == "fingerprint":
        described.write_text(json.dumps({**tree, "fingerprint": "0" * 32}))
    else:
        described.write_text(json.dumps({**tree, "digests": None, "fingerprint": ""}))
    result = call("verify", *at(plain), "--step", "35", "-o", "json")
    assert result.exit_code == 4, result.output
    copies = json.loads(result.stdout)["copies"]
    assert [c["verdict"] for c in copies] == ["good", "good", "corrupt", "good"]
    pulled = call("pull", *at(plain), "--step", "35", "--out", str(tmp_path / "out"))
    assert pulled.exit_code == 0, pulled.output
    assert_pulled(tmp_path / "out", 35)


def test_verify_reads_every_copy_and_tells_which_one_is_corrupt(plain: PlainRun) -> None:
    assert call("verify", *at(plain)).exit_code == 0
    bad = Path(DiskLayout.shard(plain.disk(0).replicas, CheckpointId(35, LIVE), 1))
    flip(bad)
    result = call("verify", *at(plain), "--step", "latest")
    assert result.exit_code == 4
    assert str(bad) in result.output
    assert "3 of 4 copies are good" in result.output
    assert call("verify", *at(plain), "--step", "25").exit_code == 0


def test_verify_of_a_pulled_folder_finds_flips_gaps_and_strangers(
    plain: PlainRun, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    call("pull", *at(plain), "--out", str(out))
    good = call("verify", str(out))
    assert good.exit_code == 0, good.output
    assert "2 of 2 copies are good" in good.output
    flip(out / "00001.safetensors")
    assert call("verify", str(out)).exit_code == 4
    (out / "00001.safetensors").unlink()
    assert call("verify", str(out)).exit_code == 3
    (out / "00001.json").unlink()
    gone = call("verify", str(out))
    assert gone.exit_code == 3
    assert "rank 1: missing" in gone.output
    (out / "00001.json").write_bytes(manifest(CheckpointId(25, LIVE), 1).to_json())
    assert call("verify", str(out)).exit_code == 4


def test_stock_torch_reads_a_pulled_folder_without_backstay(
    plain: PlainRun, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    call("pull", *at(plain), "--out", str(out))
    state = {"model.weight": torch.zeros(6, 1000)}
    reader = dcp.HuggingFaceStorageReader(str(out))
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(state, storage_reader=reader, no_dist=True)
    whole = np.concatenate([tensors(35, rank)["model.weight"] for rank in range(2)])
    assert torch.equal(state["model.weight"], torch.from_numpy(whole))


def test_status_of_a_stopped_job_says_so(plain: PlainRun) -> None:
    result = call("status", *at(plain))
    assert result.exit_code == 0
    assert "team/plain: not running" in result.output
    assert json.loads(call("status", *at(plain), "-o", "json").stdout)["run"] == RUN


# --- a bucket -------------------------------------------------------------------------------------


@pytest.fixture
def bucket(s3_server: S3Server) -> str:
    name = s3_server.make_bucket()
    upload(s3_server.client(), name, "some/prefix")
    return name


def in_bucket(server: S3Server, bucket: str) -> tuple[list[str], dict[str, str]]:
    where = ["--bucket", bucket, "--endpoint", server.endpoint, "--run", RUN]
    keys = {
        "BACKSTAY_S3_ACCESS_KEY": server.access_key,
        "BACKSTAY_S3_SECRET_KEY": server.secret_key,
    }
    return [*where, "--prefix", "some/prefix"], keys


def test_from_a_bucket_only_committed_checkpoints_are_taken_by_themselves(
    s3_server: S3Server,
    bucket: str,
    tmp_path: Path,
) -> None:
    where, keys = in_bucket(s3_server, bucket)
    found = json.loads(call("checkpoints", *where, "-o", "json", **keys).stdout)
    listed = {CheckpointId.parse(c["checkpoint"]).step: c for c in found["checkpoints"]}
    assert found["attempt"] == LIVE
    assert {step for step, c in listed.items() if c["durable"]} == {20, 25, 30}
    assert listed[10]["complete_in"] == []
    assert not listed[30]["on_lineage"]
    assert call("pull", *where, "--out", str(tmp_path / "a"), **keys).exit_code == 0
    assert_pulled(tmp_path / "a", 25)
    refused = call("pull", *where, "--step", "35", "--out", str(tmp_path / "b"), **keys)
    assert refused.exit_code == 3
    assert "--uncommitted" in refused.output
    taken = call(
        "pull", *where, "--step", "35", "--uncommitted", "--out", str(tmp_path / "b"), **keys
    )
    assert taken.exit_code == 0, taken.output
    assert_pulled(tmp_path / "b", 35)


def test_a_bucket_alone_tells_what_a_restore_would_take_and_what_one_considered(
    s3_server: S3Server,
    bucket: str,
    tmp_path: Path,
) -> None:
    where, keys = in_bucket(s3_server, bucket)
    done = call("restore", "--dry-run", *where, "-o", "json", **keys)
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)["preview"]
    assert told["checkpoint"] == str(CheckpointId(35, LIVE))  # adopted: whole without a commit
    why = {CheckpointId.parse(one["checkpoint"]).step: one["why"] for one in told["candidates"]}
    assert "rank 1" in why[10]
    assert "off the lineage" in why[30]
    chosen = call("restore", "--dry-run", *where, "--step", "20", "-o", "json", **keys)
    assert json.loads(chosen.stdout)["preview"]["checkpoint"] == str(CheckpointId(20, DEAD))
    there = ("--bucket", bucket, "--endpoint", s3_server.endpoint, "--prefix", "some/prefix")
    other = call(
        "restore", "--dry-run", *there, "--run", "team/new", "--from", RUN, "-o", "json", **keys
    )
    told = json.loads(other.stdout)["preview"]
    assert (told["outcome"], told["checkpoint_run"]) == ("origin", RUN)
    assert told["checkpoint"] == str(CheckpointId(25, LIVE))  # the newest durable one
    nothing = call("explain-restore", *where, **keys)
    assert nothing.exit_code == 3
    taken = Candidate(checkpoint=CheckpointId(20, DEAD), taken=True, why="the newest")
    view = RestoreView(
        attempt=LIVE,
        base=CheckpointId(20, DEAD),
        finished=1.0,
        seconds=2.0,
        bytes_by_tier={},
        lost_steps=0,
        candidates=(taken,),
    )
    layout = RemoteLayout("some/prefix", RUN)
    put(s3_server.client(), bucket, layout.explanation(LIVE), codec.dumps(view))
    explained = call("explain-restore", *where, "--attempt", str(LIVE), **keys)
    assert f"taken  step 20 of attempt {DEAD}: the newest" in explained.stdout, explained.output
    out = tmp_path / "bundle.tar.gz"
    bundled = call("support-bundle", "--out", str(out), *where, "-o", "json", **keys)
    assert json.loads(bundled.stdout)["missing"] == []
    with tarfile.open(out) as archive:
        parts = {m.name: archive.extractfile(m).read() for m in archive.getmembers()}
    assert (
        f"{layout.shard(CheckpointId(25, LIVE), 1)}\n".encode()
        in (parts["backstay-bundle/remote/keys.tsv"])
    )
    for data in parts.values():
        assert s3_server.secret_key.encode() not in data


def test_rotten_and_exchanged_objects_are_found(
    s3_server: S3Server,
    bucket: str,
    tmp_path: Path,
) -> None:
    where, keys = in_bucket(s3_server, bucket)
    client = s3_server.client()
    assert call("verify", *where, "--step", "25", **keys).exit_code == 0
    rotten = bytearray(shard(25, 1))
    rotten[-1] ^= 1
    key = f"some/prefix/{RUN}/checkpoints/{CheckpointId(25, LIVE)}/00001"
    put(client, bucket, f"{key}.safetensors", bytes(rotten))
    pulled = call("pull", *where, "--step", "25", "--out", str(tmp_path / "out"), **keys)
    assert pulled.exit_code == 4
    assert not (tmp_path / "out").exists()
    assert call("verify", *where, "--step", "25", **keys).exit_code == 4
    other = manifest(CheckpointId(20, DEAD), 1)
    put(client, bucket, f"{key}.json", other.to_json())
    told = call("verify", *where, "--step", "25", **keys)
    assert told.exit_code == 4
    assert "is the manifest of rank 1 of" in told.output


def test_a_shard_that_is_not_what_was_committed_is_refused(
    s3_server: S3Server,
    bucket: str,
    tmp_path: Path,
) -> None:
    where, keys = in_bucket(s3_server, bucket)
    checkpoint = CheckpointId(25, LIVE)
    tree = json.loads(manifest(checkpoint, 0).to_json())
    data = bytes(len(shard(25, 0)))
    from backstay_cli.digest import digest, fingerprint

    size = tree["chunk_size"]
    digests = [digest(data[i : i + size]) for i in range(0, len(data), size)]
    tree |= {"digests": digests, "fingerprint": fingerprint(digests)}
    key = f"some/prefix/{RUN}/checkpoints/{checkpoint}/00000"
    put(s3_server.client(), bucket, f"{key}.safetensors", data)
    put(s3_server.client(), bucket, f"{key}.json", json.dumps(tree).encode())
    told = call("pull", *where, "--step", "25", "--out", str(tmp_path / "out"), **keys)
    assert told.exit_code == 4
    assert "commit record" in told.output


def test_wrong_bucket_run_and_keys_are_told_apart(
    s3_server: S3Server,
    bucket: str,
) -> None:
    where, keys = in_bucket(s3_server, bucket)
    elsewhere = [*where[:5], "team/other", *where[6:]]
    nothing = call("checkpoints", *elsewhere, **keys)
    assert nothing.exit_code == 3
    assert "nothing is kept under" in nothing.output
    missing = call("checkpoints", *where[:1], "no-such-bucket", *where[2:], **keys)
    assert missing.exit_code == 3
    assert "no such bucket" in missing.output
    wrong = call("checkpoints", *where, **{**keys, "BACKSTAY_S3_SECRET_KEY": "wrong"})
    assert wrong.exit_code == 2
    assert "credentials were refused" in wrong.output


# --- running sidecars -----------------------------------------------------------------------------


def test_a_checkpoint_is_pulled_through_a_running_sidecar(tmp_path: Path) -> None:
    with SidecarJob(tmp_path, replicas=1, per_replica=2) as job:
        job.start(0)
        attempt = job.begin().attempt
        for rank in range(2):
            job.save(rank=rank, step=35, data=shard(35, rank), attempt=attempt, plan="plan-1")
        token = {"BACKSTAY_TOKEN": TOKEN}
        where = ("--address", job.host(0))

        def in_local() -> bool:
            listed = json.loads(call("checkpoints", *where, "-o", "json", **token).stdout)
            return any("local" in c["complete_in"] for c in listed["checkpoints"])

        job.wait_for(in_local, "the checkpoint to be listed in local")
        out = tmp_path / "out"
        result = call("pull", *where, "--out", str(out), **token)
        assert result.exit_code == 0, result.output
        assert_pulled(out, 35)
        assert call("verify", *where, "--step", "35", **token).exit_code == 0
        flip(Path(DiskLayout.shard(job.disk(0).shards, CheckpointId(35, attempt), 1)))
        assert call("verify", *where, "--step", "35", **token).exit_code == 4
        status = call("status", *where, **token)
        assert status.exit_code == 0
        assert "replicas" in status.output
        for rank in range(2):
            job.train(rank, attempt, 36)

        def heard() -> bool:
            return bool(
                json.loads(call("status", *where, "-o", "json", **token).stdout)["step"] == 36
            )

        job.wait_for(heard, "the leader to hear of step 36")
        late = call("flush", *where, "--timeout", "0.2", **token)
        assert late.exit_code == 1
        assert "is not complete in local" in late.output
        order = abs(job.wait_for(lambda: job.word(0, Word.SAVE_AT_STEP), "the order to save"))
        forced = {"step": order, "attempt": attempt, "slot": 1, "reason": FORCED}
        for rank in range(2):
            job.save(rank=rank, data=shard(order, rank), plan="plan-1", **forced)
            job.train(rank, attempt, order)
        flushed = json.loads(call("flush", *where, "-o", "json", **token).stdout)
        assert (flushed["done"], flushed["tier"], flushed["step"]) == (True, "local", order)
        preview = json.loads(call("restore", "--dry-run", *where, "-o", "json", **token).stdout)
        assert preview["preview"]["checkpoint"] == str(CheckpointId(order, attempt))
        chosen = call("restore", "--dry-run", *where, "--step", "35", "-o", "json", **token)
        assert json.loads(chosen.stdout)["preview"]["checkpoint"] == str(CheckpointId(35, attempt))
        explained = json.loads(call("explain-restore", *where, "-o", "json", **token).stdout)
        assert (explained["restore"]["attempt"], explained["restore"]["outcome"]) == (
            attempt,
            "fresh",
        )
        bundle = tmp_path / "bundle.tar.gz"
        told = call("support-bundle", "--out", str(bundle), *where, "-o", "json", **token)
        assert told.exit_code == 0, told.output
        assert json.loads(told.stdout)["missing"] == []
        with tarfile.open(bundle) as archive:
            parts = {m.name: archive.extractfile(m).read() for m in archive.getmembers()}
        assert b"backstay_step" in parts["backstay-bundle/sidecars/0/metrics.txt"]
        assert not any(TOKEN.encode() in data for data in parts.values())
        refused = call("status", *where, BACKSTAY_TOKEN="another-token-of-some-length")
        assert refused.exit_code == 2
        assert "the token was refused" in refused.output


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"--topology": "/nowhere"}, "there is no file"),
        ({"--replica": "3"}, "has replicas 0 to 0"),
        ({"token": ""}, "openssl rand"),
        ({"--topology": "broken"}, "not JSON"),
    ],
    ids=str,
)
def test_the_agent_refuses_what_it_can_not_start_with(
    tmp_path: Path, change: dict[str, str], words: str
) -> None:
    with SidecarJob(tmp_path) as job:
        assert job.topology.replicas == 1
    (tmp_path / "broken").write_text("{")
    if change.get("--topology") == "broken":
        change = {"--topology": str(tmp_path / "broken")}
    options = {
        "--topology": str(tmp_path / "topology.json"),
        "--replica": "0",
        "--volume": str(tmp_path / "volume"),
        **change,
    }
    token = options.pop("token", TOKEN)
    arguments = [word for option in options.items() for word in option]
    result = call("agent", *arguments, BACKSTAY_TOKEN=token)
    assert result.exit_code in (2, 3)
    assert words in result.output
