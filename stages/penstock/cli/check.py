"""`penstock check`: prints the config and checks the data, model and folders that it names.

Nothing is prepared or trained, and nothing written but the model of a run with `model.encoders`.
Every check runs, also after others have failed.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from penstock.cli.console import Console
from penstock.config.loading import yaml12
from penstock.config.loading.fault import dotted
from penstock.config.resolve import resolve
from penstock.config.rules.run import rule_violations
from penstock.config.schema.dataset import DatasetConfig
from penstock.config.schema.run import RunConfig
from penstock.core import env
from penstock.core.errors import (
    CapabilityError,
    ConfigError,
    ElsewhereError,
    PenstockError,
    StageError,
    UnreachableError,
)
from penstock.core.remote.urls import redact
from penstock.core.sources.pin import check_model as check_model_files
from penstock.core.sources.pin import pin_tokenizer
from penstock.core.sources.pin_remote import resolve_folder
from penstock.estimate.machine import (
    check_adapted_layers,
    check_machine,
    check_model,
    check_weights,
    needs_login,
    require_push,
    resolve_hf_config,
    resolve_text_config,
    unmatched_no_decay,
    with_prompts_apart,
    world_size,
)
from penstock.estimate.media import check_media
from penstock.pipeline.composing import with_composed_model
from penstock.pipeline.origins import resolve_init_checkpoint, with_adapter
from penstock.pipeline.outputs import find_unwritable, output_folders
from penstock.pipeline.pins import (
    DATASET_FIELDS,
    check_checkpoints,
    pin_dataset,
    resolve_dataset_type,
)
from penstock.pipeline.plan import (
    PRECISION_FIELDS,
    dataset_settings,
    float32_by_default,
    includes_stage,
    prepare_step,
    user_prepared_step,
)
from penstock.prepare.chat_templates.resolve import describe_template, resolve_chat_template
from penstock.prepare.stage import Prepare

if TYPE_CHECKING:
    from penstock.prepare.first_records import FirstSamples

Value = TypeVar("Value")
Status = Literal["ok", "fault", "not looked at"]


@dataclass(frozen=True)
class CheckResult:
    """The result of one check."""

    at: str
    """The field that was checked, or `model`."""
    status: Status
    text: str
    exit_code: int = 0
    """Of a fault: 2 for an error in the config, 3 for a missing capability of this machine."""

    @property
    def message(self) -> str:
        """The text, prefixed with the field unless it begins with it."""
        return self.text if self.text.startswith(self.at) else f"{self.at}: {self.text}"


def check_run(run: RunConfig, console: Console, *, all_fields: bool) -> dict[str, Any]:
    """Print the config as YAML and a line for each check; returns both for --json.

    Only fields that are set are printed, or with `all_fields` every field, and the resolved values
    of null fields as a comment. Raises ConfigError or CapabilityError if a check finds a fault.
    """
    typed, results = _compose_and_check(run)
    console.result(print_config(typed, all_fields=all_fields))
    faults = [result for result in results if result.status == "fault"]
    for result in results:
        if result.status != "fault":
            console.say(f"{result.status}: {result.message}")
    values = {
        "config": typed.model_dump(mode="json"),
        "resolved": resolve(typed),
        "looks": [asdict(result) for result in results],
    }
    if not faults:
        return values
    console.more.update(values)
    is_config = any(fault.exit_code == ConfigError.exit_code for fault in faults)
    raise (ConfigError if is_config else CapabilityError)(
        f"{len(faults)} of {len(results)} checks found a fault:\n"
        + "\n".join(fault.message for fault in faults)
    )


def _compose_and_check(run: RunConfig) -> tuple[RunConfig, list[CheckResult]]:
    """The results of all checks, of a run with encoders on its composed model."""
    if not run.model.encoders:
        return _run_checks(run)

    def compose() -> tuple[RunConfig, str]:
        composed = with_composed_model(run)
        return composed, f"the model is composed in {composed.model.model_path}"

    results: list[CheckResult] = []
    composed = _run_check(results, "model.encoders", compose)
    if composed is None:
        return run, results
    typed, checks = _run_checks(composed)
    # What is printed loads as the run that the user wrote, not as its composed model.
    return typed.model_copy(update={"model": run.model}), [*results, *checks]


def _run_checks(run: RunConfig) -> tuple[RunConfig, list[CheckResult]]:
    """The run with the types of its data sets, and all results at it."""
    results: list[CheckResult] = []
    tokenizer = _run_check(results, "model.tokenizer_path", lambda: _load_tokenizer(run))
    template = resolve_chat_template(run.data)
    if template and tokenizer is not None:
        _run_check(
            results, "data.chat_template", lambda: (None, describe_template(template, tokenizer))
        )
    typed_datasets: dict[str, list[DatasetConfig]] = {}
    counts: dict[str, int] = {}
    if run.data.skip_prepare_dataset:
        _run_check(results, "data.dataset_prepared_path", lambda: _check_prepared(run))
    # The sources of prepared data may no longer exist.
    for name in () if run.data.skip_prepare_dataset else DATASET_FIELDS:
        for index, dataset in enumerate(getattr(run.data, name)):
            field, typed = f"data.{name}.{index}", None
            if dataset.is_read:
                check = partial(_check_dataset, run, field, dataset, tokenizer, counts)
                typed = _run_check(results, field, check)
            typed_datasets.setdefault(name, []).append(typed or dataset)
    if run.data.val_set_size and len(counts) == len(run.data.read_datasets):
        check = partial(_check_validation_size, run, sum(counts.values()))
        _run_check(results, "data.val_set_size", check)
    typed = run.with_fields("data", **typed_datasets)
    # Rules on dataset types, which were not known when the file was loaded.
    ruled = [
        CheckResult(dotted(fault.path), "fault", fault.text, 2) for fault in rule_violations(typed)
    ]
    return typed, [
        *_check_model(typed),
        *results,
        *ruled,
        *_check_media(typed, [*results, *ruled]),
        *_check_outputs(typed),
        *_check_push(typed),
    ]


def _run_check(
    results: list[CheckResult], field: str, check: Callable[[], tuple[Value, str]]
) -> Value | None:
    """The value of `check`; its message, or the error that it raises, is added to `results`."""
    try:
        value, text = check()
    except UnreachableError as error:
        results.append(CheckResult(field, "not looked at", str(error)))
    except PenstockError as error:
        code = CapabilityError.exit_code if isinstance(error, CapabilityError) else 2
        results.append(CheckResult(field, "fault", str(error), code))
    else:
        results.append(CheckResult(field, "ok", text))
        return value
    return None


def _check_model(run: RunConfig) -> list[CheckResult]:
    """Check the model's config.json, and whether this machine can train the run."""
    if "train" not in run.stages:
        return []
    try:
        kind, notes = _validate_model(run)
    except (ElsewhereError, UnreachableError) as error:
        return [CheckResult("model", "not looked at", f"not checked against the model: {error}")]
    except (ConfigError, CapabilityError) as error:
        return [CheckResult("model", "fault", str(error), error.exit_code)]
    devices = f"{env.num_gpus()} CUDA device(s)" if env.num_gpus() else "no CUDA device"
    ranks = world_size(run)
    text = f"{kind}, {ranks} process{'es' if ranks > 1 else ''}, {devices}"
    return [CheckResult("model", "ok", text), *(CheckResult("model", "ok", note) for note in notes)]


