"""A small client of the cluster's API server, with the admin certificate."""

from __future__ import annotations

import http.client
import json
import ssl
import time
from typing import Any

from cluster.harness import layout


class Refused(Exception):
    """The API server answered with an error status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status


class Api:
    """One call, one connection: nothing to keep alive."""

    def __init__(self, cluster: layout.Layout, port: int) -> None:
        self.port = port
        self.context = ssl.create_default_context(cafile=str(cluster.pki / "ca.crt"))
        self.context.load_cert_chain(cluster.pki / "admin.crt", cluster.pki / "admin.key")

    def call(
        self, method: str, path: str, body: object = None, kind: str = "application/json"
    ) -> Any:
        """The decoded answer; Refused on an error status, OSError if nobody answers."""
        connection = http.client.HTTPSConnection(
            "127.0.0.1", self.port, context=self.context, timeout=10
        )
        try:
            data = None if body is None else json.dumps(body)
            connection.request(method, path, data, {"Content-Type": kind})
            answer = connection.getresponse()
            text = answer.read().decode()
        except http.client.HTTPException as error:
            raise OSError(str(error)) from error
        finally:
            connection.close()
        if answer.status >= 400:
            raise Refused(answer.status, text[:500])
        return json.loads(text) if text.startswith("{") else text

    def ready(self) -> bool:
        """Whether the API server says that it is ready."""
        try:
            return self.call("GET", "/readyz") == "ok"
        except (OSError, Refused):
            return False

    def exists(self, path: str) -> bool:
        """Whether there is an object at this path."""
        try:
            self.call("GET", path)
            return True
        except (OSError, Refused):
            return False

    def apply(self, path: str, document: dict[str, Any]) -> None:
        """Server-side apply; tried again while the API server is still starting."""
        for attempt in range(50):
            try:
                query = f"{path}?fieldManager=test-cluster&force=true"
                self.call("PATCH", query, document, "application/apply-patch+yaml")
                return
            except (OSError, Refused) as error:
                if attempt == 49 or (
                    isinstance(error, Refused) and error.status not in (403, 404, 429, 500, 503)
                ):
                    raise
                time.sleep(0.2)

    def nodes(self) -> dict[str, bool]:
        """Node names, and whether each is Ready."""
        listing = self.call("GET", "/api/v1/nodes")
        return {
            item["metadata"]["name"]: any(
                c["type"] == "Ready" and c["status"] == "True"
                for c in item.get("status", {}).get("conditions", [])
            )
            for item in listing["items"]
        }
