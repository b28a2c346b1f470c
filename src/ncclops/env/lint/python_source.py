"""What a Python file sets in ``os.environ``, and hands to programs in dictionaries."""

from __future__ import annotations

import ast
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress

from ncclops.env.lint import slips
from ncclops.env.lint.environments import Found, Scope, is_setting_of_interest
from ncclops.env.lint.model import Setting
from ncclops.env.lint.passing import passed
from ncclops.env.lint.shell import read_shell
from ncclops.env.lint.words import NAME, Word, is_open

_BY_LINE = re.compile(
    rf"^\s*os\.environ(?:\[|\.setdefault\()\s*[\"']({NAME})[\"'](?:\]\s*=|,)\s*[\"']([^\"']*)[\"']\)?"
    r"\s*(?:#.*)?$"
)
_MOST_LEVELS = 60
_HANDS_ON = re.compile(
    r"(?:^|\s)(?:-x|-e|--env|--export|export)[= ]\s*(?:ALL,)?"
    r"(?:NCCL_|TORCH_|GLOO_|OFI_NCCL_)\w*="
)
_ENVIRONMENT = re.compile(r"(?i)(?:\w*_)?env(?:s|iron(?:ment)?)?(?:_?var(?:iable)?s?)?")
# Methods and functions that are given a name and a value.
_SETTERS = re.compile(
    r"(?i)(?:put|(?:set|add|with)_?)?env(?:ironment)?(?:_?var(?:iable)?)?|setdefault"
)
_RUN = frozenset(
    {"system", "popen", "run", "Popen", "call", "check_call", "check_output", "getoutput"}
)
_LEADING = re.compile(r"\s*(?:NCCL_|TORCH_|GLOO_|OFI_NCCL_)\w*=\S*\s+\S")
_SAYS = frozenset(
    {"print", "info", "warning", "warn", "error", "debug", "critical", "exception", "add_argument"}
    | {"exit", "fail", "skip", "echo", "log"}
)


# What stands first in a line of a string, up to a quote and what escapes or fills in.
_FIRST_IN_LINE = re.compile(r"""\s*(?:[A-Za-z]{0,2}["']{1,3}\s*)?([^\s"'\\{}][^"'\\{}]*)""")
_MOST_BETWEEN = 4000


