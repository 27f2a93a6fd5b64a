"""The restore rounds of a simulated cluster, message by message (protocol_sim.py)."""

from __future__ import annotations

from backstay_protocol import promises, rounds
from backstay_protocol.choice import Fresh, nearest
from backstay_protocol.messages import (
    GO,
    LOAD,
    WAIT,
    BadSource,
    CopySource,
    JoinRequest,
    LeaderDecision,
    PromiseReply,
    RankJoin,
    RankVerdict,
    ShardPlan,
    StoreReply,
    VerdictRequest,
)
from backstay_protocol.names import REMOTE
from backstay_protocol.promises import in_line, promise, store
from backstay_protocol.records import AttemptRecord, Claim
from backstay_protocol.rounds import Effect, Event, Round
from support.protocol_cluster import (
    Action,
    Cluster,
    Message,
    Pod,
    World,
)


class RoundsOfCluster(Cluster):
    """Joins, loads, go-aheads, and the messages between leaders, members and the store."""

    # --- joining, loading, going -----------------------------------------------------------------

    def join_request(self, pod: Pod) -> JoinRequest:
        ranks = tuple(
            RankJoin(
                rank=rank,
                local_rank=local,
                nonce=f"{pod.number}.{pod.nonce}.{rank}",
                world_size=self.settings_of(pod).world_size,
            )
            for local, rank in enumerate(self.ranks(pod))
        )
        return JoinRequest(
            replica=pod.replica,
            generation=pod.identity.generation,
            current=pod.identity.current,
            replaces=pod.identity.replaces,
            uid="",
            address="",
            ranks=ranks,
        )

    def _joins(self, pod: Pod) -> list[Action]:
        if pod.run >= 0 or pod.loaded:
            return []
        found: list[Action] = []
        for leader in self.pods:
            if leader.replica != 0 or not self.reach(pod, leader) or leader.run >= 0:
                continue
            if pod.replicas != leader.replicas:  # another job's token
                continue
            current = leader.leader.round
            if current and not current.over and pod.joined == (leader.number, current.name):
                continue
            found.append(
                (
                    "join",
                    f"{pod.name} joins at {leader.name}",
                    lambda leader=leader: self.join(pod, leader),
                )
            )
        return found

    def join(self, pod: Pod, leader: Pod) -> None:
        current = leader.leader.round
        if current is None or current.over:
            current = rounds.begin(f"r{next(self.names)}", self.now, leader.leader.last)
            leader.leader.round = leader.leader.last = current
            self.round_pods[current.name] = {}
            self.choices[current.name] = self.choice
        request = self.join_request(pod)
        seat = current.joins.get(pod.replica)
        if seat is None or request.generation >= seat.generation:
            self.round_pods[current.name][pod.replica] = pod.number
        pod.joined = (leader.number, current.name)
        self.advance(leader, rounds.Joined(request))

    def advance(self, leader: Pod, event: Event) -> None:
        current = leader.leader.round
        assert current is not None
        after, effects = rounds.advance(current, event, self.settings_of(leader))
        leader.leader.round = leader.leader.last = after
        for effect in effects:
            self._effect(leader, after, effect)

    def _effect(self, leader: Pod, current: Round, effect: Effect) -> None:
        if isinstance(effect, rounds.AskPromise):
            self._take_world(leader, current)
        if isinstance(effect, rounds.Announce):
            self._announced(leader, current)
        if isinstance(effect, rounds.GiveUp) and self.judge:
            self.judge.judge_refusal(leader, current)
        local = (rounds.Announce, rounds.Begin, rounds.GiveUp, rounds.Waiting)
        if not isinstance(effect, local):
            self.in_flight.append(Message(leader.number, current.name, effect))

    def _take_world(self, leader: Pod, current: Round) -> None:
        key = (current.name, current.attempt)
        if key not in self.by_round:
            self.by_round[key] = len(self.worlds)
            if self.lists_before_claim:
                self.old_views[current.name] = self.remote_view()
            members = dict(self.round_pods[current.name])
            size = self.settings_of(leader).world_size
            self.worlds.append(
                World(current.name, current.attempt, current.generation, members, size)
            )

    def _announced(self, leader: Pod, current: Round) -> None:
        world = self.worlds[self.world_of(current)]
        assert current.decision is not None
        worlds = {int(shard.fingerprint.split(".")[0]) for shard in current.decision.shards}
        base = current.decision.base
        world.base = (base.step, min(worlds)) if base else None
        assert current.choice is not None
        world.token = current.choice.choice
        world.by_hand = isinstance(current.choice, Fresh) and current.choice.origin is not None
        if current.remote is not None:
            world.knew_intents = current.remote.intents
        if self.judge:
            self.judge.judge_choice(leader, current, worlds)

    def _loads(self, pod: Pod) -> list[Action]:
        if pod.joined is None or pod.run >= 0:
            return []
        leader = self.pods[pod.joined[0]]
        if not self.reach(pod, leader):
            return [("hear", f"{pod.name} can't reach its leader", lambda: self._start_over(pod))]
        current = leader.leader.round
        if current is None or current.name != pod.joined[1]:
            return [("hear", f"{pod.name}'s round is gone", lambda: self._start_over(pod))]
        if pod.loaded is None:
            reply = rounds.answer_join(current, self.join_request(pod))
            if reply.status == LOAD:
                return [("load", f"{pod.name} loads", lambda: self.load(pod, leader))]
            if reply.status == WAIT and not current.over:
                return []
            return [("hear", f"{pod.name} hears: {reply.status}", lambda: self._start_over(pod))]
        answer = rounds.answer_verdict(current, pod.loaded[1])
        if answer.status == WAIT:
            return []
        if answer.status == GO:
            return [("go", f"{pod.name} hears go", lambda: self.go(pod, current, answer.record))]
        return [("hear", f"{pod.name} hears {answer.status}", lambda: self._unload(pod))]

    def _unload(self, pod: Pod) -> None:
        pod.loaded = None

    def _start_over(self, pod: Pod) -> None:
        pod.joined = pod.loaded = None

    def load(self, pod: Pod, leader: Pod) -> None:
        """Read every shard needed, from the nearest source that serves it, and say how it went."""
        current = leader.leader.round
        assert current is not None
        assert current.decision is not None
        decision = current.decision
        bad = [
            b
            for shard in decision.shards
            if self._needs(pod, decision, shard.rank)
            for b in self._read(pod, decision, shard, current.name)
        ]
        verdicts = tuple(
            RankVerdict(rank=rank, nonce=decision.nonces[rank], ok=not bad, bad=tuple(bad))
            for rank in self.ranks(pod)
        )
        request = VerdictRequest(
            replica=pod.replica, round=current.name, serial=decision.serial, verdicts=verdicts
        )
        pod.loaded = (decision, request)
        self.advance(leader, rounds.VerdictGiven(request))

    def _needs(self, pod: Pod, decision: LeaderDecision, rank: int) -> bool:
        same_world = decision.saved_world_size == self.settings_of(pod).world_size
        return rank in self.ranks(pod) or not same_world

    def _read(
        self, pod: Pod, decision: LeaderDecision, shard: ShardPlan, round_name: str
    ) -> list[BadSource]:
        """[] when some source served it, else why each did not."""
        assert decision.base is not None
        marks = {
            CopySource(tier=tier, holder=int(holder))
            for rank, tier, holder in (
                mark.split("/") for mark in decision.unreachable.get(pod.replica, ())
            )
            if int(rank) == shard.rank
        }
        bad = []
        for source in nearest(shard.sources, pod.replica, marks):
            problem = self._try(pod, decision, shard, source, round_name)
            if problem is None:
                return []
            bad.append(
                BadSource(
                    shard_rank=shard.rank,
                    tier=source.tier,
                    holder=source.holder,
                    proven=problem,
                    detail="gone or bad" if problem else "out of reach",
                )
            )
        return bad

    def _try(
        self,
        pod: Pod,
        decision: LeaderDecision,
        shard: ShardPlan,
        source: CopySource,
        round_name: str,
    ) -> bool | None:
        """None: served. True: proven bad. False: out of reach."""
        base = decision.base
        assert base is not None
        if source.tier == REMOTE:
            if not self.remote.up:
                return False
            if decision.base_run:
                there = {(c.checkpoint, c.rank): c.fingerprint for c in self.other.copies}
                return None if there.get((base, shard.rank)) == shard.fingerprint else True
            own = self.remote.shards.get((base, shard.rank))
            good = own is not None and own.fingerprint == shard.fingerprint
            return None if good and (base, shard.rank) not in self.remote.corrupt else True
        holder = self.pods[self.round_pods[round_name][source.holder]]
        if not self.reach(pod, holder):
            return False
        held = [
            found
            for tier, found in self.shards_at(holder)
            if tier == source.tier and found.fingerprint == shard.fingerprint
        ]
        return None if held else True

    def go(self, pod: Pod, current: Round, record: AttemptRecord | None) -> None:
        """The go-ahead counts only while the sidecar still holds the promise it was given under."""
        assert pod.loaded is not None
        assert record is not None
        decision = pod.loaded[0]
        if not promises.heeds(self.state(pod), record.attempt) or self.state(pod).record != record:
            self._start_over(pod)
            return
        number = self.world_of(current)
        world = self.worlds[number]
        pod.run, pod.chain, pod.joined, pod.loaded = number, decision.chain, None, None
        if self.judge:
            self.judge.judge_go(pod, decision)
        for rank in self.ranks(pod):
            world.progress[rank] = decision.base.step if decision.base else 0
        if len(world.progress) == world.size and not world.order:
            world.order = 1 + max(other.order for other in self.worlds)
            if self.judge:
                self.judge.judge_formed(number)

    # --- messages of a round ---------------------------------------------------------------------

    def _deliveries(self, message: Message) -> list[Action]:
        what = f"{type(message.effect).__name__} of {message.round}"
        found: list[Action] = [("deliver", f"{what} arrives", lambda: self.deliver(message))]
        if self.leader_of(message) is not None:
            found.append(("lose", f"{what} is lost", lambda: self.lose(message)))
            found.append(
                (
                    "lose",
                    f"{what} arrives, its answer is lost",
                    lambda: self.deliver(message, heard=False),
                )
            )
        if isinstance(message.effect, rounds.AskPromise | rounds.AskStore):
            found.append(
                (
                    "lose",
                    f"{what} arrives, the sidecar dies between its two writes",
                    lambda: self.deliver(message, heard=False, torn=True),
                )
            )
        return found

    def leader_of(self, message: Message) -> Pod | None:
        """The leader, if it still waits for the answer."""
        leader = self.pods[message.leader]
        current = leader.leader.round
        return leader if leader.alive and current and current.name == message.round else None

    def lose(self, message: Message) -> None:
        self.in_flight.remove(message)
        leader = self.leader_of(message)
        if leader is not None:
            self.advance(leader, _silence(message.effect))

    def deliver(self, message: Message, *, heard: bool = True, torn: bool = False) -> None:
        effect = message.effect
        if isinstance(effect, rounds.AskPromise | rounds.AskStore):
            target = self.pods[self.round_pods[message.round][effect.replica]]
            if not self.reach(self.pods[message.leader], target):
                return self.lose(message)
            event = self._at_member(target, effect, message.round, torn=torn)
        else:
            if not self.remote.up:
                return self.lose(message)
            event = self._at_remote(effect, message.round)
        self.in_flight.remove(message)
        leader = self.leader_of(message)
        if leader is not None:
            self.advance(leader, event if heard else _silence(effect))
        return None

    def _at_member(
        self, pod: Pod, effect: rounds.AskPromise | rounds.AskStore, name: str, *, torn: bool
    ) -> Event:
        has_disk = self.disks[pod.disk].ok
        state = self.state(pod)
        if isinstance(effect, rounds.AskPromise):
            new, granted, why = promise(state, effect.request, pod.identity, has_disk=has_disk)
            self.write_state(pod, new, self.record_world(pod), torn=torn)
            reply = PromiseReply(
                granted=granted,
                why=why,
                known=self.known(pod),
                record=new.record,
                in_line=has_disk and in_line(new, pod.identity),
                inventory=self.inventory(pod),
            )
            return rounds.PromiseAnswered(effect.replica, effect.request.attempt, reply)
        record = effect.request.record
        new, stored, why = store(state, effect.request, pod.identity, has_disk=has_disk)
        world = self.by_round[name, record.attempt]
        self.write_state(pod, new, world if stored else self.record_world(pod), torn=torn)
        return rounds.StoreAnswered(
            effect.replica, record.attempt, record.ran, StoreReply(stored=stored, why=why)
        )

    def known(self, pod: Pod) -> int:
        state = self.state(pod)
        return max(
            state.promised,
            state.record.attempt if state.record else 0,
            *(shard.attempt for _, shard in self.shards_at(pod)),
            0,
        )

    def _at_remote(self, effect: Effect, name: str) -> Event:
        if isinstance(effect, rounds.MakeClaim):
            return self.create_claim(effect.claim)
        if isinstance(effect, rounds.ListRemote):
            view = self.old_views.get(name) or self.remote_view(effect.runs)
            return rounds.RemoteListed(effect.attempt, view)
        assert isinstance(effect, rounds.WriteBase)
        attempt = effect.record.attempt
        self.remote.bases.setdefault(attempt, effect.record)
        self.remote.base_worlds.setdefault(attempt, self.by_round[name, attempt])
        return rounds.BaseWritten(attempt)

    def create_claim(self, claim: Claim) -> Event:
        there = self.remote.claims.setdefault(claim.attempt, claim)
        if there == claim:
            return rounds.ClaimMade(claim.attempt)
        return rounds.ClaimTaken(claim.attempt, there.round, there.owner)


def _silence(effect: Effect) -> Event:
    """What a leader sees when an answer does not come."""
    why = "timed out"
    if isinstance(effect, rounds.AskPromise):
        return rounds.PromiseUnreachable(effect.replica, effect.request.attempt, why)
    if isinstance(effect, rounds.AskStore):
        record = effect.request.record
        return rounds.StoreUnreachable(effect.replica, record.attempt, record.ran, why)
    if isinstance(effect, rounds.MakeClaim):
        return rounds.ClaimUnreachable(effect.claim.attempt, why)
    if isinstance(effect, rounds.ListRemote):
        return rounds.ListingFailed(effect.attempt, why)
    assert isinstance(effect, rounds.WriteBase)
    return rounds.BaseUnreachable(effect.record.attempt, why)
