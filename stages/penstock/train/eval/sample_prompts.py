"""Sample prompts: completions of fixed prompts with the current weights during training."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedTokenizerBase

from penstock.engine.build import BuiltModel
from penstock.engine.distributed.ranks import ProcessInfo
from penstock.engine.generation.sampling import SamplingParams
from penstock.engine.generation.sequences import Prompt
from penstock.rows.tokenizer import load_tokenizer
from penstock.train.launch.job import Job


@dataclass(frozen=True)
class Prompts:
    """Prompts, and the tokenizer that encodes them and decodes completions."""

    texts: tuple[str, ...]
    tokens: tuple[tuple[int, ...], ...]
    end: int | None
    """The end-of-sequence token."""
    tokenizer: PreTrainedTokenizerBase

    @classmethod
    def of(cls, texts: Sequence[str], tokenizer: str, revision: str | None) -> "Prompts":
        """Encode texts as user messages if the tokenizer has a chat template, else as plain
        text."""
        loaded = load_tokenizer(tokenizer, revision)
        if loaded.chat_template:
            asked = [[{"role": "user", "content": text}] for text in texts]
            rendered = [
                loaded.apply_chat_template(one, tokenize=False, add_generation_prompt=True)
                for one in asked
            ]
            # The chat template already adds special tokens.
            found = [loaded.encode(str(text), add_special_tokens=False) for text in rendered]
        else:
            found = [loaded.encode(text) for text in texts]
        end = loaded.eos_token_id
        return cls(
            tuple(texts), tuple(map(tuple, found)), end if isinstance(end, int) else None, loaded
        )

    def told(self, answers: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
        """Each prompt with its decoded completion, without the end-of-sequence token."""
        found: list[dict[str, Any]] = []
        for text, answer in zip(self.texts, answers, strict=True):
            ended = bool(answer) and answer[-1] == self.end
            said = self.tokenizer.decode(list(answer[:-1] if ended else answer))
            found.append({"prompt": text, "answer": said, "tokens": len(answer), "ended": ended})
        return found


if TYPE_CHECKING:
    from penstock.train.eval.sample_prompts import Prompts


class _StoppedError(Exception):
    """Some rank was asked to stop."""


class Sampler:
    """Completes prompts with greedy decoding. Every rank creates one and makes the same calls."""

    def __init__(
        self,
        prompts: "Prompts | None",
        built: BuiltModel,
        ranks: ProcessInfo,
        *,
        max_new_tokens: int,
    ) -> None:
        """`prompts` are only given on rank 0.

        Raises ConfigError for a prompt that the model cannot complete, before training starts.
        """
        self._prompts, self._generator, self._ranks = prompts, built.generator, ranks
        told = ranks.all_gather((prompts.tokens, prompts.end) if prompts else None)[0]
        assert told is not None
        tokens, end = told
        ends = () if end is None else (end,)
        how = SamplingParams(max_tokens=max_new_tokens, temperature=0, stop_tokens=ends)
        self._asked = [Prompt(ids, how) for ids in tokens]
        for number, prompt in enumerate(self._asked):
            self._generator.require_possible(f"train.sample_prompts.{number}", prompt)

    def answer(self, is_asked_to_stop: Callable[[], object]) -> list[dict[str, Any]] | None:
        """Generate completions; rank 0 returns each prompt with its completion.

        None if any rank is asked to stop before the end. Raises NotFiniteError for a diverged
        model.
        """

        def go_on() -> None:
            if self._ranks.any_rank(bool(is_asked_to_stop())):
                raise _StoppedError

        try:
            found = self._generator.generate(self._asked, between=go_on)
        except _StoppedError:
            return None
        answers = [one.answers[0].tokens for one in found]
        return self._prompts.told(answers) if self._prompts else []


def build_sampler(job: Job, built: BuiltModel, ranks: ProcessInfo) -> Sampler | None:
    """Build the sampler of the config; None without prompts."""
    train, prompts = job.config.train, None
    if not train.sample_prompts:
        return None
    if ranks.is_main_process:
        # The tokenizer library takes seconds to import, and no other rank needs it.
        from penstock.train.eval.sample_prompts import Prompts  # noqa: PLC0415

        assert job.tokenizer is not None
        prompts = Prompts.of(train.sample_prompts, job.tokenizer, job.tokenizer_revision)
    return Sampler(prompts, built, ranks, max_new_tokens=train.sample_max_new_tokens)
