"""JSON by a schema: how much of it is valid, how fast it comes, and what logits processors cost per step.

Arms, on the same prompts with the same compiled grammar, interleaved prompt by prompt:

    transformers   plain `generate` of a model of its own, with xgrammar's mask as a logits processor
    plain          the generator without speculation
    speculation    the generator with its default policy
    free           speculation without a grammar, for the cost of it (other text, as long)

Then the cost of a processor: greedy text without and with one that changes nothing, without speculation; and how long
the mask and a copy of the matcher take. Prints a table, ends in one JSON line. "valid" is judged by parsing the answer
and checking it by hand, field by field.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, LogitsProcessorList, PreTrainedModel

from experiments.common.environment import describe
from experiments.common.pair_arguments import add_pair_arguments, load_generator
from experiments.common.report import add_out_argument, print_report
from experiments.common.script import run_script
from spec_stack import SpecStackGenerator
from spec_stack.hf.processors import Processor
from spec_stack.hf.structured import Grammar

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 10},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "colours": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 1, "maxItems": 3},
        "is_member": {"type": "boolean"},
    },
    "required": ["name", "age", "colours", "is_member"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
NAMES = ("Alice", "Bob", "Carla", "David", "Emma", "Frank", "Grace", "Henry", "Irene", "Jack")


def is_valid(text: str) -> bool:
    """Return whether an answer fits the schema, without the library that made it."""
    try:
        answer = json.loads(text)
    except ValueError:
        return False
    return (
        isinstance(answer, dict)
        and set(answer) == set(SCHEMA["required"])
        and isinstance(answer["name"], str)
        and len(answer["name"]) <= 10
        and type(answer["age"]) is int
        and 0 <= answer["age"] <= 150
        and isinstance(answer["colours"], list)
        and 1 <= len(answer["colours"]) <= 3
        and set(answer["colours"]) <= {"red", "green", "blue"}
        and isinstance(answer["is_member"], bool)
    )


class MaskProcessor:
    """The mask for transformers' `generate`: one matcher, taken forward by the last token, as xgrammar's own does."""

    def __init__(self, grammar: Grammar) -> None:
        self._grammar = grammar

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return self._grammar.mask(input_ids[0].tolist(), scores.clone())


class Idle:
    """A processor that changes nothing, and is copied for the draft."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores


def prompts_of(num: int) -> list[list[dict[str, str]]]:
    text = "Describe {name} number {number} as JSON with name, age, colours and is_member."
    return [
        [{"role": "user", "content": text.format(name=NAMES[number % len(NAMES)], number=number)}]
        for number in range(num)
    ]


def by_transformers(
    generator: SpecStackGenerator, plain: PreTrainedModel, messages: Sequence[dict[str, str]], max_tokens: int
) -> tuple[str, int, float]:
    tokenizer = generator.tokenizer
    started = perf_counter()
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    grammar = generator.pair.grammars.compile(FORMAT, generator.pair.end_ids, len(prompt))
    if grammar is None:
        raise ValueError("the format asks for nothing")
    ids = torch.tensor([prompt], device=plain.device)
    output = plain.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=max_tokens,
        logits_processor=LogitsProcessorList([MaskProcessor(grammar)]),
    )
    answer = output[0, len(prompt) :].tolist()
    return tokenizer.decode(answer, skip_special_tokens=True), len(answer), perf_counter() - started


def by_generator(generator: SpecStackGenerator, **options: Any) -> tuple[str, int, float]:
    started = perf_counter()
    result = generator.generate(**options)
    return result.text, len(result.token_ids), perf_counter() - started


def processor_cost(generator: SpecStackGenerator, repeats: int) -> dict[str, float]:
    """Microseconds per step that a processor adds: medians of differences of interleaved runs."""
    text = "def read_lines(path):\n    with open(path) as file:\n"
    several: list[Processor] = [Idle(), Idle(), Idle()]
    arms: dict[str, dict[str, Any]] = {
        "none": {},
        "idle": {"logits_processor": Idle()},
        "three_idle": {"logits_processor": several},
        "repetition_penalty": {"repetition_penalty": 1.0001},
    }
    costs: dict[str, dict[str, list[float]]] = {arm: {"plain": [], "speculation": []} for arm in arms}
    for repeat in range(repeats + 1):
        for arm, more in arms.items():
            for mode, gamma in (("plain", 0), ("speculation", 4)):
                started = perf_counter()
                result = generator.generate(text, max_tokens=100, ignore_eos=True, gamma=gamma, **more)
                if repeat:
                    costs[arm][mode].append((perf_counter() - started) / result.metrics.num_steps * 1e6)
    return {
        f"{arm}_{mode}_us": median(a - b for a, b in zip(times, costs["none"][mode], strict=True))
        for arm, modes in costs.items()
        for mode, times in modes.items()
        if arm != "none"
    }


