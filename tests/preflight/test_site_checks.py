"""A site's own checks: read from its files, judged by how their commands end, told as any other."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from ncclops.preflight import hand_over, site_checks
from ncclops.preflight.catalogue import catalogue
from ncclops.preflight.machine import commands
from ncclops.preflight.model import NodeReport, Status
from ncclops.preflight.site_checks import ELSEWHERE, Ended, SiteCheck, concerning
from tests.conftest import LIMIT_S, CompletedText, clean_environ

slow = pytest.mark.slow
FILE = """\
[[check]]
id = "site.data"
wanted = "/data is mounted"
command = ["mountpoint", "/data"]
remedy = "mount it: systemctl start data.mount"
"""


def check(**more: Any) -> SiteCheck:
    given = {"id": "site.data", "wanted": "mounted", "command": ("sh",), "remedy": "mount it"}
    return SiteCheck(**(given | more))


def shell(script: str, **more: Any) -> SiteCheck:
    return check(command=("sh", "-c", script), **more)


def put(text: str, config: Path, name: str = "data") -> dict[str, str]:
    """``text`` as a file of the user's; the environment in which it counts."""
    directory = config / "ncclops" / "checks"
    directory.mkdir(parents=True, exist_ok=True)
    (directory / f"{name}.toml").write_text(text)
    return {"XDG_CONFIG_HOME": str(config)}


@pytest.mark.parametrize(
    ("ended", "more", "status", "read"),
    [
        (Ended(code=0, said="fine"), {}, "OK", "fine"),
        (Ended(code=0), {}, "OK", "sh exits with 0"),
        (Ended(code=1, said="not mounted"), {}, "FAIL", "not mounted"),
        (Ended(code=1), {"severity": "WARN"}, "WARN", "sh exits with 1"),
        (Ended(code=2), {"exits": {Status.WARN: (1, 2)}}, "WARN", "sh exits with 2"),
        (Ended(code=77), {"exits": {Status.CANNOT_TELL: (77,)}}, "CANNOT-TELL", "exits with 77"),
        (Ended(code=0), {"exits": {Status.FAIL: (0,), Status.OK: (1,)}}, "FAIL", "exits with 0"),
        (Ended(code=1), {"exits": {Status.FAIL: (0,), Status.OK: (1,)}}, "OK", "exits with 1"),
        (Ended(late=True), {"limit": "2s"}, "FAIL", "sh has not ended within 2s"),
        (Ended(late=True), {"severity": "WARN"}, "WARN", "sh has not ended within 15s"),
        (Ended(signal="SIGSEGV"), {}, "CANNOT-TELL", "sh was ended by SIGSEGV"),
        (Ended(problem="Permission denied"), {}, "WARN", "could not be run: Permission denied"),
        (Ended(code=127, said="x: not found"), {}, "WARN", "could not be run: x: not found"),
        (Ended(code=127), {"exits": {Status.FAIL: (127,)}}, "FAIL", "exits with 127"),
        (ELSEWHERE, {}, "CANNOT-TELL", "not run below another root"),
    ],
)
def test_how_a_command_ends_is_what_the_check_says(
    ended: Ended, more: dict[str, Any], status: str, read: str
) -> None:
    found = check(**more).judge(ended)
    assert (found.status, found.check, found.subject) == (status, "site.data", "host")
    assert read in found.read
    assert bool(found.remedy) == (status in ("WARN", "FAIL"))


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("[[check]]", "[[checks]]", "must hold [[check]] tables and nothing else"),
        ("[[check]]", "x = 1\n[[check]]", "must hold [[check]] tables and nothing else"),
        ("[[check]]", "[[check]", "is not valid TOML"),
        ("wanted", "wants", "check 'site.data': unknown key 'wants'; did you mean wanted?"),
        ('remedy = "mount it: systemctl start data.mount"', "", "remedy is missing"),
        ("site.data", "data", "id: write two or more words"),
        ("site.data", "host.shm", "id: ncclops has a check of this name"),
        ('["mountpoint", "/data"]', "[]", "command: write the program and its arguments"),
        ('["mountpoint", "/data"]', '"mountpoint /data"', "command: write a list of texts"),
        ('["mountpoint", "/data"]', "[1]", 'as in ["one", "two"], not [1]'),
        ('wanted = "/data is mounted"\n', "", "wanted is missing"),
        ('"/data is mounted"', "7", 'wanted: must be text: write it in quotes, as in "7"'),
        ("id =", 'severity = "BAD"\nid =', "severity: 'BAD' is neither WARN nor FAIL"),
        ("id =", 'exits = {WARN = "1"}\nid =', "exits: write a table of lists"),
        ("id =", "limit = 5\nid =", 'limit: must be text: write it in quotes, as in "5"'),
        ("remedy", 'limit = "1"\nremedy', "'1' is not a duration"),
        ("remedy", 'limit = "5m"\nremedy', "limit: 5m is not between 100ms and 30s"),
        ("remedy", "exits = { OK = [0, 300] }\nremedy", "exit codes from 0 to 255, each once"),
        ("remedy", "exits = { OK = [0], WARN = [0] }\nremedy", "each once"),
        ("remedy", "exits = { BAD = [1] }\nremedy", "exits: write a table of lists"),
        ("remedy", 'severity = "WARN"\nexits = { FAIL = [1] }\nremedy', "FAIL is graver than"),
        ("[[check]]", FILE + "[[check]]", "two checks have one id"),
    ],
)
def test_what_is_wrong_in_a_file_is_one_line_that_names_it(
    old: str,
    new: str,
    says: str,
    tmp_path: Path,
    ncclops_in_process: Callable[..., CompletedText],
) -> None:
    done = ncclops_in_process("preflight", env=put(FILE.replace(old, new, 1), tmp_path))
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "ncclops/checks/data.toml" in line
    assert says in line


