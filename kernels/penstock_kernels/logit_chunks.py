"""Chunk size of the linear cross-entropy. No torch, because the memory estimate uses it too.

With small chunks, a head's matrix is read from memory too often; with large ones, logits fill it.
"""

ON_CPU, FEWEST_ON_CPU, MOST_ON_CPU = 16 << 20, 192, 1024
ON_GPU, FEWEST_ON_GPU = 768 << 20, 256
"""Bytes of logits, and limits of the number of tokens."""


def tokens_at_once(row_bytes: int, kind: str) -> int:
    """Tokens per chunk, for logits of so many bytes a token, on a device of that kind."""
    row = max(1, row_bytes)
    if kind == "cpu":
        return min(max(FEWEST_ON_CPU, ON_CPU // row), MOST_ON_CPU)
    return max(FEWEST_ON_GPU, ON_GPU // row // FEWEST_ON_GPU * FEWEST_ON_GPU)
