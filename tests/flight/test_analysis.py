"""Who hung first, from records alone: NCCL's states, rings that wrapped, restarts, many groups."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from ncclops.flight import judge
from ncclops.flight.analysis_context import FlightFinding, Side
from ncclops.flight.finding_kinds import FindingKind
from ncclops.flight.model import FlightEvidence, GroupState, RankPlace
from ncclops.flight.report import first_behind
from ncclops.flight.sentences import sentence
from ncclops.stacks.frame import Frame
from tests.flight import dumps
from tests.flight.dumps import entry, report, transfer

WORLD = dumps.WORLD
DP, TP = ("1", "dp"), ("2", "tp")


def done(first: int, last: int, **more: Any) -> list[dict[str, Any]]:
    return [entry(seq, **more) for seq in range(first, last + 1)]


def test_nothing_wrong_is_none() -> None:
    """All ranks completed the same operations."""
    verdict = report({rank: done(1, 5) for rank in range(4)})
    assert not verdict.is_bad
    assert verdict.to_json()["verdict"]["kind"] == "none"


def test_a_rank_that_never_arrived() -> None:
    """Others wait in an operation that it did not enqueue; it may have finished all before."""
    ranks = {r: [*done(1, 4), entry(5, state="scheduled", line=60)] for r in (0, 1, 3)}
    found = report({**ranks, 2: done(1, 4)})
    finding = found.findings[0]
    assert (finding.kind, finding.culprits, finding.seq) == ("never-arrived", (2,), 5)
    assert "rank 2 never entered all_reduce #5 of group default_pg (0-3)" in found.sentence
    assert finding.sides[0].frame == Frame("/home/user/train.py", 60, "step")


def test_operations_enqueued_ahead_do_not_hide_where_it_hangs() -> None:
    """NCCL's ranks run ahead of their device: the first that does not complete counts."""
    ahead = [entry(seq, state="scheduled") for seq in (5, 6, 7, 8)]
    found = report({0: [*done(1, 4), *ahead], 1: [*done(1, 4), *ahead[:2]], 2: done(1, 4)})
    assert (found.findings[0].seq, found.findings[0].culprits) == (5, (2,))


def test_the_first_to_fall_behind() -> None:
    """Of several that did not arrive, the one with the lowest count."""
    pending = [entry(7, state="scheduled")]
    found = report({0: [*done(1, 6), *pending], 1: done(1, 5), 2: done(1, 6), 3: done(1, 6)})
    assert first_behind(found.groups[0]) == 1
    assert set(found.findings[0].culprits) >= {1}


def test_all_arrived_and_the_transfer_stalls() -> None:
    """Enqueued by all, alike, completed by none: no rank is to blame for it."""
    found = report({r: [*done(1, 4), entry(5, state="started")] for r in range(4)})
    assert (found.findings[0].kind, found.findings[0].culprits) == ("stalled", ())


def test_a_device_that_did_not_start_is_named() -> None:
    """All arrived; on one rank the device never came to it."""
    states = {0: "started", 1: "started", 2: "scheduled"}
    found = report({r: [*done(1, 4), entry(5, state=state)] for r, state in states.items()})
    assert (found.findings[0].kind, found.findings[0].culprits) == ("stalled", (2,))


@pytest.mark.parametrize(
    ("odd", "kind"),
    [
        ({"sizes": [[5]]}, "shape-mismatch"),
        ({"dtype": "Double"}, "dtype-mismatch"),
        ({"op": "nccl:reduce"}, "op-mismatch"),
        ({"op": "nccl:barrier", "sizes": []}, "op-mismatch"),
        ({"op": "nccl:broadcast", "sizes": [[9]], "line": 61}, "order-mismatch"),
    ],
)
def test_kinds_of_disagreement(odd: dict[str, Any], kind: str) -> None:
    """What differs decides; two calls that have nothing in common are out of order."""
    ranks = {r: [*done(1, 4), entry(5, state="scheduled", line=60)] for r in range(4)}
    ranks[3] = [*done(1, 4), entry(5, **{"state": "scheduled", "line": 62, **odd})]
    finding = report(ranks).findings[0]
    assert (finding.kind, finding.culprits, finding.seq) == (kind, (3,), 5)


