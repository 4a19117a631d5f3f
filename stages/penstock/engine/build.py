"""Build a model for training: the order of construction, read top to bottom.

    meta device -> quantized layers -> adapters -> tensor and expert parallelism ->
    activation checkpointing -> FSDP sharding -> storage -> weights -> optimizer

Parameters stay on the meta device until their sharding is known, so a model larger than one device
can be built.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from penstock.adapters.init import initial_lora
from penstock.adapters.inject import LoraSpec, inject
from penstock.adapters.match_targets import require_adaptable
from penstock.adapters.names import MAGNITUDE, parse_lora_name
from penstock.adapters.targetable_layers import select_layers
from penstock.config.schema.lora import LoraConfig
from penstock.config.schema.run import RunConfig
from penstock.config.schema.train import TrainConfig
from penstock.core.extensions import METRICS
from penstock.engine.activations.checkpointing import (
    apply_activation_checkpointing,
    checkpoint_kind,
)
from penstock.engine.activations.offload import build_offloader, offload
from penstock.engine.backends.compile import compile_layers
from penstock.engine.backends.layer_ops import (
    dropout_config,
    select_activation_impl,
    select_layer_ops,
)
from penstock.engine.backends.select_attention import choose_attention
from penstock.engine.backends.select_experts import select_moe_backend
from penstock.engine.build_step import build_train_step
from penstock.engine.checkpoint.async_staging import PreUpdateHooks
from penstock.engine.checkpoint.train_state import TrainState
from penstock.engine.distributed.collectives import Residual
from penstock.engine.distributed.context_parallel import ContextParallel
from penstock.engine.distributed.data_parallel import gradient_sync, local_params, shard_parts
from penstock.engine.distributed.device_mesh import Mesh
from penstock.engine.distributed.expert_parallel import parallelize_experts
from penstock.engine.distributed.parallel_dims import ParallelDims, build_parallel_dims
from penstock.engine.distributed.parallel_model import (
    AutocastContext,
    ParallelModel,
    build_stage_modules,
)
from penstock.engine.distributed.param_shards import LocalParam
from penstock.engine.distributed.pipeline_stages import describe_pipeline
from penstock.engine.distributed.ranks import ProcessInfo
from penstock.engine.distributed.tensor_parallel import REDUCE_DTYPES, parallelize_tensor
from penstock.engine.distributed.tensor_sharding import param_shards
from penstock.engine.distributed.vocab_parallel import VocabParallelHead
from penstock.engine.eval_step import EvalModel
from penstock.engine.generation.generator import Generator, build_generator
from penstock.engine.hf.base_model import BaseModelWeights
from penstock.engine.hf.load_weights import Readers, load_weights
from penstock.engine.hf.prediction_layers import describe_prediction_layers
from penstock.engine.hf.unused_tensors import describe_unused
from penstock.engine.losses.build import (
    build_sequence_logprobs,
    eval_loss_fn,
    train_loss_fn,
)
from penstock.engine.losses.indexer_loss import (
    describe_indexers,
    set_trainable_indexers,
)
from penstock.engine.losses.sequence_logprobs import SequenceLogProbs
from penstock.engine.model_source import quantization_args
from penstock.engine.moe.select_dispatcher import select_token_dispatcher
from penstock.engine.optim.build import build_distributed_optimizer, set_grad_dtype
from penstock.engine.optim.cpu_offload import CPUOffloadedParams
from penstock.engine.peft.dora_norms import norms_for
from penstock.engine.peft.init_from_adapter import AdapterStart
from penstock.engine.peft.lora_products import select_lora_products
from penstock.engine.precision.fp8_all_gather import enable_fp8_all_gather
from penstock.engine.precision.fp8_convert import convert_to_float8_training, set_amax_reduce_groups
from penstock.engine.precision.param_dtype import (
    cast_params,
    fp32_params,
    rounded_to,
)
from penstock.engine.quantization.noise import add_noise
from penstock.engine.split_by_length import is_padded
from penstock.engine.train_step import TrainStep
from penstock.engine.trainable import adapted, trainable_params
from penstock.engine.validate_backend import describe_backend, require_backend
from penstock.engine.validate_model import validate_model
from penstock.engine.vision.build import (
    build_image_inputs,
    build_outline,
    checked_vision,
    left_to_base,
)
from penstock.engine.vision.encoded import build_tower
from penstock.engine.vision.freeze import (
    checked_parts,
    freeze,
    freeze_image_experts,
    frozen_parts,
)
from penstock.engine.vision.image_cost import ImageCost, build_image_cost
from penstock.engine.vision.image_text import freeze_image_text
from penstock.models.automodel.causal_lm import AutoCausalLM
from penstock.models.automodel.family import AutoFamily
from penstock.models.automodel.outline import AutoModelConfig
from penstock.models.causal_lm import CausalLM
from penstock.models.decoder import Decoder, PipelineStageModules
from penstock.models.decoder_config import DecoderConfig
from penstock.models.family import Family
from penstock.models.flops import TrainableParams, layer_flops, pairs_per_token
from penstock.models.layers.attention import AttentionFn, in_bf16
from penstock.models.layers.experts import ExpertOperations
from penstock.models.registry import get_family
from penstock.models.vision.tower import VisionTower
from penstock.models.vision.types import VisionConfig

if TYPE_CHECKING:
    from penstock.engine.distributed.pipeline_parallel import Pipeline

Notify = Callable[[str], None]

LoadFn = Callable[
    [
        Sequence[LocalParam],
        BaseModelWeights,
        Path | None,
        RunConfig,
        ProcessInfo,
        AdapterStart | None,
    ],
    None,
]
"""Loads the weights of an empty model; see `load_params`."""


@dataclass(frozen=True)
class BuiltModel:
    """A model ready to train."""

    engine: TrainStep
    evaluator: EvalModel
    sequence_logprobs: SequenceLogProbs
    generator: Generator
    train_state: TrainState
    dims: ParallelDims
    layout: dict[str, Any]
    vocab_size: int
    config: DecoderConfig
    learning: TrainableParams
    pairs_per_token: int
    """The cost of a token outside attention, in query-key pairs, for costs of packed sequences."""
    image_cost: ImageCost | None
    """The cost of images, in addition; None without a vision part of known size."""
    quantized: tuple[str, ...] = ()
    """The quantization formats of the base model's matrices."""


