"""Every optimizer under every kind of layout, given the same gradients: torch's steps of a
checkpoint's tensors, what is rounded at random to the very same bits, and gone on with from
checkpoints of any other layout."""

from importlib.util import find_spec

import numpy as np
import pytest
import torch

from penstock.engine.checkpoint.checkpoint_manager import CheckpointManager
from penstock.engine.distributed.param_shards import local
from penstock.engine.hf.load_weights import copy_shard
from penstock.optim.groups import set_lr
from tests.engine import runs
from tests.engine.inputs import MODELS
from tests.engine.loops import each, loop_of, parameters_of
from tests.ranks import on_ranks
from tests.turns import one_day_in

pytestmark = pytest.mark.dist

STEPS, HALF = 20, 2
HEAD_DIM = 16
LR, MUON_LR, DECAY = 0.01, 0.03, 0.1
ALONE = {"data_parallel_mode": "none"}
SPARSE = {"kind": "experts", "expert_parallel_size": 2}
LAYOUTS = {
    "shard 2": (2, {}),
    "tp 2, not fused": (2, {"tensor_parallel_size": 2, "model": {"merge_qkv": False}}),
    "pp 2": (2, {"pipeline_parallel_size": 2}),
    "replicate 2": (2, {"data_parallel_mode": "ddp", "data_parallel_replicate_size": 2}),
    "ep 2 over shard 2": (2, SPARSE),
    "ep 2 over tp 2": (2, {**SPARSE, "tensor_parallel_size": 2}),
    "shard 2 x tp 2": (4, {"tensor_parallel_size": 2}),
    "replicate 2 x shard 2": (4, {"data_parallel_replicate_size": 2}),
    "pp 2 x tp 2": (4, {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}),
    "ep 2 over shard 4": (4, SPARSE),
    "ep 2 over shard 2 x tp 2": (4, {**SPARSE, "tensor_parallel_size": 2}),
}
MUON = {"optimizer": "muon", "muon_lr": MUON_LR, "optimizer_dtype": "fp32"}
TOLD = {
    "muon_momentum": 0.8,
    "muon_nesterov": False,
    "muon_ns_steps": 3,
    "muon_adjust_lr_fn": "match_rms_adamw",
    "optimizer_kwargs": {"betas": [0.8, 0.9], "eps": 1e-6},
}
EXACT = {
    "adamw": {},
    "sgd": {"optimizer": "sgd", "optimizer_kwargs": {"momentum": 0.9, "nesterov": True}},
    "muon": MUON,
    "muon-told": {**MUON, **TOLD},
    "muon-heads": {**MUON, "muon_split_heads": True},
    "named": {"optimizer": "torch.optim.NAdam", "optimizer_kwargs": {"betas": [0.8, 0.9]}},
    "novograd": {
        "optimizer": "novograd",
        "optimizer_dtype": "fp32",
        "optimizer_kwargs": {"betas": [0.8, 0.5], "amsgrad": True, "grad_averaging": True},
    },
}
IN_BF16 = {"precision": "bf16", "stochastic_rounding": True}
KAHAN = {"precision": "bf16", "optimizer_kwargs": {"use_kahan_summation": True}}
ROUNDED = {
    "adamw at random": IN_BF16,
    "states at random": {"optimizer": "anyprecision_adamw", "stochastic_rounding": True},
    "kahan": {"optimizer": "anyprecision_adamw", **KAHAN},
    "muon at random": {"optimizer": "muon", "muon_lr": MUON_LR, **IN_BF16},
    "novograd at random": {"optimizer": "novograd", **IN_BF16},
}

