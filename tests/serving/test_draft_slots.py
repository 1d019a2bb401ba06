"""A draft over slots of its own beside a dense target: the target's own tokens, and as few slots at any length."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from spec_stack.config import PrefillConfig
from spec_stack.prefill.draft_kv_budget import RENEW_EVERY, DraftKVBudget, choose_slots
from spec_stack.sglang.draft_kv_rows import DraftKVRow
from tests.support.reference import sparse_greedy

from .conftest import ASSETS, CONTEXT, Reference, Server, report_of

SLOTS = 128
GAMMA = 4
NUM_ROWS = 6
# Of the drafts without a model.
NUM_IDS = 60
CONFIG = PrefillConfig(draft_kv_budget=96, chunk_size=16)
FLAGS = (
    *("--max-total-tokens", "24000", "--chunked-prefill-size", "256", "--max-running-requests", str(NUM_ROWS)),
    *("--context-length", str(CONTEXT), "--spec-stack-draft-kv-budget", str(SLOTS)),
    *("--spec-stack-sparse-prefill", "draft_only"),
)


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file that says what fails now."""
    return tmp_path_factory.mktemp("faults") / "chosen"


@pytest.fixture(scope="module")
def slotted(launch: Any, faults: Path) -> Iterator[Server]:
    """The target drafts for itself, so that over the whole text it accepts all that it proposes."""
    environment = {"SPEC_STACK_TEST_COUNT_KV": "1", "SPEC_STACK_TEST_FAULTS": str(faults)}
    server = launch(*FLAGS, draft=ASSETS / "target", environment=environment)
    yield server
    server.stop()


def _accepted(replies: list[dict[str, Any]]) -> float:
    reports = [report_of(reply) for reply in replies]
    return sum(it["num_accepted"] for it in reports) / sum(it["num_proposed"] for it in reports)


def test_a_request_holds_as_few_slots_of_the_drafts_at_any_length(slotted: Server, reference: Reference) -> None:
    """Counted in the draft's buffers, which are empty at first."""
    before, counted = slotted.state()["draft_kv_budget"], []
    assert before["num_written"] == 0
    for num_tokens, seed in ((1000, 2), (2400, 3)):
        prompt = reference.text_ids(num_tokens, seed)
        reply = slotted.generate(prompt, 40, gamma=GAMMA)
        assert reply["output_ids"] == reference.tokens(prompt, max_new_tokens=40)
        counted.append(slotted.state()["draft_kv_budget"])
    assert [it["max_num_used"] for it in counted] == [SLOTS + 1, SLOTS + 1]
    # A request that comes later may have another row.
    first, second = (it["num_written"] for it in counted)
    assert SLOTS <= first <= before["num_per_request"]
    assert second <= 2 * before["num_per_request"]
    took = f"{before['num_bytes'] / 1e9:.2f} GB in all"
    said = f"the draft has {before['num_per_request']} slots of its own for each request, {took}"
    assert said in slotted.log.read_text(errors="replace")
    # The pool has room for its rows and for nothing else, whatever the target's has.
    assert before["num_slots"] <= (NUM_ROWS + 1) * before["num_per_request"] + 1 < 24000 / 3


def test_the_first_proposal_is_the_drafts_over_the_chosen_positions(slotted: Server, reference: Reference) -> None:
    """As plain Transformers drafts over them, the token after the prompt among them."""
    found, expected = [], []
    for seed in range(20, 26):
        prompt = reference.prompt(400 + 100 * seed % 700, seed)
        reply = slotted.generate(prompt, 12, gamma=GAMMA)
        chosen = [*choose_slots(prompt, SLOTS, 32, 32), len(prompt)]
        first, *others = reply["output_ids"]
        kept = [[*prompt, first][at] for at in chosen]
        drafted = sparse_greedy(reference.generator.target, kept, chosen, len(prompt) + 1, GAMMA)
        same = [mine == others[at] for at, mine in enumerate(drafted)]
        expected.append((*same, False).index(False))
        found.append(report_of(reply)["accepted_trace"][0])
    assert found == expected
    assert len(set(found)) > 1


