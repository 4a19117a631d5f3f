"""A job's model, asked to write, on one rank; and what transformers would have written."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers

from penstock.engine.build import BuiltModel, assemble
from penstock.engine.distributed.ranks import ProcessInfo, init_process_group
from penstock.engine.generation.sequences import GenerationOutput, Prompt, TopKLogprobs
from penstock.engine.hf.config import read_hf_config
from penstock.rows.tokenizer import byte_tokenizer
from penstock.train.launch.job import Job
from tests.engine import runs

Told = dict[str, Any]
"""What is told of a prompt and its answers, as plain numbers: tensors do not outlive their rank."""


def write_model(folder: Path, **changes: Any) -> Path:
    """A folder of random weights of which each token has a mind of its own."""
    return runs.write_model(folder, seed=1, **{"initializer_range": 0.2, **changes})


def read_model(folder: Path) -> Any:
    """The same in transformers."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def job_of(folder: Path, name: str, of: str = "model", **settings: Any) -> Job:
    """A run of one of the folder's models; nothing of it but the model is needed."""
    written = {"model_path": str(folder / of), **settings.pop("model", {})}
    adapter = settings.pop("adapter", None)
    settings = {"data_parallel_mode": "none", **settings}
    run = runs.run_config(folder / name, folder / of, model=written, **settings)
    return runs.job_of(run, folder / "packed", adapter=adapter)


def built_of(job: Job, ranks: ProcessInfo | None = None) -> BuiltModel:
    """The job's model on this rank."""
    torch.set_num_threads(1)
    hf_config = read_hf_config(job.config_path, job.config.model.foundation)
    return assemble(
        job.config,
        hf_config,
        job.weights,
        ranks or init_process_group(60),
        lambda _: None,
        adapter=job.adapter,
    )


def written(built: BuiltModel, prompts: Sequence[Prompt], **limits: Any) -> list[Told]:
    """What the model writes. Stop texts are in bytes as `byte_tokenizer` has them."""
    generator = replace(built.generator, **limits)
    tokenizer = byte_tokenizer()
    return [
        told(each)
        for each in generator.generate(prompts, lambda ids: str(tokenizer.decode(list(ids))))
    ]


def told(answered: GenerationOutput) -> Told:
    """In plain numbers."""
    top_k_logprobs, theirs = ranked(answered.top_k_logprobs)
    return {
        "tokens": [one.tokens for one in answered.completions],
        "log_probs": [one.log_probs for one in answered.completions],
        "ended": [one.finish_reason for one in answered.completions],
        "drawn among": [ranked(one.top_k_logprobs) for one in answered.completions],
        "read": None if answered.log_probs_T is None else answered.log_probs_T.tolist(),
        "top_k_logprobs": top_k_logprobs,
        "theirs": theirs,
    }


def ranked(top_k_logprobs: TopKLogprobs | None) -> tuple[Any, Any]:
    """Tokens and log-probabilities."""
    if top_k_logprobs is None:
        return None, None
    return top_k_logprobs.tokens_TK.tolist(), top_k_logprobs.log_probs_TK.tolist()


@torch.no_grad()
def log_probs_after(model: Any, ids: Sequence[int]) -> torch.Tensor:
    """What transformers foretells after each token, [T, V]; nothing is kept between passes."""
    logits = model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0]
    return logits.float().log_softmax(-1)


def assert_foretold(
    model: Any, prompt: Sequence[int], found: Mapping[str, Any], atol: float
) -> None:
    """Every log-probability that is told is transformers'."""
    for tokens, log_probs in zip(found["tokens"], found["log_probs"], strict=True):
        foretold = log_probs_after(model, [*prompt, *tokens])[len(prompt) - 1 : -1]
        wanted = foretold.gather(1, torch.tensor(tokens)[:, None]).squeeze(1)
        torch.testing.assert_close(torch.tensor(log_probs), wanted, atol=atol, rtol=0)
