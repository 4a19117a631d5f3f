"""Checks before any work that this machine can train a run; errors say what to write instead.

Modules about models are imported only where a check needs them: most cached runs need none.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.config.schema.parallelism import SPLIT_BACKWARD
from penstock.config.schema.run import RunConfig
from penstock.config.schema.train import TrainConfig
from penstock.core import env
from penstock.core.errors import CapabilityError, ConfigError
from penstock.core.extensions import OPTIMIZERS
from penstock.core.machine.gpus import Gpus, detect_gpus
from penstock.core.remote.urls import is_url
from penstock.core.sources.hub import local_folder
from penstock.core.sources.hub_login import require_hub, require_login
from penstock.core.sources.pin import CONFIG_AND_CODE, pin_config
from penstock.engine.distributed.parallel_dims import (
    AXIS_FIELDS,
    ParallelDims,
    accumulation_steps,
    build_parallel_dims,
    compute_dims,
    rows_per_step,
)
from penstock.engine.distributed.suggest_layout import LayoutSuggestion
from penstock.engine.model_source import quantization_args
from penstock.engine.moe.deepep_requirements import require_nvlink, require_one_machine
from penstock.models.builtin import SCHEME
from penstock.train.launch.torchrun import num_local_ranks
from penstock.train.trackers.registry import require_trackers
from penstock_kernels.flash_packages import PACKAGES

if TYPE_CHECKING:
    from penstock.models.family import Family
    from penstock.models.hf_config import HfConfig
    from penstock.models.weights import WeightMap


MIN_TORCH_FOR_SPLIT_BACKWARD = "2.12"
"""The first PyTorch version that runs the schedules in SPLIT_BACKWARD."""


def world_size(run: RunConfig) -> int:
    """The number of ranks: torchrun's if it is running, else that of the section `launch`."""
    started = env.rank_variables()
    return started[2] if started else num_local_ranks(run) * run.launch.nnodes


def check_machine(run: RunConfig) -> None:
    """Refuse a run that this machine cannot train, or a layout that does not fit the ranks."""
    from penstock.engine.moe.balancing_settings import needs_router_config, require_routers
    from penstock.engine.validate_model import (
        require_dense_networks,
        require_prompts_apart,
        require_whole_documents,
        uses_context_parallel,
    )

    # nvidia-smi, which says more than the number of GPUs, takes up to a second.
    needs_details = run.model.ep_dispatch == "deepep" or run.train.enable_fp8_training
    devices = detect_gpus() if needs_details else Gpus(env.num_gpus())
    gpus = devices.count
    check_foundation_entries(run)
    check_attention(run.model.attn_implementation, gpus)
    require_prefix_sharing_attention(run)
    if not gpus and run.model.moe_implementation in ("triton", "quack"):
        raise CapabilityError(
            f"model.moe_implementation is {run.model.moe_implementation}, which needs a CUDA "
            "device, and there is none.\n"
            "  Write native or eager, or leave it out to get the best there is."
        )
    if run.model.moe_implementation == "quack":
        require_quack()
    require_nvlink(run, devices)
    if run.train.enable_fp8_training:
        check_fp8(run, devices.capability)
    if not gpus and run.train.init_device == "cuda":
        raise CapabilityError(
            "train.init_device is cuda, and there is no CUDA device.\n"
            "  Write cpu, or leave it out: weights are then made where they are needed."
        )
    if not gpus and run.train.enable_activation_offload:
        raise CapabilityError(
            "train.enable_activation_offload moves activations from a GPU to the host's memory, "
            "where they are anyway: there is no CUDA device.\n"
            "  Leave it out. enable_gradient_checkpointing saves memory on any machine."
        )
    if env.waits_for_kernels() and not run.train.allow_cuda_launch_blocking:
        raise CapabilityError(
            "CUDA_LAUNCH_BLOCKING is set in the environment, and makes every kernel wait.\n"
            "  Unset it, or write train.allow_cuda_launch_blocking: true if that is wanted."
        )
    nproc = run.launch.nproc_per_node
    if gpus and nproc != "auto" and nproc > gpus:
        raise CapabilityError(
            f"launch.nproc_per_node is {nproc}, and {gpus} CUDA devices are visible.\n"
            f"  Write {gpus} or auto."
        )
    check_schedule(run.train)
    require_trackers(run.train)
    env.require_variables(run.launch.pass_env, "launch.pass_env")
    check_optimizer(run, gpus)
    if needs_router_config(run.train):
        require_routers(run, resolve_text_config(run))
    if run.train.dropout.ffn:
        require_dense_networks(run.train, resolve_text_config(run))
    if uses_context_parallel(run.train):
        require_whole_documents(run.train, resolve_text_config(run))
    if run.data.shares_prompts:
        require_prompts_apart(run.data, resolve_text_config(run))
    check_adapted_layers(run)
    check_layout(run, gpus)
    require_one_machine(run, world_size(run), num_local_ranks(run))


