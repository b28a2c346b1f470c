"""Whether a GPU made its rank fail, by what the driver and the rank say."""

from __future__ import annotations

import pytest

from ncclops.agent.gpu_watch import Fact, describe_xid, find_fault
from ncclops.host.nvml import GpuName

NAME = GpuName(3, "GPU-5b1c", "0000:5e:00.0")
LOST = "the GPU does not answer: GPU is lost"
ECC = "[rank5]: RuntimeError: CUDA error: uncorrectable ECC error encountered"
ILLEGAL = "[rank5]: RuntimeError: CUDA error: an illegal memory access was encountered"
MISTAKE = "[rank5]: KeyError: 'learning_rate'"


def xid(number: int) -> Fact:
    return Fact(f"NVRM: Xid (PCI:0000:5e:00): {number}, ", describe_xid(number))


def said(*facts: Fact | str, output: str = "") -> str | None:
    """What is said of the GPU; None where it is not the cause."""
    known = [fact if isinstance(fact, Fact) else Fact(fact, fact) for fact in facts]
    fault = find_fault(5, "n07", NAME, known, output)
    return None if fault is None else str(fault)


@pytest.mark.parametrize(
    ("facts", "output", "what"),
    [
        ((xid(79), LOST), "", f"Xid 79 (GPU has fallen off the bus), {LOST}"),
        ((xid(95),), ECC, "uncorrectable ECC error encountered, Xid 95 (uncontained memory error)"),
        ((xid(170),), ILLEGAL, "Xid 170"),
        (("2 uncorrectable ECC errors",), MISTAKE, "2 uncorrectable ECC errors"),
        (
            ("the driver asks for recovery of the GPU: node reboot",),
            ILLEGAL,
            "the driver asks for recovery of the GPU: node reboot",
        ),
        ((), ECC, "uncorrectable ECC error encountered"),
        ((), "[rank5]: pynvml.NVMLError_GpuIsLost: GPU is lost", "a GPU no longer answers"),
    ],
)
def test_the_gpu_and_its_node_are_named_with_the_evidence(
    facts: tuple[Fact | str, ...], output: str, what: str
) -> None:
    device = "GPU 3 (GPU-5b1c, PCI 0000:5e:00.0)"
    assert said(*facts, output=output) == f"{device} on node n07: {what}; replace node n07"


@pytest.mark.parametrize(
    ("facts", "output"),
    [
        ((), ""),
        ((), MISTAKE),
        ((), ILLEGAL),
        ((xid(31),), ILLEGAL),  # the program's own
        ((xid(45),), ""),  # what the end of any process leaves
    ],
)
def test_other_failures_are_not_the_gpus(facts: tuple[Fact, ...], output: str) -> None:
    assert said(*facts, output=output) is None


def test_what_another_rank_has_met_is_not_held_against_this_ranks_gpu() -> None:
    """A rank that leaves shows why the others restarted before."""
    shown = f"""\
ncclops.restart.attribution.RemoteFaultError: Traceback (most recent call last):
{ECC}

The above exception was the direct cause of the following exception:

{MISTAKE}
"""
    assert said(output=shown) is None
    assert said(output=shown + ECC) is not None
