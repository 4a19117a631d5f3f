"""What a laid-out model writes after prompts: many answers at once, from the weights as they are.

Every rank takes part in every pass, under any layout, and every rank gets all answers. Answers are
dealt out to replicas; nothing of what is drawn depends on that, but by rounding. Attention over a
ring, and positions that go by a document's length, keep nothing between passes: there each token
costs a pass over all that comes before it.

T tokens of a pass, S places in which a token is drawn or told, C those of a chunk, V vocabulary.
"""

import secrets
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from penstock.config.train import TrainConfig
from penstock.core.errors import ConfigError, PenstockError
from penstock.engine.drawing import draw
from penstock.engine.generation_passes import Kept, Limits, Pass, Passes, Recomputed
from penstock.engine.parallel.cuts import share
from penstock.engine.parallel.fits import tokens_multiple
from penstock.engine.parallel.layout import Layout
from penstock.engine.parallel.vocabulary import LogitsOf
from penstock.engine.prompt_scores import PromptScores
from penstock.engine.ranks import Ranks
from penstock.engine.sequences import Answer, Answered, Decode, Growing, Prompt
from penstock.models.shape import BY_DOCUMENT, DecoderConfig

KEPT_TOKENS = 1 << 17
PASSED_TOKENS = 1 << 13


class NotFiniteError(PenstockError):
    """The model gives what are no numbers."""


