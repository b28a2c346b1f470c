"""The command line as a whole: quick, light, and polite when used wrongly."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ncclops import cli
from ncclops.cli import _options
from ncclops.cli._commands import COMMANDS
from ncclops.cli._exit_codes import TABLE, as_markdown
from ncclops.errors import EXIT_INTERNAL_ERROR, EXIT_INTERRUPTED, NcclopsError
from tests.conftest import REPOSITORY, CompletedText, clean_environ

Ncclops = Callable[..., CompletedText]

# Modules whose import would be felt on every command.
HEAVY = (
    "torch",
    "pydantic",
    "rich",
    "numpy",
    "pynvml",
    "asyncio",
    "hyperscan",
    "logging",
    "msgspec",
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("statement", "allowed"),
    [
        ("import ncclops", ()),
        ("import ncclops.cli", ()),
        ("import ncclops.env", ("msgspec",)),
        ("import ncclops.profiles", ("pydantic",)),
        ("import ncclops.classify", ()),
        ("import ncclops.receipts, ncclops.receipt", ()),
        ("import sys; sys.argv = ['ncclops', '--version']; import ncclops.cli as c; c.app()", ()),
        ("import sys; sys.argv = ['ncclops', '--help']; import ncclops.cli as c; c.app()", ()),
        (
            "import sys; sys.argv = ['ncclops', 'launch', '-h']; import ncclops.cli as c; c.app()",
            (),
        ),
        (
            "import sys; sys.argv = ['ncclops', 'classify', '/dev/null'];"
            "import ncclops.cli as c; c.app()",
            ("logging",),
        ),
        (
            "import sys; sys.argv = ['ncclops', 'launch', '--dry-run', '/dev/null'];"
            "import ncclops.cli as c; c.app()",
            ("pydantic", "rich", "pynvml", "logging", "msgspec"),
        ),
    ],
)
def test_nothing_heavy_is_imported(statement: str, allowed: tuple[str, ...]) -> None:
    """torch never; the rest only where a command needs it."""
    program = (
        f"import atexit, json, sys\n"
        f"report = lambda: print('LOADED', json.dumps(sorted(sys.modules)), file=sys.stderr)\n"
        f"atexit.register(report)\n"
        f"{statement}\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=clean_environ(), capture_output=True, text=True
    )
    loaded = set(json.loads(done.stderr.rpartition("LOADED")[2]))
    assert loaded & set(HEAVY) <= set(allowed)


def test_version_and_module_entry(ncclops: Ncclops) -> None:
    from ncclops import __version__

    assert ncclops("--version").stdout == f"ncclops {__version__}\n"


def test_help_groups_the_commands(ncclops_in_process: Ncclops) -> None:
    for arguments in ((), ("--help",), ("-h",)):
        done = ncclops_in_process(*arguments)
        assert done.returncode == 0
        panels = {
            lines[0]: [line.split()[0] for line in lines[1:]]
            for lines in (part.splitlines() for part in done.stdout.split("\n\n"))
            if lines[0] in ("Run:", "Diagnose:", "Environment:")
        }
        assert list(panels) == ["Run:", "Diagnose:", "Environment:"]
        assert "launch" in panels["Run:"]
        assert {"classify", "receipt", "stacks"} <= {*panels["Diagnose:"]}
        assert panels["Environment:"] == ["env", "advise", "profile"]


def test_every_command_of_the_table_can_be_loaded(ncclops_in_process: Ncclops) -> None:
    for command in COMMANDS:
        done = ncclops_in_process(command.name, "--help")
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(f"Usage: ncclops {command.name} ")


def test_a_group_without_a_command_shows_its_help(ncclops_in_process: Ncclops) -> None:
    for group in ("env", "flight", "notify", "profile", "receipt", "store"):
        bare, asked = ncclops_in_process(group), ncclops_in_process(group, "--help")
        assert (bare.returncode, bare.stderr, bare.stdout) == (0, "", asked.stdout)


def test_a_former_spelling_works_and_is_not_shown(ncclops_in_process: Ncclops) -> None:
    assert "where" not in ncclops_in_process("--help").stdout.split()
    now, before = (ncclops_in_process(name, "--limit", "5") for name in ("stacks", "where"))
    assert (now.returncode, now.stderr) == (before.returncode, before.stderr)
    assert "--limit 5: " in now.stderr


@pytest.mark.parametrize("arguments", [["lunch"], ["--bogus"], ["env", "dif"], ["launch"]])
def test_wrong_usage_is_one_line_and_exit_2(
    arguments: list[str], ncclops_in_process: Ncclops
) -> None:
    done = ncclops_in_process(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("ncclops: error: ")


@pytest.mark.parametrize(
    "arguments",
    [
        *(
            [*command, "a" * 100_000]
            for command in (
                ["status"],
                ["bundle"],
                ["stop"],
                ["classify"],
                ["receipt", "check"],
                ["flight", "analyze"],
                ["preflight", "--root"],
                ["launch"],
            )
        ),
        ["preflight", "--path", "/tmp/\udcff"],
        ["env", "exec", "-p", "local-cpu", ""],
    ],
    ids=lambda arguments: " ".join(arguments)[:20],
)
def test_a_name_that_no_file_has_is_one_line_and_exit_2(
    arguments: list[str], ncclops_in_process: Ncclops
) -> None:
    done = ncclops_in_process(*arguments)
    assert done.returncode == 2, done.stderr
    errors = [line for line in done.stderr.splitlines() if "ncclops: error: " in line]
    assert len(errors) == 1 and len(errors[0]) < 300


@pytest.mark.parametrize("columns", ["²", "-1", "9" * 5000])
def test_a_width_that_is_none_is_passed_over(columns: str, ncclops: Ncclops) -> None:
    done = ncclops("env", "explain", "NCCL_DEBUG", env={"COLUMNS": columns})
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("arguments", "suggestion"),
    [
        (["lanch"], "did you mean launch?"),
        (["receipt", "chek"], "ncclops receipt has no command 'chek': did you mean check?"),
        (["receipt", "runs/a"], "has no command 'runs/a': it has check, compare"),
        (["env", "export", "--format", "jsn"], "choose sh, dotenv or json; did you mean json?"),
        (["launch", "--restart", "in_process", "x.py"], "did you mean in-process?"),
        (
            ["launch", "--restrat", "none"],
            "launch has no option --restrat: did you mean --restart?",
        ),
        (
            ["preflight", "--ignore", "x"],
            "no option --ignore: `ncclops preflight --help` lists all",
        ),
        (["launch"], "Missing argument 'SCRIPT': `ncclops launch --help` shows how it is used"),
        (
            ["launch", "--master-port", "x", "a.py"],
            "is not a whole number from 1 to 65535: `ncclops launch --help` shows how it is used",
        ),
        (
            ["incident", "runs/a", "last"],
            "'last' is not a whole number: `ncclops incident --help` shows how it is used",
        ),
    ],
)
def test_a_mistyped_word_is_answered_with_the_right_one(
    arguments: list[str], suggestion: str, ncclops_in_process: Ncclops
) -> None:
    done = ncclops_in_process(*arguments)
    assert done.returncode == 2
    assert done.stderr.endswith(suggestion + "\n")


def test_the_table_of_exit_codes_in_the_contracts_is_the_one_in_the_code() -> None:
    assert as_markdown() in (REPOSITORY / "docs" / "contracts.md").read_text()


def test_every_error_has_its_exit_code_in_the_table() -> None:
    def below(kind: type[NcclopsError]) -> set[type[NcclopsError]]:
        return {kind}.union(*map(below, kind.__subclasses__()))

    own = {each.exit_code for each in below(NcclopsError)} - {0, 1, 2}
    for code in {*own, EXIT_INTERNAL_ERROR, EXIT_INTERRUPTED}:
        assert any(re.search(rf"\b{code}\b", row.others) for row in TABLE), code


def test_quiet_leaves_remarks_out_and_the_answer_in(ncclops_in_process: Ncclops) -> None:
    usual = ncclops_in_process("env", "diff", "--json")
    assert usual.stderr.startswith("ncclops: profile ")
    for arguments in (["-q", "env", "diff", "--json"], ["env", "diff", "-q", "--json"]):
        quiet = ncclops_in_process(*arguments)
        assert (quiet.stderr, quiet.stdout) == ("", usual.stdout)
    by_environment = ncclops_in_process("env", "diff", "--json", env={"NCCLOPS_VERBOSE": "-1"})
    assert by_environment.stderr == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], ["warning", "error"]),
        (["-q"], ["warning", "error"]),
        (["-v"], ["info", "warning", "error"]),
        (["-vv"], ["debug", "info", "warning", "error"]),
    ],
)
def test_what_is_logged_goes_to_stderr_from_the_level_that_was_asked_for(
    options: list[str], said: list[str]
) -> None:
    program = (
        "import logging, sys, ncclops.cli as c; c.run(sys.argv[1:]);"
        "log = logging.getLogger('ncclops.part');"
        "[log.log(level, 'words') for level in (10, 20, 30, 40)]"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "profile", "list", *options],
        env=clean_environ(),
        capture_output=True,
        text=True,
    )
    assert done.stderr.splitlines() == [f"ncclops: {level}: ncclops.part: words" for level in said]


@pytest.mark.slow
def test_a_fault_of_our_own_is_one_line_and_its_traceback_a_file(tmp_path: Path) -> None:
    program = (
        "import sys; from ncclops import cli; from ncclops.cli import _commands;"
        "_commands.COMMANDS += (_commands.Command('broken', 'Run', '', 'missing_module:broken'),);"
        "sys.exit(cli.run(sys.argv[1:]))"
    )

    def run(*arguments: str) -> CompletedText:
        return subprocess.run(
            [sys.executable, "-c", program, *arguments],
            env=clean_environ({"TMPDIR": str(tmp_path)}),
            capture_output=True,
            text=True,
        )

    done = run("broken")
    assert (done.returncode, done.stdout) == (EXIT_INTERNAL_ERROR, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("ncclops: error: internal error: ModuleNotFoundError: ")
    (log,) = tmp_path.iterdir()
    assert str(log) in line
    assert "Traceback (most recent call last)" in log.read_text()
    assert "Traceback (most recent call last)" in run("-v", "broken").stderr


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("can't start new thread")])
def test_what_the_machine_lacks_is_no_fault_of_our_own(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def app(*_: object, **__: object) -> int:
        raise error

    monkeypatch.setattr(cli, "app", app)
    assert cli.run(["profile", "list"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("ncclops: error: ") and "internal" not in line
    assert "memory" in line


@pytest.mark.slow
def test_a_full_disk_is_one_line(tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "ncclops", "profile", "list"],
            env=clean_environ(),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert done.returncode == 1
    assert done.stderr == (
        "ncclops: error: cannot write standard output: No space left on device\n"
    )


@pytest.mark.slow
def test_a_directory_that_was_removed_or_may_not_be_read_is_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ncclops", "profile", "list"]
    gone, home = tmp_path / "gone", tmp_path / "home"
    (home / ".config/ncclops/profiles").mkdir(parents=True)
    (home / ".config/ncclops").chmod(0)
    without_rights = []
    if os.geteuid() == 0:
        if shutil.which("setpriv") is None:
            pytest.skip("needs setpriv")
        without_rights = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"]
    nowhere = ["sh", "-c", 'mkdir "$0"; cd "$0"; rmdir "$0"; exec "$@"', str(gone)]
    for prefix, said in (
        (nowhere, "the current directory has been removed: change to one that exists"),
        (without_rights, "check its mode and its owner"),
    ):
        done = subprocess.run(
            [*prefix, *command],
            env=clean_environ({"HOME": str(home)}),
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 2, done.stderr
        assert said in done.stderr and done.stderr.count("\n") == 1


def test_completion_installs_and_completes(ncclops: Ncclops, tmp_path: Path) -> None:
    # There is no shell to detect above a test, so it is named.
    home = {"HOME": str(tmp_path), "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    done = ncclops("--install-completion", "bash", env=home)
    assert done.returncode == 0, done.stderr
    assert "ncclops" in (tmp_path / ".bashrc").read_text()
    asked = {"_NCCLOPS_COMPLETE": "complete_bash", "COMP_WORDS": "ncclops la", "COMP_CWORD": "1"}
    assert ncclops(env=asked).stdout.split() == ["launch"]
    asked |= {"COMP_WORDS": "ncclops launch --profile single", "COMP_CWORD": "3"}
    assert ncclops(env=asked).stdout.split() == ["single-node-h200"]


def test_names_of_profiles_are_completed() -> None:
    assert _options.profile_names("compile") == ["compile-sensitive"]
    assert "single-node-h200" in _options.profile_names("")
    assert _options.profile_names("./prof") == []  # the shell's own completion of files


def test_a_reader_that_leaves_is_no_error_worth_a_traceback(ncclops: Ncclops) -> None:
    done = subprocess.run(
        f"{sys.executable} -m ncclops profile list | true",
        shell=True,
        env=clean_environ(),
        capture_output=True,
        text=True,
    )
    assert "Traceback" not in done.stderr
