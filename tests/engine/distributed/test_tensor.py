"""Models divided over a tensor axis compute what transformers does in one process.

The ranks start from a checkpoint's tensors and tell what they got by the names of its tensors, so
nothing is gathered: each box of each rank is judged by the same box of the reference.
"""

from collections import defaultdict
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from itertools import chain

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

from penstock.adapters.inject import LoraSpec, inject
from penstock.adapters.names import native_name, parse_lora_name
from penstock.engine.activations.checkpointing import Kind, apply_activation_checkpointing
from penstock.engine.distributed.collectives import Residual
from penstock.engine.distributed.data_parallel import FSDPPolicy, shard
from penstock.engine.distributed.device_mesh import Mesh
from penstock.engine.distributed.parallel_dims import ParallelDims
from penstock.engine.distributed.param_shards import local, make_local_param
from penstock.engine.distributed.tensor_parallel import parallelize_tensor, reduce_partial_grads
from penstock.engine.distributed.tensor_sharding import TensorParallelPlan, param_shards
from penstock.engine.distributed.vocab_parallel import VocabParallelHead
from penstock.losses.cross_entropy import Loss, sum_cross_entropy
from penstock.models.decoder import Decoder
from penstock.models.decoder_config import DecoderConfig
from penstock.models.registry import get_family
from penstock.models.tp_roles import DECODER_ROLES
from penstock.models.weights import WeightMap
from penstock_kernels.attention import VarlenMetadata
from tests.engine.losses.divided_losses import Products, check_terms
from tests.losses.test_logits_loss import Entropy, Focal
from tests.models.twins import documents, hf_model, positions, their_loss
from tests.ranks import on_ranks
from tests.turns import one_day_in

