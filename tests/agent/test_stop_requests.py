"""Which signals count as a request to stop, and which as the second one, that waits for nothing."""

from __future__ import annotations

import asyncio
import os
import signal
from datetime import timedelta

import pytest

from ncclops.agent import supervisor
from ncclops.agent.condition import Condition
from ncclops.agent.pulse import Pulse
from ncclops.agent.stop_requests import StopRequests
from ncclops.agent.supervisor import FORWARDED
from ncclops.decision.outcome import StopRequest


@pytest.mark.parametrize(
    ("came", "requests"),
    [
        (["direct", "forwarded"], 1),
        (["forwarded", "direct"], 1),
        (["forwarded, direct"], 1),  # the kernel keeps one of a kind
        (["forwarded", "forwarded"], 2),
        (["direct", "direct"], 1),  # sent twice at once
        (["direct", "forwarded", "another direct"], 1),
        (["direct", "later", "direct"], 2),
        (["direct", "forwarded", "later", "direct", "forwarded"], 2),
    ],
)
def test_a_signal_to_all_processes_of_a_job_is_one_request(
    came: list[str], requests: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pulse, taken = Pulse(), list[StopRequest]()
    monkeypatch.setattr(supervisor, "SAME_REQUEST_S", 1e6)  # however slow the machine is

    async def take() -> StopRequests:
        stop = StopRequests(
            Condition(),
            timedelta(seconds=9),
            on_request=taken.append,
            pass_on=lambda _: None,
            forwarded=lambda: pulse.forwarded,
        )
        stop.take(lambda: None)
        for ways in came:
            if ways == "later":
                monkeypatch.setattr(supervisor, "SAME_REQUEST_S", 0)
                continue
            if "forwarded" in ways:
                pulse.count_forwarded()
            os.kill(os.getpid(), signal.SIGHUP if "another" in ways else signal.SIGTERM)
            await asyncio.sleep(0.05)
        return stop

    taken_over = (*FORWARDED, signal.SIGCHLD, signal.SIGTSTP, signal.SIGCONT)
    before = {signum: signal.getsignal(signum) for signum in taken_over}
    try:
        stop = asyncio.run(take())
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
    assert stop.signals == len(taken) == requests
    assert stop.hurry == (requests > 1)
