"""Keys of data follow effects: a setting of data is in a key where, and only where, it can change
what is prepared, packed or trained. That it cannot is judged by what comes of stages that are given
the setting all the same."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from penstock.config.loading.load import loads
from penstock.config.rules.notices import iter_notices
from penstock.config.schema.run import RunConfig
from penstock.core.cache.stage import Artifact, stage_key
from penstock.core.errors import ConfigError
from penstock.pack.settings import PackSettings
from penstock.pack.stage import Pack
from penstock.pipeline.plan import dataset_settings, pack_step, prepare_step
from penstock.pipeline.plan import plan as planned
from penstock.prepare.chat_templates.resolve import resolve_chat_template
from penstock.prepare.settings import DatasetSettings, PrepareSettings
from penstock.prepare.stage import Prepare
from penstock.rows.prepared import PreparedSamples
from penstock.rows.tokenizer import byte_tokenizer
from tests.config.values import smallest
from tests.stages.prepared import contents, run, write_lines

Sections = dict[str, dict[str, Any]]

ANSWERS = ("It is doubled.", "No, it is not.", "Then it is.")
RECORDS: list[dict[str, Any]] = [
    {
        "messages": [
            {"role": role, "content": f"{text} {number}"}
            for answer in ANSWERS[: 1 + number % 3]
            for role, text in (("user", "What is it?"), ("assistant", answer))
        ],
        "conversations": [
            {"from": "human", "value": "Why?"},
            {"from": "gpt", "value": f"{number}"},
        ],
        "instruction": f"Double {number}.",
        "output": f"{2 * number}",
        "src": ["How?"],
        "tgt": [f"Like {number}."],
        "text": f"It is said of {number} that it was doubled. " * (1 + number % 3),
        "input_ids": [*range(1, 30 + number)],
        "labels": [-100, -100, -100, *range(4, 30 + number)],
        "group": number % 5,
    }
    for number in range(24)
]


def source(**values: Any) -> Sections:
    """What a run has beside the smallest: a data set with these values."""
    return {"dataset": values}


CHAT, TEXT, IDS, QUESTIONS = (
    source(type=kind) for kind in ("chat", "text", "tokenized", "instruction")
)


@dataclass(frozen=True)
class Case:
    """Settings, and runs with and without which they have no effect."""

    written: Sections
    off: list[Sections]
    on: list[Sections]
    stage: str = "prepare"
    told: str | None = None
    """What a user who writes them without effect is told; None: what is wanted is so anyway."""


def of_data(**written: Any) -> Sections:
    return {"data": written}


IN_TURNS = source(type="sharegpt")
EVALUATES: Sections = {"train": {"eval_only": True}, "data": {"val_set_size": 5}, **CHAT}
CASES: dict[str, Case] = {
    "data.truncation_mode": Case(
        of_data(truncation_mode="drop_turns"),
        [
            source(type=kind, max_seq_len=limit)
            for kind, limit in (("text", 50), ("tokenized", 40), ("instruction", 32))
        ],
        [
            source(type="chat", max_seq_len=90),
            {**source(type="tokenized", max_seq_len=20), **of_data(max_prompt_len=2)},
        ],
        told="no dataset has conversations whose turns could be dropped",
    ),
    "data.max_prompt_len": Case(
        of_data(max_prompt_len=2),
        [
            {**source(type="text", max_seq_len=50), **of_data(truncation_mode=mode)}
            for mode in ("keep_start", "keep_end", "drop")
        ],
        [source(type="tokenized", max_seq_len=20)],
        told="no dataset has prompts that are not trained",
    ),
    "data.train_on_prompt": Case(
        of_data(train_on_prompt=True),
        [TEXT, {**TEXT, **of_data(mask_eos_in_loss=True)}],
        [CHAT, IDS, QUESTIONS],
    ),
    "data.train_on_turns": Case(
        of_data(train_on_turns="last"),
        [TEXT, IDS, QUESTIONS],
        [CHAT],
        told="no dataset has turns to choose from",
    ),
    "data.turn_rendering": Case(
        of_data(turn_rendering="per_turn"),
        [TEXT, IDS],
        [CHAT, QUESTIONS],
        told="no dataset has conversations to render",
    ),
    "data.chat_template": Case(of_data(chat_template="llama3"), [TEXT, IDS], [CHAT, QUESTIONS]),
    "data.chat_template_kwargs": Case(
        of_data(chat_template_kwargs={"x": 1}), [TEXT, IDS], [CHAT, QUESTIONS]
    ),
    "data.add_eos": Case(
        of_data(add_eos=False),
        [CHAT, IDS, IN_TURNS, source(type="sft_turns")],
        [TEXT, QUESTIONS],
        told="tokens that are given, and those of a chat template, stay as they are",
    ),
    "data.mask_eos_in_loss": Case(
        of_data(mask_eos_in_loss=True),
        [IDS],
        [TEXT, CHAT],
        told="the labels of tokenized data say what is trained",
    ),
    "data.dataset_shard_num": Case(
        of_data(dataset_shard_num=1, dataset_shard_idx=0), [CHAT, TEXT], []
    ),
    "data.shuffle_before_merging_datasets": Case(
        of_data(shuffle_before_merging_datasets=False),
        [CHAT, {**CHAT, **of_data(shuffle_merged_datasets=False)}],
        [{**CHAT, **of_data(mix_strategy="random")}, {**CHAT, "beside": {"type": "chat"}}],
    ),
    "train.seed": Case(
        {"train": {"seed": 7}},
        [
            {**CHAT, **of_data(shuffle_merged_datasets=False)},
            {
                **CHAT,
                "beside": {"type": "chat"},
                **of_data(shuffle_merged_datasets=False, shuffle_before_merging_datasets=False),
            },
        ],
        [
            CHAT,
            {**CHAT, "beside": {"type": "chat"}, **of_data(shuffle_merged_datasets=False)},
            *(
                {
                    **CHAT,
                    **of_data(
                        shuffle_merged_datasets=False,
                        shuffle_before_merging_datasets=False,
                        **more,
                    ),
                }
                for more in ({"val_set_size": 5}, {"mix_strategy": "interleave_over"})
            ),
        ],
    ),
    "data.datasets.0.roles_to_train": Case(
        source(roles_to_train=["user", "assistant"]),
        [QUESTIONS],
        [CHAT],
        told="of type: instruction the answer alone is trained",
    ),
    "data.datasets.0.train_on_eos": Case(
        source(train_on_eos="none"), [{**CHAT, **of_data(mask_eos_in_loss=True)}], [CHAT]
    ),
    "data.datasets.0.field_messages": Case(source(field_messages="messages"), [CHAT], [IN_TURNS]),
    "field_messages of sharegpt": Case(source(field_messages="conversations"), [IN_TURNS], [CHAT]),
    "data.datasets.0.message_roles": Case(source(message_roles={"user": []}), [CHAT], []),
    "data.datasets.0.ds_type": Case(source(ds_type="json"), [CHAT, TEXT, IDS], []),
    "ds_type of other files": Case(source(ds_type="text"), [], [TEXT]),
    "data.datasets.0.shards": Case(source(shards=1), [CHAT], []),
    "data.datasets.0.shards_idx": Case(
        source(shards_idx=0), [source(type="chat", shards=n) for n in (1, 2)], []
    ),
    "another shard": Case(source(shards_idx=1), [], [source(type="chat", shards=2)]),
    "data.datasets.0.allow_private_urls": Case(
        source(allow_private_urls=True), [CHAT], [{**CHAT, "model": {"tokenizer_path": "seeing"}}]
    ),
    "seed of packing": Case(
        {"train": {"seed": 7}},
        [
            {**CHAT, **of_data(sample_packing_method=method)}
            for method in ("sequential", "greedy", "wrapped")
        ],
        [{**CHAT, **of_data(sample_packing_method="multipack")}],
        "pack",
    ),
    "data.eval_sample_packing": Case(
        of_data(eval_sample_packing=False),
        [CHAT, {**CHAT, **of_data(sample_packing_method="multipack")}],
        [{**CHAT, **of_data(val_set_size=5)}],
        "pack",
        told="there are no evaluation samples",
    ),
    "data.isolate_samples": Case(of_data(isolate_samples=False), [EVALUATES], [CHAT], "train"),
    "data.dataloader_drop_last": Case(
        of_data(dataloader_drop_last=False), [EVALUATES], [CHAT], "train"
    ),
}
OFF = [(name, number) for name, case in CASES.items() for number in range(len(case.off))]
ON = [(name, number) for name, case in CASES.items() for number in range(len(case.on))]


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working folder with the data, and a tokenizer with an image processor beside it."""
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "records.jsonl", RECORDS)
    byte_tokenizer().save_pretrained(tmp_path / "seeing")
    (tmp_path / "seeing" / "preprocessor_config.json").write_text("{}")


