"""The phase that a callback has open; outside of a run, where none is recorded."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from ncclops.integrations._phases import Phases


def test_one_phase_is_open_until_it_ends() -> None:
    phases = Phases("90s")
    seen = [phases.is_open]
    phases.end()  # a hook that comes without a beginning
    phases.begin("eval")
    phases.begin("checkpoint")  # the beginning of another one ends it
    seen.append(phases.is_open)
    phases.end()
    seen.append(phases.is_open)
    assert seen == [False, True, False]


def test_a_limit_that_is_no_duration_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="soon"):
        Phases("soon")
    number: Any = 1800
    with pytest.raises(TypeError, match="give text with a unit, as '30m', or a datetime"):
        Phases(number)
    assert not Phases(timedelta(minutes=1)).is_open
