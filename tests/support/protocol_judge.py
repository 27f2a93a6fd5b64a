"""Judges what a simulated cluster does against the invariants, by the truth kept beside it.

The judgements and their narrowings are those of the project's model of the protocol: what a
protocol can promise while every tier keeps one checkpoint only.
"""

from __future__ import annotations

from dataclasses import dataclass

from backstay_protocol.choice import (
    Base,
    Chosen,
    Fresh,
    Given,
    Refuse,
    RestoreView,
    choose,
)
from backstay_protocol.history import lineage_of
from backstay_protocol.ids import CheckpointId
from backstay_protocol.messages import LeaderDecision
from backstay_protocol.round_events import NOTHING_USABLE
from backstay_protocol.rounds import Phase, Round
from backstay_protocol.topology import ManualChoice
from support.protocol_cluster import FOREIGN, OTHER, UNKNOWN, Pod, Shard, World
from support.protocol_sim import Sim


class Violation(AssertionError):
    """An invariant was broken; the first word says which."""


@dataclass(frozen=True)
class Facts:
    """What must not get worse by a deletion."""

    newest: int
    lives: bool
    """A complete checkpoint on the lineage of the newest world exists somewhere."""
    survives: frozenset[int]
    """Pods whose node may be lost with such a checkpoint left."""
    durable: frozenset[CheckpointId]
    """Committed, on that lineage, and not known to be under an intent when its base was chosen."""
    shards: int
    commits: int