def run_of(*layers: Sections) -> RunConfig:
    """The smallest run with these layers, one over the other."""
    merged: Sections = {}
    for layer in layers:
        for name, values in layer.items():
            merged[name] = {**merged.get(name, {}), **values}
    first, second = merged.pop("dataset", {}), merged.pop("beside", None)
    entries = [{"path": "records.jsonl", **entry} for entry in (first, second) if entry is not None]
    merged["data"] = {**merged.get("data", {}), "datasets": entries}
    merged["train"] = {"data_parallel_mode": "none", **merged.get("train", {})}
    return loads(smallest(**merged))


def key(run: RunConfig, stage: str) -> str:
    if stage == "prepare":
        return stage_key(prepare_step(run).stage)
    if stage == "pack":
        # Of one input, since the settings may be in the key of that.
        return stage_key(pack_step(run, prepare_step(run_of(CHAT)).artifact).stage)
    settings = planned(run, ("train",)).step(stage).stage.settings
    return settings.model_dump_json()


@pytest.mark.parametrize(("name", "number"), OFF)
def test_a_setting_without_effect_is_in_no_key_and_is_told(name: str, number: int) -> None:
    case = CASES[name]
    without, written = run_of(case.off[number]), run_of(case.off[number], case.written)
    assert without != written
    assert key(without, case.stage) == key(written, case.stage)
    told = [line for line in iter_notices(written) if line not in [*iter_notices(without)]]
    assert len(told) == (case.told is not None)
    for line in told:
        assert line.startswith(f"{name}: {case.told}; write ")


