"""Breaking a running local job on purpose, as `backstay local fail` orders it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from backstay_operator.api.names import TRAINER

from backstay_cli.errors import CommandError
from backstay_cli.local import tree
from backstay_cli.local.control import FAILURES, FailOrder
from backstay_cli.local.kubelet import Pod
from backstay_cli.local.machine import Nodes


@dataclass(frozen=True, kw_only=True)
class Done:
    """What was broken."""

    replicas: tuple[int, ...]
    detail: str


class Failures:
    """Carries orders out. It tells the deciding part nothing: that must notice by itself."""

    def __init__(
        self, pods: Mapping[int, Pod], nodes: Nodes, lose_node: Callable[[str], None]
    ) -> None:
        """`pods`: by replica, those that exist; `lose_node` notes that a node is no more."""
        self._pods = pods
        self._nodes = nodes
        self._lose_node = lose_node

    async def carry_out(self, order: FailOrder) -> Done:
        """Raises CommandError that names the choices."""
        if order.failure == "all":
            return await self._destroy_nodes(list(self._pods.values()))
        pod = self._choose(order.replica)
        if order.failure == "trainer":
            return self._kill_rank(pod, order.local_rank)
        if order.failure == "memory":
            return await self._wipe_memory(pod)
        if order.failure == "node":
            return await self._destroy_nodes([pod])
        raise CommandError(f"no such failure: {order.failure}; choose {', '.join(FAILURES)}")

    def _choose(self, replica: int) -> Pod:
        if replica < 0 and self._pods:
            return self._pods[max(self._pods)]
        if replica not in self._pods:
            running = ", ".join(str(r) for r in sorted(self._pods)) or "none just now"
            raise CommandError(f"replica {replica} does not run; running: {running}")
        return self._pods[replica]

    def _kill_rank(self, pod: Pod, local_rank: int) -> Done:
        process = pod.process(TRAINER)
        ranks = (
            tree.rank_processes(process.shim_pid, process.pid, tree.children_by_parent())
            if process is not None
            else {}
        )
        if local_rank not in ranks or not tree.kill(ranks[local_rank]):
            running = ", ".join(str(rank) for rank in sorted(ranks)) or "none just now"
            raise CommandError(
                f"replica {pod.replica} has no trainer process of local rank {local_rank}; "
                f"running: {running}"
            )
        detail = (
            f"killed the trainer process of replica {pod.replica}, local rank {local_rank} "
            f"(process {ranks[local_rank].pid}, SIGKILL)"
        )
        return Done(replicas=(pod.replica,), detail=detail)

    async def _wipe_memory(self, pod: Pod) -> Done:
        await pod.reboot(lambda: self._nodes.wipe_memory(pod.plan.node))
        detail = (
            f"wiped the memory of {pod.plan.node} as a reboot would: all containers of replica "
            f"{pod.replica} died; its disk stays"
        )
        return Done(replicas=(pod.replica,), detail=detail)

    async def _destroy_nodes(self, pods: list[Pod]) -> Done:
        if not pods:
            raise CommandError("no pod runs just now")
        for pod in pods:
            self._lose_node(pod.plan.node)
        await asyncio.gather(*(pod.kill() for pod in pods))
        for pod in pods:
            self._nodes.destroy(pod.plan.node)
        names = ", ".join(pod.plan.node for pod in pods)
        replicas = tuple(sorted(pod.replica for pod in pods))
        shown = ", ".join(str(replica) for replica in replicas)
        return Done(
            replicas=replicas,
            detail=f"destroyed {names} with memory and disk (replica {shown})",
        )
