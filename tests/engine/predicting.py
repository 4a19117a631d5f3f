"""Models with layers that predict further tokens, in transformers' own modules: published
checkpoints of them, and their losses by the formula of DeepSeek-V3 (arXiv:2412.19437, 2.2)."""

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import save_file
from torch import nn
from transformers.core_model_loading import revert_weight_conversion

from penstock.core.files import read_json, write_json
from penstock.rows.reader import PackedRows
from penstock.rows.schema import packed_schema
from penstock.rows.tokenizer import load_tokenizer
from tests.engine import runs
from tests.engine.inputs import LINEAR_ATTENTION, MODELS

DOCUMENTS = ([1, 2, 63], [65], [2, 1, 1], [64, 3])
"""Lengths of the documents in each row."""

GLM = {
    "model_type": "glm4_moe",
    "architectures": ["Glm4MoeForCausalLM"],
    "tie_word_embeddings": False,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "use_qk_norm": True,
    "attention_bias": True,
}
SPARSE = {**MODELS["sparse attention"], "num_attention_heads": 8}
PREDICTING: Mapping[str, dict[str, Any]] = {
    "deepseek_v3": {**MODELS["latent attention"], "num_attention_heads": 8},
    "deepseek_v32": SPARSE,
    "glm_moe_dsa": {
        **SPARSE,
        "model_type": "glm_moe_dsa",
        "architectures": ["GlmMoeDsaForCausalLM"],
    },
    "glm4_moe": GLM,
    "qwen3_next": {
        **MODELS["linear attention"],
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "mlp_only_layers": [],
    },
    "qwen3_5_text": {
        **MODELS["dense linear attention"],
        "tie_word_embeddings": True,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    },
}
COUNTS = {"qwen3_5_text": "mtp_num_hidden_layers"}
LAYERS = 2


