"""Pipeline stage modules: which modules of a model each pipeline rank holds."""

from penstock.config.schema.train import TrainConfig
from penstock.engine.distributed.pipeline_stages import layers_of_stages, stages_of_rank
from penstock.models.decoder import PipelineStageModules
from penstock.models.decoder_config import DecoderConfig


def build_stage_modules(
    config: DecoderConfig, train: TrainConfig, index: int
) -> list[PipelineStageModules]:
    """The modules of the rank at `index` in its pipeline, in stage order.

    Raises ConfigError as `layers_of_stages` does.
    """
    if train.pipeline_parallel_size == 1:
        return [PipelineStageModules.all_of(config)]
    layers = layers_of_stages(train, config.num_hidden_layers)
    last = len(layers) - 1
    return [
        PipelineStageModules(layers[stage], begins=stage == 0, ends=stage == last)
        for stage in stages_of_rank(train, index)
    ]