def require_quack() -> None:
    """Refuse QuACK's kernels without their package, by its distribution's name: other packages can
    also be imported as `quack`."""
    try:
        version("quack-kernels")
    except PackageNotFoundError:
        raise CapabilityError(
            "model.moe_implementation is quack, and the package quack-kernels is not installed.\n"
            "  pip install 'penstock[quack]', or leave it out to get the best there is."
        ) from None


def check_schedule(train: TrainConfig) -> None:
    """Refuse schedules that this PyTorch cannot run: before 2.12 its split backward
    pass requires every input of a stage to be a tensor."""
    from packaging.version import Version

    # From its metadata: a run whose stages are cached is planned without importing torch.
    schedule, installed = train.pipeline_parallel_schedule, version("torch")
    if (
        train.pipeline_parallel_size > 1
        and schedule in SPLIT_BACKWARD
        and Version(installed) < Version(MIN_TORCH_FOR_SPLIT_BACKWARD)
    ):
        raise CapabilityError(
            f"train.pipeline_parallel_schedule is {schedule}, which needs PyTorch "
            f"{MIN_TORCH_FOR_SPLIT_BACKWARD}, and {installed} is installed.\n"
            "  Write Interleaved1F1B or 1F1B, or install a newer PyTorch."
        )


def check_foundation_entries(run: RunConfig) -> None:
    """Refuse entries of `model.foundation` that have no effect."""
    if run.model.foundation:
        from penstock.models.foundation import check_foundation

        loads = bool(run.model.model_path or run.train.init_checkpoint_path)
        check_foundation(resolve_hf_config(run, {}), run.model.foundation, loads_weights=loads)


def check_optimizer(run: RunConfig, gpus: int) -> None:
    """Refuse an optimizer that is not installed or does not support its settings."""
    if not gpus and run.train.optimizer_offload != "none":
        raise CapabilityError(
            "train.optimizer_offload moves the optimizer from a GPU to the host's memory, where it "
            "is anyway: there is no CUDA device.\n"
            "  Leave it out. anyprecision_adamw keeps its states in half the memory on any machine."
        )
    if run.train.fuse_optimizer_step:
        require_single_micro_batch(run)
    if run.train.optimizer not in OPTIMIZERS.builtins:
        # Imports torch, which only optimizers that are not ours need here.
        from penstock.optim.optimizer_by_name import named_optimizer

        named_optimizer(run.train)


def require_single_micro_batch(run: RunConfig) -> None:
    """Refuse gradient accumulation with the optimizer in the backward pass."""
    count = accumulation_steps(
        run.train, build_parallel_dims(run.train, world_size(run)).num_replicas
    )
    if count > 1:
        raise ConfigError(
            f"train.fuse_optimizer_step is true, and a step of global_batch_size "
            f"{run.train.global_batch_size} is {count} micro-batches, whose gradients are added up "
            "first.\n  Raise train.micro_batch_size, or leave fuse_optimizer_step out."
        )


