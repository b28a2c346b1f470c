"""What the parser of the command line refuses, in one line that says what to write instead."""

from __future__ import annotations

from typing import Any

from ncclops.nearest import meant


def worded(error: Any) -> str:
    """``error`` in words. The classes of errors have moved between the releases of typer that are
    accepted, so what they have is asked for by its name."""
    message = error.format_message().rstrip(".")
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "ncclops"
    if hasattr(error, "possibilities") and context is not None:
        # Compared without dashes, which all have in common.
        known = {name.lstrip("-"): name for name in _options(context)}
        close = meant(error.option_name.lstrip("-"), known)
        hint = f"did you mean {known[close[0]]}?" if close else f"`{path} --help` lists all"
        return f"{path} has no option {error.option_name}: {hint}"
    kind = getattr(getattr(error, "param", None), "type", None)
    numbers = [f"{word} {at}" for word, at in _limits(kind) if at is not None]
    number = " ".join(["is not a whole number", *numbers])
    message = message.replace("is not a valid int range", number)
    message = message.replace("is not a valid int", number)
    return f"{message}: `{path} --help` shows how it is used"


def _options(context: Any) -> list[str]:
    params = context.command.get_params(context)
    names = [name for param in params for name in (*param.opts, *param.secondary_opts)]
    return [name for name in names if name.startswith("--")]


def _limits(kind: Any) -> list[tuple[str, int | None]]:
    return [("from", getattr(kind, "min", None)), ("to", getattr(kind, "max", None))]
