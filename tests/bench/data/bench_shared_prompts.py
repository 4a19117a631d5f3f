"""What shared prompts save and round: `python -m tests.bench.data.bench_shared_prompts`.

Tokens of an epoch over the preference demo set (or the file that is named: a JSON list of such
records), as the byte-level tokenizer makes them, nothing cut: in our packed rows, padding included;
as two rows of each pair without any padding; with each pair padded to its longer side; and in the
batches that TRL's own DPO trainer makes, with its own collator, of eight pairs, its default. TRL's
answers and ours are compared.

Then the loss and the gradients of one step of DPO in fp32, with shared prompts and with two rows,
beside those of the same model written out in fp64 here, one answer at a time: so a difference can
be told from rounding.
"""

import contextlib
import json
import os
import platform
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import numpy as np
import torch
import torch.nn.functional as F
import transformers
from trl import DPOConfig, DPOTrainer

from penstock.core.cache.stage import Artifact
from penstock.pack.settings import PackSettings
from penstock.pack.stage import Pack
from penstock.rows.collate import collate
from penstock.rows.prepared import PreparedSamples
from penstock.rows.reader import PackedRows
from penstock.rows.ref_logprobs import write_scores
from penstock.rows.tokenizer import byte_tokenizer
from penstock.train.launch.job import Job
from tests.bench.pages import write_section
from tests.engine import loops, runs
from tests.stages.prepared import prepare, run, write_lines

DEMO = Path(__file__).parents[4] / "shared" / "data" / "preference" / "dpo_en_demo.json"
TITLE = "Shared prompts in preference training"
GOAL = 0.65

ROW = 32_768
MULTIPLE = 128
"""What rows are padded to, as `data.pad_to_multiple_of` does unless it is written."""
PAIRS_OF_TRL = 8
ROLES = {"human": "user", "gpt": "assistant", "system": "system"}

MODEL = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 384,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": ROW,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    "tie_word_embeddings": False,
}
BETA = 0.1
PAIRS, LONGEST = 16, 2048
"""Of the step that is compared, and the tokens of a side at most: attention is written out."""

Arrays = loops.Arrays


class Step(NamedTuple):
    """What a step makes of its pairs."""

    loss: float
    gradients: Arrays


def packed(prepared: Artifact, out: Path, *, share_prompts: bool) -> PackedRows:
    """All pairs in rows."""
    settings = PackSettings(
        sample_packing_method="multipack",
        sample_packing_sequence_len=ROW,
        share_prompts=share_prompts,
    )
    out.mkdir()
    Pack(settings, prepared).run(out)
    return PackedRows(out / "data" / "train")


def tokens_of_rows(rows: PackedRows) -> int:
    """What training passes through the model, a row at a time."""
    laid = [collate([[rows.row(at)]], pad_to_multiple_of=MULTIPLE) for at in range(len(rows))]
    return sum(len(one.values[0]) for one in laid)


def trl_batches(records: list[dict[str, Any]], place: Path) -> tuple[int, list[int]]:
    """The tokens that TRL passes through its model in an epoch, padding included, and those of each
    side of a pair without it."""

    def messages(rope_impl: list[dict[str, str]]) -> list[dict[str, str]]:
        return [{"role": ROLES[turn["from"]], "content": turn["value"]} for turn in rope_impl]

    told = {
        "prompt": [messages(record["conversations"]) for record in records],
        **{
            side: [messages([record[side]]) for record in records]
            for side in ("chosen", "rejected")
        },
    }
    arguments = DPOConfig(
        output_dir=str(place / "trl"),
        use_cpu=True,
        bf16=False,
        report_to=[],
        max_length=None,
        per_device_train_batch_size=PAIRS_OF_TRL,
        disable_tqdm=True,
    )
    config = transformers.AutoConfig.for_model(**{**MODEL, "num_hidden_layers": 1})
    trainer = DPOTrainer(
        # It makes no batch without a model; nothing is asked of this one.
        model=transformers.AutoModelForCausalLM.from_config(config),
        ref_model=transformers.AutoModelForCausalLM.from_config(config),
        args=arguments,
        processing_class=byte_tokenizer(),
        train_dataset=datasets.Dataset.from_dict(told),
    )
    padded, own = 0, []
    for batch in trainer.get_train_dataloader():
        padded += batch["input_ids"].numel()
        own += batch["attention_mask"].sum(1).tolist()
    return padded, own


