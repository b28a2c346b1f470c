"""What a user asked for, as values: a profile by its names, and overrides of variables."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence

from ncclops.env.host import has_rdma, installed_torch
from ncclops.env.plan import Overrides, Plan, PlanContext, compute_plan
from ncclops.errors import UsageError
from ncclops.host.gpus import find_gpus
from ncclops.profiles import Profile, RestartMode, choose_profile, load_profiles, with_lane

_log = logging.getLogger(__name__)


def resolve_profile(
    refs: Sequence[str] | None, *, nnodes: int = 1, say: Callable[[str], None]
) -> Profile:
    """The profile of ``--profile``, with the lane chosen for this host when none is named.

    ``say`` gets a line when one was chosen. Raises ``ProfileError`` for one that is unknown or
    invalid.
    """

    def choose() -> str:
        gpus = find_gpus()
        lane = choose_profile(nnodes=nnodes, gpus=gpus.count, rdma=has_rdma())
        here = f"{nnodes} node{'s' * (nnodes != 1)}, {gpus.count} GPU{'s' * (gpus.count != 1)}"
        say(f"profile {lane} (chosen: {here})")
        return lane

    return load_profiles(with_lane(tuple(refs or ()), choose))


def parse_overrides(
    set_: Sequence[str] | None, unset: Sequence[str] | None, keep: Sequence[str] | None
) -> Overrides:
    """``--set``, ``--unset`` and ``--keep`` as values. Raises ``UsageError`` on a bad name."""
    values: dict[str, str] = {}
    for assignment in set_ or ():
        name, equals, value = assignment.partition("=")
        if not equals:
            raise UsageError(f"--set {assignment}: write it as NAME=VALUE")
        values[_variable("--set", name)] = value
    return Overrides(
        set=values,
        unset=frozenset(_variable("--unset", name) for name in unset or ()),
        keep=frozenset(_variable("--keep", name) for name in keep or ()),
    )


def overrides_of(env: Mapping[str, str | None], keep: Collection[str]) -> Overrides:
    """What Python callers give: variables to set, with None to remove, and those to keep.

    Raises ``UsageError`` on a bad name, and on one that is in both.
    """
    for name in (*env, *keep):
        _variable("variable", name)
    return Overrides(
        set={name: value for name, value in env.items() if value is not None},
        unset=frozenset(name for name, value in env.items() if value is None),
        keep=frozenset(keep),
    )


def plan_environment(
    profile: str | Sequence[str] = (),
    *,
    env: Mapping[str, str | None] | None = None,
    keep: Collection[str] = (),
    restart: RestartMode = "in-process",
    environ: Mapping[str, str] | None = None,
) -> Plan:
    """What a profile changes in ``environ`` (default: this process's), with the reason for each.

    The arguments are those of ``LaunchRequest``, and the plan is what `ncclops launch` applies with
    the same. ``plan.changes`` is the difference, ``plan.apply(environ)`` the environment after it.
    Changes nothing; any thread. Raises ``ProfileError`` and ``UsageError``.
    """
    refs = (profile,) if isinstance(profile, str) else tuple(profile)
    return compute_plan(
        resolve_profile(refs, say=_log.info),
        os.environ if environ is None else environ,
        overrides_of(env or {}, keep),
        PlanContext(restart=restart, torch=installed_torch()),
    )


def _variable(option: str, name: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise UsageError(f"{option} {name!r}: not the name of an environment variable")
    return name