def test_four_at_once_get_the_targets_tokens_while_their_slots_are_chosen_anew(
    slotted: Server, reference: Reference
) -> None:
    """Of prompts that the slots hold, and of others; one of them outgrows its slots while it is answered."""
    before = slotted.state()["draft_kv_budget"]
    prompts = [reference.prompt(num_tokens, 30 + at) for at, num_tokens in enumerate((100, 700, 1200, 1900))]
    num_new = 2 * RENEW_EVERY
    replies = slotted.generate_all([(prompt, {"max_new_tokens": num_new}) for prompt in prompts])
    for prompt, reply in zip(prompts, replies, strict=True):
        assert reply["output_ids"] == reference.tokens(prompt, max_new_tokens=num_new), len(prompt)
    after = slotted.state()["draft_kv_budget"]
    assert after["num_renewals"] - before["num_renewals"] >= 3 * (num_new // RENEW_EVERY - 1)
    assert after["num_restored"] > before["num_restored"]
    assert after["max_num_used"] <= SLOTS + RENEW_EVERY + 1
    assert _accepted(replies) > 0.2


def test_a_growing_conversation_keeps_the_targets_cache_and_its_tokens(slotted: Server, reference: Reference) -> None:
    slotted.flush()
    history: list[int] = []
    for turn in range(5):
        prompt = [*history, *reference.text_ids(60 + 70 * (turn % 3), seed=50 + turn)]
        reply = slotted.generate(prompt, 24)
        assert reply["output_ids"] == reference.tokens(prompt, max_new_tokens=24), turn
        # Of the newest token there may be no KV yet.
        assert len(history) - 1 <= reply["meta_info"]["cached_tokens"] <= len(history)
        history = [*prompt, *reply["output_ids"]]
    assert len(history) > 4 * SLOTS


def test_nothing_is_left_behind_by_aborts_and_an_emptied_cache(slotted: Server, reference: Reference) -> None:
    prompts = [reference.prompt(300 + 200 * at, seed=70 + at) for at in range(3)]
    for prompt in prompts:
        slotted.hang_up(prompt)
    slotted.flush()
    replies = slotted.generate_all([(prompt, {"max_new_tokens": 12}) for prompt in prompts])
    for prompt, reply in zip(prompts, replies, strict=True):
        assert reply["output_ids"] == reference.tokens(prompt)[:12]
    time.sleep(3)
    # Idle, SGLang compares what its pools hold with what they should, and ends itself if they differ.
    assert slotted.is_alive, slotted.tail()
    state = slotted.state()
    assert state["draft_kv_budget"]["num_written"] < state["draft_kv_budget"]["num_slots"]
    assert not state["num_failures"]


@pytest.mark.parametrize("fault", ["slots", "reading", "places", "lengths"])
def test_a_failure_costs_proposals_and_no_token(
    slotted: Server, reference: Reference, faults: Path, fault: str
) -> None:
    # Others for each fault: a row that is not read may still hold the text of who had it before.
    seed = 90 + 2 * ("slots", "reading", "places", "lengths").index(fault)
    prompts = [reference.prompt(num_tokens, seed=seed + at) for at, num_tokens in enumerate((500, 90))]
    faults.write_text(fault)
    try:
        replies = slotted.generate_all([(prompt, {"max_new_tokens": 16, "gamma": GAMMA}) for prompt in prompts])
    finally:
        faults.write_text("")
    for prompt, reply in zip(prompts, replies, strict=True):
        assert reply["output_ids"] == reference.tokens(prompt)[:16]
    assert _accepted(replies) < 0.2
    again = slotted.generate(prompts[1], 16, gamma=GAMMA)
    assert report_of(again)["num_accepted"] == report_of(again)["num_proposed"]


class _Nothing(torch.nn.Module):
    """Stands in for SGLang's model of the draft: no layers, and always the same logits."""

    def __init__(self) -> None:
        super().__init__()
        self.fails = False

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, batch: Any) -> Any:
        if self.fails:
            fail()
        return SimpleNamespace(next_token_logits=torch.zeros(len(batch.seq_lens), NUM_IDS))


