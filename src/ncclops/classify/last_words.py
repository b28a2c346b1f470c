"""What a failure that no signature knows is likeliest to be, by the words of its lines.

The last answer before ``unknown``. A line is read only where it says of itself that something
failed, and does not call itself information or a warning. Its words are weighed with
``words.json``, which `scripts/word_weights.py` learns from the examples of all signatures and
from what codes mean (errno, signals, exit codes, states of gRPC and HTTP). Such an answer is of
low confidence and never a reason to try again.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path

from ncclops.classify.matched_lines import is_of_ignored_exception, readings

# The class of lines that read like a failure and are none: what is learned of them is not told.
HARMLESS = "harmless"
# What an exception is anyway, and what ends no job.
_SCRIPT_S = (HARMLESS, "user-error", "collective-mismatch")
# What stands in evidence in the place of a signature's id.
BY_WORDS = "by-words"
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
# A longer number is one of many: a process, a port, an address.
_LONGEST_NUMBER = 3
_LAST_LINES, _READ_LINES, _MOST_LOGS = 60, 8, 64
# A line of a megabyte says what it says at its end.
_CHARS = 600
# What is less likely stays unknown. Of what is told, about the share ``_CONFIDENCE`` is right on
# labelled excerpts that nobody looked at; of what is not, a third (docs/classify-scores.md).
_LEAST_LIKELY, _CONFIDENCE = 0.25, 0.7
# From here on the words of an exception are believed against its being the script's own.
_SURE = 0.6
# Of fewer words that are known, one decides alone: "error" is no reason.
_LEAST_WORDS = 4

_CALLS_ITSELF_ERROR = (
    r"(?:^|[\s\[(|*:<#])(?:(?:ERROR|FATAL|CRITICAL|SEVERE|EMERG|ERR)(?=[\s\])|*:>]|$)"
    r"|(?:error|fatal|panic)(?=[\])|:>]))"
    r"|(?:^|\s)[EF]\d{4,8} |\d [EF] \S+:\d+\]|level=(?:error|fatal)|\b[Ff]atal error\b"
    r"|\b\w*[Ee]rror(?: \w+){0,3}: |\w(?:Error|Exception)\b|\bError (?:in|while|running|when)\b"
    r"|_ERROR\b|\[E\]"
)
_SAYS_SO = (
    r"\b(?:[Ff]ail(?:ed|ure|s|ing)?|FAILED|[Uu]nable to|[Cc]annot|[Cc]ould ?n[o']t|[Cc]an't"
    r"|[Rr]efused|[Dd]enied|[Rr]ejected|[Uu]nreachable|[Tt]imed? ?-?out(?!['\"]?\s?[:=] ?\d)"
    r"|[Aa]bort(?:ed|ing)?|[Ii]nvalid|[Cc]rash(?:ed)?|[Kk]illed|[Tt]erminated|[Dd]ied|[Pp]anic"
    r"|SIG[A-Z]{3,4}|signal \d+|[Nn]o such|[Nn]ot found|[Mm]issing|[Uu]nsupported|[Nn]ot supported"
    r"|exit(?:s|ed)? with (?:exception|code|status|error)|[Mm]ismatch\w*|[Ii]ncompatible"
    r"|[Uu]nexpected|[Nn]ot enough|[Ii]nsufficient|exceed(?:ed|s))\b"
)
# Exceptions whose names say that a script has made a mistake.
_OF_SCRIPT = re.compile(
    r"\b(?:Type|Value|Key|Index|Attribute|Name|Import|ModuleNotFound|Assertion|Syntax|Unbound\w*"
    r"|FileNotFound|FileExists|Permission|ZeroDivision|Recursion|Unicode\w*|Validation"
    r"|JSONDecode|Pickling|Pickle)Error\b"
)
_FAILS = re.compile(f"{_CALLS_ITSELF_ERROR}|{_SAYS_SO}")
_IS_QUIET = re.compile(
    r"\b(?:INFO|DEBUG|TRACE|NOTICE|WARN(?:ING)?|[Ww]arn(?:ing)?)\b|level=(?:info|debug|warn)"
    r"|\b[IWDN]\d{4}\b|\[[IWD]\b|\d [IWD] \S+:\d+\]|(?:^|\s)[IWD] \d\d-\d\d"
    r"|(?i:\b(?:if|may|might|retry\w*|retries|retrying|fall(?:ing|s)? ?back|ignor\w+|optional"
    r"|non-?fatal|harmless|skip\w*|recover\w*|deprecat\w+|will be|please note|could result"
    r"|disabl\w+|instead|trying again|e\.g\.|0 (?:errors|failed)|no errors?|without error"
    r"|already been registered|could not collect)\b)"
    r"|(?i:(?:failed|failure|unable) to|could not|couldn't|cannot|can't) (?:shut ?down|close|stop"
    r"|clean|remove|delete|unlink|unmap|munmap|release|destroy|free)\b"
    r"|^\s*(?:File \"|at |\^+$|#\d+ |@ )|\braise\b|\bexcept\b|\bcatch\b"
)


# What says that a program is at work, where no line says that something failed: a logger's
# information and warnings, and what trainers, servers and schedulers print as they start and save.
_AT_WORK = re.compile(
    r"(?:^|[\s\[(|*:<])(?<!NCCL )(?:INFO|WARN(?:ING)?|NeMo [IW])(?=[\s\])|*:>]|$)|\[[IW]\]"
    r"|(?:^|\s)[IW](?:\d{4}| \d\d-\d\d) \d\d:|\d: [IW] \S+:\d+\]|level=(?:info|warn)"
    r"|\b(?:User|Future|Runtime|(?:Pending)?Deprecation|Resource|Import|Syntax)Warning: ?"
    r"|[Ss]tart(?:ed|ing)? (?:trainer|(?:to )?train(?:ing)?\b)|\bRunning training\b"
    r"|^\s*(?:Num (?:examples|[Ee]pochs)|Num processes|Process index) ?[:=] ?\d"
    r"|trainable params: \d|^\W*nThread \d+ nGpus \d|\bStarting elastic_operator with"
    r"|\busing world size: \d|^ ?> (?:initializ|building|setting|finished|padded|learning rate)"
    r"|\b(?:sav(?:ing|ed)|load(?:ing|ed)) (?:checkpoint|model weights) (?:at|from|to)\b"
    r"|`Trainer\.fit` stopped: |\bTracking run with wandb|\bCreated device /job:"
    r"|Started a local Ray instance|\bStarted server process\b|has been allocated resources"
    r"|^\s*Normal +(?:Scheduled|Pull(?:ing|ed)|Created|Started)\b|\| READY +\|"
    r"|\bGPU (?:relative|individual) performance:|Node=\S+ Score=(?:0\.[7-9]|1\.)"
    r"|\| +\d+MiB / +\d+MiB \||\bcreating index\.\.\.|\bloading annotations into memory"
    r"|(?i:^\W*(?:creating|building|loading|compiling) (?:the )?"
    r"(?:model|optimizer|data\w*|tokenizer)\b)"
    r"|\bUse GPU: \d+ for training|already downloaded and verified|^\W*Resum(?:ing|ed) from \S"
    r"|\bSyncing run \S|\bRANK and WORLD_SIZE in environ"
    r"|(?i:\b(?:total|trainable|number of|num\. model) param(?:eter)?s\b)|\d param(?:eter)?s\b"
)
# A warning of NCCL's is how it says what failed, whatever its words; and these speak of trouble.
_TROUBLES = re.compile(
    r"\bNCCL WARN\b|\.(?:cc|cu|h)[: ]\d+ WARN\b"
    r"|\b(?:[Ee]rror|[Ee]xception|dead|lost|hangs?|hung|stuck)\b"
    r"|\b(?i:corrupt\w*|degraded|unhealthy|broken|damaged|overheat\w*|throttl\w*|disconnect\w*"
    r"|unresponsive|not respond\w*|stall\w*|slow(?:er|ly)?|out of (?:memory|space)|overflow"
    r"|preempt\w*|evict\w*|drain\w*|imminent|interrupt\w*|cancel\w*|kill\w*|straggl\w*"
    r"|shut(?:ting)? ?down|reboot\w*|bad|leak\w*|no space|not ready|ERR!)\b"
)


@dataclass(frozen=True, slots=True)
class Guess:
    """A class, how sure of it, and the line that speaks most for it with the words that do.

    ``source`` is the place of the line's log among those read.
    """

    class_: str
    confidence: float
    source: int
    line_from_end: int
    text: str
    words: tuple[str, ...]


def guess(tails: Iterable[str], is_harmless: Callable[[str], bool]) -> Guess | None:
    """What logs that end in ``tails`` are likeliest to have failed with; None: it is not clear.

    ``is_harmless`` tells which lines are known to read like a failure and to be none.
    """
    read = [
        (number, back, line)
        for number, tail in enumerate(islice(tails, _MOST_LOGS))
        for back, line in _failing_lines(tail)
        if not is_harmless(line)
    ]
    words = {word for *_, line in read for word in words_of(line)} & _model().words.keys()
    chances = likelihoods(words)
    class_ = max(chances, key=chances.__getitem__)
    if len(words) < _LEAST_WORDS or class_ == HARMLESS or chances[class_] < _LEAST_LIKELY:
        return None
    speaks = _speaking_for(class_)
    number, back, line = max(read, key=lambda item: sum(map(speaks, words_of(item[2]))))
    return Guess(class_, _CONFIDENCE, number, back, line, _telling(words_of(line), class_))


def are_at_work(tails: Iterable[str], is_harmless: Callable[[str], bool]) -> bool:
    """Whether logs that end in ``tails`` show programs at work and not a line of a failure."""
    lines = [
        line
        for tail in islice(tails, _MOST_LOGS)
        for line in tail.removesuffix("\n").split("\n")[-_LAST_LINES:]
    ]
    fails = (line for line in lines if _FAILS.search(line[-_CHARS:]) or _TROUBLES.search(line))
    return any(map(_AT_WORK.search, lines)) and all(map(is_harmless, fails))


def of_exception(line: str) -> Guess | None:
    """What an exception, in one line, speaks of; None: of the script, or it is not clear."""
    line = line[-_CHARS:]
    if _OF_SCRIPT.search(line):
        return None
    words = words_of(line) & _model().words.keys()
    chances = likelihoods(words)
    class_ = max(chances, key=chances.__getitem__)
    if len(words) < _LEAST_WORDS or class_ in _SCRIPT_S or chances[class_] < _SURE:
        return None
    return Guess(class_, _CONFIDENCE, 0, 0, line, _telling(words, class_))


def words_of(line: str) -> frozenset[str]:
    """The words and short numbers of a line, each once, parts of compound names apart."""
    found = (word.lower() for word in _WORD.findall(line))
    return frozenset("0" if w.isdigit() and len(w) > _LONGEST_NUMBER else w for w in found)


def likelihoods(words: Iterable[str]) -> dict[str, float]:
    """How likely each class is for lines that hold ``words``; their sum is one."""
    model = _model()
    known = [model.words[word] for word in words if word in model.words]
    length = math.sqrt(sum(rarity * rarity for rarity, _ in known)) or 1.0
    scores = dict(model.intercepts)
    for rarity, weights in known:
        for name, weight in weights.items():
            scores[name] += rarity / length * weight
    highest = max(scores.values())
    odds = {name: math.exp(score - highest) for name, score in scores.items()}
    total = sum(odds.values())
    return {name: value / total for name, value in odds.items()}


def _failing_lines(tail: str) -> list[tuple[int, str]]:
    """The last lines that say that something failed, each with its distance from the end.

    Without what a launcher or a container has put in front of them.
    """
    lines = tail.removesuffix("\n").split("\n")
    failing = [
        (len(lines) - 1 - at, readings(part, b"")[-1])
        for at, line in enumerate(lines[-_LAST_LINES:], max(0, len(lines) - _LAST_LINES))
        for part in line[-_CHARS:].split("\r")
        if _FAILS.search(part)
        and not _IS_QUIET.search(part)
        and not is_of_ignored_exception("\n".join([*lines[:at], ""]).encode())
    ]
    return failing[-_READ_LINES:]


def _telling(words: Iterable[str], class_: str) -> tuple[str, ...]:
    speaks = _speaking_for(class_)
    return tuple(sorted(words, key=lambda word: (-speaks(word), word))[:4])


def _speaking_for(class_: str) -> Callable[[str], float]:
    words = _model().words

    def speaks(word: str) -> float:
        rarity, weights = words.get(word, (0.0, {}))
        return rarity * weights.get(class_, 0.0)

    return speaks


@dataclass(frozen=True, slots=True)
class _Model:
    intercepts: dict[str, float]
    words: dict[str, tuple[float, dict[str, float]]]


@cache
def _model() -> _Model:
    data = json.loads(Path(__file__).with_name("words.json").read_text("utf-8"))
    names = list(data["intercepts"])
    words = {
        word: (
            rarity / 100,
            {names[i]: weight / 100 for i, weight in zip(row[::2], row[1::2], strict=True)},
        )
        for word, (rarity, *row) in data["words"].items()
    }
    return _Model(data["intercepts"], words)