def assemble(
    run: RunConfig,
    hf_config: dict[str, Any],
    weights: Path | None,
    ranks: ProcessInfo,
    notify: Notify,
    *,
    adapter: Path | None = None,
    load: LoadFn | None = None,
    images: bool = False,
) -> BuiltModel:
    """Build the model that `run` describes, sharded over `ranks`, with its weights and optimizer.

    `weights` is a folder of safetensors, or None for a random initialization from `train.seed`;
    `adapter` is the folder of an adapter to resume from. `load` fills the empty parameters,
    `load_params` by default. With `images` the vision part of a multimodal model is built.
    """
    train = run.train
    family = checked_family(run, hf_config, weights, ranks, notify)
    mesh = Mesh(
        build_parallel_dims(train, ranks.world_size),
        ranks.rank,
        ranks.device.type,
        experts="strided" if train.ep_outside else "adjacent",
    )
    context = ContextParallel(mesh)
    config = family.trained_config(hf_config, mtp=train.mtp_loss_weight > 0)
    vision = checked_vision(run, hf_config, config, images=images)
    base = base_weights(run, family, config, hf_config, weights, vision)
    bidirectional = vision is not None and vision.type.bidirectional
    attend = context.attention_fn(
        choose_attention(run, config, ranks.device, notify, bidirectional=bidirectional)
    )
    attend = in_bf16(attend) if run.model.attention_cast_bf16 else attend
    experts = select_activation_impl(
        select_moe_backend(run, config, ranks.device, notify), run.model
    )
    register_dispatcher = select_token_dispatcher(run, config, mesh, ranks.device, notify)
    loss = train_loss_fn(run, ranks.device, config.logit_soft_cap)
    parts = [
        build_empty(run, family, base, part, attend, experts, vision, images=images)
        for part in build_stage_modules(config, train, mesh.index("pipeline"), run.data.row_length)
    ]
    float8_modules = convert_to_float8_training(parts, train, base.names, family.roles, notify)
    residual: Residual = "split" if train.sequence_parallel else "whole"
    context.parallelize(parts)
    for part in parts:
        parallelize_tensor(
            part,
            mesh,
            family.roles,
            residual=residual,
            reduce_dtype=REDUCE_DTYPES[train.tp_reduce_dtype],
        )
        parallelize_experts(part, mesh, register_dispatcher)
        # After the hooks that communicate, which are then inside what is recomputed.
        if train.enable_gradient_checkpointing:
            apply_activation_checkpointing(
                part,
                train.recompute_modules,
                checkpoint_kind(train),
                moe_recompute="gates" if train.moe_checkpoint_method == "moe_act" else "whole",
            )
    # Last: what checkpointing saves, the inputs of layers, is offloaded.
    if train.enable_activation_offload:
        offload(parts, build_offloader(ranks.device, train.activation_gpu_limit))
    # Before FSDP, which cuts these boxes further (`local_params`).
    shards = [
        param_shards(part, base.names, mesh, roles=family.roles, residual=residual)
        for part in parts
    ]
    if run.lora.enable_aqn:
        for part, part_shards in zip(parts, shards, strict=True):
            add_noise(part, part_shards, run.lora.aqn_alpha)
    set_amax_reduce_groups(parts, float8_modules, mesh)
    shard_parts(parts, mesh, train, run.model.basic_modules)
    # After FSDP: what is one graph depends on its units.
    if train.enable_compile:
        for part in parts:
            compile_layers(part, ranks.device)
    # Parameters under FSDP CPU offload stay in host memory.
    param_device = torch.device("cpu") if train.enable_fsdp_offload else ranks.device
    for part in parts:
        part.to_empty(device="cpu" if train.init_device == "cpu" else param_device)
    adapter_init = (
        AdapterStart(adapter, lora_target_layers(run, family, config, base.vision), base.names)
        if adapter
        else None
    )
    # Fills every parameter: `to_empty` leaves memory as it is.
    (load or load_params)(
        local_params(parts, shards, mesh, train), base, weights, run, ranks, adapter_init
    )
    if train.init_device == "cpu":
        for part in parts:
            part.to(param_device)
    enable_fp8_all_gather(parts, train, notify)
    # Collect them again: `Module.to` may replace a parameter by a new object.
    params = local_params(parts, shards, mesh, train)
    set_grad_dtype(train, params)
    # After the dtype of gradients is set, which the copies take over.
    cpu_offload = CPUOffloadedParams.of(params) if train.optimizer_offload == "cpu" else None
    optimizer_params = cpu_offload.host_params if cpu_offload else params
    optimizer = build_distributed_optimizer(
        run,
        optimizer_params,
        family.roles,
        config,
        ranks,
        checked_parts(train, params, config, vision, mesh),
    )
    autocast = autocast_context(train, ranks.device)
    vocab_head = VocabParallelHead(
        mesh,
        config.vocab_size,
        residual=residual,
        logits="divided" if train.tp_vocab_parallel_loss else "gathered",
        reduce_dtype=REDUCE_DTYPES[train.tp_reduce_dtype],
    )
    layout = ParallelModel(
        mesh=mesh,
        parts=parts,
        params=params,
        context=context,
        sync=gradient_sync(train, mesh, parts, params),
        pipeline=build_pipeline(parts, mesh, run, config, ranks, residual, autocast, notify),
        autocast=autocast,
        images=build_image_inputs(run, vision, parts, config, mesh, residual),
        heartbeat=ranks.heartbeat,
    )
    eval_loss = eval_loss_fn(run, config.logit_soft_cap)
    metrics = [METRICS.build(*item) for item in train.eval_metrics.items()]
    pre_update_hooks = PreUpdateHooks()
    engine = build_train_step(
        run,
        layout,
        optimizer,
        ranks,
        names=base.names,
        vocab_head=vocab_head,
        loss=loss,
        eval_loss=eval_loss,
        cpu_offload=cpu_offload,
        pre_update_hooks=pre_update_hooks,
    )
    return BuiltModel(
        engine=engine,
        evaluator=EvalModel(
            layout,
            ranks,
            vocab_head.token_scores(eval_loss, metrics),
            is_padded(config),
            len(metrics),
        ),
        sequence_logprobs=build_sequence_logprobs(run, layout, vocab_head, ranks),
        generator=build_generator(train, layout, ranks, vocab_head.full_logits(eval_loss)),
        train_state=TrainState(
            params,
            optimizer,
            only_trained=saves_adapters_only(run.lora),
            left_to_base=left_to_base(params),
            stepped=optimizer_params,
            states="saved" if train.save_optimizer else "left out",
            pre_update_hooks=pre_update_hooks,
            rounded_to=rounded_to(train),
            compressed_to=None if train.ckpt_quant == "none" else train.ckpt_quant,
            exact=fp32_params(parts, params, base.names),
        ),
        dims=mesh.dims,
        layout={"mode": train.data_parallel_mode, **asdict(mesh.dims)},
        vocab_size=config.vocab_size,
        config=config,
        learning=trainable_params(run, family, config),
        pairs_per_token=pairs_per_token(config),
        image_cost=build_image_cost(run, hf_config, config, images=images),
        quantized=tuple(sorted({format.name for format in base.formats.values()})),
    )


