"""`model.encoders`: the model that a run is planned with, and what it is keyed by."""

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from penstock.compose.stage import Compose
from penstock.config.loading.load import loads
from penstock.core.cache.in_use import pin_artifacts
from penstock.core.cache.record import write_record
from penstock.core.cache.stage import ATTEMPT, stage_key
from penstock.core.errors import CapabilityError
from penstock.core.files import PART, read_json, remove, write_json
from penstock.export.base_model import read_base_model
from penstock.export.card import describe_base, front_matter
from penstock.models.initialize import initialize
from penstock.models.registry import get_family
from penstock.pipeline.composing import compose_step, with_composed_model
from penstock.pipeline.origins import resolve_model_source
from penstock.pipeline.plan import plan
from tests.cli.command import penstock as said
from tests.pipeline.runs import penstock, statuses, write_run
from tests.stages.compose.test_llava import loaded_model, write_encoder, write_text

TINY: dict[str, Any] = {"image": {"config_path": "builtin:tiny-clip"}}
SCRATCH: dict[str, Any] = {
    "config_path": "builtin:tiny-llama",
    "foundation": {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 48},
    "encoders": TINY,
}


def asked(folder, model=None, **sections):
    """A run on pictures whose model is `model`, with its results in `folder`."""
    return loads(
        {
            "model": model or SCRATCH,
            "data": {
                "datasets": [{"path": "builtin:shapes", "type": "chat"}],
                "dataset_prepared_path": str(folder / "prepared"),
            },
            "train": {"output_dir": str(folder / "out"), "data_parallel_mode": "none"},
            "pipeline": {"artifacts_path": str(folder / "artifacts")},
            **sections,
        }
    )


def files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


def test_a_run_with_encoders_is_the_run_of_the_composed_model(tmp_path, monkeypatch):
    run = asked(tmp_path)
    made = with_composed_model(run).model
    again = asked(tmp_path, {"model_path": made.model_path})
    keys = [stage_key(step.stage) for step in plan(again).steps]
    monkeypatch.setattr(Compose, "run", None)  # it is not made again
    assert [stage_key(step.stage) for step in plan(run).steps] == keys
    assert made.foundation == made.encoders == {}
    folder = Path(str(made.model_path))
    assert folder.is_relative_to(tmp_path / "artifacts" / "compose")
    whole: Any = loaded_model(folder)
    config = {**read_json(folder / "config.json")["text_config"], "vocab_size": 320}
    assert (config["model_type"], config["num_hidden_layers"]) == ("llama", 1)
    state = whole.state_dict()
    for name in ("embed_tokens.weight", "layers.0.mlp.down_proj.weight"):
        there = state[f"model.language_model.{name}"]
        family = get_family(config, "native")
        drawn = initialize(f"model.{name}", there.shape, run.train.seed, family.read(config))
        assert torch.equal(there, drawn), name
    assert whole.config.vision_feature_layer == -1
    transformers.AutoProcessor.from_pretrained(folder)


def test_what_decides_the_composed_model_is_in_its_key(tmp_path):
    text = tmp_path / "text"
    write_text(text)
    encoder = write_encoder(tmp_path / "encoder", "siglip_vision_model")
    here = {"model_path": str(text), "encoders": {"image": {"model_path": str(encoder)}}}

    def key(model: dict[str, Any] | None = None, **train: Any) -> str:
        found = {"output_dir": "out", "data_parallel_mode": "none", **train}
        return stage_key(compose_step(asked(tmp_path, model or here, train=found)).stage)

    def image(**values: Any) -> dict[str, Any]:
        return {**here, "encoders": {"image": {"model_path": str(encoder), **values}}}

    first = key()
    other = tmp_path / "other"
    other.mkdir()
    for file in ("config.json", "preprocessor_config.json"):
        write_json(other / file, read_json(encoder / file))
    assert key(image(config_path=str(other))) == first, "it is the content that counts"
    assert key(lr=0.5, num_train_epochs=9) == first
    changed = {
        key(seed=1),
        key(image(projector="linear")),
        key(image(projector="pixel_shuffle")),
        key(image(projector="pixel_shuffle", scale_factor=4)),
        key({**here, "foundation": {"rms_norm_eps": 1e-5}}),
        key({**here, "encoders": {"image": {"config_path": str(encoder)}}}),
        key({**here, "tokenizer_path": "builtin:bytes"}),
    }
    write_json(other / "config.json", {**read_json(encoder / "config.json"), "more": 1})
    changed.add(key(image(config_path=str(other))))
    with (encoder / "model.safetensors").open("ab") as stream:
        stream.write(b" ")
    changed.add(key())
    assert len(changed | {first}) == 10


def test_parts_that_do_not_fit_are_refused_before_anything_is_written(tmp_path):
    encoders = {"image": {"config_path": "builtin:tiny-clip"}}
    model = {"config_path": "builtin:tiny-gpt-oss", "tokenizer_path": "builtin:bytes"}
    run = asked(tmp_path, {**model, "encoders": encoders, "foundation": {"model_type": "llava"}})
    with pytest.raises(CapabilityError, match="which has a vision part of its own"):
        with_composed_model(run)
    assert not (tmp_path / "artifacts").exists()


