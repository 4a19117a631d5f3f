"""Folders and files that are not what a field names: told with the path and what to write."""

import re
from pathlib import Path

import peft
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from penstock.rows.tokenizer import byte_tokenizer
from tests.cli.mistakes.table import (
    Change,
    Mistake,
    copy,
    data,
    entries,
    link,
    make_and_judge,
    pipe,
    train,
    write,
)

USED = {"model": {"config_path": None, "model_path": "m"}}
ADAPTED = {**USED, "lora": {"enable_lora": True, "init_adapter_path": "a"}}
WEIGHTS, ADAPTER = "model.safetensors", "adapter_model.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with its tokenizer, and an adapter of it."""
    root = tmp_path_factory.mktemp("made")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(str(root / "model"))
    byte_tokenizer().save_pretrained(str(root / "model"))
    adapted = peft.LoraConfig(r=4, target_modules=["q_proj"])
    peft.get_peft_model(model, adapted).save_pretrained(str(root / "adapter"))
    entries("adapter_config.json", base_model_name_or_path="org/base")(root / "adapter")
    return root


def cut(name: str, size: int) -> Change:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:size])


def instead(name: str, change: Change) -> Change:
    def apply(folder: Path) -> None:
        (folder / name).unlink()
        change(folder)

    return apply


ENTRIES: dict[str, tuple[dict[str, object], str]] = {
    "no heads": ({"num_attention_heads": 0}, "num_attention_heads is 0; it must be an integer"),
    "heads below nothing": ({"num_attention_heads": -2}, "num_attention_heads is -2"),
    "a word for heads": ({"num_attention_heads": "two"}, "num_attention_heads is 'two'"),
    "a truth for heads": ({"num_attention_heads": True}, "num_attention_heads is True; it must"),
    "half a head": ({"num_attention_heads": 2.5}, r"num_attention_heads is 2\.5"),
    "a list of heads": ({"num_attention_heads": [2]}, r"num_attention_heads is \[2\]"),
    "a billion heads": ({"num_attention_heads": 10**9}, "and the config makes it"),
    "heads beyond counting": ({"num_attention_heads": 10**18}, "at most 2,147,483,647"),
    "no width": ({"hidden_size": 0}, "hidden_size is 0"),
    "a word for a width": ({"hidden_size": "x"}, "hidden_size is 'x'"),
    "a width beyond memory": ({"hidden_size": 10**12}, "at most 2,147,483,647 can be built"),
    "no layers": ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
    "a billion layers": ({"num_hidden_layers": 10**9}, "at most 10,000 can be built"),
    "half a layer": ({"num_hidden_layers": 1.5}, r"num_hidden_layers is 1\.5"),
    "no heads of keys": ({"num_key_value_heads": 0}, "num_key_value_heads is 0"),
    "no vocabulary": ({"vocab_size": 0}, "vocab_size is 0"),
    "a list of tokens": ({"vocab_size": [1]}, r"vocab_size is \[1\]"),
    "a type in a list": ({"model_type": ["llama"]}, r"model_type is \['llama'\]"),
    "a type in a mapping": ({"model_type": {"a": 1}}, "model_type is {'a': 1}"),
    "a word for RoPE": ({"rope_parameters": "x"}, "cannot be read as a model of type llama"),
    "a list for RoPE": ({"rope_scaling": [1]}, "cannot be read as a model of type llama"),
    "a kind of RoPE that is none": ({"rope_scaling": {"type": "yarnn"}}, "of the kind 'yarnn'"),
    "a word for a table": ({"quantization_config": "x"}, "quantization_config is not a table"),
    "GPTQ": ({"quantization_config": {"quant_method": "gptq"}}, "quant_method 'gptq'"),
    "an odd head": ({"head_dim": 7}, "head_dim is 7"),
}

