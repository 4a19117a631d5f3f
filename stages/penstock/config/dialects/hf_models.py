"""Models, adapters and rows by the names that tools around Hugging Face's libraries share."""

from typing import Any, cast

from penstock.config.dialects.dialect import Rule, listed
from penstock.config.dialects.draft import Draft, Entry

SOURCES, TESTS = "data.datasets", "data.test_datasets"
ROW, GROUP = "data.sample_packing_sequence_len", "data.sample_packing_group_size"
METHOD = "data.sample_packing_method"

FLASH = (
    "flash_attention_2",
    "flash_attention_3",
    "fa2",
    "fa3",
    "auto",
    "xformers",
    "flex_attention",
)
PLAIN = {"sdpa": "sdpa", "eager": "eager", "disabled": "eager"}

BEST_HERE = "the best attention there is here is taken, a flash kernel where there are"


def attention(entry: Entry) -> None:
    """A name of transformers', or a kernel of the hub."""
    name = str(entry.value)
    if name in PLAIN:
        entry.put("model.attn_implementation", PLAIN[name])
    elif name in FLASH or "flash" in name:
        entry.no_effect(BEST_HERE)
    else:
        entry.refuse(f"it takes {', '.join((*PLAIN, *FLASH))}, and flash kernels of the hub")


def names_in(value: Any) -> list[str]:
    """A list of names, or names between commas."""
    return [name.strip() for one in listed(value) for name in str(one).split(",") if name.strip()]


def targets(value: Any) -> list[str] | str:
    """Layers that bear an adapter; `all` and `all-linear` are all linear ones but the head."""
    return "all-linear" if value in ("all", "all-linear") else names_in(value)


def in_few_bits(kind: str) -> Rule:
    """The rule of a truth that asks for base weights of few bits."""

    def rule(entry: Entry) -> None:
        if entry.value:
            entry.put("lora.enable_qlora", True)
            entry.put("lora.quant_format", kind)
        else:
            entry.no_effect("base weights keep their precision")

    return rule


def lay_rows(draft: Draft, longest: Any, packing: str | None, *, pairs: bool) -> None:
    """Cut samples to `longest` tokens, and lay them into rows by `packing`; None: one to a row.

    A pair is a row with its prompt and both answers, each of which may be as long. Texts that are
    `wrapped` are one stream, of which a row is as much as fits: none is cut to a length of its own,
    and a row's tokens see all that is before them.
    """
    if packing == "wrapped":
        draft.put("data.isolate_samples", False)
    for name in (SOURCES, TESTS) if packing != "wrapped" else ():
        for source in cast("list[dict[str, Any]]", draft.value(name) or []):
            if isinstance(longest, int):
                source.setdefault("max_seq_len", longest)
    if isinstance(longest, int):
        draft.put(ROW, 2 * longest if pairs else longest)
    draft.put(METHOD, packing or "multipack")
    if packing is None:
        draft.put(GROUP, 1)


def settle_precision(draft: Draft, weights: Any) -> None:
    """Weights in bfloat16 are so while they are trained; adapters beside them are in float32."""
    is_whole = not draft.value("lora.enable_lora")
    is_mixed = draft.value("train.precision") == "bf16_mixed"
    if weights in ("bfloat16", "bf16") and is_whole and is_mixed:
        draft.put("train.precision", "bf16")
