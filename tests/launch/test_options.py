"""Option values in the spellings of people and of torchrun, and a clear refusal of the others."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from pathlib import Path

import pytest

from ncclops.agent.layout import Shown, Target
from ncclops.errors import UsageError
from ncclops.launch.command import prepare
from ncclops.launch.options import (
    behind_the_script,
    check_allowed,
    check_attached,
    check_networks,
    check_target,
    parse_nproc,
    parse_shown,
    parse_snapshot_every,
    parse_timeouts,
    silent_store,
    target_of,
    with_attached,
)
from ncclops.launch.request import LaunchRequest
from ncclops.launch.resolve import resolve
from ncclops.timeouts import settle

EVERYONE = frozenset(range(4))
NOBODY: frozenset[int] = frozenset()


class TestNproc:
    def test_auto_is_one_worker_per_gpu(self) -> None:
        assert parse_nproc("auto", 8) == (8, None)

    def test_auto_without_a_gpu_is_one_worker_and_says_so(self) -> None:
        count, remark = parse_nproc("auto", 0)
        assert count == 1
        assert remark is not None
        assert "no GPU" in remark

    @pytest.mark.parametrize(("text", "count"), [("3", 3), ("gpu", 2), ("cpu", os.cpu_count())])
    def test_numbers_and_words(self, text: str, count: int) -> None:
        assert parse_nproc(text, 2) == (count, None)

    @pytest.mark.parametrize("text", ["0", "-1", "two", "", "1.5"])
    def test_anything_else_is_refused_by_name(self, text: str) -> None:
        with pytest.raises(UsageError, match="--nproc-per-node"):
            parse_nproc(text, 2)

    def test_gpu_without_one_is_refused(self) -> None:
        with pytest.raises(UsageError, match="no GPU"):
            parse_nproc("gpu", 0)


class TestShown:
    @pytest.mark.parametrize(
        ("tee", "redirects", "local_ranks", "shown"),
        [
            (None, "0", "", Shown(frozenset({0}), frozenset({0}))),
            ("all", "0", "", Shown(EVERYONE, EVERYONE)),
            ("none", "0", "", Shown(NOBODY, NOBODY)),
            ("1,3", "0", "", Shown(frozenset({1, 3}), frozenset({1, 3}))),
            ("3", "0", "", Shown(EVERYONE, EVERYONE)),
            ("1", "0", "", Shown(EVERYONE, frozenset({0}))),
            ("2:3", "0", "", Shown(frozenset({0, 2}), frozenset({0, 2}))),
            (None, "3", "", Shown(NOBODY, NOBODY)),
            (None, "0:2", "", Shown(frozenset({0}), NOBODY)),
            ("1:1", "3", "", Shown(frozenset({1}), NOBODY)),
            (None, "0", "1,2", Shown(frozenset({1, 2}), frozenset({1, 2}))),
        ],
    )
    def test_forms(self, tee: str | None, redirects: str, local_ranks: str, shown: Shown) -> None:
        assert parse_shown(tee, redirects, local_ranks, nproc=4) == shown

    @pytest.mark.parametrize("tee", ["some", "1;2", "0:9", "4"])
    def test_other_forms_are_refused_by_name(self, tee: str) -> None:
        with pytest.raises(UsageError, match="--tee"):
            parse_shown(tee, "0", "", nproc=4)


class TestTarget:
    def test_a_script_that_can_be_read_is_fine(self, tmp_path: Path) -> None:
        script = tmp_path / "train.py"
        script.write_text("")
        check_target(Target("script", str(script)))

    @pytest.mark.parametrize(
        ("target", "says"),
        [
            (Target("script", "missing.py"), "does not exist"),
            (Target("script", "."), "is a directory"),
            (Target("module", "no_such_module_here.train"), "no_such_module_here"),
            (Target("program", "no-such-program-here"), "no-such-program-here"),
        ],
    )
    def test_what_cannot_start_is_refused_by_name(self, target: Target, says: str) -> None:
        with pytest.raises(UsageError, match=says):
            check_target(target)

    @pytest.mark.parametrize("name", ["pipe", "/dev/null", "/dev/fd/{fd}", "link", "function"])
    def test_what_only_one_worker_could_read_is_refused(self, name: str, tmp_path: Path) -> None:
        """Also where it is a file here: workers have a standard input of their own."""
        os.mkfifo(tmp_path / "pipe")
        (tmp_path / "train.py").write_text("def main(): pass\n")
        with (tmp_path / "train.py").open() as file:
            (tmp_path / "link").symlink_to(f"/dev/fd/{file.fileno()}")
            path = tmp_path / name.format(fd=file.fileno())
            target = Target("script", str(path))
            if name == "function":
                target = Target("function", f"{tmp_path / 'link'}:main")
            with pytest.raises(UsageError, match="each worker has to read it: write it into"):
                check_target(target)

    def test_modules_are_found_where_python_would_find_them(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "trainer.py").write_text("")
        monkeypatch.chdir(tmp_path)
        check_target(Target("module", "trainer"))
        check_target(Target("module", "json.tool"))

    def test_a_function_of_a_file_is_distinguished_from_a_file_of_that_name(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "train.py").write_text("def main(): pass\nfrom os import getcwd as where\n")
        (tmp_path / "odd.py:name").touch()
        monkeypatch.chdir(tmp_path)
        kinds = {
            name: target_of(name, (), module=False, program=False).kind
            for name in ("train.py", "train.py:main", "odd.py:name", "train.py:not-a-name")
        }
        assert list(kinds.values()) == ["script", "function", "script", "script"]
        for found in ("main", "where"):
            check_target(Target("function", f"train.py:{found}"))
        with pytest.raises(UsageError, match=r"train.py has no function mian; it defines main"):
            check_target(Target("function", "train.py:mian"))
        with pytest.raises(UsageError, match=r"gone.py does not exist"):
            check_target(Target("function", "gone.py:main"))


def test_only_a_rank_of_this_node_gets_its_standard_input() -> None:
    check_attached(3, nproc=2, nodes=2, node=1)
    check_attached(3, nproc=2, nodes=2, node=None)  # not known before they meet
    with pytest.raises(UsageError, match=r"--attach-stdin 4: the ranks are 0 to 3"):
        check_attached(4, nproc=2, nodes=2, node=1)
    with pytest.raises(UsageError, match=r"runs on node 0, and this is node 1: give the option th"):
        check_attached(1, nproc=2, nodes=2, node=1)
    shown = with_attached(Shown(frozenset({0}), frozenset()), 3, nproc=2)
    assert shown == Shown(frozenset({0, 1}), frozenset({1}))


def test_no_timeout_of_a_profile_holds_where_a_person_may_stop_a_rank() -> None:
    day = timedelta(days=1)
    short = {name: timedelta(minutes=1) for name in ("soft", "compile", "stop_grace")}
    assert settle.attended(short) == {"process_group": day, "stop_grace": timedelta(minutes=1)}
    timeouts = settle.settle(settle.attended(short))
    assert (timeouts.process_group, timeouts.steady) == (day, None)


@pytest.mark.parametrize("text", [None, "auto", "1", "10", "2%", "0.5%", "100%"])
def test_how_often_snapshots_are_taken(text: str | None) -> None:
    assert parse_snapshot_every(text) == text


@pytest.mark.parametrize("text", ["", "0", "-1", "often", "0%", "101%", "%", "1.5"])
def test_what_is_no_frequency_of_snapshots_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"--snapshot-every .*: give a number of steps, auto, or"):
        parse_snapshot_every(text)


def test_a_timeout_without_a_value_and_a_program_that_is_a_module_are_refused() -> None:
    with pytest.raises(UsageError, match="--timeout soft: write it as NAME=TIME"):
        parse_timeouts(["soft"])
    with pytest.raises(UsageError, match="--module and --no-python"):
        target_of("train", (), module=True, program=True)


def test_an_option_of_launch_behind_the_script_is_told() -> None:
    line = behind_the_script(Target("script", "t.py", ("--lr", "1", "--nproc_per_node=2")))
    assert line is not None
    assert line.startswith("--nproc_per_node stands behind t.py, which gets it: ")
    both = behind_the_script(Target("script", "t.py", ("--nproc-per-node", "2", "--rdzv-id=7")))
    assert both is not None
    assert both.startswith("--nproc-per-node, --rdzv-id stand behind t.py")
    own = ("--profile", "--nnodes", "2", "--restart", "nproc-per-node")
    assert behind_the_script(Target("script", "t.py", own)) is None


@pytest.mark.parametrize("text", ["\x7fELF\2\1\1\0", "#!/bin/bash\nset -e\ntrain | tee log\n"])
def test_a_program_is_no_script(tmp_path: Path, text: str) -> None:
    """It would fail on all ranks, as a mistake in a line of a script that nobody has written."""
    path = tmp_path / "train"
    path.write_text(text)
    with pytest.raises(UsageError, match="no Python script: start it with --no-python"):
        check_target(Target("script", str(path)))


@pytest.mark.parametrize(
    "text",
    [
        "print(1)\n",
        "def f(:\n",  # the run says where
        "#!/usr/bin/env python3\nprint(1)\n",
        "#!/opt/pypy/bin/pypy3\nprint(1)\n",
        "#!/bin/sh\n'''exec' /very/long/path/python \"$0\" \"$@\"\n' '''\nprint(1)\n",  # pip's
    ],
)
def test_what_python_reads_is_one_whatever_its_first_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "train"
    path.write_text(text)
    check_target(Target("script", str(path)))


def test_a_store_that_nobody_serves_yet_is_named_before_workers_wait_for_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        environ = {"NCCLOPS_STORE": f"127.0.0.1:{listener.getsockname()[1]}"}
        assert silent_store({}) is None
        assert silent_store(environ) is None
    said = silent_store(environ)
    assert said is not None
    assert f"NCCLOPS_STORE={environ['NCCLOPS_STORE']} yet (Connection refused)" in said


class TestNetworks:
    @pytest.mark.parametrize(
        "name",
        [
            *("ib", "RoCE", "socket", "plugin", "IB", "Socket", "gIB", "IBext_v8", "UCX"),
            *("AWS Libfabric", "FasTrak", "GPUDirectTCPX_v7", "Spectrum-X"),
        ],
    )
    def test_kinds_and_names_of_nccl_are_taken(self, name: str) -> None:
        check_networks([name], "--require-network")

    @pytest.mark.parametrize(
        ("name", "meant"),
        [
            *(("inifniband", "ib"), ("InfiniBand", "ib"), ("rcoe", "roce"), ("RoCEv2", "roce")),
            *(
                ("sockets", "socket"),
                ("TCP", "socket"),
                ("rdma", "ib or roce"),
                ("plugn", "plugin"),
            ),
        ],
    )
    def test_what_no_network_is_called_is_refused(self, name: str, meant: str) -> None:
        with pytest.raises(UsageError, match=f"--require-network {name}: did you mean {meant}[?]"):
            check_networks(["ib", name], "--require-network")

    def test_an_empty_name_is_refused(self) -> None:
        with pytest.raises(UsageError, match="--require-network: one of the names is empty"):
            check_networks(["ib", ""], "--require-network")

    def test_a_profile_is_looked_at_as_well(self, tmp_path: Path) -> None:
        lane = tmp_path / "mine.toml"
        lane.write_text(
            'extends = "local-cpu"\ndescription = "x"\n[network]\nexpect = ["infiniband"]\n'
        )
        request = LaunchRequest(target="-", program=True, profile=str(lane))
        with pytest.raises(UsageError, match=r"profile mine: network\.expect: infiniband: did you"):
            resolve(request, stdout_is_data=False)


class TestAllowedDifferences:
    @pytest.mark.parametrize(
        "name", ["torch", "driver branch", "clock", "NCCL_IB_HCA", "NCCL_OF_TOMORROW", "MY_PATH"]
    )
    def test_what_nodes_compare_is_taken(self, name: str) -> None:
        check_allowed([name], {"MY_PATH"})

    @pytest.mark.parametrize(
        ("name", "hint"),
        [
            *(("torhc", "did you mean torch"), ("NCLC_IB_HCA", "did you mean NCCL_IB_HCA")),
            *(("MY_PAHT", "did you mean MY_PATH"), ("colour", "they compare variables of the")),
        ],
    )
    def test_what_they_do_not_is_refused(self, name: str, hint: str) -> None:
        with pytest.raises(UsageError, match=f"--allow-difference {name}: nodes compare .*{hint}"):
            check_allowed([name], {"MY_PATH"})


def test_a_dry_run_refuses_an_address_that_is_none(tmp_path: Path) -> None:
    """What only a start found is found by `--dry-run` as well."""
    script = tmp_path / "train.py"
    script.write_text("")
    request = LaunchRequest(target=script, profile="local-cpu", control_listen="node:http")
    with pytest.raises(UsageError, match="--control-listen node:http: no address to listen on"):
        prepare(request)
