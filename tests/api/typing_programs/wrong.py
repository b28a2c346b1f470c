"""Wrong uses of the Python API: each line that mypy has to refuse names the error's code."""

from __future__ import annotations

from datetime import timedelta

from ncclops import receipt
from ncclops.classify import classify
from ncclops.env import plan_environment
from ncclops.flight import analyze
from ncclops.launch import LaunchRequest, launch, prepare, start

LaunchRequest("train.py")  # E: call-arg
LaunchRequest()  # E: call-arg
LaunchRequest(target="train.py", restart="sometimes")  # E: arg-type
LaunchRequest(target="train.py", timeouts={"soft": 90})  # E: dict-item
LaunchRequest(target="train.py", nproc=2)  # E: call-arg
LaunchRequest(target="train.py", env={"OMP_NUM_THREADS": 1})  # E: dict-item
request = LaunchRequest(target="train.py")
request.target = "other.py"  # E: misc
launch("train.py")  # E: arg-type
verdict = launch(request)
verdict.outcome = "completed"  # E: misc
if verdict.outcome == "succeeded":  # E: comparison-overlap
    print(verdict)
print(verdict.exit)  # E: attr-defined
start(request).wait(5)  # E: arg-type
start(request).stop(grace="30s")  # E: arg-type
prepare(request).start()  # E: attr-defined
plan_environment(restart=True)  # E: arg-type
plan_environment("base", env=["NCCL_DEBUG=INFO"])  # E: arg-type
plan_environment("base").apply({})  # E: call-arg
classify(3)  # E: arg-type
analyze(None)  # E: arg-type
receipt.step("3")  # E: arg-type
receipt.phase("save", limit=600)  # E: arg-type
receipt.phase("save", limit=timedelta(minutes=10))
receipt.check()  # E: call-arg
