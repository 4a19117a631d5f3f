"""Short models on fake GPUs: layouts, their jobs, and what their dry runs found."""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.config.schema.run import RunConfig
from penstock.engine.distributed.parallel_dims import ParallelDims, compute_dims
from penstock.estimate.costs.device_speed import find_machine
from penstock.estimate.costs.estimate import build_cost_model, predict
from penstock.estimate.dryrun.dry_run import RankChoice, run_jobs, select_ranks, summarize
from penstock.estimate.dryrun.job import DryRunJob
from penstock.estimate.dryrun.summary import DryRun
from tests.engine import runs

DENSE: dict[str, Any] = {
    "vocab_size": 32_000,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}
MOE: dict[str, Any] = {
    **DENSE,
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "moe_intermediate_size": 1024,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
GEMMA3: dict[str, Any] = {
    **DENSE,
    "model_type": "gemma3_text",
    "architectures": ["Gemma3ForCausalLM"],
    "sliding_window": 1024,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "rope_parameters": {"full_attention": {"rope_theta": 1e6}},
}
OLMO2: dict[str, Any] = {
    **DENSE,
    "model_type": "olmo2",
    "architectures": ["Olmo2ForCausalLM"],
}
LATENT: dict[str, Any] = {
    **DENSE,
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "num_hidden_layers": 2,
    "num_key_value_heads": 16,
    "head_dim": None,
    "q_lora_rank": 768,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "moe_intermediate_size": 1024,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
}
SPARSE: dict[str, Any] = {
    **LATENT,
    "model_type": "deepseek_v32",
    "architectures": ["DeepseekV32ForCausalLM"],
    "index_topk": 512,
    "index_n_heads": 16,
    "index_head_dim": 128,
}
LINEAR: dict[str, Any] = {
    **DENSE,
    "model_type": "qwen3_5_text",
    "architectures": ["Qwen3_5ForCausalLM"],
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
PHI3: dict[str, Any] = {**DENSE, "model_type": "phi3", "architectures": ["Phi3ForCausalLM"]}

DEVICE = "H100"
ROW = 8192


@dataclass(frozen=True)
class Case:
    """A layout of a short model."""

    world: int = 8
    model: Mapping[str, Any] = field(default_factory=lambda: DENSE)
    train: Mapping[str, Any] = field(default_factory=dict)
    lora: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Of the section `model`."""
    preference: Mapping[str, Any] | None = None
    """The loss, and `share_prompts` of the data; None: supervised fine-tuning."""
    row: int = ROW

    def config(self, folder: Path) -> RunConfig:
        """The run, with its model's config in `folder`."""
        model = runs.write_config(folder / "model", **self.model)
        train = {"enable_mixed_precision": True, "global_batch_size": None, **self.train}
        data: dict[str, Any] = {"sample_packing_sequence_len": self.row}
        loss = dict(self.preference or {})
        if self.preference is not None:
            train["objective"] = "preference"
            data["share_prompts"] = loss.pop("share_prompts", True)
            kind = "kto" if loss.get("loss_type") == "kto" else "preference"
            data["datasets"] = [{"path": "dummy", "type": kind}]
        return runs.run_config(
            folder / "out",
            model,
            lora=dict(self.lora),
            model=dict(self.settings),
            preference=loss,
            data=data,
            **train,
        )

    def jobs(self, folder: Path, ranks: RankChoice = "roles") -> list[DryRunJob]:
        """The jobs of its ranks, whose results are written to `folder`."""
        run = self.config(folder)
        dims = self.dims(run)
        return [
            DryRunJob.build(
                run,
                {**runs.TINY, **self.model},
                dims,
                rank=rank,
                device=DEVICE,
                local_ranks=8,
                folder=folder,
            )
            for rank in select_ranks(dims, ranks)
        ]

    def dims(self, run: RunConfig) -> ParallelDims:
        """The parallel dimensions of its run."""
        dims = compute_dims(run.train, self.world)
        assert isinstance(dims, ParallelDims), dims
        return dims


def dry_runs(cases: Mapping[str, Case], ranks: RankChoice = "roles") -> dict[str, DryRun]:
    """Run the cases dry in one process, by name."""
    found: dict[str, DryRun] = {}
    with tempfile.TemporaryDirectory() as name:
        planned = {each: case.jobs(Path(name) / each, ranks) for each, case in cases.items()}
        results = iter(run_jobs([job for jobs in planned.values() for job in jobs]))
        for each, jobs in planned.items():
            dims = cases[each].dims(jobs[0].run())
            found[each] = summarize(dims, DEVICE, [next(results) for _ in jobs])
    return found


def estimated_memory(case: Case) -> float:
    """Peak bytes as `penstock plan` computes them from shapes."""
    with tempfile.TemporaryDirectory() as folder:
        run = case.config(Path(folder))
    model = build_cost_model(run, {**runs.TINY, **case.model})
    return predict(run, model, case.dims(run), find_machine(DEVICE), None).memory.total
