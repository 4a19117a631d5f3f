"""Files of other tools are told from ours, said in our words, and judged where they stand."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.config.loading import yaml12
from penstock.config.loading.cli_overrides import split_overrides
from penstock.config.loading.load import load, loads
from penstock.config.loading.schema_tree import annotation_at
from penstock.config.schema.run import RunConfig
from penstock.config.server.config import ServerConfig
from penstock.config.server.run_fields import SERVER as SERVERS_OWN
from penstock.config.translate.apply import DIALECTS, detect_dialect, find_dialect, translate
from penstock.config.translate.dialect import Dialect, is_flat
from penstock.config.translate.fit_parallel_sizes import Devices
from penstock.config.translate.hf.llama_factory import LLAMA_FACTORY
from penstock.config.translate.hf.trl import TRL
from penstock.config.translate.load_foreign import load_translation
from penstock.config.translate.translation import GAPS, Draft, Entry
from penstock.core.errors import ConfigError
from penstock.engine.distributed.parallel_dims import (
    accumulation_steps,
    build_parallel_dims,
    rows_per_step,
)

ROOT = Path(__file__).parents[3]
NATIVE = sorted([ROOT / "configs" / "quickstart.yaml", *(ROOT / "configs/examples").glob("*.yaml")])
SERVERS = sorted((ROOT / "configs" / "server").glob("*.yaml"))
FOREIGN = sorted((ROOT / "configs" / "foreign").glob("*.yaml"))

BLOCK = re.compile(r"^```yaml\n(.*?)^```", re.MULTILINE | re.DOTALL)


def _square(entry: Entry) -> None:
    entry.put("train.lr", entry.value**2)
    if entry.value < 0:
        entry.approximated("negative ones are turned round")


def _finalized(draft: Draft) -> None:
    if draft.get("half"):
        draft.change("train.seed", draft.get("seed") // 2, "half of it")


SMALL = Dialect(
    name="small",
    title="Small",
    recognizes=is_flat,
    same={"seed": "train.seed", "deep.name": "pipeline.name", "old": "train.micro_batch_size"},
    computed={"root": _square, "half": lambda entry: entry.no_effect("settles the seed")},
    unsupported={"voice": "nobody speaks here"},
    defaults={"root": 2.0, "old": 3},
    overridden_by={"old": ("new",)},
    finalize=_finalized,
)


def said(values: dict[str, Any]) -> dict[str, tuple[str, str]]:
    lines = translate(values, SMALL, Devices(1)).lines
    return {line.key: (line.kind, line.why) for line in lines}


def test_every_key_is_told_in_one_of_nine_ways() -> None:
    told = said({"seed": 4, "half": True, "deep": {"name": "x"}, "rot": 1, "voice": "loud"})
    assert told["seed"] == ("approximated", "half of it")
    assert told["half"] == ("no effect", "settles the seed")
    assert told["deep.name"] == ("maps", "")
    assert told["rot"] == ("unknown", "is not a known key of Small; did you mean root?")
    assert told["voice"] == ("left out", "nobody speaks here")
    assert told["root"] == told["old"] == ("assumed", "")
    assert said({"root": 3})["root"] == ("translated", "")
    assert said({"root": -3})["root"][0] == "approximated"
    assert said({"voice": False})["voice"] == ("no effect", "is off")
    assert said({"root": "x"})["root"] == ("refused", "x is not a valid value")


def test_null_is_as_if_a_key_were_left_out() -> None:
    told = said({"root": None})
    assert told["root"] == ("assumed", "")
    assert said({"half": None})["half"] == ("no effect", "null, the same as leaving it out")


def test_a_stronger_key_stands_in_place_of_a_weaker_one() -> None:
    told = said({"new": 1, "old": 5})
    assert told["old"] == ("no effect", "new is written, and overrides it")
    assert "old" not in said({"new": 1})


@pytest.mark.parametrize("file", NATIVE, ids=lambda file: file.stem)
def test_files_of_ours_are_no_dialect(file: Path) -> None:
    assert detect_dialect(yaml.safe_load(file.read_text())) is None


@pytest.mark.parametrize("file", FOREIGN, ids=lambda file: file.stem)
def test_each_foreign_example_is_a_run_of_its_dialect(file: Path) -> None:
    translation = load_translation(file, None, Devices(2))
    assert translation.dialect == file.stem
    assert not translation.of(*GAPS)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"model": {"model_path": "x"}},
        {"modle": {"model_path": "x"}, "dta": {}},
        {"model_path": "x"},
        {"train": {"stage": "SFT"}, "model_name_or_path": "x", "stage": "SFT"},
        {"model_name_or_path": "x"},
    ],
    ids=str,
)
def test_what_is_nobodys_is_judged_as_ours(values: dict[str, Any]) -> None:
    assert detect_dialect(values) is None


ODD: list[Any] = ["x", -1, 0, [1, None], {"x": 1}]


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
def test_no_value_whatever_is_more_than_refused(dialect: Dialect) -> None:
    for key in dialect.keys:
        for value in ODD:
            found = translate({key: value}, dialect, Devices(2))
            assert any(line.key.startswith(key) for line in found.lines), (key, value)


def test_dialects_name_settings_that_there_are() -> None:
    for dialect in DIALECTS:
        assert find_dialect(dialect.name) is dialect
        tables = [dialect.same, dialect.computed, dialect.unsupported, dialect.idle]
        assert sum(map(len, tables)) == len(dialect.keys), dialect.name
        assert all(len(key) > 1 for key in dialect.keys), dialect.name
        assert dialect.defaults.keys() | dialect.overridden_by.keys() <= dialect.keys
        for name in [*dialect.same.values(), *dialect.placeholders]:
            assert annotation_at(tuple(name.split("."))) is not None, (dialect.name, name)
    with pytest.raises(ConfigError, match="ernie is not a dialect; did you mean erniekit"):
        find_dialect("ernie")


SERVER = """\
model_path: Qwen/Qwen3-0.6B
lora_rank: 8
enable_lora: true
worker_bind_port: 5556
log_gradient_norms: true
"""


def test_a_servers_file_is_a_run_once_its_data_are_named(tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text(SERVER)
    with pytest.raises(ConfigError, match=r"data\.datasets: required"):
        load(file)
    heard: list[str] = []
    _, overrides = split_overrides(["--data.datasets", "[{path: a.jsonl}]"])
    run = load(file, overrides, heard.append)
    assert (run.lora.lora_rank, run.model.lm_head_fp32) == (8, True)
    assert run.train.log_grad_norm == "layers"
    assert any("1 without effect here" in line for line in heard)


@pytest.mark.parametrize("file", SERVERS, ids=lambda file: file.stem)
def test_each_servers_file_can_be_told_as_a_run(file: Path) -> None:
    translation = load_translation(file, None, Devices(2))
    assert not translation.of(*GAPS)


def test_every_setting_of_a_server_is_known_where_its_file_is_read_as_a_runs() -> None:
    assert find_dialect("server") == SERVERS_OWN
    assert SERVERS_OWN.keys == ServerConfig.model_fields.keys()


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ({"model_path": "builtin:a"}, {"model": {"config_path": "builtin:a"}}),
        ({"model_path": "builtin:a", "config_path": "b"}, {"model": {"config_path": "b"}}),
        ({"sample_packing_strategy": "best_fit"}, {"data": {"sample_packing_method": "multipack"}}),
        (
            {"master_addr": "first", "master_port": 7},
            {"launch": {"rdzv_endpoint": "first:7"}},
        ),
        ({"nproc_per_node": "auto"}, {"launch": {"nproc_per_node": None}}),
        ({"master_port": 7}, {"launch": {"rdzv_endpoint": None}}),
        (
            {"master_addr": "first", "nnodes": 2, "node_rank": 1},
            {"launch": {"rdzv_endpoint": None, "nnodes": None, "node_rank": None}},
        ),
    ],
    ids=str,
)
def test_what_a_server_says_otherwise_than_a_run_is_put_in_a_runs_words(
    values: dict[str, Any], wanted: dict[str, Any]
) -> None:
    settings = translate(values, SERVERS_OWN, Devices(1)).settings
    for section, fields in wanted.items():
        found = settings.get(section, {})
        assert {name: found.get(name) for name in fields} == fields
        assert "model_path" not in found


ERNIE = """\
model_name_or_path: Qwen/Qwen3-0.6B
train_dataset_path: a.jsonl
output_dir: out
learning_rate: -1
logging_steps: 0
fine_tuning: LoRA
save_total_limit: 5
learning_rat: 3
"""


def test_faults_are_told_where_the_foreign_key_stands(tmp_path: Path) -> None:
    file = tmp_path / "theirs.yaml"
    file.write_text(ERNIE)
    with pytest.raises(ConfigError) as refused:
        load(file)
    assert str(refused.value).splitlines() == [
        f"{file}:4: learning_rate (here train.lr): is -1; it must be at least 0",
        f"{file}:5: logging_steps (here train.log_interval): is 0; it must be at least 1",
        f"{file}:8: learning_rat: is not a known key of ERNIEKit; did you mean learning_rate?",
    ]
    file.write_text(ERNIE.replace("learning_rat: 3\n", ""))
    _, overrides = split_overrides(["--train.lr", "1e-4", "--train.log_interval", "4"])
    run = load(file, overrides)
    assert (run.train.lr, run.train.save_total_limit) == (1e-4, 5)


LAYOUTS: list[dict[str, Any]] = [
    {},
    {"tensor_parallel_size": 4},
    {"tensor_parallel_size": 32, "sequence_parallel": True},
    {"tensor_parallel_size": 8, "pipeline_parallel_size": 14, "expert_parallel_size": 8},
    {"data_parallel_shard_size": 4},
    {"data_parallel_shard_size": 2, "data_parallel_replicate_size": 4},
    {"ringattn_parallel_size": 4, "ulysses_parallel_size": 2},
    {"pipeline_parallel_size": 4, "pipeline_parallel_split": [0, 7, 14, 21]},
]

SHAPES = Dialect(
    name="shapes",
    title="Shapes",
    recognizes=is_flat,
    same={name: f"train.{name}" for layout in LAYOUTS for name in layout}
    | {"rows": "train.global_batch_size", "steps": "train.gradient_accumulation_steps"}
    | {"devices": "launch.nproc_per_node", "nodes": "launch.nnodes"}
    | {"rows of a pass": "train.micro_batch_size"},
)


def fitted(layout: dict[str, Any], ranks: int) -> tuple[RunConfig, int]:
    found = translate(layout, SHAPES, Devices(ranks))
    rest = {"model": {"model_path": "x"}, "data": {"datasets": [{"path": "a"}]}}
    train = {"output_dir": "out", **found.settings.get("train", {})}
    launch = {"launch": found.settings["launch"]} if "launch" in found.settings else {}
    return loads({**rest, "train": train, **launch}), found.ranks


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 8, 16, 112, 128])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_any_layout_fits_any_number_of_devices(layout: dict[str, Any], ranks: int) -> None:
    for rows in ({"steps": 12}, {"rows": 12}, {"rows": 12, "nodes": 2}):
        run, used = fitted({**layout, **rows}, ranks)
        assert used <= ranks
        replicas = build_parallel_dims(run.train, used).num_replicas
        assert accumulation_steps(run.train, replicas) >= 1


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8, 16])
def test_rows_of_a_step_are_the_same_however_a_model_is_cut(ranks: int) -> None:
    cut = {"tensor_parallel_size": 32, "pipeline_parallel_size": 2, "steps": 12}
    shared = {"data_parallel_shard_size": 16, "steps": 3}
    for layout, rows in [(cut, 12), (shared, 48), ({**cut, "rows": 24, "devices": 128}, 24)]:
        run, used = fitted(
            {k: v for k, v in layout.items() if k != "steps" or "rows" not in layout}, ranks
        )
        assert rows_per_step(run.train, build_parallel_dims(run.train, used).num_replicas) == rows


def test_as_many_processes_as_a_file_asks_for_where_there_are_so_many() -> None:
    run, used = fitted({"devices": 2, "rows": 8}, 8)
    assert (run.launch.nproc_per_node, used) == (2, 2)
    run, used = fitted({"devices": 8, "nodes": 2, "rows": 12}, 8)
    assert (run.launch.nproc_per_node, run.launch.nnodes, used) == (6, 1, 6)
    run, used = fitted({"rows": 12, "rows of a pass": 4}, 4)
    assert (run.launch.nproc_per_node, used, accumulation_steps(run.train, used)) == (3, 3, 1)


def test_without_a_gpu_nothing_is_moved_from_one() -> None:
    moved = Dialect("m", "M", is_flat, same={"move": "train.optimizer_offload"})
    assert translate({"move": "cpu"}, moved, Devices(1)).settings["train"]
    here = translate({"move": "cpu"}, moved, Devices(1, has_gpus=False))
    assert not here.settings["train"]
    assert here.lines[0].kind == "approximated"


PAGES = sorted((ROOT / "docs" / "migrate").glob("from-*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_pages_for_newcomers_say_on_the_right_what_the_left_becomes(page: Path) -> None:
    left, right = (yaml12.parse(text).value for text in BLOCK.findall(page.read_text())[:2])
    dialect = detect_dialect(left)
    assert dialect
    translation = translate(left, dialect, Devices(32))
    assert not translation.of(*GAPS)
    run, said = loads(translation.settings), loads(right)
    assert json.loads(said.model_dump_json(exclude_unset=True)) == _part_of(run, said)


def _part_of(run: RunConfig, said: RunConfig) -> Any:
    """What a run says of the settings that another one writes."""

    def within(whole: Any, part: Any) -> Any:
        if isinstance(part, dict):
            return {name: within(whole.get(name), inner) for name, inner in part.items()}
        if isinstance(part, list) and isinstance(whole, list) and len(whole) == len(part):
            return [within(one, other) for one, other in zip(whole, part, strict=True)]
        return whole

    whole = json.loads(run.model_dump_json())
    return within(whole, json.loads(said.model_dump_json(exclude_unset=True)))


def test_values_that_may_not_do_what_was_meant_are_doubtful() -> None:
    def kinds(dialect: Dialect, **keys: Any) -> dict[str, str]:
        base = {"model_name_or_path": "m", "output_dir": "o", **keys}
        return {line.key: line.kind for line in translate(base, dialect, Devices(2)).lines}

    warm = {"dataset_name": "d", "warmup_steps": 50, "max_steps": 40}
    assert kinds(TRL, **warm)["warmup_steps"] == "doubtful"
    assert kinds(TRL, **{**warm, "warmup_steps": 40})["warmup_steps"] != "doubtful"
    texts = {"dataset": "d,e", "template": "qwen3", "cutoff_len": 64, "stage": "pt"}
    # Documents that are joined lose nothing.
    assert kinds(LLAMA_FACTORY, **texts)["dataset"] == "approximated"
    alone = {"model_name_or_path": "m", "output_dir": "o", **texts, "packing": False}
    [line] = [
        one for one in translate(alone, LLAMA_FACTORY, Devices(2)).lines if one.key == "dataset"
    ]
    assert (line.kind, line.why.count("is truncated; tools that concatenate")) == ("doubtful", 1)
    assert kinds(LLAMA_FACTORY, **{**texts, "stage": "sft"})["dataset"] == "approximated"
    assert kinds(LLAMA_FACTORY, **{**texts, "stage": "sft"}, fp8=True)["fp8"] == "doubtful"


@pytest.mark.parametrize(
    ("dialect", "keys"),
    [
        (TRL, {"dataset_name": "d", "packing": True, "packing_strategy": "wrapped"}),
        (LLAMA_FACTORY, {"dataset": "d", "template": "qwen3", "stage": "pt"}),
    ],
    ids=["trl", "llama_factory"],
)
def test_documents_that_are_joined_and_cut_there_are_so_here(
    dialect: Dialect, keys: dict[str, Any]
) -> None:
    length = "max_length" if dialect is TRL else "cutoff_len"
    base = {"model_name_or_path": "m", "output_dir": "o", length: 64, **keys}
    data = translate(base, dialect, Devices(1)).settings["data"]
    assert (data["sample_packing_method"], data["isolate_samples"]) == ("wrapped", False)
    assert data["sample_packing_sequence_len"] == 64
    assert all("max_seq_len" not in source for source in data["datasets"])
