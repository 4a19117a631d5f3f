"""The job file of a training run, which every rank reads."""

import uuid
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, PlainSerializer, TypeAdapter

from penstock.config.loading import yaml12
from penstock.config.schema.run import RunConfig
from penstock.core.cache.record import Record, read_record_fields, write_record
from penstock.core.cache.stage import Artifact, Source
from penstock.core.files import atomic_write
from penstock.core.remote.urls import redact
from penstock.core.sources.hub import MODEL_FILES, local_folder
from penstock.core.sources.pin_remote import resolve_folder
from penstock.core.sources.unchanged import PinnedFile, pinned_files, require_unchanged
from penstock.engine.model_source import ModelSource
from penstock.rows.chat_template import ChatTemplate

JOB = "job.json"
RESOLVED_CONFIG = "config.yaml"
OUTCOME = "outcome.json"
EARLIER_KEYS = "earlier_keys.json"
RANKS_LOCK = ".ranks.lock"
CHECKPOINTS = "checkpoints"
LOGS = "logs"
METRICS = "metrics.jsonl"
REPORT = "report.html"
SAMPLES = "samples.jsonl"
DATA_SAMPLES = "shown_data.json"
EVAL_RESULTS = "eval_results.json"
ENVIRONMENT = "surroundings.json"
HF_WEIGHTS = "hf_ckpt"
"""Folder in the last checkpoint, named as in xorl."""

# Passed on verbatim: a URL in a prompt is part of its text.
PROMPTS = "sample_prompts"


def remove_secrets(value: Any) -> Any:
    """A config's values without signed URLs and passwords in URLs.

    Ranks need none, because remote files are downloaded before they start. Prompts are not
    redacted, because a URL in a prompt is part of its text.
    """
    if isinstance(value, dict):
        return {
            name: item if name == PROMPTS else remove_secrets(item) for name, item in value.items()
        }
    if isinstance(value, list):
        return [remove_secrets(item) for item in value]
    return redact(value) if isinstance(value, str) else value


def _explicit_fields(config: RunConfig) -> dict[str, Any]:
    # Only what was set, so that reports can tell it from defaults.
    return remove_secrets(config.model_dump(mode="json", exclude_unset=True))


