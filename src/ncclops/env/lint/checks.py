"""Checks of single variables against the catalogue: names, values, readers, places."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from functools import cache

from ncclops.env.catalogue import (
    LIBNCCL,
    MISSPELT_PREFIXES,
    Variable,
    catalogue,
    is_covered,
    is_of_plugin,
    nearest_names,
)
from ncclops.env.lint.model import Circumstances, Host, LintedSettings, LintFinding, Setting, engine
from ncclops.env.values import doubt_about, problem_with

# The ids of the findings below, for suppressions.
CHECK_IDS = (
    "adapter-prefix",
    "bad-value",
    "conf-file-line",
    "deprecated",
    "multi-host-setting",
    "net-plugin-missing",
    "not-exported",
    "not-on-this-host",
    "single-node-poison",
    "unknown-name",
    "unlikely-adapter",
    "unlikely-value",
    "unread",
    "unread-by-second-engine",
    "unread-here",
)
_CATALOGUE = "the catalogue"
# A frequent cause of failures on one node, and yet sometimes set there for a reason.
_NOT_POISON = frozenset({"CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH", "LD_PRELOAD", "NCCL_ALGO"})
_BLANKS = re.compile(r"[\w:.-]+(?: +[\w:.-]+)+")
_OF_SCRIPTS = ("build", "nccl-tests")
# Where something lies, or what is to be built: a script's own, or a build's.
_PLACES = re.compile(r".*_(?:HOME|ROOT|DIR|PREFIX|INCLUDE|LIB|REPO|BRANCH|COMMIT|TAG|URL|IMAGE)")
_PATH = re.compile(r"(?:~|\.{1,2})?/")
_SWITCHES = {"true": "1", "yes": "1", "on": "1", "false": "0", "no": "0", "off": "0"}
# Not NCCL's or torch.distributed's, and of no use to a shell script itself.
_FOR_PROGRAMS = frozenset(
    {"CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING", "OMP_NUM_THREADS", "PYTORCH_CUDA_ALLOC_CONF"}
)
# How long a name has to be to tell a slip where its prefix is anybody's.
_LONG_NAME = 14
# Checks of words; a number may have spaces around it, a word may not.
_WORDS = frozenset({"choices", "list_of", "words"})
# Drivers by which RDMA adapters are named, and names that are none but nearly one of them.
_ADAPTERS = ("mlx5", "mlx4", "bnxt", "ionic")
_ADAPTER_LISTS = frozenset({"NCCL_IB_HCA", "UCX_NET_DEVICES"})
# Names of Ethernet and Cray interfaces and of Slingshot's adapters, which UCX and libfabric take:
# they are no names of RDMA adapters.
_INTERFACE = re.compile(r"(?:eth|bond|hsn|cxi|ipogif|eno|ens)\d|enp\d+s\d|docker\d")
_BUILT_IN_NETS = frozenset({"ib", "socket", "rdma"})


def check_variables(settings: LintedSettings, where: Circumstances) -> Iterator[LintFinding]:
    """Findings about one variable each."""
    for setting in settings.all:
        variable = catalogue().get(setting.name)
        if variable is None:
            yield from _unknown(setting, where)
            continue
        if not setting.exported:
            yield from _not_exported(setting, variable)
            continue
        yield from _value(setting, variable)
        yield from _reader(setting, variable, where)
        yield from _place(setting, variable, where)
        if engine(settings, where) == "second" and variable.nccl2 is False:
            yield LintFinding(
                "unread-by-second-engine",
                "note",
                (setting.name,),
                f"{setting.name} is not read by torch's second NCCL engine, which runs here",
                "TORCH_DIST_USE_NCCL2=0 brings the classic engine back",
                variable.source,
                setting.line,
            )
    if where.host is not None:
        yield from _host(settings, where.host)


def _unknown(setting: Setting, where: Circumstances) -> Iterator[LintFinding]:
    name = setting.name
    bare = name.strip().removeprefix("export ").strip()
    if bare != name and is_covered(bare):
        yield LintFinding(
            "conf-file-line",
            "error",
            (bare,),
            f"{name!r} is taken as the name: NCCL's file knows no spaces around it and no export",
            f"write {bare}=VALUE",
            "run on libnccl 2.32.3",
            setting.line,
            (f"{name}=", f"{bare}="),
        )
        return
    if not setting.exported or setting.expanded:  # what a script expands itself is its own
        return
    near = nearest_names(name) if is_covered(name) else _misspelt_prefix(setting)
    is_place = _PLACES.fullmatch(name) is not None or _PATH.match(setting.value or "") is not None
    if is_place:
        near = tuple(other for other in near if _is_slip_of(name, other))
    one_off = tuple(other for other in near if _is_one_off(name, other))
    if len(one_off) == 1:
        near = one_off
    # plugins, and AMD's fork, read names that the catalogue does not have
    of_fork = "rocm" in where.uses and name.startswith("NCCL_")
    of_others = is_of_plugin(name) or is_place or setting.printed or of_fork
    if not near and (not is_covered(name) or of_others):
        return
    meant = f"did you mean {' or '.join(near)}?" if near else "check its spelling"
    message = f"{name} is not known: nothing in the catalogue reads it"
    repair = (name, near[0]) if len(near) == 1 and _is_slip_of(name, near[0]) else None
    yield LintFinding(
        "unknown-name", "warning", (name,), message, meant, _CATALOGUE, setting.line, repair
    )


def _misspelt_prefix(setting: Setting) -> tuple[str, ...]:
    """The name that ``NCLL_DEBUG``, ``nccl_debug`` or ``NCC_INFO=INFO`` was meant to be, if any."""
    name = setting.name
    for wrong, right in MISSPELT_PREFIXES.items():
        if name.startswith(wrong):
            meant = right + name.removeprefix(wrong)
            if meant in catalogue():
                return (meant,)
            is_level = (setting.value or "").upper() in catalogue()["NCCL_DEBUG"].check["choices"]
            return nearest_names(meant) or (("NCCL_DEBUG",) if is_level else ())
    if name.startswith("FI_"):
        return _one_letter_off(name)
    if name.startswith("NCCL") and (slip := _without_underscores().get(name.replace("_", ""))):
        return (slip,)
    if not is_covered(name) and (slip := _slip_of_another(name)):
        return (slip,)
    upper = name.upper()
    variable = catalogue().get(upper) if name.islower() and is_covered(upper) else None
    return (upper,) if variable and variable.component not in _OF_SCRIPTS else ()


@cache
def _slip_of_another(name: str) -> str | None:
    """The long name, of CUDA, OpenMP or the loader, that ``name`` differs from in one letter."""
    if len(name) < _LONG_NAME or name in catalogue():
        return None
    return next(
        (
            other
            for other, variable in catalogue().items()
            if len(other) >= _LONG_NAME
            and not is_covered(other)
            and variable.component not in (*_OF_SCRIPTS, "libfabric", "ucx")
            and _is_one_off(name, other)
        ),
        None,
    )


@cache
def _without_underscores() -> dict[str, str]:
    """NCCL's names without their underscores: ``NCCLDEBUG``."""
    return {
        name.replace("_", ""): name
        for name, variable in catalogue().items()
        if name.startswith("NCCL_") and variable.component not in _OF_SCRIPTS
    }


