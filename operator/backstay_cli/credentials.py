"""S3 keys of the person who runs the command, from the environment."""

from __future__ import annotations

import itertools
import os

from backstay_cli.errors import UsageError
from backstay_protocol.names import (
    ENV_S3_ACCESS_KEY,
    ENV_S3_SECRET_KEY,
    ENV_S3_SESSION_TOKEN,
    ENV_TOKEN,
)

HINT = (
    "set BACKSTAY_S3_ACCESS_KEY and BACKSTAY_S3_SECRET_KEY (or AWS_ACCESS_KEY_ID and "
    "AWS_SECRET_ACCESS_KEY)"
)
_NAMES = (
    (ENV_S3_ACCESS_KEY, ENV_S3_SECRET_KEY, ENV_S3_SESSION_TOKEN),
    ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"),
)
"""Access key, secret key, session token: the first pair that is set counts."""


def credentials() -> tuple[str, str, str]:
    """S3 keys and session token of the person. Raises UsageError if there are none."""
    for access, secret, session in _NAMES:
        if os.environ.get(access) and os.environ.get(secret):
            return os.environ[access], os.environ[secret], os.environ.get(session, "")
    raise UsageError("no credentials for the S3 store", HINT)


def secrets_of_environment() -> list[str]:
    """All that is secret in what the environment gives this command."""
    names = (ENV_TOKEN, *itertools.chain(*_NAMES))
    return [value for name in names if (value := os.environ.get(name))]