@dataclass
class _PoolConfig:
    max_total_num_tokens: int = 0


def slotted_without_layers(num_rows: int) -> tuple[Any, _Nothing]:
    """A draft over slots whose model computes nothing, and that model."""
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

    from spec_stack.sglang.draft_kv_slots import DraftKVSlots

    model = _Nothing()
    runner = SimpleNamespace(
        model=model,
        dtype=torch.float32,
        device="cpu",
        model_config=SimpleNamespace(vocab_size=NUM_IDS, context_len=CONTEXT),
        attn_backend=SimpleNamespace(init_forward_metadata=lambda batch: None),
        kv_index_translator=None,
    )
    draft = DraftKVSlots(runner, CONFIG, GAMMA, num_rows, 0)
    target_rows = ReqToTokenPool(num_rows, CONTEXT, "cpu", enable_memory_saver=False)
    draft.pools(_PoolConfig(), target_rows)
    return draft, model


def batch_of(draft: Any, lengths: dict[int, int], num_said: int = 1) -> Any:
    """A batch of requests by row, each with so many tokens that the target has."""
    rows, seq_lens = torch.tensor(list(lengths)), torch.tensor(list(lengths.values()))
    requests = []
    for row, length in lengths.items():
        words = random.Random(row)
        prompt = [words.randrange(NUM_IDS) for _ in range(length + 1 - num_said)]
        requests.append(SimpleNamespace(origin_input_ids=prompt, output_ids=[1] * num_said, customized_info=None))
    return SimpleNamespace(
        reqs=requests,
        req_pool_indices=rows,
        req_pool_indices_cpu=rows,
        seq_lens=seq_lens,
        seq_lens_cpu=seq_lens,
        seq_lens_sum=int(seq_lens.sum()),
        out_cache_loc=torch.zeros(0, dtype=torch.int64),
        prefix_lens=[0] * len(lengths),
        extend_lens=list(lengths.values()),
        spec_info=draft.no_proposal(torch.ones(len(lengths), dtype=torch.int64)),
    )


def lengths_in_the_draft(draft: Any, batch: Any) -> tuple[list[int], list[int]]:
    """On the device and on the host, while the draft takes in a step's tokens, for each of which there is a slot."""
    with draft.catching_up(batch, GAMMA + 1):
        assert len(batch.out_cache_loc) == (GAMMA + 1) * len(batch.reqs)
        return batch.seq_lens.tolist(), batch.seq_lens_cpu.tolist()


def fail(*args: Any) -> None:
    raise RuntimeError("put out of action by a test")


def test_a_request_whose_slots_could_not_be_read_anew_begins_anew() -> None:
    draft, model = slotted_without_layers(1)
    batch = batch_of(draft, {0: 3000})
    draft.begin_step(batch)
    assert not draft.has_new(batch)
    words = random.Random(1)
    batch.reqs[0].output_ids += [words.randrange(NUM_IDS) for _ in range(RENEW_EVERY)]
    model.fails = True
    with pytest.raises(RuntimeError, match="by a test"):
        draft.begin_step(batch)
    assert draft.num_restored
    assert draft.has_new(batch)


def test_after_a_prefill_that_cannot_be_noted_every_request_begins_anew() -> None:
    draft, _ = slotted_without_layers(1)
    batch = batch_of(draft, {0: 3000})
    draft.begin_step(batch)
    draft.note_prefill(SimpleNamespace())
    assert draft.has_new(batch)
    draft.begin_step(batch)
    assert not draft.has_new(batch)


