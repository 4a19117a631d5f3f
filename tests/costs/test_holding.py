"""What a rank is said to hold, beside the models, pieces and formats that it would hold."""

import math
from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig

from penstock.adapters.inject import LoraSpec, inject
from penstock.config.loading.load import loads
from penstock.engine.distributed.parallel_dims import ParallelDims
from penstock.engine.distributed.parallel_model import build_stage_modules
from penstock.engine.distributed.tensor_sharding import TensorParallelPlan
from penstock.estimate.costs.param_sizes import QUANT_FORMATS, _bytes_per_element, list_tensors
from penstock.estimate.costs.sharded_model import ShardedModel, UnshardedModel
from penstock.models.decoder import Decoder
from penstock.models.quantization_config import QuantizationConfig
from penstock.models.registry import get_family
from penstock_kernels.quant import get_format
from tests.config.values import smallest

SIZES = {
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
LATENT = {
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "head_dim": 4,
}
INDEXED = {"index_topk": 4, "index_n_heads": 4, "index_head_dim": 8}
MODELS = {
    "dense": ("qwen3", {"tie_word_embeddings": True}),
    "experts": ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2}),
    "gated experts": ("qwen2_moe", {"num_experts": 4, "num_experts_per_tok": 2}),
    "split norms": ("olmo3", {"pad_token_id": None}),
    "fused layers": ("phi3", {"pad_token_id": None}),
    "norms around layers": ("gemma3_text", {}),
    "latent attention": ("deepseek_v3", {"num_key_value_heads": 8, **LATENT}),
    "sparse attention": ("deepseek_v32", {"num_key_value_heads": 8, **LATENT, **INDEXED}),
    "predicting": (
        "deepseek_v3",
        {"num_key_value_heads": 8, **LATENT, "num_nextn_predict_layers": 1},
    ),
    "biases": ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2}),
}


def family(kind):
    model_type, more = MODELS[kind]
    hf = AutoConfig.for_model(model_type, **{**SIZES, **more}).to_dict()
    return get_family(hf), get_family(hf).trained_config(hf, mtp=True)


def cut_of(kind, degrees, **sections):
    run = loads(smallest(**sections))
    its, config = family(kind)
    return ShardedModel(run, UnshardedModel.from_run(run, its, config), degrees, "cpu"), its, config


@pytest.mark.parametrize("kind", MODELS)
def test_one_process_holds_the_model(kind):
    cut, _, config = cut_of(kind, ParallelDims())
    with torch.device("meta"):
        model = Decoder(config, merge_qkv=True)
    assert sum(one.num_elements for one in list_tensors(cut)) == sum(
        p.numel() for p in model.parameters()
    )


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_that_split_matrices_hold_their_pieces(kind, size):
    degrees = ParallelDims(tensor=size, expert=2)
    cut, its, config = cut_of(kind, degrees, train={"tensor_parallel_size": size})
    names = its.weight_map(config, merge_qkv=True)
    most = 0
    for index in range(size):
        cuts = TensorParallelPlan(
            names, its.roles, size, index, "whole", expert_size=2, expert_index=index % 2
        )
        shapes = {name: names.native_shape(name) for name in names.native_names()}
        sizes = [sum(p.numel for p in cuts.shards(name, shape)) for name, shape in shapes.items()]
        most = max(most, sum(sizes))
    # Shares that do not come out even are rounded up, each for itself.
    assert sum(one.num_elements for one in list_tensors(cut)) == pytest.approx(most, rel=0.01)


@pytest.mark.parametrize(
    ("kind", "schedule"),
    [
        ("experts", "1F1B"),
        ("experts", "Interleaved1F1B"),
        ("predicting", "1F1B"),
        ("dense", "ZBVZeroBubble"),
    ],
)
def test_ranks_of_a_pipeline_hold_their_stages(kind, schedule):
    train = {
        "pipeline_parallel_size": 2,
        "pipeline_parallel_schedule": schedule,
        "gradient_accumulation_steps": 2,
    }
    cut, _, config = cut_of(kind, ParallelDims(pipeline=2), train=train)
    for rank in range(2):
        with torch.device("meta"):
            parts = [
                Decoder(config, merge_qkv=True, part=part)
                for part in build_stage_modules(
                    config, cut.run.train, rank, cut.run.data.row_length
                )
            ]
        whole = sum(p.numel() for part in parts for p in part.parameters())
        assert sum(one.num_elements for one in list_tensors(cut, rank)) == whole


@pytest.mark.parametrize(
    ("kind", "experts"),
    [("dense", "each"), ("experts", "each"), ("experts", "hybrid"), ("gated experts", "each")],
)
def test_adapters_alone_learn_and_are_as_many_as_are_injected(kind, experts):
    more = {"experts": ["lm_head"], "gated experts": ["shared_expert_gate"]}
    targets = ["q_proj", "down_proj", *more.get(kind, [])]
    lora = {"enable_lora": True, "lora_rank": 4, "lora_target_modules": targets}
    lora["moe_hybrid_shared_lora"] = experts == "hybrid"
    cut, _, config = cut_of(kind, ParallelDims(), lora=lora)
    with torch.device("meta"):
        model = Decoder(config, merge_qkv=True)
        inject(model, LoraSpec(rank=4, alpha=4, targets=targets, experts=experts))
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert sum(one.num_elements for one in list_tensors(cut) if one.is_trainable) == sum(
        p.numel() for p in trained.values()
    )
    head = sum(p.numel() for name, p in trained.items() if name.startswith("lm_head"))
    chosen = config.experts.experts_per_token if config.experts else 1
    share = chosen / config.experts.num_experts if config.experts else 1
    # A factor that experts share is used for each expert of a token.
    inner = sum(
        p.numel() * (share if ".experts." in name else chosen if ".mlp.adapter." in name else 1)
        for name, p in trained.items()
        if not name.startswith("lm_head")
    )
    assert cut.model.trainable.adapter_params == head + inner
    assert cut.model.trainable.head_adapter_params == head


@pytest.mark.parametrize("name", QUANT_FORMATS)
@pytest.mark.parametrize("columns", [64, 128, 200, 4096])
def test_quantized_rows_take_the_bytes_of_their_format(name, columns):
    widths = get_format(name).widths(columns)
    assert _bytes_per_element(name, columns, None) * columns == pytest.approx(sum(widths.values()))


def test_shards_are_whole_rows():
    cut, _, _ = cut_of("dense", ParallelDims(shard=8))
    for one in list_tensors(cut):
        assert one.num_local_elements == math.ceil(one.rows / 8) * one.columns


@pytest.mark.parametrize("published", [None, QuantizationConfig("fp8", "compressed-tensors")])
def test_quantized_matrices_take_their_bits_and_all_else_its_own(published):
    lora = {"enable_lora": True, "enable_qlora": True, "quant_format": "int8"}
    model = {"exclude_modules": ["o_proj"]}
    cut, its, config = cut_of("dense", ParallelDims(), lora={**lora, **model})
    cut = replace(cut, model=UnshardedModel.from_run(cut.run, its, config, published))
    format = get_format(published.format if published else "int8")
    names = its.weight_map(config, merge_qkv=True)
    want = 0.0
    for name in names.native_names():
        *rows, columns = names.native_shape(name)
        count = math.prod(rows) * columns
        if "_proj" in name and "o_proj" not in name:
            want += rows[0] * sum(format.widths(columns).values())
        else:
            # Vectors in fp32, matrices as they are computed with.
            want += count * (2 if rows else 4)
    assert sum(
        one.local_bytes for one in list_tensors(cut) if not one.is_trainable
    ) == pytest.approx(want)