def test_a_known_call_at_the_wrong_time_is_out_of_order() -> None:
    """Same operation, other size, but one that the loop makes next: skipped, not misshapen."""
    steps = [
        entry(2 * n + k, sizes=[[size]], line=size)
        for n in range(3)
        for k, size in ((1, 4), (2, 8))
    ]
    ranks = {r: [*steps, entry(7, sizes=[[4]], line=4, state="scheduled")] for r in range(3)}
    ranks[1] = [*steps, entry(7, sizes=[[8]], line=8, state="scheduled")]
    finding = report(ranks).findings[0]
    assert (finding.kind, finding.culprits) == ("order-mismatch", (1,))


def test_one_line_with_another_size_is_a_shape() -> None:
    """The same line of the script on both sides cannot be out of order."""
    steps = [entry(n, sizes=[[4 if n % 2 else 8]], line=50) for n in range(1, 7)]
    ranks = {r: [*steps, entry(7, sizes=[[4]], line=50, state="scheduled")] for r in range(3)}
    ranks[1] = [*steps, entry(7, sizes=[[8]], line=50, state="scheduled")]
    assert report(ranks).findings[0].kind == "shape-mismatch"


def test_two_against_two_go_by_what_is_usual() -> None:
    """No majority: the call that the job makes elsewhere is the right one."""
    ranks = {r: [*done(1, 4), entry(5, state="scheduled")] for r in (0, 1)}
    odd = {r: [*done(1, 4), entry(5, state="scheduled", sizes=[[3]])] for r in (2, 3)}
    assert report(ranks | odd).findings[0].culprits == (2, 3)


@pytest.mark.parametrize(
    ("op", "sizes"),
    [
        ("nccl:all_to_all", {0: [[4]], 1: [[6]]}),
        ("nccl:all_to_all_v_single", {0: [[4]], 1: [[6]]}),
        ("gloo:scatter", {0: [[2, 4]], 1: []}),
    ],
)
def test_uneven_operations_may_differ(op: str, sizes: dict[int, list[list[int]]]) -> None:
    """Where each rank gives or takes its own share, sizes say nothing."""
    taken: dict[str, Any] = (
        {"output_sizes": [[4]], "output_dtypes": ["Float"]} if "scatter" in op else {}
    )
    ranks = {r: [entry(1, op=op, sizes=size, **taken), *done(2, 3)] for r, size in sizes.items()}
    assert not report(ranks).is_bad


def test_names_of_one_algorithm_agree() -> None:
    """A list of tensors on one rank and one tensor on the other is the same all_gather."""
    ranks = {0: [entry(1, op="nccl:all_gather")], 1: [entry(1, op="nccl:_all_gather_base")]}
    assert not report(ranks).is_bad


def test_a_disagreement_that_was_survived_does_not_explain_a_later_hang() -> None:
    """It is reported, after the hang."""
    before = {0: entry(2, sizes=[[4]]), 1: entry(2, sizes=[[4]]), 2: entry(2, sizes=[[5]])}
    ranks = {
        r: [entry(1), odd, *done(3, 6), *([] if r == 1 else [entry(7, state="scheduled")])]
        for r, odd in before.items()
    }
    found = report(ranks)
    assert [finding.kind for finding in found.findings] == ["never-arrived", "shape-mismatch"]
    assert [finding.hung for finding in found.findings] == [True, False]


def test_deadlock_over_two_groups() -> None:
    """The device of each holds the one that the other waits for."""
    both = {DP: [0, 1], TP: [0, 1]}
    first: dict[str, Any] = {"state": "scheduled"}
    found = report(
        {
            0: [entry(3, group=DP, record_id=8, **first), entry(4, group=TP, record_id=9, **first)],
            1: [entry(4, group=TP, record_id=8, **first), entry(3, group=DP, record_id=9, **first)],
        },
        both,
    )
    finding = found.findings[0]
    assert (finding.kind, finding.circle) == ("cross-group-deadlock", (0, 1))
    assert "rank 0 is in all_reduce [4] Float, #3 of group dp" in found.sentence