def _one_letter_off(name: str) -> tuple[str, ...]:
    """The variable of libfabric that ``name`` is with a letter too many, missing or moved.

    It has more providers than the catalogue; another letter may make another name (TX, RX).
    """
    for other, variable in catalogue().items():
        same_letters = len(other) == len(name) and sorted(other) == sorted(name)
        if (
            variable.component == "libfabric"
            and (len(other) != len(name) or same_letters)
            and _is_one_off(name, other)
        ):
            return (other,)
    return ()


def _is_slip_of(name: str, meant: str) -> bool:
    """Whether the two differ by no more than a slip of the pen.

    Another letter in a short name may be another name.
    """
    if name.upper() == meant or name.startswith(tuple(MISSPELT_PREFIXES)):
        return True
    has_other_letter = len(name) == len(meant) and sorted(name) != sorted(meant)
    if _is_one_off(name, meant) and not has_other_letter:
        return True
    return difflib.SequenceMatcher(None, name, meant).ratio() > 0.93


def _not_exported(setting: Setting, variable: Variable) -> Iterator[LintFinding]:
    known_outside = variable.component in _OF_SCRIPTS
    is_meant = is_covered(setting.name) or setting.name in _FOR_PROGRAMS
    if is_meant and not known_outside and not setting.expanded:
        yield LintFinding(
            "not-exported",
            "note",
            (setting.name,),
            f"{setting.name} is assigned and not exported here, so no program sees it unless it"
            " was exported before",
            f"export {setting.name}",
            "POSIX shell",
            setting.line,
        )


def _value(setting: Setting, variable: Variable) -> Iterator[LintFinding]:
    if setting.value is None:
        return
    value = setting.value
    if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"":
        problem = f"the quotes in {value} are part of the value"
    elif not variable.check.keys().isdisjoint(_WORDS) and value != value.strip():
        problem = f"there are spaces around {value!r}, and they are part of the value"
    else:
        problem = problem_with(variable, value) or ""
    if problem:
        yield LintFinding(
            "bad-value",
            "error",
            (setting.name,),
            f"{setting.name}: {problem}",
            "",
            variable.source,
            setting.line,
            _right_value(variable, value),
        )
        return
    if doubt := doubt_about(variable, value):
        yield LintFinding(
            "unlikely-value",
            "warning",
            (setting.name,),
            f"{setting.name}: {doubt}",
            "",
            variable.source,
            setting.line,
        )
    elif setting.name in _ADAPTER_LISTS:
        yield from _adapters(setting, value)
        if setting.name == "NCCL_IB_HCA":
            yield from _prefixes(setting, value)


