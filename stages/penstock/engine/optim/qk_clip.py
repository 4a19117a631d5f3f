"""QK-clip: bounds attention logits by scaling the weights of queries and keys after a step.

Algorithm 1 of "Kimi K2: Open agentic intelligence" (arXiv 2507.20534), which calls Muon with it
MuonClip. A head whose largest logit in a step was S, over a threshold t, has its later logits of
the same tokens multiplied by gamma = t / S.

L layers of the model, N query heads, K key heads, G = N / K; R rows of a weight.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch

from penstock.config.schema.train import TrainConfig
from penstock.engine.distributed.device_mesh import Mesh
from penstock.engine.distributed.param_shards import LocalParam, TensorShard, local
from penstock.engine.distributed.ranks import ProcessInfo
from penstock.engine.optim.distributed_muon import attention_layer
from penstock.engine.step_part import StepPart, StepState
from penstock.models.causal_lm import CausalLM
from penstock.models.decoder import Decoder
from penstock.models.decoder_config import DecoderConfig
from penstock.models.latent_config import LatentAttentionConfig
from penstock.models.layers.attention import SelfAttention
from penstock.models.layers.block import Block
from penstock.models.layers.token_mixer import TokenMixer
from penstock_kernels.attention import VarlenMetadata
from penstock_kernels.max_logits import max_logits

Recompute = Literal["any", "reentrant"]
"""Under reentrant checkpointing a layer's only pass with gradients is its recomputation."""


def build_qk_clip(
    train: TrainConfig,
    config: DecoderConfig,
    parts: Sequence[CausalLM],
    params: Sequence[LocalParam],
    mesh: Mesh,
    ranks: ProcessInfo,
) -> "QKClip | None":
    """The QK-clip of a run; None without one."""
    if train.qk_clip_threshold is None:
        return None
    kind: Recompute = "reentrant" if train.enable_reentrant else "any"
    return QKClip(train.qk_clip_threshold, config, parts, params, mesh, ranks, recompute=kind)


class QKClip(StepPart):
    """The largest attention logits of a step, and the clipping of the weights that made them."""

    def __init__(
        self,
        threshold: float,
        config: DecoderConfig,
        parts: Sequence[CausalLM],
        params: Sequence[LocalParam],
        mesh: Mesh,
        ranks: ProcessInfo,
        *,
        recompute: Recompute = "any",
    ) -> None:
        """Observe attention in `parts`; `params` are those that the optimizer steps."""
        self._threshold, self._config, self._ranks = threshold, config, ranks
        named = [(attention_layer(param.name), param) for param in params]
        self._params = [
            (layer_of[0], param) for layer_of, param in named if layer_of and layer_of[1] in SCALED
        ]
        shape = config.num_layers, config.num_attention_heads
        self._max_LN = torch.full(shape, float("-inf"), device=ranks.device)
        heads = config.num_attention_heads // mesh.size("tensor")
        first = mesh.index("tensor") * heads
        for part in parts:
            assert isinstance(part, Decoder)
            for layer, block in part.model.layers.items():
                assert isinstance(block, Block)
                max_N = self._max_LN[int(layer), first : first + heads]
                if (mixer := block.token_mixer) and int(layer) not in config.linear_layers:
                    _observe(mixer, max_N, recompute)
        self._reduced_LN = self._max_LN

    def after_backward(self, step: StepState) -> torch.Tensor:
        """All-reduce the logits of this step, and begin the next. Returns the largest one and the
        number of heads to clip, fp64 [2], on rank 0, and zeros on others."""
        del step
        # A copy: it is reduced in place, and layers write to views of `_max_LN`.
        self._reduced_LN = self._ranks.all_reduce_max(self._max_LN.clone())
        self._max_LN.fill_(float("-inf"))
        over = (self._reduced_LN > self._threshold).sum()
        totals = torch.stack([self._reduced_LN.max().double(), over.double()])
        return totals if self._ranks.rank == 0 else torch.zeros_like(totals)

    def finish(self, step: StepState, totals: Sequence[float]) -> Mapping[str, Any]:
        del step
        largest, clipped = totals
        return {"max_attention_logit": largest, "clipped_heads": int(clipped)}

    @torch.no_grad()
    def after_update(self, step: StepState) -> None:
        """Scale the weights of the heads that were over the threshold."""
        del step
        # 1 for heads that are not over the threshold.
        gamma_LN = self._threshold / self._reduced_LN.clamp(min=self._threshold)
        for layer, param in self._params:
            for shard in param.shards:
                factors_R = self._row_factors(layer, shard, gamma_LN[layer])
                rows = shard.view(local(param.parameter))
                rows.mul_(factors_R.to(rows.device).view(-1, *[1] * (rows.dim() - 1)))

    def _row_factors(self, layer: int, shard: TensorShard, gamma_N: torch.Tensor) -> torch.Tensor:
        config = self._config.of_layer(layer)
        of_tensor = _latent_factors(config.latent, gamma_N) if config.latent else {}
        of_tensor = of_tensor or _grouped_factors(config, gamma_N)
        kind = next((kind for kind in of_tensor if f".{kind}." in shard.tensor), None)
        # A checkpoint may have queries, keys and values as one tensor.
        factors_R = torch.cat([*of_tensor.values()]) if kind is None else of_tensor[kind]
        assert len(factors_R) == shard.full_shape[0], shard.tensor
        return factors_R.narrow(0, shard.offsets[0], shard.num_rows)


