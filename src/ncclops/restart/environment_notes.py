"""What in the environment would keep a restart from working, as sentences with the remedy. Pure.

Source: what ProcessGroupNCCL of torch 2.5 to 2.15 reads (two engines, "nccl" and "nccl2").
"""

from __future__ import annotations

from collections.abc import Mapping

_FALSE = {"0", "no", "n", "false", "f"}


def environment_notes(
    env: Mapping[str, str], torch_version: tuple[int, int], has_cuda: bool
) -> list[str]:
    """One sentence for each thing that would end the process instead of letting it restart."""
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
