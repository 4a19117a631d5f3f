"""Ways to cut one small model over ranks."""

from dataclasses import replace
from typing import Any

from tests.engine.laid import Layout, laid

FORMS = (
    laid("one process, two rows at once", data_parallel_mode="none", micro_batch_size=2),
    laid("one process, all kept", data_parallel_mode="none", enable_gradient_checkpointing=False),
    laid("one process, reentrant", data_parallel_mode="none", enable_reentrant=True),
    laid(
        "one process, parts recomputed",
        data_parallel_mode="none",
        recompute_modules=["mlp", "self_attn"],
    ),
    laid("one process, begun on the cpu", data_parallel_mode="none", init_device="cpu"),
    laid("one process, sharded", shard=1),
)
"""One process, which computes in other ways."""

SINGLE = (
    laid("shard 2", shard=2),
    laid("shard 4", shard=4, kind="untied"),
    laid("shard 2, two rows at once", shard=2, micro_batch_size=2),
    laid("shard 2, zero 1", shard=2, zero_stage=1),
    laid("shard 2, zero 2", shard=2, zero_stage=2, enable_forward_prefetch=False),
    laid("shard 2, reentrant", shard=2, enable_reentrant=True),
    laid("shard 2, each reads", shard=2, load_weights_mode="all_ranks", model={"merge_qkv": False}),
    laid("shard 2, adapters", shard=2, lora=True),
    laid("replicate 2", replicate=2),
    laid("replicate 2, ddp", replicate=2, data_parallel_mode="ddp"),
    laid("replicate 4, ddp", replicate=4, data_parallel_mode="ddp", kind="untied"),
    laid("ring 2", ring=2),
    laid("ring 4", ring=4, kind="untied"),
    laid("ulysses 2", ulysses=2),
    laid("ulysses 4, two key heads", ulysses=4, kind="two key heads"),
    laid("tp 2", tp=2),
    laid("tp 2, sequence parallel", tp=2, sequence_parallel=True, kind="untied"),
    laid("tp 2, not fused", tp=2, model={"merge_qkv": False}, load_weights_mode="all_ranks"),
    laid("tp 2, logits gathered", tp=2, tp_vocab_parallel_loss=False),
    laid("tp 2, adapters", tp=2, lora=True),
    laid("tp 4, two key heads", tp=4, kind="two key heads"),
    laid("pp 2", pp=2),
    laid("pp 2, untied", pp=2, kind="untied", load_weights_mode="all_ranks"),
    laid("pp 2, GPipe", pp=2, pipeline_parallel_schedule="GPipe"),
    laid("pp 2, interleaved", pp=2, pipeline_parallel_schedule="Interleaved1F1B"),
    laid("pp 2, interleaved zero bubble", pp=2, pipeline_parallel_schedule="InterleavedZeroBubble"),
    laid("pp 2, ZBV", pp=2, pipeline_parallel_schedule="ZBVZeroBubble"),
    laid("pp 2, DualPipeV", pp=2, pipeline_parallel_schedule="DualPipeV"),
    laid("pp 2, adapters", pp=2, lora=True),
    laid("pp 4", pp=4),
)
"""One axis, in every form."""

SPLIT: dict[str, Any] = {"sequence_parallel": True}
PAIRS = (
    laid("pp 2 x replicate 2", pp=2, replicate=2),
    laid("pp 2 x shard 2", pp=2, shard=2, kind="untied"),
    laid("pp 2 x ring 2", pp=2, ring=2),
    laid("pp 2 x ulysses 2", pp=2, ulysses=2),
    laid("pp 2 x tp 2", pp=2, tp=2),
    laid("pp 2 x tp 2, sequence parallel", pp=2, tp=2, **SPLIT),
    laid("replicate 2 x shard 2", replicate=2, shard=2),
    laid("replicate 2 x ring 2", replicate=2, ring=2, cp_fsdp_mode="none"),
    laid("replicate 2 x ulysses 2", replicate=2, ulysses=2, data_parallel_mode="ddp"),
    laid("replicate 2 x tp 2", replicate=2, tp=2),
    laid("shard 2 x ring 2", shard=2, ring=2, kind="untied"),
    laid("shard 2 x ulysses 2", shard=2, ulysses=2, cp_fsdp_mode="none"),
    laid("shard 2 x tp 2", shard=2, tp=2, kind="untied"),
    laid("ring 2 x ulysses 2", ring=2, ulysses=2, cp_fsdp_mode="ulysses_only"),
    laid("ring 2 x tp 2", ring=2, tp=2, **SPLIT),
    laid("ulysses 2 x tp 2", ulysses=2, tp=2, cp_fsdp_mode="ring_only"),
)
"""Every two axes, on four ranks."""