def check_attention(written: str | None, gpus: int) -> None:
    """Refuse an attention backend without its GPU or package."""
    if not gpus and written in ("native", *PACKAGES):
        raise CapabilityError(
            f"model.attn_implementation is {written}, which needs a CUDA device, and there is "
            "none.\n  Write sdpa, or leave it out to get the best there is."
        )
    if written in PACKAGES and (reason := PACKAGES[written].missing_reason()):
        raise CapabilityError(
            f"model.attn_implementation is {written}, and {reason}.\n"
            "  Or leave it out to get the best there is."
        )


def require_prefix_sharing_attention(run: RunConfig) -> None:
    """Refuse an attention backend that cannot mask the completions of a shared prompt from each
    other."""
    written, over_ring = run.model.attn_implementation, run.train.ringattn_parallel_size > 1
    hides = written not in PACKAGES and not (written == "native" and over_ring)
    if run.data.shares_prompts and not hides:
        raise CapabilityError(
            f"model.attn_implementation is {written}, which cannot hide parts of a document"
            f"{' over a ring' * over_ring}, and answers share prompts in one.\n"
            "  Write sdpa, or leave it out; or data.share_prompts: false."
        )


def with_prompts_apart(run: RunConfig) -> tuple[RunConfig, tuple[str, ...]]:
    """The run without shared prompts, and a line that says so, if they are the default and the
    model's code cannot hide parts of a document."""
    data = run.data
    if not data.shares_prompts or data.share_prompts is not None:
        return run, ()
    # A finished run of other data is known without the model.
    from penstock.models.registry import get_family, is_native

    hf_config, adapters = resolve_hf_config(run), run.lora.enable_lora
    why = "transformers' models"
    if is_native(hf_config, run.model.backend, adapters=adapters):
        config = get_family(hf_config, run.model.backend, adapters=adapters).read(hf_config)
        if config.whole_past is None:
            return run, ()
        why = config.whole_past
    note = f"data: prompts are stored before each answer; {why} cannot share them"
    return run.with_fields("data", share_prompts=False), (note,)


def check_fp8(run: RunConfig, capability: tuple[int, int] | None) -> None:
    """Refuse fp8 training on GPUs that do not support it, and for layers that cannot use it."""
    from penstock.engine.precision.fp8_layers import float8_layers, require_float8

    require_float8(capability)
    config, family = resolve_family(run)
    float8_layers(run.train, _tensor_names(run, config, family), family.roles)


def check_adapted_layers(run: RunConfig) -> tuple[str, ...]:
    """Refuse `lora_target_modules` that the model of this config.json does not have, or with
    `missing_targets: skip` a note that names them."""
    targets = run.lora.lora_target_modules
    if not run.lora.enable_lora or not isinstance(targets, list):
        return ()
    from penstock.adapters.match_targets import require_layers

    names = _adapted_names(run, *resolve_family(run))
    skips = run.lora.missing_targets == "skip"
    missing = require_layers(targets, names, skip_missing=skips)
    if not missing:
        return ()
    return (
        f"lora.lora_target_modules: {', '.join(missing)} "
        f"name{'' if missing[1:] else 's'} no layer of this model (lora.missing_targets: skip)",
    )


def unmatched_no_decay(run: RunConfig) -> tuple[str, ...]:
    """Notes that name entries of `no_decay_modules` and `no_decay_params` that are in no name of a
    parameter of this model."""
    train = run.train
    has_patterns = train.no_decay_modules or train.no_decay_params
    if run.lora.enable_lora or not train.decays_weights or not has_patterns:
        return ()
    names = _tensor_names(run, *resolve_family(run)).native_names()
    modules = [name.rpartition(".")[0] for name in names]
    parts = {part for name in names for part in name.split(".") if not part.isdecimal()}
    notes: list[str] = []
    for field, within in (("no_decay_modules", modules), ("no_decay_params", names)):
        for pattern in getattr(train, field):
            if not any(pattern in name for name in within):
                near = get_close_matches(pattern, parts, 1)
                meant = f"; did you mean {near[0]}?" if near else ""
                notes.append(f"train.{field}: {pattern} is in no name of this model{meant}")
    return tuple(notes)


