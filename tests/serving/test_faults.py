"""An exception in any hook costs at most the request that it was for, and is in the log with its traceback."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .conftest import Reference, Server
from .test_penalties import ask_penalised, expected_tokens

# By the end of what is hooked. A launch's arguments are read before there is a server.
BY_HOOK: dict[str, tuple[str, ...]] = {
    "ServerArgs.add_cli_args": (),
    "Scheduler._add_request_to_queue": ("deciding",),
    "Scheduler.get_next_batch_to_run": ("round", "setting aside", "scoring", "placing", "telling"),
    # Of a draft with slots of its own alone: `test_draft_slots.py`.
    "ForwardBatch.init_new": (),
    "TokenizerManager.__init__": ("options", "header", "stream"),
    "TokenizerManager.update_request_meta_info": ("report", "books"),
    "TokenizerManager.collect_metrics": ("counting",),
    "TokenizerManager._calculate_spec_decoding_metrics": ("acceptance",),
    "Scheduler.get_internal_state": ("state",),
}
OF_THE_WORKER = (
    *("choosing", "capping", "switching", "learning", "caps", "finding penalties", "penalties", "forgetting"),
)
# A round fails again and again, and of a kind of failure only the first tracebacks are logged: it is last.
FAULTS = (*(fault for faults in BY_HOOK.values() for fault in faults if fault != "round"), *OF_THE_WORKER, "round")
# The others of a hook that has several are left to the night.
FIRST = {*(faults[0] for faults in BY_HOOK.values() if faults), "scoring", "placing", "choosing", "penalties"}


def test_every_hook_is_put_out_of_action_and_a_launch_has_at_most_eight() -> None:
    from spec_stack.sglang.hooks import HOOKS, HOOKS_OF_DRAFTING, HOOKS_OF_KV_SLOTS, HOOKS_OF_SCORING_MODEL

    hooks = HOOKS | HOOKS_OF_DRAFTING | HOOKS_OF_KV_SLOTS
    assert {".".join(target.split(".")[-2:]) for target in hooks} == set(BY_HOOK)
    # A draft with slots of its own takes one more.
    assert len(HOOKS | HOOKS_OF_DRAFTING) <= 8
    assert len(HOOKS | HOOKS_OF_SCORING_MODEL) <= 8


@pytest.fixture(scope="module")
def chosen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file that says what fails now."""
    return tmp_path_factory.mktemp("faults") / "chosen"


@pytest.fixture(scope="module")
def faulty(launch: Any, chosen: Path) -> Iterator[Server]:
    environment = {"SPEC_STACK_TEST_FAULTS": str(chosen), "SPEC_STACK_SGLANG": '{"calibration": "none"}'}
    flags = ("--spec-stack-min-prompt-tokens", "400", "--enable-metrics", "--chunked-prefill-size", "256")
    # Prompts are checked, and any share is let pass.
    flags += ("--spec-stack-max-dropped-attention", "1")
    server = launch("--max-total-tokens", "8000", *flags, environment=environment)
    yield server
    server.stop()


def _ask(server: Server, reference: Reference) -> list[dict[str, Any]]:
    """Long prompts and a short one at once, one with a penalty; then OpenAI's clients. The tokens are right ones."""
    prompts = [reference.prompt(num_tokens, seed=500 + at) for at, num_tokens in enumerate((600, 450, 80, 90))]
    options: list[dict[str, Any]] = [{"sparse_prefill": "on"}, {}, {}, {"gamma": 2}]
    replies = server.generate_all(
        [(ids, {"max_new_tokens": 8, **it}) for ids, it in zip(prompts, options, strict=True)]
    )
    for prompt, reply in zip(prompts, replies, strict=True):
        right = [
            reference.tokens(prompt, max_new_tokens=8, sparse_prefill="on" if pruned else "off")
            for pruned in (False, True)
        ]
        assert reply["output_ids"] in right
    penalty = {"frequency_penalty": 0.5, "repetition_penalty": 1.1}
    reply = ask_penalised(server, prompts[2], 12, penalty)
    assert reply["output_ids"] == expected_tokens(reference, prompts[2], 12, penalty)
    text = reference.tokenizer.decode(prompts[2])
    body = {"model": "default", "prompt": text, "max_tokens": 4, "temperature": 0, "frequency_penalty": 0.5}
    assert server.post("/v1/completions", body)[0] == 200
    events = list(server.stream("/v1/completions", {**body, "stream_options": {"include_usage": True}}))
    assert events[-1]["usage"]["completion_tokens"] == 4
    server.flush()
    assert server.get("/server_info")["internal_states"]
    return replies


@pytest.mark.parametrize(
    "fault", [fault if fault in FIRST else pytest.param(fault, marks=pytest.mark.nightly) for fault in FAULTS]
)
def test_a_failure_costs_a_dense_prompt_or_a_number_and_never_the_server(
    faulty: Server, reference: Reference, chosen: Path, fault: str
) -> None:
    # Of the fault before nothing is known, so that the same prompts are scored again.
    faulty.flush()
    chosen.write_text(fault)
    try:
        _ask(faulty, reference)
    finally:
        chosen.write_text("")
    assert faulty.is_alive, faulty.tail()
    log = faulty.log.read_text(errors="replace")
    assert f"RuntimeError: put out of action by a test: {fault}" in log
    prompt = reference.prompt(500, seed=507)
    reply = faulty.generate(prompt, 4, sparse_prefill="on")
    assert reply["meta_info"]["spec_stack"]["outcome"] == "pruned"
    assert reply["output_ids"] == reference.tokens(prompt, max_new_tokens=4, sparse_prefill="on")
    assert faulty.state()["num_failures"]