TRIPLES = (
    laid("pp 2 x shard 2 x tp 2", pp=2, shard=2, tp=2),
    laid("pp 2 x ring 2 x ulysses 2", pp=2, ring=2, ulysses=2),
    laid("pp 2 x replicate 2 x ulysses 2", pp=2, replicate=2, ulysses=2),
    laid("pp 2 x shard 2 x ring 2", pp=2, shard=2, ring=2, kind="untied"),
    laid("replicate 2 x shard 2 x tp 2", replicate=2, shard=2, tp=2, **SPLIT),
    laid("replicate 2 x ring 2 x ulysses 2", replicate=2, ring=2, ulysses=2),
    laid("shard 2 x ring 2 x tp 2", shard=2, ring=2, tp=2),
    laid("shard 2 x ulysses 2 x tp 2", shard=2, ulysses=2, tp=2, zero_stage=2),
    laid("ring 2 x ulysses 2 x tp 2", ring=2, ulysses=2, tp=2, kind="untied"),
    laid("shard 2 x tp 4, two key heads", shard=2, tp=4, kind="two key heads"),
    laid("pp 4 x tp 2", pp=4, tp=2, kind="untied"),
    laid("ring 4 x ulysses 2", ring=4, ulysses=2),
)
"""Three axes, or two of which one is larger, on eight ranks."""


def _sparse(name: str, expert: int, /, **settings: Any) -> Layout:
    return laid(name, kind="experts", expert_parallel_size=expert, **settings)


EXPERTS = (
    _sparse("experts, tp 2", 1, tp=2),
    _sparse("ep 2 over shard 2", 2, shard=2),
    _sparse("ep 2 over replicate 2, ddp", 2, replicate=2, data_parallel_mode="ddp"),
    _sparse("ep 2 over tp 2", 2, tp=2),
    _sparse("ep 2 over tp 2, sequence parallel", 2, tp=2, **SPLIT),
    _sparse("ep 2 over ring 2", 2, ring=2),
    _sparse("ep 2 over ulysses 2", 2, ulysses=2),
    _sparse("ep 2 over shard 4", 2, shard=4),
    _sparse("ep 2 over shard 4, far apart", 2, shard=4, ep_outside=True),
    _sparse("ep 2 over replicate 2 x shard 2", 2, replicate=2, shard=2),
    _sparse("ep 2 over shard 2 x tp 2", 2, shard=2, tp=2),
    _sparse("ep 2 over pp 2 x shard 2", 2, pp=2, shard=2),
    _sparse("ep 2 over tp 2, gates recomputed", 2, tp=2, moe_checkpoint_method="moe_act"),
    _sparse(
        "experts, pp 2, ZBV, gates recomputed",
        1,
        pp=2,
        pipeline_parallel_schedule="ZBVZeroBubble",
        moe_checkpoint_method="moe_act",
    ),
    _sparse("ep 4 over shard 4", 4, shard=4),
    _sparse("ep 4 over shard 2 x tp 2, ddp", 4, replicate=2, tp=2, data_parallel_mode="ddp"),
    _sparse("ep 4 over ring 2 x ulysses 2", 4, ring=2, ulysses=2),
    _sparse("ep 4 over pp 2 x shard 2 x tp 2", 4, pp=2, shard=2, tp=2),
    _sparse("ep 4 over pp 2 x ring 2 x ulysses 2", 4, pp=2, ring=2, ulysses=2),
    _sparse("ep 4 over shard 2 x ulysses 2 x tp 2", 4, shard=2, ulysses=2, tp=2, **SPLIT),
    _sparse("ep 2 over shard 2 x ring 2 x tp 2", 2, shard=2, ring=2, tp=2),
)
"""Experts shared out over ranks of every other axis."""