def _prefixes(setting: Setting, value: str) -> Iterator[LintFinding]:
    """``mlx5_1``, which NCCL takes for the beginning of a name; after ``=`` it does not."""
    entries = [entry.strip().partition(":")[0] for entry in value.removeprefix("^").split(",")]
    if "mlx5_1" in entries and "=" not in value:
        yield LintFinding(
            "adapter-prefix",
            "note",
            (setting.name,),
            f"{setting.name}: mlx5_1 is the beginning of mlx5_10 to mlx5_19 as well, and NCCL takes"
            " what begins so, on hosts that have them",
            f"write {'^' if value.startswith('^') else ''}=NAME,… for these names alone",
            "NCCL user guide, NCCL_IB_HCA",
            setting.line,
        )


def _adapters(setting: Setting, value: str) -> Iterator[LintFinding]:
    """``mx5_0`` and ``mlx_1``: names that no driver gives, and one letter off one that does."""
    for entry in value.lstrip("^=").split(","):
        if setting.name != "UCX_NET_DEVICES" and _INTERFACE.match(entry.strip()):
            yield LintFinding(
                "unlikely-adapter",
                "warning",
                (setting.name,),
                f"{setting.name}: {entry.strip()} is the name of an interface and not of an"
                " RDMA adapter, and what matches none is left out without a word",
                "name adapters as ibv_devices does; NCCL_SOCKET_IFNAME takes interfaces, and"
                " NCCL_IB_DISABLE=1 says that none is meant",
                "NCCL user guide, NCCL_IB_HCA",
                setting.line,
            )
            continue
        match = re.match(r"([A-Za-z]+)(\d?)", entry.strip())
        if match is None or any(driver.startswith(entry.strip()) for driver in _ADAPTERS):
            continue
        stems = {match[1], match[0]}
        if stems.isdisjoint(_ADAPTERS):
            meant = [d for d in _ADAPTERS if any(_is_one_off(stem, d) for stem in stems)]
            if meant:
                yield LintFinding(
                    "unlikely-adapter",
                    "warning",
                    (setting.name,),
                    f"{setting.name}: no driver names an adapter {entry.strip()}, and what matches"
                    " none is left out without a word",
                    f"did you mean {meant[0]}{'_' if meant[0] == 'bnxt' else ''}…?",
                    "Linux, drivers/infiniband",
                    setting.line,
                )


def _is_one_off(name: str, meant: str) -> bool:
    """Whether one letter is missing, too many, another one, or two have changed places."""
    if sorted(name) == sorted(meant):
        return sum(a != b for a, b in zip(name, meant, strict=True)) == 2
    if len(name) == len(meant):
        return sum(a != b for a, b in zip(name, meant, strict=True)) == 1
    longer, shorter = sorted((name, meant), key=len, reverse=True)
    return len(longer) == len(shorter) + 1 and any(
        longer[:at] + longer[at + 1 :] == shorter for at in range(len(longer))
    )


def _right_value(variable: Variable, value: str) -> tuple[str, str] | None:
    """The value, and what was certainly meant by it."""
    choices = variable.check.get("choices", ())
    meant = None
    if value.strip().upper() in choices and not value.strip().isdigit():
        meant = value.strip().upper()
    elif variable.kind == "bool" and value.strip().lower() in _SWITCHES:
        meant = _SWITCHES[value.strip().lower()]
    elif variable.name == "CUBLAS_WORKSPACE_CONFIG" and re.fullmatch(r"\d+:\d+", value):
        meant = f":{value}"
    elif variable.name.endswith(("_IFNAME", "_HCA")) and _BLANKS.fullmatch(value):
        meant = ",".join(value.split())
    return (value, meant) if meant is not None and meant != value else None


