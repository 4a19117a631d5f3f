"""Model store: checkpoints of clients' models, and exports for sampling.

A folder appears complete or not at all. Adapters are saved with their own rank, even if the base's
tensors are allocated wider.
"""

import hashlib
import json
import logging
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from penstock.adapters.names import parse_lora_name
from penstock.core.cache.folder_digests import ALGORITHM, DIGESTS, FolderDigests, digest_of_file
from penstock.core.errors import ArtifactError, PenstockError, StageError
from penstock.core.files import PART, fsync, regular_files, remove, write_json
from penstock.engine.checkpoint.checkpoint_manager import CheckpointManager
from penstock.engine.checkpoint.folders import CheckpointNaming, in_brief, read_file, read_state
from penstock.engine.checkpoint.model_reader import CheckpointReader
from penstock.engine.checkpoint.resume import require_whole
from penstock.engine.checkpoint.train_state import States, TrainState
from penstock.engine.distributed.ranks import ProcessInfo
from penstock.engine.hf.export import as_in_files
from penstock.engine.hf.export_adapter import adapters_in, write_adapter_folder
from penstock.engine.hf.save_model import DTYPES, HFFolderMeta, write_hf_folder
from penstock.engine.hf.state_dict import in_checkpoint
from penstock.engine.hf.tokenizer_files import TokenizerFiles
from penstock.engine.model_source import LoraArgs
from penstock.engine.multi_lora.model_pool import ModelPool, TenantModel
from penstock.engine.multi_lora.rank_padding import rank_dim, trim_lora_rank
from penstock.engine.vision.build import build_outline

LOG = logging.getLogger(__name__)

# Upper bound in bytes of all files besides tensors: metadata and configs.
BESIDE = 1 << 20
# Upper bound in bytes of a tokenizer's files.
TOKENIZER = 64 << 20
# Upper bound of optimizer bytes per parameter: two moments in fp32, and the bfloat16 rounding
# compensation.
STATES = {"adamw": 8, "anyprecisionadamw": 10, "muon": 8, "sgd": 4}

# The key in `state.json` with the description of the model.
OF_MODEL = "model"

# The file in a sampler folder that describes its adapter.
SAMPLER = "sampler.json"


class Sizes(NamedTuple):
    """Sizes in bytes."""

    state: int
    """Weights, and optimizer states after the first step."""
    export: int
    """Weights only, in fp32, plus the stored weights that are on disk during export."""


def estimate_sizes(trained: TrainState, ranks: ProcessInfo, exported: int | None = None) -> Sizes:
    """Estimate the sizes of a checkpoint and of an export. Collective.

    `trained` is what a checkpoint saves; `exported` is the number of parameters in an export, None:
    as many as are saved.
    """
    local_tensors = {
        name: (math.prod(boxes[0].full_shape), boxes[0].data.element_size())
        for name, boxes in trained.boxes().items()
    }
    tensors: dict[str, tuple[int, int]] = {}
    for of_rank in ranks.all_gather(local_tensors):
        # By name: several ranks hold parts of a tensor.
        tensors |= of_rank
    weights = sum(count * itemsize for count, itemsize in tensors.values())
    numbers = sum(count for count, _ in tensors.values())
    states = STATES[type(trained.optimizer).__name__.lower()] * numbers
    exported = numbers if exported is None else exported
    return Sizes(weights + states + BESIDE, 4 * exported + weights + BESIDE + TOKENIZER)


