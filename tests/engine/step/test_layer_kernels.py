"""What layers are computed with and in what precision: as the `model` section says."""

from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.overrides import TorchFunctionMode

from penstock.core.errors import CapabilityError
from penstock.engine.hf.config import read_hf_config
from penstock.engine.validate_model import (
    require_fused_projections,
    require_prompts_apart,
    require_whole_documents,
)
from penstock.estimate.machine import check_model
from penstock.models.layers.attention import SelfAttention
from penstock.models.layers.block import Block
from penstock.pipeline.plan import check_machine
from penstock_kernels.op import Op
from tests.engine import runs
from tests.engine.loops import decoder_of, each, loop_of, step
from tests.models.twins import SIZES, hf_model
from tests.ranks import on_ranks

OPERATIONS = {
    "rmsnorm_native": {"rms_norm", "add_rms_norm"},
    "activation_native": {"swiglu"},
    "rope_native": {"rope"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kernels")
    runs.write_rows(folder / "packed", 2)
    for family in ("qwen3", "qwen3_moe"):
        hf_model(family, tied=False, vocab_size=runs.VOCAB).save_pretrained(folder / family)
    return folder


def job(folder, out, family="qwen3", model=None, **train):
    settings = {"data_parallel_mode": "none", "max_steps": 1, **train}
    model = {"model_path": str(folder / family), **(model or {})}
    run = runs.run_config(folder / out, folder / family, model=model, **settings)
    return runs.job_of(run, folder / "packed")


class OfLogits(TorchFunctionMode):
    """In what the products that make logits are computed."""

    def __init__(self):
        super().__init__()
        self.dtypes = set()

    def __torch_function__(self, function, types, arguments=(), options=None):
        options = options or {}
        if function is torch.mm and options["out"].shape[-1] == runs.VOCAB:
            self.dtypes.add(str(options["out"].dtype))
        return function(*arguments, **options)


def seeing(attend, seen, q_TNH, *rest):
    """Whether what attention gives is made of numbers that bf16 has, though it may be in fp32."""
    y_TNH = attend(q_TNH, *rest)
    seen.add("bf16" if torch.equal(y_TNH, y_TNH.bfloat16().to(y_TNH.dtype)) else "fp32")
    assert y_TNH.dtype == q_TNH.dtype
    return y_TNH


def watched(job):
    """Of which operations the best implementation was asked for in a step, what attention and
    logits were computed in."""
    loop, asked, call = loop_of(job), set(), Op.__call__
    seen = set()
    for layer in decoder_of(loop).model.layers.values():
        assert isinstance(layer, Block)
        assert isinstance(layer.token_mixer, SelfAttention)
        layer.token_mixer.attend = partial(seeing, layer.token_mixer.attend, seen)

    def counted(op, *arguments, **options):
        asked.add(op.name)
        return call(op, *arguments, **options)

    with patch.object(Op, "__call__", counted), OfLogits() as logits:
        step(loop)
    return asked, seen, logits.dtypes


@pytest.mark.dist
@pytest.mark.slow
def test_layers_are_computed_with_what_is_written_and_in_what_is_written(folder):
    mixed: dict[str, Any] = {"enable_mixed_precision": True}
    jobs = {
        "unset": job(folder, "unset"),
        "experts": job(folder, "experts", "qwen3_moe", {"activation_native": True}),
        "cast": job(folder, "cast", model={"attention_cast_bf16": True}),
        "mixed": job(folder, "mixed", **mixed),
        "exact": job(folder, "exact", model={"lm_head_fp32": True}, **mixed),
        "sharded": job(
            folder,
            "sharded",
            model={"lm_head_fp32": True},
            **mixed,
            data_parallel_mode="fsdp2",
        ),
    }
    for name in OPERATIONS:
        jobs[name] = job(folder, name, model={name: True})
    [found] = on_ranks(1, each, watched, jobs)
    everything = set().union(*OPERATIONS.values())
    assert found["unset"][0] & everything == everything
    for name, operations in OPERATIONS.items():
        assert found[name][0] & everything == everything - operations
    assert found["experts"][0] & everything == everything - {"swiglu"}
    attention = {name: dtypes for name, (_, dtypes, _) in found.items()}
    assert attention["unset"] == {"fp32"}
    assert attention["cast"] == attention["mixed"] == {"bf16"}
    logits = {name: dtypes for name, (_, _, dtypes) in found.items()}
    assert logits["mixed"] == {"torch.bfloat16"}
    assert logits["unset"] == logits["exact"] == logits["sharded"] == {"torch.float32"}


@pytest.mark.parametrize("name", ["ringattn_parallel_size", "ulysses_parallel_size"])
def test_documents_that_turn_by_their_length_are_not_shared_out(folder, name):
    shared: dict[str, Any] = {name: 2}
    run = job(folder, "shared out", **shared).config
    alone = job(folder, "alone").config
    require_whole_documents(run.train, read_hf_config(str(folder / "qwen3"), {}))
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    by_length = read_hf_config(str(folder / "qwen3"), {"rope_parameters": rope})
    require_whole_documents(alone.train, by_length)
    with pytest.raises(CapabilityError, match=f"train.{name} share.*kind 'dynamic'"):
        require_whole_documents(run.train, by_length)
    changed = {"model": run.model.model_copy(update={"foundation": {"rope_parameters": rope}})}
    with pytest.raises(CapabilityError, match=f"train.{name} share"):
        check_machine(run.model_copy(update=changed))


def test_projections_that_a_checkpoint_has_as_one_layer_are_not_split(folder):
    split = job(folder, "split", model={"merge_qkv": False}).config
    phi3 = {**runs.TINY, "model_type": "phi3"}
    require_fused_projections(split, runs.TINY)
    require_fused_projections(job(folder, "merged").config, phi3)
    fused = runs.write_config(folder / "fused", model_type="phi3")
    planned = {"config_path": str(fused), "model_path": None}
    planned = split.model_copy(update={"model": split.model.model_copy(update=planned)})
    for refuse in (lambda: require_fused_projections(split, phi3), lambda: check_model(planned)):
        with pytest.raises(CapabilityError, match=r"merge_qkv is false, and q, k and v of a phi3"):
            refuse()


def test_prompts_are_not_shared_where_documents_turn_by_their_length(folder):
    run = job(folder, "pairs").config
    pairs = run.data.datasets[0].model_copy(update={"type": "preference"})
    data = run.data.model_copy(update={"datasets": [pairs]})
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    by_length = read_hf_config(str(folder / "qwen3"), {"rope_parameters": rope})
    require_prompts_apart(data, read_hf_config(str(folder / "qwen3"), {}))
    require_prompts_apart(run.data, by_length)
    require_prompts_apart(data.model_copy(update={"share_prompts": False}), by_length)
    with pytest.raises(CapabilityError, match=r"kind 'dynamic'(.|\n)*data.share_prompts: false"):
        require_prompts_apart(data, by_length)
    chunks = {"model_type": "llama4_text", **SIZES, "intermediate_size_mlp": 80}
    with pytest.raises(CapabilityError, match=r"chunks of 8192 tokens(.|\n)*share_prompts: false"):
        require_prompts_apart(data, chunks)
    changed = {
        "model": run.model.model_copy(update={"foundation": {"rope_parameters": rope}}),
        "data": data,
    }
    with pytest.raises(CapabilityError, match=r"data\.share_prompts lays both answers"):
        check_machine(run.model_copy(update=changed))
