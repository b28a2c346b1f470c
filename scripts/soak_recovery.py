"""Random faults in one training after the other: is the result the same to the last bit?

    python scripts/soak_recovery.py [--faults 50] [--seeds 1] [--seed 0] [--ranks 4]
                                    [--nodes 1] [--shape ddp,fsdp2,ddp-keep-going]
                                    [--keep DIRECTORY]

Each job is `ncclops launch --restart in-process:grow` of tests/restart/recovery_shapes.py: AdamW,
dropout, data that is shuffled, and snapshots. Exceptions of several types and lines, exits,
SIGKILL, SIGSTOP and hangs strike it; also while it restarts for the fault before, while a snapshot
is taken, copied and restored, in the first and in the last step, and two ranks or all at once; and
ranks are slow. A rank is lost at most three times, as no further new process would take its place,
and each fault strikes at a step that has not been done before.

``whole`` is a training with accumulation, a schedule, scaled losses, averaged weights, workers of
loaders and evaluations; ``fsdp2``, ``whole`` and ``ddp`` can have ``-keep-going`` behind, where
objects stay alive, and ``ddp-keep-going-shrink`` is a world that gets smaller. With ``--nodes 2``
there are two agents, and all ranks of one may be lost at once. ``compiled``, ``parts``, ``mesh``
and ``pipeline`` are described in tests/restart/recovery_shapes.py.

A job is good when it is completed, all its faults have struck, and each rank has the bits of an
undisturbed run: weights, the optimizer's state, generators, place in the data. Each job is a line;
the directory of a bad one stays. ``--seed 7 --seeds 1`` repeats one. For NCCL on the fake GPU:
`scripts/fake_gpu python scripts/soak_recovery.py --shape nccl`, or
``nccl-keep-going-shrink``. Exits with 1 if one was not good.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.restart.recovery import planned, run, steps_of, wrong


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--faults", type=int, default=50, help="in each job")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--shape", default="ddp,fsdp2,ddp-keep-going")
    parser.add_argument("--nodes", type=int, default=1, help="that share the ranks")
    parser.add_argument("--keep", type=Path, help="where the directories of bad jobs stay")
    given = parser.parse_args()
    keep = given.keep or Path(tempfile.mkdtemp(prefix="soak-recovery-"))
    bad = 0
    for shape in given.shape.split(","):
        steps = steps_of(given.faults)
        undisturbed = run(keep / f"{shape}-undisturbed", shape, given.ranks, steps, [], given.nodes)
        if undisturbed.code != 0 or len(undisturbed.results) != given.ranks:
            sys.exit(f"{shape}: undisturbed, exit code {undisturbed.code}; see {keep}")
        for seed in range(given.seed, given.seed + given.seeds):
            plan = planned(seed, shape, given.ranks, given.faults, given.nodes)
            directory = keep / f"{shape}-seed-{seed}"
            outcome = run(directory, shape, given.ranks, steps, plan, given.nodes)
            is_smaller = "shrink" in shape
            errors = wrong(outcome, undisturbed.results, plan, is_smaller=is_smaller)
            kinds = Counter(fault[4].partition("-")[0] for fault in plan)
            struck = f"{len(outcome.struck)} of {len(plan)} faults ({dict(kinds)})"
            line = f"{shape}, {given.ranks} ranks, {steps} steps, seed {seed}: {struck}"
            told = "; ".join(errors) or "the same bits"
            print(f"{line}, {outcome.seconds:.0f} s: {told}", flush=True)
            if errors:
                bad += 1
                print(f"  see {directory}", flush=True)
            else:
                shutil.rmtree(directory)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
