"""Whether an exception was already dealt with when another one came on top of it.

An interruption may land in ``except queue.Empty:``, which a rank that polls runs through all the
time, or in the ``finally`` that an error of the rank's own is passing through. Python chains the
earlier exception to it in both cases; only the source says which it was.
"""

from __future__ import annotations

import ast
import linecache
import sys
from collections.abc import Iterable, Iterator
from traceback import walk_stack, walk_tb
from types import FrameType


def is_handled(earlier: BaseException, later: BaseException) -> bool:
    """Whether ``later`` came in an ``except`` clause that would not have let ``earlier`` out.

    ``False`` also where the source cannot be read.
    """
    return _is_handled_in(walk_tb(later.__traceback__), earlier)


def passes_through(thread: int, frame: FrameType) -> Exception | None:
    """The exception that ``thread``, which is in ``frame``, is still to let out: it runs what is to
    be done before, in a ``finally``, an ``__exit__`` or an ``except`` that raises it again."""
    current = sys._current_exceptions().get(thread)
    error = current[1] if isinstance(current, tuple) else current  # 3.11: sys.exc_info()
    if not isinstance(error, Exception) or _is_handled_in(walk_stack(frame), error):
        return None
    return error


def _is_handled_in(places: Iterable[tuple[FrameType, int]], error: BaseException) -> bool:
    if (caught := error.__traceback__) is None:
        return False
    frame = caught.tb_frame  # the outermost that it has reached: where it was caught
    line = next((line for each, line in places if each is frame), None)
    clause = None if line is None else _innermost_handler(frame, line)
    return clause is not None and line is not None and _ends(clause.body, line) != {_RAISES}


def _innermost_handler(frame: FrameType, line: int) -> ast.ExceptHandler | None:
    """The ``except`` clause that has ``line``; ``None`` if a ``finally`` in it has it."""
    source = "".join(linecache.getlines(frame.f_code.co_filename, frame.f_globals))
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return None
    found: tuple[int, ast.ExceptHandler | None] | None = None
    for node in ast.walk(tree):
        for clause, body in _clauses(node):
            if body and body[0].lineno <= line <= (body[-1].end_lineno or 0):
                begins = clause.lineno if clause is not None else body[0].lineno
                found = max(found or (0, None), (begins, clause), key=lambda each: each[0])
    return found[1] if found is not None else None


def _clauses(node: ast.AST) -> Iterator[tuple[ast.ExceptHandler | None, list[ast.stmt]]]:
    if isinstance(node, ast.Try | ast.TryStar):
        yield None, node.finalbody
        for handler in node.handlers:
            yield handler, handler.body


# How a part of a function may end.
_RAISES, _RETURNS, _JUMPS, _GOES_ON = "raise", "return", "break or continue", "next statement"
_ENDS: dict[type[ast.stmt], str] = {
    ast.Raise: _RAISES,
    ast.Return: _RETURNS,
    ast.Break: _JUMPS,
    ast.Continue: _JUMPS,
}


def _ends(block: list[ast.stmt], line: int) -> set[str]:
    """How ``block`` may end that has got to ``line``, or not yet as far, whatever is decided there.

    A retry that raises only after the last time has dealt with an exception when it tries again.
    """
    ends: set[str] = set()
    for statement in block:
        if (statement.end_lineno or 0) >= line:
            possible = _statement_ends(statement, line)
            ends |= possible - {_GOES_ON}
            if _GOES_ON not in possible:
                return ends
    return ends | {_GOES_ON}


def _statement_ends(statement: ast.stmt, line: int) -> set[str]:
    if type(statement) in _ENDS:
        return {_ENDS[type(statement)]}
    is_loop = isinstance(statement, ast.For | ast.AsyncFor | ast.While)
    for part in _parts(statement):
        if part[0].lineno <= line <= (part[-1].end_lineno or 0):
            ends = _ends(part, line)
            return ends - {_JUMPS} | {_GOES_ON} if is_loop else ends
    if isinstance(statement, ast.If):
        return _ends(statement.body, line) | _ends(statement.orelse, line)
    if isinstance(statement, ast.With | ast.AsyncWith):
        return _ends(statement.body, line)
    return {_GOES_ON}


def _parts(statement: ast.stmt) -> Iterator[list[ast.stmt]]:
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return
    parts = [getattr(statement, name, []) for name in ("body", "orelse", "finalbody")]
    parts += [
        each.body for each in getattr(statement, "handlers", []) + getattr(statement, "cases", [])
    ]
    yield from filter(None, parts)
