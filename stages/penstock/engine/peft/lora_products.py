"""How the products of adapters are computed in a layout."""

from penstock.adapters.factor_copies import FactorCopies
from penstock.adapters.lora import LoraLinear
from penstock.config.schema.train import TrainConfig
from penstock.engine.activations.checkpointing import checkpoint_kind
from penstock.models.causal_lm import CausalLM


def select_lora_products(model: CausalLM, train: TrainConfig) -> None:
    """Set how the adapters on linear layers of a model's part are computed, in place."""
    # A backward pass that is split computes weight gradients later, without those of inputs: one
    # node of the graph would compute both, twice.
    is_split = checkpoint_kind(train) == "once"
    # FSDP gathers the matrices in the dtype of products, into memory that it frees in between.
    copies = None if train.data_parallel_mode == "fsdp2" else FactorCopies()
    for module in model.modules():
        if isinstance(module, LoraLinear):
            module.is_fusable = module.is_fusable and not is_split
            module.copies = copies