def _validate_model(run: RunConfig) -> tuple[str, tuple[str, ...]]:
    """The model's type, and notes. Raises the errors that planning the run would raise."""
    run, _ = with_prompts_apart(with_adapter(resolve_init_checkpoint(run)))
    check_machine(run)
    if run.model.model_path:
        check_model_files(run.model.model_path)
    check_checkpoints(run)
    check_weights(run)
    notes = check_model(run)
    return resolve_hf_config(run)["model_type"], (
        *notes,
        *check_adapted_layers(run),
        *unmatched_no_decay(run),
    )


def _load_tokenizer(run: RunConfig) -> tuple[Any, str]:
    # Imported here: it takes one to two seconds, which invalid configs need not wait for.
    from penstock.rows.tokenizer import load_tokenizer

    source = run.model.tokenizer_source
    try:
        pinned = pin_tokenizer(source)
    except ElsewhereError as error:
        raise UnreachableError(str(error)) from error
    tokenizer = load_tokenizer(resolve_folder(source, pinned), pinned.pin.get("commit"))
    _require_vocabulary(run, tokenizer)
    template = "a chat template" if tokenizer.chat_template else "no chat template"
    return tokenizer, f"{redact(source)}, {len(tokenizer):,} tokens, {template}"


def _vocabulary_size(run: RunConfig) -> int | None:
    """The model's vocabulary size; None if its config.json cannot be read, which the check of the
    model reports."""
    try:
        vocab_size = resolve_text_config(run).get("vocab_size")
    except (ConfigError, CapabilityError):
        return None
    return vocab_size if isinstance(vocab_size, int) else None


