"""What is said of ranks that hang."""

from __future__ import annotations

import pytest

from ncclops.agent.hang_action import before_any_group
from ncclops.agent.hosted_store import StoreAddress
from ncclops.health.hang import HangVerdict


@pytest.mark.parametrize(("host", "named"), [("n01", "n01:29500"), ("fd00::1", "[fd00::1]:29500")])
def test_ranks_that_hang_before_they_have_met_are_told_with_their_stores_address(
    host: str, named: str
) -> None:
    hung = HangVerdict(hung=True, culprits=(0,), reason="all ranks are stuck", findings=())
    told = before_any_group(hung, StoreAddress(host, 29500))
    assert told.reason == (
        f"all ranks are stuck; no rank has a process group yet: they meet in the store at {named}"
    )
    assert (told.hung, told.culprits) == (True, (0,))