@dataclass(frozen=True)
class Generator:
    """Writes with a model that is trained beside it."""

    layout: Layout
    ranks: Ranks
    logits: LogitsOf
    multiple: int
    """What the tokens of a pass must be a multiple of under this layout."""
    keeps: bool
    """Whether keys and values are kept between passes."""
    eagerly: Callable[[], AbstractContextManager[object]] = nullcontext
    """Entered while it writes, so that nothing is compiled for passes of changing shapes."""
    kept_tokens: int = KEPT_TOKENS
    """Tokens of prompts and answers for which a replica has room at once; others wait."""
    passed_tokens: int = PASSED_TOKENS
    """Tokens of prompts in a pass."""

    @torch.no_grad()
    def generate(self, prompts: Sequence[Prompt], decode: Decode | None = None) -> list[Answered]:
        """The answers to each prompt, on every rank; every rank must ask for the same.

        An answer depends on its prompt, on what is asked of it, on the seed and on its number among
        those to the prompt, and not on what else is asked for. `decode` is wanted for stop texts.

        Raises:
            ConfigError: for a prompt that is empty, leaves no room in the model's context, or has
                tokens that the model does not know; for stop texts without `decode`.
            NotFiniteError: the model's logits are no numbers.
        """
        for number, prompt in enumerate(prompts):
            self._require_possible(number, prompt, decode)
        growing = self._growing(prompts)
        scores = PromptScores(prompts, self.ranks.device)
        passes = self._passes(growing)
        with self.eagerly(), self.layout.at_rest():
            while not all(one.ended for one in growing):
                self.ranks.pulse.begins("answering prompts")
                found = self._found(passes.following(), scores, len(growing))
                if self.ranks.world > 1:
                    # From each replica its own, and the same from all ranks of one.
                    found = self.ranks.highest(found)
                tokens, log_probs, flaws = found.tolist()
                if max(flaws) > 0:
                    raise NotFiniteError(
                        "the model's logits are not finite: its weights have diverged."
                    )
                for one, token, log_prob in zip(growing, tokens, log_probs, strict=True):
                    if token >= 0:
                        one.add(int(token), log_prob, decode)
                passes.sift()
        scores.share(self.ranks)
        answers: list[list[Answer]] = [[] for _ in prompts]
        for one in growing:
            answers[one.prompt_number].append(one.answer())
        return [Answered(its, *scores.of(number)) for number, its in enumerate(answers)]

    @property
    def _config(self) -> DecoderConfig:
        return self.layout.parts[0].config

    def _passes(self, growing: Sequence[Growing]) -> Passes:
        """This replica's share. Neighbours, so that answers to one prompt are together."""
        mesh = self.layout.mesh
        mine = share(len(growing), mesh.degrees.num_replicas, mesh.index("replicate", "shard"))
        limits = Limits(self.kept_tokens, self.passed_tokens, self.multiple)
        here = [growing[number] for number in mine]
        return Kept(here, limits, self.ranks.device) if self.keeps else Recomputed(here, limits)

    def _growing(self, prompts: Sequence[Prompt]) -> list[Growing]:
        [seeds, *_] = self.ranks.gather([secrets.randbits(63) for _ in prompts])
        limit = self._config.max_position_embeddings
        found: list[Growing] = []
        for number, (prompt, fresh) in enumerate(zip(prompts, seeds, strict=True)):
            room, most = limit - len(prompt.tokens), prompt.how.max_tokens
            most = room if most is None else min(room, most)
            seed = fresh if prompt.how.seed is None else prompt.how.seed
            for sample in range(prompt.count):
                found.append(Growing(len(found), number, prompt, sample, most, seed))
        return found

    def _require_possible(self, number: int, prompt: Prompt, decode: Decode | None) -> None:
        length, limit = len(prompt.tokens), self._config.max_position_embeddings
        if not length:
            raise ConfigError(f"prompt {number} has no token. Give it one at least.")
        if length > limit or (length == limit and prompt.how.max_tokens != 0):
            raise ConfigError(
                f"prompt {number} has {length} tokens, and the model's context ends at {limit}.\n"
                "  Shorten it, so that there is room for an answer."
            )
        size = self._config.vocab_size
        if strangers := [token for token in prompt.tokens if not 0 <= token < size]:
            raise ConfigError(
                f"prompt {number} has token {strangers[0]}, and the model's vocabulary ends at "
                f"{size - 1}."
            )
        if prompt.count < 1:
            raise ConfigError(f"{prompt.count} answers are asked to prompt {number}. Ask for 1.")
        if not 0 <= prompt.likeliest <= size:
            raise ConfigError(
                f"the {prompt.likeliest} likeliest tokens are asked of prompt {number}, and the "
                f"model's vocabulary has {size}."
            )
        if prompt.how.stop_texts and decode is None:
            raise ConfigError(
                f"the answers to prompt {number} end with a text, and there is no tokenizer to "
                "tell it by.\n  Give stop tokens."
            )

    def _found(self, one: Pass, scores: PromptScores, count: int) -> torch.Tensor:
        """Of each answer the next token, its log-probability, and whether there was a flaw in what
        they come from: fp64 [3, count]; -inf where another rank knows."""
        found = torch.full((3, count), -torch.inf, dtype=torch.float64, device=self.ranks.device)
        reduce = partial(self._take, one, self._here(one.slots_T()), scores, found)
        call = self.layout.call(one.batch, reduce, self.ranks.device)
        self.layout.look(replace(call, segments=one.segments(call.segments)))
        return found

    def _take(
        self,
        one: Pass,
        slots_T: torch.Tensor,
        scores: PromptScores,
        found: torch.Tensor,
        hidden: torch.Tensor,
        head: nn.Module,
    ) -> torch.Tensor:
        """Draw what follows on this rank's tokens, and tell what was asked of prompts."""
        if read := one.read():
            self._tell(one, read, scores, found, hidden, head)
        places_S = (slots_T >= 0).nonzero().squeeze(1)
        for some, logits_CV in self.logits(hidden, head, places_S):
            numbers = slots_T[some].tolist()
            after = [growing for number in numbers for growing in one.after[number]]
            rows = [row for row, number in enumerate(numbers) for _ in one.after[number]]
            wide_CV = logits_CV.float()
            if len(rows) != len(numbers):
                wide_CV = wide_CV[rows]
            # What is no number is the greatest of any numbers.
            flaws_S = ~wide_CV.amax(-1).isfinite()
            if flaws_S.any():
                wide_CV = wide_CV.masked_fill(flaws_S[:, None], 0)
            drawn = draw(
                wide_CV, [one.prompt.how for one in after], [one.uniform() for one in after]
            )
            told = torch.stack([each.double() for each in (*drawn, flaws_S)])
            found[:, [one.number for one in after]] = told
        return hidden.new_zeros((), dtype=torch.float32)

    def _tell(
        self,
        one: Pass,
        read: Sequence[tuple[int, Growing]],
        scores: PromptScores,
        found: torch.Tensor,
        hidden: torch.Tensor,
        head: nn.Module,
    ) -> None:
        """What foretells each token of these prompts but the first."""
        into_T = torch.full((sum(one.batch.lengths),), -1, dtype=torch.int64)
        for start, growing in read:
            places = scores.places(growing.prompt_number)
            into_T[start : start + len(places)] = torch.arange(places.start, places.stop)
        into_T = self._here(into_T)
        next_T = self._here(one.batch.input_ids_T.roll(-1))
        places_S = (into_T >= 0).nonzero().squeeze(1)
        for some, logits_CV in self.logits(hidden, head, places_S):
            log_probs_CV = logits_CV.float().log_softmax(-1)
            if log_probs_CV.isnan().any():
                found[2, read[0][1].number] = 1
                continue
            scores.take(into_T[some], next_T[some], log_probs_CV)

    def _here(self, values_T: torch.Tensor) -> torch.Tensor:
        """This rank's part of what there is for each token."""
        return self.layout.context.part(values_T).to(self.ranks.device, non_blocking=True)


def generator_of(train: TrainConfig, layout: Layout, ranks: Ranks, logits: LogitsOf) -> Generator:
    """One for the model that the settings lay out so."""
    by_document = layout.parts[0].config.rope_parameters["rope_type"] in BY_DOCUMENT
    keeps = layout.context.keeps and not by_document
    generator = Generator(layout, ranks, logits, tokens_multiple(train), keeps)
    if not train.enable_compile:
        return generator
    return replace(generator, eagerly=partial(torch.compiler.set_stance, "force_eager"))
