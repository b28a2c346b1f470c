#!/usr/bin/env python3
"""Scripted histories of jobs, shown to the hang detector and to watchdogs with one timer.

    python scripts/simulate_hangs.py [--histories 1200] [--seed 0] [--json]

Each history is a job of 2 to 6 ranks: start-up, compile, steps, and what happens in between.
Harmless are a slow compile, a long checkpoint (declared or not), a data stall, a slow rank and a
recompile. A history may then end in a hang: one rank that keeps the GIL, a collective that no
rank leaves, a rank that idles outside a collective for good, a rank that dies. A kill in a harmless
history, or before the hang, is a false kill; a hang that is not found within its window is missed.

Sensors miss a look now and then. In harmless histories any of them may be blind throughout; in
those that hang only the GPU's may, because a hang must leave two kinds of evidence to be found: an
agent can always read the CPU time of its own children, and profiles switch torch's flight recorder
on.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal

from ncclops.health.evidence import Reading, Tracker
from ncclops.health.hang import HangLimits, judge

LOOK_EVERY_S = 60.0
MINUTE = 60.0
LIMITS = HangLimits()
OURS = "two kinds of evidence"
# A hang is due within the window that applies to it (ten steps of 45 s fit into the shortest), and
# three looks.
SLACK_S = 3 * LOOK_EVERY_S

Mode = Literal["step", "wait", "busy", "gil", "idle", "dead"]
Fault = Literal["gil-held", "same-operation", "idle-outside", "dead-rank"]

DUE_S: dict[Fault, float] = {
    "gil-held": LIMITS.hang.total_seconds(),
    "same-operation": LIMITS.hang.total_seconds(),
    "idle-outside": LIMITS.quiet.total_seconds(),
    "dead-rank": 0.0,
}


@dataclass(frozen=True)
class Act:
    """A stretch of time in which every rank is in one mode; ``modes`` by rank, default ``mode``."""

    seconds: float
    mode: Mode
    modes: dict[int, Mode] = field(default_factory=dict)
    phase: tuple[int, float] | None = None  # rank that declares it, limit in seconds
    warm: bool = True
    slowdown: float = 1.0


@dataclass(frozen=True)
class History:
    """One job. ``fault`` begins with the last act, which lasts until somebody finds it."""

    name: str
    ranks: int
    step_s: float
    spins: bool  # waiting for a collective burns CPU
    blind: frozenset[str]  # sensors that read nothing
    acts: tuple[Act, ...]
    fault: Fault | None
    seed: int

    @property
    def fault_at(self) -> float | None:
        if self.fault is None:
            return None
        return sum(act.seconds for act in self.acts[:-1])


# ---- writing histories ------------------------------------------------------------------------


def write_history(seed: int) -> History:
    """A history from its number: the same number, the same history."""
    rng = random.Random(seed)
    ranks = rng.randint(2, 6)
    fault: Fault | None = rng.choice([None, None, None, *DUE_S])
    sensors = ("gpu", "cpu", "collective", "tick") if fault is None else ("gpu",)
    blind = frozenset(sensor for sensor in sensors if rng.random() < 0.3)
    name, middle = rng.choice(HARMLESS)
    step_s = rng.choice([0.3, 2.0, 10.0, 45.0])
    acts = [*start_up(rng, ranks), steps(rng), *middle(rng, ranks), steps(rng, least_s=12 * step_s)]
    if fault is not None:
        acts.append(faulty_act(fault, rng, ranks))
    return History(
        name=name,
        ranks=ranks,
        step_s=step_s,
        spins=rng.random() < 0.5,
        blind=blind,
        acts=tuple(acts),
        fault=fault,
        seed=seed,
    )


def start_up(rng: random.Random, ranks: int) -> list[Act]:
    """Imports, then a compile that ranks finish at different times."""
    slowest = rng.randrange(ranks)
    return [
        Act(rng.uniform(0.5, 5) * MINUTE, "busy", warm=False),
        *compile_acts(rng, slowest, rng.uniform(0.5, 6) * MINUTE),
    ]


def compile_acts(rng: random.Random, slowest: int, seconds: float) -> list[Act]:
    """All compile, then wait for the slowest; it keeps the GIL for minutes at a time."""
    acts = []
    left = seconds
    while left > 0:
        part = min(left, rng.uniform(1, 8) * MINUTE)
        modes: dict[int, Mode] = {slowest: rng.choice(["busy", "gil"])}
        together = left > seconds * 0.6
        acts.append(Act(part, "busy" if together else "wait", modes, warm=False))
        left -= part
    return acts


def steps(rng: random.Random, least_s: float = 0.0) -> Act:
    """Undisturbed; before a hang at least ``least_s``, so that the usual step time is known."""
    return Act(max(least_s, rng.uniform(4, 20) * MINUTE), "step")


def slow_compile(rng: random.Random, ranks: int) -> list[Act]:
    """A compile that begins again, as after a restart: up to 100 minutes."""
    return compile_acts(rng, rng.randrange(ranks), rng.uniform(15, 100) * MINUTE)


def long_checkpoint(rng: random.Random, _ranks: int) -> list[Act]:
    """Rank 0 writes, mostly waiting for the file server; undeclared up to 25 minutes."""
    if rng.random() < 0.5:
        limit = rng.uniform(20, 90) * MINUTE
        seconds = limit * rng.uniform(0.5, 0.95)
        return [Act(seconds, "wait", {0: rng.choice(["idle", "busy"])}, phase=(0, limit))]
    pickling = Act(rng.uniform(0.5, 4) * MINUTE, "wait", {0: "gil"})
    return [pickling, Act(rng.uniform(3, 25) * MINUTE, "wait", {0: "idle"})]


def data_stall(rng: random.Random, ranks: int) -> list[Act]:
    """A loader that gets nothing: one rank is idle outside a collective, the others wait for it."""
    return [Act(rng.uniform(3, 27) * MINUTE, "wait", {rng.randrange(ranks): "idle"})]


def slow_rank(rng: random.Random, _ranks: int) -> list[Act]:
    """Steps become several times as long for all, because one rank is slow."""
    return [Act(rng.uniform(10, 40) * MINUTE, "step", slowdown=rng.uniform(2, 8))]


def recompile(rng: random.Random, ranks: int) -> list[Act]:
    """A new shape in mid-run: one rank compiles for long, undeclared, the others wait."""
    rank = rng.randrange(ranks)
    acts = []
    for _ in range(rng.randint(1, 5)):
        acts.append(Act(rng.uniform(1, 9) * MINUTE, "wait", {rank: "busy"}))
        acts.append(Act(rng.uniform(0.5, 5) * MINUTE, "wait", {rank: "gil"}))
    return [*acts, Act(MINUTE, "wait", {rank: "busy"})]


def nothing_special(rng: random.Random, _ranks: int) -> list[Act]:
    return [steps(rng)]


Middle = Callable[[random.Random, int], list[Act]]
HARMLESS: list[tuple[str, Middle]] = [
    ("slow compile", slow_compile),
    ("long checkpoint", long_checkpoint),
    ("data stall", data_stall),
    ("slow rank", slow_rank),
    ("recompile", recompile),
    ("steady", nothing_special),
]


def faulty_act(fault: Fault, rng: random.Random, ranks: int) -> Act:
    rank = rng.randrange(ranks)
    if fault == "same-operation":
        return Act(0.0, "wait")
    mode: Mode = {"gil-held": "gil", "idle-outside": "idle", "dead-rank": "dead"}[fault]  # type: ignore[assignment]
    return Act(0.0, "wait", {rank: mode})


# ---- playing them ------------------------------------------------------------------------------


class Rank:
    """The counters of one rank as they would be read, moved on by :meth:`live`."""

    def __init__(self, history: History, rank: int) -> None:
        self._history = history
        self._rank = rank
        self._rng = random.Random(history.seed * 1000 + rank)
        self._steps = 0.0
        self._tick = self._enqueued = self._completed = 0
        self._cpu_s = 0.0
        self._burns = self._rng.random() < 0.5  # what keeps the GIL: a loop, or a wait

    def live(self, act: Act, seconds: float) -> None:
        mode = act.modes.get(self._rank, act.mode)
        if mode == "step":
            self._steps += seconds / (self._history.step_s * act.slowdown)
            self._completed = self._enqueued = int(self._steps * 10)
            self._enqueued += self._rng.randint(0, 1)
        elif mode == "wait":
            self._enqueued = self._completed + 1
        else:
            self._enqueued = self._completed
        if mode not in ("gil", "dead"):
            self._tick += 1
        self._cpu_s += seconds * self._cpu_share(mode)

    def _cpu_share(self, mode: Mode) -> float:
        if mode in ("idle", "dead"):
            return 0.01
        if mode == "gil":
            return 1.0 if self._burns else 0.0
        if mode == "wait":
            return 1.0 if self._history.spins else 0.02
        return self._rng.uniform(0.5, 4.0)

    def read(self, act: Act, acted_s: float) -> Reading:
        mode = act.modes.get(self._rank, act.mode)
        blind = self._history.blind
        declared = act.phase is not None and act.phase[0] == self._rank
        missed = self._rng.random() < 0.02  # a look that came to nothing
        return Reading(
            rank=self._rank,
            alive=mode != "dead",
            steps=int(self._steps),
            tick=None if "tick" in blind else self._tick,
            enqueued=None if "collective" in blind else self._enqueued,
            completed=None if "collective" in blind else self._completed,
            cpu_s=None if "cpu" in blind or missed else self._cpu_s,
            gpu_active=None if "gpu" in blind else mode in ("wait", "step"),
            warming_up=not act.warm or (self._history.name == "slow compile" and self._steps < 2),
            phase="checkpoint" if declared else None,
            phase_age=timedelta(seconds=acted_s) if declared else None,
            phase_limit=timedelta(seconds=act.phase[1]) if declared and act.phase else None,
        )


def play(history: History) -> Iterator[tuple[float, list[Reading]]]:
    """The readings of all ranks, look by look; the act of a fault goes on for good."""
    ranks = [Rank(history, rank) for rank in range(history.ranks)]
    now = 0.0
    for act in history.acts:
        acted = 0.0
        lasts = act.seconds if act is not history.acts[-1] or history.fault is None else 1e9
        while acted < lasts:
            seconds = min(LOOK_EVERY_S, lasts - acted)
            acted += seconds
            now += seconds
            for rank in ranks:
                rank.live(act, seconds)
            yield now, [rank.read(act, acted) for rank in ranks]


# ---- watching them -----------------------------------------------------------------------------

Watch = Callable[[float, list[Reading]], bool]


def detector(history: History) -> Watch:
    """Ours: says True when it would kill."""
    trackers = [Tracker() for _ in range(history.ranks)]

    def look(now: float, readings: list[Reading]) -> bool:
        samples = [
            tracker.add(reading, now) for tracker, reading in zip(trackers, readings, strict=True)
        ]
        return judge(samples, LIMITS, world_size=history.ranks).hung

    return look


def one_timer(limit_s: float) -> Callable[[History], Watch]:
    """A watchdog that kills when a rank's step counter has not moved for ``limit_s``."""

    def watch(history: History) -> Watch:
        moved = [0.0] * history.ranks
        last = [-1] * history.ranks

        def look(now: float, readings: list[Reading]) -> bool:
            for reading in readings:
                if reading.steps != last[reading.rank]:
                    last[reading.rank], moved[reading.rank] = reading.steps or 0, now
            return now - min(moved) > limit_s

        return look

    return watch


