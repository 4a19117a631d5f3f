"""How the stored samples of the training sources are mixed, as the settings say."""

from collections.abc import Sequence

from penstock.core.errors import StageError
from penstock.prepare.settings import MixSettings, PrepareSettings
from penstock.rows.sample_order import DatasetMixer, expected_draws

MAX_DRAWS = 1 << 28
"""Samples of an epoch that `interleave_over` draws at most: their order must fit memory."""


def build_mixer(settings: PrepareSettings, mean_tokens: Sequence[float] = ()) -> DatasetMixer:
    """How samples become epochs.

    `mean_tokens` are those of a sample of each training source. Where weights are shares of tokens,
    a source whose samples are twice as long gives half as many.
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
    """How much of one source is used."""
    return mix[dataset] if mix else MixSettings()


def check_mix(
    num_rows: Sequence[int],
    labels: Sequence[str],
    settings: PrepareSettings,
    mean_tokens: Sequence[float] = (),
) -> None:
    """Raise StageError for a source that is drawn from and holds nothing, and for an epoch that is
    too large. `num_rows`, `labels` and `mean_tokens` are those of the training sources."""
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
            f"that they would last for {max(draws):.0f} draws; {MAX_DRAWS} are the most.\n"
            "  Raise its weight, or write mix_strategy: random with data.samples_per_epoch."
        )
