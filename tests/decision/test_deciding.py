"""The decision on an attempt, row by row: for a single node, and for several."""

from __future__ import annotations

import signal
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from ncclops.classify.model import Classification
from ncclops.classify.policy import PastAttempt, default_rules
from ncclops.cluster import records
from ncclops.decision.deciding import AttemptDecision, decide
from ncclops.decision.node_end import CannotStart, JobRules, NodeEnd
from ncclops.decision.outcome import StopRequest
from ncclops.decision.retrying import Escalated, RetryPlan
from ncclops.errors import NcclopsError, NotNeeded
from ncclops.record.event_values import GpuFault
from ncclops.record.story_record import Story
from ncclops.record.verdict_record import FirstFailure, WorkerEnding

PLAN = RetryPlan(lane="generic", rules=default_rules(), granted=0)
RULES = JobRules(retry=PLAN)
IN_PLACE = replace(RULES, losses_allowed=True)
RECEIPT = replace(RULES, require_receipt=True)
STATIC, C10D = RULES, replace(RULES, replaceable=True)
MISTAKE = Classification(
    class_="user-error", confidence=0.5, summary="mistake", retry_policy="fix-code"
)
REFUSED = Classification(
    class_="bootstrap", confidence=0.9, summary="refused", retry_policy="retry-once-lazy"
)
HARDWARE = Classification(
    class_="gpu-hardware", confidence=0.9, summary="broken", retry_policy="replace-node"
)
STORE_GONE = Classification(
    class_="store-rendezvous", confidence=0.9, summary="gone", retry_policy="fix-config"
)
SIGINT = StopRequest(reason="SIGINT", grace=timedelta(seconds=9), signum=signal.SIGINT)
DRAIN = StopRequest(reason="drain", grace=timedelta(seconds=9))


def ending(rank: int, code: int | None = 0, **more: Any) -> WorkerEnding:
    return WorkerEnding(
        **{"rank": rank, "pid": 100 + rank, "exit_code": code, "signal": None, "seconds": 1.0}
        | more
    )


def killed(rank: int, name: str = "SIGKILL", **more: Any) -> WorkerEnding:
    return ending(rank, None, signal=name, **more)


def node(
    *endings: WorkerEnding, name: str = "n0", found: Classification = MISTAKE, **more: Any
) -> NodeEnd:
    """How a node ended; with the failure that a bad ending is, where it has failed."""
    bad = [each for each in endings if not each.ok and not each.asked_to_stop]
    if bad and more.get("failed") and "failure" not in more:
        more["failure"] = FirstFailure.of(
            bad[0], message=None, tail=[], log="stderr.log", host=name
        )
    return NodeEnd(
        name=name, endings=endings, classification=found.as_json() | {"evidence": []}, **more
    )


def failed(*endings: WorkerEnding, **more: Any) -> NodeEnd:
    return node(*endings, failed=True, fatal=True, **more)


def lost(name: str, why: str = "silent for 30s", **more: Any) -> NodeEnd:
    return NodeEnd(name=name, lost=why, **more)


WELL = node(ending(0), ending(1))
BROKEN = GpuFault(rank=1, node="n0", gpu=3, uuid="GPU-5", device="GPU 3 (GPU-5)", what="Xid 79")
SPARED = node(ending(0), killed(1), failed=False)
WORST = failed(ending(0, 1), ending(1, asked_to_stop=True))
CANNOT = CannotStart.of(NcclopsError("cannot start attempt 1: no file"))
ALL_GAVE_UP = node(
    ending(0, 1),
    ending(1, 1),
    failed=True,
    fatal=True,
    escalated=Escalated(to="respawn", reason="3 times in a row", failure=("E", "f:1")),
)

