"""A link with a delay: two TAP devices, and this process between them.

``python -m tests.preflight.slow_link NAMESPACE INSIDE OUTSIDE SECONDS`` in the hub's namespace:
``INSIDE`` goes to ``NAMESPACE``, and what is sent on one comes out of the other later.
(Not every kernel has netem.)
"""

from __future__ import annotations

import fcntl
import heapq
import itertools
import os
import select
import struct
import subprocess
import sys
import time

_TUNSETIFF = 0x400454CA  # linux/if_tun.h
_IFF_TAP, _IFF_NO_PI = 0x0002, 0x1000


def tap(name: str) -> int:
    fd = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH14x", name.encode(), _IFF_TAP | _IFF_NO_PI))
    return fd


def main(namespace: str, inside: str, outside: str, seconds: str) -> None:
    one, other = tap("slow0"), tap(outside)
    subprocess.run(["ip", "link", "set", "slow0", "netns", namespace, "name", inside], check=True)
    print("ready", flush=True)
    across = {one: other, other: one}
    late: list[tuple[float, int, int, bytes]] = []
    number = itertools.count()
    while True:
        patience = max(0.0, late[0][0] - time.monotonic()) if late else None
        for fd in select.select([one, other], [], [], patience)[0]:
            frame = os.read(fd, 1 << 16)
            heapq.heappush(
                late, (time.monotonic() + float(seconds), next(number), across[fd], frame)
            )
        while late and late[0][0] <= time.monotonic():
            *_, fd, frame = heapq.heappop(late)
            try:
                os.write(fd, frame)
            except OSError:
                continue  # that end is down


if __name__ == "__main__":
    main(*sys.argv[1:])
