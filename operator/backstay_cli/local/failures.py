"""Breaking a running local job on purpose, as `backstay local fail` orders it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from backstay_cli.errors import CommandError
from backstay_cli.local import tree
from backstay_cli.local.control import FAILURES, FailOrder
from backstay_cli.local.kubelet import Pod
from backstay_cli.local.machine import Nodes
from backstay_operator.api.names import TRAINER


@dataclass(frozen=True, kw_only=True)
class Breakage:
    """What will be broken, in words, and how."""

    replicas: tuple[int, ...]
    detail: str
    act: Callable[[], Awaitable[None]]
    """Raises CommandError if it was gone before."""


class Failures:
    """Prepares what is ordered. It tells the deciding part nothing: that must notice by itself."""

    def __init__(
        self, pods: Mapping[int, Pod], nodes: Nodes, lose_node: Callable[[str], None]
    ) -> None:
        """`pods`: by replica, those that exist; `lose_node` notes that a node is no more."""
        self._pods = pods
        self._nodes = nodes
        self._lose_node = lose_node

    def prepare(self, order: FailOrder) -> Breakage:
        """Raises CommandError that names the choices."""
        if order.failure == "all":
            return self._nodes_of(list(self._pods.values()))
        pod = self._choose(order.replica)
        if order.failure == "trainer":
            return self._rank_of(pod, order.local_rank)
        if order.failure == "memory":
            return self._memory_of(pod)
        if order.failure == "node":
            return self._nodes_of([pod])
        raise CommandError(f"no such failure: {order.failure}; choose {', '.join(FAILURES)}")

    def _choose(self, replica: int) -> Pod:
        if replica < 0 and self._pods:
            return self._pods[max(self._pods)]
        if replica not in self._pods:
            running = ", ".join(str(r) for r in sorted(self._pods)) or "none just now"
            raise CommandError(f"replica {replica} does not run; running: {running}")
        return self._pods[replica]

    def _rank_of(self, pod: Pod, local_rank: int) -> Breakage:
        process = pod.process(TRAINER)
        ranks = (
            tree.rank_processes(process.shim_pid, tree.children_by_parent())
            if process is not None
            else {}
        )
        where = f"replica {pod.replica}, local rank {local_rank}"
        if local_rank not in ranks:
            running = ", ".join(str(rank) for rank in sorted(ranks)) or "none just now"
            raise CommandError(f"no trainer process of {where}; local ranks there: {running}")
        victim = ranks[local_rank]

        async def act() -> None:
            if not tree.kill(victim):
                raise CommandError(f"the trainer process of {where} ended just before")

        return Breakage(
            replicas=(pod.replica,),
            detail=f"SIGKILL to the trainer process of {where} (process {victim.pid})",
            act=act,
        )

    def _memory_of(self, pod: Pod) -> Breakage:
        async def act() -> None:
            await pod.reboot(lambda: self._nodes.wipe_memory(pod.plan.node))

        return Breakage(
            replicas=(pod.replica,),
            detail=f"{pod.plan.node} is rebooted: all containers of replica {pod.replica} die and "
            "its memory is wiped; its disk stays",
            act=act,
        )

    def _nodes_of(self, pods: list[Pod]) -> Breakage:
        if not pods:
            raise CommandError("no pod runs just now")
        replicas = tuple(sorted(pod.replica for pod in pods))
        shown = ", ".join(str(replica) for replica in replicas)
        names = ", ".join(pod.plan.node for pod in pods)

        async def act() -> None:
            for pod in pods:
                self._lose_node(pod.plan.node)
            await asyncio.gather(*(pod.kill() for pod in pods))
            for pod in pods:
                self._nodes.destroy(pod.plan.node)

        return Breakage(
            replicas=replicas,
            detail=f"{names} destroyed with memory and disk (replica {shown})",
            act=act,
        )
