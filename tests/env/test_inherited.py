"""What a shell has left on, told where it reaches the workers."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from ncclops.env import Overrides, PlanContext, compute_plan
from ncclops.env.inherited import in_a_line, left_on, lines_at_launch
from ncclops.env.lint.model import Circumstances, Host
from ncclops.profiles import RESTART_MODES, RestartMode, load_profiles

LANES = ["local-cpu", "single-node-h200", "multi-host-h200", "multi-host-h200-socket"]


def told(
    environ: Mapping[str, str], *refs: str, overrides: Overrides | None = None
) -> dict[str, str]:
    profile = load_profiles(refs or ("multi-host-h200",))
    context = PlanContext(torch="2.13.0")
    plan = compute_plan(profile, environ, overrides or Overrides(), context)
    found = left_on(plan, profile, environ, context)
    return {setting: finding.rule for setting, finding in found.items()}


@pytest.mark.parametrize(
    ("setting", "rule"),
    [
        ("NCCL_DEBUG=INFO", "debug-log-left-on"),
        ("NCCL_DEBUG=TRACE", "debug-log-left-on"),
        ("NCCL_P2P_NET_CHUNKSIZE=1048576", "chunk-raised"),
        ("NCCL_P2P_NVL_CHUNKSIZE=1048576", "nvlink-chunk-raised"),
        ("NCCL_BUFFSIZE=8388608", "buffer-raised"),
        ("TORCH_DISTRIBUTED_DEBUG=DETAIL", "debug-check-left-on"),
        ("CUDA_LAUNCH_BLOCKING=1", "launch-blocking-left-on"),
        ("NCCL_P2P_DISABLE=1", "p2p-off"),
    ],
)
def test_what_is_inherited_is_told(setting: str, rule: str) -> None:
    name, _, value = setting.partition("=")
    assert told({name: value}) == {setting: rule}


def test_both_variables_of_a_combination_are_told() -> None:
    shell = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
    assert told(shell) == dict.fromkeys(
        ("NCCL_P2P_DISABLE=1", "NCCL_SHM_DISABLE=1"), "p2p-and-shm-off"
    )


def test_what_is_harmless_is_not() -> None:
    assert told({"NCCL_DEBUG": "WARN", "NCCL_P2P_NET_CHUNKSIZE": "262144", "NCCL_NET": "gIB"}) == {}


def test_what_was_chosen_is_not() -> None:
    shell = {"NCCL_DEBUG": "INFO"}
    for overrides in (
        Overrides(set=shell),
        Overrides(unset=frozenset(shell)),
        Overrides(keep=frozenset(shell)),
    ):
        assert told(shell, overrides=overrides) == {}
    assert told(shell, "local-cpu", "debug-bootstrap") == {}
    assert told({"NCCL_P2P_NET_CHUNKSIZE": "1048576"}, "single-node-h200") == {}  # unset there


def test_a_profile_that_raises_a_value_has_chosen_it(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    entry = 'env.NCCL_BUFFSIZE = { set = "8388608", why = "w" }'
    raised = 'env.NCCL_P2P_NVL_CHUNKSIZE = { default = "8388608", why = "w" }'
    text = f'description = "d"\nextends = "local-cpu"\n{entry}\n{raised}\n'
    path.write_text(text, encoding="utf-8")
    assert told({"NCCL_BUFFSIZE": "8388608"}, str(path)) == {}


def test_nccls_configuration_files_are_inherited_too(tmp_path: Path) -> None:
    conf = tmp_path / "nccl.conf"
    conf.write_text("NCCL_DEBUG=INFO\n", encoding="utf-8")
    named = {"NCCL_CONF_FILE": str(conf)}
    assert told(named) == {"NCCL_DEBUG=INFO": "debug-log-left-on"}
    assert told(named | {"NCCL_DEBUG": "WARN"}) == {}


def test_all_is_one_line() -> None:
    profile = load_profiles(["multi-host-h200"])
    environ = {"NCCL_DEBUG": "INFO", "NCCL_P2P_NET_CHUNKSIZE": "1048576"}
    plan = compute_plan(profile, environ, Overrides(), PlanContext())
    line = in_a_line(left_on(plan, profile, environ, PlanContext()))
    assert line is not None
    assert line.startswith(
        "inherited by the workers: NCCL_P2P_NET_CHUNKSIZE=1048576, NCCL_DEBUG=INFO ("
    )
    assert "\n" not in line
    assert in_a_line({}) is None


def said(
    environ: Mapping[str, str],
    overrides: Overrides | None = None,
    *,
    lane: str = "single-node-h200",
    restart: RestartMode = "in-process",
    **where: Any,
) -> list[str]:
    profile = load_profiles([lane])
    context = PlanContext(restart=restart, torch="2.13.0")
    plan = compute_plan(profile, environ, overrides or Overrides(), context)
    here = Circumstances(restart=restart, torch="2.13.0", **where)
    return lines_at_launch(plan, profile, environ, here)


def test_a_misspelt_name_is_told_wherever_it_comes_from() -> None:
    typo = {"NCCL_NVLS_ENABEL": "0"}
    (line,) = said(typo)
    assert line.startswith("NCCL_NVLS_ENABEL is not known: nothing in the catalogue reads it; did")
    assert "did you mean NCCL_NVLS_ENABLE?" in line
    assert said({}, Overrides(set=typo)) == [line]


def test_a_name_that_is_kept_or_removed_or_like_no_other_is_not() -> None:
    typo = {"NCCL_DEBUGG": "INFO"}
    assert said(typo, Overrides(keep=frozenset(typo))) == []
    assert said(typo, Overrides(unset=frozenset(typo))) == []
    assert said({"NCCL_OUR_SITE": "1", "PYTORCH_BUILD_VERSION": "2.9", "TORCH_HOME": "/x"}) == []


def test_an_error_has_a_line_of_its_own_also_where_it_is_asked_for() -> None:
    """`env lint` called them errors, and a launch began with them without a word."""
    off = {"NCCL_NET": "IB", "NCCL_IB_DISABLE": "1"}
    (line,) = said(off, lane="local-cpu", gpus=True)
    assert line.endswith(
        "NCCL refuses to start; unset one of the two (`ncclops env lint`: net-ib-disabled)"
    )
    asked = Overrides(set={"TORCH_NCCL_TEARDOWN_ON_TIMEOUT": "1"})
    (line,) = said({}, asked)
    assert line.endswith("(`ncclops env lint`: teardown-ends-process)")
    assert said({}, asked, restart="process") == []
    (line,) = said({"NCCL_SOCKET_IFNAME": "eth7"}, host=Host(frozenset({"lo"})), lane="local-cpu")
    assert line.startswith("NCCL_SOCKET_IFNAME: this host has no interface eth7; it has lo (")


def test_an_error_that_is_kept_or_harms_nothing_is_not_told() -> None:
    wrong = {"NCCL_DEBUG": "LOUD"}
    assert len(said(wrong)) == 1
    assert said(wrong, Overrides(keep=frozenset(wrong))) == []
    assert said({"NCCL_TIMEOUT": "half an hour"}) == []
    lo = Host(frozenset({"lo"}))
    assert said({"NCCL_SOCKET_IFNAME": "eth7"}, host=lo, lane="local-cpu", gpus=False) == []
    without_sys = Host()  # as in a chroot: not even the loopback is to be seen
    assert said({"NCCL_SOCKET_IFNAME": "eth7"}, host=without_sys, lane="local-cpu") == []


def test_a_clean_shell_is_told_nothing_under_any_shipped_profile() -> None:
    for lane, restart in product(LANES, RESTART_MODES):
        assert said({}, lane=lane, restart=restart, gpus=True) == [], (lane, restart)