FEW = [
    ("shard 2", "muon"),
    ("shard 2", "muon-heads"),
    ("tp 2, not fused", "muon"),
    ("shard 2", "novograd"),
]
MORE = [
    *[("shard 2", kind) for kind in EXACT if kind not in ("muon", "muon-heads", "novograd")],
    ("pp 2 x tp 2", "muon-heads"),
    ("ep 2 over shard 2", "muon"),
    ("pp 2 x tp 2", "muon"),
    ("ep 2 over shard 2 x tp 2", "muon"),
    ("ep 2 over shard 2", "novograd"),
    ("pp 2 x tp 2", "novograd"),
]
REST = [(name, kind) for name in LAYOUTS for kind in EXACT if (name, kind) not in FEW + MORE]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("optimizers")
    runs.write_rows(folder / "packed", 4)
    # No matrix so small that PyTorch multiplies one by itself otherwise than a stack.
    runs.write_config(folder / "dense", tie_word_embeddings=False, head_dim=HEAD_DIM)
    runs.write_config(folder / "experts", **MODELS["experts"], head_dim=HEAD_DIM)
    return folder


def job(folder, out, *, kind="dense", **train):
    settings = {"lr": LR, "weight_decay": DECAY, "no_decay_modules": ["norm"], **train}
    run = runs.run_config(folder / out, folder / kind, **settings)
    return runs.job_of(run, folder / "packed")


def by_world(names):
    """Names of layouts by their number of ranks."""
    found = {}
    for name in names:
        found.setdefault(LAYOUTS[name[0]][0], []).append(name)
    return found


def drawn(tensor, shape, step):
    """A gradient that depends on nothing else, also not on the precision that it is kept in."""
    seed = 1000 * sum(at * byte for at, byte in enumerate(tensor.encode(), 1)) + step
    full = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return full.bfloat16().float()


def take_steps(loop, steps):
    """Steps of the optimizer along drawn gradients."""
    engine = loop.built.engine
    for step in steps:
        for local_param in engine.model.trainable:
            gradient = torch.zeros_like(
                local_param.parameter, dtype=local_param.parameter.grad_dtype
            )
            for piece in local_param.shards:
                copy_shard(
                    drawn(piece.tensor, piece.full_shape, step), piece, piece.view(local(gradient))
                )
            local_param.parameter.grad = gradient
        set_lr(engine.optimizer, LR)
        engine.optimizer.step()


def stepped(job, steps=STEPS):
    """Weights before and after."""
    loop = loop_of(job)
    before = parameters_of(loop)
    take_steps(loop, range(steps))
    return before, parameters_of(loop)


def beside_torchs(jobs):
    """What torch makes of the weights, here where products of bfloat16 are added up alike, and what
    each job makes of them."""
    judged, found = {}, {}
    for name, (before, after) in each(stepped, jobs).items():
        kind = name.rpartition(" ")[2]
        of = kind, len(before)
        if of not in judged and torch.distributed.get_rank() == 0:
            judged[of] = torchs(before, kind)
        found[name] = judged.get(of), after
    return found


class Plain:
    """NovoGrad as its paper has it, in fp64, with the largest norm so far and averaged gradients;
    each matrix of a stack by itself."""

    def __init__(self, groups):
        self.groups = groups
        self.states = {}

    def step(self):
        for group in self.groups:
            for weight in group["params"]:
                stacked = weight.ndim == 3
                matrices = weight if stacked else [weight]
                for at, matrix in enumerate(matrices):
                    gradient = (weight.grad[at] if stacked else weight.grad).double()
                    self.move((weight, at), matrix, gradient, group["weight_decay"])

    def move(self, key, weight, gradient, decay):
        square = gradient.square().sum()
        m, v, highest = self.states.get(key, (0.0, square, 0.0))
        v = 0.5 * v + 0.5 * square
        highest = max(highest, v)
        exact = weight.detach().double()
        m = 0.8 * m + 0.2 * (gradient / (highest.sqrt() + 1e-8) + decay * exact)
        self.states[key] = m, v, highest
        weight.data.copy_(exact - LR * m)


def moves_by_muon(name):
    return name.startswith("model.layers.") and "norm" not in name and ".gate.weight" not in name


def heads_of(weights):
    """Queries, keys and values of each head as parameters of their own, which share memory with the
    whole, by name and first row."""
    return {
        (name, row): torch.nn.Parameter(weight.data[row : row + HEAD_DIM])
        for name, weight in weights.items()
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))
        for row in range(0, len(weight), HEAD_DIM)
    }