CONFIGS: dict[str, tuple[str | bytes, str]] = {
    "a list": ("[]", "it is a list, and a model's config is a mapping"),
    "a text": ('"x"', "it is 'x', and a model's config"),
    "a number": ("5", "it is 5, and a model's config"),
    "null": ("null", "it is None, and a model's config"),
    "nothing": ("", "cannot be read as JSON"),
    "UTF-16": ('{"model_type":"llama"}'.encode("utf-16"), "cannot be read as JSON"),
    "no number": ('{"model_type": "llama", "hidden_size": NaN}', "hidden_size is nan"),
}

FILES: dict[str, tuple[Change, str]] = {
    "a folder for weights": (instead(WEIGHTS, lambda d: (d / WEIGHTS).mkdir()), "m holds no model"),
    "a pipe for weights": (instead(WEIGHTS, pipe(WEIGHTS)), "model.safetensors is a link that"),
    "a broken link for weights": (
        instead(WEIGHTS, link(WEIGHTS, "../blobs/x")),
        "model.safetensors is a link that leads nowhere",
    ),
    "no bytes": (write(WEIGHTS, ""), "its header would be 0 bytes"),
    "a text for weights": (write(WEIGHTS, "hello world, text"), "not a safetensors file"),
    "zeros for weights": (write(WEIGHTS, b"\0" * 5000), "its header would be 0 bytes of 5000"),
    "a list for a header": (write(WEIGHTS, b"\2\0\0\0\0\0\0\0[]"), "its header is not a table"),
    "a broken index": (instead(WEIGHTS, write(INDEX, "{")), "it has no weight_map"),
    "a list for an index": (instead(WEIGHTS, write(INDEX, "[]")), "it has no weight_map"),
    "an index to elsewhere": (
        instead(WEIGHTS, write(INDEX, '{"weight_map": {"a": "../../etc/passwd"}}')),
        "m/passwd is not there",
    ),
    "a pipe for config.json": (
        instead("config.json", pipe("config.json")),
        "config.json is a link that leads nowhere, a device, a pipe",
    ),
    "a folder for config.json": (
        instead("config.json", lambda d: (d / "config.json").mkdir()),
        "no config.json",
    ),
    "a list for a tokenizer": (write("tokenizer.json", "[]"), "tokenizer of m cannot be loaded"),
    "a list for its settings": (write("tokenizer_config.json", "[]"), "tokenizer of m cannot be"),
    "no settings of it": (write("tokenizer_config.json", ""), "tokenizer of m cannot be loaded"),
    "a template in bytes": (write("chat_template.jinja", b"\xff\xfe"), "tokenizer of m cannot be"),
}

ADAPTERS: dict[str, tuple[Change, str]] = {
    "no weights": (lambda d: (d / ADAPTER).unlink(), f"a has no {re.escape(ADAPTER)}"),
    "weights cut short": (cut(ADAPTER, 600), "a safetensors file"),
    "no JSON": (write("adapter_config.json", "{"), "adapter_config.json cannot be read: it is not"),
    "a list": (write("adapter_config.json", "[1]"), "adapter_config.json .* not a JSON object"),
    "a word for a rank": (entries("adapter_config.json", r="x"), "lora_rank: Input should be"),
    "another kind": (
        entries("adapter_config.json", peft_type="PREFIX_TUNING"),
        "only LORA is read",
    ),
}

