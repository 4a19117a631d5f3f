"""Definition of linear attention, token by token. The reference of every other implementation.

T tokens, B documents; G heads of queries and keys, each for N / G consecutive heads of values; K
and V the widths of a key and of a value.
"""

import torch

from penstock_kernels.attention.segments import VarlenMetadata


def decode_step(
    q_BGK: torch.Tensor,
    k_BGK: torch.Tensor,
    v_BNV: torch.Tensor,
    log_decay_BN: torch.Tensor,
    beta_BN: torch.Tensor | None,
    state_BNKV: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token of each of several documents: its output [B, N, V] and the next state.

    The state is decayed, corrected by the token, and read:

        S = exp(log_decay) * S
        S = S + k (beta * (v - k S))    the delta rule; without beta S + k v
        y = scale * q S

    `log_decay` is [B, N], or [B, N, K] for a decay of each channel of the key. Computed in the
    state's dtype. Gated DeltaNet (https://arxiv.org/abs/2412.06464, equation 10), Kimi Delta
    Attention (https://arxiv.org/abs/2510.26692), gated linear attention
    (https://arxiv.org/abs/2312.06635) and Mamba-2 (https://arxiv.org/abs/2405.21060).
    """
    wide, N = state_BNKV.dtype, v_BNV.shape[1]
    q_BNK, k_BNK = (x.to(wide).repeat_interleave(N // x.shape[1], dim=1) for x in (q_BGK, k_BGK))
    decay = log_decay_BN.to(wide).exp()
    state_BNKV = state_BNKV * (decay[..., None] if decay.ndim == 3 else decay[..., None, None])
    update_BNV = v_BNV.to(wide)
    if beta_BN is not None:
        known_BNV = (k_BNK.unsqueeze(-2) @ state_BNKV).squeeze(-2)
        update_BNV = beta_BN.to(wide).unsqueeze(-1) * (update_BNV - known_BNV)
    state_BNKV = state_BNKV + k_BNK.unsqueeze(-1) * update_BNV.unsqueeze(-2)
    y_BNV = (scale * q_BNK.unsqueeze(-2) @ state_BNKV).squeeze(-2)
    return y_BNV.to(v_BNV.dtype), state_BNKV


def shape_mismatch(
    q_TGK: torch.Tensor,
    k_TGK: torch.Tensor,
    v_TNV: torch.Tensor,
    log_decay_TN: torch.Tensor,
    beta_TN: torch.Tensor | None,
    segments: VarlenMetadata,
    scale: float,
    initial_state_BNKV: torch.Tensor | None = None,
) -> str | None:
    """Why these shapes are no inputs of linear attention, or None.

    A beta or decay of another shape would broadcast, and give a wrong result.
    """
    del scale
    q, k, v = (tuple(x.shape) for x in (q_TGK, k_TGK, v_TNV))
    if (len(q), len(v)) != (3, 3) or q != k or q[0] != v[0] or not q[1] or v[1] % q[1]:
        return f"q is {q}, k is {k} and v is {v}"
    decay = tuple(log_decay_TN.shape)
    # Sizes may be symbolic, and are not found in a tuple of tuples.
    if decay != v[:2] and decay != (*v[:2], k[2]):
        return f"log_decay is {decay}, and v is {v}"
    if beta_TN is not None and tuple(beta_TN.shape) != v[:2]:
        return f"beta is {tuple(beta_TN.shape)}, and v is {v}"
    if segments.num_tokens != q[0]:
        return f"q holds {q[0]} tokens and the documents {segments.num_tokens}"
    if segments.start_rows is not None:
        return "start rows hide some of a document's past, and its state has all of it"
    states = len(segments.lengths), v[1], k[2], v[2]
    if initial_state_BNKV is not None and tuple(initial_state_BNKV.shape) != states:
        return f"initial_state is {tuple(initial_state_BNKV.shape)}, and the states are {states}"
    return None


def recurrent(
    q_TGK: torch.Tensor,
    k_TGK: torch.Tensor,
    v_TNV: torch.Tensor,
    log_decay_TN: torch.Tensor,
    beta_TN: torch.Tensor | None,
    segments: VarlenMetadata,
    scale: float,
    initial_state_BNKV: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`decode_step` over the tokens of each document.

    Args:
        log_decay_TN: [T, N], or [T, N, K] for a decay of each channel of the key; 0 or less.
        beta_TN: the rate of the delta rule, or None for none.
        initial_state_BNKV: each document's state before its first token; None for zeros.

    Returns:
        Outputs [T, N, V] in the dtype of v, and each document's state after its last token, [B, N,
        K, V] in fp32, or fp64 for inputs of that dtype.

    Raises:
        ValueError: shapes do not fit each other or the documents, or start rows hide some of a
            document's past, all of which its state has.
    """
    if reason := shape_mismatch(
        q_TGK, k_TGK, v_TNV, log_decay_TN, beta_TN, segments, scale, initial_state_BNKV
    ):
        raise ValueError(reason)
    wide = torch.promote_types(v_TNV.dtype, torch.float32)
    if initial_state_BNKV is None:
        shape = len(segments.lengths), v_TNV.shape[1], k_TGK.shape[2], v_TNV.shape[2]
        initial_state_BNKV = v_TNV.new_zeros(shape, dtype=wide)
    outputs, states, start = [], [], 0
    for document, length in enumerate(segments.lengths):
        state = initial_state_BNKV[document : document + 1].to(wide)
        for position in range(start, start + length):
            step = slice(position, position + 1)
            beta = None if beta_TN is None else beta_TN[step]
            token = q_TGK[step], k_TGK[step], v_TNV[step], log_decay_TN[step], beta
            y_1NV, state = decode_step(*token, state, scale)
            outputs.append(y_1NV)
        states.append(state)
        start += length
    return torch.cat(outputs), torch.cat(states)