def grammar_cost(generator: SpecStackGenerator, messages: Sequence[dict[str, str]]) -> dict[str, float]:
    """Median microseconds of a row's mask, of a copy of the matcher, and of compiling a schema anew."""
    answer = generator.generate(messages=messages, max_tokens=120, response_format=FORMAT).token_ids
    masks, forks, compiles = [], [], []
    for number in range(5):
        varied = json.loads(json.dumps(SCHEMA))
        varied["properties"]["name"]["maxLength"] = 11 + number
        form = {"type": "json_schema", "schema": varied}
        started = perf_counter()
        grammar = generator.pair.grammars.compile(form, generator.pair.end_ids, 1)
        compiles.append(perf_counter() - started)
        if grammar is None:
            raise ValueError("the format asks for nothing")
        for end in range(len(answer)):
            scores = torch.zeros(1, generator.pair.vocab_size)
            started = perf_counter()
            grammar.mask([0, *answer[:end]], scores)
            masks.append(perf_counter() - started)
            started = perf_counter()
            grammar.fork()
            forks.append(perf_counter() - started)
    costs = {"mask": masks, "fork": forks, "compile": compiles}
    return {f"{name}_us": median(times) * 1e6 for name, times in costs.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_pair_arguments(parser)
    parser.add_argument("--prompts", type=int, default=100, help="how many answers per arm (%(default)s)")
    parser.add_argument("--max-tokens", type=int, default=120, help="per answer (%(default)s)")
    parser.add_argument("--repeats", type=int, default=15, help="runs for the cost of processors (%(default)s)")
    add_out_argument(parser)
    arguments = parser.parse_args()
    if min(arguments.prompts, arguments.max_tokens, arguments.repeats) < 1:
        raise ValueError("--prompts, --max-tokens and --repeats must be 1 or more")
    generator = load_generator(arguments)
    plain = AutoModelForCausalLM.from_pretrained(
        generator.target.config._name_or_path, dtype=generator.target.dtype
    ).to(generator.target.device)
    most = arguments.max_tokens
    arms: dict[str, Callable[[Sequence[dict[str, str]]], tuple[str, int, float]]] = {
        "transformers": lambda messages: by_transformers(generator, plain, messages, most),
        "plain": lambda messages: by_generator(
            generator, messages=messages, max_tokens=most, response_format=FORMAT, gamma=0
        ),
        "speculation": lambda messages: by_generator(
            generator, messages=messages, max_tokens=most, response_format=FORMAT
        ),
        "free": lambda messages: by_generator(generator, messages=messages, max_tokens=40, ignore_eos=True),
    }
    prompts = prompts_of(arguments.prompts)
    for run in arms.values():
        run(prompts[0])
    rows: dict[str, list[tuple[str, int, float]]] = {arm: [] for arm in arms}
    for index, messages in enumerate(tqdm(prompts, disable=None)):
        names = [*arms]
        for arm in names[index % len(names) :] + names[: index % len(names)]:
            rows[arm].append(arms[arm](messages))
    report: dict[str, Any] = {"experiment": "bench_structured", **describe(), "prompts": len(prompts)}
    print(f"{'arm':14}{'valid':>8}{'tokens':>8}{'tokens/s':>10}{'ms/answer':>11}")
    for arm, answers in rows.items():
        num_tokens, seconds = sum(each[1] for each in answers), sum(each[2] for each in answers)
        valid = sum(is_valid(text) for text, _, _ in answers)
        report[arm] = {
            "valid": valid,
            "num_tokens": num_tokens,
            "tokens_per_s": num_tokens / seconds,
            "answer_ms": median(each[2] for each in answers) * 1e3,
        }
        row = report[arm]
        print(f"{arm:14}{valid:8}{num_tokens:8}{row['tokens_per_s']:10.0f}{row['answer_ms']:11.0f}")
    same = sum(a[0] == b[0] == c[0] for a, b, c in zip(*(rows[arm] for arm in [*arms][:3]), strict=True))
    report["same_text"] = same
    report["processors"] = processor_cost(generator, arguments.repeats)
    report["grammar"] = grammar_cost(generator, prompts[0])
    print(f"{same} of {len(prompts)} answers the same in the three arms with a grammar")
    for name, value in (report["processors"] | report["grammar"]).items():
        print(f"{name:32}{value:10.0f}")
    print_report(report, arguments.out)


if __name__ == "__main__":
    run_script(main)
