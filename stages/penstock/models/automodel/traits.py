"""Finds out how a model class must be called, by running a tiny model of it on the CPU.

Documents that are packed into one sequence must not see each other. Whether they do is not
declared anywhere: it depends on position ids, the mask that the model makes of them, and kernels of
layers with state. So two short documents are run packed and apart, forward and backward.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from penstock.core.errors import CapabilityError
from penstock.models.automodel.attention import attention_over
from penstock.models.automodel.build import build_config, build_model
from penstock.models.automodel.inputs import accepted, packed_inputs
from penstock.models.automodel.outline import AttentionImpl, Head, Scoring, Traits
from penstock.models.automodel.routers import infer_scoring, router_modules
from penstock.models.automodel.tiny_config import MAX_POSITIONS, shrink
from penstock_kernels.attention import VarlenMetadata

# Tokens of the two documents: more than the tiny model's windows.
LENGTHS = (11, 7)
# Relative difference up to which values are equal but for rounding (fp32).
TOLERANCE = 2e-4

# Factors of logits by their names in configs, and the exponent with which they apply.
SCALES = (
    ("logit_scale", 1),
    ("logits_scaling", -1),
    ("lm_head_multiplier", 1),
    ("output_scale", 1),
)
EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
"""Names of the number of experts in configs."""
SOFT_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")


def find_traits(hf_config: Mapping[str, Any]) -> Traits:
    """How the model of a config.json is called.

    Raises CapabilityError if it cannot be trained as a causal language model, with the reason.
    """
    config = build_config(hf_config)
    implementations: list[AttentionImpl] = ["varlen", "sdpa", "eager"]
    if set(getattr(config, "layer_types", None) or ()) & {"chunked_attention"}:
        # Chunks are longer than the documents of this check.
        implementations.remove("varlen")
    try:
        tiny = type(config).from_dict(shrink(config.to_dict()))
        expected = _Run(tiny, "eager")
        require_causal(expected.model, tiny.model_type)
    except CapabilityError:
        raise
    # What a model's code may raise is not known.
    except Exception as error:
        raise CapabilityError(
            f"transformers cannot run a small model of type {config.model_type} with this "
            f"config.json ({type(error).__name__}: {error}), so how it is called is not known.\n"
            "  Leave out model.backend if Penstock has the family, or correct config.json."
        ) from error
    found_traits: Traits | None = None
    for name in implementations:
        try:
            run = _Run(tiny, name, like=expected.model)
            apart = run.apart()
        except Exception:  # noqa: BLE001 - the model does not run with this implementation
            continue
        if _difference(apart, expected.apart()):
            continue
        try:
            difference = _difference(run.packed(), apart)
        except Exception as error:  # noqa: BLE001 - whatever a model raises for a packed sequence
            reason = str(error).splitlines()[:1]
            difference = f"packed documents raise {type(error).__name__}: {reason}"
        scoring, routers_why = find_scoring(run)
        head, why = find_head(run.model, run.ids[0], config)
        traits = Traits(
            name,
            packing=not difference,
            positions_end=_positions_end(expected.model),
            head=head,
            why=difference or why,
            scoring=scoring,
            routers_why=routers_why,
        )
        if traits.packing:
            return traits
        found_traits = found_traits or traits
    if found_traits is None:
        raise CapabilityError(
            f"models of type {tiny.model_type} do not repeat their own results on the same tokens; "
            "they cannot be trained."
        )
    return found_traits


def _positions_end(model: Any) -> bool:
    ids = torch.full((1, MAX_POSITIONS + 2), 5)
    try:
        with torch.no_grad():
            _logits(model, ids)
    # A table of positions raises; rotary embeddings compute any position.
    except (IndexError, RuntimeError):
        return True
    return False


def require_causal(model: Any, model_type: str) -> None:
    """Raise CapabilityError for a model whose tokens see later ones."""
    ids = _ids(model, LENGTHS[0])
    changed = ids.clone()
    changed[-1] = changed[-1] - 1
    with torch.no_grad():
        first, second = (_logits(model, token_ids[None])[0, :-1] for token_ids in (ids, changed))
    if is_different(first, second):
        raise CapabilityError(
            f"in a model of type {model_type} with this config.json, tokens see the tokens after "
            "them: it is not a causal language model.\n"
            "  If it is a decoder of an encoder's type, write model.foundation: {is_decoder: true}."
        )


def find_head(model: Any, ids_L: torch.Tensor, config: Any) -> tuple[Head | None, str]:
    """How logits follow from the base model's hidden states and the head in the model of `config`,
    or None and the reason if they do not: from a tiny model and token ids. Factors may follow from
    a model's width, so those of the tiny model are others."""
    head = model.get_output_embeddings()
    base = model.base_model
    if head is None or base is model:
        return None, "it has no head of its own; all logits are computed"
    ids_1L = ids_L[None]
    with torch.no_grad():
        # Large logits, which a soft cap changes.
        for parameter in head.parameters():
            parameter.mul_(500.0)
    with torch.no_grad(), attention_over(VarlenMetadata.of([ids_1L.shape[1]], ids_1L.device)):
        expected = _logits(model, ids_1L)
        hidden = base(input_ids=ids_1L, **accepted(base, {"use_cache": False}))[0]
        for form, form_of_config in zip(_forms(model.config), _forms(config), strict=True):
            try:
                logits = head(hidden) * form.scale
            except (RuntimeError, TypeError):
                break
            if form.soft_cap:
                logits = (logits / form.soft_cap).tanh() * form.soft_cap
            if logits.shape == expected.shape and not is_different(logits, expected):
                return form_of_config, ""
    return None, "its logits are not those of its head alone; all logits are computed"


