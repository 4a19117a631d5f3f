"""Small real runs for engine tests: packed rows, a config, one rank's share of training."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
import transformers
from torch.distributed.tensor import DTensor

from penstock.config.loading.load import loads
from penstock.config.schema.run import RunConfig
from penstock.engine.distributed.ranks import init_process_group
from penstock.rows.schema import PACKED
from penstock.train.launch.job import Job
from penstock.train.launch.stop_request import StopRequest
from penstock.train.rank import run_rank
from tests.models.stored import write_published

VOCAB = 320
LR = 0.05

TINY = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "initializer_range": 0.05,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "use_sliding_window": False,
}


def write_rows(folder: Path, num_rows: int, *, seed: int = 0, split: str = "train") -> Path:
    """Random packed rows of uneven documents, half of their tokens trained."""
    rng = np.random.default_rng(seed)
    rows: dict[str, list[Any]] = {"input_ids": [], "labels": [], "lengths": []}
    for _ in range(num_rows):
        lengths = rng.integers(1, 40, size=int(rng.integers(1, 6))).tolist()
        ids = rng.integers(0, VOCAB, size=sum(lengths))
        labels = np.where(rng.random(len(ids)) < 0.5, np.roll(ids, -1), -100)
        labels[np.cumsum(lengths) - 1] = -100
        rows["input_ids"].append(ids.tolist())
        rows["labels"].append(labels.tolist())
        rows["lengths"].append(lengths)
    data = folder / "data" / split
    data.mkdir(parents=True)
    table = pa.table(rows, schema=PACKED)
    with pa.ipc.new_file(str(data / "rows-00000-of-00001.arrow"), PACKED) as writer:
        writer.write_table(table)
    return folder


def write_config(folder: Path, **changes: Any) -> Path:
    """A folder with a tiny model's config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**TINY, **changes}))
    return folder


def write_model(folder: Path, *, seed: int = 0, noise: float = 0.05, **changes: Any) -> Path:
    """A folder of a tiny model's random weights, of which no tensor is ones or zeros: norms must
    differ from 1, and sinks and biases from 0, to be told apart."""
    config = transformers.AutoConfig.for_model(**{**TINY, **changes})
    config.dtype = torch.float32
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(noise * torch.randn_like(parameter))
            if config.model_type == "gemma4_text" and name.endswith("q_norm.weight"):
                parameter.mul_(0.2)  # scores have no other factor
            if name.endswith("A_log"):
                parameter.sub_(4)  # a state that is forgotten at once has no gradient but rounding
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.add_(noise * torch.randn_like(buffer))
    model.save_pretrained(folder)
    write_published(model, folder)
    return folder


def run_config(out: Path, model: Path, /, **train: Any) -> RunConfig:
    """A config in full precision with a global batch of 4 rows."""
    names = ("model", "data", "lora", "preference", "launch")
    sections = {name: train.pop(name, {}) for name in names}
    settings = {
        "output_dir": str(out),
        "enable_mixed_precision": False,
        "global_batch_size": 4,
        "num_train_epochs": 1,
        "lr": LR,
        "seed": 7,
        "save_epochs": 0,
        "save_hf_weights": False,
        "log_format": "structured",
        **train,
    }
    return loads(
        {
            "model": {"config_path": str(model), **sections["model"]},
            "data": {
                "datasets": [{"path": "dummy"}],
                "sample_packing_sequence_len": 256,
                **sections["data"],
            },
            "train": settings,
            "lora": sections["lora"],
            "preference": sections["preference"],
            "launch": sections["launch"],
        }
    )


def job_of(
    run: RunConfig,
    packed: Path,
    key: str = "a" * 64,
    epoch_rows: tuple[int, ...] = (),
    adapter: Path | None = None,
    tokenizer: str | None = None,
    initial: Path | None = None,
) -> Job:
    """The job a train stage would hand to its ranks."""
    out = Path(run.train.output_dir)
    out.mkdir(parents=True, exist_ok=True)
    weights = Path(run.model.model_path) if run.model.model_path else None
    return Job(
        key=key,
        config=run,
        packed_dir=packed,
        packed_key="c" * 64,
        epoch_rows=epoch_rows,
        max_token_id=VOCAB - 1,
        config_path=str(run.model.config_path or run.model.model_path),
        weights=weights,
        output_dir=out,
        launch_id="test",
        adapter=adapter,
        tokenizer=tokenizer,
        init_checkpoint=initial,
    )


def short_job(folder: Path, out: str, **train: Any) -> Job:
    """A run of one step in one process, with the rows and the model in `folder`."""
    settings = {"data_parallel_mode": "none", "max_steps": 1, **train}
    return job_of(run_config(folder / out, folder / "model", **settings), folder / "packed")


def train_here(job: Job, stop: StopRequest | None = None) -> dict[str, Any] | None:
    """Train on this rank of a running group (or alone); the facts, or None when stopped."""
    torch.set_num_threads(1)
    return run_rank(job, init_process_group(60), StopRequest() if stop is None else stop)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The full value of a parameter or gradient, on every rank."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def losses(out: Path) -> list[float]:
    """The loss of each step, from the metrics."""
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [record["loss"] for record in records if "loss" in record]