@dataclass(frozen=True)
class Job:
    """Inputs, outputs, and the user's config."""

    key: str
    config: Annotated[RunConfig, PlainSerializer(_explicit_fields)]
    packed_dir: Annotated[Path, Field(alias="packed")]
    packed_key: str
    """The key of the packed rows: a data cursor is only valid for the same rows."""
    epoch_rows: tuple[int, ...]
    """Number of rows of each packed epoch, in order; empty if all rows are one epoch."""
    max_token_id: int
    """The largest token id in the packed rows."""
    config_path: str
    """A local folder with a config.json, or `builtin:<name>`."""
    weights: Path | None
    """A local folder of safetensors; None initializes from the seed."""
    output_dir: Path
    launch_id: Annotated[str, Field(alias="launch")]
    """Unique id of this start of the ranks, so that late output of an earlier start is not mistaken
    for its own."""
    adapter: Path | None = None
    """A local folder with the adapter to resume from."""
    tokenizer: str | None = None
    """The tokenizer: a folder, a Hub id or `builtin:<name>`. Only sample prompts need it."""
    tokenizer_revision: str | None = None
    chat_template: ChatTemplate | None = None
    """The chat template of sample prompts; None for the tokenizer's own."""
    init_checkpoint: Annotated[Path | None, Field(alias="initial")] = None
    """A local checkpoint whose weights are loaded at the start, without optimizer state."""
    ref_logprobs: Annotated[Path | None, Field(alias="scores")] = None
    """The folder of reference log-probs, existing or to be written."""
    row_length: int | None = None
    """Maximum tokens per packed row, if it was chosen automatically."""
    images: bool = False
    """Whether the rows have images."""
    earlier_keys: tuple[str, ...] = ()
    """Keys of the shorter runs whose checkpoints this one resumes from too."""
    sources: tuple[PinnedFile, ...] = ()
    """The files of model, adapter and checkpoints on this machine."""

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of the checkpoints that the run resumes from."""
        return (self.key, *self.earlier_keys)

    def require_unchanged_sources(self) -> None:
        """Raise StageError if the files that were loaded are not those that were pinned."""
        require_unchanged(self.sources)

    def write(self) -> Path:
        """Write the job and the full config to the output folder; return the job file."""
        path = self.output_dir / JOB
        self.save(path)
        with atomic_write(self.output_dir / RESOLVED_CONFIG) as part:
            values = remove_secrets(self.config.model_dump(mode="json"))
            part.write_text(yaml12.dump(values), encoding="utf-8")
        return path

    def save(self, path: Path) -> None:
        """Write only the job, for the ranks."""
        record = _job_fields().dump_python(self, mode="json", by_alias=True)
        write_record(path, {**record, "working_dir": str(Path.cwd())})

    @classmethod
    def read(cls, path: Path) -> "Job":
        job = _job_fields().validate_python(read_job(path))
        if job.row_length is None:
            return job
        return replace(job, config=job.config.with_row_length(job.row_length))


@cache
def _job_fields() -> TypeAdapter[Job]:
    # Built on first use: with the schema of the whole config, which takes 40 ms.
    return TypeAdapter(Job)


def read_job(path: Path) -> Record:
    """Read the job file as plain values. Raises ArtifactError if it is damaged."""
    return read_record_fields(path, "Run the same command again, which writes it again.")


def read_outcome(output_dir: Path) -> Record | None:
    """Read the outcome of the ranks; None if they have not finished. Raises ArtifactError for a
    damaged file."""
    remedy = "Delete it and run the same command again; training resumes from its checkpoint."
    return _read_if_present(output_dir / OUTCOME, remedy)


def read_earlier_keys(output_dir: Path, key: str) -> tuple[str, ...]:
    """Read the keys of the shorter runs that the run with this key goes on from. Raises
    ArtifactError for a damaged file."""
    remedy = "Delete it; then only checkpoints of the run's own key are resumed from."
    record = _read_if_present(output_dir / EARLIER_KEYS, remedy)
    return tuple(record["earlier"]) if record and record["key"] == key else ()


def _read_if_present(path: Path, remedy: str) -> Record | None:
    try:
        return read_record_fields(path, remedy)
    except (FileNotFoundError, NotADirectoryError):
        return None


def write_earlier_keys(output_dir: Path, key: str, shorter: str) -> None:
    """Record that the run with this key goes on from the one with the key `shorter`."""
    earlier = [shorter, *read_earlier_keys(output_dir, shorter)]
    write_record(output_dir / EARLIER_KEYS, {"key": key, "earlier": earlier})


def resolve_source(path: str | None, source: Source | None) -> Path | None:
    """The local folder of a source that the config names, if it does."""
    return local_folder(path, source).resolve() if path and source else None


def build_job(
    key: str,
    config: RunConfig,
    packed: Artifact,
    model_source: ModelSource,
    output_dir: Path,
    *checkpoints: Source | None,
) -> Job:
    """Build the job of a new start of ranks that read `packed` and initialize from the model
    `model_source`, or from `checkpoints`."""
    config_path = model_source.config_path
    if model_source.config.pin["kind"] != "builtin":
        files = (*MODEL_FILES, "*.py") if model_source.runs_code else MODEL_FILES
        config_path = str(local_folder(config_path, model_source.config, files).resolve())
    sources = (model_source.config, model_source.weights, model_source.adapter, *checkpoints)
    facts = packed.facts
    row_length = None
    if config.data.sample_packing_sequence_len is None:
        # Missing in artifacts packed by earlier versions, which used the default.
        row_length = facts.get("row_length", {}).get("train")
    if row_length is not None:
        config = config.with_row_length(row_length)
    return Job(
        key=key,
        config=config,
        packed_dir=packed.path.resolve(),
        packed_key=packed.key,
        epoch_rows=tuple(facts.get("epoch_rows", {}).get("train", ())),
        max_token_id=facts["max_token_id"]["train"],
        config_path=config_path,
        weights=resolve_source(model_source.model_path, model_source.weights),
        adapter=resolve_source(model_source.adapter_path, model_source.adapter),
        output_dir=output_dir,
        launch_id=uuid.uuid4().hex,
        tokenizer=resolve_folder(model_source.tokenizer_path, model_source.tokenizer),
        tokenizer_revision=model_source.tokenizer.pin.get("commit"),
        chat_template=model_source.chat_template,
        row_length=row_length,
        images=any(facts.get("images", {}).values()),
        earlier_keys=read_earlier_keys(output_dir, key),
        sources=tuple(pinned_files(source for source in sources if source)),
    )
