"""The loops of the SDK's cookbook, as they are written, run to their end on a real server.

Beside the server they are given rows that lie here in place of those they download, and a template
for a tokenizer that has none of its own.
"""

import json

import pytest
import tinker

from tests.server.serving import Server, write_model

datasets = pytest.importorskip("datasets")
model_info = pytest.importorskip("tinker_cookbook.model_info")
sl_loop = pytest.importorskip("tinker_cookbook.recipes.sl_loop")
rl_loop = pytest.importorskip("tinker_cookbook.recipes.rl_loop")

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.timeout(280),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(model, tmp_path_factory):
    found = Server(tmp_path_factory.mktemp("served"), model).start()
    yield found
    found.stop()


@pytest.fixture
def loops(monkeypatch, shared):
    """Both modules, over questions of the shared data."""
    lines = (shared / "data" / "gsm8k" / "train.jsonl").read_text().splitlines()[:24]
    rows = [
        {
            **row,
            "messages": [
                {"role": "user", "content": row["question"][:80]},
                {"role": "assistant", "content": row["answer"][:80]},
            ],
        }
        for row in map(json.loads, lines)
    ]
    train = datasets.DatasetDict(train=datasets.Dataset.from_list(rows))
    monkeypatch.setattr(datasets, "load_dataset", lambda *_: train)
    monkeypatch.setattr(model_info, "get_recommended_renderer_name", lambda _: "role_colon")
    monkeypatch.setenv("TINKER_API_KEY", "tml-of-tests")
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    clients, client_of = [], tinker.ServiceClient

    def remembered(**given):
        clients.append(client_of(**given))
        return clients[-1]

    monkeypatch.setattr(tinker, "ServiceClient", remembered)
    yield
    # The loops leave them open.
    for client in clients:
        client.close("success").result()


def told(log_path, name):
    """What the loop logged under this name, step by step."""
    lines = (log_path / "metrics.jsonl").read_text().splitlines()
    return [step[name] for step in map(json.loads, lines) if name in step]


def saved(log_path):
    lines = (log_path / "checkpoints.jsonl").read_text().splitlines()
    return [json.loads(line)["name"] for line in lines]


@pytest.mark.usefixtures("loops")
def test_the_supervised_loop_learns_and_saves(server, model, tmp_path):
    sl_loop.main(
        sl_loop.Config(
            base_url=server.url,
            log_path=str(tmp_path / "log"),
            model_name=str(model),
            batch_size=4,
            learning_rate=5e-3,
            max_length=512,
            lora_rank=8,
            save_every=2,
        )
    )
    losses = told(tmp_path / "log", "train_mean_nll")
    assert len(losses) == 6
    assert losses[-1] < losses[0] - 0.05
    assert told(tmp_path / "log", "step") == list(range(6))
    assert saved(tmp_path / "log") == ["000002", "000004", "final"]


@pytest.mark.usefixtures("loops")
def test_the_loop_of_rewards_draws_and_steps(server, model, tmp_path, monkeypatch):
    # Nobody expects that this model counts.
    monkeypatch.setattr(rl_loop, "get_reward", lambda response, _: float(len(response) % 2))
    rl_loop.main(
        rl_loop.Config(
            base_url=server.url,
            log_path=str(tmp_path / "log"),
            model_name=str(model),
            batch_size=6,
            group_size=4,
            learning_rate=1e-2,
            lora_rank=8,
            save_every=2,
            max_tokens=12,
        )
    )
    assert len(told(tmp_path / "log", "reward/total")) == 4
    assert len(told(tmp_path / "log", "grad_norm")) == 4
    assert saved(tmp_path / "log") == ["000002", "final"]