# how one node ended, the job's rules, outcome, exit code, and what the reason says
ROWS = {
    "all exited 0": (WELL, RULES, "completed", 0, "2 workers exited 0"),
    "killed when the script had ended": (
        node(ending(0), killed(1, finished=True)),
        RULES,
        "completed",
        0,
        "rank 1 was killed by SIGKILL, after the script had ended well; 1 worker exited 0",
    ),
    "a rank was lost, the others finished": (
        SPARED,
        IN_PLACE,
        "completed",
        0,
        "rank 1 was killed by SIGKILL, the others went on; 1 worker exited 0",
    ),
    "a rank was ended, the others finished": (
        replace(SPARED, why_ended={1: "hard timeout: its abort has not returned"}),
        IN_PLACE,
        "completed",
        0,
        "rank 1 was killed by SIGKILL (hard timeout: its abort has not returned), the others went",
    ),
    "a rank was lost where all are needed": (
        replace(SPARED, failed=True, fatal=True),
        RULES,
        "failed",
        1,
        "rank 1 was killed by SIGKILL",
    ),
    "all were lost": (node(killed(0), failed=True), IN_PLACE, "failed", 1, "rank 0 was killed"),
    "one failed before it could restart in place": (
        failed(ending(0), ending(1, 2)),
        IN_PLACE,
        "failed",
        1,
        "rank 1 exited with code 2",
    ),
    "one failed, and we stopped the other": (WORST, RULES, "failed", 1, "rank 0 exited with code"),
    "we stopped a worker, and nothing else failed": (
        node(killed(0, "SIGTERM", asked_to_stop=True)),
        RULES,
        "failed",
        1,
        "rank 0 was killed by SIGTERM",
    ),
    "a worker did not end at all": (failed(ending(0, None)), RULES, "failed", 1, "did not end"),
    "stopped by a signal": (replace(WELL, stop=SIGINT), RULES, "interrupted", 130, "by SIGINT"),
    "stopped by a command": (replace(WELL, stop=DRAIN), RULES, "stopped", 0, "requested: drain"),
    "stopped by a command, and by force": (
        replace(WELL, stop=DRAIN, endings=(ending(0), killed(1))),
        RULES,
        "stopped",
        1,
        "requested: drain; rank 1 did not exit cleanly",
    ),
    "stopped by a signal, and a rank failed meanwhile": (
        replace(WORST, stop=SIGINT),
        RULES,
        "interrupted",
        130,
        "stopped by SIGINT; rank 0 failed meanwhile (exited with code 1)",
    ),
    "asked to stop after the failure": (
        replace(WORST, stopping=True),
        RULES,
        "failed",
        1,
        "rank 0 exited with code 1",
    ),
    "asked to stop after the end": (replace(WELL, stopping=True), RULES, "completed", 0, "2 work"),
    "the launcher was killed": (
        replace(WELL, stop=SIGINT, launcher_lost=True),
        RULES,
        "failed",
        1,
        "the launcher was killed; the agent stopped the workers",
    ),
    "cannot start": (
        node(failed=True, fatal=True, cannot_start=CANNOT),
        RULES,
        "failed",
        1,
        "cannot start attempt 1: no file",
    ),
    "a spare that was not needed": (
        node(failed=True, cannot_start=CannotStart.of(NotNeeded("not needed"))),
        RULES,
        "stopped",
        NotNeeded.exit_code,
        "not needed",
    ),
    "a hang": (
        failed(killed(0), killed(1), hang="rank 0: stale", failure=None),
        RULES,
        "failed",
        1,
        "hang: rank 0: stale",
    ),
    "restarts in place gave up": (ALL_GAVE_UP, IN_PLACE, "failed", 1, "rank 0 exited with code 1"),
    "no healthy receipt": (
        WELL,
        RECEIPT,
        "no-receipt",
        4,
        "2 workers exited 0; --require-receipt asked for a healthy receipt, and there is none",
    ),
    "a healthy receipt": (replace(WELL, healthy=True), RECEIPT, "completed", 0, "2 workers"),
    "a receipt that could not be judged": (
        replace(WELL, healthy=None),
        RECEIPT,
        "no-receipt",
        70,
        "see agent.log",
    ),
    "no receipt where it failed anyhow": (WORST, RECEIPT, "failed", 1, "rank 0 exited"),
    "the job's store was lost, after all had finished": (
        replace(WELL, cut_off="the job's store is lost"),
        RULES,
        "completed",
        0,
        "2 workers exited 0",
    ),
    "the workers' store had ended, and a worker failed": (
        replace(WORST, store_ended="was killed by SIGKILL"),
        RULES,
        "failed",
        1,
        "the store server was killed by SIGKILL; rank 0 exited with code 1",
    ),
    "the workers' store had ended, after which they finished": (
        replace(WELL, store_ended="was killed by SIGKILL"),
        RULES,
        "completed",
        0,
        "2 workers exited 0",
    ),
    "the job's store was lost, and a worker failed": (
        replace(WORST, cut_off="the job's store is lost"),
        RULES,
        "failed",
        1,
        "rank 0 exited with code 1; the job's store is lost",
    ),
}


