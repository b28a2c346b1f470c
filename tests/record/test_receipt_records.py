"""The records of ``receipt.jsonl``: what workers write, and what is read of damaged lines."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ncclops.record import receipt_records
from ncclops.record.receipt_records import TYPES, StepRecord, decode
from tests.conftest import LIMIT_S, clean_environ

EVERYTHING = """
from datetime import timedelta
from ncclops import receipt
from ncclops.receipts.pace import Unit, summary
from ncclops.receipts.recorder import current

with receipt.compile_warmup():
    pass
try:
    with receipt.compile_warmup():
        raise ValueError
except ValueError:
    pass
receipt.step(0, tokens=5, loss=float("nan"), busy=timedelta(seconds=0.1))
with receipt.phase("checkpoint"):
    receipt.step(1)
receipt.peak_memory()
current().note_pace(summary([Unit("step", n, 5.0 + n, 2.0, 0.5) for n in range(10)], 10))
current().begin_iteration(1)
receipt.step(2)
receipt.end()
"""


@pytest.mark.slow
def test_all_that_a_worker_writes_has_a_type(tmp_path: Path) -> None:
    """All kinds but ``stop``, which takes an agent; with no field that its type does not know."""
    (tmp_path / "ranks" / "0").mkdir(parents=True)
    environ = clean_environ({"NCCLOPS_RUN_DIR": str(tmp_path), "RANK": "0"})
    command = [sys.executable, "-c", EVERYTHING]
    subprocess.run(command, env=environ, check=True, timeout=LIMIT_S)
    lines = (tmp_path / "ranks" / "0" / "receipt.jsonl").read_text().splitlines()
    kinds = set()
    for line in lines:
        record = decode(line)
        assert record is not None, line
        known = {*record.__struct_fields__, "kind"}
        assert set(json.loads(line)) <= known
        kinds.add(type(record))
    assert kinds == set(TYPES) - {receipt_records.StopRecord}


@pytest.mark.parametrize(
    "line",
    [
        "",
        "null",
        "[]",
        "[" * 100_000,
        '{"kind": "step", "ts": 1.0, "step"',
        '{"kind": "later", "ts": 1.0}',
        '{"kind": "step", "ts": 1.0, "step": "3"}',
        '{"kind": "step", "ts": 1.0, "step": 3, "seconds": "long"}',
        '{"kind": "step", "ts": 1.0, "step": 3, "seconds": -1}',
        '{"kind": "step", "ts": 1e300, "step": 3}',
        '{"kind": "step", "step": 3}',
        '{"kind": "step", "ts": NaN, "step": 3}',
    ],
)
def test_what_is_no_record_is_none(line: str) -> None:
    assert decode(line) is None


def test_fields_of_later_versions_are_passed_over() -> None:
    line = '{"kind": "step", "ts": 1.0, "iteration": 2, "step": 3, "later": {"a": [1]}}'
    assert decode(line) == StepRecord(ts=1.0, iteration=2, step=3)


@given(st.binary(max_size=60), st.integers(0, 70))
def test_no_damage_is_a_reason_to_fail(noise: bytes, at: int) -> None:
    line = b'{"ts": 1.0, "kind": "step", "iteration": 0, "step": 3, "seconds": 0.5}'
    decode(line[:at] + noise + line[at:])
    decode(line[:at])
