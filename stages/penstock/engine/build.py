"""The order of construction. This file is that order; read it top to bottom.

    meta -> bits -> adapters -> division -> recomputation -> sharding -> storage -> weights ->
    optimizer

Nothing is allocated until it is known where it lies, so a model larger than one device assembles.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from penstock.adapters.init import initial_lora
from penstock.adapters.inject import LoraSpec, inject
from penstock.adapters.lora_experts import Form
from penstock.adapters.match_targets import require_adaptable
from penstock.adapters.names import MAGNITUDE, factor_of
from penstock.adapters.targets import chosen_layers
from penstock.config.schema.lora import LoraConfig
from penstock.config.schema.run import RunConfig
from penstock.config.schema.train import TrainConfig
from penstock.engine.activations.checkpointing import kind_of, mixtures_of, recompute
from penstock.engine.activations.offload import offload, store_for
from penstock.engine.backends.compile import compile_layers
from penstock.engine.backends.layer_ops import (
    dropping,
    drops,
    gates_as_written,
    operations_as_written,
    precision_as_written,
)
from penstock.engine.backends.select_attention import choose_attention
from penstock.engine.backends.select_experts import choose_experts
from penstock.engine.checkpoint.async_staging import Changes
from penstock.engine.checkpoint.train_state import Trained
from penstock.engine.distributed.collectives import Residual
from penstock.engine.distributed.context_parallel import Context
from penstock.engine.distributed.data_parallel import gradient_sync, held_in, shard_parts
from penstock.engine.distributed.device_mesh import Mesh
from penstock.engine.distributed.expert_parallel import share_experts
from penstock.engine.distributed.parallel_dims import Degrees, degrees_of
from penstock.engine.distributed.parallel_model import Casting, Layout
from penstock.engine.distributed.param_shards import Held
from penstock.engine.distributed.pipeline_stages import described
from penstock.engine.distributed.ranks import Ranks
from penstock.engine.distributed.stage_modules import parts_of
from penstock.engine.distributed.tensor_parallel import SUMS, divide
from penstock.engine.distributed.tensor_sharding import pieces_of
from penstock.engine.distributed.vocab_parallel import Vocabulary
from penstock.engine.eval_step import Onlooker
from penstock.engine.generation.generator import Generator, generator_of
from penstock.engine.hf.base_model import Base
from penstock.engine.hf.load_weights import Readers, fill
from penstock.engine.losses.build import (
    answer_sums,
    preferences_of,
    told_loss,
    trained_loss,
)
from penstock.engine.losses.sequence_logprobs import AnswerSums
from penstock.engine.model_source import quantising_of
from penstock.engine.moe.load_balancing import routers_of
from penstock.engine.moe.select_dispatcher import choose_exchange
from penstock.engine.optim.build import accumulate_as_written, optimizer_of
from penstock.engine.optim.cpu_offload import HostCopies
from penstock.engine.optim.grad_scaler import LossScale
from penstock.engine.optim.norm_metrics import norms_of
from penstock.engine.optim.optimizer_in_backward import FusedStep
from penstock.engine.peft.dora_norms import norms_for
from penstock.engine.peft.init_from_adapter import AdapterStart
from penstock.engine.peft.relora import merging_of
from penstock.engine.precision.fp8_all_gather import gather_in_8_bits
from penstock.engine.precision.fp8_convert import agree_on_scales, put_float8
from penstock.engine.precision.param_dtype import (
    exact_parameters,
    keep_all_in,
    keep_frozen_in,
    rounded_to,
)
from penstock.engine.quantization.noise import add_noise
from penstock.engine.quantization.quantized_reader import Drawn
from penstock.engine.train_step import Engine
from penstock.engine.trainable import learning
from penstock.engine.validate_model import require_possible
from penstock.models.decoder import Decoder, Part
from penstock.models.decoder_config import DecoderConfig
from penstock.models.family import Family
from penstock.models.flops import Learning, pairs_per_token
from penstock.models.layers.attention import Attend
from penstock.models.layers.experts import ExpertOperations
from penstock.models.registry import family_of

if TYPE_CHECKING:
    from penstock.engine.distributed.pipeline_parallel import Pipeline

Notify = Callable[[str], None]


@dataclass(frozen=True)
class Assembled:
    """A model ready to train."""

    engine: Engine
    onlooker: Onlooker
    """The same model, for those who only look."""
    answers: AnswerSums
    """The same model, for those who ask about whole answers."""
    generator: Generator
    """The same model, for those who want answers."""
    trained: Trained
    degrees: Degrees
    layout: dict[str, Any]
    vocab_size: int
    config: DecoderConfig
    learning: Learning
    pairs_per_token: int
    """What a token costs in pairs of tokens, for telling dear rows from cheap ones."""
    quantised: tuple[str, ...] = ()
    """The formats in which matrices of the base model are kept."""


def assemble(
    run: RunConfig,
    hf_config: dict[str, Any],
    weights: Path | None,
    ranks: Ranks,
    notify: Notify,
    *,
    adapter: Path | None = None,
) -> Assembled:
    """Build the model that `run` asks for, laid out over `ranks`, with its weights and optimizer.

    `weights` is a folder of safetensors, or None for a random start from `train.seed`; `adapter` is
    a folder of an adapter to go on from.
    """
    train = run.train
    require_possible(run, hf_config)
    mesh = Mesh(
        degrees_of(train, ranks.world),
        ranks.rank,
        ranks.device.type,
        experts="strangers" if train.ep_outside else "neighbours",
    )
    context = Context(mesh)
    family = family_of(hf_config)
    config = family.read(hf_config)
    names = family.weight_map(config, merge_qkv=run.model.merge_qkv)
    attend = context.attend(choose_attention(run, config, ranks.device, notify))
    attend = precision_as_written(attend, run.model)
    experts = gates_as_written(choose_experts(run, config, ranks.device, notify), run.model)
    exchange = choose_exchange(run, config, mesh, ranks.device, notify)
    loss = trained_loss(run, ranks.device)
    base = Base(names, quantising_of(run), hf_config, family.roles, weights)
    parts = [
        build_empty(run, family, base, part, attend, experts)
        for part in parts_of(config, train, mesh.index("pipeline"))
    ]
    in_float8 = put_float8(parts, train, names, family.roles, notify)
    residual: Residual = "split" if train.sequence_parallel else "whole"
    for part in parts:
        divide(part, mesh, family.roles, residual=residual, sums=SUMS[train.tp_reduce_dtype])
        share_experts(part, mesh, exchange)
        if train.enable_gradient_checkpointing:
            recompute(part, train.recompute_modules, kind_of(train), mixtures=mixtures_of(train))
    if train.enable_activation_offload:
        offload(parts, store_for(ranks.device, train.activation_gpu_limit))
    pieces = [pieces_of(part, names, mesh, roles=family.roles, residual=residual) for part in parts]
    if run.lora.enable_aqn:
        for part, its in zip(parts, pieces, strict=True):
            add_noise(part, its, run.lora.aqn_alpha)
    agree_on_scales(parts, in_float8, mesh)
    shard_parts(parts, mesh, train, run.model.basic_modules)
    if train.enable_compile:
        for part in parts:
            compile_layers(part, ranks.device)
    # Offloaded weights stay in host memory.
    home = torch.device("cpu") if train.enable_fsdp_offload else ranks.device
    for part in parts:
        part.to_empty(device="cpu" if train.init_device == "cpu" else home)
    begun = AdapterStart(adapter, adapted_layers(run, family, config), names) if adapter else None
    load(held_in(parts, pieces, mesh, train), base, weights, run, ranks, begun)
    for part in parts:
        part.to(home)
    gather_in_8_bits(parts, train, notify)
    # Again: moving a parameter may have made another of it.
    held = held_in(parts, pieces, mesh, train)
    accumulate_as_written(train, held)
    copies = HostCopies.of(held) if train.optimizer_offload == "cpu" else None
    stepped = copies.there if copies else held
    optimizer = optimizer_of(run, stepped, family.roles, config.num_hidden_layers, ranks)
    casting = casting_of(train, ranks.device)
    if mesh.size("pipeline") > 1:
        notify(described(train, config.num_hidden_layers))
    vocabulary = Vocabulary(
        mesh,
        config.vocab_size,
        residual=residual,
        logits="divided" if train.tp_vocab_parallel_loss else "gathered",
        sums=SUMS[train.tp_reduce_dtype],
    )
    layout = Layout(
        mesh=mesh,
        parts=parts,
        held=held,
        context=context,
        sync=gradient_sync(train, mesh, parts, held),
        pipeline=pipeline_of(parts, mesh, train, ranks, residual, casting),
        casting=casting,
        pulse=ranks.pulse,
    )
    told = told_loss(run)
    changes = Changes()
    engine = Engine(
        layout=layout,
        optimizer=optimizer,
        ranks=ranks,
        sum_of_losses=vocabulary.sum_of_losses(loss),
        told_losses=vocabulary.sum_of_losses(told),
        max_grad_norm=train.max_grad_norm,
        noise_seed=train.seed if run.lora.enable_aqn or any(map(drops, parts)) else None,
        preferences=preferences_of(run, layout, vocabulary, ranks),
        routers=routers_of(train, config, parts, held, mesh, ranks),
        merging=merging_of(run, parts, held, optimizer, names, mesh, ranks),
        fused=(
            FusedStep(optimizer, layout.trainable, ranks, changes)
            if train.fuse_optimizer_step
            else None
        ),
        copies=copies,
        scaling=LossScale(train.loss_scale_init) if train.computes_in == "float16" else None,
        norms=norms_of(train, held, ranks),
        changes=changes,
    )
    degrees = mesh.degrees
    return Assembled(
        engine=engine,
        onlooker=Onlooker(layout, ranks, vocabulary.scores(told)),
        answers=answer_sums(run, layout, vocabulary, ranks),
        generator=generator_of(train, layout, ranks, vocabulary.whole_logits(told)),
        trained=Trained(
            held,
            optimizer,
            only_trained=keeps_only_adapters(run.lora),
            stepped=stepped,
            states="saved" if train.save_optimizer else "left out",
            changes=changes,
            rounded_to=rounded_to(train),
            compressed_to=None if train.ckpt_quant == "none" else train.ckpt_quant,
            exact=exact_parameters(parts, held, names),
        ),
        degrees=degrees,
        layout={"mode": train.data_parallel_mode, **asdict(degrees)},
        vocab_size=config.vocab_size,
        config=config,
        learning=learning(run, family, config),
        pairs_per_token=pairs_per_token(config),
        quantised=tuple(sorted({format.name for format in base.formats.values()})),
    )


def build_empty(
    run: RunConfig,
    family: Family,
    base: Base,
    part: Part,
    attend: Attend,
    experts: ExpertOperations,
) -> Decoder:
    """The architecture with its adapters, on the meta device: shapes and no storage."""
    with torch.device("meta"):
        model = Decoder(
            base.names.config,
            merge_qkv=run.model.merge_qkv,
            attention=attend,
            experts=experts,
            operations=operations_as_written(run.model),
            router="fp32" if run.model.router_fp32 else "model",
            dropout=dropping(run.train.dropout),
            part=part,
        )
        if run.model.freeze_router:
            for router in model.routers().values():
                router.requires_grad_(False)
        base.quantise(model)
        if run.lora.enable_lora:
            require_adaptable(base.names.config)
            inject(model, lora_spec(run, family))
            if keeps_only_adapters(run.lora):
                keep_frozen_in(getattr(torch, run.train.computes_in), model)
        if run.train.keeps_in == "bfloat16":
            keep_all_in(torch.bfloat16, model)
    return model


def pipeline_of(
    parts: Sequence[Decoder],
    mesh: Mesh,
    train: TrainConfig,
    ranks: Ranks,
    residual: Residual,
    casting: Casting,
) -> "Pipeline | None":
    """What passes hidden states from part to part; None where one rank has all layers."""
    if mesh.size("pipeline") == 1:
        return None
    # Its schedules bring the compiler with them, a second that others need not wait.
    from penstock.engine.distributed.pipeline_parallel import Pipeline  # noqa: PLC0415

    how = {"residual": residual, "casting": casting}
    return Pipeline(parts, mesh, train, device=ranks.device, pulse=ranks.pulse, **how)


def casting_of(train: TrainConfig, device: torch.device) -> Casting:
    """What casts for a forward pass; nothing where FSDP casts the weights themselves, or where they
    are kept in what is computed in."""
    dtype = train.computes_in
    if train.data_parallel_mode == "fsdp2" or train.keeps_in == dtype:
        return nullcontext
    return partial(torch.autocast, device.type, dtype=getattr(torch, dtype))


def lora_spec(run: RunConfig, family: Family) -> LoraSpec:
    """What the `lora` section says, in the adapter's words."""
    lora, targets = run.lora, run.lora.lora_target_modules
    targets = (targets,) if isinstance(targets, str) else targets
    return LoraSpec(
        rank=lora.lora_rank,
        alpha=lora.lora_alpha,
        targets=tuple(targets or family.lora_targets),
        seed=run.train.seed,
        dropout=lora.lora_dropout,
        experts=sharing_of(lora),
        scaling="root" if lora.use_rslora else "rank",
        normed="dora" if lora.use_dora else "plain",
        bias=lora.lora_bias,
    )


