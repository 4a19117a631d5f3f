"""Losses of preferences by the names that several tools share."""

from collections.abc import Mapping

from penstock.config.dialects.draft import Entry

LOSSES: Mapping[str, str] = {
    "sigmoid": "sigmoid",
    "hinge": "hinge",
    "ipo": "ipo",
    "kto_pair": "kto_pair",
    "nca_pair": "nca_pair",
    "sppo_hard": "sppo_hard",
    "orpo": "orpo",
    "simpo": "simpo",
}
"""Their names to ours, which are the same."""


def precomputed(entry: Entry) -> None:
    """A truth that asks for reference log-probabilities before training."""
    if entry.value:
        entry.put("preference.precompute_ref_logps", True)
    else:
        entry.no_effect("they are always computed before training, and kept for other runs")
