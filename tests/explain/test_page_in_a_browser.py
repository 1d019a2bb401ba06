"""The page as a person reads it: opened in a headless browser, looked at, hovered over and clicked."""

from __future__ import annotations

from typing import Any

import pytest

from spec_stack import PrefillConfig, SpecStackConfig, SpecStackGenerator
from spec_stack.explain.observe import watch
from spec_stack.explain.page import render
from tests.support.browser import Page, find_browser

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_browser() is None, reason="no Chromium or Chrome is installed"),
]
DOCUMENT = "\n".join(f"def f{index}(x):\n    return x + {index}" for index in range(120))
QUESTIONS = [f"{DOCUMENT}\n\nWhat is f3 <b>of 1</b>?", "And f7?"]


@pytest.fixture(scope="module")
def shown() -> list[dict[str, Any]]:
    config = SpecStackConfig(PrefillConfig(min_prompt_tokens=64))
    generator = SpecStackGenerator.from_pretrained(device="cpu", precision="fp32", config=config)
    ways = {"sparse": None, "dense": "off"}
    return [watch(generator, name, [], QUESTIONS, max_tokens=16, sparse_prefill=way) for name, way in ways.items()]


@pytest.fixture(scope="module")
def address(shown: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("explain") / "page.html"
    data = {"title": "A session, explained", "about": {"pair": "embedded"}, "runs": shown}
    path.write_text(render(data), encoding="utf-8")
    return path.as_uri()


def test_a_person_reads_the_answer_and_what_was_kept(address: str, shown: list[dict[str, Any]]) -> None:
    with Page(address) as page:
        text = page.text()
        assert "A session, explained" in text
        turn = shown[0]["turns"][0]
        assert f"{turn['metrics']['num_prompt_tokens']:,}" in text
        # Markup in a question is seen as it was written.
        assert "What is f3 <b>of 1</b>?" in text
        answer = "".join(token["text"] for token in turn["answer"])
        assert page.evaluate("document.querySelector('.answer').textContent") == answer
        for writer in {token["writer"] for token in turn["answer"]}:
            expected = sum(token["writer"] == writer for token in turn["answer"])
            selector = f'.run:first-child [data-writer="{writer}"]'
            assert page.evaluate(f"document.querySelectorAll('{selector}').length") == expected
        assert page.evaluate("document.querySelectorAll('.run:first-child svg[data-chart]').length") == 4
        assert "dense, measured" in text
        assert page.problems == []


def test_a_person_hovers_for_numbers_and_opens_what_is_folded(address: str, shown: list[dict[str, Any]]) -> None:
    prompt = shown[0]["turns"][0]["prompt"]
    with Page(address) as page:
        assert page.evaluate("document.getElementById('tip').hidden") is True
        page.hover(".text.prompt > span", 3)
        tip = page.text("#tip")
        assert "token 3 of" in tip
        assert float(tip.split("importance ")[1].split("\n")[0]) == pytest.approx(prompt["importance"][3], rel=0.01)
        listed = [query["weight"] for query in prompt["queries"]]
        weights = (
            """[...document.querySelectorAll(".run:first-child .queries dt")].map((row) => Number(row.textContent))"""
        )
        assert page.evaluate(weights) == listed
        title = page.evaluate("document.querySelector('.run:first-child .text.prompt .q').title")
        assert float(title.removeprefix("scoring query, weight ")) in listed
        before = len(page.text(".text.prompt"))
        page.click(".text.prompt summary")
        page.evaluate("new Promise((done) => setTimeout(done, 200))")
        assert len(page.text(".text.prompt")) > before
        page.hover(".answer b", 1)
        assert "accepted" in page.text("#tip")
        assert page.problems == []


def test_a_person_turns_to_the_second_turn_and_sees_what_is_cached(address: str, shown: list[dict[str, Any]]) -> None:
    with Page(address) as page:
        assert "cached" not in page.text(".run .legend ~ .text")
        page.click(".tabs button", 1)
        assert page.evaluate("document.querySelector('.tabs button:nth-child(2)').ariaSelected") == "true"
        assert page.text(".run .question") == "And f7?"
        assert "cached from earlier turns" in page.text(".run")
        assert f"{shown[0]['turns'][1]['metrics']['num_new_tokens']:,}" in page.text(".run .tiles")


def test_a_legend_says_what_each_colour_and_line_means(address: str, shown: list[dict[str, Any]]) -> None:
    turn = shown[0]["turns"][0]
    with Page(address) as page:
        text = page.text(".run:first-child")
        assert "importance to the draft: 0" in text
        assert "a bar per line or chunk" in text
        writers = {token["writer"] for token in turn["answer"]}
        lines = page.evaluate(
            """Object.fromEntries([...document.querySelectorAll(".run:first-child .answer b")].map((token) => {
                const style = getComputedStyle(token);
                return [token.dataset.writer, [style.borderBottomStyle, style.borderBottomColor].join(" ")];
            }))"""
        )
        assert set(lines) == writers
        # A line of its own for each, and the same one in the legend.
        assert len(set(lines.values())) == len(writers)
        assert len({line.split(" ")[0] for line in lines.values()}) == len(writers)
        named = page.evaluate(
            """[...document.querySelectorAll(".run:first-child .legend b")].map((name) => {
                const style = getComputedStyle(name);
                return [style.borderBottomStyle, style.borderBottomColor].join(" ");
            })"""
        )
        assert sorted(named) == sorted(lines.values())
        # Dropped text differs from kept text by more than its colour.
        weight = "getComputedStyle(document.querySelector('.run:first-child .text.prompt .{}')).fontWeight"
        assert page.evaluate(weight.format("k")) != page.evaluate(weight.format("d"))


def test_every_chart_names_its_axis_and_its_unit(address: str) -> None:
    with Page(address) as page:
        axes = page.evaluate(
            """[...document.querySelectorAll(".run:first-child svg[data-chart]")].map((svg) =>
                [svg.getAttribute("aria-label"), [...svg.querySelectorAll("text")].map((text) => text.textContent)])"""
        )
        for title, labels in axes:
            assert "step" in labels
            has_unit = any(unit in title for unit in ("tokens", "probability", "bits"))
            assert has_unit or any(label.endswith((" s", " ms", " µs")) for label in labels)
        # No label is cut off by its picture.
        cut = page.evaluate(
            """[...document.querySelectorAll("svg[data-chart] text")].filter((text) => {
                const [label, frame] = [text.getBoundingClientRect(), text.ownerSVGElement.getBoundingClientRect()];
                return label.left < frame.left || label.right > frame.right || label.bottom > frame.bottom + 1;
            }).map((text) => text.textContent)"""
        )
        assert cut == []


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [390, 420])
def test_the_page_fits_a_phone_and_can_be_read_in_light_and_dark(address: str, width: int, dark: bool) -> None:
    with Page(address, width=width, height=844, dark=dark) as page:
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        # Nothing is wider than the card it stands in, but for charts, which scroll.
        wide = """[...document.querySelectorAll(".run *")].filter((element) => !element.closest(".scroll, details")
            && element.getBoundingClientRect().right > element.closest(".run").getBoundingClientRect().right)
            .map((element) => element.className.toString())"""
        assert page.evaluate(wide) == []
        # WCAG contrast of texts and tokens against what they stand on, their heat included.
        ratios = page.evaluate(
            """(() => {
                const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
                const paint = (...colours) => {
                    for (const colour of colours) { canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1); }
                    const parts = [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3).map((value) => value / 255)
                        .map((value) => (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4));
                    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
                };
                const card = getComputedStyle(document.querySelector(".run")).backgroundColor;
                const read = ".question, .note, .legend > span, .answer b, .text .d, .text .k, .text summary";
                return [...document.querySelectorAll(read)].slice(0, 3000).map((element) => {
                    const style = getComputedStyle(element);
                    const [ink, ground] = [paint(style.color), paint(card, style.backgroundColor)];
                    return (Math.max(ink, ground) + 0.05) / (Math.min(ink, ground) + 0.05);
                });
            })()"""
        )
        assert len(ratios) > 60
        assert min(ratios) >= 4.5
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (background == "rgb(18, 23, 22)") is dark
