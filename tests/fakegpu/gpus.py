"""The GPU of a rank, and the GPUs of this machine in the place of fake ones.

With ``NCCLOPS_TEST_GPU=real`` the tests marked ``gpu`` run on real GPUs, as ``scripts/gpu_day`` has
them do: a test shows there whether the fake GPU behaves as the real one.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from tests.fakegpu.host import Event, Host

if TYPE_CHECKING:
    import torch

REAL = os.environ.get("NCCLOPS_TEST_GPU") == "real"


def take_gpu(rank: int) -> torch.device:
    """The GPU of ``rank``, the current one from now on. Ranks share GPUs where there are fewer.

    NCCL takes two ranks on one GPU only if they say that they are on different hosts. torch 2.15
    has a GPU in mind already when the group is made: the one that ``LOCAL_RANK`` says.
    """
    import torch

    count = torch.cuda.device_count()
    if count < int(os.environ["WORLD_SIZE"]):
        os.environ["NCCL_HOSTID"] = f"rank-{rank}"
    os.environ["LOCAL_RANK"] = str(rank)
    device = torch.device("cuda", rank % count)
    torch.cuda.set_device(device)
    return device


class RealHost(Host):
    """The real GPUs of this machine: no test can set what they do, and they write no log."""

    def __init__(self) -> None:
        # Ranks that share a GPU are connected over sockets, see ``take_gpu``.
        self.environment = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}

    def set(self, *lines: str) -> None:
        pytest.skip(f"real GPUs know no rules: {'; '.join(lines)}")

    def events(self, name: str, rank: int | None = None) -> list[Event]:
        del rank
        pytest.skip(f"real GPUs write no log: {name}")
