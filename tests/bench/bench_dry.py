"""Dry runs of large layouts: what they take here, and what they find.

    python -m tests.bench.bench_dry [--case NAME] [--json FILE]

Rows of the table: docs/benchmarks/dry.md.
"""

import argparse
import json
import resource
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.engine.distributed.parallel_dims import ParallelDims, compute_dims
from penstock.estimate.costs.device_speed import find_machine
from penstock.estimate.costs.estimate import build_cost_model, predict
from penstock.estimate.dryrun.dry_run import dry_run, select_ranks
from tests.engine import runs

GIB = 2**30


def dense(width: int, inner: int, layers: int, heads: int, vocabulary: int) -> dict[str, Any]:
    """A dense model of 8 key-value heads, 128 wide."""
    return {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131_072,
        "tie_word_embeddings": False,
    }


def sparse(base: Mapping[str, Any], experts: int, inner: int, chosen: int) -> dict[str, Any]:
    """A mixture of experts."""
    return {
        **base,
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "moe_intermediate_size": inner,
        "num_experts": experts,
        "num_experts_per_tok": chosen,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


B8 = dense(4096, 12_288, 36, 32, 151_936)
B32 = dense(5120, 25_600, 64, 64, 151_936)
B70 = dense(8192, 28_672, 80, 64, 128_256)
B30_A3 = {**sparse(dense(2048, 6144, 48, 32, 151_936), 128, 768, 8), "num_key_value_heads": 4}
B235_A22 = {**sparse(dense(4096, 12_288, 94, 64, 151_936), 128, 1536, 8), "num_key_value_heads": 4}
B671 = sparse(dense(7168, 18_432, 60, 128, 129_280), 256, 2048, 8)
GLM5: dict[str, Any] = {
    **dense(6144, 12_288, 78, 64, 154_880),
    "model_type": "glm_moe_dsa",
    "architectures": ["GlmMoeDsaForCausalLM"],
    "num_key_value_heads": 64,
    "head_dim": None,
    "q_lora_rank": 2048,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "index_topk": 2048,
    "index_head_dim": 128,
    "index_n_heads": 32,
    "first_k_dense_replace": 3,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}
LATENT: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "head_dim": None,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "moe_intermediate_size": 2048,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
}
DEEPSEEK_V3: dict[str, Any] = {
    **dense(7168, 18_432, 61, 128, 129_280),
    **LATENT,
    "num_key_value_heads": 128,
    "first_k_dense_replace": 3,
    "n_routed_experts": 256,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 1,
}
KIMI_K2: dict[str, Any] = {
    **dense(7168, 18_432, 61, 64, 163_840),
    **LATENT,
    "num_key_value_heads": 64,
    "first_k_dense_replace": 1,
    "n_routed_experts": 384,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.827,
}
Q35_A3: dict[str, Any] = {
    **dense(2048, 512, 40, 16, 248_320),
    "model_type": "qwen3_5_moe_text",
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "num_key_value_heads": 2,
    "head_dim": 256,
    "layer_types": [*["linear_attention"] * 3, "full_attention"] * 10,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000_000,
        "partial_rotary_factor": 0.25,
    },
}


@dataclass(frozen=True)
class Layout:
    """A model on a number of devices."""

    model: Mapping[str, Any]
    world: int
    train: Mapping[str, Any] = field(default_factory=dict)
    tokens: int = 8192
    device: str = "H100"


def accumulating(count: int, **more: Any) -> dict[str, Any]:
    """This many micro-batches."""
    return {"gradient_accumulation_steps": count, **more}


LAYOUTS: Mapping[str, Layout] = {
    "8B, fsdp 8, 1 micro-batch": Layout(B8, 8),
    "8B, fsdp 8, 2 micro-batches": Layout(B8, 8, accumulating(2)),
    "8B, fsdp 8, 8 micro-batches": Layout(B8, 8, accumulating(8)),
    "32B, fsdp 64, 2 micro-batches": Layout(B32, 64, accumulating(2), device="H200"),
    "70B, tp 8 x fsdp 16": Layout(B70, 128, {"tensor_parallel_size": 8, "sequence_parallel": True}),
    "30B-A3B, ep 8 x fsdp 64": Layout(B30_A3, 64, {"expert_parallel_size": 8}),
    "235B-A22B, ep 8 x pp 4 x hsdp 8 x 8": Layout(
        B235_A22,
        256,
        accumulating(
            8,
            pipeline_parallel_size=4,
            expert_parallel_size=8,
            data_parallel_shard_size=8,
            data_parallel_replicate_size=8,
        ),
        tokens=4096,
    ),
    "671B MoE, ep 32 x fsdp 1024": Layout(
        B671, 1024, {"expert_parallel_size": 32}, tokens=4096, device="H200"
    ),
    "DeepSeek-V3 with MTP, ep 32 x fsdp 256": Layout(
        DEEPSEEK_V3, 256, {"expert_parallel_size": 32, "mtp_loss_weight": 0.3}, tokens=4096
    ),
    "Kimi K2, ep 32 x fsdp 1024": Layout(KIMI_K2, 1024, {"expert_parallel_size": 32}, tokens=4096),
    "GLM-5, ep 32 x fsdp 512": Layout(GLM5, 512, {"expert_parallel_size": 32}),
    "Qwen3.5-35B-A3B, ep 8 x fsdp 8": Layout(Q35_A3, 8, {"expert_parallel_size": 8}),
    "70B, hsdp 64 x 64": Layout(
        B70, 4096, {"data_parallel_replicate_size": 64, "data_parallel_shard_size": 64}
    ),
}


def measure(layout: Layout) -> dict[str, Any]:
    """The figures of one layout."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        hf_config = {**runs.TINY, **layout.model}
        model = runs.write_config(Path(folder) / "model", **layout.model)
        train = {"enable_mixed_precision": True, "global_batch_size": None, **layout.train}
        data = {"sample_packing_sequence_len": layout.tokens}
        run = runs.run_config(Path(folder) / "out", model, data=data, **train)
    dims = compute_dims(run.train, layout.world)
    assert isinstance(dims, ParallelDims), dims
    found = dry_run(
        run,
        hf_config,
        dims,
        select_ranks(dims, "roles"),
        device_name=layout.device,
        local_ranks=min(8, layout.world),
    )
    taken = time.perf_counter() - started
    machine = find_machine(layout.device)
    estimate = predict(run, build_cost_model(run, hf_config), dims, machine, None)
    worst = max(found.ranks, key=lambda rank: rank.timeline.seconds)
    uses = worst.collectives()
    return {
        "peak GiB": round(found.peak / GIB, 2),
        "estimate": round(estimate.memory.total / found.peak, 3),
        "step s": round(found.seconds, 3),
        "tokens/s": round(found.tokens_per_second),
        "MFU": round(found.mfu or 0, 3),
        "exposed ms": round(1000 * worst.timeline.exposed_seconds, 1),
        "exposed GiB": round(sum(use.exposed_bytes for use in uses) / GIB, 2),
        "syncs": sum(worst.syncs.values()),
        "in micro-batches": worst.syncs_in_micro_batches,
        "launches a layer": round(worst.launches_per_layer or 0, 1),
        "faults": sum(found.faults.values()),
        "took s": round(taken, 1),
        "took GiB": round(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 / GIB, 2),
    }


def main() -> None:
    """Print a row for each layout."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=[*LAYOUTS])
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    rows: dict[str, Any] = {}
    for name, layout in LAYOUTS.items():
        if asked.case in (None, name):
            rows[name] = measure(layout)
            print(f"{name:38}", json.dumps(rows[name]), flush=True)
    if asked.json:
        asked.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
