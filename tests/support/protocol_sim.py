"""A simulated cluster that runs the protocol's real decisions, one message at a time.

Pods with disks and memory volumes, a remote store with conditional create, leaders and members: all
of it plain values, moved on by `actions()`, each of which is one message, one write or one fault.
What is decided is decided by the production code (choose, advance, promise/store, completeness,
Deletion, thin, ...). The truth (which world really wrote a shard) is kept beside it for judging
(protocol_judge.py); the protocol itself sees attempt numbers only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from backstay_protocol import rounds
from backstay_protocol.ids import CheckpointId
from backstay_protocol.rounds import Phase
from backstay_protocol.topology import ManualChoice, PodIdentity
from support.protocol_cluster import (
    OTHER,
    Action,
    Disk,
    Leader,
    Pod,
    another_run,
)
from support.protocol_cluster_work import WorkOfCluster


class Sim(WorkOfCluster):
    """The cluster. `actions()` says what can happen next; `do()` makes it happen."""

    most_wishes = 0
    """How often a person may change `restore`; walks that look at that raise it."""

    # --- doing -----------------------------------------------------------------------------------

    def do(self, action: Action) -> None:
        self.log.append(action[1])
        action[2]()
        if self.judge:
            self.judge.judge_state()

    def actions(self) -> list[Action]:
        found: list[Action] = []
        for pod in self.pods:
            if pod.alive:
                found += self._joins(pod)
                found += self._loads(pod)
                found += self._training(pod)
                found += self._uploads(pod)
                if pod.replica == 0:
                    found += self._duties(pod)
        found += [a for message in self.in_flight for a in self._deliveries(message)]
        return found + self._faults() + self._wishes()

    # --- what people do --------------------------------------------------------------------------

    def _wishes(self) -> list[Action]:
        """A person changes `restore` in the job, a few times in all; the other run deletes."""
        found: list[Action] = []
        number = len(self.wishes)
        if number < self.most_wishes:
            wishes = [ManualChoice(token=f"h{number}", fresh=True)]
            if self.settings.remote_configured:
                wishes.append(ManualChoice(token=f"h{number}", run=OTHER))
                wishes.append(ManualChoice(token=f"h{number}", run=OTHER, run_step=1))
            found += [
                ("wish", f"a person wishes {w.run or 'fresh'} {w.run_step}", partial(self.wish, w))
                for w in wishes
            ]
        if number and len(self.other.commits) == 2:
            found.append(("other deletes", "the other run deletes step 1", self.other_deletes))
        return found

    def wish(self, choice: ManualChoice) -> None:
        self.wishes.append(choice)
        self.choice = choice

    def other_deletes(self) -> None:
        self.other = another_run(2)

    # --- faults ----------------------------------------------------------------------------------

    def tick(self, pod: Pod) -> None:
        self.now += 2.0
        self.advance(pod, rounds.Tick(self.now))

    def _faults(self) -> list[Action]:
        found: list[Action] = []
        for pod in self.pods:
            if not pod.alive:
                continue
            if pod.run >= 0 or pod.joined:
                found.append(
                    (
                        "trainer dies",
                        f"trainer of {pod.name} dies",
                        lambda p=pod: self.kill_trainer(p),
                    )
                )
            found.append(
                (
                    "sidecar dies",
                    f"sidecar of {pod.name} crashes",
                    lambda p=pod: self.kill_sidecar(p),
                )
            )
            if pod.ghost:
                found.append(
                    ("ghost dies", f"{pod.name} finally dies", lambda p=pod: self.kill_pod(p))
                )
                continue
            if len(self.pods) < 8:
                found += self._replacements(pod)
        found += [
            (
                "corrupt",
                f"the remote copy of {shard.fingerprint} goes bad",
                partial(self.corrupt, key),
            )
            for key, shard in self.remote.shards.items()
            if key not in self.remote.corrupt and len(self.remote.corrupt) < 2
        ]
        what = "goes away" if self.remote.up else "comes back"
        if self.settings.remote_configured:
            found.append(("remote", f"remote tier {what}", self.flip_remote))
        return found

    def _replacements(self, pod: Pod) -> list[Action]:
        found: list[Action] = [
            (
                "pod dies",
                f"{pod.name} dies, the next on the same disk",
                lambda: self.replace_pod(pod, "dies", pod.disk),
            ),
        ]
        used = {p.disk for p in self.pods if p.alive}
        orphans = [
            number
            for number, disk in enumerate(self.disks)
            if disk.ok
            and number not in used
            and number != pod.disk
            and self.disk_replica(number) == pod.replica
        ]
        for how in ("node lost", "cut off", "replaced alive"):
            for disk in [None, *orphans]:
                where = "a new disk" if disk is None else f"returned disk {disk}"
                found.append(
                    (
                        how,
                        f"{pod.name} {how}, the next on {where}",
                        lambda h=how, d=disk: self.replace_pod(pod, h, d),
                    )
                )
        return found

    def disk_replica(self, number: int) -> int:
        return next(p.replica for p in self.pods if p.disk == number)

    def kill_trainer(self, pod: Pod) -> None:
        pod.run, pod.joined, pod.loaded, pod.nonce = -1, None, None, pod.nonce + 1

    def kill_sidecar(self, pod: Pod) -> None:
        pod.leader, pod.told, pod.uploading = Leader(), None, None

    def kill_pod(self, pod: Pod) -> None:
        pod.alive, pod.run, pod.joined, pod.loaded = False, -1, None, None
        pod.leader, pod.told, pod.uploading, pod.slots = Leader(), None, None, {}

    def replace_pod(self, pod: Pod, how: str, disk: int | None) -> Pod:
        """The operator's part: generation first, with what it replaces and who is current."""
        pod.ghost = True
        if how in ("dies", "node lost"):
            self.kill_pod(pod)
        if how == "node lost":
            self.disks[pod.disk] = Disk(ok=False)
        if how == "cut off":
            pod.cut = True
        if disk is None:
            disk = len(self.disks)
            self.disks.append(Disk())
        self.generation += 1
        current = {p.replica: p.identity.generation for p in self.current_pods()}
        current[pod.replica] = self.generation
        identity = PodIdentity(
            replica=pod.replica,
            generation=self.generation,
            current=current,
            replaces=pod.identity.generation,
        )
        fresh = Pod(len(self.pods), identity, disk, pod.replicas)
        self.pods.append(fresh)
        return fresh

    def resize(self, replicas: int) -> None:
        """The job is deleted and applied again with another size; the old pods may run on."""
        olds = {pod.replica: pod for pod in self.current_pods()}
        for pod in olds.values():
            pod.ghost = True
            if pod.replica < replicas:
                self.kill_pod(pod)
        self.generation += 1
        self.settings = replace(self.settings, replicas=replicas)
        current = dict.fromkeys(range(replicas), self.generation)
        for replica in range(replicas):
            old = olds.get(replica)
            usable = old is not None and self.disks[old.disk].ok
            if not usable:
                self.disks.append(Disk())
            identity = PodIdentity(replica=replica, generation=self.generation, current=current)
            disk = old.disk if old is not None and usable else len(self.disks) - 1
            self.pods.append(Pod(len(self.pods), identity, disk, replicas))

    def corrupt(self, key: tuple[CheckpointId, int]) -> None:
        self.remote.corrupt.add(key)

    def flip_remote(self) -> None:
        self.remote.up = not self.remote.up

    # --- whole walks, for tests that need to get somewhere ---------------------------------------

    def act(self, kind: str, text: str = "") -> None:
        """The first thing enabled of this kind whose account contains `text`."""
        for action in self.actions():
            if action[0] == kind and text in action[1]:
                return self.do(action)
        enabled = sorted({(a[0], a[1]) for a in self.actions()})
        raise LookupError(f"no {kind} {text!r} is enabled; these are: {enabled}")

    def settle(
        self, *kinds: str, limit: int = 400, only: Callable[[Action], bool] | None = None
    ) -> None:
        """Do what is enabled of these kinds, first come first served, until nothing is left."""
        for _ in range(limit):
            enabled = [a for a in self.actions() if a[0] in kinds and (only is None or only(a))]
            if not enabled:
                return
            self.do(enabled[0])

    def start(self) -> None:
        """A round of the current pods, undisturbed, to the go-ahead."""
        pods = [p for p in self.current_pods() if p.replica < self.settings.replicas]
        self.restore(*pods)

    def restore(self, leader: Pod, *others: Pod) -> None:
        """A round of exactly these pods, undisturbed, to the go-ahead or to its end."""
        self.gather(leader, *others)
        current = leader.leader.round
        assert current is not None
        own = {current.name, *(pod.name for pod in (leader, *others))}
        while True:
            self.settle(
                "deliver", "load", "go", "hear", only=lambda a: bool(own & set(a[1].split()))
            )
            if leader.leader.round is None or leader.leader.round.phase is not Phase.HOLD:
                return
            self.tick(leader)

    def gather(self, leader: Pod, *others: Pod) -> None:
        """Restart the trainers of these pods and let them join; nothing is delivered yet."""
        for pod in (leader, *others):
            if pod.run >= 0:
                self.kill_trainer(pod)
            self._start_over(pod)
        for pod in (leader, *others):
            self.do(("join", f"{pod.name} joins", lambda p=pod: self.join(p, leader)))

    def train(self, steps: int, *kinds: str) -> None:
        """Every rank of the newest world captures so many steps; then the given kinds of work."""
        for _ in range(steps * self.settings.world_size):
            saves = [a for a in self.actions() if a[0] == "save"]
            self.do(saves[0])
        self.settle(*kinds)
