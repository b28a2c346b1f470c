"""Files that are handed over to be linted, and are not what they should be: one line says so."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ncclops.env.lint import Circumstances, lint
from ncclops.env.lint.inputs import of_file, open_file
from ncclops.errors import UsageError

MANIFEST = "env:\n- name: NCCL_DEBUG\n  value: INFO\n"


def linted(path: Path, kind: str | None = None) -> dict[str, str | None]:
    settings, _ = of_file(str(path), kind, Circumstances())
    return {setting.name: setting.value for setting in settings.all}


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("utf16.yaml", MANIFEST.encode("utf-16"), "it is not UTF-8 text"),
        ("utf16.sh", "export A=1\n".encode("utf-16"), "it is not UTF-8 text"),
        ("mapping.yaml", b"a: b: c\n", "line 1: mapping values are not allowed"),
        ("indented.yaml", b"env:\n  - name: A\n   value: x\n", "cannot be read as YAML: line 3"),
        ("open.yaml", b"args: [a, b\n", "cannot be read as YAML: line 2"),
        ("flow.yaml", b"[" * 500_000, "nested more than 100 levels deep"),
        ("block.yaml", b"- " * 500_000, "nested more than 100 levels deep"),
        ("tags.yaml", b"%TAG !a! b\n" * 50_000, "more than 100 %TAG directives"),
        ("large.sh", b"export A=1\n" * 100_000, "larger than 1 MiB"),
        ("many.sh", b"".join(b"export A%d=1\n" % n for n in range(10_001)), "10,000 variables"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_linted(tmp_path: Path, name: str, content: bytes, complaint: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=complaint) as told:
        linted(tmp_path / name)
    assert str(tmp_path / name) in str(told.value)
    assert "\n" not in str(told.value)


def test_the_mark_that_editors_on_windows_write_is_no_part_of_a_name(tmp_path: Path) -> None:
    path = tmp_path / "job.env"
    path.write_bytes("NCCL_DEBUG=INFO\r\nNCCL_NET=IB\r\n".encode("utf-8-sig"))
    assert linted(path) == {"NCCL_DEBUG": "INFO", "NCCL_NET": "IB"}
    file = open_file(str(path), None)
    assert file.encoded(file.text) == file.raw


def test_of_a_directory_the_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"is a directory: name the files in it, as .*/\*\.sh$"):
        linted(tmp_path)


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.sh")
    for path in (tmp_path / "pipe.sh", Path("/dev/zero")):
        with pytest.raises(UsageError, match="it is no regular file; pipe it into"):
            linted(path)


@pytest.mark.parametrize(
    "content",
    [
        MANIFEST,
        f"{{{{- if .Values.debug }}}}\n{MANIFEST}{{{{- end }}}}\n",
        f"%TAG !s! tag:site,2026:\n---\n{MANIFEST}own: !s!x &a [1]\n---\nanother: document\n",
    ],
    ids=["plain", "template", "tags"],
)
def test_manifests_and_their_templates_are_read(tmp_path: Path, content: str) -> None:
    (tmp_path / "job.yaml").write_text(content)
    assert linted(tmp_path / "job.yaml") == {"NCCL_DEBUG": "INFO"}


_MANY = "".join(f"  NCCL_A{number}: x\n" for number in range(5000))
_SCRIPT = "export NCCL_DEBUG=x; " * 10_000


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "content",
    [
        "x:\n  env: &a\n" + "  - NCCL_DEBUG=x\n" * 10_000 + "y:\n" + "- env: *a\n" * 10_000,
        f"x: &a\n{_MANY}y:\n" + "- env: *a\n" * 10_000,
        f"x: &a\n{_MANY}y:\n" + "- <<: *a\n" * 10_000,
        f"x: &a\n{_MANY}y: {{<<: [" + "*a ," * 25_000 + "]}\n",
        f"x: &a\n{_MANY}env:\n" + "- *a\n" * 10_000,
        f'x:\n- &a "{_SCRIPT}"\n' + "- *a\n" * 10_000,
        f'x: &a "{_SCRIPT}"\nenv: [' + "*a ," * 25_000 + "]\n",
        "env:\n" + "- NCCL_DEBUG=x\n" * 5_000 + "".join(f'k{n}: "A= b"\n' for n in range(3000)),
    ],
    ids=["sequence", "mapping", "merged", "merged-list", "entries", "script", "items", "commands"],
)
def test_what_aliases_repeat_has_an_end(tmp_path: Path, content: str) -> None:
    """A megabyte, four times this, took hours, and a hundred gigabytes of memory."""
    (tmp_path / "job.yaml").write_text(content)
    linted(tmp_path / "job.yaml")


def test_a_number_of_thousands_of_digits_is_no_value(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(f'os.environ["NCCL_NTHREADS"] = str(0x{"f" * 5000})\n')
    assert linted(tmp_path / "job.py") == {"NCCL_NTHREADS": None}


def test_a_python_file_shows_what_it_uses(tmp_path: Path) -> None:
    path = tmp_path / "t.py"
    path.write_text("os.environ['NCCL_MIN_NCHANNELS'] = '112'\n")
    for line, told in (("", True), ("import rocm_kernels\n", False)):
        path.write_text(path.read_text() + line)
        settings, where = of_file(str(path), None, Circumstances())
        assert ("min-above-max-channels" in {f.rule for f in lint(settings, where)}) is told
