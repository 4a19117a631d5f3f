"""The main job on real data: GSM8K on two training processes, judged by transformers and peft."""

import gc
import json

import pyarrow as pa
import pytest
import torch
import yaml
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from penstock.adapters.inject import LoraSpec, inject
from penstock.cli import train as by_hand
from penstock.engine.checkpoint.model_reader import CheckpointReader
from penstock.models.decoder import Decoder
from penstock.models.registry import get_family
from penstock.rows.tokenizer import byte_tokenizer
from penstock_kernels.attention import VarlenMetadata
from tests.cli.command import penstock
from tests.ranks import on_ranks

pytestmark = pytest.mark.slow

NUM_ROWS = 7473
# fp32 sums in another order, on logits of magnitude ten.
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A random four-layer Qwen3 with its tokenizer, as transformers saves it."""
    folder = tmp_path_factory.mktemp("gsm8k") / "base"
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        tie_word_embeddings=False,
        initializer_range=0.05,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def prepared_of(base):
    """Data that the tests share: what is prepared for one serves the other."""
    return base.parent / "prepared"


def train(folder, base, shared, steps, **sections):
    """Two ranks under fsdp2 for some steps on all of GSM8K; the closing object of the command that
    goes on from there."""
    run = {
        "model": {"model_path": str(base)},
        "data": {
            "datasets": [
                {
                    "path": str(shared / "data" / "gsm8k" / "train.jsonl"),
                    "type": "instruction",
                    "field_instruction": "question",
                    "field_output": "answer",
                }
            ],
            "dataset_prepared_path": str(prepared_of(base)),
            "sample_packing_sequence_len": 2048,
        },
        "train": {
            "output_dir": str(folder / "out"),
            "data_parallel_mode": "fsdp2",
            "enable_mixed_precision": False,
            "lr": 3e-3,
            "max_steps": steps,
            "log_format": "structured",
        },
        "pipeline": {"artifacts_path": str(folder / "artifacts")},
        "launch": {"nproc_per_node": 2, "env": {"OMP_NUM_THREADS": "1"}},
        **sections,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.yaml").write_text(yaml.safe_dump(run))
    assert on_ranks(2, by_hand.main, [str(folder / "run.yaml")]) == [0, 0]
    done = penstock("run", folder / "run.yaml", "--json").last
    assert [stage["status"] for stage in done["stages"]] == ["cached"] * 3 + ["ran"]
    return done


def engine_model(out, base, **lora):
    """The engine's own model, with the weights of the last checkpoint."""
    config = json.loads((base / "config.json").read_text())
    family = get_family(config)
    decoder = family.read(config)
    model = Decoder(decoder)
    if lora:
        inject(model, LoraSpec(**lora))
        start = Qwen3ForCausalLM.from_pretrained(base, dtype=torch.float32).state_dict()
        model.load_state_dict(start, strict=False)
    reader = CheckpointReader(out)
    model.load_state_dict(reader.read(sorted(reader.shapes())), strict=not lora)
    return model.eval()


def real_rows(prepared, count=20):
    """Token ids of the first prepared samples."""
    slices = sorted((prepared / "data" / "train").glob("*.arrow"))
    with pa.OSFile(str(slices[0])) as file:
        ids = pa.ipc.open_file(file).read_all()["input_ids"]
    return [torch.tensor(row) for row in ids.slice(0, count).to_pylist()]


@torch.no_grad()
def largest_difference(ours, theirs, rows):
    """Over the rows, each alone and all packed together: the largest difference of a logit."""
    worst = 0.0
    lengths = [len(row) for row in rows]
    positions = torch.cat([torch.arange(n) for n in lengths])
    packed = ours(torch.cat(rows), positions, VarlenMetadata.of(lengths)).split(lengths)
    for row, together in zip(rows, packed, strict=True):
        want = theirs(row[None], use_cache=False).logits[0]
        alone = ours(row, torch.arange(len(row)), VarlenMetadata.of([len(row)]))
        worst = max(worst, *((got - want).abs().max().item() for got in (alone, together)))
    return worst


def losses(out):
    lines = (out / "metrics.jsonl").read_text().splitlines()
    return [record["loss"] for record in map(json.loads, lines) if "loss" in record]


def facts_of(done, name):
    return next(stage["facts"] for stage in done["stages"] if stage["stage"] == name)


@pytest.mark.exhaustive
def test_full_fine_tuning_exports_what_the_engine_computes(tmp_path, base, shared):
    done = train(tmp_path / "full", base, shared, 20)
    out = tmp_path / "full" / "out"
    assert facts_of(done, "prepare")["rows"]["train"] == NUM_ROWS
    assert facts_of(done, "prepare")["dropped"] == {}
    seen = losses(out)
    assert sum(seen[-5:]) / 5 < 0.75 * seen[0]
    prepared = next((prepared_of(base) / "prepare").glob("*/manifest.json")).parent
    theirs = AutoModelForCausalLM.from_pretrained(out / "hf", dtype=torch.float32).eval()
    ours = engine_model(out / facts_of(done, "train")["checkpoint"], base)
    assert largest_difference(ours, theirs, real_rows(prepared)) <= TOLERANCE
    assert AutoTokenizer.from_pretrained(out / "hf").chat_template
    gc.collect()


def test_lora_exports_an_adapter_and_the_merged_model(tmp_path, base, shared):
    lora = {"enable_lora": True, "lora_rank": 8, "lora_alpha": 16}
    done = train(tmp_path / "lora", base, shared, 8, lora=lora)
    out = tmp_path / "lora" / "out"
    assert losses(out)[-1] < losses(out)[0]
    prepared = next((prepared_of(base) / "prepare").glob("*/manifest.json")).parent
    rows = real_rows(prepared)
    checkpoint = out / facts_of(done, "train")["checkpoint"]
    ours = engine_model(checkpoint, base, rank=8, alpha=16)
    start = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    adapted = PeftModel.from_pretrained(start, out / "adapter").eval()
    assert largest_difference(ours, adapted, rows) <= TOLERANCE
    merged = AutoModelForCausalLM.from_pretrained(out / "hf", dtype=torch.float32).eval()
    assert largest_difference(ours, merged, rows) <= TOLERANCE
    gc.collect()
