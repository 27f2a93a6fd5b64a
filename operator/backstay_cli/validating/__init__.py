"""What is wrong with a manifest: by itself, and in the cluster that shall carry it out."""

from backstay_cli.validating.bucket import check_bucket
from backstay_cli.validating.files import Checked, read_files
from backstay_cli.validating.findings import OK, PROBLEM, UNKNOWN, Finding
from backstay_cli.validating.server import check_server

__all__ = [
    "OK",
    "PROBLEM",
    "UNKNOWN",
    "Checked",
    "Finding",
    "check_bucket",
    "check_server",
    "read_files",
]