def on(nodes: list[NodeEnd], rules: JobRules = RULES) -> AttemptDecision:
    return decide(nodes, rules, random=lambda: 0.5)


@pytest.mark.parametrize(
    ("found", "class_", "action"),
    [
        (STORE_GONE, "store-rendezvous", "retry"),
        (Classification(class_="unknown", confidence=0.0, summary=""), "store-rendezvous", "retry"),
        (MISTAKE, "user-error", "unknown"),
    ],
)
def test_a_lost_store_server_is_no_mistake_of_the_configuration(
    found: Classification, class_: str, action: str
) -> None:
    """The next attempt has a store of its own; what a rank itself has raised stays what it is."""
    end = failed(
        ending(0, 1), found=found, store_ended="was killed by SIGKILL", story=Story(what="")
    )
    decision = on([end])
    assert decision.classification is not None and decision.classification["class"] == class_
    assert decision.next_action == action
    assert (decision.following is not None) == (action == "retry")
    assert decision.story is not None and (decision.story.class_ == class_) == (
        found is not MISTAKE
    )


def test_an_external_store_that_is_gone_is_not_retried() -> None:
    assert on([failed(ending(0, 1), found=STORE_GONE)]).following is None


@pytest.mark.parametrize("row", ROWS)
def test_each_end_of_a_single_node_has_its_outcome(row: str) -> None:
    end, rules, outcome, code, reason = ROWS[row]
    decision = on([end], rules)
    assert (decision.outcome, decision.exit_code) == (outcome, code)
    assert reason in decision.reason
    assert (decision.classification is not None) == (outcome == "failed" and not end.cannot_start)


@pytest.mark.parametrize("row", ROWS)
def test_several_nodes_come_to_the_same_for_the_same_ends(row: str) -> None:
    """Each worker on a node of its own."""
    end, rules, outcome, code, _ = ROWS[row]
    nodes = [
        replace(end, name=f"n{each.rank}", endings=(each,), failed=end.failed and not each.ok)
        for each in end.endings
    ] or [end]
    decision = on(nodes, rules)
    assert (decision.outcome, decision.exit_code) == (outcome, code)


@pytest.mark.parametrize("row", ROWS)
def test_all_agents_read_the_decision_that_one_has_made(row: str) -> None:
    """Ends and decisions go through the shared log, as JSON."""
    end, rules, *_ = ROWS[row]
    ended = records.decode(records.encode(records.EndedRecord(node=1, end=end)))
    assert isinstance(ended, records.EndedRecord)
    decision = on([end], rules)
    assert on([ended.end], rules).reason == decision.reason
    logged = records.decode(records.encode(records.DecisionRecord(node=0, decision=decision)))
    assert isinstance(logged, records.DecisionRecord)
    again = logged.decision
    assert again.following == decision.following
    assert again.attempt == decision.attempt
    assert (again.outcome, again.exit_code, again.reason, again.retry) == (
        decision.outcome,
        decision.exit_code,
        decision.reason,
        decision.retry,
    )


