"""What restarts in place may leave behind, and what is counted."""

from __future__ import annotations

import threading
from dataclasses import replace

from ncclops.profiles import Growth
from ncclops.worker.resources import Balance, Usage, measure

EMPTY = Usage(gpu_memory_gib=None, gpu_tensors_gib=None, fds=20, threads=8, process_groups=0)
LOADED = Usage(gpu_memory_gib=1.5, gpu_tensors_gib=0.0, fds=90, threads=150, process_groups=0)
BUDGET = Growth(gpu_memory_gib=2.0, fds=50, threads=10, process_groups=0)


def balance(*starts: Usage) -> tuple[Balance, str | None]:
    result, exceeded = Balance(BUDGET), None
    for usage in starts:
        assert exceeded is None
        exceeded = result.start(usage)
    return result, exceeded


def test_what_comes_once_and_stays_is_no_growth() -> None:
    """The first iteration loads libraries, makes a CUDA context, starts pools of threads."""
    kept, exceeded = balance(EMPTY, LOADED, LOADED, LOADED)
    assert exceeded is None
    assert kept.grown == {}


def test_growth_from_one_iteration_to_the_next_is_seen_before_it_matters() -> None:
    kept, exceeded = balance(EMPTY, LOADED, replace(LOADED, fds=100))
    assert exceeded is None
    assert kept.grown == {"fds": 10}


def test_small_growth_adds_up_to_the_budget() -> None:
    steps = [replace(LOADED, fds=90 + 20 * n) for n in range(4)]
    _, exceeded = balance(EMPTY, *steps)
    assert exceeded is not None
    assert "open files grew by 60" in exceeded
    assert "budget of 50" in exceeded


def test_each_kind_has_its_budget() -> None:
    for change, words in (
        ({"threads": 161}, "threads grew by 11"),
        ({"gpu_memory_gib": 3.6}, "GPU memory (GiB) grew by 2.1"),
        ({"process_groups": 1}, "1 process groups of an interrupted iteration"),
    ):
        _, exceeded = balance(EMPTY, LOADED, replace(LOADED, **change))
        assert exceeded is not None
        assert words in exceeded


def test_a_model_that_is_still_on_the_gpu_is_found_at_the_first_restart() -> None:
    """The next iteration would run out of memory."""
    held = replace(LOADED, gpu_memory_gib=61.5, gpu_tensors_gib=60.0)
    kept, exceeded = balance(EMPTY, held)
    assert exceeded is not None
    assert "still hold 60 GiB" in exceeded
    assert kept.grown["gpu_tensors_gib"] == 60.0


def test_files_and_threads_of_this_process_are_counted() -> None:
    before = measure()
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    with open("/dev/null") as one, open("/dev/null") as two:  # noqa: PTH123
        thread.start()
        during = measure()
        assert one.fileno() != two.fileno()
    done.set()
    thread.join()
    assert during.fds - before.fds == 2
    assert during.threads - before.threads == 1
    assert before.gpu_memory_gib is None, "no CUDA context was made to look"
