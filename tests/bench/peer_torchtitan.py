"""torchtitan's model, sharding, loss and clipping in the order of its `Trainer.train_step`.

Its masks for packed documents need a GPU, so on a CPU it attends to all that came before in the
row: on rows of one document that is the same, on others it is wrong and the dearer the longer the
row.
"""

# pyright: reportMissingImports=false

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torchtitan.components.loss import cross_entropy_loss
from torchtitan.distributed.fsdp import apply_fsdp_to_decoder, disable_fsdp_gradient_division
from torchtitan.distributed.utils import clip_grad_norm_
from torchtitan.models.common import CosSinRoPE, Embedding, Linear
from torchtitan.models.common.attention import ScaledDotProductAttention, VarlenAttention
from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.qwen3 import Qwen3Model, Qwen3StateDictAdapter, Qwen3TransformerBlock

from penstock.engine.distributed.ranks import ProcessInfo
from penstock.rows.collate import MicroBatch

Step = Callable[[Sequence[MicroBatch]], float]

START = {"weight": torch.nn.init.ones_}
"""Every weight is loaded over; something must be named."""


def torchtitan_step(
    hf_config: dict[str, Any], state: dict[str, torch.Tensor], ranks: ProcessInfo, *, mixed: bool
) -> Step:
    """A step of the model with these weights."""
    config = model_config(hf_config, ranks.device)
    model = config.build()
    model.init_states(buffer_device=ranks.device)
    native = Qwen3StateDictAdapter(config, None).from_hf(dict(state))
    model.load_state_dict(native, strict=False)
    model.to(ranks.device).train()
    dtype = torch.bfloat16 if mixed else torch.float32
    mesh = init_device_mesh(ranks.device.type, (ranks.world_size,), mesh_dim_names=("fsdp",))
    apply_fsdp_to_decoder(
        model, mesh, param_dtype=dtype, reduce_dtype=torch.float32, pp_enabled=False
    )
    disable_fsdp_gradient_division(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(batches: Sequence[MicroBatch]) -> float:
        trained = torch.tensor(sum(batch.num_trained for batch in batches), device=ranks.device)
        dist.all_reduce(trained)
        total = torch.zeros((), device=ranks.device)
        for batch in batches:
            positions = batch.position_ids_T[None].to(ranks.device)
            masks = model.get_attention_masks(positions) if ranks.device.type == "cuda" else None
            logits = model(batch.input_ids_T[None].to(ranks.device), positions, masks)
            labels = batch.labels_T[None].to(ranks.device)
            loss = cross_entropy_loss(logits, labels) / trained
            del logits
            loss.backward()
            total += loss.detach()
        clip_grad_norm_(list(model.parameters()), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        dist.all_reduce(total)
        return total.item()

    return step


def model_config(hf_config: dict[str, Any], device: torch.device) -> Qwen3Model.Config:
    """torchtitan's description of a dense Qwen3."""
    width, heads = hf_config["hidden_size"], hf_config["num_attention_heads"]

    def norm(size: int) -> RMSNorm.Config:
        return RMSNorm.Config(
            normalized_shape=size, eps=hf_config["rms_norm_eps"], param_init=START
        )

    rope = CosSinRoPE.Config(
        dim=hf_config["head_dim"],
        max_seq_len=hf_config["max_position_embeddings"],
        theta=hf_config["rope_parameters"]["rope_theta"],
    )
    on_cuda = device.type == "cuda"
    inner = VarlenAttention.Config() if on_cuda else ScaledDotProductAttention.Config()
    layers = [
        Qwen3TransformerBlock.Config(
            attention_norm=norm(width),
            ffn_norm=norm(width),
            attention=make_gqa_config(
                dim=width,
                n_heads=heads,
                n_kv_heads=hf_config["num_key_value_heads"],
                head_dim=hf_config["head_dim"],
                wqkv_param_init=START,
                wo_param_init=START,
                inner_attention=inner,
                fuse_qkv=True,
                rope=rope,
                qk_norm=norm(hf_config["head_dim"]),
            ),
            feed_forward=make_ffn_config(
                dim=width,
                hidden_dim=hf_config["intermediate_size"],
                w1_param_init=START,
                w2w3_param_init=START,
            ),
        )
        for _ in range(hf_config["num_hidden_layers"])
    ]
    vocabulary = hf_config["vocab_size"]
    return Qwen3Model.Config(
        vocab_size=vocabulary,
        dim=width,
        norm=norm(width),
        enable_weight_tying=hf_config["tie_word_embeddings"],
        tok_embeddings=Embedding.Config(
            num_embeddings=vocabulary, embedding_dim=width, param_init=START
        ),
        lm_head=Linear.Config(in_features=width, out_features=vocabulary, param_init=START),
        layers=layers,
    )
