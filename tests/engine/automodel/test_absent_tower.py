"""Models whose vision tower transformers takes from timm: trained on text, without that library."""

from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from penstock.core.errors import CapabilityError
from penstock.core.files import write_json
from penstock.engine.vision.image_text import check_image_text
from penstock.models.automodel.build import build_model
from penstock.models.automodel.family import auto_family
from penstock.models.automodel.outline import AutoModelConfig
from penstock.models.automodel.tiny_config import shrink
from tests.cli.command import penstock, small_run
from tests.engine import runs
from tests.turns import one_day_in

pytestmark = pytest.mark.usefixtures("warm_ranks")

TOWER = "model.vision_tower.timm_model.conv_stem.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A tiny Gemma 3n, with one tensor of the tower that it has in files."""
    folder = tmp_path_factory.mktemp("gemma3n")
    gemma3n = transformers.CONFIG_MAPPING["gemma3n"]
    config = gemma3n.from_dict(shrink(gemma3n().to_dict()))
    torch.manual_seed(0)
    state = build_model(config, "eager").state_dict()
    # Of embeddings that are 0, the sparsity of activations has no gradient.
    tensors = {name: tensor + 0.01 * torch.randn(tensor.shape) for name, tensor in state.items()}
    tensors.pop("lm_head.weight")
    tensors[TOWER] = torch.randn(4, 3, 3, 3).bfloat16()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    write_json(
        folder / "config.json", config.to_dict() | {"architectures": [type(config).__name__]}
    )
    return folder


@one_day_in(3, of=1)
def test_text_trains_the_language_model_and_exports_have_the_tower_of_the_base_model(
    folder, tmp_path
):
    run = small_run(
        tmp_path,
        model={"model_path": str(folder), "config_path": None, "tokenizer_path": "builtin:bytes"},
        train={"max_steps": 1, "optimizer": "adamw", "lr": 1e-2},
    )
    said = penstock("run", run)
    assert not said.code, said.err
    exported = {}
    for file in (tmp_path / "out" / "hf").glob("*.safetensors"):
        exported |= load_file(file)
    base = load_file(folder / "model.safetensors")
    assert exported.keys() == base.keys()
    assert torch.equal(exported[TOWER], base[TOWER])
    changed = {name for name in base if not torch.equal(exported[name], base[name])}
    assert {name for name in changed if "q_proj" in name}
    assert all(name.startswith("model.language_model.") for name in changed)
    assert "unused" not in said.err
    assert "not verified" not in said.err


def test_images_and_random_weights_are_refused(folder, tmp_path):
    values = transformers.AutoConfig.from_pretrained(folder).to_dict()
    config = auto_family(values).read(values)
    assert isinstance(config, AutoModelConfig)
    run = runs.run_config(tmp_path / "refused", tmp_path)
    with pytest.raises(CapabilityError, match="trained on text alone: its vision tower is a model"):
        check_image_text(run, values, config, images=True)
    said = penstock("check", small_run(tmp_path, model={"config_path": str(folder)}))
    assert said.code == 2
    assert "the language model alone of a gemma3n is initialized here" in said.err