class TestNodes:
    def test_the_node_is_named_where_there_are_several(self) -> None:
        other = replace(WELL, name="n1")
        assert on([WELL, other]).reason == "4 workers exited 0 on 2 nodes"
        assert on([other, WORST]).reason == "rank 0 exited with code 1 on n0"
        assert on([WELL, replace(other, stop=SIGINT)]).reason == "stopped by SIGINT on n1"
        assert on([WELL, replace(other, stop=DRAIN)]).reason == "requested on n1: drain"
        hung = failed(killed(3), name="n1", hang="rank 3: stale")
        assert on([WELL, hung]).reason == "hang: rank 3: stale on n1"
        orphan = replace(other, stop=SIGINT, launcher_lost=True)
        assert on([WELL, orphan]).reason.startswith("the launcher was killed on n1")

    @pytest.mark.parametrize(
        ("by_force", "stop", "reason", "code"),
        [
            (False, SIGINT, "stopped by SIGINT", 130),  # as in the imports of a script
            (True, SIGINT, "stopped by SIGINT; rank 0 did not exit cleanly", 130),
            (False, DRAIN, "requested: drain; rank 0 did not exit cleanly", 1),
        ],
    )
    def test_a_worker_that_sigterm_alone_has_ended_was_stopped_by_the_signal(
        self, by_force: bool, stop: StopRequest, reason: str, code: int
    ) -> None:
        ended = killed(0, "SIGTERM", asked_to_stop=True)
        decision = on([node(ended, stop=stop, by_force=by_force)])
        assert (decision.reason, decision.exit_code) == (reason, code)

    def test_forced_workers_of_any_node_make_a_stop_unclean(self) -> None:
        decision = on([replace(WELL, stop=DRAIN), node(killed(2), killed(3), name="n1")])
        assert (decision.outcome, decision.exit_code) == ("stopped", 1)
        assert decision.reason.endswith("ranks 2, 3 did not exit cleanly")

    def test_a_lost_node_fails_the_attempt_where_all_are_needed(self) -> None:
        decision = on([WELL, lost("n1", "its agent has ended")])
        assert (decision.outcome, decision.exit_code) == ("failed", 1)
        assert decision.reason == "n1 was lost: its agent has ended"
        assert decision.failure is None
        assert decision.classification is not None
        assert decision.classification["class"] == "peer-exit"

    def test_the_others_finish_without_a_lost_node(self) -> None:
        decision = on([WELL, lost("n1")], IN_PLACE)
        assert decision.outcome == "completed"
        assert decision.reason == (
            "n1 was lost: silent for 30s, the others went on; 2 workers exited 0 on 1 node"
        )

    def test_the_ranks_that_were_lost_are_named_for_all_nodes(self) -> None:
        other = node(ending(2), killed(3), name="n1")
        assert on([SPARED, other], IN_PLACE).ranks_lost == (1, 3)
        assert on([WELL, lost("n1")], IN_PLACE).ranks_lost == ()
        assert on([WORST, other], RULES).ranks_lost == (), "the job has not finished"

    def test_ranks_that_were_lost_with_their_node_are_named(self) -> None:
        left = node(ending(0), without=(1, 2))
        cut_off = on([replace(left, cut_off="the store is lost")], IN_PLACE)
        assert cut_off.reason == "ranks 1, 2 were lost, the others went on; 1 worker exited 0"
        known = on([left, lost("n1")], IN_PLACE)
        assert known.reason.startswith("n1 was lost: silent for 30s, the others went on; 1 worker")
        assert cut_off.ranks_lost == known.ranks_lost == (1, 2)

    def test_no_node_finishes_without_a_lost_node(self) -> None:
        gave_up = node(ending(0, 1), failed=True)
        decision = on([gave_up, lost("n1")], IN_PLACE)
        assert decision.reason == "n1 was lost: silent for 30s", "its peers only followed"

    def test_a_failure_before_the_loss_is_to_blame(self) -> None:
        first = replace(WORST, failed_first=True)
        assert on([first, lost("n1")]).reason == "rank 0 exited with code 1 on n0"

    def test_a_node_that_failed_first_and_was_lost_then_leaves_the_blame_to_what_is_known(
        self,
    ) -> None:
        gone = lost("n1", failed_first=True)
        assert on([WELL, gone], IN_PLACE).outcome == "failed"
        assert on([WORST, gone]).reason == "rank 0 exited with code 1 on n0"

    def test_the_first_failure_is_blamed_and_else_the_one_with_a_cause_of_its_own(self) -> None:
        sure = replace(WORST, name="n1", endings=(ending(2, 3),), failure=None)
        sure = replace(sure, classification=REFUSED.as_json() | {"evidence": []})
        assert "rank 2" in on([WORST, sure]).reason
        assert "rank 0" in on([replace(WORST, failed_first=True), sure]).reason

    def test_an_idle_node_counts_for_nothing(self) -> None:
        idle = NodeEnd(name="n2", idle=True)
        assert on([WELL, idle]).reason == "2 workers exited 0 on 1 node"
        assert on([WELL, replace(idle, lost="silent")]).outcome == "completed"
        assert "n2" not in on([WORST, replace(idle, lost="silent")]).reason

    def test_one_healthy_receipt_is_enough_for_all(self) -> None:
        assert on([WELL, replace(WELL, healthy=True)], RECEIPT).outcome == "completed"
        assert on([WELL, replace(WELL, healthy=False)], RECEIPT).outcome == "no-receipt"


