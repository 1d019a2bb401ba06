"""A real SGLang server on loopback for these tests, and the Transformers backend as their reference.

They need SGLang, which pins its own transformers: `make test` runs them in an environment of their own.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

ASSETS = Path(__file__).resolve().parents[2] / "spec_stack" / "assets"
if importlib.util.find_spec("sglang") is None:
    collect_ignore_glob = ["test_*.py"]

_ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    # A leaked KV slot or request row ends the server: while it works, and (SGLang's default) whenever it idles.
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "2",
    # An error while scoring ends the server instead of hiding in a dense prefill.
    "SPEC_STACK_SGLANG": '{"raise_scoring_errors": true}',
}
_ARGUMENTS = (
    *("--device", "cpu", "--host", "127.0.0.1", "--dtype", "float32"),
    *("--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--grammar-backend", "none"),
    *("--mem-fraction-static", "0.1", "--disable-cuda-graph", "--skip-server-warmup"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All of this folder is marked, so that `-m "not serving"` leaves it out."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.serving)


class ServerDiedError(Exception):
    """The log's end says why."""


class Server:
    """An SGLang server in its own process group, which is stopped as one."""

    def __init__(self, log: Path, arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{free.getsockname()[1]}"
        self.log = log
        command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(ASSETS / "target"), *_ARGUMENTS]
        with log.open("w") as output:
            self._process = subprocess.Popen(
                [*command, "--port", self.url.rsplit(":", 1)[1], *arguments],
                env={**os.environ, **_ENVIRONMENT, **(environment or {})},
                # Away from the repository: a folder named like a package would shadow it.
                cwd=log.parent,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait(self, seconds: float = 300) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise ServerDiedError(self.tail())
            try:
                self.get("/health")
                return
            except OSError:
                time.sleep(0.5)
        raise ServerDiedError(f"not ready after {seconds} s\n{self.tail()}")

    def stop(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def exit_code(self, seconds: float) -> int:
        return self._process.wait(seconds)

    def tail(self) -> str:
        return "".join(self.log.read_text(errors="replace").splitlines(keepends=True)[-40:])

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=60) as reply:
            body = reply.read()
        return json.loads(body) if body else None

    def post(self, path: str, body: Mapping[str, Any], timeout: float = 300) -> tuple[int, Any]:
        """Status and parsed reply."""
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout) as reply:
                return reply.status, json.load(reply)
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read() or b"null")

    def generate(self, input_ids: Sequence[int], max_new_tokens: int = 24, **custom: Any) -> dict[str, Any]:
        """A greedy /generate with custom_params; its reply."""
        status, reply = self.post("/generate", generate_body(input_ids, max_new_tokens, **custom))
        assert status == 200, reply
        return dict(reply)

    def generate_all(self, requests: Sequence[tuple[Sequence[int], dict[str, Any]]]) -> list[dict[str, Any]]:
        """All at once."""
        with ThreadPoolExecutor(len(requests)) as pool:
            return list(pool.map(lambda request: self.generate(request[0], **request[1]), requests))

    def stream(self, path: str, body: Mapping[str, Any]) -> Iterator[Any]:
        """The events of a streamed reply."""
        request = urllib.request.Request(
            self.url + path, json.dumps({**body, "stream": True}).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=300) as reply:
            for line in reply:
                data = line.decode().removeprefix("data:").strip()
                if data and data != "[DONE]":
                    yield json.loads(data)


def generate_body(input_ids: Sequence[int], max_new_tokens: int, **custom: Any) -> dict[str, Any]:
    return {
        "input_ids": list(input_ids),
        "sampling_params": {
            "temperature": 0,
            "max_new_tokens": max_new_tokens,
            "ignore_eos": True,
            "custom_params": custom,
        },
    }


class Reference:
    """Tokens of the Transformers backend, decoded without speculation."""

    def __init__(self) -> None:
        import torch

        from spec_stack import SpecStackGenerator

        torch.set_num_threads(1)
        self.generator = SpecStackGenerator.from_pretrained(prepack_linears=False, precision="fp32")
        self.tokenizer = self.generator.tokenizer
        self._result = lru_cache(None)(self._generate)

    def _generate(self, input_ids: tuple[int, ...], max_tokens: int, specprefill: bool, keep_rate: float) -> Any:
        return self.generator.generate(
            input_ids=list(input_ids),
            max_tokens=max_tokens,
            specprefill=specprefill,
            keep_rate=keep_rate,
            gamma=0,
            ignore_eos=True,
        )

    def result(
        self, input_ids: Sequence[int], max_new_tokens: int = 24, specprefill: bool = False, keep_rate: float = 0.2
    ) -> Any:
        return self._result(tuple(input_ids), max_new_tokens, specprefill, keep_rate)

    def tokens(self, input_ids: Sequence[int], **options: Any) -> list[int]:
        return list(self.result(input_ids, **options).token_ids)

    def prompt(self, num_tokens: int, seed: int) -> list[int]:
        """About num_tokens tokens of real text with a fact in it and a question after it."""
        from spec_stack.demo import hide_fact

        messages = hide_fact(self.tokenizer, num_tokens, seed).messages
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return list(self.tokenizer(text, add_special_tokens=False).input_ids)


@pytest.fixture(scope="session")
def reference() -> Reference:
    return Reference()


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Starts servers with the plugin's algorithm and stops them after the module."""
    started: list[Server] = []

    def start(*arguments: str, environment: Mapping[str, str] | None = None, wait: bool = True) -> Server:
        draft = ["--speculative-algorithm", "SPEC_STACK", "--speculative-draft-model-path", str(ASSETS / "draft")]
        log = tmp_path_factory.mktemp("server") / "log"
        server = Server(log, [*draft, *arguments], environment)
        started.append(server)
        if wait:
            server.wait()
        return server

    yield start
    for server in started:
        server.stop()
