"""What variables take: for each grammar of values some that its reader takes, and some not."""

from __future__ import annotations

import pytest

from ncclops.env.lint import Circumstances, LintedSettings, Setting, lint

WRONG = {
    "NCCL_SOCKET_IFNAME": ["eth0;eth1", "eth*", "!docker0", "eth0/eth1"],
    "NCCL_OOB_NET_IFNAME": ["eth0 eth1", "eth0|eth1"],
    "NCCL_IB_HCA": ["mlx5_0;mlx5_1", "mlx5_*", "/dev/infiniband/uverbs0"],
    "TP_SOCKET_IFNAME": ["^lo", "=eth0"],
    "NCCL_IB_ADDR_RANGE": ["10.0.0.0", "ten"],
    "NCCL_DEBUG_LEVELS": ["DEBUG", "WARN;INFO"],
    "NCCL_DEBUG_SUBSYS": ["NET;INIT"],
    "NCCL_BUFFSIZE": ["0", "-1", "4M"],
    "NCCL_P2P_LEVEL": ["PCI", "NVLINK", "NET"],
    "NCCL_NTHREADS": ["100", "1024"],
    "NCCL_LL128_NTHREADS": ["x", "1024"],
    "NCCL_WORK_FIFO_BYTES": ["1000000"],
    "NCCL_COMM_ID": ["10.0.0.1", "1234", "host:"],
    "NCCL_RAS_ADDR": ["localhost"],
    "NCCL_CTA_POLICY": ["FAST"],
    "NCCL_NET_MERGE_LEVEL": ["pix", "ALL"],
    "NCCL_COMM_BLOCKING": ["true", "2"],
    "TORCH_SHOW_CPP_STACKTRACES": ["yes"],
    "GLOO_DEVICE_TRANSPORT": ["tcp"],
    "MASTER_ADDR": ["tcp://10.0.0.1", "host:29500"],
    "OMP_NUM_THREADS": ["0", "all"],
    "CUDA_VISIBLE_DEVICES": ["0;1", "cuda:0", "[0,1]"],
    "CUBLAS_WORKSPACE_CONFIG": ["4096:8", "true"],
    "PYTORCH_CUDA_ALLOC_CONF": [
        "expandable_segments:true",
        "expandable_segments:1",
        "max_split_size_mb:10",
        "garbage_collection_threshold:80",
        "max_split_size_mb:512;expandable_segments:True",
        "True",
    ],
    "FI_EFA_USE_DEVICE_RDMA": ["enabled"],
    "FI_LOG_LEVEL": ["error"],
    "FI_CXI_RX_MATCH_MODE": ["hard"],
    "FI_MR_CACHE_MONITOR": ["none"],
    "UCX_TLS": ["rc cuda", "rc;tcp"],
}
DOUBTFUL = {
    "NCCL_SOCKET_IFNAME": ["^docker0,^lo"],
    "NCCL_IB_HCA": ["all", "mlx5_0-7", "^mlx5_0,^mlx5_1"],
    "NCCL_IB_PKEY": ["0x8001", "32769"],
    "NCCL_NET": ["TCP", "InfiniBand", "eth0"],
    "NCCL_NET_PLUGIN": ["false", "0"],
    "TORCH_FR_BUFFER_SIZE": ["67108864"],
    "CUDA_VISIBLE_DEVICES": ["0,0", "0,1,10,1"],
    "CUDA_LAUNCH_BLOCKING": ["true"],
    "FI_PROVIDER": ["eth0"],
    "UCX_TLS": ["rdma", "tcp,ib0"],
}
RIGHT = {
    "NCCL_ALGO": ["MSCCL,Tree,Ring", "allreduce:tree,ring", "^NVLS"],
    "NCCL_SOCKET_IFNAME": ["eth0", "^docker0,lo", "=eth0,eth1", "^=eth0", "eth0:1", "en"],
    "NCCL_IB_HCA": ["mlx5", "=mlx5_0:1,mlx5_1:1", "^=mlx5_3", "rocep1s0f0", "mlx5_0:1:0:1"],
    "NCCL_IB_PKEY": ["0", "1"],
    "NCCL_IB_ADDR_RANGE": ["10.0.0.0/8", "fe80::/10"],
    "NCCL_DEBUG_LEVELS": ["WARN,INFO", "^TRACE"],
    "NCCL_NET": ["IB", "Socket", "AWS Libfabric", "gIB", "FasTrak", "ofi"],
    "NCCL_NET_PLUGIN": ["none", "ofi", "libnccl-net.so"],
    "NCCL_BUFFSIZE": ["4194304"],
    "NCCL_P2P_LEVEL": ["NVL", "NVB", "C2C", "P2C", "SYS"],  # one parser for both
    "NCCL_NET_GDR_LEVEL": ["NVL", "NVB", "C2C", "PXN", "SYS"],
    "NCCL_NTHREADS": ["64", "256", "640"],
    "NCCL_LL128_NTHREADS": ["-2", "160", "640"],
    "NCCL_WORK_FIFO_BYTES": ["1048576"],
    "NCCL_COMM_ID": ["10.0.0.1:1234", "[::1]:99", "host:1"],
    "NCCL_CTA_POLICY": ["DEFAULT", "EFFICIENCY|ZERO", "1"],
    "NCCL_NET_MERGE_LEVEL": ["PORT", "PIX"],
    "GLOO_DEVICE_TRANSPORT": ["TCP", "UV"],
    "MASTER_ADDR": ["10.0.0.1", "host.domain", "fe80::1"],
    "OMP_NUM_THREADS": ["8", "4,2"],
    "CUDA_VISIBLE_DEVICES": ["", "0", "0,1,10", "1,11", "-1", "GPU-8a2b,GPU-8a2c", "MIG-1"],
    "CUBLAS_WORKSPACE_CONFIG": [":4096:8", ":16:8:4096:2"],
    "PYTORCH_CUDA_ALLOC_CONF": [
        "expandable_segments:True",
        "max_split_size_mb:512, expandable_segments:False",
        "garbage_collection_threshold:0.8,max_split_size_mb:128",
        "backend:cudaMallocAsync",
        "roundup_power2_divisions:[256:1,512:2,1024:4,>:8]",
    ],
    "FI_EFA_USE_DEVICE_RDMA": ["1", "true"],
    "FI_PROVIDER": ["efa", "^tcp", "verbs;ofi_rxm", "cxi"],
    "FI_MR_CACHE_MONITOR": ["userfaultfd"],
    "UCX_TLS": ["all", "^tcp", "rc_x,sm,self,cuda_ipc", "ib", "ud_x"],
    "TORCH_FR_BUFFER_SIZE": ["2000", "200000"],
}


