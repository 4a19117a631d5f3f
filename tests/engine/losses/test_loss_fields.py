"""What the settings of the loss do to a step: what it is, how it is computed, what is told."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from penstock.core.errors import CapabilityError
from penstock.engine.losses.build import train_loss_fn
from penstock.rows.reader import PackedRows
from tests.engine import runs
from tests.engine.loops import each, evaluated, loop_of, step
from tests.models.twins import hf_model
from tests.ranks import on_ranks

SMOOTHING, Z = 0.2, 0.01


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("loss")
    runs.write_rows(folder / "packed", 4)
    hf_model("qwen3", tied=False, vocab_size=runs.VOCAB).save_pretrained(folder / "model")
    return folder


def job(folder, out, **train):
    settings = {"data_parallel_mode": "none", "optimizer": "sgd", "max_steps": 1, **train}
    model = {"model_path": str(folder / "model")}
    run = runs.run_config(folder / out, folder / "model", model=model, **settings)
    return runs.job_of(run, folder / "packed")


class Names(TorchDispatchMode):
    """Which operations were called."""

    def __init__(self):
        super().__init__()
        self.found = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.found.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def told(job):
    """The loss of validation, a step's and its gradient norm, and how they were computed."""
    compiled, compile = [], torch.compile

    def watched(function, **_):
        compiled.append(function.__name__)
        return function

    torch.compile = watched
    try:
        loop = loop_of(job)
        before = evaluated(loop, PackedRows(job.packed_dir / "data" / "train"))["eval_loss"]
        with Names() as names:
            record = step(loop)
    finally:
        torch.compile = compile
    return before, record["loss"], record["grad_norm"], compiled, "logsumexp" in names.found


def of_transformers(folder, smoothing=0.0, z=0.0):
    """The mean loss of all rows, and the norm of its gradients."""
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    packed = PackedRows(folder / "packed" / "data" / "train")
    loss, trained = torch.zeros(()), 0
    for row in map(packed.row, range(4)):
        ids, labels = (torch.tensor(x, dtype=torch.int64) for x in (row.input_ids, row.labels))
        lengths = list(row.lengths)
        for document, target in zip(ids.split(lengths), labels.split(lengths), strict=True):
            logits = model(input_ids=document[None], use_cache=False).logits[0]
            how = {"reduction": "sum", "label_smoothing": smoothing}
            loss = loss + F.cross_entropy(logits, target, **how)
            loss = loss + z * logits[target != -100].logsumexp(1).square().sum()
            trained += int((target != -100).sum())
    (loss / trained).backward()
    norms = [p.grad.norm() for p in model.parameters() if p.grad is not None]
    return (loss / trained).item(), torch.stack(norms).norm().item()


@pytest.mark.dist
def test_the_loss_is_what_is_written_and_computed_as_is_written(folder):
    jobs = {
        name: job(folder, name, **train)
        for name, train in {
            "plain": {},
            "eager": {"ce_mode": "eager"},
            "compiled": {"ce_mode": "compiled", "label_smoothing": SMOOTHING},
            "smoothed": {"label_smoothing": SMOOTHING},
            "drawn": {"z_loss_coef": Z},
        }.items()
    }
    [found] = on_ranks(1, each, told, jobs)
    plain, smoothed = of_transformers(folder), of_transformers(folder, smoothing=SMOOTHING)
    drawn = of_transformers(folder, z=Z)
    assert min(abs(other[0] - plain[0]) for other in (smoothed, drawn)) > 0.01
    wanted = {"smoothed": smoothed, "compiled": smoothed, "drawn": drawn}
    for name, (before, *made, compiled, logits_are_whole) in found.items():
        # Validation compares models, whatever they are trained on.
        assert before == pytest.approx(plain[0], rel=1e-5)
        assert made == pytest.approx(wanted.get(name, plain), rel=1e-5)
        assert sorted({*compiled}) == (["slope_", "tally"] if name == "compiled" else [])
        assert logits_are_whole == (name in ("eager", "compiled"))


def test_compiling_without_a_compiler_is_refused(folder, monkeypatch):
    run = job(folder, "without", ce_mode="compiled").config
    assert train_loss_fn(run, torch.device("cpu")).mode == "compiled"
    monkeypatch.setenv("PATH", "")
    with pytest.raises(CapabilityError, match=r"none of g\+\+, clang\+\+ is in the PATH"):
        train_loss_fn(run, torch.device("cpu"))