def tokens(records: list[dict[str, Any]], place: Path) -> list[str]:
    """The first table."""
    data = write_lines(place / "all.jsonl", records)
    prepared, _ = run(prepare((data, {"type": "preference"})), place / "prepared" / "all")
    samples = PreparedSamples(prepared.path, "train")
    sides = np.stack([samples.side_lengths(side) for side in samples.stored], axis=1)
    padded, own = trl_batches(records, place)
    assert sorted(own) == sorted(sides.ravel().tolist()), "other answers than ours"
    ours = tokens_of_rows(packed(prepared, place / "shared", share_prompts=True))
    others = {
        "two rows of a pair, no padding": int(sides.sum()),
        "each pair padded to its longer side": int(2 * sides.max(axis=1).sum()),
        f"TRL, {PAIRS_OF_TRL} pairs a batch": padded,
    }
    lines = [f"{'shared prompts, padding included':37} {ours:10,}"]
    for name, count in others.items():
        lines.append(f"{name:37} {count:10,}   ours / this {ours / count:.3f}")
    return [*lines, f"goal, against what others do: {GOAL}"]


def job_of(place: Path, packed_place: Path, name: str) -> Job:
    """A run of one step over those rows."""
    config = runs.run_config(
        place / name,
        place / "model",
        model={"model_path": str(place / "model")},
        data={
            "datasets": [{"path": "dummy", "type": "preference"}],
            "sample_packing_sequence_len": ROW,
        },
        preference={"beta": BETA},
        objective="preference",
        data_parallel_mode="none",
        global_batch_size=len(PackedRows(packed_place / "data" / "train")),
        max_grad_norm=1e9,
        max_steps=1,
    )
    return replace(runs.job_of(config, packed_place), scores=place / "scores")


def one_step(job: Job) -> Step:
    """The loss and the gradients of the first step, by the names in a checkpoint."""
    loop = loops.loop_of(job)
    gradients = loops.before_each_update(loop, lambda: loops.gradients_of(loop))
    return Step(loops.step(loop)["loss"], gradients[0])


def sums_of(weights: dict[str, torch.Tensor], rows: PackedRows) -> dict[bytes, torch.Tensor]:
    """The log-probabilities of every sample's two answers, from rows of one document for each."""
    found: dict[bytes, torch.Tensor] = {}
    for at in range(len(rows)):
        row = rows.row(at)
        assert row.branching is not None
        ends = np.cumsum(row.lengths)
        sums = [
            sum_of(weights, row.input_ids[end - length : end], row.labels[end - length : end])
            for end, length in zip(ends, row.lengths, strict=True)
        ]
        pairs = torch.stack(sums).view(-1, 2)
        found |= dict(zip(row.branching.samples, pairs, strict=True))
    return found


