"""The environment as data: the plan, and how it is written for shells and programs.

    from ncclops.env import plan_environment

    plan = plan_environment("single-node-h200", env={"NCCL_DEBUG": "INFO"})
    for change in plan.changes:
        print(change.action, change.name, change.after, change.reason)

``plan.apply`` gives the environment itself; ``ncclops.env.snapshot`` writes environments down and
compares two. Nothing here changes this process's environment, and any thread may call it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ncclops.env.plan import Action, Change, Overrides, Plan, PlanContext, compute_plan
from ncclops.host.software import has_rdma, installed_nccl, installed_torch
from ncclops.lazy_names import lazy_names

if TYPE_CHECKING:
    from ncclops.env.request import plan_environment

__all__ = [
    "Action",
    "Change",
    "Overrides",
    "Plan",
    "PlanContext",
    "compute_plan",
    "has_rdma",
    "installed_nccl",
    "installed_torch",
    "plan_environment",
]


# It reads profiles, which imports pydantic.
__getattr__ = lazy_names(__name__, {"plan_environment": "request"})
