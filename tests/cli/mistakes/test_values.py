"""Values that are none of their field's: told with file, line and field."""

from pathlib import Path

import pytest

from tests.cli.mistakes.table import Mistake, data, make_and_judge, train

NAN = float("nan")


def lora(line: str, **settings: object) -> Mistake:
    return Mistake(line, sections={"lora": {"enable_lora": True, **settings}})


def dataset(line: str, **settings: object) -> Mistake:
    entry = {"path": "rows.jsonl", "type": "text", **settings}
    return Mistake(line, sections={"data": {"datasets": [entry]}})


def section(name: str, line: str, code: int = 2, **settings: object) -> Mistake:
    return Mistake(line, sections={name: settings}, code=code)


def notice(name: str, line: str, **settings: object) -> Mistake:
    return section(name, line, 0, **settings)


STEPS = r"run\.yaml:14: train\.max_steps: "

MISTAKES = {
    "steps beyond a life": train(STEPS + "is 1e\\+18; wanted a whole number", max_steps=1e18),
    "steps beyond a life, whole": train(STEPS + ".*at most 1000000000", max_steps=10**18),
    "half a step": train(STEPS + r"is 2\.5; wanted a whole number", max_steps=2.5),
    "a list of steps": train(STEPS + "is a list; wanted a whole number", max_steps=[3]),
    "a mapping of steps": train(STEPS + "is a mapping", max_steps={"a": 1}),
    "true steps": train(STEPS + "is true; wanted a whole number", max_steps=True),
    "no number of steps": train(STEPS + "is NaN", max_steps=NAN),
    "a date": train(STEPS + "is the text 2024-01-01", max_steps="2024-01-01"),
    "an underscore in a number": train(STEPS + "is the text 1_000", max_steps="1_000"),
    "epochs beyond a life": train("num_train_epochs: .*at most 1,000,000", num_train_epochs=1e12),
    "a batch beyond memory": train(
        "global_batch_size: .*at most 10000000", global_batch_size=10**15
    ),
    "gradients beyond time": train(
        "gradient_accumulation_steps: .*at most", gradient_accumulation_steps=10**12
    ),
    "rows beyond memory": train("micro_batch_size: .*at most", micro_batch_size=10**12),
    "a rate in a list": train(r"train\.lr: is a list; wanted a number", lr=[1e-5]),
    "letters after a rate": train(r"train\.lr: is the text 1e-5x", lr="1e-5x"),
    "a percentage for a rate": train(r"train\.lr: is the text 5%", lr="5%"),
    "a rate that is true": train(r"train\.lr: is true; wanted a number", lr=True),
    "a seed below zero": train("seed: is -1; it must be at least 0", seed=-1),
    "a seed of more bits": train("seed: .*it must be less than", seed=2**70),
    "a seed in letters": train("seed: is the text abc", seed="abc"),
    "a negative decay": train(r"weight_decay: is -0\.1", weight_decay=-0.1),
    "three betas": train(
        r"optimizer_kwargs\.betas: .*write two numbers", optimizer_kwargs={"betas": [0.9] * 3}
    ),
    "an option of no optimizer": train(
        r"optimizer_kwargs\.eps1: .*did you mean eps\?", optimizer_kwargs={"eps1": 1}
    ),
    "letters for epsilon": train(
        r"optimizer_kwargs\.eps: is small; write a number", optimizer_kwargs={"eps": "small"}
    ),
    "a negative norm": train("max_grad_norm: is -1", max_grad_norm=-1),
    "saving at epochs": train("save_steps: is the text epoch", save_steps="epoch"),
    "a row beyond 32 bits": data(
        "sample_packing_sequence_len: .*less than", sample_packing_sequence_len=10**15
    ),
    "a row of nothing": data("sample_packing_sequence_len: is 0", sample_packing_sequence_len=0),
    "a row of one token": data(
        "at least 12 samples, among the first 12, are longer than a row of 1 tokens",
        sample_packing_sequence_len=1,
    ),
    "all held out": data(r"val_set_size: is 1\.0; write a whole number", val_set_size=1.0),
    "all held out, counted": data(
        r"data\.val_set_size: Validation takes 12 samples, and the data has 12", val_set_size=12
    ),
    "less than nothing held out": data(r"val_set_size: is -0\.1", val_set_size=-0.1),
    "a percentage held out": data("val_set_size: is the text 10%", val_set_size="10%"),
    "groups of nothing held out": data("split_by: is only used with val_set_size", split_by="text"),
    "groups of no column": data(
        "12 of the first 12 records have no value in 'user'", split_by="user", val_set_size=2
    ),
    "more processes than any machine": data("dataset_num_proc: .*at most", dataset_num_proc=10**5),
    "fewer processes than none": data("dataset_num_proc: is -1", dataset_num_proc=-1),
    "samples of one token": dataset("12 of the first 12 records give no sample", max_seq_len=1),
    "samples below nothing": dataset("max_seq_len: is -1", max_seq_len=-1),
    "a negative weight": dataset(r"datasets\.0\.weight: is -1", weight=-1),
    "a weight of nothing": dataset("all weights are 0", weight=0),
    "a slice of a file": dataset("slices of a split are not supported", split="train[:10%]"),
    "a misspelt field of data": dataset("field_txt: .*did you mean field_text", field_txt="a"),
    "a suffix for a kind": dataset("ds_type: .*did you mean json", ds_type="jsonl"),
    "a section of logging": section("logging", "logging: unknown section", steps=1),
    "a million processes": section(
        "launch", "nproc_per_node: .*at most 1024", nproc_per_node=10**6
    ),
    "dropout of all": lora("lora_dropout: .*less than 1", lora_dropout=1.0),
    "a rank above all widths": lora("layers are at most 256 wide", lora_rank=10**9),
    "a negative alpha": lora("lora_alpha: is -16", lora_alpha=-16),
    "layers in a mapping": lora("lora_target_modules: is a mapping", lora_target_modules={"q": 1}),
    "a number for a layer": lora(r"lora_target_modules\.0: is 1", lora_target_modules=[1]),
    "a layer of BERT": lora("'query' names no linear layer", lora_target_modules=["query"]),
    "a misspelt format": lora(
        "quant_format: .*did you mean nf4", enable_qlora=True, quant_format="nf5"
    ),
    "no stages": section("pipeline", "stages: is empty", stages=[]),
    "a stage twice": section("pipeline", "listed more than once", stages=["train", "train"]),
    "stages in disorder": section(
        "pipeline", "stages are out of order", stages=["train", "prepare", "pack"]
    ),
    "a stage left out": section("pipeline", "train needs pack", stages=["prepare", "train"]),
    "a stage of null": section("pipeline", r"stages\.0: is empty", stages=[None]),
    "time in hours": section(
        "pipeline", r"timeouts\.train: is the text 2h", timeouts={"train": "2h"}
    ),
    "time below nothing": section("pipeline", r"timeouts\.train: is -5", timeouts={"train": -5}),
    "a cache that is on": section("pipeline", "cache: .*write reuse", cache="on"),
    "a loss that is misspelt": section(
        "preference", "loss_type: .*did you mean dpop", loss_type="dop"
    ),
    "a format of llama.cpp": section("export", "format: is the text gguf", format="gguf"),
    "a dtype of C": section("export", "dtype: .*did you mean float32", dtype="float"),
    "a unit with a letter more": section("export", "max_shard_size: ", max_shard_size="5GBB"),
    "a store that is none": section("push", r"push\.url: .*did you mean s3://", url="s4://x/y"),
    "a web page to push to": section("push", "nothing can be written to https", url="https://x/y"),
    "the address of a repository": section(
        "push", "is not a hub repository", repo_id="https://huggingface.co/me/x"
    ),
    "a repository of three parts": section("push", "'a/b/c' is not a hub", repo_id="a/b/c"),
    "maybe private": section("push", "private: is the text maybe", repo_id="me/x", private="maybe"),
    "a dtype of transformers": section("model", "torch_dtype: unknown", torch_dtype="bfloat16"),
    "code of a built-in model": section("model", "trust_remote_code", 2, trust_remote_code=True),
    "a misspelt entry of config.json": section(
        "model", r"foundation\.hiden_size: .*did you mean hidden_size", foundation={"hiden_size": 5}
    ),
    "a billion layers": section(
        "model", "num_hidden_layers is 1,000,000,000", foundation={"num_hidden_layers": 10**9}
    ),
    "a width beyond counting": section(
        "model", "vocab_size is 1,000,000,000,000", foundation={"vocab_size": 10**12}
    ),
    "more ranks than machines have": section(
        "train", "tensor_parallel_size: is .* must be at most", tensor_parallel_size=10**18
    ),
    "a rest of more ranks than machines have": section(
        "train", "data_parallel_shard_size: is .* at most", data_parallel_shard_size=10**18
    ),
    "a word for a width": section(
        "model", r"foundation\.hidden_size: 'big' is text", foundation={"hidden_size": "big"}
    ),
    "layers below nothing": section(
        "model", r"foundation\.num_hidden_layers \(-1\)", foundation={"num_hidden_layers": -1}
    ),
    "no heads": section(
        "model", r"foundation\.num_attention_heads \(0\)", foundation={"num_attention_heads": 0}
    ),
    "a list of entries": section("model", "foundation: is a list", foundation=[1]),
    "warmup beyond the end": notice(
        "train",
        "lr_warmup_steps: is 100, and training ends after 10",
        max_steps=10,
        lr_warmup_steps=100,
    ),
    "a rate that float32 rounds away": notice("train", "change no weight above 3e-23", lr=1e-30),
    "a rate that bfloat16 rounds away": notice(
        "train",
        "steps of 1e-06 change no weight above 0.0005, .*stochastic_rounding: true, or precision",
        lr=1e-6,
        precision="bf16",
    ),
    "a preference of nothing": section("preference", r"preference\.beta: is not used", beta=0.3),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_value_that_is_none_of_its_field_is_told_with_its_place(
    mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make_and_judge(MISTAKES[mistake], tmp_path)
