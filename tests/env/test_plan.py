"""The plan: precedence, rows and what is applied."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from ncclops.env import Change, Overrides, Plan, PlanContext, compute_plan
from ncclops.errors import UsageError
from ncclops.profiles import Entry, EntryCondition, Profile
from ncclops.profiles.model import NetworkSettings
from tests.env.conftest import make_profile

NEVER = EntryCondition(restart=frozenset())
FILL = {"run_dir": "/runs/1", "rank_dir": "/runs/1/ranks/0"}


def profile(**env: Entry | tuple[Entry, ...]) -> Profile:
    entries = {name: e if isinstance(e, tuple) else (e,) for name, e in env.items()}
    return make_profile(entries)


def entry(action: str, value: str | None = None, **more: object) -> Entry:
    return Entry(action=action, why="because", source="profile p", value=value, **more)  # type: ignore[arg-type]


def plan(
    of: Profile,
    environ: Mapping[str, str] | None = None,
    overrides: Overrides | None = None,
    context: PlanContext | None = None,
) -> Plan:
    return compute_plan(of, environ or {}, overrides or Overrides(), context or PlanContext())


def only_row(result: Plan) -> Change:
    (row,) = result.changes
    return row


def test_a_variable_without_a_name_is_not_handed_on() -> None:
    """``env =x command``: Python reads it, and cannot unset it."""
    assert plan(profile()).apply({"": "x", "A": "B"}, FILL) == {"A": "B"}


@pytest.mark.parametrize(
    ("action", "before", "expected"),
    [
        # action, exported value, (row action, after) or None for no row
        ("default", None, ("set", "P")),
        ("default", "E", ("keep", "E")),
        ("default", "P", ("keep", "P")),
        ("set", None, ("set", "P")),
        ("set", "E", ("set", "P")),
        ("set", "P", ("keep", "P")),
        ("unset", None, None),
        ("unset", "E", ("unset", None)),
    ],
)
def test_each_action_against_what_was_exported(
    action: str, before: str | None, expected: tuple[str, str | None] | None
) -> None:
    value = None if action == "unset" else "P"
    result = plan(profile(X=entry(action, value)), {} if before is None else {"X": before})
    if expected is None:
        assert result.changes == ()
        return
    row = only_row(result)
    assert (row.action, row.before, row.after) == (expected[0], before, expected[1])
    assert row.source == "profile p"
    assert "because" in row.reason


@pytest.mark.parametrize("action", ["default", "set", "unset"])
@pytest.mark.parametrize(
    ("overrides", "before", "expected"),
    [
        (Overrides(set={"X": "C"}), "E", ("set", "C")),
        (Overrides(set={"X": "C"}), None, ("set", "C")),
        (Overrides(set={"X": "E"}), "E", ("keep", "E")),
        (Overrides(unset=frozenset({"X"})), "E", ("unset", None)),
        (Overrides(unset=frozenset({"X"})), None, ("keep", None)),
        (Overrides(keep=frozenset({"X"})), "E", ("keep", "E")),
        (Overrides(keep=frozenset({"X"})), None, ("keep", None)),
    ],
)
def test_the_command_line_overrides_all_and_says_what_it_overrules(
    action: str, overrides: Overrides, before: str | None, expected: tuple[str, str | None]
) -> None:
    value = None if action == "unset" else "P"
    environ = {} if before is None else {"X": before}
    result = plan(profile(X=entry(action, value)), environ, overrides)
    row = only_row(result)
    assert (row.action, row.before, row.after) == (expected[0], before, expected[1])
    assert row.source == "command line"
    assert f"profile p would {action} it" in row.reason
    applied = result.apply(environ, FILL)
    assert applied.get("X") == expected[1]


def test_the_command_line_may_name_what_no_profile_mentions() -> None:
    overrides = Overrides(set={"A": "1"}, unset=frozenset({"B"}), keep=frozenset({"C"}))
    result = plan(profile(), {"B": "2", "C": "3"}, overrides)
    assert [(row.name, row.action) for row in result.changes] == [
        ("A", "set"),
        ("B", "unset"),
        ("C", "keep"),
    ]
    assert result.apply({"B": "2", "C": "3", "D": "4"}, FILL) == {"A": "1", "C": "3", "D": "4"}


def test_one_variable_in_two_options_is_refused() -> None:
    with pytest.raises(UsageError, match="X is given with --set and --keep: choose one"):
        Overrides(set={"X": "1"}, keep=frozenset({"X"}))


@pytest.mark.parametrize(
    ("before", "after", "action"),
    [
        ("/a:/opt/gib/lib64:/b", "/a:/b", "scrub"),
        ("/opt/gib/lib64/:/a/", "/a/", "scrub"),
        ("/opt/gib/lib64:/opt/gib/lib", None, "scrub"),
        ("/b::/opt/gib/lib:/a", "/b::/a", "scrub"),
        ("/b:/a:/b", "/b:/a:/b", "keep"),
        ("/opt/gibberish/lib", "/opt/gibberish/lib", "keep"),
        ("", "", "keep"),
    ],
)
def test_scrub_takes_out_whole_entries_and_touches_nothing_else(
    before: str, after: str | None, action: str
) -> None:
    of = profile(LD_LIBRARY_PATH=entry("scrub", patterns=("*/gib/lib*",)))
    result = plan(of, {"LD_LIBRARY_PATH": before})
    row = only_row(result)
    assert (row.action, row.before, row.after) == (action, before, after)
    assert result.apply({"LD_LIBRARY_PATH": before}, FILL).get("LD_LIBRARY_PATH") == after


def test_the_first_entry_whose_condition_holds_is_taken() -> None:
    of = profile(
        X=(
            entry("set", "new", when=EntryCondition(torch=">=2.14")),
            entry("set", "restart", when=EntryCondition(restart=frozenset({"in-process"}))),
            entry("set", "other", when=EntryCondition(absent=("Y",))),
        )
    )
    new, old = PlanContext("in-process", "2.15.0"), PlanContext("in-process", "2.13.0+cpu")
    assert only_row(plan(of, context=new)).after == "new"
    assert only_row(plan(of, context=old)).after == "restart"
    assert only_row(plan(of, context=PlanContext("in-process", None))).after == "restart"
    process = PlanContext("process", "2.13.0")
    assert only_row(plan(of, context=process)).after == "other"
    assert plan(of, {"Y": "1"}, context=process).changes == ()
    given = Overrides(set={"Y": "1"})
    assert [row.name for row in plan(of, overrides=given, context=process).changes] == ["Y"]
    taken = Overrides(unset=frozenset({"Y"}))
    assert plan(of, {"Y": "1"}, taken, process).changes[0].after == "other"


def test_a_default_follows_the_operators_value_of_the_other_spelling() -> None:
    of = profile(
        NEW=entry("default", "2000", follows="OLD"), OLD=entry("default", "2000", follows="NEW")
    )
    for environ, overrides in (
        ({"OLD": "50"}, Overrides()),
        ({"NEW": "50"}, Overrides()),
        ({}, Overrides(set={"OLD": "50"})),
        ({"OLD": "7"}, Overrides(set={"OLD": "50"})),
    ):
        applied = plan(of, environ, overrides).apply(environ, FILL)
        assert applied == {"OLD": "50", "NEW": "50"}


def test_placeholders_are_filled_in_what_is_set_and_in_nothing_else() -> None:
    of = profile(X=entry("set", "{rank_dir}/x-%h"), Y=entry("default", "{run_dir}"))
    environ = {"Y": "{run_dir}", "Z": "{rank_dir}"}
    result = plan(of, environ)
    assert result.changes[0].after == "{rank_dir}/x-%h"
    assert result.apply(environ, FILL) == {
        "X": "/runs/1/ranks/0/x-%h",
        "Y": "{run_dir}",
        "Z": "{rank_dir}",
    }
    assert environ == {"Y": "{run_dir}", "Z": "{rank_dir}"}


def test_applying_what_the_rows_say_gives_the_environment_of_the_plan() -> None:
    of = profile(A=entry("set", "1"), B=entry("unset"), C=entry("default", "3"))
    environ = {"B": "2", "C": "mine", "D": "4"}
    result = plan(of, environ)
    by_hand = dict(environ)
    for row in result.to_json()["changes"]:
        assert set(row) == {"name", "action", "before", "after", "reason", "source"}
        if row["after"] is None:
            by_hand.pop(row["name"], None)
        else:
            by_hand[row["name"]] = row["after"]
    assert result.apply(environ, FILL) == by_hand
    assert result.to_json()["schema"] == "ncclops.env-diff/1"


@pytest.mark.parametrize(
    ("value", "holds"),
    [("none", True), ("NONE", True), ("aws-ofi", False), (None, False), ("", False)],
)
def test_a_condition_on_the_operators_value(value: str | None, holds: bool) -> None:
    when = EntryCondition(value=("no*e", "lo"))
    of = profile(X=(entry("unset", when=when),))
    result = plan(of, {} if value is None else {"X": value})
    assert bool(result.changes) == holds


def test_a_scope_takes_all_its_variables_but_those_that_are_named() -> None:
    scope = Entry("unset", "one node.", "profile p")
    of = replace(
        profile(NCCL_IB_TC=entry("set", "7"), NCCL_IB_SL=entry("unset", when=NEVER)),
        scopes={"between_nodes": scope},
    )
    environ = {
        "NCCL_IB_TC": "1",
        "NCCL_IB_SL": "1",
        "NCCL_IB_HCA": "mlx5",
        "UCX_TLS": "rc",
        "UCX_UNKNOWN": "1",
        "NCCL_DEBUG": "WARN",
    }
    asked = Overrides(keep=frozenset({"UCX_TLS"}), set={"FI_PROVIDER": "tcp"})
    rows = {row.name: row for row in plan(of, environ, asked).changes}
    assert {name: (row.action, row.after) for name, row in rows.items()} == {
        "NCCL_IB_TC": ("set", "7"),
        "NCCL_IB_HCA": ("unset", None),
        "UCX_UNKNOWN": ("unset", None),
        "UCX_TLS": ("keep", "rc"),
        "FI_PROVIDER": ("set", "tcp"),
    }
    assert rows["NCCL_IB_HCA"].reason.startswith("one node. Which HCAs")
    assert rows["NCCL_IB_HCA"].source == "profile p"
    assert rows["UCX_TLS"].reason == "--keep on the command line; profile p would unset it"


NCCL_LOG = {
    "NCCL_DEBUG": "INFO",
    "NCCL_DEBUG_SUBSYS": "NET,ENV,BOOTSTRAP",
    "NCCL_DEBUG_FILE": "/runs/1/ranks/0/nccl.log",
}


def with_network(*expect: str, **entries: Entry) -> Profile:
    return replace(profile(**entries), network=NetworkSettings(expect, log=True))


def test_a_profile_that_expects_a_network_has_nccl_say_which_it_uses() -> None:
    context = PlanContext(from_files=lambda _environ: ())
    result = compute_plan(with_network("ib", "roce"), {}, Overrides(), context)
    assert result.apply({}, FILL) == NCCL_LOG
    assert all("meant for ib or roce" in row.reason for row in result.changes)
    assert all(row.source.endswith(", [network]") for row in result.changes)
    silent = replace(profile(), network=NetworkSettings(("ib",)))
    for other in (profile(), silent):  # debugging is never on by default
        assert compute_plan(other, {}, Overrides(), context).changes == ()


@pytest.mark.parametrize("name", NCCL_LOG)
@pytest.mark.parametrize("where", ["shell", "file", "profile"])
def test_nccls_log_stays_as_somebody_else_has_it(name: str, where: str) -> None:
    environ = {name: "x"} if where == "shell" else {}
    files = (name,) if where == "file" else ()
    own = {name: entry("set", "x")} if where == "profile" else {}
    context = PlanContext(from_files=lambda _environ: files)
    result = compute_plan(with_network("ib", **own), environ, Overrides(), context)
    assert {row.name for row in result.changes} == set(own)
