"""An advisory concerns a job only where all its conditions are known to hold."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ncclops.advisories import Case, advisories, concerning, in_a_line
from ncclops.advisories.table import read
from ncclops.host.software import Plugin, Software

H200 = Software(
    torch="2.13.1+cu130",
    nccl="2.30.7",
    nccl_from="wheel",
    driver="580.95.05",
    gpus=("NVIDIA H200",) * 8,
    cpu="x86_64",
    fabric_manager="580.95.05",
    fabric_manager_known=True,
    plugin_known=True,
    rdma=("InfiniBand",),
    stack_unlimited=False,
)
JOB = Case(software=H200, environ={}, nodes=4, ranks=32, restart="in-process")


def job(environ: dict[str, str] | None = None, **software: Any) -> Case:
    return replace(JOB, software=replace(H200, **software), environ=environ or {})


def concerned(case: Case) -> set[str]:
    found = concerning(advisories(), case)
    return {each.advisory.id for each in found if each.state == "concerns"}


def state(case: Case, advisory: str) -> tuple[str, tuple[str, ...]]:
    (found,) = (each for each in concerning(advisories(), case) if each.advisory.id == advisory)
    return found.state, found.unknown


def test_a_current_stack_is_concerned_by_nothing() -> None:
    assert concerned(JOB) == set()
    assert in_a_line(concerning(advisories(), JOB)) is None


GB200: dict[str, Any] = {"gpus": ("NVIDIA GB200",) * 4, "cpu": "aarch64"}


@pytest.mark.parametrize(
    ("case", "advisory"),
    [
        (job(nccl="2.25.1"), "nccl-2.25.1-abort-hangs"),
        (job(nccl="2.28.7"), "nccl-2.28-restart-in-place-segfault"),
        (job(nccl="2.29.2", **GB200), "nccl-arm-lost-proxy-slots"),
        (job(nccl="2.29.7"), "nccl-2.29.7-ib-hang"),
        (job(nccl="2.27.7"), "nccl-2.27-ras-segfault"),
        (job({"NCCL_IB_ROCE_VERSION_NUM": "2"}, nccl="2.22.3", rdma=("Ethernet",)),
         "nccl-2.22.3-roce-version-num"),
        (job(fabric_manager="575.57.08"), "fabric-manager-differs"),
        (job(nccl="2.21.5", **GB200), "nccl-before-blackwell"),
        (job(nccl="2.26.2", driver="535.161.08"), "nccl-2.26.2-nvls-driver-12.2"),
        (job(nccl="2.20.5", gpus=("NVIDIA A100-SXM4-80GB",),
             plugin=Plugin("aws-ofi-nccl", "1.16.2", "/p")), "ofi-1.16.2-nccl-2.20-tuner"),
        (job(nccl="2.27.5", plugin=Plugin("gib", "1.1.0", "/p")), "gib-before-1.1.2-old-nccl"),
    ],
)  # fmt: skip
def test_what_the_threads_are_about_is_found(case: Case, advisory: str) -> None:
    assert advisory in concerned(case)
    line = in_a_line(concerning(advisories(), case))
    assert line is not None
    assert "ncclops advise" in line


@pytest.mark.parametrize(
    ("case", "advisory"),
    [
        (job(nccl="2.26.2"), "nccl-2.25.1-abort-hangs"),
        (replace(job(nccl="2.28.7"), restart="process"), "nccl-2.28-restart-in-place-segfault"),
        (job(nccl="2.28.9"), "nccl-2.28-restart-in-place-segfault"),
        (job(nccl="2.28.9"), "nccl-arm-lost-proxy-slots"),  # x86
        (job(nccl="2.29.3", **GB200), "nccl-arm-lost-proxy-slots"),
        (job({"NCCL_PXN_DISABLE": "1"}, nccl="2.29.7"), "nccl-2.29.7-ib-hang"),
        (job(nccl="2.29.7", rdma=("Ethernet",)), "nccl-2.29.7-ib-hang"),
        (replace(job(nccl="2.29.7"), nodes=1), "nccl-2.29.7-ib-hang"),
        (job({"NCCL_RAS_ENABLE": "0"}, nccl="2.27.7"), "nccl-2.27-ras-segfault"),
        (job(fabric_manager=None), "fabric-manager-differs"),
        (job(nccl="2.27.5"), "gib-before-1.1.2-old-nccl"),  # no plugin
        (job(nccl="2.25.1", gpus=()), "nccl-2.25.1-abort-hangs"),  # nothing to run NCCL on
    ],
)
def test_what_is_fixed_or_has_the_way_round_is_not_concerned(case: Case, advisory: str) -> None:
    assert state(case, advisory) == ("no", ())


def test_an_unknown_version_is_no_bad_one() -> None:
    found, unknown = state(job(nccl=None, nccl_from=None), "nccl-2.25.1-abort-hangs")
    assert found == "cannot-tell"
    assert unknown == ("NCCL is ==2.25.1 (its version is not known)",)
    assert concerned(job(nccl=None, nccl_from=None)) == set()
    assert state(job(nccl="ours-7"), "nccl-2.25.1-abort-hangs")[0] == "cannot-tell"


def test_one_condition_that_fails_decides_whatever_else_is_unknown() -> None:
    unknown = Case(software=replace(H200, nccl="2.26.5"))
    assert state(unknown, "nccl-2.28-restart-in-place-segfault") == ("no", ())


def test_a_machine_without_a_job_says_what_it_depends_on() -> None:
    machine = Case(software=replace(H200, nccl="2.28.7"), environ={})
    assert state(machine, "nccl-2.28-restart-in-place-segfault") == (
        "cannot-tell",
        ("it restarts in-process",),
    )
    machine = Case(software=replace(H200, nccl="2.29.7"), environ={})
    assert state(machine, "nccl-2.29.7-ib-hang")[1] == ("the job has several nodes",)


def test_what_no_version_shows_is_never_said_to_concern() -> None:
    for advisory in advisories():
        if advisory.when.use is not None:
            for version in ("2.18.1", "2.26.2", "2.28.9", "2.29.7", "2.31.2"):
                assert advisory.id not in concerned(job(nccl=version, **GB200))


def test_another_build_of_the_same_version_cannot_be_told() -> None:
    case = job(nccl="2.28.9", nccl_from="other", **GB200)
    assert state(case, "nccl-arm-lost-proxy-slots") == (
        "cannot-tell",
        ("NCCL was built as its wheel is",),
    )


def test_a_plugin_of_unknown_version_or_make_cannot_be_told() -> None:
    gib = job(nccl="2.27.5", plugin=Plugin("gib", None, "/p"))
    assert state(gib, "gib-before-1.1.2-old-nccl")[0] == "cannot-tell"
    other = job(nccl="2.27.5", plugin=Plugin("libnccl-net.so", None, "/p"))
    assert state(other, "gib-before-1.1.2-old-nccl")[0] == "cannot-tell"


def test_the_worst_comes_first_and_the_line_counts_the_rest() -> None:
    table = read(
        "".join(
            f"""
            [[advisory]]
            id = "{name}"
            title = "title {name}"
            severity = "{severity}"
            symptom = "S."
            remedy = "R."
            sources = ["https://a/b"]
            when = {{ nccl = ["==2.25.1"] }}
            """
            for name, severity in (("a", "low"), ("b", "medium"), ("c", "high"))
        )
    )
    found = concerning(table, job(nccl="2.25.1"))
    assert [each.advisory.id for each in found] == ["c", "b", "a"]
    line = in_a_line(found)
    assert line is not None
    assert "(high): title c (c), and 2 more" in line
