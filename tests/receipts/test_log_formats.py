"""The trainers' lines: each pattern knows its examples and nothing that only looks like one."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ncclops.receipts import log_formats
from ncclops.receipts.log_scan import LogScan
from ncclops.receipts.observation import Observation

TRAINERS = Path(log_formats.__file__).parent / "trainers"
Table = dict[str, Any]


def tables() -> Iterator[Any]:
    for path in sorted(TRAINERS.glob("*.toml")):
        document = tomllib.loads(path.read_text())
        for index, table in enumerate(document["pattern"]):
            if table["kind"] not in ("failed", "noise", "table"):
                yield pytest.param(document, table, id=f"{path.stem}-{table['kind']}-{index}")


def seen_by(document: Table, table: Table, line: str) -> list[Observation]:
    """What one pattern alone makes of a line, through the reader that users' lines go through."""
    table = table | {"continues": False}
    alone = log_formats.parse_form(document | {"pattern": [table], "only_with": None})
    scan = LogScan("log", forms=[alone])
    return scan.feed(line)


@pytest.mark.parametrize(("document", "table"), [*tables()])
def test_a_pattern_matches_its_examples(document: Table, table: Table) -> None:
    assert table["examples"]
    for example in table["examples"]:
        seen = seen_by(document, table, example["line"] + "\n")
        assert seen, example["line"]
        assert seen[0].kind == table["kind"]
        for name in ("step", "seconds", "rate"):
            if name in example:
                assert getattr(seen[0], name) == pytest.approx(example[name]), example["line"]
        if "gib" in example:
            (memory,) = [each for each in seen if each.kind == "memory"]
            assert memory.gib == pytest.approx(example["gib"], abs=1e-4)


@pytest.mark.parametrize(("document", "table"), [*tables()])
def test_a_pattern_leaves_near_misses_alone(document: Table, table: Table) -> None:
    assert table["near_misses"]
    for line in table["near_misses"]:
        assert seen_by(document, table, line) == []


def test_every_named_trainer_is_there() -> None:
    names = {form.name for form in log_formats.shipped_forms()}
    assert names >= {
        "composer",
        "deepspeed",
        "detectron2",
        "fairseq",
        "huggingface-trainer",
        "lightning",
        "maxtext",
        "megatron-lm",
        "metric-logger",
        "mmengine",
        "nanogpt",
        "nemo",
        "olmo",
        "playbook",
        "pytorch-examples",
        "timm",
        "torchtitan",
        "torchtune",
        "ultralytics",
        "verl",
    }


@pytest.mark.parametrize(
    "line",
    [
        "INFO - Epoch(train)  [{epoch}][{step:2}/50]  time: 1.5  memory: 900  loss: 0.7",
        "[d2.utils.events]:  iter: {number}  total_loss: 3.2  time: 0.3  max_mem: 900M",
        "Train: {epoch} [{step:4}/50 ( 3%)]  Loss: 6.9 (6.9)  Time: 1.4s, 87.5/s (1.8s, 67.5/s)",
        "Epoch: [{epoch}]  [{step:2}/50]  eta: 0:02:24  loss: 6.9 (6.9)  time: 0.17  max mem: 9",
        "Epoch {epoch}/9:  3%|#  | {step}/50 [00:19<01:29,  2.49s/it]",
        "[epoch={epoch}][batch={step}/50]:",
        "[step={number}/90000]",
    ],
)
def test_steps_count_on_across_epochs(line: str) -> None:
    scan = LogScan("log")
    for number in range(1, 100):
        epoch, step = divmod(number, 50)
        scan.feed(line.format(epoch=epoch, step=step, number=number) + "\n")
    assert scan.facts.steps == 99


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"kind": "stepp"}, "kind 'stepp' is none of"),
        ({"regex": "("}, "unterminated subpattern"),
        ({"contains": None}, "contains"),
    ],
)
def test_a_profile_s_own_form_is_checked(change: Table, said: str) -> None:
    pattern: Table = {"kind": "step", "contains": ["s"], "regex": r"s(?P<step>\d+)"} | change
    pattern = {key: value for key, value in pattern.items() if value is not None}
    with pytest.raises(ValueError, match="form own: ") as raised:
        log_formats.parse_form({"name": "own", "pattern": [pattern]})
    assert said in str(raised.value)


