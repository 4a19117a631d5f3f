"""Whether tokenizers and chat templates from elsewhere end, tried in a process with limits.

A pattern can backtrack for years, a replacement multiply each text, a template loop or multiply.
The result is cached by content.
"""

import json
import resource
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from penstock.core.cache.digest_cache import cached_value
from penstock.core.cache.record import digest_json
from penstock.core.errors import ConfigError

VERSION = 1
"""Increase it if other texts are tried."""

# Characters of a chat template; published ones have at most some 20,000.
MAX_TEMPLATE = 1 << 20

CPU_SECONDS = 5
ADDRESS_BYTES = 1 << 30
OUTPUT_FACTOR = 100
"""Characters that a normalizer may write for each that it reads."""

# Characters that are repeated, followed by another one: what backtracking patterns meet.
RUNS = ("a", "A", "1", " ", "\n", "!", "é", "字", "a1", "a ", "'s ", "\r\n")

RUN_LENGTH = 2000
MESSAGES = 30


def require_bounded_tokenizer(backend: Any, location: str) -> None:
    """Raise ConfigError if the normalizer and the pre-tokenizer do not end on difficult texts."""
    parts = {
        # tokenizers has no other way to a part's JSON than the one by which it is pickled.
        name: json.loads(part.__getstate__())
        for name in ("normalizer", "pre_tokenizer")
        if (part := getattr(backend, name, None))
    }
    if "pattern" in json.dumps(parts) and (fault := _fault({"tokenizer": parts})):
        raise ConfigError(
            f"The tokenizer of {location} cannot encode a text of {RUN_LENGTH:,} like characters: "
            f"{fault}.\n  Correct the patterns in its tokenizer.json, or set model.tokenizer_path "
            "to another one."
        )


def require_bounded_template(text: str, location: str) -> None:
    """Raise ConfigError if a chat template is too long, or does not end."""
    fault = f"it has {len(text):,} characters; {MAX_TEMPLATE:,} are allowed"
    if len(text) <= MAX_TEMPLATE:
        fault = _fault({"template": text})
    if fault:
        raise ConfigError(
            f"The chat template cannot be used: {location}: {fault}.\n"
            "  Correct it there, or name another in data.chat_template."
        )


def _fault(content: Mapping[str, Any]) -> str:
    payload = json.dumps(content)
    return cached_value(digest_json([VERSION, "probe", payload]), lambda: _probe(payload))


def _probe(payload: str) -> str:
    command = [sys.executable, "-m", "penstock.rows.probe"]
    done = subprocess.run(command, input=payload.encode(), capture_output=True, check=False)
    if done.returncode == -signal.SIGXCPU:
        return f"it takes more than {CPU_SECONDS} seconds"
    if done.returncode:
        return f"it takes more than {ADDRESS_BYTES >> 30} GiB of memory, or crashes"
    return done.stdout.decode()


def main() -> None:
    """Print why what is given on standard input cannot be used."""
    content = json.loads(sys.stdin.buffer.read())
    # SIGXCPU writes the memory of the process to a core file otherwise.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(ValueError, OSError):  # macOS has the limit, and may refuse to set it
        resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_BYTES, ADDRESS_BYTES))
    if "template" in content:
        _render(content["template"])
    else:
        sys.stdout.write(_pre_tokenize(content["tokenizer"]))


def _pre_tokenize(parts: Mapping[str, Any]) -> str:
    from tokenizers import Tokenizer  # noqa: PLC0415 - only in the process with limits

    model = {"type": "BPE", "vocab": {}, "merges": []}
    tokenizer = Tokenizer.from_str(json.dumps({"version": "1.0", **parts, "model": model}))
    # After the import, whose own CPU time does not count. SIGXCPU comes at the first limit, SIGKILL
    # at the second.
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 1))
    texts = [part * (RUN_LENGTH // len(part)) + end for part in RUNS for end in ("", "_", "b")]
    try:
        for text in texts:
            normal = tokenizer.normalizer.normalize_str(text) if tokenizer.normalizer else text
            if len(normal) > OUTPUT_FACTOR * len(text):
                return f"it becomes {len(normal):,} characters"
            if tokenizer.pre_tokenizer:
                tokenizer.pre_tokenizer.pre_tokenize_str(normal)
    except BaseException as error:  # noqa: BLE001 - a panic in Rust is no Exception
        return str(error).partition("\n")[0]
    return ""


def _render(text: str) -> None:
    from penstock.rows.template_syntax import ENVIRONMENT  # noqa: PLC0415 - as above

    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 1))
    messages = [
        {"role": role, "content": "word " * 9} for role in ("user", "assistant") * (MESSAGES // 2)
    ]
    for more in ({}, {"tools": [{"type": "function", "function": {"name": "f"}}]}):
        try:
            ENVIRONMENT.from_string(text).render(messages=messages, **more)
        # Its exit code tells `_probe` that memory was too little.
        except MemoryError:
            raise
        except Exception:  # noqa: BLE001 - only whether it ends
            continue


if __name__ == "__main__":
    main()
