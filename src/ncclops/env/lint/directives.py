"""Environment settings in the comments that schedulers read: Slurm, PBS, LSF, Grid Engine."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ncclops.env.lint import slips
from ncclops.env.lint.environments import Found
from ncclops.env.lint.model import Setting
from ncclops.env.lint.passing import listed
from ncclops.env.lint.words import words_of

_DIRECTIVE = re.compile(
    r"^#[ \t]?(SBATCH|PBS|BSUB|\$|PJM|MSUB|COBALT|[Ff][Ll][Uu][Xx]:)[ \t]+(.*)$", re.MULTILINE
)


def settings_of(text: str, line: int, found: Found) -> list[Setting]:
    """What the directives of ``text`` set, noted in ``found``; Slurm heeds the last one alone."""
    settings: list[Setting] = []
    slurm: list[Setting] = []
    at, number = 0, line
    for match in _DIRECTIVE.finditer(text):
        number += text.count("\n", at, match.start())
        at = match.start()
        given = list(_of_directive(match[1], match[2], number))
        for setting in given:
            found.note(setting)
        if match[1] == "SBATCH":
            if "--export" not in match[2]:
                continue
            if slurm:
                found.slips.append(slips.overwritten(slurm, number))
            slurm = given
            if given and not re.search(r"--export[= ][\"']?ALL\b", match[2]):
                found.slips.append(slips.only_these(given, number, "#SBATCH --export"))
        else:
            settings.extend(given)
    return settings + slurm


def _of_directive(scheduler: str, rest: str, line: int) -> Iterator[Setting]:
    words = words_of(rest, line)
    for position, word in enumerate(words):
        if word.text.startswith("--export="):
            after = "".join(w.text for w in words[position + 1 :] if word.text.endswith(","))
            yield from listed(word.text.partition("=")[2] + after, word)
        elif word.text.startswith("--env="):
            yield from listed(word.text.partition("=")[2].replace(":", ","), word)
        elif word.text in ("--export", "-v", "-env", "-x", "--env") and position + 1 < len(words):
            if scheduler == "SBATCH" and word.text != "--export":
                continue
            following = words[position + 1]
            text = following.text
            yield from listed(text.replace(":", ",") if scheduler == "COBALT" else text, following)
