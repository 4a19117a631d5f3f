"""Tokenizers, templates and encoders for the tests of how text becomes tokens."""

from functools import cache
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, trainers
from tokenizers.pre_tokenizers import ByteLevel, Metaspace, Sequence, Split
from transformers import PreTrainedTokenizerFast

from penstock.prepare.encode.encoder import Encoder
from penstock.prepare.settings import DatasetSettings
from tests.conftest import ROOT

SPECIAL = ("<|end|>", "<|im_start|>", "<|im_end|>", "<|header|>", "<|/header|>")

# The pattern of Qwen's and (but for the digits) Llama 3's tokenizers.
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CHATML = """\
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\n' }}
{%- if m.role == 'assistant' %}
{%- generation %}{{- m.content + '<|im_end|>' }}{% endgeneration %}
{%- else %}
{{- m.content + '<|im_end|>' }}
{%- endif %}
{{- '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}"""

HEADERS = """\
{{- '<|end|>' }}
{%- for m in messages %}
{{- '<|header|>' + m.role + '<|/header|>\n\n' }}
{%- if m.role == 'assistant' %}
{%- generation %}{{- m.content | trim }}{{- '<|im_end|>' }}{% endgeneration %}
{%- else %}
{{- m.content | trim }}{{- '<|im_end|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|header|>assistant<|/header|>\n\n' }}{% endif %}"""

TOOLS = """\
{%- if tools %}
{{- '<|im_start|>system\n# Tools\n' }}
{%- for tool in tools %}{{- tool | tojson }}{{- '\n' }}{% endfor %}
{{- '<|im_end|>\n' }}
{%- endif %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{{- '<|im_start|>assistant\n' }}
{%- generation %}
{{- m.content or '' }}
{%- for call in m.tool_calls or [] %}
{{- '\n<tool_call>\n' + call.function | tojson + '\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>' }}
{%- endgeneration %}
{{- '\n' }}
{%- elif m.role == 'tool' %}
{{- '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}
{%- else %}
{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}"""

TEMPLATES = {"chatml": CHATML, "headers": HEADERS, "tools": TOOLS}
MARK, END_OF_MARK = ("{%- generation %}", "{%- endgeneration %}")


def unmarked(template: str) -> str:
    """The template without the marks around what the assistant says."""
    bare = template.replace("{% endgeneration %}", "").replace(END_OF_MARK, "")
    return bare.replace(MARK, "")


@cache
def _learnt() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = Sequence(
        [Split(Regex(PATTERN), "isolated"), ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1500, initial_alphabet=ByteLevel.alphabet(), show_progress=False
    )
    pages = ("README.md", "docs/reference/dataset-formats.md", "docs/guide/data.md")
    written = tuple((ROOT / page).read_text() for page in pages)
    tokenizer.train_from_iterator(written, trainer)
    return tokenizer.to_str()


@cache
def _learnt_pieces() -> str:
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    rest = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=1500, special_tokens=rest, show_progress=False)
    tokenizer.train_from_iterator([(ROOT / "README.md").read_text()], trainer)
    return tokenizer.to_str()


@cache
def words(template: str | None = None, kind: str = "bytes") -> Any:
    """A tokenizer that knows some words: of `bytes`, of `nfc` text, of `pieces` as SentencePiece
    makes them, or of bytes with `greedy` special tokens, which take the blanks after them."""
    tokenizer = Tokenizer.from_str(_learnt_pieces() if kind == "pieces" else _learnt())
    if kind == "nfc":
        tokenizer.normalizer = normalizers.NFC()
    special = [AddedToken(s, special=True, rstrip=kind == "greedy") for s in SPECIAL]
    tokenizer.add_special_tokens(special)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")
    fast.chat_template = template
    return fast


def encode(record: Any, tokenizer: Any, **settings: Any) -> Any:
    """The one sample of a record, as (ids, labels), a pair of them, or the fault it has."""
    samples = Encoder(DatasetSettings(**settings), tokenizer)([record])
    if samples.faults:
        return samples.faults[0]
    sides = [(ids.tolist(), labels.tolist()) for ids, labels, _ in (s[0] for s in samples.sides)]
    return tuple(sides) if len(sides) > 1 else sides[0]


def trained(tokenizer: Any, labels: Any) -> str:
    """What is trained, as text."""
    return tokenizer.decode([label for label in labels if label != -100])
