"""What all tests share: the command line, in a separate process or in this one."""

from __future__ import annotations

import io
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, settings

import ncclops as ncclops_package
from ncclops.cli import main
from ncclops.testing._processes import free_port as free_port

if TYPE_CHECKING:
    from tests.lanes import LaneProcess

# An installed package registers the second itself; a checkout that is only on the path does not.
pytest_plugins = [
    "tests.fast_tier",
    "ncclops.testing.plugin",
    "tests.fakegpu.fixtures",
    "tests.lanes",
]

REPOSITORY = Path(__file__).parent.parent
# Nothing in the suite takes this long; a test that hangs should fail with its output instead.
LIMIT_S = 120

# How long an example takes is the machine's affair, and no property of the code. Each run draws
# other examples.
settings.register_profile(
    "gate", max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("extended", settings.get_profile("gate"), max_examples=200)

# A shell that runs the suite in the background has it ignore these; the programs under test would
# inherit that, and leave a Ctrl-C alone as they should then.
for ignored in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(ignored) is signal.SIG_IGN:
        signal.signal(ignored, signal.SIG_DFL)

CompletedText = subprocess.CompletedProcess[str]


@pytest.hookimpl(trylast=True)  # once there is something that writes to the terminal
def pytest_configure(config: pytest.Config) -> None:
    """Before tests are imported: what they say of their own examples is added to it."""
    settings.load_profile("extended" if config.getoption("--extended") else "gate")
    if (terminal := config.pluginmanager.get_plugin("terminalreporter")) is not None:
        config.pluginmanager.register(_FailuresAtOnce(terminal))


class _FailuresAtOnce:
    """Names each failure when it happens: a run that is cut off shows no summary."""

    def __init__(self, terminal: pytest.TerminalReporter) -> None:
        self._terminal = terminal

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._terminal.write_line(f"\nfailed: {report.nodeid} ({report.when})")


def clean_environ(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment, without what a profile has a say in, plus ``extra``."""
    spared = ("NCCL_", "TORCH_", "TORCHELASTIC_", "NCCLOPS_", "GLOO_", "OMP_", "CUDA_")
    kept = {"NCCLOPS_STORE_RELAY"}  # with which all tests can be run
    environ = {k: v for k, v in os.environ.items() if not k.startswith(spared) or k in kept}
    # The package under test, wherever a test's process has its current directory.
    package = str(Path(ncclops_package.__file__).parent.parent)
    environ["PYTHONPATH"] = os.pathsep.join([package, *filter(None, [environ.get("PYTHONPATH")])])
    return environ | dict(extra or {})


def run_ncclops(
    directory: Path,
    *arguments: str | Path,
    env: Mapping[str, str] | None = None,
    python: str | Path = sys.executable,
    limit_s: float = LIMIT_S,
) -> CompletedText:
    """The command line in ``directory``; for fixtures that several tests share."""
    return subprocess.run(
        [python, "-m", "ncclops", *map(str, arguments)],
        cwd=directory,
        env=clean_environ(env),
        capture_output=True,
        text=True,
        timeout=limit_s,
    )


@pytest.fixture
def ncclops(
    starts_processes: None, tmp_path: Path, lane_process: LaneProcess
) -> Callable[..., CompletedText]:
    """``ncclops("launch", ..., env={...})`` runs the command line in ``tmp_path``, on the lane."""

    def run(
        *arguments: str | Path, env: Mapping[str, str] | None = None, **more: Any
    ) -> CompletedText:
        environment = lane_process.environment | dict(env or {})
        return run_ncclops(
            tmp_path, *arguments, env=environment, python=lane_process.python, **more
        )

    return run


@pytest.fixture
def ncclops_in_process(tmp_path: Path) -> Callable[..., CompletedText]:
    """Like ``ncclops``, without a process: for commands that read, compute and print.

    The same entry point, arguments, environment and current directory, and what it wrote on its two
    streams; a fault that it does not handle comes out as itself. Not for what a process is part of:
    signals, imports, start-up time, closed streams, or a command that starts workers.
    """

    def run(*arguments: str | Path, env: Mapping[str, str] | None = None) -> CompletedText:
        command = ["ncclops", *map(str, arguments)]
        stdout, stderr = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2))
        with (
            chdir(tmp_path),
            mock.patch.dict(os.environ, clean_environ(env), clear=True),
            mock.patch.object(sys, "argv", command),
            redirect_stdout(stdout),
            redirect_stderr(stderr),
            _logging_restored(),
        ):
            try:
                main()
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else int(end.code is not None)
        return subprocess.CompletedProcess(command, code, _written(stdout), _written(stderr))

    return run


@pytest.fixture(autouse=True, scope="session")
def _cache_of_our_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What commands keep for the next call stays out of the home directory of who runs the tests.

    A test finds there what another one has left, as a user's call does.
    """
    with mock.patch.dict(os.environ, XDG_CACHE_HOME=str(tmp_path_factory.mktemp("cache"))):
        yield


@pytest.fixture(scope="session")
def nvml_stub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for LD_LIBRARY_PATH with a libnvidia-ml.so.1 that obeys NVML_STUB_* variables.

    For processes that a test starts: a process loads the library once.
    """
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler to build the NVML stand-in with")
    folder = tmp_path_factory.mktemp("nvml")
    source = Path(__file__).parent / "restart" / "nvml_stub.c"
    library = folder / "libnvidia-ml.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True, timeout=120)
    return folder


@pytest.fixture
def with_nvml(nvml_stub: Path) -> Callable[..., Any]:
    """``with_nvml(program, *arguments, NVML_STUB_…=…)``: what ``program`` prints as JSON there."""

    def run(program: str, *arguments: str | Path, **variables: str) -> Any:
        done = subprocess.run(
            [sys.executable, "-c", program, *map(str, arguments)],
            env=clean_environ({"LD_LIBRARY_PATH": str(nvml_stub), **variables}),
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


def _written(stream: io.TextIOWrapper) -> str:
    stream.seek(0)
    return stream.read()


@contextmanager
def full_pipe() -> Iterator[int]:
    """The end for writing of a pipe that takes nothing more, and that nobody reads meanwhile."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with suppress(BlockingIOError):
        while os.write(writer, b"x" * 4096):
            pass
    os.set_blocking(writer, True)
    try:
        yield writer
    finally:
        os.close(reader)  # first: who waits for it goes on
        os.close(writer)


@contextmanager
def _logging_restored() -> Iterator[None]:
    # The command line says what is logged and where; the streams it writes to end with the call.
    loggers = [logging.getLogger(), logging.getLogger("ncclops")]
    before = [(logger.level, logger.handlers[:], logger.propagate) for logger in loggers]
    try:
        yield
    finally:
        for logger, (level, handlers, propagate) in zip(loggers, before, strict=True):
            logger.setLevel(level)
            logger.handlers[:] = handlers
            logger.propagate = propagate