def pairs(table: dict[str, list[str]]) -> list[tuple[str, str]]:
    return [(name, value) for name, values in table.items() for value in values]


def levels(name: str, value: str) -> list[str]:
    found = lint(LintedSettings([Setting(name, value, 1)]), Circumstances())
    return [f.level for f in found if f.rule in ("bad-value", "unlikely-value")]


@pytest.mark.parametrize(("name", "value"), pairs(WRONG))
def test_what_a_reader_does_not_take_is_an_error(name: str, value: str) -> None:
    assert levels(name, value) == ["error"]


@pytest.mark.parametrize(("name", "value"), pairs(DOUBTFUL))
def test_what_is_hardly_meant_is_a_warning(name: str, value: str) -> None:
    assert levels(name, value) == ["warning"]


@pytest.mark.parametrize(("name", "value"), pairs(RIGHT))
def test_what_a_reader_takes_is_no_finding(name: str, value: str) -> None:
    assert levels(name, value) == []


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("OMP_NUM_THREAD", "OMP_NUM_THREADS"),
        ("CUDA_VISIBLE_DEVICE", "CUDA_VISIBLE_DEVICES"),
        ("LD_LIBARY_PATH", "LD_LIBRARY_PATH"),
        ("MY_NUM_THREADS", None),
        ("LOCAL_RANKS", None),
    ],
)
def test_a_letter_amiss_in_a_long_name_is_told(name: str, meant: str | None) -> None:
    found = lint(LintedSettings([Setting(name, "1", 1)]), Circumstances())
    assert [f.remedy for f in found] == ([f"did you mean {meant}?"] if meant else [])


def test_set_and_empty_is_not_set() -> None:
    settings = LintedSettings([Setting("NCCL_DEBUG", ""), Setting("NCCL_DEBUG_SUBSYS", "NET")])
    assert "log-settings-without-log" in {f.rule for f in lint(settings, Circumstances())}
