"""The commands that a run accepts from outside, and the interface by which the agent runs them."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Annotated, Any, Literal, Protocol, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from ncclops.durations import parse_duration
from ncclops.nearest import nearest
from ncclops.plain_text import plain_line

# Of `ncclops.timeouts.model`: those that can be changed while a run is under way.
TimeoutName = Literal["soft", "hard", "process_group"]


class ControlRefused(Exception):
    """The agent refuses a command; the message is one line that says why."""


class Controls(Protocol):
    """What the agent does on a command. Called in its event loop, one at a time.

    Each method starts what it is named for, does not wait for its end, and returns one line that
    says what follows. It raises :class:`ControlRefused` where that is not possible.

    ``reason`` and ``by`` (who asks) are for the record, of any content: one line, at most a few
    hundred characters.
    """

    def stop(self, *, reason: str, by: str, grace: timedelta | None = None) -> str:
        """Stop the run gracefully, with SIGKILL after ``grace`` (None: as the agent has it)."""

    def restart(self, *, reason: str, by: str) -> str:
        """Start the script again on all ranks."""

    def tighten_timeouts(self, limits: Mapping[str, timedelta], *, reason: str, by: str) -> str:
        """Shorten the timeouts in ``limits`` (by :data:`TimeoutName`) from now on."""


def _checked(text: str) -> str:
    if not parse_duration(text):
        raise ValueError(f"{text!r} would end everything at once")
    return text


NO_REASON = "no reason given"
_MOST_CHARS = 400


def _in_a_line(text: str) -> str:
    return plain_line(text, _MOST_CHARS)


_Text = Annotated[str, Field(max_length=_MOST_CHARS), AfterValidator(_in_a_line)]


class _Command(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    reason: _Text = NO_REASON
    by: _Text = "unknown"


class Stop(_Command):
    """Stop the run gracefully; ``grace`` is a duration such as ``"90s"``."""

    action: Literal["stop"] = "stop"
    grace: Annotated[str, Field(max_length=40), AfterValidator(_checked)] | None = None

    @property
    def limit(self) -> timedelta | None:
        return None if self.grace is None else parse_duration(self.grace)


class Restart(_Command):
    """Start the script again on all ranks."""

    action: Literal["restart"] = "restart"


class TightenTimeouts(_Command):
    """Shorten timeouts; ``timeouts`` maps a name to a duration such as ``"90s"``."""

    action: Literal["tighten-timeouts"] = "tighten-timeouts"
    timeouts: dict[
        TimeoutName,
        Annotated[str, Field(max_length=40), AfterValidator(_checked)],
    ] = Field(min_length=1)

    @property
    def limits(self) -> dict[str, timedelta]:
        return {name: parse_duration(text) for name, text in self.timeouts.items()}


Command = Stop | Restart | TightenTimeouts
_ANY: TypeAdapter[Command] = TypeAdapter(Annotated[Command, Field(discriminator="action")])


def parse_command(document: bytes | str) -> Command:
    """The command in a JSON document. Raises ``ValueError`` with what is wrong in a line."""
    try:
        return _ANY.validate_json(document)
    except ValidationError as error:
        raise ValueError(_in_a_line(_say(error.errors(include_url=False)[0]))) from None


def _say(problem: Any) -> str:
    """What is wrong, by pydantic's first ``problem``, and what to write."""
    # The command's own name is in front where it is known: the user did not write it.
    action, *path = map(str, problem["loc"] or ("",))
    known = {kind.model_fields["action"].default: kind for kind in get_args(Command)}
    match problem["type"]:
        case "union_tag_invalid":
            return f"action: no {problem['ctx']['tag']!r}{nearest(problem['ctx']['tag'], known)}"
        case "union_tag_not_found":
            return f"action is missing{nearest('', known)}"
        case "extra_forbidden":
            return f"{path[-1]}: unknown key{nearest(path[-1], known[action].model_fields)}"
    said = str(problem["msg"])
    return f"{'.'.join(path)}: {said}" if path else said


def run_command(controls: Controls, command: Command) -> str:
    """Have ``controls`` do what ``command`` says; what follows. See :class:`Controls`."""
    fields: dict[str, Any] = {"reason": command.reason, "by": command.by}
    match command:
        case Stop():
            return controls.stop(**fields, grace=command.limit)
        case Restart():
            return controls.restart(**fields)
        case TightenTimeouts():
            return controls.tighten_timeouts(command.limits, **fields)