def _reader(setting: Setting, variable: Variable, where: Circumstances) -> Iterator[LintFinding]:
    instead = f"use {variable.replaced_by}" if variable.replaced_by else ""
    if variable.status == "unread" or (variable.status == "removed" and _is_gone(variable, where)):
        since = f" since {variable.removed}" if variable.removed else ""
        message = f"{setting.name} is read by nothing{since}"
        if variable.status == "unread":
            message = f"{setting.name}: {variable.summary}"
        yield _about_reader("unread", "warning", setting, variable, message, instead)
    elif variable.status == "deprecated" or (variable.deprecated and variable.replaced_by):
        since = f" since {variable.deprecated}" if variable.deprecated else ""
        if variable.component == "flight-recorder" or variable.component == "allocator":
            return  # both names are in use; the rules on pairs say when one is not enough
        message = f"{setting.name} is deprecated{since}"
        yield _about_reader("deprecated", "note", setting, variable, message, instead)
    elif variable.read_in(torch=where.torch, nccl=where.nccl) is False and not setting.expanded:
        installed = (
            f"NCCL {where.nccl}" if variable.component in LIBNCCL else f"torch {where.torch}"
        )
        message = f"{setting.name} is not read by {installed} (it came with {variable.since})"
        yield _about_reader("unread-here", "note", setting, variable, message, instead)


def _is_gone(variable: Variable, where: Circumstances) -> bool:
    """Whether a removed variable is gone from what runs, as far as that is known."""
    return variable.read_in(torch=where.torch, nccl=where.nccl) is not True


def _about_reader(
    rule: str, level: str, setting: Setting, variable: Variable, message: str, remedy: str
) -> LintFinding:
    return LintFinding(
        rule,
        "warning" if level == "warning" else "note",
        (setting.name,),
        message,
        remedy or ("remove it" if level == "warning" else ""),
        variable.source,
        setting.line,
    )


def _place(setting: Setting, variable: Variable, where: Circumstances) -> Iterator[LintFinding]:
    if where.nodes != "one" or not setting.value:
        return
    name = setting.name
    if variable.single_node == "high" and name not in _NOT_POISON and not _harmless(setting, where):
        yield LintFinding(
            "single-node-poison",
            "note" if name.endswith("_IFNAME") else "warning",
            (name,),
            f"{name} can stop a job on one node. {variable.risk or ''}".strip(),
            f"unset {name} on one node (profile single-node-h200 does)",
            variable.source,
            setting.line,
        )
    elif variable.multi_host and not name.endswith("_DISABLE"):
        yield LintFinding(
            "multi-host-setting",
            "note",
            (name,),
            f"{name} only matters between nodes",
            "",
            variable.source,
            setting.line,
        )


def _harmless(setting: Setting, where: Circumstances) -> bool:
    """Whether a dangerous name has a value that is safe on this very host."""
    value = setting.value or ""
    if setting.name == "NCCL_NET":
        return value.lower() == "socket"
    if setting.name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        if value in ("lo", "=lo") or value.startswith("^"):
            return True
        return where.host is not None and not _absent(setting.name, value, where.host)
    return False


def _host(settings: LintedSettings, host: Host) -> Iterator[LintFinding]:
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_IB_HCA"):
        value = settings.value(name)
        absent = _absent(name, value, host) if value else ()
        if absent:
            kind = "HCA" if name == "NCCL_IB_HCA" else "interface"
            have = ", ".join(sorted(host.hcas if kind == "HCA" else host.interfaces)) or "none"
            yield LintFinding(
                "not-on-this-host",
                "error",
                (name,),
                f"{name}: this host has no {kind} {' or '.join(absent)}",
                f"it has {have}",
                _CATALOGUE,
                settings.line(name),
            )
    net = settings.value("NCCL_NET")
    if net and net.lower() not in _BUILT_IN_NETS and host.net_plugins == frozenset():
        yield LintFinding(
            "net-plugin-missing",
            "error",
            ("NCCL_NET",),
            f"NCCL_NET={net} is a plugin's network, and this host has no network plugin",
            "unset NCCL_NET, or put the plugin's directory into LD_LIBRARY_PATH",
            "nccl src/plugin/net.cc",
            settings.line("NCCL_NET"),
        )


def _absent(name: str, value: str, host: Host) -> tuple[str, ...]:
    """The entries of an interface or HCA list that match nothing here, if that is fatal.

    NCCL takes prefixes, ``=`` for exact names and ``^`` to leave out; it is content with one
    match. Gloo wants each exact name. Without any interface, even ``lo``, nothing is known of them.
    """
    if value.startswith("^") or (name != "NCCL_IB_HCA" and not host.interfaces):
        return ()
    exact = name == "GLOO_SOCKET_IFNAME" or value.startswith("=")
    have = host.hcas if name == "NCCL_IB_HCA" else host.interfaces
    wanted = [re.split(":", entry)[0] for entry in value.lstrip("=").split(",") if entry]
    absent = tuple(
        entry
        for entry in wanted
        if not (entry in have if exact else any(item.startswith(entry) for item in have))
    )
    return absent if name == "GLOO_SOCKET_IFNAME" or len(absent) == len(wanted) else ()
