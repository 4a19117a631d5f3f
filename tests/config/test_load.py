"""A configuration is refused with every fault at once, in a person's words, or it is a run."""

import subprocess
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.config.loading.cli_overrides import split_overrides
from penstock.config.loading.load import load, loads
from penstock.config.loading.schema_tree import annotation_at, is_section, sections
from penstock.config.loading.suggest_name import SYNONYMS
from penstock.config.schema.run import RunConfig
from penstock.core.errors import ConfigError
from tests.config.values import SMALLEST, faults_of, smallest

# What `penstock` must be able to run today, written as users write it.
AVAILABLE = """\
model:
  model_path: Qwen/Qwen3-0.6B
  tokenizer_path: builtin:bytes
  attn_implementation: sdpa
  merge_qkv: false
  basic_modules: [Embedding]
  foundation: {num_hidden_layers: 4}
data:
  datasets:
    - path: gsm8k/train.jsonl
      type: instruction
      field_instruction: question
      field_output: answer
      max_seq_len: 2048
    - {path: org/name, type: chat, name: main, split: train, revision: v1.0, field_system: system}
    - {path: folder, type: text, data_files: ['*.jsonl', b.json.gz]}
    - {path: folder, data_files: data/*, ds_type: parquet}
  dataset_prepared_path: prepared
  select_columns: [input_ids, labels]
  sample_packing_method: multipack
  sample_packing_sequence_len: 4096
  sample_packing_sequentially: false
  eval_sample_packing: false
  dataloader_num_workers: 0
  dataloader_prefetch_factor: null
  pad_to_multiple_of: 64
  val_set_size: 0.05
  dataset_num_proc: 2
  num_dataset_shards_to_save: 4
  bad_rows_allowed: 0.01
train:
  output_dir: outputs/run
  data_parallel_mode: ddp
  data_parallel_shard_size: 2
  data_parallel_replicate_size: 1
  reshard_after_forward: true
  optimizer: sgd
  lr: 1e-5
  lr_min: 0
  lr_warmup_ratio: 0.1
  lr_decay_style: cosine
  global_batch_size: 32
  micro_batch_size: 2
  gradient_accumulation_steps: 4
  max_steps: 10
  recompute_modules: [self_attn, mlp]
  init_device: cpu
  load_weights_mode: all_ranks
  save_epochs: 0.25
  load_checkpoint_path: auto
  log_format: structured
  use_wandb: false
  seed: 0
lora:
  enable_lora: true
  lora_target_modules: [q_proj]
  save_lora_only: true
pipeline: {name: gsm, stages: [prepare, pack, train, export, push], cache: refresh}
launch: {nproc_per_node: 2, nnodes: 2, rdzv_endpoint: 'a:1', timeout: 60, env: {A: 'b'}}
export: {dtype: bf16, max_shard_size: 500MB, merge_lora: false}
push: {repo_id: me/my-model, private: false, create_pr: true, dry_run: true}
"""


def refusal(file: Path, text: str, *words: str) -> list[str]:
    file.write_text(text)
    with pytest.raises(ConfigError) as refused:
        load(file, split_overrides(words)[1])
    return str(refused.value).splitlines()


def test_everything_available_loads_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(AVAILABLE)
    run = load(file)
    assert run.train.lr == 1e-5
    assert run.data.datasets[0].field_instruction == "question"
    assert loads(run.model_dump()) == run
    assert RunConfig.model_validate_json(run.model_dump_json()) == run


FAULTY = """\
modle:
  model_path: x
data:
  sample_packing_methd: multipack
  cutoff_len: 3
  lr: 3
  datasets:
    - path: a
      max_seq_len: "3"
      trust_remote_code: true
    - 7
    - {path: s, data_files: [1, a],
       shards_idx: 2}
    - type: text
train:
  lr: "1e-5"
  lr: 2e-5
  use_wandb: yes
  init_device: cpu
  optimizer: muoon
  micro_batch_size: 0
  gc_steps: 3.0
  lr_decay_style: cosien
  recompute_modules: mlp
launch:
  env: {A: 1}
  nodes: 2
learning_rate: 3
lora:
qwertyuiop: {}
"""