def read_python(text: str, found: Found, line: int = 1) -> None:
    """Tell ``found`` what ``text`` sets. What is no Python (a template) is read line by line."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        if line == 1:  # else a text that a script writes, in which something is to be filled in
            found.slips.append(slips.of_python(error))
        for number, row in enumerate(text.splitlines(), start=line):
            if match := _BY_LINE.match(row):
                value = None if is_open(match[2]) else match[2]
                found.note(Setting(match[1], value, number))
        return
    values = _Values(tree)
    reader = _Reader(Scope(found), found, line - 1, values)
    reader.body(tree.body)
    reader.scope.close()
    _dictionaries(tree, found, line - 1, values)
    _commands(tree, found, line - 1, text.splitlines())


class _Reader:
    def __init__(self, scope: Scope, found: Found, offset: int, values: _Values) -> None:
        self.scope, self.found, self.offset, self.values = scope, found, offset, values
        self.depth = 0

    def body(self, statements: Iterable[ast.stmt]) -> None:
        if self.depth > _MOST_LEVELS:
            return
        self.depth += 1
        for statement in statements:
            self.statement(statement)
        self.depth -= 1

    def statement(self, node: ast.stmt) -> None:
        if isinstance(node, ast.If):
            self._branches([node.body, node.orelse], complete=True)
        elif isinstance(node, ast.For | ast.AsyncFor | ast.While):
            if isinstance(node, ast.For):
                self.pairs(node)
            self._branches([node.body], complete=False)
        elif isinstance(node, ast.Try):
            self.body(node.body)
            self._branches([handler.body for handler in node.handlers], complete=False)
            self.body(node.orelse)
            self.body(node.finalbody)
        elif isinstance(node, ast.Match):
            self._branches([case.body for case in node.cases], complete=False)
        elif isinstance(node, ast.With | ast.AsyncWith):
            for item in node.items:
                self.expression(item.context_expr)
            self.body(node.body)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            # when it runs, and after what, is not known
            choices = Scope(self.found).alternatives(complete=True)
            inner = _Reader(choices.scope, self.found, self.offset, self.values)
            inner.depth = self.depth
            with choices.branch():
                inner.body(node.body)
        elif isinstance(node, ast.Return | ast.Raise):
            if isinstance(node, ast.Return):
                self.scope.close_part()  # whoever called goes on with what is set
            self.scope.end()
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                self.store(target, node.value)
            self.expression(node.value)
        elif isinstance(node, ast.AugAssign):
            if _is_environ(node.target) and isinstance(node.value, ast.Dict):
                self.mapping(node.value)
        elif isinstance(node, ast.Delete):
            for target in node.targets:
                if isinstance(target, ast.Subscript) and _is_environ(target.value):
                    self.unset(target.slice)
        elif isinstance(node, ast.Expr):
            self.expression(node.value)

    def _branches(self, bodies: Iterable[list[ast.stmt]], complete: bool) -> None:
        choices = self.scope.alternatives(complete)
        for body in bodies:
            with choices.branch():
                self.body(body)
        choices.merge()

    def pairs(self, node: ast.For) -> None:
        """``for name, value in [("A", "1")]: os.environ[name] = value``."""
        sets = any(
            isinstance(inner, ast.Subscript)
            and isinstance(inner.ctx, ast.Store)
            and (_is_environ(inner.value) or _is_for_others(inner.value))
            for statement in node.body
            for inner in ast.walk(statement)
        )
        for item in node.iter.elts if sets and isinstance(node.iter, ast.List | ast.Tuple) else ():
            if isinstance(item, ast.Tuple) and len(item.elts) == 2:
                self.assign(item.elts[0], item.elts[1], certain=False)

    def store(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Subscript):
            if _is_environ(target.value):
                self.assign(target.slice, value)
            elif _is_for_others(target.value):
                self.hand_on(target.slice, value)

    def hand_on(self, key: ast.expr, value: ast.expr) -> None:
        """A variable for another process: what it is given together with is not followed."""
        name = self.values.text(key)
        if name is not None and is_setting_of_interest(name):
            self.found.note(Setting(name, self.values.text(value), value.lineno + self.offset))

    def expression(self, node: ast.expr) -> None:
        if not isinstance(node, ast.Call):
            return
        function = node.func
        if not isinstance(function, ast.Attribute):
            return
        arguments = node.args
        if _is_environ(function.value):
            if function.attr == "setdefault" and len(arguments) == 2:
                self.assign(arguments[0], arguments[1])
            elif function.attr == "update":
                for argument in arguments:
                    if isinstance(argument, ast.Dict):
                        self.mapping(argument)
                for keyword in node.keywords:
                    if keyword.arg:
                        self.assign(ast.Constant(keyword.arg), keyword.value)
            elif function.attr == "pop" and arguments:
                self.unset(arguments[0])
        elif function.attr == "putenv" and len(arguments) == 2:
            self.assign(arguments[0], arguments[1])
        elif _SETTERS.fullmatch(function.attr) and len(arguments) == 2:
            self.hand_on(arguments[0], arguments[1])
        if isinstance(function.value, ast.Call):
            self.expression(function.value)  # image.env("A", "1").run()

    def mapping(self, node: ast.Dict) -> None:
        for key, value in zip(node.keys, node.values, strict=True):
            if key is not None:
                self.assign(key, value)

    def assign(self, key: ast.expr, value: ast.expr, certain: bool = True) -> None:
        name = self.values.text(key)
        if name is None:
            return
        line = getattr(value, "lineno", 1) + self.offset
        is_text = not isinstance(value, ast.Constant) or isinstance(value.value, str)
        if not is_text and certain and is_setting_of_interest(name):
            self.found.slips.append(slips.no_text(name, ast.unparse(value), line))
        self.scope.assign(Setting(name, self.values.text(value), line))

    def unset(self, key: ast.expr) -> None:
        if isinstance(key, ast.Constant) and isinstance(key.value, str):
            self.scope.unset(key.value)


def _name_of(node: ast.expr) -> str:
    """The last name of ``a.b.name`` and of ``name``, or of what is called."""
    return getattr(node, "attr", "") or getattr(node, "id", "")


def _is_environ(node: ast.expr) -> bool:
    """``os.environ``, or a bare ``environ``."""
    return _name_of(node) == "environ"


def _is_for_others(node: ast.expr) -> bool:
    """A mapping for another process, by its name: ``env``, ``self.env_vars``, ``child_env``."""
    return _ENVIRONMENT.fullmatch(_name_of(node)) is not None


class _Values:
    """What the expressions of a module come to, as far as its text says."""

    def __init__(self, tree: ast.Module) -> None:
        self._names: dict[str, ast.expr] = {}
        counts: Counter[str] = Counter()
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
                counts[node.id] += 1
            elif isinstance(node, ast.arg):
                counts[node.arg] += 1
        for statement in tree.body:
            if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
                target = statement.targets[0]
                if isinstance(target, ast.Name) and counts[target.id] == 1:
                    self._names[target.id] = statement.value

    def text(self, node: ast.expr, depth: int = 0) -> str | None:
        """The value as a text; None where it is known only when it runs."""
        if depth > _MOST_LEVELS:
            return None
        if isinstance(node, ast.Constant):
            if isinstance(node.value, str):
                return None if is_open(node.value) else node.value
            if isinstance(node.value, int) and not isinstance(node.value, bool):
                with suppress(ValueError):  # a number of thousands of digits
                    return str(node.value)
        elif isinstance(node, ast.Name) and isinstance(self._names.get(node.id), ast.Constant):
            return self.text(self._names[node.id], depth + 1)
        elif isinstance(node, ast.JoinedStr):
            parts = [p.value if isinstance(p, ast.Constant) else None for p in node.values]
            return "".join(map(str, parts)) if None not in parts else None
        elif isinstance(node, ast.IfExp):
            either, other = (self.text(n, depth + 1) for n in (node.body, node.orelse))
            return either if either == other else None
        elif isinstance(node, ast.BoolOp) and isinstance(node.op, ast.Or):
            return self.text(node.values[-1], depth + 1)
        elif isinstance(node, ast.Call):
            name = _name_of(node.func)
            if name == "str" and len(node.args) == 1:
                return self.text(node.args[0], depth + 1)
            taken = name == "getenv" or (name == "get" and isinstance(node.func, ast.Attribute))
            if taken and len(node.args) == 2:
                # what is there stays; else this is the value, as in ${NAME:-VALUE}
                return self.text(node.args[1], depth + 1)
        return None


def _dictionaries(tree: ast.Module, found: Found, offset: int, values: _Values) -> None:
    """``{"NCCL_DEBUG": "INFO", …}`` for a process, a container or a Ray job: each by itself.

    Also ``dict(os.environ, NCCL_DEBUG="INFO")``, and ``{"name": "NCCL_DEBUG", "value": "INFO"}``.
    """
    for node in ast.walk(tree):
        pairs = list(_pairs(node, values))
        settings = [
            Setting(name, values.text(value), value.lineno + offset)
            for name, value in pairs
            if isinstance(value, ast.Constant | ast.JoinedStr | ast.Call | ast.Name | ast.BoolOp)
            and not (isinstance(value, ast.Constant) and not isinstance(value.value, str))
        ]
        # one name alone may be anything: a default, a help text, what is expected of a command
        if any(is_setting_of_interest(s.name) and s.value is not None for s in settings):
            for setting in settings:
                if is_setting_of_interest(setting.name):
                    found.note(setting)
            found.add_environment([s for s in settings if _is_name(s.name)], branched=False)


def _pairs(node: ast.AST, values: _Values) -> Iterator[tuple[str, ast.expr]]:
    """Names and values in ``node``, if it is a dictionary or a call that may make one."""
    given: dict[str, ast.expr] = {}
    if isinstance(node, ast.Dict):
        for key, value in zip(node.keys, node.values, strict=True):
            name = values.text(key) if key is not None else None
            if name is not None:
                given[name] = value
    elif isinstance(node, ast.Call):
        given = {k.arg: k.value for k in node.keywords if k.arg}
        called = _name_of(node.func)
        if called == "V1EnvVar" and len(node.args) == 2:
            given.update(name=node.args[0], value=node.args[1])
        elif called not in ("dict", "update") and not _ENVIRONMENT.fullmatch(called):
            given = {
                key: given[key] for key in ("name", "value") if len(given) == 2 and key in given
            }
        if not is_setting_of_interest(values.text(given.get("name", node.func)) or ""):
            given = {name: value for name, value in given.items() if is_setting_of_interest(name)}
    if "name" in given and "value" in given:
        name = values.text(given["name"])
        if name is not None and is_setting_of_interest(name):
            yield name, given["value"]
            return
    yield from given.items()


def _commands(tree: ast.Module, found: Found, offset: int, rows: Sequence[str]) -> None:
    """Command lines: lists of words, and strings for a shell. What is documentation is none."""
    prose = set(_not_commands(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.args and _name_of(node.func) in _RUN:
            first = node.args[0]
            text = _shell_text(first)
            if _LEADING.match(text):
                read_shell(_as_written(text, first, rows), found, line=first.lineno + offset)
        if isinstance(node, ast.List | ast.Tuple):
            words = [_word(item, offset) for item in node.elts]
            given = [s for s in passed(words) if _is_name(s.name)]
            if any(is_setting_of_interest(setting.name) for setting in given):
                Scope(found).run(given)
        elif isinstance(node, ast.Constant | ast.JoinedStr) and id(node) not in prose:
            text = _shell_text(node)
            if text and _HANDS_ON.search(text):
                read_shell(_as_written(text, node, rows), found, line=node.lineno + offset)


def _not_commands(tree: ast.Module) -> Iterator[int]:
    """Documentation, what is printed or logged or raised, and the parts of longer strings."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield id(node.value)
        elif isinstance(node, ast.JoinedStr):
            yield from map(id, node.values)
        elif isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name in _SAYS or name.endswith(("Error", "Exception", "Warning")):
                yield from map(id, node.args)
            yield from (id(k.value) for k in node.keywords if k.arg in ("help", "description"))