@dataclass(frozen=True)
class ModelStore:
    """Saves and loads clients' models. Every rank creates one and makes the same calls."""

    residents: ModelPool
    base_model: str
    tokenizer: TokenizerFiles
    group: dist.ProcessGroup
    """A gloo group of all ranks used for nothing else."""

    def sizes(self, name: str) -> Sizes:
        resident, substrate = self.residents.get(name), self.residents.substrate
        exported = None
        if substrate.sharing == "alone":
            # The base may be quantized, with less than a byte per parameter.
            exported = sum(map(math.prod, substrate.names.hf_shapes().values()))
            if substrate.vision:
                outline = build_outline(substrate.hf_config)
                exported += sum(map(math.prod, outline.shapes.values()))
        return estimate_sizes(self._trained(resident, states="left out"), self._ranks, exported)

    def save(self, name: str, folder: Path, facts: Mapping[str, Any]) -> None:
        """Save a checkpoint to resume from, without accumulated gradients. Raises StageError if it
        cannot be written."""
        resident = self.residents.activate(name)
        state = {"step": resident.step, "key": "", "facts": dict(facts)}
        state[OF_MODEL] = self._described(resident)
        self._checkpoints(resident, folder).save(resident.step, state)

    def load(self, name: str, folder: Path, *, optimizer: bool) -> None:
        """Resume from a checkpoint, with its optimizer states if `optimizer`, else with a new
        optimizer.

        Accumulated gradients are cleared. The adapter takes the alpha of the checkpoint.

        Raises ArtifactError for an incomplete checkpoint, or one of another kind: nothing has
        changed then. If its files are damaged, or StageError is raised because a rank failed
        otherwise, a model that shares the base is unchanged, and a full model is reset.
        """
        resident = self.residents.get(name)
        state = self._read(resident, folder, "read" if optimizer else "passed over")
        resident.zero_grad()
        resident.step = int(state["step"]) if optimizer else 0

    def init_from(self, name: str, folder: Path) -> None:
        """Start a new model from the weights of a checkpoint, which may be one of a run. The
        adapter takes its alpha, if it has one. Raises ArtifactError as `load`."""
        self._read(self.residents.get(name), folder, "passed over")

    def export(self, name: str, folder: Path, dtype: str | None) -> None:
        """Export for sampling: a PEFT folder, or a full Hugging Face model with full fine-tuning.

        `dtype` None: an adapter in its training dtype, a model in bfloat16. Raises StageError if it
        cannot be written.
        """
        resident = self.residents.activate(name)
        room = folder.with_name(f"{folder.name}.export{PART}")
        aside = self._checkpoints(resident, room / "weights", states="left out")
        self._on_main_process(lambda: remove(room))
        try:
            aside.save(resident.step, {"step": resident.step, "key": ""})
            kept_in = DTYPES[dtype] if dtype else None
            self._on_main_process(partial(self._write_export, resident, room, folder, kept_in))
        except StageError:
            # A partial export would use the disk space that the next one needs.
            with suppress(StageError):
                self._on_main_process(lambda: remove(room))
            raise

    @property
    def _ranks(self) -> Any:
        return self.residents.substrate.ranks

    def _read(self, resident: TenantModel, folder: Path, states: States) -> dict[str, Any]:
        """Load a checkpoint into the model, on all ranks or on none; returns its `state.json`."""
        try:
            require_whole(folder, self._ranks)
            return self._read_verified(resident, folder, states)
        except (ArtifactError, StageError) as error:
            # Do not reveal the server's paths to clients.
            raise type(error)(str(error).replace(str(folder), folder.name)) from error

    def _read_verified(self, resident: TenantModel, folder: Path, states: States) -> dict[str, Any]:
        with self._raise_on_all_ranks(folder):
            state = read_state(folder)
            self._require_alike(resident, folder, state)
            if states == "read":
                _require_optimizer(resident, folder, state)
        residents, substrate = self.residents, self.residents.substrate
        strong = resident.adapter
        if strong and (alpha := state.get(OF_MODEL, {}).get("alpha")) is not None:
            strong = residents.with_alpha(strong, alpha)
        self._checkpoints(resident, folder).require_loadable(folder, states=states)
        residents.activate(resident.name)
        # There may be no memory for a backup of a full model.
        is_small = substrate.sharing == "adapters"
        with self._raise_on_all_ranks(folder):
            before = (
                (substrate.copy_params(resident.trained), resident.optimizer) if is_small else None
            )
        try:
            with self._raise_on_all_ranks(folder):
                residents.reset_optimizer(resident)
                self._checkpoints(resident, folder).load(folder, states=states)
        except (ArtifactError, StageError):
            substrate.reshard()
            if before:
                weights, resident.optimizer = before
                substrate.load_params(resident.trained, weights)
            else:
                residents.reset_weights(resident)
            raise
        substrate.reshard()
        if strong:
            residents.set_adapter_spec(resident, strong)
        return state

    @contextmanager
    def _raise_on_all_ranks(self, folder: Path) -> Generator[None]:
        """If a rank fails, also for lack of memory, all ranks raise the first failing rank's error,
        an ArtifactError or StageError."""
        fault = None
        try:
            yield
        except ArtifactError as error:
            fault = (True, str(error))
        except Exception as error:
            LOG.exception("%s cannot be loaded on rank %d", folder, self._ranks.rank)
            fault = (False, f"{type(error).__name__}: {error}")
        for rank, report in enumerate(self._ranks.all_gather(fault)):
            if report is None:
                continue
            is_of_files, why = report
            if is_of_files:
                raise ArtifactError(why)
            raise StageError(
                f"{folder.name} cannot be loaded, as rank {rank} met {why}\n"
                "  Load it again; the log of the workers tells more."
            )

    def _checkpoints(
        self, resident: TenantModel, folder: Path, *, states: Any = "saved"
    ) -> CheckpointManager:
        """A manager that saves to this folder, whatever the step."""
        trained, naming = self._trained(resident, states=states), CheckpointNaming(folder.name)
        return CheckpointManager(
            folder.parent, trained, self._ranks, naming=naming, group=self.group
        )

    def _trained(self, resident: TenantModel, *, states: Any) -> TrainState:
        substrate = self.residents.substrate
        train_state = replace(
            substrate.built.train_state,
            optimizer=resident.optimizer,
            states=states,
            compressed_to=None,
        )
        if resident.adapter is None or substrate.sharing == "alone":
            return train_state
        cut = partial(trim_lora_rank, resident.adapter.rank)
        return replace(train_state, params=resident.trained, cut=cut)

    def _described(self, resident: TenantModel) -> dict[str, Any]:
        adapter = resident.adapter
        hf_config = json.dumps(self.residents.substrate.hf_config, sort_keys=True)
        described: dict[str, Any] = {
            "base_model": self.base_model,
            "config": hashlib.sha256(hf_config.encode()).hexdigest()[:16],
            "rank": adapter and adapter.rank,
        }
        if adapter:
            kinds = sorted(adapter.kinds)
            described |= {"alpha": adapter.alpha, "seed": adapter.seed, "learns": kinds}
        return described

    def _require_alike(self, resident: TenantModel, folder: Path, state: Mapping[str, Any]) -> None:
        saved = state.get(OF_MODEL, {})
        described = self._described(resident)
        if "config" in saved and saved["config"] != described["config"]:
            raise ArtifactError(
                f"{folder.name} was trained on {saved['base_model']}, and this server serves "
                f"{self.base_model}, whose config.json is another.\n"
                f"  Serve {saved['base_model']}, or load a checkpoint of {self.base_model}."
            )
        shapes = CheckpointReader(folder).shapes()
        factors = {name: factor for name in shapes if (factor := parse_lora_name(name))}
        # That of the adapters in the checkpoint; None for a full model.
        ranks = (
            shapes[name][0][rank_dim(factor, len(shapes[name][0]))]
            for name, factor in factors.items()
            if factor.side == "lora_A"
        )
        rank = saved["rank"] if "rank" in saved else next(ranks, None)
        if rank != described["rank"]:
            remedy = "all weights trained (enable_lora: false)" if rank is None else f"rank {rank}"
            raise ArtifactError(
                f"{folder.name} holds {_describe_rank(rank)}, and {resident.name} is "
                f"{_describe_rank(described['rank'])}.\n"
                f"  Create a model with {remedy}, and load it there."
            )
        if resident.adapter is None:
            return
        substrate, adapts = self.residents.substrate, resident.adapter.adapts
        layers = {layer for layer in substrate.adapted if adapts(layer)}
        if apart := sorted(layers ^ {factor.hf_module for factor in factors.values()}):
            raise ArtifactError(
                f"{folder.name} and {resident.name} do not train the same layers: {apart[0]} is "
                "only in one of them.\n"
                "  Create a model with the train_attn, train_mlp and train_unembed that it was "
                "saved with, on a server with the same lora_target_modules."
            )

    def _write_export(
        self, resident: TenantModel, room: Path, folder: Path, dtype: torch.dtype | None
    ) -> None:
        substrate, out = self.residents.substrate, room / "out"
        reader = CheckpointReader(room / "weights")
        run, names = substrate.run, substrate.names
        alpha = resident.adapter.alpha if resident.adapter else 0.0
        adapters = adapters_in(reader, names, LoraArgs(alpha) if resident.adapter else None)
        if adapters and substrate.sharing == "adapters":
            out.mkdir()
            base = run.model.model_path or self.base_model
            write_adapter_folder(adapters, out, base_model=base, dtype=dtype)
            assert resident.adapter is not None
            sampler: dict[str, Any] = {
                "rank": resident.adapter.rank,
                "alpha": alpha,
                "layers": [*filter(resident.adapter.adapts, substrate.adapted)],
                "digests": ALGORITHM,
            }
        else:
            state_dict = in_checkpoint(reader, names, substrate.formats)
            state_dict = adapters.merged_into(state_dict) if adapters else state_dict
            out.mkdir()
            with ExitStack() as opened:
                if substrate.vision:
                    state_dict = as_in_files(state_dict, substrate.base, opened)
                write_hf_folder(
                    state_dict,
                    out,
                    HFFolderMeta(substrate.hf_config, self.tokenizer),
                    dtype=dtype or torch.bfloat16,
                )
            sampler = {"rank": None, "digests": ALGORITHM}
        write_json(out / SAMPLER, sampler)
        written = regular_files(out)
        digests = {path.relative_to(out).as_posix(): digest_of_file(path) for path in written}
        FolderDigests(digests).write(out)
        # On disk before the rename: a folder with the final name is complete after a crash too.
        for path in (*written, out):
            fsync(path)
        remove(folder)
        out.rename(folder)
        fsync(folder.parent)
        remove(room)

    def _on_main_process(self, act: Callable[[], None]) -> None:
        """Run `act` on rank 0 while the others wait. All raise StageError if it failed."""
        # What the other ranks are told of an exception that is not caught here.
        fault: str | None = "it failed"
        try:
            if self._ranks.is_main_process:
                act()
            fault = None
        except OSError as error:
            fault = f"{error}.\n  Make room on the disk."
        except PenstockError as error:
            fault = str(error)
        finally:
            # Also if another exception is raised: the other ranks must not wait forever.
            [fault, *_] = self._ranks.all_gather(fault)
        if fault is not None:
            raise StageError(f"the model could not be written: {fault}")


