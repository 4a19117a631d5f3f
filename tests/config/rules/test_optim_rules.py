"""Settings of optimizers, schedules and precision that cannot be honoured are refused with the
reason and the way out."""

from typing import Any

import pytest

from tests.config.values import refused_and_mended

# Of `train`: settings, where the fault is told, words of the reason, and what mends it.
COMBINATIONS: list[tuple[dict[str, Any], str, str, dict[str, Any]]] = [
    (
        {"optimizer_kwargs": {"beta": [0.9, 0.9]}},
        "optimizer_kwargs.beta",
        "did you mean betas?",
        {"optimizer_kwargs": {"betas": [0.9, 0.9]}},
    ),
    (
        {"optimizer_kwargs": {"betas": [0.9, 1.0]}},
        "optimizer_kwargs.betas",
        "write two numbers from 0 to below 1",
        {"optimizer_kwargs": {"betas": [0.9, 0.99]}},
    ),
    (
        {"optimizer": "sgd", "optimizer_kwargs": {"momentum": True}},
        "optimizer_kwargs.momentum",
        "write a number from 0 to below 1",
        {"optimizer_kwargs": {"momentum": 0.9}},
    ),
    (
        {"optimizer": "sgd", "optimizer_kwargs": {"nesterov": True}},
        "optimizer_kwargs.nesterov",
        "needs momentum above 0",
        {"optimizer_kwargs": {"nesterov": True, "momentum": 0.9}},
    ),
    (
        {"optimizer": "torch.optim.Adafactor"},
        "optimizer",
        "write data_parallel_mode: none or ddp",
        {"data_parallel_mode": "ddp"},
    ),
    (
        {
            "optimizer": "torchao.optim.AdamW8bit",
            "data_parallel_mode": "none",
            "tensor_parallel_size": 2,
        },
        "optimizer",
        "write tensor_parallel_size: 1",
        {"tensor_parallel_size": 1},
    ),
    ({"muon_lr": 0.1}, "muon_lr", "write optimizer: muon", {"optimizer": "muon"}),
    (
        {"optimizer": "muon", "lr": 0.0, "lr_min": 0.0},
        "lr",
        "muon_lr follows its schedule",
        {"lr": 1e-3},
    ),
    (
        {"lr_decay_style": "inverse_sqrt", "lr": 1e-5, "lr_min": 1e-4},
        "lr_min",
        "the inverse_sqrt decay would rise",
        {"lr_min": 1e-6},
    ),
    (
        {"lr_decay_style": "wsd", "lr": 1e-5, "lr_min": 1e-4},
        "lr_min",
        "the wsd decay would rise",
        {"lr_min": 1e-6},
    ),
    (
        {"lr_warmup_steps": 5, "lr_warmup_ratio": 0.1},
        "lr_warmup_ratio",
        "leave one of the two out",
        {"lr_warmup_steps": None},
    ),
    (
        {"lr_decay_style": "linear", "lr_warmup_ratio": 0.5, "lr_decay_ratio": 0.4},
        "lr_warmup_ratio",
        "after the decay's end",
        {"lr_decay_ratio": 0.6},
    ),
    (
        {"lr_decay_style": "inverse_sqrt", "lr_decay_ratio": 0.5},
        "lr_decay_ratio",
        "lr_decay_style: inverse_sqrt decays until the end of the",
        {"lr_decay_ratio": 1.0},
    ),
    (
        {"lr_decay_style": "wsd", "lr_schedule_kwargs": {"num_cycles": 1.5}},
        "lr_schedule_kwargs.num_cycles",
        "decay_shape is linear",
        {"lr_schedule_kwargs": {"num_cycles": 1.5, "decay_shape": "cosine"}},
    ),
    (
        {"lr_schedule_kwargs": {"power": 2.0}},
        "lr_schedule_kwargs.power",
        "write lr_decay_style: polynomial",
        {"lr_decay_style": "polynomial"},
    ),
    (
        {"lr_schedule_kwargs": {"warmup_style": "plus_one"}},
        "lr_schedule_kwargs.warmup_style",
        "there is no warmup",
        {"lr_warmup_steps": 3},
    ),
    (
        {"lr_decay_style": "noam", "lr_start": 1e-6},
        "lr_start",
        "has a warmup of its own",
        {"lr_start": 0.0},
    ),
    (
        {"precision": "fp16_mixed", "enable_mixed_precision": False},
        "precision",
        "fp16_mixed is mixed precision",
        {"precision": "bf16"},
    ),
    (
        {"precision": "fp32", "master_weights": False},
        "master_weights",
        "this run computes in float32",
        {"precision": "bf16"},
    ),
    (
        {"loss_scale_init": 2.0},
        "loss_scale_init",
        "write precision: fp16_mixed",
        {"precision": "fp16_mixed"},
    ),
    (
        {"grad_accum_dtype": "bf16"},
        "grad_accum_dtype",
        "write fsdp_reduce_dtype: bf16 as well",
        {"fsdp_reduce_dtype": "bf16"},
    ),
    (
        {"grad_accum_dtype": "bf16", "data_parallel_mode": "ddp", "optimizer": "sgd"},
        "grad_accum_dtype",
        "sgd needs gradients in the dtype of weights",
        {"optimizer": "adamw"},
    ),
    (
        {
            "grad_accum_dtype": "fp32",
            "precision": "bf16",
            "data_parallel_mode": "ddp",
            "pipeline_parallel_size": 2,
            "pipeline_parallel_schedule": "ZBVZeroBubble",
        },
        "grad_accum_dtype",
        "pipeline_parallel_schedule: ZBVZeroBubble accumulates",
        {"data_parallel_mode": "fsdp2"},
    ),
    (
        {"stochastic_rounding": True},
        "stochastic_rounding",
        "weights and optimizer states are in float32",
        {"precision": "bf16"},
    ),
    (
        {"stochastic_rounding": True, "precision": "bf16", "optimizer": "sgd"},
        "stochastic_rounding",
        "sgd has no stochastic rounding",
        {"optimizer": "muon"},
    ),
    (
        {"optimizer": "anyprecision_adamw", "optimizer_kwargs": {"use_kahan_summation": True}},
        "optimizer_kwargs.use_kahan_summation",
        "compensates rounding errors of bfloat16 weights",
        {"precision": "bf16"},
    ),
    (
        {"fuse_optimizer_step": True},
        "fuse_optimizer_step",
        "write max_grad_norm: 0",
        {"max_grad_norm": 0.0},
    ),
    (
        {"fuse_optimizer_step": True, "max_grad_norm": 0.0, "optimizer": "muon"},
        "fuse_optimizer_step",
        "uses each gradient as soon as it is complete",
        {"optimizer": "sgd"},
    ),
    (
        {"optimizer_offload": "cpu", "enable_fsdp_offload": True},
        "optimizer_offload",
        "leave one of the two out",
        {"enable_fsdp_offload": False},
    ),
]


@pytest.mark.parametrize(("settings", "where", "reason", "mended"), COMBINATIONS)
def test_what_cannot_be_honoured_is_refused_with_what_can(
    settings: dict[str, Any], where: str, reason: str, mended: dict[str, Any]
) -> None:
    refused_and_mended({"train": settings}, f"train.{where}", reason, {"train": mended})
