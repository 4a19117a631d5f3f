"""Runs whose memory is predicted and measured: what takes it differs from one to the next."""

from collections.abc import Mapping
from typing import Any

LONG = [1024, 512, 512]

Case = Mapping[str, Any]

CASES: Mapping[str, Case] = {
    "activations": {"lengths": LONG},
    "recomputed": {"lengths": LONG, "enable_gradient_checkpointing": True},
    "full precision": {"lengths": LONG, "enable_mixed_precision": False},
    "whole weights": {"lengths": LONG, "data_parallel_mode": "none"},
    "a large vocabulary": {"lengths": [256, 256], "hf": {"vocab_size": 32_768}},
    "adapters": {"lengths": LONG, "lora": {"enable_lora": True}},
    "sharded": {"world": 2, "lengths": [512, 512]},
    "split matrices": {"world": 2, "lengths": [512, 512], "tensor_parallel_size": 2},
}
"""Settings of `train`, but for: documents of a row, what is other about the model, ranks, and the
section `lora`."""

QUICK = ("activations", "recomputed")
