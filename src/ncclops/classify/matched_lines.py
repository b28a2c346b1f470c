"""Lines around literals, and what the signatures that match one line leave of each other."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import pairwise
from typing import NamedTuple

from ncclops.classify.model import Signature, Stamp

# What stands before a line that others have passed on: launchers, containers, Ray, MPI, kubectl,
# torch's ranks. Several may follow each other.
_PREFIX = re.compile(
    r"(?:\s*(?:"
    # mpirun --tag-output, SageMaker
    r"\[\d+,(?:\d+|mpirank:\d+,[\w.-]{1,60})\]<std(?:out|err|diag)>: ?"
    # torchrun --tee, torch's ranks
    r"|\[(?:rank|default|trainer|worker|train|node)[ -]?\d+(?:\|\d+)?\]:(?:\[rank\d+\]:)?"
    r"|\((?:[^()\n]|\([^()\n]*\)){1,120}?pid=\d+(?:, ip=[\w.:-]+)?\)"  # Ray, vLLM
    r"|\[[a-z0-9][\w.-]*/[\w.-]+(?:/[\w.-]+)?\]"  # stern, kubectl logs --prefix
    r"|[\w.-]{1,60} +\| "  # docker compose
    r"|\d{1,5}: "  # srun --label
    r"|[a-z][\w-]*[\d.][\w.-]*: "  # pdsh, DeepSpeed
    r"|\d{4}-\d\d-\d\dT[\d:.]+(?:Z|[+-]\d\d:?\d\d)(?: std(?:out|err) [FP])?"  # container runtimes
    r"|(?:ERROR|CRITICAL|INFO|WARNING) \d\d-\d\d \d\d:\d\d:\d\d \[[^\]\n]{1,80}\]"  # vLLM
    r"|\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?: [A-Z]+\d+)?\]"  # SGLang, and plain stamps
    r"|[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d [\w.-]{1,80} [\w.-]{1,60}(?:\[\d+\])?: "  # syslog
    # Loggers that part their fields by bars or dashes
    r"|\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d+)?(?: ?(?:UTC|Z))?"
    r"(?: [|-] [\w.:/-]{1,60}){0,4} [|:-] "
    r"|> "  # a quotation
    r"))+\s*"
)
_HARMLESS_LEVEL = re.compile(r"\b(?:DEBUG|INFO|WARNING)\b")
# NCCL's last words, as torch and vLLM pass them on, stand on the line below these.
LAST_ERROR = "Last error:"
_BELOW = rb"(?:[ \t]*|\\n\"[^\n]*)\r?\n"
_LAST_ERROR = re.compile(LAST_ERROR.encode() + _BELOW + rb"$")
_NEXT_LINE = re.compile(_BELOW + rb"(?=[^\r\n])")
LAST_ERROR_REACH = 160
# What most logs have none of is compiled when it is met: a start waits for that.
_compiled = cache(re.compile)
# What collectors of logs write of a line: a JSON object, or with the entities of a web page.
_JSON_MESSAGE = r'"(?:log|message|msg|line|text|textPayload)"\s*:\s*("(?:[^"\\]|\\.){1,8000}")'
_ENTITIES = {"&gt;": ">", "&lt;": "<", "&quot;": '"', "&#39;": "'", "&#x27;": "'", "&amp;": "&"}
# XLA has NCCL's last words on the same line, as has what joins the lines of an exception.
_QUOTED_LAST_ERROR = (
    r"Last NCCL warning\(error\) log entry[^']*'([^']+)'"
    r"|\bnccl[A-Z]\w+: [^\n]*?\bLast error: ?(?:\\n)?(\S[^\n]*)"
)
_IGNORED_EXCEPTION = (
    rb"Exception ignored [^\n]*\n"
    rb"[^\n]*Traceback \(most recent call last\):\r?\n"
    rb"(?:(?:\[[^\]\n]{1,40}\]:? ?|\d{1,5}: )?  [^\n]*\n)*\Z"  # frames, after a rank's prefix
)
# A rank that begins to write where the line of another process has not ended.
_NEXT_WRITER = r"(?<=\S)(?=\[rank\d+\]:)"
# What a shell or another process writes while a bar stands without the end of its line.
_AFTER_BAR = r"\d%\|[^\n]*\[[\d:]{4,12}<[^\]\n]{0,400}\](?=[^\s\]])"
# NCCL before 2.4 wrote its levels without its name.
_OLD_NCCL = r"(\[\d+\] (?:\S+\.\w+:\d+ )?|^(?:include|misc|transport)/\S+:\d+ )(?=(?:WARN|INFO) )"
# Later NCCL and RCCL have two levels more: what failed, which was a warning, and a notice.
_NEW_NCCL = r"(\[\d+\] |\.\w+:\d+ (?:\([^()\n]{1,80}\) )?)NCCL (ERROR|ATTN) "
_OLD_LEVELS = {"ERROR": "WARN", "ATTN": "INFO"}
# Around a literal in a line of a megabyte, this much is read on either side.
_REACH = 4096
EVIDENCE_CHARS = 600
_RANK_DIGITS = 10


class Line(NamedTuple):
    """A line that something matched, and what is known about it."""

    text: str
    number: int
    rank: int | None
    stamp: Stamp | None
    steps_before: int


class Match(NamedTuple):
    """A signature found in a line, where, the rank that it accuses, and the one that wrote it."""

    signature: Signature
    start: int
    culprit: int | None
    writer: int | None = None


def accused(found: re.Match[str]) -> int | None:
    """The rank in the first filled group whose name begins with ``rank``."""
    named = (value for name, value in found.groupdict().items() if name.startswith("rank"))
    return next((int(value) for value in named if value and len(value) < _RANK_DIGITS), None)


def writer(found: re.Match[str]) -> int | None:
    """The rank in the group ``writer``: a line without a prefix may still say who wrote it."""
    value = found.groupdict().get("writer")
    return int(value) if value and len(value) < _RANK_DIGITS else None


def with_last_errors(
    block: bytes, before: bytes, found: Iterable[tuple[int, int]], literal: int | None
) -> Iterator[tuple[int, int]]:
    """``found``, and the line below each ``Last error:``, the ``literal``, whatever it says.

    ``before`` is what ends where the block begins.
    """
    if literal is None:
        yield from found
        return
    if _LAST_ERROR.search(before[-LAST_ERROR_REACH:]) and block[:1] not in (b"", b"\r", b"\n"):
        yield 1, literal
    for end, number in found:
        yield end, number
        if number == literal and (below := _NEXT_LINE.match(block, end)) is not None:
            yield below.end() + 1, literal


def by_line(block: bytes, found: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int, set[int]]]:
    """(start, stop, literals) of each line, or progress-bar segment, that holds a literal."""
    start = stop = -1
    literals: set[int] = set()
    for end, literal in found:
        if end > stop:
            if literals:
                yield start, stop, literals
            start, stop = _line_around(block, end)
            literals = set()
        literals.add(literal)
    if literals:
        yield start, stop, literals


def _line_around(block: bytes, end: int) -> tuple[int, int]:
    low, high = max(0, end - _REACH), min(len(block), end + _REACH)
    start = max(block.rfind(b"\n", low, end), block.rfind(b"\r", low, end)) + 1 or low
    stop = block.find(b"\n", end, high)
    stop = high if stop < 0 else stop
    bar = block.find(b"\r", end, stop)
    return start, stop if bar < 0 else bar


def writers(text: str) -> list[str]:
    """What each process has written of a line on which several have."""
    prefix = _PREFIX.match(text)
    first = prefix.end() if prefix is not None else 0
    cuts = [found.start() for found in _compiled(_NEXT_WRITER).finditer(text, first + 1)]
    return [text[a:b] for a, b in pairwise([0, *cuts, len(text)])]


def readings(text: str, before: bytes) -> list[str]:
    """The line as it stands, and as its author wrote it; ``before`` is what ends where it begins.

    Launchers and containers put a name in front of a line, and a bar may stand there; NCCL's last
    error is passed on without the ``NCCL WARN`` that it was printed with.
    """
    if " NCCL " in text:
        text = _compiled(_NEW_NCCL).sub(
            lambda level: f"{level[1]}NCCL {_OLD_LEVELS[level[2]]} ", text
        )
    found = [text]
    if (collected := _as_collected(text)) is not None:
        found.append(collected)
    prefix = _PREFIX.match(found[-1])
    if prefix is not None and 0 < prefix.end() < len(found[-1]):
        # The level stays: what a logger calls information or a warning is no failure.
        level = _HARMLESS_LEVEL.search(prefix[0])
        found.append((f"{level[0]}: " if level else "") + found[-1][prefix.end() :])
    if "%|" in text and (bar := _compiled(_AFTER_BAR).search(found[-1])) is not None:
        found.append(found[-1][bar.end() :])
    if _LAST_ERROR.search(before):
        found.extend(_as_warnings(found[-1]))
    elif "Last " in text and (quoted := _compiled(_QUOTED_LAST_ERROR).search(text)) is not None:
        found.extend(_as_warnings(quoted[1] or quoted[2]))
    elif _has_level(text) and (old := _compiled(_OLD_NCCL).search(found[-1])) is not None:
        found.append(f"{found[-1][: old.end()]}NCCL {found[-1][old.end() :]}")
    return found


def _has_level(text: str) -> bool:
    return "WARN " in text or "INFO " in text


def _as_warnings(last_error: str) -> tuple[str, str]:
    """NCCL's last error as the warning that it was, and as what some signatures know it by."""
    return f"NCCL WARN {last_error}", f"NCCL WARN Last error: {last_error}"


