"""Golden outputs: what the embedded pair answers, token for token, through everything that a user can call.

A change of the package's insides must not change them. `python -m tests.goldens.record` writes them anew where a change
of behaviour is meant. They hold for fp32 on one thread; nothing here depends on the clock or on installed sources.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from spec_stack import PrefillConfig, SessionConfig, SpecStackConfig, SpecStackGenerator, with_draft
from tests.support.clocks import counted_readings
from tests.support.forwards import forwards_of
from tests.support.models import make_model, make_tokenizer, random_prompt
from tests.support.nightly import others_nightly

EXPECTED = Path(__file__).with_name("expected.json")
# Every option whose name may change stands here, and nowhere else in this file.
DENSE: dict[str, Any] = {"sparse_prefill": "off"}
SPARSE: dict[str, Any] = {"sparse_prefill": "on"}
DRAFT_ONLY: dict[str, Any] = {"sparse_prefill": "draft_only"}
NGRAM: dict[str, Any] = {"proposer": "ngram"}
DRAFT_MODEL: dict[str, Any] = {"proposer": "model"}
DRAFT_BUDGET: dict[str, Any] = {"draft_kv_budget": 128, "min_prompt_tokens": 64}
ATTENTION_RULE: dict[str, Any] = {"on_scoring_failure": "raise"}
RECALL: dict[str, Any] = {"recall_threshold": 2.0, "max_recalled_chunks": 8}
RECALLED = "num_recalled_tokens"
METRICS = ("num_kept_tokens", "num_cached_tokens", RECALLED)
FROM_NGRAMS = "num_ngram_accepted"

CODE = "import os\n\n\ndef read_lines(path):\n    with open(path) as file:\n"
CHAT = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Where does Bruno live?"}]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["Ada", "Bruno"]},
        "is_old": {"type": "boolean"},
        "city": {"enum": ["Oslo", "Rome"]},
    },
    "required": ["name", "is_old", "city"],
    "additionalProperties": False,
}
SCENARIOS: dict[str, Callable[[], dict[str, Any]]] = {}
# Those that by day run in fixed shapes too.
STATIC = ("dense", "draft_kv_budget", "ngram_lookup", "session_of_three_turns_with_recall")
# How the pairs' steps run while a scenario does.
STEP: dict[str, Any] = {"draft_step": "auto"}
DEVICE: dict[str, Any] = {"device": "cpu"}
# Another device draws other random numbers, and a server's test is about its protocol.
ON_CPU_ALONE = ("sampled_with_a_seed", "stream_of_serve")


def scenario(function: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
    SCENARIOS[function.__name__] = function
    return function


def generator(**options: Any) -> SpecStackGenerator:
    """Over the embedded pair, by the defaults of `PrefillConfig` unless an option says otherwise."""
    return _generator(STEP["draft_step"], DEVICE["device"], **options)


@cache
def _generator(draft_step: str, device: str, **options: Any) -> SpecStackGenerator:
    config = SpecStackConfig(PrefillConfig(**ATTENTION_RULE, **options), session=SessionConfig(**RECALL))
    return _load(config, calibration=False)


def _load(config: SpecStackConfig | None = None, **options: Any) -> SpecStackGenerator:
    return SpecStackGenerator.from_pretrained(
        precision="fp32", config=config, prepack_linears=False, **options, **STEP, **DEVICE
    )


def document(num_functions: int = 32) -> str:
    """Code with two facts in it."""
    parts = [
        f"def load_{name}_{index}(path, size={index}):\n"
        f"    data = read(path, size + {3 * index})\n"
        f"    return {name}(data)"
        for index, name in enumerate(["table", "image", "index", "graph"] * (num_functions // 4))
    ]
    parts.insert(num_functions // 4, "The red code for Bruno is 48213.")
    parts.insert(3 * num_functions // 4, "The golden code for Elena is 90577.")
    return "\n\n".join(parts)


def question(name: str, colour: str) -> dict[str, str]:
    return {"role": "user", "content": f"What is the {colour} code for {name}?"}


def long_chat() -> list[dict[str, str]]:
    first = question("Bruno", "red")
    return [first | {"content": f"{document()}\n\n{first['content']}"}]


def kept_spans(target: PreTrainedModel, run: Callable[[], Any]) -> tuple[Any, list[list[int]]]:
    """What `run` returns, and the half-open spans of the prompt's positions that the target prefilled."""
    with forwards_of(target) as fed:
        result = run()
    positions: list[int] = []
    for each in fed:
        if not positions or each.positions[0] > positions[-1]:
            positions += each.positions
    spans: list[list[int]] = []
    for position in sorted(p for p in positions if p < result.metrics.num_prompt_tokens):
        if spans and spans[-1][1] == position:
            spans[-1][1] += 1
        else:
            spans.append([position, position + 1])
    return result, spans