ADAPTED = (
    _sparse("adapters of experts, ep 2 over shard 2", 2, shard=2, lora=True),
    _sparse("adapters of experts, pp 2", 1, pp=2, lora=True),
    _sparse(
        "shared adapters, ep 2 over replicate 2, ddp",
        2,
        replicate=2,
        lora="shared",
        data_parallel_mode="ddp",
    ),
    _sparse("shared adapters, tp 2", 1, tp=2, lora="shared"),
    _sparse("half shared adapters, ep 2 over tp 2", 2, tp=2, lora="half shared", **SPLIT),
    _sparse(
        "half shared adapters, ep 2 over shard 2, gates recomputed",
        2,
        shard=2,
        lora="half shared",
        moe_checkpoint_method="moe_act",
    ),
)
"""Experts with adapters, which lie where they do, or on all ranks if experts share them."""


EP_SHARD: dict[str, Any] = {"shard": 2, "expert_parallel_size": 2}
EP_TP: dict[str, Any] = {"tp": 2, "expert_parallel_size": 2, **SPLIT}
MORE_EXPERTS = tuple(
    laid(f"{kind}, {name}", kind=kind, **settings)
    for kind, layouts in {
        "dots1": {"ep 2 over shard 2": EP_SHARD, "ep 2 over tp 2": EP_TP},
        "granitemoe": {
            "ep 2 over shard 2": {**EP_SHARD, "moe_checkpoint_method": "moe_act"},
            "ep 2 over tp 2": EP_TP,
            "ep 2 over shard 2, adapters": {**EP_SHARD, "lora": True},
            "pp 2": {"pp": 2},
        },
        "llama 4": {
            "ep 2 over shard 2": {**EP_SHARD, "moe_checkpoint_method": "moe_act"},
            "ep 2 over tp 2": EP_TP,
            "pp 2 x ring 2": {"pp": 2, "ring": 2},
            "ulysses 2": {"ulysses": 2},
            "ring 2 x tp 2": {"ring": 2, "tp": 2},
        },
        "cohere2_moe": {"ep 2 over tp 2": {**EP_TP, "lora": "of all"}, "shard 2": EP_SHARD},
        "minimax_m2": {"ep 2 over tp 2": EP_TP, "ring 2": {"ring": 2}},
        "hunyuan_v1_moe": {"ep 2 over tp 2": EP_TP, "ulysses 2": {"ulysses": 2}},
        "olmoe": {"ep 2 over shard 2": EP_SHARD, "tp 2": {"tp": 2, "lora": True}},
    }.items()
    for name, settings in layouts.items()
)
"""What other families have: other routers, stacks of experts, norms and names."""


def _sinks(name: str, /, **settings: Any) -> Layout:
    return laid(f"gpt-oss, {name}", kind="sinks", **settings)


SINKS = (
    _sinks(
        "ep 2 over shard 2, gates recomputed",
        shard=2,
        expert_parallel_size=2,
        moe_checkpoint_method="moe_act",
    ),
    _sinks("ring 2", ring=2),
    _sinks("ulysses 2", ulysses=2),
    _sinks("tp 2, sequence parallel", tp=2, model={"merge_qkv": False}, **SPLIT),
    _sinks("tp 2, adapters", tp=2, lora=True),
    _sinks("pp 2", pp=2),
)
"""Windows and sinks in attention, and experts that are one tensor in a checkpoint."""


def _norms(name: str, /, **settings: Any) -> Layout:
    return laid(f"layer norms, {name}", kind="layer norms", **settings)


WITH_LAYER_NORMS = (
    _norms("shard 2"),
    _norms("tp 2, sequence parallel", tp=2, model={"merge_qkv": False}, **SPLIT),
    _norms("pp 2", pp=2),
    _norms("ring 2", ring=2),
    _norms("tp 2, adapters", tp=2, lora=True),
)
"""Norms with biases, a share of each head turned, and networks without a gate."""


def _positions(name: str, /, **settings: Any) -> Layout:
    return laid(f"learned positions, {name}", kind="learned positions", **settings)


WITH_LEARNED_POSITIONS = (
    _positions("shard 2", shard=2),
    _positions("tp 2, sequence parallel", tp=2, model={"merge_qkv": False}, **SPLIT),
    _positions("tp 2", tp=2),
    _positions("pp 2", pp=2),
    _positions("ring 2", ring=2),
    _positions("ulysses 2", ulysses=2),
)
"""A table of positions beside the embedding, and tensors that a checkpoint calls otherwise."""


