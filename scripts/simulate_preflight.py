"""How long preflight takes for hundreds and thousands of hosts, from parts measured here.

    .venv/bin/python scripts/simulate_preflight.py [--hosts 512 4096]
    .venv/bin/python scripts/simulate_preflight.py --faults 1000 [--from 0]

No machine of a developer has 512 hosts. Measured: what one host's process does a second (open
probes and answer as many), what the store's process does, and the judging of the whole matrix, with
faults planted. Computed from these: each host has its own CPU, all of them one store, and rounds
end when the slowest edge has, or at their limit. Waiting for packets that are dropped is what the
limits of ``probe`` say it is.

With ``--faults``: so many clusters made up by seed, of 4 to 64 hosts with one to three faults at
once (``tests/preflight/made_edges.py``), and how many verdicts were right. Prints each that was
not, and exits with 1 if one convicted what had no fault.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections import Counter
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).parents[1]))

from ncclops.preflight.edges import schedule, wire
from ncclops.preflight.edges.judge import judge
from ncclops.preflight.edges.listener import Listener
from ncclops.preflight.edges.model import Facts, Outcome, Place, Plan, Seen, Verdict
from ncclops.preflight.edges.probe import FIRST, SECOND, probe
from ncclops.preflight.edges.run import Limits
from ncclops.restart import store_server
from tests.preflight.made_edges import judged

_PROBES = 1500
_AT_ONCE, _HOSTS_AT_ONCE = 16, 8
_UID = "0" * 32


@dataclass(frozen=True)
class Parts:
    """Per second: probes that a process opens while it answers as many, with 64 KiB each way and
    without; requests and bytes of the store's process."""

    whole: float
    small: float
    requests: float
    bytes: float


def measure() -> Parts:
    """On this machine, over its loopback."""
    whole, small = asyncio.run(_probes())
    requests, rate = _store()
    return Parts(whole, small, requests, rate)


async def _probes() -> tuple[float, float]:
    place = Place(interface="lo", address="127.0.0.1", prefix=8, family=4, mtu=65536)
    listener = Listener(_UID)
    await listener.start(place, (40000, 45000), 4, 0)

    async def rate(data_bytes: int, pings: int, count: int) -> float:
        numbers = iter(range(count))

        async def walk() -> None:
            for number in numbers:
                found = await probe(
                    "127.0.0.1",
                    listener.ports[1 + number % (len(listener.ports) - 1)],
                    own_uid=_UID,
                    place=place,
                    pings=pings,
                    data_bytes=data_bytes,
                )
                assert found.how is None, found

        began = time.perf_counter()
        await asyncio.gather(*(walk() for _ in range(_AT_ONCE)))
        return count / (time.perf_counter() - began)

    rates = await rate(wire.DATA_BYTES, 4, _PROBES), await rate(0, 0, _PROBES)
    await listener.close()
    return rates


def _store() -> tuple[float, float]:
    tcp_store = store_server.load_tcp_store()
    listener = store_server.bind(0, loopback=True)
    assert listener is not None
    port = listener.getsockname()[1]
    server = store_server.serve(listener.detach(), port, tcp_store)
    limit = timedelta(seconds=30)
    client = tcp_store("127.0.0.1", port, None, False, limit, wait_for_workers=False)
    client.set("small", "x" * 200)
    client.set("large", "x" * 1_000_000)
    began = time.perf_counter()
    for _ in range(2000):
        client.get("small")
    requests = 2000 / (time.perf_counter() - began)
    began = time.perf_counter()
    for _ in range(200):
        client.get("large")
    rate = 200 * 1_000_000 / (time.perf_counter() - began)
    del client, server
    return requests, rate


def cluster(n: int) -> tuple[Facts, ...]:
    """``n`` hosts in two subnets."""
    return tuple(
        Facts(
            name=f"n{number:04d}",
            uid=f"{number:032x}",
            rank=number,
            boot_id=str(number),
            place=Place(
                interface="eth0",
                address=f"10.{number // (n // 2)}.{number // 250 % 250}.{number % 250 + 1}",
                prefix=16,
                family=4,
                mtu=1500,
                mac=f"02:00:00:00:{number // 256:02x}:{number % 256:02x}",
            ),
            ports=(29500, *range(32768, 32768 + 32 * 800, 800)),
            port_range=(32768, 60999),
        )
        for number in range(n)
    )