def test_waiting_in_another_group_is_not_the_cause() -> None:
    """3 waits for 2 in one group, 2 for 1 in another, 1 for 0 in a third: 0 it is."""
    groups = {("1", "a"): [0, 1], ("2", "b"): [1, 2], ("3", "c"): [2, 3]}
    names = list(groups)
    found = report(
        {
            0: [entry(1, group=names[0], record_id=1)],
            1: [entry(2, group=names[0], state="scheduled")],
            2: [entry(2, group=names[1], state="scheduled")],
            3: [entry(2, group=names[2], state="scheduled")],
        },
        groups,
    )
    assert [finding.culprits for finding in found.findings] == [(0,)]


def test_two_hangs_in_two_groups_are_two_findings() -> None:
    """Each with its own culprit."""
    groups = {DP: [0, 1], TP: [2, 3]}
    found = report(
        {
            0: [entry(1, group=DP), entry(2, group=DP, state="scheduled")],
            1: [entry(1, group=DP)],
            2: [entry(1, group=TP), entry(2, group=TP, state="scheduled")],
            3: [entry(1, group=TP), entry(2, group=TP, state="scheduled", sizes=[[3]])],
        },
        groups,
    )
    assert sorted(finding.kind for finding in found.findings) == ["never-arrived", "shape-mismatch"]


def test_rings_that_wrapped_are_compared_where_they_overlap() -> None:
    """Ranks remember different windows; what only one remembers disagrees with no other."""
    ranks = {0: done(100, 110), 1: done(104, 110), 2: [entry(98, sizes=[[99]]), *done(105, 110)]}
    assert not report(ranks).is_bad
    hung = {r: [*entries, entry(111, state="scheduled")] for r, entries in ranks.items()}
    hung[1] = done(104, 110)
    assert report(hung).findings[0].culprits == (1,)


def test_windows_that_do_not_overlap() -> None:
    """A rank far behind has no operation in common with the others' rings, and is named."""
    far = [*done(500, 519), entry(520, state="scheduled")]
    found = report({0: far, 1: far, 2: done(1, 30)})
    assert (found.findings[0].kind, found.findings[0].culprits) == ("never-arrived", (2,))


def test_gaps_in_what_is_recorded_are_no_disagreement() -> None:
    """Gloo counts operations that it does not record."""
    seqs = (1, 2, 5, 6)
    assert not report({r: [entry(seq) for seq in seqs] for r in range(3)}).is_bad


def test_entries_of_before_a_restart_are_not_compared() -> None:
    """The ring goes on over a restart, while the groups' numbers begin again."""
    old = [entry(seq, pg_id=0, at_s=seq, sizes=[[7]]) for seq in range(1, 30)]
    new = [entry(seq, pg_id=3, at_s=100 + seq, record_id=50 + seq) for seq in range(1, 4)]
    fresh = [entry(seq, pg_id=0, at_s=100 + seq) for seq in range(1, 4)]
    assert not report({0: old + new, 1: old[:20] + new, 2: fresh}).is_bad


def test_a_rank_left_behind_by_a_restart_has_entered_nothing() -> None:
    """Its high count is of the groups before."""
    old = [entry(seq, pg_id=0, at_s=seq) for seq in range(1, 30)]
    new = [
        *(entry(seq, pg_id=3, at_s=100 + seq, record_id=50 + seq) for seq in (1, 2)),
        entry(3, pg_id=3, at_s=103, record_id=53, state="scheduled"),
    ]
    found = report({0: old + new, 1: old + new, 2: old})
    assert (found.findings[0].kind, found.findings[0].culprits) == ("never-arrived", (2,))


def test_a_member_without_a_dump_is_missing() -> None:
    """The others wait and have all arrived: it is the one that left nothing."""
    members = {WORLD: [0, 1, 2, 3]}
    found = report({r: [*done(1, 4), entry(5, state="scheduled")] for r in (0, 1, 3)}, members)
    assert (found.findings[0].kind, found.findings[0].culprits) == ("rank-died", (2,))
    assert found.findings[0].confidence < 0.9
    assert any("no dump of rank 2" in note for note in found.notes)


