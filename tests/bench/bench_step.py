"""A training step of one process on a CPU beside those of others: `python -m
tests.bench.bench_step [--case NAME] [--dtype bf16] [--model FOLDER]`.

A Qwen3 of four layers on one thread: rows of one document of 1024 tokens with a vocabulary of
32,768, the same with adapters of rank 16 on all linear layers, and rows of eight documents of 512.
Ways take turns in one process, each with the same weights, rows and AdamW with clipping, and
figures are medians of tokens per CPU second. First losses are compared: it must be the same work.
Beside them are a loop around transformers' model as its users write it, transformers' Trainer,
TRL's SFTTrainer and peft, if they are installed, and the floor: the products of matrices and
attention of the step by themselves. With a folder of a real model, such as SmolLM2-135M-Instruct,
there are steps of it as well: of one chat of 72 tokens and of 2,000 tokens, with all weights and
with adapters.
"""

import argparse
import importlib
import importlib.util
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

from penstock.rows.collate import MicroBatch
from penstock.train.dataloader import read
from tests.bench.bench_train import SEED, small_qwen3, weights
from tests.bench.data.packed import write_documents
from tests.engine import loops, runs

ROUNDS, WARM = 7, 2
RANK = 16
BACKEND = "ours, transformers backend"
Step = Callable[[MicroBatch], float]


@dataclass(frozen=True)
class Case:
    """What is measured, and what is to be reached."""

    name: str
    vocabulary: int
    documents: tuple[int, ...]
    """Tokens of each document of a row."""
    adapters: bool
    goals: dict[tuple[str, str], float]
    """By precision and way: what ours is to be of it, at least."""
    model: Path | None = None
    """A folder with a model, whose steps take memory: only the loop and the floor are beside it.
    None: a small model."""

    @property
    def hf_config(self) -> dict[str, Any]:
        """The model."""
        if self.model is None:
            return small_qwen3(self.vocabulary)
        return json.loads((self.model / "config.json").read_text())


CASES = (
    Case(
        "one document",
        32_768,
        (1024,),
        adapters=False,
        goals={
            ("bf16", "Trainer"): 1.6,
            ("bf16", "SFTTrainer"): 5.0,
            ("bf16", "floor"): 0.45,
            ("bf16", BACKEND): 1.0,
            ("fp32", "floor"): 0.70,
        },
    ),
    Case("adapters", 32_768, (1024,), adapters=True, goals={("bf16", "loop with peft"): 1.5}),
    Case(
        "packed",
        4096,
        (512,) * 8,
        adapters=False,
        goals={("bf16", "loop"): 2.5, ("bf16", BACKEND): 1.0},
    ),
)


def cases_of(model: Path) -> list[Case]:
    """Steps of a real model."""
    vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
    cases: list[Case] = []
    for name, documents, goal in (("chat", (72,), 1.0), ("2,000 tokens", (400,) * 5, 1.5)):
        for adapters in (False, True):
            loop = "loop with peft" if adapters else "loop"
            goals = {(dtype, loop): goal for dtype in ("bf16", "fp32")}
            title = f"real, {name}, adapters" if adapters else f"real, {name}"
            cases.append(Case(title, vocabulary, documents, adapters, goals, model))
    return cases


def ours(
    case: Case, folder: Path, *, mixed: bool, compiled: bool, backend: str = "native"
) -> tuple[Step, list[MicroBatch]]:
    """Our step, and the rows of all steps."""
    run = runs.run_config(
        folder / f"out {compiled} {backend}",
        case.model or folder / "model",
        model={"model_path": str(case.model or folder / "model"), "backend": backend},
        lora={"enable_lora": case.adapters, "lora_rank": RANK},
        data_parallel_mode="none",
        enable_mixed_precision=mixed,
        enable_gradient_checkpointing=False,
        global_batch_size=None,
        max_steps=100,
        num_train_epochs=100,
        optimizer="adamw",
        lr=1e-4,
        max_grad_norm=1.0,
        seed=SEED,
        **({"enable_compile": True} if compiled else {}),
    )
    loop = loops.loop_of(runs.job_of(run, folder / "packed"))
    rows = [
        batch
        for groups, _ in zip(loop._steps(), range(WARM + ROUNDS), strict=False)
        for batch in read(loop.rows, groups, loop.reading)
    ]
    numbers = iter(range(len(rows)))

    def step(batch: MicroBatch) -> float:
        loss = loop.built.engine.step([batch], 1e-4, next(numbers)).loss
        assert loss is not None
        return loss

    return step, rows


