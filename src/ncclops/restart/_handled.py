"""Whether an exception was already dealt with when another one came on top of it.

An interruption may land in ``except queue.Empty:``, which a rank that polls runs through all the
time, or in the ``finally`` that an error of the rank's own is passing through. Python chains the
earlier exception to it in both cases; only the source says which it was.
"""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterator
from types import FrameType


def is_handled(earlier: BaseException, later: BaseException) -> bool:
    """Whether ``later`` came in an ``except`` clause that would not have let ``earlier`` out.

    ``False`` also where the source cannot be read.
    """
    caught = earlier.__traceback__
    if caught is None:
        return False
    frame = caught.tb_frame  # the outermost that it has reached: where it was caught
    line = _line_in(frame, later)
    clause = None if line is None else _innermost_handler(frame, line)
    return clause is not None and not any(isinstance(node, ast.Raise) for node in _own(clause))


def _line_in(frame: FrameType, error: BaseException) -> int | None:
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame is frame:
            return trace.tb_lineno
        trace = trace.tb_next
    return None


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


def _own(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes below ``node``, without those of functions that are defined there."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from _own(child)
