#!/usr/bin/env python3
"""Scripted histories of jobs, shown to the whole decision path and to watchdogs with one timer.

    python scripts/simulate_hangs.py [--histories 2000] [--seed 0] [--json]

Each history is a job on 1 to 4 nodes with 2 to 8 ranks: start-up, compile, steps, and what happens
in between. Harmless are a slow compile (up to the window that compiles have), layers that are
compiled one by one, a long checkpoint (declared or not), a declared checkpoint for which ranks wait
in a loop outside collectives, a data stall, a slow rank, a recompile, pauses of the garbage
collector, and a machine that stands still (as a virtual machine that is moved). Clocks that jump
need no history: only the monotonic one is read. A history may then end in a hang: one rank that
keeps the GIL, a collective that no rank leaves, a rank that idles outside a collective for good, a
start at which a rank does not come. Steps are shown by all ranks, by the first alone, or by none.

"ours" is everything in the product that may act, with the timeouts that a run has by default: what
each node sees and tells the others (``ncclops.health.liveness``, records of other nodes arriving up
to 2 s late), and behind it the soft timeout of the restart core and the timeout of process groups,
which know of one rank alone. Whoever acts first is counted: in a harmless history, or before the
hang, as a false kill. A hang that nobody acts on within its window is missed.

Sensors miss a look now and then. In harmless histories any of them may be blind throughout; in
those that hang only the GPU's may, because a hang must leave two kinds of evidence to be found: an
agent can always read the CPU time of its own children, and profiles switch torch's flight recorder
on. Intervals are Wilson's, at 95 %.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal

from ncclops.health.evidence import Reading
from ncclops.health.hang import HangLimits
from ncclops.health.liveness import Elsewhere, Liveness, NodeView
from ncclops.timeouts.settle import acts_before, settle

LOOK_EVERY_S = 30.0
MINUTE = 60.0
TIMEOUTS = settle({})
assert TIMEOUTS.steady is not None
LIMITS = HangLimits(compile=TIMEOUTS.compile).at_most(acts_before(TIMEOUTS.steady))
OURS = "ours, everything that acts"
# A hang is due within the window that applies to it (ten steps of 45 s fit into the shortest), and
# the looks that it takes to share and confirm it.
SLACK_S = 6 * LOOK_EVERY_S
# A record of another node arrives by then.
LATE_S = 2.0

Mode = Literal["step", "exchange", "wait", "busy", "gil", "idle", "poll", "stopped"]
Shown = Literal["by all", "by the first", "by none"]
Fault = Literal["gil-held", "same-operation", "idle-outside", "absent-at-start"]

DUE_S: dict[Fault, float] = {
    "gil-held": LIMITS.hang.total_seconds(),
    "same-operation": LIMITS.hang.total_seconds(),
    "idle-outside": LIMITS.quiet.total_seconds(),
    "absent-at-start": LIMITS.compile.total_seconds(),
}


@dataclass(frozen=True)
class Act:
    """A stretch of time in which every rank is in one mode; ``modes`` by rank, default ``mode``.

    ``frozen`` is a node whose machine stands still, its agent too.
    """

    seconds: float
    mode: Mode
    modes: dict[int, Mode] = field(default_factory=dict)
    phase: tuple[int, float] | None = None  # rank that declares it, limit in seconds
    warm: bool = True
    slowdown: float = 1.0
    frozen: int | None = None


@dataclass(frozen=True)
class History:
    """One job. ``fault`` begins with the last act, which lasts until somebody acts on it."""

    name: str
    nodes: int
    ranks_per_node: int
    step_s: float
    spins: bool  # waiting for a collective burns CPU
    blind: frozenset[str]  # sensors that read nothing
    acts: tuple[Act, ...]
    fault: Fault | None
    shown: Shown  # which ranks show steps
    seed: int

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def fault_at(self) -> float | None:
        if self.fault is None:
            return None
        return sum(act.seconds for act in self.acts[:-1])


# ---- writing histories ------------------------------------------------------------------------


def write_history(seed: int) -> History:
    """A history from its number: the same number, the same history."""
    rng = random.Random(seed)
    nodes = rng.choice([1, 1, 2, 2, 3, 4])
    per_node = rng.randint(2 if nodes == 1 else 1, 8 // nodes)
    ranks = nodes * per_node
    fault: Fault | None = rng.choice([None, None, None, None, None, *DUE_S])
    sensors = ("gpu", "cpu", "collective", "tick", "main") if fault is None else ("gpu",)
    blind = frozenset(sensor for sensor in sensors if rng.random() < 0.3)
    name, middle = rng.choice(HARMLESS)
    step_s = rng.choice([0.3, 2.0, 10.0, 45.0])
    shown: Shown = rng.choice(["by all", "by all", "by the first", "by none"])
    acts: list[Act]
    if fault == "absent-at-start":
        acts = [Act(rng.uniform(0.5, 5) * MINUTE, "busy", warm=False)]
    else:
        acts = [*start_up(rng, ranks), steps(rng), *middle(rng, ranks, nodes)]
        # Where no rank shows steps, it takes a while until it is known that they train.
        known_s = LIMITS.quiet.total_seconds() + SLACK_S if shown == "by none" else 0.0
        acts.append(steps(rng, least_s=max(known_s, 12 * step_s)))
    if fault is not None:
        acts.append(faulty_act(fault, rng, ranks))
    return History(
        name=name,
        nodes=nodes,
        ranks_per_node=per_node,
        step_s=step_s,
        spins=rng.random() < 0.5,
        blind=blind,
        acts=tuple(acts),
        fault=fault,
        shown=shown,
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
        modes: dict[int, Mode] = {slowest: rng.choice(["busy", "gil", "idle"])}
        together = left > seconds * 0.6
        acts.append(Act(part, "busy" if together else "wait", modes, warm=False))
        left -= part
    return acts


def steps(rng: random.Random, least_s: float = 0.0) -> Act:
    """Undisturbed; before a hang at least ``least_s``, so that the usual step time is known."""
    return Act(max(least_s, rng.uniform(4, 20) * MINUTE), "step")


def slow_compile(rng: random.Random, ranks: int, _nodes: int) -> list[Act]:
    """A compile that begins again, as after a restart: up to nearly the window of a compile."""
    most = 0.95 * LIMITS.compile.total_seconds()
    return compile_acts(rng, rng.randrange(ranks), rng.uniform(15 * MINUTE, most))


def layered_compile(rng: random.Random, ranks: int, _nodes: int) -> list[Act]:
    """After a restart, with collectives between the layers, which are no steps yet."""
    slowest, acts = rng.randrange(ranks), list[Act]()
    for _ in range(rng.randint(4, 12)):
        acts += compile_acts(rng, slowest, rng.uniform(0.5, 8) * MINUTE)
        acts.append(Act(rng.uniform(0.1, 2) * MINUTE, "exchange", warm=False))
    return acts


def long_checkpoint(rng: random.Random, _ranks: int, _nodes: int) -> list[Act]:
    """Rank 0 writes, mostly waiting for the file server; undeclared up to 25 minutes.

    Others wait in a collective, so what one rank declares stays within the timeout of groups.
    """
    if rng.random() < 0.5:
        limit = rng.uniform(20, 40) * MINUTE
        seconds = limit * rng.uniform(0.5, 0.95)
        return [Act(seconds, "wait", {0: rng.choice(["idle", "busy"])}, phase=(0, limit))]
    pickling = Act(rng.uniform(0.5, 4) * MINUTE, "wait", {0: "gil"})
    return [pickling, Act(rng.uniform(3, 21) * MINUTE, "wait", {0: "idle"})]


def polled_checkpoint(rng: random.Random, _ranks: int, _nodes: int) -> list[Act]:
    """Rank 0 writes, as it has declared; the others look again and again whether it is there."""
    limit = rng.uniform(40, 90) * MINUTE
    return [Act(limit * rng.uniform(0.5, 0.95), "poll", {0: "idle"}, phase=(0, limit))]


def data_stall(rng: random.Random, ranks: int, _nodes: int) -> list[Act]:
    """A loader that gets nothing: one rank is idle outside a collective, the others wait for it."""
    return [Act(rng.uniform(3, 27) * MINUTE, "wait", {rng.randrange(ranks): "idle"})]


def slow_rank(rng: random.Random, _ranks: int, _nodes: int) -> list[Act]:
    """Steps become several times as long for all, because one rank is slow."""
    return [Act(rng.uniform(10, 40) * MINUTE, "step", slowdown=rng.uniform(2, 8))]


def recompile(rng: random.Random, ranks: int, _nodes: int) -> list[Act]:
    """A new shape in mid-run: one rank compiles for long, undeclared, the others wait."""
    rank = rng.randrange(ranks)
    acts = []
    for _ in range(rng.randint(1, 4)):
        acts.append(Act(rng.uniform(1, 5) * MINUTE, "wait", {rank: "busy"}))
        acts.append(Act(rng.uniform(0.5, 4) * MINUTE, "wait", {rank: "gil"}))
    return [*acts, Act(MINUTE, "wait", {rank: "busy"})]


def collector_pauses(rng: random.Random, ranks: int, _nodes: int) -> list[Act]:
    """One rank after another keeps the GIL for a while, as the garbage collector does."""
    acts = []
    for _ in range(rng.randint(2, 6)):
        acts.append(Act(rng.uniform(5, 90), "wait", {rng.randrange(ranks): "gil"}))
        acts.append(Act(rng.uniform(1, 3) * MINUTE, "step"))
    return acts


def machine_stands_still(rng: random.Random, _ranks: int, nodes: int) -> list[Act]:
    """One node stops for minutes, its agent too; the others wait for its ranks."""
    return [Act(rng.uniform(2, 30) * MINUTE, "wait", frozen=rng.randrange(nodes)), steps(rng)]


def nothing_special(rng: random.Random, _ranks: int, _nodes: int) -> list[Act]:
    return [steps(rng)]


Middle = Callable[[random.Random, int, int], list[Act]]
HARMLESS: list[tuple[str, Middle]] = [
    ("slow compile", slow_compile),
    ("layered compile", layered_compile),
    ("long checkpoint", long_checkpoint),
    ("polled checkpoint", polled_checkpoint),
    ("data stall", data_stall),
    ("slow rank", slow_rank),
    ("recompile", recompile),
    ("collector pauses", collector_pauses),
    ("machine stands still", machine_stands_still),
    ("steady", nothing_special),
]


def faulty_act(fault: Fault, rng: random.Random, ranks: int) -> Act:
    rank = rng.randrange(ranks)
    match fault:
        case "same-operation":
            return Act(0.0, "wait")
        case "gil-held":
            return Act(0.0, "wait", {rank: "gil"})
        case "idle-outside":
            return Act(0.0, "wait", {rank: "idle"})
        case "absent-at-start":
            return Act(0.0, "wait", {rank: "idle"}, warm=False)


# ---- playing them ------------------------------------------------------------------------------


class Rank:
    """The counters of one rank as they would be read, moved on by :meth:`live`."""

    def __init__(self, history: History, rank: int) -> None:
        self._history = history
        self._rank = rank
        self.node = rank // history.ranks_per_node
        self._rng = random.Random(history.seed * 1000 + rank)
        self.steps, self._collectives = 0.0, 0.0
        self._tick = self._main = self._enqueued = self._completed = 0
        self._cpu_s = 0.0
        self._starts, self._warm = 0, False
        self._burns = self._rng.random() < 0.5  # what keeps the GIL: a loop, or a wait
        self.blocked_s = 0.0  # since the main thread has last moved
        self.waited_s = 0.0  # in the present collective

    def mode(self, act: Act) -> Mode:
        return "stopped" if act.frozen == self.node else act.modes.get(self._rank, act.mode)

    def live(self, act: Act, seconds: float) -> None:
        mode = self.mode(act)
        if self._warm and not act.warm:
            self._starts += 1
            self.steps, self._collectives = 0.0, 0.0
        self._warm = act.warm
        if mode == "stopped":
            return
        if mode in ("step", "exchange"):
            done = seconds / (self._history.step_s * act.slowdown)
            self.steps += done if mode == "step" else 0.0
            self._collectives += done * 10
            self._completed = self._enqueued = int(self._collectives)
            self._enqueued += self._rng.randint(0, 1)
        elif mode == "wait":
            self._enqueued = self._completed + 1
        else:
            self._enqueued = self._completed
        self.waited_s = self.waited_s + seconds if mode == "wait" else 0.0
        moves = mode in ("step", "exchange", "busy", "poll")
        self.blocked_s = 0.0 if moves else self.blocked_s + seconds
        self._main += moves
        self._tick += mode != "gil"
        self._cpu_s += seconds * self._cpu_share(mode)

    def _cpu_share(self, mode: Mode) -> float:
        if mode in ("idle", "poll"):
            return 0.01
        if mode == "gil":
            return 1.0 if self._burns else 0.0
        if mode == "wait":
            return 1.0 if self._history.spins else 0.02
        return self._rng.uniform(0.5, 4.0)

    def read(self, act: Act, acted_s: float) -> Reading:
        blind = self._history.blind
        declared = act.phase is not None and act.phase[0] == self._rank
        missed = self._rng.random() < 0.02  # a look that came to nothing
        shown = self._history.shown
        shows_steps = shown == "by all" or (shown == "by the first" and self._rank == 0)
        return Reading(
            rank=self._rank,
            alive=True,
            incarnation=self._starts,
            steps=int(self.steps) if shows_steps else None,
            tick=None if "tick" in blind else self._tick,
            main_beat=None if "main" in blind else self._main,
            enqueued=None if "collective" in blind else self._enqueued,
            completed=None if "collective" in blind else self._completed,
            cpu_s=None if "cpu" in blind or missed else self._cpu_s,
            gpu_active=None if "gpu" in blind else self.mode(act) in ("wait", "step", "exchange"),
            warming_up=not (act.warm and shows_steps),
            phase="checkpoint" if declared else None,
            phase_age=timedelta(seconds=acted_s) if declared else None,
            phase_limit=timedelta(seconds=act.phase[1]) if declared and act.phase else None,
        )


@dataclass(frozen=True)
class Moment:
    """One look of all agents: what they read, by node; None for a node that stands still."""

    now: float
    warm: bool
    steps: list[int]  # by rank, shown or not
    readings: list[list[Reading] | None]
    blocked_s: float  # the longest that a main thread has not moved, of ranks that declare nothing
    waited_s: float  # the longest that a rank has waited in one collective


def play(history: History) -> Iterator[Moment]:
    """The history, look by look; the act of a fault goes on for good."""
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
            readings: list[list[Reading] | None] = [
                None
                if node == act.frozen
                else [rank.read(act, acted) for rank in ranks if rank.node == node]
                for node in range(history.nodes)
            ]
            yield Moment(
                now,
                act.warm,
                [int(rank.steps) for rank in ranks],
                readings,
                blocked_s=max(rank.blocked_s for rank in ranks),
                waited_s=max(rank.waited_s for rank in ranks),
            )


# ---- watching them -----------------------------------------------------------------------------

Watch = Callable[[Moment], bool]


def ours(history: History) -> Watch:
    """Everything of the product that may act; says True when it would."""
    rng = random.Random(history.seed)
    nodes = [Liveness(LIMITS) for _ in range(history.nodes)]
    views: list[NodeView | None] = [None] * history.nodes
    soft, steady = TIMEOUTS.soft, TIMEOUTS.steady
    assert soft is not None
    assert steady is not None

    def seen_from(node: int, known: Sequence[NodeView | None]) -> Elsewhere:
        others = [view for other, view in enumerate(known) if other != node]
        silent = sum(view is None for view in others) * history.ranks_per_node
        return Elsewhere.of([view for view in others if view is not None], silent=silent)

    def look(moment: Moment) -> bool:
        before = list(views)
        found = [
            None if readings is None else nodes[node].look(readings, moment.now)
            for node, readings in enumerate(moment.readings)
        ]
        acts = False
        for node, findings in enumerate(found):
            if findings is None:
                continue
            # Of what others have told since the last look some is still on its way.
            known = [
                before[n] if rng.random() < LATE_S / LOOK_EVERY_S else view
                for n, view in enumerate(views)
            ]
            acts = nodes[node].verdict(findings, seen_from(node, known)) is not None or acts
            own = nodes[node].view(findings)
            told = [view for view in views if view is not None]
            if told or own.has_stuck_ranks or own.shows_steps:
                views[node] = own
        group = (steady if moment.warm else TIMEOUTS.first).process_group
        by_timer = moment.blocked_s > soft.total_seconds()
        return acts or by_timer or moment.waited_s > group.total_seconds()

    return look


def one_timer(limit_s: float) -> Callable[[History], Watch]:
    """A watchdog that kills when a rank has not completed a step for ``limit_s``."""

    def watch(history: History) -> Watch:
        moved = [0.0] * history.ranks
        last = [-1] * history.ranks

        def look(moment: Moment) -> bool:
            for rank, steps in enumerate(moment.steps):
                if steps != last[rank]:
                    last[rank], moved[rank] = steps, moment.now
            return moment.now - min(moved) > limit_s

        return look

    return watch


@dataclass
class Score:
    """What one watchdog did over all histories, of which ``harmless`` and ``hanging``."""

    harmless: int = 0
    hanging: int = 0
    false_kills: list[str] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)
    delays_s: dict[str, list[float]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        delays = [delay for each in self.delays_s.values() for delay in each]
        return {
            "histories": self.harmless + self.hanging,
            "hangs": self.hanging,
            "false_kills": len(self.false_kills),
            "false_kill_rate": wilson(len(self.false_kills), self.harmless + self.hanging),
            "missed_hangs": len(self.missed),
            "missed_rate": wilson(len(self.missed), self.hanging),
            "found": len(delays),
            "median_delay_s": statistics.median(delays) if delays else None,
            "delay_s": {
                fault: [round(value) for value in (statistics.median(found), max(found))]
                for fault, found in sorted(self.delays_s.items())
            },
        }


def wilson(hits: int, of: int) -> tuple[float, float]:
    """The interval of a rate, at 95 %."""
    if of == 0:
        return 0.0, 1.0
    z, rate = 1.96, hits / of
    middle = (rate + z * z / (2 * of)) / (1 + z * z / of)
    half = z / (1 + z * z / of) * math.sqrt(rate * (1 - rate) / of + z * z / (4 * of * of))
    return max(0.0, middle - half), min(1.0, middle + half)


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
    for title in watches:
        scores[title].harmless += history.fault is None
        scores[title].hanging += history.fault is not None
    open_watches = dict(watches)
    for moment in play(history):
        for title in [title for title, look in open_watches.items() if look(moment)]:
            del open_watches[title]
            if history.fault_at is None or moment.now <= history.fault_at:
                scores[title].false_kills.append(name)
            elif moment.now <= due[title]:
                found = scores[title].delays_s.setdefault(str(history.fault), [])
                found.append(moment.now - history.fault_at)
        for title in [title for title in open_watches if moment.now > due[title]]:
            del open_watches[title]
            scores[title].missed.append(name)
        if not open_watches:
            break


def simulate(histories: int, seed: int) -> dict[str, Score]:
    """Scores by watchdog over ``histories`` histories, numbered on from ``seed``."""
    watchdogs: dict[str, Callable[[History], Watch]] = {
        OURS: ours,
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
    parser.add_argument("--histories", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", dest="as_json")
    arguments = parser.parse_args()
    scores = simulate(arguments.histories, arguments.seed)
    if arguments.as_json:
        print(json.dumps({title: score.to_json() for title, score in scores.items()}, indent=2))
        return
    rows = {title: score.to_json() for title, score in scores.items()}
    hangs = next(iter(rows.values()))["hangs"]
    print(f"{arguments.histories} histories from seed {arguments.seed}, {hangs} with a hang")
    print(f"{'':28}{'false kills':>22}{'missed hangs':>22}{'median delay':>14}")
    for title, row in rows.items():
        delay = row["median_delay_s"]
        print(
            f"{title:28}{_rate(row['false_kills'], row['false_kill_rate']):>22}"
            f"{_rate(row['missed_hangs'], row['missed_rate']):>22}"
            f"{'-' if delay is None else f'{delay / MINUTE:.1f} min':>14}"
        )
    print("\ntime to detection of ours: median, longest")
    for fault, (median, longest) in rows[OURS]["delay_s"].items():
        print(f"  {fault:18}{median / MINUTE:6.1f}{longest / MINUTE:7.1f} min")


def _rate(hits: int, interval: tuple[float, float]) -> str:
    low, high = (100 * bound for bound in interval)
    return f"{hits} ({low:.1f} to {high:.1f} %)"


if __name__ == "__main__":
    main()
