"""What a shell has left on, told where it reaches the workers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from ncclops.env import Overrides, PlanContext, compute_plan
from ncclops.env.inherited import in_a_line, left_on, lines_at_launch
from ncclops.profiles import load_profiles


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


def said(environ: Mapping[str, str], overrides: Overrides | None = None) -> list[str]:
    profile = load_profiles(["single-node-h200"])
    plan = compute_plan(profile, environ, overrides or Overrides(), PlanContext())
    return lines_at_launch(plan, profile, environ, PlanContext())


def test_a_misspelt_name_is_told_wherever_it_comes_from() -> None:
    typo = {"NCCL_NVLS_ENABEL": "0"}
    (line,) = said(typo)
    assert line.startswith("NCCL_NVLS_ENABEL is not known: nothing in the catalogue reads it; did")
    assert "NCCL_NVLS_ENABLE or " in line
    assert said({}, Overrides(set=typo)) == [line]


def test_a_name_that_is_kept_or_removed_or_like_no_other_is_not() -> None:
    typo = {"NCCL_DEBUGG": "INFO"}
    assert said(typo, Overrides(keep=frozenset(typo))) == []
    assert said(typo, Overrides(unset=frozenset(typo))) == []
    assert said({"NCCL_OUR_SITE": "1", "PYTORCH_BUILD_VERSION": "2.9", "TORCH_HOME": "/x"}) == []
