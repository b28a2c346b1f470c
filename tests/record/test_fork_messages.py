"""What the agent and its fork server say to each other."""

from __future__ import annotations

import pytest

from ncclops.record.fork_messages import (
    Forked,
    ForkMessage,
    Ready,
    Refused,
    Unfit,
    decode,
    encode,
)


@pytest.mark.parametrize(
    "message",
    [
        Ready(seconds=1.5, not_imported={"sympy": "ModuleNotFoundError: sympy"}),
        Unfit(why="the imports have started threads: python"),
        Forked(pid=7),
        Refused(why="fork: Cannot allocate memory"),
    ],
)
def test_a_message_is_read_as_it_was_written(message: ForkMessage) -> None:
    assert decode(encode(message)) == message


@pytest.mark.parametrize("text", [b"", b"{}", b'{"message":"forked"}', b"[" * 60_000, b"\xff"])
def test_what_is_no_message_is_none(text: bytes) -> None:
    assert decode(text) is None


@pytest.mark.parametrize("kind", [Refused, Unfit])
def test_a_refusal_is_shown_by_its_reason(
    kind: type[Refused | Unfit],
) -> None:
    assert str(kind(why="fork: Resource temporarily unavailable")).startswith("fork: Resource")
