"""From a request to what it means here: the profile loaded, this node's place in the job known."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import cast

from ncclops import exit_codes
from ncclops.env.request import overrides_of, resolve_profile
from ncclops.launch import launch_config, options
from ncclops.launch.prepared import Resolved
from ncclops.launch.request import LaunchRequest
from ncclops.profiles.model import NetworkSettings, RestartMode
from ncclops.schedulers.node_options import NodeOptions


def resolve(request: LaunchRequest, *, stdout_is_data: bool) -> Resolved:
    """``request`` on this host, in this environment. Raises ``UsageError`` or ``ProfileError``."""
    LaunchRequest.checked(request)
    placed = launch_config.place(
        NodeOptions(
            nnodes=_text(request.nnodes),
            node_rank=request.node_rank,
            master_addr=request.master_addr,
            master_port=request.master_port,
            rdzv_backend=request.rdzv_backend,
            rdzv_endpoint=request.rdzv_endpoint,
            rdzv_id=request.rdzv_id,
            rdzv_conf=request.rdzv_conf,
            local_addr=request.local_addr,
            nproc=_text(request.nproc_per_node),
            max_restarts=request.max_restarts,
        ),
        standalone=request.standalone,
    )
    remarks = list(placed.remarks)
    nnodes = placed.rendezvous.active if placed.rendezvous else 1
    profile = resolve_profile(
        request.profiles, parameters=request.parameters, nnodes=nnodes, say=remarks.append
    )
    options.check_networks(request.networks, "--require-network")
    options.check_networks(profile.network.expect, f"profile {profile.name}: network.expect:")
    if request.networks:
        profile = replace(profile, network=NetworkSettings(request.networks, log=True))
    restart, _, grow = options.parse_restart(request.restart).partition(":")
    if grow:
        profile = replace(profile, restarts=replace(profile.restarts, grow=True))
    if request.warm_start is not None:
        warm_start = replace(profile.warm_start, enabled=request.warm_start)
        profile = replace(profile, warm_start=warm_start)
    return Resolved(
        target=options.target_of(
            os.fspath(request.target),
            tuple(request.arguments),
            module=request.module,
            program=request.program,
        ),
        profile=profile,
        remarks=remarks,
        overrides=overrides_of(options.with_compat(request.env, request.compat), request.keep),
        timeouts=request.timeouts,
        rendezvous=placed.rendezvous,
        master_port=request.master_port or 0,
        allowed_differences=tuple(request.allow_difference),
        nproc=placed.nproc,
        restart=cast(RestartMode, restart),
        max_restarts=placed.max_restarts,
        job_id=request.rdzv_id,
        run_dir=None if request.run_dir is None else Path(request.run_dir),
        log_dir=None if request.log_dir is None else Path(request.log_dir),
        tee=request.tee,
        redirects=request.redirects,
        local_ranks=request.local_ranks_filter,
        require_receipt=request.require_receipt,
        exit_codes=profile.exit_codes
        if request.exit_codes is None
        else exit_codes.with_changes(request.exit_codes, profile.exit_codes),
        preflight=options.parse_preflight(request.preflight),
        collectives=options.checked_collectives(
            wanted=request.collectives, preflight=request.preflight
        ),
        require_network=request.networks,
        snapshot_every=options.parse_snapshot_every(_text(request.snapshot_every)),
        control_listen=request.control_listen,
        control_token_for_reads=request.control_token_for_reads,
        attach_stdin=request.attach_stdin,
        stdout_is_data=stdout_is_data,
    )


def _text(value: int | str | None) -> str | None:
    return None if value is None else str(value)