def torchs(before, kind):
    """What torch's own optimizers make of a checkpoint's tensors."""
    weights = {name: torch.nn.Parameter(torch.from_numpy(a.copy())) for name, a in before.items()}
    groups = [
        {"params": [w for n, w in weights.items() if "norm" not in n], "weight_decay": DECAY},
        {"params": [w for n, w in weights.items() if "norm" in n], "weight_decay": 0.0},
    ]
    chosen = {weight for name, weight in weights.items() if moves_by_muon(name)}
    rest = [{**g, "params": [w for w in g["params"] if w not in chosen]} for g in groups]
    heads = heads_of(weights) if kind == "muon-heads" else {}
    whole = [weight for name, weight in weights.items() if (name, 0) not in heads]
    optimizers = {
        "adamw": lambda: [torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95))],
        "sgd": lambda: [torch.optim.SGD(groups, lr=LR, momentum=0.9, nesterov=True)],
        "named": lambda: [torch.optim.NAdam(groups, lr=LR, betas=(0.8, 0.9))],
        "novograd": lambda: [Plain(groups)],
        "muon-told": lambda: [
            torch.optim.Muon(
                chosen,
                lr=MUON_LR,
                weight_decay=DECAY,
                momentum=0.8,
                nesterov=False,
                ns_steps=3,
                adjust_lr_fn="match_rms_adamw",
            ),
            torch.optim.AdamW(rest, lr=LR, betas=(0.8, 0.9), eps=1e-6),
        ],
        "muon-heads": lambda: [
            torch.optim.Muon(
                [*heads.values(), *chosen.intersection(whole)], lr=MUON_LR, weight_decay=DECAY
            ),
            torch.optim.AdamW(rest, lr=LR, betas=(0.9, 0.95)),
        ],
        "muon": lambda: [
            torch.optim.Muon(chosen, lr=MUON_LR, weight_decay=DECAY),
            torch.optim.AdamW(rest, lr=LR, betas=(0.9, 0.95)),
        ],
    }[kind]()
    for step in range(STEPS):
        for name, weight in weights.items():
            weight.grad = drawn(name, weight.shape, step)
        for (name, row), head in heads.items():
            gradient = weights[name].grad
            assert gradient is not None
            head.grad = gradient[row : row + HEAD_DIM]
        for optimizer in optimizers:
            optimizer.step()
    return {name: weight.detach().numpy() for name, weight in weights.items()}


@pytest.mark.parametrize(
    "names",
    [
        FEW,
        pytest.param(MORE, marks=[pytest.mark.slow, pytest.mark.exhaustive]),
        pytest.param(REST, marks=[pytest.mark.slow, pytest.mark.exhaustive]),
    ],
    ids=["few", "more", "rest"],
)
def test_twenty_steps_are_torchs_of_a_checkpoints_tensors_in_every_layout(names, folder):
    for world, some in by_world(names).items():
        jobs = {
            f"{layout}: {kind}": job(folder, "exact", **EXACT[kind], **LAYOUTS[layout][1])
            for layout, kind in some
        }
        found = on_ranks(world, beside_torchs, jobs)[0]
        for name, (want, after) in found.items():
            assert after.keys() == want.keys()
            # Each step turns a matrix by products of 8 bits, and moves it by about MUON_LR. Ours
            # are added up in float32, PyTorch's as its library does it on this processor: one
            # number in hundreds of matrices is rounded the other way, and the iteration spreads it.
            atol = STEPS * MUON_LR * 2**-9 if "muon" in name else 1e-7
            for tensor, array in want.items():
                np.testing.assert_allclose(
                    after[tensor], array, rtol=1e-6, atol=atol, err_msg=f"{name}: {tensor}"
                )


def after_three(jobs):
    """Weights after three steps."""
    return each(lambda job: stepped(job, 3)[1], jobs)