@dataclass
class Score:
    """What one watchdog did over all histories."""

    false_kills: list[str] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)
    delays_s: list[float] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        delay = statistics.median(self.delays_s) if self.delays_s else None
        return {
            "false_kills": len(self.false_kills),
            "missed_hangs": len(self.missed),
            "found": len(self.delays_s),
            "median_delay_s": delay,
        }


def due_at(history: History, title: str) -> float:
    """By when ``title`` must have found the hang: ours within the window of that kind of hang,
    others within the longest window of any.
    """
    if history.fault is None or history.fault_at is None:
        return float("inf")
    window_s = DUE_S[history.fault] if title == OURS else max(DUE_S.values())
    return history.fault_at + window_s + SLACK_S


def show(history: History, watches: dict[str, Watch], scores: dict[str, Score]) -> None:
    """Play ``history`` once to all watchdogs; each watches until it kills."""
    due = {title: due_at(history, title) for title in watches}
    name = f"{history.name}, then {history.fault}, seed {history.seed}"
    open_watches = dict(watches)
    for now, readings in play(history):
        for title in [title for title, look in open_watches.items() if look(now, readings)]:
            del open_watches[title]
            if history.fault_at is None or now <= history.fault_at:
                scores[title].false_kills.append(name)
            else:
                scores[title].delays_s.append(now - history.fault_at)
        for title in [title for title in open_watches if now > due[title]]:
            del open_watches[title]
            scores[title].missed.append(name)
        if not open_watches:
            break


