"""What can be linted: a file, an environment, what a profile makes of one."""

from __future__ import annotations

from codecs import BOM_UTF8
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ncclops.env.host import describe_host
from ncclops.env.lint.containers import problem_of_yaml
from ncclops.env.lint.jobs import features, node_count
from ncclops.env.lint.model import Circumstances, LintedSettings, Setting, under_profile
from ncclops.env.lint.notebook import code_of
from ncclops.env.lint.parse import FORMATS, Format, guess_format, read
from ncclops.env.origins import from_files
from ncclops.env.plan import Overrides, PlanContext, compute_plan
from ncclops.errors import UsageError
from ncclops.host.gpus import find_gpus
from ncclops.profiles.model import DEFAULT_RESTART_MODE, Profile
from ncclops.record.regular_file import advice, read_regular, read_stdin

Linted = tuple[LintedSettings, Circumstances]

# The longest launch script known has 100 kB, and the catalogue has some 2,000 names. A notebook
# holds the pictures that it has made.
_MOST_BYTES = 1 << 20
_MOST_OF_NOTEBOOK = 16 << 20
_MOST_NAMES = 10_000
# Stands for the run directory, which a plan that is only looked at does not have.
_FILL = {"run_dir": "/run-dir", "rank_dir": "/run-dir/ranks/0"}


@dataclass(frozen=True)
class LintedFile:
    """The text of a file (``-`` is standard input), what kind of file it is, and its bytes.

    The text is without the mark that editors on Windows write: with it, the first name would be
    another one.
    """

    name: str
    text: str
    kind: Format
    raw: bytes

    def encoded(self, text: str) -> bytes:
        """``text`` as bytes of this file."""
        return BOM_UTF8 * self.raw.startswith(BOM_UTF8) + text.encode()

    def settings(self, text: str, where: Circumstances) -> Linted:
        """What ``text`` sets as a file of this kind, and what it says about its job."""
        return _settings(self.name, text, self.kind, where)


def open_file(name: str, kind: str | None) -> LintedFile:
    """A file that is to be linted; raises ``UsageError`` as ``of_file`` does."""
    path = Path(name)
    chosen = next((known for known in FORMATS if known == kind), None)
    if kind is not None and chosen is None:
        raise UsageError(f"--format {kind}: choose {', '.join(FORMATS)}")
    raw = _read(name, path)
    text = raw.removeprefix(BOM_UTF8).decode(errors="replace")
    return LintedFile(name, text, chosen or guess_format(path, text), raw)


def of_file(name: str, kind: str | None, where: Circumstances) -> Linted:
    """A file (``-`` is standard input), and what it says about its job.

    Raises ``UsageError`` when it cannot be read, or is no text, no YAML where its name says so, or
    larger than any such file; and when ``kind`` is no format.
    """
    file = open_file(name, kind)
    return _settings(name, file.text, file.kind, where)


def _settings(name: str, text: str, format_: Format, where: Circumstances) -> Linted:
    if format_ == "yaml" and (problem := problem_of_yaml(text)):
        raise UsageError(f"{name}: cannot be read as YAML: {problem}; correct it, or say --format")
    if format_ not in ("dotenv", "conf"):
        code = code_of(text) if format_ == "notebook" else text
        nodes = where.nodes if format_ == "python" else where.nodes or node_count(code)
        where = replace(where, nodes=nodes, uses=where.uses | features(code))
    settings = read(text, format_, Path(name))
    if len({setting.name for setting in settings.all}) > _MOST_NAMES:
        raise UsageError(
            f"{name}: sets more than {_MOST_NAMES:,} variables: lint the part that a job reads"
        )
    return settings, where


def of_environ(environ: Mapping[str, str], where: Circumstances) -> Linted:
    """An environment on this host, with what NCCL adds from its configuration files."""
    effective = dict(environ) | {item.name: item.value for item in from_files(environ).values()}
    settings = LintedSettings(Setting(name, value) for name, value in effective.items())
    gpus = find_gpus(effective).count > 0
    return settings, replace(where, host=describe_host(effective), gpus=gpus)


def of_profile(profile: Profile, environ: Mapping[str, str], where: Circumstances) -> Linted:
    """What ``profile`` makes of ``environ`` on this host."""
    where = under_profile(profile, where)
    context = PlanContext(restart=where.restart or DEFAULT_RESTART_MODE, torch=where.torch)
    plan = compute_plan(profile, environ, Overrides(), context)
    return of_environ(plan.apply(environ, _FILL), where)


def _read(name: str, path: Path) -> bytes:
    most = _MOST_OF_NOTEBOOK if path.suffix == ".ipynb" else _MOST_BYTES
    try:
        raw = read_stdin(most) if name == "-" else read_regular(path, most)
    except IsADirectoryError:
        raise UsageError(f"{name} is a directory: name the files in it, as {name}/*.sh") from None
    except OSError as error:
        raise UsageError(f"{name}: cannot be read: {error.strerror}{advice(error)}") from None
    if b"\0" in raw:
        raise UsageError(
            f"{name}: cannot be read: it is not UTF-8 text; convert it (iconv -t UTF-8)"
        )
    return raw
