"""Steps of models with experts, all weights trained: `python -m tests.bench.gpu.experts [--dry]`.

Layers of Qwen3-30B-A3B and of gpt-oss-20B, as many as fit, with rows of 8192. Routers are drawn so
that some experts get more tokens than others, as those of trained models do; how many more is not
measured. Model FLOP count the experts that a token is routed to.
"""

import argparse
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from penstock.engine.distributed.ranks import ProcessInfo, destroy_process_group, init_process_group
from penstock.models.layers.router import Router
from penstock.train.trainer import Trainer
from tests.bench import train_cuda
from tests.bench.bench_gpu import IN_16_BITS, ON_ONE, OURS
from tests.bench.timing import CUDA, machine, verdict
from tests.bench.train_cuda import Case, Figures
from tests.engine import loops, runs

MFU = 0.35
QWEN3_30B_A3B: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 151_936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "tie_word_embeddings": False,
}
GPT_OSS_20B: dict[str, Any] = {
    "model_type": "gpt_oss",
    "architectures": ["GptOssForCausalLM"],
    "vocab_size": 201_088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 6,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "attention_bias": True,
    "tie_word_embeddings": False,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 150_000.0,
        "factor": 32.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
}
SMALL = {
    "vocab_size": runs.VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
DRY: Mapping[str, dict[str, Any]] = {
    "Qwen3-30B-A3B": {**SMALL, "moe_intermediate_size": 16, "num_experts": 8},
    "gpt-oss-20B": {**SMALL, "intermediate_size": 16, "num_local_experts": 6},
}
CASES = {
    name: Case(name, shape, train={**ON_ONE, **IN_16_BITS})
    for name, shape in (("Qwen3-30B-A3B", QWEN3_30B_A3B), ("gpt-oss-20B", GPT_OSS_20B))
}
SPREAD = 0.3
"""Of the logarithm of the norms of routers' rows: experts with longer ones get more tokens."""


def skew_routers(loop: Trainer) -> None:
    """Give some experts more tokens than others."""
    generator = torch.Generator().manual_seed(0)
    for module in loops.decoder_of(loop).modules():
        if isinstance(module, Router):
            scale_E1 = (SPREAD * torch.randn(len(module.weight), 1, generator=generator)).exp()
            with torch.no_grad():
                module.weight.mul_(scale_E1.to(module.weight))


def measure(case: Case, ranks: ProcessInfo) -> Figures | None:
    """With as little recomputed as fits; None where nothing does."""
    for recomputed, train in OURS.items():
        asked = replace(case, train={**case.train, **train})
        found = train_cuda.measure_if_it_fits(
            f"{case.name}, {recomputed} recomputed",
            lambda folder, asked=asked: train_cuda.measure(
                asked, folder, ranks, prepare=skew_routers
            ),
        )
        if found:
            return found
    return None


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches of a step")
    parser.add_argument("--dry", action="store_true")
    asked = parser.parse_args()
    accumulate, dry = asked.accumulate, asked.dry
    print(machine())
    ranks = init_process_group(600)
    device = torch.cuda.get_device_name() if CUDA else "CPU"
    sheet = next((flop for name, flop in train_cuda.PEAKS.items() if name in device), None)
    for name, case in CASES.items():
        if dry:
            case = replace(case, shape={**case.shape, **DRY[name]}, row=64, document=20)
        if accumulate > 1:
            name = f"{name}, {accumulate} micro-batches"
            train = {**case.train, "gradient_accumulation_steps": accumulate}
            case = replace(case, name=name, train=train)
        found = measure(case, ranks)
        if found is None:
            continue
        print(
            f"{name}: {found.tokens_per_second:,.0f} tokens/s, "
            f"{found.flop_per_second / 1e12:.0f} TFLOP/s, {found.peak_bytes / 2**30:.1f} GiB"
        )
        if sheet:
            print(verdict(f"{name}: MFU", found.flop_per_second / sheet, MFU))
    destroy_process_group()


if __name__ == "__main__":
    main()
