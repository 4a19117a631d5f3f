"""Finds out how a multimodal model of transformers is called, by running a tiny model of it on
documents with images or audio of noise.

Its documents are computed as a padded batch, by transformers' own attention.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from penstock.core.errors import CapabilityError
from penstock.models.automodel.attention import attention_over
from penstock.models.automodel.build import build_config, build_model, takes_images
from penstock.models.automodel.inputs import accepted
from penstock.models.automodel.media.absent_tower import WHY, has_absent_tower
from penstock.models.automodel.media.inputs import join_media, media_inputs
from penstock.models.automodel.media.synthetic import KINDS, Kind, MediaMaker, Tensors, find_maker
from penstock.models.automodel.media.tiny_media import TOKENS
from penstock.models.automodel.outline import AttentionImpl, MediaTraits, Traits
from penstock.models.automodel.tiny_config import shrink
from penstock.models.automodel.traits import find_head, is_different
from penstock_kernels.attention import VarlenMetadata

PLURALS = {"image": "images", "audio": "audio"}

NOISE = 0.02

# Ends of the names in configs of the token of a kind of media.
TOKEN_NAMES = ("token_id", "token_index")


@dataclass(frozen=True)
class Document:
    """Tokens and media of a document."""

    ids_L: torch.Tensor  # noqa: N815 - L names the dimension
    media: list[Tensors]


def token_ids(config: Any) -> dict[str, int]:
    """The token that takes a feature, by the kind of media."""
    text = config.get_text_config(decoder=True)
    ids: dict[str, int] = {}
    for kind in KINDS:
        values = (
            getattr(holder, f"{kind}_{name}", None)
            for holder in (config, text)
            for name in TOKEN_NAMES
        )
        value = next((value for value in values if isinstance(value, int)), None)
        if value is not None:
            ids[kind] = value
    return ids


def token_id(config: Any, kind: Kind = "image") -> int:
    """The token that takes a feature of a kind of media.

    Raises CapabilityError if the config names none.
    """
    token = token_ids(config).get(kind)
    if token is None:
        raise CapabilityError(f"a config of type {config.model_type} names no {kind} token")
    return token


def find_media_traits(hf_config: Mapping[str, Any]) -> tuple[Traits, MediaTraits]:
    """How the model of a config.json is called.

    Raises CapabilityError if it cannot be trained on images, or on audio if it takes no images,
    with the reason.
    """
    config = build_config(hf_config)
    kind: Kind = "image" if takes_images(config) else "audio"
    tiny = type(config).from_dict(shrink(config.to_dict()))
    model_type = str(config.model_type)
    if any(part.is_encoder_decoder for part in (config, config.get_text_config(decoder=True))):
        raise CapabilityError(
            f"a {model_type} is an encoder-decoder: its encoder reads the tokens, and it is not a "
            "causal language model."
        )
    implementations: tuple[AttentionImpl, ...] = ("sdpa", "eager")
    why = ""
    for name in implementations:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            try:
                model = build_model(tiny, name).eval()
            except CapabilityError as error:
                why = str(error)
                continue
        _add_noise(model)
        is_text_only = has_absent_tower(config)
        try:
            check_text(model) if is_text_only else check_media(model, kind)
        except Exception as error:  # noqa: BLE001 - what a model's forward may raise is not known
            why = (str(error).splitlines() or [type(error).__name__])[0]
            continue
        head, head_why = find_head(model, text_ids(model, 11), config)
        traits = Traits(name, packing=False, positions_end=False, head=head, why=head_why)
        refused: dict[str, str] = dict.fromkeys(token_ids(config) if is_text_only else (), WHY)
        for other_kind in KINDS:
            if is_text_only or other_kind == kind or other_kind not in token_ids(config):
                continue
            try:
                check_media(model, other_kind)
            except Exception as error:  # noqa: BLE001 - as above
                refused[other_kind] = (str(error).splitlines() or [type(error).__name__])[0]
        trained = {k: token for k, token in token_ids(config).items() if k not in refused}
        return traits, MediaTraits(trained, refused)
    plural = PLURALS[kind]
    raise CapabilityError(f"models of type {model_type} are not trained on {plural}: {why}.")


@torch.no_grad()
def _add_noise(model: Any) -> None:
    # Make parameters that are ones or zeros when initialized tell from others.
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.add_(NOISE * torch.randn(parameter.shape, generator=generator))


def text_ids(model: Any, length: int, seed: int = 0) -> torch.Tensor:
    """Distinct ids [L] of tokens that are text."""
    size = min(model.get_input_embeddings().weight.shape[0], 300)
    special = {
        value
        for name, value in model.config.to_dict().items()
        if name.endswith(TOKENS) and isinstance(value, int)
    }
    generator = torch.Generator().manual_seed(seed)
    candidates = [
        token for token in torch.randperm(size, generator=generator).tolist() if token > 7
    ]
    # A check changes a token to the next id, which must be text as well.
    return torch.tensor(
        [token for token in candidates if not {token, token + 1} & special][:length]
    )


def document(model: Any, maker: MediaMaker, media: list[int], seed: int = 0) -> Document:
    """A document with media of these numbers, and text between them."""
    token = token_id(model.config, maker.kind)
    text = text_ids(model, 4 * len(media) + 7, seed)
    parts, samples = [text[:3]], list[Tensors]()
    for index, number in enumerate(media):
        tensors, count = maker.make_one(number)
        samples.append(tensors)
        parts += [torch.full((count,), token), text[3 + 4 * index : 7 + 4 * index]]
    parts.append(text[3 + 4 * len(media) :])
    return Document(torch.cat(parts), samples)


def document_logits(model: Any, documents: list[Document]) -> list[torch.Tensor]:
    """Logits [L, V] of each document of one padded batch."""
    lengths = [len(document.ids_L) for document in documents]
    here_BL = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    ids_BL = here_BL.long().masked_scatter(
        here_BL, torch.cat([document.ids_L for document in documents])
    )
    media = join_media(sample for document in documents for sample in document.media)
    inputs = {"use_cache": False, "return_dict": True}
    inputs |= media_inputs(model, ids_BL, here_BL, token_ids(model.config), media or None)
    with attention_over(VarlenMetadata.of([1])):
        outputs = model(input_ids=ids_BL, **accepted(model, inputs)).logits
    return [row[:length] for row, length in zip(outputs, lengths, strict=True)]


def check_media(model: Any, kind: Kind) -> None:
    """Raise CapabilityError unless a padded batch gives the logits of each document alone, with
    other logits for other media, and the model runs without media."""
    maker = find_maker(model, kind)
    documents = [
        document(model, maker, media, seed) for seed, media in enumerate(([0], [], [1, 2]))
    ]
    with torch.no_grad():
        alone = _logits_alone(model, documents)
        changed_document = Document(documents[0].ids_L, [maker.make_one(2)[0]])
        after = int((changed_document.ids_L == token_id(model.config, kind)).nonzero()[-1]) + 1
        if not is_different(
            document_logits(model, [changed_document])[0][after], alone[0][after], 1e-7
        ):
            raise CapabilityError(f"its logits do not depend on the {PLURALS[kind]}")
        _require_causal(model, documents, alone)


@torch.no_grad()
def check_text(model: Any) -> None:
    """Raise CapabilityError unless a padded batch of text gives the logits of each document
    alone."""
    documents = [Document(text_ids(model, length, length), []) for length in (11, 5, 8)]
    _require_causal(model, documents, _logits_alone(model, documents))


def _logits_alone(model: Any, documents: list[Document]) -> list[torch.Tensor]:
    together = document_logits(model, documents)
    alone = [document_logits(model, [document])[0] for document in documents]
    if any(is_different(first, second) for first, second in zip(together, alone, strict=True)):
        raise CapabilityError("a padded batch gives other results than each document alone")
    return alone


def _require_causal(model: Any, documents: list[Document], logits: list[torch.Tensor]) -> None:
    for sample, expected in zip(documents, logits, strict=True):
        changed = sample.ids_L.clone()
        changed[-1] = changed[-1] + 1
        changed_logits_LV = document_logits(model, [Document(changed, sample.media)])[0]
        if is_different(changed_logits_LV[:-1], expected[:-1]):
            raise CapabilityError("tokens of text see the tokens after them")
