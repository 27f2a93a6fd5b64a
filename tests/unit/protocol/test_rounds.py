"""The leader's round, event by event. What many rounds do together: test_protocol_machine.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import pytest

from backstay_protocol import rounds
from backstay_protocol.choice import Fresh
from backstay_protocol.ids import first_attempt_of
from backstay_protocol.messages import (
    AGAIN,
    FAILED,
    GO,
    LOAD,
    WAIT,
    BadSource,
    Inventory,
    PromiseReply,
    RankVerdict,
    ShardCopy,
    StoreReply,
    VerdictRequest,
)
from backstay_protocol.records import AttemptRecord
from backstay_protocol.round_load import backoff_seconds
from backstay_protocol.rounds import Effect, Event, Phase, Round, RoundSettings
from backstay_protocol.topology import Peer, RemoteTier, RestoreOptions, Tiers, Topology
from support.protocol_values import copies, copy, join, point, record

T = TypeVar("T")
FIRST = first_attempt_of(1)
LATER = FIRST + 1
OLD = 7  # an attempt before
STEP = point(5, OLD)


class Driver:
    """Feeds events to one round of two replicas and keeps what it asked for."""

    def __init__(self, *, remote: bool = True, options: RestoreOptions | None = None) -> None:
        self.settings = RoundSettings(
            replicas=2,
            processes_per_replica=1,
            remote_configured=remote,
            owner="c/u",
            restore=options or RestoreOptions(),
        )
        self.round: Round = rounds.begin("r", 0.0)
        self.effects: tuple[Effect, ...] = ()
        self.now = 0.0

    def feed(self, *events: Event) -> tuple[Effect, ...]:
        for event in events:
            self.round, self.effects = rounds.advance(self.round, event, self.settings)
        return self.effects

    def only(self, kind: type[T]) -> T:
        found = [effect for effect in self.effects if isinstance(effect, kind)]
        assert len(found) == 1, self.effects
        return found[0]

    def after(self, seconds: float) -> tuple[Effect, ...]:
        self.now += seconds
        return self.feed(rounds.Tick(self.now))

    @property
    def given_up(self) -> rounds.GiveUp:
        assert self.round.give_up is not None, self.round
        return self.round.give_up

    # --- usual walks ------------------------------------------------------------------------------

    def join_all(self, **fields: Any) -> Driver:
        self.feed(rounds.Joined(join(0, **fields)), rounds.Joined(join(1, **fields)))
        return self

    def promise_all(
        self,
        *held: list[ShardCopy],
        stored: AttemptRecord | None = None,
        in_line: bool = False,
    ) -> Driver:
        for replica in (0, 1):
            own = tuple(held[replica]) if replica < len(held) else ()
            reply = PromiseReply(
                granted=True,
                known=self.round.attempt,
                record=stored,
                in_line=in_line,
                inventory=Inventory(copies=own),
            )
            self.feed(rounds.PromiseAnswered(replica, self.round.attempt, reply))
        return self

    def claim(self) -> Driver:
        self.feed(rounds.ClaimMade(self.round.attempt))
        return self

    def list(self, **fields: Any) -> Driver:
        seen = rounds.RemoteView(**({"claims": (self.round.attempt,)} | fields))
        self.feed(rounds.RemoteListed(self.round.attempt, seen))
        return self

    def verdict(self, replica: int, **fields: Any) -> VerdictRequest:
        assert self.round.decision is not None
        defaults: dict[str, Any] = {"rank": replica, "nonce": f"a{replica}", "ok": True}
        return VerdictRequest(
            replica=replica,
            round="r",
            serial=self.round.decision.serial,
            verdicts=(RankVerdict(**(defaults | fields)),),
        )

    def load_all(self) -> Driver:
        for replica in (0, 1):
            self.feed(rounds.VerdictGiven(self.verdict(replica)))
        return self

    def store_all(self, *, ran: bool) -> Driver:
        for replica in (0, 1):
            self.feed(self.stored(replica, ran=ran))
        return self

    def stored(self, replica: int, *, ran: bool, ok: bool = True, why: str = "") -> Event:
        reply = StoreReply(stored=ok, why=why)
        return rounds.StoreAnswered(replica, self.round.attempt, ran, reply)


def loading(**options: Any) -> Driver:
    """A round whose ranks load step 5; rank 0's shard has a second copy at replica 1."""
    driver = Driver(remote=False, **options).join_all()
    held = [[copy(STEP, 0)], [copy(STEP, 1), copy(STEP, 0, "neighbor", 1)]]
    return driver.promise_all(*held, stored=record(OLD))


# --- the whole walk -------------------------------------------------------------------------------


def test_a_round_walks_from_the_joins_to_the_go_ahead() -> None:
    driver = Driver().join_all(last_step=9, last_attempt=FIRST)
    asks = driver.effects
    assert [a.replica for a in asks if isinstance(a, rounds.AskPromise)] == [0, 1]
    driver.promise_all(stored=record(OLD))
    assert driver.only(rounds.MakeClaim).claim.attempt == FIRST
    driver.claim()
    assert driver.only(rounds.ListRemote).attempt == FIRST
    driver.list(inventory=Inventory(copies=tuple(copies(point(5, OLD - 1), "remote"))))
    # the members' record is of a newer attempt that did not start from there
    assert driver.given_up.code == "NothingToRestore"


def test_what_begins_is_recorded_in_the_remote_tier_then_by_all_then_goes() -> None:
    driver = Driver().join_all(last_step=9, last_attempt=FIRST)
    driver.promise_all(copies(STEP)).claim().list()
    decision = driver.only(rounds.Announce).decision
    assert (decision.base, decision.serial, decision.attempt) == (STEP, 1, FIRST)
    assert decision.nonces == {0: "a0", 1: "a1"}
    driver.feed(rounds.VerdictGiven(driver.verdict(0, bytes_by_tier={"local": 8})))
    driver.feed(rounds.VerdictGiven(driver.verdict(1, bytes_by_tier={"local": 4, "remote": 1})))
    written = driver.only(rounds.WriteBase).record
    assert (written.base, written.chain, written.ran) == (STEP, ((OLD, 5),), False)
    assert (written.world_size, written.replicas) == (2, 2)
    driver.feed(rounds.BaseWritten(FIRST))
    assert [e.request.record.ran for e in driver.effects if isinstance(e, rounds.AskStore)] == [
        False,
        False,
    ]
    driver.store_all(ran=False)
    assert [e.request.record.ran for e in driver.effects if isinstance(e, rounds.AskStore)] == [
        True,
        True,
    ]
    driver.after(3.0)
    driver.store_all(ran=True)
    begin = driver.only(rounds.Begin)
    assert begin.record == replace(written, ran=True)
    assert begin.summary.bytes_by_tier == {"local": 12, "remote": 1}
    assert begin.summary.lost_steps == 4
    assert (begin.summary.claimed, begin.summary.base_recorded) == (True, True)
    assert begin.summary.seconds == 3.0
    assert driver.round.phase is Phase.BEGUN


def test_a_start_from_nothing_has_no_base_and_counts_all_steps_as_lost() -> None:
    driver = Driver().join_all(last_step=9, last_attempt=FIRST).promise_all().claim().list()
    assert driver.only(rounds.Announce).decision.base is None
    driver.load_all()
    assert driver.only(rounds.WriteBase).record.base is None
    driver.feed(rounds.BaseWritten(FIRST))
    driver.store_all(ran=False).store_all(ran=True)
    assert driver.only(rounds.Begin).summary.lost_steps == 9


def test_lost_steps_are_unknown_where_no_control_block_remembers() -> None:
    driver = Driver(remote=False).join_all().promise_all().load_all()
    driver.store_all(ran=False).store_all(ran=True)
    assert driver.only(rounds.Begin).summary.lost_steps == -1


def test_without_a_remote_tier_there_is_no_claim_and_no_base_record() -> None:
    driver = Driver(remote=False).join_all().promise_all(copies(STEP))
    assert driver.only(rounds.Announce).decision.base == STEP
    driver.load_all()
    assert driver.round.phase is Phase.STORE


# --- gather ---------------------------------------------------------------------------------------


def test_missing_ranks_are_named_while_the_others_wait() -> None:
    driver = Driver()
    driver.feed(rounds.Joined(join(1)))
    assert driver.only(rounds.Waiting).message == "waiting for rank 0 to call restore()"
    assert rounds.answer_join(driver.round, join(1)).status == WAIT


