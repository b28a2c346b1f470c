"""What a user asked for, as values: a profile by its names, and overrides of variables."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from reprlib import repr as short_repr

from ncclops.env.catalogue import catalogue
from ncclops.env.plan import Overrides, Plan, PlanContext, compute_plan
from ncclops.env.values import problem_with
from ncclops.errors import ProfileError, UsageError
from ncclops.host.gpus import find_gpus
from ncclops.host.software import has_rdma, installed_torch
from ncclops.profiles import Profile, RestartMode, choose_profile, load_profiles, with_lane
from ncclops.profiles.files import read_all
from ncclops.profiles.model import GivenParameter
from ncclops.profiles.parameters import own_name

_log = logging.getLogger(__name__)

# What --profile is where no lane is named: profiles separated by commas.
DEFAULT_PROFILE = "NCCLOPS_PROFILE"


def resolve_profile(
    refs: Sequence[str] | None,
    *,
    parameters: Mapping[str, GivenParameter] | None = None,
    nnodes: int = 1,
    environ: Mapping[str, str] = os.environ,
    say: Callable[[str], None],
) -> Profile:
    """The profile of ``--profile``, with ``--param`` applied.

    Where no lane is named, it is what ``NCCLOPS_PROFILE`` in ``environ`` names, or else the lane is
    chosen for this host. ``say`` gets a line where that is so, and others on what a person should
    know. Raises ``ProfileError`` for one that is unknown or invalid, ``UsageError`` for parameters.
    """

    def choose() -> str:
        gpus = find_gpus()
        lane = choose_profile(nnodes=nnodes, gpus=gpus.count, rdma=has_rdma())
        here = f"{nnodes} node{'s' * (nnodes != 1)}, {gpus.count} GPU{'s' * (gpus.count != 1)}"
        say(f"profile {lane} (chosen: {here})")
        return lane

    def default() -> Sequence[str]:
        names = [name.strip() for name in environ.get(DEFAULT_PROFILE, "").split(",")]
        found = [name for name in names if name]
        try:
            read_all(found)
        except ProfileError as error:
            lines = (f"{DEFAULT_PROFILE}: {line}" for line in error.lines)
            raise ProfileError(*lines) from None
        if found:
            say(f"profile {'+'.join(found)} (by {DEFAULT_PROFILE})")
        return found

    return load(with_lane(tuple(refs or ()), choose, default=default), parameters, say=say)


def load(
    refs: Sequence[str],
    parameters: Mapping[str, GivenParameter] | None,
    *,
    say: Callable[[str], None],
) -> Profile:
    """Exactly the profiles ``refs``, with ``--param`` applied; otherwise as ``resolve_profile``."""
    profile = load_profiles(refs, parameters=parameters)
    for name in map(own_name, parameters or ()):
        _check_values(profile, name)
        if not profile.uses[name]:
            say(f"--param {name} changes nothing: profile {profile.name} makes no use of it")
    for remark in profile.remarks:
        say(remark)
    return profile


def _check_values(profile: Profile, parameter: str) -> None:
    """Raise ``UsageError`` for a variable that would refuse what a parameter gives it."""
    for use in profile.uses[parameter]:
        variable = catalogue().get(use)
        for entry in profile.env.get(use, ()):
            problem = variable and entry.value and problem_with(variable, entry.value)
            if problem:
                value = profile.parameters[parameter]
                raise UsageError(f"--param {parameter}={value}: {use}: {problem}")


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

    Raises ``UsageError`` on a bad name, on one that is in both, and on a value that is no text.
    """
    # By a caller that no type checker may have seen, or to whom text was a collection of names.
    if not isinstance(env, Mapping):
        raise UsageError(f"env: give a mapping of names to values, not {short_repr(env)}")
    if isinstance(keep, str) or not isinstance(keep, Collection):
        raise UsageError(f"keep: give a list of names, not {short_repr(keep)}")
    for name in (*env, *keep):
        _variable("variable", name)
    given: Mapping[str, object] = env
    for name, value in given.items():
        if not isinstance(value, str | None):
            raise UsageError(f"env: {name} is {value!r}: give text, or None to remove the variable")
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
    parameters: Mapping[str, GivenParameter] | None = None,
    restart: RestartMode = "in-process",
    environ: Mapping[str, str] | None = None,
) -> Plan:
    """What a profile changes in ``environ`` (default: this process's), with the reason for each.

    The arguments are those of ``LaunchRequest``, and the plan is what `ncclops launch` applies with
    the same. ``plan.changes`` is the difference, ``plan.apply(environ)`` the environment after it.
    Changes nothing; any thread. Raises ``ProfileError`` and ``UsageError``.
    """
    refs = (profile,) if isinstance(profile, str) else profile
    if not isinstance(refs, Sequence) or not all(isinstance(ref, str) for ref in refs):
        raise UsageError(f"profile: give a name or a list of names, not {short_repr(profile)}")
    environ = os.environ if environ is None else environ
    return compute_plan(
        resolve_profile(refs, parameters=parameters, environ=environ, say=_log.info),
        environ,
        overrides_of(env or {}, keep),
        PlanContext(restart=restart, torch=installed_torch()),
    )


def _variable(option: str, name: str) -> str:
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise UsageError(f"{option} {name!r}: not the name of an environment variable")
    return name
