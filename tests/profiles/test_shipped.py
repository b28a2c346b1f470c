"""The shipped profiles say what the playbook asks for, by restart mode and torch version."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

import pytest

from ncclops.env import Overrides, Plan, PlanContext, compute_plan
from ncclops.profiles import RESTART_MODES, RestartMode, list_profiles, load_profiles
from ncclops.profiles.files import shipped_dir
from ncclops.timeouts.settle import settle

SHIPPED = sorted(path.stem for path in shipped_dir().glob("*.toml"))
FILL = {"run_dir": "/r", "rank_dir": "/r/0"}
TORCH = ("2.5.1", "2.7.1", "2.13.0+cu130", "2.15.0")

NINE_DEFAULTS = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "TORCH_NCCL_AVOID_RECORD_STREAMS": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NVTE_DP_AMAX_REDUCE_INTERVAL": "0",
    "NVTE_ASYNC_AMAX_REDUCTION": "1",
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    "NCCL_P2P_NET_CHUNKSIZE": "524288",
    "TORCH_NCCL_HIGH_PRIORITY": "1",
    "TOKENIZERS_PARALLELISM": "False",
}
SINGLE_NODE_UNSETS = (
    "NCCL_NET",
    "NCCL_CROSS_NIC",
    "NCCL_NET_GDR_LEVEL",
    "NCCL_TUNER_CONFIG_PATH",
    "NCCL_IB_ADAPTIVE_ROUTING",
    "NCCL_IB_FIFO_TC",
    "NCCL_IB_QPS_PER_CONNECTION",
    "NCCL_IB_TC",
    "NCCL_NVLS_CHUNKSIZE",
    "NCCL_P2P_NET_CHUNKSIZE",
)
# By the catalogue's scope, or by the family of a name that it does not have.
OF_A_FABRIC = (
    "NCCL_ENV_PLUGIN",
    "NCCL_GIN_PLUGIN",
    "NCCL_RMA_PLUGIN",
    "NCCL_SOCKET_FAMILY",
    "NCCL_TUNER_PLUGIN",
    "TP_SOCKET_IFNAME",
    "NCCL_IB_HCA",
    "NCCL_IB_GID_INDEX",
    "NCCL_IB_SL",
    "NCCL_IB_TIMEOUT",
    "NCCL_IB_OF_THE_FUTURE",
    "NCCL_COLLNET_ENABLE",
    "NCCL_FASTRAK_IFNAME",
    "OFI_NCCL_PROTOCOL",
    "UCX_TLS",
    "UCX_RNDV_THRESH",
    "UCX_NET_DEVICES",
    "FI_PROVIDER",
    "FI_EFA_USE_DEVICE_RDMA",
)
SINGLE_NODE_SETS = {"NCCL_NET_PLUGIN": "none", "NCCL_IB_DISABLE": "1", "NCCL_IBEXT_DISABLE": "1"}


def plan(
    *refs: str,
    environ: Mapping[str, str] | None = None,
    restart: RestartMode = "in-process",
    torch: str | None = "2.13.0",
) -> Plan:
    context = PlanContext(restart=restart, torch=torch)
    return compute_plan(load_profiles(refs), environ or {}, Overrides(), context)


def after(
    *refs: str,
    environ: Mapping[str, str] | None = None,
    restart: RestartMode = "in-process",
    torch: str | None = "2.13.0",
) -> dict[str, str]:
    result = plan(*refs, environ=environ, restart=restart, torch=torch)
    return result.apply(environ or {}, FILL)


def test_the_promised_profiles_are_there_and_load() -> None:
    assert set(SHIPPED) >= {
        "base",
        "single-node-h200",
        "multi-host-h200",
        "multi-host-h200-socket",
        "compile-sensitive",
        "regional-compile",
        "debug-bootstrap",
        "debug-collectives",
        "local-cpu",
    }
    assert [item.problem for item in list_profiles(shipped_dir().parent)] == [None] * len(SHIPPED)


@pytest.mark.parametrize("name", SHIPPED)
def test_every_reason_starts_with_a_sentence_that_fits_a_table(name: str) -> None:
    for entries in load_profiles([name]).env.values():
        for entry in entries:
            first = entry.why.split(". ")[0]
            assert len(first) <= 100, first
            assert re.search(r"[.'?]$", entry.why), entry.why


@pytest.mark.parametrize("torch", TORCH)
@pytest.mark.parametrize("restart", RESTART_MODES)
@pytest.mark.parametrize("lane", ["single-node-h200", "multi-host-h200", "multi-host-h200-socket"])
def test_the_nine_defaults_are_in_every_gpu_lane(
    lane: str, restart: RestartMode, torch: str
) -> None:
    expected = dict(NINE_DEFAULTS)
    if lane == "single-node-h200":
        del expected["NCCL_P2P_NET_CHUNKSIZE"]  # on the unset list there
    assert expected.items() <= after(lane, restart=restart, torch=torch).items()


def test_what_the_operator_exported_beats_a_default() -> None:
    mine = dict.fromkeys(NINE_DEFAULTS, "mine")
    result = after("multi-host-h200", environ=mine, restart="process")
    assert {name: result[name] for name in mine} == mine


def test_the_single_node_sanitiser_runs_whatever_was_exported() -> None:
    poison = dict.fromkeys(SINGLE_NODE_UNSETS, "leaked")
    poison |= dict.fromkeys(SINGLE_NODE_SETS, "leaked")
    poison |= dict.fromkeys(OF_A_FABRIC, "leaked")
    poison["LD_LIBRARY_PATH"] = "/usr/local/cuda/lib64:/usr/local/gib/lib64:/home/me/lib"
    result = after("single-node-h200", environ=poison)
    assert not {*SINGLE_NODE_UNSETS, *OF_A_FABRIC} & set(result)
    assert SINGLE_NODE_SETS.items() <= result.items()
    assert result["LD_LIBRARY_PATH"] == "/usr/local/cuda/lib64:/home/me/lib"


@pytest.mark.parametrize(
    ("entry", "scrubbed"),
    [
        ("/usr/local/gib/lib64", True),
        ("/var/lib/tcpxo/lib64/", True),
        ("/usr/local/tcpx/lib64", True),
        ("/opt/hpcx-v2.18/nccl_rdma_sharp_plugin/lib", True),
        ("/opt/amazon/ofi-nccl/lib/x86_64-linux-gnu", True),
        ("/opt/aws-ofi-nccl/lib", True),
        ("/opt/aws-ofi-nccl/install/lib", True),
        ("/opt/hpcx/sharp/lib", True),
        ("/usr/local/nvidia/lib64", False),  # the driver's own libraries on some clouds
        ("/opt/amazon/efa/lib", False),  # libfabric; other programs link it
        ("/opt/hpcx/ompi/lib", False),
        ("/usr/lib/x86_64-linux-gnu", False),
    ],
)
def test_only_vendor_network_directories_are_scrubbed(entry: str, scrubbed: bool) -> None:
    result = after("single-node-h200", environ={"LD_LIBRARY_PATH": f"/keep:{entry}"})
    assert result["LD_LIBRARY_PATH"] == ("/keep" if scrubbed else f"/keep:{entry}")


@pytest.mark.parametrize(
    ("files", "scrubbed"),
    [
        (["libnccl-net.so"], True),
        (["libnccl-net-ofi.so.1", "libfabric.so.1"], True),
        (["libnccl-tuner.so"], True),
        (["libnccl-profiler-inspector.so"], True),
        (["libnccl-env-gcp.so"], True),
        (["libnccl-gin.so"], True),
        (["libnccl-rma-site.so"], True),
        (["libfabric.so.1"], False),
        (["libnccl.so.2"], False),
        # What an installer has put beside the driver, or into an environment's own directory.
        (["libnccl-net.so", "libcuda.so.1"], False),
        (["libnccl-net.so", "libstdc++.so.6"], False),
        ([], False),
    ],
)
def test_a_directory_is_scrubbed_by_the_plugin_in_it(
    tmp_path: Path, files: list[str], scrubbed: bool
) -> None:
    directory = tmp_path / "efa" / "lib"
    directory.mkdir(parents=True)
    for name in files:
        (directory / name).touch()
    path = f"/keep:{directory}:{tmp_path}/missing:"
    (row,) = (
        row
        for row in plan("single-node-h200", environ={"LD_LIBRARY_PATH": path}).changes
        if row.name == "LD_LIBRARY_PATH"
    )
    assert row.after == (f"/keep:{tmp_path}/missing:" if scrubbed else path)
    assert (f"{directory} holds" in row.reason) == any("-" in name for name in files)
    assert ("and stays, since" in row.reason) == (len(files) == 2 and not scrubbed)


def test_what_is_no_setting_of_a_fabric_stays_on_one_node() -> None:
    own = {"FI_API_KEY": "x", "NCCL_DEBUG": "WARN", "NCCL_TOPO_FILE": "/t.xml", "MASTER_PORT": "1"}
    assert own.items() <= after("single-node-h200", environ=own).items()


SINGLE_NODE_LEFTOVERS = {
    "NCCL_NET_PLUGIN": "none",
    "NCCL_NET": "socket",
    "NCCL_SOCKET_IFNAME": "lo",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_COMM_ID": "127.0.0.1:5000",
    "NCCL_OOB_NET_IFNAME": "=lo",
    "TP_SOCKET_IFNAME": "lo",
    "UCX_NET_DEVICES": "lo",
    "UCX_TLS": "self,sm",
    "FI_PROVIDER": "shm",
}


def test_multi_host_takes_out_what_a_single_node_shell_has_left() -> None:
    left = after("single-node-h200", environ={"NCCL_SOCKET_IFNAME": "lo"}) | SINGLE_NODE_LEFTOVERS
    result = after("multi-host-h200", environ=left)
    assert not SINGLE_NODE_LEFTOVERS.keys() & result.keys()
    assert (result["NCCL_IB_DISABLE"], result["NCCL_IBEXT_DISABLE"]) == ("0", "0")
    sockets = after("multi-host-h200-socket", environ=left)
    assert (sockets["NCCL_NET"], sockets["NCCL_NET_PLUGIN"]) == ("Socket", "none")
    assert not (SINGLE_NODE_LEFTOVERS.keys() - {"NCCL_NET", "NCCL_NET_PLUGIN"}) & sockets.keys()
    meant = Overrides(keep=frozenset({"NCCL_NET"}))
    kept = compute_plan(load_profiles(["multi-host-h200"]), left, meant, PlanContext())
    assert kept.apply(left, FILL)["NCCL_NET"] == "socket"


def test_multi_host_keeps_the_fabric_and_the_plugin_as_they_are() -> None:
    fabric = {
        "NCCL_NET": "gIB",
        "NCCL_NET_PLUGIN": "/usr/local/gib/lib64/libnccl-net.so",
        "NCCL_IB_TC": "52",
        "NCCL_SOCKET_IFNAME": "eth0",
        "GLOO_SOCKET_IFNAME": "eth0",
        "NCCL_COMM_ID": "10.0.0.1:5000",
        "NCCL_TUNER_PLUGIN": "libnccl-tuner.so",
        "NCCL_ENV_PLUGIN": "gcp",
        "UCX_TLS": "rc,sm",
        "UCX_NET_DEVICES": "mlx5_0:1",
        "FI_PROVIDER": "efa,shm",
        "LD_LIBRARY_PATH": "/usr/local/gib/lib64",
    }
    leaked = {"NCCL_IB_DISABLE": "1", "NCCL_IBEXT_DISABLE": "1"}
    result = after("multi-host-h200", environ=fabric | leaked)
    assert fabric.items() <= result.items()
    assert (result["NCCL_IB_DISABLE"], result["NCCL_IBEXT_DISABLE"]) == ("0", "0")


@pytest.mark.parametrize(
    ("value", "stays"),
    [
        ("CollNetChain", False),
        ("collnetdirect,NVLSTree", False),
        ("Ring,CollNetDirect", True),
        ("^NVLSTree", True),
        ("Ring", True),
    ],
)
def test_an_algorithm_that_works_between_nodes_only_goes_on_one_node(
    value: str, stays: bool
) -> None:
    left = {"NCCL_ALGO": value}
    assert ("NCCL_ALGO" in after("single-node-h200", environ=left)) is stays
    assert after("multi-host-h200", environ=left)["NCCL_ALGO"] == value


def test_the_socket_lane_uses_plain_ip_only() -> None:
    left = {"NCCL_NET": "gIB", "NCCL_ENV_PLUGIN": "gcp"}
    result = after("multi-host-h200-socket", environ=left)
    assert result["NCCL_NET"] == "Socket"
    assert "NCCL_ENV_PLUGIN" not in result
    assert SINGLE_NODE_SETS.items() <= result.items()


@pytest.mark.parametrize("torch", TORCH)
@pytest.mark.parametrize("overlay", [(), ("compile-sensitive",), ("regional-compile",)])
@pytest.mark.parametrize("lane", ["single-node-h200", "multi-host-h200", "local-cpu"])
def test_in_process_restart_gets_what_it_needs_even_against_the_shell(
    lane: str, overlay: tuple[str, ...], torch: str
) -> None:
    hostile = {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "TORCH_NCCL_BLOCKING_WAIT": "1",
        "TORCH_NCCL_RETHROW_CUDA_ERRORS": "1",
    }
    result = after(lane, *overlay, environ=hostile, torch=torch)
    assert result["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    assert result["TORCH_NCCL_BLOCKING_WAIT"] == "0"
    assert result["TORCH_NCCL_RETHROW_CUDA_ERRORS"] == "0"
    assert result["TORCH_CPP_LOG_LEVEL"] == "ERROR"
    if lane != "local-cpu":
        shell = {"NCCL_NVLS_ENABLE": "1"}
        assert after(lane, *overlay, environ=shell, torch=torch)["NCCL_NVLS_ENABLE"] == "0"


@pytest.mark.parametrize("restart", ["process", "none"])
def test_without_in_process_restart_torch_behaves_as_under_torchrun(restart: RestartMode) -> None:
    result = after("single-node-h200", restart=restart)
    assert result["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "1"
    absent = {
        "TORCH_NCCL_RETHROW_CUDA_ERRORS",
        "TORCH_NCCL_BLOCKING_WAIT",
        "TORCH_CPP_LOG_LEVEL",
    }
    assert not absent & set(result)


def test_the_second_nccl_engine_is_named_where_it_ignores_a_value() -> None:
    rows = {row.name: row for row in plan("single-node-h200", torch="2.15.0").changes}
    for name in ("TORCH_NCCL_RETHROW_CUDA_ERRORS", "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"):
        assert "classic" in rows[name].reason


@pytest.mark.parametrize(
    ("overlay", "expected"),
    [
        (
            "compile-sensitive",
            {
                "TORCH_NCCL_ENABLE_MONITORING": "0",
                "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "7200",
                "TORCH_DISTRIBUTED_DEFAULT_TIMEOUT": "7200",
                "TORCHINDUCTOR_DISTRIBUTED_MAX_AUTOTUNE_GEMM": "0",
            },
        ),
        (
            "regional-compile",
            {
                "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
                "TORCH_NCCL_BLOCKING_WAIT": "1",
                "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "7200",
                "NCCL_TIMEOUT": "7200",
                "TORCHINDUCTOR_DISTRIBUTED_MAX_AUTOTUNE_GEMM": "0",
            },
        ),
    ],
)
def test_the_compile_overlays_on_a_lane(overlay: str, expected: dict[str, str]) -> None:
    result = after("single-node-h200", overlay, restart="process")
    assert expected.items() <= result.items()
    profile = load_profiles(["single-node-h200", overlay])
    assert profile.timeouts["process_group"] == timedelta(minutes=120)
    assert settle(profile.timeouts).stop_grace == timedelta(seconds=15)


@pytest.mark.parametrize("name", ["TORCH_DISTRIBUTED_DEFAULT_TIMEOUT", "NCCL_TIMEOUT"])
def test_where_a_timeout_that_nothing_reads_is_set_the_group_timeout_says_the_same(
    name: str,
) -> None:
    for ref in SHIPPED:
        profile = load_profiles([ref])
        for entry in profile.env.get(name, ()):
            group = profile.timeouts.get("process_group")
            assert group is not None
            assert entry.value == str(int(group.total_seconds()))
            assert re.search("[Nn]othing reads it|No torch release reads it", entry.why)


def test_a_plain_single_node_lane_leaves_torchs_group_timeout() -> None:
    assert "process_group" not in load_profiles(["single-node-h200"]).timeouts


@pytest.mark.parametrize("lane", ["single-node-h200", "multi-host-h200", "local-cpu"])
def test_the_flight_recorder_is_on_under_the_names_that_torch_reads(lane: str) -> None:
    old, new = "TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_FR_BUFFER_SIZE"
    before = after(lane, torch="2.7.1")
    assert before[new] == before[old] == "2000"
    result = after(lane)
    assert result[new] == "2000"
    assert old not in result  # torch 2.8 and later print a warning for it, on each rank
    assert result["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"].startswith("/r/0/")
    mine = after(lane, environ={"TORCH_NCCL_TRACE_BUFFER_SIZE": "9"})
    assert mine["TORCH_FR_BUFFER_SIZE"] == "9"


def test_debugging_is_never_on_by_default() -> None:
    for lane in ("single-node-h200", "multi-host-h200", "multi-host-h200-socket", "local-cpu"):
        debugging = {"NCCL_DEBUG", "TORCH_DISTRIBUTED_DEBUG", "TORCH_NCCL_DESYNC_DEBUG"}
        assert not debugging & set(after(lane))


@pytest.mark.parametrize("overlay", ["debug-bootstrap", "debug-collectives"])
@pytest.mark.parametrize("restart", RESTART_MODES)
def test_a_debug_overlay_writes_per_rank_files_at_a_level_that_takes_effect(
    overlay: str, restart: RestartMode
) -> None:
    result = after("single-node-h200", overlay, restart=restart)
    assert result["NCCL_DEBUG"] == "INFO"
    assert result["NCCL_DEBUG_FILE"].startswith("/r/0/")
    assert {"%h", "%p"} <= set(re.findall("%[a-z]", result["NCCL_DEBUG_FILE"]))
    assert result["TORCH_DISTRIBUTED_DEBUG"] in ("INFO", "DETAIL")
    assert result["TORCH_CPP_LOG_LEVEL"] == "INFO"


def test_the_allocator_is_left_alone_when_its_other_name_is_used() -> None:
    result = after("single-node-h200", environ={"PYTORCH_ALLOC_CONF": "backend:native"})
    assert "PYTORCH_CUDA_ALLOC_CONF" not in result