def _of(kind: str, name: str, /, **settings: Any) -> Layout:
    return laid(f"{kind}, {name}", kind=kind, **settings)


DESCRIBED = (
    _of("output norms", "shard 2", shard=2),
    _of("output norms", "tp 2, sequence parallel", tp=2, model={"merge_qkv": False}, **SPLIT),
    _of("output norms", "tp 4, two key heads", tp=4),
    _of("output norms", "tp 2, adapters", tp=2, lora=True),
    _of("output norms", "pp 2 x ring 2", pp=2, ring=2),
    _of("output norms", "ulysses 2", ulysses=2),
    _of("fused layers", "shard 2, each reads", shard=2, load_weights_mode="all_ranks"),
    _of("fused layers", "tp 2, sequence parallel", tp=2, **SPLIT),
    _of("fused layers", "tp 4, two key heads", tp=4),
    _of("fused layers", "tp 2, adapters", tp=2, lora=True),
    _of("fused layers", "normed adapters, tp 2", tp=2, lora="normed"),
    _of("fused layers", "merged adapters, tp 2", tp=2, lora="merged"),
    _of("fused layers", "over nf4, shard 2 x tp 2", shard=2, tp=2, lora="over nf4", **SPLIT),
    _of("fused layers", "pp 2 x shard 2", pp=2, shard=2),
    _of("soft caps", "shard 2", shard=2),
    _of("soft caps", "tp 2, sequence parallel", tp=2, **SPLIT),
    _of("soft caps", "ring 2", ring=2),
    _of("soft caps", "pp 2 x ulysses 2", pp=2, ulysses=2),
    _of("gemma 4", "tp 2, sequence parallel", tp=2, **SPLIT),
    _of("gemma 4", "tp 4, adapters", tp=4, lora="of all", model={"merge_qkv": False}),
    _of("gemma 4", "shard 2 x tp 2, adapters", shard=2, tp=2, lora="of all", **SPLIT),
    _of("gemma 4", "pp 2 x ring 2", pp=2, ring=2),
    _of("gemma 4", "ulysses 2", ulysses=2),
    _of("parallel blocks", "tp 2, sequence parallel", tp=2, model={"merge_qkv": False}, **SPLIT),
    _of("parallel blocks", "tp 2, parts recomputed", tp=2, recompute_modules=["mlp", "self_attn"]),
    _of("parallel blocks", "shard 2 x tp 2, adapters", shard=2, tp=2, lora="of all"),
    _of("parallel blocks", "pp 2 x ring 2", pp=2, ring=2),
    _of("dense sinks", "tp 2, sequence parallel", tp=2, **SPLIT),
    _of("dense sinks", "pp 2 x ring 2", pp=2, ring=2),
    _of("scales", "tp 2, sequence parallel", tp=2, **SPLIT),
    _of("scales", "pp 2", pp=2),
    _of("query scales", "tp 2, parts recomputed", tp=2, recompute_modules=["self_attn"]),
    _of("query scales", "pp 2 x ring 2", pp=2, ring=2),
)
"""Norms elsewhere or of another kind, factors, soft caps, RoPE by layer, and fused layers."""

RATE = 0.1

OF_LATENT_ATTENTION = tuple(
    _of("latent attention", name, **settings)
    for name, settings in {
        "shard 2": {"shard": 2, "load_weights_mode": "all_ranks"},
        "tp 2": {"tp": 2, "recompute_modules": ["core_attn"]},
        "ep 2 over tp 2": EP_TP,
        "ep 2 over shard 2": EP_SHARD,
        "tp 4": {"tp": 4},
        "tp 2, adapters": {"tp": 2, "lora": True, **SPLIT},
        "ring 2": {"ring": 2},
        "ulysses 2": {"ulysses": 2},
        "pp 2 x ring 2": {"pp": 2, "ring": 2},
        "pp 2 x ulysses 2": {"pp": 2, "ulysses": 2},
        "ep 4 over ring 2 x ulysses 2": {"ring": 2, "ulysses": 2, "expert_parallel_size": 4},
        "ep 4 over shard 2 x ulysses 2 x tp 2": {
            "shard": 2,
            "ulysses": 2,
            "tp": 2,
            "expert_parallel_size": 4,
            **SPLIT,
        },
    }.items()
)
OF_LATENT_ATTENTION += (
    _of("dense latent attention", "tp 2, normed adapters", tp=2, lora="normed"),
    _of("dense latent attention", "tp 2, merged adapters", tp=2, lora="merged"),
    _of("dense latent attention", "over nf4, shard 2 x tp 2", shard=2, tp=2, lora="over nf4"),
    _of("dense latent attention", "tp 2, dropout", tp=2, lora=True, drops=RATE, **SPLIT),
)
"""Heads of latent attention are split, and its latent vectors computed on every rank."""

