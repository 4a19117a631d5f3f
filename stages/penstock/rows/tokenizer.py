"""Tokenizers: the byte-level one built in code, and any that transformers can load."""

import json
import re
from difflib import get_close_matches
from importlib.util import find_spec
from operator import index
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.utils import cached_file

from penstock.core.errors import CapabilityError, ConfigError
from penstock.core.files import require_regular
from penstock.core.sources.pin import GENERATION_CONFIG
from penstock.rows.byte_vocabulary import END_OF_TEXT, TURN_END, byte_library_tokenizer
from penstock.rows.probe import (
    MAX_TEMPLATE,
    require_bounded_template,
    require_bounded_tokenizer,
)

VOCABULARY = "tokenizer.json"

# Of the files of a tokenizer; the largest that are published have some 40 MB.
MAX_BYTES = {
    VOCABULARY: 512 << 20,
    "tokenizer_config.json": 64 << 20,
    "special_tokens_map.json": 64 << 20,
    "added_tokens.json": 64 << 20,
    "chat_template.jinja": 4 * MAX_TEMPLATE,
    "chat_template.json": 4 * MAX_TEMPLATE,
    GENERATION_CONFIG: 4 << 20,
}

# Packages named by transformers' errors about a tokenizer.model that it cannot read.
MODEL_PACKAGES = re.compile("sentencepiece|tiktoken", re.IGNORECASE)

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['role'] == 'assistant' -%}
{%- generation -%}{{- message['content'] + '<|im_end|>' -}}{%- endgeneration -%}
{%- else -%}
{{- message['content'] + '<|im_end|>' -}}
{%- endif -%}
{{- '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}"""
"""ChatML. The `generation` block marks the trained tokens of an assistant turn: its content and
`<|im_end|>`."""


def byte_tokenizer() -> PreTrainedTokenizerBase:
    """Build the byte-level tokenizer with the ChatML chat template. Lossless; needs no network.

    The EOS token is `<|im_end|>`; the padding token is `<|endoftext|>`.
    """
    fast = PreTrainedTokenizerFast(
        tokenizer_object=byte_library_tokenizer(),
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def load_tokenizer(path: str, revision: str | None = None) -> PreTrainedTokenizerBase:
    """Load the tokenizer from a local folder, a hub id, or the built-in one (`builtin:…`).

    Never runs remote code (`trust_remote_code=False`). Raises ConfigError if the files cannot be
    used or the EOS token is not in the vocabulary, and CapabilityError if they cannot be fetched.
    """
    if path.startswith("builtin:"):
        return byte_tokenizer()
    folder = Path(path).expanduser()
    is_here = folder.exists()
    if is_here:
        _require_sizes(folder)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(folder) if is_here else path,
            revision=revision or "main",
            trust_remote_code=False,
            local_files_only=is_here,
        )
    except (HfHubHTTPError, ConnectionError) as error:
        raise _unreachable(path, error) from error
    except Exception as error:
        if not is_here and isinstance(error, OSError):
            raise _unreachable(path, error) from error
        if find_spec("sentencepiece") is None and MODEL_PACKAGES.search(str(error)):
            raise CapabilityError(
                f"The tokenizer of {path} has no {VOCABULARY}, and transformers reads its "
                "tokenizer.model with the package sentencepiece, which is not installed.\n"
                "  Install it (pip install sentencepiece; tiktoken for a file of tiktoken's), or "
                f"set model.tokenizer_path to a folder with a {VOCABULARY}."
            ) from error
        files = ", ".join(sorted(file.name for file in folder.glob("*.json"))) if is_here else ""
        raise ConfigError(
            f"The tokenizer of {path} cannot be loaded"
            f"{f' (from {files})' if files else ''}: {_first_line(error)}\n"
            "  Set model.tokenizer_path to a folder or hub id that transformers can load."
        ) from error
    if not tokenizer.is_fast:
        raise CapabilityError(
            f"The tokenizer of {path} runs in Python ({type(tokenizer).__name__}), which does "
            "not tell where its tokens are in a text.\n"
            f"  Set model.tokenizer_path to a folder with a {VOCABULARY} of the same vocabulary, "
            "or prepare data of type: tokenized with it."
        )
    require_bounded_tokenizer(tokenizer.backend_tokenizer, path)
    templates = tokenizer.chat_template or ""
    for text in templates.values() if isinstance(templates, dict) else [templates]:
        require_bounded_template(text, f"the tokenizer of {path}")
    _require_known_end(tokenizer, path, revision)
    return tokenizer


def load_stop_token_ids(path: str, revision: str | None = None) -> tuple[int, ...]:
    """`eos_token_id` of generation_config.json beside the tokenizer; empty without one.

    Raises ConfigError if the file cannot be used.
    """
    folder = Path(path).expanduser()
    file: Any = folder / GENERATION_CONFIG
    # A link that leads nowhere is not absent: without an error, no stop token would be known.
    is_absent = folder.exists() and not (file.exists() or file.is_symlink())
    if path.startswith("builtin:") or is_absent:
        return ()
    # cached_file returns None, instead of raising, where these private options are False.
    if not folder.exists():
        file = cached_file(
            path,
            GENERATION_CONFIG,
            revision=revision or "main",
            _raise_exceptions_for_gated_repo=False,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
    if file is None:
        return ()
    try:
        require_regular(Path(file))
        named = json.loads(Path(file).read_text(encoding="utf-8"))["eos_token_id"]
        return tuple(map(index, named if isinstance(named, list) else [named]))
    except KeyError:
        return ()
    except (ValueError, TypeError, OSError, RecursionError) as error:
        raise ConfigError(
            f"{GENERATION_CONFIG} of {path} has no eos_token_id that can be used: "
            f"{_first_line(error)}\n"
            "  Write a token id or a list of them, or leave it out."
        ) from error


def _require_sizes(folder: Path) -> None:
    """Raise ConfigError for a file that transformers would read whole, and is no tokenizer's."""
    for name, limit in MAX_BYTES.items():
        file = folder / name
        if not file.exists():
            continue
        if not file.is_file():
            raise ConfigError(f"{file} is a folder, a device or a pipe.\n  Write the file there.")
        if (size := file.stat().st_size) > limit:
            raise ConfigError(
                f"{file} has {size:,} bytes; {limit:,} are allowed.\n"
                "  Restore it from where the model comes from."
            )


def _require_known_end(tokenizer: PreTrainedTokenizerBase, path: str, revision: str | None) -> None:
    """Raise ConfigError if eos_token is not in the vocabulary."""
    # transformers would append such a token, with an id for which the embedding has no row.
    folder = Path(path).expanduser()
    is_here = folder.exists()
    file: Any = folder / VOCABULARY
    if not is_here:
        file = try_to_load_from_cache(path, VOCABULARY, revision=revision)
    end: Any = tokenizer.eos_token
    declared: Any = tokenizer.init_kwargs.get("added_tokens_decoder") or {}
    if end is None or not isinstance(file, str | Path) or not Path(file).is_file():
        return
    # Searching the raw bytes is much faster than parsing the whole vocabulary.
    content = Path(file).read_bytes()
    # Programs write a tokenizer.json with escapes or without.
    spellings = {json.dumps(end, ensure_ascii=escapes).encode() for escapes in (True, False)}
    if any(spelling in content for spelling in spellings) or end in map(str, declared.values()):
        return
    end_tokens = [
        str(token) for token in tokenizer.added_tokens_decoder.values() if str(token) != end
    ]
    vocabulary = [token for token in tokenizer.get_vocab() if token != end]
    near = get_close_matches(end, end_tokens, n=1) or get_close_matches(end, vocabulary, n=1)
    raise ConfigError(
        f"The tokenizer of {path} has eos_token {end!r}, which is not in its vocabulary"
        f"{f'; did you mean {near[0]!r}?' if near else '.'}\n"
        "  Correct eos_token in its tokenizer_config.json (or special_tokens_map.json), or add the "
        "token to its tokenizer.json."
    )


def _unreachable(path: str, error: Exception) -> CapabilityError:
    return CapabilityError(
        f"The tokenizer of {path} cannot be fetched from the hub: {_first_line(error)}\n"
        "  Go online or log in (hf auth login), or set model.tokenizer_path to a local folder."
    )


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
