"""The family of every model that transformers can build: sizes and names come from its outline."""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from penstock.core.env import cache_home
from penstock.core.files import read_json
from penstock.models.automodel.outline import AutoModelConfig, ModelOutline
from penstock.models.automodel.remote_code import CODE
from penstock.models.automodel.weight_map import AutoWeightMap
from penstock.models.decoder_config import (
    LENGTH_DEPENDENT_ROPE,
    DecoderConfig,
    LearnedPositions,
)
from penstock.models.family import Family
from penstock.models.hf_config import HfConfig

# Raised when `describe` finds something else for the same config.
REVISION = 13

POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "context_length")
# The longest document of a model whose config names no number of positions.
UNLIMITED = 1 << 20

NO_EFFECT = (
    *("_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version"),
    "quantization_config",
)
"""Fields of config.json that do not change the outline."""


@dataclass(frozen=True, kw_only=True)
class AutoFamily(Family):
    """A model that transformers builds."""

    outline: ModelOutline
    not_native: tuple[str, ...] = ()
    """Why the native family of the model type does not compute this config.json; empty where there
    is no native family, or `model.backend` is `transformers`."""

    def weight_map(self, config: DecoderConfig, *, merge_qkv: bool = False) -> AutoWeightMap:
        del merge_qkv
        assert isinstance(config, AutoModelConfig)
        return AutoWeightMap(config)


def read_sizes(outline: ModelOutline, hf: HfConfig) -> AutoModelConfig:
    """The sizes in a config.json, as far as they have names that models share."""
    text = {**hf, **(hf.get("text_config") or {})}
    table = f"{outline.embedding}.weight"
    vocab, width = outline.params[outline.tied.get(table, table)]
    positions = _size(text, *POSITIONS) or UNLIMITED
    heads = _size(text, "num_attention_heads", "n_head", "n_heads", "num_heads") or 1
    return AutoModelConfig(
        vocab_size=outline.linear[outline.head][0] if outline.head in outline.linear else vocab,
        hidden_size=width,
        intermediate_size=_size(text, "intermediate_size", "ffn_dim", "n_inner") or 4 * width,
        num_hidden_layers=max(1, len(outline.layers)),
        num_attention_heads=heads,
        num_key_value_heads=_size(text, "num_key_value_heads") or heads,
        head_dim=_size(text, "head_dim", "v_head_dim") or max(1, width // heads),
        max_position_embeddings=positions,
        tie_word_embeddings=f"{outline.head}.weight" in outline.tied,
        learned_positions=LearnedPositions(positions, 0) if outline.traits.positions_end else None,
        attention_soft_cap=text.get("attn_logit_softcapping"),
        outline=outline,
        rope_limit=_rope_limit(text, positions),
    )


def _rope_limit(text: HfConfig, positions: int) -> float:
    # The length from which RoPE parameters, of any kind of layer, depend on the length.
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    limits = [math.inf]
    for parameters in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if parameters.get("rope_type", parameters.get("type")) in LENGTH_DEPENDENT_ROPE:
            own = parameters.get("original_max_position_embeddings")
            limits.append(own or text.get("original_max_position_embeddings") or positions)
    return min(limits)


def default_lora_targets(outline: ModelOutline) -> tuple[str, ...]:
    """Every linear layer but the head, and stacked experts."""
    targets = (*(name for name in outline.linear if name != outline.head), *outline.stacked)
    return tuple(dict.fromkeys(name.rpartition(".")[2] for name in targets))


def auto_family(hf_config: HfConfig) -> AutoFamily:
    """The family of a config.json for the transformers backend.

    The outline is computed once for a config and these versions of transformers and PyTorch, which
    takes seconds, and then read from the cache folder.

    Raises CapabilityError for a model that cannot be trained, with the reason.
    """
    # As text, because the cache needs a key that can be hashed.
    return _family(json.dumps(hf_config, sort_keys=True))


@cache
def _family(text: str) -> AutoFamily:
    hf_config: Mapping[str, Any] = json.loads(text)
    entries = {key: value for key, value in hf_config.items() if key not in NO_EFFECT}
    if CODE in entries:
        # Not the folder: the same code may lie in another one.
        entries[CODE] = entries[CODE]["digest"]
    versions = [REVISION, version("transformers"), version("torch")]
    digest = hashlib.sha256(json.dumps([entries, versions], sort_keys=True).encode()).hexdigest()
    file = cache_home() / "models" / f"{digest[:32]}.json"
    outline = None
    if file.is_file():
        outline = ModelOutline.from_json(read_json(file))
    if outline is None:
        from penstock.models.automodel.describe import describe  # noqa: PLC0415 - torch

        outline = describe(hf_config)
        file.parent.mkdir(parents=True, exist_ok=True)
        # Each rank may write it, so parts have names of their own, and replace it atomically.
        with NamedTemporaryFile("w", encoding="utf-8", dir=file.parent, delete=False) as part:
            part.write(json.dumps(outline.to_json()))
        Path(part.name).replace(file)
    return AutoFamily(
        str(hf_config.get("model_type")),
        outline.architecture,
        partial(read_sizes, outline),
        roles={},
        lora_targets=default_lora_targets(outline),
        outline=outline,
    )


def _size(hf: HfConfig, *names: str) -> int | None:
    sizes = (hf.get(name) for name in names)
    return next((value for value in sizes if isinstance(value, int) and value > 0), None)
