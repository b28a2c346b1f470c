"""The words for failures that no line of a log stands for."""

from __future__ import annotations

from ncclops.classify import wording


def test_a_lost_node_may_be_replaced_and_is_said_as_it_was_given() -> None:
    said = wording.describe_loss("h1", "its agent has ended")
    lost = wording.loss(said)
    assert (lost.summary, lost.class_) == ("h1 was lost: its agent has ended", "peer-exit")
    assert lost.retry_policy == "replace-node"


def test_only_signals_with_a_usual_reason_have_a_hint() -> None:
    assert "out-of-memory" in (wording.signal_hint("SIGKILL") or "")
    assert wording.signal_hint("SIGUSR1") is wording.signal_hint(None) is None
