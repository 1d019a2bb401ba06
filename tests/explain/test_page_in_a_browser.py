"""The page as a person reads it: opened in a headless browser, clicked, and driven by keys."""

from __future__ import annotations

from typing import Any

import pytest

from spec_stack import PrefillConfig, SpecStackConfig, SpecStackGenerator
from spec_stack.explain.page import explain_live, render
from tests.support.browser import Page, find_browser

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_browser() is None, reason="no Chromium or Chrome is installed"),
]
DOCUMENT = "\n".join(f"def f{index}(x):\n    return x + {index}" for index in range(120))
QUESTIONS = [f"{DOCUMENT}\n\nWhat is f3 <b>of 1</b>?", "And f7?"]


@pytest.fixture(scope="module")
def explained() -> dict[str, Any]:
    generator = SpecStackGenerator.from_pretrained(
        device="cpu", precision="fp32", config=SpecStackConfig(PrefillConfig(min_prompt_tokens=64))
    )
    return explain_live(
        generator, source="s", pair="p", options={"max_tokens": 16}, messages=[], questions=QUESTIONS, compare=True
    )


@pytest.fixture(scope="module")
def address(explained: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("explain") / "page.html"
    path.write_text(render(explained), encoding="utf-8")
    return path.as_uri()


@pytest.mark.parametrize("width", [375, 1280])
def test_the_page_opens_at_the_answer(address: str, explained: dict[str, Any], width: int) -> None:
    turn = explained["turns"][0]
    with Page(address, width=width, height=700) as page:
        answer = "document.querySelector('.answer')"
        assert page.evaluate(f"{answer}.textContent") == "".join(token["text"] or "▪" for token in turn["answer"])
        assert page.evaluate(f"{answer}.getBoundingClientRect().bottom") < 350
        # Markup in a question is seen as it was written.
        assert page.text("h1") == "What is f3 <b>of 1</b>?"
        assert "From the whole prompt" in page.text(".answers")
        assert page.problems == []


def test_keys_and_the_legend_lead_to_kept_lines(address: str, explained: dict[str, Any]) -> None:
    press = "document.dispatchEvent(new KeyboardEvent('keydown', {{ key: '{}' }}))"
    seen = """(() => {
        const box = document.querySelector(".row.now").getBoundingClientRect();
        return box.top >= 0 && box.bottom <= innerHeight;
    })()"""
    with Page(address) as page:
        num_kept = page.evaluate("document.querySelectorAll('.row.kept').length")
        for key, place in [("n", 1), ("n", 2), ("p", 1), ("p", num_kept)]:
            page.evaluate(press.format(key))
            assert page.text("#where").startswith(f"kept line {place} of {num_kept}: ")
            assert page.evaluate(seen)
        for reason, number in explained["turns"][0]["tokens"].items():
            button = f'button[data-reason="{reason}"]'
            assert page.text(button).endswith(f" {number:,}")
            page.evaluate(f"document.querySelector('{button}').click()")
            assert reason in page.text("#where").split(": ")[1].split(", ")
            assert reason in page.text(".row.now .why")
        page.click(".text summary")
        assert page.evaluate("document.querySelector('.text details').open") is True
        page.click("#tabs button", 1)
        assert page.text("h1") == "And f7?"
        assert page.problems == []


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [375, 1280])
def test_the_page_fits_and_can_be_read_in_light_and_dark(address: str, width: int, dark: bool) -> None:
    with Page(address, width=width, height=844, dark=dark) as page:
        page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        # WCAG contrast of texts against what they stand on, their tint included.
        ratios = page.evaluate(
            """(() => {
                const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
                const paint = (...colours) => {
                    for (const colour of colours) { canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1); }
                    const parts = [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3).map((value) => value / 255)
                        .map((value) => (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4));
                    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
                };
                const card = getComputedStyle(document.querySelector("section")).backgroundColor;
                const read = "h1, .note, .legend b, .legend .sign, .answer b, .why div, .line span, mark, summary";
                return [...document.querySelectorAll(read)].slice(0, 3000).map((element) => {
                    const style = getComputedStyle(element);
                    const [ink, ground] = [paint(style.color), paint(card, style.backgroundColor)];
                    return (Math.max(ink, ground) + 0.05) / (Math.min(ink, ground) + 0.05);
                });
            })()"""
        )
        assert len(ratios) > 60
        assert min(ratios) >= 4.5
