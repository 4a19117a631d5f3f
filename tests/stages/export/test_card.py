"""Model cards, read back by huggingface_hub's own reader, their snippets run as they stand."""

import json
import platform
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import yaml
from huggingface_hub import ModelCard, constants
from safetensors.torch import load_file
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM

from penstock.config.loading.load import load
from penstock.core.cache.data_facts import DATA
from penstock.core.cache.manifest import MANIFEST
from penstock.core.cache.stage import Artifact, identity, stage_key
from penstock.core.cache.store import PlannedStage, get_or_build
from penstock.core.sources.pin import pin_model
from penstock.export.base_model import read_model_folder
from penstock.export.license import copy_license_files, detect_license
from penstock.export.lineage import Lineage
from penstock.export.stage import Export
from penstock.pipeline.plan import Plan, RebuildOptions, execute_stage, plan
from penstock.push.contents import list_contents
from penstock.rows.prepared import PLAN
from penstock.rows.tokenizer import byte_tokenizer
from tests.pipeline.runs import write_chats, write_run
from tests.ranks import on_ranks

pytestmark = [
    pytest.mark.dist,
    # peft asks transformers for a name that transformers has since changed.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
]

BASE, DATASET, COMMIT = "someone/tiny", "someone/sums", "5" * 40
APACHE = "\n" * 3 + " " * 30 + "Apache License\n" + " " * 27 + "Version 2.0, January 2004\n"
TOKEN = "s3cret" * 6
HOSTILE = "<b>x|y `z`"
"""What a folder of data may be called."""


def in_cache(cache: Path, name: str) -> Path:
    """The folder of COMMIT, as the hub's client keeps it."""
    place = cache / name
    (place / "refs").mkdir(parents=True)
    (place / "refs/main").write_text(COMMIT)
    snapshot = place / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    return snapshot


def with_cache(cache: Path) -> pytest.MonkeyPatch:
    patch = pytest.MonkeyPatch()
    patch.setattr(constants, "HF_HUB_CACHE", str(cache))
    return patch


def train(config: Path, cache: Path) -> None:
    """Prepare, pack and train on this rank alone."""
    patch = with_cache(cache)
    planned = plan(load(config), ("train",), ranks="this_process")
    for step in planned.steps:
        execute_stage(step, planned.run, RebuildOptions(), lambda _: None)
    patch.undo()


class Made(NamedTuple):
    """A finished run of adapters, exported."""

    plan: Plan
    hf: Path
    adapter: Path

    def artifact(self, stage: str) -> Artifact:
        return self.plan.step(stage).artifact

    @property
    def export(self) -> Export:
        stage = self.plan.step("export").stage
        assert isinstance(stage, Export)
        return stage


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run on a base model of the hub and a folder of somebody's, with a token in the config."""
    folder = tmp_path_factory.mktemp("card")
    base = in_cache(folder / "cache", "models--someone--tiny")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
    )
    Qwen3ForCausalLM(config).save_pretrained(base)
    byte_tokenizer().save_pretrained(base)
    front = {"license": "other", "license_name": "tiny-licence", "license_link": "LICENSE.txt"}
    (base / "README.md").write_text(f"---\n{yaml.safe_dump(front)}---\n# Tiny\n")
    (base / "LICENSE.txt").write_text("Do what you like.\n")
    chats = folder / HOSTILE
    chats.mkdir()
    write_chats(chats / "chats.jsonl")
    with (chats / "chats.jsonl").open("a") as stream:
        stream.write('{"messages": []}\n' + '{"messages": [{"role": "user", "content": "7?"}]}\n')
    config = write_run(
        folder / "run",
        model={"model_path": BASE, "config_path": BASE, "foundation": {}},
        data={
            "datasets": [{"path": str(chats), "type": "chat"}],
            "bad_rows_allowed": 0.5,
        },
        train={"max_steps": 2, "lr_decay_style": "cosine"},
        lora={
            "enable_lora": True,
            "lora_rank": 4,
            "lora_alpha": 8,
            "enable_qlora": True,
            "quant_format": "nf4",
        },
        launch={"env": {"OMP_DISPLAY": TOKEN}},
    )
    on_ranks(1, train, config, folder / "cache")
    patch = with_cache(folder / "cache")
    planned = plan(load(config), ("export",))
    out = get_or_build(planned.step("export")).path
    yield Made(planned, out / "hf", out / "adapter")
    patch.undo()


def cell(text: str, name: str) -> str:
    """The value beside that name in a table of a card."""
    (found,) = re.findall(rf"^\| {re.escape(name)} \| (.*) \|$", text, flags=re.MULTILINE)
    return found


def test_the_front_matter_names_the_base_the_library_the_licence_and_the_loss(made):
    facts = made.artifact("train").facts
    for folder, library, relation in (
        (made.hf, "transformers", "finetune"),
        (made.adapter, "peft", "adapter"),
    ):
        card = ModelCard.load(folder / "README.md")
        said = card.data.to_dict()
        assert said["base_model"] == BASE
        assert said["base_model_relation"] == relation
        assert said["library_name"] == library
        assert said["pipeline_tag"] == "text-generation"
        assert said["license"] == "other"
        assert said["license_name"] == "tiny-licence"
        assert (folder / said["license_link"]).read_text() == "Do what you like.\n"
        assert "datasets" not in said
        assert set(said["tags"]) == {"penstock", "lora"}
        ((result,),) = (each["results"] for each in said["model-index"])
        assert result["metrics"][0]["value"] == pytest.approx(facts["eval_loss"], abs=1e-6)
        assert HOSTILE in result["dataset"]["name"]