def test_the_barrier_is_bounded_and_names_who_did_not_come() -> None:
    driver = Driver(options=RestoreOptions(barrier_seconds=10))
    driver.feed(rounds.Joined(join(1)))
    assert driver.after(10.0) == ()
    driver.after(1.0)
    assert (driver.given_up.code, driver.given_up.retry) == ("BarrierExpired", False)
    assert driver.given_up.why == "after 11 s rank 0 did not call restore()"
    assert rounds.answer_join(driver.round, join(1)).status == FAILED


@pytest.mark.parametrize(
    ("request_", "why"),
    [
        pytest.param(join(2), "the job has 2 replicas", id="a replica too many"),
        pytest.param(join(0, world_size=4), "says that the world has 4 ranks", id="world size"),
        pytest.param(join(0, ranks=(1,)), "should hold ranks 0 to 0", id="rank in another replica"),
    ],
)
def test_a_rank_that_does_not_fit_the_topology_ends_the_round(request_: Any, why: str) -> None:
    driver = Driver()
    driver.feed(rounds.Joined(request_))
    assert driver.given_up.code == "WorldMisfit"
    assert why in driver.given_up.why


def test_a_pod_left_over_from_a_job_of_another_size_disturbs_nobody() -> None:
    driver = Driver()
    driver.feed(rounds.Joined(join(0, generation=2)))
    assert driver.feed(rounds.Joined(join(2, generation=1, world_size=3))) == ()
    driver.feed(rounds.Joined(join(1, generation=2)))
    assert driver.round.phase is Phase.PROMISE


def test_a_rank_that_joins_anew_before_the_world_is_whole_replaces_itself() -> None:
    driver = Driver()
    driver.feed(rounds.Joined(join(0, nonce="a")), rounds.Joined(join(0, nonce="b")))
    driver.feed(rounds.Joined(join(1)))
    assert driver.round.nonces == {0: "b0", 1: "a1"}


def test_a_rank_that_starts_anew_later_restarts_the_round() -> None:
    driver = loading()
    driver.feed(rounds.Joined(join(0, nonce="b")))
    assert (driver.given_up.code, driver.given_up.retry) == ("RankRejoined", True)
    assert rounds.answer_verdict(driver.round, _any_verdict()).status == AGAIN
    assert rounds.answer_join(driver.round, join(0, nonce="b")).status == WAIT


def _any_verdict() -> VerdictRequest:
    return VerdictRequest(replica=1, round="r", serial=1, verdicts=())


def test_the_same_processes_re_attach() -> None:
    driver = loading()
    assert driver.feed(rounds.Joined(join(0))) == ()
    assert rounds.answer_join(driver.round, join(0)).status == LOAD
    assert rounds.answer_join(driver.round, join(0, ranks=())).status == LOAD


def test_a_new_generation_of_a_replica_restarts_the_round() -> None:
    driver = loading()
    driver.feed(rounds.Joined(join(0, generation=2)))
    assert driver.given_up.code == "RankRejoined"


def test_a_replaced_pod_is_told_so() -> None:
    driver = Driver()
    driver.feed(rounds.Joined(join(0, generation=2)), rounds.Joined(join(0, generation=1)))
    assert driver.round.members == {0: 2}
    reply = rounds.answer_join(driver.round, join(0, generation=1))
    assert reply.status == FAILED
    assert "was replaced by generation 2" in reply.message


def test_the_newest_pod_says_whom_a_world_consists_of() -> None:
    driver = Driver()
    driver.feed(rounds.Joined(join(0, generation=3, current={0: 3, 1: 2})))
    driver.feed(rounds.Joined(join(1, generation=1)))
    assert driver.only(rounds.Waiting).message == "waiting for the newer pod of replica 1 to join"
    driver.after(700.0)
    assert "newer pod of replica 1" in driver.given_up.why


def test_when_the_right_pod_joins_the_round_goes_on() -> None:
    driver = Driver()
    driver.feed(rounds.Joined(join(0, generation=3, current={0: 3, 1: 2})))
    driver.feed(rounds.Joined(join(1, generation=2)))
    assert driver.round.attempt == first_attempt_of(3)


# --- numbers and promises -------------------------------------------------------------------------


def refuse(known: int, why: str = "no") -> PromiseReply:
    return PromiseReply(granted=False, known=known, why=why)


