"""Names that a package imports at their first use."""

from __future__ import annotations

import pytest

from ncclops.lazy_names import lazy_names
from ncclops.rank_lists import rank_list


def test_a_name_is_imported_from_its_module_at_its_first_use() -> None:
    found = lazy_names("ncclops", {"rank_list": "rank_lists", "absent": "no_such_module"})
    assert found("rank_list") is rank_list


def test_any_other_name_is_an_attribute_error_that_says_which() -> None:
    found = lazy_names("ncclops", {"rank_list": "rank_lists"})
    with pytest.raises(AttributeError, match="module 'ncclops' has no attribute 'nothing'"):
        found("nothing")
