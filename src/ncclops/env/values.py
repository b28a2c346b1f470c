"""Whether a value is one that its reader takes."""

from __future__ import annotations

import difflib
import re

from ncclops.env.catalogue import LIBNCCL, Variable

_WORDS = frozenset(["y", "yes", "1", "t", "true", "n", "no", "0", "f", "false"])
_TRUE = frozenset(["y", "yes", "1", "t", "true", "on"])
# Words that mean a yes, where 1 is what is taken for one.
_YES = frozenset(["y", "yes", "t", "true", "on", "enable", "enabled"])
# Components whose readers know words for a yes, or of which that is not known.
_OWN_WORDS = frozenset(["libfabric", "nccl-plugin-gcp", "nvshmem", "sharp", "ucx"])
# What scripts and Python read, who know ~.
_OF_SHELLS = frozenset(["build", "inductor", "launcher", "nvrx", "pytorch-logging", "elastic"])
_PATH_LISTS = frozenset(["LD_LIBRARY_PATH", "LD_PRELOAD"])
# What strtoll takes with base 0: NCCL's own reading of a number.
_INTEGER = re.compile(r"\s*[+-]?(0[xX][0-9a-fA-F]+|\d+)\s*")
# No number that is read has more characters.
_MOST_CHARS = 1000
_LEADING_INTEGER = re.compile(r"\s*[+-]?\d+")


def is_true(value: str) -> bool:
    """Whether ``value`` switches a boolean on, in the words that torch and NCCL take."""
    return value.strip().lower() in _TRUE


def as_number(value: str) -> float | None:
    """``value`` as a number, None when it is none."""
    if len(value) > _MOST_CHARS:
        return None
    if _INTEGER.fullmatch(value):
        return int(value, 0) if "x" in value.lower() else int(value)
    try:
        return float(value)
    except ValueError:
        return None


def problem_with(variable: Variable, value: str) -> str | None:
    """What is wrong with ``value``, and what the reader makes of it; None when nothing is."""
    check = variable.check
    if not value.strip():
        return None  # set and empty: NCCL and torch take it as not set, or as a word of their own
    shown = "" if variable.kind == "secret" else f"{value!r}: "
    for pattern, why in check.get("never", {}).items():
        if re.search(pattern, value):
            return f"{shown}{why}"
    for pattern, why in check.get("must", {}).items():
        if not re.search(pattern, value):
            return f"{shown}{why}"
    if "choices" in check:
        return _not_among(variable, value)
    if "list_of" in check:
        return _list_problem(variable, value)
    if "keys" in check:
        return _key_problem(variable, value)
    if "words" in check and value.lower() not in _WORDS:
        return f"{value!r} is not a yes or no: torch raises an error; write 1 or 0"
    if "min" in check or "integer" in check:
        return _number_problem(variable, value)
    return None


def doubt_about(variable: Variable, value: str) -> str | None:
    """Why ``value`` is hardly meant, although its reader takes it; None where nothing says so."""
    for pattern, why in variable.check.get("doubt", {}).items():
        if re.search(pattern, value.strip()):
            return f"{value!r}: {why}"
    if variable.kind == "path" and variable.component not in _OF_SHELLS and value[0] == "~":
        return f"{value!r}: no shell has put a directory in the place of ~, and its reader does not"
    if variable.name in _PATH_LISTS and re.search(r"(?:^|:)~", value):
        return f"{value!r}: ~ is a directory of this name here; write the whole path, or $HOME"
    if variable.kind == "bool" and _is_no_switch(variable, value.strip()):
        return f"{value!r}: it takes 1 or 0"
    return None


def _is_no_switch(variable: Variable, value: str) -> bool:
    """Whether a switch that takes 1 or 0 is given another number, or a word that may be a no."""
    if value.isdigit():
        return "integer" in variable.check and value.lstrip("0") not in ("", "1")
    takes_numbers = not variable.check and variable.accepts in ("0/1", "1/0", "1 enables")
    return takes_numbers and variable.component not in _OWN_WORDS and value.lower() in _YES


def _not_among(variable: Variable, value: str) -> str | None:
    choices: list[str] = variable.check["choices"]
    any_case = variable.check.get("any_case", False)
    known = {choice.upper() for choice in choices} if any_case else set(choices)
    if (value.upper() if any_case else value) in known:
        return None
    hint = ""
    if value.upper() in {choice.upper() for choice in choices}:
        hint = ": only upper case counts"
    elif variable.name == "NCCL_DEBUG":
        hint = ": logging then stays off"
    return f"{value!r} is not one of {', '.join(choices)}{hint}"


def _list_problem(variable: Variable, value: str) -> str | None:
    words_of_forks = variable.check.get("of_forks", [])
    known = {word.upper() for word in [*variable.check["list_of"], *words_of_forks]}
    functions = value.split(";")
    for function in functions:
        words = function.rpartition(":")[2].removeprefix("^")
        for entry in words.split(","):
            anywhere = "excludes_anywhere" in variable.check
            word = entry.strip().removeprefix("^") if anywhere else entry
            if word.strip() and word.strip().upper() not in known:
                names = ", ".join(variable.check["list_of"])
                return f"{word.strip()!r} is not one of {names}"
    return None


def _key_problem(variable: Variable, value: str) -> str | None:
    """A key that is nearly a known one; another may be of a version that is not known here."""
    for item in value.split(","):
        key = item.partition(":")[0].strip()
        near = difflib.get_close_matches(key[:100], variable.check["keys"], n=1, cutoff=0.75)
        if near and key != near[0]:
            return f"{key!r} is not a key: did you mean {near[0]}? torch refuses to start"
    return None


def _taken_as(variable: Variable, value: str) -> str:
    """What NCCL makes of a number that is none (tried on libnccl 2.32.3)."""
    if variable.component not in LIBNCCL:
        return ""
    start = _LEADING_INTEGER.match(value)
    if start:
        return f": NCCL reads {start[0].strip()} and ignores the rest"
    switch = "; write 1 or 0" if variable.kind == "bool" else ""
    return f": NCCL ignores it and uses its default{switch}"


def _number_problem(variable: Variable, value: str) -> str | None:
    number = as_number(value)
    if number is None or not _INTEGER.fullmatch(value):
        return f"{value!r} is not a whole number{_taken_as(variable, value)}"
    low, high = variable.check.get("min"), variable.check.get("max")
    if low is not None and number < low:
        return f"{value} is below {low}, the least that is taken"
    if high is not None and number > high:
        return f"{value} is above {high}, the most that is taken"
    step = variable.check.get("multiple_of", 1)
    if number % step:
        return f"{value} is no multiple of {step}: NCCL ignores it and uses its default"
    if variable.check.get("power_of_two") and int(number) & (int(number) - 1):
        return f"{value} is no power of two: NCCL ignores it and uses its default"
    return None
