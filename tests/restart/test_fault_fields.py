"""What an incident says in fields, so that nothing has to be read out of a sentence."""

from __future__ import annotations

import dataclasses
import json
import traceback
from typing import Any

import pytest
from torch._utils import ExceptionWrapper
from torch.multiprocessing.spawn import ProcessRaisedException

from ncclops.restart._process import release
from ncclops.restart.agreement import Agreement
from ncclops.restart.attribution import Causes, ExceededTimeout, Fault, FaultKind
from ncclops.restart.exception import Escalation, PeersAbsent, RestartAbort
from ncclops.restart.incident import describe
from ncclops.restart.raised import (
    Raised,
    append_to_chain,
    chain_of,
    described,
    summarise,
    text_of,
)
from ncclops.restart.state import State


def fault_of(error: BaseException, rank: int = 1) -> Fault:
    """The fault of ``rank``, as it comes out of the store."""
    try:
        raise error
    except BaseException as raised:  # noqa: BLE001 - what a rank does with what it raises
        kind = FaultKind.EXCEPTION if isinstance(raised, Exception) else FaultKind.LEFT
        fault = Fault.of_exception(raised, kind, initial_rank=rank, rank=rank, iteration=0)
    stored = Fault.from_json(fault.to_json())
    assert stored == fault
    return stored


def test_a_raised_exception_has_its_class_its_bases_and_its_place() -> None:
    raised = fault_of(ModuleNotFoundError("no module named x")).raised
    assert raised is not None
    assert raised.name == "ModuleNotFoundError"
    assert raised.is_a(ImportError)
    assert not raised.is_a(KeyError, OSError)
    assert (raised.file, raised.function) == (__file__, "fault_of")


@dataclasses.dataclass(frozen=True)
class FrozenError(Exception):
    """Nothing can be set on it, not by Python's own ``contextlib`` either."""

    code: int


def test_an_exception_that_cannot_be_changed_is_chained_and_released() -> None:
    try:
        raise FrozenError(3)
    except FrozenError as caught:
        error = caught
    earlier = ValueError("earlier")
    append_to_chain(error, earlier)
    release([error])
    assert error.__cause__ is earlier
    assert error.__traceback__ is None


@pytest.mark.parametrize(
    ("first_faulty", "linked"),
    [(0, ["own"]), (1, ["own", "of rank 1"])],
)
def test_a_rank_that_failed_in_anothers_wake_leaves_with_both_exceptions(
    first_faulty: int, linked: list[str]
) -> None:
    """As on NCCL, where a rank may raise when its peer has failed."""
    causes = Causes(initial_rank=0)
    own = ValueError("own")
    causes.note(own)
    faults = [fault_of(own, rank=0), fault_of(KeyError("of rank 1"), rank=1)]
    causes.note_faults(faults if first_faulty == 0 else faults[::-1])
    causes.note(limit := RestartAbort("no further restart"))
    _, *links = chain_of(causes.with_root_cause(limit))
    assert len(links) == len(linked)
    assert all(text in str(link) for text, link in zip(linked, links, strict=True))


class UnspeakableError(Exception):
    """Its text cannot be had."""

    def __str__(self) -> str:
        raise RuntimeError("of __str__")


def test_an_exception_that_has_no_text_is_a_fault_like_any_other() -> None:
    fault = fault_of(UnspeakableError())
    assert fault.raised is not None
    assert fault.raised.name == "UnspeakableError"
    assert "UnspeakableError" in fault.summary