def test_missing_dumps_of_a_healthy_job_are_only_noted() -> None:
    """Somebody forgot to copy a file."""
    found = report({r: done(1, 4) for r in (0, 1, 3)}, {WORLD: [0, 1, 2, 3]})
    assert not found.is_bad
    assert any("no dump of rank 2" in note for note in found.notes)


def test_a_rank_that_ended_well_left_its_peers_waiting() -> None:
    """One step less: it did not die, it is done."""
    made = dumps.evidence({r: [*done(1, 4), entry(5, state="scheduled")] for r in (0, 1)})
    made.rank(2).ended, made.rank(2).ended_well = "its process has ended (exit code 0)", True
    for rank in (0, 1):
        record = made.ranks[rank].record
        assert record is not None
        record.ranks_of[WORLD] = (0, 1, 2)
    finding = judge(made).findings[0]
    assert (finding.kind, finding.culprits) == ("never-arrived", (2,))


def test_one_call_more_than_all_other_ranks() -> None:
    """All others have finished: the one that still calls is the odd one."""
    made = dumps.evidence({0: [*done(1, 4), entry(5, state="scheduled", line=60)]})
    record = made.ranks[0].record
    assert record is not None
    record.ranks_of[WORLD] = (0, 1, 2)
    for rank in (1, 2):
        made.rank(rank).ended, made.rank(rank).ended_well = "exited with code 0", True
    finding = judge(made).findings[0]
    assert (finding.kind, finding.culprits) == ("extra-call", (0,))


def test_a_death_comes_before_what_the_survivors_disagree_about() -> None:
    """Peers of a killed rank fail at once and may clean up in different ways."""
    ranks = {0: [*done(1, 4), entry(5, state="scheduled")]}
    ranks[1] = [*done(1, 4), entry(5, op="nccl:barrier", sizes=[], state="scheduled")]
    made = dumps.evidence(ranks, {WORLD: [0, 1, 2]})
    made.rank(2).ended = "its process has ended (SIGKILL)"
    finding = judge(made).findings[0]
    assert (finding.kind, finding.culprits) == ("rank-died", (2,))


def test_a_rank_that_gloo_ended_comes_after_what_the_survivors_disagree_about() -> None:
    """It had entered as well, and received more than it asked for."""
    ranks = {0: [*done(1, 4), entry(5, state="scheduled")]}
    ranks[1] = [*done(1, 4), entry(5, sizes=[[6]], line=60, state="scheduled")]
    made = dumps.evidence(ranks, {WORLD: [0, 1, 2]})
    made.rank(2).ended = "its process is gone"
    made.rank(2).overrun = (24, 16)
    assert judge(made).findings[0].kind == "shape-mismatch"


@pytest.mark.parametrize(
    ("signal", "kind"), [("SIGABRT", "op-mismatch"), ("SIGKILL", "rank-died"), (None, "rank-died")]
)
def test_an_abort_comes_after_what_the_survivors_disagree_about_and_no_other_death(
    signal: str | None, kind: str
) -> None:
    """By the signal, whatever is said of the end: Gloo aborts on a message it has no room for."""
    ranks = {0: [*done(1, 4), entry(5, state="scheduled")]}
    ranks[1] = [*done(1, 4), entry(5, op="nccl:barrier", sizes=[], state="scheduled")]
    made = dumps.evidence(ranks, {WORLD: [0, 1, 2]})
    made.rank(2).ended, made.rank(2).ended_signal = "its process was aborted", signal
    assert judge(made).findings[0].kind == kind


def test_what_several_ranks_say_of_themselves_is_shown_as_they_said_it() -> None:
    made = dumps.evidence({0: [*done(1, 4), entry(5, state="scheduled")]}, {WORLD: [0, 1, 2]})
    made.faults = {1: "ValueError: it is empty", 2: "ValueError: it is empty"}
    for rank in (1, 2):
        made.rank(rank).place = RankPlace(Frame("/home/user/data.py", 3, "load"))
    sentence = judge(made).sentence
    assert sentence is not None
    assert sentence.endswith("it reported ValueError: it is empty; they are in data.py:3 load")


