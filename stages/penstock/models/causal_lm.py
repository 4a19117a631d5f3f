"""The two kinds of causal language models that the engine trains."""

from penstock.models.automodel.causal_lm import AutoCausalLM
from penstock.models.decoder import Decoder

CausalLM = Decoder | AutoCausalLM
"""Our decoder, or a transformers model."""
