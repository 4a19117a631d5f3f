"""RoPE positions in three axes (M-RoPE; Wang et al. 2024, "Qwen2-VL"). T packed tokens.

A text token has one position on all axes. The features of an image or video have that of the token
before it plus 1, and their place in the grid along time, height and width; the text goes on after
the larger of height and width. Positions restart at 0 in each document; those of completions that
share a prompt go on after it.
"""

from collections.abc import Sequence

import numpy as np

from penstock.core.errors import StageError


def image_places(
    input_ids_T: np.ndarray, image_token_ids: int | Sequence[int], token_counts: Sequence[int]
) -> np.ndarray:
    """The places of the image tokens (or those of several kinds of media), in order.

    Raises StageError if there are not as many as the images have.
    """
    positions = np.flatnonzero(np.isin(input_ids_T, image_token_ids))
    if len(positions) != sum(token_counts):
        raise StageError(
            f"a micro-batch has {len(positions)} image tokens (id {image_token_ids}), and its"
            f" {len(token_counts)} images have {sum(token_counts)} features.\n"
            "  The data was prepared for another model or processor: prepare it again."
        )
    return positions


def image_runs(positions: np.ndarray, lengths: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """The first place and the end of each run of image tokens within a document.

    `positions` are those of the image tokens, and `lengths` the document lengths.
    """
    # side="right", as the sum of the lengths up to a document is the first place after it.
    documents = np.searchsorted(np.cumsum(lengths), positions, side="right")
    # -2 is no neighbor of position 0, which so begins a run.
    is_first = (np.diff(positions, prepend=-2) > 1) | (np.diff(documents, prepend=-1) > 0)
    begins = np.flatnonzero(is_first)
    ends = [*(begins[1:] - 1), len(positions) - 1]
    return tuple(
        (int(positions[first]), int(positions[last]) + 1)
        for first, last in zip(begins, ends, strict=True)
    )


def feature_index(positions: np.ndarray, num_tokens: int) -> np.ndarray:
    """The index of each token's image feature, int64 [T]; -1 for other tokens."""
    index_T = np.full(num_tokens, -1, dtype=np.int64)
    index_T[positions] = np.arange(len(positions))
    return index_T


def mrope_positions(
    image_positions: np.ndarray,
    positions_T: np.ndarray,
    lengths: Sequence[int],
    grids: np.ndarray,
    token_counts: Sequence[int],
    merge_size: int,
    intervals: Sequence[float] | None = None,
) -> np.ndarray:
    """Positions on each axis, int64 [T, 3].

    Args:
        image_positions: the places of the image tokens.
        positions_T: positions on one axis, as of text alone.
        lengths: document lengths, whose sum is T.
        grids: patches of each image along time, height and width, [images, 3].
        token_counts: image tokens of each image.
        merge_size: patches per feature along height and width.
        intervals: positions between temporal patches of each image, of which fractions are cut off;
            None: 1.

    Raises StageError if the tokens of an image are not one run in one document, or not as many as
    its grid has.
    """
    ends = np.cumsum(lengths)
    positions_T3 = np.repeat(positions_T, 3).reshape(-1, 3)
    used = 0
    steps = [1.0] * len(token_counts) if intervals is None else intervals
    for (frames, height, width), count, step in zip(
        grids.tolist(), token_counts, steps, strict=True
    ):
        rows, columns = height // merge_size, width // merge_size
        first, last = image_positions[used], image_positions[used + count - 1]
        document = np.searchsorted(ends, first, side="right")
        if frames * rows * columns != count or last - first != count - 1 or last >= ends[document]:
            raise StageError(
                f"an image of {frames} x {rows} x {columns} features has {count} tokens over"
                f" {last - first + 1} places of a micro-batch; they must be as many, without others"
                " between them.\n  Prepare the data again."
            )
        grid_3F = np.indices((frames, rows, columns)).reshape(3, -1)
        # In fp32 and cut off, as transformers computes them.
        grid_3F[0] = grid_3F[0].astype(np.float32) * np.float32(step)
        positions_T3[first : last + 1] = positions_T3[first] + grid_3F.T
        # As text, the image's tokens would have taken `count` positions.
        positions_T3[last + 1 : ends[document]] -= count - max(rows, columns)
        used += count
    return positions_T3