def model_of(case: Case) -> transformers.PreTrainedModel:
    """transformers' model with our weights, fp32."""
    if case.model is not None:
        return transformers.AutoModelForCausalLM.from_pretrained(
            case.model, attn_implementation="sdpa", dtype=torch.float32
        ).train()
    config = transformers.AutoConfig.for_model(**case.hf_config)
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="sdpa", dtype=torch.float32
    )
    model.load_state_dict(weights(case.hf_config), strict=False)
    return model.train()


def inputs_of(batch: MicroBatch) -> dict[str, Any]:
    """A row in the one form in which transformers keeps documents apart."""
    labels = batch.labels_T[None]
    return {
        "input_ids": batch.input_ids_T[None],
        "position_ids": batch.position_ids_T[None],
        "use_cache": False,
        "labels": labels,
        "shift_labels": labels,
    }


def loop_of_users(case: Case, folder: Path, *, mixed: bool) -> Step:
    """Forward, backward, clipping and AdamW, written by hand; under peft with adapters."""
    del folder
    model: Any = model_of(case)
    if case.adapters:
        import peft

        model = peft.get_peft_model(
            model, peft.LoraConfig(r=RANK, lora_alpha=RANK, target_modules="all-linear")
        )
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)

    def step(batch: MicroBatch) -> float:
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
            loss = model(**inputs_of(batch)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step


def _arguments(*, mixed: bool) -> dict[str, Any]:
    """What a trainer is told so that it does no more than train."""
    return {
        "per_device_train_batch_size": 1,
        "max_steps": 1000,
        "learning_rate": 1e-4,
        "lr_scheduler_type": "constant",
        "bf16": mixed,
        "use_cpu": True,
        "report_to": [],
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
        "optim": "adamw_torch_fused",
    }


def trainer(case: Case, folder: Path, *, mixed: bool) -> Step:
    """transformers' Trainer, a step at a time."""
    arguments = transformers.TrainingArguments(
        output_dir=str(folder / "trainer"), **_arguments(mixed=mixed)
    )
    made = transformers.Trainer(model=model_of(case), args=arguments)
    return _stepping(made)


def sft_trainer(case: Case, folder: Path, *, mixed: bool) -> Step:
    """TRL's SFTTrainer, a step at a time; its rows are packed already."""
    trl = importlib.import_module("trl")

    arguments = trl.SFTConfig(
        output_dir=str(folder / "sft"),
        gradient_checkpointing=False,
        dataset_kwargs={"skip_prepare_dataset": True},
        max_length=None,
        **_arguments(mixed=mixed),
    )
    import datasets

    rows = datasets.Dataset.from_list([{"input_ids": [0, 1], "labels": [0, 1]}])
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=_no_tokenizer(), pad_token="<pad>", eos_token="<pad>"
    )
    made = trl.SFTTrainer(
        model=model_of(case), args=arguments, train_dataset=rows, processing_class=tokenizer
    )
    return _stepping(made)


def _no_tokenizer() -> Any:
    import tokenizers

    return tokenizers.Tokenizer(tokenizers.models.WordLevel({"<pad>": 0}, unk_token="<pad>"))


def _stepping(made: Any) -> Step:
    """What a trainer does in a step, called as it calls it: its own loss, clipping and update."""
    made.create_optimizer_and_scheduler(1000)
    model = made.accelerator.prepare(made.model)
    model.train()
    optimizer = made.accelerator.prepare(made.optimizer)

    def step(batch: MicroBatch) -> float:
        inputs = inputs_of(batch)
        if "SFT" in type(made).__name__:
            # It shifts labels itself.
            inputs = {
                "input_ids": inputs["input_ids"],
                "position_ids": inputs["position_ids"],
                "labels": torch.roll(inputs["labels"], 1, dims=1),
            }
        trained = torch.tensor(batch.num_trained)
        loss = made.training_step(model, inputs, trained)
        made.accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss)

    return step


