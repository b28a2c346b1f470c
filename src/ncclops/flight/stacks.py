"""Stacks of a rank's threads as text, to where its main thread stands.

Three forms are known: faulthandler's and py-spy's (innermost frame first), and tracebacks
(innermost last).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ncclops.flight.frames import place_of
from ncclops.flight.model import Frame, Place

_FAULTHANDLER_THREAD = re.compile(
    r"^(?:Current thread|Thread) (0x[0-9a-f]+)(.*?)\(most recent call"
)
_SPY_THREAD = re.compile(r"^Thread (?:0x)?[0-9a-fA-F]+ \(([^)]*)\)(?:: \"?([^\"]*)\"?)?")
_SPY_FRAME = re.compile(r"^ {2,}(\S.*?) \((.+?):(\d+)\)\s*$")
_FILE = re.compile(r'^\s*File "(.+?)", line (\d+|\?\?\?)(?:,)? in (.+?)\s*$')
_TRACEBACK = "Traceback (most recent call last)"
_MOST_FRAMES = 200


@dataclass(slots=True)
class _Thread:
    name: str
    frames: list[Frame]
    innermost_last: bool = False


def place_in(text: str) -> Place | None:
    """Where the main thread is, or the first other one in user code; None without any frame."""
    threads = [thread for thread in _threads(text) if thread.frames]
    if not threads:
        return None
    places = [place_of(tuple(_innermost_first(thread))) for thread in threads]
    main = _main_index(threads)
    if places[main].frame is not None or places[main].what is not None:
        return places[main]
    # A main thread without user code (an embedding interpreter, a launcher that joins).
    return next((place for place in places if place.frame is not None), places[main])


def _innermost_first(thread: _Thread) -> list[Frame]:
    return thread.frames[::-1] if thread.innermost_last else thread.frames


def _main_index(threads: list[_Thread]) -> int:
    for index, thread in enumerate(threads):
        if "MainThread" in thread.name or "main thread" in thread.name.lower():
            return index
    # faulthandler prints threads youngest first.
    return len(threads) - 1


def _threads(text: str) -> list[_Thread]:
    threads: list[_Thread] = []
    for line in text.splitlines():
        if started := _start(line):
            threads.append(started)
        elif (frame := _frame(line)) is not None:
            if not threads:
                threads.append(_Thread("", []))
            if len(threads[-1].frames) < _MOST_FRAMES:
                threads[-1].frames.append(frame)
    return threads


def _start(line: str) -> _Thread | None:
    if found := _FAULTHANDLER_THREAD.match(line):
        return _Thread(found.group(2), [])
    if line.lstrip().startswith(_TRACEBACK):
        return _Thread("", [], innermost_last=True)
    if found := _SPY_THREAD.match(line):
        return _Thread(found.group(2) or found.group(1), [])
    return None


def _frame(line: str) -> Frame | None:
    if found := _FILE.match(line):
        number = found.group(2)
        return Frame(found.group(1), int(number) if number.isdigit() else 0, found.group(3))
    if found := _SPY_FRAME.match(line):
        return Frame(found.group(2), int(found.group(3)), found.group(1))
    return None