def test_a_long_chain_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a function leaves it that has retried many times: each link has a traceback."""
    links, read = 100, 0
    error = ValueError("the first")
    for number in range(links):
        try:
            raise ValueError(number) from error
        except ValueError as later:
            error = later
    initialise = traceback.TracebackException.__init__

    def counting(self: traceback.TracebackException, *args: Any, **kwargs: Any) -> None:
        nonlocal read
        read += 1
        initialise(self, *args, **kwargs)

    monkeypatch.setattr(traceback.TracebackException, "__init__", counting)
    fault_of(error)
    assert 0 < read < 10 * links


def test_a_syntax_error_is_at_the_line_that_cannot_be_parsed() -> None:
    with pytest.raises(SyntaxError) as caught:
        compile("a = 1\nb =", "train.py", "exec")
    raised = Raised.of(caught.value)
    assert (raised.name, raised.file, raised.line) == ("SyntaxError", "train.py", 2)


def test_of_an_exception_of_a_data_loaders_worker_the_original_is_described() -> None:
    try:
        raise KeyError("shard-13")
    except KeyError:
        wrapper = ExceptionWrapper(where="in DataLoader worker process 0")
    with pytest.raises(KeyError) as caught:
        wrapper.reraise()
    raised = Raised.of(caught.value)
    assert (raised.name, raised.file) == ("KeyError", __file__)
    assert raised.is_a(LookupError)


def test_of_an_exception_of_a_process_that_mp_spawn_has_started_the_original_is_described() -> None:
    try:
        raise KeyError("shard-13")
    except KeyError:
        original = traceback.format_exc()
    # As torch.multiprocessing.spawn words it, in ProcessContext.join.
    said = f"\n\n-- Process 1 terminated with the following error:\n{original}"
    error = ProcessRaisedException(said, 1, 4711)
    raised = Raised.of(error)
    assert (raised.name, raised.file) == ("KeyError", __file__)
    assert raised.is_a(LookupError)
    assert summarise(error) == "KeyError: 'shard-13' (in process 1 of mp.spawn)"


@pytest.mark.parametrize("text", ["Caught A in ", "Caught A in b. Original Traceback ", "  x\n"])
def test_a_text_of_a_megabyte_is_read_in_time_that_grows_with_its_length(text: str) -> None:
    """Otherwise this takes hours."""
    begin = "Caught KeyError in thread 1.\nOriginal Traceback "
    assert len(summarise(RuntimeError(begin + text * 30_000))) == 300


def test_an_escalation_travels_with_the_fault_to_every_ranks_incident() -> None:
    escalation = Escalation("respawn", "open files grew by 300", ("OSError", "train.py:3"))
    fault = fault_of(RestartAbort("enough", escalation=escalation))
    assert fault.escalation == escalation
    assert fault.stops_restarting
    other = fault_of(RuntimeError("closed by peer"), rank=0)
    agreement = Agreement(0, frozenset({1}), frozenset({1}), frozenset({1}), (other, fault), (0, 1))
    state = State(rank=0, world_size=2)
    incident = describe(agreement, state, state, {})
    assert incident.escalation == escalation
    document = json.loads(json.dumps(incident.to_dict()))
    assert document["escalation"]["to"] == "respawn"
    assert document["raised"]["name"] == "RestartAbort"


def test_who_was_waited_for_is_beside_who_raised() -> None:
    state, said = State(rank=0, world_size=3), "waited 6 s for rank 1 of 3"
    faults = tuple(fault_of(PeersAbsent(said, [1]), rank) for rank in (0, 2))
    everyone = frozenset({0, 2})
    agreement = Agreement(0, everyone, frozenset(), frozenset(), faults, (0, 2))
    incident = describe(agreement, state, state, {})
    assert (incident.first_faulty_rank, incident.absent_ranks) == (0, (1,))
    assert incident.exception is not None
    assert json.loads(json.dumps(incident.to_dict()))["absent_ranks"] == [1]


def test_an_exceeded_timeout_is_a_value() -> None:
    timeout = ExceededTimeout("hard", 90.0, 91.2, "python")
    fault = Fault(FaultKind.DIED, 1, 1, 0, 0.0, "rank 1: ended", detail="ended", timeout=timeout)
    assert Fault.from_json(fault.to_json()) == fault


@pytest.mark.parametrize("where", ["message", "note", "cause"])
def test_of_a_long_message_the_beginning_and_the_end_are_read(where: str) -> None:
    """A rank that reads 300 MB of one, line by line, holds up all others for minutes."""
    long = "the first words\n" + "x y\n" * 1_000_000 + "the last words"
    error: BaseException = ValueError("short")
    if where == "message":
        error = ValueError(long)
    elif where == "note":
        error.add_note(long)
    else:
        error.__cause__ = RuntimeError(long)
    text = "".join(described(error).format())
    assert "the first words" in text
    assert "the last words" in text
    assert len(text) < 100_000
    assert len(text_of(error)) < 100_000


def test_a_short_message_is_shown_as_python_shows_it() -> None:
    try:
        try:
            raise KeyError("a")
        except KeyError as error:
            raise ExceptionGroup("b", [ValueError("c\nd"), TypeError("e")]) from error
    except ExceptionGroup as error:
        error.add_note("f")
        assert list(described(error).format()) == traceback.format_exception(error)
