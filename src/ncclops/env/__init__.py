"""The environment as data: the plan, and how it is written for shells and programs."""

from __future__ import annotations

from ncclops.env.host import has_rdma, installed_nccl, installed_torch
from ncclops.env.plan import Action, Change, Overrides, Plan, PlanContext, compute_plan

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
]