def test_all_that_is_wrong_in_all_files_is_told_at_once(
    tmp_path: Path, ncclops_in_process: Callable[..., CompletedText]
) -> None:
    put(FILE.replace("id =", 'limit = "9m"\nseverity = "fail"\nwhen = 1\nid ='), tmp_path)
    put("[[check]\n", tmp_path, "more")
    env = put(FILE + FILE.replace("remedy", "remdy"), tmp_path, "third")
    done = ncclops_in_process("preflight", env=env)
    assert done.returncode == 2
    expected = [
        "data.toml: check 'site.data': unknown key 'when'; known: id, wanted,",
        "data.toml: check 'site.data': limit: 9m is not between 100ms and 30s",
        "data.toml: check 'site.data': severity: 'fail' is neither WARN nor FAIL; did you mean",
        "more.toml is not valid TOML",
        "third.toml: check 'site.data': unknown key 'remdy'; did you mean remedy?",
        "third.toml: check 'site.data': two checks have one id",
    ]
    lines = done.stderr.splitlines()
    assert len(lines) == len(expected)
    for line, says in zip(lines, expected, strict=True):
        assert line.startswith("ncclops: error: ")
        assert says in line


def test_the_users_check_replaces_its_namesake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_site = tmp_path / "site"
    of_site.mkdir()
    second = FILE.replace("site.data", "site.scratch")
    (of_site / "all.toml").write_text(FILE + second)
    monkeypatch.setattr(site_checks, "SITE", of_site)
    (name, place), *_ = put(FILE.replace("/data", "/home"), tmp_path).items()
    monkeypatch.setenv(name, place)
    found = {each.id: each.command[1] for each in site_checks.standing_checks()}
    assert found == {"site.data": "/home", "site.scratch": "/data"}


@pytest.mark.parametrize(
    ("lanes", "sources", "counts"),
    [
        ((), [], True),
        ((), ["/p/local-cpu.toml"], True),
        (("multi-host-*",), [], False),
        (("multi-host-*",), ["/p/base.toml", "/p/multi-host-h200.toml"], True),
        (("multi-host-h200",), ["/p/multi-host-h200.toml", "./ours.toml"], True),
        (("single-node-*", "ours"), ["/p/multi-host-h200.toml"], False),
    ],
)
def test_a_check_is_about_lanes_and_what_extends_them(
    lanes: tuple[str, ...], sources: list[str], counts: bool
) -> None:
    assert bool(concerning([check(lanes=lanes)], sources)) == counts


def test_the_name_of_a_sites_check_can_be_misspelt(
    tmp_path: Path, ncclops_in_process: Callable[..., CompletedText]
) -> None:
    done = ncclops_in_process("preflight", "--skip", "site.dat", env=put(FILE, tmp_path))
    assert (done.returncode, "did you mean site.data?" in done.stderr) == (2, True)


