"""Parameters that are given in place of a profile's own: ``--param``."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from ncclops.errors import UsageError
from ncclops.profiles import Profile, load_profiles
from ncclops.profiles.model import GivenParameter, as_text
from ncclops.profiles.parameters import parse_parameters
from ncclops.timeouts.settle import settle

TYPED = """
description = "one parameter of each type"
[parameters]
window = "2m"
entries = 20
share = 0.5
flag = true
word = "abc"
[timeouts]
process_group = "{window}"
[watch]
hang = "{window}"
[env]
ALL = { set = "{window}/{entries}/{share}/{flag}/{word}", why = "w" }
"""


@pytest.fixture
def typed(tmp_path: Path) -> str:
    path = tmp_path / "typed.toml"
    path.write_text(TYPED, encoding="utf-8")
    return str(path)


def values(profile: Profile, name: str) -> set[str | None]:
    return {entry.value for entry in profile.env[name]}


@pytest.mark.parametrize("lane", ["single-node-h200", "multi-host-h200", "local-cpu"])
def test_all_that_follows_from_a_parameter_follows_what_is_given(lane: str) -> None:
    refs = [lane, "regional-compile"]
    profile = load_profiles(refs, parameters={"compile_timeout": "45m"})
    assert profile.timeouts["process_group"] == timedelta(minutes=45)
    longer = load_profiles(refs, parameters={"compile_timeout": "3h"})
    soft, more = settle(profile.timeouts).soft, settle(longer.timeouts).soft
    assert soft is not None
    assert more is not None
    assert more / soft == 4
    for name in ("NCCL_TIMEOUT", "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"):
        assert values(profile, name) == {"2700"}
    assert values(profile, "TORCH_DISTRIBUTED_DEFAULT_TIMEOUT") == {"2700"}
    own = load_profiles(refs).timeouts["steady_process_group"]
    assert profile.timeouts["steady_process_group"] == own


def test_a_profile_says_what_follows_from_each_parameter(typed: str) -> None:
    uses = load_profiles([typed]).uses
    assert uses["window"] == ("timeouts.process_group", "watch.hang", "ALL")
    assert uses["entries"] == ("ALL",)
    assert load_profiles(["single-node-h200"]).uses["p2p_net_chunksize"] == ()


@pytest.mark.parametrize(
    ("name", "given", "value"),
    [
        ("window", "90s", "90/20/0.5/1/abc"),
        ("window", timedelta(minutes=1), "60/20/0.5/1/abc"),
        ("entries", "7", "120/7/0.5/1/abc"),
        ("entries", 7, "120/7/0.5/1/abc"),
        ("share", "2", "120/20/2.0/1/abc"),
        ("flag", "FALSE", "120/20/0.5/0/abc"),
        ("flag", False, "120/20/0.5/0/abc"),
        ("word", "a=b", "120/20/0.5/1/a=b"),
    ],
)
def test_each_type(typed: str, name: str, given: GivenParameter, value: str) -> None:
    assert values(load_profiles([typed], parameters={name: given}), "ALL") == {value}
    text = parse_parameters([f"{name}={as_text(given)}"])
    assert values(load_profiles([typed], parameters=text), "ALL") == {value}


@pytest.mark.parametrize(
    ("name", "given", "says"),
    [
        ("window", "90", "'90' is not a duration.*has window = 2m"),
        ("window", "0s", "must be positive"),
        ("window", "-2m", "is not a duration"),
        ("entries", "7.5", "must be a whole number .*has entries = 20"),
        ("entries", "", "must be a whole number"),
        ("share", "nan", "must be a number"),
        ("flag", "maybe", "must be true or false .*has flag = true"),
        ("windw", "3m", r"profile typed has no parameter 'windw'; did you mean window\\?"),
        ("zzz", "3m", "; known: window, entries, share, flag, word"),
        ("compile_timeout", "3m", "; compile-sensitive and regional-compile have it"),
    ],
)
def test_another_type_and_another_name_are_refused(
    typed: str, name: str, given: str, says: str
) -> None:
    with pytest.raises(UsageError, match=f"^--param {name}={given}: .*{says}"):
        load_profiles([typed], parameters={name: given})


@pytest.mark.parametrize("pair", ["window", "=3m", " =3m"])
def test_another_form_is_refused(pair: str) -> None:
    with pytest.raises(UsageError, match="write it as NAME=VALUE"):
        parse_parameters([pair])


def test_the_last_of_several_values_counts_and_dashes_are_underscores(typed: str) -> None:
    given = parse_parameters(["word=a", "word=b"])
    assert values(load_profiles([typed], parameters=given), "ALL") == {"120/20/0.5/1/b"}
    profile = load_profiles(
        ["local-cpu", "regional-compile"], parameters={"compile-timeout": "45m"}
    )
    assert profile.parameters["compile_timeout"] == "45m"


def test_a_lane_whose_parameter_gives_way_to_an_overlay_is_told(tmp_path: Path) -> None:
    lane = tmp_path / "mine.toml"
    lane.write_text(
        'description = "d"\nextends = "local-cpu"\nparameters.compile_timeout = "45m"\n',
        encoding="utf-8",
    )
    refs = [str(lane), "regional-compile"]
    profile = load_profiles(refs)
    assert profile.parameters["compile_timeout"] == "120m"
    assert profile.remarks == (
        "parameter compile_timeout is 120m by profile regional-compile, not 45m:"
        " --param compile_timeout=45m keeps that",
    )
    decided = load_profiles(refs, parameters={"compile_timeout": "45m"})
    assert decided.remarks == ()
    assert decided.timeouts["process_group"] == timedelta(minutes=45)
    assert load_profiles(["local-cpu", "compile-sensitive", "regional-compile"]).remarks == ()
