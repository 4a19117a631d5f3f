"""What a model's tensors do not allow, told before any work."""

from pathlib import Path
from typing import Any

import pytest

from penstock.config.schema.export import ExportConfig
from penstock.core.errors import CapabilityError, ConfigError
from penstock.estimate.machine import check_model
from tests.engine import runs
from tests.engine.inputs import MODELS, SHAPE


def check(folder: Path, model: dict[str, Any] | None = None, **sections: Any) -> None:
    runs.write_config(folder / "model", **{**runs.TINY, **(model or {})})
    export = ExportConfig(**sections.pop("export", {}))
    run = runs.run_config(folder / "out", folder / "model", **sections)
    check_model(run.model_copy(update={"export": export}))


def test_layers_that_the_format_of_an_export_does_not_have_are_refused(tmp_path: Path) -> None:
    check(tmp_path, export={"quantise": "fp8"})
    with pytest.raises(CapabilityError, match=r"export\.quantise: .* needs multiples of 128 x 128"):
        check(tmp_path, export={"quantise": "block_fp8"})


@pytest.mark.parametrize(
    ("model", "lora", "says"),
    [
        ({}, {"lora_bias": "all"}, "lora_bias is all, and none of these layers has a bias"),
        ({}, {"moe_shared_lora": True}, "moe_shared_lora is true, .* the model has none"),
        (
            MODELS["experts"],
            {"moe_hybrid_shared_lora": True, "lora_target_modules": ["q_proj"]},
            "moe_hybrid_shared_lora is true, .* lora_target_modules names none",
        ),
        (MODELS["experts"], {"use_dora": True}, "use_dora is true, .* names experts"),
        (
            MODELS["sinks"],
            {"lora_bias": "all", "lora_target_modules": ["q_proj"]},
            "Write lora_bias: lora_only",
        ),
        (
            {"attention_bias": True},
            {"lora_bias": "lora_only", "lora_target_modules": ["q_proj"]},
            "names only some of the layers that .*qkv_proj is",
        ),
    ],
    ids=str,
)
def test_options_that_adapters_of_these_layers_do_not_have_are_refused(tmp_path, model, lora, says):
    check(tmp_path, model, lora={"enable_lora": True})
    with pytest.raises((CapabilityError, ConfigError), match=f"(?s){says}"):
        check(tmp_path, model, lora={"enable_lora": True, **lora})


def test_ranks_that_would_cut_groups_of_a_scale_in_dense_layers_among_experts_are_refused(tmp_path):
    qlora: dict[str, Any] = {"lora": {"enable_lora": True, "enable_qlora": True}}
    model = {**SHAPE, **MODELS["cohere2_moe"]}
    check(tmp_path, model, **qlora)
    with pytest.raises(CapabilityError, match=r"(?s)cuts the 40 columns of .*\.down_proj within"):
        check(tmp_path, model, tensor_parallel_size=2, **qlora)


@pytest.mark.parametrize(
    ("targets", "split"), [(["q_proj"], [0, 4]), (["layers.[01].*.q_proj"], [0, 2])], ids=str
)
def test_a_rank_without_an_adapter_is_refused(tmp_path, targets, split):
    model = {"num_hidden_layers": 4, "tie_word_embeddings": False}
    layout = {"pipeline_parallel_size": 2, "pipeline_parallel_split": split}
    lora = {"enable_lora": True, "lora_target_modules": targets}
    with pytest.raises(ConfigError, match=r"(?s)names no layer of rank 1 .* nothing would be tr"):
        check(tmp_path, model, lora=lora, **layout)
    check(tmp_path, model, lora={**lora, "lora_target_modules": [*targets, "lm_head"]}, **layout)