MODEL_PATHS = {
    "blank": ("   ", "model_path: is blank"),
    "no user": ("~nobodyxyz/m", "~nobodyxyz is the home folder of no user"),
    "an FTP server": ("ftp://x/y", "ftp://x/y is not a URL that can be read"),
    "a revision": ("Qwen/Qwen3-8B@main", "neither a path that exists nor a hub id"),
    "a null character": ("a\0b", "has a null character"),
    "a name that is too long": ("x" * 5000, "model_path: has a name of more than 255 bytes"),
    "a path that is too long": ("/x" * 3000, "model_path: is longer than 4096 bytes"),
    "a device": ("/dev/null", "/dev/null is a file, not a folder"),
    "a path of Windows": ("C:\\Users\\x", "neither a path that exists nor a hub id"),
    "a placeholder": ("<your model>", "<your model> is neither a path"),
    "a variable without an end": ("${X/m", r"\$\{X/m is no variable"),
    "a variable without a name": ("${}/m", r"\$\{\} is no variable"),
    "a number": (5, "model_path: is 5; wanted text"),
    "a list": (["m"], "model_path: is a list; wanted text"),
    "a broken link": ("broken", "broken is a link to nowhere, which does not exist"),
    "the folder above": ("above", "Did you mean above/hf|above holds neither config.json"),
    "nothing": ("dd", "dd holds neither config.json"),
}

OUTPUTS = {
    "the root": ("/", "output_dir: / is a folder of other programs"),
    "devices": ("/dev", "output_dir: /dev is a folder of other programs"),
    "settings of the system": ("/etc/", "is a folder of other programs"),
    "home": ("~", "is a folder of other programs"),
    "all users' files": ("/tmp", "/tmp is a folder of other programs"),
    "blank": ("  ", "output_dir: is blank"),
    "no user": ("~nobodyxyz/x", "output_dir: ~nobodyxyz is the home folder of no user"),
    "below a file": ("rows.jsonl/out", r"train\.output_dir: rows\.jsonl/out cannot be written to"),
    "null": (None, "output_dir: is empty; wanted text"),
    "a device": ("/dev/null", "/dev/null cannot be written to"),
    "a null character": ("a\0b", "has a null character"),
    "a name that is too long": ("x" * 300, "has a name of more than 255 bytes"),
    "no bucket": ("s3://", "has no bucket"),
    "a web server": ("http://x/y", "results cannot be written to http://"),
    "a list": (["a"], "output_dir: is a list; wanted text"),
    "a link to itself": ("loop", r"train\.output_dir: loop cannot be written to"),
}

DATA_PATHS = {
    "a pipe": ("ff.jsonl", "ff.jsonl is a device or a pipe"),
    "an endless device": ("/dev/zero", "/dev/zero is a device or a pipe"),
    "blank": (" ", r"datasets\.0\.path: is blank"),
    "no user": ("~nobodyxyz/x", "~nobodyxyz is the home folder of no user"),
    "a config": ("run.yaml", "run.yaml has no suffix of a known file type"),
    "a broken link": ("bl.jsonl", "bl.jsonl is a link to nowhere, which does not exist"),
    "a name that is too long": ("x" * 300 + ".jsonl", "has a name of more than 255 bytes"),
    "a number": (5, "path: is 5; wanted text"),
    "a folder of nothing": ("dd", "dd holds no file that ends in"),
    "a file without a suffix": ("rows", "rows has no suffix of a known file type"),
}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def places(folder: Path) -> None:
    """Things that are no data and no models."""
    (folder / "dd").mkdir()
    pipe("ff.jsonl")(folder)
    link("bl.jsonl", "nowhere")(folder)
    link("broken", "nowhere")(folder)
    link("loop", "loop")(folder)
    write("rows", '{"text": "a"}\n')(folder)
    write("above/hf/config.json", "{}")(folder)


def judge(line: str, folder: Path, made: Path, change: Change, code: int = 2) -> None:
    make_and_judge(
        Mistake(line, sections=USED, make=copy(made / "model", "m", change), code=code), folder
    )


@pytest.mark.parametrize("mistake", ENTRIES)
def test_an_entry_of_config_json_that_no_model_has_is_told(mistake, made, tmp_path):
    values, line = ENTRIES[mistake]
    unsupported = mistake in ("GPTQ", "a kind of RoPE that is none")
    judge(line, tmp_path, made, entries("config.json", **values), 3 if unsupported else 2)


