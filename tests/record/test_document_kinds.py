"""run.json, verdict.json and environment.json: nothing is lost, and no damage is a traceback.

``documents/`` holds those of two real runs, as the first version wrote them. They are never edited.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from ncclops.env.snapshot import load
from ncclops.errors import UsageError
from ncclops.launch import read_verdict
from ncclops.record.document_kind import DocumentKind
from ncclops.record.environment_record import ENVIRONMENT
from ncclops.record.paths import RunPaths
from ncclops.record.run_record import RUN, NodesPlanned, RunRecord
from ncclops.record.verdict_record import VERDICT, VerdictRecord
from ncclops.report import page, records
from tests.conftest import CompletedText
from tests.record.strategies import TEXT, of_struct

DOCUMENTS = Path(__file__).parent / "documents"
KINDS: dict[str, DocumentKind[Any]] = {
    "run": RUN,
    "verdict": VERDICT,
    "environment": ENVIRONMENT,
}
REAL = sorted(path.name for path in DOCUMENTS.iterdir())
PER_FILE = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**40), 10**40) | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)


def real(name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((DOCUMENTS / name).read_text())
    return document


def kind_of(name: str) -> DocumentKind[Any]:
    return KINDS[name.partition("-")[0]]


def places(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Where there is something in ``value``, as keys and indices from the top."""
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    for key, each in inner:
        yield (*path, key)
        if isinstance(each, dict | list):
            yield from places(each, (*path, key))


@st.composite
def damaged(draw: st.DrawFn, name: str) -> bytes:
    """A real document in which something is missing, of another type, added or cut off."""
    document = real(name)
    for _ in range(draw(st.integers(0, 3))):
        *path, last = draw(st.sampled_from(list(places(document))))
        inside: Any = document
        for key in path:
            inside = inside[key]
        match draw(st.sampled_from(["remove", "replace", "add"])):
            case "remove":
                del inside[last]
            case "replace":
                inside[last] = draw(JSON_VALUES)
            case "add" if isinstance(inside, dict):
                inside[draw(TEXT)] = draw(JSON_VALUES)
        assume(document)
    text = json.dumps(document).encode()
    return text[: draw(st.sampled_from([len(text), draw(st.integers(0, len(text)))]))]


def refused(read: Callable[[], object], *, naming: Path) -> None:
    """``read`` comes to an answer, or to one line that names the file."""
    try:
        read()
    except UsageError as error:
        assert str(naming) in str(error)
        assert "\n" not in str(error)


# What later versions have added, by kind.
ADDED: dict[str, dict[str, Any]] = {
    "run": {"launcher": None},
    "verdict": {
        "ranks_lost": [],
        "gpu_faults": [],
        "slow_ranks": [],
        "story": None,
        "next_action": None,
    },
}


@pytest.mark.parametrize("name", REAL)
def test_a_document_of_the_first_version_is_written_again_as_it_was(name: str) -> None:
    document, kind = real(name), kind_of(name)
    again = kind.to_json(kind.parse(document, Path(name)))
    added = ADDED.get(name.partition("-")[0], {})
    if document.get("first_failure"):
        document["first_failure"]["caused_by"] = None
    for worker in document.get("workers", []):
        worker["finished"] = worker["left"] = worker["script_failed"] = False
    assert json.dumps(again) == json.dumps(document | added)  # in the same order, too


@PER_FILE
@given(of_struct(VerdictRecord))
def test_a_verdict_is_read_back_as_it_was_written(tmp_path: Path, verdict: VerdictRecord) -> None:
    VERDICT.write(tmp_path / "verdict.json", verdict)
    assert VERDICT.read(tmp_path / "verdict.json") == verdict


@PER_FILE
@given(of_struct(RunRecord))
def test_a_run_is_read_back_as_it_was_written(tmp_path: Path, run: RunRecord) -> None:
    RUN.write(tmp_path / "run.json", run)
    assert RUN.read(tmp_path / "run.json") == run


def test_how_nodes_meet_is_said_only_where_there_are_several() -> None:
    several = NodesPlanned(count=2, spares=1, rank=None, backend="c10d", store="n0:29400", id="job")
    alone = NodesPlanned(count=1, rank=0)
    written = [RunRecord(nodes=nodes).settled()["nodes"] for nodes in (several, alone)]
    assert list(written[0]) == ["count", "spares", "rank", "backend", "store", "id"]
    assert written[1] == {"count": 1, "rank": 0}


