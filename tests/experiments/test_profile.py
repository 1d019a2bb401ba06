"""The profile of precisions: resumable records, honest differences, and what is made of the records."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from argparse import Namespace
from collections import Counter
from pathlib import Path

import pytest
import torch

from experiments.common.prompt_files import choose_prompts
from experiments.policies import bench_floor, profile_steps, train_controller
from experiments.speed import bench_lookup
from spec_stack import SpecStackGenerator, StepRecord
from spec_stack.controller.predictor import load_step_predictor
from spec_stack.controller.registry import make_policy
from spec_stack.offline.records import read_records
from tests.support import reference
from tests.support.controller_data import context

NUM_TOKENS = 28
SMALL = ["--precisions", "fp32", "nf4", "--gammas", "0", "2", "4", "--random", "1", "--per-task", "1"]
TINY = ["--precisions", "fp32", "--gammas", "0", "2", "--tokens", "8", "--per-task", "1"]


def run(script: object, *arguments: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["script", *map(str, arguments)])
    script.main()  # type: ignore[attr-defined]


def steps(records: list[StepRecord]) -> Counter[tuple[object, ...]]:
    return Counter((r.request_id, r.precision, r.policy, r.step, r.gamma, r.num_accepted) for r in records)


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("profile") / "profile.parquet"
    with pytest.MonkeyPatch.context() as patch:
        run(profile_steps, *SMALL, "--tokens", NUM_TOKENS, "--out", path, monkeypatch=patch)
    return path


@pytest.mark.slow
def test_every_prompt_runs_at_every_precision_and_gamma_once(profile: Path) -> None:
    records = read_records(profile)
    assert max(steps(records).values()) == 1
    runs = Counter((record.precision, record.policy) for record in records if record.step == 0)
    policies = ("fixed-0", "fixed-2", "fixed-4", "random-0")
    assert runs == {(precision, policy): 4 for precision in ("fp32", "nf4") for policy in policies}
    lengths: Counter[tuple[str, str, str]] = Counter()
    for record in records:
        lengths[record.request_id, record.precision, record.policy] += record.num_tokens
    assert set(lengths.values()) == {NUM_TOKENS}


@pytest.mark.slow
def test_an_interrupted_profile_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, path, blocks = tmp_path / "whole.parquet", tmp_path / "profile.parquet", []
    run(profile_steps, *TINY, "--out", whole, monkeypatch=monkeypatch)

    def interrupted(*arguments: object) -> object:
        blocks.append(arguments)
        if len(blocks) == 3:
            raise KeyboardInterrupt
        return run_block(*arguments)

    run_block = profile_steps.run_block
    with monkeypatch.context() as patch:
        patch.setattr(profile_steps, "run_block", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(profile_steps, *TINY, "--out", path, monkeypatch=patch)
    assert 0 < len(read_records(path)) < len(read_records(whole))
    run(profile_steps, *TINY, "--out", path, monkeypatch=monkeypatch)
    assert steps(read_records(path)) == steps(read_records(whole))

    with pytest.raises(ValueError, match="begun with other settings of tokens"):
        run(profile_steps, *TINY, "--tokens", "9", "--out", path, monkeypatch=monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(profile_steps, "pair_fingerprint", lambda target, draft: "another/edition")
        with pytest.raises(ValueError, match="begun with other settings of pair"):
            run(profile_steps, *TINY, "--out", path, monkeypatch=patch)
    path.with_suffix(".json").unlink()
    with pytest.raises(ValueError, match="give another --out"):
        run(profile_steps, *TINY, "--out", path, monkeypatch=monkeypatch)


def test_random_gammas_vary_within_a_run_and_are_the_same_in_every_one() -> None:
    drawn = [profile_steps.RandomGamma((1, 2, 4), 0, "code-0") for _ in range(2)]
    other = profile_steps.RandomGamma((1, 2, 4), 1, "code-0")
    choices = [[policy.choose(context()) for _ in range(30)] for policy in (*drawn, other)]
    assert set(choices[0]) == {1, 2, 4}
    assert choices[0] == choices[1] != choices[2]


def test_the_gap_where_two_texts_part_is_the_targets(embedded: SpecStackGenerator) -> None:
    ids = embedded.tokenizer("def read_lines(path):\n    ").input_ids
    plain = embedded.generate(input_ids=ids, gamma=0, max_tokens=10, ignore_eos=True).token_ids
    other = [*plain[:6], plain[6] + 1, *plain[7:]]
    logits = reference.logits(embedded.target, ids + plain[:6], range(len(ids) + 6))[-1]
    gap = profile_steps.gap_at(embedded, ids, plain, other, 6)
    assert gap == pytest.approx(float(logits[plain[6]] - logits[plain[6] + 1]), abs=1e-3)
    assert gap > 0


def test_a_block_tells_which_runs_part_from_plain_decoding(embedded: SpecStackGenerator) -> None:
    """A draft cannot change what a sound target says, so the target itself is made to change its mind."""
    arguments = Namespace(gammas=[0, 2], random=0, tokens=8, max_prompt_tokens=64)
    prompt = choose_prompts([], 1)[0]
    records, differences = profile_steps.run_block({"fp32": embedded}, prompt, "code-0", arguments)
    assert (len({record.policy for record in records}), differences) == (2, [])

    pair = SpecStackGenerator.from_pretrained(device="cpu", precision="fp32", prepack_linears=False)
    head = pair.target.lm_head.forward

    def changed_in_blocks(states: torch.Tensor) -> torch.Tensor:
        logits = head(states)
        return logits if states.shape[1] == 1 else logits.flip(-1)

    pair.target.lm_head.forward = changed_in_blocks  # type: ignore[method-assign]
    _, differences = profile_steps.run_block({"fp32": pair}, prompt, "code-0", arguments)
    assert [(each.policy, each.position) for each in differences] == [("fixed-2", 1)]
    assert differences[0].gap > 1
    assert not differences[0].is_tie


@pytest.mark.slow
def test_the_predictor_comes_from_the_file(profile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ["--policies", "random", "--folds", "2", "--out", tmp_path / "all", "--ship", tmp_path / "ship"]
    run(train_controller, profile, *options, monkeypatch=monkeypatch)
    assert load_step_predictor(tmp_path / "ship").card.num_prompts == 4
    assert make_policy("speckv", predictor=tmp_path / "ship").name == "speckv"


def test_the_projects_own_prompts_cover_the_four_categories() -> None:
    prompts = choose_prompts([], 6)
    assert Counter(prompt.task for prompt in prompts) == {"code": 6, "math": 6, "chat": 6, "summary": 6}
    assert len({prompt.text for prompt in prompts}) == 24


@pytest.mark.slow
def test_the_grid_for_a_card_runs_from_end_to_end_on_a_cpu(tmp_path: Path) -> None:
    script = Path(profile_steps.__file__).parents[1] / "runs" / "profile_grid_gpu.sh"
    small = {"SMALL": "1", "DEVICE": "cpu", "PRECISIONS": "fp32 int8", "TARGET": "", "OUT": str(tmp_path)}
    subprocess.run(["bash", str(script)], env={**os.environ, **small, "PYTHON": sys.executable}, check=True)
    replayed = json.loads((tmp_path / "profile_replay_gpu.json").read_text())["summary"]
    assert set(replayed) == {"fp32", "int8"}
    assert {"fixed-0", "best-fixed", "throughput", "speckv", "confidence"} <= set(replayed["int8"])


@pytest.mark.slow
def test_the_floor_and_the_look_ups_are_measured_from_end_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "line.json"
    run(bench_floor, "--num-prompts", 2, "--long", 300, "--repeats", 1, "--cases", 1, 3, "--out", out,
        monkeypatch=monkeypatch)  # fmt: skip
    rows = json.loads(out.read_text())["result"]
    assert len(rows) == 4
    assert all(len(row["plain_s"]) == len(row["ours_s"]) == 2 for row in rows.values())
    run(bench_lookup, "--copying", 1, "--tokens", 12, "--repeats", 1, "--out", out, monkeypatch=monkeypatch)
    line = json.loads(out.read_text())
    assert line["tasks"] == ["edit", "quote", "rewrite"]
    assert all(detail["prompts_with_other_tokens"] == 0 for detail in line["details"].values())
