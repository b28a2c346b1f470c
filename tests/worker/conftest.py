"""Scripts under the worker entry, and runs of `ncclops launch`, for tests of what workers do."""

from tests.launch.conftest import only_run, script

__all__ = ["only_run", "script"]