def _word(node: ast.expr, offset: int) -> Word:
    text = _shell_text(node)
    known = isinstance(node, ast.Constant)
    return Word(text or "", known, True, node.lineno + offset, text or "")


def _shell_text(node: ast.expr) -> str:
    """A string as a shell would get it; what is filled in is a variable there."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        known = (_shell_text(p) if isinstance(p, ast.Constant) else "${X}" for p in node.values)
        return "".join(known)
    return ""


def _as_written(text: str, node: ast.expr, rows: Sequence[str]) -> str:
    """``text``, which ``node`` comes to, in as many lines as it is written in.

    To a shell, a line that goes on is no other text. Where a line of the file begins in the text is
    told by what stands first in it.
    """
    last = node.end_lineno or node.lineno
    if text.count("\n") >= last - node.lineno:
        return text
    pieces: list[str] = []
    at = lines = 0
    for below, row in enumerate(rows[node.lineno : last], start=1):
        begin = _FIRST_IN_LINE.match(row)
        place = text.find(begin[1], at, at + _MOST_BETWEEN) if begin else -1
        if place >= 0:
            lines += text.count("\n", at, place)
            pieces += [text[at:place], "\\\n" * (below - lines)]
            at, lines = place, max(lines, below)
    return "".join([*pieces, text[at:]])


def _is_name(name: str) -> bool:
    return re.fullmatch(NAME, name) is not None