def test_an_unknown_option_of_a_form_is_named() -> None:
    with pytest.raises(ValueError, match="zero_base"):
        log_formats.parse_form({"name": "own", "zero_base": True, "pattern": []})


STEP = {"kind": "step", "contains": ["iter"], "regex": r"iter (?P<step>\w+)"}


@pytest.mark.parametrize(
    "document",
    [
        {"name": "own"},
        {"name": 5, "pattern": [STEP]},
        {"name": "own", "pattern": "abc"},
        {"name": "own", "pattern": ["abc"]},
        {"name": "own", "order": "z", "pattern": [STEP]},
        {"name": "own", "pattern": [STEP | {"contains": "iter"}]},
        {"name": "own", "pattern": [STEP | {"regex": 5}]},
        {"name": "own", "pattern": [STEP | {"values": [5]}]},
        {"name": "own", "pattern": [{"kind": "step", "contains": ["iter"]}]},
        {"name": "own", "pattern": [STEP | {"regex": "%{number}"}]},
        {"name": "own", "pattern": [STEP], "parts": {"number": 5}},
    ],
)
def test_a_table_that_is_no_form_is_refused(document: Table) -> None:
    with pytest.raises(ValueError, match="form"):
        log_formats.parse_form(document)


def test_what_a_profiles_form_takes_for_numbers_and_units_need_be_none() -> None:
    """An error here would end the reading of all output of the run."""
    amount = r"took (?P<amount>\w+?)(?P<time_unit>[a-z]+) (?P<memory>\d+)(?P<memory_unit>\w+)"
    form = log_formats.parse_form(
        {
            "name": "own",
            "only_with": "another that is not there",
            "pattern": [STEP, {"kind": "warmup", "contains": ["took"], "regex": amount}],
        }
    )
    scan = LogScan("log", forms=[form])
    assert scan.feed("iter abc\n") == []
    assert [seen.step for seen in scan.feed("iter 7\n")] == [7]
    assert [(seen.seconds, seen.gib) for seen in scan.feed("took 5parsecs 3firkins\n")] == [
        (None, None)
    ]
    assert scan.facts is not None


@pytest.mark.parametrize("number", ["9" * 400, "nan", "inf", "1e999"])
def test_a_number_that_no_computer_has_is_no_rate(number: str) -> None:
    """A median with it, and the verdict, would hold what no reader of JSON takes."""
    form = log_formats.parse_form(
        {
            "name": "own",
            "pattern": [
                {
                    "kind": "step",
                    "contains": ["iter"],
                    "regex": r"iter (?P<step>\d+) (?P<tokens_per_s>\w+)",
                }
            ],
        }
    )
    (seen,) = LogScan("log", forms=[form]).feed(f"iter 7 {number}\n")
    assert (seen.step, seen.rate, seen.unit) == (7, None, None)


def test_what_is_kept_of_ranks_that_lines_name_has_an_end() -> None:
    scan = LogScan("log", most_streams=5)
    for rank in range(5):
        assert scan.feed(f"[rank{rank}]: step 1 loss 2.5\n")
    assert scan.feed("[rank5]: step 1 loss 2.5\n") == []
    assert scan.feed("[rank3]: step 2 loss 2.5\n")


def test_lines_of_a_failure_are_known() -> None:
    (form,) = (form for form in log_formats.shipped_forms() if form.name == "failures")
    tables = tomllib.loads((TRAINERS / "failures.toml").read_text())["pattern"]
    for table, pattern in zip(tables, form.patterns, strict=True):
        for example in table["examples"]:
            line = example["line"].removeprefix("[rank1]: ")
            assert pattern.match(line, line.lower()) is not None
        for line in table["near_misses"]:
            assert pattern.match(line, line.lower()) is None
