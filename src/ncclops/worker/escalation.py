"""Whether another restart in place can help, and what may if it cannot: new processes, or nothing.

Pure: from incidents, which all ranks get alike, to a decision. A rank that knows more (its memory,
its guardian) decides by itself, and says so with an exception; the others read it in the incident.
"""

from __future__ import annotations

import builtins
import json
import re
from dataclasses import dataclass
from typing import Literal

from ncclops.restart.attribution import FaultKind
from ncclops.restart.exception import RestartAbort
from ncclops.restart.incident import Incident

Way = Literal["respawn", "stop"]

# The same exception at the same place so often without a new step: a restart in place changes
# nothing about it.
_SAME_FAILURE_LIMIT = 3
# Exceptions that a mistake in the script raises, and hardly anything else. Early in a run one is
# enough; later, hours of training are worth the attempts.
_MISTAKES = (
    NameError,
    AttributeError,
    TypeError,
    LookupError,
    ImportError,
    SyntaxError,
    NotImplementedError,
)
_UNKNOWN = "unknown place"
_EARLY_S = 300.0
# NCCL's words for a communicator that did not come up: the playbook's list of what a new process
# with lazy communicators gets over.
_STARTUP_WORDS = (
    "ncclRemoteError",
    "remote process exited",
    "socketPollConnect",
    "Connection refused",
)
# After these every further call into CUDA fails until the process ends: the errors of which the
# CUDA runtime's manual says that the process must be relaunched.
_POISONED = re.compile(
    r"(?:CUDA|Cuda|cuda).{0,200}?"
    r"(?P<what>an illegal memory access was encountered|device-side assert triggered"
    r"|unspecified launch failure|misaligned address|an illegal instruction was encountered"
    r"|hardware stack error|invalid program counter|operation not supported on global/shared"
    r"|the launch timed out and was terminated|uncorrectable ECC error encountered"
    r"|uncorrectable NVLink error|context is destroyed|driver shutting down"
    r"|cudaError(IllegalAddress|Assert|LaunchFailure|MisalignedAddress|IllegalInstruction"
    r"|HardwareStackError|InvalidPc|InvalidAddressSpace|LaunchTimeout|ECCUncorrectable"
    r"|NvlinkUncorrectable|ContextIsDestroyed))",
    re.DOTALL,
)
_SAID_BY_A_RANK = re.compile(r"RestartAbort: escalation to (respawn|stop): (.*)")


@dataclass(frozen=True)
class Escalation:
    """Restarts in place end here. ``failure`` is the exception and its place, where it is one."""

    to: Way
    reason: str
    failure: tuple[str, str] | None = None

    def as_exception(self) -> RestartAbort:
        """Takes this rank out; the others read in the incident why, and follow."""
        return RestartAbort(f"escalation to {self.to}: {self.reason}")


class Repetition:
    """Takes note of incidents; ``escalation`` is None as long as restarts in place may help.

    ``started`` is when this attempt began, in seconds since the epoch. ``respawned_for`` is the
    failure for which an earlier attempt has asked for new processes, as :func:`failure_as_text`
    put it: once more, and they have not helped either.
    """

    def __init__(self, started: float, respawned_for: str | None) -> None:
        self._started = started
        self._respawned_for = _failure(respawned_for)
        self._last: tuple[str, str] | None = None
        self._last_step: int | None = None
        self._times = 0
        self.escalation: Escalation | None = None

    def count(self, incident: Incident, highest_step: int | None) -> None:
        """How an iteration ended; ``highest_step`` is the highest that any has reached here."""
        said = _said_by_a_rank(incident) or _poisoned(incident)
        this = _place(incident)
        if said is not None or this is None:
            self._last, self.escalation = None, said
            return
        self._times = self._times + 1 if self._is_again(this, highest_step) else 1
        self._last, self._last_step = this, highest_step
        self.escalation = self._decide(incident, this)

    def _is_again(self, this: tuple[str, str], step: int | None) -> bool:
        return _is_same(this, self._last) and step == self._last_step

    def _decide(self, incident: Incident, this: tuple[str, str]) -> Escalation | None:
        what = f"{this[0]} ({this[1]})"
        early = incident.at - self._started < _EARLY_S
        if early and _is_mistake(this[0]):
            return Escalation("stop", f"{what}: a mistake in the script", this)
        if early and incident.iteration == 0 and _is_startup_failure(incident):
            return Escalation("respawn", f"{what}: a failure to start", this)
        if self._respawned_for is not None and _is_same(this, self._respawned_for):
            return Escalation("stop", f"{what}: again in new processes", this)
        if self._times >= _SAME_FAILURE_LIMIT:
            times = f"{self._times} times in a row at the same place without a new step"
            return Escalation("respawn", f"{what}: {times}", this)
        return None


def failure_as_text(failure: tuple[str, str]) -> str:
    """For the variable by which the next attempt learns of it."""
    return json.dumps(failure)


def _failure(text: str | None) -> tuple[str, str] | None:
    if not text:
        return None
    what, where = json.loads(text)
    return str(what), str(where)


def _said_by_a_rank(incident: Incident) -> Escalation | None:
    for fault in incident.faults:
        said = _SAID_BY_A_RANK.search(fault.summary)
        if said is not None:
            to: Way = "respawn" if said[1] == "respawn" else "stop"
            return Escalation(to, said[2])
    return None


def _poisoned(incident: Incident) -> Escalation | None:
    for fault in incident.faults:
        found = _POISONED.search(f"{fault.summary}\n{fault.traceback or ''}")
        if found is not None:
            rank, what = fault.initial_rank, found["what"]
            reason = f"the CUDA context of rank {rank} is corrupted: {what}"
            return Escalation("respawn", reason, (f"rank {rank}", what))
    return None


def _is_same(this: tuple[str, str], last: tuple[str, str] | None) -> bool:
    """Whether two failures are one; where a place is unknown, by the exception alone."""
    if last is None or this[0] != last[0]:
        return False
    return this[1] == last[1] or _UNKNOWN in (this[1], last[1])


def _is_mistake(exception: str) -> bool:
    # A syntax error comes with its place in front: `File "train.py", line 3 … SyntaxError: …`.
    named = re.findall(r"\b([A-Z]\w+):", exception)
    name = named[-1] if exception.startswith("File ") and named else exception.partition(":")[0]
    kind = getattr(builtins, name, None)
    return isinstance(kind, type) and issubclass(kind, _MISTAKES)


def _is_startup_failure(incident: Incident) -> bool:
    text = f"{incident.exception} {incident.traceback}"
    return any(words in text for words in _STARTUP_WORDS)


def _place(incident: Incident) -> tuple[str, str] | None:
    """The exception's name, and where it was raised; a hang and its rank; None for what ends by
    itself, such as ranks that are lost one by one.
    """
    if incident.exception is None:
        hang = incident.cause == FaultKind.SOFT_TIMEOUT.value
        return (f"{incident.cause}", f"rank {incident.first_faulty_rank}") if hang else None
    lines = [line.strip() for line in (incident.traceback or "").splitlines()]
    places = [line for line in lines if line.startswith("File ")]
    return str(incident.exception), places[-1] if places else _UNKNOWN
