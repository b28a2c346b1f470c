"""``ncclops profile`` as people and scripts call it."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.conftest import CompletedText

Ncclops = Callable[..., CompletedText]


@pytest.fixture
def run(ncclops_in_process: Ncclops) -> Ncclops:
    """``run("show", "base")``: these commands only read, and need no process of their own."""
    return partial(ncclops_in_process, "profile")


def test_list_names_the_shipped_profiles_and_marks_overlays(run: Ncclops) -> None:
    lines = {line.split()[0]: line for line in run("list").stdout.splitlines() if line.strip()}
    assert " overlay " in lines["compile-sensitive"]
    assert " lane " in lines["single-node-h200"]
    profiles = json.loads(run("list", "--json").stdout)["profiles"]
    kinds = {item["name"]: item["kind"] for item in profiles}
    assert (kinds["debug-bootstrap"], kinds["local-cpu"]) == ("overlay", "lane")


def test_show_gives_each_value_with_its_condition_and_reason(run: Ncclops) -> None:
    text = run("show", "single-node-h200", "regional-compile").stdout
    assert "set 3" in text
    assert "set 0, when restart in-process" in text
    assert "parameter compile_timeout = 120m" in text
    assert "unset" in text
    document = json.loads(run("show", "base", "--json").stdout)
    whole = {line.strip() for line in run("show", "base").stdout.splitlines()}
    for entries in document["env"].values():
        assert {entry["why"] for entry in entries} <= whole
    assert document["schema"] == "ncclops.profile/1"
    entry = document["env"]["TORCH_NCCL_ASYNC_ERROR_HANDLING"][0]
    assert entry["when"]["restart"] == ["in-process"]
    assert entry["why"]


def test_validate_accepts_a_good_file(run: Ncclops, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('description = "d"\nextends = "single-node-h200"\n', encoding="utf-8")
    ran = run("validate", str(path))
    assert ran.returncode == 0
    assert ran.stdout.startswith(f"{path}: valid: ")


BAD = {
    "syntax": ("x = [1,\n", "not valid TOML"),
    "loop": ('extends = "./bad.toml"', "the profiles form a loop: bad -> bad"),
    "key": ('extend = "base"', "extend: unknown key; did you mean extends?"),
    "duration": ('timeouts.stop_grace = "1 minute"', "timeouts.stop_grace: '1 minute' is not a"),
    "type": ('env.X = { set = true, why = "w" }', "env.X.set: must be text"),
    "suppression": ('lint.ignore.unred = "why"', "there is no rule 'unred'; did you mean unread"),
    "trainer": (
        '[[watch.trainers]]\nname = "ours"\n'
        'pattern = [{ kind = "step", contains = [], regex = "(" }]',
        "watch.trainers: form ours: pattern for step: missing )",
    ),
    "parent": ('extends = "bas"', "unknown profile 'bas'; did you mean base"),
}


@pytest.mark.parametrize(("text", "message"), BAD.values(), ids=BAD.keys())
def test_validate_says_what_is_wrong_in_one_line(
    run: Ncclops, tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(f'description = "d"\n{text}\n', encoding="utf-8")
    ran = run("validate", str(path))
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr.startswith(f"ncclops: error: {path}: ")
    assert message in ran.stderr
    assert len(ran.stderr.splitlines()) == 1