class Judge:
    """Watches one Sim; raises Violation."""

    def __init__(self, sim: Sim) -> None:
        self.sim = sim
        sim.judge = self

    # --- the truth -------------------------------------------------------------------------------

    def base_of(self, number: int) -> tuple[int, int] | None:
        return self.sim.worlds[number].base

    def truly_on_lineage(self, head: int, step: int, world: int) -> bool:
        if world == head:
            return True
        base = self.base_of(head)
        while base is not None and base[1] >= 0:
            if base[1] == world and step <= base[0]:
                return True
            base = self.base_of(base[1])
        return False

    def newest(self, among: set[int] | None = None) -> int:
        """The world that really is the newest: later pods first, then later start."""
        begun = [
            (world.generation, world.order, number)
            for number, world in enumerate(self.sim.worlds)
            if world.order and (among is None or number in among)
        ]
        return max(begun)[2] if begun else -1

    def shards(self, pods: list[Pod], *, remote: bool, intents: bool = True) -> list[Shard]:
        """Everything that these pods, and the remote store, could serve."""
        found = [shard for pod in pods if pod.alive for _, shard in self.sim.shards_at(pod)]
        if remote:
            store = self.sim.remote
            found += [
                shard
                for key, shard in store.shards.items()
                if key not in store.corrupt and (intents or key[0] not in store.intents)
            ]
        return found

    @staticmethod
    def whole(shards: list[Shard]) -> set[tuple[int, int]]:
        """(step, world) of every checkpoint that is truly whole in these shards."""
        ranks: dict[tuple[int, int], set[int]] = {}
        size: dict[tuple[int, int], int] = {}
        for shard in shards:
            ranks.setdefault((shard.step, shard.world), set()).add(shard.rank)
            size[shard.step, shard.world] = shard.world_size
        return {key for key, found in ranks.items() if len(found) == size[key]}

    def visible_worlds(self, pods: list[Pod], *, remote: bool) -> set[int]:
        seen = {self.sim.record_world(pod) for pod in pods if self.sim.state(pod).record}
        seen |= {shard.world for shard in self.shards(pods, remote=False)}
        if remote:
            seen |= set(self.sim.remote.base_worlds.values())
            seen |= {shard.world for shard in self.sim.remote.shards.values()}
        return seen - {-1}

    # --- choices ---------------------------------------------------------------------------------

    def members(self, current: Round) -> list[Pod]:
        seats = self.sim.worlds[self.sim.world_of(current)].members
        return [self.sim.pods[number] for number in seats.values()]

    def judge_choice(self, leader: Pod, current: Round, worlds: set[int]) -> None:
        """Every decision that ranks are told to load."""
        assert current.decision is not None
        base = current.decision.base
        members = self.members(current)
        remote = current.claimed and self.sim.remote.up
        if len(worlds) > 1:
            raise Violation(f"I1: step {base.step if base else 0} is mixed from {sorted(worlds)}")
        assert current.choice is not None
        if self._judge_by_hand(current, current.choice, members, remote=remote):
            return
        if base is None:
            self._judge_nothing(members, remote=remote, fresh=True, struck=current)
            return
        visible = self.visible_worlds(members, remote=remote)
        head = self.newest(visible)
        if head >= 0 and not self.truly_on_lineage(head, base.step, min(worlds)):
            raise Violation(
                f"I3: chose step {base.step} of world {min(worlds)}, not on the lineage of the "
                f"newer world {head}"
            )

    def _judge_by_hand(
        self, current: Round, chosen: Chosen, members: list[Pod], *, remote: bool
    ) -> bool:
        """Whether the decision gives contents by hand, and then whether it may.

        A token that no record in sight carries applies now; one that a record carries never again.
        Contents are given again only while the newest world began so and has nothing of its own.
        """
        recorded = self._recorded_in(current, members)
        wanted = self._open_choice(current, recorded)
        given = isinstance(chosen, Given) or (
            isinstance(chosen, Fresh) and chosen.origin is not None
        )
        if wanted is not None and not given:
            raise Violation(f"I6: {wanted} is not applied yet, and {chosen.reason}")
        if wanted is not None and chosen.choice != wanted.token:
            raise Violation(f"I6: the token of {wanted} is not recorded")
        if wanted is not None or not given:
            return given
        head = self._rank_of_newest(recorded | self.visible_worlds(members, remote=remote))
        before = self.sim.worlds[head] if head >= 0 else None
        if before is None:
            raise Violation("I6: contents are given again, and nobody had been given any")
        if isinstance(chosen, Given):
            again = before.base == (chosen.checkpoint.step, FOREIGN)
        else:
            again = before.by_hand
        if not again or before.token != chosen.choice:
            raise Violation(f"I6: {chosen.reason}: but the newest world {head} began otherwise")
        self._judge_nothing(members, remote=remote, fresh=False)
        return True

    def _recorded_in(self, current: Round, members: list[Pod]) -> set[int]:
        """Worlds whose records this round saw: its listing may be older than what is there now."""
        listed = current.remote.bases if current.remote is not None and current.claimed else ()
        known = {self.sim.remote.base_worlds[base.attempt] for base in listed}
        return self.recorded_worlds(members, remote=False) | known

    def _open_choice(self, current: Round, recorded: set[int]) -> ManualChoice | None:
        """What a person has chosen and none of these worlds' records carries."""
        wanted = self.sim.choices[current.name]
        if wanted is None or any(self.sim.worlds[w].token == wanted.token for w in recorded):
            return None
        return wanted

    def _rank_of_newest(self, worlds: set[int]) -> int:
        told = [w for w in worlds if self.base_of(w) != (0, UNKNOWN)]
        return max(told, key=lambda w: self._rank(self.sim.worlds[w]), default=-1)

    def recorded_worlds(self, pods: list[Pod], *, remote: bool) -> set[int]:
        """Those of which a record can be read."""
        seen = {self.sim.record_world(pod) for pod in pods if self.sim.state(pod).record}
        return (seen | (set(self.sim.remote.base_worlds.values()) if remote else set())) - {-1}

    def judge_refusal(self, leader: Pod, current: Round) -> None:
        assert current.give_up is not None
        if current.give_up.code == NOTHING_USABLE and not current.struck:
            members = self.members(current)
            wanted = self._open_choice(current, self._recorded_in(current, members))
            if wanted is None:
                self._judge_nothing(members, remote=self.sim.remote.up, fresh=False, struck=current)
            elif wanted.fresh or wanted.run_step in {-1, *(c.step for c in self.sim.other.commits)}:
                raise Violation(f"I6: a refusal although {wanted} can be had")

    def _judge_nothing(
        self, pods: list[Pod], *, remote: bool, fresh: bool, struck: Round | None = None
    ) -> None:
        """A refusal, or a start from nothing: was there really nothing?"""
        what = "a start from nothing" if fresh else "a refusal"
        visible = self.visible_worlds(pods, remote=remote)
        told = [w for w in visible if self.base_of(w) != (0, UNKNOWN)]
        head = max(told, key=lambda w: self._rank(self.sim.worlds[w]), default=-1)
        held = self.whole(self.shards(pods, remote=False))
        everything = self.whole(self.shards(pods, remote=remote)) - (self._doomed() - held)
        if any(head < 0 or self.truly_on_lineage(head, s, w) for s, w in everything):
            raise Violation(f"I5: {what} although a complete checkpoint on the lineage is in reach")
        if fresh and (everything or (head >= 0 and self.base_of(head) is not None)):
            raise Violation("I5: silent fresh start")
        hidden = self.sim.settings.remote_configured and not self.sim.remote.up
        if fresh and hidden and self.sim.remote.commits:
            raise Violation("I5: fresh start while the remote tier has durable checkpoints")

    @staticmethod
    def _rank(world: World) -> tuple[int, int, int]:
        return world.generation, world.attempt, world.order

    def _doomed(self) -> set[tuple[int, int]]:
        """Deletions past their last look: whoever lists now may see them or not."""
        names = {
            pod.leader.deletion.checkpoint
            for pod in self.sim.pods
            if pod.leader.deletion and pod.leader.deletion.todo.value.startswith("remove")
        }
        return {(s.step, s.world) for s in self.sim.remote.shards.values() if s.checkpoint in names}

    # --- beginning -------------------------------------------------------------------------------

    def judge_go(self, pod: Pod, decision: LeaderDecision) -> None:
        """I2: whoever goes ahead in a world has loaded that world's base."""
        world = self.sim.worlds[pod.run]
        step = decision.base.step if decision.base else None
        if step != (world.base[0] if world.base else None):
            raise Violation(f"I2: {pod.name} goes ahead from {decision.base}, not {world.base}")

    def judge_formed(self, number: int) -> None:
        me = self.sim.worlds[number]
        for other, world in enumerate(self.sim.worlds):
            if other != number and world.order and world.attempt == me.attempt:
                raise Violation(f"I2: worlds {other} and {number} both train as {me.attempt}")

    # --- every state -----------------------------------------------------------------------------

    def judge_state(self) -> None:
        """A commit stands over whole shards; and were failures to stop now, a restore would do."""
        store = self.sim.remote
        whole = {
            CheckpointId(step, self.sim.worlds[world].attempt)
            for step, world in self.whole(list(store.shards.values()))
        }
        for checkpoint in store.commits - store.intents:
            if checkpoint not in whole:
                raise Violation(f"I1: the commit record of {checkpoint} stands over missing shards")
        pods = [p for p in self.sim.current_pods() if p.replica < self.sim.settings.replicas]
        if all(pod.alive for pod in pods) and store.up:
            found = choose(self.view_of(pods))
            plain = isinstance(found, Fresh) and found.origin is None
            if not isinstance(found, Base):
                self._judge_nothing(pods, remote=True, fresh=plain)
            if isinstance(found, Refuse):
                self._judge_given(pods)

    def _judge_given(self, pods: list[Pod]) -> None:
        """A refusal, although the newest world began from another run's checkpoint that is there,
        or by hand from nothing and left nothing?
        """
        recorded = self.recorded_worlds(pods, remote=True)
        head = self._rank_of_newest(recorded | self.visible_worlds(pods, remote=True))
        if head < 0 or head not in recorded:
            return
        base = self.base_of(head)
        steps = {c.step for c in self.sim.other.commits}
        if base is not None and base[1] == FOREIGN and base[0] in steps:
            raise Violation(f"I6: a refusal although step {base[0]} of the other run is there")
        left = {s.world for s in self.shards(pods, remote=True)}
        left |= {s.world for s in self.sim.remote.shards.values()}
        if self.sim.worlds[head].by_hand and head not in left:
            raise Violation("I6: a refusal after a fresh start by hand that left nothing")

    def view_of(self, pods: list[Pod]) -> RestoreView:
        """What a claimed and listed round of these pods would see now."""
        remote = self.sim.remote_view()
        inventories = [self.sim.inventory(pod) for pod in pods] + [remote.inventory]
        records = (self.sim.state(pod).record for pod in pods)
        return RestoreView(
            attempt=10**12,
            world_size=self.sim.settings.world_size,
            records=tuple(record for record in records if record is not None),
            bases=remote.bases,
            copies=tuple(copy for inventory in inventories for copy in inventory.copies),
            chains={a: chain for inventory in inventories for a, chain in inventory.chains.items()},
            remote_configured=self.sim.settings.remote_configured,
            claimed=True,
            listed=True,
            intents=remote.intents,
            others={OTHER: self.sim.other},
            struck=frozenset((c, rank, "remote", -1) for c, rank in self.sim.remote.corrupt),
            quarantine_after=self.sim.settings.restore.quarantine_after,
        )

    # --- deletions -------------------------------------------------------------------------------

    def facts(self) -> Facts:
        newest = self.newest()
        if newest < 0:
            return Facts(-1, False, frozenset(), frozenset(), 0, 0)
        pods = self._pods_that_count(newest)
        record = self.sim.remote.bases.get(self.sim.worlds[newest].attempt)
        lineage = lineage_of(record) if record else None
        knew = self.sim.worlds[newest].knew_intents
        durable = {
            c for c in self.sim.remote.commits if lineage and lineage.contains(c) and c not in knew
        }
        return Facts(
            newest=newest,
            lives=self._lives(newest, pods),
            survives=frozenset(
                pod.number for pod in pods if self._lives(newest, [p for p in pods if p is not pod])
            ),
            durable=frozenset(durable),
            shards=len(self.sim.remote.shards),
            commits=len(self.sim.remote.commits),
        )

    def _pods_that_count(self, newest: int) -> list[Pod]:
        numbers = {pod.number for pod in self.sim.current_pods()}
        numbers |= set(self.sim.worlds[newest].members.values())
        return [self.sim.pods[n] for n in sorted(numbers) if self.sim.pods[n].alive]

    def _lives(self, head: int, pods: list[Pod]) -> bool:
        whole = self.whole(self.shards(pods, remote=True))
        return any(self.truly_on_lineage(head, step, world) for step, world in whole)

    def judge_remote_delete(
        self, what: str, checkpoint: CheckpointId, deleter: int, before: Facts
    ) -> None:
        """`deleter`: the world whose leader deletes."""
        if before.newest < 0:
            return
        after = self.facts()
        changed = (before.shards, before.commits) != (after.shards, after.commits)
        for number in self._bases_to_keep(before.newest, deleter):
            base = self.base_of(number)
            if base is None or base[1] < 0 or not changed:
                continue
            if (checkpoint.step, checkpoint.attempt) == (
                base[0],
                self.sim.worlds[base[1]].attempt,
            ) and not self._may_lose_remote_base(number, checkpoint):
                raise Violation(f"I4: {what} removes the base of world {number}")
        if self._claimed(before.newest) and before.durable and not after.durable:
            raise Violation(f"I4: {what} removes the last durable checkpoint on the lineage")
        if before.lives and not after.lives and not self.sim.remote.corrupt:
            raise Violation(f"I4: {what} removes the only complete copy")

    def _bases_to_keep(self, newest: int, deleter: int) -> set[int]:
        """The newest world's, and those of rounds of its generation that have chosen already.

        A newer world that has stored its go-ahead, though no rank has heard of it yet, succeeds it.
        """
        later = self._rank(self.sim.worlds[deleter])[:2] > self._rank(self.sim.worlds[newest])[:2]
        kept = {deleter if later else newest}
        for pod in self.sim.pods:
            current = pod.leader.round
            if pod.alive and current and current.phase in (Phase.BASE, Phase.STORE, Phase.GO):
                number = self.sim.world_of(current)
                if self.sim.worlds[number].generation >= self.sim.worlds[newest].generation:
                    kept.add(number)
        return kept

    def _claimed(self, number: int) -> bool:
        world = self.sim.worlds[number]
        claim = self.sim.remote.claims.get(world.attempt)
        return claim is not None and claim.round in (world.round, "late")

    def _may_lose_remote_base(self, number: int, checkpoint: CheckpointId) -> bool:
        """It knew of the intent when it chose (a last resort), or has the base at home."""
        world = self.sim.worlds[number]
        if checkpoint in world.knew_intents:
            return True
        own = [self.sim.pods[n] for n in world.members.values() if self.sim.pods[n].alive]
        at_home = world.base in self.whole(self.shards(own, remote=False))
        return not self._claimed(number) and at_home

    def judge_local_delete(self, what: str, before: Facts) -> None:
        if before.newest < 0:
            return
        after = self.facts()
        # A remote copy that went bad after its commit is a fault of its own (guarantees.md, 4).
        if before.lives and not after.lives and not self.sim.remote.corrupt:
            raise Violation(f"I4: {what} removes the only complete copy")
        members = self.sim.worlds[before.newest].members.values()
        if all(self.sim.pods[number].alive for number in members):
            worse = before.survives - after.survives
            if worse and len(self._pods_that_count(before.newest)) > 1:
                raise Violation(f"I4: {what}: the loss of pod {min(worse)} was survivable before")
