"""What NCCL does in a thread, and may be left in the middle of."""

from __future__ import annotations

import queue
import threading

from ncclops.restart._groups.attempts import Attempt

WITHIN_S = 30.0


def attempt(act: threading.Event, error: str = "") -> tuple[Attempt, queue.Queue[str]]:
    """One that fails with ``error``, if with anything, when ``act`` is set; what is called then."""
    called = queue.Queue[str]()

    def wait() -> None:
        assert act.wait(WITHIN_S)
        if error:
            raise RuntimeError(error)

    return Attempt("a thread", wait, called.put, lambda: called.put("ended")), called


def test_it_says_how_it_has_ended() -> None:
    over = threading.Event()
    over.set()
    for error, said in (("", ""), ("in NCCL", "RuntimeError: in NCCL")):
        made, called = attempt(over, error)
        assert called.get(timeout=WITHIN_S) == said
        made.leave()  # in vain: others have failed, say
        assert called.get(timeout=WITHIN_S) == "ended"


def test_one_that_was_left_ends_what_it_comes_to() -> None:
    over = threading.Event()
    made, called = attempt(over)
    made.leave()
    assert called.empty()
    over.set()
    assert called.get(timeout=WITHIN_S) == "ended"