def test_a_composed_model_is_pruned_once_no_result_was_made_from_it(tmp_path):
    runs = [
        asked(tmp_path, {**SCRATCH, "foundation": {**SCRATCH["foundation"], "rms_norm_eps": eps}})
        for eps in (1e-4, 1e-5)
    ]
    planned = [plan(run) for run in runs]
    folders = [one.composed.path for one in planned if one.composed]
    trained = tmp_path / "trained"
    for name, one in (("made", planned[0].step("train")), ("begun", planned[0].step("export"))):
        inputs = {name: source.key for name, source in one.stage.inputs.items()}
        record = {"stage": one.stage.name, "key": name, "inputs": inputs}
        write_record(trained / one.stage.name / name / ATTEMPT, record)
    prune = ("artifacts", "prune", "--keep-last", "0", "--unreferenced", "--json", "--root")

    def pruned() -> list[str]:
        return said(*prune, tmp_path).last["pruned"]

    with pin_artifacts(planned[1].used):
        assert pruned() == []
    assert pruned() == [str(folders[1])]
    remove(trained / "train")
    assert pruned() == []
    remove(trained)
    assert pruned() == [str(folders[0])]
    assert [folder.exists() for folder in folders] == [False, False]


def test_the_card_of_a_composed_model_names_its_parts_as_they_were_written(tmp_path):
    text = tmp_path / "a" / "text"
    write_text(text)
    model = {"model_path": str(text), "encoders": TINY}
    base = read_base_model(resolve_model_source(with_composed_model(asked(tmp_path, model))))
    assert base is not None
    assert base.name == "text with builtin:tiny-clip"
    assert describe_base(base) == "`text` with `builtin:tiny-clip` (random weights)"
    assert "base_model" not in front_matter(base, "finetune").to_dict()
    hub = [replace(part, repo=f"org/{n}", drawn=False) for n, part in enumerate(base.parts)]
    data = front_matter(replace(base, parts=tuple(hub)), "finetune").to_dict()
    assert data["base_model"] == ["org/0", "org/1"]


COMPOSE = """
import sys
from pathlib import Path
from penstock.pipeline.composing import with_composed_model
from penstock.config.loading.load import load
if len(sys.argv) > 2:
    import os, signal, penstock.compose.build as build
    real = build.save_tensors
    def save(tensors, target):
        real(tensors, target)
        if target.name.endswith(f"{sys.argv[2]}.safetensors"):
            os.kill(os.getpid(), signal.SIGKILL)
    build.save_tensors = save
print(with_composed_model(load(Path(sys.argv[1]))).model.model_path)
"""


def start(config: Path, *words: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", COMPOSE, str(config), *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=dict(os.environ))


@pytest.mark.exhaustive
def test_two_runs_at_once_and_killed_ones_leave_the_same_whole_model(tmp_path):
    config = write_run(tmp_path / "here", model=SCRATCH)
    alone = start(config)
    whole = Path(alone.communicate()[0].strip())
    assert alone.returncode == 0
    config = write_run(tmp_path / "there", model=SCRATCH)
    for file in (0, 2):
        killed = start(config, str(file))
        killed.communicate()
        assert killed.returncode == -signal.SIGKILL
        [folder] = (tmp_path / "there/artifacts/compose").glob("[0-9a-f]*")
        assert not (folder / "manifest.json").exists()
        assert not (folder / "hf").exists()
    both = [start(config), start(config)]
    places = {Path(one.communicate()[0].strip()) for one in both}
    assert [one.returncode for one in both] == [0, 0]
    [place] = places
    assert place.parent.name == whole.parent.name
    assert files(place) == files(whole)
    assert not list(place.parent.glob(f"*{PART}"))


@pytest.mark.dist
@pytest.mark.exhaustive
def test_two_phases_train_the_projector_and_then_the_language_model(tmp_path):
    data = {
        "datasets": [{"path": "builtin:shapes", "type": "chat", "max_samples": 24}],
        "sample_packing_sequence_len": 256,
        "val_set_size": 0,
    }
    train = {"global_batch_size": 4, "num_train_epochs": 1}
    model: dict[str, Any] = {**SCRATCH, "freeze": ["vision", "language"]}
    config = write_run(tmp_path, model=model, data=data, train=train)
    penstock("run", config)
    [whole] = (tmp_path / "artifacts/compose").glob("[0-9a-f]*/hf")
    [first] = (tmp_path / "artifacts/export").glob("*/hf")
    assert "`builtin:tiny-llama` (random weights) with `builtin:tiny-clip`" in (
        first / "README.md"
    ).read_text(encoding="utf-8")
    base = {"config_path": None, "foundation": {}}
    model = {**base, "model_path": str(first), "freeze": ["vision"]}
    second = {**train, "output_dir": str(tmp_path / "second")}
    config = write_run(tmp_path, model=model, data=data, train=second)
    done = penstock("run", config, "--json")
    assert statuses(done)["prepare"] == statuses(done)["pack"] == "cached"
    [last] = {*(tmp_path / "artifacts/export").glob("*/hf")} - {first}
    states = [loaded_model(folder).state_dict() for folder in (whole, first, last)]
    for name in states[0]:
        was, then, now = (state[name] for state in states)
        assert torch.equal(was, then) is ("projector" not in name), name
        assert torch.equal(then, now) is ("vision_tower" in name), name
