"""How quick the command line starts, in multiples of ``python -c "import typer"``.

    python scripts/bench_cli.py [ROUNDS]

Each round runs every command once, one after the other, so that a busy machine slows all of them
alike; the least time of each counts. Modules are compiled beforehand, as an installation has them,
and `classify` has been called once (it keeps what it builds), but for the line that says otherwise.
What the contracts aim for: ``--help`` within 0.2 s, ``--version``, ``--help`` and ``classify`` of a
small file within twice the import of typer.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROUNDS = 15
LOG = "step 1 loss 2.0\n" * 4 + "[rank3]: torch.OutOfMemoryError: CUDA out of memory.\n"


def seconds(command: list[str], environ: dict[str, str]) -> tuple[float, float]:
    """Wall and CPU time of one run; the first is what a user waits, on an idle machine."""
    began = time.perf_counter()
    process = subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    took = time.perf_counter() - began
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{command} ended with exit code {process.returncode}")
    return took, usage.ru_utime + usage.ru_stime


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else ROUNDS
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch) / "train.log"
        log.write_text(LOG)
        environ = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
        environ["PYTHONPYCACHEPREFIX"] = str(Path(scratch) / "compiled")
        environ["XDG_CACHE_HOME"] = str(Path(scratch) / "cache")
        ncclops = [sys.executable, "-m", "ncclops"]
        commands = {
            'python -c "import typer"': [sys.executable, "-c", "import typer"],
            "ncclops --version": [*ncclops, "--version"],
            "ncclops --help": [*ncclops, "--help"],
            "ncclops launch --help": [*ncclops, "launch", "--help"],
            "ncclops classify train.log": [*ncclops, "classify", str(log)],
            "the same, nothing kept": [
                *["env", "XDG_CACHE_HOME=/proc/none", *ncclops, "classify", str(log)]
            ],
        }
        for command in commands.values():
            seconds(command, environ)  # compiles
        runs: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
        for _ in range(rounds):
            for name, command in commands.items():
                runs[name].append(seconds(command, environ))
    least = {
        name: [min(column) for column in zip(*took, strict=True)] for name, took in runs.items()
    }
    wall_unit, cpu_unit = next(iter(least.values()))
    for name, (wall, cpu) in least.items():
        print(
            f"{name:28} {wall * 1000:6.0f} ms, {wall / wall_unit:4.2f} times;"
            f" CPU {cpu * 1000:6.0f} ms, {cpu / cpu_unit:4.2f} times"
        )


if __name__ == "__main__":
    main()
