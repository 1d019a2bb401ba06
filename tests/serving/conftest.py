"""A real SGLang server on loopback for these tests, and the Transformers backend as their reference.

They need SGLang, which pins its own transformers: `make test` runs them in an environment of their own.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from tests.support.ports import free_port

ASSETS = Path(__file__).resolve().parents[2] / "spec_stack" / "assets"
if importlib.util.find_spec("sglang") is None:
    collect_ignore_glob = ["test_*.py"]

CONTEXT = 4096
MIN_PROMPT_TOKENS = 400
ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    # A leaked KV slot or request row ends the server: while it works, and (SGLang's default) whenever it idles.
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "2",
    # The processes of a server begin as copies of the first, which is launched in half of the time.
    "SPEC_STACK_TEST_FORK": "1",
    # An error while scoring ends the server instead of hiding in a dense prefill.
    # The paper's rule, whatever lies beside the draft.
    "SPEC_STACK_SGLANG": '{"prefill": {"on_scoring_failure": "raise"}, "calibration": "none"}',
}
# What an oracle that scores chunks by all layers can follow.
BY_CHUNKS = {
    "SPEC_STACK_SGLANG": '{"prefill": {"on_scoring_failure": "raise", "granularity": "chunks", '
    '"first_scoring_layer": 0}, "calibration": "none"}'
}
ARGUMENTS = (
    *("--device", "cpu", "--host", "127.0.0.1", "--dtype", "float32"),
    *("--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--grammar-backend", "none"),
    # What others take of the memory while a server loads counts as its weights, and over this share it ends.
    *("--mem-fraction-static", "0.9", "--disable-cuda-graph", "--skip-server-warmup"),
    # An idle scheduler spins otherwise, and tests beside it need the cores.
    "--sleep-on-idle",
)


LAUNCH_SERVER = (sys.executable, "-m", "sglang.launch_server")
SERVE = (str(Path(sys.executable).with_name("sglang")), "serve")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All of this folder is marked, so that `-m "not serving"` leaves it out."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.serving)


class ServerDiedError(Exception):
    """The log's end says why."""


class _Copied:
    """A process as `subprocess.Popen` has one, of Python's fork server, which has SGLang imported (`forked`)."""

    def __init__(self, log: Path, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        from . import forked

        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([forked.__name__])
        self._process = context.Process(target=forked.serve, args=(log, arguments, environment))
        os.environ.update(ENVIRONMENT)
        self._process.start()
        self.pid = int(self._process.pid or 0)

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, seconds: float) -> int:
        self._process.join(seconds)
        if (code := self._process.exitcode) is None:
            raise subprocess.TimeoutExpired("a server", seconds)
        return code


