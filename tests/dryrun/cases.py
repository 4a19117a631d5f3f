"""The layouts whose dry runs are kept in `tests/golden/dry_runs.json`.

python -m tests.dryrun.cases   writes that file again
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.estimate.dryrun.summary import DryRun, RankSummary
from tests.dryrun.layouts import (
    GEMMA3,
    LATENT,
    LINEAR,
    MOE,
    OLMO2,
    PHI3,
    SPARSE,
    Case,
    dry_runs,
)

GOLDEN = Path(__file__).parents[1] / "golden" / "dry_runs.json"

LORA = {"enable_lora": True, "lora_rank": 8}
QLORA = {**LORA, "enable_qlora": True}
DPO = {"loss_type": "sigmoid"}
PREDICTING = {**LATENT, "num_nextn_predict_layers": 2}
FURTHER = {"mtp_loss_weight": 0.3}
FOUR = {"gradient_accumulation_steps": 4}


def pipeline(schedule: str, **more: Any) -> dict[str, Any]:
    """A pipeline of two ranks with four micro-batches."""
    return {"pipeline_parallel_size": 2, "pipeline_parallel_schedule": schedule, **FOUR, **more}


CASES: Mapping[str, Case] = {
    "one device": Case(world=1, train={"data_parallel_mode": "none"}),
    "one device, lora": Case(world=1, train={"data_parallel_mode": "none"}, lora=LORA),
    "one device, sgd": Case(world=1, train={"data_parallel_mode": "none", "optimizer": "sgd"}),
    "ddp": Case(train={"data_parallel_mode": "ddp"}),
    "fsdp": Case(),
    "fsdp, 4 micro-batches": Case(train=FOUR),
    "fsdp, reduced once": Case(train={**FOUR, "fsdp_gradient_sync": "step"}),
    "fsdp, zero 2": Case(train={"zero_stage": 2}),
    "fsdp, no recomputation": Case(train={"enable_gradient_checkpointing": False}),
    "fsdp, recomputed attention": Case(train={"recompute_modules": ["self_attn"]}),
    "fsdp, fp32": Case(train={"enable_mixed_precision": False}),
    "fsdp, eager loss": Case(train={"ce_mode": "eager"}),
    "fsdp, muon": Case(train={"optimizer": "muon"}),
    "fsdp, anyprecision": Case(train={"optimizer": "anyprecision_adamw"}),
    "fsdp, optimizer in backward": Case(train={"fuse_optimizer_step": True, "max_grad_norm": 0}),
    "fsdp, optimizer on the host": Case(train={"optimizer_offload": "cpu"}),
    "fsdp, offload": Case(train={"enable_fsdp_offload": True}),
    "fsdp, activation offload": Case(train={"enable_activation_offload": True}),
    "fsdp, lora": Case(lora=LORA),
    "one device, qlora": Case(world=1, train={"data_parallel_mode": "none"}, lora=QLORA),
    "fsdp, qlora": Case(lora=QLORA),
    "fsdp, fp8": Case(train={"enable_fp8_training": True}),
    "fsdp, dpo": Case(preference=DPO),
    "fsdp, kto, prompts not shared": Case(preference={"loss_type": "kto", "share_prompts": False}),
    "tp, orpo": Case(train={"tensor_parallel_size": 2}, preference={"loss_type": "orpo"}),
    "1f1b, dpo, lora": Case(train=pipeline("1F1B"), preference=DPO, lora=LORA),
    "hsdp": Case(train={"data_parallel_replicate_size": 2}),
    "tp": Case(train={"tensor_parallel_size": 2}),
    "tp, sequence parallel": Case(train={"tensor_parallel_size": 2, "sequence_parallel": True}),
    "gemma 3, no recomputation": Case(model=GEMMA3, train={"enable_gradient_checkpointing": False}),
    "olmo 2, tp": Case(model=OLMO2, train={"tensor_parallel_size": 2}),
    "phi 3, tp": Case(model=PHI3, train={"tensor_parallel_size": 2}),
    "tp, gathered logits": Case(train={"tensor_parallel_size": 2, "tp_vocab_parallel_loss": False}),
    "ring": Case(train={"ringattn_parallel_size": 2}),
    "ulysses": Case(train={"ulysses_parallel_size": 2}),
    "ring x ulysses": Case(train={"ringattn_parallel_size": 2, "ulysses_parallel_size": 2}),
    "1f1b": Case(train=pipeline("1F1B")),
    "gpipe": Case(train=pipeline("GPipe")),
    "interleaved": Case(train=pipeline("Interleaved1F1B")),
    "interleaved zero bubble": Case(train=pipeline("InterleavedZeroBubble")),
    "zbv": Case(train=pipeline("ZBVZeroBubble")),
    "1f1b x tp": Case(train=pipeline("1F1B", tensor_parallel_size=2)),
    "moe": Case(model=MOE),
    "moe, triton": Case(model=MOE, settings={"moe_implementation": "triton"}),
    "ep": Case(model=MOE, train={"expert_parallel_size": 4}),
    "ep x 1f1b": Case(model=MOE, train=pipeline("1F1B", expert_parallel_size=2)),
    "ep, lora": Case(model=MOE, train={"expert_parallel_size": 4}, lora=LORA),
    "latent attention, tp": Case(
        model=LATENT,
        train={"tensor_parallel_size": 2, "sequence_parallel": True, "expert_parallel_size": 4},
    ),
    "sparse attention": Case(model=SPARSE),
    "sparse attention, ring x ulysses": Case(
        model=SPARSE, train={"ringattn_parallel_size": 2, "ulysses_parallel_size": 2}
    ),
    "sparse attention, no recomputation": Case(
        model=SPARSE, train={"enable_gradient_checkpointing": False}
    ),
    "multi-token prediction": Case(model=PREDICTING, train=FURTHER),
    "multi-token prediction, 1f1b": Case(model=PREDICTING, train={**FURTHER, **pipeline("1F1B")}),
    "multi-token prediction, ring x ulysses": Case(
        model=PREDICTING,
        train={**FURTHER, "ringattn_parallel_size": 2, "ulysses_parallel_size": 2},
    ),
    "multi-token prediction, no recomputation": Case(
        model=PREDICTING, train={**FURTHER, "enable_gradient_checkpointing": False}
    ),
    "linear attention, tp": Case(model=LINEAR, train={"tensor_parallel_size": 2}),
    "linear attention, no recomputation": Case(
        model=LINEAR, train={"enable_gradient_checkpointing": False}
    ),
    "linear attention, ring x ulysses": Case(
        model=LINEAR, train={"ringattn_parallel_size": 2, "ulysses_parallel_size": 2}
    ),
    "linear attention, 1f1b": Case(model=LINEAR, train=pipeline("1F1B")),
    "moe, tp": Case(model=MOE, train={"tensor_parallel_size": 2}),
}


def counts(found: DryRun) -> dict[str, Any]:
    """What the golden file holds for a layout, by rank."""
    return {str(rank.rank): _counts(rank) for rank in found.ranks}


def _counts(rank: RankSummary) -> dict[str, Any]:
    order = [(use.name, use.dtype, len(use.ranks)) for use in _collectives(rank)]
    kinds: dict[str, int] = {}
    for name, _, size in order:
        kinds[f"{name} of {size}"] = kinds.get(f"{name} of {size}", 0) + 1
    return {
        "launches": rank.launches,
        "copies": sum(rank.copies.values()),
        "syncs": sum(rank.syncs.values()),
        "syncs in micro-batches": rank.syncs_in_micro_batches,
        "collectives": dict(sorted(kinds.items())),
        "order": hashlib.sha256(json.dumps(order).encode()).hexdigest()[:12],
    }


def _collectives(rank: RankSummary) -> list[Any]:
    return [record for record in rank.records if type(record).__name__ == "Collective"]


if __name__ == "__main__":
    found = {name: counts(one) for name, one in dry_runs(CASES).items()}
    GOLDEN.write_text(json.dumps(found, indent=1) + "\n")
