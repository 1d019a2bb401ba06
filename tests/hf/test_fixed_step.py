"""Forwards in fixed shapes: the same tokens as eager ones, one graph for all lengths, and few waits for a GPU."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from shutil import which
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from spec_stack import SpecStackGenerator
from spec_stack.cli.doctor import diagnose
from spec_stack.hf import fixed_step
from spec_stack.hf.attention import install
from spec_stack.hf.fixed_step import FixedCache, FixedStep, why_eager
from spec_stack.hf.model import CachedModel
from spec_stack.hf.versions import cache_parameter
from tests.support.cuda import Operators, blocking_copies, read_backs
from tests.support.models import FAMILIES, VOCAB, make_model, random_prompt
from tests.support.nightly import others_nightly
from tests.support.tiny_architectures import CONFIGS

TOLERANCE = {"atol": 1e-4, "rtol": 1e-3}
SHARED = {family: make_model(family) for family in FAMILIES}
for _model in SHARED.values():
    install(_model)


def pair_of_views(family: str = "llama") -> tuple[CachedModel, CachedModel]:
    """The same model, eager and in fixed shapes, after a sparse prefill."""
    model = SHARED[family]
    step = FixedStep(model, "static", is_draft=True)
    assert str(step) == "static"
    views = CachedModel(model, 4096), CachedModel(model, 4096, step=step)
    prompt, kept = random_prompt(460), range(0, 460, 2)
    for view in views:
        view.forward([prompt[position] for position in kept], kept, 1)
    return views


@pytest.mark.parametrize("family", FAMILIES)
def test_any_mix_of_widths_rollbacks_forks_and_kept_slots_gives_the_eager_logits(family: str) -> None:
    eager, fixed = pair_of_views(family)
    choose = random.Random(0)
    for turn in range(40):
        num_tokens = choose.choice([1, 1, 2, 3, 5, 16, 20])
        token_ids = random_prompt(num_tokens, seed=turn)
        positions = range(eager.next_position + turn % 2, eager.next_position + turn % 2 + num_tokens)
        logits = [view.forward(token_ids, positions, 1 + num_tokens // 2) for view in (eager, fixed)]
        torch.testing.assert_close(*logits, **TOLERANCE)
        back = choose.randint(0, num_tokens)
        for view in (eager, fixed):
            view.rollback(back)
        if turn == 13:
            fixed = fixed.fork()
        if turn == 20:
            fixed.release()
        if turn == 26:
            slots = [slot for slot in range(eager.num_cached) if slot % 5]
            for view in (eager, fixed):
                view.keep_slots(slots)
    assert (fixed.positions, fixed.token_ids) == (eager.positions, eager.token_ids)
    assert eager.num_cached > 256
    theirs = fixed.contents()
    for name, tensor in eager.contents().items():
        torch.testing.assert_close(theirs[name], tensor, **TOLERANCE)


def test_a_fork_is_not_changed_by_what_its_origin_goes_on_with() -> None:
    eager, fixed = pair_of_views()
    for view in (eager, fixed):
        view.forward([5], [460], 1)
    fork = fixed.fork()
    for view in (fixed, fixed):
        view.rollback(1)
        view.forward([9], [460], 1)
    torch.testing.assert_close(fork.forward([7], [461], 1), eager.forward([7], [461], 1), **TOLERANCE)


def compiled_step(monkeypatch: pytest.MonkeyPatch, backend: Any) -> FixedStep:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    torch._dynamo.reset()
    return FixedStep(SHARED["llama"], "compiled", is_draft=True)


def test_one_graph_without_a_break_serves_200_steps_over_the_borders_of_buckets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # In a thread that has run no forward: what the graph's guards read is there from the start.
    with ThreadPoolExecutor(1) as thread:
        thread.submit(compile_once_for_200_steps, monkeypatch).result()


def compile_counter() -> Any:
    # Imported here, since it takes two seconds.
    from torch._dynamo.testing import CompileCounterWithBackend

    return CompileCounterWithBackend("eager")


def compile_once_for_200_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    counter = compile_counter()
    step = compiled_step(monkeypatch, counter)
    assert str(step) == "compiled"
    assert counter.frame_count == 1
    eager, compiled = CachedModel(SHARED["llama"], 4096), CachedModel(SHARED["llama"], 4096, step=step)
    for view in (eager, compiled):
        view.forward(random_prompt(200), range(200), 1)
    for position in range(200, 400):
        logits = [view.forward([position % VOCAB], [position], 1) for view in (eager, compiled)]
        torch.testing.assert_close(*logits, **TOLERANCE)
        if position % 7 == 0:
            for view in (eager, compiled):
                view.rollback(1)
                view.forward([3], [position], 1)
    assert counter.frame_count == 1


@pytest.mark.nightly
def test_a_failed_compilation_leaves_the_draft_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("no compiler here")

    assert "no compiler here" in str(compiled_step(monkeypatch, fails))


class LargestResult(TorchDispatchMode):
    """Numbers in the largest tensor that an operator gives in the block."""

    num_numbers = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        sizes = [each.numel() for each in tree_leaves(result) if isinstance(each, torch.Tensor)]
        self.num_numbers = max([self.num_numbers, *sizes])
        return result


@pytest.mark.parametrize("width", [1, 5, 16])
def test_no_step_repeats_the_keys_of_heads_that_share_them(width: int) -> None:
    model = SHARED["qwen2"]
    num_kv_heads = model.config.num_key_value_heads
    assert num_kv_heads < model.config.num_attention_heads
    keys, values = ([torch.zeros(1, num_kv_heads, 4096, 16) for _ in model.model.layers] for _ in range(2))
    inputs = torch.arange(width).expand(3, width).contiguous()
    with torch.inference_mode(), LargestResult() as largest:
        fixed_step.fixed_forward(model, cache_parameter(type(model)), inputs, keys, values)
    assert largest.num_numbers == keys[0].numel()


def on_meta() -> FixedCache:
    """A bucket on another device than the host's, without numbers."""
    model = make_model().to("meta")
    install(model)
    shape = 1, model.config.num_key_value_heads, 256, model.config.head_dim
    keys, values = ([torch.empty(shape, device="meta") for _ in model.model.layers] for _ in range(2))
    return FixedCache(FixedStep(model, "static"), keys, values)