def test_a_rank_that_was_silent_before_it_was_ended_did_not_arrive() -> None:
    """That its monitor process ended it came of that; where it stood is known by a signal."""
    ranks = {r: [*done(1, 4), entry(5, state="scheduled")] for r in (0, 1)}
    made = dumps.evidence(ranks, {WORLD: [0, 1, 2]})
    about = made.rank(2)
    about.ended, about.silent = "it did not answer: soft timeout; the process died", True
    about.place = RankPlace(Frame("/home/user/data.py", 3, "load"))
    found = judge(made)
    assert (found.findings[0].kind, found.findings[0].culprits) == ("never-arrived", (2,))
    assert found.sentence.endswith("it is in data.py:3 load; its monitor process ended it")
    about.no_python_s = 8.4
    assert "it is in data.py:3 load and has run no Python for 8 s" in judge(made).sentence
    about.stopped = True
    assert "it is in data.py:3 load, stopped by a signal" in judge(made).sentence
    about.place = None  # a stopped process takes no signal for its stacks
    found = judge(made)
    assert (found.findings[0].kind, found.findings[0].culprits) == ("never-arrived", (2,))
    assert "it was stopped by a signal" in found.sentence
    about.stopped, about.no_python_s = False, None
    assert judge(made).findings[0].kind == "rank-died"


def test_a_rank_that_waits_in_a_transfer_is_not_blamed_for_one_that_is_elsewhere() -> None:
    """Gloo records no transfers: a pipeline is known from its stacks and the groups' counts."""
    made = dumps.evidence({r: [] for r in range(3)})
    for rank, count in ((0, 5), (1, 4), (2, 4)):
        state = GroupState("0", "default_pg", (0, 1, 2), "gloo", count, 4)
        made.ranks[rank].groups = (state,)
    made.ranks[0].place = RankPlace(Frame("/home/user/comm.py", 30, "give"), inside="send")
    made.ranks[1].place = RankPlace(Frame("/home/user/train.py", 9, "main"))
    made.ranks[2].place = RankPlace(Frame("/home/user/comm.py", 33, "take"), inside="recv")
    found = judge(made)
    assert (found.findings[0].kind, found.findings[0].culprits) == ("never-arrived", (1,))
    assert found.sentence.startswith("rank 1 never entered send #5")
    assert found.findings[0].sides[-1].ranks == (2,)
    for about in made.ranks.values():
        about.groups = ()
    assert judge(made).findings[0].culprits == (1,), "by the stacks alone"
    made.ranks[1].place = made.ranks[2].place
    assert judge(made).findings[0].culprits == (0,), "who differs from most"


def test_seconds_between_snapshots_are_no_hang() -> None:
    """A running job is not looked at everywhere in one instant."""
    ranks = {r: [*done(1, 4), entry(5, state="scheduled")] for r in (0, 1)} | {2: done(1, 4)}
    assert not judge(dumps.evidence(ranks, taken_at=dumps.BEGUN_S + 5.3)).is_bad
    assert judge(dumps.evidence(ranks, taken_at=dumps.BEGUN_S + 65)).is_bad


@pytest.mark.parametrize(("backend", "bad"), [("nccl", True), ("nccl2", False)])
def test_the_second_engine_learns_late_that_an_operation_has_ended(backend: str, bad: bool) -> None:
    """torch's looks once a second: what all entered may have ended unknown to the recorder."""
    op = f"{backend}:all_reduce"
    ranks = {r: [*done(1, 4, op=op), entry(5, op=op, state="scheduled")] for r in (0, 1)}
    assert judge(dumps.evidence(ranks, taken_at=dumps.BEGUN_S + 6)).is_bad == bad
    assert judge(dumps.evidence(ranks, taken_at=dumps.BEGUN_S + 7)).is_bad


def test_what_has_ended_elsewhere_has_ended_where_the_second_engine_learns_no_more() -> None:
    """torch's does not, once the group is being destroyed."""
    op = "nccl2:all_reduce"
    unlearned = [*done(1, 2, op=op), *(entry(n, op=op, state="scheduled") for n in range(3, 8))]
    finding = report({0: unlearned, 1: done(1, 5, op=op)}).findings[0]
    assert (finding.kind, finding.culprits, finding.seq) == ("never-arrived", (1,), 6)


