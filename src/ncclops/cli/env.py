"""``ncclops env``: what the environment of a job will be, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from ncclops.cli import env_audit, env_explain, env_lint, env_snapshot
from ncclops.cli._options import (
    RESTART_MODES,
    ChangedExitCodeOption,
    JsonOption,
    ParamOption,
    RestartMode,
    one_of,
    profile_option,
    shown,
)
from ncclops.cli._output import note, print_json, warn
from ncclops.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ncclops.env import Plan, PlanContext
    from ncclops.profiles import Profile

_FORMATS = ("sh", "dotenv", "json")


class _Planned(NamedTuple):
    """A plan over this process's environment, and what it was made from."""

    plan: Plan
    environ: dict[str, str]
    profile: Profile
    context: PlanContext


app = typer.Typer(
    no_args_is_help=True,
    help="Show, export and apply the environment that a profile gives a job.",
)

ProfileOption = Annotated[
    list[str] | None,
    profile_option(
        "Profile to use; repeat it to put overlays on a lane. Without it the lane is"
        " chosen for this host."
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="K=V", help="Set a variable, whatever the profile says."),
]
UnsetOption = Annotated[
    list[str] | None,
    typer.Option("--unset", metavar="K", help="Remove a variable, whatever the profile says."),
]
KeepOption = Annotated[
    list[str] | None,
    typer.Option("--keep", metavar="K", help="Leave a variable as it is here."),
]
RestartOption = Annotated[
    RestartMode,
    typer.Option(
        "--restart",
        parser=one_of("--restart", RESTART_MODES),
        metavar=shown(RESTART_MODES),
        help="How the job restarts after a fault; values of variables depend on it.",
    ),
]


@app.command()
def diff(
    two: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[A [B]]",
            hidden=True,  # the former spelling of env compare
        ),
    ] = None,
    profile: ProfileOption = None,
    param: ParamOption = None,
    set_: SetOption = None,
    unset: UnsetOption = None,
    keep: KeepOption = None,
    restart: RestartOption = "in-process",
    exit_code: ChangedExitCodeOption = False,
    as_json: JsonOption = False,
) -> None:
    """Show what a profile changes in this environment, and why.

    It is exactly what `ncclops launch` applies with the same options.
    """
    if two:
        if len(two) > 2 or profile or param or set_ or unset or keep:
            raise UsageError(
                "env diff shows a plan; two environments are compared by `ncclops env compare A B`"
            )
        env_snapshot.compare(two, as_json=as_json, exit_code=exit_code)
        return
    planned = _plan(profile, param, set_, unset, keep, restart)
    plan, environ = planned.plan, planned.environ
    if as_json:
        more = {"from_files": _files_after(plan, environ), "inherited": _inherited(planned)}
        print_json(_with_origins(plan) | more)
    else:
        from ncclops.cli._env_table import print_files, print_inherited, print_plan

        print_plan(plan, _origins(plan, ("unset", "scrub")))
        print_files(_files_after(plan, environ))
        print_inherited(_inherited(planned))
    if exit_code and any(change.action != "keep" for change in plan.changes):
        raise typer.Exit(1)


@app.command()
def export(
    profile: ProfileOption = None,
    param: ParamOption = None,
    set_: SetOption = None,
    unset: UnsetOption = None,
    keep: KeepOption = None,
    restart: RestartOption = "in-process",
    format_: Annotated[
        str,
        typer.Option(
            "--format",
            parser=one_of("--format", _FORMATS),
            metavar=shown(_FORMATS),
            help="What to write.",
        ),
    ] = "sh",
) -> None:
    """Print the environment for a shell to eval, or for another program to read.

    Per-rank paths are filled in with the current directory.
    """
    from ncclops.env import render

    planned = _plan(profile, param, set_, unset, keep, restart)
    plan, environ, fill = planned.plan, planned.environ, _current_directory()
    if format_ == "json":
        print_json(render.to_document(plan, environ, fill))
    else:
        for name in render.unnameable(plan):
            warn(
                f"{name!r} is left out: no shell can name it; `ncclops env exec` starts a program"
                " without it"
            )
        writer = render.to_sh if format_ == "sh" else render.to_dotenv
        typer.echo(writer(plan, environ, fill), nl=False)