def test_the_first_number_is_the_generations_first() -> None:
    assert Driver().join_all(generation=7).round.attempt == first_attempt_of(7)


def test_a_bare_topology_counts_from_one() -> None:
    assert Driver().join_all(generation=0).round.attempt == 1


def test_a_number_that_is_known_somewhere_is_passed() -> None:
    driver = Driver().join_all()
    driver.feed(rounds.PromiseAnswered(0, FIRST, refuse(known=FIRST + 4)))
    assert driver.round.attempt == FIRST + 5
    assert len(driver.effects) == 2  # all are asked again


def test_a_grant_that_knows_of_a_greater_number_counts_for_nothing() -> None:
    driver = Driver().join_all()
    driver.feed(rounds.PromiseAnswered(0, FIRST, PromiseReply(granted=True, known=FIRST + 4)))
    assert driver.round.attempt == FIRST + 5
    assert not driver.round.promises


def test_a_number_that_something_was_saved_under_is_never_taken_again() -> None:
    driver = Driver().join_all()
    held = Inventory(copies=(copy(point(3, FIRST), 0),))
    driver.feed(rounds.PromiseAnswered(0, FIRST, PromiseReply(granted=True, inventory=held)))
    assert (driver.round.phase, driver.round.attempt) == (Phase.PROMISE, LATER)


def test_an_answer_to_an_older_question_changes_nothing() -> None:
    driver = Driver().join_all()
    driver.feed(rounds.PromiseAnswered(0, FIRST, refuse(known=FIRST)))
    assert driver.feed(rounds.PromiseAnswered(1, FIRST, PromiseReply(granted=True))) == ()
    assert driver.feed(rounds.PromiseUnreachable(1, FIRST, "late")) == ()


def test_a_world_that_sees_a_greater_generation_stands_down() -> None:
    driver = Driver().join_all()
    driver.feed(rounds.PromiseAnswered(0, FIRST, refuse(known=first_attempt_of(2))))
    assert (driver.given_up.code, driver.given_up.retry) == ("NewerWorldExists", False)
    assert "stands down" in driver.given_up.why


def test_a_bare_world_never_stands_down() -> None:
    driver = Driver().join_all(generation=0)
    driver.feed(rounds.PromiseAnswered(0, 1, refuse(known=first_attempt_of(2))))
    assert driver.round.attempt == first_attempt_of(2) + 1


def test_a_member_that_refuses_for_another_reason_ends_the_round() -> None:
    driver = Driver().join_all()
    driver.feed(rounds.PromiseAnswered(0, FIRST, refuse(0, "not a member")))
    assert (driver.given_up.code, driver.given_up.retry) == ("MemberRefused", True)
    assert "not a member" in driver.given_up.why


def test_a_silent_member_is_asked_again_and_then_given_up() -> None:
    driver = Driver().join_all()
    driver.feed(rounds.PromiseUnreachable(1, FIRST, "timed out"))
    assert "sidecar of replica 1: timed out" in driver.only(rounds.Waiting).message
    assert driver.after(0.5) == ()
    assert [e.replica for e in driver.after(0.6) if isinstance(e, rounds.AskPromise)] == [1]
    assert driver.after(5.0) == ()  # asked, not answered yet
    driver.feed(rounds.PromiseUnreachable(1, FIRST, "timed out"))
    driver.after(40.0)
    driver.feed(rounds.PromiseUnreachable(1, FIRST, "timed out"))
    assert (driver.given_up.code, driver.given_up.retry) == ("MemberUnreachable", True)


def test_a_member_that_answers_again_is_forgiven() -> None:
    driver = Driver().join_all()
    driver.feed(rounds.PromiseUnreachable(1, FIRST, "timed out"))
    driver.after(20.0)
    driver.promise_all()
    assert not driver.round.silent


# --- claim and listing ----------------------------------------------------------------------------


def claiming(**fields: Any) -> Driver:
    return Driver(**fields).join_all().promise_all()


def test_a_claim_that_is_taken_means_another_number_from_the_promise_on() -> None:
    driver = claiming()
    driver.feed(rounds.ClaimTaken(FIRST, "other", "c/u"))
    assert (driver.round.phase, driver.round.attempt) == (Phase.PROMISE, LATER)


