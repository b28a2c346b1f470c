"""docs/events.md says of each event what its type says."""

from __future__ import annotations

from types import ModuleType

import pytest

from ncclops.record.events import TYPES, Event
from tests.conftest import REPOSITORY
from tests.scripts_of_repository import load_script


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("events_page")


def test_the_page_is_what_the_types_give(script: ModuleType) -> None:
    written = (REPOSITORY / "docs" / "events.md").read_text()
    assert written == script.page(), "run scripts/events_page.py"


@pytest.mark.parametrize("kind", (Event, *TYPES))
def test_every_event_and_every_field_is_explained(script: ModuleType, kind: type[Event]) -> None:
    texts = dict(script.field_texts())
    missing = [field for field in script.own_fields(kind) if (kind.__name__, field) not in texts]
    assert not missing
    assert script.text_of(kind)
