"""The page, read by a parser: always run, no browser needed."""

from __future__ import annotations

import json
import re
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from shutil import which
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spec_stack import PrefillConfig, SpecStackConfig, SpecStackGenerator
from spec_stack.cli.main import main
from spec_stack.controller.base import DraftSignals, StepRecord
from spec_stack.explain.page import explain_live, file_name, render, rows_of, writers_of, written
from spec_stack.prefill.explanation import Explanation, KeptSpan, ScoringQuery

HOSTILE = "</script><img src=x onerror=alert(1)><!-- {{data}} {{title}} & \u2028"
# Attributes that make a browser fetch something.
FETCHING = {"src", "href", "srcset", "action", "data", "poster", "background"}
DOCUMENT = "\n".join(f"def f{index}(x):\n    return x + {index}" for index in range(60))
QUESTION, FORMAT = "What does f17 return?", "Answer in one word.\nUse no punctuation.\nDo not explain."


class Reader(HTMLParser):
    """Tags in order, what would be fetched, and the text of the title and of each script."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.fetched: list[str] = []
        self.scripts: list[str] = []
        self.title = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.fetched += [value or "" for name, value in attributes if name in FETCHING]
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, text: str) -> None:
        if self.tags and self.tags[-1] == "script" and self.cdata_elem == "script":
            self.scripts[-1] += text
        if self.tags and self.tags[-1] == "title" and not self.title:
            self.title = text


def data_of(page: str) -> dict[str, Any]:
    shown: dict[str, Any] = json.loads(Reader(page).scripts[0])
    return shown


@pytest.fixture(scope="module")
def explained() -> dict[str, Any]:
    config = SpecStackConfig(PrefillConfig(min_prompt_tokens=64, on_scoring_failure="raise"))
    generator = SpecStackGenerator.from_pretrained(device="cpu", precision="fp32", config=config)
    texts = [f"{DOCUMENT}\n\n{QUESTION}\n\n{FORMAT}", "And what does f41?"]
    options = {"max_tokens": 8, "keep_rate": 0.3, "gamma": 3}
    return explain_live(
        generator, source="notes.py", pair="p", options=options, messages=[], questions=texts, compare=True
    )


def test_hostile_text_is_data_and_never_markup() -> None:
    turn = {"question": HOSTILE, "rows": [{"parts": [[HOSTILE, "ends", 0.5]], "tokens": 1, "heat": 1.0}]}
    explanation = {"title": HOSTILE, "about": {"prompt": HOSTILE, HOSTILE: HOSTILE}, "turns": [turn]}
    page = render(explanation)
    assert data_of(page) == explanation
    read = Reader(page)
    assert "img" not in read.tags
    assert read.tags.count("script") == 2
    assert read.title == f"{HOSTILE} ({HOSTILE})"


def test_the_page_loads_nothing(explained: dict[str, Any]) -> None:
    page = render(explained)
    read = Reader(page)
    assert read.fetched == []
    assert "link" not in read.tags
    without_data = page.replace(read.scripts[0], "")
    # The one address is the name of SVG's markup language, which nobody fetches.
    assert set(re.findall(r"https?://[^\s\"']+", without_data)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"\b(fetch|XMLHttpRequest|import|innerHTML|eval)\b", read.scripts[1])
    assert "@import" not in page
    assert "url(" not in page


def test_each_turn_shows_what_its_request_kept_and_the_script_knows_every_reason(explained: dict[str, Any]) -> None:
    script = Reader(render(explained)).scripts[1]
    first, second = explained["turns"]
    for turn in (first, second):
        metrics = turn["metrics"]
        assert sum(turn["tokens"].values()) == metrics["num_kept_tokens"]
        assert sum(row["tokens"] for row in turn["rows"]) == metrics["num_prompt_tokens"]
        assert "".join(token["text"] for token in turn["answer"]).startswith(turn["text"])
        assert sum(step["num_tokens"] for step in turn["steps"]) == metrics["num_tokens"]
        assert turn["dense"]["ttft_s"] > 0
        shown = {part[1] for row in turn["rows"] for part in row["parts"]} - {None}
        assert shown == set(turn["tokens"])
        for reason in shown:
            assert re.search(rf'^ +"?{reason}"?: \["', script, re.MULTILINE), reason
        assert max(row["heat"] for row in turn["rows"]) == 1
    # Instructions stand behind the question, which is found.
    assert (explained["title"], second["question"]) == (QUESTION, "And what does f41?")
    assert first["queries"][0]["weight"] == 1
    assert {"attention", "ends", "protected"} <= set(first["tokens"])
    assert {"cached", "dense"} <= set(second["tokens"])


def test_rows_are_the_lines_with_their_parts_and_mean_importance() -> None:
    tokens = ["ab", "c\n", "d", "", "e", "\n\n", "f"]
    explanation = Explanation(
        tokens,
        [KeptSpan(1, 4, "ends", 2), KeptSpan(7, 9, "attention", 1)],
        [ScoringQuery(4, 6, 0.5)],
        [4.0] * 3 + [1.0] * 4,
    )
    rows = rows_of(explanation)
    assert [row["parts"] for row in rows] == [
        [["a", None, 0], ["bc\n", "ends", 0]],
        [["de", None, 0.5], ["\n", None, 0]],
        [["\n", "attention", 0]],
        [["f", "attention", 0]],
    ]
    assert [row["tokens"] for row in rows] == [2, 4, 0, 1]
    assert [row["heat"] for row in rows] == pytest.approx([1.0, 0.67, 0.0, 0.5], abs=0.01)


def test_the_command_names_title_and_file_after_the_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.py").write_text(DOCUMENT)
    assert main(["explain", "--file", "notes.py", QUESTION, "--chat", "--sparse-prefill", "on", "--device", "cpu"]) == 0
    page = (tmp_path / "explain-notes-what-does-f17-return.html").read_text(encoding="utf-8")
    assert Reader(page).title == f"{QUESTION} (notes.py)"
    captured = capsys.readouterr()
    assert captured.out.strip() == data_of(page)["turns"][0]["text"].strip() != ""
    told = captured.err.splitlines()
    assert f"scoring query, weight 1.00: {QUESTION}" in told
    assert told[-1] == f"page: {tmp_path / 'explain-notes-what-does-f17-return.html'}"
    assert any("the embedded test pair answers" in line for line in told)
    assert main(["explain", "--file", "notes.py", QUESTION, "--quiet", "--out", "page.html", "--device", "cpu"]) == 0
    assert capsys.readouterr().err.splitlines() == [f"page: {tmp_path / 'page.html'}"]
    assert file_name("prompt", "../ ?/") == "explain-prompt.html"


def record(gamma: int, num_accepted: int, num_tokens: int | None = None, **more: Any) -> StepRecord:
    signals = DraftSignals([1.0] * gamma, [0.5] * gamma)
    num_tokens = num_accepted + 1 if num_tokens is None else num_tokens
    return StepRecord(
        "one", 1, "fixed", "fp32", "code", False, 0.25, gamma, num_accepted, num_tokens, signals, 0.1, 0.2, 0.0, **more
    )


@pytest.mark.parametrize(
    ("step", "writers"),
    [
        (record(2, 2), ["draft", "draft", "bonus"]),
        (record(2, 1), ["draft", "correction"]),
        (record(0, 0), ["plain"]),
        # A stop string inside the accepted run: the target's own token was never handed out.
        (record(4, 3, 2), ["draft", "draft"]),
        (record(5, 4, proposer="model+ngram", num_ngram_tokens=3), ["draft", "draft", "ngram", "ngram", "correction"]),
        (record(5, 1, proposer="model+ngram", num_ngram_tokens=3), ["draft", "correction"]),
        (record(2, 1, proposer="look-up"), ["look-up", "correction"]),
    ],
)
def test_the_writers_of_a_step(step: StepRecord, writers: list[str]) -> None:
    assert writers_of(step) == writers


@given(st.lists(st.integers(0, 6).flatmap(lambda gamma: st.tuples(st.just(gamma), st.integers(0, gamma))), min_size=1))
def test_every_token_has_one_writer_and_its_own_step(steps: list[tuple[int, int]]) -> None:
    records = [record(*each) for each in steps]
    tokens = written(records, ["a"] * sum(one.num_tokens for one in records))
    assert [token["step"] for token in tokens] == sorted(token["step"] for token in tokens)
    assert sum(token["writer"] == "draft" for token in tokens) == sum(one.num_accepted for one in records)
    with pytest.raises(ValueError, match="texts for"):
        written(records, [])


PROBE = """<script>
    const found = { problems: [] };
    addEventListener("error", (event) => found.problems.push(event.message));
    addEventListener("load", () => {
        const text = (selector) => document.querySelector(selector).textContent;
        const press = (key) => document.dispatchEvent(new KeyboardEvent("keydown", { key }));
        Object.assign(found, { title: text("h1"), answer: text(".answer") });
        found.kept = document.querySelectorAll(".row.kept").length;
        found.where = ["n", "n", "p", "p"].map((key) => { press(key); return text("#where").split(" ")[2]; });
        found.reasons = [...document.querySelectorAll("button[data-reason]")].map((button) => {
            button.click();
            return text("#where").split(": ")[1].split(", ").includes(button.dataset.reason);
        });
        document.querySelectorAll("#tabs button")[1].click();
        found.second = text("h1");
        document.title = JSON.stringify(found);
    });
</script>"""
BROWSER = which("chromium") or which("chromium-browser") or which("google-chrome")


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome is installed")
def test_in_a_browser_keys_and_the_legend_lead_to_kept_lines(explained: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text(render(explained).replace("<head>", f"<head>{PROBE}"), encoding="utf-8")
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=9000", "--dump-dom"]
    command = [str(BROWSER), *flags, f"--user-data-dir={tmp_path / 'profile'}", path.as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout
    found = json.loads(Reader(shown).title)
    first = explained["turns"][0]
    assert found["problems"] == []
    assert (found["title"], found["second"]) == (QUESTION, "And what does f41?")
    assert found["answer"] == "".join(token["text"] or "▪" for token in first["answer"])
    assert found["where"] == ["1", "2", "1", str(found["kept"])]
    assert found["reasons"] == [True] * len(first["tokens"])
