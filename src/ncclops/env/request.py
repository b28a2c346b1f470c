"""What a user asked for, as values: a profile by its names, and overrides of variables."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from ncclops.env.host import has_rdma
from ncclops.env.plan import Overrides
from ncclops.errors import UsageError
from ncclops.host.gpus import find_gpus
from ncclops.profiles import Profile, choose_profile, load_profiles, with_lane


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


def _variable(option: str, name: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise UsageError(f"{option} {name!r}: not the name of an environment variable")
    return name