OF_SPARSE_ATTENTION = (
    _of("sparse attention", "ep 2 over tp 2", **EP_TP),
    _of("sparse attention", "shard 2", shard=2),
    _of("sparse attention", "tp 2, adapters", tp=2, lora=True, **SPLIT),
    _of("sparse attention", "pp 2, recomputed", pp=2, recompute_modules=["core_attn"]),
    _of("sparse attention", "ring 2", ring=2),
    _of("sparse attention", "ulysses 2, recomputed", ulysses=2, recompute_modules=["core_attn"]),
    _of("sparse attention", "ring 2 x ulysses 2", ring=2, ulysses=2),
    _of("sparse attention", "ep 2 over ring 2 x tp 2", ring=2, **EP_TP),
    _of("sparse attention", "pp 2 x ulysses 2", pp=2, ulysses=2),
    _of("sparse attention", "ep 4 over ring 2 x shard 2", ring=2, shard=2, expert_parallel_size=4),
)
"""The selection is computed on every rank."""

OF_LINEAR_ATTENTION = tuple(
    _of("linear attention", name, **settings)
    for name, settings in {
        "shard 2": {"shard": 2, "load_weights_mode": "all_ranks"},
        "tp 2": {"tp": 2, "recompute_modules": ["core_attn"]},
        "ep 2 over tp 2": EP_TP,
        "tp 4": {"tp": 4, "recompute_modules": ["self_attn"]},
        "tp 2, adapters": {"tp": 2, "lora": "of all", **SPLIT},
        "pp 2 x shard 2": {"pp": 2, "shard": 2},
        "ep 4 over pp 2 x shard 2 x tp 2": {
            "pp": 2,
            "shard": 2,
            "tp": 2,
            "expert_parallel_size": 4,
        },
        "shard 4": {"shard": 4},
        "shard 2 x tp 2": {"shard": 2, "tp": 2},
        "ep 2 over ring 2": {"ring": 2, "expert_parallel_size": 2},
        "ring 4": {"ring": 4, "enable_reentrant": True},
        "ulysses 2": {"ulysses": 2, "recompute_modules": ["core_attn"]},
        "pp 2 x ring 2": {"pp": 2, "ring": 2},
        "ring 4 x ulysses 2": {"ring": 4, "ulysses": 2},
    }.items()
)
OF_LINEAR_ATTENTION += (
    _of("dense linear attention", "tp 2, sequence parallel", tp=2, **SPLIT),
    _of("dense linear attention", "tp 2, normed adapters", tp=2, lora="normed"),
    _of("dense linear attention", "tp 2, merged adapters", tp=2, lora="merged"),
    _of("dense linear attention", "over nf4, shard 2 x tp 2", shard=2, tp=2, lora="over nf4"),
    _of("dense linear attention", "replicate 2, ddp", replicate=2, data_parallel_mode="ddp"),
    _of("dense linear attention", "pp 2", pp=2),
    _of("dense linear attention", "pp 2, ZBV", pp=2, pipeline_parallel_schedule="ZBVZeroBubble"),
    _of("dense linear attention", "ring 2", ring=2, lora="of all"),
    _of("dense linear attention", "ring 3", ring=3),
    _of("dense linear attention", "ring 2 x ulysses 2", ring=2, ulysses=2, cp_fsdp_mode="none"),
    _of("dense linear attention", "ring 2 x tp 2", ring=2, tp=2, **SPLIT),
    _of("dense linear attention", "ring 2 x tp 4", ring=2, tp=4, drops=RATE),
)
"""Heads of linear attention are split, and the channels of its convolution with them. With three
ranks some have no heads, and eight repeat those of keys."""
OF_HYBRIDS = (
    _of("channel linear attention", "ep 2 over tp 2", **EP_TP),
    _of("channel linear attention", "tp 2, adapters", tp=2, lora="of all"),
    _of("channel linear attention", "shard 2", shard=2),
    _of("channel linear attention", "pp 2", pp=2),
    _of("channel linear attention", "ulysses 2", ulysses=2),
    _of("channel linear attention", "ring 2", ring=2),
    _of("separate linear attention", "tp 2, sequence parallel", tp=2, **SPLIT),
    _of("separate linear attention", "tp 2, adapters", tp=2, lora="of all"),
    _of("separate linear attention", "over nf4, shard 2 x tp 2", shard=2, tp=2, lora="over nf4"),
    _of("separate linear attention", "pp 2 x shard 2", pp=2, shard=2),
    _of("convolutions", "tp 2, sequence parallel", tp=2, **SPLIT),
    _of("convolutions", "tp 2, adapters", tp=2, lora="of all"),
    _of("convolutions", "shard 2, merged adapters", shard=2, lora="merged"),
    _of("convolutions", "tp 2, normed adapters", tp=2, lora="normed"),
    _of("convolutions", "over few bits, shard 2 x tp 2", shard=2, tp=2, lora="over few bits"),
    _of("convolutions", "shard 2", shard=2),
    _of("convolutions", "pp 2", pp=2),
    _of("separate linear attention", "ring 2 x tp 2", ring=2, tp=2),
    _of("convolutions", "ring 3", ring=3),
    _of("convolutions", "ulysses 2 x tp 2", ulysses=2, tp=2, **SPLIT),
    _of("mamba", "shard 2", shard=2, load_weights_mode="all_ranks"),
    _of("mamba", "ep 2 over tp 2", recompute_modules=["core_attn"], **EP_TP),
    _of("mamba", "tp 4", tp=4, recompute_modules=["self_attn"]),
    _of("mamba", "tp 2, adapters", tp=2, lora=True, **SPLIT),
    _of("mamba", "tp 2, adapters of all", tp=2, lora="of all"),
    _of("mamba", "pp 2 x shard 2 x tp 2", pp=2, shard=2, tp=2),
    _of("dense mamba", "tp 2, sequence parallel", tp=2, **SPLIT),
    _of("dense mamba", "tp 4, adapters", tp=4, lora=True),
    _of("dense mamba", "ring 2 x ulysses 2", ring=2, ulysses=2),
    _of("dense mamba", "ulysses 2 x tp 2", ulysses=2, tp=2, **SPLIT),
    _of("mamba", "pp 2 x ring 2", pp=2, ring=2),
    _of("dense mamba", "tp 2, normed adapters", tp=2, lora="normed"),
    _of("dense mamba", "tp 2, dropout", tp=2, lora="of all", drops=RATE),
    _of("dense mamba", "shard 2, merged adapters", shard=2, lora="merged"),
    _of("dense mamba", "pp 2", pp=2),
    _of("layers of one part", "tp 2, sequence parallel", tp=2, **SPLIT),
    _of("layers of one part", "tp 2, recomputed", tp=2, recompute_modules=["core_attn", "mlp"]),
    _of("layers of one part", "tp 2, adapters", tp=2, lora=True),
    _of("layers of one part", "shard 2", shard=2),
    _of("layers of one part", "pp 2", pp=2),
    _of("layers of one part", "ring 3", ring=3),
    _of("experts without a gate", "ep 2 over tp 2", **EP_TP),
    _of("experts without a gate", "adapters of all, ep 2 over tp 2", lora="of all", **EP_TP),
    _of(
        "experts without a gate",
        "ep 2 over shard 2, gates recomputed",
        moe_checkpoint_method="moe_act",
        **EP_SHARD,
    ),
    _of("experts without a gate", "adapters, ep 2 over shard 2", lora=True, **EP_SHARD),
    _of(
        "experts without a gate",
        "over few bits, shard 2 x tp 2",
        shard=2,
        tp=2,
        lora="over few bits",
    ),
    _of("experts without a gate", "half shared adapters, shard 2", shard=2, lora="half shared"),
    _of("experts without a gate", "shard 2, merged adapters", shard=2, lora="half shared, merged"),
    _of("experts without a gate", "pp 2", pp=2),
    _of("convolutions and experts", "ep 2 over tp 2", **EP_TP),
    _of("convolutions and experts", "adapters of all, ep 2 over tp 2", lora="of all", **EP_TP),
    _of("convolutions and experts", "shard 2", shard=2),
    _of("convolutions and experts", "pp 2", pp=2),
    _of("convolutions and experts", "ep 2 over ring 2", ring=2, expert_parallel_size=2),
)
"""Other kinds of layers with a state beside softmax attention."""

