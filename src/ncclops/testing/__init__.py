"""Faults for wrapped functions, in tests: real ranks, real faults, and what became of them.

A test names a function that is wrapped with ``ncclops.restart.Wrapper``, how many ranks run it and
which faults strike where; it gets back what each rank returned and every incident::

    def test_an_exception_on_one_rank_restarts_both(ncclops_job: JobFactory) -> None:
        undisturbed = ncclops_job(train, world_size=2).run()
        fault = Fault.exception(rank=1, at="step", n=3)
        result = ncclops_job(train, world_size=2, faults=[fault]).run()
        (incident,) = result.incidents
        assert incident.faulty_ranks == (1,)
        assert result.values == undisturbed.values

``ncclops_job`` is a fixture of the pytest plugin that comes with ncclops (the extra ``testing``
installs pytest); without pytest, ``with JobFactory(directory) as job:`` is the same.
``place("step")`` in the function names a place; the core's own are ``CORE_PLACES``.
``note("loss", value=loss)`` sends values to the test. Both cost one comparison in a rank that no
harness has started.

Each rank is a process, forked from one that has imported torch; the job has a deadline, after which
the stacks of all ranks are in the error; and when it has ended, nothing of it is left or the test
fails. See ``docs/testing.md``.

Importing this package imports neither torch nor pytest.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ncclops.restart._observer import CORE_PLACES, place

if TYPE_CHECKING:
    from ncclops.testing.errors import (
        DeadlineExceeded,
        FaultDidNotStrike,
        HarnessError,
        InjectedFault,
        LeftBehind,
        RankFailed,
    )
    from ncclops.testing.faults import Fault, FaultKind
    from ncclops.testing.interpreter import Interpreter
    from ncclops.testing.job import Job, JobFactory
    from ncclops.testing.notes import note
    from ncclops.testing.results import JobResult, Note, RankResult, Strike

__all__ = [
    "CORE_PLACES",
    "DeadlineExceeded",
    "Fault",
    "FaultDidNotStrike",
    "FaultKind",
    "HarnessError",
    "InjectedFault",
    "Interpreter",
    "Job",
    "JobFactory",
    "JobResult",
    "LeftBehind",
    "Note",
    "RankFailed",
    "RankResult",
    "Strike",
    "note",
    "place",
]

_HOMES = {
    "DeadlineExceeded": "errors",
    "Fault": "faults",
    "FaultDidNotStrike": "errors",
    "FaultKind": "faults",
    "HarnessError": "errors",
    "InjectedFault": "errors",
    "Interpreter": "interpreter",
    "Job": "job",
    "JobFactory": "job",
    "JobResult": "results",
    "LeftBehind": "errors",
    "Note": "results",
    "RankFailed": "errors",
    "RankResult": "results",
    "Strike": "results",
    "note": "notes",
}


def __getattr__(name: str) -> Any:
    """A public name, from the module that holds it: a training script needs ``place`` alone."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
