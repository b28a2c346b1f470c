"""`ncclops launch`: torchrun's options and our own, parsed and handed on."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ncclops.cli import _output, _verbosity
from ncclops.cli._options import LAUNCH_RESTARTS, LaunchRestart, one_of, profile_option, shown

if TYPE_CHECKING:
    from ncclops.launch import Prepared
    from ncclops.launch.prepared import Resolved


# Options of torchrun that a pasted line may carry and that have nothing to act on here.
TorchrunOnly = Annotated[str | None, typer.Option(hidden=True)]
_NOTHING_TO_DO = {
    "--monitor-interval": "nothing is polled here",
    "--start-method": "each worker is a new process",
}

# As in ncclops.launch.request, which is imported when the command runs.
Preflight = Literal["off", "host", "full"]
_PREFLIGHT: tuple[Preflight, ...] = ("off", "host", "full")
Compat = Literal["off", "nvrx"]
_COMPAT: tuple[Compat, ...] = ("off", "nvrx")

_OURS = "Environment and run"
_WORKERS = "Workers (as torchrun)"
_NODES = "Nodes (as torchrun)"
_OUTPUT = "Output"


def launch(
    context: typer.Context,
    script: Annotated[
        str,
        typer.Argument(
            metavar="SCRIPT", help="Training script, FILE.py:FUNCTION, or with -m a module."
        ),
    ],
    profile: Annotated[
        list[str] | None,
        profile_option(
            "Launch profile; repeat for overlays. Default: chosen by what this node has.", _OURS
        ),
    ] = None,
    param: Annotated[
        list[str] | None,
        typer.Option(
            "--param",
            metavar="NAME=VALUE",
            rich_help_panel=_OURS,
            help="Set a parameter of the profile, and all that follows from it.",
        ),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="K=V",
            rich_help_panel=_OURS,
            help="Set a variable, whatever the profile says.",
        ),
    ] = None,
    unset: Annotated[
        list[str] | None,
        typer.Option("--unset", metavar="K", rich_help_panel=_OURS, help="Unset a variable."),
    ] = None,
    keep: Annotated[
        list[str] | None,
        typer.Option(
            "--keep", metavar="K", rich_help_panel=_OURS, help="Leave a variable as it is here."
        ),
    ] = None,
    timeout: Annotated[
        list[str] | None,
        typer.Option(
            "--timeout",
            metavar="NAME=TIME",
            rich_help_panel=_OURS,
            help="Set a timeout of the profile, such as soft=90s; --dry-run lists them.",
        ),
    ] = None,
    restart: Annotated[
        LaunchRestart,
        typer.Option(
            "--restart",
            parser=one_of("--restart", LAUNCH_RESTARTS),
            metavar=shown(LAUNCH_RESTARTS),
            rich_help_panel=_OURS,
            help="After a fault: go on in the same processes (:grow: with new ones in the places of"
            " ranks that are lost), start all anew, or stop.",
        ),
    ] = "in-process",
    run_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            rich_help_panel=_OURS,
            help="The run directory itself. Default: runs/<run id>.",
        ),
    ] = None,
    control_listen: Annotated[
        str | None,
        typer.Option(
            metavar="[HOST:]PORT",
            rich_help_panel=_OURS,
            help="Serve status and metrics over TCP too, on loopback unless HOST says otherwise.",
        ),
    ] = None,
    control_token_for_reads: Annotated[
        bool,
        typer.Option(
            "--control-token-for-reads",
            rich_help_panel=_OURS,
            help="With --control-listen: reading, too, needs the run's token.",
        ),
    ] = False,
    attach_stdin: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="RANK",
            rich_help_panel=_OURS,
            help="Give this rank the terminal (or standard input), for breakpoint() and pdb.",
        ),
    ] = None,
    compat: Annotated[
        Compat | None,
        typer.Option(
            "--compat",
            parser=one_of("--compat", _COMPAT),
            metavar=shown(_COMPAT),
            rich_help_panel=_OURS,
            help="nvrx: import nvidia_resiliency_ext.inprocess gets ncclops.restart (Megatron-LM).",
        ),
    ] = None,
    warm_start: Annotated[
        bool | None,
        typer.Option(
            "--warm-start/--no-warm-start",
            rich_help_panel=_OURS,
            show_default=False,
            help="Fork workers from one process that has imported torch. Default: as the profile"
            " says, else where the restart is in process.",
        ),
    ] = None,
    require_receipt: Annotated[
        bool,
        typer.Option(
            "--require-receipt",
            rich_help_panel=_OURS,
            help="Exit with 4 unless the run shows a healthy receipt.",
        ),
    ] = False,
    exit_codes: Annotated[
        str | None,
        typer.Option(
            "--exit-codes",
            metavar="SET|KIND=CODE,…",
            rich_help_panel=_OURS,
            help="Exit codes that tell a scheduler whether another start may help: scheduler, or"
            " your own, as in retry=75,fix=78. Default: as the profile says, else 1 for all.",
        ),
    ] = None,
    preflight: Annotated[
        Preflight,
        typer.Option(
            "--preflight",
            parser=one_of("--preflight", _PREFLIGHT),
            metavar=shown(_PREFLIGHT),
            rich_help_panel=_OURS,
            help="Check this node first (host), with several also the edges between them (full);"
            " exit with 3 if it is not fit. Default: off.",
        ),
    ] = "off",
    collectives: Annotated[
        bool,
        typer.Option(
            "--collectives",
            rich_help_panel=_OURS,
            help="With --preflight: also a short all_reduce between this node's GPUs, and with full"
            " between pairs of nodes: a minute or two.",
        ),
    ] = False,
    require_network: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NETWORK",
            rich_help_panel=_OURS,
            help="End the job unless NCCL uses this network: ib, roce, socket, plugin or a name as"
            " NCCL prints it; several with commas.",
        ),
    ] = None,
    snapshot_every: Annotated[
        str | None,
        typer.Option(
            metavar="STEPS|auto|PERCENT%",
            rich_help_panel=_OURS,
            help="How often a script that uses ncclops.restart.snapshot takes one, or the share of"
            " the time that they may take. Default: as the script says.",
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", rich_help_panel=_OURS, help="Show what would run, under which environment."
        ),
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            rich_help_panel=_OURS,
            help="Print the verdict (or the dry run) as JSON on stdout.",
        ),
    ] = False,
    nproc_per_node: Annotated[
        str | None,
        typer.Option(
            metavar="N|auto|gpu|cpu",
            rich_help_panel=_WORKERS,
            help="Workers on this node. Default: one per GPU (auto).",
        ),
    ] = None,
    max_restarts: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="N",
            rich_help_panel=_WORKERS,
            help="How often to start all workers again. Default: 0.",
        ),
    ] = None,
    module: Annotated[
        bool,
        typer.Option(
            "-m", "--module", rich_help_panel=_WORKERS, help="SCRIPT is a module, as in python -m."
        ),
    ] = False,
    no_python: Annotated[
        bool,
        typer.Option(
            "--no-python", rich_help_panel=_WORKERS, help="SCRIPT is a program of its own."
        ),
    ] = False,
    standalone: Annotated[
        bool,
        typer.Option(
            "--standalone",
            rich_help_panel=_NODES,
            help="One node; a free port is picked (the default).",
        ),
    ] = False,
    nnodes: Annotated[
        str | None,
        typer.Option(
            metavar="N[:M]",
            rich_help_panel=_NODES,
            help="Number of nodes that train, and with spares in all. Default: 1, or the step's.",
        ),
    ] = None,
    node_rank: Annotated[
        int | None,
        typer.Option(
            min=0, metavar="I", rich_help_panel=_NODES, help="This node's place, from 0 (static)."
        ),
    ] = None,
    master_addr: Annotated[
        str | None,
        typer.Option(
            metavar="HOST", rich_help_panel=_NODES, help="Address of node 0, for several nodes."
        ),
    ] = None,
    master_port: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=65535,
            metavar="PORT",
            rich_help_panel=_NODES,
            help="Port of the store on node 0.",
        ),
    ] = None,
    rdzv_backend: Annotated[
        str | None,
        typer.Option(
            metavar="c10d|static",
            rich_help_panel=_NODES,
            help="How several nodes meet. Default: static, or c10d with --rdzv-endpoint alone.",
        ),
    ] = None,
    rdzv_endpoint: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            rich_help_panel=_NODES,
            help="Where they meet: a node, which then hosts the store, or a store elsewhere.",
        ),
    ] = None,
    rdzv_id: Annotated[
        str | None,
        typer.Option(
            metavar="ID",
            rich_help_panel=_NODES,
            help="The job's name: each job in a store needs its own. Default: none.",
        ),
    ] = None,
    rdzv_conf: Annotated[
        str | None,
        typer.Option(
            metavar="K=V,…",
            rich_help_panel=_NODES,
            help="join_timeout=600, last_call_timeout=30, keep_alive_interval=5,"
            " keep_alive_max_attempt=3 (seconds), is_host.",
        ),
    ] = None,
    local_addr: Annotated[
        str | None,
        typer.Option(
            metavar="ADDR",
            rich_help_panel=_NODES,
            help="Address of this node for the others. Default: that of the route to the store.",
        ),
    ] = None,
    allow_difference: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            rich_help_panel=_NODES,
            help="Start although nodes differ in this variable or fact; counts on node 0.",
        ),
    ] = None,
    log_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            rich_help_panel=_OUTPUT,
            help="Where run directories are made. Default: runs.",
        ),
    ] = None,
    tee: Annotated[
        str | None,
        typer.Option(
            "-t",
            "--tee",
            metavar="RANKS",
            rich_help_panel=_OUTPUT,
            help="Whose output to show: all, none, local ranks (0,2), or torchrun's forms"
            " (3 or 0:3,1:1). Default: rank 0.",
        ),
    ] = None,
    redirects: Annotated[
        str,
        typer.Option(
            "-r",
            "--redirects",
            metavar="STREAMS",
            rich_help_panel=_OUTPUT,
            help="torchrun's: streams not to show here.",
        ),
    ] = "0",
    monitor_interval: TorchrunOnly = None,
    start_method: TorchrunOnly = None,
    local_ranks_filter: Annotated[
        str,
        typer.Option(
            metavar="RANKS",
            rich_help_panel=_OUTPUT,
            help="torchrun's: local ranks to show instead of 0.",
        ),
    ] = "",
) -> None:
    """Start SCRIPT on this node's GPUs, in an environment of which every variable can be explained.

    A torchrun command line works with the first word changed. What follows SCRIPT is the script's.
    """
    import os

    from ncclops.env.request import parse_overrides
    from ncclops.launch import LaunchRequest, command, start_report
    from ncclops.launch.options import parse_timeouts
    from ncclops.profiles.parameters import parse_parameters

    given = (monitor_interval, start_method)
    for (option, why), value in zip(_NOTHING_TO_DO.items(), given, strict=True):
        if value is not None:
            _output.note(f"{option} has no effect: {why}")
    with start_report.reporting(os.environ) as report:
        overrides = parse_overrides(set_, unset, keep)
        request = LaunchRequest(
            target=script,
            arguments=tuple(context.args),
            module=module,
            program=no_python,
            profile=profile or (),
            parameters=parse_parameters(param),
            env={**overrides.set, **dict.fromkeys(overrides.unset)},
            keep=tuple(overrides.keep),
            timeouts=parse_timeouts(timeout),
            restart=restart,
            max_restarts=max_restarts,
            nproc_per_node=nproc_per_node,
            nnodes=nnodes,
            node_rank=node_rank,
            standalone=standalone,
            master_addr=master_addr,
            master_port=master_port,
            rdzv_backend=rdzv_backend,
            rdzv_endpoint=rdzv_endpoint,
            rdzv_id=rdzv_id,
            rdzv_conf=rdzv_conf,
            local_addr=local_addr,
            allow_difference=allow_difference or (),
            run_dir=run_dir,
            log_dir=log_dir,
            tee=tee,
            redirects=redirects,
            local_ranks_filter=local_ranks_filter,
            require_receipt=require_receipt,
            exit_codes=exit_codes,
            preflight=preflight,
            collectives=collectives,
            require_network=[
                name.strip() for given in require_network or () for name in given.split(",")
            ],
            snapshot_every=snapshot_every,
            control_listen=control_listen,
            control_token_for_reads=control_token_for_reads,
            attach_stdin=attach_stdin,
            compat=compat,
            warm_start=warm_start,
        )
        prepared = command.prepare(request, stdout_is_data=as_json)
        if dry_run:
            _show(prepared, as_json=as_json)
            return
        code = command.start(
            prepared,
            say=_output.warn,
            note=_output.note,
            began=report.began,
            quiet=_verbosity.level() < 0,
        )
        raise typer.Exit(code)


def _show(prepared: Prepared, *, as_json: bool) -> None:
    if as_json:
        _output.print_json({"schema": "ncclops.dry-run/1", **prepared.to_json()})
        return
    from ncclops.cli._env_table import print_plan

    for remark in prepared.remarks:
        _output.note(remark)
    described = prepared.to_json()
    timeouts = ", ".join(
        f"{name} {value}" for name, value in described["timeouts"].items() if value
    )
    lines = [
        f"stack     {prepared.stack.line()}",
        f"command   {shlex.join(prepared.argv)}",
        f"workers   {prepared.layout.nproc} on this node, world size {prepared.layout.world_size}",
        f"restart   {_restarts(prepared.request)}",
        f"timeouts  {timeouts}",
    ]
    _output.echo("\n".join(lines))
    print_plan(prepared.plan)


def _restarts(request: Resolved) -> str:
    """What follows a failure; ``max_restarts`` is of new attempts, not of restarts in place."""
    if request.mode == "none":
        return "none"
    more = f"up to {request.max_restarts} more attempts, whatever failed"
    return f"{request.mode}; " + (
        more if request.max_restarts else "another attempt only where the retry policy has one"
    )