def _require_vocabulary(run: RunConfig, tokenizer: Any) -> None:
    """Refuse a tokenizer whose vocabulary is larger than the model's, or whose chat template writes
    added tokens beyond it. Other added tokens do not count: few texts contain them."""
    size, vocab_size = tokenizer.vocab_size, _vocabulary_size(run)
    if vocab_size is None:
        return
    template = str(tokenizer.chat_template or "")
    written = [
        str(token)
        for number, token in sorted(tokenizer.added_tokens_decoder.items())
        if number >= vocab_size and str(token) in template
    ]
    if written:
        subject = f"its chat template writes {', '.join(written[:5])}"
        raise _beyond_vocabulary(run, subject, vocab_size)
    if size > vocab_size:
        raise ConfigError(
            f"{redact(run.model.tokenizer_source)} has {size:,} tokens, and the model "
            f"{redact(run.model.config_source)} knows {vocab_size:,} (vocab_size).\n"
            "  Leave tokenizer_path out to take the model's own, or name the one it was made with."
        )


def _beyond_vocabulary(run: RunConfig, subject: str, vocab_size: int) -> ConfigError:
    return ConfigError(
        f"{redact(run.model.tokenizer_source)}: {subject}, beyond the {vocab_size:,} tokens of the "
        f"model {redact(run.model.config_source)} (vocab_size), which has no embedding for it.\n"
        "  Name the tokenizer that the model was made with, or save the model with more embeddings "
        "(transformers' resize_token_embeddings) and name that."
    )


def _require_known_tokens(
    run: RunConfig, tokenizer: Any, dataset: DatasetConfig, samples: "FirstSamples"
) -> None:
    """Refuse samples with tokens that the model has no embedding for."""
    vocab_size = _vocabulary_size(run)
    if vocab_size is None:
        return
    if beyond := [number for number in samples.largest_tokens if number >= vocab_size]:
        tokens = ", ".join(map(repr, tokenizer.convert_ids_to_tokens(beyond)))
        subject = f"the first samples of {redact(dataset.path)} contain {tokens}"
        raise _beyond_vocabulary(run, subject, vocab_size)


def _check_prepared(run: RunConfig) -> tuple[None, str]:
    """Check prepared data that is used as it is."""
    step = user_prepared_step(run)
    return None, f"{step.where} is taken as it is (data.skip_prepare_dataset)"


def _check_dataset(
    run: RunConfig, field: str, dataset: DatasetConfig, tokenizer: Any, counts: dict[str, int]
) -> tuple[DatasetConfig, str]:
    """The data set with its type, and a summary of its first records. `counts` receives the number
    of samples if these are all records."""
    from penstock.prepare.bad_records import BadRecord
    from penstock.prepare.dataset_type import INFER_RECORDS
    from penstock.prepare.first_records import first_samples, image_source
    from penstock.prepare.infer_type import read_first_values

    token, notes = run.data.hf_use_auth_token, list[str]()
    source = pin_dataset(dataset, token)
    typed = resolve_dataset_type(run, field, dataset, notes)
    try:
        values = read_first_values(source, typed.ds_type, token, run.data.max_record_bytes)
    except CapabilityError as error:
        raise UnreachableError(str(error)) from error
    records = [value for value in values if not isinstance(value, BadRecord)]
    if not records:
        raise StageError(f"{redact(dataset.path)} has no record that can be read at its beginning.")
    unread = [
        f"record {number}: {value.why}"
        for number, value in enumerate(values, 1)
        if isinstance(value, BadRecord)
    ]
    if unread and not run.data.bad_rows_allowed:
        raise StageError(
            f"{redact(dataset.path)}: {len(unread)} of the first {len(values)} records cannot be "
            f"used: {'; '.join(unread[:3])}.\n"
            "  Correct them, or set data.bad_rows_allowed to the part that may be left out."
        )
    columns = ", ".join(records[0])
    inferred = "" if dataset.is_typed else " (inferred from its records)"
    text = f"{redact(dataset.path)}: type: {typed.type}{inferred}; columns {columns}"
    if tokenizer is None:
        return typed, f"{text}; not tokenized, as the tokenizer cannot be loaded"
    role = "train" if ".datasets." in field else "test"
    only = tuple(run.data.select_columns) if run.data.select_columns else None
    settings = dataset_settings(run, typed, role)
    samples = first_samples(records, settings, tokenizer, only, image_source(run, source, settings))
    if not samples.samples or (samples.bad and not run.data.bad_rows_allowed):
        raise StageError(
            f"{redact(dataset.path)}, read as type: {typed.type}: "
            f"{samples.records - samples.samples} of the first {samples.records} records give no "
            f"sample: {'; '.join(samples.faults[:3])}{samples.hint}"
        )
    _require_known_tokens(run, tokenizer, dataset, samples)
    _require_room(run, field, dataset, samples)
    if role == "train":
        _require_group(run, dataset, records)
    if len(records) < INFER_RECORDS and role == "train":
        counts[field] = samples.samples
    return typed, (
        f"{text}; the first {samples.samples} samples have {samples.tokens:,} tokens, "
        f"{samples.trained_tokens:,} of them trained"
        + "".join(f"\n  warning: {fault}" for fault in samples.unread)
        + "".join(f"\n  {line}" for line in samples.warnings)
    )


