"""The agents' log over a real store, who watches whom, and how a round stands."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from ncclops.cluster.heartbeat import HeartbeatWatch, Silence, Unread, watched_by
from ncclops.cluster.records import (
    AtWorkRecord,
    BackRecord,
    ByeRecord,
    DecisionRecord,
    EndedRecord,
    LostRecord,
    SilentRecord,
    StopVoteRecord,
    UnknownRecord,
)
from ncclops.cluster.round_state import RoundState
from ncclops.cluster.shared_log import SharedLog
from ncclops.decision.deciding import AttemptDecision
from ncclops.decision.node_end import NodeEnd

SHORTLY = timedelta(milliseconds=50)
LIMIT = timedelta(seconds=60)


@pytest.fixture
def server() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, None, True, LIMIT, wait_for_workers=False)


def another(server: dist.TCPStore) -> Any:
    return dist.TCPStore("127.0.0.1", server.port, None, False, LIMIT, wait_for_workers=False)


class TestLog:
    def test_all_readers_see_all_records_in_one_order(self, server: dist.TCPStore) -> None:
        def write(writer: int) -> None:
            log = SharedLog(another(server), "job")
            for number in range(20):
                log.post(StopVoteRecord(node=writer, number=number, at=0))

        threads = [threading.Thread(target=write, args=(writer,)) for writer in range(4)]
        for thread in threads:
            thread.start()
        seen = []
        for _ in range(2):
            log = SharedLog(another(server), "job")
            seen.append([log.read(number, LIMIT) for number in range(80)])
        for thread in threads:
            thread.join(LIMIT.total_seconds())
        assert seen[0] == seen[1]
        for writer in range(4):
            own = [
                each.number
                for each in seen[0]
                if isinstance(each, StopVoteRecord) and each.node == writer
            ]
            assert own == list(range(20))

    def test_nothing_within_the_time_is_none(self, server: dist.TCPStore) -> None:
        log = SharedLog(another(server), "job")
        assert log.read(0, SHORTLY) is None
        log.post(ByeRecord(node=1))
        assert log.read(0, SHORTLY) == ByeRecord(node=1)

    def test_what_another_version_has_written_hides_nothing(self, server: dist.TCPStore) -> None:
        server.set("job/log/0", '{"kind": "promoted", "node": 1}')
        log = SharedLog(another(server), "job")
        assert log.post(ByeRecord(node=1)) == 1
        assert log.read(0, SHORTLY) == UnknownRecord()
        assert log.read(1, SHORTLY) == ByeRecord(node=1)

    def test_a_record_that_is_posted_twice_is_there_twice(self, server: dist.TCPStore) -> None:
        """A node that was late may be late again."""
        log = SharedLog(another(server), "job")
        assert [log.post(BackRecord(node=1)) for _ in range(2)] == [0, 1]
        assert [log.read(number, SHORTLY) for number in (0, 1)] == [BackRecord(node=1)] * 2

    def test_rounds_do_not_see_each_other(self, server: dist.TCPStore) -> None:
        SharedLog(another(server), "round1").post(ByeRecord(node=1))
        assert SharedLog(another(server), "round2").read(0, SHORTLY) is None


class TestPulse:
    def test_the_first_watches_all_and_all_watch_the_first(self) -> None:
        assert watched_by(0, {0, 1, 2, 3}) == [1, 2, 3]
        assert watched_by(2, {0, 1, 2, 3}) == [0]
        assert watched_by(1, {1, 2, 3}) == [2, 3]  # 0 is lost, and 1 the first that is left
        assert watched_by(1, {1}) == []

    def test_a_counter_that_stands_still_for_too_long_is_lost(self) -> None:
        watch = HeartbeatWatch(10)
        assert watch.look(0, {1: 5, 2: 5}) == []
        assert watch.look(9, {1: 6, 2: 5}) == []
        assert watch.look(10, {1: 7, 2: 5}) == [2]

    def test_a_rank_that_is_back_has_the_whole_time_again(self) -> None:
        watch = HeartbeatWatch(10)
        watch.look(0, {1: 5, 2: 5})
        assert watch.look(10, {1: 5, 2: 6}) == [1]
        assert watch.look(11, {1: 5, 2: 7}) == []  # it is back, and has sent nothing yet
        assert watch.look(21, {1: 5, 2: 8}) == [1]
        watch.look(25, {})  # others watch it
        assert watch.look(40, {2: 8}) == []

    def test_silence_is_counted_only_while_the_watcher_runs(self) -> None:
        silence = Silence(pause_s=1.0, now=0.0)
        assert [silence.look(now) for now in (1.0, 2.0)] == [1.0, 2.0]
        assert silence.look(60.0) == 0.0  # we stood still: what was said is yet to be read
        silence.received(60.5)
        assert [silence.look(now) for now in (61.0, 62.0, 63.0)] == [0.5, 1.5, 2.5]

    def test_how_long_the_watcher_stood_still_is_known_for_a_while(self) -> None:
        silence = Silence(pause_s=1.0, now=0.0)
        assert silence.stood_still(1.0) == 0.0
        assert silence.stood_still(21.0) == 21.0  # before the first look after it
        assert silence.look(21.1) == 0.0
        assert silence.stood_still(22.0) == pytest.approx(21.1)
        for now in (22.1, 23.1, 24.1):
            silence.look(now)
        assert silence.stood_still(24.5) == 0.0

    def test_a_watcher_that_was_stopped_itself_takes_no_running_node_for_lost(self) -> None:
        watch = HeartbeatWatch(10)
        watch.look(0, {1: 5})
        assert watch.look(100, {1: 60}) == []

    def test_an_agent_is_silent_once_it_has_read_nothing_for_so_long(self) -> None:
        agent = Unread(10, pause_s=5)
        looks = [(0, 700), (5, 700), (9, 1400), (10, 2100), (11, 2800)]
        assert [agent.look(*look) for look in looks] == [False, False, False, True, False]
        assert agent.is_silent
        assert agent.look(12, 0)
        assert not agent.is_silent

    def test_time_in_which_the_watcher_stood_still_says_nothing_of_the_agent(self) -> None:
        agent = Unread(10, pause_s=5)
        assert not any(agent.look(*look) for look in [(0, 700), (100, 700), (105, 1400)])

    def test_one_that_reads_now_and_then_is_not_silent(self) -> None:
        agent = Unread(10, pause_s=5)
        looks = [(0, 700), (8, 1400), (9, 700), (18, 1400), (20, 700)]
        assert not any(agent.look(*look) for look in looks)


class TestStanding:
    def test_the_first_decision_is_the_decision(self) -> None:
        round_state = RoundState(2)
        first = AttemptDecision(outcome="completed", exit_code=0, reason="4 workers exited 0")
        other = AttemptDecision(outcome="failed", exit_code=1, reason="a worker failed")
        assert round_state.take(DecisionRecord(node=0, decision=first))
        assert not round_state.take(DecisionRecord(node=1, decision=other))
        assert round_state.decision == first

    def test_when_the_one_that_decides_is_lost_the_next_one_does(self) -> None:
        round_state = RoundState(3)
        assert round_state.decider() == 0
        round_state.take(LostRecord(node=0, why="killed"))
        assert round_state.decider() == 1

    def test_when_the_one_that_decides_has_left_the_next_one_does(self) -> None:
        """It was asked to stop, and needs no decision."""
        round_state = RoundState(2)
        round_state.take(ByeRecord(node=0))
        assert round_state.decider() == 1

    def test_lost_idle_and_departed_nodes_are_not_waited_for(self) -> None:
        round_state = RoundState(4, idle=frozenset({3}))
        round_state.take(EndedRecord(node=0, end=NodeEnd(name="n0")))
        round_state.take(LostRecord(node=1, why="cut off"))
        assert not round_state.all_ended()
        round_state.take(EndedRecord(node=2, end=NodeEnd(name="n2")))
        assert round_state.all_ended()
        round_state.take(ByeRecord(node=2))
        assert not round_state.take(LostRecord(node=2, why="silent"))

    def test_a_node_works_unless_it_is_lost_done_or_waits_to_return(self) -> None:
        round_state = RoundState(6, idle=frozenset({5}))
        round_state.take(LostRecord(node=1, why="cut off"))
        round_state.take(EndedRecord(node=2, end=NodeEnd(name="n2")))
        round_state.take(ByeRecord(node=3))
        round_state.take(AtWorkRecord(node=4, at_work=False))
        assert [node for node in range(6) if round_state.works(node)] == [0]
        round_state.take(AtWorkRecord(node=4, at_work=True))
        assert round_state.works(4)

    def test_a_node_whose_agent_does_not_answer_is_not_waited_for_and_decides_nothing(self) -> None:
        round_state = RoundState(2)
        round_state.take(EndedRecord(node=1, end=NodeEnd(name="n1")))
        assert round_state.not_ended() == {0}
        round_state.take(SilentRecord(node=0, silent=True))
        assert (round_state.decider(), round_state.all_ended()) == (1, True)
        assert round_state.node_ends()[0].lost == "its agent does not answer"
        round_state.take(SilentRecord(node=0, silent=False))
        assert (round_state.decider(), round_state.all_ended()) == (0, False)

    def test_one_that_was_only_late_is_back(self) -> None:
        round_state = RoundState(2)
        round_state.take(LostRecord(node=1, why="silent"))
        assert round_state.take(BackRecord(node=1))
        assert round_state.living == [0, 1]