@app.command(
    name="exec", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False}
)
def exec_(
    command: Annotated[list[str], typer.Argument(metavar="CMD...", help="Command to run.")],
    profile: ProfileOption = None,
    param: ParamOption = None,
    set_: SetOption = None,
    unset: UnsetOption = None,
    keep: KeepOption = None,
    restart: RestartOption = "in-process",
) -> None:
    """Run a command under the environment; ncclops is replaced by it.

    Per-rank paths are filled in with the current directory.
    """
    import os

    planned = _plan(profile, param, set_, unset, keep, restart)
    environ = planned.plan.apply(planned.environ, _current_directory())
    try:
        os.execvpe(command[0], command, environ)
    except OSError as error:
        raise UsageError(f"cannot run {command[0]}: {error.strerror}") from None
    except ValueError:
        raise UsageError("cannot run a command without a name: name a program") from None


app.command(name="compare")(env_snapshot.compare_command)
app.command()(env_explain.explain)
app.command()(env_lint.lint)
app.command()(env_audit.audit)
app.command()(env_snapshot.snapshot)


def _plan(
    profile: Sequence[str] | None,
    param: Sequence[str] | None,
    set_: Sequence[str] | None,
    unset: Sequence[str] | None,
    keep: Sequence[str] | None,
    restart: RestartMode,
) -> _Planned:
    import os

    from ncclops.env import PlanContext, compute_plan, installed_torch
    from ncclops.env.request import parse_overrides, resolve_profile
    from ncclops.profiles.parameters import parse_parameters

    overrides = parse_overrides(set_, unset, keep)
    environ = dict(os.environ)
    context = PlanContext(restart=restart, torch=installed_torch())
    resolved = resolve_profile(profile, parameters=parse_parameters(param), say=note)
    plan = compute_plan(resolved, environ, overrides, context)
    return _Planned(plan, environ, resolved, context)


def _inherited(planned: _Planned) -> list[dict[str, str]]:
    """What the shell has left on that reaches the workers."""
    from ncclops.env.inherited import left_on

    found = left_on(planned.plan, planned.profile, planned.environ, planned.context)
    return [
        {
            "name": setting.partition("=")[0],
            "value": setting.partition("=")[2],
            "rule": finding.rule,
            "message": finding.message,
            "remedy": finding.remedy,
        }
        for setting, finding in found.items()
    ]


def _origins(plan: Plan, actions: Sequence[str]) -> dict[str, str]:
    """Who exported the values that rows with one of ``actions`` met."""
    from ncclops.env.origins import exported_by

    return {
        change.name: exported_by(change.name, change.before)
        for change in plan.changes
        if change.before is not None and change.action in actions
    }


def _with_origins(plan: Plan) -> dict[str, Any]:
    """The plan's document, each row with ``before_from``: who exported what it met."""
    origins = _origins(plan, ("set", "unset", "scrub", "keep"))
    document = plan.to_json()
    for row in document["changes"]:
        row["before_from"] = origins.get(row["name"])
    return document


def _files_after(plan: Plan, environ: dict[str, str]) -> list[dict[str, str]]:
    """What NCCL's configuration files still add once the plan is applied.

    The plan cannot take that away, only set something else: NCCL fills in what is absent.
    """
    from ncclops.env.origins import from_files

    added = from_files(plan.apply(environ, _current_directory()))
    return [
        {"name": setting.name, "value": setting.value, "source": setting.source}
        for setting in added.values()
    ]


def _current_directory() -> dict[str, str]:
    from pathlib import Path

    here = str(Path.cwd())
    return {"run_dir": here, "rank_dir": here}
