"""What lint says about single variables, and about whole files and profiles."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from ncclops.env import Overrides, PlanContext, compute_plan
from ncclops.env.lint import (
    Circumstances,
    Host,
    LintedSettings,
    LintFinding,
    checks,
    known_ids,
    lint,
    of_environment,
)
from ncclops.env.lint.jobs import features, node_count
from ncclops.env.lint.model import Setting, under_profile
from ncclops.env.lint.parse import parse
from ncclops.profiles import RESTART_MODES, RestartMode, list_profiles, load_profiles
from ncclops.profiles.files import shipped_dir

NOWHERE = Circumstances()
HOST = Host(
    interfaces=frozenset({"lo", "eth0", "ib0"}),
    hcas=frozenset({"mlx5_0", "mlx5_10"}),
    net_plugins=frozenset(),
)


def found(where: Circumstances = NOWHERE, /, **environ: str) -> dict[str, LintFinding]:
    return {finding.rule: finding for finding in lint(of_environment(environ), where)}


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("NCCL_DEBUG", "info,trace", "logging then stays off"),
        ("NCCL_DEBUG", "WARNING", "is not one of VERSION, WARN"),
        ("NCCL_DEBUG_SUBSYS", "INIT,NETWORK", "'NETWORK' is not one of"),
        ("NCCL_ALGO", "Rings", "'Rings' is not one of ring"),
        ("NCCL_PROTO", "LL256", "'LL256' is not one of LL"),
        ("NCCL_NET_GDR_LEVEL", "pix", "only upper case counts"),
        ("NCCL_NVLS_ENABLE", "3", "is not one of 0, 1, 2"),
        ("NCCL_P2P_DISABLE", "true", "NCCL ignores it and uses its default; write 1 or 0"),
        ("NCCL_BUFFSIZE", "4M", "NCCL reads 4 and ignores the rest"),
        ("NCCL_IB_TIMEOUT", "50", "above 31"),
        ("NCCL_IB_QPS_PER_CONNECTION", "0", "below 1"),
        ("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", "-5", "below 0"),
        ("TORCH_NCCL_BLOCKING_WAIT", "on", "torch raises an error"),
        ("TORCH_FR_BUFFER_SIZE", "abc", "is not a whole number"),
        ("TORCH_CPP_LOG_LEVEL", "debug", "is not one of INFO, WARNING"),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "4", "is not one of 0, 1, 2, 3"),
        ("NCCL_SOCKET_FAMILY", "IPV4", "is not one of AF_INET"),
        ("NCCL_DEBUG", "'INFO'", "the quotes in 'INFO' are part of the value"),
        ("NCCL_DEBUG", "INFO ", "they are part of the value"),
        ("NCCL_COMM_ID", "10.0.0.1:70000", "up to 65535"),
        ("NCCL_RAS_ADDR", "localhost:99999", "up to 65535"),
        ("NCCL_IB_RAIL_POLICY", "CX8", "it takes NONE, CX9"),
        ("NCCL_PROXY_CPUSET", "8..15", "as in 0-3,8"),
        ("NCCL_PAT_ENABLE", "3", "is not one of 0, 1, 2"),
        ("NCCL_MNNVL_UUID", "abc", "is not a whole number"),
        ("NCCL_NETDEVS_POLICY", "MAX", "it takes AUTO, ALL or MAX:N"),
        ("NCCL_SOCKET_MAGIC", "-1", "not negative"),
        ("NCCL_RAS_TIMEOUT_FACTOR", "0", "above 0"),
        ("OFI_NCCL_USE_IPV6_TCP", "yes", "it takes 1 or 0, true or false"),
        ("OFI_NCCL_EAGER_MAX_SIZE", "8k", "is not a whole number"),
        ("OFI_NCCL_TUNER_TYPE", "auto", "is not one of Internal, Region, Model"),
        ("OFI_NCCL_NET_LATENCY", "75us", "it is not a number"),
        ("UCX_IB_GID_INDEX", "-1", "it takes auto or a number"),
        ("UCX_MEMTYPE_CACHE", "false", "it takes y, n or try"),
        ("UCX_RC_VERBS_SEG_SIZE", "8 KiB", "it takes a size"),
        ("UCX_RNDV_SCHEME", "get", "is not one of auto, get_zcopy"),
        ("FI_CXI_LLRING_MODE", "on", "is not one of idle, always, never"),
        ("OMP_PROC_BIND", "yes", "it takes true, false"),
    ],
)
def test_a_value_that_its_reader_does_not_take(name: str, value: str, message: str) -> None:
    finding = found(**{name: value})["bad-value"]
    assert finding.level == "error"
    assert message in finding.message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("NCCL_DEBUG", "info"),
        ("NCCL_DEBUG_SUBSYS", "^COLL,net"),
        ("NCCL_COMM_ID", "[fe80::1]:65535"),
        ("NCCL_IB_HCA", "=Ethernet 4,Ethernet 10"),
        ("NCCL_IB_HCA", "=mlx5_0::0:0,mlx5_1:1:0:1"),
        ("NCCL_NETDEVS_POLICY", "max:1"),
        ("NCCL_PROXY_CPUSET", "0-3,8"),
        ("NCCL_PSK", "x" * 32),
        ("NCCL_DEBUG_FILE", "/tmp/100%%.%h.%p"),
        ("OFI_NCCL_USE_IPV6_TCP", "True"),
        ("OFI_NCCL_EAGER_MAX_SIZE", "-1"),
        ("OMP_PROC_BIND", "spread,close"),
        ("NCCL_ALGO", "^NVLS"),
        ("NCCL_ALGO", "allreduce:tree,ring;broadcast:ring"),
        ("NCCL_PROTO", "^LL128"),
        ("NCCL_BUFFSIZE", "0x400000"),
        ("NCCL_BUFFSIZE", " 8388608"),
        ("NCCL_CUMEM_ENABLE", "-2"),
        ("NCCL_IB_GID_INDEX", "-1"),
        ("NCCL_NET_GDR_LEVEL", "PHB"),
        ("TORCH_NCCL_BLOCKING_WAIT", "False"),
        ("TORCH_DISTRIBUTED_DEBUG", "detail"),
        ("TORCH_CPP_LOG_LEVEL", "error"),
        ("NCCL_DEBUG", ""),
        ("NCCL_SOCKET_IFNAME", "^docker0,lo"),
        ("TOKENIZERS_PARALLELISM", "False"),
        ("UCX_MEMTYPE_CACHE", "On"),
        ("UCX_DC_MLX5_SEG_SIZE", "8kb"),
        ("UCX_KEEPALIVE_INTERVAL", "1.5s"),
        ("UCX_RNDV_SCHEME", "GET_ZCOPY"),
    ],
)
def test_a_value_that_its_reader_takes(name: str, value: str) -> None:
    assert "bad-value" not in found(**{name: value})


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("NCCL_IB_TIMOUT", "NCCL_IB_TIMEOUT"),
        ("NCCL_SOCKET_IF_NAME", "NCCL_SOCKET_IFNAME"),
        ("TORCH_NCCL_HEARTBEAT_TIMEOUT", "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"),
        ("TORCH_NCCL_IB_HCA", "NCCL_IB_HCA"),
        ("NCCL_HEARTBEAT_TIMEOUT_SEC", "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"),
        ("NCCLDEBUG", "NCCL_DEBUG"),
        ("NCC_IB_HCAS", "NCCL_IB_HCA"),
        ("FI_EFA_USE_DEVICE_RMDA", "FI_EFA_USE_DEVICE_RDMA"),
        ("UCX_NET_DEVICE", "UCX_NET_DEVICES"),
        ("UCX_UNIFIED_TLS_MODE", "UCX_UNIFIED_MODE"),
        ("UCX_RC_MLX5_TX_QUEUE_LENGTH", "UCX_RC_MLX5_TX_QUEUE_LEN"),
    ],
)
def test_a_misspelt_name_gets_the_nearest(name: str, meant: str) -> None:
    finding = found(**{name: "1"})["unknown-name"]
    assert finding.remedy.startswith(f"did you mean {meant}")


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("NCCL_IB_DISABEL", "NCCL_IB_DISABLE"),
        ("NCCL_P2P_DISBLE", "NCCL_P2P_DISABLE"),
        ("NCCL_SOKET_IFNAME", "NCCL_SOCKET_IFNAME"),
        ("NCCL_DEBGU", "NCCL_DEBUG"),
        ("NCCL_IB_HAC", "NCCL_IB_HCA"),
    ],
)
def test_a_slip_of_the_pen_is_no_choice_of_three_and_is_repaired(name: str, meant: str) -> None:
    finding = found(**{name: "1"})["unknown-name"]
    assert finding.remedy == f"did you mean {meant}?"
    assert finding.repair == (name, meant)


def test_another_letter_in_a_short_name_is_not_repaired() -> None:
    assert found(NCCL_IB_TX="3")["unknown-name"].repair is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("NCCL_DEBUG_FILE", "/tmp/nccl.%x.%p"),
        ("NCCL_DEBUG_FILE", "stdout"),
        ("NCCL_CONF_FILE", "~/nccl.conf"),
        ("TORCH_FR_DUMP_TEMP_FILE", "~/fr_"),
        ("LD_LIBRARY_PATH", "/opt/lib:~/lib"),
        ("NCCL_SOCKET_IFNAME", "10.0.0.1"),
        ("NCCL_IB_HCA", "mlx5_[0-3]"),
        ("NCCL_ALGO", "Ring:Tree"),
        ("NCCL_DEBUG_SUBSYS", "INIT,^NET"),
        ("NCCL_COLLNET_ENABLE", "5"),
        ("TORCH_DIST_INIT_BARRIER", "true"),
        ("NCCL_FASTRAK_NUM_FLOWS", "two"),
    ],
)
def test_a_value_that_is_hardly_meant(name: str, value: str) -> None:
    assert found(**{name: value})["unlikely-value"].level == "warning"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TORCH_DIST_INIT_BARRIER", "false"),
        ("FI_EFA_RX_COPY_OOO", "true"),
        ("NCCL_IB_DISABLE", "01"),
        ("NCCL_DEBUG_FILE", "/home/me/~nccl.%p"),
        ("TORCH_LOGS_OUT", "~/torch.log"),
    ],
)
def test_a_value_that_may_well_be_meant(name: str, value: str) -> None:
    assert {"bad-value", "unlikely-value"}.isdisjoint(found(**{name: value}))


def test_a_level_under_a_misspelt_prefix() -> None:
    assert found(NCC_INFO="INFO")["unknown-name"].remedy == "did you mean NCCL_DEBUG?"
    assert found(NCC_CODES="INFO1") == {}


def test_a_key_that_is_too_short_is_not_shown() -> None:
    message = found(NCCL_PSK="my-short-key")["bad-value"].message
    assert "less than 32" in message and "my-short-key" not in message


@pytest.mark.parametrize(
    ("line", "expanded"),
    [
        ("export NCCL_CONF_FILE=~/nccl.conf", True),
        ("export LD_LIBRARY_PATH=~/lib:~/lib2", True),
        ("mpirun -x NCCL_CONF_FILE=~/nccl.conf ./train", True),
        ("setenv NCCL_CONF_FILE ~/nccl.conf", True),
        ('export NCCL_CONF_FILE="~/nccl.conf"', False),
        ("export NCCL_CONF_FILE='~/nccl.conf'", False),
        ("export NCCL_CONF_FILE=\\~/nccl.conf", False),
    ],
)
def test_a_shell_puts_the_home_directory_where_no_quote_is(line: str, expanded: bool) -> None:
    rules = {finding.rule for finding in lint(LintedSettings(parse(line, "shell")), NOWHERE)}
    assert ("unlikely-value" not in rules) is expanded


@pytest.mark.parametrize("name", ["NCCL_ROOT", "NCCL_VERSION", "MY_NCCL_THING", "TORCH_HOME"])
def test_names_of_builds_and_of_others_are_left_alone(name: str) -> None:
    assert found(**{name: "x"}) == {}


def test_a_scripts_own_variable_and_plugins_names_are_left_alone() -> None:
    text = "export NCCL_RUNNER=x\n$NCCL_RUNNER\nexport NCCL_EP_JIT_SOURCE_DIR=/x\n"
    assert lint(LintedSettings(parse(text, "shell")), NOWHERE) == []
    typo = LintedSettings(parse("export OFI_NCCL_PROTOCL=RDMA\n", "shell"))
    assert [finding.rule for finding in lint(typo, NOWHERE)] == ["unknown-name"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        # a name that a script has made up, of whatever it uses it for
        ("export NCCL_RUNNER=x\n$NCCL_RUNNER\n", False),
        ("export NCCL_RUNNER=x\necho $NCCL_RUNNER\n", False),
        ("export NCCL_RUNNER=/opt/x\nsource more.sh\n", False),
        ("export NCCL_RUNNER=x\ntorchrun t.py\n", True),
        # a slip stays one where the script only prints it, or hands it on
        ("export NCCL_IB_TIMOUT=22\necho timeout: $NCCL_IB_TIMOUT\ntorchrun t.py\n", True),
        ("export NCCL_IB_TIMOUT=22\nmpirun -x NCCL_IB_TIMOUT=$NCCL_IB_TIMOUT t\n", True),
        ("export NCCL_TOPO_FILEE=/etc/t.xml\ntorchrun t.py\n", True),
    ],
)
def test_a_name_that_a_script_uses_as_its_own_is_no_slip(text: str, told: bool) -> None:
    found = {finding.rule for finding in lint(LintedSettings(parse(text, "shell")), NOWHERE)}
    assert ("unknown-name" in found) is told


def test_a_name_of_a_later_torch_that_a_script_uses_itself() -> None:
    text = "export NCCL_HOME=/opt/nccl\nexport LD_LIBRARY_PATH=$NCCL_HOME/lib\n"
    assert lint(LintedSettings(parse(text, "shell")), Circumstances(torch="2.13.0")) == []


@pytest.mark.parametrize(
    "mark",
    [
        "YOUR_INDEX", "your-index", "YourIndex", "<GID_INDEX>", "TODO", "XXX", "change_me",
        "REPLACE_ME", "REPLACE_WITH_INDEX", "GID_INDEX_HERE", "[gid index]", "...",
    ],
)  # fmt: skip
def test_what_is_still_to_be_filled_in_is_no_wrong_value(mark: str) -> None:
    for kind in ("shell", "dotenv"):
        text = f"export NCCL_IB_GID_INDEX='{mark}'\n"
        assert lint(LintedSettings(parse(text, kind)), NOWHERE) == []


@pytest.mark.parametrize("value", ["yours", "none", "XX1", "INDEX"])
def test_a_word_that_is_no_mark_is_a_wrong_value(value: str) -> None:
    text = f"export NCCL_IB_GID_INDEX={value}\n"
    (finding,) = lint(LintedSettings(parse(text, "shell")), NOWHERE)
    assert finding.rule == "bad-value"


def test_unread_removed_and_deprecated_names() -> None:
    assert found(NCCL_TIMEOUT="1800")["unread"].level == "warning"
    assert found(NCCL_TREE_THRESHOLD="0")["unread"].level == "warning"
    old = found(NCCL_ASYNC_ERROR_HANDLING="1")["deprecated"]
    assert old.remedy == "use TORCH_NCCL_ASYNC_ERROR_HANDLING"
    streams = {"TORCH_NCCL_AVOID_RECORD_STREAMS": "1"}
    assert "unread" in found(Circumstances(torch="2.13.0"), **streams)
    assert found(Circumstances(torch="2.7.1"), **streams) == {}


def test_a_variable_younger_than_what_is_installed() -> None:
    new = {"TORCHINDUCTOR_DISTRIBUTED_MAX_AUTOTUNE_GEMM": "0"}
    assert "torch 2.9.0 (it came with 2.10)" in (
        found(Circumstances(torch="2.9.0"), **new)["unread-here"].message
    )
    assert found(Circumstances(torch="2.10.0"), **new) == {}
    nccl = {"NCCL_CHECK_MODE": "DEFAULT"}
    assert "unread-here" in found(Circumstances(nccl="2.21.5"), **nccl)
    assert found(**nccl) == {}


def test_the_second_engine_reads_less() -> None:
    heartbeat = {"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "7200"}
    second = Circumstances(torch="2.15.0")
    assert "unread-by-second-engine" in found(second, **heartbeat)
    assert found(second, **heartbeat, TORCH_DIST_USE_NCCL2="0") == {}
    assert found(Circumstances(torch="2.14.0"), **heartbeat) == {}
    chosen = found(Circumstances(torch="2.14.0"), **heartbeat, TORCH_DIST_USE_NCCL2="1")
    assert "unread-by-second-engine" in chosen


def test_single_node_poison_and_settings_for_several_nodes() -> None:
    one, many = Circumstances(nodes="one"), Circumstances(nodes="many")
    assert found(one, NCCL_NET="gIB")["single-node-poison"].level == "warning"
    assert found(one, NCCL_NET="Socket") == {}
    assert found(many, NCCL_NET="gIB") == {}
    assert found(one, NCCL_SOCKET_IFNAME="eth0")["single-node-poison"].level == "note"
    assert found(one, NCCL_SOCKET_IFNAME="^lo,docker") == {}
    assert found(one, NCCL_CROSS_NIC="1")["multi-host-setting"].level == "note"
    assert found(many, NCCL_CROSS_NIC="1") == {}


@pytest.mark.parametrize(
    ("name", "value", "fatal"),
    [
        ("NCCL_SOCKET_IFNAME", "ens5", True),
        ("NCCL_SOCKET_IFNAME", "eth", False),
        ("NCCL_SOCKET_IFNAME", "=eth", True),
        ("NCCL_SOCKET_IFNAME", "=eth0", False),
        ("NCCL_SOCKET_IFNAME", "ens5,ib", False),
        ("NCCL_SOCKET_IFNAME", "^ens5", False),
        ("GLOO_SOCKET_IFNAME", "eth", True),
        ("GLOO_SOCKET_IFNAME", "eth0,ens5", True),
        ("GLOO_SOCKET_IFNAME", "eth0", False),
        ("NCCL_IB_HCA", "mlx5_1", False),
        ("NCCL_IB_HCA", "=mlx5_1", True),
        ("NCCL_IB_HCA", "=mlx5_0:1,mlx5_3:1", False),
        ("NCCL_IB_HCA", "ibp", True),
    ],
)
def test_interfaces_and_hcas_that_this_host_has(name: str, value: str, fatal: bool) -> None:
    result = found(Circumstances(host=HOST), **{name: value})
    assert ("not-on-this-host" in result) is fatal


def test_a_network_of_a_plugin_that_is_not_here() -> None:
    assert "net-plugin-missing" in found(Circumstances(host=HOST), NCCL_NET="gIB")
    assert "net-plugin-missing" not in found(Circumstances(host=HOST), NCCL_NET="IB")
    with_one = replace(HOST, net_plugins=frozenset({"/usr/local/gib/lib64/libnccl-net.so"}))
    assert found(Circumstances(host=with_one), NCCL_NET="gIB") == {}


def test_suppressions_name_a_rule_or_a_rule_and_a_variable() -> None:
    environ = {"NCCL_TIMEOUT": "1", "NCCL_SOCKET_TIMEOUT": "1"}
    everything = Circumstances(ignore={"unread": "why"})
    one = Circumstances(ignore={"unread:NCCL_TIMEOUT": "why"})
    assert lint(of_environment(environ), everything) == []
    assert [f.names for f in lint(of_environment(environ), one)] == [("NCCL_SOCKET_TIMEOUT",)]


def test_every_finding_can_be_suppressed_by_an_id_that_exists() -> None:
    source = Path(checks.__file__).read_text(encoding="utf-8")
    used = set(re.findall(r'Finding\(\s*"([a-z-]+)"|_about_reader\(\s*"([a-z-]+)"', source))
    assert {first or second for first, second in used} == set(checks.CHECK_IDS)
    assert set(checks.CHECK_IDS) <= set(known_ids())


def test_a_line_of_a_configuration_file_that_means_nothing() -> None:
    settings = LintedSettings(parse(" NCCL_DEBUG=INFO\nexport NCCL_NET=IB\n", "conf"))
    findings = lint(settings, NOWHERE)
    assert [(finding.rule, finding.line) for finding in findings] == [
        ("conf-file-line", 1),
        ("conf-file-line", 2),
    ]


SHIPPED = sorted(path.stem for path in shipped_dir().glob("*.toml"))


@pytest.mark.parametrize("torch", ["2.5.1", "2.7.1", "2.10.0", "2.13.0", "2.15.0"])
@pytest.mark.parametrize("restart", RESTART_MODES)
@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_profile_is_clean_for_its_lane(
    name: str, restart: RestartMode, torch: str
) -> None:
    kinds = {summary.name: summary.kind for summary in list_profiles(shipped_dir().parent)}
    for lane in ("single-node-h200", "multi-host-h200"):
        refs = [name] if kinds[name] == "lane" else [lane, name]
        profile = load_profiles(refs)
        plan = compute_plan(profile, {}, Overrides(), PlanContext(restart, torch))
        environ = plan.apply({}, {"run_dir": "/r", "rank_dir": "/r/0"})
        gpus = name not in ("base", "local-cpu")
        where = Circumstances(restart=restart, torch=torch, gpus=gpus)
        findings = lint(of_environment(environ), under_profile(profile, where))
        # A note may say that this torch does not read a value; the value's reason says so too.
        assert [finding for finding in findings if finding.level != "note"] == []
        if torch == "2.13.0":
            assert findings == []


SCRIPT = """#!/bin/bash
#SBATCH --nodes=2
# A launch script with one of each, in the manner of public ones.
export NCCL_DEBUG=INFO
export NCCL_IB_TIMOUT=22
export NCCL_SOCKET_IFNAME=${IFACE:-eth0}
export TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC=$((60 * 60))
export NCCL_NET=IB NCCL_IB_DISABLE=1
NCCL_ROOT=/opt/nccl make -C tests
if [ -n "$DEBUG" ]; then
    export TORCH_DISTRIBUTED_DEBUG=DETAIL TORCH_CPP_LOG_LEVEL=INFO
fi
CUDA_DEVICE_MAX_CONNECTIONS=1 torchrun --nnodes=2 train.py --use-torch-fsdp2
"""


def test_a_whole_script() -> None:
    where = Circumstances(nodes=node_count(SCRIPT), uses=features(SCRIPT))
    findings = lint(LintedSettings(parse(SCRIPT, "shell")), where)
    assert [(finding.line, finding.rule) for finding in findings] == [
        (4, "debug-log-left-on"),
        (5, "unknown-name"),
        (8, "net-ib-disabled"),
        (8, "ib-off-on-many-nodes"),
        (11, "debug-check-left-on"),
        (13, "one-connection-fsdp2"),
    ]


def test_what_amds_fork_may_read_is_of_nccl_alone() -> None:
    where = Circumstances(uses=frozenset({"rocm"}))
    unknown = LintedSettings(Setting(name, "1") for name in ("NCCL_XYZZY", "UCX_XYZZY"))
    assert [f.names for f in lint(unknown, where)] == [("UCX_XYZZY",)]
