"""``ncclops notify``: are the channels of ``[notify]`` what they should be?"""

from __future__ import annotations

import os
from typing import Annotated

import typer

from ncclops.cli._options import JsonOption, ParamOption, profile_option
from ncclops.cli._output import echo, note, print_json
from ncclops.errors import UsageError

_SCHEMA = "ncclops.notify-test/1"

app = typer.Typer(no_args_is_help=True, help="Try the channels of [notify].")


@app.callback()
def _notify() -> None:
    """Try the channels of [notify]."""


@app.command()
def test(
    profile: Annotated[
        list[str] | None,
        profile_option("The profile whose channels are tried. Default: as of launch."),
    ] = None,
    param: ParamOption = None,
    to: Annotated[
        list[str] | None,
        typer.Option("--to", metavar="CHANNEL", help="Only this channel; may be repeated."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Send one message that says it is a test to each channel, and say what came of it.

    Whatever the rules of the channel are, without a job, with one try of 10 s each. Exits with 1
    where one was not sent.
    """
    from ncclops.env.request import resolve_profile
    from ncclops.host_name import host_name
    from ncclops.nearest import nearest
    from ncclops.notify.trying import try_channels
    from ncclops.profiles.parameters import parse_parameters

    found = resolve_profile(profile, parameters=parse_parameters(param), say=note)
    channels = found.notify.to
    for name in to or ():
        if name not in channels:
            there = nearest(name, channels) or "; it has no channel"
            raise UsageError(f"--to {name}: profile {found.name} has no such channel{there}")
    if not channels:
        raise UsageError(
            f"profile {found.name} tells nobody: add a channel, [notify.to.NAME] (docs/notify.md)"
        )
    wanted = {name: each for name, each in channels.items() if not to or name in to}
    tried = try_channels(wanted, os.environ, profile=found.name, node=host_name())
    if as_json:
        rows = [
            {
                "name": each.name,
                "kind": each.kind,
                "sent": not each.why,
                "seconds": round(each.seconds, 3),
                "error": each.why or None,
            }
            for each in tried
        ]
        print_json({"schema": _SCHEMA, "profile": found.name, "channels": rows})
    else:
        name_width = max(len(each.name) for each in tried)
        kind_width = max(len(each.kind) for each in tried)
        for each in tried:
            came = f"not sent: {each.why}" if each.why else "sent"
            start = f"{each.name.ljust(name_width)}  {each.kind.ljust(kind_width)}"
            echo(f"{start}  {came} ({each.seconds:.1f} s)")
    if any(each.why for each in tried):
        raise typer.Exit(1)
