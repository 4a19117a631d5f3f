"""Variables and `~` in paths, judged by a shell."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.config.loading.cli_overrides import Override
from penstock.config.loading.expand_paths import expand
from penstock.config.loading.load import load
from penstock.config.loading.schema_tree import sections
from penstock.config.schema.base import FilePath
from penstock.config.server.config import ServerConfig
from penstock.config.server.load import load_server
from penstock.core.errors import ConfigError
from penstock.core.process.allowed_env import is_secret


@pytest.mark.parametrize(
    "text",
    ["~", "~/a", "a/~", "$ROOT/x", "${ROOT}x", "${NONE:-d}/x", "${ROOT:-d}", "${EMPTY:-d}/a"],
)
def test_paths_expand_as_a_shell_expands_them(text: str, monkeypatch: Any) -> None:
    monkeypatch.setenv("ROOT", "/data")
    monkeypatch.setenv("EMPTY", "")
    monkeypatch.delenv("NONE", raising=False)
    said = subprocess.run(["sh", "-c", f"printf %s {text}"], capture_output=True, check=True)
    assert expand(text) == said.stdout.decode()


@given(
    st.text(alphabet="ab/.~$ {}*-", max_size=12).filter(
        lambda t: t[:1] != "~" and (not t or not t.isspace())
    )
)
@settings(max_examples=100)
def test_what_doubles_its_dollars_is_literal(text: str) -> None:
    assert expand(text.replace("$", "$$")) == text


def written(folder: Path, data: str = "rows.jsonl") -> Path:
    file = folder / "run.yaml"
    file.write_text(
        "model: {config_path: 'builtin:tiny-qwen3'}\n"
        f"data: {{datasets: [{{path: '{data}', type: text}}], dataset_prepared_path: ~/prep}}\n"
        "train: {output_dir: '${OUT:-runs}/one', data_parallel_mode: none}\n"
        "pipeline: {name: '${literal}'}\n"
    )
    return file


def test_a_file_and_its_overrides_are_expanded_and_other_fields_stay(
    tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setenv("PLACE", "/somewhere")
    push = Override("push.url", "file://${PLACE}/out")
    run = load(written(tmp_path, "$PLACE/rows.jsonl"), [push])
    assert run.data.dataset_prepared_path == str(Path.home() / "prep")
    assert run.data.datasets[0].path == "/somewhere/rows.jsonl"
    assert (run.train.output_dir, run.push.url) == ("runs/one", "file:///somewhere/out")
    assert run.pipeline.name == "${literal}"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("ABSENT", r"run.yaml:2: data.datasets.0.path: \$\{ABSENT\} is not set"),
        ("HF_TOKEN", "looks like a secret"),
    ],
)
def test_unset_variables_and_secrets_are_refused_by_name(
    name: str, says: str, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.delenv("ABSENT", raising=False)
    monkeypatch.setenv("HF_TOKEN", "hf_hidden")
    with pytest.raises(ConfigError, match=says) as caught:
        load(written(tmp_path, f"https://x/${{{name}}}/rows.jsonl"))
    assert "hf_hidden" not in str(caught.value)


def test_credentials_are_told_from_settings_by_their_names():
    secret = "HF_TOKEN WANDB_API_KEY AWS_ACCESS_KEY_ID AWS_SECRET_ACCESS_KEY GITHUB_PAT DB_PWD"
    more = "GOOGLE_APPLICATION_CREDENTIALS MY_PASSPHRASE AZURE_STORAGE_CONNECTION_STRING NETRC"
    assert all(map(is_secret, [*secret.split(), *more.split()]))
    plain = "AWS_REGION WANDB_PROJECT GOOGLE_CLOUD_PROJECT MLFLOW_TRACKING_URI PWD MAX_TOKENS PATH"
    assert not any(map(is_secret, plain.split()))


NAMED_AS_A_PLACE = re.compile(r"(^|_)(path|dir|file|files|folder|url|uri)$")


def test_every_setting_named_as_a_path_or_an_address_is_expanded() -> None:
    for section in (*sections().values(), ServerConfig):
        fields = section.model_fields
        declared = {
            name
            for name, field in fields.items()
            if any(isinstance(part, FilePath) for part in field.metadata)
        }
        assert declared - {"chat_template"} == set(filter(NAMED_AS_A_PLACE.search, fields)), section


def test_a_servers_file_and_its_overrides_are_expanded(tmp_path: Path, monkeypatch: Any) -> None:
    file = tmp_path / "server.yaml"
    file.write_text("model_path: ${MODELS:-/models}/small\noutput_dir: ~/out\n")
    monkeypatch.delenv("MODELS", raising=False)
    monkeypatch.setenv("PLACE", "/somewhere")
    keys = Override("server.api_keys_file", "$PLACE/keys")
    config = load_server(file, [keys])
    assert (config.model_path, config.output_dir) == ("/models/small", str(Path.home() / "out"))
    assert config.api_keys_file == "/somewhere/keys"
    file.write_text("model_path: ${MODELS}/small\n")
    with pytest.raises(ConfigError, match=r"server.yaml:1: model_path: \$\{MODELS\} is not set"):
        load_server(file)
