"""Cost estimates before a run: memory per rank, step time, tokens, steps, disk. No torch."""

from dataclasses import dataclass, replace

from penstock.config.schema.run import RunConfig
from penstock.engine.distributed.parallel_dims import ParallelDims, rows_per_step
from penstock.estimate.costs.device_speed import Machine
from penstock.estimate.costs.disk import Disk, estimate_disk
from penstock.estimate.costs.durations import Step, estimate_forward, estimate_step
from penstock.estimate.costs.memory import Memory, peak_memory
from penstock.estimate.costs.sharded_model import ShardedModel, UnshardedModel
from penstock.estimate.costs.token_counts import Data, Length, estimate_length, estimate_work
from penstock.estimate.costs.vision import vision_work
from penstock.models.automodel.outline import AutoModelConfig
from penstock.models.flops import step_flops
from penstock.models.hf_config import HfConfig
from penstock.models.quantization_config import parse_quantization_config
from penstock.models.registry import get_family
from penstock.reference.settings import unread_rows_line


@dataclass(frozen=True)
class Prediction:
    """Estimated costs of one run with one parallel layout."""

    degrees: ParallelDims
    machine: Machine
    memory: Memory
    """Peak memory of the rank with the highest peak."""
    step: Step | None
    """None if the speed of the machine is unknown."""
    rows_per_step: int
    tokens_per_step: int
    flops_per_step: float
    length: Length | None
    disk: Disk
    reference_seconds: float | None = None
    """Time of the reference stage: one forward pass over all training rows. None without a
    reference stage, or if unknown."""
    unread_rows: str | None = None
    """Line about reference log-probs that training does not read; None without any."""

    @property
    def fits(self) -> bool | None:
        """Whether peak memory fits; None if the memory of the device is unknown."""
        limit = self.machine.memory
        return None if limit is None else self.memory.total <= USABLE_MEMORY * limit

    @property
    def seconds(self) -> float | None:
        """Time of all steps, without an earlier end by `max_hours` or `early_stopping`."""
        if self.step is None or self.length is None:
            return None
        return self.step.total * self.length.steps


USABLE_MEMORY = 0.92
"""Share of device memory available to tensors; the rest is for libraries and fragmentation."""


def build_cost_model(run: RunConfig, hf_config: HfConfig) -> UnshardedModel:
    """Build the unsharded model. Raises CapabilityError for an unsupported model."""
    family = get_family(hf_config, run.model.backend, adapters=run.lora.enable_lora)
    keeps_codes = run.model.model_path is not None and run.lora.enable_qlora
    published = parse_quantization_config(hf_config) if keeps_codes else None
    config = family.trained_config(hf_config, mtp=run.train.mtp_loss_weight > 0)
    return UnshardedModel.from_run(run, family, config, published)


def with_images(
    model: UnshardedModel, run: RunConfig, hf_config: HfConfig, data: Data | None
) -> UnshardedModel:
    """The model with its vision part, if the data has images whose features are not stored. Models
    of transformers have it."""
    has_vision = isinstance(model.config, AutoModelConfig)
    if data is None or not data.image_tokens or run.data.encode_images or has_vision:
        return model
    return replace(model, vision=vision_work(run, hf_config, data.image_tokens, data.rows))


def predict(
    run: RunConfig,
    model: UnshardedModel,
    degrees: ParallelDims,
    machine: Machine,
    data: Data | None,
) -> Prediction:
    """Estimate the costs of the run with this layout on this machine."""
    sharded = ShardedModel(run, model, degrees, machine.kind)
    rows = rows_per_step(run.train, degrees.num_replicas)
    length = estimate_length(run, data, rows)
    work = estimate_work(model.config, run, data, rows)
    epochs = float(run.train.num_train_epochs)
    if length and data and length.set_by != "num_train_epochs":
        epochs = length.tokens * len(data.epoch_rows) / max(1, data.tokens)
    reference_seconds = unread_rows = None
    if "reference" in run.stages and data:
        if forward := estimate_forward(sharded, machine, work):
            reference_seconds = forward.total * data.rows / rows
        if length:
            unread_rows = unread_rows_line(length.steps * rows, data.rows, length.set_by)
    return Prediction(
        degrees=degrees,
        machine=machine,
        memory=peak_memory(sharded),
        step=estimate_step(sharded, machine, work),
        rows_per_step=rows,
        tokens_per_step=work.tokens,
        flops_per_step=step_flops(model.config, work, learning=model.trainable)
        + (model.vision.flops(rows) if model.vision else 0.0),
        length=length,
        disk=estimate_disk(sharded, data, length.steps if length else None, epochs),
        reference_seconds=reference_seconds,
        unread_rows=unread_rows,
    )
