"""What `export` prints, read back by the programs it is meant for."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ncclops.env import Overrides, Plan, PlanContext, compute_plan
from ncclops.env.render import to_document, to_dotenv, to_sh, unnameable
from tests.env.conftest import make_profile

EMPTY = make_profile()
FILL = {"run_dir": "/r", "rank_dir": "/r/0"}

AWKWARD = {
    "SINGLE": "it's",
    "DOUBLE": 'say "x"',
    "SPACES": "  two  words ",
    "NEWLINES": "one\ntwo\n\n",
    "EQUALS": "a=b=c",
    "DOLLAR": "$HOME `date` ${X} $(id)",
    "BACKSLASH": "a\\b\\\\n",
    "UNICODE": "größe-→-日本",
    "GLOB": "* ? [a] ~ ! # ;&|<>",
    "EMPTY": "",
    "TABS": "\ta\r\n",
}


def plan_setting(values: dict[str, str], unset: frozenset[str] = frozenset()) -> Plan:
    environ = dict.fromkeys(unset, "before")
    return compute_plan(EMPTY, environ, Overrides(set=values, unset=unset), PlanContext())


def environment_after(script: str, environ: dict[str, str]) -> dict[str, str]:
    """What a program sees that a real sh starts after it evaluated ``script``."""
    dump = "import json, os, sys; json.dump(dict(os.environ), sys.stdout)"
    ran = subprocess.run(
        ["sh", "-c", 'eval "$SCRIPT"; exec "$PYTHON" -c "$DUMP"'],
        env={**environ, "SCRIPT": script, "PYTHON": sys.executable, "DUMP": dump},
        capture_output=True,
        check=True,
        timeout=60,
    )
    return dict(json.loads(ran.stdout))


@pytest.mark.slow
def test_awkward_values_survive_a_real_sh_exactly() -> None:
    plan = plan_setting(AWKWARD, unset=frozenset({"GONE"}))
    environ = {"PATH": os.environ["PATH"], "GONE": "before", "LC_ALL": "C.UTF-8"}
    after = environment_after(to_sh(plan, environ, FILL), environ)
    assert {name: after[name] for name in AWKWARD} == AWKWARD
    assert "GONE" not in after


# What a POSIX environment can hold: any text without NUL.
@pytest.mark.slow
@settings(max_examples=15)
@given(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])))
def test_any_value_survives_a_real_sh(value: str) -> None:
    environ = {"PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8"}
    script = to_sh(plan_setting({"VALUE": value}), environ, FILL)
    assert environment_after(script, environ)["VALUE"] == value


def test_sh_prints_only_changes() -> None:
    plan = compute_plan(EMPTY, {"K": "1"}, Overrides(keep=frozenset({"K"})), PlanContext())
    assert to_sh(plan, {"K": "1"}, FILL) == ""


def test_dotenv_and_json_hold_what_is_kept_too() -> None:
    overrides = Overrides(set={"S": 'a"b$c\nd\\'}, keep=frozenset({"K"}), unset=frozenset({"U"}))
    environ = {"K": "1", "U": "2"}
    plan = compute_plan(EMPTY, environ, overrides, PlanContext())
    assert to_dotenv(plan, environ, FILL) == ('S="a\\"b\\$c\\nd\\\\"\n# U must not be set\nK="1"\n')
    document = to_document(plan, environ, FILL)
    assert document["set"] == {"S": 'a"b$c\nd\\', "K": "1"}
    assert document["unset"] == ["U"]


@pytest.mark.parametrize(
    "name", ["A$(touch x)", "A;touch x;", "A\ntouch x\n", "A B", "ä", "1A", ""]
)
def test_a_name_that_no_shell_takes_is_not_given_to_one(name: str) -> None:
    """Any process may have put it into the environment; evaluated, it is a command."""
    overrides = Overrides(unset=frozenset({name, "U"}))
    environ = {name: "1", "U": "2"}
    plan = compute_plan(EMPTY, environ, overrides, PlanContext())
    assert to_sh(plan, environ, FILL) == "unset U\n"
    assert to_dotenv(plan, environ, FILL) == "# U must not be set\n"
    assert unnameable(plan) == [name]
    assert to_document(plan, environ, FILL)["unset"] == sorted([name, "U"])
