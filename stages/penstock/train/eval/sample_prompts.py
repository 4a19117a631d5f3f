"""Sample prompts: completions of fixed prompts with the current weights during training."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.engine.build import BuiltModel
from penstock.engine.distributed.ranks import ProcessInfo
from penstock.engine.generation.sampling import SamplingParams
from penstock.engine.generation.sequences import Prompt
from penstock.rows.chat_template import ChatTemplate
from penstock.train.launch.job import Job

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class SamplePrompts:
    """Prompts, and the tokenizer that encodes them and decodes completions."""

    texts: tuple[str, ...]
    token_ids: tuple[tuple[int, ...], ...]
    stop_tokens: tuple[int, ...]
    """The end-of-sequence token, and that with which the chat template ends an answer."""
    tokenizer: "PreTrainedTokenizerBase"

    @classmethod
    def encode(
        cls,
        texts: Sequence[str],
        tokenizer: str,
        revision: str | None,
        chat_template: ChatTemplate | None = None,
    ) -> "SamplePrompts":
        """Encode texts as user messages if there is a chat template (`chat_template`, or the
        tokenizer's own), else as plain text."""
        # The tokenizer library takes seconds to import, and only rank 0 needs it.
        from penstock.rows.template_tokens import end_of_turn  # noqa: PLC0415
        from penstock.rows.tokenizer import load_tokenizer  # noqa: PLC0415

        chat_template = chat_template or ChatTemplate()
        loaded = chat_template.apply(load_tokenizer(tokenizer, revision))
        ends: list[Any] = [loaded.eos_token_id]
        if loaded.chat_template:
            conversations = [[{"role": "user", "content": text}] for text in texts]
            rendered = [
                loaded.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=True, **chat_template.variables
                )
                for messages in conversations
            ]
            ends.append(end_of_turn(loaded, chat_template.variables))
            # The chat template already adds special tokens.
            encoded = [loaded.encode(str(text), add_special_tokens=False) for text in rendered]
        else:
            encoded = [loaded.encode(text) for text in texts]
        stop_tokens = tuple(dict.fromkeys(end for end in ends if isinstance(end, int)))
        return cls(tuple(texts), tuple(map(tuple, encoded)), stop_tokens, loaded)

    def decode(self, answers: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
        """Each prompt with its decoded completion, without the token that ends it."""
        samples: list[dict[str, Any]] = []
        for text, answer in zip(self.texts, answers, strict=True):
            ended = bool(answer) and answer[-1] in self.stop_tokens
            text_out = self.tokenizer.decode(list(answer[:-1] if ended else answer))
            samples.append(
                {"prompt": text, "answer": text_out, "tokens": len(answer), "ended": ended}
            )
        return samples


class _StoppedError(Exception):
    """Some rank was asked to stop."""


class SamplePromptGenerator:
    """Completes prompts with greedy decoding. Every rank creates one and makes the same calls."""

    def __init__(
        self,
        prompts: SamplePrompts | None,
        built: BuiltModel,
        ranks: ProcessInfo,
        *,
        max_new_tokens: int,
    ) -> None:
        """`prompts` is None on ranks other than rank 0.

        Raises ConfigError for a prompt that the model cannot complete, before training starts.
        """
        self._prompts, self._generator, self._ranks = prompts, built.generator, ranks
        encoded = ranks.all_gather((prompts.token_ids, prompts.stop_tokens) if prompts else None)[0]
        assert encoded is not None
        tokens, stop_tokens = encoded
        sampling_params = SamplingParams(
            max_tokens=max_new_tokens, temperature=0, stop_tokens=stop_tokens
        )
        self._generation_prompts = [Prompt(ids, sampling_params) for ids in tokens]
        for number, prompt in enumerate(self._generation_prompts):
            self._generator.require_possible(f"train.sample_prompts.{number}", prompt)

    def generate(self, is_asked_to_stop: Callable[[], object]) -> list[dict[str, Any]] | None:
        """Generate completions; rank 0 returns each prompt with its completion.

        None if any rank is asked to stop before the end. Raises NotFiniteError for a diverged
        model.
        """

        # The generator is left between two tokens by an exception alone.
        def raise_if_stopped() -> None:
            if self._ranks.any_rank(bool(is_asked_to_stop())):
                raise _StoppedError

        try:
            outputs = self._generator.generate(self._generation_prompts, between=raise_if_stopped)
        except _StoppedError:
            return None
        answers = [output.completions[0].tokens for output in outputs]
        return self._prompts.decode(answers) if self._prompts else []


def build_sample_generator(
    job: Job, built: BuiltModel, ranks: ProcessInfo
) -> SamplePromptGenerator | None:
    """Build the sampler of the config; None without prompts."""
    train, prompts = job.config.train, None
    if not train.sample_prompts:
        return None
    if ranks.is_main_process:
        assert job.tokenizer is not None
        prompts = SamplePrompts.encode(
            train.sample_prompts, job.tokenizer, job.tokenizer_revision, job.chat_template
        )
    return SamplePromptGenerator(prompts, built, ranks, max_new_tokens=train.sample_max_new_tokens)
