"""TOML files that people hand over: profiles, signatures, checks."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

from ncclops.errors import UsageError
from ncclops.record.regular_file import read_regular

# The largest of ours has 30 kB.
MOST_BYTES = 1 << 20
# In one key, tomllib goes through all levels for each one.
_MOST_DOTS = 300
_KEY = re.compile(r"""\s*((?:[\w-]+|"[^"]*"|'[^']*')(?:\s*\.\s*[\w."'-]+)?)\s*=""")
# Of a file that is something else altogether the first ones say enough.
_MOST_PROBLEMS = 50


def site_directory(kind: str) -> Path:
    """What the administrators of this machine have put there for all its users."""
    return Path("/etc/ncclops") / kind


def user_directories(kind: str) -> list[Path]:
    """Where a user keeps ``kind``: profiles, signatures, checks. It need not exist.

    None where there is no home: in a container that runs under a number without a name.
    """
    config = Path(os.environ.get("XDG_CONFIG_HOME", ""))
    if not config.is_absolute():  # the specification has relative ones ignored
        try:
            config = Path.home() / ".config"
        except RuntimeError:
            return []
    return [config / "ncclops" / kind]


def with_home(path: str) -> Path:
    """``path`` with the home of a user for ``~``; as it is where there is no such home."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def load_toml(path: Path) -> dict[str, Any]:
    """What ``path`` holds.

    Raises ``OSError`` if it cannot be read, or is no regular file, no text or larger than any such
    file, and ``ValueError`` if it is no TOML, which does not name the file.
    """
    import tomllib  # modules of commands that read none import this one

    text = read_regular(path, MOST_BYTES)
    for number, line in enumerate(text.splitlines(), start=1):
        if line.count(b".") > _MOST_DOTS:
            raise ValueError(f"line {number} has more than {_MOST_DOTS} dots")
    try:
        document = text.decode("utf-8-sig")  # editors on Windows write the mark
        return tomllib.loads(document)
    except UnicodeDecodeError:
        raise OSError(errno.EILSEQ, "it is not UTF-8 text", str(path)) from None
    except tomllib.TOMLDecodeError as error:
        raise ValueError(_with_its_key(str(error), document)) from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _with_its_key(said: str, document: str) -> str:
    """What tomllib has ``said``; of a key that is there twice with its name, which that lacks."""
    if not said.startswith("Cannot overwrite a value"):
        return said
    lines = document.splitlines()
    # The number is that of the value's last line; there is none where the document ends with it.
    if number := re.search(r"line (\d+)", said):
        del lines[int(number[1]) :]
    for index in reversed(range(len(lines))):
        if key := _KEY.match(lines[index]):
            return f"line {index + 1} sets {key[1]}, which is set before it"
    return said


def refuse(problems: Iterable[str], error: type[UsageError] = UsageError) -> None:
    """Raise ``error`` with a line for each of ``problems``, of very many the first, if any."""
    lines = list(islice(problems, _MOST_PROBLEMS + 1))
    if len(lines) > _MOST_PROBLEMS:
        lines[_MOST_PROBLEMS:] = ["there is more that is wrong: mend this first"]
    if lines:
        raise error(*lines)
