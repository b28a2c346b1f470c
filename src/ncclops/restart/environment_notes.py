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
# From this torch on, communicators that send and recv make by themselves (pytorch#150690) as well.
_TORCH_P2P = (2, 8)


def environment_notes(
    env: Mapping[str, str],
    torch_version: tuple[int, int],
    has_cuda: bool,
    *,
    nccl_version: tuple[int, ...] | None = None,
    nccl_timeout: timedelta | None = None,
    hard_timeout: timedelta | None = None,
) -> list[str]:
    """One sentence for each thing that would end the process instead of letting it restart.

    ``nccl_version`` and ``nccl_timeout`` (of a group that is made without a timeout) are what
    this torch has, ``None`` where it has no NCCL; ``hard_timeout`` is the wrapper's.
    """
    notes = []
    if _under_torchrun(env):
        notes.append(
            "started by torchrun, whose agent ends all workers when one of them dies: only faults "
            "that leave every process alive can be restarted; use `ncclops launch` or srun "
            "(with --kill-on-bad-exit=0) to survive the loss of a process"
        )
    if has_cuda and not _nccl_lets_live(env, torch_version):
        notes.append(
            "torch's NCCL watchdog ends the process on an error or a timeout: "
            "set TORCH_NCCL_ASYNC_ERROR_HANDLING=0 (torchrun sets 1)"
        )
    if has_cuda and env.get("NCCL_NVLS_ENABLE") != "0":
        notes.append("NVLink SHARP does not survive an abort: set NCCL_NVLS_ENABLE=0")
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


def _under_torchrun(env: Mapping[str, str]) -> bool:
    return "TORCHELASTIC_RUN_ID" in env and "NCCLOPS_RUN_ID" not in env


def _nccl_lets_live(env: Mapping[str, str], torch_version: tuple[int, int]) -> bool:
    if env.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3") in ("0", "2"):
        return True
    # Only the older engine reads this; the newer one is the default from 2.15, optional in 2.14.
    newer_by_default = torch_version >= (2, 15)
    newer = env.get("TORCH_DIST_USE_NCCL2", "1" if newer_by_default else "0").lower() not in _FALSE
    if torch_version >= (2, 14) and newer:
        return False
    return env.get("TORCH_NCCL_RETHROW_CUDA_ERRORS", "1").lower() in _FALSE
