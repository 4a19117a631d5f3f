"""Files as projects publish them: each key is used, has a reason, or is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.config.loading import yaml12
from penstock.config.loading.load import loads
from penstock.config.translate.apply import DIALECTS, detect_dialect, translate
from penstock.config.translate.dialect import Dialect
from penstock.config.translate.fit_parallel_sizes import Devices
from penstock.config.translate.load_foreign import drop_invalid
from penstock.config.translate.translation import GAPS, Line, Translation
from tests.config.dialects.changed import draw, is_told
from tests.config.dialects.published import Judge, keys_without_line, table, translate_one

CORPUS = Path(__file__).parent / "corpus"
FILES = sorted(CORPUS.glob("*.yaml"))

GAPS_OF: dict[str, set[str]] = {
    "axolotl-lora": {"neftune_noise_alpha"},
    "axolotl-dpo": {"lisa_n_layers", "lisa_step_interval"},
    "axolotl-grpo": {"rl", "datasets.0.type"},
    "axolotl-images": {"image_size"},
    "llama-factory-sft": {"use_dft_loss"},
    "llama-factory-dpo": set(),
    "llama-factory-v1": set(),
    "handbook-mixer": set(),
    "handbook-mixture": {"eos_token"},
    "trl-arguments": set(),
    "torchtune-lora": {"quantizer"},
    "torchtune-dpo": set(),
}


def translated(file: Path) -> Translation:
    translation = translate_one(file).translation
    assert translation
    return translation


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_each_key_has_a_line_and_the_rest_is_a_run(file: Path) -> None:
    outcome = translate_one(file)
    assert outcome.missing == ()
    assert outcome.translation
    assert {line.key for line in outcome.translation.of(*GAPS)} == GAPS_OF[file.stem]
    idle = outcome.translation.of(*GAPS, "no effect", "approximated")
    assert all(len(line.why) > 5 for line in idle)


def sources(stem: str, name: str = "datasets") -> list[dict[str, Any]]:
    return translated(CORPUS / f"{stem}.yaml").settings["data"][name]


def test_axolotls_messages_are_read_as_it_reads_them() -> None:
    chats, own = sources("axolotl-lora")
    assert chats["type"] == "sharegpt"
    assert (chats["field_messages"], chats["split"]) == ("conversations", "train[:5%]")
    assert chats["message_roles"] == {"assistant": ["bot"]}
    assert chats["roles_to_train"] == ["assistant", "user"]
    assert (chats["train_on_eos"], chats["drop_system_message"]) == ("last", True)
    assert (own["field_instruction"], own["field_output"]) == ("ask", "reply")
    settings = translated(CORPUS / "axolotl-lora.yaml").settings
    assert settings["data"]["deduplicate"] == "exact"
    assert settings["data"]["sample_packing_sequentially"] is True
    assert settings["data"]["shuffle_merged_datasets"] is False
    assert settings["lora"]["merge_lora_interval"] == 100
    intel, other = sources("axolotl-dpo")
    assert (intel["type"], intel["field_prompt"]) == ("preference", "question")
    assert (other["field_messages"], other["field_chosen"]) == ("dialog", "good")
    preference = translated(CORPUS / "axolotl-dpo.yaml").settings["preference"]
    assert (preference["beta"], preference["label_smoothing"]) == (0.2, 0.1)
    images = translated(CORPUS / "axolotl-images.yaml").settings["model"]
    assert images["freeze"] == ["vision", "projector"]


def test_llama_factorys_dataset_info_says_where_data_is_and_what_it_holds(tmp_path: Path) -> None:
    chats, questions, tools = sources("llama-factory-sft")
    beside = {"path": str(CORPUS / "chats.json"), "type": "sharegpt"}
    assert beside.items() <= chats.items()
    columns = {"field_instruction": "ask", "field_output": "reply", "split": "train_all"}
    # Without `query` no column `input` is part of a question.
    assert {"path": "org/questions", "type": "instruction", **columns}.items() <= questions.items()
    keys = {"field_message_role": "who", "field_message_content": "what"}
    assert {"type": "chat", "field_messages": "turns", **keys}.items() <= tools.items()
    assert (tools["field_tools"], tools["field_system"]) == ("functions", "rules")
    assert tools["message_roles"] == {"user": ["customer"], "assistant": ["agent"]}
    [pairs] = sources("llama-factory-dpo")
    assert {"type": "preference", "field_chosen": "good", "field_rejected": "bad"}.items() <= (
        pairs.items()
    )
    text = (CORPUS / "llama-factory-sft.yaml").read_text()
    for stage, names, wanted in (
        ("kto", "votes", {"type": "kto", "field_prompt": "ask", "field_label": "liked"}),
        ("pt", "books", {"type": "text", "field_text": "text"}),
    ):
        file = tmp_path / f"{stage}.yaml"
        changed = text.replace("stage: sft", f"stage: {stage}\ndataset_dir: {CORPUS}")
        file.write_text(changed.replace("chats, questions, tools", names))
        [source] = translated(file).settings["data"]["datasets"]
        assert wanted.items() <= source.items()
    file.write_text(text)
    assert [line.key for line in translated(file).of("approximated")][:1] == ["dataset"]
    file.write_text(text.replace("tools", f"gone\ndataset_dir: {CORPUS}"))
    [line] = translated(file).of("refused")
    assert (line.key, line.why.startswith("gone is not in ")) == ("dataset", True)


def test_the_handbooks_shares_are_shares_of_each_data_set() -> None:
    assert sources("handbook-mixer") == [
        {"path": path, "type": "chat", "split": "train_sft", "max_seq_len": 2048, **share}
        for path, share in (
            ("org/chats", {"shards": 2}),
            ("org/other", {}),
            ("org/large", {"shards": 1000}),
        )
    ]
    held = sources("handbook-mixer", "test_datasets")
    assert [(one["path"], one["split"]) for one in held] == [
        ("org/chats", "test_sft"), ("org/other", "test_sft"), ("org/large", "test_sft"),
    ]  # fmt: skip
    pairs, more = sources("handbook-mixture")
    assert (pairs["name"], pairs["split"]) == ("default", "train_prefs[:30%]")
    assert "shards" not in more
    assert translated(CORPUS / "handbook-mixture.yaml").settings["data"]["val_set_size"] == 2000


def test_torchtunes_components_are_settings() -> None:
    run = loads(translated(CORPUS / "torchtune-lora.yaml").settings)
    assert run.model.model_path == "models/base"
    mlp = ["gate_proj", "up_proj", "down_proj"]
    assert run.lora.lora_target_modules == ["q_proj", "v_proj", "o_proj", *mlp]
    [source] = run.data.datasets
    assert (source.path, source.ds_type, source.max_seq_len) == ("rows.json", "json", 2048)
    assert (source.field_instruction, source.field_output) == ("ask", "reply")
    assert (run.data.sample_packing_method, run.train.max_grad_norm) == ("multipack", 0.0)
    assert (run.train.lr_decay_style, run.train.lr_warmup_steps) == ("cosine", 100)
    assert (run.train.precision, run.train.weight_decay) == ("bf16_mixed", 0.01)
    pairs = loads(translated(CORPUS / "torchtune-dpo.yaml").settings)
    assert (pairs.train.objective, pairs.preference.beta) == ("preference", 0.05)
    assert (pairs.train.max_steps, pairs.train.precision) == (1000, "bf16")
    assert (pairs.train.lr_decay_style, pairs.train.tensor_parallel_size) == ("constant", 2)
    assert not pairs.lora.enable_lora


WRONG: list[Any] = [["x"], {"x": 1}, "seven", -3]


def changed_copies(values: dict[str, Any]) -> list[tuple[str, dict[str, Any], str | None]]:
    """Copies of a file, each with one key renamed, removed, nested, or of another type; with the
    key that the report must name."""
    copies: list[tuple[str, dict[str, Any], str | None]] = []
    for index, key in enumerate(values):
        rest = {name: value for name, value in values.items() if name != key}
        wrong = WRONG[index // 4 % len(WRONG)]
        copies.append(
            [
                (f"{key} renamed", {**rest, f"{key}_x": values[key]}, f"{key}_x"),
                (f"{key} is {wrong}", {**rest, key: wrong}, key),
                (f"{key} nested", {**rest, "extra": {key: values[key]}}, f"extra.{key}"),
                (f"{key} removed", rest, None),
            ][index % 4]
        )
    return copies


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_changed_copies_are_translated_with_a_line_for_what_was_changed(file: Path) -> None:
    values: dict[str, Any] = yaml12.parse(file.read_text()).value
    for change, copy, named in changed_copies(values):
        dialect = detect_dialect(copy)
        if dialect is None:
            continue  # what it is detected by was changed
        found = drop_invalid(translate(copy, dialect, Devices(8), CORPUS))
        assert not keys_without_line(copy, found), change
        lines = [line for line in found.lines if named and line.key.startswith(named)]
        assert named is None or lines, change
        if change.endswith((" renamed", " nested")):
            assert all(_is_told(line, dialect) for line in lines), change


def _is_told(line: Line, dialect: Dialect) -> bool:
    is_family = any(line.key.startswith(name) for name in dialect.families)
    return line.kind == "unknown" or is_family


def test_a_key_that_is_misspelled_or_nested_is_told_with_the_name_that_is_known() -> None:
    axolotl = {"base_model": "a", "datasets": [{"path": "b", "typ": "alpaca"}], "output_dir": "c"}
    values = {**axolotl, "learning_rat": 1, "training": {"num_epochs": 2}}
    dialect = detect_dialect(values)
    assert dialect
    lines = {line.key: line.why for line in translate(values, dialect, Devices(1)).lines}
    assert lines["learning_rat"].endswith("Axolotl; did you mean learning_rate?")
    assert lines["training.num_epochs"].endswith("Axolotl; did you mean num_epochs?")
    assert lines["datasets.0.typ"].endswith("datasets; did you mean type?")


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
def test_families_hold_no_key_that_a_table_has(dialect: Dialect) -> None:
    assert all(name not in dialect.keys or name.endswith(".") for name in dialect.families)


@pytest.mark.parametrize("stem", ["axolotl-lora", "handbook-mixer", "torchtune-dpo"])
def test_translated_files_pass_a_check(stem: str, tmp_path: Path) -> None:
    verdict = Judge(tmp_path).check(translate_one(CORPUS / f"{stem}.yaml"))
    assert (verdict.code, verdict.reasons) == (0, ())


def test_drawn_changed_copies_are_told(tmp_path: Path) -> None:
    judge, changes = Judge(tmp_path), draw([translate_one(file) for file in FILES], 15, seed=20)
    silent = [change for change in changes if not is_told(change, judge)]
    assert not [f"{change.file.name} {change.what}" for change in silent]


def test_the_table_counts_files_and_keys(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    for name, keys in (("whole", {}), ("gap", {"lisa_n_layers": 4}), ("odd", {})):
        values = {"base_model": "a", "datasets": [{"path": "b", "type": "alpaca"}], **keys}
        folder = tmp_path / "tool"
        folder.mkdir(exist_ok=True)
        if name == "odd":
            values = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "FSDP"}
        (folder / f"{name}.yaml").write_text(json.dumps(values))
    text = table(tmp_path, Judge(tmp_path_factory.mktemp("judge")))
    assert "| tool | 2 | 1 | 1 | 2 | 0 | 0 | 0 | 1 |" in text
    assert "| `lisa_n_layers` | 1 | left out | all layers are trained in every step" in text