def sum_of(weights: dict[str, torch.Tensor], ids: np.ndarray, labels: np.ndarray) -> torch.Tensor:
    """Llama in the precision of `weights`, and the summed log-probability of what is labelled.

    T tokens, N heads, H their width.
    """
    count, width = len(ids), MODEL["head_dim"]
    theta = MODEL["rope_parameters"]["rope_theta"]
    rates_H = theta ** -(torch.arange(0, width, 2, dtype=torch.float64) / width)
    angles_TH = torch.outer(torch.arange(count, dtype=torch.float64), rates_H.repeat(2))

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weights[f"{name}.weight"]

    def heads(x: torch.Tensor) -> torch.Tensor:
        return x.view(count, -1, width).transpose(0, 1)

    def turned(x_NTH: torch.Tensor) -> torch.Tensor:
        first, second = x_NTH.chunk(2, -1)
        return x_NTH * angles_TH.cos() + torch.cat([-second, first], -1) * angles_TH.sin()

    x = F.embedding(torch.tensor(ids, dtype=torch.int64), weights["model.embed_tokens.weight"])
    for layer in range(MODEL["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        own = norm(x, f"{at}.input_layernorm")
        query, key, value = (
            heads(own @ weights[f"{at}.self_attn.{name}_proj.weight"].T) for name in "qkv"
        )
        repeats = len(query) // len(key)
        key, value = (each.repeat_interleave(repeats, 0) for each in (turned(key), value))
        scores = turned(query) @ key.transpose(1, 2) / width**0.5
        later = torch.ones(count, count, dtype=torch.bool).triu(1)
        mixed = scores.masked_fill(later, -torch.inf).softmax(-1) @ value
        mixed = mixed.transpose(0, 1).reshape(count, -1)
        x = x + mixed @ weights[f"{at}.self_attn.o_proj.weight"].T
        own = norm(x, f"{at}.post_attention_layernorm")
        gate, up = (own @ weights[f"{at}.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (F.silu(gate) * up) @ weights[f"{at}.mlp.down_proj.weight"].T
    logits = norm(x, "model.norm") @ weights["lm_head.weight"].T
    targets = torch.tensor(labels, dtype=torch.int64)
    return -F.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")


def written_out(weights: dict[str, torch.Tensor], rows: PackedRows, scores_DA: np.ndarray) -> Step:
    """The loss and the gradients in the precision of `weights`."""
    weights = {name: value.clone().requires_grad_() for name, value in weights.items()}
    found = sums_of(weights, rows)
    ratios_DA = torch.stack(list(found.values())) - torch.tensor(scores_DA)
    loss = -F.logsigmoid(BETA * (ratios_DA[:, 0] - ratios_DA[:, 1])).mean()
    loss.backward()
    gradients = {n: value.grad.numpy() for n, value in weights.items() if value.grad is not None}
    return Step(loss.item(), gradients)


def apart(got: Step, want: Step) -> tuple[float, float, float]:
    """Relative differences: of the loss, of all gradients as one vector, of the worst tensor."""
    assert got.gradients.keys() == want.gradients.keys()
    differences = {name: got.gradients[name] - array for name, array in want.gradients.items()}

    def norm(arrays: Arrays) -> float:
        return float(np.sqrt(sum((each.astype(np.float64) ** 2).sum() for each in arrays.values())))

    worst = max(norm({n: d}) / norm({n: want.gradients[n]}) for n, d in differences.items())
    loss = abs(got.loss - want.loss) / abs(want.loss)
    return loss, norm(differences) / norm(want.gradients), worst


def rounding(records: list[dict[str, Any]], place: Path) -> list[str]:
    """The second table."""
    config = transformers.AutoConfig.for_model(**MODEL)
    config.dtype = torch.float32
    models: list[dict[str, torch.Tensor]] = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config)
        if not seed:
            model.save_pretrained(place / "model")
        models.append({name: value.double() for name, value in model.state_dict().items()})
    data = write_lines(place / "some.jsonl", records)
    prepared, _ = run(prepare((data, {"type": "preference"})), place / "prepared" / "some")
    two = packed(prepared, place / "two rows", share_prompts=False)
    packed(prepared, place / "one", share_prompts=True)
    with torch.no_grad():
        reference = sums_of(models[1], two)
    scores_DA = torch.stack(list(reference.values())).numpy()
    write_scores(place / "scores", list(reference), scores_DA)
    judge = written_out(models[0], two, scores_DA)
    steps = {
        name: one_step(job_of(place, place / folder, f"run {name}"))
        for name, folder in (("shared prompts", "one"), ("two rows of a pair", "two rows"))
    }
    shared, alone = steps.values()
    compared = {"shared prompts against two rows": apart(shared, alone)}
    compared |= {f"{name} against fp64": apart(step, judge) for name, step in steps.items()}
    header = f"{'relative difference of':37} {'loss':>9} {'gradients':>10} {'worst tensor':>13}"
    lines = [
        f"{name:37} {loss:9.1e} {gradients:10.1e} {worst:13.1e}"
        for name, (loss, gradients, worst) in compared.items()
    ]
    return [header, *lines]


def main() -> None:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else DEMO
    records = json.loads(path.read_text())
    short = [
        record
        for record in records
        if all(
            sum(len(turn["value"].encode()) + 32 for turn in [*record["conversations"], side])
            < LONGEST
            for side in (record["chosen"], record["rejected"])
        )
    ]
    datasets.disable_progress_bars()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        counted = tokens(records, Path(folder))
        rounded = rounding(short[:PAIRS], Path(folder))
    print("\n".join([*counted, "", *rounded]))
    machine = f"{platform.machine()}, {os.cpu_count()} CPUs, PyTorch {torch.__version__}."
    write_section(
        "cpu",
        TITLE,
        [
            "Written by `tests/bench/data/bench_shared_prompts.py`.",
            "",
            f"Tokens of an epoch over {len(records)} pairs of answers to conversations; byte-level "
            f"tokenizer, nothing cut, `multipack`, rows of {ROW:,}, padded to whole {MULTIPLE}.",
            "",
            *["```", *counted, "```", ""],
            f"One step of DPO on {PAIRS} of the pairs in fp32, a Llama of three layers, 64 wide; "
            "gradients as one vector, and of the tensor that differs most. The judge is the model "
            f"written out in fp64, one answer at a time. {machine}",
            "",
            *["```", *rounded, "```"],
        ],
    )


if __name__ == "__main__":
    main()