@pytest.mark.parametrize("num_tokens", others_nightly([1, 3, 16], usual=[3]))
def test_nothing_waits_for_the_device_in_a_forward(num_tokens: int) -> None:
    cache = on_meta()
    with blocking_copies() as copies, read_backs() as reads:
        cache.forward([5] * num_tokens, range(num_tokens), 100)
    assert (copies, reads) == ([], [])


class Replayed:
    """A captured call's stand-in on a CPU: the same tensors every time. Its operators are not launched."""

    operators: Operators | None = None
    num_made = 0

    def __init__(self, call: Callable[[], Any], shares_pool_with: Replayed | None) -> None:
        self._call, self._result = call, None
        Replayed.num_made += 1

    def replay(self) -> Any:
        if self.operators is not None:
            self.operators.counts = False
        new = self._call()
        if self._result is None:
            self._result = new
        self._result.copy_(new)
        if self.operators is not None:
            self.operators.counts = True
        return self._result


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> FixedStep:
    monkeypatch.setattr(fixed_step, "CapturedCall", Replayed)
    monkeypatch.setattr(Replayed, "num_made", 0)
    monkeypatch.setattr(Replayed, "operators", None)
    step = FixedStep(SHARED["llama"], "static")
    step.is_captured = True
    return step


def test_captured_forwards_are_the_eager_ones_and_captured_once_a_width_and_bucket(captured: FixedStep) -> None:
    eager, replayed = CachedModel(SHARED["llama"], 4096), CachedModel(SHARED["llama"], 4096, step=captured)
    for view in (eager, replayed):
        view.forward(random_prompt(180), range(180), 1)
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    for turn in range(60):
        num_tokens = (1, 1, 4)[turn % 3]
        positions = range(eager.next_position, eager.next_position + num_tokens)
        token_ids = random_prompt(num_tokens, seed=turn)
        kept.append((eager.forward(token_ids, positions, 1), replayed.forward(token_ids, positions, 1)))
    # No later replay has changed them.
    for expected, got in kept:
        torch.testing.assert_close(got, expected, **TOLERANCE)
    assert Replayed.num_made == 2 * 2


