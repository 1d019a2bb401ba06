"""Scoring models that SGLang's runner does not run: the Transformers backend scores in the scheduler's process."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3_5TextConfig

from spec_stack import PrefillConfig
from spec_stack.engine.pair import ModelPair
from spec_stack.hf.attention import install
from spec_stack.hf.model import CachedModel
from spec_stack.prefill.rule import ScoringInputs
from spec_stack.prefill.scoring import gather_inputs
from spec_stack.prefill.selection import select
from spec_stack.types import Proposal
from tests.support.retokenize import TOKENIZER_FILES, drop_merges

from .conftest import ASSETS, CONTEXT, MIN_PROMPT_TOKENS, Reference, Server, generate_body, special_spans
from .test_serving import kept_ids

_SIZES = (
    *("--max-total-tokens", "16000", "--chunked-prefill-size", "256", "--context-length", str(CONTEXT)),
    *("--spec-stack-min-prompt-tokens", str(MIN_PROMPT_TOKENS)),
)
# A failing scoring costs a dense prefill here; elsewhere in these tests it ends the server.
_GOES_ON = {"SPEC_STACK_SGLANG": '{"calibration": "none"}'}
_CONFIG = PrefillConfig(min_prompt_tokens=MIN_PROMPT_TOKENS)


def _kept(draft: Any, reference: Reference, prompt: list[int], tokenization: Any = None) -> list[int]:
    """The tokens that Python keeps by this draft, which reads the prompt at once."""
    protected = [(start, stop) for start, stop in special_spans(prompt)]
    pieces = reference.generator.pair.pieces(prompt)
    unscored = ScoringInputs(prompt, protected=protected, pieces=pieces)
    inputs, _ = gather_inputs(draft, unscored, lambda *_: Proposal(), _CONFIG, tokenization)
    return list(select(inputs, _CONFIG, protected).token_ids)


def _check(server: Server, reference: Reference, prompt: list[int], kept: list[int]) -> None:
    """The prompt is pruned to these tokens."""
    reply = server.generate(prompt, 12, explain=True)
    report = reply["meta_info"]["spec_stack"]
    assert [prompt[at] for start, stop in report["kept_spans"] for at in range(start, stop)] == kept
    assert report["outcome"] == "pruned"
    assert reply["output_ids"] == reference.tokens(kept, max_new_tokens=12)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3.5 with the embedded target's tokenizer."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    config = Qwen3_5TextConfig(
        **{"vocab_size": 4096, "hidden_size": 64, "intermediate_size": 96, "max_position_embeddings": CONTEXT},
        **{**heads, **linear, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
        **{"num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2},
        **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
    )
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(std=0.3)
    folder = tmp_path_factory.mktemp("hybrid")
    model.save_pretrained(folder)
    for name in TOKENIZER_FILES:
        shutil.copy(ASSETS / "target" / name, folder)
    return folder


def test_a_hybrid_scores_prompts(launch: Any, reference: Reference, hybrid: Path) -> None:
    server = launch(*_SIZES, beside=(), draft=hybrid)
    assert server.state()["scoring_backend"].startswith("transformers, since SGLang's runner does not")
    log = server.log.read_text(errors="replace")
    assert "scoring backend: transformers, since SGLang's runner does not" in log
    assert "the draft's own KV pool: 65536 tokens" in log
    model = AutoModelForCausalLM.from_pretrained(hybrid, dtype=torch.float32).eval()
    install(model)
    prompt = reference.prompt(900, seed=42)
    _check(server, reference, prompt, _kept(CachedModel(model, 8192), reference, prompt))
    # Its state is no prefix of another prompt's.
    assert server.state()["draft_pool"]["num_held"] == 0
    server.stop()


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded draft with another tokenizer."""
    folder = tmp_path_factory.mktemp("other")
    drop_merges(ASSETS / "draft", folder, share=0.4, seed=0, tokenizer_from=ASSETS / "target")
    return folder


@pytest.fixture(scope="module")
def foreign(launch: Any, other: Path) -> Iterator[Server]:
    """A server whose scoring model has another tokenizer."""
    server = launch(*_SIZES, beside=(), draft=other, environment=_GOES_ON)
    yield server
    server.stop()


