"""A pretraining script that uses in-process restart the way Megatron-LM does; nothing of ncclops.

The calls are Megatron's (``megatron/training/inprocess_restart.py`` and its callers) as facts: a
tree with a reserve, a second store beside the wrapper's, a name space of it for each iteration, and
an adapter in place of the function as Megatron-Bridge has one. Model and data are small, and the
last step of the first iteration goes wrong as the arguments say: ``kill`` or ``raise``.
"""

import argparse
import logging
import os
import signal
import socket
import sys
from datetime import timedelta
from typing import Any, Optional

import torch
import torch.distributed as dist

try:
    import nvidia_resiliency_ext.inprocess as inprocess
    from nvidia_resiliency_ext.inprocess import CallWrapper
except ImportError:
    inprocess = None
    CallWrapper = type(None)

try:
    from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncRequest
except ImportError:
    AsyncRequest = None

STEPS, FAULTY_STEP = 6, 3
GLOBALS: dict[str, Any] = {}


def destroy_state() -> None:
    GLOBALS.clear()


class AbortCheckpoint(inprocess.abort.Abort if inprocess else object):  # type: ignore[misc]
    def __call__(self, state: "inprocess.state.FrozenState") -> "inprocess.state.FrozenState":
        say(f"checkpoint worker of rank {state.rank} reset")
        return state


def say(line: str) -> None:
    os.write(1, f"{line}\n".encode())


def wrapped(train: Any, args: argparse.Namespace) -> Any:
    layers = [
        inprocess.rank_assignment.Layer(
            min_ranks=args.active,
            max_ranks=args.active,
            flag=inprocess.rank_assignment.LayerFlag.RESERVE,
        )
    ]
    if args.granularity == "node":
        layers.append(
            inprocess.rank_assignment.Layer(
                min_ranks=1,
                max_ranks=int(os.environ["WORLD_SIZE"]),
                key_or_fn=lambda _: socket.gethostname(),
                flag=inprocess.rank_assignment.LayerFlag.RESERVE,
            )
        )
    finalize = [
        inprocess.finalize.ThreadedFinalize(timeout=timedelta(seconds=10), fn=destroy_state),
        inprocess.finalize.ThreadedFinalize(
            timeout=timedelta(seconds=10), fn=torch.cuda.empty_cache
        ),
    ]
    return inprocess.Wrapper(
        store_kwargs={
            "timeout": timedelta(seconds=300),
            "port": int(os.environ["MASTER_PORT"]) + 2,
        },
        initialize=inprocess.Compose(
            inprocess.initialize.RetryController(min_world_size=args.active),
            inprocess.nested_restarter.NestedRestarterHandlingCompleted(),
        ),
        abort=inprocess.Compose(
            inprocess.abort.AbortTransformerEngine(),
            inprocess.abort.AbortTorchDistributed(),
            AbortCheckpoint(),
            inprocess.nested_restarter.NestedRestarterHandlingStarting(),
        ),
        completion=inprocess.nested_restarter.NestedRestarterFinalized(),
        terminate=inprocess.nested_restarter.NestedRestarterAborted(),
        health_check=inprocess.health_check.CudaHealthCheck(timeout=timedelta(seconds=10)),
        rank_assignment=inprocess.rank_assignment.Tree(layers=layers),
        finalize=inprocess.Compose(*finalize),
        heartbeat_interval=timedelta(seconds=30),
        heartbeat_timeout=timedelta(seconds=60),
        barrier_timeout=timedelta(seconds=120),
        completion_timeout=timedelta(seconds=120),
        monitor_process_interval=timedelta(seconds=1),
        monitor_thread_interval=timedelta(seconds=1),
        progress_watchdog_interval=timedelta(seconds=1),
        last_call_wait=timedelta(milliseconds=100),
        soft_timeout=timedelta(seconds=60),
        hard_timeout=timedelta(seconds=90),
        termination_grace_time=timedelta(seconds=1),
        enabled=True,
    )(train)


def pretrain(
    args: argparse.Namespace,
    store: dist.Store | None = None,
    inprocess_call_wrapper: Optional[CallWrapper] = None,  # noqa: UP045 - as the script has it
) -> None:
    iteration = 0
    if inprocess_call_wrapper is not None:
        iteration = inprocess_call_wrapper.iteration
        store = dist.PrefixStore(str(iteration), store)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(minutes=5)
    )
    assert not GLOBALS, "state of an earlier iteration"
    model = GLOBALS["model"] = torch.nn.Linear(4, 1)
    for step in range(STEPS):
        loss = model(torch.ones(2, 4)).square().mean()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        if iteration == 0 and rank == 1 and step == FAULTY_STEP:
            if args.fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("a fault on purpose")
    say(f"iteration {iteration}: rank {rank} of {world_size} trained {STEPS} steps")
    dist.destroy_process_group()
    destroy_state()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--active", type=int, default=2)
    parser.add_argument("--granularity", choices=("node", "rank"), default="node")
    parser.add_argument("--fault", choices=("kill", "raise"), required=True)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")
    if inprocess is None:
        sys.exit("In-process restart is not available")
    run = wrapped(pretrain, args)
    store = dist.TCPStore(
        host_name=os.environ["MASTER_ADDR"],
        port=int(os.environ["MASTER_PORT"]) + 1,
        world_size=int(os.environ["WORLD_SIZE"]),
        is_master=int(os.environ["RANK"]) == 0,
        timeout=timedelta(seconds=300),
        wait_for_workers=True,
        use_libuv=True,
    )
    run(args, store=store)


if __name__ == "__main__":
    main()
