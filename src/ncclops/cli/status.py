"""``ncclops status``: the progress of a run, once or live."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ncclops.cli._options import JsonOption
from ncclops.cli._output import note, print_json, stdout_console
from ncclops.errors import UsageError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ncclops.status.model import RunStatus

# A person reads no faster, and the agent's server looks no more often than twice as fast.
_WATCH_EVERY_S = 1.0
# Nothing is cut that a user may search for with grep.
_PIPE_COLUMNS = 200


def status(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN]",
            help="Run directory, run id or its beginning; default: the newest run under way in"
            " runs/, else the newest of all.",
        ),
    ] = None,
    as_json: JsonOption = False,
    watch: Annotated[
        bool,
        typer.Option("--watch", help="A live screen, with keys; without a keyboard, a live table."),
    ] = False,
) -> None:
    """Show what a run is doing: its phase, and for each rank step, step time and memory.

    Asks the run's agent, and reads the run directory where that does not answer.
    """
    from ncclops.control import client
    from ncclops.record import runs

    if watch and as_json:
        raise UsageError("--watch draws for a terminal and --json is for programs: give one")
    if watch and not sys.stdout.isatty():
        raise UsageError("--watch needs a terminal: without one, ask again and again with --json")
    found = runs.find(run)
    if found.other_live:
        more = found.other_live
        note(f"{more} more run{'s are' if more > 1 else ' is'} under way; this is the newest")
    if watch:
        from ncclops.live_view.terminal import has_keys

        (_watch_with_keys if has_keys() else _watch)(found.path)
        return
    seen = client.status_of(found.path)
    if as_json:
        print_json(seen.to_json())
    else:
        from ncclops.cli import _status_table

        width = None if sys.stdout.isatty() else _PIPE_COLUMNS
        stdout_console().print(_status_table.draw(seen), width=width)


def _watch_with_keys(run_dir: Path) -> None:
    """The screen; what was known last stays on the terminal, as the table without keys does."""
    import os
    import signal
    from contextlib import suppress

    from ncclops.cli import _status_table
    from ncclops.control import client
    from ncclops.live_view.terminal import Left
    from ncclops.live_view.watching import watch

    seen = client.status_of(run_dir)
    try:
        seen = watch(run_dir, seen)
    except Left as left:
        if left.signum is not None:  # as whoever sent it expects
            signal.signal(left.signum, signal.SIG_DFL)
            os.kill(os.getpid(), left.signum)
        return  # nobody is there to read
    console = stdout_console()
    with suppress(OSError):
        console.print(_status_table.draw(seen, height=console.size.height))


def _watch(run_dir: Path) -> None:
    from rich.live import Live

    from ncclops.cli import _status_table

    console = stdout_console()

    def draw(seen: RunStatus) -> RenderableType:
        return _status_table.draw(seen, height=console.size.height)

    try:
        if console.is_dumb_terminal:  # on which `Live` draws at its end alone
            for seen in _looks(run_dir):
                console.print(draw(seen))
            return
        with Live(console=console, auto_refresh=False) as live:
            for seen in _looks(run_dir):
                live.update(draw(seen), refresh=True)
    except KeyboardInterrupt:
        return  # the way to stop looking; the run goes on


def _looks(run_dir: Path) -> Iterator[RunStatus]:
    """The status once a second, until the run has ended."""
    import time

    from ncclops.control import client

    yield (seen := client.status_of(run_dir))
    while seen.phase not in ("ended", "lost"):
        # A table of what changes all the time: there is no event but the clock.
        time.sleep(_WATCH_EVERY_S)
        yield (seen := client.status_of(run_dir))