def _check_media(run: RunConfig, results: Sequence[CheckResult]) -> list[CheckResult]:
    """Faults of images and audio that the run cannot take, as planning it would find them;
    `results` are those at its data, without which there are none."""
    if run.data.skip_prepare_dataset or any(result.status != "ok" for result in results):
        return []

    def check() -> tuple[None, str]:
        stage = prepare_step(run).stage
        packs, trains = (includes_stage(run.stages, name) for name in ("pack", "train"))
        if isinstance(stage, Prepare):
            check_media(run, stage, packs=packs, trains=trains)
        return None, ""

    faults: list[CheckResult] = []
    _run_check(faults, "data", check)
    return [result for result in faults if result.status != "ok"]


def _check_validation_size(run: RunConfig, count: int) -> tuple[None, str]:
    """The number of validation samples of at most `count`. Raises as the prepare stage would."""
    from penstock.prepare.select.select import validation_count

    size = run.data.val_set_size
    num_validation = validation_count(size, count)
    if num_validation >= count:
        raise StageError(
            f"Validation takes {num_validation} samples, and the data has {count} at most.\n"
            f"  Set data.val_set_size ({size}) lower."
        )
    return None, f"{num_validation} of at most {count} samples are held out"


def _require_room(
    run: RunConfig, field: str, dataset: DatasetConfig, samples: "FirstSamples"
) -> None:
    """Refuse packed sequences that are too short for a sample, as packing would."""
    data, length = run.data, run.data.row_length
    too_long = [size for size in samples.lengths if size > length]
    if data.splits_samples or not too_long:
        return
    raise StageError(
        f"{redact(dataset.path)}: at least {len(too_long)} samples, among the first "
        f"{samples.samples}, are longer than a row of {length:,} tokens "
        f"(data.sample_packing_sequence_len); the longest has {max(too_long):,}.\n"
        f"  Set {field}.max_seq_len to {length} to cut them as data.truncation_mode says, or the "
        f"length of a row to {max(too_long)} or more."
    )


def _require_group(run: RunConfig, dataset: DatasetConfig, records: list[dict[str, Any]]) -> None:
    """Refuse records without a value in the column `data.split_by`, as the prepare stage would."""
    column = run.data.split_by
    lacking = [record for record in records if column and record.get(column) is None]
    if lacking:
        raise StageError(
            f"{redact(dataset.path)}: {len(lacking)} of the first {len(records)} records have no "
            f"value in {column!r} (data.split_by); they have {', '.join(lacking[0])}.\n"
            "  Name a column that every record has."
        )


def _check_outputs(run: RunConfig) -> list[CheckResult]:
    """Check that the output folders are writable."""
    results: list[CheckResult] = []
    for name, folder in output_folders(run, run.stages).items():
        refused = find_unwritable({name: folder})
        text = refused[0].removeprefix(f"{name} ") if refused else f"{folder} can be written to"
        results.append(CheckResult(name, "fault" if refused else "ok", text, 2 if refused else 0))
    return results


def _check_push(run: RunConfig) -> list[CheckResult]:
    """Check that there is a login if the run pushes to the hub."""
    results: list[CheckResult] = []
    if needs_login(run):
        login = "there is a login for the hub"
        _run_check(results, "push.repo_id", lambda: (require_push(run), login))
    return results


def print_config(run: RunConfig, *, all_fields: bool) -> str:
    """The config as YAML that loads as the same run: the fields that are set, or with `all_fields`
    all, but for the precision if it is chosen for this machine."""
    chosen_here = {"train": {*PRECISION_FIELDS}} if float32_by_default(run) else None
    settings = run.model_dump(mode="json", exclude_unset=not all_fields, exclude=chosen_here)
    text = yaml12.dump(settings).rstrip()
    resolved = "\n# ".join(yaml12.dump(resolve(run)).splitlines())
    return f"{text}\n# Resolved:\n# {resolved}" if all_fields else text
