"""Scoring and the draft's own slots on another device: no copy stops the host, no part is long beside others, and the
order of streams is right, by streams that note who waits for whom."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from spec_stack.config import PrefillConfig
from tests.support.cuda import blocking_copies

HEADS, KV_HEADS, DIM, VOCAB, LAYERS = 4, 2, 8, 50, 3


@dataclass(frozen=True)
class _Sizes:
    """SGLang's configuration of a KV pool, of which one field counts."""

    max_total_num_tokens: int


@dataclass
class _Request:
    origin_input_ids: list[int]
    output_ids: list[int]
    customized_info: None = None


def runner_of_layers(device: str) -> Any:
    """SGLang's runner of a model with its own attention layers, as far as a draft's forwards look at it."""
    from sglang.srt.layers.radix_attention import RadixAttention

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(
                RadixAttention(HEADS, DIM, 0.3, KV_HEADS, layer) for layer in range(LAYERS)
            )
            self.table = torch.zeros(VOCAB, HEADS * DIM, device=device)
            self.lengths: list[int] = []

        def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, batch: Any) -> Any:
            self.lengths.append(len(input_ids))
            hidden = self.table[input_ids] + positions[:, None] / 1000
            for layer in self.layers:
                keys = hidden[:, : KV_HEADS * DIM]
                hidden = layer(hidden, keys, keys, batch)
            last = batch.extend_start_loc + batch.extend_seq_lens - 1
            return SimpleNamespace(next_token_logits=hidden[last] @ self.table.T)

    return SimpleNamespace(
        model=Model(),
        dtype=torch.float32,
        device=device,
        model_config=SimpleNamespace(vocab_size=VOCAB, context_len=100_000),
    )


def launch_of(context_len: int) -> Any:
    """A launch that prunes nothing by itself."""
    return SimpleNamespace(target=SimpleNamespace(context_len=context_len), prunes=False)


def _score(runner: Any, num_tokens: int, config: PrefillConfig, most_of_a_part: Callable[[int], int]) -> Any:
    from spec_stack.prefill.turn import Cached
    from spec_stack.sglang.decide import KnownTexts, Prompt, UnscoredPrompt
    from spec_stack.sglang.draft_pool import DraftScoringRunner
    from spec_stack.sglang.scoring import DraftScorer
    from spec_stack.sglang.server_args import ServerConfig

    launch = launch_of(runner.model_config.context_len)
    scorer = DraftScorer(launch, DraftScoringRunner(runner, num_tokens + 100))
    prompt = Prompt((5,) * num_tokens, None, None, config, "recall")
    known = KnownTexts(ServerConfig(), None, None, lambda prompt: 0, num_tokens)
    needs = UnscoredPrompt(known.text_of(prompt), Cached(), True, False, "", (), prompt)
    return scorer.decide(needs, known, most_of_a_part)


@pytest.mark.parametrize(
    "slots", [np.arange(40), np.arange(40) + 7, np.array([*range(20), *range(50, 70)]), np.arange(40)[::-1].copy()]
)
def test_a_forward_of_the_scoring_draft_copies_without_waiting(slots: Any) -> None:
    from spec_stack.sglang.draft_pool import DraftScoringRunner

    draft = DraftScoringRunner(runner_of_layers("meta"), 100)
    with torch.no_grad(), blocking_copies() as found:
        for length, num_new in ((30, 30), (39, 9), (40, 1)):
            draft.run([3] * num_new, slots[:length], captured={}, num_captured=4)
    assert found == []


@pytest.mark.parametrize("num_prompts", [1, 3])
def test_slots_are_chosen_and_renewed_without_waiting(num_prompts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

    from spec_stack.sglang.draft_kv_slots import DraftKVSlots

    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace(empty_cache=lambda: None))
    runner = runner_of_layers("meta")
    backend = SimpleNamespace(
        init_forward_metadata=lambda batch: None, forward=lambda q, k, v, layer, batch, save_kv_cache: q
    )
    runner.attn_backend, runner.kv_index_translator = backend, None
    draft = DraftKVSlots(runner, PrefillConfig(draft_kv_budget=128), max_gamma=4, num_requests=4, slot_bytes=0)
    draft.pools(_Sizes(1000), ReqToTokenPool(4, 2000, "meta", enable_memory_saver=False))
    batch: Any = SimpleNamespace(
        req_pool_indices_cpu=torch.arange(1, 1 + num_prompts),
        prefix_lens=[0] * num_prompts,
        extend_lens=[700] * num_prompts,
        reqs=[_Request(list(range(700)), []) for _ in range(num_prompts)],
        seq_lens_cpu=None,
    )
    with blocking_copies() as found:
        draft.note_prefill(batch)
        batch.spec_info = draft.no_proposal(torch.zeros(num_prompts, dtype=torch.int32, device="meta"))
        draft.begin_step(batch)
        for request in batch.reqs:
            # What is written shares words with what was dropped.
            request.output_ids += [0, *range(100, 165)]
        draft.begin_step(batch)
    assert draft.num_renewals == num_prompts
    assert draft.num_restored
    assert found == []


RUNS: list[tuple[list[int], list[int]]] = [
    ([0], [3616, 8192, 8192]),
    ([1], [1568, *[2048] * 9]),
    ([0, 1, 1, 0], [3616, *[2048] * 2, 4096, 8192]),
    ([1, 0, 0, 0], [1568, 2048, 8192, 8192]),
]


@pytest.mark.parametrize(("runs", "lengths"), RUNS)
def test_parts_are_short_while_requests_run(runs: list[int], lengths: list[int]) -> None:
    """runs: whether any do, before each part; then as before the last one."""
    runner = runner_of_layers("meta")
    config = PrefillConfig(scoring_queries="look_ahead", look_ahead=0)

    def most_of_a_part(chunk: int) -> int:
        num_done = len(runner.model.lengths)
        return min(chunk, 2048) if runs[min(num_done, len(runs) - 1)] else chunk

    work = _score(runner, 20_000, config, most_of_a_part)
    with torch.no_grad():
        while sum(runner.model.lengths) < 20_000:
            next(work)
    assert runner.model.lengths == lengths


class _Stream:
    def __init__(self, name: str, events: list[str]) -> None:
        self.name, self._events = name, events

    def wait_stream(self, other: _Stream) -> None:
        self._events.append(f"{self.name} waits for {other.name}")


@pytest.mark.parametrize("fails", [False, True])
def test_a_part_runs_on_the_forward_stream_between_what_came_before_and_what_comes_after(
    monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """What fails half-way has written slots on that stream too."""
    from spec_stack.sglang.scoring import on_forward_stream

    events: list[str] = []
    forward, current = _Stream("forward", events), _Stream("current", events)

    @contextmanager
    def on_forward() -> Iterator[None]:
        events.append("forward begins")
        try:
            yield
        finally:
            events.append("forward ends")

    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace(current_stream=lambda: current))
    scheduler = SimpleNamespace(forward_stream=forward, forward_stream_ctx=on_forward())
    try:
        with on_forward_stream(scheduler, torch.device("cuda")):
            events.append("part")
            if fails:
                raise MemoryError
    except MemoryError:
        assert fails
    order = ["forward waits for current", "forward begins", "part", "forward ends", "current waits for forward"]
    assert events == order
