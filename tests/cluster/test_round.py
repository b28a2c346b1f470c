"""What a node knows of one round, of the job's store, and what its rendezvous process reports."""

from __future__ import annotations

import msgspec
import pytest

from ncclops.cluster import messages
from ncclops.cluster.job_store import JobStore
from ncclops.cluster.messages import Message
from ncclops.cluster.round import Round


@pytest.mark.parametrize(
    "message",
    [
        messages.Tick(),
        messages.Connected(),
        messages.Waiting(["n0", "n1"], begun=True),
        messages.Met(1, 4),
        messages.Gathered([{"name": "n0", "clock_offset_s": 0.1}]),
        messages.Logged({"kind": "stop", "node": 1}),
        messages.NoRound("nodes 1, 2 did not come"),
        messages.Unneeded(),
        messages.StoreLost("Broken pipe"),
        messages.ProcessEnded(),
    ],
)
def test_a_message_is_one_line_there_and_back(message: Message) -> None:
    line = messages.encode(message)
    assert line.count(b"\n") == 1
    assert messages.decode(line) == message


@pytest.mark.parametrize("line", [b"{}", b'{"is": "unheard-of"}', b'{"is": "met", "rank": "one"}'])
def test_what_is_no_message_is_refused(line: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        messages.decode(line)


class TestRound:
    def test_a_new_round_starts_without_the_state_of_the_last(self) -> None:
        last, following = Round(0, 4), Round(1, 4)
        last.meet(2, 3)
        last.state.take({"kind": "stop", "node": 0})
        last.no_round = "late"
        assert following.rank is None
        assert (following.state.size, following.state.stop) == (4, None)
        assert not following.is_over_before_start

    @pytest.mark.parametrize(
        "record",
        [
            {"kind": "refused", "node": 0, "names": [], "lines": []},
            {"kind": "lost", "node": 1, "why": "silent"},
            {"kind": "stop", "node": 1},
        ],
    )
    def test_what_ends_a_round_before_its_start(self, record: dict[str, object]) -> None:
        current = Round(0, 2)
        current.meet(0, 2)
        current.state.take({"kind": "waiting", "missing": [1], "here": ["n0"]})
        assert not current.is_over_before_start
        current.state.take(record)
        assert current.is_over_before_start

    def test_the_first_that_is_left_decides(self) -> None:
        current = Round(0, 2)
        assert not current.is_ours_to_decide, "the nodes have not met"
        current.meet(1, 2)
        assert not current.is_ours_to_decide
        current.state.take({"kind": "lost", "node": 0, "why": "silent"})
        assert current.is_ours_to_decide

    def test_only_the_first_failure_comes_with_its_lines(self) -> None:
        current = Round(0, 2)
        assert [current.is_first_failure() for _ in range(3)] == [True, False, False]

    def test_a_record_that_is_on_its_way_is_not_posted_again(self) -> None:
        current = Round(0, 2)
        point = {"kind": "stop-point", "round": 0, "way": "step", "point": 7}
        assert current.is_new_stop(point)
        assert not current.is_new_stop(point)
        assert current.is_new_stop({**point, "round": 1})
        assert current.is_new_stop({"kind": "stop-go", "round": 1})


def test_a_store_is_lost_once_and_for_the_first_reason() -> None:
    reasons: list[str] = []
    job_store = JobStore("n0:29500", reasons.append)
    job_store.answered()
    job_store.lose("Broken pipe")
    job_store.lose("no answer for 30s")
    assert reasons == ["Broken pipe"]
    assert job_store.lost == "the job's store at n0:29500 is lost (Broken pipe)"
    assert (job_store.is_ours, job_store.pids) == (False, set())