FAULTS = [
    (1, "modle: unknown section; did you mean model?"),
    (4, "data.sample_packing_methd: unknown field; did you mean sample_packing_method?"),
    (5, "data.cutoff_len: unknown field; did you mean sample_packing_sequence_len?"),
    (6, "data.lr: unknown field; did you mean train.lr?"),
    (
        9,
        "data.datasets.0.max_seq_len: is the text 3; wanted a whole number or null:"
        " write 3 without quotes",
    ),
    (
        10,
        "data.datasets.0.trust_remote_code: loading scripts are not run;"
        " convert the dataset to parquet or jsonl, and leave trust_remote_code out",
    ),
    (
        11,
        "data.datasets.1: is 7; wanted a mapping of settings, for example {path: data/train.jsonl}",
    ),
    (12, 'data.datasets.2.data_files.0: is 1; wanted text: write it in quotes, "1"'),
    (
        13,
        "data.datasets.2.shards_idx: there is only one shard without shards; write shards too",
    ),
    (14, "data.datasets.3.path: required; for example path: data/train.jsonl"),
    (15, "train.output_dir: required; for example output_dir: outputs/my-run"),
    (17, "train.lr: written twice, first in line 16; keep one of them"),
    (
        18,
        "train.use_wandb: is the text yes; wanted true, false or null:"
        " write true, since YAML 1.2 reads yes as text",
    ),
    (
        19,
        "train.init_device: data_parallel_mode: fsdp2 cannot initialize on cpu, where every rank"
        " would hold the whole model; write init_device: meta or leave it out",
    ),
    (
        20,
        "train.optimizer: is muoon; did you mean muon? It takes adamw, anyprecision_adamw, sgd,"
        " muon, novograd, or the full name of another, such as torch.optim.RAdam",
    ),
    (21, "train.micro_batch_size: is 0; it must be at least 1"),
    (22, "train.gc_steps: is 3.0; wanted a whole number: write 3"),
    (
        23,
        "train.lr_decay_style: is the text cosien; did you mean cosine?"
        " It takes constant, linear, cosine, polynomial, inverse_sqrt, wsd, square, sqrt, noam,"
        " noam_hold, step or exponential",
    ),
    (
        24,
        "train.recompute_modules: is the text mlp; wanted a list of self_attn, core_attn, mlp or"
        " vision, or null: write [mlp]",
    ),
    (26, 'launch.env.A: is 1; wanted text: write it in quotes, "1"'),
    (27, "launch.nodes: unknown field; did you mean nnodes?"),
    (28, "learning_rate: unknown field; did you mean train.lr?"),
    (
        30,
        "qwertyuiop: unknown section; the sections are model, data, train, lora, preference,"
        " pipeline, launch, export, push, release",
    ),
]


def test_every_fault_is_told_at_once_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    assert refusal(file, FAULTY) == [f"{file}:{line}: {text}" for line, text in FAULTS]


def test_section_without_content_is_an_empty_one(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "model: {config_path: x}\ndata: {datasets: [{path: x}]}\ntrain: {output_dir: o}\n"
        "lora:\n  # enable_lora: true\n"
    )
    assert not load(file).lora.enable_lora


@pytest.mark.parametrize(
    ("content", "line", "words"),
    [
        (b"", None, "the file is empty"),
        (b"# only a comment\n", None, "the file is empty"),
        (b"\n\n- a\n", 3, "the top level is not a mapping"),
        (b"text", 1, "the top level is not a mapping"),
        (b"a: 1\nb: \xff\n", 2, "byte 0xff is not UTF-8"),
        (b"a: [1\nb: 2\n", 2, "not valid YAML"),
        (b"train: !!python/name:os.system {}\n", 1, "is not supported"),
    ],
)
def test_file_that_holds_no_settings_is_refused(
    tmp_path: Path, content: bytes, line: int | None, words: str
) -> None:
    file = tmp_path / "run.yaml"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=words) as refused:
        load(file)
    assert str(refused.value).startswith(f"{file}:{line}: " if line else f"{file}: ")


def test_path_that_is_no_file_is_refused_with_what_is_near(tmp_path: Path) -> None:
    (tmp_path / "quickstart.yaml").write_text("a: 1")
    with pytest.raises(
        ConfigError, match=r"quickstrt\.yaml does not exist; did you mean .*/quickst"
    ):
        load(tmp_path / "quickstrt.yaml")
    with pytest.raises(ConfigError, match=r"is a folder with quickstart\.yaml"):
        load(tmp_path)
    with pytest.raises(ConfigError, match=r"neither does the folder .*/nowhere"):
        load(tmp_path / "nowhere" / "a.yaml")