@slow
def test_commands_end_as_they_end_and_leave_nothing(tmp_path: Path) -> None:
    """Side by side: what ends, what fails, what cannot be started, what floods, what hangs."""
    own_session = f"import os,time; os.setsid(); open({str(tmp_path / 'pid')!r},'w').write(str("
    own_session += "os.getpid())); time.sleep(600)"
    (tmp_path / "escape.py").write_text(own_session)
    ends = [
        (shell("echo; echo ' data is here '; echo more"), Ended(code=0, said="data is here")),
        (shell("echo no >&2; exit 3"), Ended(code=3, said="no")),
        (shell('echo "$SITE"; exit 3'), Ended(code=3, said="eu-1")),
        (shell("cat"), Ended(code=0)),  # there is nothing to read
        (shell("kill -SEGV $$"), Ended(signal="SIGSEGV")),
        (check(command=(f"{tmp_path}/none",)), Ended(problem="No such file or directory")),
        (shell("sleep 600 & echo left; exit 1"), Ended(code=1, said="left")),
        (shell("echo y; yes & exit 1"), Ended(code=1, said="y")),
        (shell("yes", limit="500ms"), Ended(late=True)),
        (shell("trap '' TERM; sleep 600 & wait", limit="500ms"), Ended(late=True)),
        (shell(f"{sys.executable} {tmp_path}/escape.py", limit="15s"), Ended(late=True)),
    ]
    found = commands.run([each for each, _ in ends], {**os.environ, "SITE": "eu-1"})
    assert found == [ended for _, ended in ends]
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


@slow
def test_a_command_ends_with_the_preflight_that_runs_it(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    text = FILE.replace('["mountpoint", "/data"]', f'["sh", "-c", "echo $$ >{pid}; sleep 600"]')
    environ = clean_environ(put(text + 'limit = "30s"', tmp_path))
    command = [sys.executable, "-m", "ncclops", "preflight", "--window=10ms"]
    process = subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL, cwd=tmp_path)
    deadline = time.monotonic() + LIMIT_S
    while not (pid.exists() and pid.read_text().strip()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    with suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            os.kill(int(pid.read_text()), 0)
            time.sleep(0.05)
        pytest.fail("the command runs on")


@pytest.fixture
def failing(tmp_path: Path) -> dict[str, str]:
    """A site whose check fails, and a lane that has no other."""
    text = FILE.replace('["mountpoint", "/data"]', '["sh", "-c", "echo /data is gone; exit 1"]')
    others = '[[check]]\nid = "site.other"\nwanted = "x"\ncommand = ["false"]\nremedy = "y"\n'
    environ = put(text + others + 'lanes = ["multi-host-*"]\n', tmp_path)
    lanes = tmp_path / "ncclops" / "profiles"
    lanes.mkdir()
    for name, more in (("ours", []), ("spared", ["site.data"])):
        (lanes / f"{name}.toml").write_text(
            f'extends = "local-cpu"\ndescription = "x"\n'
            f"[preflight]\nignore = {json.dumps([*catalogue(), *more])}\n"
        )
    return environ


def test_it_is_told_as_any_other_check() -> None:
    finding = check().judge(Ended(code=1, said="/data is gone"))
    report = NodeReport(host="n1", time=0.0, findings=(finding,))
    (told,) = hand_over.document([report])["hosts"][0]["findings"]
    assert (told["check"], told["status"]) == ("site.data", "FAIL")
    assert "site.data host: /data is gone" in hand_over.reason(report.findings)
    gauge = b'ncclops_preflight_check{check="site.data",host="n1",subject="host"} 3.0'
    assert gauge in hand_over.prometheus([report])


@slow
def test_a_node_on_which_it_fails_is_left_out(
    tmp_path: Path, ncclops: Callable[..., CompletedText], failing: dict[str, str]
) -> None:
    once = ("preflight", "--window=10ms", "--node-name=n1", "--exclude-file=bad", "--profile")
    done = ncclops(*once, "ours", env=failing)
    assert done.returncode == 3
    head, row, remedy = done.stdout.splitlines()
    assert head.startswith("host n1: 1 FAIL (")
    assert row == "FAIL  site.data  host  /data is gone (wanted: /data is mounted)"
    assert remedy.endswith("-> mount it: systemctl start data.mount")
    assert (tmp_path / "bad").read_text() == "n1\n"
    assert ncclops(*once, "spared", env=failing).returncode == 0
    assert (tmp_path / "bad").read_text() == ""


@slow
def test_nothing_starts_where_it_fails(
    tmp_path: Path, ncclops: Callable[..., CompletedText], failing: dict[str, str]
) -> None:
    (tmp_path / "train.py").write_text("print('trained')\n")
    once = ("launch", "--nproc-per-node=1", "--restart=none", "--preflight=host", "train.py")
    done = ncclops(*once, env=failing | {"NCCLOPS_PROFILE": "ours"})
    assert (done.returncode, "trained" in done.stdout) == (3, False)
    assert "not fit for the job: site.data host: /data is gone" in done.stderr
