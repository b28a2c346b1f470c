"""Samples of what people hand over, damaged, or grown in shapes that take some readers long."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from random import Random
from typing import Any

from tests.hostile.mutations import damage

_ENTRY: dict[str, Any] = {
    "pg_id": 0,
    "process_group": ["0", "default_pg"],
    "collective_seq_id": 1,
    "profiling_name": "nccl:all_reduce",
    "input_sizes": [[4]],
    "output_sizes": [[4]],
    "input_dtypes": ["Float"],
    "output_dtypes": ["Float"],
    "state": "started",
    "retired": False,
    "timeout_ms": 600000,
    "is_p2p": False,
}
_LOG = """\
[rank0]: step 1 loss 2.5 tok/s 1000 mem 3.2GiB
[rank1]: n1:12:12 [0] misc/socket.cc:58 NCCL WARN socketStartConnect: Connect to 10.0.0.1<4> failed
[rank1]: Traceback (most recent call last):
[rank1]:   File "train.py", line 3, in <module>
[rank1]: torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:1, remote process exited
run.sh: line 12: 4242 Killed   python train.py
"""
_SIGNATURE = """\
[[signature]]
id = "site-quota"
class = "user-error"
role = "cause"
literals = ["quota controller"]
pattern = "quota controller (?:ended|stopped)"
retry = "fix-config"
summary = "the quota is used up"
remedy = ["ask for more"]
examples = ["quota controller ended the job"]
near_misses = ["the quota controller says hello"]
"""
_PROFILE = """\
description = "a site's own"
extends = "single-node-h200"
[parameters]
warm = "45m"
[timeouts]
compile = "{warm}"
[env.NCCL_DEBUG]
set = "WARN"
why = "loud"
when = { torch = ">=2.8,<3" }
"""
_MANIFEST = """\
spec:
  containers:
  - name: train
    env: &env
    - {name: NCCL_ALGO, value: "Ring"}
    - name: NCCL_DEBUG
      value: INFO # loud
    command: ["bash", "-c", "export NCCL_IB_DISABLE=1; python t.py"]
"""
_SCRIPT = """\
#!/bin/bash
#SBATCH --nodes=2
if true; then export NCCL_DEBUG=${X:-INFO} NCCL_NTHREADS="256"; fi
cat <<END
$(date) `id`
END
env NCCL_ALGO='Ring' srun --export=ALL,NCCL_PROTO=LL \\
  torchrun --nnodes 2 t.py
unset NCCL_DEBUG
"""
SAMPLES = {
    "job.sh": _SCRIPT,
    "job.yaml": _MANIFEST,
    "job.env": "NCCL_DEBUG=INFO # loud\nexport NCCL_ALGO='Ring'\n",
    "nccl.conf": "NCCL_DEBUG=INFO\n",
    "Dockerfile": "FROM x\nENV NCCL_DEBUG=INFO A='b c' \\\n  C=$D\nENV NCCL_ALGO Ring\n",
    "job.py": "import os\nos.environ['NCCL_DEBUG'] = 'INFO'\nE = {'NCCL_ALGO': 'Ring'}\n",
    "site.toml": _PROFILE,
    "train.log": _LOG,
    "signatures/site.toml": _SIGNATURE,
    "receipt.jsonl": '{"ts": 1.5, "kind": "step", "step": 3}\n',
    "flight_0.json": json.dumps(
        {
            "version": "2.9",
            "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}},
            "entries": [_ENTRY],
        }
    ),
}
# What took minutes, or forever, before it was mended: a file each.
SHAPES = {
    "job.sh": "export NCCL_DEBUG=$(" * 50_000,
    "job.yaml": "args: |\n  " + " " * 500_000 + "x\n",
    "job.env": "A=x" + " " * 500_000 + "x\n",
    "Dockerfile": "ENV A=" + "${" * 250_000 + "\n",
    "job.py": "A = " + "-" * 500_000 + "1\n",
    "nccl.conf": "NCCL_NTHREADS=" + "9" * 500_000 + "\n",
    "site.toml": 'description = "d"\n' + "a." * 250_000 + "a = 1\n",
    "train.log": "".join(
        f"{line[:8000]}\n"
        for line in (
            "socketStartConnect" * 500,
            "socket NCCL WARN " + "cuMulticast" * 800,
            "Killed " + "0" * 8000,
            "NET/OFI fi_0" * 800,
        )
    )
    + "".join(f"[rank{rank}]: Fatal Python error: Segmentation fault\n" for rank in range(20_000)),
}


def write(directory: Path, files: dict[str, str]) -> None:
    """The samples, and ``files`` in place of some of them."""
    shutil.rmtree(directory, ignore_errors=True)
    (directory / "signatures").mkdir(parents=True)
    for name, text in {**SAMPLES, **files}.items():
        (directory / name).write_text(text)


def damaged(directory: Path, seed: int) -> str:
    """Write the samples and damage each of them, or grow it; what was done."""
    random = Random(seed)
    write(directory, {})
    done = []
    for name in SAMPLES:
        # Logs are read whatever their size: one of 3 GB takes its time.
        way = _grow if random.random() < 0.6 or name == "train.log" else damage
        done.append(way(directory / name, random))
    return f"seed {seed}: " + "; ".join(done)


def _grow(path: Path, random: Random) -> str:
    """Repeat a piece of the file, alone or where it stands, up to some 300 kB."""
    text = path.read_text()
    begin = random.randrange(len(text))
    piece = text[begin : begin + random.choice((1, 2, 3, 5, 8, 20, 60, 300))]
    times = random.choice((1000, 10_000, 300_000)) // len(piece) + 1
    rest = text if random.random() < 0.7 else ""
    path.write_text(rest[:begin] + piece * times + rest[begin:])
    return f"{path.name}: {times} times {piece[:60]!r}"
