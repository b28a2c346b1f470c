"""``ncclops stop``: stop a run gracefully."""

from __future__ import annotations

from typing import Annotated

import typer

from ncclops.cli._options import JsonOption, LiveRunArgument
from ncclops.cli._output import note, print_json
from ncclops.errors import UsageError
from ncclops.host_name import host_name


def stop(
    run: LiveRunArgument = None,
    reason: Annotated[
        str, typer.Option(metavar="TEXT", help="For the record of the run.")
    ] = "no reason given",
    grace: Annotated[
        str | None,
        typer.Option(
            metavar="DURATION",
            help="Grace period before SIGTERM and SIGKILL. Default: 5m.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Ask the agent of a run to stop it; it answers at once with what follows.

    Needs the run's token, so only the user who started the run can do it.
    """
    from ncclops.control import client
    from ncclops.record import runs

    found = runs.find(run, live_only=True)
    if run is None and found.other_live:
        raise UsageError(
            f"{found.other_live + 1} runs are under way in runs/: name the one to stop"
        )
    command = {"action": "stop", "reason": reason, "by": _asking(), "grace": _checked(grace)}
    message = client.send(found.path, command)
    if as_json:
        print_json(
            {
                "schema": "ncclops.stop/1",
                "run_dir": str(found.path),
                "reason": reason,
                "message": message,
            }
        )
    else:
        note(f"{found.path.name}: {message}")


def _checked(grace: str | None) -> str | None:
    from ncclops.durations import parse_duration

    try:
        if grace is not None and not parse_duration(grace):
            raise ValueError("must be positive")
    except (ValueError, OverflowError) as error:
        raise UsageError(f"--grace {grace}: {error}") from None
    return grace


def _asking() -> str:
    """The user who requests the stop, as the run's record has it."""
    import getpass

    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container without an entry for its user
        user = "unknown user"
    return f"{user}@{host_name()} with ncclops stop"