OF_GEMMA3 = tuple(
    replace(layout, name=f"gemma 3, {layout.name}", kind="gemma 3")
    for layout in (*SINGLE, *PAIRS, *TRIPLES)
    if "two key heads" not in layout.name
)
"""Every axis in every form, and any two or three of them."""

ZBV: dict[str, Any] = {"pipeline_parallel_schedule": "ZBVZeroBubble"}
NORMED: dict[str, Any] = {"kind": "untied", "lora": "normed"}
FORMED = (
    laid("normed adapters, shard 2", shard=2, load_weights_mode="all_ranks", **NORMED),
    laid("normed adapters, tp 2", tp=2, **NORMED),
    laid("normed adapters, tp 2, not fused", tp=2, model={"merge_qkv": False}, **SPLIT, **NORMED),
    laid("normed adapters, pp 2", pp=2, **NORMED),
    _sinks("tp 2, adapters and biases", tp=2, lora="biased"),
)
"""Adapters with magnitudes, on the embedding and the head too, and with biases."""

MERGED: dict[str, Any] = {"kind": "untied", "lora": "merged"}
MERGING = (
    laid("merged adapters, shard 2, offloaded", shard=2, enable_fsdp_offload=True, **MERGED),
    laid("merged adapters, tp 2, not fused", tp=2, model={"merge_qkv": False}, **SPLIT, **MERGED),
    laid("merged adapters, pp 2, ZBV", pp=2, **ZBV, **MERGED),
    _sparse(
        "merged adapters of experts, ep 2 over shard 2 x tp 2",
        2,
        shard=2,
        tp=2,
        lora="half shared, merged",
    ),
    _sparse(
        "merged adapters of experts, ep 2 over replicate 2, ddp",
        2,
        replicate=2,
        lora="half shared, merged",
        data_parallel_mode="ddp",
    ),
)
"""Adapters that become part of the weights after the second step, and start anew."""

