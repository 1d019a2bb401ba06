"""The figures that the front pages show are those of experiments/results."""

from __future__ import annotations

import json

import pytest
from PIL import Image

from experiments.common import headlines, plot_overview
from tests.support.pages import ROOT, result


def front_page() -> list[str]:
    """Rows of the README's table: first tokens, evidence, answers, LongBench, decoding, HumanEval."""
    kept = result("evidence_shapes_qwen_2k")["whole"]
    shares = [kept["calibrated"][rate] for rate in ("0.1", "0.2")]
    others = [f"{kept[name]['0.1'][0]:.2f} / {kept[name]['0.2'][0]:.2f}" for name in ("default", "BM25", "paper")]
    ratios = [row["ttft_ratio"][0] for row in headlines.shipped(result("real_speed")).values()]
    answers = result("answers_positions_2k")["shapes"]["all"]["over_dense"]
    names = ("dense", "calibrated 0.1", "calibrated 0.2", "BM25 0.2")
    scores = {name: arm["share_of_dense"] for name, arm in result("longbench")["arms"].items()}
    live = {name: arm["speed_over_plain"] for name, arm in result("real_decode")["all"].items()}
    tasks = result("humaneval")
    mean, low, high = live["default"]
    return [
        f"**{' / '.join(f'{ratio:.2f}' for ratio in ratios)}×**",
        f"**{' / '.join(f'{mean:.2f} [{low:.2f}, {high:.2f}]' for mean, low, high in shares)}**",
        "; ".join(others),
        "; ".join(str(round(answers[name]["right"][0] * answers[name]["n"])) for name in names),
        f"{headlines.around(scores['default 0.2'])}; {scores['random 0.2'][0]:.2f}",
        f"**{mean:.2f}×** [{low:.2f}, {high:.2f}]; {live['draft'][0]:.2f}; {live['look-up 10'][0]:.2f}",
        f"{tasks['batched']['pass_at_1']:.3f}; {tasks['spec']['pass_at_1']:.3f}",
    ]


def test_the_front_page_shows_the_committed_figures() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [figure for figure in front_page() if f"| {figure} |" not in text] == []


@pytest.mark.parametrize(
    ("checkpoint", "name"),
    [
        ("qwen_1_5b", "Qwen2.5-Coder 1.5B"),
        ("qwen_0_5b", "Qwen2.5-Coder 0.5B"),
        ("smol_135m", "SmolLM2 135M (Llama)"),
        ("gemma_270m", "Gemma 3 270M (windows of 512)"),
    ],
)
def test_the_page_of_support_shows_what_pretrained_weights_answered(checkpoint: str, name: str) -> None:
    runs = [result(f"pretrained_{checkpoint}_{precision}") for precision in ("fp32", "bf16")]
    cells = [f"{own['same']['plain']} and {own['same']['speculation']} of {own['n']}" for own in runs]
    assert f"| {' | '.join([name, *cells])} |" in (ROOT / "docs" / "support.md").read_text(encoding="utf-8")


def test_the_picture_shows_the_committed_figures() -> None:
    with Image.open(ROOT / "docs" / "images" / "overview.png") as picture:
        shown = json.loads(picture.info["Description"])
    assert shown == json.loads(plot_overview.data(plot_overview.charts())), "run experiments/common/plot_overview.py"


def test_the_page_of_results_is_what_the_files_say() -> None:
    text = headlines.PAGE.read_text(encoding="utf-8")
    assert text == headlines.with_table(text, headlines.table()), "run python -m experiments.common.headlines"
