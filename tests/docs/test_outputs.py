"""Commands that only read and print say what README and the pages show of them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.conftest import REPOSITORY, CompletedText
from tests.docs.shown import first_that_differs

PAGES = ("README.md", "docs/environment.md", "docs/profiles.md", "docs/classify.md")
_BLOCK = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_READS_AND_PRINTS = {"advise", "classify", "env", "profile"}
# What lies in the directory.
FILES = {
    "job.sh": """\
#!/bin/bash
#SBATCH --nodes=2
#SBATCH --gpus-per-node=8
export NCCL_SOCKET_IFNAME=ens7
export NCCL_DEBUG=info,trace
export NCCL_IB_TIMOUT=22
export OMP_NUM_THREADS=8

export NCCL_NET=IB
export NCCL_IB_DISABLE=1
srun torchrun train.py
""",
}


class Shown(NamedTuple):
    page: str
    command: str
    output: list[str]


def all_shown() -> Iterator[Shown]:
    for page in PAGES:
        for block in _BLOCK.finditer((REPOSITORY / page).read_text()):
            for part in re.split(r"^\$ ", block[1], flags=re.MULTILINE)[1:]:
                command, *output = part.rstrip("\n").split("\n")
                words = command.partition("ncclops ")[2].split()
                if output and words and words[0] in _READS_AND_PRINTS:
                    yield Shown(page, command, output)


SHOWN = list(all_shown())


@pytest.mark.parametrize("shown", SHOWN, ids=[f"{each.page}: {each.command}" for each in SHOWN])
def test_a_command_prints_what_is_shown(
    shown: Shown, tmp_path: Path, ncclops_in_process: Callable[..., CompletedText]
) -> None:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    words = shlex.split(shown.command, comments=True)
    given = dict(word.split("=", 1) for word in words[: words.index("ncclops")])
    done = ncclops_in_process(*words[words.index("ncclops") + 1 :], env={"COLUMNS": "120"} | given)
    printed = done.stdout + done.stderr
    missing = first_that_differs(shown.output, printed)
    assert missing is None, f"{missing}\n---\n{printed}"


def test_there_are_such_commands() -> None:
    assert len(SHOWN) > 4