OVER_NVFP4: dict[str, Any] = {"kind": "broad", "lora": "over nvfp4"}
OVER_TILES: dict[str, Any] = {"kind": "broad", "lora": "over tiles"}
QUANTIZED = (
    laid("over nf4, shard 2 x tp 2", shard=2, tp=2, kind="broad", lora="over nf4", **SPLIT),
    laid("over nvfp4, tp 2", tp=2, load_weights_mode="all_ranks", **OVER_NVFP4),
    laid("over nvfp4, shard 2, offloaded", shard=2, enable_fsdp_offload=True, **OVER_NVFP4),
    laid("over tiles, pp 2, not fused", pp=2, model={"merge_qkv": False}, **OVER_TILES),
    laid("over tiles, shard 2, reentrant", shard=2, enable_reentrant=True, **OVER_TILES),
    _sparse("over few bits, ep 2 over shard 2", 2, shard=2, lora="over few bits"),
    _sparse("over few bits, ep 2 over tp 2", 2, tp=2, lora="over few bits", **SPLIT),
    _sparse(
        "over few bits, ep 2 over replicate 2, ddp, gates recomputed",
        2,
        replicate=2,
        data_parallel_mode="ddp",
        moe_checkpoint_method="moe_act",
        lora="over few bits",
    ),
    laid("over nvfp4, merged, pp 2", pp=2, kind="broad", lora="over nvfp4, merged"),
    _sparse(
        "over few bits, merged, ep 2 over replicate 2, ddp",
        2,
        replicate=2,
        data_parallel_mode="ddp",
        lora="over few bits, merged",
    ),
)
"""Adapters over weights in fewer bits."""

AWAY: dict[str, Any] = {"enable_activation_offload": True}
OFFLOADED = (
    laid("away, one process, all kept", shard=1, enable_gradient_checkpointing=False, **AWAY),
    laid("away, shard 2, reentrant", shard=2, enable_reentrant=True, **AWAY),
    laid("away, tp 2, parts recomputed", tp=2, recompute_modules=["self_attn"], **SPLIT, **AWAY),
    laid("away, pp 2, some stay", pp=2, activation_gpu_limit=2e-5, **AWAY),
    laid("away, pp 2, ZBV", pp=2, **ZBV, **AWAY),
    _sparse(
        "away, ep 2 over shard 2, gates recomputed",
        2,
        shard=2,
        moe_checkpoint_method="moe_act",
        **AWAY,
    ),
)
"""Activations that wait in other memory for the backward pass."""


