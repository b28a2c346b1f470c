"""What an exception means for a restart in the same process, by its text.

Which errors a restart cannot repair is data (``in_place.toml``). What else an exception is,
``judge`` takes from the signatures by which the whole run is classified. A worker asks between a
fault and its restart, where a rank that takes longer holds up all others: ``prepare`` reads them
before, and of the text only some thousand characters are looked at.
"""

from __future__ import annotations

import functools
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ncclops.classify.model import Signature

# Of a text, and of what was printed before it, the last characters; together no more than the
# signatures are looked for in without a database to be compiled first.
_MOST_CHARS = 8000
# A traceback quotes the script, and the script's own words are no error's.
_QUOTED = re.compile(r'^( *File "[^\n]*\n)(?: {4,}\S[^\n]*(?:\n|\Z))+', re.MULTILINE)
# How far behind the word CUDA its error may stand: a number, a file and a line are between them.
_REACH = 200


def corrupted_context(text: str) -> str | None:
    """The CUDA error in ``text`` after which every further call fails; None without one.

    ``text`` is an exception, with or without its traceback. Any thread.
    """
    found = _corrupted().search(text)
    return None if found is None else found["words"] or found["code"]


def is_hardware(what: str) -> bool:
    """Whether ``what``, found by ``corrupted_context``, is a fault of the GPU itself."""
    return what in data()["corrupted-context"]["hardware"]


def is_failed_start(text: str) -> bool:
    """Whether ``text``, an exception with its traceback, is of a communicator that did not come up.

    Only at the start of a run: later the loss of a peer has the same messages. Any thread.
    """
    return any(words in text for words in data()["failed-start"]["words"])


@dataclass(frozen=True, slots=True)
class Judgement:
    """What the signatures say of an exception.

    ``is_final``: no new start changes anything about it. ``is_script_s``: nothing shows that it is
    of anything but the script. ``proof`` is the line by which it was known, empty without one.
    """

    class_: str
    summary: str
    is_final: bool
    is_script_s: bool
    proof: str


def prepare() -> None:
    """Read what ``judge`` needs, which takes longer than a restart should."""
    from ncclops.classify import scanner  # noqa: F401
    from ncclops.classify.last_words import likelihoods

    likelihoods(())  # reads the weights of words
    _signatures()
    data()


def judge(text: str, printed: str = "") -> Judgement:
    """What the exception ``text`` is, its traceback included, after its process has ``printed``."""
    from ncclops.classify.loader import SignatureSet
    from ncclops.classify.scanner import Scanner

    scanner = Scanner(SignatureSet(_signatures()))
    scanner.feed(None, "output", f"{printed[-_MOST_CHARS:]}\n")
    scanner.feed(None, "output", f"{_QUOTED.sub(_first_line, text[-_MOST_CHARS:])}\n")
    report = scanner.verdict()
    found, final = report.verdict, data()["final"]
    return Judgement(
        class_=found.class_,
        summary=found.summary,
        is_final=found.retry_policy in ("fix-config", "fix-code")
        and found.class_ in final["classes"]
        and found.confidence >= final["least_confidence"]
        and found.signature not in final["signatures_that_may_pass"],
        is_script_s=found.class_ == "user-error"
        or found.signature in (None, *data()["script"]["signatures"]),
        proof=report.evidence[0].text if report.evidence else "",
    )


def _first_line(quoted: re.Match[str]) -> str:
    return quoted[1]


@functools.cache
def _signatures() -> tuple[Signature, ...]:
    """A site's and a user's too: the agent judges by them, and two answers would contradict."""
    from ncclops.classify.loader import standing_signatures

    return standing_signatures().signatures


@functools.cache
def data() -> dict[str, Any]:
    """``in_place.toml``."""
    return tomllib.loads(Path(__file__).with_name("in_place.toml").read_text("utf-8"))


@functools.cache
def _corrupted() -> re.Pattern[str]:
    table = data()["corrupted-context"]
    after, words, codes = ("|".join(map(re.escape, table[key])) for key in _ALTERNATIVES)
    pattern = rf"(?:{after}).{{0,{_REACH}}}?(?P<words>{words})|\b(?P<code>{codes})\b"
    return re.compile(pattern, re.DOTALL)


_ALTERNATIVES = ("after", "words", "codes")
