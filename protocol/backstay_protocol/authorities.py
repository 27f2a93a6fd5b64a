"""Whom HTTPS clients of the object store trust: the public authorities, and one's own beside them.

Sidecar and library each make one from a file (ENV_S3_CA_FILE), which may come late and may change:
a Secret is renewed under a running pod. The command ends too soon to need one (its bucket.py).
"""

from __future__ import annotations

import os
import ssl
import threading


class Authorities:
    """A TLS context for clients. Safe for several threads."""

    def __init__(self, path: str) -> None:
        """`path`: certificates in PEM. One that can't be read is no error here, see `trouble`."""
        self.context = ssl.create_default_context()
        """The same one all the time: what is added later counts for the next connection."""
        self.trouble = ""
        """Why one's own authority is not trusted; empty: it is."""
        self._path = path
        self._seen: tuple[int, int, int] | None = None
        self._lock = threading.Lock()
        self.refresh()

    def refresh(self) -> None:
        """Read the file if it is another one than last time. What was trusted once stays so."""
        with self._lock:
            try:
                found = os.stat(self._path)
                seen = (found.st_ino, found.st_mtime_ns, found.st_size)
                if seen == self._seen:
                    return
                self.context.load_verify_locations(cafile=self._path)
            except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
                said = error.strerror or str(error) if isinstance(error, OSError) else str(error)
                self.trouble = f"the authority's certificate {self._path} can't be read ({said})"
            else:
                self._seen, self.trouble = seen, ""


def authorities(path: str) -> Authorities | None:
    """None for no path: then the public authorities alone are trusted."""
    return Authorities(path) if path else None
