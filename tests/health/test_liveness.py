"""What each node makes of its looks, and all nodes together."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

from ncclops.health.evidence import Reading
from ncclops.health.hang import HangFinding, HangLimits
from ncclops.health.liveness import Elsewhere, Liveness, NodeView

# Looks are 30 s apart with these.
LIMITS = HangLimits(hang=timedelta(minutes=10), quiet=timedelta(minutes=30))
LOOK_S = 30.0

Read = Callable[[int, int], Reading]


def waits(rank: int, look: int) -> Reading:
    """In a collective for good."""
    return Reading(
        rank=rank, steps=9, tick=look, main_beat=5, enqueued=7, completed=6, cpu_s=60.0 + look * 9
    )


def trains(rank: int, look: int) -> Reading:
    counted = 10 * look
    return Reading(rank=rank, steps=look, tick=look, enqueued=counted, completed=counted)


def sleeps(rank: int, look: int) -> Reading:
    """Idle outside of collectives."""
    return Reading(rank=rank, steps=9, tick=look, main_beat=5, enqueued=7, completed=7, cpu_s=60.0)


def has_ended(rank: int, look: int) -> Reading:
    """The script is over, one collective before the one in which others wait."""
    return Reading(rank=rank, steps=9, tick=look, enqueued=6, completed=6, ended=True)


def saves(rank: int, look: int) -> Reading:
    """In a declared phase for half an hour more than the long window."""
    return Reading(
        rank=rank,
        steps=9,
        tick=look,
        main_beat=5,
        cpu_s=60.0,
        phase="checkpoint",
        phase_age=timedelta(seconds=look * LOOK_S),
        phase_limit=timedelta(minutes=60),
    )


class Cluster:
    """Nodes with a rank each, whose views of one look arrive before the next."""

    def __init__(self, *reads: Read) -> None:
        self.reads = list(reads)
        self.nodes = [Liveness(LIMITS) for _ in reads]
        self.views: dict[int, NodeView] = {}
        self.now = 0.0
        self.looks = 0

    def look(self, after_s: float = LOOK_S) -> list[int]:
        """The nodes that act after one more look."""
        self.now += after_s
        self.looks += 1
        found = [
            node.look([read(rank, self.looks)], self.now)
            for rank, (node, read) in enumerate(zip(self.nodes, self.reads, strict=True))
        ]
        acting = [
            rank
            for rank, (node, findings) in enumerate(zip(self.nodes, found, strict=True))
            if node.verdict(findings, self.seen_from(rank)) is not None
        ]
        self.views = {
            rank: node.view(findings)
            for rank, (node, findings) in enumerate(zip(self.nodes, found, strict=True))
        }
        return acting

    def seen_from(self, node: int) -> Elsewhere:
        others = [view for rank, view in self.views.items() if rank != node]
        return Elsewhere.of(others, silent=len(self.nodes) - 1 - len(others))

    def looks_until_somebody_acts(self, most: int = 200) -> tuple[int, list[int]] | None:
        for look in range(most):
            if acting := self.look():
                return look, acting
        return None


def minutes(looks: int) -> float:
    return looks * LOOK_S / 60


def test_one_node_acts_as_soon_as_the_window_has_passed() -> None:
    found = Cluster(waits).looks_until_somebody_acts()
    assert found is not None
    assert (10 <= minutes(found[0]) <= 11, found[1]) == (True, [0])


def test_over_several_nodes_one_acts_and_hardly_later() -> None:
    found = Cluster(waits, waits, waits).looks_until_somebody_acts()
    assert found is not None
    assert (10 <= minutes(found[0]) <= 13, found[1]) == (True, [0])


def test_the_node_of_the_rank_to_blame_acts() -> None:
    found = Cluster(waits, sleeps).looks_until_somebody_acts()
    assert found is not None
    assert (30 <= minutes(found[0]) <= 33, found[1]) == (True, [1])


def test_the_node_acts_on_whose_rank_the_script_has_ended_too_early() -> None:
    found = Cluster(waits, has_ended, waits).looks_until_somebody_acts()
    assert found is not None
    assert (10 <= minutes(found[0]) <= 13, found[1]) == (True, [1])


def test_a_rank_on_which_the_script_has_ended_is_not_waited_for() -> None:
    assert Cluster(trains, has_ended).looks_until_somebody_acts() is None
    found = Cluster(has_ended, sleeps).looks_until_somebody_acts()
    assert found is not None
    assert found[1] == [1]


def test_nobody_acts_while_a_rank_of_any_node_works() -> None:
    assert Cluster(waits, trains, waits).looks_until_somebody_acts() is None


def test_ranks_may_wait_for_a_declared_phase_of_another_node() -> None:
    found = Cluster(saves, sleeps, waits).looks_until_somebody_acts(most=119)
    assert found is None, "59 minutes of the hour that was declared"


def test_a_node_of_which_nothing_is_known_may_be_at_work() -> None:
    node = Liveness(LIMITS)
    for look in range(200):
        findings = node.look([waits(0, look)], look * LOOK_S)
        assert node.verdict(findings, Elsewhere(ranks=4)) is None


def test_time_in_which_the_machine_stood_still_is_no_evidence() -> None:
    cluster = Cluster(trains)
    for _ in range(3):
        assert cluster.look() == []
    cluster.looks -= 1  # at the first look afterwards nothing has moved yet
    assert cluster.look(after_s=3 * 3600) == []
    cluster.reads = [waits]
    found = cluster.looks_until_somebody_acts()
    assert found is not None, "and what hangs afterwards is found"
    assert 9 <= minutes(found[0]) <= 11


def test_a_shorter_limit_holds_from_the_next_look_on() -> None:
    cluster = Cluster(waits)
    cluster.nodes[0].act_before(timedelta(minutes=2))
    found = cluster.looks_until_somebody_acts()
    assert found is not None
    assert 2 <= minutes(found[0]) <= 3


def test_a_view_has_what_bears_on_other_nodes() -> None:
    works = HangFinding(rank=0, state="working")
    stuck = HangFinding(rank=1, state="stuck")
    saving = HangFinding(rank=2, state="working", phase="checkpoint")
    view = NodeView.of([works, stuck, saving])
    assert (view.ranks, view.findings, view.has_stuck_ranks) == (3, (stuck, saving), True)
    assert not NodeView.of([works, saving]).has_stuck_ranks


def test_a_node_tells_what_others_do_not_know() -> None:
    works, trains = NodeView(ranks=4), NodeView(ranks=4, shows_steps=True)
    stuck = NodeView(ranks=4, findings=(HangFinding(rank=1, state="stuck"),))
    assert not works.is_news(None, [works])
    assert stuck.is_news(None, [works])
    assert works.is_news(None, [stuck]), "all answer"
    assert not works.is_news(works, [stuck]), "once"
    assert trains.is_news(None, [works])
    assert not trains.is_news(None, [trains]), "one is enough"
    assert works.is_news(trains, []), "it starts again"
