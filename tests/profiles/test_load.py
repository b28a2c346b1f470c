"""Lookup, inheritance, overlays and parameters."""

from __future__ import annotations

import os
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest

from ncclops.errors import ProfileError
from ncclops.profiles import choose_profile, files, list_profiles, load_profiles, with_lane


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty project directory with its own, empty, user config directory."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    here = tmp_path / "project"
    (here / "profiles").mkdir(parents=True)
    monkeypatch.chdir(here)
    return here


def write(directory: Path, name: str, text: str) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{name}.toml"
    path.write_text(f'description = "test"\n{text}', encoding="utf-8")
    return path


def value(name: str, *refs: str) -> str | None:
    return load_profiles(refs).env[name][0].value


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory in place of /etc/ncclops/profiles."""
    directory = tmp_path / "etc" / "ncclops" / "profiles"
    monkeypatch.setattr(files, "SITE", directory)
    return directory


def test_a_name_is_found_in_the_project_then_with_the_user_the_site_and_ncclops(
    project: Path, tmp_path: Path, site: Path
) -> None:
    user = tmp_path / "config" / "ncclops" / "profiles"
    entry = 'env.X = {{ set = "{}", why = "w" }}'
    assert load_profiles(["local-cpu"]).sources[-1].endswith("profiles/local-cpu.toml")
    write(site, "local-cpu", entry.format("site"))
    assert value("X", "local-cpu") == "site"
    origins = {summary.name: summary.origin for summary in list_profiles()}
    assert (origins["local-cpu"], origins["base"]) == ("site", "shipped")
    write(user, "local-cpu", entry.format("user"))
    assert value("X", "local-cpu") == "user"
    write(project / "profiles", "local-cpu", entry.format("project"))
    assert value("X", "local-cpu") == "project"


def test_a_path_is_taken_as_it_is_and_its_parents_relative_to_it(project: Path) -> None:
    write(project / "elsewhere", "parent", 'env.X = { set = "1", why = "w" }')
    write(project / "elsewhere", "child", 'extends = "./parent.toml"')
    assert value("X", "elsewhere/child.toml") == "1"


def test_a_project_profile_may_extend_the_shipped_one_of_its_own_name(project: Path) -> None:
    write(
        project / "profiles",
        "single-node-h200",
        'extends = "single-node-h200"\nnodes = "one"\nenv.X = { set = "1", why = "w" }',
    )
    profile = load_profiles(["single-node-h200"])
    assert profile.env["X"][0].value == "1"
    assert profile.env["NCCL_NET"][0].action == "unset"


def test_profiles_of_one_name_may_extend_each_other_down_to_the_shipped_one(
    project: Path, tmp_path: Path, site: Path
) -> None:
    user = tmp_path / "config" / "ncclops" / "profiles"
    for letter, directory in zip("PUS", (project / "profiles", user, site), strict=True):
        entry = f'env.{letter} = {{ set = "1", why = "w" }}'
        write(directory, "local-cpu", f'extends = "local-cpu"\n{entry}')
    profile = load_profiles(["local-cpu"])
    assert {"P", "U", "S", "GLOO_SOCKET_IFNAME"} <= profile.env.keys()


def test_a_child_replaces_a_variable_whole_and_keeps_the_others(project: Path) -> None:
    write(
        project / "profiles",
        "parent",
        """
        [[env.X]]
        when = { restart = "none" }
        set = "1"
        why = "w"
        [[env.X]]
        set = "2"
        why = "w"
        [env.Y]
        unset = true
        why = "w"
        """,
    )
    write(project / "profiles", "child", 'extends = "parent"\nenv.X = { default = "3", why = "w" }')
    env = load_profiles(["child"]).env
    assert [entry.value for entry in env["X"]] == ["3"]
    assert env["Y"][0].action == "unset"
    assert env["X"][0].source == "profile child"


def test_overlays_come_over_the_lane_in_the_order_given(project: Path) -> None:
    write(project / "profiles", "lane", 'env.X = { set = "lane", why = "w" }')
    for name in ("one", "two"):
        write(
            project / "profiles", name, f'kind = "overlay"\nenv.X = {{ set = "{name}", why = "w" }}'
        )
    assert value("X", "lane", "one", "two") == "two"
    assert value("X", "lane", "two", "one") == "one"
    profile = load_profiles(["lane", "one"])
    assert (profile.name, profile.kind) == ("lane+one", "lane")


def test_two_lanes_do_not_combine() -> None:
    with pytest.raises(ProfileError, match="are both lanes: choose one"):
        load_profiles(["single-node-h200", "multi-host-h200"])


def test_a_parameter_reaches_values_in_seconds_and_timeouts_as_durations(project: Path) -> None:
    write(
        project / "profiles",
        "p",
        """
        [parameters]
        window = "1.5m"
        flag = true
        entries = 20
        word = "abc"
        [timeouts]
        process_group = "{window}"
        [env]
        W = { set = "{window}", why = "w" }
        F = { set = "{flag}/{entries}/{word}", why = "w" }
        J = { set = '{"json": {}, "n": 1}', why = "w" }
        R = { set = "{rank_dir}/x", why = "w" }
        """,
    )
    profile = load_profiles(["p"])
    assert profile.timeouts["process_group"] == timedelta(seconds=90)
    values = {name: entries[0].value for name, entries in profile.env.items()}
    assert values == {
        "W": "90",
        "F": "1/20/abc",
        "J": '{"json": {}, "n": 1}',
        "R": "{rank_dir}/x",
    }


def test_a_child_changes_a_parents_window_through_its_parameter(project: Path) -> None:
    write(
        project / "profiles",
        "quick",
        'kind = "overlay"\nextends = "compile-sensitive"\nparameters.compile_timeout = "30m"',
    )
    profile = load_profiles(["single-node-h200", "quick"])
    assert profile.timeouts["process_group"] == timedelta(minutes=30)
    heartbeat = profile.env["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"]
    assert {entry.value for entry in heartbeat} == {"1800"}


def test_two_parents_that_share_a_parent_are_no_loop(project: Path) -> None:
    directory = project / "profiles"
    write(directory, "root", 'env.X = { set = "root", why = "w" }')
    write(directory, "left", 'extends = "root"\nenv.X = { set = "left", why = "w" }')
    write(directory, "right", 'extends = "root"')
    write(directory, "both", 'extends = ["left", "right"]')
    assert value("X", "both") == "left"


def test_list_shows_overlays_lanes_and_broken_files(project: Path) -> None:
    (project / "profiles" / "broken.toml").write_text("description = ", encoding="utf-8")
    listed = {summary.name: summary for summary in list_profiles()}
    assert listed["compile-sensitive"].kind == "overlay"
    assert listed["single-node-h200"].kind == "lane"
    assert listed["single-node-h200"].origin == "shipped"
    assert "not valid TOML" in (listed["broken"].problem or "")


def test_list_shows_what_launch_would_refuse(project: Path) -> None:
    """A file that is right by itself, and cannot be used."""
    write(project / "profiles", "orphan", 'extends = "no-such-parent"')
    write(project / "profiles", "wrong", 'env.X = { set = "{windw}", why = "w" }')
    write(project / "profiles", "child", 'extends = "wrong"')
    problems = {summary.name: summary.problem or "" for summary in list_profiles()}
    assert "extends: unknown profile 'no-such-parent'" in problems["orphan"]
    assert "there is no parameter 'windw'" in problems["wrong"]
    assert "there is no parameter 'windw'" in problems["child"]


def test_the_lane_is_chosen_by_nodes_gpus_and_fabric() -> None:
    assert choose_profile(nnodes=1, gpus=8, rdma=True) == "single-node-h200"
    assert choose_profile(nnodes=2, gpus=8, rdma=True) == "multi-host-h200"
    assert choose_profile(nnodes=2, gpus=8, rdma=False) == "multi-host-h200-socket"
    assert choose_profile(nnodes=1, gpus=0, rdma=False) == "local-cpu"
    assert choose_profile(nnodes=2, gpus=0, rdma=False) == "base"


def test_overlays_alone_are_put_on_the_chosen_lane() -> None:
    assert with_lane(["debug-bootstrap"], lambda: "single-node-h200") == (
        "single-node-h200",
        "debug-bootstrap",
    )


def nobody() -> str:
    raise AssertionError("asked for a lane")


def test_with_a_lane_named_this_host_is_not_looked_at() -> None:
    refs = ("base", "debug-bootstrap")
    assert with_lane(refs, nobody, default=nobody) == refs


def test_a_default_stands_in_where_no_lane_is_named() -> None:
    lane = partial(with_lane, choose=nobody, default=lambda: ["base", "expert-parallel"])
    assert lane(()) == ("base", "expert-parallel")
    assert lane(["debug-bootstrap"]) == ("base", "expert-parallel", "debug-bootstrap")
    assert lane(["expert-parallel"]) == ("base", "expert-parallel")
    overlay = with_lane([], lambda: "base", default=lambda: ["expert-parallel"])
    assert overlay == ("base", "expert-parallel")


def test_a_lane_says_when_the_number_of_nodes_is_wrong() -> None:
    load_profiles(["single-node-h200"]).require_nodes(1)
    with pytest.raises(ProfileError, match="is for one node and the job has 2"):
        load_profiles(["single-node-h200"]).require_nodes(2)
    with pytest.raises(ProfileError, match="is for several nodes and the job has one"):
        load_profiles(["multi-host-h200"]).require_nodes(1)


def test_a_child_takes_a_scope_back_or_gives_its_own_reason(project: Path) -> None:
    directory = project / "profiles"
    scope = '[scopes.between_nodes]\nunset = {}\nwhy = "{}"'
    write(directory, "open", 'extends = "single-node-h200"\n' + scope.format("false", "two rails"))
    write(directory, "own", 'extends = "single-node-h200"\n' + scope.format("true", "ours"))
    assert load_profiles(["open"]).scopes == {}
    assert load_profiles(["own"]).scopes["between_nodes"].source == "profile own"
    assert load_profiles(["single-node-h200"]).scopes["between_nodes"].action == "unset"


def test_exit_codes_come_as_a_set_and_changes_and_a_set_begins_anew(project: Path) -> None:
    text = 'extends = "{}"\n[exit_codes]\n'
    profiles = project / "profiles"
    write(profiles, "site", text.format("local-cpu") + 'set = "scheduler"\nfix = 93\n')
    write(profiles, "ours", text.format("site") + "retry = 138\n")
    write(profiles, "plain", text.format("ours") + 'set = "default"\nunknown = 2\n')
    ours = load_profiles(["ours"], cwd=project).exit_codes
    assert (ours.retry, ours.replace_node, ours.fix) == (138, 76, 93)
    plain = load_profiles(["plain"], cwd=project).exit_codes
    assert (plain.retry, plain.fix, plain.unknown) == (1, 1, 2)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("retry = 0", "exit_codes.retry: "),
        ("retry = 300", "exit_codes.retry: "),
        ('retry = "75"', "exit_codes.retry: "),
        ('set = "slurm"', "exit_codes.set: cannot be 'slurm'; write 'default' or 'scheduler'"),
        ("requeue = 75", "exit_codes.requeue: unknown key; known: "),
    ],
)
def test_what_is_no_exit_code_names_file_and_key(project: Path, line: str, message: str) -> None:
    write(project / "profiles", "bad", f"[exit_codes]\n{line}\n")
    with pytest.raises(ProfileError, match=r"bad\.toml") as refused:
        load_profiles(["bad"], cwd=project)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.skipif(os.geteuid() != 0, reason="a file of another user")
@pytest.mark.parametrize(
    ("mode", "owner", "counts"), [(0o1777, 0, True), (0o1777, 4711, False), (0o755, 4711, True)]
)
def test_profiles_of_a_stranger_in_a_directory_for_all_are_passed_over(
    project: Path, mode: int, owner: int, counts: bool
) -> None:
    write(project / "profiles", "local-cpu", 'env.X = { set = "1", why = "w" }')
    os.chown(project / "profiles", owner, -1)
    project.chmod(mode)
    origins = {summary.name: summary.origin for summary in list_profiles()}
    assert (origins["local-cpu"] == "project") == counts
