"""All that carries out orders on this rank, around an assembled model."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from penstock.core.files import read_json
from penstock.engine.client_losses import ClientLosses
from penstock.engine.hf_tokenizer import TokenizerFiles
from penstock.engine.resident_files import resting_on
from penstock.engine.residents import Residents
from penstock.engine.substrate import Substrate
from penstock.rows.tokenizer import load_tokenizer
from penstock.server.sync.hosts import LOOPBACK
from penstock.server.worker.dealing import Dealing
from penstock.server.worker.operations import Operations
from penstock.server.worker.sampling import Sampling


def operations_on(
    substrate: Substrate,
    *,
    base_model: str,
    tokenizer: TokenizerFiles,
    begin_from: Path | None = None,
    allowed_hosts: Sequence[str] = LOOPBACK,
) -> Operations:
    """Every rank makes one at the same time. `base_model` is what the model is called,
    `begin_from` a checkpoint whose weights every new model starts from, and `allowed_hosts` are
    those that weights may be sent to."""
    built, ranks = substrate.built, substrate.ranks
    layout = built.engine.layout
    residents = Residents(substrate)
    reading = load_tokenizer(tokenizer.typed, tokenizer.source.pin.get("commit"))
    return Operations(
        residents,
        resting_on(residents, base_model, tokenizer),
        ClientLosses(layout, ranks, built.answers.log_probs, built.engine.routers),
        Dealing(
            substrate.run,
            num_replicas=built.degrees.num_replicas,
            replica=layout.mesh.index("replicate", "shard"),
            pin_memory=ranks.device.type == "cuda",
        ),
        Sampling(residents, partial(_decoded, reading), ends_of(substrate, reading)),
        begin_from,
        tuple(allowed_hosts),
    )


def ends_of(substrate: Substrate, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """The tokens that end a text of the model's: what its tokenizer says, its config.json, and its
    generation_config.json, where it has one."""
    file = substrate.weights / "generation_config.json" if substrate.weights else None
    said = [substrate.hf_config, read_json(file) if file and file.is_file() else {}]
    found: list[Any] = [tokenizer.eos_token_id]
    for each in said:
        ends = each.get("eos_token_id")
        found += ends if isinstance(ends, list) else [ends]
    return tuple(sorted({end for end in found if isinstance(end, int)}))


def _decoded(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> str:
    return str(tokenizer.decode(list(tokens), skip_special_tokens=False))
