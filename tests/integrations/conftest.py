"""Runs of `ncclops launch`, for tests of what trainers do in them."""

from tests.launch.conftest import background, only_run

__all__ = ["background", "only_run"]
