"""A request to `launch` as plain values: one form for Python and the command line."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import timedelta
from numbers import Integral
from os import PathLike, fsencode, fspath
from reprlib import repr as short_repr
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from ncclops.durations import format_duration
from ncclops.errors import UsageError
from ncclops.profiles.model import as_text

Restart = Literal["in-process", "in-process:grow", "process", "none"]
Preflight = Literal["off", "host", "full"]


@dataclass(frozen=True, kw_only=True)
class LaunchRequest:
    """One job on this node, or this node's part of a job of several.

    Fields have the names, the defaults and the meaning of `ncclops launch`'s options; None is an
    option that is not given. Nothing is checked before :func:`ncclops.launch.prepare` or
    :func:`ncclops.launch.start`, which raise ``UsageError`` or ``ProfileError``.
    """

    target: str | PathLike[str]
    """A script, ``FILE.py:FUNCTION``, with ``module`` a module, with ``program`` any program."""

    arguments: Sequence[str] = ()
    """The script's own arguments."""

    module: bool = False
    program: bool = False

    profile: str | Sequence[str] = ()
    """One profile (name or path), or a lane and overlays. Default: chosen by what this node has."""

    parameters: Mapping[str, str | int | float | bool | timedelta] = field(default_factory=dict)
    """Parameters of the profile, by name: each replaces the profile's own."""

    env: Mapping[str, str | None] = field(default_factory=dict)
    """Variables to set whatever the profile says; None removes one."""

    keep: Sequence[str] = ()
    """Variables to leave as they are in this process."""

    timeouts: Mapping[str, timedelta] = field(default_factory=dict)
    """Timeouts by the profile's names (``soft``, ``hard``, ``groups.PATTERN``…), all positive."""

    restart: Restart = "in-process"
    """After a fault: go on in the same processes (``:grow``: and start new ones in the places of
    ranks that are lost), start all anew, or stop."""

    max_restarts: int | None = None
    """How often to start all workers again. Default: 0, and what the retry policy grants."""

    nproc_per_node: int | str | None = None
    """Workers here: a number, ``"auto"`` (one per GPU; the default), ``"gpu"`` or ``"cpu"``."""

    nnodes: int | str | None = None
    """Nodes that train; ``"2:3"`` is two and a spare. Default: 1, or the scheduler's step."""

    node_rank: int | None = None
    standalone: bool = False
    master_addr: str | None = None
    master_port: int | None = None
    rdzv_backend: str | None = None
    rdzv_endpoint: str | None = None
    rdzv_id: str | None = None
    rdzv_conf: str | None = None
    local_addr: str | None = None
    allow_difference: Sequence[str] = ()

    run_dir: str | PathLike[str] | None = None
    """The run directory itself; it must hold no run yet. Default: a new one below ``log_dir``."""

    log_dir: str | PathLike[str] | None = None
    """Where run directories are made. Default: ``runs`` in the current directory."""

    tee: str | None = None
    redirects: str = "0"
    local_ranks_filter: str = ""
    require_receipt: bool = False

    exit_codes: str | None = None
    """A set of exit codes (``"default"``, ``"scheduler"``), changes (``"retry=75,fix=78"``), or
    both with commas. Default: the profile's."""

    preflight: Preflight = "off"
    """``"host"``: check this node before anything starts, and refuse to start if a check fails.
    ``"full"``: of several nodes also the edges between them; a spare replaces one that fails."""

    collectives: bool = False
    """With ``preflight``: also a short all_reduce between the GPUs of this node, once, before
    anything starts. Takes up to two minutes."""

    require_network: str | Sequence[str] = ()
    """The job ends unless NCCL uses one of these: ib, roce, socket, plugin, or a name of NCCL's."""

    snapshot_every: int | str | None = None
    """How often a script that uses ``restart.snapshot`` takes one: a number of steps, ``"auto"``,
    or the share of the time that they may take, such as ``"2%"``. Default: as the script says."""

    control_listen: str | None = None
    control_token_for_reads: bool = False

    warm_start: bool | None = None
    """Fork workers from one process that has imported torch. Default: the profile's, which is no
    unless it says so."""

    compat: Literal["off", "nvrx"] | None = None
    """``"nvrx"``: ``import nvidia_resiliency_ext.inprocess`` gets ``ncclops.restart``. Default:
    what ``NCCLOPS_COMPAT`` says, which a profile may set."""

    attach_stdin: int | None = None
    """The rank that gets standard input, and the terminal if there is one: for a debugger."""

    def command_line(self) -> list[str]:
        """The arguments of ``ncclops`` that mean the same: what a person would type.

        Raises ``UsageError`` as :meth:`check_types`.
        """
        self.check_types()
        return self._words()

    @staticmethod
    def checked(request: LaunchRequest) -> LaunchRequest:
        """``request``, by a caller that no type checker may have seen. Raises ``UsageError``."""
        if not isinstance(request, LaunchRequest):
            raise UsageError(
                f"{short_repr(request)} is no request: give LaunchRequest(target='train.py')"
            )
        request.check_types()
        return request

    def check_types(self) -> None:
        """Raise ``UsageError`` for a field that is not of its type, and for text that no program
        can be given; values are looked at later."""
        hints = get_type_hints(type(self))
        for each in fields(self):
            value = getattr(self, each.name)
            if not _fits(value, hints[each.name]):
                wanted = "a list of words" if each.name == "arguments" else each.type
                raise UsageError(f"{each.name}={short_repr(value)}: give {wanted}")
        for word in self._words():
            if not _can_be_handed_over(word):
                raise UsageError(
                    f"{short_repr(word)}: no program can be given that: take out NUL characters and"
                    " halves of surrogate pairs"
                )

    def _words(self) -> list[str]:
        return ["launch", *self._options(), fspath(self.target), *self.arguments]

    def _options(self) -> Iterator[str]:
        plain = {each.name: each.default for each in fields(self)}
        for name in _SPECIAL:
            plain.pop(name)
        for name, default in plain.items():
            value = getattr(self, name)
            if value != default:
                yield from _option(name, value)
        for profile in self.profiles:
            yield from _option("profile", profile)
        for name, given in self.parameters.items():
            yield from _option("param", f"{name}={as_text(given)}")
        for name, text in self.env.items():
            yield from _option("unset", name) if text is None else _option("set", f"{name}={text}")
        for name in self.keep:
            yield from _option("keep", name)
        for name, limit in self.timeouts.items():
            yield from _option("timeout", f"{name}={format_duration(limit)}")
        for name in self.allow_difference:
            yield from _option("allow_difference", name)
        for name in self.networks:
            yield from _option("require_network", name)
        if self.program:
            yield "--no-python"

    @property
    def profiles(self) -> tuple[str, ...]:
        """``profile`` as a sequence, whichever way it was given."""
        return (self.profile,) if isinstance(self.profile, str) else tuple(self.profile)

    @property
    def networks(self) -> tuple[str, ...]:
        """``require_network`` as a sequence, whichever way it was given."""
        given = self.require_network
        return tuple(given.split(",")) if isinstance(given, str) else tuple(given)


