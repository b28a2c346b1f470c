"""One host of a test: takes part in a preflight of the edges and writes the verdict.

``python -m tests.preflight.edge_host OUTPUT STORE COUNT [RANK [JOIN_S [FIRST_S]]]``
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import msgspec

from ncclops.preflight.edges.run import Limits, Unmet, Where, run
from ncclops.preflight.edges.sentences import summary, tell


def main(
    output: str, store: str, count: str, rank: str = "", join_s: str = "40", first_s: str = ""
) -> None:
    """Take part; OUTPUT holds the verdict, if there was one."""
    host, _, port = store.rpartition(":")
    where = Where(
        host=host.strip("[]"),
        port=int(port),
        count=int(count),
        least=int(count),
        rank=int(rank) if rank else None,
    )
    limits = Limits(join=float(join_s))
    if first_s:
        limits = replace(limits, first=float(first_s), slack=3.0)
    try:
        verdict = run(where, limits=limits, note=lambda text: print(text, flush=True))
    except Unmet as error:
        print(error, flush=True)
        os._exit(1)  # a thread may wait in torch's store: see ``errors.STORE_CALL``
    print(summary(verdict), *verdict.matrix, sep="\n")
    for told in tell(verdict):
        print(told)
    partial = Path(f"{output}.part")
    partial.write_bytes(msgspec.json.encode(verdict))
    partial.rename(output)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
