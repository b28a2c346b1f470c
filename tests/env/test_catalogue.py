"""The catalogue holds together, and answers the questions it is asked."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from ncclops.env.audit import constants
from ncclops.env.catalogue import (
    LIBNCCL,
    RANKS,
    READ_WHEN,
    READERS,
    TORCH,
    Variable,
    catalogue,
    is_covered,
    nearest_names,
)
from ncclops.env.explain import explain
from ncclops.env.values import problem_with
from ncclops.errors import UsageError
from ncclops.profiles import load_profiles
from ncclops.profiles.files import shipped_dir

EVERY = list(catalogue().values())


def is_whole(variable: Variable) -> bool:
    sentences = [variable.summary, variable.risk or ".", variable.restart or "."]
    other = variable.replaced_by
    return bool(
        re.fullmatch(r"[A-Z][A-Za-z0-9_]*", variable.name)
        and all(sentence.endswith(".") for sentence in sentences)
        and variable.source
        and variable.ranks in RANKS
        and (variable.read in READ_WHEN or " " in variable.read)
        and (other is None or not other.isupper() or other in catalogue())
        and (variable.status != "unread" or variable.read == "never")
    )


def test_every_entry_is_whole() -> None:
    assert [variable.name for variable in EVERY if not is_whole(variable)] == []
    assert len(EVERY) > 600


def test_a_line_may_stand_for_several_variables() -> None:
    for name in ("UCX_RC_TX_QUEUE_LEN", "UCX_RC_MLX5_TX_QUEUE_LEN", "UCX_IB_TX_QUEUE_LEN"):
        assert catalogue()[name].name == name
    assert catalogue()["FI_OFI_RXR_CQ_SIZE"].replaced_by == "FI_EFA_CQ_SIZE"
    assert "CQ_SIZE" in catalogue()["FI_OFI_RXR_CQ_SIZE"].summary


def test_a_plain_default_passes_its_own_check() -> None:
    plain = [v for v in EVERY if v.check and re.fullmatch(r"-?\d+|[A-Z]+", v.default)]
    assert [v.name for v in plain if problem_with(v, v.default) is not None] == []
    assert len(plain) > 100


def test_components_have_readers_and_libnccl_entries_their_binaries() -> None:
    assert set(LIBNCCL) <= set(READERS)
    assert set(TORCH) <= set(READERS)
    for variable in EVERY:
        if variable.component in LIBNCCL and variable.status in ("active", "deprecated"):
            known = variable.libnccl is not None or variable.since == "2.33"  # not released yet
            assert known or not variable.name.startswith("NCCL_")


def test_what_profiles_touch_is_in_the_catalogue() -> None:
    for path in shipped_dir().glob("*.toml"):
        assert set(load_profiles([str(path)]).env) <= set(catalogue())


def test_constants_and_variables_are_disjoint() -> None:
    assert not constants() & set(catalogue())


@pytest.mark.parametrize(
    ("name", "torch", "nccl", "read"),
    [
        ("NCCL_TIMEOUT", "2.13.0", "2.29.7", False),
        ("NCCL_TREE_THRESHOLD", None, "2.29.7", False),
        ("NCCL_TREE_THRESHOLD", None, None, False),
        ("NCCL_NVLS_ENABLE", None, "2.16.5", False),
        ("NCCL_NVLS_ENABLE", None, "2.17.1", True),
        ("NCCL_NVLS_ENABLE", "2.13.0", None, None),
        ("NCCL_IB_DISABLE", None, "2.29.7", None),
        ("TORCH_FR_BUFFER_SIZE", "2.7.1", None, False),
        ("TORCH_FR_BUFFER_SIZE", "2.8.0+cu128", None, True),
        ("TORCH_NCCL_AVOID_RECORD_STREAMS", "2.7.1", None, True),
        ("TORCH_NCCL_AVOID_RECORD_STREAMS", "2.8.0", None, False),
        ("OFI_NCCL_PROTOCOL", "2.13.0", "2.29.7", None),
    ],
)
def test_whether_an_installed_version_reads_it(
    name: str, torch: str | None, nccl: str | None, read: bool | None
) -> None:
    assert catalogue()[name].read_in(torch=torch, nccl=nccl) is read


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("NCCL_NVLS_ENABEL", "NCCL_NVLS_ENABLE"),
        ("nccl_debug", "NCCL_DEBUG"),
        ("NCCL_MAX_CHANNELS", "NCCL_MAX_NCHANNELS"),
        ("TORCH_NCCL_IB_HCA", "NCCL_IB_HCA"),
        ("GLOO_SOCKET_IFNAMES", "GLOO_SOCKET_IFNAME"),
    ],
)
def test_the_nearest_name(written: str, meant: str) -> None:
    assert nearest_names(written)[0] == meant


def test_nothing_is_near_a_strange_name() -> None:
    assert nearest_names("HELLO_WORLD_OF_MINE") == ()
    assert not is_covered("HELLO_WORLD_OF_MINE")


def test_explain_knows_the_value_here_and_what_is_wrong_with_it() -> None:
    environ = {"NCCL_NVLS_ENABLE": "3", "HOME": "/nonexistent"}
    document = explain("NCCL_NVLS_ENABLE", environ, torch="2.13.0", nccl="2.29.7")
    assert document["read_by"] == "NCCL"
    assert document["default"] == "2"
    assert document["here"]["value"] == "3"
    assert "is not one of 0, 1, 2" in document["here"]["problem"]
    assert "Must be 0" in document["restart"]


def test_explain_says_when_a_plugin_answers_for_the_environment() -> None:
    environ = {"NCCL_ALGO": "Ring", "NCCL_ENV_PLUGIN": "gcp", "HOME": "/nonexistent"}
    here = explain("NCCL_ALGO", environ, torch=None, nccl=None)["here"]
    assert here["from"].endswith("NCCL asks the plugin gcp first, which may say otherwise")
    environ["NCCL_ENV_PLUGIN"] = "none"
    here = explain("NCCL_ALGO", environ, torch=None, nccl=None)["here"]
    assert "plugin" not in here["from"]


def test_explain_of_an_unknown_name_gives_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"NCCL_IB_TIMOUT: .* did you mean NCCL_IB_TIMEOUT"):
        explain("NCCL_IB_TIMOUT", {}, torch=None, nccl=None)


@pytest.mark.slow
def test_asking_the_catalogue_needs_neither_torch_nor_pydantic() -> None:
    code = (
        "import sys; from ncclops.env.catalogue import catalogue; catalogue();"
        "import ncclops.env.lint, ncclops.env.explain;"
        "print(sorted({'torch', 'pydantic', 'rich'} & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ran.stdout == "[]\n", ran.stderr
