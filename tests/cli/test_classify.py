"""`ncclops classify` as a process: documents, exit codes, errors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ncclops.classify.model import CLASSES, RETRY_POLICIES
from tests.conftest import run_ncclops

pytestmark = pytest.mark.slow

XID = "[678.5] NVRM: Xid (PCI:0000:91:00): 79, pid=1, name=python, GPU has fallen off the bus.\n"
STEPS = "".join(f"step {i} loss 2.0 tok/s 900\n" for i in range(4))
OOM = STEPS + "[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"


def ncclops(*arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ncclops", "classify", *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=60,
    )


def document(*arguments: str, stdin: str | None = None) -> dict[str, Any]:
    done = ncclops(*arguments, "--json", stdin=stdin)
    assert done.returncode == 0, done.stderr
    loaded: dict[str, Any] = json.loads(done.stdout)
    return loaded


def test_the_json_document_is_as_promised(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text(OOM)
    found = document(str(log))
    assert found["schema"] == "ncclops.classify/1"
    verdict = found["verdict"]
    assert verdict["class"] == "gpu-oom" and verdict["class"] in CLASSES
    assert (verdict["signature"], verdict["rank"]) == ("gpu-out-of-memory", 3)
    assert 0 <= verdict["confidence"] <= 1
    assert verdict["retry"]["policy"] in RETRY_POLICIES
    assert (verdict["retry"]["eligible"], bool(verdict["retry"]["reason"])) == (False, True)
    assert all(isinstance(line, str) for line in verdict["remedy"])
    first = found["evidence"][0]
    assert (first["file"], first["line"], first["role"]) == (str(log), 5, "cause")
    assert "CUDA out of memory" in first["text"]
    stats = found["stats"]
    assert (stats["files"], stats["lines"], stats["bytes"]) == (1, 5, len(OOM))
    assert stats["seconds"] >= 0


def test_a_kernel_log_from_standard_input() -> None:
    found = document("-", stdin=XID)
    assert found["verdict"]["class"] == "gpu-hardware"
    assert found["verdict"]["retry"] == {
        "eligible": True,
        "policy": "replace-node",
        "reason": found["verdict"]["retry"]["reason"],
    }
    assert found["evidence"][0]["file"] == "-"


@pytest.mark.parametrize(
    ("log", "code"), [(STEPS, 0), (XID, 10), (OOM, 11), ("nothing to see\n", 12)]
)
def test_exit_codes(log: str, code: int) -> None:
    assert ncclops("-", stdin=log).returncode == 0
    assert ncclops("-", "--exit-code", stdin=log).returncode == code
    assert ncclops("-", "--exit-code", "--json", stdin=log).returncode == code


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("/no/such.log",), "cannot read /no/such.log: No such file or directory"),
        ((), "nothing to classify"),
        (("--explain", "no-net-plugn"), "did you mean no-net-plugin?"),
        (("--explain", "zzz"), "--list` shows them all"),
        (("--signatures", "/no/such", "-"), "no signatures in /no/such"),
        (("--jsn", "-"), "jsn"),
    ],
)
def test_wrong_use_is_one_line_and_exit_2(arguments: tuple[str, ...], complaint: str) -> None:
    done = ncclops(*arguments, stdin="")
    assert (done.returncode, done.stdout) == (2, "")
    assert complaint in done.stderr
    assert done.stderr.startswith("ncclops: error: ") and done.stderr.count("\n") == 1


def test_the_text_names_rank_line_retry_and_remedy(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text(OOM)
    done = ncclops(str(log))
    assert done.returncode == 0
    for part in ("gpu-oom: ", "rank 3", f"{log}:5", "not retried (fix-config)", "do:"):
        assert part in done.stdout
    assert "\x1b" not in done.stdout


def test_text_from_a_log_cannot_move_the_cursor(tmp_path: Path) -> None:
    log = tmp_path / "evil.log"
    log.write_bytes(b"\x9b2J\x07 CUDA out of memory \x08\x08 Tried to allocate\n")
    assert not set(ncclops(str(log)).stdout) & set("\x1b\x07\x08\x9b")


def test_list_and_explain() -> None:
    listed = ncclops("--list").stdout
    assert "no-net-plugin" in listed and "watchdog-collective-timeout" in listed
    explained = ncclops("--explain", "no-net-plugin").stdout
    for part in ("plugin-env", "fix-config", "matches, for example", "does not match"):
        assert part in explained
    everything = json.loads(ncclops("--list", "--json").stdout)
    assert everything["schema"] == "ncclops.signatures/1"
    assert {row["class"] for row in everything["signatures"]} == set(CLASSES) - {
        "no-failure-seen",
        "benign",
        "unknown",
    }


def test_a_sites_own_signatures(tmp_path: Path) -> None:
    (tmp_path / "site.toml").write_text(
        '[[signature]]\nid = "site"\nclass = "preempted"\nrole = "cause"\n'
        'literals = ["quota controller"]\nretry = "none"\nsummary = "quota"\nremedy = ["ask"]\n'
        'examples = ["quota controller ended the job"]\nnear_misses = ["quota ok"]\n'
    )
    found = document("--signatures", str(tmp_path), "-", stdin="quota controller ended the job\n")
    assert found["verdict"]["signature"] == "site"


def test_what_is_kept_from_call_to_call_changes_no_answer(tmp_path: Path) -> None:
    (tmp_path / "train.log").write_text(
        STEPS * 1000 + OOM
    )  # more than is searched without hyperscan
    answers, kept = [], tmp_path / "cache"
    for home in (kept, kept, Path("/proc/nowhere")):
        done = run_ncclops(
            tmp_path, "classify", "train.log", "--json", env={"XDG_CACHE_HOME": str(home)}
        )
        assert (done.returncode, done.stderr) == (0, "")
        found = json.loads(done.stdout)
        del found["stats"]["seconds"]
        answers.append(found)
    assert answers[0]["verdict"]["signature"] == "gpu-out-of-memory"
    assert answers[1:] == answers[:1] * 2
    assert [path.name.partition("-")[0] for path in sorted((kept / "ncclops").iterdir())] == [
        "literals",
        "signatures",
    ]


def test_neither_torch_nor_pydantic_is_loaded_by_the_engine() -> None:
    code = (
        "import sys, ncclops.classify.policy; from ncclops.classify import classify_bytes\n"
        "classify_bytes(b'CUDA out of memory')\n"
        "print(sorted({'torch', 'pydantic', 'rich', 'typer'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


def test_an_empty_log_is_called_empty(tmp_path: Path) -> None:
    (tmp_path / "empty.log").touch()
    assert document(str(tmp_path / "empty.log"))["verdict"]["summary"] == "the input is empty"
