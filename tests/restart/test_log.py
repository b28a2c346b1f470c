"""Where the records of the main process go."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from ncclops.restart.log import set_up_logging

LOGGER = logging.getLogger("ncclops.restart")


@pytest.fixture
def ancestor() -> Iterator[logging.Logger]:
    """The nearest ancestor, without a handler; what the test changes is undone."""
    nearest = logging.getLogger("ncclops")
    before = [(logger, logger.handlers[:], logger.propagate) for logger in (nearest, LOGGER)]
    for logger in (nearest, LOGGER):
        logger.handlers[:] = []
    yield nearest
    for logger, handlers, propagate in before:
        logger.handlers[:], logger.propagate = handlers, propagate
    set_up_logging(0)


def test_they_go_to_the_nearest_stream_handler_and_into_no_file(
    ancestor: logging.Logger, tmp_path: Path
) -> None:
    stream, of_the_root = io.StringIO(), io.StringIO()
    file = logging.FileHandler(tmp_path / "log")
    outer = logging.StreamHandler(of_the_root)
    ancestor.addHandler(file)
    ancestor.addHandler(logging.StreamHandler(stream))
    logging.getLogger().addHandler(outer)
    try:
        set_up_logging(3)
        set_up_logging(3)  # the second call of a wrapped function
        LOGGER.warning("once")
    finally:
        logging.getLogger().removeHandler(outer)
        file.close()
    assert stream.getvalue() == "[rank 3] once\n"
    assert (tmp_path / "log").read_text() == ""
    assert of_the_root.getvalue() == ""


def test_without_any_they_go_where_python_sends_them(ancestor: logging.Logger) -> None:
    """The application may set logging up later; nothing of it is anticipated."""
    assert not ancestor.handlers
    root = logging.getLogger()
    before, root.handlers[:] = root.handlers[:], []
    try:
        set_up_logging(0)
        assert LOGGER.handlers == []
        assert LOGGER.propagate
    finally:
        root.handlers[:] = before
