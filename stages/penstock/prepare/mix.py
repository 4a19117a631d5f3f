"""Mixing of training sources according to the settings."""

from collections.abc import Sequence

from penstock.core.errors import StageError
from penstock.prepare.settings import MixSettings, PrepareSettings
from penstock.rows.sample_order import DatasetMixer, expected_draws

# Maximum samples per epoch with `interleave_over`, because their order must fit in memory.
MAX_DRAWS = 1 << 28


def build_mixer(settings: PrepareSettings, mean_tokens: Sequence[float] = ()) -> DatasetMixer:
    """Build the mixer of the training sources.

    `mean_tokens` is the mean sample length of each source. If weights are shares of tokens, a
    source with samples twice as long contributes half as many.
    """
    weights = tuple(mix_settings(settings.mix, of).weight for of in range(len(settings.datasets)))
    if settings.weight_unit == "tokens" and mean_tokens:
        pairs = zip(weights, mean_tokens, strict=True)
        weights = tuple(weight / mean if weight else 0.0 for weight, mean in pairs)
    return DatasetMixer(
        seed=settings.seed,
        strategy=settings.mix_strategy,
        weights=weights,
        samples_per_epoch=settings.samples_per_epoch,
        epochs=settings.epochs,
        shuffle_before_merging_datasets=settings.shuffle_before_merging_datasets,
        shuffle_merged_datasets=settings.shuffle_merged_datasets,
    )


def mix_settings(mix: Sequence[MixSettings], dataset: int) -> MixSettings:
    """Mix settings of one source."""
    return mix[dataset] if mix else MixSettings()


def check_mix(
    num_rows: Sequence[int],
    labels: Sequence[str],
    settings: PrepareSettings,
    mean_tokens: Sequence[float] = (),
) -> None:
    """Raise StageError for a source with a weight but no samples, and for an epoch that is too
    large. `num_rows`, `labels` and `mean_tokens` are per training source."""
    if settings.mix_strategy == "concat":
        return
    mixing = build_mixer(settings, mean_tokens)
    for of, (rows, share) in enumerate(zip(num_rows, mixing.shares, strict=True)):
        if share and not rows:
            raise StageError(
                f"No sample of {labels[of]} (data.datasets.{of}) is left, and mix_strategy: "
                f"{settings.mix_strategy} draws from it.\n  Set its weight to 0, or leave it out."
            )
    draws = expected_draws(num_rows, mixing)
    if settings.mix_strategy == "interleave_over" and max(draws) > MAX_DRAWS:
        of = draws.index(max(draws))
        raise StageError(
            f"{labels[of]} (data.datasets.{of}) has {num_rows[of]} samples and so small a weight "
            f"that an epoch would have {max(draws):.0f} draws; the maximum is {MAX_DRAWS}.\n"
            "  Raise its weight, or write mix_strategy: random with data.samples_per_epoch."
        )
