"""The interface of configs of layers whose token mixer has a state: linear attention and short
convolutions. What plans, stores, splits and caches such layers needs no other. No torch."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from penstock.core.errors import ConfigError
from penstock.models.names import LINEAR_ATTN

MODEL_TYPES = (
    "qwen3_next",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "lfm2",
    "lfm2_moe",
    "olmo_hybrid",
    "granitemoehybrid",
    "bamba",
    "nemotron_h",
    "kimi_linear",
)
"""The model types with such layers."""

Shape = tuple[int, ...]


@dataclass(frozen=True)
class InitialValues:
    """The distribution that a parameter is initialized with."""

    kind: Literal["log_uniform", "softplus_log_uniform", "log_number"]
    """The logarithm of a uniform number; the number whose softplus has a uniform logarithm, as time
    steps in Mamba; or the logarithms of `low`, `low` + 1 and so on."""
    low: float
    high: float = 0.0
    floor: float = 0.0
    """The least time step."""


@dataclass(frozen=True)
class SavedNumbers:
    """What a layer saves for its backward pass, in numbers per token."""

    computed: int
    """In the compute dtype."""
    fp32: int = 0


class StateLayerConfig(ABC):
    """Sizes of layers of linear attention, or of another token mixer with a state."""

    module: ClassVar[str] = LINEAR_ATTN
    """The name of the token mixer in checkpoints."""
    layer_type: ClassVar[str] = "linear_attention"
    """Its name in `layer_types`."""
    heads_field: ClassVar[str]
    """The name of `heads` in config.json."""

    @property
    @abstractmethod
    def heads(self) -> int:
        """Heads, or channels, that are computed independently: tensor parallelism shares them
        out."""

    def split_heads(self, part: str) -> int:
        """The heads of a checkpoint's layer, or of a block of its rows, by the last part of its
        name; with fewer heads than tensor-parallel ranks several have the same one."""
        del part
        return self.heads

    def why_unsplit(self, tensor: int) -> str | None:
        """Why so many tensor-parallel ranks cannot share the heads; None if they can."""
        if not self.heads % tensor:
            return None
        return f"{self.heads_field} is {self.heads}: every rank must get equally many whole heads"

    @abstractmethod
    def shapes(self, width: int) -> Mapping[str, Shape]:
        """The shape of each parameter of a layer, in order, for a hidden size."""

    def stored(self, name: str, shape: Shape) -> Mapping[str, Shape]:
        """The tensors of a checkpoint whose rows are this parameter, in order."""
        return {name: shape}

    def row_blocks(self, layer: str) -> Mapping[str, int] | None:
        """The blocks of rows of a checkpoint's layer, each of which has all heads in order; None:
        one."""
        del layer
        return None

    def initial_values(self, leaf: str) -> InitialValues | float | None:
        """Those of the parameters with this last part of their names; None: as in other layers."""
        del leaf
        return None

    def matmul_params(self, width: int) -> int:
        """Parameters of the projections of a layer, for a hidden size."""
        shapes = self.shapes(width).values()
        return sum(math.prod(shape) for shape in shapes if len(shape) == 2)

    @property
    @abstractmethod
    def input_layers(self) -> tuple[str, ...]:
        """The layers of a checkpoint that read the input of the token mixer."""

    @property
    def inner_layers(self) -> Mapping[str, int]:
        """Those after them, with the number of features that they read."""
        return {}

    @property
    @abstractmethod
    def output_layer(self) -> tuple[str, int]:
        """The output projection in a checkpoint, and the number of features that it reads."""

    @property
    @abstractmethod
    def saved(self) -> SavedNumbers:
        """What a layer saves besides inputs of linear layers."""

    @property
    @abstractmethod
    def exchanged(self) -> tuple[tuple[int, int], ...]:
        """What context parallelism exchanges for a token, to give each rank all tokens of some
        heads, and back: numbers of heads, of which each is for equally many of the last, and the
        numbers of a head."""

    def heads_of_rank(self, tensor: int, context: int) -> tuple[int, ...]:
        """Those heads of a rank, where `context` ranks share those of each of `tensor` ranks."""
        # With fewer heads than tensor-parallel ranks several ranks have the same head.
        counts = [max(1, heads // tensor) for heads, _ in self.exchanged]
        heads_by_count = [(count, *even_heads(count, counts[-1], context)) for count in counts]
        return tuple(
            (count * repeats + empty) // context for count, repeats, empty in heads_by_count
        )

    def exchanged_by_rank(self, tensor: int, context: int) -> int:
        """Numbers of a token that a rank gets and gives back."""
        heads = self.heads_of_rank(tensor, context)
        return sum(count * size for count, (_, size) in zip(heads, self.exchanged, strict=True))

    @property
    @abstractmethod
    def state_size(self) -> int:
        """Numbers in the state of a layer, for one sequence."""

    @property
    @abstractmethod
    def state_macs(self) -> int:
        """Multiplications of one token with the states of a layer."""


def even_heads(heads: int, last: int, ranks: int) -> tuple[int, int]:
    """How often each head is repeated, and how many empty ones are added, so that `ranks` get
    equally many. Each of `heads` is for as many consecutive ones of `last`, which are not
    repeated."""
    shared, repeats = last // heads, ranks // math.gcd(ranks, heads)
    # Copies of a head serve equally many of the last: where that cannot be, there is one for each.
    if shared % repeats:
        repeats = shared
    return repeats, -heads * repeats % ranks


def require_sizes(config: object, fields: Mapping[str, str]) -> None:
    """Raise ConfigError for sizes that are not positive integers. `fields` are their names here and
    in config.json."""
    for name, field in fields.items():
        size = getattr(config, name)
        if type(size) is not int or size < 1:
            raise config_error(f"{field} is {size!r}; it must be an integer of 1 or more")


def config_error(fault: str) -> ConfigError:
    """The error for a fault of a config.json."""
    return ConfigError(
        f"the model's {fault}. Correct the config.json that model.config_path names."
    )
