"""`penstock data show`: prints prepared samples as text, with trained tokens marked."""

import difflib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console as Terminal
from rich.text import Text

from penstock.cli.console import Console
from penstock.cli.data.commands import SampleSelection
from penstock.cli.data.load_prepared import Prepared
from penstock.cli.data.page import write_page
from penstock.cli.data.sample_view import (
    ImageView,
    Part,
    SampleView,
    Span,
    format_counts,
    format_image,
    format_origin,
    printable,
)
from penstock.config.schema.run import RunConfig
from penstock.core.cache.store import PlannedStage
from penstock.core.errors import ConfigError
from penstock.core.files import read_json
from penstock.core.sources.pin import pin_tokenizer
from penstock.media.video_processor import INDICES
from penstock.prepare.locate_record import Locate, build_locator
from penstock.prepare.sample_sources import DataSource, SplitSources, split_sources
from penstock.rows.decoding import Decoder, load_pinned_decoder
from penstock.rows.image_files import MEDIA, ImageFiles
from penstock.rows.prepared import PLAN, PreparedSamples, Sample
from penstock.rows.reader import Tokens
from penstock.rows.sample_order import Indices
from penstock.rows.schema import IGNORED

STYLES = {
    (True, False): "green",
    (True, True): "bold green",
    (False, False): "dim",
    (False, True): "bold cyan",
}
"""Terminal style of tokens by (trained, special)."""

LEGEND = {"green": "trained", "dim": "not trained", "bold": "special tokens"}

MARKS = ("[[", "]]")
"""Marks around trained tokens on a terminal without colors."""


def show_samples(
    prepared: Prepared, selection: SampleSelection, console: Console, page: Path | None = None
) -> dict[str, Any]:
    """Print the samples, or write them to an HTML page; returns them as plain values. Raises
    ConfigError if there are none."""
    folder = prepared.step.path
    samples = PreparedSamples(folder, selection.split)
    origins = split_sources(read_json(folder / PLAN), selection.split)
    seed = prepared.run.train.seed if selection.seed is None else selection.seed
    chosen = _select_samples(selection, len(samples), origins, seed, prepared.run)
    typed = prepared.run.model.tokenizer_source
    decoder = load_pinned_decoder(typed, pin_tokenizer(typed))
    locate = build_locator(prepared.step.stage)
    media = ImageFiles.in_folder(folder / MEDIA)
    shown = [
        _build_view(
            index,
            samples.sample(index),
            origins.sources[origins.source_indices[index]],
            locate,
            decoder,
            media,
        )
        for index in chosen
    ]
    if page:
        write_page(page, shown, f"{selection.split} samples of {len(samples):,}", prepared.step)
        console.result(str(page))
    elif not console.as_json:
        _print_samples(shown, selection.split, len(samples), prepared.step)
    return {
        **({"html": str(page)} if page else {}),
        "split": selection.split,
        "kind": samples.kind,
        "num_samples": len(samples),
        "samples": [asdict(sample) for sample in shown],
    }


def _select_samples(
    selection: SampleSelection, total: int, origins: SplitSources, seed: int, run: RunConfig
) -> list[int]:
    """Indices of the samples to show: those given, or a sorted random draw without replacement."""
    if not total:
        raise ConfigError(
            f"the {selection.split} split has no samples.\n"
            "  Write data.val_set_size or data.test_datasets to have validation data."
        )
    candidates = _samples_from_source(selection, origins, run)
    if not selection.index:
        random = np.random.default_rng(seed)
        size = min(selection.number, len(candidates))
        drawn = random.choice(len(candidates), size, replace=False, shuffle=False)
        return sorted(candidates[drawn].tolist())
    if selection.seed is not None:
        raise ConfigError("--index names samples and --seed draws them.\n  Leave one of them out.")
    for index in selection.index:
        if not 0 <= index < total:
            raise ConfigError(
                f"--index {index}: the {selection.split} split has {total} samples, "
                f"from 0 to {total - 1}."
            )
        if index not in candidates:
            source = origins.sources[origins.source_indices[index]]
            raise ConfigError(
                f"--index {index} is a sample of {source.label} ({source.section}), not of "
                f"{selection.source}."
            )
    return selection.index


def _samples_from_source(
    selection: SampleSelection, origins: SplitSources, run: RunConfig
) -> Indices:
    if selection.source is None:
        return np.arange(len(origins.source_indices))
    source_name = selection.source
    candidates = [
        index
        for index, source in enumerate(origins.sources)
        if source_name in (source.label, source.section, _source_path(source, run))
    ]
    if not candidates:
        names = [source.label for source in origins.sources]
        near = difflib.get_close_matches(source_name, names, n=1, cutoff=0.4)
        hint = f" Did you mean {near[0]}?" if near else ""
        listed = "\n".join(f"    {source.label} ({source.section})" for source in origins.sources)
        raise ConfigError(
            f"--source {source_name} gave no sample to {selection.split}.{hint} "
            f"Those that did:\n{listed}"
        )
    return np.flatnonzero(np.isin(origins.source_indices, candidates))