def checked_family(
    run: RunConfig,
    hf_config: dict[str, Any],
    weights: Path | None,
    ranks: ProcessInfo,
    notify: Notify,
) -> Family:
    """The model's family. Raises ConfigError or CapabilityError for settings that it cannot honour,
    and for weights that are not those of its config."""
    family = get_family(hf_config, run.model.backend, adapters=run.lora.enable_lora)
    if isinstance(family, AutoFamily):
        require_backend(run, family, family.read(hf_config))
        notify(describe_backend(family))
    else:
        validate_model(run, hf_config)
        if line := describe_indexers(run.train, family.read(hf_config)):
            notify(line)
    num_layers = family.read(hf_config).num_hidden_layers
    carried = None if run.train.mtp_loss_weight else weights
    if carried and (line := describe_prediction_layers(carried, num_layers)):
        notify(line)
    # Headers of all files are read, which one rank does for the others.
    if weights and ranks.is_main_process:
        names = family.weight_map(family.trained_config(hf_config, mtp=carried is None))
        if line := describe_unused(weights, hf_config, names):
            notify(line)
    return family


def base_weights(
    run: RunConfig,
    family: Family,
    config: DecoderConfig,
    hf_config: dict[str, Any],
    weights: Path | None,
    vision: VisionConfig | None,
) -> BaseModelWeights:
    """The base model's weights in `weights`, with those of its vision part if that is built."""
    names = family.weight_map(config, merge_qkv=run.model.merge_qkv)
    outline = build_outline(hf_config) if vision else None
    if outline is not None:
        names = replace(names, vision=outline.shapes)
    return BaseModelWeights(
        names, quantization_args(run), hf_config, family.roles, weights, outline
    )


