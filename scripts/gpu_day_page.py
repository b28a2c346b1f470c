"""Run what needs a GPU, and write one page of results. ``scripts/gpu_day`` sets up what it needs.

    scripts/gpu_day [--out DIR] [--minutes 25] [--parts tests benchmark log]

One after the other, each with its share of the time: what the machine is; the tests marked ``gpu``,
on its GPUs; the restart benchmark on NCCL, at 2 and 4 ranks; the log of NCCL in a run of two
ranks, line by line beside that of the fake GPU, where ``scripts/fake_gpu`` has set that up. Ranks
share GPUs where there are fewer. ``DIR/gpu-day.md`` is the page; the raw output of each part lies
beside it. What runs out of time is ended, and the page says so. Exits with 1 if a test failed or a
part could not run, with 3 where there is no GPU.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
FAKE_GPU = REPOSITORY / ".fakegpu" / "made"
# pytest-benchmark, where the interpreter has it, warns beside xdist, and warnings are errors here.
# Two at a time: with eight jobs on one GPU (2026-11-27, H200) ranks did not run for seconds.
PYTEST = (sys.executable, "-m", "pytest", "-p", "no:benchmark", "-m", "gpu", "-q", "-n", "2")
TESTS = ("tests/fakegpu", "tests/restart")
BENCHMARK = (
    *("scripts/bench_restart.py", "--backend", "nccl", "--worlds", "2", "4"),
    *("--repeat", "1", "--without", "torchrun"),
)


@dataclass
class Part:
    """A part of the page. ``is_good``: nothing failed."""

    title: str
    text: str
    is_good: bool


def main() -> int:
    """Run the parts, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("gpu-day"), help="default: gpu-day")
    parser.add_argument("--minutes", type=float, default=25.0, help="for all of it")
    parser.add_argument("--parts", choices=PARTS, nargs="+", default=[*PARTS], help="default: all")
    arguments = parser.parse_args()
    out: Path = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    if (machine := this_machine()) is None:
        print("scripts/gpu_day: torch finds no GPU: is this its CUDA build, and is there a driver?")
        return 3
    page = [f"# {machine}\n"]
    total_s = 60 * arguments.minutes
    good = True
    for part, share in (PARTS[name] for name in arguments.parts):
        began = time.monotonic()
        found = part(out, share * total_s)
        good &= found.is_good
        page.append(f"## {found.title} ({time.monotonic() - began:.0f} s)\n\n{found.text}\n")
        (out / "gpu-day.md").write_text("\n".join(page))  # what follows may take the machine down
        print(page[-1], flush=True)
    return 0 if good else 1


def this_machine() -> str | None:
    """GPUs and versions; None without a GPU."""
    import pynvml
    import torch

    if not torch.cuda.is_available():
        return None
    pynvml.nvmlInit()
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    gpus = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    driver = pynvml.nvmlSystemGetDriverVersion()
    return f"{gpus}, driver {driver}, torch {torch.__version__}, NCCL {nccl}"


def run(
    command: list[str], output: Path, limit_s: float, env: dict[str, str] | None = None
) -> tuple[int | None, str]:
    """``command`` with its children; its exit code, None when it was ended, and its output."""
    with output.open("w") as file:
        process = subprocess.Popen(
            command,
            cwd=REPOSITORY,
            env={**os.environ, **(env or {})},
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            code = None
    return code, output.read_text()


# --- tests ----------------------------------------------------------------------------------------


def tests(out: Path, limit_s: float) -> Part:
    """The tests marked ``gpu``, on the GPUs of this machine."""
    results = out / "tests.xml"
    results.unlink(missing_ok=True)
    code, _ = run(
        [*PYTEST, *TESTS, "--junitxml", str(results)],
        out / "tests.txt",
        limit_s,
        {"NCCLOPS_TEST_GPU": "real"},
    )
    text = cases(results.read_text()) if results.exists() else "no results: see tests.txt"
    if code is None:
        text = f"ended after {limit_s:.0f} s: see tests.txt\n\n{text}"
    return Part("Tests on the GPU", text, code == 0)


def cases(xml: str) -> str:
    """pytest's results in JUnit's form: a count, and a line for each test that did not pass."""
    counts: Counter[str] = Counter()
    lines = []
    for case in ElementTree.fromstring(xml).iter("testcase"):
        name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
        for outcome in ("failure", "error", "skipped"):
            if (what := case.find(outcome)) is not None:
                counts[outcome] += 1
                first = (what.get("message") or "").strip().partition("\n")[0][:200]
                lines.append(f"- {outcome}: `{name}`: {first}")
                break
        else:
            counts["passed"] += 1
    counted = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))
    return "\n".join([counted, "", *sorted(lines)])


