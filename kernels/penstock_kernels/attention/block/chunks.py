"""Sliding-window attention by chunks: documents longer than a window are split into chunks no
shorter than it, and a token attends to its own chunk and the previous one. So work is linear in a
document's length.

B documents, L tokens of each, n chunks of a document, C tokens in a chunk; N query heads, K
key/value heads, H head width.
"""

from collections.abc import Callable

import torch

MULTIPLE = 16
"""Chunk sizes are a multiple of this, for the kernels."""

Forward = Callable[..., tuple[torch.Tensor, torch.Tensor]]
Backward = Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


def forward(
    attend: Forward,
    window: int,
    q_BLNH: torch.Tensor,
    k_BLKH: torch.Tensor,
    v_BLKH: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp of all tokens, from `attend(hidden, q, k, v)` of batches of chunks."""
    hidden_C2C = _hidden(window, q_BLNH.device)
    q, k, v = (_cut(part, window) for part in (q_BLNH, k_BLKH, v_BLKH))
    results = [attend(_own(hidden_C2C), q[:, 0], k[:, 0], v[:, 0])]
    if q.shape[1] > 1:
        later = attend(hidden_C2C, q[:, 1:].flatten(0, 1), _with_earlier(k), _with_earlier(v))
        results.append(later)
    y, lse = (_joined(parts, q_BLNH) for parts in zip(*results, strict=True))
    return y, lse


def backward(
    gradients: Backward,
    window: int,
    dy_BLNH: torch.Tensor,
    q_BLNH: torch.Tensor,
    k_BLKH: torch.Tensor,
    v_BLKH: torch.Tensor,
    y_BLNH: torch.Tensor,
    lse_BLN: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of all tokens, from `gradients(hidden, dy, q, k, v, y, lse)` of chunk batches."""
    hidden_C2C = _hidden(window, q_BLNH.device)
    tensors = (dy_BLNH, q_BLNH, k_BLKH, v_BLKH, y_BLNH, lse_BLN)
    dy, q, k, v, y, lse = (_cut(part, window) for part in tensors)
    first = (part[:, 0] for part in (dy, q, k, v, y, lse))
    dq, dk, dv = gradients(_own(hidden_C2C), *first)
    if q.shape[1] == 1:
        return _joined((dq,), q_BLNH), _joined((dk,), q_BLNH), _joined((dv,), q_BLNH)
    dy, q, y, lse = (part[:, 1:].flatten(0, 1) for part in (dy, q, y, lse))
    more = gradients(hidden_C2C, dy, q, _with_earlier(k), _with_earlier(v), y, lse)
    return (
        _joined((dq, more[0]), q_BLNH),
        _joined(_added(dk, more[1]), q_BLNH),
        _joined(_added(dv, more[2]), q_BLNH),
    )


def _chunk(window: int) -> int:
    return -(-window // MULTIPLE) * MULTIPLE


def _hidden(window: int, device: torch.device) -> torch.Tensor:
    """bool [C, 2C]: masked keys of the previous and the own chunk, by query."""
    chunk = _chunk(window)
    at_C1 = torch.arange(chunk, 2 * chunk, device=device).unsqueeze(1)
    back_C2C = at_C1 - torch.arange(2 * chunk, device=device)
    return (back_C2C < 0) | (back_C2C >= window)


def _own(hidden_C2C: torch.Tensor) -> torch.Tensor:
    return hidden_C2C[:, hidden_C2C.shape[0] :]


def _cut(x_BLN: torch.Tensor, window: int) -> torch.Tensor:
    """[B, n, C, ...]."""
    batch, length, *dims = x_BLN.shape
    chunk = _chunk(window)
    # Zeros: no token sees the padding, and no gradient of its own comes to it.
    padding = x_BLN.new_zeros(batch, -length % chunk, *dims)
    return torch.cat((x_BLN, padding), dim=1).unflatten(1, (-1, chunk))


def _with_earlier(x_BnCN: torch.Tensor) -> torch.Tensor:
    """Of every chunk but the first, in rows [B * (n - 1), 2C, ...]: the one before, and its own."""
    return torch.cat((x_BnCN[:, :-1], x_BnCN[:, 1:]), dim=2).flatten(0, 1)


def _added(first_BCN: torch.Tensor, pairs_R2CN: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What comes back to keys, of the first chunk [B, C, ...] and of the others in rows: each was
    in its own row and in the following one's."""
    batch, chunk = first_BCN.shape[:2]
    pairs = pairs_R2CN.unflatten(0, (batch, -1))
    earlier, own = pairs[:, :, :chunk], pairs[:, :, chunk:].clone()
    # The last chunk is nobody's previous one.
    own[:, :-1] += earlier[:, 1:]
    return first_BCN + earlier[:, 0], own.flatten(0, 1)


def _joined(parts: tuple[torch.Tensor, ...], q_BLNH: torch.Tensor) -> torch.Tensor:
    """[B, L, ...] of the first chunk, [B, C, ...], and of the others in rows, if there are any."""
    batch, length = q_BLNH.shape[:2]
    first, *later = parts
    chunks = [first.unsqueeze(1), *(part.unflatten(0, (batch, -1)) for part in later)]
    return torch.cat(chunks, dim=1).flatten(1, 2)[:, :length]
