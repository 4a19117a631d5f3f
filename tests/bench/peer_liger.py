"""The training step of transformers' own model with Liger-Kernel's kernels, as its users write it
on one GPU: weights, gradients and AdamW's states in bfloat16, or peft's adapters on frozen ones.

Packed rows go the one way in which transformers keeps documents apart: position ids, no mask, no
cache. Attention is FlashAttention's where a package of it is installed, else PyTorch's, which masks
a packed row as a whole.
"""

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal

import torch
import transformers

from penstock.rows.reader import Row
from tests.bench import peers
from tests.bench.timing import CUDA, DEVICE

Step = Callable[[Row], float]
"""A packed row to its loss."""

FLASH = {"flash_attn_interface": "flash_attention_3", "flash_attn": "flash_attention_2"}


def attention() -> str:
    """The fastest implementation that transformers has here."""
    return next((name for package, name in FLASH.items() if CUDA and find_spec(package)), "sdpa")


def liger_step(
    hf_config: dict[str, Any], rank: int | None, recomputed: Literal["nothing", "layers"]
) -> Step:
    """A step of a model with random weights; with adapters of that rank, or of all weights."""
    if CUDA and peers.serves("liger"):
        import_module("liger_kernel.transformers").apply_liger_kernel_to_qwen3()
    config = transformers.AutoConfig.for_model(**hf_config)
    with torch.device(DEVICE):
        model: Any = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation=attention(), dtype=torch.bfloat16
        )
    if recomputed == "layers":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if rank is not None:
        peft = import_module("peft")
        model.enable_input_require_grads()
        model = peft.get_peft_model(
            model, peft.LoraConfig(r=rank, lora_alpha=rank, target_modules="all-linear")
        )
    model.train()
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(learning, lr=1e-5, fused=True)

    def step(row: Row) -> float:
        tokens, labels = (
            torch.from_numpy(part.astype("int64"))[None].to(DEVICE)
            for part in (row.input_ids, row.labels)
        )
        places = torch.cat([torch.arange(int(length)) for length in row.lengths])
        loss = model(
            input_ids=tokens,
            position_ids=places[None].to(DEVICE),
            attention_mask=None,
            use_cache=False,
            labels=labels,
            shift_labels=labels,
        ).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(learning, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step
