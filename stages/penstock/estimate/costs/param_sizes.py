"""Parameter sizes of one rank: every tensor by layer, sharded and gathered. No torch."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from penstock.adapters.match_targets import ROUTERS, TargetLayer
from penstock.adapters.names import EMBEDDING, is_of_experts
from penstock.config.schema.quantization import PAIRS, is_among
from penstock.engine.distributed.pipeline_stages import layers_of_stages, stages_of_rank
from penstock.estimate.costs.sharded_model import ShardedModel
from penstock.models.flops import layer_flops
from penstock.models.names import (
    EMBEDDING_WEIGHT,
    HEAD_WEIGHT,
    INDEXER,
    LINEAR_ATTN,
    POSITIONS_WEIGHT,
)
from penstock.models.tp_roles import ParallelStyle
from penstock.models.weights import LAYERS

ROOT = -1
"""Layer number of the embedding, the final norm and the LM head."""

EMBEDDING_UNIT = -2
"""FSDP unit of an embedding that is gathered apart from the norm and the head."""

WHOLE = (None, ParallelStyle.REPLICATED, ParallelStyle.ROUTER, ParallelStyle.EXPERTS)
"""Roles of modules whose parameters tensor parallelism does not split."""

# NF4: Dettmers et al. 2023, "QLoRA". MXFP4: OCP Microscaling Formats 1.0, 8-bit scales of 32
# values. NVFP4: fp8 scales of 16 values, and one in float32.
QUANT_FORMATS: Mapping[str, tuple[float, int | None, int, int]] = {
    "nf4": (0.5, 64, 4, 0),
    "nvfp4": (0.5, 16, 1, 4),
    "mxfp4": (0.5, 32, 1, 0),
    "int4": (0.5, 128, 4, 0),
    "int8": (1, None, 4, 0),
    "fp8": (1, None, 4, 0),
    "block_fp8": (1, 128, 4, 0),
}
"""Quantization formats: (bytes per value, values per scale (None: the whole row), bytes per scale,
bytes of additional scales per row)."""


@dataclass(frozen=True)
class Tensor:
    """One parameter of a rank, before FSDP sharding."""

    unit: int
    """FSDP unit: layer number, ROOT, or EMBEDDING_UNIT."""
    rows: int
    """Size of the dimension that FSDP shards."""
    columns: int
    """Elements per row."""
    is_trainable: bool
    width: float
    """Bytes per element of the shard."""
    gathered_width: float
    """Bytes per element when gathered for computation."""
    shards: int
    is_hidden_matrix: bool = False
    """Whether it is a hidden weight matrix, which Muon updates."""

    @property
    def num_elements(self) -> int:
        """Number of elements before FSDP sharding."""
        return self.rows * self.columns

    @property
    def num_local_elements(self) -> int:
        """Number of elements of this rank's shard."""
        # FSDP2 cuts as torch.chunk does: the first shards have the most rows.
        return -(-self.rows // self.shards) * self.columns

    @property
    def local_bytes(self) -> float:
        """Bytes of this rank's shard."""
        return self.num_local_elements * self.width

    @property
    def gathered_bytes(self) -> float:
        """Bytes when gathered."""
        return self.num_elements * self.gathered_width


def list_tensors(sharded: ShardedModel, pipeline: int = 0) -> list[Tensor]:
    """Parameters of pipeline rank `pipeline`; the largest sizes if ranks of a stage differ."""
    layers, begins, ends = _local_stages(sharded, pipeline)
    return [
        *_base_tensors(sharded, layers, begins=begins, ends=ends),
        *_adapter_tensors(sharded, layers, ends),
    ]


def list_vision_tensors(sharded: ShardedModel) -> list[Tensor]:
    """Tower and projector of the vision part of a rank, each as one; none of a model without."""
    compute, tensors = sharded.compute_bytes, list[Tensor]()
    for params, learns in sharded.model.vision.parts if sharded.model.vision else ():
        narrow = not learns and sharded.saves_only_adapters
        width = min(sharded.param_bytes, compute) if narrow else sharded.param_bytes
        tensors.append(Tensor(ROOT, params, 1, learns, width, compute, sharded.shards))
    return tensors


def local_layers(sharded: ShardedModel, pipeline: int) -> list[int]:
    """Layer numbers of that pipeline rank."""
    return _local_stages(sharded, pipeline)[0]


def _local_stages(sharded: ShardedModel, pipeline: int) -> tuple[list[int], bool, bool]:
    run, config = sharded.run, sharded.config
    if sharded.degrees.pipeline == 1:
        return list(range(config.num_layers)), True, True
    costs = layer_flops(config, run.data.row_length)
    stages = layers_of_stages(run.train, costs, config.num_mtp_layers)
    own_stages = stages_of_rank(run.train, pipeline)
    return (
        [layer for stage in own_stages for layer in stages[stage]],
        0 in own_stages,
        len(stages) - 1 in own_stages,
    )


def _base_tensors(
    sharded: ShardedModel, layers: list[int], *, begins: bool, ends: bool
) -> Iterator[Tensor]:
    shapes = sharded.model.shapes
    for name, shape in shapes.items():
        if _is_here(name, layers, begins=begins, ends=ends):
            yield _tensor(sharded, name, shape)
    # The first and the last pipeline stage each have a copy of some embeddings.
    if ends and sharded.degrees.pipeline > 1:
        if sharded.config.tie_word_embeddings:
            yield _tensor(sharded, HEAD_WEIGHT, shapes[EMBEDDING_WEIGHT])
        elif sharded.config.num_mtp_layers:
            yield _tensor(sharded, EMBEDDING_WEIGHT, shapes[EMBEDDING_WEIGHT])


def _is_here(name: str, layers: list[int], *, begins: bool, ends: bool) -> bool:
    layer = parse_layer_number(name)
    if layer != ROOT:
        return layer in layers
    return begins if name in (EMBEDDING_WEIGHT, POSITIONS_WEIGHT) else ends


def parse_layer_number(name: str) -> int:
    """Layer number of a parameter, or ROOT."""
    return int(name.split(".")[2]) if name.startswith(LAYERS) else ROOT


def _tensor(sharded: ShardedModel, name: str, shape: tuple[int, ...]) -> Tensor:
    module, _, leaf = name.rpartition(".")
    layer, of_experts = parse_layer_number(name), is_of_experts(name)
    rows, columns = _local_shape(sharded, name, shape)
    train, of_indexer = sharded.run.train, f".{INDEXER}." in name
    learns = not sharded.run.lora.enable_lora and not (
        sharded.run.model.freeze_router and module.endswith(ROUTERS)
    )
    learns &= bool(train.indexer_loss_coef) if of_indexer else not train.indexer_warmup
    # Biases are not matrices; expert biases are stacks of vectors, with one more dimension.
    is_matrix = len(shape) > 1 + of_experts
    width = float(sharded.param_bytes)
    gathered = float(sharded.compute_bytes)
    if not learns and is_matrix and sharded.saves_only_adapters:
        width = min(sharded.param_bytes, sharded.compute_bytes)
    format = _quant_format(sharded, name, is_matrix) if layer != ROOT else None
    if format:
        published = sharded.model.quantization
        group_size = sharded.run.lora.quant_group_size or (published and published.group_size)
        width = gathered = _bytes_per_element(format, shape[-1], group_size)
    shards = sharded.expert_shards if of_experts else sharded.shards
    is_filter = sharded.model.roles.get(module) is ParallelStyle.CHANNELS
    hidden = is_matrix and layer != ROOT and leaf != "sinks" and not is_filter
    unit = _unit(sharded, module)
    return Tensor(unit, rows, columns, learns, width, gathered, shards, hidden)


def _unit(sharded: ShardedModel, module: str) -> int:
    if module == EMBEDDING and sharded.has_edge_units:
        return EMBEDDING_UNIT
    return parse_layer_number(f"{module}.")


def _local_shape(sharded: ShardedModel, name: str, shape: tuple[int, ...]) -> tuple[int, int]:
    """(rows, elements per row) of a tensor on one rank, after tensor and expert parallelism."""
    size, config = sharded.degrees.tensor, sharded.config
    rows, columns = shape[0], math.prod(shape[1:])
    module = name.rpartition(".")[0]
    if is_of_experts(name):
        return -(-rows // sharded.degrees.expert), columns
    role = sharded.model.roles.get(module)
    layer = parse_layer_number(name)
    if size == 1 or role in WHOLE:
        return rows, columns
    if layer != ROOT and ".mlp." in name and config.layer_experts(layer):
        return rows, columns
    if role is ParallelStyle.ROWWISE:
        return (rows, -(-columns // size)) if len(shape) > 1 else (rows, columns)
    if f".{LINEAR_ATTN}." in name and config.linear:
        last = module.rpartition(".")[2]
        blocks = config.linear.row_blocks(last) or {last: rows}
        heads = (min(size, config.linear.split_heads(part)) for part in blocks)
        return sum(
            -(-rows // ranks) for rows, ranks in zip(blocks.values(), heads, strict=True)
        ), columns
    if ".self_attn." in name and role is not ParallelStyle.PER_HEAD:
        config = config.of_layer(layer)
        queries = config.qkv_features["q_proj"]
        parts = {"qkv_proj": (queries, rows - queries)}
        parts |= dict.fromkeys(("q_proj", "q_norm"), (rows, 0))
        queries, keys_values = parts.get(module.rpartition(".")[2], (0, rows))
        # With more ranks than key heads, ranks have copies of a head.
        kv_ranks = min(size, config.num_key_value_heads)
        return -(-queries // size) + -(-keys_values // kv_ranks), columns
    return -(-rows // size), columns


def _quant_format(sharded: ShardedModel, name: str, is_matrix: bool) -> str | None:
    """Quantization format of a matrix of a layer; None if it is not quantized."""
    lora = sharded.run.lora
    module = name.rpartition(".")[0]
    role = sharded.model.roles.get(module)
    if (
        not lora.enable_qlora
        or not is_matrix
        or role in (None, ParallelStyle.ROUTER, ParallelStyle.PER_HEAD, ParallelStyle.CHANNELS)
    ):
        return None
    published = sharded.model.quantization
    untouched = published.ignored_modules if published else ()
    if is_among(lora.exclude_modules or untouched, module):
        return None
    chosen = published.format if published else lora.quant_format
    linear, experts = PAIRS.get(chosen, (chosen, chosen))
    return experts if role is ParallelStyle.EXPERTS else linear


def _bytes_per_element(format: str, columns: int, group_size: int | None) -> float:
    """Bytes per element of a quantized row, including scales."""
    code_bytes, group, scale, global_bytes = QUANT_FORMATS[format]
    if group is None:
        return code_bytes + scale / columns
    if group_size and format in ("nf4", "int4"):
        group = group_size
    groups = -(-columns // group)
    # Rows of 4-bit codes are padded to whole groups.
    codes = groups * group * code_bytes if code_bytes < 1 else columns
    return (codes + groups * scale + global_bytes) / columns


def _adapter_tensors(sharded: ShardedModel, layers: list[int], ends: bool) -> Iterator[Tensor]:
    for adapter in sharded.model.adapters:
        layer = parse_layer_number(adapter.of)
        if layer == ROOT and adapter.name != EMBEDDING and not ends:
            continue
        if layer == ROOT or layer in layers:
            shards = sharded.expert_shards if adapter.experts else sharded.shards
            unit = _unit(sharded, adapter.native)
            for rows, columns in _adapter_shapes(sharded, adapter):
                yield Tensor(unit, rows, columns, True, 4, sharded.compute_bytes, shards)


def _adapter_shapes(sharded: ShardedModel, layer: TargetLayer) -> Iterator[tuple[int, int]]:
    """Yield (rows, elements per row) of a layer's LoRA A and B, and of its DoRA magnitudes."""
    size, lora = sharded.degrees.tensor, sharded.run.lora
    role = sharded.model.roles.get(layer.native)
    outputs, inputs, rank = layer.outputs, layer.inputs, lora.lora_rank
    if layer.experts:
        count = -(-layer.experts // sharded.degrees.expert)
        first, second = count, count
        if lora.moe_shared_lora:
            first = second = 1
        elif lora.moe_hybrid_shared_lora:
            first, second = (count, 1) if layer.native.endswith("down_proj") else (1, count)
        yield (first, rank * inputs) if first > 1 else (rank, inputs)
        yield (second, outputs * rank) if second > 1 else (outputs, rank)
        return
    if role is ParallelStyle.ROWWISE:
        inputs = -(-inputs // size)
    elif role not in WHOLE:
        outputs = -(-outputs // size)
    yield rank, inputs
    yield outputs, rank
    if lora.use_dora:
        yield outputs, 1
