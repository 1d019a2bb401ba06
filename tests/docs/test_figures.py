"""The figures that the front pages show are those of experiments/results."""

from __future__ import annotations

import json

import pytest
from PIL import Image

from experiments.common import front_page, headlines, plot_overview
from tests.support.pages import ROOT


def test_the_front_page_has_the_table_of_the_committed_results() -> None:
    text = front_page.PAGE.read_text(encoding="utf-8")
    expected = headlines.with_table(text, front_page.table(), front_page.BEGIN, front_page.END)
    assert text == expected, "run python -m experiments.common.front_page"


def test_the_loss_in_the_front_pages_first_lines_is_the_tables() -> None:
    found, speed = headlines.load("evidence_shapes_qwen_2k"), headlines.load("real_speed")["lengths"]
    n = found["num_prompts"]
    lost = {
        rule: [round(n * (1 - found["whole"][rule][rate][0])) for rate in ("0.1", "0.2")]
        for rule in ("calibrated", "default")
    }
    default = sorted(f"{own['default 0.2']['ttft_ratio'][0]:.2f}" for own in speed.values())
    text = front_page.PAGE.read_text(encoding="utf-8")
    assert f"{lost['calibrated'][0]} of {n} prompts of manuals, logs and code lose evidence" in text
    sooner, decoding = speed["2048"]["calibrated 0.1"]["ttft_ratio"][0], headlines.load("real_decode")["all"]["default"]
    assert f"with 10 % kept the first token of a 2K prompt comes {sooner:.1f}× sooner" in text
    assert f"{decoding['speed_over_plain'][0]:.1f}× on short prompts" in text
    page = (ROOT / "docs" / "loss.md").read_text(encoding="utf-8")
    told = "of {} prompts of 2K, calibrated, {} with 10 % kept and {} with 20 %; uncalibrated {} and {}."
    assert told.format(n, *lost["calibrated"], *lost["default"]) in page
    whole = headlines.load("evidence_novels_2k")["whole"]
    novels = [round(n * (1 - whole[rule][rate][0])) for rule in ("calibrated", "default") for rate in ("0.1", "0.2")]
    assert f"lose evidence their answer needs, {novels[0]} of novels and meetings" in text
    assert "Of novels and meetings it is {} and {}; {} and {}.".format(*novels) in page
    without = speed["8192"]["calibrated 0.1"]["ttft_ratio"][0]
    assert f"a window of 512 ({without:.1f}× without)" in text
    pairs = (ROOT / "docs" / "faq.md").read_text(encoding="utf-8")
    assert f"| Qwen2.5-Coder 1.5B | Qwen2.5-Coder 0.5B | 3 | 2.4 | {sooner:.1f} |" in pairs
    assert f"Uncalibrated, 20 % kept: [{default[0]} to {default[-1]}×]" in text


def test_the_figures_are_of_the_settings_that_the_front_page_names() -> None:
    text = front_page.PAGE.read_text(encoding="utf-8")
    assert "bf16 on two AMD EPYC cores (rows 2 and 7: one)" in text
    for number, row in enumerate(front_page.ROWS, start=1):
        for name in row.files:
            result = headlines.load(name)
            assert "AMD EPYC" in result["machine"], name
            assert "--precision bf16" in result["command"], name
            assert result["threads"] == (1 if number in (2, 7) else 2), name
            assert ("--draft-window 512" in result["command"]) == (name.endswith("8k")), name


def test_the_front_page_says_how_many_answers_at_8k_are_of_shorter_texts() -> None:
    lines = (ROOT / "experiments" / "results" / "answers_8k_rows.jsonl").read_text(encoding="utf-8").splitlines()
    dense = [row for row in map(json.loads, lines) if row["arm"] == "dense"]
    shorter = sum(row["num_kept"] < 7_200 for row in dense)
    assert f"{shorter} of its answers are of texts under 7,200 tokens" in front_page.PAGE.read_text(encoding="utf-8")


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
    runs = [headlines.load(f"pretrained_{checkpoint}_{precision}") for precision in ("fp32", "bf16")]
    cells = [f"{own['same']['plain']} and {own['same']['speculation']} of {own['n']}" for own in runs]
    assert f"| {' | '.join([name, *cells])} |" in (ROOT / "docs" / "support.md").read_text(encoding="utf-8")


def test_the_picture_shows_the_committed_figures() -> None:
    with Image.open(ROOT / "docs" / "images" / "overview.png") as picture:
        shown = json.loads(picture.info["Description"])
    assert shown == json.loads(plot_overview.data(plot_overview.charts())), "run experiments/common/plot_overview.py"


def test_the_page_of_results_is_what_the_files_say() -> None:
    text = headlines.PAGE.read_text(encoding="utf-8")
    assert text == headlines.with_table(text, headlines.table()), "run python -m experiments.common.headlines"
