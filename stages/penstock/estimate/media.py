"""Checks before any work that images, audio and video in the data can be trained on.

Modules about media are imported only where a check needs them: most data has none.
"""

from collections.abc import Iterator, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING

from penstock.config.schema.run import RunConfig
from penstock.core.cache.digest_cache import cached_value
from penstock.core.cache.record import digest_json
from penstock.core.errors import CapabilityError, ConfigError
from penstock.core.remote.urls import redact
from penstock.estimate.machine import resolve_family
from penstock.prepare.stage import Prepare

if TYPE_CHECKING:
    from penstock.media.bounds import MediaBounds


def check_media(run: RunConfig, stage: Prepare, *, packs: bool, trains: bool) -> None:
    """Refuse data whose first records have media that this model or run cannot take, and bounds
    that its processor cannot keep to: what only the stages that read them would find out otherwise.
    Names the data set."""
    from penstock.media.kinds import KINDS

    _check_media_bounds(run, stage)
    checked: set[str] = set()
    for location, kind, suffixes in _first_media(stage):
        try:
            _require_packages(kind, suffixes)
            if kind in checked:
                continue
            checked.add(kind)
            _require_media_processor(run, stage, kind)
            if packs and run.data.sample_packing_method == "wrapped":
                from penstock.pack.plan_rows import wrapped_error

                raise wrapped_error("samples with images")
            if trains:
                _require_trained(run, kind)
        except (ConfigError, CapabilityError) as error:
            raise type(error)(f"{location} has {KINDS[kind].plural}. {error}") from error


def _check_media_bounds(run: RunConfig, stage: Prepare) -> None:
    """Refuse a number of pixels or frames of a data set that no processor of the model keeps to."""
    settings = stage.settings
    for name in ("datasets", "test_datasets"):
        for index, dataset in enumerate(getattr(settings, name)):
            bounds = dataset.media_bounds
            for kind in bounds.kinds:
                location = f"data.{name}.{index}"
                try:
                    is_kept = _has_media_processor(stage, kind, bounds)
                except (ConfigError, CapabilityError) as error:
                    raise type(error)(f"{location}.{error}") from error
                if not is_kept:
                    model = redact(run.model.tokenizer_source)
                    raise ConfigError(
                        f"{location}.{' and '.join(bounds.of(kind))}: {model} has no {kind} "
                        "processor (preprocessor_config.json beside its tokenizer).\n  Leave it "
                        "out, or use another model."
                    )


def _require_trained(run: RunConfig, kind: str) -> None:
    """Refuse a model that is not trained on media of this kind, or settings that cannot be honoured
    with them."""
    from penstock.engine.vision.build import check_videos, checked_vision
    from penstock.engine.vision.image_text import require_audio

    hf_config, family = resolve_family(run)
    config = family.read(hf_config)
    if kind == "audio":
        require_audio(hf_config, config)
    vision = checked_vision(run, hf_config, config, images=True)
    if kind == "video":
        check_videos(config, vision)


def _require_packages(kind: str, suffixes: Sequence[str]) -> None:
    """Refuse files whose names say that packages are needed which are not installed."""
    from penstock.media.kinds import DECODED_BY, has_extra

    decoded = DECODED_BY.get(kind)
    named = [suffix for suffix in suffixes if decoded and suffix in decoded.suffixes]
    if decoded and named and not has_extra(decoded.extra):
        raise CapabilityError(
            f"Files that end in {', '.join(named)} need further packages.\n"
            f"  pip install 'penstock[{decoded.extra}]', or {decoded.otherwise}."
        )


def _first_media(stage: Prepare) -> Iterator[tuple[str, str, Sequence[str]]]:
    """(field of the data set, kind, suffixes of the files' names) of the media in the first records
    of each data set that are read. Data of the hub is not looked at, which may need the network."""
    from penstock.prepare.readers.first_media import find_first_media

    settings = stage.settings
    fields = {
        "datasets": zip(stage.sources, settings.datasets, strict=True),
        "test_datasets": zip(stage.test_sources, settings.test_datasets, strict=True),
    }
    for name, data in fields.items():
        for index, (source, dataset) in enumerate(data):
            is_used = name != "datasets" or not settings.mix or settings.mix[index].weight
            if not is_used or source.pin["kind"] == "hub":
                continue
            media = find_first_media(source, dataset, settings.select_columns, stage.hub_token)
            for kind in sorted(media):
                yield f"data.{name}.{index}", kind, media[kind]


def _require_media_processor(run: RunConfig, stage: Prepare, kind: str) -> None:
    """Refuse a model without a processor of this kind, unless records may be left out for it, and
    one that is not supported."""
    from penstock.media.bounds import UNBOUNDED
    from penstock.media.kinds import KINDS

    name = redact(run.model.tokenizer_source)
    if not _has_media_processor(stage, kind, UNBOUNDED) and not run.data.bad_rows_allowed:
        raise ConfigError(
            f"{name} has no {kind} processor (preprocessor_config.json beside its tokenizer).\n"
            f"  Use a model that takes {KINDS[kind].plural}, or data without them."
        )


def _has_media_processor(stage: Prepare, kind: str, bounds: "MediaBounds") -> bool:
    """Whether the model has a processor of this kind. Raises as `load_processor`, once for each
    tokenizer."""

    def find() -> bool:
        from penstock.media.load import load_processor
        from penstock.rows.tokenizer import load_tokenizer

        path, revision = stage.tokenizer_path, stage.tokenizer.pin.get("commit")
        tokenizer = load_tokenizer(path, revision)
        return load_processor(kind, path, revision, tokenizer, bounds) is not None

    own = [bounds.of(kind)] if bounds.of(kind) else []
    # Which processors there are for the same files depends on the version of transformers.
    cache_key = [f"{kind} processor", version("transformers"), stage.tokenizer.key, *own]
    return cached_value(digest_json(cache_key), find)