def floor(case: Case, folder: Path, *, mixed: bool) -> Step:
    """Every product of matrices of a step and its attention, forward and backward, alone."""
    del folder
    hf, dtype = case.hf_config, torch.bfloat16 if mixed else torch.float32
    width, inner = hf["hidden_size"], hf["intermediate_size"]
    heads, keys = hf["num_attention_heads"], hf["num_key_value_heads"]
    dim = hf.get("head_dim") or width // heads
    layer = [(width, (heads + 2 * keys) * dim), (heads * dim, width)]
    layer += [(width, 2 * inner), (inner, width)]
    shapes = [*layer * hf["num_hidden_layers"], (width, case.vocabulary)]
    tokens = sum(case.documents)
    made = {
        (ins, outs): (
            torch.randn(tokens, ins).to(dtype),
            torch.randn(outs, ins).to(dtype),
            torch.randn(tokens, outs).to(dtype),
        )
        for ins, outs in set(shapes)
    }
    documents = len(case.documents)
    q, k, v = (
        torch.randn(documents, n, case.documents[0], dim).to(dtype).requires_grad_()
        for n in (heads, keys, keys)
    )

    def step(_: MicroBatch) -> float:
        for shape in shapes:
            x, w, dy = made[shape]
            for left, right in ((x, w.T), (dy, w), (dy.T, x)):
                torch.mm(left, right)
        for _layer in range(hf["num_hidden_layers"]):
            y = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=True
            )
            torch.autograd.grad(y, (q, k, v), torch.ones_like(y))
        return float("nan")

    return step


def ways_of(case: Case, folder: Path, *, mixed: bool) -> dict[str, Step]:
    """Those of others."""
    found = {"loop with peft" if case.adapters else "loop": loop_of_users}
    if not case.adapters:
        found |= {"floor": floor}
        if case.model is None:
            found |= {"Trainer": trainer, "SFTTrainer": sft_trainer}
    ways: dict[str, Step] = {}
    for name, make in found.items():
        needed = {"loop with peft": "peft", "SFTTrainer": "trl"}.get(name, "transformers")
        if importlib.util.find_spec(needed) is None:
            print(f"  {name}: {needed} is not installed, and is missing here")
        else:
            ways[name] = make(case, folder, mixed=mixed)
    return ways


def measure(case: Case, folder: Path, *, mixed: bool, compiled: bool) -> None:
    """Print how fast each way is, and ours against it."""
    step, rows = ours(case, folder, mixed=mixed, compiled=compiled)
    ways = {"ours": step, **ways_of(case, folder, mixed=mixed)}
    if case.model is None:
        ways[BACKEND], _ = ours(case, folder, mixed=mixed, compiled=False, backend="transformers")
    dtype = "bf16" if mixed else "fp32"
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number, batch in enumerate(rows[: WARM + ROUNDS]):
        losses = {}
        for name, way in ways.items():
            used = time.process_time()
            losses[name] = way(batch)
            if number >= WARM:
                seconds[name].append(time.process_time() - used)
        if not number:
            said = ", ".join(f"{name} {loss:.4f}" for name, loss in losses.items() if loss == loss)
            print(f"  first loss {said}")
    tokens = sum(case.documents)
    speed = {name: tokens / statistics.median(used) for name, used in seconds.items()}
    loop = speed["loop with peft" if case.adapters else "loop"]
    if BACKEND in speed:
        wanted = 2.5 if len(case.documents) > 1 else 1.0
        print(f"  {BACKEND} is {speed[BACKEND] / loop:.2f} x the loop (goal {wanted:g})")
    for name, each in speed.items():
        goal = case.goals.get((dtype, name))
        wanted = f" (goal {goal:g})" if goal else ""
        ratio = "" if name == "ours" else f"   ours {speed['ours'] / each:5.2f} x{wanted}"
        print(f"  {name:26} {each:8.0f} tokens per CPU second{ratio}", flush=True)


def main(cases: Sequence[Case] = CASES) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="A folder with a real model.")
    parser.add_argument("--case", help="Only the case of this name.")
    parser.add_argument("--dtype", choices=["bf16", "fp32"])
    parser.add_argument("--compile", action="store_true", help="train.enable_compile")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    for case in (*cases, *(cases_of(asked.model) if asked.model else ())):
        if asked.case not in (None, case.name):
            continue
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            write_documents(
                folder / "packed",
                num_rows=WARM + ROUNDS + 1,
                documents=case.documents,
                vocabulary=case.vocabulary,
            )
            if case.model is None:
                runs.write_config(folder / "model", **case.hf_config)
                save_file(weights(case.hf_config), folder / "model" / "model.safetensors")
            for dtype in ("bf16", "fp32"):
                if asked.dtype in (None, dtype):
                    print(f"{case.name}, {dtype}")
                    measure(case, folder, mixed=dtype == "bf16", compiled=asked.compile)


if __name__ == "__main__":
    main()
