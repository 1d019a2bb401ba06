"""The tables of the pages about long contexts and serving are those of experiments/results."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from tests.support.pages import ROOT, result


def named(cell: str) -> str:
    """A cell as pages name it: "8000 go on" is "8,000, goes on"."""
    length, _, kind = cell.partition(" ")
    return f"{int(length):,}, {kind.replace('go on', 'goes on')}"


def row(values: Iterable[str]) -> str:
    return f"| {' | '.join(values)} |"


def chosen_anew() -> list[str]:
    found = result("draft_choice")["result"]
    arms, kinds = ("full", "window", "attention", "once", "64, 8, 64"), ("go on", "quote", "topics")

    def cell(length: int, arm: str) -> str:
        shares = " / ".join(f"{100 * found[f'{length} {kind}'][arm]['right']:.0f}" for kind in kinds)
        return f"**{shares}**" if arm == arms[-1] else shares

    return [row([f"{n:,}", *(cell(n, arm) for arm in arms)]) for n in (1500, 2000, 4000, 8000)]


def by_length() -> list[str]:
    fixed, default = (result("decode_collapse")["pair_table"][policy] for policy in ("fixed", "default"))
    rows = []
    for cell, arms in fixed.items():
        speeds = {
            arm: f"{arms[arm]['over_plain']:.2f} / {default[cell][arm]['over_plain']:.2f}"
            for arm in ("full", "window", "words", "attention", "chosen")
        }
        speeds["chosen"] = f"**{speeds['chosen']}**"
        accepted = " / ".join(f"{100 * arms[arm]['acceptance_rate']:.0f}" for arm in ("full", "window", "chosen"))
        rows.append(row([named(cell), f"{arms['plain']['tokens_per_s']:.3g}", *speeds.values(), f"{accepted} %"]))
    return rows


def by_length_on_a_real_pair() -> list[str]:
    fixed, default = (result("decode_collapse_real")["pair_table"][policy] for policy in ("fixed", "default"))
    rows = []
    for cell, arms in fixed.items():
        values = [named(cell), f"{arms['plain']['tokens_per_s']:.2f}"]
        for own in (arms, default[cell]):
            for name in ("over_plain", "over_plain_with_reading"):
                values.append(f"{own['full'][name]:.2f} / **{own['chosen'][name]:.2f}**")
        full, chosen = arms["full"], arms["chosen"]
        values.append(f"{full['reads_s']:.1f} / {chosen['reads_s']:.1f}")
        values.append(f"{100 * full['acceptance_rate']:.0f} / {100 * chosen['acceptance_rate']:.0f} %")
        rows.append(row(values))
    return rows


def all_arms_on_a_real_pair() -> list[str]:
    rows = []
    for cell, arms in result("decode_collapse_real_fp32")["pair_table"]["fixed"].items():
        names = ("full", "window", "words", "attention", "chosen")
        speeds = [f"{arms[name]['over_plain']:.2f}" for name in names]
        speeds[-1] = f"**{speeds[-1]}**"
        reading = " / ".join(f"{arms[name]['over_plain_with_reading']:.2f}" for name in ("full", "words", "chosen"))
        accepted = " / ".join(f"{100 * arms[name]['acceptance_rate']:.0f}" for name in names)
        assert all(arms[name]["same_tokens"] == arms[name]["n"] == 2 for name in names)
        rows.append(row([named(cell), f"{arms['plain']['tokens_per_s']:.2f}", *speeds, reading, f"{accepted} %"]))
    return rows


def a_growing_conversation() -> list[str]:
    arms = result("growing_server")["parts"]["growing"]
    rows = []
    for turn, own in arms["off"].items():
        each = [of_arm[turn] for of_arm in arms.values()]
        assert all(one["as_off"] for one in each)
        *others, slots = (f"{one['tokens_per_s']:.1f}" for one in each)
        accepted = " / ".join(f"{100 * one['accepted']:.0f}" for one in each[1:])
        first = " / ".join(f"{one['ttft_s']:.2f}" for one in each)
        rows.append(
            row([f"{turn.split()[1]}, {own['num_tokens']:,.0f}", *others, f"**{slots}**", f"{accepted} %", first])
        )
    return rows


def given_answers() -> list[str]:
    found = result("real_slots")
    ranges = [
        f"({low:+.3f} to {high:+.3f})"
        for low, high in (found[arm]["accepted_over_full"] for arm in ("chosen", "window"))
    ]
    full, chosen, window = (f"{found[arm]['accepted']:.3f}" for arm in ("full", "chosen", "window"))
    return [
        f"{full} with the whole prompt, **{chosen}** with chosen slots {ranges[0]}",
        f"{window} with a window {ranges[1]}",
    ]


def by_size() -> list[str]:
    rows = []
    for length, own in result("decode_shapes")["random"]["table"].items():
        whole, slots, speeds = own["full"], own["chosen"], own["tokens_per_s"]
        steps = f"{1e3 * whole['target_1_s']:.0f} / {1e3 * whole['target_block_s']:.0f}"
        drafts = f"{1e3 * whole['draft_1_s']:.0f} / **{1e3 * slots['draft_1_s']:.0f}**"
        told = (f"{speeds['plain']:.2f}", f"{speeds['full']:.2f}", f"**{speeds['chosen']:.2f}**")
        rows.append(row([f"{int(length) // 1000}K", steps, drafts, *told]))
    return rows


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


def looked_up_in_texts() -> list[str]:
    rows = []
    for name in ("lookup_texts", "lookup_texts_real", "lookup_texts_sessions"):
        arms = result(name)["result"]
        for arm, shown in (("ours", "look-ups"), ("ours, with earlier answers", "with earlier answers")):
            own = arms[arm]
            over = dict(own["over_transformers"])
            mean, of_all = over.pop("mean"), over.pop("all")
            ends = (f"{over[task]:.2f} ({task})" for task in (max(over, key=over.get), min(over, key=over.get)))
            shared = own["accepted_per_step_by_source"]["earlier answers"]
            accepted = f"{own['accepted_per_step_all']:.2f}" + (f" ({shared:.2f})" if shared else "")
            # Behind the answers' name, which stands in the first of an answer's rows alone.
            rows.append(row([shown, f"**{mean:.2f}**", f"{of_all:.2f}", *ends, accepted]))
    return rows


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


def replayed_batches() -> list[str]:
    found = result("compare_batches")
    worlds = [found[world][size] for world in ("measured", "card") for size in ("batch 1", "batch 4", "batch 16")]
    rows = []
    for lag, shown in ((1, "`throughput`, lag 1"), (2, "lag 2")):
        rows.append(row([shown, *(f"{100 * own['rules'][f'throughput, lag {lag}']['gain']:+.1f}" for own in worlds)]))
    worst = min(own["rules"][f"throughput, lag {lag}"]["gain"] for own in worlds for lag in (1, 2))
    return [*rows, f"`throughput` stands within {-100 * worst:.1f} % of it"]


_TABLES = {
    "lookup": (looked_up_in_texts, looked_up_live),
    "long-contexts": (
        *(chosen_anew, by_length, by_length_on_a_real_pair, all_arms_on_a_real_pair),
        *(given_answers, by_size, on_a_server, a_growing_conversation),
    ),
    "results-embedded": (replayed_batches,),
    "serving": (turns_of_a_real_pair, memory_of_a_real_pair, later_replies_of_a_real_pair),
}


@pytest.mark.parametrize(("page", "rows"), [(page, each) for page, of_page in _TABLES.items() for each in of_page])
def test_a_page_has_the_committed_tables(page: str, rows: Any) -> None:
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    made = rows()
    assert made
    assert [each for each in made if each not in text] == []
