"""Multi-token prediction on images: image tokens have their features as embeddings in the layers
that predict further tokens, too. Judged by transformers' own modules."""

from copy import deepcopy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from penstock.core.files import read_json, write_json
from penstock.rows.tokenizer import load_tokenizer
from tests.engine import runs
from tests.engine.vision.steps import NUMBERS, each_steps, image_job
from tests.models.images import IMAGE, MORE, image_documents
from tests.models.multimodal import CONFIGS
from tests.ranks import on_ranks

KIND = "qwen3_5"
LAYERS = 2
WEIGHT = 0.3
PARTS = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
PREFIX = "model.language_model."


class Predicting(nn.Module):
    """A Qwen3.5 of transformers whose last decoder layer predicts the token after the next."""

    def __init__(self) -> None:
        super().__init__()
        values = deepcopy(CONFIGS[KIND])
        values["vision_config"] |= MORE[KIND]
        text = values["text_config"]
        text["num_hidden_layers"] = LAYERS + 1
        text["layer_types"] = [*text["layer_types"], "full_attention"]
        config = transformers.AutoConfig.for_model(KIND, **values, image_token_id=IMAGE)
        torch.manual_seed(0)
        self.model = transformers.AutoModelForImageTextToText.from_config(config)
        width = text["hidden_size"]
        norm = type(self.model.model.language_model.norm)
        self.mtp = nn.ModuleDict({name: norm(width) for name in PARTS})
        self.mtp["fc"] = nn.Linear(2 * width, width, bias=False)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
                if name.endswith("A_log"):
                    parameter.sub_(4)

    def losses(self, ids, labels, images):
        """The summed losses of a document's next tokens, and of those after them."""
        inner, text, seen = self.model.model, self.model.model.language_model, {}
        handle = text.register_forward_pre_hook(
            lambda _, __, kwargs: seen.update(kwargs), with_kwargs=True
        )
        more = {} if images is None else dict(images.tensors)
        if images is not None:
            more["mm_token_type_ids"] = (ids == IMAGE).int()[None]
        text.config.num_hidden_layers = LAYERS
        hidden = inner(input_ids=ids[None], use_cache=False, **more).last_hidden_state
        text.config.num_hidden_layers = LAYERS + 1
        handle.remove()
        both = (
            self.mtp["pre_fc_norm_embedding"](seen["inputs_embeds"][:, 1:]),
            self.mtp["pre_fc_norm_hidden"](hidden[:, :-1]),
        )
        x = self.mtp["fc"](torch.cat(both, -1))
        at = seen["position_ids"]
        at = torch.arange(len(ids)).expand(3, 1, -1) if at is None else at[-3:]
        angles = text.rotary_emb(x, position_ids=at[..., :-1])
        block = text.layers[LAYERS]
        further = self.mtp["norm"](block(x, attention_mask=None, position_embeddings=angles))
        return self._loss(hidden, labels), self._loss(further, labels[1:])

    def _loss(self, hidden, labels):
        return F.cross_entropy(self.model.lm_head(hidden)[0], labels, reduction="sum")

    def published(self, name: str) -> str:
        """What checkpoints call a parameter."""
        name = name.removeprefix("model.") if name.startswith("model.") else name
        return name.replace(f"{PREFIX}layers.{LAYERS}.", "mtp.layers.0.")

    def save(self, folder):
        self.model.save_pretrained(folder)
        [file] = folder.glob("*.safetensors")
        stored = {self.published(f"model.{name}"): one for name, one in load_file(file).items()}
        stored |= {f"mtp.{name}": one for name, one in self.mtp.state_dict().items()}
        save_file(stored, file, {"format": "pt"})
        said = read_json(folder / "config.json")
        text = said["text_config"]
        text |= {"num_hidden_layers": LAYERS, "mtp_num_hidden_layers": 1}
        text["layer_types"] = text["layer_types"][:LAYERS]
        write_json(folder / "config.json", said)
        load_tokenizer("builtin:bytes").save_pretrained(folder)
        (folder / "preprocessor_config.json").write_text("{}")


def expected(model):
    """Loss of the next tokens, and the gradients with the loss of those after, as published."""
    documents = [one for row in NUMBERS for one in zip(*image_documents(KIND, row), strict=True)]
    trained = sum(int((labels != -100).sum()) for _, labels, _ in documents)
    each = [model.losses(*one) for one in documents]
    main, further = (torch.stack(losses).sum() / trained for losses in zip(*each, strict=True))
    (main + WEIGHT * further).backward()
    found = {model.published(n): p.grad for n, p in model.named_parameters() if p.grad is not None}
    return main.item(), found


LAYOUTS = {
    "fsdp2 2": {"data_parallel_shard_size": 2},
    "tp 2, sequence parallel": {"tensor_parallel_size": 2, "sequence_parallel": True},
    "ring 2": {"ringattn_parallel_size": 2},
}


@pytest.mark.dist
@pytest.mark.parametrize(
    ("world", "layouts"),
    [
        (1, {"alone": {"data_parallel_mode": "none"}}),
        pytest.param(2, LAYOUTS, marks=pytest.mark.exhaustive),
    ],
    ids=["alone", "layouts"],
)
def test_losses_of_further_tokens_are_those_of_transformers_modules(tmp_path, world, layouts):
    model = Predicting()
    model.save(tmp_path / KIND)
    runs.write_rows(tmp_path / "packed", 4)
    how = {"mtp_loss_weight": WEIGHT, "max_grad_norm": 0}
    jobs = {name: image_job(tmp_path, name, KIND, **how, **one) for name, one in layouts.items()}
    main, wanted = expected(model)
    for name, found in on_ranks(world, each_steps, jobs)[0].items():
        assert found["loss"][0] == pytest.approx(main, rel=1e-5), name
        seen = set()
        for tensor, gradient in found["gradients"].items():
            stored = tensor if tensor in wanted else tensor.replace("model.", PREFIX, 1)
            if stored not in wanted:
                continue  # fused here
            seen.add(stored.split(".")[1 if stored.startswith("model.") else 0])
            error = np.linalg.norm(gradient - wanted[stored].numpy())
            # Of what is 0 but for rounding, such as biases of keys, digits differ.
            least = 1e-6
            assert error <= 2e-5 * wanted[stored].norm() + least, f"{name}: {tensor}"
        assert seen >= {"visual", "language_model", "mtp"}, name
