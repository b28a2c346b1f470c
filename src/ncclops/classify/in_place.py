"""Failures that a restart in the same process cannot repair, by the text of the exception.

The words are data (``in_place.toml``). Apart from the signatures, and without the scanner: a worker
asks between a fault and its restart, and a rank that takes longer holds up all others.
"""

from __future__ import annotations

import functools
import re
import tomllib
from importlib import resources
from typing import Any

# How far behind the word CUDA its error may stand: a number, a file and a line are between them.
_REACH = 200


def corrupted_context(text: str) -> str | None:
    """The CUDA error in ``text`` after which every further call fails; None without one.

    ``text`` is an exception, with or without its traceback. Any thread.
    """
    found = _corrupted().search(text)
    return None if found is None else found["words"] or found["code"]


def is_failed_start(text: str) -> bool:
    """Whether ``text``, an exception with its traceback, is of a communicator that did not come up.

    Only at the start of a run: later the loss of a peer has the same messages. Any thread.
    """
    return any(words in text for words in data()["failed-start"]["words"])


@functools.cache
def data() -> dict[str, Any]:
    """``in_place.toml``."""
    text = resources.files("ncclops.classify").joinpath("in_place.toml").read_text("utf-8")
    return tomllib.loads(text)


@functools.cache
def _corrupted() -> re.Pattern[str]:
    table = data()["corrupted-context"]
    after, words, codes = ("|".join(map(re.escape, table[key])) for key in _ALTERNATIVES)
    pattern = rf"(?:{after}).{{0,{_REACH}}}?(?P<words>{words})|\b(?P<code>{codes})\b"
    return re.compile(pattern, re.DOTALL)


_ALTERNATIVES = ("after", "words", "codes")
