"""Environment settings in YAML manifests (Kubernetes, compose) and Dockerfiles, read by line.

A YAML parser says no more than whether a manifest is one: what matters is where a line sets a
variable, and templates are not YAML.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from ncclops.env.lint.model import Setting
from ncclops.env.lint.shell import NAME, logical_lines, without_comment, words_of

_ENTRY = re.compile(
    rf"\s*+(?:-\s*+)?\{{?\s*+name:\s*+[\"']?({NAME})[\"']?\s*+(?:,\s*+value:([^}}]*)\}})?"
)
_VALUE = re.compile(r"\s*value:\s*(.*)")
_MAPPING = re.compile(r"\s*([A-Z][A-Z0-9]*_[A-Z0-9_]+):\s+(\S.*)")
_TEMPLATE = re.compile(r"\{\{|\{%|<%")
_MOST_LEVELS = 100
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


def problem_of_yaml(text: str) -> str | None:
    """Why ``text`` is no YAML, in words; None if it is, or may be once a template is filled in."""
    if _TEMPLATE.search(text):
        return None
    import yaml

    # libyaml goes through all open brackets for each one, and through all tags for each directive.
    levels = 0
    if text.count("%TAG") > _MOST_LEVELS:
        return f"it has more than {_MOST_LEVELS} %TAG directives"
    try:
        for event in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
            levels += isinstance(event, yaml.CollectionStartEvent)
            levels -= isinstance(event, yaml.CollectionEndEvent)
            if levels > _MOST_LEVELS:
                return f"it is nested more than {_MOST_LEVELS} levels deep"
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        return f"line {mark.line + 1}: {error.problem}" if mark else str(error.problem)
    except yaml.YAMLError as error:  # characters that are none
        return " ".join(str(error).split())
    return None


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
    value = quoted[2] if quoted else without_comment(text)
    return None if re.search(r"\{\{|\$|^[|>&*]", value) else value