class Predicting(nn.Module):
    """A model of transformers whose last `depths` layers predict further tokens."""

    def __init__(self, name: str, depths: int = 1) -> None:
        super().__init__()
        self.name, self.depths = name, depths
        layers: dict[str, Any] = {"num_hidden_layers": LAYERS + depths}
        if "layer_types" in PREDICTING[name]:
            types = LINEAR_ATTENTION["layer_types"][:LAYERS]
            layers["layer_types"] = [*types, *["full_attention"] * depths]
        changes = {**PREDICTING[name], **layers}
        # A copy: transformers adds to tables.
        config = transformers.AutoConfig.for_model(**deepcopy({**runs.TINY, **changes}))
        config.dtype = torch.float32
        torch.manual_seed(3)
        self.model = transformers.AutoModelForCausalLM.from_config(config)
        norm, width = type(self.model.model.norm), config.hidden_size
        self.more = nn.ModuleDict()
        for depth in range(depths):
            for part in PARTS:
                self.more[f"{depth} {part}"] = norm(width, eps=config.rms_norm_eps)
            self.more[f"{depth} eh_proj"] = nn.Linear(2 * width, width, bias=False)
        with torch.no_grad():
            for at, parameter in self.named_parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
                if at.endswith("A_log"):
                    parameter.sub_(4)

    def losses(
        self, ids: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor
    ) -> list[torch.Tensor]:
        """The weighted sum of the losses of a document's next tokens, and that of each depth."""
        main, config = self.model.model, self.model.config
        config.num_hidden_layers = LAYERS
        hidden = main(input_ids=ids[None], use_cache=False).last_hidden_state
        config.num_hidden_layers = LAYERS + self.depths
        found = [self._loss(hidden, labels, weights)]
        for depth in range(1, self.depths + 1):
            enorm, hnorm, norm, eh_proj = (self.more[f"{depth - 1} {part}"] for part in ALL)
            if len(ids) <= depth:
                break
            embedding = main.embed_tokens(ids[None, depth:])
            x = eh_proj(torch.cat([enorm(embedding), hnorm(hidden[:, :-1])], -1))
            at = torch.arange(x.shape[1])[None]
            angles = main.rotary_emb(x, position_ids=at)
            block = main.layers[LAYERS + depth - 1]
            mask = None
            if hasattr(config, "index_topk"):
                # Indexers select by it.
                mask = torch.full((1, 1, x.shape[1], x.shape[1]), torch.finfo(x.dtype).min).triu(1)
            hidden = block(x, attention_mask=mask, position_embeddings=angles, position_ids=at)
            # Those of GLM 5 return a selection too.
            hidden = norm(hidden[0] if isinstance(hidden, tuple) else hidden)
            found.append(self._loss(hidden, labels[depth:], weights[depth:]))
        return found

    def _loss(
        self, hidden: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        logits = self.model.lm_head(hidden)[0]
        return (F.cross_entropy(logits, labels, reduction="none") * weights).sum()

    def published(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """These tensors, or gradients, of the parameters under the names in checkpoints."""
        own = {n.removeprefix("model."): t for n, t in tensors.items() if n.startswith("model.")}
        found: dict[str, torch.Tensor] = {}
        for name, tensor in revert_weight_conversion(self.model, own).items():
            found[self._renamed(name)] = tensor
        for name, tensor in tensors.items():
            if name.startswith("more."):
                _, key, leaf = name.split(".")
                depth, part = key.split()
                found[f"{self._part(int(depth), part)}.{leaf}"] = tensor
        return found

    def _renamed(self, name: str) -> str:
        for depth in range(self.depths):
            layer = f"model.layers.{LAYERS + depth}."
            if self.name.startswith("qwen") and name.startswith(layer):
                return f"mtp.layers.{depth}.{name.removeprefix(layer)}"
        return name

    def _part(self, depth: int, part: str) -> str:
        if self.name.startswith("qwen"):
            return PARTS.get(part, "mtp.fc")
        part = "shared_head.norm" if part == "norm" else part
        return f"model.layers.{LAYERS + depth}.{part}"

    def save(self, folder: Path) -> Path:
        """A folder as published, with the copies of embedding and head that DeepSeek's has."""
        folder.mkdir(parents=True)
        self.model.save_pretrained(folder)
        for file in folder.glob("*.safetensors"):
            file.unlink()
        tensors = self.published({n: p.detach() for n, p in self.state_dict().items()})
        if not self.name.startswith("qwen"):
            for depth in range(self.depths):
                at = f"model.layers.{LAYERS + depth}"
                tensors[f"{at}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"]
                tensors[f"{at}.shared_head.head.weight"] = tensors["lm_head.weight"]
        if self.model.config.tie_word_embeddings:
            del tensors["lm_head.weight"]
        whole = {name: tensor.clone().contiguous() for name, tensor in tensors.items()}
        save_file(whole, folder / "model.safetensors", {"format": "pt"})
        said = read_json(folder / "config.json")
        said["num_hidden_layers"] = LAYERS
        for field in {"layer_types", "mlp_layer_types", "indexer_types"} & said.keys():
            said[field] = said[field] and said[field][:LAYERS]
        said.pop("num_nextn_predict_layers", None)
        said[COUNTS.get(self.name, "num_nextn_predict_layers")] = self.depths
        write_json(folder / "config.json", said)
        load_tokenizer("builtin:bytes").save_pretrained(folder)
        return folder


PARTS = {
    "enorm": "mtp.pre_fc_norm_embedding",
    "hnorm": "mtp.pre_fc_norm_hidden",
    "norm": "mtp.norm",
}
"""Norms by DeepSeek's names, and what Qwen calls them."""
ALL = (*PARTS, "eh_proj")


def write_rows(folder: Path, *, is_weighted: bool = False) -> Path:
    """Rows of DOCUMENTS, most of whose tokens are trained, perhaps with loss weights of very
    different sizes."""
    generator = torch.Generator().manual_seed(1)
    rows: dict[str, list[Any]] = {"input_ids": [], "labels": [], "lengths": []}
    for lengths in DOCUMENTS:
        ids = torch.randint(0, runs.VOCAB, (sum(lengths),), generator=generator)
        labels = ids.roll(-1).masked_fill(torch.rand(len(ids), generator=generator) < 0.2, -100)
        labels[torch.tensor(lengths).cumsum(0) - 1] = -100
        rows["input_ids"].append(ids.tolist())
        rows["labels"].append(labels.tolist())
        rows["lengths"].append(lengths)
        if is_weighted:
            scale = (0.1, 1, 20)[len(rows["lengths"]) % 3]
            weights = scale * torch.rand(len(ids), generator=generator) + 0.01
            weights = weights.masked_fill(labels == -100, 0)
            rows.setdefault("loss_weights", []).append(weights.tolist())
    schema = packed_schema("sft", is_weighted=is_weighted)
    data = folder / "data" / "train"
    data.mkdir(parents=True)
    with pa.ipc.new_file(str(data / "rows-00000-of-00001.arrow"), schema) as writer:
        writer.write_table(pa.table(rows, schema=schema))
    return folder


def read_documents(folder: Path) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Ids, labels and loss weights of each document."""
    rows = PackedRows(folder / "data" / "train")
    found = []
    for number in range(len(DOCUMENTS)):
        row = rows.row(number)
        ids, labels = (torch.tensor(x, dtype=torch.int64) for x in (row.input_ids, row.labels))
        weights = (labels != -100).float()
        if row.loss_weights is not None:
            weights = torch.tensor(row.loss_weights)
        lengths = row.lengths.tolist()
        found += zip(*(x.split(lengths) for x in (ids, labels, weights)), strict=True)
    return found


def expected(
    model: Predicting, packed: Path, weight: float
) -> tuple[float, float, dict[str, torch.Tensor]]:
    """The main loss, the mean of the depths' losses, and the gradients of both together."""
    documents = read_documents(packed)
    trained = sum(float(weights.sum()) for *_, weights in documents)
    sums = torch.zeros(1 + model.depths)
    for document in documents:
        for depth, loss in enumerate(model.losses(*document)):
            sums[depth] = sums[depth] + loss
    main, further = sums[0] / trained, sums[1:].sum() / trained / model.depths
    model.zero_grad()
    (main + weight * further).backward()
    grads = {
        name: torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in model.named_parameters()
    }
    return main.item(), further.item(), model.published(grads)
