"""Numbers from outside have a largest value, and their length costs nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ncclops.whole_numbers import MOST, whole_number
from tests.conftest import CompletedText

DIGITS = "9" * 100_000


@given(st.integers(0, 1 << 70), st.integers(0, 1 << 70), st.integers(0, 50))
def test_a_number_is_read_up_to_the_largest(number: int, most: int, zeros: int) -> None:
    expected = number if number <= most else None
    assert whole_number("0" * zeros + str(number), most) == expected


@pytest.mark.parametrize("text", ["", "-1", "+1", " 1", "1_0", "1.0", "²", "٣", "0x10", "1\n"])
def test_nothing_but_digits_is_a_number(text: str) -> None:
    assert whole_number(text) is None


def test_the_number_of_digits_costs_nothing() -> None:
    assert whole_number(DIGITS) is None
    assert whole_number("0" * 100_000 + "7") == 7
    assert whole_number(str(MOST)) == MOST


OPTIONS: Mapping[str, tuple[str, ...]] = {
    "workers": ("--nproc-per-node", DIGITS),
    "workers that no node has": ("--nproc-per-node", "1000000000"),
    "nodes": ("--nnodes", DIGITS),
    "spares": ("--nnodes", f"1:{DIGITS}"),
    "store": ("--nnodes", "2", "--rdzv-endpoint", f"localhost:{DIGITS}"),
    "times": ("--nnodes", "2", "--rdzv-conf", f"timeout={DIGITS}"),
    "shown": ("--local-ranks-filter", DIGITS),
    "shown of one": ("--tee", f"{DIGITS}:1"),
    "shown of some": ("--tee", f"0,{DIGITS}"),
    "restarts": ("--max-restarts", DIGITS),
    "parameter": ("-p", "single-node-h200", "--param", f"gpus_per_node={DIGITS}"),
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options_take_no_numbers_without_end(
    options: tuple[str, ...], ncclops_in_process: Callable[..., CompletedText]
) -> None:
    done = ncclops_in_process("launch", "--dry-run", *options, "train.py")
    assert done.returncode == 2, done.stderr[-2000:]
    assert done.stderr.splitlines()[-1].startswith("ncclops: error: ")
    assert max(map(len, done.stderr.splitlines())) < 3000


VARIABLES = (
    {"SLURM_JOB_END_TIME": DIGITS},
    {"SLURM_JOB_ID": DIGITS, "SLURM_NNODES": "1"},
    {"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": DIGITS},
    {"TORCH_NCCL_TRACE_BUFFER_SIZE": DIGITS},
    {"PET_NNODES": DIGITS},
    {"PET_NPROC_PER_NODE": DIGITS},
)


@pytest.mark.parametrize("variables", VARIABLES, ids=" ".join)
def test_variables_are_read_or_refused(
    variables: dict[str, str], ncclops_in_process: Callable[..., CompletedText]
) -> None:
    done = ncclops_in_process("launch", "--dry-run", "train.py", env=variables)
    assert done.returncode in (0, 2), done.stderr[-2000:]
    assert "internal error" not in done.stderr