class TestRetry:
    def granted(self, number: int, **more: Any) -> JobRules:
        return JobRules(retry=replace(PLAN, granted=number), **more)

    def test_what_the_policy_calls_eligible_is_tried_again(self) -> None:
        decision = on([replace(WORST, classification=REFUSED.as_json())])
        assert decision.following is not None
        assert decision.following.environ["NCCLOPS_NCCL_INIT"] == "lazy"
        assert decision.attempt == PastAttempt.of(REFUSED, progressed=False)
        assert decision.retry is not None
        assert decision.retry["action"] == "retry"

    def test_its_limits_hold(self) -> None:
        before = (PastAttempt.of(REFUSED, progressed=False),)
        refused = replace(WORST, classification=REFUSED.as_json())
        decision = on([refused], replace(RULES, history=before))
        assert decision.following is None
        assert decision.retry is not None
        assert decision.retry["action"] == "stop"
        assert decision.attempt is not None, "the next agent of the job counts it too"

    @pytest.mark.parametrize(("granted", "used", "follows"), [(0, 0, 0), (1, 0, 1), (1, 1, 0)])
    def test_the_operator_may_grant_what_the_policy_does_not(
        self, granted: int, used: int, follows: bool
    ) -> None:
        history = tuple(PastAttempt.of(MISTAKE, progressed=False) for _ in range(used))
        rules = self.granted(granted, history=history, granted_used=used)
        decision = on([WORST], rules)
        assert (decision.following is not None) == follows
        if decision.following is not None:
            assert "--max-restarts" in decision.following.reason

    def test_nothing_follows_where_restarts_are_off(self) -> None:
        rules = JobRules(retry=replace(PLAN, granted=3, allowed=False))
        assert on([WORST], rules).following is None

    def test_workers_that_gave_up_get_new_processes_once(self) -> None:
        decision = on([ALL_GAVE_UP], IN_PLACE)
        assert decision.following is not None
        assert decision.following.reason == "new processes: 3 times in a row"
        assert decision.following.environ["NCCLOPS_RESPAWNED_FOR"] == '["E", "f:1"]'
        history = (PastAttempt.of(MISTAKE, progressed=False),)
        assert on([ALL_GAVE_UP], replace(IN_PLACE, history=history)).following is None
        further = replace(ALL_GAVE_UP, progressed=True)
        assert on([further], replace(IN_PLACE, history=history)).following is not None

    def test_workers_that_know_the_failure_are_heard_on_whichever_node(self) -> None:
        waited = Escalated(to="respawn", reason="waited", failure=None, failed_start=True)
        first = replace(ALL_GAVE_UP, escalated=waited, failed_first=True)
        for nodes, heard in (
            ([first, ALL_GAVE_UP], "3 times in a row"),
            ([ALL_GAVE_UP, first], "3 times in a row"),
            ([first, WORST], "waited"),
        ):
            following = on(nodes, IN_PLACE).following
            assert following is not None
            assert following.reason == f"new processes: {heard}"

    def test_workers_that_asked_to_stop_get_none(self) -> None:
        stop = Escalated(to="stop", reason="a mistake in the script", failure=None)
        assert on([replace(ALL_GAVE_UP, escalated=stop)], IN_PLACE).following is None

    @pytest.mark.parametrize("rules", [STATIC, C10D])
    def test_a_lost_node_is_replaced_where_another_can_take_its_place(
        self, rules: JobRules
    ) -> None:
        decision = on([WELL, lost("n1")], rules)
        assert (decision.following is not None) == rules.replaceable
        assert decision.retry is not None
        assert decision.retry["action"] == "replace-node"

    def test_where_none_can_an_operators_restart_is_no_help(self) -> None:
        decision = on([WELL, lost("n1")], self.granted(1))
        assert decision.following is None
        assert "no other node can take its place" in decision.reason

    @pytest.mark.parametrize("end", [ALL_GAVE_UP, WORST, failed(ending(1, 1), found=HARDWARE)])
    def test_others_go_on_without_the_node_that_has_a_broken_gpu(self, end: NodeEnd) -> None:
        broken, spare = replace(end, gpu_faults=(BROKEN,)), node(name="n1", idle=True)
        rules = replace(C10D, retry=replace(PLAN, granted=1), nodes_needed=2)
        decision = on([WELL, broken, spare], rules)
        assert decision.following is not None
        assert decision.following.reason.endswith(f"; {BROKEN}")
        assert decision.replaced == (1,)

    @pytest.mark.parametrize(
        ("others", "more", "rules"),
        [
            ([WELL], {}, C10D),  # too few
            ([WELL, lost("n2")], {}, C10D),
            ([WELL, WELL], {}, STATIC),  # places are fixed
            ([WELL, WELL], {"hosts_store": True}, C10D),  # no node can do without it
        ],
    )
    def test_where_they_cannot_the_job_ends(
        self, others: list[NodeEnd], more: dict[str, Any], rules: JobRules
    ) -> None:
        broken = replace(WORST, gpu_faults=(BROKEN,), **more)
        rules = replace(rules, retry=replace(PLAN, granted=1), nodes_needed=2)
        decision = on([broken, *others], rules)
        assert decision.following is None
        assert decision.replaced == ()

    @pytest.mark.parametrize("end", [replace(ALL_GAVE_UP, progressed=True), WORST])
    @pytest.mark.parametrize("rules", [STATIC, replace(C10D, nodes_needed=2)])
    def test_no_process_is_started_on_a_broken_gpu(self, end: NodeEnd, rules: JobRules) -> None:
        """Whoever asks for it: the workers, the policy or the operator."""
        rules = replace(rules, retry=replace(PLAN, granted=3))
        assert on([end, WELL], rules).following is not None
        broken = on([replace(end, gpu_faults=(BROKEN,)), WELL], rules)
        assert broken.following is None
        assert broken.gpu_faults == (BROKEN,)
        assert broken.reason.endswith("GPU 3 (GPU-5) on node n0: Xid 79; replace node n0")

    @pytest.mark.parametrize(
        "end",
        [
            replace(WELL, stop=SIGINT),
            replace(WELL, stop=DRAIN),
            replace(WELL, launcher_lost=True),
            replace(WORST, stopping=True),
            replace(WORST, cut_off="the job's store is lost"),
            node(failed=True, fatal=True, cannot_start=CANNOT),
            WELL,
        ],
    )
    def test_nothing_follows_and_nothing_is_remembered(self, end: NodeEnd) -> None:
        decision = on([end], self.granted(9))
        assert (decision.following, decision.attempt, decision.retry) == (None, None, None)

    def test_progress_on_any_node_counts(self) -> None:
        decision = on([WORST, replace(WELL, name="n1", progressed=True)])
        assert decision.attempt is not None
        assert decision.attempt.progressed