def test_a_snapshot_from_before_the_operation_proves_nothing() -> None:
    """The rank that was looked at first had not entered what others did later."""
    made = dumps.evidence({r: done(1, 50) for r in range(3)})
    early = dumps.evidence({2: done(1, 40)}, {WORLD: [0, 1, 2]}, taken_at=dumps.BEGUN_S + 40.2)
    made.ranks[2] = early.ranks[2]
    assert not judge(made).is_bad


def test_operations_that_timed_out_look_complete_on_gloo() -> None:
    """Its recorder does not distinguish the ends: that others never entered it decides."""
    over = entry(5, op="gloo:all_reduce", state="scheduled", retired=True)
    before = [entry(n, op="gloo:all_reduce", state="scheduled", retired=True) for n in (1, 2, 3, 4)]
    found = report({0: [*before, over], 1: [*before, over], 2: before})
    assert (found.findings[0].kind, found.findings[0].culprits) == ("never-arrived", (2,))


def test_a_recorder_that_learns_of_no_end_is_taken_at_its_last() -> None:
    """Blocking waits have no watchdog: everything stays scheduled for ever."""
    scheduled = [entry(seq, state="scheduled") for seq in range(1, 200)]
    found = report({0: scheduled, 1: scheduled, 2: scheduled[:-1]})
    assert (found.findings[0].seq, found.findings[0].culprits) == (199, (2,))


def test_backends_of_one_group_count_apart() -> None:
    """cpu:gloo,cuda:nccl: two counters under one name."""
    nccl = [*done(1, 4), entry(5, state="scheduled", record_id=100)]
    gloo = [entry(n, op="gloo:barrier", sizes=[], record_id=50 + n) for n in (1, 2)]
    found = report({0: nccl + gloo, 1: nccl + gloo, 2: done(1, 4) + gloo})
    assert (found.findings[0].seq, found.findings[0].culprits) == (5, (2,))
    assert {group.name.backend for group in found.groups} == {"nccl", "gloo"}


def test_groups_of_one_name_with_different_members() -> None:
    """Split groups: rows of a mesh are called alike."""
    row = ("3", "tp")
    made = FlightEvidence("dumps")
    for members in ((0, 1), (2, 3)):
        part = dumps.evidence(
            {
                rank: [*done(1, 3, group=row), entry(4, group=row, state="scheduled")]
                for rank in members
                if rank != 3
            }
            | ({3: done(1, 3, group=row)} if 3 in members else {}),
            {row: members},
        )
        made.ranks |= part.ranks
    found = judge(made)
    assert ("never-arrived", (3,)) in [(f.kind, f.culprits) for f in found.findings]
    assert len(found.groups) == 2


def test_operations_issued_as_one_are_one() -> None:
    """Coalesced operations share a number; a missing one of them is a disagreement."""
    whole = [entry(1, sizes=[[4]]), entry(1, sizes=[[8]]), entry(1, op="nccl:coalesced", sizes=[])]
    assert not report({0: whole, 1: whole}).is_bad
    part = [whole[0], whole[2]]
    assert report({0: whole, 1: whole, 2: part}).findings[0].culprits == (2,)


def test_a_receive_waits_for_its_sender() -> None:
    """Rank 1 receives from 0, which is in a collective that 1 never enters: they wait in turn."""
    found = report(
        {
            0: [*done(1, 4), entry(5, state="scheduled", record_id=9)],
            1: [*done(1, 4), transfer("recv 1<-0", record_id=9)],
        }
    )
    finding = found.findings[0]
    assert finding.kind == "cross-group-deadlock"
    assert "recv from rank 0" in found.sentence


def test_a_receive_from_a_rank_that_does_nothing() -> None:
    """Pipeline stages: the one that did not send is the cause."""
    found = report({0: done(1, 4), 1: [*done(1, 4), transfer("recv 1<-0", record_id=9)]})
    assert (found.findings[0].kind, found.findings[0].culprits) == ("never-arrived", (0,))


def test_matching_transfers_stall() -> None:
    """Both sides are there."""
    found = report(
        {
            0: [*done(1, 4), transfer("send 0->1", record_id=9)],
            1: [*done(1, 4), transfer("recv 1<-0", record_id=9)],
        }
    )
    assert {finding.kind for finding in found.findings} == {"stalled"}


