"""Copies tensors into the buffer of a snapshot.

What is on the host is copied at once: nothing would keep the next step from changing it. What is on
a GPU is copied by a stream of its own, after all that the current stream has been given, and the
caller does not wait. The next step must not change a tensor before it is copied, and there are two
ways to see to that:

- Parameters and states of optimizers are changed by ``optimizer.step()`` alone. So the copy goes on
  during the next forward and backward pass, and the current stream waits for it just before the
  next step of any optimizer (a hook of torch's for all of them).
- All other tensors (buffers, averages) may be changed at any time: they are copied first, and the
  current stream waits for them right away.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ncclops.restart.snapshot._blobs import Blob, Row, tensor_of
from ncclops.restart.snapshot._errors import NoRoom
from ncclops.restart.snapshot._room import available_bytes, check, local_ranks

if TYPE_CHECKING:
    from torch import Tensor


def make_buffer(nbytes: int, sources: Iterable[Tensor]) -> Tensor:
    """On the host; pinned where one of ``sources`` is on a GPU. All of it is in memory.

    Raises ``NoRoom``.
    """
    import torch

    check(nbytes, available_bytes(), local_ranks())
    pinned = any(each.is_cuda for each in sources)
    try:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned).zero_()
    except RuntimeError as error:  # a limit of the process, or of what may be pinned
        raise NoRoom(f"{nbytes / 2**30:.3g} GiB of memory: {error}") from error


class Copier:
    """Copies for one rank. Main thread. ``overlaps``: during the next forward and backward pass."""

    def __init__(self, *, overlaps: bool) -> None:
        self._overlaps = overlaps
        self._stream: Any = None
        self._pending: list[Any] = []  # events that come before the next step of an optimizer
        self._hook: Any = None

    def copy(
        self, blob: Blob, rows: Sequence[Row], sources: Sequence[Tensor], late: Collection[int]
    ) -> None:
        """Copy ``sources`` into the buffer of ``blob``, as ``rows`` say.

        ``late`` are the addresses of those tensors that only an optimizer's step changes.
        """
        import torch

        on_gpu = []
        with torch.no_grad():
            for row, source in zip(rows, sources, strict=True):
                if not row.nbytes:
                    continue
                if source.is_cuda:
                    on_gpu.append((row, source))
                else:
                    tensor_of(blob.buffer, row).copy_(source)
            if on_gpu:
                self._copy_from_gpu(blob, on_gpu, late)
        blob.is_copied = not on_gpu

    def _copy_from_gpu(
        self, blob: Blob, pairs: Sequence[tuple[Row, Tensor]], late: Collection[int]
    ) -> None:
        import torch

        if self._stream is None:
            self._stream = torch.cuda.Stream()
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        overlapping = [each for each in pairs if self._overlaps and each[1].data_ptr() in late]
        at_once = [each for each in pairs if not (self._overlaps and each[1].data_ptr() in late)]
        if at_once:
            blob.waits_for.append(self._copy_on_stream(blob, at_once))
            current.wait_event(blob.waits_for[-1])
        if overlapping:
            blob.waits_for.append(self._copy_on_stream(blob, overlapping))
            self._pending.append(blob.waits_for[-1])
            self._watch_optimizers()

    def _copy_on_stream(self, blob: Blob, pairs: Sequence[tuple[Row, Tensor]]) -> Any:
        import torch

        with torch.cuda.stream(self._stream):
            for row, source in pairs:
                tensor_of(blob.buffer, row).copy_(source, non_blocking=True)
                source.record_stream(self._stream)
            done = torch.cuda.Event(blocking=True)  # whoever waits for it, sleeps
            done.record(self._stream)
        return done

    def _watch_optimizers(self) -> None:
        from torch.optim import optimizer

        if self._hook is None:
            self._hook = optimizer.register_optimizer_step_pre_hook(self._before_step)

    def _before_step(self, *_: object) -> None:
        self.wait_on_device()

    def wait_on_device(self) -> None:
        """What the current stream is given from now on comes after all copies. Does not block."""
        if self._pending:
            import torch

            for event in self._pending:
                torch.cuda.current_stream().wait_event(event)
            self._pending.clear()

    def close(self) -> None:
        """Take the hook away."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
