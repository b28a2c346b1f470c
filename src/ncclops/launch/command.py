"""`ncclops launch` without its options' spelling: settle everything, then start the run here.

``prepare`` changes nothing on the machine, so ``--dry-run`` is ``prepare`` and a print.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ncclops import advisories
from ncclops.agent import attached, fork_server_process, hosted_store, supervisor, workers
from ncclops.agent.history import JobHistory
from ncclops.agent.job import Job, NetworkWanted
from ncclops.agent.layout import Layout, Nodes
from ncclops.agent.pulse import Pulse
from ncclops.classify.policy import default_rules
from ncclops.cluster.node_info import NodeInfo
from ncclops.control import holders, launcher
from ncclops.decision.retrying import RetryPlan
from ncclops.env import Overrides, PlanContext, compute_plan, inherited
from ncclops.env.host import describe_host
from ncclops.env.lint.model import WRAPPER_HARD_TIMEOUT, Circumstances
from ncclops.env.origins import effective
from ncclops.errors import NcclopsError, NodeUnfit, UsageError
from ncclops.exhausted import described
from ncclops.health import hang, stalls
from ncclops.health.live import WatchRules
from ncclops.host.gpus import find_gpus
from ncclops.host.software import Software, find_software, installed_torch
from ncclops.host_name import host_name, with_port
from ncclops.launch import describe_node, options
from ncclops.launch.prepared import Prepared, Resolved
from ncclops.launch.request import LaunchRequest
from ncclops.launch.resolve import resolve
from ncclops.launch.stack import find_stack
from ncclops.profiles import Profile
from ncclops.profiles.notification import KUBEFLOW_URL
from ncclops.receipts.log_formats import parse_forms
from ncclops.record import answer, event_log, shared_page, variables
from ncclops.record.control_address import listen_tcp, listen_unix, tcp_address
from ncclops.record.events import EnvAppliedEvent, RunStartedEvent, StackEvent, WorkerStartedEvent
from ncclops.record.regular_file import is_there
from ncclops.record.run_directory import DirectoryTaken, RunDirectory
from ncclops.redaction.redactor import Redactor
from ncclops.schedulers import affinity
from ncclops.schedulers.allocation import find_allocation
from ncclops.timeouts import handed_over, settle
from ncclops.timeouts.model import Timeouts
from ncclops.timeouts.settle import Surroundings

if TYPE_CHECKING:
    from ncclops.notify.targets import NotifyPlan

_SETTLE_LIMIT_S = 10.0


def prepare(asked: LaunchRequest, *, stdout_is_data: bool = False) -> Prepared:
    """Check a request and settle profile, plan and layout; nothing is started or written.

    Reads this process's environment. ``stdout_is_data`` keeps workers' output off standard output.
    Raises ``UsageError`` or ``ProfileError``. Any thread.
    """
    _check_kernel()
    request = resolve(asked, stdout_is_data=stdout_is_data)
    options.check_target(request.target)
    options.check_signatures()
    argv = workers.command(request.target)
    if shutil.which(argv[0]) is None:
        raise UsageError(f"PYTHON_EXEC={argv[0]} is not a program: correct or unset it")
    remarks = list(request.remarks)
    _check_overrides(request.overrides)
    if line := options.behind_the_script(request.target):
        remarks.append(line)
    gpus = find_gpus()
    if gpus.remark:
        remarks.append(gpus.remark)
    nproc, remark = options.parse_nproc(request.nproc, gpus.count)
    if remark:
        remarks.append(remark)
    rendezvous = request.rendezvous
    nodes = (
        Nodes() if rendezvous is None else Nodes(count=rendezvous.active, rank=rendezvous.rank or 0)
    )
    cpus, allocation = os.sched_getaffinity(0), find_allocation(os.environ)
    if remark := affinity.remark(nproc, cpus, os.cpu_count() or 1, allocation):
        remarks.append(remark)
    request.profile.require_nodes(nodes.count)
    context = PlanContext(restart=request.mode, torch=installed_torch())
    plan = compute_plan(request.profile, os.environ, request.overrides, context)
    if request.control_listen is not None:
        tcp_address(request.control_listen)
    if request.allowed_differences:
        # An entry for some hosts alone is in the profile, and not in this host's plan.
        names = {*(change.name for change in plan.changes), *request.profile.env}
        options.check_allowed(request.allowed_differences, names)
    planned = plan.without_run(os.environ)
    options.check_compat(planned)
    local_addr = None if rendezvous is None else rendezvous.local_addr
    options.check_addresses(planned, nodes=nodes.count, local_addr=local_addr)
    if request.require_network:
        options.check_nccl_says(effective(planned))
    around = Surroundings(
        restart=request.mode,
        environ=planned,
        torch=context.torch,
        gpus=gpus.count > 0,
    )
    shown = options.parse_shown(request.tee, request.redirects, request.local_ranks, nproc)
    own = request.profile.timeouts
    if (attached := request.attach_stdin) is not None:
        rank = nodes.rank if rendezvous is None else rendezvous.rank
        options.check_attached(attached, nproc, nodes.count, rank)
        shown, own = options.with_attached(shown, attached, nproc), settle.attended(own)
    named = settle.with_named(own, request.timeouts)
    timeouts = settle.settle(named, around)
    remarks += options.follows_a_parameter(request.profile, request.timeouts)
    remarks += settle.remarks(timeouts, around)
    remarks += settle.without_effect(request.timeouts, request.mode)
    script = Path(request.target.name)
    layout = Layout(nodes=nodes, nproc=nproc)
    software = find_software(gpus, around.environ)
    where = _circumstances(request, nodes, software, timeouts, planned)
    # What the launcher sets for each worker itself is not inherited.
    handed_on = {k: v for k, v in os.environ.items() if k not in workers.identity_names()}
    remarks += inherited.lines_at_launch(plan, request.profile, handed_on, where)
    case = advisories.Case(
        software=software,
        environ=effective(around.environ),
        nodes=nodes.count,
        ranks=layout.world_size,
        restart=request.mode,
    )
    known = advisories.concerning(advisories.advisories(), case)
    if line := advisories.in_a_line(known):
        remarks.append(line)
    return Prepared(
        request=request,
        plan=plan,
        stack=find_stack(gpus, script.parent if request.target.kind == "script" else Path()),
        software=software,
        advisories=[each for each in known if each.state == "concerns"],
        timeouts=timeouts,
        retry=_retry_plan(request),
        trainers=parse_forms(request.profile.watch.trainers, f"profile {request.profile.name}"),
        notify=_notify_plan(request.profile),
        layout=layout,
        shown=shown,
        argv=argv,
        remarks=remarks,
    )


def _check_kernel() -> None:
    if not Path("/proc/self/stat").exists():
        raise UsageError(
            "no processes are to be seen in /proc: mount it (mount -t proc proc /proc)"
        )
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError) as error:  # the former: Python was built for an older kernel
        why = "this Python has none" if isinstance(error, AttributeError) else error.strerror
        raise UsageError(
            f"pidfd_open is refused here ({why}), by which launch learns that processes have ended:"
            " allow pidfd_open and pidfd_send_signal in the container's seccomp profile, or use"
            " Linux 5.3 or newer"
        ) from error


def _circumstances(
    request: Resolved,
    nodes: Nodes,
    software: Software,
    timeouts: Timeouts,
    planned: Mapping[str, str],
) -> Circumstances:
    return Circumstances(
        restart=request.mode,
        torch=software.torch,
        nccl=software.nccl,
        # Several may be processes of one host, which then are right to use the loopback.
        nodes="one" if nodes.count == 1 else None,
        gpus=bool(software.gpus),
        # A plugin may lie where only the dynamic loader's configuration says.
        host=replace(describe_host(planned), net_plugins=None),
        hard_timeout=timeouts.hard or WRAPPER_HARD_TIMEOUT,
    )


def _check_overrides(overrides: Overrides) -> None:
    said = {*overrides.set, *overrides.unset, *overrides.keep}
    if taken := sorted(said & workers.identity_names()):
        raise UsageError(
            f"{', '.join(taken)}: the launcher sets this for each worker;"
            " --nproc-per-node, --node-rank, --master-addr and --master-port decide what"
        )


def start(
    prepared: Prepared,
    *,
    say: Callable[[str], None],
    note: Callable[[str], None],
    began: Callable[[Path], None],
    quiet: bool = False,
) -> int:
    """Run to the end; the exit code of `launch`. Raises ``UsageError`` before anything starts,
    ``PreflightRefused`` for a node that is not fit.

    Only in the main thread of a process that does nothing else: it forks and handles signals.
    ``say`` gets lines for the user, ``note`` those that say how the run is started; ``began`` the
    run directory, when the run is recorded and signals to this process reach it. ``quiet``: the
    agent prints only warnings, errors and where the verdict is.
    """
    request, rendezvous = prepared.request, prepared.request.rendezvous
    check = None
    if request.preflight != "off":  # not loaded for nothing
        from ncclops.launch import node_check

        try:
            check = node_check.require_fit_node(prepared, say=say, note=note)
        except NodeUnfit as unfit:
            unfit.exit_code = request.exit_codes.of_error(unfit)
            raise
    listener = node_info = None
    control_listeners = []
    if request.control_listen is not None:
        control_listeners.append(listen_tcp(request.control_listen, holders.port_in_use))
    if rendezvous is None:
        listener = hosted_store.listen(host=None, port=request.master_port)
        if doubt := options.silent_store(prepared.plan.without_run(os.environ)):
            prepared.remarks.append(doubt)
    else:
        node_info = describe_node.bring(prepared, rendezvous, check)
        if doubt := describe_node.doubt(rendezvous):
            prepared.remarks.append(doubt)
    try:
        run = RunDirectory.create(
            exact=request.run_dir,
            parent=request.log_dir,
            node=host_name(),
            several=rendezvous is not None,
        )
    except DirectoryTaken as taken:
        raise UsageError(holders.directory_in_use(taken.path)) from None
    try:
        _record_start(run, prepared)
        if check is not None:
            node_check.record(run, check)
    except OSError as error:
        run.give_back()
        raise UsageError(
            f"cannot write the run directory {run.shown()}: {described(error)}:"
            " or give --run-dir another path"
        ) from error
    _greet(run, prepared, note)
    for control_listener in control_listeners:
        note(f"status and metrics at http://{with_port(*control_listener.getsockname()[:2])}")
    try:
        # Before the run is reported as begun: a caller may stop it from then on.
        control_listeners.append(listen_unix(run.path))
    except OSError as error:
        say(f"`ncclops stop` will not reach this run: {described(error)}")
    job = replace(
        _job(run, prepared, listener, node_info),
        control_listeners=control_listeners,
        control_token_for_reads=request.control_token_for_reads,
        quiet=quiet,
        check_node=None if check is None else partial(node_check.again, check),
    )

    def agent(pulse: Pulse) -> int:
        fork_server = fork_server_process.start_first(job)  # it imports while the agent does
        from ncclops.agent.agent import run_agent

        coordinate = None
        if node_info is not None:  # not loaded for nothing
            from ncclops.cluster.multi_node import MultiNode

            coordinate = partial(MultiNode, node_info)
        return run_agent(job, pulse, fork_server, coordinate)

    sockets = (listener if node_info is None else node_info.listener, *control_listeners)
    with attached.restored() if job.attached is not None else nullcontext():
        try:
            code = supervisor.hold(
                agent,
                handed_over=[each for each in sockets if each is not None],
                ready=partial(began, run.path),
                lost_code=request.exit_codes.unknown,
                lost=partial(_conclude_without_agent, run, prepared, time.monotonic()),
            )
        except OSError as error:  # no process to be had
            _conclude_without_agent(run, prepared, time.monotonic(), described(error))
            code = request.exit_codes.unknown
    with suppress(TimeoutError):  # again, for an agent that was killed
        answer.within(_SETTLE_LIMIT_S, partial(shared_page.settle_all, run.path))
    return code


def _conclude_without_agent(run: RunDirectory, prepared: Prepared, began: float, why: str) -> None:
    """Write the verdict of an agent that was killed, unless it had done so; say where it is."""
    from ncclops.agent import conclusion, notifications, verdict_report

    codes = prepared.request.exit_codes
    error, seconds = NcclopsError(why), time.monotonic() - began

    def conclude() -> None:
        if not is_there(run.paths.verdict):
            events = event_log.read(run.paths.events)
            begun = {each.attempt for each in events if isinstance(each, WorkerStartedEvent)}
            verdict = conclusion.conclude_crash(
                run, error, codes=codes, attempts=len(begun), endings=[], seconds=seconds
            )
            verdict_report.print_crash(verdict, run)

    with (
        suppress(TimeoutError),
        notifications.told(run, prepared.notify, _warn, _SETTLE_LIMIT_S),
    ):
        answer.within(_SETTLE_LIMIT_S, conclude)


def _warn(line: str) -> None:
    answer.tell(f"ncclops: {line}\n")


def _record_start(run: RunDirectory, prepared: Prepared) -> None:
    # The command line and the plan may hold keys, and others may read the run.
    record = msgspec.structs.replace(
        Redactor().record(msgspec.structs.replace(prepared.to_record(), argv=sys.argv)),
        started=time.time(),
        launcher=launcher.current(),
        cwd=str(Path.cwd()),
    )
    run.write_run(record)
    run.add(RunStartedEvent(run_id=run.run_id, world_size=prepared.layout.world_size))
    run.add(StackEvent(**asdict(prepared.stack)))
    run.add(EnvAppliedEvent(profile=prepared.request.profile.name, changes=record.plan))


def _greet(run: RunDirectory, prepared: Prepared, note: Callable[[str], None]) -> None:
    layout, rendezvous = prepared.layout, prepared.request.rendezvous
    workers_here = f"{layout.nproc} worker{'s' * (layout.nproc != 1)}"
    where = ""
    if rendezvous is not None:
        spares = rendezvous.most - rendezvous.active
        more = f" and {spares} spare{'s' * (spares > 1)}" if spares else ""
        where = f", one of {rendezvous.active} nodes{more} that meet at {rendezvous.address}"
    changed = sum(change.action != "keep" for change in prepared.plan.changes)
    lines = [
        prepared.stack.line(),
        *prepared.remarks,
        f"{workers_here}{where}, profile {prepared.request.profile.name}:"
        f" {changed} variables changed (`ncclops env diff` shows which and why)",
        f"run directory {run.shown()}",
    ]
    for line in lines:
        note(line)


def _job(
    run: RunDirectory,
    prepared: Prepared,
    listener: socket.socket | None,
    node_info: NodeInfo | None,
) -> Job:
    request, layout = prepared.request, prepared.layout
    return Job(
        run=run,
        argv=prepared.argv,
        environ_of=partial(_environ, run, prepared),
        layout=layout,
        job_id=request.job_id or (run.run_id if node_info is None else node_info.rendezvous.job_id),
        retry=prepared.retry,
        history=JobHistory.of_job(os.environ, run.path.parent),
        stop_grace=prepared.timeouts.stop_grace,
        timeouts=prepared.timeouts,
        watch=_watch_rules(prepared),
        hang=_hang_limits(prepared),
        trainers=prepared.trainers,
        notify=prepared.notify,
        shown=prepared.shown,
        restarts_in_process=request.mode == "in-process",
        grows=request.mode == "in-process" and request.profile.restarts.grow,
        listener=listener,
        master_port=request.master_port,
        require_receipt=request.require_receipt,
        exit_codes=request.exit_codes,
        network=NetworkWanted(request.profile.network.expect, bool(request.require_network)),
        warm_imports=_warm_imports(request),
        attached=request.attach_stdin,
        stdout_is_data=request.stdout_is_data,
    )


def _warm_imports(request: Resolved) -> tuple[str, ...] | None:
    """What the fork server imports; None: workers are started afresh."""
    warm = request.profile.warm_start
    # A wrapper of the interpreter may do something of its own for each rank, such as bind it.
    afresh = request.target.kind == "program" or "PYTHON_EXEC" in os.environ
    enabled = request.mode == "in-process" if warm.enabled is None else warm.enabled
    return warm.imports if enabled and not afresh else None


def _watch_rules(prepared: Prepared) -> WatchRules:
    watch = prepared.request.profile.watch
    return WatchRules(
        stall=stalls.StallLimits(startup=watch.startup, compile=prepared.timeouts.compile),
        straggler=watch.straggler,
    )


def _hang_limits(prepared: Prepared) -> hang.HangLimits:
    watch, timeouts = prepared.request.profile.watch, prepared.timeouts
    quiet = max(watch.quiet, watch.hang)
    limits = hang.HangLimits(hang=watch.hang, quiet=quiet, moving=quiet, compile=timeouts.compile)
    return limits.at_most(settle.acts_before(timeouts.steady or timeouts.first))


def _notify_plan(profile: Profile) -> NotifyPlan | None:
    """Whom the job tells what; None: nobody. Raises ``UsageError`` for a secret that is missing."""
    if (given := os.environ.get(variables.NOTIFY, "off")) != "off":
        raise UsageError(f"{variables.NOTIFY}={given}: only off is known: correct or unset it")
    if variables.NOTIFY in os.environ:
        return None
    if not profile.notify.to and not os.environ.get(KUBEFLOW_URL):
        return None
    from ncclops.notify.targets import settle as settle_targets  # not loaded for nothing

    return settle_targets(profile.notify, os.environ)


def _retry_plan(request: Resolved) -> RetryPlan:
    """The retry table as the profile changes it. Raises ``UsageError`` for a change it refuses."""
    changes = dict(request.profile.retry)
    lane = changes.pop("lane", "generic")
    return RetryPlan(
        lane=lane,
        rules=default_rules().overridden(changes),
        granted=request.max_restarts,
        allowed=request.restart != "none",
    )


def _environ(run: RunDirectory, prepared: Prepared, rank: int) -> dict[str, str]:
    fill = {"run_dir": str(run.path), "rank_dir": str(run.paths.rank(rank).root)}
    environ = prepared.plan.apply(os.environ, fill)
    if variables.RUN_DIR in environ:  # another job than the run that this one is started from
        environ.pop(variables.STORE_PREFIX, None)
    for name in variables.OURS:
        environ.pop(name, None)
    environ |= {
        variables.RUN_DIR: str(run.path),
        variables.RUN_ID: run.run_id,
        variables.RESTART: prepared.request.mode,
        variables.LIMITS: handed_over.to_variable(
            prepared.timeouts,
            prepared.request.profile.growth,
            prepared.request.profile.restarts,
        ),
    }
    if (every := prepared.request.snapshot_every) is not None:
        environ[variables.SNAPSHOT_EVERY] = every
    return environ
