"""The options of `launch`, parsed once: spellings that people and torchrun use, as values."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import cast, get_args

from ncclops.agent.layout import Shown, Target
from ncclops.durations import parse_duration
from ncclops.env.catalogue import catalogue
from ncclops.errors import UsageError
from ncclops.health import network
from ncclops.launch.request import Preflight, Restart
from ncclops.nearest import nearest
from ncclops.profiles import Profile
from ncclops.profiles.model import as_text
from ncclops.record.variables import COMPAT
from ncclops.whole_numbers import MOST_WORKERS_OF_A_NODE, whole_number

# Of an option's value in an error.
_SHOWN_CHARS = 80
_MOST_LINKS = 40  # the kernel's limit
_BEGINNING_BYTES = 4096
_STORE_ANSWERS_WITHIN_S = 3.0
_LAUNCHERS_OWN = re.compile(r"--(?:nproc|rdzv)[-_][a-z_-]+")
_STREAM_FLAGS = {"0": (False, False), "1": (True, False), "2": (False, True), "3": (True, True)}


def parse_nproc(text: str, gpu_count: int) -> tuple[int, str | None]:
    """Workers on this node for ``auto``, ``gpu``, ``cpu`` or a number, and a remark if due."""
    if text == "auto":
        if gpu_count:
            return gpu_count, None
        return 1, "no GPU found: starting 1 worker (--nproc-per-node N for more)"
    if text == "gpu":
        if not gpu_count:
            raise UsageError("--nproc-per-node gpu: no GPU found here; give a number instead")
        return gpu_count, None
    if text == "cpu":
        return os.cpu_count() or 1, None
    nproc = whole_number(text, MOST_WORKERS_OF_A_NODE)
    if not nproc:
        raise UsageError(
            f"--nproc-per-node {text[:_SHOWN_CHARS]}: give auto, gpu, cpu or a number from 1 to"
            f" {MOST_WORKERS_OF_A_NODE}"
        )
    return nproc, None


def parse_shown(tee: str | None, redirects: str, local_ranks: str, nproc: int) -> Shown:
    """What the terminal shows: rank 0 by default, more or less by ``--tee`` and friends.

    ``tee`` is ``all``, ``none``, a list of local ranks (``1,3``), or torchrun's forms: one digit
    for all ranks (1 stdout, 2 stderr, 3 both, 0 neither) or pairs ``rank:digit``. ``redirects``
    has torchrun's forms and takes streams off the terminal that ``tee`` does not put back.
    ``local_ranks`` (``--local-ranks-filter``) is a list of local ranks to show instead of 0.
    """
    everyone = frozenset(range(nproc))
    base = _rank_list("--local-ranks-filter", local_ranks) if local_ranks else frozenset({0})
    hidden = _streams("--redirects", redirects, everyone)
    shown = Shown(base - hidden.stdout, base - hidden.stderr)
    if tee is None:
        return shown
    if tee == "none":
        return Shown(frozenset(), frozenset())
    if tee == "all":
        return Shown(everyone, everyone)
    if "," in tee and ":" not in tee:
        ranks = _rank_list("--tee", tee)
        return Shown(ranks, ranks)
    chosen = _streams("--tee", tee, everyone)
    return Shown(shown.stdout | chosen.stdout, shown.stderr | chosen.stderr)


def _rank_list(option: str, text: str) -> frozenset[int]:
    ranks = [whole_number(part, MOST_WORKERS_OF_A_NODE - 1) for part in text.split(",")]
    if None in ranks:
        raise UsageError(
            f"{option} {text[:_SHOWN_CHARS]}: give local ranks separated by commas, as in 0,2"
        )
    return frozenset(rank for rank in ranks if rank is not None)


def _streams(option: str, text: str, everyone: frozenset[int]) -> Shown:
    if text in _STREAM_FLAGS:
        out, err = _STREAM_FLAGS[text]
        return Shown(everyone if out else frozenset(), everyone if err else frozenset())
    pairs = [re.fullmatch(r"(\d{1,4}):([0-3])", part) for part in text.split(",")]
    if None in pairs:
        raise UsageError(
            f"{option} {text[:_SHOWN_CHARS]}: give all, none, local ranks (0,2), or torchrun's"
            " 0 to 3 or 0:3,1:1"
        )
    flags = {int(pair[1]): _STREAM_FLAGS[pair[2]] for pair in pairs if pair}
    return Shown(
        frozenset(rank for rank, (out, _) in flags.items() if out),
        frozenset(rank for rank, (_, err) in flags.items() if err),
    )


def parse_preflight(text: str) -> Preflight:
    """What ``--preflight`` may be. Raises ``UsageError``."""
    for choice in get_args(Preflight):
        if text == choice:
            return cast("Preflight", choice)
    raise UsageError(f"--preflight {text}: choose off, host or full")


def parse_restart(text: str) -> Restart:
    """What ``--restart`` may be. Raises ``UsageError``."""
    choices = get_args(Restart)
    for choice in choices:
        if text == choice:
            return cast("Restart", choice)
    raise UsageError(f"--restart {text}: choose {', '.join(choices[:-1])} or {choices[-1]}")


def checked_collectives(*, wanted: bool, preflight: str) -> bool:
    """Whether collectives are tried. Raises ``UsageError`` where nothing is checked."""
    if wanted and preflight == "off":
        raise UsageError("--collectives is part of a check: add --preflight host or full")
    return wanted


def parse_snapshot_every(text: str | None) -> str | None:
    """``--snapshot-every`` as workers get it. Raises ``UsageError`` where it is no frequency."""
    if text is None or text == "auto":
        return text
    share = re.fullmatch(r"(\d+(?:\.\d+)?)%", text)
    if (share is not None and 0 < float(share[1]) <= 100) or re.fullmatch(r"0*[1-9]\d*", text):
        return text
    raise UsageError(
        f"--snapshot-every {text}: give a number of steps, auto, or a share of the time such as 2%"
    )


def parse_timeouts(pairs: Sequence[str] | None) -> dict[str, timedelta]:
    """``--timeout NAME=TIME`` as values. Raises ``UsageError`` where TIME is no duration."""
    timeouts: dict[str, timedelta] = {}
    for pair in pairs or ():
        name, sign, text = pair.partition("=")
        if not sign:
            raise UsageError(f"--timeout {pair}: write it as NAME=TIME, as in soft=90s")
        timeouts.pop(name, None)  # what is given again counts from there
        try:
            timeouts[name] = parse_duration(text)
        except (ValueError, OverflowError) as error:
            raise UsageError(f"--timeout {pair}: {error}") from None
    return timeouts


def follows_a_parameter(profile: Profile, asked: Iterable[str]) -> list[str]:
    """A line for each timeout of ``--timeout`` whose parameter also sets what now stays behind."""
    lines = []
    for name in asked:
        own = name.strip().replace("-", "_")
        for parameter, uses in profile.uses.items():
            others = [use for use in uses if use != f"timeouts.{own}"]
            if len(others) < len(uses) and others:
                lines.append(
                    f"--timeout {name} leaves {', '.join(others)} at"
                    f" {as_text(profile.parameters[parameter])}: --param {parameter}=TIME sets all"
                )
    return lines


def behind_the_script(target: Target) -> str | None:
    """A line where an option that is hardly ever a script's own stands behind it; None: none does.

    Others, such as --profile and --nnodes, scripts have as well.
    """
    words = [word.partition("=")[0] for word in target.arguments]
    found = [word for word in words if _LAUNCHERS_OWN.fullmatch(word)]
    if not found:
        return None
    stands, them = ("stands", "it") if len(found) == 1 else ("stand", "them")
    return (
        f"{', '.join(found)} {stands} behind {target.name}, which gets {them}: an option of launch"
        " comes before the script"
    )


def target_of(name: str, arguments: tuple[str, ...], *, module: bool, program: bool) -> Target:
    """What SCRIPT on the command line stands for. Raises ``UsageError``."""
    if module and program:
        raise UsageError("--module and --no-python say two things of SCRIPT: give one")
    if module or program:
        return Target("module" if module else "program", name, arguments)
    is_function = re.fullmatch(r".+\.py:[A-Za-z_]\w*", name) and not Path(name).exists()
    return Target("function" if is_function else "script", name, arguments)


def check_target(target: Target) -> None:
    """Raise ``UsageError`` if the script, module or program of ``target`` cannot be started."""
    if target.kind == "script":
        _check_script(Path(target.name))
    elif target.kind == "function":
        path, _, name = target.name.rpartition(":")
        _check_script(Path(path))
        _check_function(Path(path), name)
    elif target.kind == "module":
        _check_module(target.name)
    else:
        _check_program(target.name)


def check_signatures() -> None:
    """Raise ``UsageError`` if a site's or a user's signatures are wrong: once the job runs, they
    could only be left out."""
    from ncclops.classify.loader import load_signatures, standing_directories

    if directories := standing_directories():
        load_signatures(*directories)


def _check_script(path: Path) -> None:
    if path.is_dir():
        raise UsageError(f"{path} is a directory: give the training script itself")
    if not path.exists():
        raise UsageError(f"script {path} does not exist: check the path, or use -m for a module")
    if not path.is_file() or _is_descriptor(path):
        # Each worker reads it, with a standard input of its own: to the others it is empty.
        raise UsageError(
            f"script {path} is a pipe, a device or a descriptor of this process, and each worker"
            " has to read it: write it into a file"
        )
    try:
        with path.open("rb") as file:
            beginning = file.read(_BEGINNING_BYTES)
    except OSError as error:
        raise UsageError(
            f"cannot read script {path} ({error.strerror}): check its permissions"
        ) from error
    if beginning.startswith(b"\x7fELF") or _is_of_a_shell(path, beginning):
        raise UsageError(f"{path} is a program and no Python script: start it with --no-python")


def _is_of_a_shell(path: Path, beginning: bytes) -> bool:
    """Whether its first line names another interpreter, and Python does not read it.

    A script that is both begins with a line for the shell, as pip writes them.
    """
    import warnings
    import zipfile

    named = beginning.partition(b"\n")[0]
    if not named.startswith(b"#!") or b"python" in named or zipfile.is_zipfile(path):
        return False
    try:
        with warnings.catch_warnings(action="ignore"):
            compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return True
    return False


def _is_descriptor(path: Path) -> bool:
    """Whether ``path`` is, or links to, a descriptor of a process: ``/dev/stdin``, ``<(…)``."""
    for _ in range(_MOST_LINKS):
        here = path.parent.resolve() / path.name
        if re.match(r"/proc/[^/]+/(task/\d+/)?fd/", str(here)):
            return True
        if not here.is_symlink():
            return False
        path = here.parent / here.readlink()
    return False


def _check_function(path: Path, name: str) -> None:
    import ast

    try:
        tree = ast.parse(path.read_bytes(), str(path))
    except SyntaxError as error:
        raise UsageError(f"{path}, line {error.lineno}: {error.msg}") from None
    defined = [node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    # It may also be imported, assigned or made by a decorator: known only when the file runs.
    if name not in defined and not re.search(rf"\b{name}\b", path.read_text(errors="replace")):
        raise UsageError(
            f"{path} has no function {name}; it defines {', '.join(defined) or 'none'}"
        )


def _check_module(name: str) -> None:
    import sys
    from importlib.machinery import PathFinder

    top = name.partition(".")[0]
    if top not in sys.builtin_module_names and not PathFinder.find_spec(
        top, [str(Path.cwd()), *sys.path]
    ):
        raise UsageError(
            f"module {top} is not found from {Path.cwd()}: check -m {name} and PYTHONPATH"
        )


def _check_program(name: str) -> None:
    import shutil

    if shutil.which(name) is None:
        raise UsageError(f"program {name} is not found or not executable: check --no-python {name}")


def check_attached(rank: int, nproc: int, nodes: int, node: int | None) -> None:
    """Raise ``UsageError`` unless ``rank`` may get this node's standard input.

    ``node`` is this node's rank among ``nodes``; None: it is not known before they meet.
    """
    if rank >= nproc * nodes:
        raise UsageError(f"--attach-stdin {rank}: the ranks are 0 to {nproc * nodes - 1}")
    if node is not None and rank // nproc != node:
        raise UsageError(
            f"--attach-stdin {rank}: that rank runs on node {rank // nproc}, and this is node"
            f" {node}: give the option there, and not here"
        )
    with suppress(OSError):  # no terminal, or none of ours
        if os.isatty(0) and os.tcgetpgrp(0) != os.getpgrp():
            raise UsageError(
                f"--attach-stdin {rank}: this runs in the background, where the terminal is not"
                " its own: start it in the foreground"
            )


def with_attached(shown: Shown, rank: int, nproc: int) -> Shown:
    """``shown``, and what the rank that gets standard input writes."""
    local = {rank % nproc}
    return Shown(stdout=shown.stdout | local, stderr=shown.stderr | local)


def with_compat(env: Mapping[str, str | None], compat: str | None) -> dict[str, str | None]:
    """``--compat`` as the variable by which workers learn of it. Raises ``UsageError``."""
    if compat is None:
        return dict(env)
    return {**env, COMPAT: None if compat == "off" else compat}


def check_compat(environ: Mapping[str, str]) -> None:
    """Raises ``UsageError`` for a value of ``NCCLOPS_COMPAT`` that no worker knows."""
    if (given := environ.get(COMPAT, "nvrx")) != "nvrx":
        raise UsageError(f"{COMPAT}={given}: only nvrx is known: correct or unset it")


def check_addresses(environ: Mapping[str, str], *, nodes: int, local_addr: str | None) -> None:
    """Raises ``UsageError`` for a variable of the restart core's that every worker would refuse,
    and for a ``--local-addr`` at which nothing of this host can be reached.

    On several nodes the agents give the workers the store's address.
    """
    from ncclops.restart._store import addresses, variables  # not loaded for each command

    try:
        if nodes == 1:
            variables.external_store(environ)
        variables.relay_is_wanted(environ)
        addresses.chosen_address(environ)
        if local_addr is not None:
            addresses.own_address(local_addr, "--local-addr")
    except ValueError as error:
        raise UsageError(str(error)) from None


def silent_store(environ: Mapping[str, str]) -> str | None:
    """A remark if nobody answers at ``NCCLOPS_STORE`` yet: workers wait for it for minutes."""
    from ncclops.restart._store import addresses, variables

    if (store := variables.external_store(environ)) is None:
        return None
    host, port = store
    try:
        address = addresses.resolve(host, _STORE_ANSWERS_WITHIN_S)[0]
        socket.create_connection((address, port), _STORE_ANSWERS_WITHIN_S).close()
    except OSError as error:
        why = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
        return (
            f"no store answers at {variables.STORE}={host}:{port} yet ({why}): workers wait for it"
        )
    return None


def check_networks(wanted: Iterable[str], where: str) -> None:
    """Raise ``UsageError`` for one of ``wanted``, of the option or key ``where``, that is none."""
    for name in wanted:
        if not name:
            raise UsageError(f"{where}: one of the names is empty: give {_kinds()}")
        if close := network.mistaken(name):
            raise UsageError(f"{where} {name}: did you mean {close}? Give {_kinds()}")


def _kinds() -> str:
    return f"{', '.join(network.KINDS)}, or a name as NCCL prints it"


def check_allowed(names: Iterable[str], planned: Collection[str]) -> None:
    """Raise ``UsageError`` for a name of ``--allow-difference`` that nodes do not compare.

    ``planned`` are the variables of the plan.
    """
    from ncclops.cluster import fingerprint

    for name in names:
        if fingerprint.is_compared(name, planned):
            continue
        hint = nearest(
            name,
            (*fingerprint.FACTS, *planned, *catalogue()),
            or_else="; they compare variables of the profile, of NCCL and of torch, and "
            + ", ".join(fingerprint.FACTS),
        )
        raise UsageError(f"--allow-difference {name}: nodes compare nothing of that name{hint}")


def check_nccl_says(environ: Mapping[str, str]) -> None:
    """Raise ``UsageError`` where NCCL would not name its network in a file of the run.

    ``environ`` is the workers', with what NCCL's own files add.
    """
    level = environ.get("NCCL_DEBUG", "")
    parts = environ.get("NCCL_DEBUG_SUBSYS", "INIT").upper()
    file = environ.get("NCCL_DEBUG_FILE", "")
    named = {part.strip() for part in parts.removeprefix("^").split(",")}
    said = bool(named & {"INIT", "NET", "ALL"}) != parts.startswith("^")
    if level.upper() not in ("INFO", "TRACE"):
        problem = f"NCCL_DEBUG={level} keeps NCCL from saying which network it uses"
    elif not said:
        problem = f"NCCL_DEBUG_SUBSYS={parts} leaves out the lines that name the network"
    elif file and not file.endswith("/nccl.log"):
        problem = f"NCCL_DEBUG_FILE={file} takes NCCL's lines out of the run"
    else:
        return
    raise UsageError(
        f"--require-network: {problem}: unset it in the shell, or give --set NCCL_DEBUG=INFO"
    )
