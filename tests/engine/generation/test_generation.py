"""What a laid-out model writes, judged by transformers and by passes that keep nothing."""

import math
from dataclasses import replace
from typing import Any

import peft
import pytest
import torch

from penstock.engine.generation.sampling import SamplingParams
from penstock.engine.generation.sequences import Prompt
from tests.engine import runs
from tests.engine.generation.writing import (
    assert_foretold,
    built_of,
    log_probs_after,
    read_model,
    write_model,
    written,
)
from tests.engine.generation.writing import job_of as job_of_model
from tests.engine.inputs import MODELS
from tests.engine.loops import each
from tests.ranks import on_ranks
from tests.turns import one_day_in, taking_turns

pytestmark = [pytest.mark.slow, pytest.mark.dist]

# Log-probabilities of about 5, of fp32 logits of about 10, in another order of summing.
ATOL = 1e-5
# Of bf16 products, whose roundings of 0.4 % meet in logits of about 10.
MIXED_ATOL = 0.2
NEW = 24
PROMPTS = ([5, 6, 7, 8, 9], [301], list(range(40, 77)), [3, 1, 4, 1, 5, 9, 2, 6])
LONG = {"num_hidden_layers": 3}
# Scaled embeddings that are the head too would write one token again and again.
APART = {"tie_word_embeddings": False}
TWO_LAYERS = {"layer_types": ["sliding_attention", "full_attention"]}
FAMILIES = {
    "model": {},
    "llama": {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "tie_word_embeddings": False,
    },
    "windows": {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "use_sliding_window": True,
        "sliding_window": 11,
        "max_window_layers": 1,
        **LONG,
    },
    "experts": {**MODELS["experts"], "mlp_only_layers": [1]},
    "gated experts": MODELS["gated experts"],
    "sinks": {**MODELS["sinks"], "sliding_window": 11},
    "learned positions": MODELS["learned positions"],
    "soft caps": {**MODELS["soft caps"], "sliding_window": 11, **APART},
    "gemma 3": {**MODELS["gemma 3"], "sliding_window": 11, **TWO_LAYERS, **APART},
    "gemma 4": {**MODELS["gemma 4"], "sliding_window": 11, **TWO_LAYERS, **APART},
    "chunks": {
        **MODELS["llama 4"],
        "attention_chunk_size": 11,
        "no_rope_layers": [1, 0],
        "moe_layers": [1],
    },
    "output norms": {**MODELS["output norms"], "sliding_window": 11, **TWO_LAYERS},
    "scales": {**MODELS["scales"], **APART},
    "query scales": MODELS["query scales"],
    "fused layers": MODELS["fused layers"],
    "latent attention": {**MODELS["latent attention"], "num_attention_heads": 8},
    "sparse attention": {**MODELS["sparse attention"], "num_attention_heads": 8},
    "linear attention": {
        **MODELS["linear attention"],
        "layer_types": ["linear_attention", "full_attention"],
    },
    "convolutions": {**MODELS["convolutions"], "layer_types": ["conv", "full_attention"]},
    "separate linear attention": {
        **MODELS["separate linear attention"],
        "layer_types": ["linear_attention", "full_attention"],
    },
    "mamba": {**MODELS["mamba"], "layer_types": ["linear_attention", "full_attention"]},
    "layers of one part": MODELS["layers of one part"],
    "dense mamba": {**MODELS["dense mamba"], "attn_layer_indices": [1]},
    "convolutions and experts": {
        **MODELS["convolutions and experts"],
        "layer_types": ["conv", "full_attention"],
    },
    "experts without a gate": MODELS["experts without a gate"],
    "channel linear attention": {
        **MODELS["channel linear attention"],
        "num_attention_heads": 8,
        "layer_types": ["linear_attention", "full_attention"],
        "mlp_layer_types": ["dense", "sparse"],
    },
    "dynamic": {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    },
    "by length": {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "max_position_embeddings": 32,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "factor": 2.0,
            "original_max_position_embeddings": 16,
            "short_factor": [1.0, 1.1, 1.2, 1.3],
            "long_factor": [1.0, 2.0, 3.0, 4.0],
        },
    },
}

