"""Damages records of a run and files that people hand over, and looks whether commands answer.

It goes on for as long as it is told:

    scripts/fuzz.py [--minutes 10] [--seed N]

One run is recorded; then for each seed, from N on, a copy of it is damaged in one to three places
and each command that reads a run is called on it; samples of scripts, manifests, profiles, logs,
signatures, receipts and dumps are damaged or grown for the commands that read those. Each has 60 s
and 2 GiB of memory, and has to give its answer, or one line and exit code 2. Prints what went
wrong with the seed that shows it again (`--seed N --minutes 0`), and exits with 1 if anything did.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from itertools import count
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.hostile import handed_over, recorded
from tests.hostile.commands import Commands


def main() -> int:
    parser = argparse.ArgumentParser(description="Damage records, and see that commands answer.")
    parser.add_argument("--minutes", type=float, default=10.0, help="how long (default: 10)")
    parser.add_argument("--seed", type=int, default=0, help="the first seed (default: 0)")
    asked = parser.parse_args()
    until = time.monotonic() + 60 * asked.minutes
    wrong = 0
    with (
        tempfile.TemporaryDirectory() as directory,
        Commands() as commands,
        Commands("handed-over") as others,
    ):
        run = recorded.record(Path(directory))
        copy = Path(directory, "copy")
        copy.mkdir()
        for seed in count(asked.seed):
            what = recorded.damaged(run, copy, seed)
            files = handed_over.damaged(Path(directory, "files"), seed)
            complaints = [(what, each) for each in commands.complaints(copy)]
            complaints += [(files, each) for each in others.complaints(Path(directory, "files"))]
            for done, complaint in complaints:
                wrong += 1
                print(f"{done}\n    {complaint}", flush=True)
            if time.monotonic() >= until:
                break
    print(f"seeds {asked.seed} to {seed}: {wrong} wrong answers")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
