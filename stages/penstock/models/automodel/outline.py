"""What is known of a transformers model without building it: a record that is computed once from
the model on the meta device, and cached. No torch: planning reads it."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple

from penstock.models.decoder_config import DecoderConfig, Scoring

Shape = tuple[int, ...]

STACKED = ("gate_up_proj", "down_proj")
"""The parameters in which transformers stacks the experts of a layer."""

Part = Literal["vision", "projector", "language"]
"""As in `model.freeze`."""

AttentionImpl = Literal["varlen", "sdpa", "eager"]
"""`varlen`: our attention over packed documents; the others are transformers' own."""


@dataclass(frozen=True)
class Head:
    """How logits follow from the last hidden states: `soft_cap(scale * head(hidden))`."""

    scale: float = 1.0
    soft_cap: float | None = None


@dataclass(frozen=True)
class Traits:
    """What was found by running a tiny model of the same class."""

    attention: AttentionImpl
    packing: bool
    """Whether packed documents give the outputs and gradients of separate ones. If not, a
    micro-batch is computed as a padded batch of documents."""
    positions_end: bool
    """Whether documents cannot be longer than the model's number of positions."""
    head: Head | None
    """None: the head cannot be called apart from the base model, so all logits are computed."""
    why: str = ""
    """Why documents are not packed, or the head is not apart."""
    scoring: Scoring | None = None
    """How routers make scores of their logits; None: routers are not observed."""
    routers_why: str = ""
    """Why they are not; empty if there are none."""


@dataclass(frozen=True)
class MediaTraits:
    """What is known of a model that takes images or audio."""

    token_ids: Mapping[str, int]
    """The token that takes a feature, by the kind of media (`image`, `audio`)."""
    refused: Mapping[str, str] = field(default_factory=dict[str, str])
    """Further kinds that the model takes, and why it is not trained on them."""
    language: tuple[str, ...] = ()
    """Beginnings of the names of the language model's parameters, the head's included."""
    vision: tuple[str, ...] = ()
    """Those of the towers of images and audio; the others are of the projector."""
    absent: bool = False
    """Whether the vision tower is not built: its parameters, with these names, are in files
    alone."""


class SavedBytes(NamedTuple):
    """Bytes that a layer saves for its backward pass, per token."""

    per_token: float
    per_pair: float
    """Times the tokens of its document."""


@dataclass(frozen=True)
class ModelOutline:
    """A transformers model: its parameters, and the modules that the engine handles."""

    architecture: str
    """The model's class."""
    params: Mapping[str, Shape]
    """Parameter shapes by state-dict name, without tied copies; persistent buffers included."""
    scalars: tuple[str, ...]
    """Those of them that are scalars in files."""
    transposed: tuple[str, ...]
    """Linear layers whose weights files store as [in, out]."""
    tied: Mapping[str, str]
    """Other names of parameters, and the name in `params`."""
    layers: tuple[str, ...]
    """The repeated layers, in order: FSDP units, and units of activation checkpointing."""
    linear: Mapping[str, tuple[int, int]]
    """Output and input features of every linear layer."""
    fp32: tuple[str, ...]
    """Parameters that the model keeps in fp32."""
    embedding: str
    head: str
    norm: str
    """The final norm; empty if it is not known."""
    experts_per_token: int
    num_experts: int
    """0: no experts."""
    stacked: Mapping[str, bool]
    """The tensors of all experts of a layer, which may have adapters, and whether a matrix in them
    is [in, out]; all have the same number of experts."""
    replaceable_experts: bool
    """Whether the code of stacked experts can be replaced: it is called through transformers'
    `ALL_EXPERTS_FUNCTIONS`, with tokens and their choices."""
    routers: Mapping[str, int]
    """The routers that are observed, and the numbers of their layers."""
    aux_loss_coef: float
    """The coefficient of the load-balancing loss that the config asks for; 0: none."""
    dropout: bool
    """Whether the config has a dropout rate above 0."""
    traits: Traits
    saved: Mapping[str, tuple[SavedBytes, ...]]
    """What each layer saves, by the dtype of activations; empty if it could not be counted."""
    media: MediaTraits | None = None
    """None for a causal language model."""

    def part(self, name: str) -> Part:
        if self.media is None or name.startswith(self.media.language):
            return "language"
        return "vision" if name.startswith(self.media.vision) else "projector"

    def to_json(self) -> dict[str, Any]:
        # A JSON object, which `family.py` keeps in the user's cache: building an outline takes
        # seconds.
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "ModelOutline":
        # JSON reads tuples back as lists: a field with tuples must be converted here.
        traits = dict(fields["traits"])
        media = fields.get("media")
        head = traits.pop("head")
        return cls(
            **{
                **fields,
                "params": {name: tuple(shape) for name, shape in fields["params"].items()},
                "linear": {name: (out, into) for name, (out, into) in fields["linear"].items()},
                "layers": tuple(fields["layers"]),
                "scalars": tuple(fields["scalars"]),
                "transposed": tuple(fields["transposed"]),
                "fp32": tuple(fields["fp32"]),
                "saved": {
                    dtype: tuple(SavedBytes(*layer) for layer in layers)
                    for dtype, layers in fields["saved"].items()
                },
                "media": media
                and MediaTraits(
                    media["token_ids"],
                    media["refused"],
                    tuple(media["language"]),
                    tuple(media["vision"]),
                    media["absent"],
                ),
                "traits": Traits(**traits, head=head and Head(**head)),
            }
        )

    def matmul_params(self) -> int:
        """Matmul parameters that each token uses, without the embedding and the head: linear
        layers, and the chosen share of stacked expert matrices."""
        total = 0
        for name, shape in self.params.items():
            module = name.removesuffix(".weight")
            if module in (self.embedding, self.head) or len(shape) < 2:
                continue
            size = math.prod(shape)
            if ".experts." in name and self.num_experts:
                total += size * self.experts_per_token // self.num_experts
            elif module in self.linear:
                total += size
        return total


@dataclass(frozen=True)
class AutoModelConfig(DecoderConfig):
    """The sizes of a transformers model, and its outline.

    Sizes that its config does not name are derived or 0; they serve estimates only.
    """

    outline: ModelOutline = field(kw_only=True)
    rope_limit: float = math.inf
    """The document length up to which RoPE does not depend on the longest document of a batch."""

    @property
    def rope_invariant_up_to(self) -> float:
        # The length up to which a KV cache holds all state of a document: 0 for models with other
        # state than keys and values.
        traits = self.outline.traits
        return self.rope_limit if traits.attention == "varlen" and traits.packing else 0

    def __post_init__(self) -> None:
        """Not checked as a native decoder's: the model's class has checked its config."""
