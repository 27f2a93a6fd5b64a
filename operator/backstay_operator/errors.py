"""The operator's errors.

BackstayError
├── Unbuildable         a valid job that can't be carried out here (the message says what to change)
├── ConfigError         the operator's own settings are wrong
└── ClusterError        a call to the API server did not do what it should
    ├── AlreadyThere    an object of that name exists
    ├── Conflict        the object has changed since it was read
    ├── Refused         it says no, and will again (admission, quota, permission, schema)
    └── Unreachable     no answer, or none that helps; it may be tried again
"""

from __future__ import annotations

from backstay_protocol.errors import BackstayError


class Unbuildable(BackstayError):
    """A valid job that this cluster or machine can't carry out."""


class ConfigError(BackstayError):
    """The operator's settings file is wrong."""


class ClusterError(BackstayError):
    """A call to the API server did not do what it should."""


class AlreadyThere(ClusterError):
    """An object of that name exists."""


class Conflict(ClusterError):
    """The object has changed since it was read: look again."""


class Refused(ClusterError):
    """The API server says no, and will again until somebody changes something."""


class Unreachable(ClusterError):
    """No answer, or none that helps: try again later."""