def build_empty(
    run: RunConfig,
    family: Family,
    base: BaseModelWeights,
    part: PipelineStageModules,
    attend: AttentionFn,
    experts: ExpertOperations,
    vision: VisionConfig | None = None,
    *,
    images: bool = False,
) -> CausalLM:
    """Build the model with its adapters on the meta device: shapes without storage."""
    config = base.names.config
    if isinstance(config, AutoModelConfig):
        model = AutoCausalLM(base.hf_config, config, attend=attend)
        freeze_image_text(run, model, images=images)
    else:
        with torch.device("meta"):
            model = Decoder(
                config,
                merge_qkv=run.model.merge_qkv,
                attention=attend,
                experts=experts,
                operations=select_layer_ops(run.model),
                router="fp32" if run.model.router_fp32 else "model",
                dropout=dropout_config(run.train.dropout),
                part=part,
                vision=build_tower(run, vision) if vision and part.has_embedding else None,
                rope_axes=vision and vision.rope_axes,
            )
        if vision is not None:
            freeze(model, frozen_parts(run))
        else:
            freeze_image_experts(model)
        set_trainable_indexers(run.train, model)
        if run.model.freeze_router:
            for router in model.all_routers():
                router.requires_grad_(False)
    with torch.device("meta"):
        base.quantize(model)
        if run.lora.enable_lora:
            require_adaptable(base.names.config)
            inject(model, lora_spec(run, family), vision=base.vision)
            select_lora_products(model, run.train)
            # Nothing is ever added to frozen matrices: fp32 would only cost memory.
            if saves_adapters_only(run.lora):
                computes_in: torch.dtype = getattr(torch, run.train.computes_in)
                cast_params(computes_in, model, frozen_matrices=True)
        if run.train.keeps_in == "bfloat16":
            cast_params(torch.bfloat16, model)
    return model


