"""The shared log's records of an attempt's end: ``ended`` of each node, and one ``decision``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec

from ncclops.cluster.round_state import RoundState
from ncclops.decision.deciding import AttemptDecision
from ncclops.decision.node_end import NodeEnd


def end_fields(end: NodeEnd) -> dict[str, Any]:
    """The fields of an ``ended`` record."""
    return {"end": msgspec.to_builtins(end)}


def decision_fields(decision: AttemptDecision) -> dict[str, Any]:
    """The fields of a ``decision`` record."""
    return {"decision": msgspec.to_builtins(decision)}


def decision_in(record: Mapping[str, Any]) -> AttemptDecision:
    """What a ``decision`` record says."""
    return msgspec.convert(record["decision"], AttemptDecision)


def nodes_in(round_state: RoundState) -> list[NodeEnd]:
    """How the attempt ended on each node of the round, as far as its records say."""
    return [_node(round_state, rank) for rank in range(round_state.size)]


def _node(round_state: RoundState, rank: int) -> NodeEnd:
    name, idle = round_state.name(rank), rank in round_state.idle
    failed = round_state.failed
    first = failed is not None and failed["node"] == rank
    if (record := round_state.ended.get(rank)) is not None:
        end = msgspec.convert(record["end"], NodeEnd)
        return replace(end, name=name, idle=idle, failed_first=first)
    lost = round_state.lost.get(rank)
    return NodeEnd(
        name=name, idle=idle, failed_first=first, lost=None if lost is None else lost["why"]
    )