def test_a_captured_token_is_one_launch_and_the_copies_of_its_inputs_and_logits(captured: FixedStep) -> None:
    view = CachedModel(SHARED["llama"], 4096, step=captured)
    view.forward(random_prompt(20), range(20), 1)
    for position in range(20, 23):
        view.forward([7], [position], 1)
    with Operators() as operators:
        Replayed.operators = operators
        view.forward([7], [23], 1)
    assert len(operators.names) <= 8
    eager = CachedModel(SHARED["llama"], 4096)
    eager.forward(random_prompt(20), range(20), 1)
    with Operators() as operators:
        eager.forward([7], [20], 1)
    assert len(operators.names) > 100


def test_a_replay_that_differs_from_the_eager_forward_is_not_used(
    captured: FixedStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Wrong(Replayed):
        def replay(self) -> Any:
            return super().replay() + 1.0

    monkeypatch.setattr(fixed_step, "CapturedCall", Wrong)
    eager, wrong = CachedModel(SHARED["llama"], 4096), CachedModel(SHARED["llama"], 4096, step=captured)
    for view in (eager, wrong):
        view.forward(random_prompt(20), range(20), 1)
    for position in range(20, 30):
        logits = [view.forward([5], [position], 1) for view in (eager, wrong)]
        torch.testing.assert_close(*logits, **TOLERANCE)
    assert str(captured).startswith("eager (a replayed forward differs")


def test_the_device_is_read_once_a_drafted_token_and_once_a_verification() -> None:
    models = make_model(seed=1), make_model(seed=2)
    generator = SpecStackGenerator(*models, draft_step="static")
    options: dict[str, Any] = {"input_ids": random_prompt(40), "proposer": "model", "gamma": 4, "max_tokens": 24}
    expected = SpecStackGenerator(*models, draft_step="eager").generate(**options).token_ids
    with read_backs() as reads:
        result = generator.generate(**options)
    assert result.token_ids == expected
    assert result.metrics.num_proposed > 20
    assert len(reads) <= result.metrics.num_steps + result.metrics.num_proposed + 4


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("Qwen3.5", "recurrent state"),
        ("Gemma3", "sliding windows"),
        ("GPT-OSS", "sliding windows"),
        ("Qwen3-MoE", "has not been checked"),
        ("Llama", ""),
    ],
)
def test_what_has_no_fixed_shapes_stays_eager_and_says_why(kind: str, reason: str) -> None:
    on = torch.device("cuda")
    told = why_eager(CONFIGS[kind], on, "auto", is_draft=True, is_quantized=False)
    assert (reason in told) if reason else not told
    assert "quantized" in why_eager(CONFIGS["Llama"], on, "auto", is_draft=True, is_quantized=True)
    assert "as asked" in why_eager(CONFIGS["Llama"], on, "eager", is_draft=True, is_quantized=False)


def test_a_cpu_is_eager_by_default_and_the_doctor_says_so() -> None:
    report = diagnose(None, None, "fp32", "cpu")
    assert "on a CPU" in report["draft"]["step"]
    report = diagnose(None, None, "fp32", "cpu", draft_step="compiled")
    assert report["draft"]["step"] == "compiled"
    assert report["target"]["step"] == "eager (on a CPU a padded verification costs more)"


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.skipif(which("g++") is None, reason="needs a C++ compiler")
def test_the_embedded_draft_compiled_drafts_the_same_tokens() -> None:
    options: dict[str, Any] = {"max_tokens": 64, "gamma": 4, "proposer": "model", "return_records": True}
    load: dict[str, Any] = {"device": "cpu", "precision": "fp32", "prepack_linears": False}
    torch._dynamo.reset()
    results = [
        SpecStackGenerator.from_pretrained(**load, draft_step=step).generate("import os\n\n\ndef read(", **options)
        for step in ("eager", "compiled")
    ]
    eager, compiled = results
    assert compiled.metrics.draft_step == "compiled"
    assert compiled.token_ids == eager.token_ids
    assert [each.num_accepted for each in compiled.records] == [each.num_accepted for each in eager.records]