def adapted_layers(run: RunConfig, family: Family, config: DecoderConfig) -> list[str]:
    """What bears adapters in all parts of the model, by the names in a checkpoint."""
    with torch.device("meta"):
        whole = Decoder(config, merge_qkv=run.model.merge_qkv)
    return chosen_layers(whole, lora_spec(run, family).targets or ())


def keeps_only_adapters(lora: LoraConfig) -> bool:
    """Whether checkpoints leave out the base model: it is nowhere else if adapters are merged."""
    return lora.enable_lora and not lora.merge_lora_interval


def sharing_of(lora: LoraConfig) -> Form:
    """Which factors experts have in common."""
    if lora.moe_shared_lora:
        return "shared"
    return "hybrid" if lora.moe_hybrid_shared_lora else "each"


def load(
    held: Sequence[Held],
    base: Base,
    weights: Path | None,
    run: RunConfig,
    ranks: Ranks,
    begun: AdapterStart | None = None,
) -> None:
    """Fill the empty model: base weights from `weights` or the seed, adapters from the seed or as
    they were `begun`."""
    seed = run.train.seed
    readers: Readers = "all_ranks" if run.train.load_weights_mode == "all_ranks" else "first_rank"
    seen = partial(base.seen, device=ranks.device)
    drawn = seen(Drawn(base.names, seed))
    norms: dict[str, torch.Tensor] = {}
    if run.lora.use_dora and not begun:
        norms = norms_for(held, weights, drawn, readers=readers, ranks=ranks, seen=seen)

    def start(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        factor = factor_of(name)
        if factor is None:
            return drawn.box(name, (0,) * len(shape), shape)
        if begun:
            return begun(name, shape)
        if factor.side == MAGNITUDE:
            return norms[factor.hf_module]
        return initial_lora(name, shape, seed)

    fill(held, weights, start, readers=readers, ranks=ranks, seen=seen)
    if begun:
        begun.lay_over(held)
