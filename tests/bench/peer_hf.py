"""The training step of transformers' own model under PyTorch's FSDP2, as its users write it.

Packed rows go the one way in which transformers keeps documents apart: position ids, no mask, no
cache.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from penstock.engine.distributed.ranks import ProcessInfo
from penstock.rows.collate import MicroBatch

Step = Callable[[Sequence[MicroBatch]], float]
"""Micro-batches of this rank to the loss over all ranks."""


def transformers_step(
    hf_config: dict[str, Any], state: dict[str, torch.Tensor], ranks: ProcessInfo, *, mixed: bool
) -> Step:
    """A step of the model with these weights, from its own loss to its optimizer."""
    config = transformers.AutoConfig.for_model(**hf_config)
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="sdpa", dtype=torch.float32
    )
    model.load_state_dict(state, strict=False)
    model.to(ranks.device).train()
    policy = (
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        if mixed
        else MixedPrecisionPolicy()
    )
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(batches: Sequence[MicroBatch]) -> float:
        trained = torch.tensor(sum(batch.num_trained for batch in batches), device=ranks.device)
        dist.all_reduce(trained)
        total = torch.zeros((), device=ranks.device)
        for index, batch in enumerate(batches):
            model.set_requires_gradient_sync(index == len(batches) - 1)
            labels = batch.labels_T[None].to(ranks.device)
            loss = model(
                input_ids=batch.input_ids_T[None].to(ranks.device),
                position_ids=batch.position_ids_T[None].to(ranks.device),
                attention_mask=None,
                use_cache=False,
                labels=labels,
                shift_labels=labels,
                num_items_in_batch=trained,
            ).loss
            # FSDP averages over ranks, and the loss is divided by the tokens of all of them.
            (loss * ranks.world_size).backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        dist.all_reduce(total)
        return total.item()

    return step