@pytest.mark.parametrize("num_done", [0, 1, 2])
def test_a_failed_choice_leaves_every_row_at_places_that_exist_and_the_next_one_is_right(
    monkeypatch: pytest.MonkeyPatch, num_done: int
) -> None:
    """Whichever of a batch's requests it fails at, and whoever had the rows before."""
    from spec_stack.sglang import draft_kv_slots
    from spec_stack.sglang.errors import num_failures

    draft, _ = slotted_without_layers(3)
    before, num_failed = batch_of(draft, {0: 3000, 1: 2000, 2: 3500}), num_failures()
    draft.note_prefill(before)
    draft.begin_step(before)
    assert max(lengths_in_the_draft(draft, before)[0]) < 1000
    new = batch_of(draft, {2: 500, 0: 100, 1: 90})
    draft.note_prefill(new)
    begun = [DraftKVRow.begin] * num_done

    class Failing(DraftKVRow):
        def begin(self, text_ids: Any) -> Any:
            return begun.pop()(self, text_ids) if begun else fail()

    monkeypatch.setattr(draft_kv_slots, "DraftKVRow", Failing)
    with pytest.raises(RuntimeError, match="by a test"):
        draft.begin_step(new)
    for lengths in lengths_in_the_draft(draft, new):
        assert min(lengths) >= 1
        assert max(lengths) + GAMMA < CONTEXT
    monkeypatch.undo()
    later = batch_of(draft, {2: 503, 0: 103, 1: 93}, num_said=4)
    draft.begin_step(later)
    texts = zip(later.reqs, later.seq_lens.tolist(), strict=True)
    known = [[*request.origin_input_ids, *request.output_ids][:num_tokens] for request, num_tokens in texts]
    expected = [len(DraftKVBudget.of(CONFIG).choose(text_ids)) + 1 for text_ids in known]
    assert lengths_in_the_draft(draft, later) == (expected, expected)
    assert num_failures() == num_failed


@pytest.mark.nightly
def test_retracted_requests_and_the_shipped_draft_get_the_targets_tokens(launch: Any, reference: Reference) -> None:
    """SGLang's own switch forces a retraction every few steps: prompt and answer are prefilled again."""
    server = launch(*FLAGS, environment={"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "6"})
    prompts = [reference.prompt(200 + 250 * at, seed=110 + at) for at in range(NUM_ROWS)]
    replies = server.generate_all([(prompt, {"max_new_tokens": 70}) for prompt in prompts])
    for prompt, reply in zip(prompts, replies, strict=True):
        assert reply["output_ids"] == reference.tokens(prompt, max_new_tokens=70), len(prompt)
    assert any(reply["meta_info"]["num_retractions"] for reply in replies)
    assert _accepted(replies) > 0.2
    assert not server.state()["num_failures"]
    server.stop()


@pytest.mark.nightly
def test_ranks_choose_alike(launch: Any, reference: Reference) -> None:
    server = launch(*FLAGS, "--tp-size", "2", environment={"SGLANG_CPU_OMP_THREADS_BIND": "0|1"})
    prompts = [reference.prompt(400 + 600 * at, seed=120 + at) for at in range(2)]
    replies = server.generate_all([(prompt, {"max_new_tokens": 50}) for prompt in prompts])
    for prompt, reply in zip(prompts, replies, strict=True):
        assert reply["output_ids"] == reference.tokens(prompt, max_new_tokens=50)
    assert not server.state()["num_failures"]
    server.stop()


@pytest.mark.nightly
@pytest.mark.parametrize("slots", [(), ("--spec-stack-draft-kv-budget", str(CONTEXT))], ids=["default", "longest text"])
def test_the_one_flag_is_enough_and_a_row_may_be_longer_than_the_longest_text(
    launch: Any, reference: Reference, slots: tuple[str, ...]
) -> None:
    """SGLang's limit of requests, which the slots are counted by, is settled at launch where nobody gives it."""
    sizes = ("--max-total-tokens", "12000", "--context-length", str(CONTEXT))
    server = launch(*sizes, "--spec-stack-sparse-prefill", "draft_only", *slots)
    prompt = reference.text_ids(1500, 5)
    reply = server.generate(prompt, 40, gamma=GAMMA)
    assert reply["output_ids"] == reference.tokens(prompt, max_new_tokens=40)
    assert _accepted([reply]) > 0.1
    num_slots = CONTEXT if slots else PrefillConfig.draft_kv_budget
    assert server.state()["draft_kv_budget"]["num_per_request"] > num_slots
    server.stop()
