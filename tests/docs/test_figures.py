"""The figures that the front pages show are those of experiments/results."""

from __future__ import annotations

import json

import pytest
from PIL import Image

from experiments.common import headlines, plot_overview, results
from tests.support.pages import ROOT, result


def latency() -> list[str]:
    found = next(length for length in result("prefill_grid")["lengths"] if length["prompt_tokens"] == 8036)
    paper, calibrated = (found["settings"][name] for name in ("default, keep 0.2", "calibrated"))
    spread = [f"{ratio:.1f}" for ratio in calibrated["ttft_ratio_range"]]
    return [f"{found['dense_s']:.2f}", f"{paper['ttft_ratio']:.1f}×", f"{calibrated['ttft_ratio']:.1f}×", *spread]


def test_the_page_of_results_shows_the_committed_figures_of_the_embedded_pair() -> None:
    text = (ROOT / "docs" / "results-real.md").read_text(encoding="utf-8")
    assert [figure for figure in latency() if figure not in text] == []
    published = result("as_published")
    assert f"{published['within']} of {published['cells']} cells" in text


def test_the_front_page_shows_the_committed_figures() -> None:
    """Evidence, answers, LongBench, HumanEval, first tokens by pair, decoding."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    kept = result("evidence_shapes_qwen_2k")["whole"]
    shares = [kept["calibrated"][rate] for rate in ("0.1", "0.2")]
    assert " / ".join(f"{mean:.2f} [{low:.2f}, {high:.2f}]" for mean, low, high in shares) in text
    others = [f"{kept[name]['0.1'][0]:.2f} / {kept[name]['0.2'][0]:.2f}" for name in ("default", "BM25", "paper")]
    assert ", ".join(others) in text
    ratios = [row["ttft_ratio"][0] for row in headlines.shipped(result("real_speed")).values()]
    assert " / ".join(f"{ratio:.2f}" for ratio in ratios) + "×" in text
    small = [length["calibrated 0.1"]["ttft_ratio"][0] for length in result("real_speed_smollm2")["lengths"].values()]
    assert " / ".join(f"{ratio:.2f}" for ratio in small) + "× / not run" in text
    smallest = result("evidence_calibrated_smollm2_2k")["recall"]["calibrated"]
    assert f"not run | {smallest['0.1'][0]:.2f} / {smallest['0.2'][0]:.2f} |" in text
    answers = result("real_answers")["arms"]
    names = ("dense", "default 0.2", "calibrated 0.1", "paper 0.2")
    assert f"| {', '.join(str(round(answers[name]['right'][0] * answers[name]['n'])) for name in names)} |" in text
    scores = result("longbench")["arms"]
    default, low, high = scores["default 0.2"]["share_of_dense"]
    others = [scores[name]["share_of_dense"][0] for name in ("calibrated 0.2", "BM25 0.2", "random 0.2")]
    assert f"| {default:.2f} [{low:.2f}, {high:.2f}], {', '.join(f'{each:.2f}' for each in others)} |" in text
    tasks = result("humaneval")
    assert f"| {tasks['batched']['pass_at_1']:.3f}, {tasks['spec']['pass_at_1']:.3f} |" in text
    live = {name: arm["speed_over_plain"] for name, arm in result("real_decode")["all"].items()}
    default, low, high = live["default"]
    assisted = max(arm[0] for name, arm in live.items() if name.startswith("assisted"))
    others = f"{live['draft'][0]:.2f}; {live['look-up 10'][0]:.2f}, {assisted:.2f} |"
    assert f"**{default:.2f}×** [{low:.2f}, {high:.2f}]; {others}" in text


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
    text = results.PAGE.read_text(encoding="utf-8")
    assert text == results.with_table(text, headlines.table()), "run python -m experiments.common.results"


def test_every_row_of_results_names_a_script_that_is_there() -> None:
    assert [row.run for row in headlines.ROWS if not (results.RUNS / f"{row.run}.sh").is_file()] == []


def test_the_page_of_results_begins_with_what_was_never_measured() -> None:
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    assert "No figure is from a GPU" in page[:600]
