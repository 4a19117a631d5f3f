"""Whether ranks issue collectives that match: otherwise they would hang on a real machine."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from penstock.estimate.dryrun.trace import Collective, Record

_POINT_TO_POINT = ("send", "recv")


def mismatched_collectives(traces: Mapping[int, Sequence[Record]]) -> Iterator[str]:
    """A line for each group whose ranks issue different collectives, and for each pair of ranks
    whose sends and receives differ; only of the ranks in `traces`."""
    sequences: dict[tuple[str, tuple[int, ...]], dict[int, list[Collective]]] = defaultdict(dict)
    messages: dict[tuple[int, int], dict[str, list[Collective]]] = defaultdict(dict)
    for rank, records in traces.items():
        for record in records:
            if not isinstance(record, Collective):
                continue
            if record.name not in _POINT_TO_POINT:
                group = sequences[record.group, record.ranks]
                group.setdefault(rank, []).append(record)
            elif record.peer is not None and record.peer in traces:
                pair = (rank, record.peer) if record.name == "send" else (record.peer, rank)
                messages[pair].setdefault(record.name, []).append(record)
    for (_, ranks), sequence in sequences.items():
        first, *other_ranks = (rank for rank in ranks if rank in traces)
        for other_rank in other_ranks:
            collectives, other_collectives = sequence.get(first, []), sequence.get(other_rank, [])
            yield from _difference(first, collectives, other_rank, other_collectives)
    for (sender, receiver), sequence in messages.items():
        sends, receives = sequence.get("send", []), sequence.get("recv", [])
        yield from _difference(sender, sends, receiver, receives, named=False)


def _difference(
    rank: int,
    collectives: Sequence[Collective],
    other_rank: int,
    other_collectives: Sequence[Collective],
    *,
    named: bool = True,
) -> Iterator[str]:
    """At most one line: the first collective that differs, or what one of them issues alone."""
    for index, (left, right) in enumerate(zip(collectives, other_collectives, strict=False)):
        if _identity(left, named=named) != _identity(right, named=named):
            yield (
                f"collective {index} of ranks {rank} and {other_rank} differs: {_text(left)} and "
                f"{_text(right)}"
            )
            return
    num_shared = min(len(collectives), len(other_collectives))
    if collectives[num_shared:]:
        extra = _text(collectives[num_shared])
        yield f"rank {rank} issues {extra}, and rank {other_rank} does not"
    if other_collectives[num_shared:]:
        extra = _text(other_collectives[num_shared])
        yield f"rank {other_rank} issues {extra}, and rank {rank} does not"


def _identity(record: Collective, *, named: bool) -> tuple[str, str, int]:
    return record.name if named else "", record.dtype, record.num_bytes


def _text(record: Collective) -> str:
    return f"{record.name} of {record.num_bytes} bytes {record.dtype} at {record.call_site}"
