"""The page as a person reads it: opened in a headless browser, looked at, hovered over and clicked."""

from __future__ import annotations

import pytest

from spec_stack import PrefillConfig, SpecStackConfig, SpecStackGenerator
from spec_stack.explain.command import write_page
from spec_stack.explain.data import Explanation, RunView
from spec_stack.explain.observe import WatchedGenerator, watch_turns
from tests.support.browser import Page, find_browser

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_browser() is None, reason="no Chromium or Chrome is installed"),
]
DOCUMENT = "\n".join(f"def f{index}(x):\n    return x + {index}" for index in range(120))
QUESTIONS = [f"{DOCUMENT}\n\nWhat is f3 <b>of 1</b>?", "And f7?"]


@pytest.fixture(scope="module")
def shown() -> list[RunView]:
    config = SpecStackConfig(PrefillConfig(min_prompt_tokens=64))
    generator = SpecStackGenerator.from_pretrained(device="cpu", precision="fp32", config=config)
    watched = WatchedGenerator.over(generator)
    ways = {"sparse": None, "dense": False}
    return [watch_turns(watched, name, [], QUESTIONS, max_tokens=16, specprefill=way) for name, way in ways.items()]


@pytest.fixture(scope="module")
def address(shown: list[RunView], tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("explain") / "page.html"
    write_page(Explanation("A session, explained", {"pair": "embedded"}, shown), path)
    return path.as_uri()


def test_a_person_reads_the_answer_and_what_was_kept(address: str, shown: list[RunView]) -> None:
    with Page(address) as page:
        text = page.text()
        assert "A session, explained" in text
        turn = shown[0].turns[0]
        assert f"{turn.metrics['num_prompt_tokens']:,}" in text
        # Markup in a question is seen as it was written.
        assert "What is f3 <b>of 1</b>?" in text
        answer = "".join(token.text for token in turn.answer)
        assert page.evaluate("document.querySelector('.answer').textContent") == answer
        for writer in {token.writer for token in turn.answer}:
            expected = sum(token.writer == writer for token in turn.answer)
            selector = f'.run:first-child [data-writer="{writer}"]'
            assert page.evaluate(f"document.querySelectorAll('{selector}').length") == expected
        assert page.evaluate("document.querySelectorAll('.run:first-child svg[data-chart]').length") == 4
        assert "dense, measured" in text
        assert page.problems == []


def test_a_person_hovers_for_numbers_and_opens_what_is_folded(address: str, shown: list[RunView]) -> None:
    prompt = shown[0].turns[0].prompt
    assert prompt is not None
    with Page(address) as page:
        assert page.evaluate("document.getElementById('tip').hidden") is True
        page.hover(".text.prompt > span", 3)
        tip = page.text("#tip")
        assert "token 3 of" in tip
        assert prompt.importance is not None
        assert float(tip.split("importance ")[1].split("\n")[0]) == pytest.approx(prompt.importance[3], rel=0.01)
        before = len(page.text(".text.prompt"))
        page.click(".text.prompt summary")
        page.evaluate("new Promise((done) => setTimeout(done, 200))")
        assert len(page.text(".text.prompt")) > before
        page.hover(".answer b", 1)
        assert "accepted" in page.text("#tip")
        assert page.problems == []


def test_a_person_turns_to_the_second_turn_and_sees_what_is_cached(address: str, shown: list[RunView]) -> None:
    with Page(address) as page:
        assert "cached" not in page.text(".run .legend ~ .text")
        page.click(".tabs button", 1)
        assert page.evaluate("document.querySelector('.tabs button:nth-child(2)').ariaSelected") == "true"
        assert page.text(".run .question") == "And f7?"
        assert "cached from earlier turns" in page.text(".run")
        assert f"{shown[0].turns[1].metrics['num_new_tokens']:,}" in page.text(".run .tiles")


@pytest.mark.parametrize("dark", [False, True])
def test_the_page_fits_a_phone_and_can_be_read_in_light_and_dark(address: str, dark: bool) -> None:
    with Page(address, width=390, height=844, dark=dark) as page:
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        # WCAG contrast of the body text and of dropped tokens against the card they stand on.
        ratios = page.evaluate(
            """(() => {
                const parse = (colour) => colour.match(/[0-9.]+/g).slice(0, 3).map(Number);
                const light = (colour) => {
                    const parts = parse(colour).map((value) => value / 255)
                        .map((value) => (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4));
                    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
                };
                const card = light(getComputedStyle(document.querySelector(".run")).backgroundColor);
                const read = [...document.querySelectorAll(".question, .note, .answer b, .text .d")];
                return read.slice(0, 60).map((element) => {
                    const ink = light(getComputedStyle(element).color);
                    return (Math.max(ink, card) + 0.05) / (Math.min(ink, card) + 0.05);
                });
            })()"""
        )
        assert len(ratios) > 5
        assert min(ratios) >= 3.0
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (background == "rgb(18, 23, 22)") is dark