def told(result: Any, metrics: tuple[str, ...] = ()) -> dict[str, Any]:
    if DEVICE["device"] == "cpu":
        step = "static" if STEP["draft_step"] == "static" else "eager (on a CPU"
        assert result.metrics.draft_step.startswith(step)
        assert result.metrics.target_step.startswith(step)
    return {"token_ids": result.token_ids, "text": result.text} | {
        name: getattr(result.metrics, name) for name in metrics
    }


@scenario
def dense() -> dict[str, Any]:
    return told(generator().generate(CODE, max_tokens=64, **DENSE))


@scenario
def dense_long_prompt() -> dict[str, Any]:
    return told(generator().generate(messages=long_chat(), max_tokens=24, gamma=4, **DRAFT_MODEL, **DENSE))


@scenario
def sparse() -> dict[str, Any]:
    pair = generator()
    result, spans = kept_spans(
        pair.target, lambda: pair.generate(messages=long_chat(), max_tokens=24, keep_rate=0.2, **SPARSE)
    )
    return told(result, METRICS) | {"kept_spans": spans}


@scenario
def sparse_as_in_the_paper() -> dict[str, Any]:
    pair = _load(SpecStackConfig(PrefillConfig.full_look_ahead(0.3)), calibration=False)
    result, spans = kept_spans(
        pair.target, lambda: pair.generate(messages=long_chat(), max_tokens=24, gamma=4, **SPARSE)
    )
    return told(result, METRICS) | {"kept_spans": spans}


@scenario
def sparse_by_the_shipped_calibration() -> dict[str, Any]:
    pair = _load()
    result, spans = kept_spans(pair.target, lambda: pair.generate(messages=long_chat(), max_tokens=24, **SPARSE))
    return told(result, METRICS) | {"kept_spans": spans}


@scenario
def ngram_lookup() -> dict[str, Any]:
    prompt = document(8) + "\n\n" + document(8)[:700]
    # How many are looked up depends on the clock.
    pair = _load(SpecStackConfig(PrefillConfig(**ATTENTION_RULE)), calibration=False)
    with counted_readings():
        result = pair.generate(prompt, max_tokens=96, gamma=6, **NGRAM, **DENSE)
    assert getattr(result.metrics, FROM_NGRAMS) > 0
    return told(result)


@scenario
def session_of_three_turns_with_recall() -> dict[str, Any]:
    messages: list[dict[str, str]] = []
    turns: list[dict[str, Any]] = []
    with generator().session() as session:
        for message in (long_chat()[0], question("Elena", "golden"), {"role": "user", "content": "Go on:\n" + CODE}):
            messages.append(message)
            options = {} if turns else SPARSE | {"keep_rate": 0.06}
            result = session.generate(messages=messages, max_tokens=20, gamma=4, **DRAFT_MODEL, **options)
            turns.append(told(result, METRICS))
            messages.append({"role": "assistant", "content": result.text})
    assert any(turn[RECALLED] for turn in turns)
    return {"turns": turns}


@scenario
def draft_kv_budget() -> dict[str, Any]:
    pair = generator(**DRAFT_BUDGET)
    options = {"messages": long_chat(), "max_tokens": 48, "gamma": 4, "return_records": True, **DRAFT_MODEL}
    result = pair.generate(**options, **DRAFT_ONLY)
    # The target's tokens do not depend on the budget; how many proposals it accepts does.
    return told(result, METRICS[:1]) | {"num_accepted": [step.num_accepted for step in result.records]}


