"""Points in time as people read them."""

from __future__ import annotations

import re

import pytest

from ncclops.moments import format_moment


def test_seconds_since_the_epoch_are_a_date_of_the_readers_zone() -> None:
    assert re.fullmatch(r"20(25|26)-\d\d-\d\d \d\d:\d\d:\d\d \S+", format_moment(1_767_225_600.5))


@pytest.mark.parametrize("seconds", [1e300, -1e300, 1e12, float("inf"), float("nan")])
def test_what_no_calendar_has_is_a_question_mark(seconds: float) -> None:
    assert format_moment(seconds) == "?"