def test_the_text_says_what_the_manifests_say(made):
    text = (made.hf / "README.md").read_text()
    prepared = made.artifact("prepare")
    facts, trained = prepared.facts, made.artifact("train").facts
    counted = json.loads((prepared.path / PLAN).read_text())["splits"]["train"]
    rows, tokens, learnt = (
        sum(each[name] for each in counted) for name in ("rows", "tokens", "trained_tokens")
    )
    line = f"| `<b>x\\|y 'z'` | training | {rows:,} | {tokens:,} | {learnt:,} | unknown |"
    assert line in text.splitlines()
    assert f"{sum(facts['dropped'].values())} of {facts['records']} records dropped" in text
    assert "4 samples of the training sources held out for validation." in text
    parameters = sum(p.numel() for p in Qwen3ForCausalLM.from_pretrained(made.hf).parameters())
    assert cell(text, "parameters") == f"{parameters:,}"
    assert cell(text, "architecture") == "`qwen3`"
    assert cell(text, "adapter").startswith("LoRA of rank 4, alpha 8, on `down_proj`, ")
    factors = load_file(made.adapter / "adapter_model.safetensors").values()
    assert cell(text, "adapter parameters") == f"{sum(each.numel() for each in factors):,}"
    assert cell(text, "trained parameters") == "adapters; the base model is frozen, in `nf4`"
    assert cell(text, "learning rate") == "0.01, decaying to 1e-07 (cosine)"
    assert cell(text, "global batch size").endswith(" of 256 tokens")
    assert cell(text, "steps").startswith("2, ")
    assert cell(text, "tokens seen") == f"{trained['tokens']:,}"
    assert cell(text, "final training loss") == f"{trained['final_loss']:.4g}"
    assert cell(text, "dtype of the weights") == cell(text, "precision") == "float32"
    for stage in ("prepare", "pack", "train", "export"):
        assert cell(text, stage) == f"`{made.artifact(stage).key}`"
    assert f"torch `{made.artifact('train').manifest['code']['torch']}`" in text


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("which", ["hf", "adapter"])
def test_the_snippet_runs_in_the_folder_as_it_stands(made, which, monkeypatch, capsys):
    folder = getattr(made, which)
    (snippet,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    monkeypatch.chdir(folder)
    scope: dict = {}
    exec(compile(snippet, "README.md", "exec"), scope)
    prompt = scope["tokenizer"].decode(scope["inputs"]["input_ids"][0])
    assert prompt == "<|im_start|>user\nHello!<|im_end|>\n<|im_start|>assistant\n"
    assert scope["output"].shape[1] > scope["inputs"]["input_ids"].shape[1]
    assert capsys.readouterr().out
    loads = {"hf": "Qwen3ForCausalLM", "adapter": "PeftModelForCausalLM"}
    assert type(scope["model"]).__name__ == loads[which]


def test_a_card_holds_nothing_of_the_machine_and_is_the_same_again(made, tmp_path):
    facts = dict(made.export.run(tmp_path / "again"))
    assert made.export.run(tmp_path / "again") == facts  # as after an interruption
    root = made.plan.step("train").path.parent.parent
    for folder in (made.hf, made.adapter):
        again = tmp_path / "again" / folder.name / "README.md"
        text = (folder / "README.md").read_bytes()
        assert again.read_bytes() == text
        for secret in (TOKEN, str(root), str(Path.home()), platform.node(), "What is"):
            assert secret.encode() not in text, secret


def test_a_push_sends_the_cards(made):
    names = {file.name for file in list_contents(made.artifact("export"))}
    assert {"README.md", "LICENSE.txt", "adapter/README.md", "adapter/LICENSE.txt"} <= names


def test_the_data_sets_of_the_hub_are_linked_though_the_data_are_gone(made, tmp_path, monkeypatch):
    shutil.copytree(made.artifact("train").path, tmp_path / "train")
    data = json.loads((tmp_path / "train" / DATA).read_text())
    pin = {"kind": "hub", "repo": DATASET, "commit": COMMIT, "name": None, "split": "train"}
    data["made"]["prepare"]["sources"]["data.0"] = pin
    (tmp_path / "train" / DATA).write_text(json.dumps(data))
    cache = Path(shutil.copytree(constants.HF_HUB_CACHE, tmp_path / "cache"))
    card = in_cache(cache, "datasets--someone--sums") / "README.md"
    card.write_text("---\nlicense: cc-by-4.0\n---\n")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    stage = replace(made.export, trained=replace(made.export.trained, path=tmp_path / "train"))
    get_or_build(PlannedStage(stage, tmp_path / "out"), verify="off")  # its input was changed
    card = ModelCard.load(tmp_path / "out/hf/README.md")
    assert card.data.to_dict()["datasets"] == [DATASET]
    assert f"[{DATASET}](https://huggingface.co/datasets/{DATASET}) at `{COMMIT[:12]}`" in card.text
    assert "| `cc-by-4.0` |" in card.text
    assert ModelCard.load(made.hf / "README.md").data.to_dict().get("datasets") is None


@pytest.mark.parametrize(("said", "name"), [("[mit]", "mit"), ("[mit, apache-2.0]", None)])
def test_one_of_several_licences_is_not_taken_for_all(tmp_path, said, name):
    (tmp_path / "README.md").write_text(f"---\nlicense: {said}\n---\n")
    found = detect_license(tmp_path)
    assert (found.id if found else None) == name


def test_every_text_that_a_licence_asks_to_pass_on_is_passed_on_and_none_is_overwritten(tmp_path):
    base, out = tmp_path / "base", tmp_path / "out"
    texts = {"LICENSE", "LICENSE.txt", "LICENCE.md", "NOTICE", "NOTICE.txt"}
    (base / "LICENSES").mkdir(parents=True)
    out.mkdir()
    for name in {*texts, "README.md", "config.json"}:
        (base / name).write_text(f"{name} of the base")
    (out / "NOTICE").write_text("Of another.")
    copy_license_files(base, out)
    assert {path.name for path in out.iterdir()} == texts
    for name in texts - {"NOTICE"}:
        assert (out / name).read_text() == f"{name} of the base"
    assert (out / "NOTICE").read_text() == "Of another."


@pytest.mark.parametrize("kind", ["known text", "other text", "no text"])
def test_a_base_model_of_a_folder_is_named_without_its_path(made, tmp_path, kind):
    base = tmp_path / "somewhere" / "my base"
    shutil.copytree(Path(constants.HF_HUB_CACHE) / "models--someone--tiny/snapshots" / COMMIT, base)
    (base / "README.md").write_text("---\n[broken\n---\n")
    (base / "LICENSE.txt").unlink()
    if kind != "no text":
        (base / "LICENSE").write_text(APACHE if kind == "known text" else "My own.")
    origin = replace(made.export.origin, model_path=str(base), weights=pin_model(str(base)))
    replace(made.export, origin=origin).run(tmp_path / "out")
    for name in ("hf", "adapter"):
        card = ModelCard.load(tmp_path / "out" / name / "README.md")
        said = card.data.to_dict()
        assert "base_model" not in said
        assert cell(card.text, "base model") == "`my base`"
        assert "somewhere" not in card.content
        wanted = {"known text": "apache-2.0", "other text": "other", "no text": None}[kind]
        assert said.get("license") == wanted
        assert ("unknown; check" in cell(card.text, "license")) == (kind == "no text")
        assert (tmp_path / "out" / name / "LICENSE").is_file() == (kind != "no text")


def test_a_base_that_started_at_random_lies_beside_the_adapter_and_has_no_card(
    made, tmp_path, monkeypatch
):
    origin = replace(made.export.origin, model_path=None, weights=None)
    replace(made.export, origin=origin).run(tmp_path / "out")
    assert not (tmp_path / "out/base/README.md").exists()
    text = (tmp_path / "out/adapter/README.md").read_text()
    assert "`../base`" in text
    assert not {"license", "base_model"} & ModelCard(text).data.to_dict().keys()
    (snippet,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    monkeypatch.chdir(tmp_path / "out/adapter")
    scope: dict = {}
    exec(compile(snippet.split("\nmessages")[0], "README.md", "exec"), scope)
    assert scope["tokenizer"].chat_template


def test_without_a_card_the_key_is_that_of_before_and_nothing_is_written(made, tmp_path):
    settings = made.export.settings.model_copy(update={"model_card": False})
    stage = replace(made.export, settings=settings)
    assert "model_card" not in identity(stage)["settings"]
    assert stage_key(stage) != stage_key(made.export)
    stage.run(tmp_path / "out")
    left = {path.name for path in (tmp_path / "out").rglob("*")}
    assert not left & {"README.md", "LICENSE.txt", MANIFEST}
    assert "config.json" in left


@pytest.mark.parametrize("content", ["not JSON", "{}", '{"files": []}'])
def test_a_manifest_of_the_users_beside_a_model_is_none_of_ours(tmp_path, content):
    (tmp_path / "llama").mkdir()
    (tmp_path / MANIFEST).write_text(content)
    assert read_model_folder(tmp_path / "llama").name == "llama"


def test_data_that_is_held_out_is_not_named_as_training_data():
    sources = [{"role": role, "dataset": 0} for role in ("train", "validation")]
    pins = {
        "data.0": {"kind": "hub", "repo": "someone/trained-on"},
        "test.0": {"kind": "hub", "repo": "someone/held-out"},
    }
    lineage = Lineage({}, {}, {}, {}, {"sources": sources}, pins)
    assert [source["pin"]["repo"] for source in lineage.sources] == [
        "someone/trained-on",
        "someone/held-out",
    ]
    assert lineage.datasets == ["someone/trained-on"]
