"""Where a run's checkpoints can be read: running sidecars, a bucket, the disks of a stopped job."""

from backstay_cli.catalog.base import Catalog, CorruptCopy, ShardSource, sealed_manifest
from backstay_cli.catalog.bucket import BucketCatalog
from backstay_cli.catalog.chain import ChainedCatalog
from backstay_cli.catalog.disks import DiskCatalog, FileSource
from backstay_cli.catalog.select import LATEST, select
from backstay_cli.catalog.sidecars import SidecarCatalog

__all__ = [
    "LATEST",
    "BucketCatalog",
    "Catalog",
    "ChainedCatalog",
    "CorruptCopy",
    "DiskCatalog",
    "FileSource",
    "ShardSource",
    "SidecarCatalog",
    "sealed_manifest",
    "select",
]