def check_weights(run: RunConfig) -> None:
    """Refuse prequantized weights unless the run uses them as they are."""
    if not run.model.model_path:
        return
    from penstock.engine.quantization.validate_settings import validate_prequantized
    from penstock.models.quantization_config import parse_quantization_config

    if declared := parse_quantization_config(resolve_hf_config(run)):
        validate_prequantized(quantization_args(run), declared)


def check_model(run: RunConfig) -> tuple[str, ...]:
    """Refuse a model that is not trained here, and weights in a folder of this machine that are
    not those its config.json implies: what only the ranks would find out otherwise. A note names
    tensors that are not used."""
    from penstock.engine.hf.weight_files import require_adapter
    from penstock.engine.validate_backend import require_backend
    from penstock.engine.validate_model import (
        require_dense_attention,
        require_fused_projections,
        require_mtp,
        require_rows_within_positions,
        require_unnormalized_queries,
    )
    from penstock.models.automodel.family import AutoFamily
    from penstock.models.multimodal import language_config

    config, family = resolve_family(run)
    shape = family.read(config)
    require_backend(run, family, shape)
    if run.export.quantise:
        # It imports torch, which plans do without.
        from penstock.engine.quantization.export import quantizer_for

        quantizer_for(run.export.quantise, family, family.weight_map(shape))
    require_mtp(run.train, config)
    if isinstance(family, AutoFamily):
        if run.data.encode_images:
            raise ConfigError(
                f"data.encode_images is true, and models of type {config.get('model_type')} are "
                "computed by transformers, images in every step.\n  Write encode_images: false."
            )
    else:
        text_config = language_config(config)
        require_fused_projections(run, text_config)
        require_unnormalized_queries(run.train, text_config)
        require_dense_attention(run.train, text_config)
        if run.model.trust_remote_code:
            raise ConfigError(
                f"model.trust_remote_code is true, and {family.model_type} is computed by "
                "Penstock's own code, not by the model's.\n"
                "  Leave trust_remote_code out, or write model.backend: transformers."
            )
    if run.data.encode_images:
        from penstock.engine.vision.encoded import require_encodable
        from penstock.models.vision.types import read_vision

        require_encodable(run, read_vision(config))
    require_rows_within_positions(run, shape)
    if run.lora.enable_lora:
        _require_adapters(run, config, family)
    adapter = run.lora.init_adapter_path
    if adapter and not is_url(adapter) and Path(adapter).is_dir():
        file = Path(adapter) / "adapter_model.safetensors"
        require_adapter(file, shape.hidden_size, shape.num_hidden_layers)
    is_partial = family.multimodal or family.weight_map(shape).absent_parts
    if is_partial and run.model.model_path is None:
        raise ConfigError(
            f"model.model_path is not set, and the language model alone of a {family.model_type} "
            "is initialized here, not its other parts.\n"
            "  Name a folder or hub id that has the weights of all parts."
        )
    return _check_base_files(run, config, family, shape.num_hidden_layers)


def resolve_family(run: RunConfig) -> "tuple[HfConfig, Family]":
    """The model's config.json and its family. Raises CapabilityError as `get_family`."""
    from penstock.models.registry import get_family

    config = resolve_hf_config(run)
    return config, get_family(config, run.model.backend, adapters=run.lora.enable_lora)


def _tensor_names(run: RunConfig, config: "HfConfig", family: "Family") -> "WeightMap":
    return family.weight_map(family.read(config), merge_qkv=run.model.merge_qkv)


