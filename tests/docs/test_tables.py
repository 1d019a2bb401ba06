"""The tables of the pages about long contexts and serving are those of experiments/results."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from tests.support.pages import ROOT, result


def row(values: Iterable[str]) -> str:
    return f"| {' | '.join(values)} |"


def on_a_server() -> list[str]:
    arms = result("draft_slots_server")["parts"]["lengths"]
    rows = []
    for cell in arms["off"]:
        length, _, at_once = cell.partition(" x ")
        each = [own[cell] for own in arms.values()]
        assert all(own["as_off"] for own in each)
        *others, slots = (f"{own['tokens_per_s']:.1f}" for own in each)
        accepted = " / ".join(f"{100 * own['accepted']:.0f}" for own in each[1:])
        first = " / ".join(f"{own['ttft_s']:.1f}" for own in each)
        rows.append(row([f"{int(length):,} × {at_once}", *others, f"**{slots}**", f"{accepted} %", first]))
    return rows


def turns_of_a_real_pair() -> list[str]:
    rows = []
    for cell, own in result("real_pair")["turns"].items():
        length, turn = cell.split(", turn ")
        waits = [f"{own['SPEC_STACK']['ttft_s']:.1f}"]
        for arm in ("off", "STANDALONE"):
            middle, least, most = own[arm]["over_spec_stack"]
            waits.append(f"{own[arm]['ttft_s']:.1f} ({middle:.2f} [{least:.2f}, {most:.2f}])")
        right = ", ".join(str(own[arm]["right"]) for arm in ("SPEC_STACK", "off", "STANDALONE"))
        rows.append(row([f"{int(length):,}, {turn}", str(own["n"]), *waits, right]))
    return rows


def memory_of_a_real_pair() -> list[str]:
    held = {arm: f"{value / 1e3:.1f}" for arm, value in result("real_pair")["memory_mb"].items()}
    return [f"{held['SPEC_STACK']} GB, STANDALONE {held['STANDALONE']}, no speculation {held['off']}"]


def later_replies_of_a_real_pair() -> list[str]:
    partings = [one for own in result("real_pair_replies")["replies"].values() for one in own["partings"]]
    return [f"{sum(one is None for one in partings)} of {len(partings)}\nreplies of three turns each"]


def looked_up_live() -> list[str]:
    found = result("lookup_live")
    tasks = {name: arms for name, arms in found.items() if isinstance(arms, dict) and "own look-up" in arms}
    over = {name: arms["look-up 10 by 3-grams"]["cpu_s"] / arms["own look-up"]["cpu_s"] for name, arms in tasks.items()}
    of_all, own = over.pop("all"), tasks["all"]["own look-up"]
    speed, low, high = own["speed_over_plain"]
    assert own["same_tokens"] == found["num_prompts"] == 130
    return [
        f"**{sum(over.values()) / len(over):.2f}** times as",
        f"{of_all:.2f} over all; most {max(over.values()):.2f}",
        f"least {min(over.values()):.2f}",
        f"{speed:.2f} [{low:.2f}, {high:.2f}] times as fast as plain",
    ]


_TABLES = {
    "lookup": (looked_up_live,),
    "long-contexts": (on_a_server,),
    "serving": (turns_of_a_real_pair, memory_of_a_real_pair, later_replies_of_a_real_pair),
}


@pytest.mark.parametrize(("page", "rows"), [(page, each) for page, of_page in _TABLES.items() for each in of_page])
def test_a_page_has_the_committed_tables(page: str, rows: Any) -> None:
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    made = rows()
    assert made
    assert [each for each in made if each not in text] == []
