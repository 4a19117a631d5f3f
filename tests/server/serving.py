"""A training server of real processes on loopback, over a tiny model in a folder."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import torch
import transformers
import yaml

from penstock.rows.tokenizer import byte_tokenizer
from penstock.server.launch.addresses import free_port
from tests.waiting import soon

VOCABULARY = 320


SIZES: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "dtype": "float32",
}


def write_model(folder: Path, model_type: str = "qwen3", **fields: Any) -> Path:
    """A tiny model of random weights with a tokenizer of bytes, as Hugging Face has them. `fields`
    are those of its config besides `SIZES`."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **{**SIZES, **fields})
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


class Server:
    """`penstock serve` on a file in `folder`."""

    def __init__(self, folder: Path, model: Path, **fields: Any) -> None:
        """`fields` None: left out of the file."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.model, self.port = folder, model, free_port("127.0.0.1", 0, "api_port")
        self.url = f"http://127.0.0.1:{self.port}"
        self.config = folder / "server.yaml"
        settings = {
            "model_path": str(model),
            "output_dir": str(folder / "out"),
            "api_port": self.port,
            "enable_lora": True,
            "lora_rank": 16,
            "lora_alpha": 16,
            "data_parallel_mode": "none",
            "attn_implementation": "sdpa",
            "enable_mixed_precision": False,
            "enable_gradient_checkpointing": False,
            "ce_mode": "eager",
            "optimizer_dtype": "fp32",
            "merge_qkv": False,
            "sample_packing_sequence_len": 2048,
            "storage_limit": "10GB",
            **fields,
        }
        written = {name: value for name, value in settings.items() if value is not None}
        self.config.write_text(yaml.safe_dump(written))
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> str:
        """All that its processes said."""
        return (self.folder / "log").read_text(errors="replace")

    def start(self, seconds: float = 90, files: int | None = None) -> "Server":
        """Begin, with so many open files at most, and wait until works can be done."""
        command = [sys.executable, "-m", "penstock.cli.main", "serve", str(self.config)]
        if files is not None:
            command = ["bash", "-c", f'ulimit -n {files}; exec "$@"', "-", *command]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                command,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self.wait_ready(seconds)
        return self

    def wait_ready(self, seconds: float = 90) -> None:
        """Wait until works can be done."""

        def ready() -> bool:
            assert self._process is not None
            assert self._process.poll() is None, self.log
            try:
                told = httpx.get(f"{self.url}/health", timeout=5)
            except httpx.HTTPError:
                return False
            return told.status_code == 200 and told.json().get("workers") == "ready"

        try:
            soon(ready, seconds)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.log[-4000:]}") from error

    def stop(self) -> None:
        """End it as a user would."""
        if self._process and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            self._process.wait(60)

    @property
    def pid(self) -> int | None:
        """Its launcher's."""
        return self._process and self._process.pid

    @property
    def status(self) -> int | None:
        """How it ended, once it has."""
        return self._process and self._process.poll()

    def kill(self) -> None:
        """End all of it without warning."""
        assert self._process
        for pid in [*self.processes().values(), self._process.pid]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self._process.wait(10)

    def processes(self) -> dict[str, int]:
        """Its processes, by what they are: api, engine, rank 0, rank 1..."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                words = (folder / "cmdline").read_bytes().decode().split("\0")
                environment = (folder / "environ").read_bytes().decode(errors="replace")
            except OSError:
                continue
            if not any(str(self.folder) in word for word in words):
                continue
            for name, module in {"api": "server.api", "engine": "server.scheduler"}.items():
                if f"penstock.{module}" in words:
                    found[name] = int(folder.name)
            if "penstock.server.worker" in words and "\0RANK=" in f"\0{environment}":
                rank = f"\0{environment}".split("\0RANK=")[1].split("\0")[0]
                found[f"rank {rank}"] = int(folder.name)
        return found


def post(server: Server, path: str, body: dict[str, Any], timeout: float = 60) -> httpx.Response:
    return httpx.post(
        f"{server.url}/api/v1/{path}",
        content=json.dumps(body),
        headers={"content-type": "application/json", "x-api-key": "tml-local"},
        timeout=timeout,
    )