def _grouped_factors(config: DecoderConfig, gamma_N: torch.Tensor) -> dict[str, torch.Tensor]:
    """Factors of rows by layer."""
    gamma_KG = gamma_N.view(config.num_key_value_heads, -1)
    # Those of a query head and of its key head multiply to the head's gamma; a key head has the
    # square root of the smallest one of its query heads.
    key_K1 = gamma_KG.amin(1, keepdim=True).sqrt()
    of_q = (gamma_KG / key_K1).flatten().repeat_interleave(config.head_dim)
    of_k = key_K1.flatten().repeat_interleave(config.head_dim)
    return {"q_proj": of_q, "k_proj": of_k, "v_proj": torch.ones_like(of_k)}


def _latent_factors(
    latent: LatentAttentionConfig, gamma_N: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Factors of rows by layer in latent attention: the root of gamma for queries and keys without
    RoPE, and gamma for queries with RoPE."""
    root_N1, gamma_N1 = gamma_N.sqrt().unsqueeze(1), gamma_N.unsqueeze(1)
    root_Nn = root_N1.expand(-1, latent.nope_dim)
    # All heads share the key with RoPE, so that their queries have all of gamma.
    of_q = torch.cat((root_Nn, gamma_N1.expand(-1, latent.rope_dim)), 1).flatten()
    of_kv = torch.cat((root_Nn, torch.ones_like(gamma_N1).expand(-1, latent.v_dim)), 1).flatten()
    return {"q_proj": of_q, "q_b_proj": of_q, "kv_b_proj": of_kv}


# Layers with rows that are scaled.
SCALED = ("q_proj", "k_proj", "qkv_proj", "q_b_proj", "kv_b_proj")


def _observe(attention: TokenMixer, max_N: torch.Tensor, recompute: Recompute) -> None:
    """Keep the maximum of each head's logits in `max_N`, in passes with gradients."""
    run_core: Callable[..., torch.Tensor] = attention.run_core
    window = attention.window if isinstance(attention, SelfAttention) else None

    # Not compiled: whether this is a recomputation would be decided once, when it is traced.
    @torch.compiler.disable()
    def record(q_TNH: torch.Tensor, k_TKH: torch.Tensor, segments: VarlenMetadata) -> None:
        # As FSDP2 and torch.utils.module_tracker ask; no public function tells it.
        is_in_backward = torch._C._current_graph_task_id() != -1
        if not torch.is_grad_enabled() or (is_in_backward and recompute != "reentrant"):
            return
        logits_N = max_logits(q_TNH, k_TKH, segments, attention.scale, window)
        torch.maximum(max_N, logits_N.to(max_N.dtype), out=max_N)

    def run(
        core: Callable[..., torch.Tensor],
        q_TNH: torch.Tensor,
        k_TKH: torch.Tensor,
        v_TKH: torch.Tensor,
        segments: VarlenMetadata,
    ) -> torch.Tensor:
        record(q_TNH, k_TKH, segments)
        return run_core(core, q_TNH, k_TKH, v_TKH, segments)

    attention.run_core = run
