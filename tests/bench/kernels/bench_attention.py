"""Attention over packed documents: `python -m tests.bench.kernels.bench_attention [--alone]
[--dry]`.

First attention alone, forward and backward, each backend that serves here: beside one call over the
whole row with a mask of its square, which is what transformers' models make of packed rows, and
beside one call over as many rows of one document each, which is as fast as documents of one length
can be (goal on a GPU: at least 0.9 of its speed).

Then, on a CPU, a whole training step of a small Qwen3 on a row of eight documents of 512 tokens,
beside transformers' model on the same row with the same optimizer, in one thread: tokens per CPU
second (goal: at least 2.5 times as many).

Packages that are not installed are named as missing. Figures of a CPU go to docs/benchmarks/cpu.md.
With `--dry` attention runs over few tokens.
"""

import argparse
import platform
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from tests.bench.bench_train import SEED, weights
from tests.bench.data.packed import write_documents
from tests.bench.pages import write_section
from tests.bench.timing import CUDA, DEVICE, Work, medians, processor_seconds, verdict
from tests.engine import loops, runs

from penstock.engine.distributed.ranks import ProcessInfo, destroy_process_group, init_process_group
from penstock.rows.collate import MicroBatch
from penstock.train.dataloader import read
from penstock_kernels.attention import VarlenMetadata, attention

TITLE = "Attention over packed documents"
OF_ROWS = 0.9
DOCUMENTS = [2048] * 8 if CUDA else [512] * 8
MIXED = [1300, 37, 611, 420, 1009, 90, 5, 624]
DRY = {"of one length": [24] * 3, "mixed": [5, 30, 11]}
HEADS, KEY_HEADS, WIDTH = (32, 8, 128) if CUDA else (4, 2, 64)
SCALE = WIDTH**-0.5
VOCABULARY = 4096
HF_CONFIG = {
    **runs.TINY,
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "initializer_range": 0.02,
}


def alone(lengths: Sequence[int], dtype: torch.dtype) -> list[str]:
    """Attention by itself, forward and backward."""
    torch.manual_seed(0)
    total = sum(lengths)
    sizes = [(total, heads, WIDTH) for heads in (HEADS, KEY_HEADS, KEY_HEADS, HEADS)]
    q, k, v, dy = (torch.randn(size, device=DEVICE, dtype=dtype) for size in sizes)
    given = [part.requires_grad_() for part in (q, k, v)]
    documents = VarlenMetadata.of(lengths, DEVICE)
    works: dict[str, Work] = {}
    refusals: dict[str, list[str]] = {}
    for name in ("eager", *attention.fast):
        fast = attention.fast.get(name)
        if fast and (
            reason := fast.unsupported_reason(q, k, v, documents, SCALE) or fast.missing_reason
        ):
            refusals.setdefault(reason, []).append(name)
            continue
        attend = attention.backend(name)
        works[name] = lambda attend=attend: torch.autograd.grad(
            attend(q, k, v, documents, SCALE), given, dy
        )
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    mask = ((document[:, None] == document) & torch.ones(total, total).bool().tril()).to(DEVICE)

    def dense(rows: int, attn_mask: torch.Tensor | None) -> Work:
        def work() -> object:
            parts = [part.unflatten(0, (rows, -1)).transpose(1, 2) for part in given]
            if CUDA and attn_mask is not None:
                # No fused kernel takes a mask and grouped heads.
                group = HEADS // KEY_HEADS
                parts[1:] = (part.repeat_interleave(group, dim=1) for part in parts[1:])
            y = F.scaled_dot_product_attention(
                *parts,
                attn_mask=attn_mask,
                is_causal=attn_mask is None,
                scale=SCALE,
                enable_gqa=True,
            )
            return torch.autograd.grad(y.transpose(1, 2).flatten(0, 1), given, dy)

        return work

    works["whole row, masked"] = dense(1, mask)
    of_one = "rows of one document"
    if len(set(lengths)) == 1:
        works[of_one] = dense(len(lengths), None)
    found = medians(works, processor_seconds)
    lines = [f"  missing: {', '.join(names)}: {reason}" for reason, names in refusals.items()]
    for name, seconds in found.items():
        ratios = [
            f"{found[other] / seconds:6.2f} x {other}"
            for other in ("whole row, masked", of_one)
            if other in found and name in ("eager", *attention.fast)
        ]
        lines.append("  ".join([f"  {name:24} {1e3 * seconds:8.1f} ms", *ratios]))
    if CUDA and of_one in found:
        ours = min(seconds for name, seconds in found.items() if name in attention.fast)
        lines.append(f"  {verdict(f'best of {of_one}', found[of_one] / ours, OF_ROWS)}")
    return lines