@pytest.mark.parametrize("name", REAL)
def test_a_later_version_may_add_fields_anywhere(name: str) -> None:
    document, kind = real(name), kind_of(name)
    expected = kind.parse(real(name), Path(name))
    for path in places(real(name)):
        inside: Any = document
        for key in path:
            inside = inside[key]
        # The names in these are values themselves.
        if isinstance(inside, dict) and not {"variables", "versions", "seconds"} & {*path}:
            inside["of_a_later_version"] = {"x": [1]}
    if name.startswith("run"):
        del document["stack"]["of_a_later_version"], document["timeouts"]["of_a_later_version"]
    if name.startswith("environment"):
        del document["files"]["of_a_later_version"]
    document["of_a_later_version"] = None
    assert kind.parse(document, Path(name)) == expected


@pytest.mark.parametrize("name", REAL)
@PER_FILE
@given(st.data())
def test_no_damage_is_a_fault_of_a_reader(tmp_path: Path, name: str, data: st.DataObject) -> None:
    """As much can be read as there is; all else is refused in one line."""
    read_everywhere(tmp_path, name, data.draw(damaged(name)))


@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize("wrong", [None, True, "7", -1, 1e300, 10**40, [], {}], ids=repr)
def test_no_value_in_the_wrong_place_is_a_fault_of_a_reader(
    tmp_path: Path, name: str, wrong: Any
) -> None:
    shapes = {tuple(0 if isinstance(key, int) else key for key in at) for at in places(real(name))}
    for *path, last in shapes:
        document: Any = real(name)
        inside = document
        for key in path:
            inside = inside[key]
        inside[last] = wrong
        read_everywhere(tmp_path, name, json.dumps(document).encode())


def read_everywhere(tmp_path: Path, name: str, content: bytes) -> None:
    """With ``content`` in the place of the document ``name`` of a run, by all that read it."""
    run = RunPaths(tmp_path)
    run.events.touch()
    run.rank(0).root.mkdir(parents=True, exist_ok=True)
    files = {"run": run.run, "verdict": run.verdict, "environment": run.rank(0).environment}
    path = files[name.partition("-")[0]]
    path.write_bytes(content)
    refused(lambda: kind_of(name).read(path), naming=path)
    if path == run.verdict:
        refused(lambda: read_verdict(tmp_path), naming=path)
    else:
        refused(lambda: load(str(tmp_path)), naming=path)
    page.render(records.read(tmp_path))


CUT = '{"schema": "ncclops.verdict/1", "run_id": "a-r'


@pytest.mark.parametrize("content", ["", "[]", CUT, '{"schema": "ncclops.run/2"}', "[" * 100_000])
def test_commands_say_in_one_line_what_is_damaged(
    tmp_path: Path, ncclops_in_process: Callable[..., CompletedText], content: str
) -> None:
    """Where a run can be shown without it, it is."""
    run = RunPaths(tmp_path / "run")
    run.rank(0).root.mkdir(parents=True)
    run.events.touch()
    for path in (run.run, run.verdict, run.rank(0).environment):
        path.write_text(content)
    compared = ncclops_in_process("env", "compare", run.root)
    assert (compared.returncode, compared.stdout) == (2, "")
    assert compared.stderr.startswith("ncclops: error: ")
    assert compared.stderr.count("\n") == 1
    assert "environment.json" in compared.stderr
    for command in ("report", "status"):
        done = ncclops_in_process(command, run.root)
        assert done.returncode == 0, done.stderr
    with pytest.raises(UsageError, match=r"verdict\.json is .*: `ncclops diagnose` shows"):
        read_verdict(run.root)


def test_a_document_that_may_not_be_read_is_named(tmp_path: Path) -> None:
    """Played with a directory in its place, which root cannot read as a file either."""
    path = tmp_path / "verdict.json"
    path.mkdir()
    with pytest.raises(UsageError, match=rf"cannot read {path}: Is a directory"):
        VERDICT.read(path)
    assert VERDICT.read(tmp_path / "other.json") is None