@pytest.mark.parametrize(("name", "number"), ON)
def test_a_setting_with_effect_is_in_the_key_and_nothing_is_told(name: str, number: int) -> None:
    case = CASES[name]
    without, written = run_of(case.on[number]), run_of(case.on[number], case.written)
    assert key(without, case.stage) != key(written, case.stage)
    assert [*iter_notices(without)] == [*iter_notices(written)]


def given(settings: PrepareSettings, written: Sections) -> PrepareSettings:
    """Settings with what is written in them, which validation would leave out."""
    values: dict[str, Any] = {}
    for section in written.values():
        values |= section
    template = {name: value for name, value in values.items() if name.startswith("chat_template")}
    if template:
        data = run_of(of_data(**template)).data
        values = {"chat_template": resolve_chat_template(data)}
    own = {name: value for name, value in values.items() if name in DatasetSettings.model_fields}
    if "roles_to_train" in own:
        own["roles_to_train"] = tuple(own["roles_to_train"])
    datasets = tuple(dataset.model_copy(update=own) for dataset in settings.datasets)
    others = {name: value for name, value in values.items() if name not in own}
    return settings.model_copy(update={"datasets": datasets, **others})


def prepared(stage: Prepare, out: Path) -> Any:
    """The files of a prepared artifact, without the keys of slices, and the order of its samples,
    in place of what decides it."""
    artifact, _ = run(stage, out)
    plan = json.loads((out / "plan.json").read_text())
    texts = contents(out)
    plan.pop("mix")
    numbers = {entry["key"]: f"{index}" for index, entry in enumerate(plan["slices"])}
    for entry in (entry for split in plan["splits"].values() for entry in split):
        entry.pop("content")  # a digest of keys of slices
    text = json.dumps(plan, sort_keys=True)
    files = {name: content for name, content in texts.items() if name != "plan.json"}
    for slice_key, slice_number in numbers.items():
        text = text.replace(slice_key, slice_number)
        files = {name.replace(slice_key, slice_number): files[name] for name in files}
    orders = [
        [order.tolist() for order in PreparedSamples(artifact.path, split).epochs()]
        for split in ("train", "validation")
    ]
    return text, files, orders


@pytest.mark.parametrize(
    ("name", "number"), [case for case in OFF if CASES[case[0]].stage == "prepare"]
)
def test_a_setting_that_is_in_no_key_changes_nothing_that_is_prepared(
    name: str, number: int, tmp_path: Path
) -> None:
    case = CASES[name]
    stage = prepare_step(run_of(case.off[number])).stage
    assert isinstance(stage, Prepare)
    settings = given(stage.settings, case.written)
    assert settings != stage.settings
    other = replace(stage, settings=settings)
    assert prepared(stage, tmp_path / "a") == prepared(other, tmp_path / "b")


@pytest.fixture
def samples(tmp_path: Path) -> Artifact:
    stage = prepare_step(run_of(CHAT)).stage
    assert isinstance(stage, Prepare)
    return run(stage, tmp_path / "prepare" / "samples")[0]


@pytest.mark.parametrize("method", ["sequential", "greedy", "wrapped", "multipack"])
def test_what_is_in_no_key_of_packed_rows_changes_none(
    method: str, samples: Artifact, tmp_path: Path
) -> None:
    rows: dict[str, dict[str, bytes]] = {}
    usual = PackSettings.model_validate(
        {"sample_packing_method": method, "sample_packing_sequence_len": 400}
    )
    for name, value in {"": None, "seed": 7, "eval_sample_packing": False}.items():
        folder = tmp_path / f"packed {name}"
        folder.mkdir()
        Pack(usual.model_copy(update={name: value} if name else {}), samples).run(folder)
        rows[name] = contents(folder)
    assert rows["eval_sample_packing"] == rows[""]
    assert (rows["seed"] == rows[""]) == (method != "multipack")