def build_pipeline(
    parts: Sequence[CausalLM],
    mesh: Mesh,
    run: RunConfig,
    config: DecoderConfig,
    ranks: ProcessInfo,
    residual: Residual,
    autocast: AutocastContext,
    notify: Notify,
) -> "Pipeline | None":
    """Build pipeline parallelism over the model parts; None when one rank holds all layers."""
    if mesh.size("pipeline") == 1:
        return None
    # Imported here: torch's pipeline schedules import the compiler, which takes a second.
    from penstock.engine.distributed.pipeline_parallel import Pipeline  # noqa: PLC0415

    costs = layer_flops(config, run.data.row_length)
    notify(describe_pipeline(run.train, costs, config.num_mtp_layers))
    settings = {"residual": residual, "autocast": autocast, "heartbeat": ranks.heartbeat}
    return Pipeline(parts, mesh, run.train, device=ranks.device, **settings)


def autocast_context(train: TrainConfig, device: torch.device) -> AutocastContext:
    """The context of forward passes: none if FSDP casts the weights, or they need no cast."""
    dtype = train.computes_in
    if train.data_parallel_mode == "fsdp2" or train.keeps_in == dtype:
        return nullcontext
    return partial(torch.autocast, device.type, dtype=getattr(torch, dtype))


def lora_spec(run: RunConfig, family: Family) -> LoraSpec:
    """Convert the `lora` config section to a LoraSpec."""
    lora, targets = run.lora, run.lora.lora_target_modules
    targets = (targets,) if isinstance(targets, str) else targets
    return LoraSpec(
        rank=lora.lora_rank,
        alpha=lora.lora_alpha,
        targets=tuple(targets or family.lora_targets),
        seed=run.train.seed,
        dropout=lora.lora_dropout,
        experts=lora.expert_sharing,
        scaling="root" if lora.use_rslora else "rank",
        normed="dora" if lora.use_dora else "plain",
        bias=lora.lora_bias,
        skip_missing=lora.missing_targets == "skip",
    )


def lora_target_layers(
    run: RunConfig, family: Family, config: DecoderConfig, vision: VisionTower | None = None
) -> list[str]:
    """The layers with adapters in all parts of the model, by their checkpoint names."""
    if isinstance(config, AutoModelConfig):
        return [layer.name for layer in adapted(run, family, config)]
    spec = lora_spec(run, family)
    with torch.device("meta"):
        # Of all layers: this rank's pipeline stage has some of them only.
        full_model = Decoder(config, merge_qkv=run.model.merge_qkv, vision=vision)
    return select_layers(full_model, spec.targets or (), skip_missing=spec.skip_missing)


def saves_adapters_only(lora: LoraConfig) -> bool:
    """Whether checkpoints leave out the base model."""
    # With ReLoRA merging they cannot: only the checkpoint has the merged weights.
    return lora.enable_lora and not lora.merge_lora_interval


def load_params(
    params: Sequence[LocalParam],
    base: BaseModelWeights,
    weights: Path | None,
    run: RunConfig,
    ranks: ProcessInfo,
    adapter_init: AdapterStart | None = None,
) -> None:
    """Load the empty model: base weights from `weights` or from the seed, adapters from the seed
    or from the saved adapter `adapter_init`.
    """
    seed = run.train.seed
    readers: Readers = "all_ranks" if run.train.load_weights_mode == "all_ranks" else "first_rank"
    to_reader = partial(base.quantized_reader, device=ranks.device)
    random_init = to_reader(base.random_init(seed))
    norms: dict[str, torch.Tensor] = {}
    # The norms of the base model; a saved adapter has its own magnitudes.
    if run.lora.use_dora and not adapter_init:
        norms = norms_for(
            params, weights, random_init, readers=readers, ranks=ranks, to_reader=to_reader
        )

    def start(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        factor = parse_lora_name(name)
        if factor is None:
            return random_init.box(name, (0,) * len(shape), shape)
        if adapter_init:
            return adapter_init(name, shape)
        if factor.side == MAGNITUDE:
            return norms[factor.hf_module]
        return initial_lora(name, shape, seed)

    load_weights(params, weights, start, readers=readers, ranks=ranks, to_reader=to_reader)
    if adapter_init:
        adapter_init.load_biases(params)
