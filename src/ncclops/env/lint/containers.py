"""What YAML and JSON set: Kubernetes, Compose, SkyPilot, Ray, workflows, chart values.

The environment of a container or task is a scope of its own, and so are the commands beside it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise, permutations
from typing import Any

from ncclops.env.catalogue import catalogue
from ncclops.env.lint import slips
from ncclops.env.lint.environments import Found, Scope, is_setting_of_interest, watched
from ncclops.env.lint.model import Setting
from ncclops.env.lint.passing import OPEN_MPI, is_of_ranks, listed, names_passed, passed
from ncclops.env.lint.shell import read_shell
from ncclops.env.lint.words import NAME, Word, is_open, without_comment

_ENTRY = re.compile(rf"\s*+(?:-\s*+)?name:\s*+[\"']?({NAME})[\"']?\s*+")
_FLOW_ENTRY = re.compile(
    rf"\s*+(?:-\s*+)?\{{\s*+name:\s*+[\"']?({NAME})[\"']?\s*+,\s*+value:([^}}]*)\}}.*"
)
_VALUE = re.compile(r"\s*value:\s*(.*)")
_MAPPING = re.compile(r"\s*([A-Z][A-Z0-9]*_[A-Z0-9_]+):\s+(\S.*)")
_ITEM = re.compile(rf"\s*-\s*[\"']?({NAME})=([^\"']*)[\"']?\s*")
_TEMPLATE = re.compile(r"\{\{|\{%|<%")
_TEMPLATE_LINE = re.compile(r"^[ \t]*(?:\{\{-?[^{}\n]*\}\}|\{%[^%\n]*%\})[ \t]*$", re.MULTILINE)
_TEMPLATE_PIECE = re.compile(r"\{\{[^{}\n]*\}\}|\{%[^%\n]*%\}")
_FILLED = "TEMPLATE@@"
_MOST_LEVELS = 100
_TOO_DEEP = f"it is nested more than {_MOST_LEVELS} levels deep"
# A megabyte with aliases can repeat an environment of thousands of variables, or a script, tens of
# thousands of times. A node is read so often in any case, and beyond that so many characters are in
# all; a part of a mapping or of a sequence counts for so many.
_FREE_READS, _MOST_REPEATED, _PART = 8, 1_000_000, 10
_ENV_KEY = re.compile(
    r"(?:\w+_)?(?:env|envs|environ|environment|env_?vars|env_?variables|environment_?variables)"
    r"|env_set|extra_?env(?:_?vars)?|variables"
)
# Keys of properties that hold a variable for the processes of a job: spark.executorEnv.NAME.
_ENV_PROPERTY = re.compile(rf"[\w.]*[Ee]nv(?:ironment)?\.({NAME})")
# Files whose names begin with a point.
_HIDDEN_FILE = re.compile(r"\.(?:env[\w.]*|\w*env|\w+rc|nccl\.conf)")
# Literals that a template takes where nothing else is given.
_FALLBACK = re.compile(
    r"""\{\{[^{}\n]{0,200}?\bdefault[( ]\s*"""
    r"""(?:"([^"{}\n]*)"|'([^'{}\n]*)'|(-?\d+))[^{}\n]{0,200}\}\}"""
)
_SHELL_FALLBACK = re.compile(rf"\$\{{{NAME}:?-([^{{}}$`]*)\}}")
# A string that does not end goes up to the end of its line, and is not searched again.
_JSON_COMMENT = re.compile(r'("(?:[^"\\\n]|\\.)*+"?)|//[^\n]*')
# What is under these keys is for the build, or for people.
_OTHER_KEYS = frozenset({"args", "build_args", "buildargs", "labels", "annotations", "inputs"})
_PROSE_KEYS = frozenset({"description", "comment", "doc", "help", "message", "title", "summary"})
# Roles of a training job whose programs are ranks of one group.
_RANKED_ROLES = frozenset({"master", "worker", "chief"})
_NULL = "tag:yaml.org,2002:null"


def problem_of_yaml(text: str) -> str | None:
    """Why ``text`` is no YAML, in words; None if it is, or may be once a template is filled in."""
    if _TEMPLATE.search(text):
        return None
    return _problem(_without_json_comments(text))


def _without_json_comments(text: str) -> str:
    """JSON as editors take it, without its comments; other text as it is."""
    if not text.lstrip().startswith(("{", "[", "//")) or not _JSON_COMMENT.search(text):
        return text
    return _JSON_COMMENT.sub(lambda match: match[1] or "", text)


def _problem(text: str) -> str | None:
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
                return _TOO_DEEP
    except yaml.MarkedYAMLError as error:
        if "nesting depth" in str(error.problem):
            return _TOO_DEEP  # libyaml has a limit of its own, from PyYAML 6.0.4 on
        mark = error.problem_mark
        return f"line {mark.line + 1}: {error.problem}" if mark else str(error.problem)
    except yaml.YAMLError as error:  # characters that are none
        return " ".join(str(error).split())
    return None


def read_yaml(text: str, found: Found, line: int = 1) -> None:
    """Tell ``found`` what ``text`` sets.

    A template is read as what it becomes, and what is no YAML even then line by line.
    """
    import yaml

    text = _without_json_comments(text)
    if _TEMPLATE.search(text):
        text = _FALLBACK.sub(lambda match: match[1] or match[2] or match[3] or "", text)
        text = _TEMPLATE_PIECE.sub(_FILLED, _TEMPLATE_LINE.sub("", text))
    documents: list[Any] = []
    if _problem(text) is None:
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        with suppress(yaml.YAMLError, RecursionError):
            documents = list(yaml.compose_all(text, Loader=loader))
    if documents:
        reader = _Reader(found, line - 1)
        for document in documents:
            reader.document(document)
        return
    settings = list(_by_line(text, line))
    for setting in settings:
        found.note(setting)
    read_shell(text, found, line=line)


def _by_line(text: str, first: int) -> Iterator[Setting]:
    """``- name: A`` with ``value: x``, ``A: x`` and ``- A=x``, wherever they stand."""
    pending: str | None = None
    for number, line in enumerate(text.splitlines(), start=first):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        named, value = pending, _VALUE.fullmatch(line)
        pending = None
        if named and value:
            yield Setting(named, _scalar_text(value[1]), number)
        elif entry := _ENTRY.fullmatch(line):
            pending = entry[1]
        elif flow := _FLOW_ENTRY.fullmatch(line):
            yield Setting(flow[1], _scalar_text(flow[2]), number)
        elif (match := _MAPPING.fullmatch(line) or _ITEM.fullmatch(line)) and match[
            2
        ].strip() not in ("null", "~"):
            yield Setting(match[1], _scalar_text(match[2]), number)


def _scalar_text(text: str) -> str | None:
    """A plain or quoted scalar; None for a template or a reference."""
    text = text.strip()
    quoted = re.fullmatch(r"(['\"])(.*?)\1(?:\s+#.*)?", text)
    value = quoted[2] if quoted else without_comment(text)
    return None if _is_open(value) or re.match(r"[|>&*{\[]", value) else value


def _is_open(value: str) -> bool:
    return is_open(value) or _FILLED in value or "$" in value


class _Reader:
    def __init__(self, found: Found, offset: int) -> None:
        self.found, self.offset = found, offset
        self.seen: set[int] = set()
        self._reads: Counter[int] = Counter()
        self._left = _MOST_REPEATED

    def document(self, node: Any) -> None:
        """A whole document, which may be nothing but an environment."""
        given = self._environment("", node) if node is not None else None
        if given:
            self._note(given)
            self._together(given)
        self.node(node)

    def node(self, node: Any) -> None:
        """A node and all below it; what an alias repeats is read once."""
        if node is None or id(node) in self.seen:
            return
        self.seen.add(id(node))
        if node.id == "mapping":
            self._mapping(node)
        elif node.id == "sequence":
            self._sequence(node, "", [])

    def _mapping(self, node: Any) -> None:
        environment: list[Setting] = []
        rest: list[tuple[str, Any]] = []
        for name, value in self._pairs(node):
            if name.endswith("ReplicaSpecs") and value.id == "mapping":
                self._compare_roles(value)
            if name == "mpiReplicaSpecs" and value.id == "mapping":
                self._of_launcher(value)
            given = self._environment(name, value)
            if given is None:
                rest.append((name, value))
            else:
                environment.extend(given)
        if environment:
            self._note(environment)
        path = next(
            (v.value for k, v in rest if k in ("path", "dest") and v.id == "scalar"),
            "",
        )
        begin = _begin(environment)
        before = len(self.found.environments)
        for name, value in rest:
            if value.id == "scalar":
                self._text(name, value, begin, path)
            elif value.id == "sequence" and id(value) not in self.seen:
                self.seen.add(id(value))
                self._sequence(value, name, begin)
            else:
                self.node(value)
        if environment and len(self.found.environments) == before:
            self._together(environment)

    def _compare_roles(self, node: Any) -> None:
        """What the master has of settings that all ranks share has to be the workers' too."""
        roles: dict[str, dict[str, Setting]] = {}
        for role, spec in self._pairs(node):
            environment = self._of_containers(spec) if role.lower() in _RANKED_ROLES else None
            if environment is not None:
                roles[role] = {s.name: s for s in environment if _is_shared(s)}
        for (role, mine), (other, theirs) in permutations(roles.items(), 2):
            alone = [
                setting
                for name, setting in mine.items()
                if setting.value is not None
                and setting.value != catalogue()[name].default
                and (name not in theirs or theirs[name].value not in (None, setting.value))
            ]
            first = role == next(iter(roles))
            # Two values that differ are told of once.
            alone = [s for s in alone if first or s.name not in theirs]
            if alone:
                self.found.slips.append(slips.roles_differ(role, other, alone))

    def _of_launcher(self, node: Any) -> None:
        """What the launcher of an MPIJob is given, and its ``mpirun`` does not hand on.

        Only where the workers are not given the same, and all of the command is written here.
        """
        roles = dict(self._pairs(node))
        launcher, workers = roles.get("Launcher"), roles.get("Worker")
        given = launcher and self._of_containers(launcher)
        theirs = self._of_containers(workers) if workers else []
        if not given or theirs is None:
            return
        words = [
            word
            for text in _texts(launcher)
            for word in re.split(r"[\s\"',]+", text)
            if word and word != "\\"
        ]
        passing = {word.partition("=")[0] for option, word in pairwise(words) if option == "-x"}
        if (
            not any(re.fullmatch(r"(?:\S*/)?mpirun", word) for word in words)
            or OPEN_MPI.isdisjoint(words)
            or any(re.search(r"[*$]", name) for name in passing)
        ):
            return
        known = passing | {setting.name for setting in theirs}
        names = [s.name for s in given if is_of_ranks(s.name) and s.name not in known]
        if names and "mca_base_env_list" not in words:
            line = next(s.line for s in given if s.name == names[0])
            giver = "the launcher's container is given"
            self.found.slips.append(slips.not_passed_on(names, line, True, giver))

    def _of_containers(self, node: Any, levels: int = 8) -> list[Setting] | None:
        """The environment of all containers below; None where it is not all written here."""
        settings: list[Setting] = []
        found_one = False
        for name, value in self._pairs(node) if node.id == "mapping" and levels else ():
            if name == "containers" and value.id == "sequence":
                for container in value.value:
                    keys = dict(self._pairs(container)) if container.id == "mapping" else {}
                    if "envFrom" in keys:
                        return None
                    found_one = True
                    entries = keys["env"].value if "env" in keys else []
                    settings += [
                        s for e in entries if not isinstance(e, tuple) for s in self._entry(e)
                    ]
            elif value.id == "mapping" and name not in ("metadata", "securityContext"):
                below = self._of_containers(value, levels - 1)
                if below is not None:
                    return below
        return settings if found_one else None

    def _note(self, environment: list[Setting]) -> None:
        for setting in environment:
            self.found.note(setting)

    def _together(self, environment: list[Setting]) -> None:
        """These settings are one environment."""
        scope = Scope(self.found, _begin(environment))
        scope.close()

    def _environment(self, key: str, node: Any) -> list[Setting] | None:
        """The settings under ``key``; None where it holds something else."""
        is_env = _ENV_KEY.fullmatch(key.replace("-", "_").lower()) is not None
        if id(node) in self.seen and not is_env:
            return None
        if node.id == "sequence" and self._may_read(node):
            settings = [s for item in node.value for s in self._entry(item)]
            wanted = is_env or any(is_setting_of_interest(s.name) for s in settings)
            items = [item for item in node.value if item.id == "mapping"]
            if settings and wanted and (is_env or len(settings) == len(items)):
                self.seen.add(id(node))
                return settings
        elif node.id == "mapping" and key.lower() not in _OTHER_KEYS:
            settings = list(self._flat(node))
            if is_env:
                lists = [value for _, value in self._pairs(node) if value.id == "sequence"]
                settings += [
                    s for value in lists for item in value.value for s in self._entry(item)
                ]
            if is_env and settings:
                self.seen.add(id(node))
                return settings
            if any(is_setting_of_interest(s.name) for s in settings):
                # a mapping of its own: a ConfigMap's data, values of a chart
                mine = [s for s in settings if is_setting_of_interest(s.name)]
                self._note(mine)
                self._together(mine)
        elif node.id == "scalar" and is_env and "=" in node.value and self._may_read(node):
            first = self._line(node) + (node.style == "|")
            parts = [
                replace(setting, value=_known(setting.value))
                for number, row in enumerate(node.value.splitlines(), start=first)
                for text in row.split()
                for setting in listed(text, Word(text, True, True, number, text))
            ]
            return parts or None
        return None

    def _entry(self, node: Any) -> Iterator[Setting]:
        """``{name: A, value: x}`` or ``A=x``."""
        if node.id == "scalar":
            if not self._may_read(node):
                return
            match = re.fullmatch(rf"({NAME})=(.*)", node.value, re.DOTALL)
            if match:
                yield Setting(match[1], _known(match[2]), self._line(node))
            return
        if node.id != "mapping":
            return
        fields = dict(self._pairs(node))
        name = next((fields[k] for k in ("name", "Name", "key", "Key") if k in fields), None)
        if name is None and len(fields) == 1:
            yield from (s for s in self._flat(node) if is_setting_of_interest(s.name))
        if name is None or name.id != "scalar" or not re.fullmatch(NAME, name.value):
            return
        value = fields.get("value", fields.get("Value"))
        if value is not None and value.id == "scalar":
            # What another file writes fills in such names itself.
            if self.offset == 0 and _has_itself(name.value, value.value):
                slip = slips.unexpanded_path(name.value, self._line(value))
                if slip not in self.found.slips:
                    self.found.slips.append(slip)
            yield Setting(name.value, _value(value), self._line(value))
        elif len(fields) > 1 and value is None and is_setting_of_interest(name.value):
            yield Setting(name.value, None, self._line(name))

    def _flat(self, node: Any) -> Iterator[Setting]:
        for key, below in self._pairs(node):
            of_property = _ENV_PROPERTY.fullmatch(key)
            name, value = of_property[1] if of_property else key, below
            if value.id == "mapping" and is_setting_of_interest(name):
                value = dict(self._pairs(value)).get("value", value)
            if value.id == "scalar" and re.fullmatch(NAME, name) and value.tag != _NULL:
                if not self._may_read(value):
                    return
                yield Setting(name, _value(value), self._line(value))

    def _sequence(self, node: Any, key: str, begin: list[Setting]) -> None:
        words = [
            Word(item.value, not _is_open(item.value), True, self._line(item), item.value)
            for item in node.value
            if item.id == "scalar" and self._may_read(item)
        ]
        given = list(passed(words))
        scope = Scope(self.found, begin)
        for name in names_passed(words):
            scope.export(name)
        if given:
            scope.run(given)
        for item in node.value:
            if item.id == "scalar":
                self._text(key, item, begin, "")
            else:
                if item.id == "mapping":
                    self._environment("", item)  # [{"A": "1"}, {"A": "2"}]: one of each
                self.node(item)

    def _text(self, key: str, node: Any, begin: list[Setting], path: str) -> None:
        """A string that may hold commands, or the text of a file."""
        text = node.value
        if key.lower() in _PROSE_KEYS or not self._may_read(node):
            return
        if not re.search(r"[A-Za-z]=|setenv", text):
            return
        line = self._line(node) + (1 if node.style in ("|", ">") else 0)
        if key in ("content", "contents", "line", "block") and path:
            self.found.embedded(text, path, line)
        elif "." in key and (not key.startswith(".") or _HIDDEN_FILE.fullmatch(key)):
            self.found.embedded(text, key, line)
        elif "\n" in text.strip() or " " in text.strip():
            filled = text.replace(_FILLED, "${TEMPLATE}")
            read_shell(filled, self.found, begin, line)

    def _may_read(self, node: Any) -> bool:
        """Whether ``node`` is read (once more): what aliases repeat has an end."""
        self._reads[id(node)] += 1
        if self._reads[id(node)] <= _FREE_READS:
            return True
        self._left -= len(node.value) * (1 if node.id == "scalar" else _PART)
        return self._left >= 0

    def _pairs(self, node: Any) -> Iterator[tuple[str, Any]]:
        """Keys and values of a mapping, with those that ``<<`` brings in."""
        for key, value in node.value if self._may_read(node) else ():
            if key.id != "scalar":
                continue
            if key.value == "<<":
                for merged in value.value if value.id == "sequence" else [value]:
                    if merged.id == "mapping" and merged is not node and self._may_read(merged):
                        yield from (
                            (k.value, v)
                            for k, v in merged.value
                            if k.id == "scalar" and k.value != "<<"
                        )
            else:
                yield key.value, value

    def _line(self, node: Any) -> int:
        line: int = node.start_mark.line + 1 + self.offset
        return line


def _texts(node: Any) -> Iterator[str]:
    """All strings under ``command`` and ``args`` below ``node``, in order."""
    for key, value in node.value if node.id == "mapping" else ():
        if key.value in ("command", "args"):
            items = value.value if value.id == "sequence" else [value]
            yield from (item.value for item in items if item.id == "scalar")
        elif value.id == "mapping":
            yield from _texts(value)
        elif value.id == "sequence":
            for item in value.value:
                yield from _texts(item)


def _has_itself(name: str, value: str) -> bool:
    """Whether a list of paths was to have its own old value in it."""
    own = rf"(?:^|:)\$(?:{name}|\{{{name}\}})(?::|$)"
    return name.endswith("PATH") and re.search(own, value) is not None


def _is_shared(setting: Setting) -> bool:
    """Whether it is NCCL's and has to be the same on all ranks."""
    variable = catalogue().get(setting.name)
    return variable is not None and variable.ranks == "equal" and setting.name.startswith("NCCL_")


def _value(node: Any) -> str | None:
    if node.tag == _NULL and not node.style:
        return None
    return _known(node.value)


def _known(value: str | None) -> str | None:
    """``value`` if it is known, or what it falls back to: ``${NAME:-VALUE}``."""
    fallback = _SHELL_FALLBACK.fullmatch(value or "")
    if value is None or fallback:
        return fallback and _known(fallback[1])
    return None if _is_open(value) else str(value)


def _begin(settings: list[Setting]) -> list[Setting]:
    """What a command begins with of an environment: that is followed, a name once."""
    return _agreed([setting for setting in settings if setting.name in watched()])


def _agreed(settings: list[Setting]) -> list[Setting]:
    """One setting a name: what a template gives twice is unknown."""
    chosen: dict[str, Setting] = {}
    for setting in settings:
        before = chosen.get(setting.name)
        differs = before is not None and before.value != setting.value
        chosen[setting.name] = replace(setting, value=None) if differs else setting
    return list(chosen.values())
