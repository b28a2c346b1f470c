"""All commands as data, and the group that imports one only when it is asked for.

``ncclops --help`` and ``ncclops --version`` import no command at all: what the help shows of each
is in the table. The help is plain text by intention: importing rich takes a tenth of a second.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

from ncclops.cli import _verbosity
from ncclops.errors import UsageError
from ncclops.nearest import meant

RUN, DIAGNOSE, ENVIRONMENT = "Run", "Diagnose", "Environment"


class Command(NamedTuple):
    """One command or group; ``source`` is its module and there a function or a ``typer.Typer``.

    ``old_name`` marks a former spelling: it works, and no help shows it. ``quiet`` is what ``-q``
    leaves.
    """

    name: str
    panel: str
    summary: str
    source: str
    settings: dict[str, Any] = {}  # noqa: RUF012 - never changed
    old_name: bool = False
    quiet: str = "Say nothing on stderr but warnings and errors."


COMMANDS = (
    Command(
        "launch",
        RUN,
        "Start a script on the GPUs of this node (or of several nodes).",
        "launch:launch",
        # What follows the script belongs to the script, whatever it looks like.
        {"allow_interspersed_args": False, "allow_extra_args": True},
        quiet="Of our own lines, show only warnings, errors and where the verdict is.",
    ),
    Command("preflight", RUN, "Is this node fit for the job?", "preflight:preflight"),
    Command("self-check", RUN, "What works on this machine?", "self_check:self_check"),
    Command("status", RUN, "Show the phase, steps and memory of a run; --watch.", "status:status"),
    Command("runs", RUN, "List runs: outcome, duration, goodput, cause.", "runs:runs"),
    Command("stop", RUN, "Ask a run to stop, after the same step on all ranks.", "stop:stop"),
    Command("notify", RUN, "Try the channels that are told of a run.", "notify:app"),
    Command("store", RUN, "Serve the store in which nodes meet.", "store:app"),
    Command("diagnose", DIAGNOSE, "What happened to a run, on one page.", "diagnose:diagnose"),
    Command("stacks", DIAGNOSE, "Stacks of all ranks of a running job.", "stacks:stacks"),
    Command("incident", DIAGNOSE, "One incident: culprit, place, timeline.", "incident:incident"),
    Command(
        "classify", DIAGNOSE, "What failed in logs, and may it be retried.", "classify:classify"
    ),
    Command("flight", DIAGNOSE, "Read flight-recorder dumps of a hang.", "flight:app"),
    Command("receipt", DIAGNOSE, "Judge a run or a log by its receipts.", "receipt:app"),
    Command("report", DIAGNOSE, "A run as one HTML page.", "report:report"),
    Command(
        "export-traces",
        DIAGNOSE,
        "Send a run to an OpenTelemetry collector, as spans.",
        "export_traces:export_traces",
    ),
    Command("bundle", DIAGNOSE, "A run as one archive, without secrets.", "bundle:bundle"),
    Command("env", ENVIRONMENT, "Show, check, export and compare environments.", "env:app"),
    Command("advise", ENVIRONMENT, "Known issues of the installed versions.", "advise:advise"),
    Command("profile", ENVIRONMENT, "List, show and check launch profiles.", "profile:app"),
    Command("where", DIAGNOSE, "Now called stacks.", "stacks:stacks", old_name=True),
)


class CommandTable(TyperGroup):
    """The group of all commands."""

    def list_commands(self, ctx: Any) -> list[str]:
        """The names that help and completion show."""
        return [command.name for command in COMMANDS if not command.old_name]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command, imported now; None if there is none of this name."""
        return next((_load(each) for each in COMMANDS if each.name == cmd_name), None)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """As the base class does, which knows only commands that are imported, with suggestions."""
        if args and not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            close = meant(args[0], self.list_commands(ctx))
            hint = f"did you mean {close[0]}?" if close else "`ncclops --help` lists all"
            raise UsageError(f"there is no command {args[0]!r}: {hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """One section for each panel, in the order of the table."""
        shown = [command for command in COMMANDS if not command.old_name]
        width = max(len(command.name) for command in shown)
        for panel in dict.fromkeys(command.panel for command in shown):
            with formatter.section(panel):
                formatter.write_dl(
                    [
                        (each.name.ljust(width), each.summary)
                        for each in shown
                        if each.panel == panel
                    ]
                )


class CommandGroup(TyperGroup):
    """A command that has commands of its own."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As the base class does; without a word the help, as of ``ncclops`` itself."""
        if not args:  # the parser's own way is an error whose message is the help, in one line
            typer.echo(ctx.get_help())
            raise typer.Exit
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """As the base class does; an error says what there is: a run may have been meant for it."""
        if args and not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            names = self.list_commands(ctx)
            close = meant(args[0], names)
            hint = f"did you mean {close[0]}?" if close else f"it has {', '.join(names)}"
            raise UsageError(f"{ctx.command_path} has no command {args[0]!r}: {hint}")
        return super().resolve_command(ctx, args)


class SectionedCommand(TyperCommand):
    """A command with many options: its help shows them by their panels."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """One section for each panel of options, in their order."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                plain = "Arguments" if param.param_type_name == "argument" else "Options"
                panel = getattr(param, "rich_help_panel", None) or plain
                sections.setdefault(panel, []).append(record)
        for panel, records in sections.items():
            with formatter.section(panel):
                formatter.write_dl(records)


def _load(command: Command) -> Any:
    module, _, name = command.source.partition(":")
    source = getattr(import_module(f"ncclops.cli.{module}"), name)
    if not isinstance(source, typer.Typer):
        app = typer.Typer(add_completion=False, rich_markup_mode=None)
        app.command(command.name, cls=SectionedCommand, context_settings=command.settings or None)(
            source
        )
        source = app
    else:
        source.info.cls = CommandGroup
    # Completion is an option of the whole; typer would add it to each part.
    source._add_completion = False
    built = typer.main.get_command(source)
    built.name = command.name
    for each in _below(built):
        each.rich_markup_mode = None
        # Whole, in the list of a group's commands; the parser would cut it off.
        each.short_help = each.short_help or (each.help or "").partition("\n\n")[0]
        if not hasattr(each, "commands"):
            each.params += _verbosity.options(command.quiet)
            each.callback = _verbosity.with_logging(each.callback)
    return built


def _below(command: Any) -> Iterator[Any]:
    yield command
    for part in getattr(command, "commands", {}).values():
        yield from _below(part)