def test_one_rank_that_stalls_and_several_are_told_with_their_verb() -> None:
    evidence = dumps.evidence({rank: [] for rank in range(2)}, {})

    def told(*ranks: int) -> str:
        sides = (Side("party", ranks, "in a barrier"),)
        finding = FlightFinding(FindingKind.STALLED, None, None, "barrier", (), 0.5, sides)
        return sentence(evidence, finding)

    assert told(0) == "rank 0 does not get out of barrier"
    assert told(0, 1) == "ranks 0, 1 do not get out of barrier"


def test_counts_of_groups_stand_in_for_an_empty_recorder() -> None:
    """torch 2.7 to 2.10 record nothing unless switched on, while each group counts anyway."""
    made = dumps.evidence({rank: [] for rank in range(3)}, {})
    for rank, last in ((0, 41), (1, 41), (2, 40)):
        made.ranks[rank].groups = (GroupState("0", "default_pg", (0, 1, 2), "nccl", last, 40),)
    found = judge(made)
    assert (found.findings[0].kind, found.findings[0].culprits) == ("never-arrived", (2,))
    assert any("TORCH_FR_BUFFER_SIZE" in note for note in found.notes)


def test_gloo_members_are_inferred_and_a_note_says_so() -> None:
    """Its recorder knows no members; the default group has all ranks."""
    made = {r: [entry(1, op="gloo:barrier", sizes=[])] for r in range(3)}
    found = report(made, {})
    assert found.groups[0].members == (0, 1, 2)
    assert any("Gloo's recorder" in note for note in found.notes)


def test_ranks_lost_before_shift_the_groups_numbers() -> None:
    """Folders are named by the ranks at launch, groups by those that were left."""
    from ncclops.flight.rank_files import renumber

    made = dumps.evidence({0: done(1, 4), 2: done(1, 4), 3: done(1, 4)}, {})
    for rank in (0, 2, 3):
        made.ranks[rank].groups = (GroupState("0", "default_pg", (0, 1, 2)),)
    renumber(made)
    assert made.ranks[2].groups[0].ranks == (0, 2, 3)
    assert any("at launch" in note for note in made.notes)


def test_a_rank_elsewhere_is_no_waiter_on_the_cpu() -> None:
    """Gloo is late to say that an operation has ended: a stack outside of it says it first."""
    made = dumps.evidence({r: [entry(1, op="gloo:all_reduce", state="scheduled")] for r in (0, 1)})
    for rank in (0, 1):
        made.ranks[rank].place = RankPlace(Frame("/home/user/train.py", 3, "load"))
    assert not judge(made).is_bad


def test_what_a_rank_reported_is_shown() -> None:
    """It raised and did not come; what it raised is on record."""
    ranks = {r: [*done(1, 4), entry(5, state="scheduled")] for r in (0, 1)} | {2: done(1, 4)}
    made = dumps.evidence(ranks, taken_at=dumps.BEGUN_S + 5.01)
    made.faults = {2: "ValueError: bad batch"}
    assert "it reported ValueError: bad batch" in judge(made).sentence


class Name(str):
    """A name whose comparisons are calls of a function, which a profiler counts."""

    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other)


def calls_for(groups: int, *, described: bool) -> int:
    """How often Python calls a function to judge two ranks that wait in so many groups.

    One knows the members of each; the other describes its groups itself, or knows nothing.
    """
    names = [(str(number), f"g{number}") for number in range(groups)]
    entries = [entry(1, group=name, state="scheduled") for name in names]
    made = dumps.evidence({0: entries, 1: entries}, dict.fromkeys(names, (0, 1)))
    record = made.rank(1).record
    assert record is not None
    record.ranks_of.clear()
    if described:
        states = [GroupState(Name(name), desc, (0, 1), "nccl", 1, 0) for name, desc in names]
        made.rank(1).groups = tuple(states)
    calls = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        judge(made)
    finally:
        sys.setprofile(before)
    return calls


@pytest.mark.parametrize("described", [False, True])
def test_twice_as_many_groups_are_twice_the_work(described: bool) -> None:
    assert calls_for(400, described=described) < 3 * calls_for(200, described=described)