def our_step(
    folder: Path, ranks: ProcessInfo, *, mixed: bool
) -> tuple[Callable[[], float], MicroBatch]:
    """A step of our loop, and the row that each trains on."""
    run = runs.run_config(
        folder / "out",
        folder / "model",
        data_parallel_mode="none",
        enable_mixed_precision=mixed,
        enable_gradient_checkpointing=False,
        global_batch_size=1,
        max_steps=1000,
        num_train_epochs=1000,
        optimizer="adamw",
        lr=1e-4,
        max_grad_norm=1.0,
        seed=SEED,
    )
    loop = loops.loop_of(runs.job_of(run, folder / "packed"), ranks)
    [batch] = read(loop.rows, next(iter(loop._steps())), loop.reading)
    return lambda: loops.step(loop)["loss"], batch


def their_step(batch: MicroBatch, *, mixed: bool) -> Callable[[], float]:
    """A step of transformers' model from the same weights on that row, as its Trainer makes it:
    under autocast where it is bf16. Documents are told by position ids alone."""
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(**HF_CONFIG),
        attn_implementation="sdpa",
        dtype=torch.float32,
    )
    model.load_state_dict(weights(HF_CONFIG), strict=False)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    labels = batch.labels_T[None]

    def step() -> float:
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
            loss = model(
                input_ids=batch.input_ids_T[None],
                position_ids=batch.position_ids_T[None],
                attention_mask=None,
                use_cache=False,
                labels=labels,
                shift_labels=labels,
            ).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step


def steps(folder: Path, ranks: ProcessInfo, *, mixed: bool) -> list[str]:
    """Whole training steps."""
    ours, batch = our_step(folder, ranks, mixed=mixed)
    theirs = their_step(batch, mixed=mixed)
    lines = [f"  first loss: ours {ours():.5f}, transformers {theirs():.5f}"]
    found = medians({"ours": ours, "transformers": theirs}, processor_seconds)
    tokens = sum(DOCUMENTS)
    lines += [f"  {name:24} {tokens / used:8.0f} tokens/CPU s" for name, used in found.items()]
    ratio = found["transformers"] / found["ours"]
    return [*lines, f"  ours / transformers {ratio:.2f} (goal 2.5)"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dtype", choices=["bf16", "fp32"])
    parser.add_argument("--alone", action="store_true", help="no whole steps")
    parser.add_argument("--dry", action="store_true", help="few tokens, and no whole steps")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    lines: list[str] = []

    def say(title: str, found: Sequence[str]) -> None:
        for line in (title, *found):
            print(line, flush=True)
            lines.append(line)

    # GPUs have fused kernels for 16 bits.
    known = ("bf16",) if CUDA else ("bf16", "fp32")
    dtypes = [asked.dtype] if asked.dtype else known
    documents = [DRY["of one length"], DRY["mixed"]] if asked.dry else [DOCUMENTS, MIXED]
    for name in dtypes:
        dtype = torch.bfloat16 if name == "bf16" else torch.float32
        for lengths in documents:
            told = lengths[0] if len(set(lengths)) == 1 else lengths
            say(f"attention, documents of {told}, {name}", alone(lengths, dtype))
    if not (asked.alone or asked.dry or CUDA):
        ranks = init_process_group(600)
        for name in dtypes:
            with tempfile.TemporaryDirectory() as made:
                folder = Path(made)
                rows = {"num_rows": 2, "documents": DOCUMENTS, "vocabulary": VOCABULARY}
                write_documents(folder / "packed", **rows)
                runs.write_config(folder / "model", **HF_CONFIG)
                say(f"a whole step, {name}", steps(folder, ranks, mixed=name == "bf16"))
        destroy_process_group()
        if asked.dtype is None:
            machine = f"{platform.machine()}, one thread, PyTorch {torch.__version__}."
            page = ["Written by `tests/bench/kernels/bench_attention.py`.", "", machine]
            write_section("cpu", TITLE, [*page, "", "```", *lines, "```"])


if __name__ == "__main__":
    main()