def test_byte_order_mark_and_windows_lines_are_read(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    text = "model: {config_path: x}\r\ndata: {datasets: [{path: x}]}\r\ntrain: {output_dir: o}\r\n"
    file.write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert load(file).train.output_dir == "o"


@pytest.mark.parametrize(("name", "meant"), SYNONYMS.items())
def test_name_from_another_tool_leads_to_a_setting_of_ours(name: str, meant: str) -> None:
    place, _, field = meant.rpartition(".")
    assert field in sections()[place].model_fields
    assert name not in sections()[place].model_fields, f"{name} is our own name"
    with pytest.raises(ConfigError) as refused:
        loads({**smallest(), name: 3})
    assert f"{name}: unknown field; did you mean {meant}?" in str(refused.value).splitlines()


@pytest.mark.parametrize(
    ("train", "line"),
    [
        ({"micro_batch_size": True}, "train.micro_batch_size: is true; wanted a whole number"),
        ({"lr": "1e-5"}, "train.lr: is the text 1e-5; wanted a number: write 1e-5 without quotes"),
        ({"lr": True}, "train.lr: is true; wanted a number"),
        ({"lr": float("inf")}, "train.lr: is inf; write a finite number"),
        ({"lr": None}, "train.lr: is empty; wanted a number"),
        ({"seed": 1.5}, "train.seed: is 1.5; wanted a whole number"),
        ({"output_dir": 3}, 'train.output_dir: is 3; wanted text: write it in quotes, "3"'),
        ({"output_dir": ""}, "train.output_dir: is empty; write at least one"),
        ({"no_decay_params": "bias"}, "train.no_decay_params: is the text bias; wanted a list of"),
        ({"enable_reentrant": 1}, "train.enable_reentrant: is 1; wanted true or false"),
        ({"lr_warmup_ratio": 2}, "train.lr_warmup_ratio: is 2; it must be at most 1"),
        ({"data_parallel_shard_size": 0}, "train.data_parallel_shard_size: is 0; write a number"),
        ({3: 4}, "train.3: 3 is not a name of a setting"),
    ],
)
def test_value_of_a_neighbouring_type_is_refused_with_what_to_write(
    train: dict[Any, Any], line: str
) -> None:
    faults = faults_of(train=train)
    assert len(faults) == 1
    assert faults[0].startswith(line)


def test_secret_written_in_the_wrong_place_is_not_repeated() -> None:
    told = faults_of(
        data={"hf_use_auth_token": "hf_abcdef"},
        launch={"env": {"HF_TOKEN": "hf_abcdef"}},
        push={"url": "s3://key:hf_abcdef@bucket/x"},
    )
    assert len(told) == 3
    assert "hf_abcdef" not in "\n".join(told)


BAD_VALUES: list[Any] = [None, True, -1, 0, 7, 2.5, "x", "yes", "", [], [None], [{}], {}, {"a": 1}]
PATHS = [
    (place, name)
    for place, section in sections().items()
    for name in [*section.model_fields, "unknown_name"]
]


@pytest.mark.slow
@settings(max_examples=150)
@given(st.lists(st.tuples(st.sampled_from(PATHS), st.sampled_from(BAD_VALUES)), max_size=4))
def test_any_values_make_a_run_or_a_refusal_in_our_words(changes: list[Any]) -> None:
    values = deepcopy(SMALLEST)
    for (place, name), value in changes:
        at: Any = values
        for step in place.replace("[]", ".0").replace("{}", ".image").split("."):
            if isinstance(at, list):  # which may stand where a mapping is meant
                at = at[0] if at and step == "0" else None
            else:
                at = at.setdefault(step, {}) if isinstance(at, dict) else None
        if isinstance(at, dict):
            at[name] = deepcopy(value)
    try:
        run = loads(values)
    except ConfigError as refused:
        text = str(refused)
        assert "pydantic" not in text
        assert "Input should" not in text
        assert "Value error" not in text
        assert all(": " in line for line in text.splitlines())
    else:
        # What is unwritten stays so: the type of a data set is then found in its records.
        assert loads(run.model_dump(exclude_unset=True)) == run


def test_every_section_is_named_by_the_path_to_it() -> None:
    for place, section in sections().items():
        steps = place.replace("[]", ".[]").replace("{}", ".image").split(".")
        path = tuple(0 if step == "[]" else step for step in steps)
        assert is_section(annotation_at(path))
        assert annotation_at(path) is section


def test_loading_settings_loads_nothing_heavy() -> None:
    code = (
        "import sys, penstock.config.loading.load;"
        " print(*{name.partition('.')[0] for name in sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy = {"torch", "numpy", "pyarrow", "transformers", "datasets", "fsspec", "huggingface_hub"}
    assert not heavy & set(done.stdout.split())


def test_smallest_run_is_one() -> None:
    assert loads(smallest()).model.tokenizer_source == "builtin:tiny-qwen3"


def test_a_file_without_sections_is_told_below_which_each_key_stands(tmp_path: Path) -> None:
    file = tmp_path / "flat.yaml"
    file.write_text("model_path: a/b\ndatasets: [{path: a.jsonl}]\noutput_dir: out\nlr: 1e-5\n")
    with pytest.raises(ConfigError) as caught:
        load(file)
    for line, name in enumerate(["model.model_path", "data.datasets", "train.output_dir"], 1):
        section, _, bare = name.partition(".")
        meant = f"flat.yaml:{line}: {bare}: unknown field; did you mean {name}? It belongs in"
        assert f"{meant} {section}:" in str(caught.value)
