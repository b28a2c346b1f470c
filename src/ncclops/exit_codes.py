"""Exit codes of `launch` for those who start jobs again: kinds of ends, and sets of codes, as data.

A scheduler sees one number. What it needs to know is whether another start may help:

    retry           another start may mend it
    replace-node    another start may, on other nodes
    fix             none does before something is changed
    unknown         nothing shows whether one would

Which of them a failure is, ``ncclops.decision`` decides; here is only the number that each has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Literal

from ncclops.errors import NcclopsError, NodeUnfit, PreflightRefused, ReceiptMissing, UsageError
from ncclops.nearest import nearest

NextAction = Literal["retry", "replace-node", "fix", "unknown"]


def _says(text: str) -> dict[str, str | int]:
    """What pages say of a key of ``[exit_codes]``, and its limits (``profiles.keys``)."""
    return {"description": text, "ge": 1, "le": 255}


@dataclass(frozen=True, kw_only=True)
class ExitCodes:
    """``[exit_codes]``: what `launch` exits with, by the kind of end.

    A good end is 0, wrong usage 2, and an end by a signal 128 and its number, whatever is set.
    """

    retry: int = field(default=1, metadata=_says("A failed job that another start may mend."))
    replace_node: int = field(
        default=1, metadata=_says("A failed job that another start may mend on other nodes.")
    )
    fix: int = field(
        default=1, metadata=_says("A failed job that no start mends before something is changed.")
    )
    unknown: int = field(
        default=1,
        metadata=_says("A failed job of which nothing shows whether another start would mend it."),
    )
    unfit_node: int = field(
        default=PreflightRefused.exit_code,
        metadata=_says("A node that `--preflight` has found unfit."),
    )
    refused: int = field(
        default=PreflightRefused.exit_code,
        metadata=_says("What is refused otherwise before anything starts."),
    )
    no_receipt: int = field(
        default=ReceiptMissing.exit_code,
        metadata=_says("A run whose receipt `--require-receipt` asks for and is not there."),
    )

    def of(self, action: NextAction) -> int:
        """The code of a failed job for which ``action`` is what is left to do."""
        return {
            "retry": self.retry,
            "replace-node": self.replace_node,
            "fix": self.fix,
            "unknown": self.unknown,
        }[action]

    def of_error(self, error: NcclopsError) -> int:
        """The code of a job that could not start because of ``error``."""
        if isinstance(error, NodeUnfit):
            return self.unfit_node
        if error.exit_code == PreflightRefused.exit_code:
            return self.refused
        return self.of(action_after(error)) if error.exit_code == 1 else error.exit_code


DEFAULT = ExitCodes()
# 75 is the code for a failure that may pass, and 78 that for a wrong configuration, in sysexits.h.
# srun returns the highest code of its tasks: what can be mended least is the highest of these.
SETS: Mapping[str, ExitCodes] = {
    "default": DEFAULT,
    "scheduler": ExitCodes(retry=75, replace_node=76, fix=78, unfit_node=76),
}


def action_after(error: NcclopsError) -> NextAction:
    """What is left to do after ``error``, because of which a job could not start."""
    if isinstance(error, NodeUnfit):
        return "replace-node"
    if isinstance(error, UsageError):
        return "fix"
    # What is refused may be another node's fault; nodes that did not come may come next time.
    return "unknown" if error.exit_code == PreflightRefused.exit_code else "retry"


def with_changes(text: str, base: ExitCodes) -> ExitCodes:
    """The codes that ``text`` stands for: a set's name, ``KIND=CODE``, or both with commas.

    Without a set's name the rest stays as in ``base``. Raises ``UsageError``.
    """
    codes = base
    for place, part in enumerate(each.strip() for each in text.split(",")):
        name, equals, code = part.partition("=")
        if not equals and place == 0 and name in SETS:
            codes = SETS[name]
            continue
        kind = name.strip().replace("-", "_")
        if not equals or kind not in _KINDS:
            raise UsageError(
                f"--exit-codes {part[:80]}: give {' or '.join(SETS)}, or KIND=CODE, where KIND is"
                f" one of {', '.join(_KINDS)}{nearest(kind, [*SETS, *_KINDS], or_else='')}"
            )
        number = code.strip()
        if not (number.isascii() and number.isdigit() and len(number) < 4):
            number = "0"
        if not 1 <= int(number) <= 255:
            raise UsageError(f"--exit-codes {part[:80]}: a code is a number from 1 to 255")
        codes = replace(codes, **{kind: int(number)})
    return codes


_KINDS = tuple(each.name for each in fields(ExitCodes))
