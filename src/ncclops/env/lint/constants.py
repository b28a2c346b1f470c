"""Variables of a shell script that it gives one value, which is known from the text."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from functools import cached_property

from ncclops.env.lint.words import NAME, Word

# ``NCCL_DEBUG=$LEVEL``, ``--env=NCCL_DEBUG="${LEVEL:-WARN}"``: the value is that of one variable.
_REFERENCE = re.compile(
    rf"""(?P<before>[^\s$"'`]*=)"?\$(?:(?P<bare>{NAME})|\{{(?P<braced>{NAME})(?::?-[^}}$`]*)?\}})"?"""
)
# What is the same as a word of its own and as the value of an assignment.
_PLAIN = re.compile(r"[\w./:,@%^+-]*")
# Lines in which a name stands, and is given no value.
_ONLY_NAMED = re.compile(r"^[ \t]*(?:#|echo\b|printf\b(?! +-v)|export +[\w ]+$).*", re.MULTILINE)


class Constants:
    """``text`` is the whole script: a variable that is mentioned in it other than as ``$NAME`` more
    than once may be given another value (``read``, ``for``, a branch), and counts as unknown."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._values: dict[str, str] = {}

    def learn(self, name: str, value: str) -> None:
        """``name`` certainly has this value from here on, if nothing else gives it one."""
        if _PLAIN.fullmatch(value):
            self._values[name] = value

    def put_into(self, word: Word) -> Word:
        """``word`` with the value in the place of the variable; itself where none is known."""
        if self._values and (found := _REFERENCE.fullmatch(word.raw)):
            name = found["bare"] or found["braced"]
            if name in self._values and self._is_given_once(name):
                text = found["before"] + self._values[name]
                return replace(word, text=text, constant=True)
        return word

    def _is_given_once(self, name: str) -> bool:
        return self._mentions[name] == 1

    @cached_property
    def _mentions(self) -> Counter[str]:
        text = _ONLY_NAMED.sub("", self._text)
        mentions = Counter(re.findall(rf"(?<![\w$]){NAME}", text))
        mentions.subtract(re.findall(rf"\$\{{({NAME})", text))
        return mentions
