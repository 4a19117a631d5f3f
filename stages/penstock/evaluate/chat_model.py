"""Chat with a model: the engine's generator, the chat template, and streamed text.

The whole conversation is rendered for every turn, so it may be edited freely; the KV cache is used
within one reply only.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from penstock.config.schema.run import RunConfig
from penstock.core.errors import ConfigError
from penstock.core.files import read_json_object
from penstock.engine.build import assemble
from penstock.engine.distributed.ranks import ProcessInfo
from penstock.engine.generation.generator import Generator
from penstock.engine.generation.sampling import SamplingParams
from penstock.engine.generation.sequences import Prompt
from penstock.engine.hf.config import read_hf_config
from penstock.models.multimodal import language_config
from penstock.rows.tokenizer import load_tokenizer

Message = Mapping[str, str]  # `role` and `content`

# Decoding result of an incomplete UTF-8 character, whose last bytes are not sampled yet.
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class StoppedError(Exception):
    """The user interrupted the reply."""


@dataclass(frozen=True)
class Reply:
    """A generated reply."""

    text: str  # Text without special tokens
    tokens: int
    ended: str
    """Finish reason: `stop`: EOS token; `length`: `max_new_tokens`; `interrupted`: Ctrl-C."""


@dataclass(frozen=True)
class ChatModel:
    """A model on this rank with its tokenizer."""

    generator: Generator
    tokenizer: PreTrainedTokenizerBase
    ends: tuple[int, ...]  # EOS token ids

    @property
    def has_template(self) -> bool:
        """Whether the tokenizer has a chat template; without one, text is only completed."""
        return bool(self.tokenizer.chat_template)

    def encode(self, messages: Sequence[Message]) -> list[int]:
        """Tokenize the prompt. Without a chat template, only the last message is used. Raises
        ConfigError if the chat template rejects the conversation."""
        if not self.has_template:
            return list(self.tokenizer.encode(messages[-1]["content"]))
        conversation = [dict(message) for message in messages]
        try:
            text = self.tokenizer.apply_chat_template(
                conversation, tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # templates may raise any exception
            roles = ", ".join(message["role"] for message in messages)
            raise ConfigError(
                f"the model's chat template rejects a conversation of {roles}: {error}\n"
                "  Remove --system if the model does not support system messages."
            ) from error
        # The chat template already contains the special tokens.
        return list(self.tokenizer.encode(str(text), add_special_tokens=False))

    def reply(
        self,
        messages: Sequence[Message],
        sampling: SamplingParams,
        on_text: Callable[[str], None],
        check_stop: Callable[[], None],
    ) -> Reply:
        """Generate the reply to a conversation; `on_text` streams its text.

        `check_stop` is called before each token and may raise StoppedError: the reply is then the
        text so far. Raises ConfigError if the conversation is longer than the model's context.
        """
        tokens: list[int] = []
        shown = ""

        def decoded(until: int | None = None) -> str:
            decoded_tokens = tokens[:until]
            return str(self.tokenizer.decode(decoded_tokens, skip_special_tokens=True))

        def on_token(_prompt: int, token: int) -> None:
            nonlocal shown
            tokens.append(token)
            # All tokens again: decoders may join a token's spaces or bytes to the ones before.
            text = decoded()
            # Printed text cannot be taken back: what later tokens may change waits.
            if text.endswith(INCOMPLETE) or not text.startswith(shown):
                return
            if text != shown:
                on_text(text[len(shown) :])
                shown = text

        prompt = Prompt(self.encode(messages), sampling)
        self.generator.require_possible("the conversation", prompt)
        try:
            # A turn begins with the turns before it.
            [answered] = self.generator.generate(
                [prompt], between=check_stop, on_token=on_token, weights_version="loaded"
            )
            ended = str(answered.completions[0].finish_reason)
        except StoppedError:
            ended = "interrupted"
        text = decoded()
        if text.startswith(shown) and text != shown:
            on_text(text[len(shown) :])
        return Reply(text, len(tokens), ended)


def load_chat_model(
    run: RunConfig,
    weights: Path,
    ranks: ProcessInfo,
    *,
    tokenizer: Path,
    adapter: Path | None = None,
) -> ChatModel:
    """Load the model in the folder `weights`, optionally with an unmerged adapter. Raises
    ConfigError, CapabilityError or ArtifactError for folders that are not supported."""
    hf_config = read_hf_config(str(weights), {}, runs_code=run.model.trust_remote_code)
    built = assemble(run, hf_config, weights, ranks, lambda _: None, adapter=adapter)
    loaded = load_tokenizer(str(tokenizer))
    return ChatModel(built.generator, loaded, end_tokens(weights, hf_config, loaded))


def end_tokens(
    folder: Path, hf_config: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase
) -> tuple[int, ...]:
    """EOS token ids from the tokenizer, config.json and generation_config.json."""
    file = folder / "generation_config.json"
    configs: list[Mapping[str, Any]] = [
        language_config(hf_config),
        read_json_object(file) if file.is_file() else {},
    ]
    tokens: list[Any] = [tokenizer.eos_token_id]
    for config in configs:
        ends = config.get("eos_token_id")
        tokens += ends if isinstance(ends, list) else [ends]
    return tuple(sorted({end for end in tokens if isinstance(end, int)}))