def _source_path(origin: DataSource, run: RunConfig) -> str | None:
    """The path of the source in the config; None if the data was prepared from another config."""
    written = {"train": run.data.datasets, "validation": run.data.test_datasets}[origin.role]
    return written[origin.dataset].path if origin.dataset < len(written) else None


def _build_view(
    index: int,
    sample: Sample,
    origin: DataSource,
    locate: Locate,
    decoder: Decoder,
    media: ImageFiles,
) -> SampleView:
    location = locate(sample.slice, sample.row)
    return SampleView(
        index=index,
        source=origin.label,
        section=origin.section,
        slice=sample.slice,
        record=sample.row,
        file=location.file if location else None,
        line=location.line if location else None,
        desirable=sample.desirable,
        score_gap=sample.score_gap,
        parts=list(_build_parts(sample, decoder)),
        images=[_build_image(digest, tokens, media) for digest, tokens in sample.images],
    )


def _build_image(digest: bytes, tokens: int, media: ImageFiles) -> ImageView:
    image = media.get(digest)
    if image is None:
        return ImageView(digest.hex(), 0, 0, tokens)
    indices = image.tensors.get(INDICES)
    frames = indices.shape[0] if indices else None
    return ImageView(digest.hex(), *image.size, tokens, image.kind, frames)


def _build_parts(sample: Sample, decoder: Decoder) -> Iterator[Part]:
    """The whole sample; for a pair the shared prompt and the two completions."""
    if "" in sample.sides:
        yield _build_part("sample", sample.sides[""], 0, decoder)
        return
    ids, labels = sample.sides["chosen"]
    rejected_ids, their_labels = sample.sides["rejected"]
    shared = _first_trained_token(labels)
    if not np.array_equal(ids[:shared], rejected_ids[: _first_trained_token(their_labels)]):
        shared = 0
    if shared:
        yield _build_part("prompt", (ids[:shared], labels[:shared]), 0, decoder)
    for name, side in sample.sides.items():
        yield _build_part(name, side, shared, decoder)


def _first_trained_token(labels: Tokens) -> int:
    """The index of the first trained token."""
    return int(np.argmax(labels != IGNORED))


def _build_part(name: str, side: tuple[Tokens, Tokens], start: int, decoder: Decoder) -> Part:
    """The tokens of a side from `start` on. The first token of a sequence is never trained, as no
    token predicts it."""
    ids, labels = side
    trained = labels != IGNORED
    trained[:1] = False
    ids, labels, trained = ids[start:], labels[start:], trained[start:]
    return Part(
        name=name,
        tokens=len(ids),
        trained_tokens=int(trained.sum()),
        other_targets=int((trained & (labels != ids)).sum()),
        spans=list(_spans(ids.tolist(), trained, decoder)),
    )


def _spans(ids: list[int], trained: np.ndarray, decoder: Decoder) -> Iterator[Span]:
    styles = list(zip(trained.tolist(), map(decoder.is_special, ids), strict=True))
    ends = list(accumulate(len(list(run)) for _, run in groupby(styles)))
    start = 0
    for end, text in zip(ends, decoder.pieces(ids, ends), strict=True):
        yield Span(*styles[start], text, ids[start:end])
        start = end


def _print_samples(shown: Sequence[SampleView], split: str, total: int, step: PlannedStage) -> None:
    terminal = Terminal(file=sys.stdout, highlight=False)
    coloured = terminal.is_terminal and bool(terminal.color_system) and not terminal.no_color
    text = Text()
    if coloured:
        for style, name in LEGEND.items():
            text.append(name, style).append("  ")
    else:
        text.append(f"Trained tokens are marked with {MARKS[0]} {MARKS[1]}.")
    text.append(f"\n{step.where}\n")
    for sample in shown:
        text.append("\n")
        text.append(f"{split} sample {sample.index} of {total}: {format_origin(sample)}\n", "bold")
        for number, image in enumerate(sample.images):
            text.append(f"{format_image(number, image)}\n", "italic")
        for part in sample.parts:
            text.append(f"{format_counts(sample, part)}\n", "italic")
            text.append_text(_color_tokens(part) if coloured else Text(_mark_tokens(part)))
            text.append("\n")
    if coloured:
        # rich would otherwise break lines at the width of the terminal, within tokens too.
        terminal.print(text, soft_wrap=True, end="")
    else:
        sys.stdout.write(text.plain)


def _color_tokens(part: Part) -> Text:
    text = Text()
    for span in part.spans:
        text.append(printable(span), STYLES[span.trained, span.special])
    return text


def _mark_tokens(part: Part) -> str:
    """The text with marks around consecutive trained tokens, special ones included."""
    pieces: list[str] = []
    inside = False
    for span in part.spans:
        if span.trained != inside:
            pieces.append(MARKS[0] if span.trained else MARKS[1])
            inside = span.trained
        pieces.append(printable(span))
    return "".join([*pieces, MARKS[1] if inside else ""])
