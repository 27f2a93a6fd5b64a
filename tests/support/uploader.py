"""A process that uploads one shard, for tests that kill it. Run by path with a JSON argument.

{"endpoint", "bucket", "access_key", "secret_key", "size", "step", "sealed", "create": key}
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from threading import Event

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from backstay_protocol.layout import RemoteLayout
from backstay_sidecar.tiers.remote import RemoteStore, RemoteTier
from backstay_sidecar.transfer.upload import UploadSettings
from support.byte_shards import RUN, byte_shard

PART_BYTES = 5 << 20


def main(order: dict) -> None:
    store = RemoteStore(
        **{key: order[key] for key in ("endpoint", "bucket", "access_key", "secret_key")}
    )
    if "create" in order:
        race(store, order["create"], order["name"])
        return
    settings = UploadSettings(concurrency=2, part_bytes=PART_BYTES)
    tier = RemoteTier(store, RemoteLayout("", RUN), settings=settings)
    tier.put(byte_shard(order["size"], step=order["step"], sealed=order["sealed"]), Event())


def race(store: RemoteStore, keys: list[str], name: str) -> None:
    """Create each key as soon as a line arrives, and say whether this process won it."""
    print("ready", flush=True)
    for key in keys:
        sys.stdin.readline()
        print(int(store.create(key, name.encode())), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
