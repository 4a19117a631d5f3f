"""Models whose code is beside their config.json: it is run where the user said so, only."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

from penstock.core.errors import CapabilityError, ConfigError
from penstock.core.sources.pin import pin_config, pin_model, pin_tokenizer
from penstock.engine.hf.export import write_folders
from penstock.engine.model_source import ExportFormat, ModelSource
from penstock.estimate.machine import check_model
from penstock.models.automodel.remote_code import CODE
from penstock.pipeline.origins import resolve_model_source
from penstock.rows.reader import PackedRows
from penstock.train.launch.job import CHECKPOINTS
from tests.engine import runs
from tests.engine.automodel import examine
from tests.engine.traces import loss_of_transformers
from tests.ranks import on_ranks

CONFIG = """
from transformers import LlamaConfig

class OwnConfig(LlamaConfig):
    model_type = "own"

    def __init__(self, gain=1.0, **others):
        super().__init__(**others)
        self.gain = gain
"""

MODEL = """
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaModel
from .configuration_own import OwnConfig

(__import__("pathlib").Path(__file__).parent / "ran").write_text("yes")

class OwnModel(LlamaModel):
    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        out.last_hidden_state = out.last_hidden_state * self.config.gain
        return out

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.model = OwnModel(config)
        self.post_init()
"""

VALUES = {
    "model_type": "own",
    "architectures": ["OwnForCausalLM"],
    "auto_map": {
        "AutoConfig": "configuration_own.OwnConfig",
        "AutoModelForCausalLM": "modeling_own.OwnForCausalLM",
    },
    "vocab_size": runs.VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "gain": 0.5,
}


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "configuration_own.py").write_text(CONFIG)
    (folder / "modeling_own.py").write_text(MODEL)
    (folder / "config.json").write_text(json.dumps(VALUES))
    return folder


def _run(folder: Path, **model):
    tokenizer = {"tokenizer_path": "builtin:bytes"}
    return runs.run_config(folder.parent / "out", folder, model={**tokenizer, **model})


def test_code_is_not_run_unasked(folder):
    values = json.loads((folder / "config.json").read_text())
    sneaky = {**values, CODE: {"folder": str(folder), "digest": ""}}
    (folder / "config.json").write_text(json.dumps(sneaky))
    with pytest.raises(CapabilityError, match=r"model\.trust_remote_code: true"):
        check_model(_run(folder))
    with pytest.raises(ConfigError, match="code_revision"):
        _run(folder, code_revision="0" * 40)
    assert not (folder / "ran").exists()


def test_code_is_asked_for_where_there_is_some_and_of_a_commit(folder):
    check_model(_run(folder, trust_remote_code=True))
    with pytest.raises(ConfigError, match="40 digits of the commit"):
        pin_config("org/name", with_code=True, revision="main")
    assert pin_config("org/name", with_code=True, revision="a" * 40).pin["commit"] == "a" * 40
    with pytest.raises(ConfigError, match=r"which have no model\.code_revision"):
        pin_config(str(folder), with_code=True, revision="a" * 40)
    plain = runs.write_config(folder.parent / "plain")
    with pytest.raises(ConfigError, match="names no code of its own"):
        check_model(_run(plain, trust_remote_code=True))
    (plain / "config.json").write_text(json.dumps({**runs.TINY, "auto_map": VALUES["auto_map"]}))
    with pytest.raises(ConfigError, match="computed by Penstock's own code"):
        check_model(_run(plain, trust_remote_code=True))


def test_the_content_of_code_is_in_the_keys_of_what_it_computes(folder):
    run = _run(folder, trust_remote_code=True)
    before = resolve_model_source(run).config.key
    with (folder / "modeling_own.py").open("a") as file:
        file.write("# changed\n")
    assert resolve_model_source(run).config.key != before
    plain = resolve_model_source(_run(folder)).config.key
    with (folder / "modeling_own.py").open("a") as file:
        file.write("# changed again\n")
    assert resolve_model_source(_run(folder)).config.key == plain


def _job(folder: Path):
    model = {"model_path": str(folder), "trust_remote_code": True}
    return examine.job_of(folder, "own", model=model)


def _trained(folder: Path):
    return examine.trained(_job(folder))


def _class_of(folder: Path):
    """The model's class, by Python's own import."""
    found = {}
    for name in ("configuration_own", "modeling_own"):
        spec = importlib.util.spec_from_file_location(f"own_code.{name}", folder / f"{name}.py")
        assert spec
        assert spec.loader
        sys.modules[spec.name] = found[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(found[name])
    return found["modeling_own"].OwnForCausalLM, found["configuration_own"].OwnConfig


@pytest.mark.slow
def test_a_model_with_its_own_code_trains_and_is_exported_with_it(tmp_path, folder):
    examine.write_rows(tmp_path)
    own_class, own_config = _class_of(folder)
    torch.manual_seed(0)
    model = own_class(own_config.from_pretrained(folder))
    model.save_pretrained(tmp_path / "saved")
    (tmp_path / "saved" / "model.safetensors").rename(folder / "model.safetensors")
    losses, weights, resumes = next(one for one in on_ranks(2, _trained, folder) if one)
    rows = PackedRows(tmp_path / "packed" / "data" / "train")
    with torch.no_grad():
        expected = loss_of_transformers(model.eval(), rows, [0, 1, 2, 3]).item()
    assert losses[0] == pytest.approx(expected, rel=1e-5)
    assert losses[-1] < losses[0]
    assert resumes
    path = str(folder)
    origin = ModelSource(
        config=pin_config(path, with_code=True),
        config_path=path,
        weights=pin_model(path),
        model_path=path,
        tokenizer=pin_tokenizer("builtin:bytes"),
        tokenizer_path="builtin:bytes",
        runs_code=True,
    )
    checkpoint = _job(folder).output_dir / CHECKPOINTS / f"global_step_{examine.STEPS}"
    write_folders(checkpoint, origin, ExportFormat(), tmp_path / "export")
    exported = tmp_path / "export" / "hf"
    assert (exported / "modeling_own.py").read_bytes() == (folder / "modeling_own.py").read_bytes()
    written = json.loads((exported / "config.json").read_text())
    assert written["auto_map"] == VALUES["auto_map"]
    assert CODE not in written
    again = _class_of(exported)[0].from_pretrained(exported, dtype=torch.float32)
    for name, parameter in again.named_parameters():
        assert torch.equal(parameter, torch.tensor(weights[name])), name