def test_the_greatest_claim_in_sight_saves_trying_each_number() -> None:
    driver = claiming()
    driver.feed(rounds.ClaimTaken(FIRST, "other", greatest=FIRST + 9))
    assert driver.round.attempt == FIRST + 10


def test_ones_own_claim_counts_when_its_answer_was_lost() -> None:
    driver = claiming()
    driver.feed(rounds.ClaimTaken(FIRST, "r", "c/u"))
    assert driver.round.claimed
    assert driver.only(rounds.ListRemote)


def test_without_a_claim_and_nobody_in_line_it_waits_and_tries_again() -> None:
    driver = claiming()
    driver.feed(rounds.ClaimUnreachable(FIRST, "refused"))
    assert "waiting for the remote tier: refused" in driver.only(rounds.Waiting).message
    driver.after(1.5)
    assert driver.only(rounds.MakeClaim).claim.round == "r"
    driver.after(200.0)
    driver.feed(rounds.ClaimUnreachable(FIRST, "refused"))
    assert (driver.given_up.code, driver.given_up.retry) == ("RemoteAway", False)
    assert "could not be reached for 120 s: refused" in driver.given_up.why


def test_with_a_member_in_line_it_begins_without_a_claim() -> None:
    driver = Driver().join_all().promise_all(copies(STEP), in_line=True)
    driver.feed(rounds.ClaimUnreachable(FIRST, "refused"))
    assert driver.only(rounds.Announce).decision.base == STEP
    driver.load_all().store_all(ran=False).store_all(ran=True)
    summary = driver.only(rounds.Begin).summary
    assert (summary.claimed, summary.base_recorded) == (False, False)


def test_in_line_but_with_nothing_here_it_still_waits_for_the_remote_tier() -> None:
    driver = Driver().join_all().promise_all(in_line=True)
    driver.feed(rounds.ClaimUnreachable(FIRST, "refused"))
    assert driver.round.phase is Phase.CLAIM
    assert "could not be listed" in driver.only(rounds.Waiting).message


def test_a_listing_that_fails_ends_the_round_and_the_wait_is_bounded_over_rounds() -> None:
    driver = claiming(options=RestoreOptions(remote_wait_seconds=5)).claim()
    driver.feed(rounds.ListingFailed(FIRST, "500"))
    assert (driver.given_up.code, driver.given_up.retry) == ("ListingFailed", True)
    driver.round = rounds.begin("r", 3.0, driver.round)
    driver.now = 9.0
    driver.feed(rounds.Tick(9.0))
    driver.join_all().promise_all().claim()
    assert driver.round.attempt == LATER
    driver.feed(rounds.ListingFailed(LATER, "500"))
    assert (driver.given_up.code, driver.given_up.retry) == ("RemoteAway", False)


def test_a_greater_claim_of_a_newer_generation_makes_the_world_stand_down() -> None:
    driver = claiming().claim().list(claims=(FIRST, first_attempt_of(2)))
    assert driver.given_up.code == "NewerWorldExists"


@pytest.mark.parametrize(
    "seen",
    [
        {"claims": (FIRST, LATER)},
        {"bases": (record(LATER),)},
        {"inventory": Inventory(chains={LATER: ()})},
        {"inventory": Inventory(copies=(copy(point(1, LATER), 0, "remote"),))},
    ],
    ids=["claim", "base", "manifest", "shard"],
)
def test_anything_greater_in_the_listing_means_another_round(seen: dict[str, Any]) -> None:
    driver = claiming().claim().list(**seen)
    assert (driver.given_up.code, driver.given_up.retry) == ("NumberTaken", True)
    assert rounds.begin("s", 1.0, driver.round).known == LATER


@pytest.mark.parametrize(
    "seen",
    [{"bases": (record(FIRST),)}, {"inventory": Inventory(chains={FIRST: ()})}],
    ids=["base", "manifest"],
)
def test_traces_of_an_attempt_of_the_same_number_mean_another_round(seen: dict[str, Any]) -> None:
    driver = claiming().claim().list(**seen)
    assert driver.given_up.code == "NumberTaken"
    assert rounds.begin("s", 1.0, driver.round).known == FIRST


