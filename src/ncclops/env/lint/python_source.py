"""What a Python file sets in ``os.environ``, and hands to programs in dictionaries."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterable, Iterator
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
_SAYS = frozenset(
    {"print", "info", "warning", "warn", "error", "debug", "critical", "exception", "add_argument"}
    | {"exit", "fail", "skip", "echo", "log"}
)


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
    reader = _Reader(Scope(found), found, line - 1)
    reader.body(tree.body)
    reader.scope.close()
    _dictionaries(tree, found, line - 1)
    _commands(tree, found, line - 1)


class _Reader:
    def __init__(self, scope: Scope, found: Found, offset: int) -> None:
        self.scope, self.found, self.offset = scope, found, offset
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
            inner = _Reader(choices.scope, self.found, self.offset)
            inner.depth = self.depth
            with choices.branch():
                inner.body(node.body)
        elif isinstance(node, ast.Return | ast.Raise):
            self.scope.end()
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                self.store(target, node.value)
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

    def store(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Subscript) and _is_environ(target.value):
            self.assign(target.slice, value)

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
        elif function.attr in ("putenv", "setenv") and len(arguments) == 2:
            self.assign(arguments[0], arguments[1])

    def mapping(self, node: ast.Dict) -> None:
        for key, value in zip(node.keys, node.values, strict=True):
            if key is not None:
                self.assign(key, value)

    def assign(self, key: ast.expr, value: ast.expr) -> None:
        if isinstance(key, ast.Constant) and isinstance(key.value, str):
            line = getattr(value, "lineno", 1) + self.offset
            self.scope.assign(Setting(key.value, _text(value), line))

    def unset(self, key: ast.expr) -> None:
        if isinstance(key, ast.Constant) and isinstance(key.value, str):
            self.scope.unset(key.value)


def _is_environ(node: ast.expr) -> bool:
    """``os.environ``, or a bare ``environ``."""
    return (
        isinstance(node, ast.Attribute)
        and node.attr == "environ"
        and isinstance(node.value, ast.Name)
        and node.value.id == "os"
    ) or (isinstance(node, ast.Name) and node.id == "environ")


def _text(node: ast.expr) -> str | None:
    """The value, if the file says it."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return None if is_open(node.value) else node.value
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "str":
        (argument, *_) = node.args or [node]
        if isinstance(argument, ast.Constant) and isinstance(argument.value, int | str):
            with suppress(ValueError):  # a number of thousands of digits
                return str(argument.value)
    return None


def _dictionaries(tree: ast.Module, found: Found, offset: int) -> None:
    """``{"NCCL_DEBUG": "INFO", …}`` for a process, a container or a Ray job: each by itself."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Dict) or not node.keys:
            continue
        settings = [
            Setting(key.value, _text(value), value.lineno + offset)
            for key, value in zip(node.keys, node.values, strict=True)
            if isinstance(key, ast.Constant)
            and isinstance(key.value, str)
            and isinstance(value, ast.Constant | ast.JoinedStr | ast.Call | ast.Name)
        ]
        # one name alone may be anything: a default, a help text, what is expected of a command
        if any(is_setting_of_interest(s.name) and s.value is not None for s in settings):
            for setting in settings:
                if is_setting_of_interest(setting.name):
                    found.note(setting)
            found.add_environment([s for s in settings if _is_name(s.name)], branched=False)


def _commands(tree: ast.Module, found: Found, offset: int) -> None:
    """Command lines: lists of words, and strings for a shell. What is documentation is none."""
    prose = set(_not_commands(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.List | ast.Tuple):
            words = [_word(item, offset) for item in node.elts]
            given = [s for s in passed(words) if _is_name(s.name)]
            if any(is_setting_of_interest(setting.name) for setting in given):
                Scope(found).run(given)
        elif isinstance(node, ast.Constant | ast.JoinedStr) and id(node) not in prose:
            text = _shell_text(node)
            if text and _HANDS_ON.search(text):
                read_shell(text, found, line=node.lineno + offset)


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


def _is_name(name: str) -> bool:
    return re.fullmatch(NAME, name) is not None
