"""Where the ranks of a running job are, in lines for people: parts of text, each with a style."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ncclops.diagnose.places import Cluster, RankView, describe_operation
from ncclops.diagnose.where import Look
from ncclops.rank_lists import rank_list, ranks_named

StyledLine = tuple[tuple[str, str], ...]


def stack_lines(seen: Look, first: int | None = None) -> Iterator[StyledLine]:
    """Ranks with the same stack together, the largest group first; that of rank ``first`` before
    all others."""
    views = {view.rank: view for view in seen.views}
    odd_one_out = len(seen.clusters) > 1
    numbered = sorted(enumerate(seen.clusters), key=lambda each: first not in each[1].ranks)
    for number, cluster in numbered if first is not None else enumerate(seen.clusters):
        style = "bold red" if odd_one_out and number > 0 else "bold"
        yield ((_headline(cluster), style),)
        for line in _last_operations(views[rank] for rank in cluster.ranks):
            yield ((f"    {line}", ""),)
        for frame in cluster.shown_frames:
            yield ((f"      {frame}", "dim"),)
    for rank, reason in seen.collected.reasons.items():
        yield ((f"rank {rank} did not answer: {reason}", "yellow"),)
    yield ((f"snapshots: {seen.collected.directory}", "dim"),)


def _headline(cluster: Cluster) -> str:
    count = len(cluster.ranks)
    ranks = f"{count} ranks ({rank_list(cluster.ranks)})" if count > 1 else ""
    return f"{ranks or f'rank {cluster.ranks[0]}'}: {cluster.place}"


def _last_operations(views: Iterable[RankView]) -> list[str]:
    """What the ranks entered last, ranks with the same answer together."""
    said: dict[str, list[int]] = {}
    for view in views:
        if view.last is not None:
            pending = ", not completed" if view.last.pending else ""
            said.setdefault(f"last entered {describe_operation(view.last)}{pending}", []).append(
                view.rank
            )
    one = len(said) == 1
    return [text if one else f"{ranks_named(ranks)}: {text}" for text, ranks in said.items()]