SOME = [("tp 2, not fused", kind) for kind in ROUNDED] + [("ep 2 over shard 2", "muon at random")]
OTHERS = [(name, kind) for name in LAYOUTS for kind in ROUNDED if (name, kind) not in SOME]


@pytest.mark.slow
@pytest.mark.parametrize(
    "names", [SOME, pytest.param(OTHERS, marks=pytest.mark.exhaustive)], ids=["some", "others"]
)
def test_what_is_rounded_is_rounded_alike_in_every_layout(names, folder):
    alone = {
        f"{model} {kind}": job(folder, "alone", kind=model, **ROUNDED[kind], **ALONE)
        for model, kind in {(LAYOUTS[name][1].get("kind", "dense"), kind) for name, kind in names}
    }
    [wanted] = on_ranks(1, after_three, alone)
    for world, some in by_world(names).items():
        jobs = {
            (layout, kind): job(folder, "rounded", **ROUNDED[kind], **LAYOUTS[layout][1])
            for layout, kind in some
        }
        found = on_ranks(world, after_three, jobs)[0]
        for (layout, kind), after in found.items():
            want = wanted[f"{LAYOUTS[layout][1].get('kind', 'dense')} {kind}"]
            assert after.keys() == want.keys()
            for tensor, array in want.items():
                assert np.array_equal(after[tensor], array), f"{layout}, {kind}: {tensor}"


def bits_of(loop):
    """All that a checkpoint would hold of this rank, by name."""
    return {
        f"{name} {box.offsets}": box.data.float().numpy().copy()
        for name, boxes in loop.built.train_state.boxes().items()
        for box in boxes
    }


def gone_on(pairs):
    """For each pair of jobs: what the first comes to, what it comes to from a checkpoint, and what
    the second does from there."""
    found = {}
    for name, (first, second) in pairs.items():
        loop = loop_of(first)
        take_steps(loop, range(HALF))
        saved = CheckpointManager(first.output_dir / name, loop.built.train_state, loop.ranks)
        saved.save(HALF, {})
        take_steps(loop, range(HALF, 2 * HALF))
        again, other = loop_of(first), loop_of(second)
        for one in (again, other):
            root = first.output_dir / name
            CheckpointManager(root, one.built.train_state, one.ranks).load(
                root / f"global_step_{HALF}"
            )
            take_steps(one, range(HALF, 2 * HALF))
        found[name] = (
            bits_of(loop),
            bits_of(again),
            parameters_of(loop),
            parameters_of(other),
        )
    return found


def assert_same_bits(found):
    for name, (bits, again, weights, others) in found.items():
        assert bits.keys() == again.keys()
        kept = {key.rpartition(" (")[0].rpartition(".")[2] for key in bits}
        assert kept > {"weight"}, f"{name} keeps no state"
        for key, array in bits.items():
            assert np.array_equal(again[key], array), f"{name}: {key}"
        for key, array in weights.items():
            assert np.array_equal(others[key], array), f"{name}, elsewhere: {key}"


@one_day_in(3, of=2)
def test_every_optimizer_goes_on_from_a_checkpoint_to_the_same_bits_in_any_layout(folder):
    tp = LAYOUTS["tp 2, not fused"][1]
    pairs = {
        name: (job(folder, "begun", **train), job(folder, "other", **train, **tp))
        for name, train in {**EXACT, **ROUNDED}.items()
    }
    for found in on_ranks(2, gone_on, pairs):
        assert_same_bits(found)


@pytest.mark.slow
@pytest.mark.parametrize(
    "optimizer",
    [
        "torch.optim.Adafactor",
        pytest.param(
            "torchao.optim.AdamW8bit",
            marks=pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not here"),
        ),
    ],
)
def test_an_optimizer_of_whole_matrices_goes_on_where_they_are_whole(optimizer, folder):
    made = job(folder, "whole", optimizer=optimizer, **ALONE)
    [found] = on_ranks(1, gone_on, {optimizer: (made, made)})
    assert_same_bits(found)
