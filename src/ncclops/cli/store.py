"""``ncclops store``: a store server that outlives every training host."""

from __future__ import annotations

from typing import Annotated

import typer

from ncclops.cli._output import echo
from ncclops.errors import UsageError

app = typer.Typer(no_args_is_help=True, help="Host the store that the ranks of a job meet in.")


@app.callback()
def _store() -> None:
    """Host the store that the ranks of a job meet in."""


@app.command()
def serve(
    port: Annotated[
        int, typer.Option(min=0, max=65535, metavar="PORT", help="Port; 0 for any free one.")
    ] = 0,
    all_interfaces: Annotated[
        bool,
        typer.Option(
            "--all-interfaces",
            help="Let other hosts reach it. torch's store has no password: only on a"
            " network whose every host may read and change its keys.",
        ),
    ] = False,
) -> None:
    """Serve a TCPStore until SIGTERM or Ctrl-C, and print its address.

    Ranks find it by NCCLOPS_STORE=HOST:PORT; then no rank's end takes the store away.
    """
    from ncclops.restart.store_server import serve_until_signalled

    def announce(address: str) -> None:
        echo(f"NCCLOPS_STORE={address}")

    try:
        serve_until_signalled(port, announce, loopback=not all_interfaces)
    except OSError as error:
        raise UsageError(f"--port {port}: {error.strerror or error}") from None