class Server:
    """An SGLang server in its own process group, which is stopped as one."""

    def __init__(
        self,
        log: Path,
        arguments: Sequence[str],
        environment: Mapping[str, str] | None = None,
        target: Path = ASSETS / "target",
        command: Sequence[str] = LAUNCH_SERVER,
    ) -> None:
        self.url = f"http://127.0.0.1:{free_port()}"
        self.log = log
        port = self.url.rsplit(":", 1)[1]
        arguments = ["--model-path", str(target), *ARGUMENTS, "--port", port, *arguments]
        environment = {**ENVIRONMENT, **(environment or {})}
        self._process: subprocess.Popen[bytes] | _Copied
        # SGLang reads some of its variables as it is imported.
        changed = [name for name in environment if environment[name] != ENVIRONMENT.get(name)]
        if command == LAUNCH_SERVER and all(name.startswith("SPEC_STACK_") for name in changed):
            self._process = _Copied(log, arguments, environment)
            return
        with log.open("w") as output:
            self._process = subprocess.Popen(
                [*command, *arguments],
                env={**os.environ, **environment},
                # Away from the repository: a folder named like a package would shadow it.
                cwd=log.parent,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait(self, seconds: float = 900) -> None:
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
        """At once: a server that ends in order takes five seconds."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(20)

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def exit_code(self, seconds: float = 600) -> int:
        return self._process.wait(seconds)

    def tail(self) -> str:
        return "".join(self.log.read_text(errors="replace").splitlines(keepends=True)[-40:])

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=600) as reply:
            body = reply.read()
        return json.loads(body) if body else None

    def post(self, path: str, body: Mapping[str, Any], timeout: float = 600) -> tuple[int, Any]:
        """Status and parsed reply."""
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout) as reply:
                body_text = reply.read().decode()
                # /flush_cache answers in plain words, /abort_request with nothing.
                is_json = "json" in (reply.headers["Content-Type"] or "") and body_text
                return reply.status, json.loads(body_text) if is_json else body_text
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read() or b"null")

    def flush(self) -> None:
        """Empty the caches. SGLang refuses, in plain words, until it has seen that it idles."""
        for _ in range(100):
            with contextlib.suppress(json.JSONDecodeError):
                if self.post("/flush_cache", {})[0] == 200:
                    return
            time.sleep(0.2)
        raise AssertionError("the caches were never emptied")

    def generate(self, input_ids: Sequence[int], max_new_tokens: int = 24, **custom: Any) -> dict[str, Any]:
        """A greedy /generate with custom_params; its reply."""
        status, reply = self.post("/generate", generate_body(input_ids, max_new_tokens, **custom))
        assert status == 200, reply
        return dict(reply)

    def hang_up(self, input_ids: Sequence[int], **custom: Any) -> None:
        """Ask for 2,000 tokens, and abort: again and again, since the first may come before the request does."""
        body = {**generate_body(input_ids, 2000, **custom), "rid": f"hangs up {time.monotonic()}"}
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(self.post, "/generate", body)
            while not future.done():
                time.sleep(0.3)
                self.post("/abort_request", {"rid": body["rid"]})
        status, reply = future.result()
        assert status == 200, reply
        assert reply["meta_info"]["finish_reason"]["type"] == "abort"

    def chat(self, messages: Sequence[Mapping[str, str]], max_tokens: int = 24, **body: Any) -> dict[str, Any]:
        """A greedy chat completion; its one choice's meta info, with the text under "text"."""
        status, reply = self.post(
            "/v1/chat/completions",
            {
                **{"model": "default", "messages": list(messages), "max_tokens": max_tokens, "temperature": 0},
                **{"return_meta_info": True, "ignore_eos": True, **body},
            },
        )
        assert status == 200, reply
        choice = reply["choices"][0]
        return {**choice["meta_info"], "text": choice["message"]["content"], "usage": reply["usage"]}

    def state(self) -> dict[str, Any]:
        """What the scheduler says about the plugin."""
        return dict(self.get("/server_info")["internal_states"][0]["spec_stack"])

    def metrics(self) -> dict[str, float]:
        """Every Prometheus sample, summed over its labels."""
        with urllib.request.urlopen(self.url + "/metrics", timeout=600) as reply:
            lines = [line.rsplit(" ", 1) for line in reply.read().decode().splitlines() if not line.startswith("#")]
        samples = {name: float(value) for name, value in lines}
        found: dict[str, float] = {}
        for name, value in samples.items():
            # SGLang's queues have a sample for each priority and one, of none, for them all.
            total = re.sub(r'priority="[^"]*"', 'priority=""', name)
            if total == name or total not in samples:
                found[name.split("{")[0]] = found.get(name.split("{")[0], 0.0) + value
        return found

    def generate_all(self, requests: Sequence[tuple[Sequence[int], dict[str, Any]]]) -> list[dict[str, Any]]:
        """All at once."""
        with ThreadPoolExecutor(len(requests)) as pool:
            return list(pool.map(lambda request: self.generate(request[0], **request[1]), requests))

    def stream(self, path: str, body: Mapping[str, Any]) -> Iterator[Any]:
        """The events of a streamed reply."""
        request = urllib.request.Request(
            self.url + path, json.dumps({**body, "stream": True}).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=600) as reply:
            for line in reply:
                data = line.decode().removeprefix("data:").strip()
                if data and data != "[DONE]":
                    yield json.loads(data)


def report_of(reply: dict[str, Any]) -> dict[str, Any]:
    """The plugin's report on a /generate reply."""
    return dict(reply["meta_info"]["spec_stack"])


def kept_positions(reply: dict[str, Any]) -> list[int]:
    """Of the prompt's tokens that the target was given; the request asked to `explain`."""
    return [position for start, stop in report_of(reply)["kept_spans"] for position in range(start, stop)]


def wait_until(reached: Callable[[], bool], seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@lru_cache(None)
def _special_ids() -> frozenset[int]:
    from transformers import AutoTokenizer

    added = AutoTokenizer.from_pretrained(ASSETS / "target").added_tokens_decoder
    return frozenset(token_id for token_id, token in added.items() if token.special)


def special_spans(input_ids: Sequence[int]) -> list[list[int]]:
    """The spans that Transformers' route protects of token ids: those of special tokens, in order."""
    spans: list[list[int]] = []
    for at, token_id in enumerate(input_ids):
        if token_id not in _special_ids():
            continue
        if spans and spans[-1][1] == at:
            spans[-1][1] = at + 1
        else:
            spans.append([at, at + 1])
    return spans


def generate_body(input_ids: Sequence[int], max_new_tokens: int, **custom: Any) -> dict[str, Any]:
    """A greedy request. Special tokens alone are protected unless asked for, as in the reference, which is given token
    ids too, and what is pruned by force is pruned afresh, since the reference remembers nothing."""
    custom = {
        "protect": special_spans(input_ids),
        **({"follow_up": "afresh"} if custom.get("sparse_prefill") == "on" else {}),
        **custom,
    }
    return {
        "input_ids": list(input_ids),
        # Which parts of earlier turns were kept is shown to those who share a salt.
        "extra_key": "tests",
        "sampling_params": {
            "temperature": 0,
            "max_new_tokens": max_new_tokens,
            "ignore_eos": True,
            "custom_params": {"spec_stack": custom},
        },
    }


class Reference:
    """Tokens of the Transformers backend, decoded without speculation."""

    def __init__(self) -> None:
        import torch

        from spec_stack import PrefillConfig, SpecStackConfig, SpecStackGenerator

        torch.set_num_threads(1)
        self.generator = SpecStackGenerator.from_pretrained(
            prepack_linears=False,
            precision="fp32",
            calibration=False,
            config=SpecStackConfig(prefill=PrefillConfig(positions="contiguous")),
        )
        self.tokenizer = self.generator.tokenizer
        self._result = lru_cache(None)(self._generate)

    def _generate(self, input_ids: tuple[int, ...], max_tokens: int, sparse_prefill: str, keep_rate: float) -> Any:
        return self.generator.generate(
            input_ids=list(input_ids),
            max_tokens=max_tokens,
            sparse_prefill=sparse_prefill,
            keep_rate=keep_rate,
            gamma=0,
            ignore_eos=True,
        )

    def result(
        self, input_ids: Sequence[int], max_new_tokens: int = 24, sparse_prefill: str = "off", keep_rate: float = 0.2
    ) -> Any:
        return self._result(tuple(input_ids), max_new_tokens, sparse_prefill, keep_rate)

    def tokens(self, input_ids: Sequence[int], **options: Any) -> list[int]:
        return list(self.result(input_ids, **options).token_ids)

    def tokens_over(self, input_ids: Sequence[int], spans: Sequence[Sequence[int]], max_new_tokens: int) -> list[int]:
        """Greedy tokens by plain Transformers over the kept tokens as a prompt: one forward, then one by one."""
        import torch
        from transformers import DynamicCache

        model, cache, found = self.generator.target, DynamicCache(), []
        ids = [input_ids[position] for start, stop in spans for position in range(start, stop)]
        with torch.no_grad():
            for _ in range(max_new_tokens):
                output = model(input_ids=torch.tensor([ids]), past_key_values=cache, use_cache=True)
                found.append(int(output.logits[0, -1].argmax()))
                ids = [found[-1]]
        return found

    def text_ids(self, num_tokens: int, seed: int) -> list[int]:
        """Exactly num_tokens tokens of real text, without any chat."""
        from spec_stack.bench.demo import hide_fact

        text = hide_fact(self.tokenizer, num_tokens + 60, seed).document
        return list(self.tokenizer(text, add_special_tokens=False).input_ids)[:num_tokens]

    def user_turn(self, num_tokens: int, seed: int) -> list[int]:
        """Exactly num_tokens tokens behind a reply: its end, real text from the middle of something, and the opening
        of the next reply."""
        before, behind = (
            self.tokenizer(template, add_special_tokens=False).input_ids
            for template in ("<|end|><|user|>", "<|end|><|assistant|>")
        )
        num_said = num_tokens - len(before) - len(behind)
        return [*before, *self.text_ids(num_said + 200 + seed % 97, seed)[-num_said:], *behind]

    def prompt(self, num_tokens: int, seed: int) -> list[int]:
        """About num_tokens tokens of real text with a fact in it and a question after it."""
        from spec_stack.bench.demo import hide_fact

        messages = hide_fact(self.tokenizer, num_tokens, seed).messages
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return list(self.tokenizer(text, add_special_tokens=False).input_ids)


@pytest.fixture(scope="session")
def reference() -> Reference:
    return Reference()


class Launcher:
    """Starts servers with the plugin's algorithm, or a scoring model with SGLang's own; stops all of them."""

    def __init__(self, folders: pytest.TempPathFactory) -> None:
        self._folders = folders
        self._started: list[Server] = []

    def __call__(
        self,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        wait: bool = True,
        command: Sequence[str] = LAUNCH_SERVER,
        own_algorithm: Sequence[str] | None = None,
        **models: Path,
    ) -> Server:
        """own_algorithm: the flags of SGLang's own algorithm, none for plain decoding, while the draft scores alone."""
        draft = models.get("draft", ASSETS / "draft")
        algorithm = ["--speculative-algorithm", "SPEC_STACK", "--speculative-draft-model-path", str(draft)]
        if own_algorithm is not None:
            algorithm = [*own_algorithm, "--spec-stack-scoring-model", str(draft)]
        log = self._folders.mktemp("server") / "log"
        server = Server(log, [*algorithm, *arguments], environment, models.get("target", ASSETS / "target"), command)
        self._started.append(server)
        if wait:
            try:
                server.wait()
            except ServerDiedError:
                server.stop()
                raise
        return server

    def stop(self) -> None:
        for server in self._started:
            server.stop()


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    launcher = Launcher(tmp_path_factory)
    yield launcher
    launcher.stop()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for most tests: chunked prefill, radix cache, eight rows, metrics."""
    launcher = Launcher(tmp_path_factory)
    yield launcher(
        *("--max-total-tokens", "24000", "--chunked-prefill-size", "256", "--max-running-requests", "8"),
        *("--spec-stack-min-prompt-tokens", str(MIN_PROMPT_TOKENS), "--context-length", str(CONTEXT)),
        *("--grammar-backend", "xgrammar", "--enable-metrics"),
    )
    launcher.stop()
