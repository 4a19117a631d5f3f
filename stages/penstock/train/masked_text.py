"""Redaction of credentials in data samples that are shown in reports."""

import re
from itertools import accumulate, pairwise

BLOT = "•"

_CREDENTIALS = re.compile(
    r"""
    (?<=://)[^\s/@'"<>]+(?=@)                           # user and password in a URL
    | (?<=://)[^\s'"<>?]*\?[^\s'"<>]*                   # a URL with a query, which may be signed
    | \b(?:sk|pk|rk)[-_][A-Za-z0-9_-]{16,}              # OpenAI, Anthropic, Stripe
    | \b(?:hf|npm|pypi|glpat|dop_v1)[-_][A-Za-z0-9_-]{16,}
    | \bgh[pousr]_[A-Za-z0-9]{16,} | \bgithub_pat_\w{16,}
    | \bxox[abposr]-[A-Za-z0-9-]{10,}                   # Slack
    | \b(?:AKIA|ASIA)[A-Z0-9]{16}\b                     # AWS
    | \bAIza[A-Za-z0-9_-]{30,}                          # Google
    | \beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*                 # a JSON web token
    | -----BEGIN[ ][A-Z ]*PRIVATE[ ]KEY-----.*?(?:-----END[ ][A-Z ]*PRIVATE[ ]KEY-----|\Z)
    | (?i:\bbearer\s+)[A-Za-z0-9._~+/-]{16,}=*
    | (?i:(?:password|passwd|secret|api[_-]?key|access[_-]?key|token)["']?\s*[:=]\s*["']?)
      (?=[^\s"',;]*\d)[^\s"',;]{8,}                      # plain words have no digits
    """,
    re.VERBOSE | re.DOTALL,
)
"""Patterns of credentials with few false positives. Passwords that are plain words are not
detected."""


def masked(text: str) -> str:
    """The text with each character of a credential replaced, of the same length."""
    return _CREDENTIALS.sub(lambda match: BLOT * len(match[0]), text)


def masked_pieces(pieces: list[str]) -> list[str]:
    """The same for consecutive pieces of one text, because a credential may span several."""
    text = masked("".join(pieces))
    bounds = pairwise(accumulate(map(len, pieces), initial=0))
    return [text[start:end] for start, end in bounds]
