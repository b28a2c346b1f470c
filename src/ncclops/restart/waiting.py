"""Whether a thread waits for the peers of its rank, by its stack. Standard library only."""

from __future__ import annotations

import re
import sys
import threading
from traceback import walk_stack
from types import FrameType

# Ours around torch's calls: some of them under `ncclops launch` alone.
_AROUND = ("/ncclops/worker/waits.py", "/ncclops/restart/_groups/open_operations.py")
_TORCH = "/torch/"
_DISTRIBUTED = "/torch/distributed/"
# Not in these: what they wait for comes.
_ENDINGS = {"destroy_process_group", "_shutdown_backend"}
_DISK = "/torch/distributed/checkpoint/"
_BACKWARD = "/torch/autograd/graph.py", "_engine_run_backward"
_FILE = re.compile(r'^ +File "([^"\n]+)"', re.MULTILINE)


def is_in_collective(main_thread: FrameType) -> bool:
    """Whether it is in a call of ``torch.distributed`` that may wait for peers."""
    files, calls = [], set()
    for frame, _ in walk_stack(main_thread):
        if frame.f_code.co_filename.endswith(_AROUND):
            continue
        if not is_of_torch(frame):
            break
        files.append(frame.f_code.co_filename)
        calls.add(frame.f_code.co_name)
    is_waiting = any(_DISTRIBUTED in file for file in files)
    return is_waiting and not any(_DISK in file for file in files) and calls.isdisjoint(_ENDINGS)


def main_thread_is_in_collective() -> bool:
    """Likewise, of this process's main thread. Any thread."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return frame is not None and is_in_collective(frame)


def is_in_backward(main_thread: FrameType) -> bool:
    """Whether it waits for autograd's threads, or computes there: no frame of Python is within."""
    code = main_thread.f_code
    file, name = _BACKWARD
    return code.co_name == name and code.co_filename.endswith(file)


def is_of_torch(frame: FrameType) -> bool:
    return _TORCH in frame.f_code.co_filename


def waits_for_peers(stack: str) -> bool:
    """Whether ``stack``, the text of one thread's, ends in ``torch.distributed``."""
    files = [file for file in _FILE.findall(stack) if not file.endswith(_AROUND)]
    return bool(files) and _DISTRIBUTED in files[-1] and _DISK not in files[-1]