_SPECIAL = (
    "target", "arguments", "program", "profile", "parameters", "env", "keep", "timeouts",
    "allow_difference", "require_network",
)  # fmt: skip


def _can_be_handed_over(word: str) -> bool:
    try:
        return b"\0" not in fsencode(word)
    except UnicodeEncodeError:
        return False


def _fits(value: Any, hint: Any) -> bool:
    origin, parts = get_origin(hint) or hint, get_args(hint)
    if origin in (Union, UnionType):
        return any(_fits(value, part) for part in parts)
    if origin is Literal:  # whoever reads it says what may be chosen
        return True
    if origin is Mapping:
        return isinstance(value, Mapping) and all(
            _fits(part, wanted)
            for item in value.items()
            for part, wanted in zip(item, parts, strict=True)
        )
    if origin is Sequence:  # a set will do; the letters of a string will not
        is_many = isinstance(value, Collection) and not isinstance(value, str | bytes)
        return is_many and all(_fits(part, parts[0]) for part in value)
    if origin is int:
        return isinstance(value, Integral) and not isinstance(value, bool)
    return isinstance(value, origin)


def _option(name: str, value: Any) -> Iterator[str]:
    option = "--" + name.replace("_", "-")
    if value is True:
        yield option
    elif value is False:
        yield "--no-" + option.removeprefix("--")
    else:
        # In one word: a value may begin with a dash.
        yield f"{option}={fspath(value) if isinstance(value, PathLike) else value}"