TWO_KINDS = {"layer_types": ["linear_attention", "full_attention"]}
MIXTURE = {**MODELS["latent attention"], "num_attention_heads": 8}
SIBLINGS: dict[str, dict[str, Any]] = {
    "dense linear attention": {**MODELS["dense linear attention"], **TWO_KINDS},
    "qwen3_5_moe_text": {
        **MODELS["linear attention"],
        **TWO_KINDS,
        "model_type": "qwen3_5_moe_text",
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "mlp_only_layers": [],
    },
    "dense latent attention": {**MODELS["dense latent attention"], "num_attention_heads": 8},
    "minicpm3": {
        **MODELS["dense latent attention"],
        "model_type": "minicpm3",
        "architectures": ["MiniCPM3ForCausalLM"],
        "num_attention_heads": 8,
    },
    "deepseek_v2": {
        **MIXTURE,
        "model_type": "deepseek_v2",
        "architectures": ["DeepseekV2ForCausalLM"],
        "topk_method": "group_limited_greedy",
    },
    "glm4_moe_lite": {
        **MIXTURE,
        "model_type": "glm4_moe_lite",
        "architectures": ["Glm4MoeLiteForCausalLM"],
        "head_dim": 4,
        "mlp_layer_types": ["dense", "sparse"],
    },
    "glm_moe_dsa": {
        **MODELS["sparse attention"],
        "model_type": "glm_moe_dsa",
        "architectures": ["GlmMoeDsaForCausalLM"],
        "num_attention_heads": 8,
    },
}
"""Families whose layers are like those of FAMILIES."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("generation")


def model_in(folder, name):
    """The folder of a model, which is written for the first test that takes it."""
    if not (folder / name).is_dir():
        write_model(folder / name, **{**FAMILIES, **SIBLINGS}[name])
    return folder / name


def job_of(folder, name, of="model", **settings):
    return job_of_model(folder, name, model_in(folder, of).name, **settings)


def greedily(job):
    how = SamplingParams(temperature=0, max_tokens=NEW)
    prompts = [
        Prompt(ids, how, needs_prompt_logprobs=True, prompt_top_k=3, top_k=2 + number)
        for number, ids in enumerate(PROMPTS)
    ]
    return written(built_of(job), prompts)


KEEPING = [name for name in FAMILIES if name != "by length"]


@pytest.mark.parametrize(
    "names", taking_turns([*(KEEPING[at::3] for at in range(3)), [*SIBLINGS]], 1)
)
def test_the_top_k_tokens_are_those_of_transformers(folder, names):
    jobs = {name: job_of(folder, f"greedy {name}", name) for name in names}
    [found] = on_ranks(1, each, greedily, jobs)
    for name in names:
        model = read_model(folder / name)
        assert len({token for one in found[name] for token in one["tokens"][0]}) > 8
        for number, (prompt, one) in enumerate(zip(PROMPTS, found[name], strict=True)):
            [tokens] = one["tokens"]
            assert one["ended"] == ["length"]
            assert_foretold(model, prompt, one, ATOL)
            foretold = log_probs_after(model, prompt)[:-1]
            own = foretold.gather(1, torch.tensor(prompt)[1:, None]).squeeze(1)
            assert math.isnan(one["read"][0])
            torch.testing.assert_close(torch.tensor(one["read"][1:]), own, atol=ATOL, rtol=0)
            best = foretold.topk(3)
            assert one["top_k_logprobs"] == [[-1] * 3, *best.indices.tolist()]
            theirs = torch.tensor(one["theirs"][1:]).reshape(-1, 3)
            torch.testing.assert_close(theirs, best.values, atol=ATOL, rtol=0)
            whole = log_probs_after(model, [*prompt, *tokens])
            best = whole[len(prompt) - 1 : -1].topk(2 + number)
            assert tokens == best.indices[:, 0].tolist(), name
            assert len(tokens) == NEW
            [(drawn, theirs)] = one["drawn among"]
            assert drawn == best.indices.tolist()
            torch.testing.assert_close(torch.tensor(theirs), best.values, atol=ATOL, rtol=0)


MANY = [
    Prompt(PROMPTS[0], SamplingParams(max_tokens=30, seed=1), num_completions=3),
    Prompt(
        PROMPTS[2],
        SamplingParams(max_tokens=7, seed=2, temperature=0.7),
        num_completions=2,
        needs_prompt_logprobs=True,
        top_k=3,
    ),
    Prompt(PROMPTS[1], SamplingParams(max_tokens=19, seed=3, top_k=40), num_completions=4, top_k=2),
    Prompt(
        PROMPTS[3], SamplingParams(max_tokens=1, seed=4), num_completions=2, prompt_top_k=2, top_k=1
    ),
    Prompt(
        PROMPTS[3],
        SamplingParams(max_tokens=12, seed=5, top_p=0.8),
        needs_prompt_logprobs=True,
        prompt_top_k=5,
    ),
    Prompt(PROMPTS[2], SamplingParams(max_tokens=26, seed=6, temperature=0)),
]
LITTLE_ROOM = {
    "all at once": {},
    "in turn": {"kv_cache_tokens": 1, "page_size": 4},
    "some at a time": {"kv_cache_tokens": 200, "page_size": 4},
    "prompts one by one": {"prefill_tokens": 1},
    "prompts in chunks": {"prefill_tokens": 13, "page_size": 16},
}


def in_little_room(job):
    """The same under every limit, and with nothing kept."""
    built = built_of(job)
    found = {name: written(built, MANY, **its) for name, its in LITTLE_ROOM.items()}
    for name, its in {"afresh": {}, "afresh, some at a time": {"prefill_tokens": 60}}.items():
        found[name] = written(built, MANY, max_cached_length=0, **its)
    # Some are kept, and some are not.
    found["by turns"] = written(built, MANY, max_cached_length=35)
    return found


CACHES = ["model", "sinks", "linear attention", "latent attention", "sparse attention"]
CACHES += ["dense mamba", "convolutions and experts", "experts without a gate"]
"""Models that do not keep the same, and of the same tokens."""


@pytest.mark.parametrize("name", taking_turns(CACHES, 1))
def test_what_is_kept_and_how_many_are_written_at_once_changes_nothing(folder, name):
    [found] = on_ranks(1, in_little_room, job_of(folder, f"room {name}", name))
    wanted = found.pop("afresh")
    assert len({tuple(tokens) for one in wanted for tokens in one["tokens"]}) == 13
    for case, its in found.items():
        assert_same(its, wanted, case)


def assert_same(found, wanted, case):
    """The same tokens, and log-probabilities but for rounding."""
    for one, other in zip(found, wanted, strict=True):
        for name in ("tokens", "ended", "top_k_logprobs"):
            assert one[name] == other[name], case
        for got, want in zip(one["log_probs"], other["log_probs"], strict=True):
            assert got == pytest.approx(want, abs=ATOL), case
        assert one["read"] == pytest.approx(other["read"], abs=ATOL, nan_ok=True), case
        for (drawn, got), (wanted_drawn, want) in zip(
            one["drawn among"], other["drawn among"], strict=True
        ):
            assert drawn == wanted_drawn, case
            torch.testing.assert_close(got and torch.tensor(got), want and torch.tensor(want))


ONE = MANY[4]


def many(job):
    """Also one alone, for which a second replica has nothing to do."""
    built = built_of(job)
    return [*written(built, MANY), *written(built, [ONE])]


LAYOUTS = {
    "tp": {"tensor_parallel_size": 2},
    "shards": {"data_parallel_mode": "fsdp2"},
    "ulysses": {"ulysses_parallel_size": 2},
}
"""Beside one process."""
OTHERS = {
    "tp, split": {"tensor_parallel_size": 2, "sequence_parallel": True},
    "replicas": {"data_parallel_mode": "ddp"},
    "stages": {"pipeline_parallel_size": 2},
    "stages, ZBV": {
        "pipeline_parallel_size": 2,
        "pipeline_parallel_schedule": "ZBVZeroBubble",
    },
    "a ring": {"ringattn_parallel_size": 2},
    "experts": {"expert_parallel_size": 2},
    "latent attention, tp": {"tensor_parallel_size": 2, "expert_parallel_size": 2},
    "latent attention, ulysses": {"ulysses_parallel_size": 2},
    "latent attention, stages": {"pipeline_parallel_size": 2},
    "sparse attention, tp": {"tensor_parallel_size": 2},
    "sparse attention, ulysses": {"ulysses_parallel_size": 2},
    "sparse attention, a ring": {"ringattn_parallel_size": 2},
    "linear attention, tp": {"tensor_parallel_size": 2},
    "linear attention, ulysses": {"ulysses_parallel_size": 2},
    "linear attention, a ring": {"ringattn_parallel_size": 2},
}


@one_day_in(3, of=2)
@pytest.mark.parametrize(
    "layouts",
    [
        pytest.param(LAYOUTS, id="shards, tp and ulysses"),
        pytest.param(OTHERS, id="others", marks=pytest.mark.exhaustive),
    ],
)
def test_every_rank_of_any_layout_draws_what_one_process_draws(folder, layouts):
    jobs = {
        name: job_of(
            folder, f"of {name}", _model_of(name), **{"data_parallel_mode": "fsdp2", **its}
        )
        for name, its in layouts.items()
    }
    alone = {name: job_of(folder, f"alone {name}", name) for name in map(_model_of, layouts)}
    [wanted] = on_ranks(1, each, many, alone)
    for found in on_ranks(2, each, many, jobs):
        for name, its in found.items():
            assert_same(its, wanted[_model_of(name)], name)


def _model_of(layout):
    kind, _, of_layout = layout.partition(", ")
    if of_layout and kind in FAMILIES:
        return kind
    return "experts" if layout == "experts" else "windows"


def asked_alone_and_together(job):
    built = built_of(job)
    together = written(built, MANY)
    alone = [written(built, [prompt])[0] for prompt in MANY]
    unseeded = Prompt(PROMPTS[0], SamplingParams(max_tokens=20), num_completions=2)
    return together, alone, [written(built, [unseeded, unseeded]) for _ in range(2)]


def test_an_answer_depends_on_its_seed_and_nothing_else_that_is_asked(folder):
    [(together, alone, unseeded)] = on_ranks(1, asked_alone_and_together, job_of(folder, "seeds"))
    assert_same(alone, together, "alone")
    answers = [tuple(tokens) for some in unseeded for one in some for tokens in one["tokens"]]
    assert len(set(answers)) == 8


def dropping(job):
    built = built_of(job)
    [model] = built.engine.model.parts
    found = written(built, MANY[:2])
    return found, all(part.training for part in model.modules())


ADAPTED = {
    "llama": ["q_proj", "v_proj", "lm_head"],
    "latent attention": ["q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"],
}


def write_adapter(folder, name):
    """On the attention and the head, of weights that matter."""
    torch.manual_seed(0)
    config = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=ADAPTED[name], init_lora_weights=False
    )
    adapted = peft.get_peft_model(read_model(model_in(folder, name)), config)
    adapted.save_pretrained(folder / f"adapter of {name}", save_embedding_layers=False)
    return folder / f"adapter of {name}"


@pytest.mark.parametrize(
    "name", ["llama", pytest.param("latent attention", marks=pytest.mark.exhaustive)]
)
def test_adapters_write_too_and_drop_nothing_while_they_do(folder, name):
    adapter = write_adapter(folder, name)
    lora = {
        "enable_lora": True,
        "lora_rank": 4,
        "lora_alpha": 8,
        "lora_dropout": 0.5,
        "lora_target_modules": ADAPTED[name],
    }
    job = job_of(folder, f"adapted {name}", name, lora=lora, adapter=adapter)
    [(found, trains)] = on_ranks(1, dropping, job)
    model = peft.PeftModel.from_pretrained(read_model(folder / name), adapter).eval()
    for prompt, one in zip(MANY[:2], found, strict=True):
        assert_foretold(model, prompt.tokens, one, ATOL)
    assert trains


def test_positions_that_go_by_length_are_turned_as_in_one_pass_over_what_there_is(folder):
    job = job_of(folder, "greedy by length", "by length")
    how = SamplingParams(max_tokens=None, seed=1)
    # The first two grow beyond what short documents are turned by; the last does not.
    prompts = [
        Prompt(list(range(10)), how, num_completions=2),
        Prompt([7], replace(how, max_tokens=9)),
    ]
    [found] = on_ranks(1, written_by, job, prompts)
    model = read_model(folder / "by length")
    assert [len(tokens) for one in found for tokens in one["tokens"]] == [22, 22, 9]
    for prompt, one in zip(prompts, found, strict=True):
        for tokens, log_probs in zip(one["tokens"], one["log_probs"], strict=True):
            wanted = [
                float(log_probs_after(model, [*prompt.tokens, *tokens[:place]])[-1, token])
                for place, token in enumerate(tokens)
            ]
            assert log_probs == pytest.approx(wanted, abs=ATOL)


def written_by(job, prompts):
    return written(built_of(job), prompts)


def kept_up_to(job):
    return built_of(job).generator.max_cached_length


def test_keys_are_kept_unless_a_document_grows_out_of_what_turned_them(folder):
    jobs = {name: job_of(folder, f"keeps {name}", name) for name in ("model", "dynamic")}
    jobs["by length"] = job_of(folder, "keeps by length", "by length")
    [found] = on_ranks(1, each, kept_up_to, jobs)
    limit = runs.TINY["max_position_embeddings"]
    assert found == {"model": math.inf, "dynamic": limit, "by length": 16}


@pytest.mark.exhaustive
def test_compiled_layers_and_mixed_precision_write_what_plain_ones_do(folder):
    jobs = {
        name: job_of(folder, name, enable_mixed_precision=True, enable_compile=name == "compiled")
        for name in ("plain", "compiled")
    }
    [found] = on_ranks(1, each, many, jobs)
    assert_same(found["compiled"], found["plain"], "compiled")
    model = read_model(folder / "model")
    for prompt, one in zip([*MANY, ONE], found["plain"], strict=True):
        assert_foretold(model, prompt.tokens, one, MIXED_ATOL)
