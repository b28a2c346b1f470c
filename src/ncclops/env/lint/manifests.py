"""Environment settings in YAML manifests (Kubernetes, compose) and Dockerfiles, read by line.

No YAML parser: what matters is where a line sets a variable, and templates are not YAML anyway.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from ncclops.env.lint.model import Setting
from ncclops.env.lint.shell import NAME, logical_lines, words_of

_ENTRY = re.compile(
    rf"\s*(?:-\s*)?\{{?\s*name:\s*[\"']?({NAME})[\"']?\s*(?:,\s*value:\s*(.*?)\s*\}})?"
)
_VALUE = re.compile(r"\s*value:\s*(.*)")
_MAPPING = re.compile(r"\s*([A-Z][A-Z0-9]*_[A-Z0-9_]+):\s+(\S.*)")
_ITEM = re.compile(rf"\s*-\s*[\"']?({NAME})=(.*)")


def yaml_settings(text: str) -> Iterator[Setting]:
    """``- name: A`` with ``value: x``, ``A: x`` and ``- A=x``."""
    pending: str | None = None
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        named, value = pending, _VALUE.fullmatch(line)
        pending = None
        if named and value:
            yield Setting(named, _scalar(value[1]), number)
        elif entry := _ENTRY.match(line):
            pending = entry[1] if entry[2] is None else None
            if entry[2] is not None:
                yield Setting(entry[1], _scalar(entry[2]), number)
        elif match := _MAPPING.fullmatch(line) or _ITEM.fullmatch(line):
            yield Setting(match[1], _scalar(match[2].rstrip("\"'")), number)


def dockerfile_settings(text: str) -> Iterator[Setting]:
    """``ENV A=x B=y`` and the old ``ENV A x``."""
    for number, line in logical_lines(text):
        match = re.match(r"\s*ENV\s+(.*)", line, re.IGNORECASE | re.DOTALL)
        if match is None:
            continue
        words = words_of(match[1])
        if words and "=" not in words[0].text and len(words) > 1:
            rest = " ".join(word.text for word in words[1:])
            yield Setting(words[0].text, _scalar(rest), number)
            continue
        for word in words:
            name, equals, value = word.text.partition("=")
            if equals and re.fullmatch(NAME, name):
                yield Setting(name, _scalar(value) if word.constant else None, number)


def _scalar(text: str) -> str | None:
    """A plain or quoted YAML scalar; None for a template or a reference."""
    text = text.strip()
    quoted = re.fullmatch(r"(['\"])(.*?)\1(?:\s+#.*)?", text)
    value = quoted[2] if quoted else re.sub(r"\s+#.*", "", text)
    return None if re.search(r"\{\{|\$|^[|>&*]", value) else value