def test_many_ranks_that_end_alike_take_no_more_words_than_two() -> None:
    many = node(ending(0), *(killed(rank) for rank in range(1, 512)))
    assert on([many], replace(RULES, losses_allowed=True)).reason == (
        "ranks 1-511 were killed by SIGKILL, the others went on; 1 worker exited 0"
    )


@pytest.mark.parametrize(
    ("near", "told"),
    [
        (
            Story(what="rank 2 never came: it was in load", rank=2),
            "rank 2 never came: it was in load",
        ),
        (Story(what="rank 3 left", rank=3), "rank 2 never came"),
        (None, "rank 2 never came"),
    ],
)
def test_the_node_of_the_rank_that_began_it_tells_the_story(near: Story | None, told: str) -> None:
    """The node that failed first has no stacks of another node's ranks."""
    far = failed(ending(0, 1), story=Story(what="rank 2 never came", rank=2), failed_first=True)
    other = failed(ending(2, 1), ending(3, 1), name="n1", story=near)
    story = on([far, other]).story
    assert story is not None
    assert story.what == told


@pytest.mark.parametrize(("confidence", "rank"), [(0.5, 2), (0.3, 0)])
def test_the_class_is_that_of_the_node_whose_rank_began_it(confidence: float, rank: int) -> None:
    """Its peers end as surely, and their logs do not say why."""
    error = Story(what="rank 2 raised ValueError", rank=2)
    peer = failed(
        ending(0, 1), story=error, failed_first=True, found=replace(MISTAKE, confidence=0.3)
    )
    began = failed(
        ending(2, 1), name="n1", story=error, found=replace(MISTAKE, confidence=confidence)
    )
    assert on([peer, began]).reason.startswith(f"rank {rank} ")


def test_a_start_that_failed_has_no_story() -> None:
    told = Story(what="rank 0 raised", rank=0)
    refused = node(name="n0", failed=True, fatal=True, cannot_start=CANNOT, story=told)
    assert on([refused]).story is None


def test_where_a_rank_only_waited_the_node_that_knows_for_whom_tells_it() -> None:
    waited = Story(what="rank 2 timed out", rank=2, waited=True, class_="watchdog-timeout")
    absent = Story(what="rank 1 did not come", rank=1)
    ends = [failed(ending(2, 1), name="n1", story=waited, failed_first=True), WELL]
    assert on(ends).story == waited
    story = on([*ends, node(ending(4), name="n2", story=absent)]).story
    assert story is not None
    assert (story.what, story.class_) == ("rank 1 did not come", "watchdog-timeout")
