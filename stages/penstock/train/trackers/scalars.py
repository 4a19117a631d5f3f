"""Scalars of a metrics.jsonl record: flat names and values for trackers."""

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from penstock.train.metrics.jsonl import is_number

Kind = Literal["train", "eval"]

GROUPS = {"phases": "seconds", "grad_norms": "grad_norm", "param_norms": "param_norm"}
"""Name prefixes of nested values, where they differ from the record's names."""

NON_METRICS = {"step", "time", "memory_rank"}


def record_kind(record: Mapping[str, Any]) -> Kind | None:
    """Whether it is a step or an evaluation; None: neither, without scalars."""
    if "loss" in record:
        return "train"
    return "eval" if any(name.startswith("eval_") for name in record) else None


def record_values(record: Mapping[str, Any]) -> dict[str, float]:
    """`train/loss`, `eval/loss`, `seconds/optimizer`, `grad_norm/layers.3`, `router/entropy.1`."""
    return dict(_flatten(record))


def _flatten(record: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in record.items():
        if name in NON_METRICS:
            continue
        if name == "routers":
            yield from _router_scalars(value)
        elif isinstance(value, Mapping):
            for inner, number in value.items():
                if is_number(number):
                    yield f"{GROUPS.get(name, name)}/{inner}", float(number)
        elif is_number(value):
            evaluated = name.removeprefix("eval_")
            yield f"{'train' if evaluated == name else 'eval'}/{evaluated}", float(value)


def _router_scalars(routers: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Router entropy per layer; not the token count of each expert."""
    for name in ("entropy", "imbalance"):
        for layer, value in zip(routers["layers"], routers[name], strict=True):
            yield f"router/{name}.{layer}", float(value)
