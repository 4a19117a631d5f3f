"""Build the optimizer of a run over this rank's sharded parameters."""

import hashlib
import math
from collections.abc import Callable, Sequence

import torch
from torch import nn

from penstock.config.schema.model import Part
from penstock.config.schema.parallelism import SPLIT_BACKWARD
from penstock.config.schema.run import RunConfig
from penstock.config.schema.train import TrainConfig
from penstock.engine.distributed.param_shards import LocalParam, TensorShard, local
from penstock.engine.distributed.ranks import ProcessInfo
from penstock.engine.optim.distributed_muon import (
    DistMuon,
    is_matrix,
    split_by_heads,
    whole_matrices,
)
from penstock.engine.optim.novograd_norms import TensorNorms
from penstock.models.decoder_config import DecoderConfig
from penstock.models.tp_roles import Roles
from penstock.optim.anyprecision import Rounding, StatePrecision
from penstock.optim.build import build_optimizer, newton_schulz_args
from penstock.optim.groups import (
    Grouping,
    constant_multiplier,
    layerwise_lr_decay,
    with_part_lrs,
)
from penstock_kernels.rng_rows import RowKeys


def build_distributed_optimizer(
    run: RunConfig,
    params: Sequence[LocalParam],
    roles: Roles,
    config: DecoderConfig,
    ranks: ProcessInfo,
    part: Callable[[str], Part] = lambda _: "language",
) -> torch.optim.Optimizer:
    """The optimizer over the trainable parameters of `params`, in a model with this config. `part`
    tells the part of a multimodal model that a parameter is of.

    Raises ConfigError as `build_optimizer` does. Collective.
    """
    train = run.train
    trained = [param for param in params if param.parameter.requires_grad]
    matrices: list[LocalParam] = []
    directions = None
    if train.optimizer == "muon":
        matrices = [param for param in trained if is_matrix(param, roles)]
        head_rows = split_by_heads(config) if train.muon_split_heads else whole_matrices
        orthogonalizer = newton_schulz_args(train)
        directions = DistMuon(matrices, orthogonalizer, ranks, head_rows=head_rows)
    num_layers = config.num_hidden_layers
    bound = train.layerwise_lr_decay_bound
    by_depth = constant_multiplier if bound == 1 else layerwise_lr_decay(bound, num_layers)
    lrs: dict[Part, float | None] = {"vision": train.vision_lr, "projector": train.projector_lr}
    # Relative to `lr`, so that these parts follow the same schedule.
    ratios = {name: lr / train.lr for name, lr in lrs.items() if lr is not None}
    grouping = Grouping(
        weight_decay=train.weight_decay,
        no_decay_modules=train.no_decay_modules,
        no_decay_params=train.no_decay_params,
        lora_plus_ratio=run.lora.lora_plus_ratio,
        lr_multiplier=with_part_lrs(by_depth, part, ratios),
        matrices={param.name for param in matrices},
        muon_lr_multiplier=train.muon_lr / train.lr if directions else 1.0,
    )
    optimizer = build_optimizer(
        [(param.name, param.parameter) for param in trained],
        train,
        grouping,
        precision=build_state_precision(train, trained),
        directions=directions,
        tensors=TensorNorms(trained, ranks) if train.optimizer == "novograd" else None,
    )
    optimizer.register_step_post_hook(_raise_versions)
    return optimizer


def _raise_versions(optimizer: torch.optim.Optimizer, *_: object) -> None:
    # Fused steps of PyTorch and Triton kernels write to weights and leave their versions, by which
    # copies of them are known to be outdated (`FactorCopies`).
    groups = optimizer.param_groups
    updated = [p for group in groups for p in group["params"] if p.grad is not None]
    torch.autograd.graph.increment_version(updated)


def set_grad_dtype(train: TrainConfig, params: Sequence[LocalParam]) -> None:
    """Accumulate gradients in `train.grad_accum_dtype` where FSDP does not reduce them."""
    if train.data_parallel_mode == "fsdp2":
        return
    if train.pipeline_parallel_schedule in SPLIT_BACKWARD and train.pipeline_parallel_size > 1:
        # Weight gradients of split backward passes bypass autograd's accumulation.
        return
    dtype = torch.bfloat16 if train.grad_accum_dtype == "bf16" else torch.float32
    for param in params:
        if param.parameter.requires_grad and param.parameter.dtype != dtype:
            param.parameter.grad_dtype = dtype


def build_state_precision(train: TrainConfig, params: Sequence[LocalParam]) -> StatePrecision:
    """The dtypes of optimizer states and weight updates."""
    in_bf16 = train.optimizer != "adamw" and train.optimizer_dtype == "bf16"
    return StatePrecision(
        states=torch.bfloat16 if in_bf16 else torch.float32,
        lost="kept" if train.optimizer_kwargs.get("use_kahan_summation") else "forgotten",
        rounding=build_rounding(params, train.seed) if train.stochastic_rounding else None,
        local=local,
    )


def build_rounding(params: Sequence[LocalParam], seed: int) -> Rounding:
    """Random numbers for stochastic rounding, from seed, step, and position in the checkpoint."""
    pieces = {param.parameter: param.shards for param in params}

    def of(parameter: nn.Parameter, step: int) -> tuple[list[RowKeys], int]:
        shards = pieces[parameter]
        runs = [run for piece in shards for run in _runs(piece, f"{seed}:{step}")]
        # Fused tensors lie below one another: all begin at the same column.
        return runs, shards[0].offsets[-1] if len(shards[0].sizes) > 1 else 0

    return of


def _runs(piece: TensorShard, salt: str) -> list[RowKeys]:
    """The row keys of a shard; each matrix of a stack has its own rows."""
    text = f"{salt}:{piece.tensor}".encode()
    key = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
    if len(piece.sizes) != 3:
        # Of a convolution, all dimensions before the last are rows; only the first may be split.
        inner = math.prod(piece.full_shape[1:-1])
        return [RowKeys(piece.num_rows * inner, key, piece.offsets[0] * inner)]
    rows = piece.full_shape[-2]
    return [
        RowKeys(piece.sizes[1], key, (piece.offsets[0] + number) * rows + piece.offsets[1])
        for number in range(piece.sizes[0])
    ]