def test_events_of_another_number_or_phase_change_nothing() -> None:
    driver = claiming()
    strays: list[Event] = [
        rounds.ClaimMade(1),
        rounds.ClaimTaken(1),
        rounds.ClaimUnreachable(1, ""),
        rounds.RemoteListed(FIRST, rounds.RemoteView()),
        rounds.ListingFailed(FIRST, ""),
        rounds.BaseWritten(FIRST),
        rounds.BaseUnreachable(FIRST, ""),
        rounds.VerdictGiven(_any_verdict()),
        rounds.StoreAnswered(0, FIRST, False, StoreReply(stored=True)),
        rounds.StoreUnreachable(0, FIRST, True, ""),
        rounds.PromiseAnswered(0, FIRST, PromiseReply(granted=True)),
        rounds.PromiseUnreachable(0, FIRST, ""),
    ]
    before = driver.round
    for stray in strays:
        assert driver.feed(stray) == ()
    assert driver.round == before


# --- decide ---------------------------------------------------------------------------------------


def test_a_refusal_ends_the_round_and_says_what_is_wrong_with_each() -> None:
    driver = Driver(remote=False).join_all().promise_all([copy(STEP, 0)])
    assert (driver.given_up.code, driver.given_up.retry) == ("NothingToRestore", False)
    assert "step 5 of attempt" in driver.given_up.why
    assert "no copy of rank 1" in driver.given_up.why


def test_a_crash_loop_is_held_back_and_then_refused() -> None:
    stored = record(FIRST - 1, STEP, restarts=1)
    driver = Driver(remote=False).join_all().promise_all(copies(STEP), stored=stored)
    assert driver.round.phase is Phase.HOLD
    assert "2 attempts in a row made no newer checkpoint" in driver.only(rounds.Waiting).message
    assert driver.after(1.0) == ()
    driver.after(1.5)
    assert driver.only(rounds.Announce)
    spent = Driver(remote=False, options=RestoreOptions(max_restarts=1)).join_all()
    spent.promise_all(copies(STEP), stored=stored)
    assert (spent.given_up.code, spent.given_up.retry) == ("RestartsSpent", False)


@pytest.mark.parametrize(
    ("restarts", "seconds"), [(0, 0), (1, 0), (2, 2), (3, 4), (6, 32), (7, 60), (5000, 60)]
)
def test_the_pause_doubles_and_is_bounded(restarts: int, seconds: float) -> None:
    assert backoff_seconds(restarts) == seconds


# --- load and verify ------------------------------------------------------------------------------


def bad(rank: int, tier: str, holder: int, *, proven: bool) -> BadSource:
    return BadSource(shard_rank=rank, tier=tier, holder=holder, proven=proven, detail="digest")


def test_a_copy_proven_bad_is_struck_out_for_everyone_and_the_leader_decides_again() -> None:
    driver = loading()
    first = driver.verdict(1)
    driver.feed(rounds.VerdictGiven(first))
    found = bad(0, "local", 0, proven=True)
    driver.feed(rounds.VerdictGiven(driver.verdict(0, ok=False, bad=(found,))))
    decision = driver.only(rounds.Announce).decision
    assert (decision.base, decision.serial) == (STEP, 2)
    assert [source.tier for source in decision.shards[0].sources] == ["neighbor"]
    assert decision.skipped_bad == ("rank 0 of step 5, local copy at replica 0: digest",)
    assert rounds.answer_verdict(driver.round, first).status == AGAIN
    assert not driver.round.verdicts  # all load anew, from the same decision


def test_when_the_last_copy_is_struck_out_all_fall_back_together() -> None:
    driver = loading()
    for found in (bad(0, "local", 0, proven=True), bad(0, "neighbor", 1, proven=True)):
        driver.feed(rounds.VerdictGiven(driver.verdict(0, ok=False, bad=(found,))))
    assert driver.given_up.code == "NothingToRestore"
    assert "2 bad copies were struck out" in driver.given_up.why
    assert rounds.answer_verdict(driver.round, _any_verdict()).status == FAILED


def test_out_of_reach_proves_nothing_and_puts_the_source_last_for_that_reader() -> None:
    driver = loading()
    found = bad(0, "local", 0, proven=False)
    driver.feed(rounds.VerdictGiven(driver.verdict(1, ok=False, bad=(found,))))
    decision = driver.only(rounds.Announce).decision
    assert decision.unreachable == {1: ("0/local/0",)}
    assert len(decision.shards[0].sources) == 2
    driver.feed(rounds.VerdictGiven(driver.verdict(1, ok=False, bad=(found,))))
    assert (driver.given_up.code, driver.given_up.retry) == ("SourcesUnreachable", True)