def _check_base_files(
    run: RunConfig, config: "HfConfig", family: "Family", num_layers: int
) -> tuple[str, ...]:
    """Refuse weights in a folder of this machine that are not those of this config.json; the note
    names those that are not used."""
    from penstock.engine.hf.unused_tensors import describe_unused
    from penstock.engine.hf.weight_files import require_plain, require_weights
    from penstock.models.automodel.family import AutoFamily
    from penstock.models.multimodal import is_language, text_name
    from penstock.models.quantization_config import parse_quantization_config

    path = run.model.model_path
    if path is None or is_url(path) or not Path(path).expanduser().is_dir():
        return ()
    folder = Path(path).expanduser()
    is_quantized = parse_quantization_config(config, folder) is not None
    is_converted = is_quantized or isinstance(family, AutoFamily)
    trained = family.trained_config(config, mtp=run.train.mtp_loss_weight > 0)
    weights = family.weight_map(trained)
    names = None if is_converted else weights
    if family.multimodal and is_quantized:
        require_plain(folder, lambda name: not is_language(name))
    spare = config.get("num_nextn_predict_layers") or 0
    rename = text_name if family.multimodal else names.config.names.today if names else str
    require_weights(folder, names, num_layers + spare, rename)
    unused = describe_unused(folder, config, weights)
    return (unused,) if unused else ()


def _require_adapters(run: RunConfig, config: "HfConfig", family: "Family") -> None:
    """Refuse a rank that is too large, and options that adapters of the targeted layers do not
    have."""
    from penstock.adapters.match_targets import linear_layers, match_targets, require_adaptable
    from penstock.adapters.names import is_expert_layer
    from penstock.adapters.validate_options import require_options
    from penstock.engine.distributed.pipeline_stages import require_trained_stages
    from penstock.engine.moe.deepep_requirements import NO_DROPOUT
    from penstock.models.flops import layer_flops
    from penstock.models.quantization_config import parse_quantization_config

    shape = family.read(config)
    widest = max(shape.hidden_size, shape.intermediate_size)
    if run.lora.lora_rank > widest:
        raise ConfigError(
            f"lora.lora_rank is {run.lora.lora_rank}, and the model's layers are at most {widest} "
            "wide: an adapter of that rank is larger than the layer itself.\n"
            "  Write a smaller rank, such as 16, or lora.enable_lora: false to train all weights."
        )
    require_adaptable(shape)
    lora, targets = run.lora, run.lora.lora_target_modules or family.lora_targets
    names = _adapted_names(run, config, family)
    if lora.enable_qlora:
        from penstock.engine.quantization.prequantized import published_in
        from penstock.engine.quantization.select_layers import select_formats

        select_formats(quantization_args(run), published_in(config), names, family.roles)
    targets = (targets,) if isinstance(targets, str) else targets
    chosen = match_targets(targets, linear_layers(names))
    drops_rows = lora.lora_dropout and any(is_expert_layer(layer.name) for layer in chosen)
    if drops_rows and run.model.ep_dispatch == "deepep":
        raise CapabilityError(NO_DROPOUT)
    if run.train.pipeline_parallel_size > 1:
        require_trained_stages(
            run.train,
            layer_flops(shape, run.data.row_length),
            [layer.native for layer in chosen],
        )
    require_options(
        [layer.name for layer in chosen],
        names,
        dropout=lora.lora_dropout,
        normed="dora" if lora.use_dora else "plain",
        experts=lora.expert_sharing,
        bias=lora.lora_bias,
    )
    if lora.enable_qlora and parse_quantization_config(config) is None:
        # It imports torch, which plans do without.
        from penstock.engine.quantization.select_layers import require_formats

        require_formats(quantization_args(run), names, family.roles, run.train.tensor_parallel_size)


def _adapted_names(run: RunConfig, config: "HfConfig", family: "Family") -> "WeightMap":
    """The names of the model's tensors, with those of its vision part if targets name it."""
    from penstock.adapters.match_targets import names_vision

    targets = run.lora.lora_target_modules
    names = _tensor_names(run, config, family)
    if names.multimodal and isinstance(targets, list) and any(map(names_vision, targets)):
        from penstock.engine.vision.build import build_outline

        names = replace(names, vision=build_outline(config).shapes)
    return names


