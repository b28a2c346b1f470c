"""`ncclops classify`: what failed, which line proves it, who began it, may it be retried."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ncclops.cli._output import echo
from ncclops.nearest import meant
from ncclops.plain_text import plain_line

if TYPE_CHECKING:
    from ncclops.classify import Report, Signature, SignatureSet

_SIGNATURES_SCHEMA = "ncclops.signatures/1"
_SHOWN_CHARS = 200
_SHOWN_ECHOES = 6


def classify(
    paths: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PATH...",
            help="Log files (plain, gzip, zstd), directories of per-rank logs, runs (by id as"
            " well), or - for stdin.",
            show_default=False,
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print ncclops.classify/1.")] = False,
    exit_code: Annotated[
        bool,
        typer.Option(
            "--exit-code/--no-exit-code",
            show_default=False,
            help="Leave with 0 no failure seen, 10 may be retried, 11 may not, 12 unknown failure.",
        ),
    ] = False,
    signatures: Annotated[
        list[Path] | None,
        typer.Option(
            "--signatures",
            metavar="DIR",
            help="More signatures: *.toml files in DIR, beside those in /etc/ncclops/signatures"
            " and ~/.config/ncclops/signatures. May be repeated.",
            show_default=False,
        ),
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="List all signatures.")] = False,
    explain: Annotated[
        str | None,
        typer.Option("--explain", metavar="ID", help="Explain one signature.", show_default=False),
    ] = None,
) -> None:
    """Say what failed in logs, which line proves it, and whether to retry.

    All PATHs together are read as the logs of one job.
    """
    from ncclops.classify import classify_paths, load_signatures
    from ncclops.classify.cache import Cache
    from ncclops.classify.loader import standing_directories
    from ncclops.errors import UsageError

    loaded = load_signatures(*standing_directories(), *(signatures or ()), cache=Cache.of_user())
    if list_:
        _print_list(loaded, json)
        return
    if explain is not None:
        _print_explanation(loaded, explain, json)
        return
    if not paths:
        raise UsageError("nothing to classify: name a log, a directory of logs, or - for stdin")
    report = classify_paths([_log_or_run(path) for path in paths], loaded)
    if json:
        from ncclops.cli._output import print_json

        print_json(report.as_json())
    else:
        _print_report(report)
    if exit_code:
        raise typer.Exit(report.verdict.exit_code)


def _log_or_run(text: str) -> str:
    """``text``, or the run of that id, or that begins so, where it is no path.

    Raises ``UsageError`` for a directory of several runs, whose logs are not those of one job.
    """
    from ncclops.errors import UsageError
    from ncclops.record.runs import find, refuse_several

    if text == "-" or "/" in text or Path(text).exists():
        refuse_several(Path(text))
        return text
    try:
        return os.path.relpath(find(text).path)
    except UsageError:
        return text  # who reads it says that there is no such file


def _print_report(report: Report) -> None:
    from ncclops.classify.model import NO_FAILURE_SEEN

    verdict = report.verdict
    phase = f" ({verdict.phase})" if verdict.phase else ""
    colour = typer.colors.RED if verdict.shows_failure else typer.colors.GREEN
    # The class of a log without a failure says no more than its summary.
    name = "" if verdict.class_ == NO_FAILURE_SEEN else f"{verdict.class_}{phase}: "
    typer.secho(name + verdict.summary, fg=colour, bold=True)
    facts = [f"confidence {verdict.confidence:.2f}"]
    if verdict.rank is not None:
        how = "begun by" if verdict.rank_began_it else "first reported by"
        facts.insert(0, f"{how} rank {verdict.rank}")
    if verdict.signature:
        facts.append(f"signature {verdict.signature}")
    echo("  " + ", ".join(facts))
    _print_evidence(report)
    if verdict.shows_failure:
        word = "may be retried" if verdict.eligible else "not retried"
        echo(f"  retry: {word} ({verdict.retry_policy}): {verdict.retry_reason}")
    for number, step in enumerate(verdict.remedy):
        echo(("  do:    " if number == 0 else "         ") + step)
    for candidate in report.candidates:
        echo(f"  perhaps {candidate.class_}: {candidate.decide}")
    for note in report.notes:
        echo(f"  note:  {note}")


def _print_evidence(report: Report) -> None:
    causes = [item for item in report.evidence if item.role == "cause"]
    echoes = [item for item in report.evidence if item.role != "cause"]
    for item in [*causes[:3], *echoes[:_SHOWN_ECHOES]]:
        rank = "" if item.rank is None else f" rank {item.rank}"
        echo(f"  {item.role}{rank}, {item.file}:{item.line}")
        echo("    " + plain_line(item.text, _SHOWN_CHARS))


def _print_list(loaded: SignatureSet, as_json: bool) -> None:
    if as_json:
        from ncclops.cli._output import print_json

        found = [_signature_as_json(item) for item in loaded.signatures]
        print_json({"schema": _SIGNATURES_SCHEMA, "signatures": found})
        return
    ordered = sorted(loaded.signatures, key=lambda item: (item.class_, item.id))
    width = max(len(item.id) for item in ordered)
    for item in ordered:
        policy = item.retry if item.role != "benign" else "-"
        echo(f"{item.id:{width}}  {item.class_:22} {item.role:8} {policy:21} {item.summary}")


def _print_explanation(loaded: SignatureSet, name: str, as_json: bool) -> None:
    signature = loaded.by_id.get(name)
    if signature is None:
        raise _unknown_signature(loaded, name)
    if as_json:
        from ncclops.cli._output import print_json

        print_json({"schema": _SIGNATURES_SCHEMA, "signatures": [_signature_as_json(signature)]})
        return
    typer.secho(f"{signature.id}: {signature.summary}", bold=True)
    phase = f", phase {signature.phase}" if signature.phase else ""
    echo(f"  class {signature.class_}{phase}, {signature.role}, {signature.certainty}")
    echo(f"  retry: {signature.retry}", newline=False)
    if signature.retry_after_progress != signature.retry:
        echo(f"; once collectives have completed: {signature.retry_after_progress}", newline=False)
    echo(f"\n  from {signature.origin}")
    for title, lines in (
        ("do", signature.remedy),
        ("outranks", tuple(sorted(signature.outranks))),
        ("needs one of", tuple(sorted(signature.requires))),
        ("unless seen", tuple(sorted(signature.absent))),
        ("looks for", signature.literals),
        ("pattern", (signature.pattern,) if signature.pattern else ()),
        ("matches, for example", signature.examples),
        ("does not match", signature.near_misses),
        ("references", signature.references),
    ):
        if lines:
            echo(f"  {title}:")
            echo("\n".join(f"    {line}" for line in lines))


def _unknown_signature(loaded: SignatureSet, name: str) -> Exception:
    from ncclops.errors import UsageError

    close = meant(name, loaded.by_id)
    hint = f"did you mean {close[0]}?" if close else "`ncclops classify --list` shows them all"
    return UsageError(f"there is no signature {name!r}: {hint}")


def _signature_as_json(signature: Signature) -> dict[str, Any]:
    return {
        "id": signature.id,
        "class": signature.class_,
        "phase": signature.phase,
        "role": signature.role,
        "certainty": signature.certainty,
        "literals": list(signature.literals),
        "pattern": signature.pattern or None,
        "outranks": sorted(signature.outranks),
        "retry": {
            "policy": signature.retry,
            "after_progress": signature.retry_after_progress,
        },
        "summary": signature.summary,
        "remedy": list(signature.remedy),
        "references": list(signature.references),
        "examples": list(signature.examples),
        "near_misses": list(signature.near_misses),
        "origin": signature.origin,
    }
