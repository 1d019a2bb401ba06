"""The example of lm-evaluation-harness; left out where lm-eval is not installed."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lm_eval", reason="lm-eval is not installed")

from lm_eval.api.registry import get_model

from examples.lm_eval_harness import SpecStackLM, sampling_of
from spec_stack.records import read_records
from tests.support.forwards import forwards_of, positions_of

TEXT = "\n".join(f"def f{index}(x):\n    return x + {index}" for index in range(60))


@dataclass
class Instance:
    args: tuple[Any, ...]
    task_name: str = "t"
    doc_id: int = 0
    extra: dict[str, Any] = field(default_factory=dict)


@pytest.fixture(scope="module")
def dense() -> SpecStackLM:
    return SpecStackLM(sparse_prefill="off", device="cpu", precision="fp32")


@pytest.fixture(scope="module")
def sparse() -> SpecStackLM:
    return SpecStackLM(sparse_prefill="on", keep_rate=0.3, device="cpu", precision="fp32")


def test_the_example_registers_the_model() -> None:
    assert get_model("spec_stack") is SpecStackLM


def test_a_dense_log_likelihood_is_the_targets_own(dense: SpecStackLM) -> None:
    # lm-eval moves a context's trailing blanks to the continuation, so these have none.
    pairs = [("def main():", "\n    return 0"), ("def main():", "\n    pass"), ("", "import os")]
    found = dense.loglikelihood([Instance(pair) for pair in pairs], disable_tqdm=True)
    target = dense.generator.target
    for (context, continuation), (value, is_greedy) in zip(pairs, found, strict=True):
        if context:
            whole, start = dense.tok_encode(context + continuation), len(dense.tok_encode(context))
        else:
            whole, start = [dense.prefix_token_id, *dense.tok_encode(continuation, add_special_tokens=False)], 1
        with torch.no_grad():
            rows = target(torch.tensor([whole])).logits[0].float().log_softmax(-1)[start - 1 : -1]
        ids = torch.tensor(whole[start:])
        assert value == pytest.approx(float(rows.gather(1, ids[:, None]).sum()), abs=1e-3)
        assert is_greedy == bool((rows.argmax(-1) == ids).all())


def test_a_sparse_log_likelihood_is_a_plain_forward_over_the_kept_tokens(sparse: SpecStackLM) -> None:
    question = TEXT + "\ndef f"
    with forwards_of(sparse.generator.target) as read:
        answer = sparse.loglikelihood([Instance((question, "7(x):"))], disable_tqdm=True)[0]
    ids = sparse.tok_encode(question)
    whole = sparse.tok_encode(question + "7(x):")
    kept = [position for position in positions_of(read) if position < len(ids)]
    assert 0 < len(kept) < len(ids)
    positions = [*kept, *range(len(ids), len(whole))]
    with torch.no_grad():
        logits = sparse.generator.target(
            torch.tensor([[whole[at] for at in positions]]), position_ids=torch.tensor([positions])
        ).logits[0]
    rows = logits.float().log_softmax(-1)[len(kept) - 1 : -1]
    expected = rows.gather(1, torch.tensor(whole[len(ids) :])[:, None]).sum()
    assert answer[0] == pytest.approx(float(expected), abs=1e-3)


def test_one_context_is_prefilled_once_for_all_of_its_choices(sparse: SpecStackLM) -> None:
    question, choices = TEXT + "\n\ndef f", ["7(x):", "8(x):", "9(y, z):"]
    with forwards_of(sparse.generator.target) as read:
        together = sparse.loglikelihood([Instance((question, choice)) for choice in choices], disable_tqdm=True)
    last = len(sparse.tok_encode(question)) - 1
    assert positions_of(read).count(last) == 1
    apart = []
    for choice in choices:
        # Another context in between.
        sparse.loglikelihood([Instance((TEXT, choice))], disable_tqdm=True)
        with forwards_of(sparse.generator.target) as read:
            apart += sparse.loglikelihood([Instance((question, choice))], disable_tqdm=True)
        assert positions_of(read).count(last) == 1
    assert together == [pytest.approx(value) for value in apart]


def test_answers_are_the_generators_and_their_steps_are_kept(tmp_path: Path) -> None:
    file = tmp_path / "steps.jsonl"
    model = SpecStackLM(sparse_prefill="on", keep_rate=0.3, device="cpu", precision="fp32", records=str(file))
    gen_kwargs = {"until": ["\n\n"], "max_gen_toks": 12, "do_sample": False, "temperature": 0.0}
    (answer,) = model.generate_until([Instance((TEXT + "\ndef f", gen_kwargs))], disable_tqdm=True)
    alone = model.generator.generate(TEXT + "\ndef f", max_tokens=12, stop="\n\n", sparse_prefill="on", keep_rate=0.3)
    assert answer == alone.text
    records = read_records(file)
    assert sum(record.num_tokens for record in records) == alone.metrics.num_tokens
    assert records[0].task == "t"
    assert records[0].keep_rate == alone.metrics.keep_rate < 1


def test_arguments_become_sampling_parameters_or_are_refused() -> None:
    assert sampling_of({"until": "\n", "max_gen_toks": 3}, 0).stop_strings == ("\n",)
    assert sampling_of({"do_sample": False, "temperature": 0.7}, 0).temperature == 0
    drawn = sampling_of({"do_sample": True, "temperature": 0.7, "top_p": 0.9, "max_new_tokens": 5}, 3)
    assert (drawn.temperature, drawn.top_p, drawn.seed, drawn.max_tokens) == (0.7, 0.9, 3, 5)
    with pytest.raises(ValueError, match="no counterpart of num_beams"):
        sampling_of({"num_beams": 4}, 0)
    with pytest.raises(ValueError, match="batch_size must be 1"):
        SpecStackLM(batch_size=8)


def test_a_chat_gets_one_bos(dense: SpecStackLM) -> None:
    text = dense.apply_chat_template([{"role": "user", "content": "Hello"}])
    ids = dense.tok_encode(text)
    assert ids.count(dense.tokenizer.bos_token_id) == 1
    assert ids == dense.tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hello"}], add_generation_prompt=True, return_dict=False
    )
