"""Samples that are longer than a row, in `penstock plan`: packing refuses them."""

from collections.abc import Iterator

from penstock.core.cache.store import find_cached
from penstock.core.errors import CapabilityError, ConfigError
from penstock.core.remote.urls import redact
from penstock.estimate.costs.file_sizes import estimate_samples
from penstock.estimate.machine import resolve_text_config
from penstock.pipeline.plan import Plan
from penstock.prepare.stage import Prepare


def long_samples(planned: Plan) -> Iterator[str]:
    """Yield a line for each split with such samples; before data is prepared, for each data set
    with such records among those that are read to estimate its tokens."""
    run, prepare = planned.run, planned.steps[0]
    data, length = run.data, run.data.row_length
    pack = next((step for step in planned.steps if step.stage.name == "pack"), None)
    if pack is None or data.splits_samples or find_cached(pack) is not None:
        return
    if find_cached(prepare) is not None:
        from penstock.prepare.notices import long_sample_warnings
        from penstock.rows.prepared import PLAN

        if (prepare.path / PLAN).is_file():  # data at a URL may not be here
            yield from long_sample_warnings(prepare.path, length)
        return
    try:
        vocab_size = resolve_text_config(run).get("vocab_size")
    except (ConfigError, CapabilityError):  # of a model that this machine cannot see
        return
    sources = prepare.stage.sources if isinstance(prepare.stage, Prepare) else ()
    for index, (dataset, source) in enumerate(zip(data.datasets, sources, strict=False)):
        is_cut = dataset.max_seq_len is not None and dataset.max_seq_len <= length
        sizes = estimate_samples([source], vocab_size) if vocab_size and not is_cut else None
        if sizes and sizes.longest_record > length:
            yield (
                f"warning: the longest of the first records of {redact(dataset.path)} has about "
                f"{sizes.longest_record:,} tokens, and a row {length:,} "
                "(data.sample_packing_sequence_len), and pack refuses longer samples; penstock "
                f"check counts exactly; write data.datasets.{index}.max_seq_len: {length}, which "
                "cuts them as data.truncation_mode says, or a longer row"
            )
