"""A model to chat with: the engine's own generator, the chat template, and text as it is sampled.

Prompts are rendered anew each turn, so a conversation may be edited freely; keys and values are
cached within an answer.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from penstock.config.schema.run import RunConfig
from penstock.core.errors import CapabilityError, ConfigError
from penstock.core.files import read_json
from penstock.engine.build import assemble
from penstock.engine.distributed.ranks import ProcessInfo
from penstock.engine.generation.generator import Generator
from penstock.engine.generation.sampling import SamplingParams
from penstock.engine.generation.sequences import Prompt
from penstock.engine.hf.config import read_hf_config
from penstock.rows.tokenizer import load_tokenizer

Message = Mapping[str, str]
"""`role` and `content`."""

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""What decoding gives for the first bytes of a character whose last have not been sampled."""


class StoppedError(Exception):
    """The answer was stopped by the person who waits for it."""


@dataclass(frozen=True)
class Reply:
    """An answer as text."""

    text: str
    """Without special tokens."""
    tokens: int
    ended: str
    """`stop`: by the end token; `length`: at `max_new_tokens`; `interrupted`: by Ctrl-C."""


@dataclass(frozen=True)
class ChatModel:
    """A model on this rank, and its tokenizer."""

    generator: Generator
    tokenizer: PreTrainedTokenizerBase
    ends: tuple[int, ...]
    """Tokens that end an answer."""

    @property
    def has_template(self) -> bool:
        """Whether conversations are rendered; without a template text is only continued."""
        return bool(self.tokenizer.chat_template)

    def encode(self, messages: Sequence[Message]) -> list[int]:
        """The tokens of a prompt. Without a chat template they are those of the last message alone.

        Raises ConfigError for a conversation that the template refuses.
        """
        if not self.has_template:
            return list(self.tokenizer.encode(messages[-1]["content"]))
        conversation = [dict(message) for message in messages]
        try:
            text = self.tokenizer.apply_chat_template(
                conversation, tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # templates raise what they like
            roles = ", ".join(message["role"] for message in messages)
            raise ConfigError(
                f"the model's chat template refuses a conversation of {roles}: {error}\n"
                "  Leave --system out if the model knows no system message."
            ) from error
        # A template writes special tokens itself.
        return list(self.tokenizer.encode(str(text), add_special_tokens=False))

    def reply(
        self,
        messages: Sequence[Message],
        how: SamplingParams,
        on_text: Callable[[str], None],
        check_stop: Callable[[], None],
    ) -> Reply:
        """The answer to a conversation; `on_text` is given its pieces as they are sampled.

        `check_stop` may raise StoppedError before each token: what there is then is the answer.
        Raises ConfigError for a conversation that is longer than the model's context.
        """
        tokens: list[int] = []
        shown = ""

        def decoded(until: int | None = None) -> str:
            found = tokens[:until]
            return str(self.tokenizer.decode(found, skip_special_tokens=True))

        def on_token(_prompt: int, token: int) -> None:
            nonlocal shown
            tokens.append(token)
            text = decoded()
            if text.endswith(INCOMPLETE) or not text.startswith(shown):
                return
            if text != shown:
                on_text(text[len(shown) :])
                shown = text

        prompt = Prompt(self.encode(messages), how)
        self.generator.require_possible("the conversation", prompt)
        try:
            [answered] = self.generator.generate([prompt], between=check_stop, on_token=on_token)
            ended = str(answered.answers[0].ended)
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
    """The model in the folder `weights`, with an adapter laid over it and not merged.

    Raises ConfigError, CapabilityError or ArtifactError for folders that cannot be computed.
    """
    hf_config = read_hf_config(str(weights), {})
    built = assemble(run, hf_config, weights, ranks, lambda _: None, adapter=adapter)
    loaded = load_tokenizer(str(tokenizer))
    return ChatModel(built.generator, loaded, end_tokens(weights, hf_config, loaded))


def end_tokens(
    folder: Path, hf_config: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase
) -> tuple[int, ...]:
    """Tokens that end an answer, by the tokenizer, config.json and generation_config.json."""
    file = folder / "generation_config.json"
    said: list[Mapping[str, Any]] = [hf_config, read_json(file) if file.is_file() else {}]
    found: list[Any] = [tokenizer.eos_token_id]
    for each in said:
        ends = each.get("eos_token_id")
        found += ends if isinstance(ends, list) else [ends]
    return tuple(sorted({end for end in found if isinstance(end, int)}))


def require_not_quantised(folder: Path) -> None:
    """Raise CapabilityError for a folder whose weights are rounded: adapters alone train on those,
    and the generator computes with plain ones."""
    if read_json(folder / "config.json").get("quantization_config"):
        raise CapabilityError(
            f"{folder} is quantised, and penstock chat computes with plain weights.\n"
            "  Serve it with vLLM, or export without export.quantise."
        )