def _dropping(name: str, /, **settings: Any) -> Layout:
    return laid(f"dropout, {name}", drops=RATE, **settings)


DROPPING = (
    _dropping("all kept", data_parallel_mode="none", enable_gradient_checkpointing=False),
    _dropping("two rows at once", data_parallel_mode="none", micro_batch_size=2),
    _dropping("shard 2", shard=2),
    _dropping("ring 2", ring=2),
    _dropping("ulysses 2", ulysses=2),
    _dropping("tp 2, sequence parallel", tp=2, **SPLIT),
    _dropping("pp 2, ZBV", pp=2, pipeline_parallel_schedule="ZBVZeroBubble"),
    _dropping("tp 2, adapters", tp=2, lora=True),
    _dropping(
        "tp 2, sequence parallel, adapters not fused",
        tp=2,
        lora=True,
        model={"merge_qkv": False},
        recompute_modules=["self_attn"],
        **SPLIT,
    ),
)
"""Layouts under which the same is dropped."""

TWO_AT_ONCE: dict[str, Any] = {"micro_batch_size": 2}
BALANCED = (
    _sparse("balance of rows, two at once", 1, balance="of rows", shard=1, **TWO_AT_ONCE),
    _sparse("balance of rows, ep 2 over shard 2", 2, balance="of rows", shard=2),
    _sparse("balance of rows, ring 2", 1, balance="of rows", ring=2, **TWO_AT_ONCE),
    _sparse("balance of rows, ulysses 2", 1, balance="of rows", ulysses=2),
    _sparse("balance of rows, tp 2", 1, balance="of rows", tp=2),
    _sparse("balance of rows, ep 2 over tp 2, split", 2, balance="of rows", tp=2, **SPLIT),
    _sparse("balance of rows, pp 2, ZBV", 1, balance="of rows", pp=2, **ZBV),
    _sparse("balance of steps, shard 2", 1, balance="of steps", shard=2),
    _sparse("balance of steps, one pass, shard 2", 1, balance="of steps", shard=2, **TWO_AT_ONCE),
    _sparse("balance of steps, tp 2, split", 1, balance="of steps", tp=2, **SPLIT),
    _sparse("balance of steps, pp 2", 1, balance="of steps", pp=2),
    _sparse(
        "balance of steps, ep 4 over pp 2 x ring 2 x tp 2",
        4,
        balance="of steps",
        pp=2,
        ring=2,
        tp=2,
    ),
)
"""Losses of routers, of rows that are cut or several at once, and of steps of several passes."""

OF_GATED_EXPERTS = (
    *(
        replace(layout, name=f"gated, {layout.name}", kind="gated experts")
        for layout in (*EXPERTS, *ADAPTED, *BALANCED)
    ),
    laid("gated, adapters of all, ep 2 over tp 2", kind="gated experts", lora="of all", **EP_TP),
    laid(
        "a stage without experts, pp 2 x tp 2",
        kind="gated experts",
        balance="of steps",
        pp=2,
        tp=2,
        pipeline_parallel_split=[0, 0],
    ),
)
"""A shared expert whose output has a gate: one row, of which not every rank has a part."""

LAYOUTS = {
    layout.name: layout
    for layout in (
        *FORMS,
        *SINGLE,
        *PAIRS,
        *TRIPLES,
        *EXPERTS,
        *ADAPTED,
        *MORE_EXPERTS,
        *SINKS,
        *WITH_LAYER_NORMS,
        *WITH_LEARNED_POSITIONS,
        *DESCRIBED,
        *OF_LATENT_ATTENTION,
        *OF_SPARSE_ATTENTION,
        *OF_LINEAR_ATTENTION,
        *OF_HYBRIDS,
        *OF_GEMMA3,
        *FORMED,
        *MERGING,
        *QUANTIZED,
        *OFFLOADED,
        *DROPPING,
        *BALANCED,
        *OF_GATED_EXPERTS,
    )
}