def test_a_limit_of_one_data_set_is_none_of_anothers_settings() -> None:
    """So its slices are reused, whatever is done with samples of the other that are too long."""
    written = of_data(truncation_mode="drop", max_prompt_len=5)
    beside: Sections = {**CHAT, "beside": {"type": "chat", "max_seq_len": 90}}
    runs = [run_of(beside), run_of(beside, written)]
    free, limited = (
        {dataset_settings(run, run.data.datasets[index], "train") for run in runs}
        for index in (0, 1)
    )
    assert (len(free), len(limited)) == (1, 2)
    assert [*iter_notices(runs[1])] == [*iter_notices(runs[0])]


def test_a_setting_of_one_of_several_types_is_told_to_nobody() -> None:
    several: Sections = {**TEXT, "beside": {"type": "chat"}}
    written = run_of(several, of_data(train_on_turns="last", turn_rendering="per_turn"))
    assert [*iter_notices(written)] == [*iter_notices(run_of(several))]
    text, chat = (dataset_settings(written, entry, "train") for entry in written.data.datasets)
    assert (text.train_on_turns, chat.train_on_turns) == ("all", "last")


def test_what_has_no_effect_on_samples_of_a_type_that_is_detected_is_told(tmp_path: Path) -> None:
    write_lines(tmp_path / "records.jsonl", [{"text": "It is said."}] * 5)
    notes = planned(run_of(of_data(train_on_turns="last")), ("prepare",)).notes
    assert [note.partition(";")[0] for note in notes if "is read as" not in note] == [
        "data.train_on_turns: no dataset has turns to choose from"
    ]


@pytest.mark.parametrize("kind", ["text", "tokenized"])
def test_a_system_prompt_is_no_column_of_samples_without_messages(kind: str) -> None:
    with pytest.raises(ConfigError, match=rf"field_system: type: {kind} does not read it; write"):
        run_of(source(type=kind, field_system="group"))


@pytest.mark.parametrize("mixed", ["concat", "random"])
@pytest.mark.parametrize("number", [0, 1])
def test_a_source_of_weight_zero_is_not_read_and_told_and_only_its_place_is_in_a_key(
    number: int, mixed: str, tmp_path: Path
) -> None:
    def excluding(**values: Any) -> RunConfig:
        other = {"path": "beside.jsonl", "weight": 0, **values}
        datasets = [{"path": "records.jsonl", "type": "chat"}]
        datasets.insert(number, other)
        train: dict[str, Any] = {"data_parallel_mode": "none"}
        return loads(smallest(data={"datasets": datasets, "mix_strategy": mixed}, train=train))

    written = excluding()
    assert [*iter_notices(written)] == [
        f"data.datasets.{number}.weight: is 0, so beside.jsonl is not read"
    ]
    stage = prepare_step(written).stage
    assert isinstance(stage, Prepare)
    others = ({"type": "text"}, {"max_samples": 3}, {"path": "org/data"}, {"max_seq_len": 40})
    assert {stage_key(prepare_step(excluding(**other)).stage) for other in others} == {
        stage_key(stage)
    }
    assert [*planned(written, ("prepare",)).notes] == []
    # A stage that is given the source all the same prepares the same.
    write_lines(tmp_path / "beside.jsonl", RECORDS[:9])
    given_all = prepare_step(excluding(weight=1)).stage
    assert isinstance(given_all, Prepare)
    settings = given_all.settings.model_copy(update={"mix": stage.settings.mix})
    assert stage_key(given_all) != stage_key(stage)
    other = replace(given_all, settings=settings)
    assert prepared(stage, tmp_path / "a") == prepared(other, tmp_path / "b")


def test_what_is_tested_on_or_compared_with_is_not_cut_to_the_shard_of_training_data(
    tmp_path: Path,
) -> None:
    source = {"path": "records.jsonl", "type": "text"}
    fields = ("datasets", "test_datasets", "decontaminate_datasets")
    data = {"dataset_shard_num": 4, "dataset_shard_idx": 1, "decontaminate_ngram": 1_000}
    sharded = prepare_step(loads(smallest(data=data | {field: [source] for field in fields})))
    assert isinstance(sharded.stage, Prepare)
    artifact, _ = run(sharded.stage, tmp_path / "prepared")
    counts = {s: len(PreparedSamples(artifact.path, s)) for s in ("train", "validation")}
    assert counts == {"train": len(RECORDS) // 4, "validation": len(RECORDS)}
    settings = sharded.stage.settings
    assert [source.dataset_shard_num for source in settings.decontaminate_datasets] == [None]
