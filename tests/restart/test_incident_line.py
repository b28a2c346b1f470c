"""An incident in one line, as the log of a restart has it."""

from __future__ import annotations

import dataclasses

import pytest
from torch._utils import ExceptionWrapper

from ncclops.restart.incident import Incident
from ncclops.restart.raised import summarise

INCIDENT = Incident(
    iteration=0,
    cause="exception",
    summary="RuntimeError: boom",
    first_faulty_rank=1,
    faulty_ranks=(1,),
    ranks_lost=(),
    exception="RuntimeError: boom",
    traceback=None,
    faults=(),
    world_size_before=3,
    world_size=3,
    initial_rank=0,
    rank_before=0,
    rank=0,
    at=0.0,
    phases_ms={"detect": 0.2, "abort": 13.0, "barrier": 12.4},
)


def test_the_line_names_the_rank_and_what_took_time() -> None:
    assert str(INCIDENT) == (
        "restart in process: rank 1: RuntimeError: boom;"
        " 3 ranks went on after 26 ms (abort 13, barrier 12)"
    )


def test_a_lost_rank_is_named_once() -> None:
    lost = dataclasses.replace(
        INCIDENT,
        summary="rank 1: the process died",
        detail="the process died",
        ranks_lost=(1, 2),
        world_size=1,
    )
    assert str(lost).startswith("restart in process: rank 1: the process died; lost 1, 2; 1 rank")


@pytest.mark.parametrize(
    ("original", "line"),
    [
        (KeyError("shard-13"), "KeyError: 'shard-13'"),
        (ValueError("two\nlines"), "ValueError: two lines"),
        (RuntimeError(), "RuntimeError"),
    ],
)
def test_an_exception_of_a_data_loaders_worker_is_shown_without_its_traceback(
    original: Exception, line: str
) -> None:
    """Which torch makes the message of the one that it raises in the main process."""
    try:
        raise original
    except Exception:  # noqa: BLE001 - as torch does
        wrapper = ExceptionWrapper(where="in DataLoader worker process 0")
    with pytest.raises(type(original)) as caught:
        wrapper.reraise()
    assert summarise(caught.value) == f"{line} (in DataLoader worker process 0)"
    assert summarise(original) == line
