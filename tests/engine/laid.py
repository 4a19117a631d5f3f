"""A way to cut one small model over ranks, as a run."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.train.launch.job import Job
from tests.engine import runs
from tests.engine.inputs import MODELS, write_model

ROWS_PER_STEP = 4
MAX_NORM, LR = 0.5, 0.5
"""Every step is clipped, and moves weights by far more than rounding does."""

SHORT = {
    "pp": "pipeline_parallel_size",
    "replicate": "data_parallel_replicate_size",
    "shard": "data_parallel_shard_size",
    "ring": "ringattn_parallel_size",
    "ulysses": "ulysses_parallel_size",
    "tp": "tensor_parallel_size",
}
"""Sizes of axes are written by these names, outermost first."""


LORA_FORMS: Mapping[bool | str, dict[str, Any]] = {
    "shared": {"moe_shared_lora": True},
    "half shared": {"moe_hybrid_shared_lora": True},
    "of all": {"lora_target_modules": "all-linear"},
    "normed": {
        "use_dora": True,
        "use_rslora": True,
        # With the root of the rank an adapter would count eight times, and so would its rounding.
        "lora_alpha": 4,
        "lora_plus_ratio": 4.0,
        "lora_target_modules": ["all-linear", "embed_tokens", "lm_head"],
    },
    "biased": {"lora_bias": "lora_only", "lora_target_modules": ["*.self_attn.*"]},
    "merged": {
        "merge_lora_interval": 2,
        "reset_optimizer_on_merge": True,
        "lora_target_modules": ["all-linear", "embed_tokens", "lm_head"],
    },
    "over nf4": {
        "enable_qlora": True,
        "quant_format": "nf4",
        "quant_group_size": 32,
        "exclude_modules": ["layers.1.mlp"],
        "use_dora": True,
    },
    "over nvfp4": {"enable_qlora": True, "enable_aqn": True, "aqn_alpha": 2.0},
    "over tiles": {"enable_qlora": True, "quant_format": "block_fp8"},
    "over few bits": {
        "enable_qlora": True,
        "quant_format": "int8_int4_experts",
        "quant_group_size": 16,
        "enable_aqn": True,
    },
    # After the last step: what is rounded to another code then changes nothing that follows.
    "over nvfp4, merged": {"enable_qlora": True, "merge_lora_interval": 3},
    "over few bits, merged": {
        "enable_qlora": True,
        "quant_format": "int8_int4_experts",
        "quant_group_size": 16,
        "merge_lora_interval": 3,
    },
    "half shared, merged": {"moe_hybrid_shared_lora": True, "merge_lora_interval": 2},
}
"""What adapters may be besides the plain ones."""


BALANCES: Mapping[str, dict[str, Any]] = {
    "": {},
    "of rows": {"moe_aux_loss_coef": 0.5, "moe_z_loss_coef": 0.05},
    "of steps": {"moe_aux_loss_coef": 0.5, "moe_global_load_balancing": True},
}
"""What is asked of routers, of which gradients are as large as of the loss."""


@dataclass(frozen=True)
class Layout:
    """Sizes of axes, and other settings."""

    name: str
    sizes: Mapping[str, int]
    more: Mapping[str, Any] = field(default_factory=dict)
    kind: str = "tied"
    """One of `inputs.MODELS`."""
    lora: bool | str = False
    """A text: one of LORA_FORMS."""
    drops: float = 0.0
    """The rate of every dropout there is."""
    balance: str = ""
    """One of BALANCES."""

    @property
    def world(self) -> int:
        """Ranks."""
        return math.prod(self.sizes.values())

    def job(self, folder: Path, out: str, *, optimizer: str = "sgd", **train: Any) -> Job:
        """A run of this layout over the rows in `folder`. Its model is written there, where none of
        an earlier run is: to write all of them takes longer than to train one."""
        if self.kind in MODELS:
            write_model(folder, self.kind)
        settings: dict[str, Any] = {
            "optimizer": optimizer,
            "lr": LR,
            "max_grad_norm": MAX_NORM,
            "global_batch_size": ROWS_PER_STEP,
            "dropout": {"hidden": self.drops, "ffn": self.drops},
            "lora": {
                "enable_lora": bool(self.lora),
                "lora_rank": 4,
                "lora_dropout": self.drops,
                **LORA_FORMS.get(self.lora, {}),
            },
            "data": {"pad_to_multiple_of": 1},
            **{SHORT[axis]: size for axis, size in self.sizes.items()},
            **BALANCES[self.balance],
            **self.more,
            **train,
        }
        model = {"model_path": str(folder / self.kind), **settings.pop("model", {})}
        run = runs.run_config(folder / out, folder / self.kind, model=model, **settings)
        return runs.job_of(run, folder / "packed")

    @property
    def alone(self) -> "Layout":
        """The same in one process: what every other layout is compared with."""
        return alone(self.kind, lora=self.lora, drops=self.drops, balance=self.balance)


def laid(
    name: str,
    /,
    kind: str = "tied",
    lora: bool | str = False,
    drops: float = 0.0,
    balance: str = "",
    **settings: Any,
) -> Layout:
    sizes = {axis: settings.pop(axis) for axis in SHORT if axis in settings}
    return Layout(name, sizes, settings, kind, lora, drops, balance)


def alone(kind: str, *, lora: bool | str = False, drops: float = 0.0, balance: str = "") -> Layout:
    """One process."""
    adapters = f", adapters {lora}" if isinstance(lora, str) else ", adapters" * lora
    name = f"one process of {kind}{adapters}{', dropout' * (drops > 0)}"
    name += f", balance {balance}" if balance else ""
    return Layout(name, {}, {"data_parallel_mode": "none"}, kind, lora, drops, balance)
