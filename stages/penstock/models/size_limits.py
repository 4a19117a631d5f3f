"""The largest sizes in a config.json from which a model can be built. No torch.

Checked before anything is derived from them: modules and weights are listed by name, so the time
and memory of a plan grow with counts of layers and experts.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, cast

from penstock.core.errors import ConfigError

MAX_LAYERS = 10_000
"""Published models have at most a few hundred."""

# Of all layers together; published models have at most about 25,000.
MAX_EXPERTS = 200_000

# Of every other size; token ids have 32 bits.
MAX_WIDTH = (1 << 31) - 1

LAYERS = re.compile(r"(.*_)?(num|n)_(.*_)?layers?")
EXPERTS = re.compile(r"(.*_)?experts?")
WIDTHS = re.compile(
    r".*_(size|dim|dims|rank|heads?|groups|experts_per_tok)|d_(model|ff)|n_embd|top_k"
)


def validate_sizes(config: Mapping[str, Any], source: str) -> None:
    """Raise ConfigError, which names `source`, for a size that is larger than any model's."""
    layers = 1
    for name, size in _sizes(config):
        leaf = name.rpartition(".")[2]
        if LAYERS.fullmatch(leaf):
            _require(name, size, MAX_LAYERS, source)
            layers = max(layers, size)
        elif WIDTHS.fullmatch(leaf):
            _require(name, size, MAX_WIDTH, source)
    # After all counts of layers: the limit is of the experts of all layers together.
    for name, size in _sizes(config):
        if EXPERTS.fullmatch(name.rpartition(".")[2]):
            _require(name, size, MAX_EXPERTS // layers, source)


def _require(name: str, size: int, limit: int, source: str) -> None:
    if size > limit:
        raise ConfigError(
            f"{source}: {name} is {size:,}; at most {limit:,} can be built.\n"
            "  Write the number that the model has."
        )


def _sizes(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, int]]:
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _sizes(cast("Mapping[str, Any]", value), f"{name}.")
        else:
            entries = cast("list[Any]", value) if isinstance(value, list) else [value]
            yield from ((name, entry) for entry in entries if type(entry) is int)