def test_a_bad_copy_that_another_source_made_good_is_noted_without_deciding_again() -> None:
    driver = loading()
    far, near = bad(0, "local", 0, proven=True), bad(0, "neighbor", 1, proven=False)
    driver.feed(rounds.VerdictGiven(driver.verdict(0, bad=(far, near))))
    driver.feed(rounds.VerdictGiven(driver.verdict(1)))
    assert driver.round.phase is Phase.STORE
    driver.store_all(ran=False).store_all(ran=True)
    assert driver.only(rounds.Begin).summary.bad == (
        "rank 0 of step 5, local copy at replica 0: digest",
    )


def test_bad_sources_of_a_start_from_nothing_mean_nothing() -> None:
    driver = Driver(remote=False).join_all().promise_all()
    driver.feed(rounds.VerdictGiven(driver.verdict(0, bad=(bad(0, "local", 0, proven=True),))))
    assert not driver.round.struck
    driver.feed(
        rounds.VerdictGiven(driver.verdict(1, ok=False, bad=(bad(0, "x", 0, proven=True),)))
    )
    assert isinstance(driver.round.choice, Fresh)


def test_a_remote_copy_is_named_without_a_holder() -> None:
    driver = Driver().join_all().promise_all(copies(STEP)).claim()
    driver.list(inventory=Inventory(copies=tuple(copies(STEP, "remote"))))
    found = bad(1, "remote", -1, proven=True)
    driver.feed(rounds.VerdictGiven(driver.verdict(0, ok=False, bad=(found,))))
    assert driver.only(rounds.Announce).decision.skipped_bad == (
        "rank 1 of step 5, remote: digest",
    )


def test_an_unclaimed_attempt_whose_copies_are_all_bad_waits_for_its_claim() -> None:
    driver = Driver().join_all().promise_all(copies(STEP), in_line=True)
    driver.feed(rounds.ClaimUnreachable(FIRST, "refused"))
    found = bad(0, "local", 0, proven=True)
    verdict = driver.verdict(0, ok=False, bad=(found,))
    driver.feed(rounds.VerdictGiven(verdict))
    assert driver.round.phase is Phase.CLAIM
    assert rounds.answer_verdict(driver.round, verdict).status == AGAIN
    assert rounds.answer_join(driver.round, join(0)).status == WAIT
    driver.after(2.0)
    driver.claim().list(inventory=Inventory(copies=tuple(copies(STEP, "remote"))))
    assert driver.only(rounds.Announce).decision.serial == 2


def test_what_can_not_be_loaded_here_ends_the_round_for_all() -> None:
    driver = loading()
    driver.feed(rounds.VerdictGiven(driver.verdict(1, ok=False, error="another structure")))
    assert (driver.given_up.code, driver.given_up.retry) == ("CannotLoad", False)
    assert driver.given_up.why == "rank 1: another structure"


def changed(field: str, value: Any) -> Callable[[VerdictRequest], VerdictRequest]:
    return lambda request: replace(request, **{field: value})


@pytest.mark.parametrize(
    "change",
    [
        changed("round", "other"),
        changed("serial", 7),
        changed("verdicts", (RankVerdict(rank=0, nonce="stranger", ok=True),)),
        changed("verdicts", ()),
    ],
    ids=["round", "serial", "nonce", "not all ranks"],
)
def test_a_verdict_on_something_else_is_not_counted(
    change: Callable[[VerdictRequest], VerdictRequest],
) -> None:
    driver = loading()
    driver.feed(rounds.VerdictGiven(change(driver.verdict(0))))
    assert not driver.round.verdicts


def test_loading_is_bounded_by_the_barrier_since_anybody_was_heard() -> None:
    driver = loading(options=RestoreOptions(barrier_seconds=10))
    assert driver.after(9.0) == ()
    driver.feed(rounds.VerdictGiven(driver.verdict(0)))
    assert driver.after(9.0) == ()
    driver.after(2.0)
    assert driver.given_up.code == "BarrierExpired"
    assert "rank 1 had not finished loading" in driver.given_up.why


