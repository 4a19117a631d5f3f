"""What decides the content of packed rows, besides the samples."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from penstock.config.schema.base import Settings
from penstock.config.schema.preference import KLPairing
from penstock.rows.row_length import SHORTEST, RowLength


def _unset_is_true(value: Any) -> Any:
    return True if value is None else value


class PackSettings(Settings):
    """The identity of packed data."""

    sample_packing_method: Literal["sequential", "multipack", "greedy", "wrapped"] = "sequential"
    """`sequential` keeps the order of the samples; `multipack` fills rows best; `greedy` puts each
    sample where most room is; `wrapped` cuts one stream of samples into full rows."""

    sample_packing_sequence_len: int = Field(default=32_000, gt=0)
    """Tokens a row holds at most."""

    row_length: RowLength = "written"
    """`written`: a row holds as many tokens as `sample_packing_sequence_len` says. `fitted`: the
    length follows from the samples, and `sample_packing_sequence_len` is its upper bound."""

    row_multiple: int = Field(default=SHORTEST, gt=0)
    """`fitted`: the length is a multiple of this, which rows are padded to when they are loaded."""

    sample_packing_group_size: int = Field(default=100_000, gt=0)
    """`multipack` and `greedy`: consecutive samples among which rows are formed."""

    eval_sample_packing: Annotated[bool, BeforeValidator(_unset_is_true)] = True
    """Whether validation is packed too; otherwise each of its samples has a row of its own."""

    num_shards: int | None = Field(default=None, gt=0)
    """Files per split; unset: by size. There are never more files than rows."""

    seed: int = 42
    """`multipack`: which samples share a row, and the order of the rows."""

    share_prompts: bool = True
    """Whether the two answers of a sample share their prompt's tokens."""

    kl_pairing: KLPairing | None = None
    """Judged answers: which answer stands beside each, as in `preference.kl_pairing`. None where
    samples are of another kind."""

    kl_rotation_size: int | None = Field(default=None, gt=0)
    """`rotate`: consecutive samples among which answers rotate; None: all."""

    kl_max_len: int | None = Field(default=None, gt=0)
    """Judged answers: tokens of a prompt with the answer beside its own, at most, unless the sample
    itself has more; None: no limit."""
