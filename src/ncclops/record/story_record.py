"""The story of a run that failed: told once, shown alike by terminal, diagnose and report."""

from __future__ import annotations

from typing import Literal

import msgspec


class CodeLine(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the user's code that was being executed, with its text where that is known.

    ``calls``: the frames of installed packages that it led through, counted, such as ``5 frames in
    torch``; None where the next line was called directly.
    """

    file: str
    line: int
    function: str = ""
    text: str = ""
    calls: str | None = None


class TriedStep(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that was tried: ``at`` in seconds since the epoch; ``lost`` are the ranks without
    which a restart in place went on."""

    at: float
    kind: Literal["restart", "escalation", "attempt"]
    what: str
    why: str = ""
    lost: list[int] = []


class Story(msgspec.Struct, frozen=True, kw_only=True):
    """Who began it, where, what it was, what was tried, why it stopped, what to do.

    ``what`` is one sentence. ``rank``, ``host`` and ``operation`` (of torch.distributed, the last
    that the rank entered) are None where they are not known. ``code`` are the user's lines, the
    innermost last. ``class_`` is the classifier's, None where it has none; ``proof`` are the lines
    that prove it. ``output`` are the last lines of the rank, where it left nothing better.
    ``ended`` is how the last attempt ended, ``stopped`` why no other one followed. ``log`` and
    ``next_command`` are for the node ``log_host``, this one where that is None. ``incident`` is the
    number of the incident that this is about. ``waited``: ``rank`` waited too long for another one,
    which no rank of its node is.
    """

    what: str
    rank: int | None = None
    host: str | None = None
    code: list[CodeLine] = []
    operation: str | None = None
    class_: str | None = msgspec.field(name="class", default=None)
    confidence: float | None = None
    summary: str = ""
    proof: list[str] = []
    output: list[str] = []
    tried: list[TriedStep] = []
    ended: str = ""
    stopped: str = ""
    log: str | None = None
    log_host: str | None = None
    incident: int | None = None
    waited: bool = False
    next_steps: list[str] = []
    next_command: str = ""
