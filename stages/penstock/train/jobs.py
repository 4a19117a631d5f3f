"""What a stage is made of, as the ranks that do its work are told it."""

import uuid
from pathlib import Path

from penstock.config.run import RunConfig, written
from penstock.core.hub import local_folder
from penstock.core.remote_source import folder_of
from penstock.core.stage import Artifact
from penstock.engine.origin import Origin
from penstock.train.job import Job


def job_of(key: str, config: RunConfig, packed: Artifact, origin: Origin, output_dir: Path) -> Job:
    """The job of a new start of ranks, which read `packed` and begin with the model of `origin`."""
    config_path = origin.config_path
    if origin.config.pin["kind"] != "builtin":
        config_path = str(local_folder(config_path, origin.config).resolve())
    weights = None
    if origin.model_path and origin.weights:
        weights = local_folder(origin.model_path, origin.weights).resolve()
    adapter = None
    if origin.adapter_path and origin.adapter:
        adapter = local_folder(origin.adapter_path, origin.adapter).resolve()
    facts = packed.facts
    row_length = None
    if not written(config, "data.sample_packing_sequence_len"):
        # Absent from what was packed before lengths were chosen: then it is the default.
        row_length = facts.get("row_length", {}).get("train")
    if row_length is not None:
        config = config.model_copy(update={"data": config.data.with_row_length(row_length)})
    return Job(
        key=key,
        config=config,
        packed=packed.path.resolve(),
        packed_key=packed.key,
        epoch_rows=tuple(facts.get("epoch_rows", {}).get("train", ())),
        max_token_id=facts["max_token_id"]["train"],
        config_path=config_path,
        weights=weights,
        adapter=adapter,
        output_dir=output_dir,
        launch=uuid.uuid4().hex,
        tokenizer=folder_of(origin.tokenizer_path, origin.tokenizer),
        tokenizer_revision=origin.tokenizer.pin.get("commit"),
        row_length=row_length,
    )
