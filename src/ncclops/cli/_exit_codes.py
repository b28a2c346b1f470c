"""Exit codes by command, as data: the table in docs/contracts.md is made of it; a test holds that.

One rule: 0 the command did its work; 1 it did, and the answer is bad; 2 wrong usage; from
3 on what only that command has; 70 an internal error; 130 interrupted. Commands that judge
(``check``, ``lint``, ``analyze``) answer with 1 unless ``--no-exit-code`` is given, commands that
show do so with ``--exit-code``.
"""

from __future__ import annotations

from typing import NamedTuple

from ncclops.errors import EXIT_INTERNAL_ERROR, EXIT_INTERRUPTED, PreflightRefused, ReceiptMissing


class ExitCodes(NamedTuple):
    """What the codes of ``command`` mean; empty where it has none beside those of all commands."""

    command: str
    worked: str = ""
    bad: str = ""
    usage: str = ""
    others: str = ""


TABLE = (
    ExitCodes(
        "all",
        "worked",
        "it ran, and the answer is bad; or descriptors, processes, memory or space ran out, which"
        " one line says",
        "wrong usage or invalid input: one line `ncclops: error: …`, of a file one for each"
        " mistake",
        f"{EXIT_INTERRUPTED} interrupted; {EXIT_INTERNAL_ERROR} a fault of ncclops itself: one line"
        " that names the file with the traceback (`-v` shows it)",
    ),
    ExitCodes(
        "`launch`",
        "the job completed, or was stopped gracefully",
        "the job failed",
        "bad profile, script or option",
        f"{PreflightRefused.exit_code} refused, because the nodes differ, by"
        " `--preflight`, or as NCCL uses another network than `--require-network` names;"
        f" {ReceiptMissing.exit_code} no healthy receipt under `--require-receipt`,"
        f" {EXIT_INTERNAL_ERROR} where it could not be judged;"
        " 130, 143, 129, 131 ended by SIGINT, SIGTERM, SIGHUP, SIGQUIT; 1, 3 and 4 are others with"
        " `--exit-codes` or `[exit_codes]`",
    ),
    ExitCodes(
        "`preflight`",
        "no check fails; warnings do not count without `--strict`",
        "",
        "unknown profile, check or root; a check of a site that is wrong",
        f"{PreflightRefused.exit_code} a check fails; not with `--no-exit-code`",
    ),
    ExitCodes(
        "`self-check`",
        "no check fails; warnings do not count without `--strict`",
        "",
        "a check of a site that is wrong",
        f"{PreflightRefused.exit_code} a check fails; not with `--no-exit-code`",
    ),
    ExitCodes(
        "`classify`",
        "classified",
        "",
        "unreadable input",
        "with `--exit-code`: 0 no failure seen, 10 may be retried, 11 may not, 12 unknown",
    ),
    ExitCodes(
        "`env diff`", "printed", "with `--exit-code`: something would change", "unknown profile"
    ),
    ExitCodes(
        "`advise`",
        "shown",
        "with `--exit-code`: a known issue concerns the machine or the run",
        "no such run, no such advisory",
    ),
    ExitCodes(
        "`diagnose`", "shown", "with `--exit-code`: the run has failed, or is lost", "no such run"
    ),
    ExitCodes("`env compare`", "printed", "with `--exit-code`: the environments differ"),
    ExitCodes(
        "`env lint`",
        "no error found, or with `--fix` none left",
        "at least one error; not with `--no-exit-code`",
        "a file that cannot be read, once the findings in the others are told; or written by"
        " `--fix`",
    ),
    ExitCodes(
        "`flight analyze`",
        "nothing wrong found",
        "a hang or a disagreement found; not with `--no-exit-code`",
        "nothing there can be read",
    ),
    ExitCodes("`receipt check`", "`healthy`", "any other verdict; not with `--no-exit-code`"),
    ExitCodes(
        "`receipt compare`", "shown", "with `--exit-code`: a swing, or a run that is not healthy"
    ),
    ExitCodes("`status`", "shown", "", "no such run, or none that can be read"),
    ExitCodes("`runs`", "shown", "", "no such directory, no such time"),
    ExitCodes(
        "`export-traces`",
        "sent",
        "no collector answers, or it refuses",
        "no such run; OpenTelemetry is not installed; settings that cannot be followed",
    ),
    ExitCodes(
        "`notify test`",
        "all messages were sent",
        "one was not sent",
        "unknown profile or channel, or there is none",
    ),
    ExitCodes(
        "`stop`",
        "the agent does it",
        "it has ended, its agent is not there or refuses",
        "no such run, several, not yours",
    ),
)


def as_markdown() -> str:
    """The table as the contracts show it."""
    head = ["| command | 0 | 1 | 2 | others |", "|---|---|---|---|---|"]
    rows = [f"| {' | '.join(row)} |".replace("|  |", "| |").replace("|  |", "| |") for row in TABLE]
    return "\n".join([*head, *rows])
