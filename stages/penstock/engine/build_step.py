"""Build the train step of a run: its parts, in their order."""

from functools import partial

import torch

from penstock.config.schema.run import RunConfig
from penstock.engine.backends.layer_ops import has_dropout
from penstock.engine.checkpoint.async_staging import PreUpdateHooks
from penstock.engine.distributed.parallel_model import ParallelModel
from penstock.engine.distributed.ranks import ProcessInfo
from penstock.engine.distributed.vocab_parallel import VocabParallelHead
from penstock.engine.losses.build import build_preference_loss
from penstock.engine.losses.indexer_loss import build_indexer_losses
from penstock.engine.losses.multi_token_prediction import build_mtp_loss
from penstock.engine.losses.token_loss import TokenLoss
from penstock.engine.moe.routers import build_routers
from penstock.engine.optim.changed_weights import ChangedWeights
from penstock.engine.optim.clip_grad import GradClipping, gradient_norm
from penstock.engine.optim.cpu_offload import CPUOffloadedParams
from penstock.engine.optim.grad_scaler import GradScaler
from penstock.engine.optim.norm_metrics import build_norms
from penstock.engine.optim.optimizer_in_backward import OptimizerInBackward
from penstock.engine.optim.qk_clip import build_qk_clip
from penstock.engine.peft.relora import build_relora
from penstock.engine.split_by_length import is_padded
from penstock.engine.train_step import TrainStep
from penstock.losses.cross_entropy import Loss
from penstock.models.weights import WeightMap


def build_train_step(
    run: RunConfig,
    layout: ParallelModel,
    optimizer: torch.optim.Optimizer,
    ranks: ProcessInfo,
    *,
    names: WeightMap,
    vocab_head: VocabParallelHead,
    loss: Loss,
    eval_loss: Loss,
    cpu_offload: CPUOffloadedParams | None,
    pre_update_hooks: PreUpdateHooks,
) -> TrainStep:
    """The step of a parallelized model. Collective. `cpu_offload` has the parameters that the
    optimizer steps, unless these are the model's."""
    train, config, mesh, trainable = run.train, names.config, layout.mesh, layout.trainable
    token_loss = vocab_head.sum_cross_entropy(loss)
    stepped = cpu_offload.host_params if cpu_offload else layout.params
    routers = build_routers(train, config, layout.parts, layout.params, mesh, ranks)
    norms = build_norms(train, layout.params, ranks)
    grad_norm = norms.gradient_norm if norms else partial(gradient_norm, trainable, ranks)
    fused = None
    if train.fuse_optimizer_step:
        fused = OptimizerInBackward(optimizer, trainable, ranks, pre_update_hooks)
        grad_norm = fused.norm
    parts = (
        # It scales the losses, and unscales the gradients before others read them.
        GradScaler(train.loss_scale_init, params=trainable)
        if train.computes_in == "float16"
        else None,
        # It sets the loss of the calls, to which the others add.
        build_preference_loss(run, layout, vocab_head, ranks)
        or TokenLoss(layout, ranks, token_loss),
        build_mtp_loss(train, config, layout, token_loss),
        build_indexer_losses(train, config),
        fused,
        # Gradients are clipped before they are copied to the host.
        GradClipping(trainable, train.max_grad_norm),
        # The weights that the optimizer has stepped are clipped before they are copied back.
        build_qk_clip(train, config, layout.parts, stepped, mesh, ranks),
        cpu_offload,
        # Weights are compared after they were copied back.
        ChangedWeights(trainable, ranks),
        build_relora(run, layout.parts, layout.params, optimizer, names, mesh, ranks),
        # Balancing over the step runs the calls once more, so they must be complete.
        routers,
        # Norms of parameters are logged after merges.
        norms,
    )
    # The losses of samples and of packed sequences need theirs in one pass, and an optimizer in the
    # backward pass needs one pass of all: no split into padded batches of similar length.
    one_pass = train.objective == "preference" or fused or (routers and routers.balances_rows)
    return TrainStep(
        layout,
        optimizer,
        ranks,
        [part for part in parts if part is not None],
        grad_norm,
        TokenLoss(layout, ranks, vocab_head.sum_cross_entropy(eval_loss)),
        pre_update_hooks,
        is_fused=fused is not None,
        splits_by_length=is_padded(config) and not one_pass,
        dropout_seed=(
            train.seed if run.lora.enable_aqn or any(map(has_dropout, layout.parts)) else None
        ),
    )