def faults(n: int) -> dict[str, set[tuple[int, int]]]:
    """What fails, by the name of the fault."""
    everyone = range(n)
    half = schedule.edges_between(range(n // 2), range(n // 2, n)) if n <= 1024 else set()
    return {
        "nothing": set(),
        "a host": schedule.edges_between(everyone, (7,)) | schedule.edges_between((7,), everyone),
        "four edges": {(1, 2), (30, 40), (40, 30), (5, 6)},
        "one subnet to the other": half,
    }


def reports(
    n: int, failed: set[tuple[int, int]], limit_s: float
) -> tuple[dict[int, Outcome], float]:
    """What each host reports, and how long the slowest waits for edges that are dead."""
    dead_s = 2 * FIRST.connect  # the first port, and then three at once
    most = int(limit_s / dead_s) * _HOSTS_AT_ONCE
    by_src: dict[int, list[int]] = {}
    for src, dst in failed:
        by_src.setdefault(src, []).append(dst)
    outcomes, slowest = {}, 0.0
    for src in range(n):
        order = sorted(by_src.get(src, ()), key=lambda dst, src=src: (dst - src) % n)
        tried, late = order[:most], order[most:]
        slowest = max(slowest, dead_s * -(-len(order) // _HOSTS_AT_ONCE))
        seen = tuple(
            Seen(dst=dst, failed=dict.fromkeys(schedule.slots(n, src, dst, 32)[:4], "timeout"))
            for dst in tried
        )
        outcomes[src] = Outcome(src=src, seen=seen, skipped=tuple(late), rtt_ms=0.1)
    return outcomes, min(limit_s, slowest)


def simulate(n: int, parts: Parts) -> None:
    """Print a row for each fault."""
    hosts, limits = cluster(n), Limits()
    plan_bytes = len(msgspec.json.encode(Plan(hosts=hosts)))
    count = len(schedule.slots(n, 0, 1, 32))
    opening_s = (n - 1) * (1 / parts.whole + (count - 1) / parts.small)
    for name, failed in faults(n).items():
        if name.startswith("one subnet") and not failed:
            continue
        first, waiting_s = reports(n, failed, limits.first)
        round_s = min(limits.first, max(opening_s, waiting_s))
        again = schedule.again(n, first)
        second = {
            src: Outcome(
                src=src,
                seen=tuple(s for s in each.seen if s.dst in set(again.get(src, ()))),
            )
            for src, each in first.items()
            if again
        }
        # What is dead is tried once more, from other local ports.
        dead_s = SECOND.connect + FIRST.connect
        second_s = min(limits.second, dead_s) if again else 0.0
        began = time.perf_counter()
        verdict = judge(hosts, first, second, expected=n, least=n)
        judging_s = time.perf_counter() - began
        told = len(msgspec.json.encode(verdict))
        said = sum(len(msgspec.json.encode(each)) for each in first.values())
        meeting_s = 8 * n / parts.requests + (n * (plan_bytes + told) + 2 * said) / parts.bytes
        total_s = meeting_s + round_s + second_s + judging_s
        causes = "; ".join(f"{each.kind} {each.shape}" for each in verdict.causes) or "none"
        print(
            f"| {n} | {name} | {meeting_s:.1f} | {round_s:.1f} | {second_s:.1f} |"
            f" {judging_s:.2f} | **{total_s:.1f}** | {causes} |"
        )
        check(verdict, failed)


def check(verdict: Verdict, failed: set[tuple[int, int]]) -> None:
    """What is planted is found, and nothing else."""
    convicted = [each for each in verdict.causes if each.severity == "FAIL"]
    assert bool(convicted) == bool(failed)


def faults_at_once(seeds: range) -> int:
    """Print what became of them; 1 if a host or an edge without a fault was convicted."""
    seen, began = Counter[str](), time.perf_counter()
    convicted = 0
    for seed, made, wrong, lacking in judged(seeds):
        word = "wrong" if wrong else "incomplete" if lacking else "right"
        seen[word] += 1
        convicted += sum(each.startswith("host ") for each in wrong)
        if word != "right":
            planted = ", ".join(each.name for each in made.faults)
            print(f"seed {seed}, {made.n} hosts, {word}: {planted}: {(wrong or lacking)[0]}")
    counts = ", ".join(f"{count} {word}" for word, count in sorted(seen.items()))
    print(f"{len(seeds)} clusters: {counts}; {convicted} hosts convicted without a fault")
    print(f"{time.perf_counter() - began:.0f} s")
    return int(bool(seen["wrong"]))


def main() -> int:
    """Measure and print, or try faults."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--hosts", type=int, nargs="+", default=[512, 4096])
    parser.add_argument("--faults", type=int, default=0, metavar="SEEDS")
    parser.add_argument("--from", type=int, default=0, dest="start", metavar="SEED")
    chosen = parser.parse_args()
    if chosen.faults:
        return faults_at_once(range(chosen.start, chosen.start + chosen.faults))
    parts = measure()
    print(f"probes a second, 64 KiB each way: {parts.whole:.0f}; without data: {parts.small:.0f}")
    print(f"store: {parts.requests:.0f} requests a second, {parts.bytes / 1e6:.0f} MB/s")
    print("| hosts | planted | meeting s | first s | second s | judging s | all s | found |")
    print("|---|---|---|---|---|---|---|---|")
    for n in chosen.hosts:
        simulate(n, parts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
