"""What a simulated cluster does between restores: save, copy, upload, commit, delete, thin."""

from __future__ import annotations

from dataclasses import replace

from backstay_protocol import commit, promises, rounds
from backstay_protocol.completeness import complete_in
from backstay_protocol.history import lineage_of
from backstay_protocol.ids import CheckpointId
from backstay_protocol.names import LOCAL, MEMORY, NEIGHBOR, REMOTE
from backstay_protocol.records import AttemptRecord, Claim
from backstay_protocol.retention import ThinView, remote_victims, thin
from support.protocol_cluster import (
    KEEP_ONE,
    OWNER,
    Action,
    Pod,
    Shard,
    World,
)
from support.protocol_cluster_rounds import RoundsOfCluster


class WorkOfCluster(RoundsOfCluster):
    """Training, transfers and the leader's duties."""

    # --- training --------------------------------------------------------------------------------

    def _training(self, pod: Pod) -> list[Action]:
        found: list[Action] = []
        if pod.run >= 0:
            world = self.worlds[pod.run]
            for rank in self.ranks(pod):
                at = world.progress.get(rank, -1)
                if world.order and at < self.max_steps and min(world.progress.values()) >= at:
                    found.append(
                        (
                            "save",
                            f"{pod.name} captures {at + 1} of {world.attempt}",
                            lambda rank=rank: self.capture(pod, rank),
                        )
                    )
        for area, shard in list(self.shards_at(pod)):
            if area == MEMORY and self.disks[pod.disk].ok:
                key = (LOCAL, shard.checkpoint, shard.rank)
                if key not in self.disks[pod.disk].shards:
                    found.append(
                        (
                            "copy",
                            f"{pod.name} writes {shard.fingerprint} to its disk",
                            lambda key=key, shard=shard: self.persist(pod, key, shard),
                        )
                    )
        found += self._offers(pod) + self._copies_again(pod)
        if pod.told:
            found.append(("thin", f"{pod.name} thins", lambda: self.carry_out_thinning(pod)))
        return found

    def capture(self, pod: Pod, rank: int) -> None:
        world = self.worlds[pod.run]
        step = world.progress[rank] + 1
        world.progress[rank] = step
        shard = Shard(step, world.attempt, pod.run, rank, world.size, pod.chain)
        slots = pod.slots.setdefault(rank, [])
        if len(slots) == 2:
            slots.remove(self._free_slot(slots, world))
        slots.append(shard)

    def _free_slot(self, slots: list[Shard], world: World) -> Shard:
        """Never the newest step that all ranks hold (the real rule is the library's)."""
        everywhere = [
            {(s.checkpoint) for s in self.pods[number].slots.get(rank, [])}
            for number in world.members.values()
            for rank in self.ranks(self.pods[number])
        ]
        common = set.intersection(*everywhere) if everywhere else set()
        keep = max(common, default=None)
        return min((s for s in slots if s.checkpoint != keep), key=lambda s: s.checkpoint)

    def persist(self, pod: Pod, key: tuple[str, CheckpointId, int], shard: Shard) -> None:
        self.disks[pod.disk].shards[key] = shard

    def _offers(self, pod: Pod) -> list[Action]:
        """The next replica pulls a copy, if what it is offered under is what it has promised."""
        attempt = promises.current_attempt(self.state(pod))
        record = self.state(pod).record
        if not attempt or record is None or record.replicas < 2:
            return []
        found: list[Action] = []
        for other in self.pods:
            if other.replica != (pod.replica + 1) % record.replicas or other is pod:
                continue
            if not self.reach(pod, other) or not promises.heeds(self.state(other), attempt):
                continue
            if not self.disks[other.disk].ok:
                continue
            for area, shard in list(self.shards_at(pod)):
                key = (NEIGHBOR, shard.checkpoint, shard.rank)
                if area == LOCAL and key not in self.disks[other.disk].shards:
                    found.append(
                        (
                            "copy",
                            f"{other.name} pulls {shard.fingerprint} from {pod.name}",
                            lambda o=other, k=key, s=shard: self.persist(o, k, s),
                        )
                    )
        return found

    def _copies_again(self, pod: Pod) -> list[Action]:
        """The missing copies of the base are made again in the background."""
        if pod.run < 0 or not self.disks[pod.disk].ok:
            return []
        base = self.worlds[pod.run].base
        if base is None:
            return []
        found: list[Action] = []
        for shard in self.readable(pod):
            key = (LOCAL, shard.checkpoint, shard.rank)
            mine = shard.rank in self.ranks(pod) and (shard.step, shard.world) == base
            if mine and key not in self.disks[pod.disk].shards:
                found.append(
                    (
                        "copy",
                        f"{pod.name} makes its copy of the base again",
                        lambda k=key, s=shard: self.persist(pod, k, s),
                    )
                )
        return found[:1]

    def readable(self, pod: Pod) -> list[Shard]:
        members = [self.pods[n] for n in self.worlds[pod.run].members.values()]
        near = [s for m in members if self.reach(pod, m) for _, s in self.shards_at(m)]
        far = [s for k, s in self.remote.shards.items() if k not in self.remote.corrupt]
        return near + (far if self.remote.up else [])

    # --- the remote tier -------------------------------------------------------------------------

    def standing(self, record: AttemptRecord) -> commit.Standing:
        return commit.Standing(
            lineage=lineage_of(record),
            claims=frozenset(self.remote.claims),
            base_recorded=record.attempt in self.remote.bases,
            commits=frozenset(self.remote.commits),
            intents=frozenset(self.remote.intents),
        )

    def _uploads(self, pod: Pod) -> list[Action]:
        if not self.settings.remote_configured or not self.remote.up:
            return []
        if pod.uploading is not None:
            return [
                (
                    "upload",
                    f"{pod.name} uploads {pod.uploading.fingerprint}",
                    lambda: self.finish_upload(pod),
                )
            ]
        record = self.state(pod).record
        if record is None or not promises.current_attempt(self.state(pod)):
            return []
        found: list[Action] = []
        for area, shard in self.shards_at(pod):
            if area != LOCAL or (shard.checkpoint, shard.rank) in self.remote.shards:
                continue
            if commit.may_upload(shard.checkpoint, self.standing(record)).allowed:
                found.append(
                    (
                        "upload",
                        f"{pod.name} is about to upload {shard.fingerprint}",
                        lambda s=shard: self.begin_upload(pod, s),
                    )
                )
        return found

    def begin_upload(self, pod: Pod, shard: Shard) -> None:
        pod.uploading = shard

    def finish_upload(self, pod: Pod) -> None:
        assert pod.uploading is not None
        shard, pod.uploading = pod.uploading, None
        self.remote.shards[shard.checkpoint, shard.rank] = shard

    def _duties(self, pod: Pod) -> list[Action]:
        """What a leader does beside rounds: late claim, commit, delete, give the word to thin."""
        state = self.state(pod)
        attempt, record = promises.current_attempt(state), state.record
        leader = pod.leader
        found: list[Action] = []
        if leader.round is not None and not leader.round.over:
            found.append(("tick", f"the clock of {pod.name} ticks", lambda: self.tick(pod)))
        if leader.deletion is not None and self.remote.up:
            found.append(
                (
                    "delete",
                    f"{pod.name}: {leader.deletion.todo.value} ({leader.deletion.checkpoint})",
                    lambda: self.go_on_deleting(pod),
                )
            )
        if leader.committing is not None and self.remote.up:
            found.append(
                (
                    "commit",
                    f"{pod.name} commits {leader.committing}",
                    lambda: self.finish_commit(pod),
                )
            )
        if not attempt or record is None or not record.ran:
            return found
        found += self._word(pod, record)
        if self.settings.remote_configured and self.remote.up:
            found += self._remote_duties(pod, record)
        return found

    def _remote_duties(self, pod: Pod, record: AttemptRecord) -> list[Action]:
        standing, leader = self.standing(record), pod.leader
        found: list[Action] = []
        if leader.late_claim == record.attempt and record.attempt not in self.remote.bases:
            found.append(
                ("claim", f"{pod.name} writes its base late", lambda: self.late_base(pod, record))
            )
        elif record.attempt in standing.claims and not standing.base_recorded:
            found.append(
                ("claim", f"{pod.name} writes its base again", lambda: self.late_base(pod, record))
            )
        if commit.may_claim_late(standing).allowed:
            found.append(
                (
                    "claim",
                    f"{pod.name} claims {record.attempt} late",
                    lambda: self.late_claim(pod, record),
                )
            )
        whole = complete_in(self.remote_copies(), REMOTE)
        if leader.committing is None:
            found += [
                (
                    "commit",
                    f"{pod.name} is about to commit {c}",
                    lambda c=c: self.begin_commit(pod, c),
                )
                for c in whole
                if commit.may_commit(c, whole, standing).allowed
            ]
        if leader.deletion is None:
            found += [
                (
                    "delete",
                    f"{pod.name} wants to delete {c}",
                    lambda c=c: self.begin_deleting(pod, c, record),
                )
                for c in self.victims(record)
            ]
        return found

    def victims(self, record: AttemptRecord) -> tuple[CheckpointId, ...]:
        present = {c for c, _ in self.remote.shards} | self.remote.commits
        return remote_victims(
            present,
            lineage=lineage_of(record),
            retention=KEEP_ONE,
            durable=self.remote.commits,
            intents=self.remote.intents,
        )

    def late_claim(self, pod: Pod, record: AttemptRecord) -> None:
        claim = Claim(attempt=record.attempt, round="late", owner=OWNER, created=0.0)
        if isinstance(self.create_claim(claim), rounds.ClaimMade):
            pod.leader.late_claim = record.attempt

    def late_base(self, pod: Pod, record: AttemptRecord) -> None:
        self.remote.bases.setdefault(record.attempt, replace(record, ran=False))
        world = self.record_world(pod)
        self.remote.base_worlds.setdefault(record.attempt, world)
        self.worlds[world].knew_intents |= frozenset(self.remote.intents)

    def begin_commit(self, pod: Pod, checkpoint: CheckpointId) -> None:
        pod.leader.committing = checkpoint

    def finish_commit(self, pod: Pod) -> None:
        """The shards are counted again just before; the check of claims may be long past."""
        checkpoint, pod.leader.committing = pod.leader.committing, None
        assert checkpoint is not None
        if checkpoint in complete_in(self.remote_copies(), REMOTE):
            self.remote.commits.add(checkpoint)

    def begin_deleting(self, pod: Pod, checkpoint: CheckpointId, record: AttemptRecord) -> None:
        pod.leader.deletion = commit.Deletion(checkpoint, record.attempt)
        pod.leader.deleter = self.record_world(pod)

    def go_on_deleting(self, pod: Pod) -> None:
        deletion = pod.leader.deletion
        assert deletion is not None
        todo = deletion.todo
        if todo in (commit.Deleting.LIST_CLAIMS, commit.Deleting.LIST_CLAIMS_AGAIN):
            deletion = deletion.listed(self.remote.claims)
        else:
            self._remove(pod, todo, deletion.checkpoint)
            deletion = deletion.done()
        pod.leader.deletion = None if deletion.todo is commit.Deleting.NOTHING else deletion

    def _remove(self, pod: Pod, todo: commit.Deleting, checkpoint: CheckpointId) -> None:
        if todo is commit.Deleting.WRITE_INTENT:
            self.remote.intents.add(checkpoint)
            return
        before = self.judge.facts() if self.judge else None
        if todo is commit.Deleting.REMOVE_COMMIT:
            self.remote.commits.discard(checkpoint)
        else:
            gone = [key for key in self.remote.shards if key[0] == checkpoint]
            for key in gone:
                del self.remote.shards[key]
        if self.judge and before:
            what = f"{pod.name}: {todo.value} of {checkpoint}"
            self.judge.judge_remote_delete(what, checkpoint, pod.leader.deleter, before)

    # --- thinning --------------------------------------------------------------------------------

    def _word(self, pod: Pod, record: AttemptRecord) -> list[Action]:
        """The leader's word to thin, from what all members report under its attempt."""
        members = self.members_of(pod, record)
        if members is None:
            return []
        copies = [c for m in members for c in self.inventory(m).copies]
        present = {c.checkpoint for c in copies if c.tier in (LOCAL, NEIGHBOR)}
        victims = thin(
            ThinView(
                lineage=lineage_of(record),
                present=frozenset(present),
                complete_local=frozenset(complete_in(copies, LOCAL)),
                complete_neighbor=frozenset(complete_in(copies, NEIGHBOR)),
                durable=frozenset(self.remote.commits),
                has_neighbor=record.replicas > 1,
                has_remote=self.settings.remote_configured,
                retention=KEEP_ONE,
                disk_full=self.disk_full,
            )
        )
        if not victims:
            return []
        return [
            (
                "thin",
                f"{m.name} hears: thin {', '.join(map(str, victims))}",
                lambda m=m: self.tell(m, record.attempt, victims),
            )
            for m in members
            if m.told is None and self.holds(m, victims)
        ]

    def holds(self, pod: Pod, victims: tuple[CheckpointId, ...]) -> bool:
        return any(key[1] in victims for key in self.disks[pod.disk].shards)

    def members_of(self, leader: Pod, record: AttemptRecord) -> list[Pod] | None:
        number = self.record_world(leader)
        members = [self.pods[n] for n in self.worlds[number].members.values()]
        fit = all(
            self.reach(leader, m) and promises.heeds(self.state(m), record.attempt) for m in members
        )
        return members if fit else None

    def tell(self, pod: Pod, attempt: int, victims: tuple[CheckpointId, ...]) -> None:
        pod.told = (attempt, victims)

    def carry_out_thinning(self, pod: Pod) -> None:
        assert pod.told is not None
        (attempt, victims), pod.told = pod.told, None
        if not promises.heeds(self.state(pod), attempt):
            return
        before = self.judge.facts() if self.judge else None
        shards = self.disks[pod.disk].shards
        for key in [key for key in shards if key[1] in victims]:
            del shards[key]
        if self.judge and before:
            self.judge.judge_local_delete(f"{pod.name} thins {victims}", before)