# --- record and go --------------------------------------------------------------------------------


def test_a_base_record_that_can_not_be_written_does_not_hold_up_the_start() -> None:
    driver = Driver().join_all().promise_all(copies(STEP)).claim().list().load_all()
    assert driver.after(1.0) == ()
    driver.feed(rounds.BaseUnreachable(FIRST, "500"))
    driver.store_all(ran=False).store_all(ran=True)
    summary = driver.only(rounds.Begin).summary
    assert (summary.claimed, summary.base_recorded) == (True, False)


def test_a_member_that_refuses_to_store_ends_the_round() -> None:
    driver = loading().load_all()
    driver.feed(driver.stored(0, ran=False, ok=False, why="a newer promise"))
    assert (driver.given_up.code, driver.given_up.retry) == ("MemberRefused", True)
    assert "a newer promise" in driver.given_up.why


@pytest.mark.parametrize("ran", [False, True])
def test_a_member_silent_at_its_store_is_asked_again(ran: bool) -> None:
    driver = loading().load_all()
    if ran:
        driver.store_all(ran=False)
    driver.feed(rounds.StoreUnreachable(1, driver.round.attempt, ran, "timed out"))
    asked = [e for e in driver.after(2.0) if isinstance(e, rounds.AskStore)]
    assert [(e.replica, e.request.record.ran) for e in asked] == [(1, ran)]
    driver.after(60.0)
    driver.feed(rounds.StoreUnreachable(1, driver.round.attempt, ran, "timed out"))
    assert driver.given_up.code == "MemberUnreachable"


def test_no_rank_hears_go_before_every_member_has_stored_the_go_ahead() -> None:
    driver = loading().load_all()
    verdict = driver.verdict(0)
    driver.store_all(ran=False)
    driver.feed(driver.stored(0, ran=True))
    assert rounds.answer_verdict(driver.round, verdict).status == WAIT
    driver.feed(driver.stored(1, ran=True))
    reply = rounds.answer_verdict(driver.round, verdict)
    assert (reply.status, reply.record) == (GO, driver.round.record)
    assert reply.record is not None
    assert reply.record.ran


def test_a_go_ahead_answers_only_the_processes_that_joined() -> None:
    driver = loading().load_all().store_all(ran=False).store_all(ran=True)
    stranger = driver.verdict(0, nonce="other")
    assert rounds.answer_verdict(driver.round, stranger).status == AGAIN
    assert rounds.answer_join(driver.round, join(0)).status == LOAD  # it re-attaches
    assert rounds.answer_join(driver.round, join(0, nonce="b")).status == WAIT


def test_a_round_that_is_over_takes_no_more_events() -> None:
    driver = loading().load_all().store_all(ran=False).store_all(ran=True)
    before = driver.round
    assert driver.feed(rounds.Joined(join(0, nonce="b"))) == ()
    assert driver.round == before
    assert before.over


def test_the_next_round_knows_the_numbers_but_not_the_strikes_of_one_that_began() -> None:
    driver = loading()
    found = bad(0, "local", 0, proven=True)
    driver.feed(rounds.VerdictGiven(driver.verdict(0, ok=False, bad=(found,))))
    again = rounds.begin("s", 7.0, replace(driver.round, phase=Phase.ENDED))
    assert (again.known, again.started, again.gathering_since) == (FIRST, 0.0, 7.0)
    assert again.struck == driver.round.struck
    assert not again.joins
    driver.load_all().store_all(ran=False).store_all(ran=True)
    later = rounds.begin("t", 9.0, driver.round)
    assert (later.known, later.started, dict(later.struck)) == (FIRST, 9.0, {})


def test_settings_come_from_the_topology() -> None:
    topology = Topology(
        namespace="n",
        job="j",
        run_name="j",
        uid="u",
        replicas=2,
        processes_per_replica=4,
        peers=tuple(Peer(replica=i, address=f"h{i}:7070") for i in (0, 1)),
        tiers=Tiers(remote=RemoteTier(endpoint="http://s:1", bucket="b")),
    )
    settings = rounds.round_settings(topology)
    assert (settings.world_size, settings.remote_configured, settings.owner) == (8, True, "local/u")
    assert settings.ranks_of(1) == range(4, 8)