def test_a_model_with_another_tokenizer_scores_prompts(foreign: Server, reference: Reference, other: Path) -> None:
    pair = ModelPair.load(ASSETS / "target", other, device="cpu", precision="fp32", prepack_linears=False)
    prompt = reference.prompt(900, seed=42)
    tokenization, _ = pair.tokenize_for_draft(prompt)
    draft = pair.draft_in_target_vocab(pair.new_draft_cache(8192), tokenization)
    _check(foreign, reference, prompt, _kept(draft, reference, prompt, tokenization))
    assert "another tokenizer" in foreign.state()["scoring_backend"]
    follow_up = foreign.generate([*prompt, *reference.text_ids(40, seed=43)], 4, follow_up="recall")
    report = follow_up["meta_info"]["spec_stack"]
    # The KV of the first turn is there.
    assert report["num_scored_tokens"] > 500 > 100 > report["num_draft_tokens"]


def test_a_prompt_with_half_a_character_is_scored(foreign: Server, reference: Reference) -> None:
    half_a_character = reference.tokenizer.convert_tokens_to_ids("\u00c3")
    prompt = reference.prompt(600, seed=44)
    prompt.insert(300, half_a_character)
    report = foreign.generate(prompt, 8)["meta_info"]["spec_stack"]
    assert (report["outcome"], report["sparse_prefill"]) == ("pruned", True)


def test_running_requests_get_tokens_while_it_scores(foreign: Server, reference: Reference) -> None:
    arrivals: list[float] = []

    def stream() -> None:
        for _ in foreign.stream("/generate", generate_body(reference.prompt(60, seed=40), 300)):
            arrivals.append(time.monotonic())

    running = threading.Thread(target=stream)
    running.start()
    while len(arrivals) <= 5 and running.is_alive():
        time.sleep(0.01)
    prompt = reference.prompt(2800, seed=46)
    begun = time.monotonic()
    reply = foreign.generate(prompt, 1)
    ended = time.monotonic()
    running.join()
    assert reply["meta_info"]["spec_stack"]["num_scored_tokens"] == len(prompt)
    # A decode step after each of eleven parts or more.
    assert sum(begun < arrival < ended for arrival in arrivals) >= 9


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("arguments", "environment"), [((), {}), (("--tp-size", "2"), {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"})]
)
def test_both_backends_keep_the_same_tokens(
    launch: Any, reference: Reference, arguments: tuple[str, ...], environment: dict[str, str]
) -> None:
    prompt = reference.prompt(900, seed=42)
    kept = kept_ids(reference, prompt, _CONFIG)
    for backend in ("transformers", "sglang"):
        flags = (*_SIZES, "--spec-stack-scoring-backend", backend, *arguments)
        server = launch(*flags, beside=(), environment=environment)
        assert server.state()["scoring_backend"].startswith(f"{backend}, since")
        _check(server, reference, prompt, kept)
        server.stop()


@pytest.mark.nightly
def test_a_gguf_file_scores_prompts(launch: Any, reference: Reference, tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="transformers unpacks GGUF files with it")
    from tests.support.gguf_files import make_qwen2, write_gguf

    write_gguf(make_qwen2(4096, max_positions=2048), tmp_path / "draft.gguf", ASSETS / "target" / "tokenizer.json")
    sizes = (*_SIZES, "--context-length", "512", "--spec-stack-min-prompt-tokens", "200")
    server = launch(*sizes, beside=(), draft=tmp_path / "draft.gguf")
    assert "is a GGUF file" in server.state()["scoring_backend"]
    assert server.generate(reference.prompt(220, seed=47), 4)["meta_info"]["spec_stack"]["outcome"] == "pruned"
    server.stop()


@pytest.mark.nightly
def test_a_hybrid_does_not_draft(launch: Any, hybrid: Path) -> None:
    server = launch(draft=hybrid, wait=False)
    assert server.exit_code(180) != 0
    assert "SPEC_STACK cannot draft with a qwen3_5_text model" in server.log.read_text(errors="replace")
