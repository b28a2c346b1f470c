"""An exception, read: as a value, in one line, and what it was raised from. Pure."""

from __future__ import annotations

import builtins
import dataclasses
import re
import traceback
from collections.abc import Iterator
from typing import Any

from ncclops.restart.exception import RankShouldRestart

# What a rank sees when a peer of its collective has gone, in Gloo's and NCCL's messages.
_PEER_IS_GONE = re.compile(
    r"closed by peer|connection (was (likely )?)?(reset|closed|refused)|broken pipe|"
    r"remote process exited|unhandled system error|communicator was aborted|ncclRemoteError|"
    r"DistNetworkError|DistStoreError|Timed out waiting \d+ *ms|collective operation timeout|"
    r"failed to pass monitoredBarrier",
    re.IGNORECASE,
)
# What it says where another rank is known to have been the one that waited.
_REACHED_BARRIER = "successfully reached monitoredBarrier"
# And for how long it has waited, where torch says that.
_WAITED_MS = re.compile(
    r"(?:timed out waiting|timeout after|monitoredBarrier in) (\d{1,12}) ?ms", re.IGNORECASE
)

# Of a message, its beginning and its end are read, so many characters of each. Some have hundreds
# of megabytes, a tensor or a response in words, and a rank that reads them holds up all others.
_END_CHARS = 16_000

# What torch raises for an exception in a data loader's worker, in a thread or in a process of
# torch.multiprocessing.spawn: the whole traceback of the original is the message. The original
# itself is what follows the last indented line. Bounded, as such texts may have any length.
_CAUGHT = re.compile(
    r"Caught \w{1,100} (?P<where>in [^\n]{1,200}?)\.\s{1,4}Original Traceback |"
    r"-- Process (?P<spawned>\d{1,9}) terminated with the following error:\s{1,4}Traceback "
)
_FRAME = re.compile(
    r'^ +File "(?P<file>.+)", line (?P<line>\d+), in (?P<function>.+)$', re.MULTILINE
)


@dataclasses.dataclass(frozen=True)
class Raised:
    """The exception behind a fault, and where it was raised.

    ``name`` is the name of its class and ``bases`` those of all its base classes, ``object``
    left out. The place is the innermost frame; ``None`` where there is none. Of an exception
    that torch has brought from another process or a thread: the original's (``bases`` are known
    of built-in classes only).
    """

    name: str
    bases: tuple[str, ...] = ()
    file: str | None = None
    line: int | None = None
    function: str | None = None

    def is_a(self, *types: type[BaseException]) -> bool:
        """Whether it is an instance of one of ``types``, by name."""
        return not {self.name, *self.bases}.isdisjoint(kind.__name__ for kind in types)

    @classmethod
    def of(cls, error: BaseException) -> Raised:
        """``error`` as a value."""
        if brought := _brought(text := text_of(error)):
            return _raised_elsewhere(text, brought[0])
        bases = tuple(base.__name__ for base in type(error).__mro__[1:] if base is not object)
        frames = traceback.extract_tb(error.__traceback__, limit=-1)
        if isinstance(error, SyntaxError) and error.filename:
            return cls(type(error).__name__, bases, error.filename, error.lineno)
        if not frames:
            return cls(type(error).__name__, bases)
        (frame,) = frames
        return cls(type(error).__name__, bases, frame.filename, frame.lineno, frame.name)


def _raised_elsewhere(text: str, original: str) -> Raised:
    """What torch says in ``text`` of an exception of another process or thread."""
    name = original.partition(":")[0].strip().rpartition(".")[2]
    kind = getattr(builtins, name, None)
    mro = kind.__mro__[1:-1] if isinstance(kind, type) else ()
    bases = tuple(base.__name__ for base in mro)
    places = list(_FRAME.finditer(text))
    if not places:
        return Raised(name, bases)
    last = places[-1]
    return Raised(name, bases, last["file"], int(last["line"]), last["function"])


def summarise(error: BaseException) -> str:
    """``error`` on one line, at most 300 characters.

    Of one that torch has brought from another process or thread: the original, and where it was.
    """
    kind = type(error)
    name, module = kind.__qualname__, kind.__module__
    name = name if module in ("builtins", "__main__") else f"{module}.{name}"  # as in a traceback
    text = text_of(error)
    text = f"{name}: {text}" if text else name
    if brought := _brought(text):
        original, where = brought
        text = f"{original} ({where})"
    line = " ".join(text.split())
    return line if len(line) <= 300 else line[:297] + "..."