def _as_collected(text: str) -> str | None:
    """What a collector of logs was given, where it wrote JSON or entities; None: it did not."""
    if text.startswith("{") and (message := _compiled(_JSON_MESSAGE).search(text)) is not None:
        try:
            return str(json.loads(message[1])).rstrip("\n")
        except ValueError:
            return None  # cut, or no JSON after all: the line is read as it stands
    plain = text
    for entity, character in _ENTITIES.items() if "&" in text else ():
        plain = plain.replace(entity, character)
    return None if plain == text else plain


def _conditional(signature: Signature) -> bool:
    return bool(signature.requires or signature.absent or signature.compares)


def holds_firm(matched: Iterable[Match]) -> bool:
    """Whether one of a line's matches makes the weak ones beside it say nothing."""
    # What holds on a condition is settled when the whole log is known, not here.
    found = (match.signature for match in matched if not _conditional(match.signature))
    failures = [signature for signature in found if signature.role != "benign"]
    return any(
        s.certainty != "weak" and not any(other.outranks_signature(s) for other in failures)
        for s in failures
    )


def strongest_on_line(matched: list[Match], firm: bool) -> list[Match]:
    """Without what another match explains away: outranked ones, and weak ones beside firm ones.

    ``firm``: what ``holds_firm`` says of them.
    """
    found = [match.signature for match in matched if not _conditional(match.signature)]

    def survives(signature: Signature) -> bool:
        if any(other.explains_on_line(signature) for other in found if other is not signature):
            return False
        return not (firm and signature.certainty == "weak")

    return [match for match in matched if survives(match.signature)]


def is_of_ignored_exception(before: bytes) -> bool:
    """Whether a line, at which ``before`` ends, is of an exception that ended nothing.

    Python prints those of destructors, callbacks at exit and the like, and goes on.
    """
    begin = before.rfind(b"Exception ignored ")
    return begin >= 0 and _compiled(_IGNORED_EXCEPTION).match(before, begin) is not None


def excerpt(text: str, start: int) -> str:
    """The part of a line that evidence shows: all of it, or a window that holds the match."""
    if len(text) <= EVIDENCE_CHARS:
        return text
    begin = 0 if start < EVIDENCE_CHARS // 2 else start - EVIDENCE_CHARS // 4
    return text[begin : begin + EVIDENCE_CHARS]
