"""What may differ between hosts, what may not, and how that is shown."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from ncclops.cluster.fingerprint import Comparison, Fingerprint, compare, relevant

LOST_AFTER = timedelta(seconds=15)


def host(number: int, variables: dict[str, str] | None = None, **given: Any) -> Fingerprint:
    facts = {"torch": "2.13.0", "profile": "base", "Python": "3.11.7"} | given.pop("facts", {})
    return Fingerprint(host=f"n{number}", variables=variables or {}, facts=facts, **given)


def judged(*prints: Fingerprint, allowed: tuple[str, ...] = ()) -> Comparison:
    return compare(prints, allowed=allowed, lost_after=LOST_AFTER)


def test_hosts_that_are_alike() -> None:
    assert judged(host(1, {"NCCL_ALGO": "Ring"}), host(2, {"NCCL_ALGO": "Ring"})) == Comparison(())


def test_a_difference_names_hosts_variable_and_values_the_odd_one_last() -> None:
    (found,) = judged(
        host(1, {"NCCL_ALGO": "Ring"}),
        host(2, {"NCCL_ALGO": "Tree"}),
        host(3, {"NCCL_ALGO": "Ring"}),
    ).of_weight("refused")
    assert found.lines() == [
        "NCCL_ALGO: must be equal on all ranks",
        "    n1, n3  Ring",
        "    n2      Tree",
    ]


def test_a_variable_that_one_host_does_not_have_differs() -> None:
    (found,) = judged(host(1), host(2, {"NCCL_ALGO": "Tree"})).of_weight("refused")
    assert found.values == (("(not set)", ("n1",)), ("Tree", ("n2",)))


@pytest.mark.parametrize("name", ["NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "GLOO_SOCKET_IFNAME"])
def test_interfaces_and_hcas_may_differ(name: str) -> None:
    found = judged(host(1, {name: "a"}), host(2, {name: "b"}))
    assert not found.of_weight("refused")
    assert not found.of_weight("remark")


def test_what_the_profile_says_by_host_is_allowed_unless_it_has_to_be_equal() -> None:
    def pair(name: str) -> Comparison:
        return judged(*(host(n, {name: str(n)}, per_host=(name,)) for n in (1, 2)))

    assert pair("NCCL_IB_TC").of_weight("remark")
    assert pair("OWN_SETTING").of_weight("remark")
    assert pair("NCCL_ALGO").of_weight("refused")


def test_versions_are_refused_or_remarked() -> None:
    found = judged(host(1), host(2, facts={"torch": "2.12.0", "Python": "3.12.1"}))
    assert [each.name for each in found.of_weight("refused")] == ["torch"]
    assert [each.name for each in found.of_weight("remark")] == ["Python"]


def test_other_parameters_of_the_profile_are_refused() -> None:
    short, long = ({"parameters": f"compile_timeout={time}"} for time in ("45m", "120m"))
    (found,) = judged(host(1, facts=short), host(2, facts=long)).of_weight("refused")
    assert found.name == "parameters"


def test_the_operator_may_allow_a_difference() -> None:
    found = judged(host(1), host(2, facts={"torch": "2.12.0"}), allowed=("torch",))
    assert not found.of_weight("refused")
    assert "--allow-difference" in found.of_weight("remark")[0].why


@pytest.mark.parametrize(("offset", "weight"), [(0.2, "fine"), (3.0, "remark"), (20.0, "refused")])
def test_clocks(offset: float, weight: str) -> None:
    found = judged(host(1), host(2, clock_offset_s=offset))
    assert [each.weight for each in found.differences] == ([] if weight == "fine" else [weight])


def test_only_what_concerns_the_job_is_compared() -> None:
    environ = {
        "NCCL_ALGO": "Ring",
        "HOSTNAME": "n1",
        "NCCL_NEW_IN_3_0": "1",
        "OWN": "x",
        "PWD": "/",
    }
    assert relevant(environ, planned=["OWN"]).keys() == {"NCCL_ALGO", "NCCL_NEW_IN_3_0", "OWN"}
