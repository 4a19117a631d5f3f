"""Settings that determine the content of packed rows, besides the samples."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from penstock.config.schema.base import Settings
from penstock.config.schema.preference import KLPairing
from penstock.rows.row_length import SHORTEST, RowLength


class PackSettings(Settings):
    """Cache identity of packed data."""

    sample_packing_method: Literal["sequential", "multipack", "greedy", "wrapped"] = "sequential"
    """`sequential`: next fit in sample order; `multipack`: as few rows as possible; `greedy`: each
    sample goes to the row with the most room; `wrapped`: samples are concatenated and split."""

    sample_packing_sequence_len: int = Field(default=32_000, gt=0)
    """Maximum tokens per row."""

    row_length: RowLength = "written"
    """`written`: rows have `sample_packing_sequence_len` tokens. `fitted`: the row length is chosen
    from the samples, with `sample_packing_sequence_len` as upper bound."""

    row_multiple: int = Field(default=SHORTEST, gt=0)
    """`fitted`: the row length is a multiple of this, to which rows are padded when loaded."""

    rows_per_step: int | None = Field(default=None, gt=0)
    """`fitted`: rows of an optimizer step, which is to have enough samples. None: rows do not
    depend on it."""

    sample_packing_group_size: int = Field(default=100_000, gt=0)
    """`multipack` and `greedy`: number of consecutive samples that are packed together."""

    eval_sample_packing: Annotated[bool, BeforeValidator(lambda value: value is None or value)] = (
        True
    )
    """Whether validation samples are packed; otherwise each has its own row."""

    num_shards: int | None = Field(default=None, gt=0)
    """Files per split (None: by size), at most one per row."""

    seed: int = 42
    """`multipack`: random seed of the packing and of the row order."""

    share_prompts: bool = True
    """Prefix sharing: whether the completions of a sample share the prompt's tokens."""

    kl_pairing: KLPairing | None = None
    """KTO: which completion each sample is paired with (`preference.kl_pairing`); None for other
    data."""

    kl_rotation_size: int | None = Field(default=None, gt=0)
    """`rotate`: number of consecutive samples in which completions rotate; None: all."""

    kl_max_len: int | None = Field(default=None, gt=0)
    """KTO: maximum tokens of a prompt with the mismatched completion, unless the sample itself is
    longer; None: no limit."""
