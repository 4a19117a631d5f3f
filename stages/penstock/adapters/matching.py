"""Which layers the names written for adapters mean, told from names and shapes. No torch: plans ask
how much learns, too."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase

from penstock.adapters.names import EACH, EMBEDDING, EXPERTS
from penstock.models.names import EMBEDDING_WEIGHT
from penstock.models.weights import LAYERS, WeightMap

ALL_LINEAR = "all-linear"
"""Stands for every linear layer but the head, as in PEFT."""

HEAD = "lm_head"
ROUTER = "mlp.gate"


@dataclass(frozen=True)
class Linear:
    """A linear layer of a checkpoint, or that of every expert of a layer."""

    name: str
    """In the checkpoint; for experts with `*` for their number."""
    native: str
    """What the model calls it."""
    outputs: int
    inputs: int
    experts: int = 0
    """How many there are of it; 0: it is no expert's."""
    of: str = ""
    """The native parameter that it is rows of."""


def means(target: str, layer: str) -> bool:
    """Whether `target` is this layer's name, or an end of it that begins with a part; or a pattern
    of such in which `*` stands for anything and `[0-3]` for a character; or ALL_LINEAR."""
    if target == ALL_LINEAR:
        return layer not in (HEAD, EMBEDDING)
    if layer == target or layer.endswith(f".{target}"):
        return True
    # A layer of experts has a star in its own name, which a star in a pattern stands for as well.
    is_pattern = any(sign in target for sign in "*?[")
    return is_pattern and (fnmatchcase(layer, target) or fnmatchcase(layer, f"*.{target}"))


def meant(targets: Iterable[str], layers: Iterable[Linear]) -> list[Linear]:
    """The layers that any of the targets means, by either of their names."""
    targets = tuple(targets)
    return [
        layer
        for layer in layers
        if any(means(target, layer.name) or means(target, layer.native) for target in targets)
    ]


def linear_layers(names: WeightMap) -> Iterator[Linear]:
    """What may bear an adapter, in the model's order: all but routers."""
    shapes = names.hf_shapes()
    for native in names.native_names():
        module, _, leaf = native.rpartition(".")
        if f".mlp.{EXPERTS}." in native:
            yield from _of_experts(names, native)
        elif leaf == "weight" and not module.endswith(ROUTER):
            for tensor in names.hf_names(native):
                if len(shapes[tensor]) == 2:
                    outputs, inputs = shapes[tensor]
                    name = EMBEDDING if native == EMBEDDING_WEIGHT else tensor[: -len(".weight")]
                    yield Linear(name, module, outputs, inputs, of=native)


def _of_experts(names: WeightMap, native: str) -> Iterator[Linear]:
    config = names.config
    experts = config.experts
    assert experts is not None
    module, _, matrix = native.rpartition(".")
    stored = f"{LAYERS}{module.split('.')[2]}.{experts.names.block}.{EACH}"
    width, inner = config.hidden_size, experts.width
    called = {"gate_proj": experts.names.gate, "up_proj": experts.names.up}
    parts: dict[str, tuple[str, int, int]] = {}
    if matrix == "down_proj":
        last = matrix if experts.clamped else experts.names.down
        parts[matrix] = (last, width, inner)
    elif matrix == "gate_up_proj" and experts.clamped:
        parts[matrix] = (matrix, 2 * inner, width)
    elif matrix == "gate_up_proj":
        parts = {part: (name, inner, width) for part, name in called.items()}
    for part, (name, outputs, inputs) in parts.items():
        yield Linear(
            f"{stored}.{name}", f"{module}.{part}", outputs, inputs, experts.num_experts, native
        )
