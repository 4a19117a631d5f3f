"""Which tensors of a Hugging Face checkpoint make which of the model's, and back.

The model's names are Hugging Face's, but for one case: with `merge_qkv` the three projections into
attention are one `qkv_proj`, rows of q, then k, then v.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from penstock.models.decoder import EMBEDDING_WEIGHT, HEAD_WEIGHT
from penstock.models.shape import DecoderConfig

FUSED = "qkv_proj"


@dataclass(frozen=True)
class WeightMap:
    """The names and shapes of one model's tensors, native and in a checkpoint."""

    config: DecoderConfig
    merge_qkv: bool = False

    def native_names(self) -> tuple[str, ...]:
        """The model's parameters, in the order of `named_parameters()`; a tied head is not one."""
        names = [EMBEDDING_WEIGHT]
        for layer in range(self.config.num_hidden_layers):
            names += [f"model.layers.{layer}.{name}" for name in self._block_names()]
        names.append("model.norm.weight")
        if not self.config.tie_word_embeddings:
            names.append(HEAD_WEIGHT)
        return tuple(names)

    def hf_names(self, native_name: str) -> tuple[str, ...]:
        """The checkpoint tensors that, concatenated on dimension 0, are the native one."""
        module, _, leaf = native_name.rpartition(".")
        parent, _, last = module.rpartition(".")
        if last != FUSED:
            return (native_name,)
        return tuple(f"{parent}.{part}.{leaf}" for part in self.config.qkv_parts)

    def to_hf(self, native_name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """The native tensor as a checkpoint stores it: views, split on dimension 0."""
        names = self.hf_names(native_name)
        if len(names) == 1:
            return {native_name: tensor}
        parts = tensor.split(list(self.config.qkv_parts.values()))
        return dict(zip(names, parts, strict=True))

    def from_hf(self, native_name: str, read: Callable[[str], torch.Tensor]) -> torch.Tensor:
        """The native tensor, of checkpoint tensors that `read` fetches by name."""
        parts = [read(name) for name in self.hf_names(native_name)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def is_optional(self, hf_name: str) -> bool:
        """Whether a checkpoint may store this tensor although the model has no place for it: a copy
        of a tied head, or old checkpoints' rotary frequencies, which are computed."""
        tied = self.config.tie_word_embeddings and hf_name == HEAD_WEIGHT
        return tied or hf_name.endswith("rotary_emb.inv_freq")

    def hf_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shape of every tensor a checkpoint must hold."""
        return {
            hf_name: self._shape(hf_name)
            for native_name in self.native_names()
            for hf_name in self.hf_names(native_name)
        }

    def native_shape(self, native_name: str) -> tuple[int, ...]:
        """The shape of a native tensor."""
        parts = [self._shape(name) for name in self.hf_names(native_name)]
        return (sum(part[0] for part in parts), *parts[0][1:])

    def _block_names(self) -> list[str]:
        config = self.config
        names = ["input_layernorm.weight"]
        for part in [FUSED] if self.merge_qkv else config.qkv_parts:
            names += _linear(f"self_attn.{part}", config.qkv_bias)
        names += _linear("self_attn.o_proj", config.o_bias)
        if config.qk_norm:
            names += ["self_attn.q_norm.weight", "self_attn.k_norm.weight"]
        names.append("post_attention_layernorm.weight")
        for part in ("gate_proj", "up_proj", "down_proj"):
            names += _linear(f"mlp.{part}", config.mlp_bias)
        return names

    def _shape(self, hf_name: str) -> tuple[int, ...]:
        config = self.config
        *_, module, leaf = hf_name.split(".")
        if module in ("q_norm", "k_norm"):
            return (config.head_dim,)
        if module.endswith("norm"):
            return (config.hidden_size,)
        rows, columns = {
            "embed_tokens": (config.vocab_size, config.hidden_size),
            "lm_head": (config.vocab_size, config.hidden_size),
            "o_proj": (config.hidden_size, config.qkv_parts["q_proj"]),
            "gate_proj": (config.intermediate_size, config.hidden_size),
            "up_proj": (config.intermediate_size, config.hidden_size),
            "down_proj": (config.hidden_size, config.intermediate_size),
            **{part: (rows, config.hidden_size) for part, rows in config.qkv_parts.items()},
        }[module]
        return (rows,) if leaf == "bias" else (rows, columns)


def _linear(module: str, bias: bool) -> list[str]:
    return [f"{module}.weight", f"{module}.bias"] if bias else [f"{module}.weight"]