def simulate(histories: int, seed: int) -> dict[str, Score]:
    """Scores by watchdog over ``histories`` histories, numbered on from ``seed``."""
    watchdogs: dict[str, Callable[[History], Watch]] = {
        OURS: detector,
        "one timer, 10 minutes": one_timer(10 * MINUTE),
        "one timer, 30 minutes": one_timer(30 * MINUTE),
        "one timer, 120 minutes": one_timer(120 * MINUTE),
    }
    scores = {title: Score() for title in watchdogs}
    for number in range(seed, seed + histories):
        history = write_history(number)
        show(history, {title: make(history) for title, make in watchdogs.items()}, scores)
    return scores


def main() -> None:
    parser = argparse.ArgumentParser(description="Show scripted histories to hang detectors.")
    parser.add_argument("--histories", type=int, default=1200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", dest="as_json")
    arguments = parser.parse_args()
    scores = simulate(arguments.histories, arguments.seed)
    if arguments.as_json:
        print(json.dumps({title: score.to_json() for title, score in scores.items()}, indent=2))
        return
    print(f"{arguments.histories} histories from seed {arguments.seed}")
    print(f"{'':24} {'false kills':>11} {'missed hangs':>12} {'found':>6} {'median delay':>13}")
    for title, score in scores.items():
        row = score.to_json()
        delay = (
            "-" if row["median_delay_s"] is None else f"{row['median_delay_s'] / MINUTE:.1f} min"
        )
        print(
            f"{title:24} {row['false_kills']:11} {row['missed_hangs']:12} {row['found']:6}"
            f" {delay:>13}"
        )


if __name__ == "__main__":
    main()