def find_scoring(run: "_Run") -> tuple[Scoring | None, str]:
    """How routers make scores of their logits, or None and why it is not known."""
    model = run.model
    experts = first_size(model.config.get_text_config(decoder=True), EXPERTS)
    if not experts:
        return None, ""
    routers = router_modules(model)
    if not routers:
        return None, "it does not say which of its modules are routers"
    scorings_by_router: dict[nn.Module, list[Scoring | None]] = {r: [] for r in routers.values()}
    ids_1L = run.ids[0][None]

    def look(router: nn.Module, _: Any, output: Any) -> None:
        scorings_by_router[router].append(infer_scoring(output, ids_1L.shape[1], experts))

    handles = [router.register_forward_hook(look) for router in scorings_by_router]
    with torch.no_grad(), attention_over(VarlenMetadata.of([ids_1L.shape[1]], ids_1L.device)):
        _logits(model, ids_1L)
    for handle in handles:
        handle.remove()
    scorings = {tuple(of_router) for of_router in scorings_by_router.values()}
    if len(scorings) != 1:
        return None, "its routers are not alike"
    [scoring] = scorings
    if len(scoring) != 1 or scoring[0] is None:
        return None, "its routers do not return logits, weights and experts of each token"
    return scoring[0], ""


def _forms(config: Any) -> Iterator[Head]:
    config = config.get_text_config(decoder=True)
    scales = [1.0]
    for name, exponent in SCALES:
        value = getattr(config, name, None)
        if isinstance(value, int | float) and value:
            scales.append(float(value) ** exponent)
    width, base = getattr(config, "hidden_size", None), getattr(config, "dim_model_base", None)
    if width and base:
        scales.append(base / width)
    caps = [getattr(config, name, None) for name in SOFT_CAPS]
    for scale in scales:
        for cap in [None, *(cap for cap in caps if cap)]:
            yield Head(scale, cap)


def first_size(config: Any, names: Sequence[str]) -> int:
    """The first of these fields that the config has as a number; 0 without any."""
    sizes = (getattr(config, name, None) for name in names)
    return next((value for value in sizes if isinstance(value, int)), 0)


class _Run:
    """A tiny model with one attention implementation, and two documents."""

    def __init__(self, config: Any, name: AttentionImpl, like: Any = None) -> None:
        with _seed(0):
            self.model = build_model(config, name).eval()
        if like is not None:
            self.model.load_state_dict(like.state_dict())
        self.ids = [_ids(self.model, length) for length in LENGTHS]

    def apart(self) -> list[torch.Tensor]:
        """Logits of each document and gradients, from one pass for each document."""
        logits = []
        for ids in self.ids:
            with attention_over(VarlenMetadata.of([len(ids)], ids.device)):
                logits.append(_logits(self.model, ids[None])[0])
        return self._with_gradients(logits)

    def packed(self) -> list[torch.Tensor]:
        """The same, of both documents in one sequence."""
        segments = VarlenMetadata.of(list(LENGTHS), self.ids[0].device)
        positions = torch.cat([torch.arange(length) for length in LENGTHS])
        with attention_over(segments):
            logits = _logits(
                self.model, torch.cat(self.ids)[None], packed_inputs(positions, segments)
            )[0]
        return self._with_gradients(list(logits.split(list(LENGTHS))))

    def _with_gradients(self, logits: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        weights = torch.linspace(-1, 1, logits[0].shape[-1])
        loss = sum((logits_LV.float() * weights).square().sum() for logits_LV in logits)
        assert isinstance(loss, torch.Tensor)
        params = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        # Experts without tokens have no gradient.
        gradients = torch.autograd.grad(loss, params, allow_unused=True)
        return [
            *(logits_LV.detach() for logits_LV in logits),
            *(gradient for gradient in gradients if gradient is not None),
        ]


def _logits(
    model: Any, ids_BL: torch.Tensor, model_inputs: Mapping[str, Any] | None = None
) -> torch.Tensor:
    inputs = {"use_cache": False, "return_dict": True, **(model_inputs or {})}
    return model(input_ids=ids_BL, **accepted(model, inputs)).logits


def _ids(model: Any, length: int) -> torch.Tensor:
    size = model.get_input_embeddings().weight.shape[0]
    with _seed(length):
        return (
            torch.randperm(size - 8)[:length] + 8
            if size > length + 16
            else torch.randint(3, size, (length,))
        )


def _difference(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> str:
    count = len(LENGTHS)
    if len(actual) != len(expected):
        return "packed documents reach other weights"
    for number, (tensor, expected_tensor) in enumerate(zip(actual, expected, strict=True)):
        if is_different(tensor, expected_tensor):
            subject = "outputs" if number < count else "gradients"
            return f"the {subject} of packed documents differ from those of separate ones"
    return ""


def is_different(
    actual: torch.Tensor, expected: torch.Tensor, tolerance: float = TOLERANCE
) -> bool:
    """Whether values differ by more than rounding, or are not numbers."""
    actual, expected = actual.double(), expected.double()
    # `not <=` and not `>`: comparisons with NaN are false.
    return not bool((actual - expected).norm() <= tolerance * expected.norm() + 1e-12)


@contextmanager
def _seed(seed: int) -> Iterator[None]:
    # By default fork_rng also saves the generator of every GPU, which initializes CUDA there.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield
