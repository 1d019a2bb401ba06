"""Eight probes that sparse prefill could fail: by keep rate, dense beside, with time to first token.

After "SpecPrefill on unified memory": a UUID at 10, 50 and 90 % of the text, three values of an array of 80 JSON
records, a bug in code, a back-reference, a line in another language, an element of an XML document. A regression is a
probe that dense prefill passes and sparse does not. Prints a table, ends in one JSON line.
"""

from __future__ import annotations

import argparse
import json
import random
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

from tqdm import tqdm

from experiments.common.environment import describe
from experiments.common.pair_arguments import add_pair_arguments, load_generator
from experiments.common.script import run_script
from experiments.quality.held_out_texts import read_texts


@dataclass(frozen=True)
class Probe:
    """A document, a question after it, and what a right answer contains, all of it."""

    name: str
    document: str
    question: str
    answers: tuple[str, ...]


def _needle(depth: float) -> Callable[[list[str], random.Random], Probe]:
    def make(lines: list[str], rng: random.Random) -> Probe:
        code = str(uuid.UUID(int=rng.getrandbits(128)))
        hidden = list(lines)
        hidden.insert(round(depth * len(lines)), f"The access token of the archive is {code}.")
        return Probe(f"needle {depth:.0%}", "\n".join(hidden), "What is the access token of the archive?", (code,))

    return make


def _json(lines: list[str], rng: random.Random) -> Probe:
    rows = [
        {"id": index, "sensor": f"s{rng.randrange(10**4):04d}", "reading": rng.randint(1000, 9999)}
        for index in range(80)
    ]
    asked = rng.sample(rows, 3)
    named = ", ".join(str(row["id"]) for row in asked)
    document = "\n".join([*lines, "[", *(json.dumps(row) + "," for row in rows), "]"])
    answers = tuple(str(row["reading"]) for row in asked)
    return Probe("json", document, f"Give the readings of the records with the ids {named}.", answers)


def _bug(lines: list[str], rng: random.Random) -> Probe:
    name = f"total_{rng.randrange(1000)}"
    code = [
        f"def {name}(values):",
        "    result = 0",
        "    for value in values:",
        "        result = value",
        "    return result",
    ]
    at = rng.randrange(len(lines))
    question = f"The function {name} should add up its values. Which operator is missing in its loop?"
    return Probe("bug", "\n".join([*lines[:at], *code, *lines[at:]]), question, ("+=",))


def _back_reference(lines: list[str], rng: random.Random) -> Probe:
    name, number = rng.choice(("Orchard", "Lantern", "Saffron")), rng.randint(100, 999)
    first = f"Section {number} is called {name}."
    last = f"As was said of section {number}, its name is to be kept."
    document = "\n".join([first, *lines, last])
    return Probe("back-reference", document, f"What is the name that is to be kept, of section {number}?", (name,))


def _language(lines: list[str], rng: random.Random) -> Probe:
    town = rng.choice(("Lübeck", "Regensburg", "Tübingen"))
    at = rng.randrange(len(lines))
    line = f"Der Schlüssel zum Lager liegt in {town}."
    return Probe(
        "language", "\n".join([*lines[:at], line, *lines[at:]]), "In which town is the key to the store?", (town,)
    )


def _xml(lines: list[str], rng: random.Random) -> Probe:
    ids = rng.sample(range(100, 999), 40)
    ports = [rng.randint(2000, 9999) for _ in ids]
    entries = [f'  <server id="{each}"><port>{port}</port></server>' for each, port in zip(ids, ports, strict=True)]
    document = "\n".join([*lines, "<servers>", *entries, "</servers>"])
    return Probe("xml", document, f"What is the port of the server with the id {ids[20]}?", (str(ports[20]),))


MAKERS: tuple[Callable[[list[str], random.Random], Probe], ...] = (
    _needle(0.1),
    _needle(0.5),
    _needle(0.9),
    _json,
    _bug,
    _back_reference,
    _language,
    _xml,
)


def make_probes(tokenizer: Any, text: str, num_tokens: int, seed: int) -> list[Probe]:
    """All eight, in the first tokens of a text. Raises ValueError where it is too short."""
    ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    if len(ids) < num_tokens:
        raise ValueError(f"the text has {len(ids)} tokens, fewer than the {num_tokens} asked for")
    lines = tokenizer.decode(ids[:num_tokens]).split("\n")
    rng = random.Random(seed)
    return [make(lines, rng) for make in MAKERS]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_pair_arguments(parser)
    parser.add_argument("--tokens", type=int, default=8000, help="of the text around each probe (%(default)s)")
    parser.add_argument("--trials", type=int, default=2, help="(%(default)s)")
    parser.add_argument("--keep-rates", type=float, nargs="+", default=[0.1, 0.2, 1.0], help="(%(default)s)")
    parser.add_argument("--max-tokens", type=int, default=64)
    arguments = parser.parse_args()
    generator = load_generator(arguments)
    text = "\n".join(read_texts(None))
    rates = [rate for rate in arguments.keep_rates if rate < 1]
    passed: dict[str, dict[str, int]] = {}
    ttft: dict[str, list[float]] = {}
    regressions = dict.fromkeys(map(str, rates), 0)
    for trial in range(arguments.trials):
        offset = trial * 4 * arguments.tokens
        for probe in tqdm(make_probes(generator.tokenizer, text[offset:], arguments.tokens, trial), leave=False):
            messages = [{"role": "user", "content": f"{probe.document}\n\n{probe.question}"}]
            right: dict[str, bool] = {}
            for rate in [1.0, *rates]:
                name = "dense" if rate == 1 else str(rate)
                result = generator.generate(
                    messages=messages,
                    max_tokens=arguments.max_tokens,
                    keep_rate=rate,
                    sparse_prefill="on" if rate < 1 else "off",
                )
                right[name] = all(answer in result.text for answer in probe.answers)
                ttft.setdefault(name, []).append(result.metrics.ttft_s)
                counts = passed.setdefault(name, {})
                counts[probe.name] = counts.get(probe.name, 0) + right[name]
            for name in regressions:
                regressions[name] += right["dense"] and not right[name]
    for name, counts in passed.items():
        speed = median(ttft["dense"]) / median(ttft[name])
        row = "  ".join(f"{probe} {count}/{arguments.trials}" for probe, count in counts.items())
        lost = "" if name == "dense" else f", {regressions[name]} regressions"
        print(f"{name:6s} TTFT {median(ttft[name]):.2f} s ({speed:.2f}x){lost}:  {row}")
    line = {
        "experiment": "adversarial",
        **describe(),
        "tokens": arguments.tokens,
        "trials": arguments.trials,
        "passed": passed,
        "regressions": regressions,
        "ttft_s": {name: median(values) for name, values in ttft.items()},
    }
    print(json.dumps(line))


if __name__ == "__main__":
    run_script(main)