@pytest.mark.parametrize("mistake", CONFIGS)
def test_a_config_json_that_is_no_mapping_is_told(mistake, made, tmp_path):
    content, line = CONFIGS[mistake]
    judge(line, tmp_path, made, write("config.json", content))


@pytest.mark.parametrize("mistake", FILES)
def test_a_file_of_a_model_that_is_none_is_told(mistake, made, tmp_path):
    change, line = FILES[mistake]
    of_weights = not re.search("config|token|leads|a link that", f"{mistake} {line}")
    judge(line, tmp_path, made, change, 3 if of_weights else 2)


@pytest.mark.parametrize("mistake", ADAPTERS)
def test_an_adapter_that_is_none_is_told(mistake, made, tmp_path):
    change, line = ADAPTERS[mistake]

    def make(folder: Path) -> None:
        copy(made / "model", "m")(folder)
        copy(made / "adapter", "a", change)(folder)

    code = {"another kind": 3, "no JSON": 1, "a list": 1, "weights cut short": 3}.get(mistake, 2)
    make_and_judge(Mistake(line, sections=ADAPTED, make=make, code=code), tmp_path)


@pytest.mark.parametrize("command", ["check run.yaml", "plan run.yaml", "run run.yaml"])
def test_an_adapter_where_a_model_is_meant_is_told_with_its_base(command, made, tmp_path):
    line = "m is an adapter of org/base, and not a model"
    make = copy(made / "adapter", "m")
    make_and_judge(Mistake(line, command, USED, make), tmp_path)


@pytest.mark.parametrize("field", ["config_path", "tokenizer_path"])
def test_an_adapter_for_a_part_of_a_model_is_told(field, made, tmp_path):
    line = "m is an adapter of org/base, and not a model"
    make_and_judge(
        Mistake(line, sections={"model": {field: "m"}}, make=copy(made / "adapter", "m")), tmp_path
    )


def test_a_model_where_an_adapter_is_meant_is_told(made, tmp_path):
    def make(folder: Path) -> None:
        copy(made / "model", "m")(folder)
        copy(made / "model", "a")(folder)

    make_and_judge(Mistake("a has no adapter_config.json", sections=ADAPTED, make=make), tmp_path)


def test_an_adapter_of_another_model_is_told(made, tmp_path):
    sections = {"lora": ADAPTED["lora"]}
    line = "a is an adapter of another model: .* 32 .* 96"
    make_and_judge(
        Mistake(line, sections=sections, make=copy(made / "adapter", "a"), code=3), tmp_path
    )


@pytest.mark.parametrize("mistake", MODEL_PATHS)
def test_a_path_that_is_no_model_is_told(mistake, tmp_path):
    path, line = MODEL_PATHS[mistake]
    sections = {"model": {"config_path": None, "model_path": path}}
    make_and_judge(Mistake(line, sections=sections, make=places), tmp_path)


@pytest.mark.parametrize("mistake", OUTPUTS)
def test_a_path_that_is_no_output_folder_is_told(mistake, tmp_path):
    path, line = OUTPUTS[mistake]
    one = train(line, output_dir=path)
    make_and_judge(Mistake(one.line, sections=one.sections, make=places), tmp_path)


@pytest.mark.parametrize("field", ["data.dataset_prepared_path", "pipeline.artifacts_path"])
def test_no_output_folder_is_one_of_the_system(field, tmp_path):
    section, _, name = field.partition(".")
    line = re.escape(f"{field}: /usr is a folder of other programs")
    make_and_judge(Mistake(line, sections={section: {name: "/usr"}}), tmp_path)


@pytest.mark.parametrize("mistake", DATA_PATHS)
def test_a_path_that_is_no_data_is_told(mistake, tmp_path):
    path, line = DATA_PATHS[mistake]
    one = data(line, datasets=[{"path": path, "type": "text"}])
    make_and_judge(Mistake(one.line, sections=one.sections, make=places), tmp_path)