# --- restart latency ------------------------------------------------------------------------------


def benchmark(out: Path, limit_s: float) -> Part:
    """``bench_restart.py`` on NCCL: what a real abort takes is in its row ``no-wrapper``."""
    code, text = run([sys.executable, *BENCHMARK], out / "benchmark.txt", limit_s)
    ended = f"\n\nended after {limit_s:.0f} s" if code is None else ""
    return Part("Restart latency, ms", f"```\n{text.strip()}\n```{ended}", code == 0)


# --- NCCL's log -----------------------------------------------------------------------------------

# Whether a rank lives long enough to see that the other has ended is chance.
BY_CHANCE = "NCCL INFO [Service thread] Connection closed by localRank #"


def log(out: Path, limit_s: float) -> Part:
    """Lines that only one of the two writes, numbers and addresses apart."""
    real = lines_of_nccl(out, "real", [sys.executable], limit_s / 2)
    if real is None:
        return Part("NCCL's log", "the ranks failed: see ranks-real.txt", is_good=False)
    if not FAKE_GPU.exists():
        text = f"{len(real)} kinds of lines; no fake GPU to compare with: run scripts/fake_gpu"
        return Part("NCCL's log", text, is_good=True)
    fake = lines_of_nccl(out, "fake", ["scripts/fake_gpu", "python"], limit_s / 2)
    if fake is None:
        text = "the ranks failed on the fake GPU: see ranks-fake.txt"
        return Part("NCCL's log", text, is_good=False)
    text = f"{len(real & fake)} kinds of lines in both.\n"
    for title, only in (("Only the fake GPU writes", fake - real), ("Only NCCL", real - fake)):
        text += f"\n{title}:\n\n```\n" + "\n".join(sorted(only)) + "\n```\n"
    return Part("NCCL's log", text, is_good=True)


def lines_of_nccl(out: Path, name: str, command: list[str], limit_s: float) -> set[str] | None:
    """The kinds of lines in the log of two ranks; None when one failed."""
    for before in out.glob(f"nccl-{name}.*"):
        before.unlink()
    env = {
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_FILE": str(out.resolve() / f"nccl-{name}.%p"),
        "NCCL_SOCKET_IFNAME": "lo",
    }
    code, _ = run([*command, "scripts/gpu_day_ranks.py"], out / f"ranks-{name}.txt", limit_s, env)
    logs = "".join(path.read_text() for path in out.glob(f"nccl-{name}.*"))
    return {kind_of(line) for line in logs.splitlines()} - {BY_CHANCE} if code == 0 else None


def kind_of(line: str) -> str:
    """``line`` of NCCL's log without the process, and with ``#`` for each number and address."""
    said = re.sub(r"^\S+:\d+:\d+ \[\d+\] ", "", line.strip())
    said = re.sub(r"\[\d+\] |\b\d+:\d+:\d+\b", "", said)
    return re.sub(r"0x[0-9a-f]+|\b[0-9a-f]*\d[0-9a-f]*\b", "#", said)


# Each with its share of the time; the rest is for setting up.
PARTS = {"tests": (tests, 0.5), "benchmark": (benchmark, 0.3), "log": (log, 0.1)}

if __name__ == "__main__":
    sys.exit(main())
