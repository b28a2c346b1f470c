"""What in the environment would keep a restart from working, as sentences with the remedy. Pure.

Sources: the reference guides of the wrapper that this one is compatible with, and what
ProcessGroupNCCL of torch 2.5 to 2.15 reads (two engines, "nccl" and "nccl2").
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

_FALSE = {"0", "no", "n", "false", "f"}


# From this NCCL on a communicator can be aborted whatever it is doing.
_NCCL = (2, 26, 2)
# torch's watchdog after an abort. A restart does not wait for it, but its tensors stay.
_MOST_SLEEP_S = 5.0
# From this torch on, communicators that send and recv make by themselves (pytorch#150690) as well.
_TORCH_P2P = (2, 8)
# To the store: of the main, the monitor and the reporter thread; of the groups of an iteration, of
# those before that are not freed yet, and of the heartbeat thread of ProcessGroupNCCL.
_CONNECTIONS_PER_RANK = 6
# The server's own: its libraries, event loop and listening socket.
_OTHER_FILES = 64


def environment_notes(
    env: Mapping[str, str],
    torch_version: tuple[int, int],
    has_cuda: bool,
    *,
    nccl_version: tuple[int, ...] | None = None,
    nccl_timeout: timedelta | None = None,
    hard_timeout: timedelta | None = None,
    most_open_files: int | None = None,
) -> list[str]:
    """One sentence for each thing that would end the process instead of letting it restart.

    ``nccl_version`` and ``nccl_timeout`` (of a group that is made without a timeout) are what
    this torch has, ``None`` where it has no NCCL; ``hard_timeout`` is the wrapper's.
    ``most_open_files`` is the hard limit of this process, ``None`` where it has none or does not
    host the store.
    """
    notes = []
    if _under_torchrun(env):
        notes.append(
            "started by torchrun, whose agent ends all workers when one of them dies: only faults "
            "that leave every process alive can be restarted; use `ncclops launch` or srun "
            "(with --kill-on-bad-exit=0) to survive the loss of a process"
        )
    if most_open_files is not None and most_open_files < (needed := _files_of_store(env)):
        notes.append(
            f"the store's server on this host may have {most_open_files} open files, and "
            f"{env.get('WORLD_SIZE')} ranks may take {needed}: raise the hard limit (ulimit -Hn, "
            "LimitNOFILE= of a service, --ulimit nofile= of a container)"
        )
    if has_cuda and not _nccl_lets_live(env, torch_version):
        notes.append(
            "torch's NCCL watchdog ends the process on an error or a timeout: "
            "set TORCH_NCCL_ASYNC_ERROR_HANDLING=0 (torchrun sets 1)"
        )
    if has_cuda and (dump_s := _sleep_after_error_s(env)) > _MOST_SLEEP_S:
        notes.append(
            f"torch's NCCL watchdog keeps the tensors of an aborted collective for {dump_s:g} s: "
            "set TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC=1 and TORCH_NCCL_DUMP_ON_TIMEOUT=0"
        )
    if has_cuda and env.get("TORCH_NCCL_USE_COMM_NONBLOCKING", "0").lower() not in _FALSE:
        notes.append(
            "with non-blocking communicators torch cannot abort one that is being made: the abort "
            "waits for TORCH_NCCL_NONBLOCKING_TIMEOUT; set TORCH_NCCL_USE_COMM_NONBLOCKING=0"
        )
    if has_cuda and env.get("NCCL_NVLS_ENABLE") != "0":
        notes.append("NVLink SHARP does not survive an abort: set NCCL_NVLS_ENABLE=0")
    if has_cuda and "LOCAL_RANK" not in env and _has_second_engine(env, torch_version):
        notes.append(
            "without LOCAL_RANK torch's second NCCL engine takes the GPU that has the rank's "
            "number, and a restart renumbers ranks: set LOCAL_RANK, or give init_process_group "
            "device_id"
        )
    if not has_cuda:
        return notes
    if nccl_version is not None and nccl_version < _NCCL:
        version = ".".join(map(str, nccl_version))
        plugin = "" if env.get("NCCL_NET_PLUGIN") == "none" else ", or set NCCL_NET_PLUGIN=none"
        notes.append(f"NCCL {version} may hang in an abort: use 2.26.2 or newer{plugin}")
    if torch_version < _TORCH_P2P:
        notes.append(
            "torch before 2.8 may hang in an abort when send and recv have made communicators by "
            "themselves (pytorch#150690): make a group of each pair with new_group"
        )
    if nccl_timeout is not None and hard_timeout is not None and nccl_timeout <= hard_timeout:
        notes.append(
            f"torch's NCCL watchdog acts after {nccl_timeout}, which must be more than "
            f"hard_timeout={hard_timeout}: give init_process_group a longer timeout"
        )
    return notes


def _files_of_store(env: Mapping[str, str]) -> int:
    """How many files the server that this process starts may have to open; 0 where it has none."""
    if env.get("RANK", "0") != "0" or env.get("NCCLOPS_STORE"):
        return 0
    if env.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return 0
    return int(env.get("WORLD_SIZE", "1")) * _CONNECTIONS_PER_RANK + _OTHER_FILES


def _has_second_engine(env: Mapping[str, str], torch_version: tuple[int, int]) -> bool:
    """Whether "nccl" is torch's newer engine: 2.15 takes it but for 0, 2.14 only for 1."""
    asked = env.get("TORCH_DIST_USE_NCCL2")
    return asked != "0" if torch_version >= (2, 15) else torch_version >= (2, 14) and asked == "1"


def _under_torchrun(env: Mapping[str, str]) -> bool:
    return "TORCHELASTIC_RUN_ID" in env and "NCCLOPS_RUN_ID" not in env


def _sleep_after_error_s(env: Mapping[str, str]) -> float:
    """How long torch's NCCL watchdog sleeps when it has seen an error, or an abort."""
    try:
        wait_ms = int(env.get("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "15000"))
    except ValueError:  # torch refuses it when it makes the first group
        return 0.0
    return 4 * wait_ms / 1000


def _nccl_lets_live(env: Mapping[str, str], torch_version: tuple[int, int]) -> bool:
    if env.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3") in ("0", "2"):
        return True
    if _has_second_engine(env, torch_version):  # which does not read this
        return False
    return env.get("TORCH_NCCL_RETHROW_CUDA_ERRORS", "1").lower() in _FALSE
