"""The model of a run with `model.encoders`: composed before the run is planned, unless it is
cached. Imports no torch for a cached one."""

import sys

from penstock.compose.stage import MODEL, Compose, ComposeSettings, PinnedPart
from penstock.config.schema.run import RunConfig
from penstock.core.cache.stage import Source
from penstock.core.cache.store import PlannedStage, find_cached, get_or_build
from penstock.core.sources.pin import pin_config, pin_encoder, pin_model, pin_tokenizer
from penstock.models.builtin import SCHEME


def with_composed_model(run: RunConfig) -> RunConfig:
    """The run with the composed model as `model.model_path`, if it has encoders. Composes it if
    that was not done before.

    Raises ConfigError and CapabilityError for parts that cannot be put together, and what the store
    raises.
    """
    return use_composed_model(compose_step(run), run) if run.model.encoders else run


def use_composed_model(step: PlannedStage, run: RunConfig) -> RunConfig:
    """The run with the model of `step`, its `compose_step`. Raises as `with_composed_model`."""
    assert isinstance(step.stage, Compose)
    if find_cached(step) is None:
        step.stage.check()
        _say(f"compose: a vision-language model, in {step.where}")
    get_or_build(step, verify=run.pipeline.verify, notify=_say)
    return run.with_fields(
        "model",
        model_path=str(step.path / MODEL),
        config_path=None,
        tokenizer_path=None,
        foundation={},
        encoders={},
    )


def compose_step(run: RunConfig) -> PlannedStage:
    """The step that composes the model of a run with an image encoder."""
    model, encoder = run.model, run.model.encoders["image"]
    image_path = encoder.config_source
    stage = Compose(
        settings=ComposeSettings(
            projector=encoder.projector,
            scale_factor=encoder.scale_factor if encoder.projector == "pixel_shuffle" else None,
            seed=run.train.seed,
            foundation=model.foundation,
        ),
        text=_part(pin_config(model.config_source), model.config_source, model.model_path),
        tokenizer=pin_tokenizer(model.tokenizer_source),
        tokenizer_path=model.tokenizer_source,
        image=_part(pin_encoder(image_path), image_path, encoder.model_path),
    )
    return PlannedStage.in_root(stage, run.pipeline.artifacts_path)


def _part(config: Source, config_path: str, model_path: str | None) -> PinnedPart:
    typed = None if model_path is None or model_path.startswith(SCHEME) else model_path
    return PinnedPart(config, config_path, pin_model(typed) if typed else None, typed)


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