def _brought(text: str) -> tuple[str, str] | None:
    """The original in ``text``, and where it was raised, if torch has brought it from there."""
    head = _CAUGHT.search(text)
    if head is None:
        return None
    lines = text[head.end() :].split("\n")
    for number in range(len(lines) - 1, 1, -1):
        if lines[number - 1].startswith("  ") and lines[number][:1].strip():
            where = head["where"] or f"in process {head['spawned']} of mp.spawn"
            return "\n".join(lines[number:]), where
    return None


def text_of(error: BaseException) -> str:
    """``str(error)`` and its notes, also of a class whose ``__str__`` fails; of a long one the
    beginning and the end.

    ``traceback.format_exception_only`` would read the tracebacks of the whole chain for each link.
    """
    try:
        text = shortened(str(error))
        notes = getattr(error, "__notes__", None)
        return "\n".join([text, *_shortened_notes(notes)]) if isinstance(notes, list) else text
    except Exception:  # noqa: BLE001 - the class is a user's
        return "<its __str__ fails>"


def described(error: BaseException) -> traceback.TracebackException:
    """``error`` as Python shows it, whose ``format`` takes no longer where messages are long."""
    whole = traceback.TracebackException.from_exception(error)
    waiting: list[Any] = [whole]
    while waiting:
        link = waiting.pop()
        # Not public: where a Python has it differently, the message stays whole.
        if isinstance(text := getattr(link, "_str", None), str):
            link._str = shortened(text)
        if isinstance(link.__notes__, list):
            link.__notes__ = _shortened_notes(link.__notes__)
        behind = [link.__cause__, link.__context__, *(link.exceptions or ())]
        waiting += [each for each in behind if each is not None]
    return whole


def shortened(text: str) -> str:
    """``text``, of a long one the beginning and the end."""
    left_out = len(text) - 2 * _END_CHARS
    if left_out <= 0:
        return text
    return f"{text[:_END_CHARS]}\n[{left_out:,} characters left out]\n{text[-_END_CHARS:]}"


def _shortened_notes(notes: list[Any]) -> list[str]:
    return [shortened(str(note)) for note in notes]


def tells_of_lost_peer(text: str) -> bool:
    """Whether ``text`` is what a rank says whose peer has gone or does not come."""
    return _PEER_IS_GONE.search(text) is not None


def points_elsewhere(text: str) -> bool:
    """Whether ``text`` is of a rank that was cut off in a monitored barrier, in which rank 0 alone
    waits for the others, and knows who has not come."""
    return _REACHED_BARRIER in text


def waited_for_peer_s(text: str) -> float | None:
    """For how many seconds the rank that says ``text`` has waited for a peer, if it says that."""
    found = _WAITED_MS.search(text)
    return None if found is None else int(found[1]) / 1000


def chain_of(error: BaseException | None) -> Iterator[BaseException]:
    """``error`` and what it was raised from or during, outermost first; ends on a cycle."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def all_behind(*errors: BaseException | None) -> list[BaseException]:
    """``errors`` and whatever they were raised from, during, or are a group of; each once."""
    found: dict[int, BaseException] = {}
    waiting = list(errors)
    while waiting:
        error = waiting.pop()
        if error is not None and id(error) not in found:
            found[id(error)] = error
            waiting += [error.__cause__, error.__context__]
            if isinstance(error, BaseExceptionGroup):
                waiting += error.exceptions
    return list(found.values())


def is_due_to_peer(error: BaseException) -> bool:
    """Whether ``error``, or one that it was raised from, is of a rank whose peer has gone."""
    return any(tells_of_lost_peer(summarise(link)) for link in chain_of(error))


def comes_from_restart(error: BaseException | None) -> bool:
    """Whether ``error`` is ``RankShouldRestart``, or was raised while that was being handled."""
    return any(isinstance(link, RankShouldRestart) for link in chain_of(error))


def append_to_chain(error: BaseException, earlier: BaseException) -> None:
    """Make ``earlier`` the end of ``error``'s chain, unless it is in it."""
    links = list(chain_of(error))
    if earlier not in links and links[-1].__cause__ is None and links[-1].__context__ is None:
        object.__setattr__(links[-1], "__cause__", earlier)  # also of a frozen dataclass