def build_model_store(
    residents: ModelPool, base_model: str, tokenizer: TokenizerFiles
) -> ModelStore:
    """Build the store with a process group of its own. Collective."""
    group = dist.new_group(backend="gloo")
    assert isinstance(group, dist.ProcessGroup)
    return ModelStore(residents, base_model, tokenizer, group)


def sampler_in(folder: Path) -> Mapping[str, Any]:
    """The description of the adapter in a sampler folder. Raises ArtifactError if there is none, or
    if it is damaged."""
    if not (folder / SAMPLER).is_file():
        raise ArtifactError(f"{folder.name} is nothing to sample from.\n  Save it again.")
    try:
        record = json.loads(read_file(folder, SAMPLER))
    except (ArtifactError, ValueError, RecursionError) as error:
        raise _damaged(folder, [str(error)]) from error
    if "digests" in record and not (folder / DIGESTS).is_file():
        raise _damaged(folder, [f"{DIGESTS} is missing"])
    return record


def require_whole_sampler(folder: Path, *, share: int, of: int) -> None:
    """Raise ArtifactError unless the files in a sampler folder match their digests. Each of `of`
    readers verifies one `share` of the bytes. Without digests nothing is verified."""
    try:
        digests = FolderDigests.read(folder)
    except ArtifactError as error:
        raise _damaged(folder, [str(error)]) from error
    if digests and (faults := digests.find_damage(folder, share=share, of=of)):
        raise _damaged(folder, faults)


def _damaged(folder: Path, faults: Sequence[str]) -> ArtifactError:
    return ArtifactError(f"{folder.name} is damaged: {in_brief(faults)}.\n  Save it again.")


def _require_optimizer(resident: TenantModel, folder: Path, state: Mapping[str, Any]) -> None:
    """Raise ArtifactError if the checkpoint's states belong to another optimizer."""
    optimizer = type(resident.optimizer).__name__.lower()
    if state["optimizer"] != optimizer:
        raise ArtifactError(
            f"{folder.name} was trained with {state['optimizer']}, and {resident.name} is trained "
            f"with {optimizer}.\n  Load its weights without the optimizer, or create a model with "
            f"{state['optimizer']}, and load it there."
        )


def _describe_rank(rank: int | None) -> str:
    return "all weights of a model" if rank is None else f"an adapter of rank {rank}"