@scenario
def cross_tokenizer_draft() -> dict[str, Any]:
    tokenizers = make_tokenizer("a b c d e f ab abc de cd", "<t>"), make_tokenizer("f e bc d abc c b ef a", "<s>")
    models = make_model(seed=1, vocab=16), make_model(seed=2, vocab=12)
    config = SpecStackConfig(PrefillConfig(chunk_size=8))
    pair = SpecStackGenerator(*models, tokenizers[0], config=config, draft_tokenizer=tokenizers[1], **STEP)
    text = "abcdefabccdefbadcbafedcabcab" * 8
    dense = pair.generate(text, max_tokens=40, gamma=3, **DENSE)
    result, spans = kept_spans(
        pair.target, lambda: pair.generate(text, max_tokens=40, gamma=3, keep_rate=0.4, **SPARSE)
    )
    return {"dense": told(dense), "sparse": told(result) | {"kept_spans": spans}}


@scenario
def sampled_with_a_seed() -> dict[str, Any]:
    options = {"temperature": 0.9, "top_p": 0.95, "top_k": 50, "repetition_penalty": 1.1, **DENSE}
    result = generator().generate(CODE, max_tokens=48, seed=7, n=2, **options)
    assert result.token_ids != result.others[0].token_ids
    return {"samples": [told(each) for each in result.choices]}


@scenario
def structured_output() -> dict[str, Any]:
    pytest.importorskip("llguidance")
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
    result = generator().generate(messages=CHAT, max_tokens=64, gamma=4, response_format=form, **DRAFT_MODEL)
    return told(result)


@scenario
def batch_through_custom_generate() -> dict[str, Any]:
    """Rows of random models, padded on the left, and rows of the embedded pair."""
    prompts = [random_prompt(length, seed=length) for length in (5, 12, 20)]
    ids = torch.tensor([[0] * (20 - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (20 - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    random = make_model(seed=1).generate(
        input_ids=ids,
        attention_mask=mask,
        max_new_tokens=24,
        do_sample=False,
        custom_generate=with_draft(make_model(seed=2)),
    )
    pair = generator()
    inputs = pair.tokenizer([CODE, CODE], return_tensors="pt")
    embedded = pair.target.generate(
        input_ids=inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        max_new_tokens=24,
        do_sample=False,
        custom_generate=with_draft(pair.pair.draft, gamma=4),
    )
    return {"random": random.tolist(), "embedded": embedded.tolist()}


@scenario
def stream_of_serve() -> dict[str, Any]:
    pytest.importorskip("fastapi")
    from starlette.testclient import TestClient

    from spec_stack.serve.app import build_app

    body = {"messages": CHAT, "temperature": 0, "max_tokens": 24, "stream": True}
    with (
        TestClient(build_app(generator())) as client,
        client.stream("POST", "/v1/chat/completions", json=body) as reply,
    ):
        lines = [line.removeprefix("data: ") for line in reply.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    choices = [choice for line in lines[:-1] for choice in json.loads(line)["choices"]]
    return {
        "text": "".join(choice["delta"].get("content") or "" for choice in choices),
        "finish_reason": choices[-1]["finish_reason"],
    }


@pytest.mark.parametrize(
    ("name", "draft_step"),
    others_nightly(
        product(SCENARIOS, ("auto", "static")),
        usual=[*((name, "auto") for name in SCENARIOS), *((name, "static") for name in STATIC)],
    ),
)
def test_the_output_is_the_golden_one(name: str, draft_step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(STEP, "draft_step", draft_step)
    assert SCENARIOS[name]() == json.loads(EXPECTED.read_text(encoding="utf-8"))[name]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("draft_step", ["eager", "static", "compiled"])
@pytest.mark.parametrize("name", [name for name in SCENARIOS if name not in ON_CPU_ALONE])
def test_a_gpu_gives_the_golden_tokens(name: str, draft_step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(STEP, "draft_step", draft_step)
    monkeypatch.setitem(DEVICE, "device", "cuda")
    assert SCENARIOS[name]() == json.loads(EXPECTED.read_text(encoding="utf-8"))[name]


def test_every_golden_has_its_scenario() -> None:
    assert json.loads(EXPECTED.read_text(encoding="utf-8")).keys() == SCENARIOS.keys()
