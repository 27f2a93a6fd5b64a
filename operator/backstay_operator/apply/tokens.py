"""Tokens of jobs: kept in each job's Secret, made from one key of the operator's own.

A Secret that is lost is made again with the same token, by an operator that was restarted too: the
pods go by it still. Used by the applier alone.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import logging
import secrets

from backstay_operator.api import TrainingJob
from backstay_operator.cluster import SECRET, Cluster, Tree, belongs_to
from backstay_operator.errors import AlreadyThere, Refused
from backstay_operator.manifests.objects import build_secret, owned_name, token_of

KEY = "key"
_TRIES = 3

log = logging.getLogger("backstay.tokens")


class Tokens:
    """One per operator."""

    def __init__(self, cluster: Cluster, namespace: str, key_name: str) -> None:
        """`key_name`: the Secret in the operator's `namespace` that holds its key."""
        self._cluster = cluster
        self._namespace = namespace
        self._key_name = key_name
        self._key = ""

    async def ensure(self, job: TrainingJob, uid: str, known: str) -> str:
        """The token in the job's Secret, which is made if it is not there.

        `known`: the token that living pods go by, if that is known; empty: it is not.
        """
        name = owned_name(job.name)
        for _ in range(_TRIES):
            found = await self._cluster.get(SECRET, job.namespace, name)
            if found is not None and belongs_to(found, uid) and token_of(found):
                return token_of(found)
            if found is not None:  # of an earlier job of this name, not collected yet
                await self._cluster.delete(
                    SECRET, job.namespace, name, uid=found["metadata"]["uid"]
                )
            token = known or await self._made(job, uid)
            try:
                await self._cluster.create(SECRET, build_secret(job, uid, token))
            except AlreadyThere:
                continue
            return token
        raise Refused(f"Secret {job.namespace}/{name} is made by somebody else again and again")

    async def _made(self, job: TrainingJob, uid: str) -> str:
        """Always the same for one job, and nobody's guess."""
        try:
            key = await self._own_key()
        except Refused as error:  # rights of an older chart
            log.warning(
                "a token is made by chance, so that it can't be made again if Secret %s/%s is lost "
                "while no operator runs: %s",
                job.namespace,
                owned_name(job.name),
                error,
            )
            return secrets.token_hex(32)
        whose = f"{job.namespace}/{job.name}/{uid}".encode()
        return hmac.new(key.encode(), whose, hashlib.sha256).hexdigest()

    async def _own_key(self) -> str:
        while not self._key:
            found = await self._cluster.get(SECRET, self._namespace, self._key_name)
            if found is not None:
                self._key = _key_of(found)
                continue
            body = {
                "apiVersion": "v1",
                "kind": "Secret",
                "type": "Opaque",
                "metadata": {"name": self._key_name, "namespace": self._namespace},
                "data": {KEY: base64.b64encode(secrets.token_hex(32).encode()).decode()},
            }
            try:
                self._key = _key_of(await self._cluster.create(SECRET, body))
            except AlreadyThere:
                continue  # another operator was faster
        return self._key


def _key_of(secret: Tree) -> str:
    encoded = (secret.get("data") or {}).get(KEY, "")
    key = base64.b64decode(encoded).decode(errors="replace").strip()
    if not key:
        name = f"{secret['metadata']['namespace']}/{secret['metadata']['name']}"
        raise Refused(f"Secret {name} has no {KEY}; delete it, and another one is made")
    return key