# Shares of 131 tokens and 78 features differ between ranks.
SIZES = {"num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 78}
LENGTHS = [7, 1, 20, 12]
SPEC = LoraSpec(rank=3, alpha=6.0, seed=11)
AGAIN: list[tuple[list[str] | None, Kind]] = [
    (["mlp", "self_attn"], "plain"),
    (["self_attn"], "reentrant"),
    (None, "plain"),
    (None, "once"),
]
"""Parts of a layer, or all of it, and how they are computed again."""
LOSS_RTOL, GRADIENT_RTOL = 2e-6, 1e-5
BY_FIVE = Loss(chunk=5)


@dataclass(frozen=True)
class Case:
    """A model, and a way to divide it."""

    family: str
    residual: Residual
    merge_qkv: bool = False
    tied: bool = False
    targets: tuple[str, ...] = ()
    keys: int = 2
    """Key heads."""
    degrees: ParallelDims | None = None
    """Of the mesh, where the test does not say."""

    @property
    def reference(self) -> str:
        """What it has in common with other ways to divide the same model."""
        return f"{self.family}-{self.tied}-{self.keys}-{'-'.join(self.targets)}"

    def hf_config(self):
        sizes = {**SIZES, "num_key_value_heads": self.keys}
        return hf_model(self.family, tied=self.tied, **sizes)


ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ON_2 = [
    Case("qwen3", "whole", tied=True),
    Case("qwen3", "split", tied=True, merge_qkv=True),
    Case("qwen2", "split"),
    Case("llama-biased", "whole", merge_qkv=True),
    Case("llama-biased", "split"),
    Case("qwen3", "split", merge_qkv=True, targets=("q_proj", "v_proj", "down_proj")),
]
ON_4 = [
    Case("qwen3", "whole", tied=True, merge_qkv=True),
    Case("qwen3", "split", tied=True),
    Case("llama-biased", "split", merge_qkv=True, keys=1),
    Case("qwen2", "whole", targets=(*ALL_LINEAR, "lm_head")),
    Case("qwen2", "split", merge_qkv=True, targets=(*ALL_LINEAR, "lm_head")),
]
CASES = {2: ON_2, 4: ON_4}
SHARDED = [
    Case("qwen3", "whole", tied=True, degrees=ParallelDims(shard=2, tensor=2)),
    Case("llama-biased", "split", merge_qkv=True, keys=1, degrees=ParallelDims(shard=2, tensor=2)),
    Case("qwen2", "split", targets=ALL_LINEAR, degrees=ParallelDims(replicate=2, tensor=2)),
]


def write_reference(case, folder):
    """The tensors of a model, the loss of the documents and the gradient of every tensor."""
    model = case.hf_config()
    ids, labels = documents(LENGTHS)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    if case.targets:
        model, factors = adapted(case, model, weights)
        weights |= factors
        loss = packed(model, sum_cross_entropy, ids, labels)
    else:
        loss = their_loss(model, ids, labels)
    loss.backward()
    named = {canonical(n): p for n, p in model.named_parameters()}
    gradients = {f"grad:{n}": p.grad for n, p in named.items() if p.grad is not None}
    save_file({**weights, **gradients, "loss": loss.detach()}, folder / case.reference)


def canonical(name):
    factor = parse_lora_name(name)
    return native_name(factor.hf_module, factor.side) if factor else name


def adapted(case, model, weights):
    """Our decoder with adapters (judged by PEFT elsewhere), B not zero, and its factors."""
    decoder, names = ours(model.config.to_dict(), fused=False)
    decoder.load_state_dict({name: weights[name] for name in names.native_names()})
    inject(decoder, replace(SPEC, targets=case.targets))
    generator = torch.Generator().manual_seed(2)
    factors = {n: p for n, p in decoder.named_parameters() if parse_lora_name(n)}
    with torch.no_grad():
        for name, factor in factors.items():
            if ".lora_B." in name:
                factor.copy_(0.1 * torch.randn(factor.shape, generator=generator))
    return decoder, {canonical(n): p.detach().clone() for n, p in factors.items()}


def ours(hf_config, *, fused):
    config = get_family(hf_config).read(hf_config)
    return Decoder(config, merge_qkv=fused), WeightMap(config, fused)


def packed(model, losses, ids, labels):
    lengths = [len(document) for document in ids]
    return model(
        torch.cat(ids),
        positions(lengths),
        VarlenMetadata.of(lengths),
        lambda hidden, head: losses(hidden, head, torch.cat(labels)),
    )


def box(whole, piece):
    return whole[tuple(slice(o, o + s) for o, s in zip(piece.offsets, piece.sizes, strict=True))]


@dataclass
class Divided:
    """A divided model on one rank, with the weights of the reference."""

    case: Case
    mesh: Mesh
    model: Decoder
    params: list
    reference: dict

    @classmethod
    def of(cls, case, mesh, hf_config, folder, *, units=None):
        reference = load_file(folder / case.reference)
        with torch.device("meta"):
            model, names = ours(hf_config, fused=case.merge_qkv)
            if case.targets:
                inject(model, replace(SPEC, targets=case.targets))
        parallelize_tensor(model, mesh, DECODER_ROLES, residual=case.residual)
        pieces = param_shards(model, names, mesh, residual=case.residual)
        if units:
            units(model)
        model.to_empty(device="cpu")
        held = [
            make_local_param(name, parameter, pieces[name])
            for name, parameter in model.named_parameters()
        ]
        with torch.no_grad():
            for one in held:
                assert sum(piece.num_rows for piece in one.shards) == local(one.parameter).shape[0]
                for piece in one.shards:
                    piece.view(local(one.parameter)).copy_(box(reference[piece.tensor], piece))
        return cls(case, mesh, model, held, reference)

    def loss(self, ids, labels, loss=BY_FIVE, **how):
        how = {"residual": self.case.residual, **how}
        vocabulary = VocabParallelHead(self.mesh, self.model.config.vocab_size, **how)
        return packed(self.model, vocabulary.sum_cross_entropy(loss), ids, labels)

    def check_step(self, ids, labels, **how):
        """Loss and every gradient are the reference's."""
        self.model.zero_grad(set_to_none=True)
        loss = self.loss(ids, labels, **how)
        loss.backward()
        reduce_partial_grads(self.params, self.mesh)
        torch.testing.assert_close(
            loss.detach(), self.reference["loss"], rtol=LOSS_RTOL, atol=0, msg=f"{self.case}"
        )
        self.check_gradients()

    def check_gradients(self):
        wanted = {name for name in self.reference if name.startswith("grad:")}
        for one in self.params:
            for piece in one.shards:
                name = f"grad:{piece.tensor}"
                assert (one.parameter.grad is not None) == (name in wanted), name
                if name in wanted:
                    want = box(self.reference[name], piece)
                    error = (piece.view(local(one.parameter.grad)) - want).norm()
                    assert error <= GRADIENT_RTOL * want.norm(), f"{self.case} {name}: {error}"

    def shapes_of_logits(self, ids, labels):
        """Of each product that gives logits in a step that comes to the reference's result."""
        with Products() as seen:
            self.check_step(ids, labels)
        here = len(self.model.get_parameter("lm_head.weight"))
        return [shape for shape in seen.shapes if shape[1] in (here, 131)]

    def tally(self):
        """How much of each tensor is here, each number divided by the ranks that have it."""
        total: dict[str, Fraction] = defaultdict(Fraction)
        for one in self.params:
            for piece in one.shards:
                total[piece.tensor] += Fraction(piece.numel, piece.num_copies)
        return total


def steps_of_cases(cases, folder):
    """Each case's loss and gradients on the ranks of one axis; what each rank holds."""
    tallies = []
    ids, labels = documents(LENGTHS)
    mesh = None
    for case, hf_config in cases:
        mesh = mesh or Mesh(
            ParallelDims(tensor=torch.distributed.get_world_size()),
            torch.distributed.get_rank(),
            "cpu",
        )
        here = Divided.of(case, mesh, hf_config, folder)
        here.check_step(ids, labels)
        tallies.append(here.tally())
    return tallies


def ways_to_compute(cases, folder):
    """Recomputation, both ways to the loss, no gradients, nothing trained, and half precision."""
    ids, labels = documents(LENGTHS)
    world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    mesh = Mesh(ParallelDims(tensor=world), rank, "cpu")
    for case, hf_config in cases:
        here = Divided.of(case, mesh, hf_config, folder)
        shapes = here.shapes_of_logits(ids, labels)
        assert max(count for count, _ in shapes) == 5
        assert 131 not in {width for _, width in shapes}
        here.check_step(ids, labels, logits="gathered")
        here.check_step(ids, labels, loss=Loss(mode="eager"))
        check_terms(
            lambda loss, logits, here=here: here.loss(ids, labels, loss, logits=logits),
            here.model.get_parameter("lm_head.weight"),
        )
        with torch.no_grad():
            torch.testing.assert_close(here.loss(ids, labels), here.reference["loss"])
        nothing = [torch.full_like(each, -100) for each in labels]
        here.model.zero_grad()
        loss = here.loss(ids, nothing)
        loss.backward()
        assert loss.item() == 0
        assert all(not one.parameter.grad.any() for one in here.params)
        with torch.autocast("cpu", torch.bfloat16):
            rounded = here.loss(ids, labels)
        rounded.backward()
        torch.testing.assert_close(rounded, here.reference["loss"], rtol=1e-2, atol=0)
        for modules, kind in AGAIN:
            again = Divided.of(case, mesh, hf_config, folder)
            apply_activation_checkpointing(again.model, modules, kind)
            again.check_step(ids, labels)


def sharded_steps(cases, folder):
    """Rows differ along one axis, weights along both, or along the other alone."""
    ids, labels = documents(LENGTHS)
    rank = torch.distributed.get_rank()
    for case, hf_config in cases:
        mesh = Mesh(case.degrees, rank, "cpu")
        here = Divided.of(
            case, mesh, hf_config, folder, units=partial(shard_all, mesh=mesh.fsdp_mesh("all"))
        )
        mine = slice(0, 2) if mesh.index("replicate", "shard") == 0 else slice(2, 4)
        loss = here.loss(ids[mine], labels[mine])
        loss.backward()
        reduce_partial_grads(here.params, mesh)
        here.check_gradients()


def shard_all(model, mesh):
    how = FSDPPolicy(
        reshard_after="nothing", param_dtype=None, reduce_dtype=None, offload=False, prefetch=False
    )
    shard(model, [*model.model.layers.values()], mesh, how)


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Start ranks on cases, once their references are written."""
    folder = tmp_path_factory.mktemp("references")

    def on(world, check, cases):
        for case in cases:
            if not (folder / case.reference).exists():
                write_reference(case, folder)
        with_configs = [(case, case.hf_config().config.to_dict()) for case in cases]
        return on_ranks(world, check, with_configs, folder), folder

    return on


@pytest.mark.dist
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_gradient_is_the_whole_models_and_each_number_is_counted_once(start, world):
    per_rank, folder = start(world, steps_of_cases, CASES[world])
    for number, case in enumerate(CASES[world]):
        reference = load_file(folder / case.reference)
        counted = defaultdict(Fraction)
        for name, numel in chain.from_iterable(tallies[number].items() for tallies in per_rank):
            counted[name] += numel
        assert counted == {
            name: tensor.numel()
            for name, tensor in reference.items()
            if name != "loss" and not name.startswith("grad:")
        }


@pytest.mark.dist
def test_however_a_divided_step_is_computed_it_comes_to_the_same(start):
    start(2, ways_to_compute, [Case("qwen3", "split", tied=True, merge_qkv=True)])


@pytest.mark.dist
@one_day_in(2, of=0)
def test_a_whole_residual_computes_the_same_in_every_way(start):
    start(4, ways_to_compute, [Case("llama-biased", "whole")])


@pytest.mark.dist
@pytest.mark.slow
def test_divided_models_can_be_sharded_and_copied(start):
    start(4, sharded_steps, SHARDED)


def scored(logits):
    """On each of two ranks, of 23 tokens and 131 logits: the places, losses and hits that are told,
    and those that all logits give. A label is what is likeliest of the logits of one rank."""
    generator = torch.Generator().manual_seed(4)
    hidden_TD, head_VD = (torch.randn(n, 9, generator=generator) for n in (23, 131))
    logits_TV = hidden_TD @ head_VD.t()
    of_shares = torch.stack([part.argmax(1) for part in logits_TV.split([65, 66], dim=1)])
    of_shares[1] += 65
    choice = torch.arange(23) % 4
    labels_T = torch.where(choice == 3, -100, of_shares[choice % 2, torch.arange(23)])
    mesh = Mesh(ParallelDims(tensor=2), torch.distributed.get_rank(), "cpu")
    mine = head_VD.split([65, 66])[mesh.index("tensor")]
    head = nn.Linear(9, len(mine), bias=False)
    head.weight.data.copy_(mine)
    scores = VocabParallelHead(mesh, 131, logits=logits).token_scores(BY_FIVE)
    found = scores(hidden_TD, head, labels_T)
    kept = labels_T != -100
    losses = nn.functional.cross_entropy(logits_TV, labels_T, reduction="none")[kept]
    right = (logits_TV.argmax(1) == labels_T)[kept]
    assert torch.equal(found[0], kept.nonzero().squeeze(1))
    # A small loss is the difference of two numbers of about ten.
    torch.testing.assert_close(found[1], losses, rtol=LOSS_RTOL, atol=3e-6)
    assert found[2].tolist() == right.tolist()
    return right.tolist()


@pytest.mark.dist
@pytest.mark.parametrize("logits", ["divided", "gathered"])
def test_a_token_is_foretold_if_its_label_is_the_likeliest_of_all_ranks(logits):
    one, other = on_ranks(2, scored, logits)
    assert one == other
    assert 3 < sum(one) < len(one) - 3


def of_packages():
    """On each of two ranks: a package's loss, the gradient of the rank's rows, and a metric, as a
    share of what all logits give."""
    generator = torch.Generator().manual_seed(4)
    hidden_TD, head_VD = (torch.randn(n, 9, generator=generator) for n in (23, 131))
    labels_T = torch.where(torch.arange(23) % 4 == 3, -100, torch.arange(23) * 5)
    mesh = Mesh(ParallelDims(tensor=2), torch.distributed.get_rank(), "cpu")
    rows = slice(0, 65) if mesh.index("tensor") == 0 else slice(65, 131)
    head = nn.Linear(9, rows.stop - rows.start, bias=False)
    head.weight.data.copy_(head_VD[rows])
    vocabulary = VocabParallelHead(mesh, 131)
    loss = Loss(chunk=5, package=Focal())
    total = vocabulary.sum_cross_entropy(loss)(hidden_TD, head, labels_T)
    total.backward()
    scores = vocabulary.token_scores(BY_FIVE, [Entropy()])(hidden_TD, head, labels_T)

    kept = labels_T != -100
    head_VD.requires_grad_()
    logits_SV = (hidden_TD @ head_VD.t())[kept]
    expected = Focal().token_losses(logits_SV, labels_T[kept]).sum()
    (gradient_VD,) = torch.autograd.grad(expected, head_VD)
    entropies = Entropy().token_values(logits_SV.detach(), labels_T[kept])
    torch.testing.assert_close(total.detach(), expected.detach())
    torch.testing.assert_close(head.weight.grad, gradient_VD[rows])
    torch.testing.assert_close(scores.values, entropies[None])


@pytest.mark.dist
def test_losses_and_metrics_of_packages_have_the_logits_of_all_ranks():
    on_ranks(2, of_packages)


@st.composite
def layouts(draw):
    """Any model that fits an axis of some size."""
    size = draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    keys = draw(st.sampled_from([k for k in (1, 2, 3, 4, 6, 8) if not (k % size and size % k)]))
    smallest = max(size, keys)
    config = DecoderConfig(
        vocab_size=draw(st.integers(size, 40)),
        hidden_size=6,
        intermediate_size=draw(st.integers(size, 40)),
        num_hidden_layers=1,
        num_attention_heads=smallest * draw(st.integers(1, 2)),
        num_key_value_heads=keys,
        head_dim=draw(st.sampled_from([2, 4])),
        tie_word_embeddings=draw(st.booleans()),
        qkv_bias=draw(st.booleans()),
        o_bias=draw(st.booleans()),
        mlp_bias=draw(st.booleans()),
        qk_norm=draw(st.booleans()),
    )
    return config, size, draw(st.booleans()), draw(st.sampled_from(["whole", "split"]))


@pytest.mark.slow
@settings(deadline=None, max_examples=25)
@given(layouts())
def test_the_pieces_of_all_ranks_are_the_whole_model_once(layout):
    config, size, fused, residual = layout
    with torch.device("meta"):
        model = Decoder(config, merge_qkv=fused)
        inject(model, SPEC)
    seen = {}
    for index in range(size):
        cuts = TensorParallelPlan(WeightMap(config, fused), DECODER_ROLES, size, index, residual)
        for name, parameter in model.named_parameters():
            pieces = cuts.shards(name, tuple(parameter.shape))
            kept = cuts.shard(name, parameter)
            assert (kept is None) == (not pieces)
            assert sum(piece.numel for piece in pieces) == (0 if kept is None else kept.numel())
            for piece in pieces:
                count = seen.setdefault(piece.tensor, torch.zeros(piece.full_shape))
                box(count, piece).add_(1 / piece.num_copies)
    fresh = {native_name(m, s) for m in _adapted(model) for s in ("lora_A", "lora_B")}
    assert seen.keys() == {*WeightMap(config).hf_shapes(), *fresh}
    for name, count in seen.items():
        torch.testing.assert_close(count, torch.ones_like(count), msg=name)


def _adapted(model: nn.Module) -> set[str]:
    factors = (parse_lora_name(name) for name, _ in model.named_parameters())
    return {factor.hf_module for factor in factors if factor}