def check_layout(run: RunConfig, gpus: int = 0) -> None:
    """Refuse a parallel layout that the model does not support. `gpus` is the number of GPUs of
    the machines that train, if known."""
    from penstock.engine.distributed.validate_layout import (
        ModelDims,
        is_model_parallel,
        validate_layout,
    )

    dims = ModelDims.of(resolve_hf_config(run)) if is_model_parallel(run.train) else None
    validate_layout(run, world_size, dims, _suggest_launches(run, gpus))


def why_cannot_train(run: RunConfig) -> ConfigError | CapabilityError | None:
    """Why this machine cannot train the run, or None. Export needs no such check."""
    try:
        check_machine(run)
        check_weights(run)
    except (ConfigError, CapabilityError) as error:
        return error
    return None


def resolve_rows_per_step(run: RunConfig) -> int:
    """Packed rows in one optimizer step over all ranks.

    Raises ConfigError or CapabilityError if they follow from the layout and it is not valid.
    """
    if run.train.global_batch_size is not None:
        return run.train.global_batch_size
    try:
        return rows_per_step(
            run.train, build_parallel_dims(run.train, world_size(run)).num_replicas
        )
    except ConfigError as error:
        raise why_cannot_train(run) or error from None


def expected_rows_per_step(run: RunConfig) -> int:
    """Packed rows in one optimizer step over all ranks; of one replica if this machine cannot lay
    out the ranks, as where data is prepared for other machines."""
    dims = compute_dims(run.train, world_size(run))
    return rows_per_step(run.train, dims.num_replicas if isinstance(dims, ParallelDims) else 1)


def rows_per_step_to_pack(run: RunConfig) -> int:
    """Packed rows in one optimizer step by which the row length is chosen: `global_batch_size`, or
    those of one replica, so that a config packs the same rows on every machine."""
    return rows_per_step(run.train, num_replicas=1)


def resolve_hf_config(run: RunConfig, entries: Mapping[str, Any] | None = None) -> "HfConfig":
    """The model's config.json, updated with `entries` (default: `model.foundation`). If it is on
    the hub, only this file is fetched."""
    from penstock.engine.hf.config import read_hf_config

    entries = run.model.foundation if entries is None else entries
    source, runs_code = run.model.config_source, run.model.trust_remote_code
    if not source.startswith(SCHEME):
        pinned = pin_config(source, with_code=runs_code, revision=run.model.code_revision)
        files = CONFIG_AND_CODE if runs_code else ("config.json",)
        source = str(local_folder(source, pinned, files))
    return read_hf_config(source, entries, runs_code=runs_code)


def resolve_text_config(run: RunConfig) -> "HfConfig":
    """`resolve_hf_config`, and of a multimodal model that of its language model."""
    from penstock.models.multimodal import language_config

    return language_config(resolve_hf_config(run))


def _suggest_launches(run: RunConfig, gpus: int) -> list[LayoutSuggestion]:
    """Other values of nproc_per_node that this machine could start."""
    if env.rank_variables():
        return []
    now = num_local_ranks(run)
    sizes = [getattr(run.train, name) for name in AXIS_FIELDS.values()]
    most = gpus or min(1024, max(now, math.prod(max(1, size) for size in sizes)))
    written = "nproc_per_node" in run.launch.model_fields_set
    return [
        # By logarithm: half as many processes are as far away as twice as many.
        LayoutSuggestion("launch.nproc_per_node", size, abs(math.log2(size / now)), written)
        for size in range(1, most + 1)
        if size != now
    ]


def check_hub(run: RunConfig) -> None:
    """Refuse, before any work, settings that need the hub or a login if it is not available."""
    if run.data.hf_use_auth_token:
        require_login("data.hf_use_auth_token: true")
    if run.data.push_dataset_to_hub:
        require_hub("data.push_dataset_to_hub")


def needs_login(run: RunConfig) -> bool:
    """Whether the run pushes to the hub."""
    return "push" in run.stages and run.push.repo_id is not None and not run.push.dry_run


def require_push(run: RunConfig) -> None:
    """Refuse, before any work, a push to the hub without a login."""
    require_hub("push.repo_id")
    require_login(f"push.repo_id: {run.push.repo_id}")
