"""Decoding, live: every policy of ours and transformers' own, greedily, over prompts that tuned nothing.

Every prompt goes through all arms, the order turning by one from prompt to prompt, so that a change of the machine's
speed meets all of them; seconds are CPU seconds, since machines are shared: of whole calls, and of ours also of what
follows the first token (decode_s). All arms run the same weights in the same layout. Ours keep over a run what they
learn, as in a generator: *default* (draft and n-gram lookup), *draft* (the draft alone), *fixed* (--gamma tokens a
step, by the draft alone), *whole* (the same, the draft over the whole of a long prompt), *own look-up* (no draft), and
any policy by name, with the draft alone; *static* and *compiled* are *draft* with that `draft_step`. Transformers':
*assisted* (its dynamic rule), *assisted 3, 5, 10* (so many tokens a step), *look-up 10* and *look-up 10 by 3-grams*,
its best setting over recorded texts; *assisted 5 static*, *assisted 5 compiled* and *look-up 10 static*, whose target
has a static cache and is compiled (its assistant cannot have one in 5.24).

Prompts are files, or standard-library modules of --documents tokens, to be continued. --random-draft gives the draft
random weights: the floor. Greedy answers must be those of *plain*; where one parts from it, the row says at which
token, and how far apart the two logits of a dense forward were there. A run goes on where it ended, its policies as new
ones. Ends in one JSON line with intervals of a bootstrap over prompts.

    decode.py code=HumanEval.jsonl.gz math=gsm8k.jsonl chat=mt_bench.jsonl --target T --draft D --rows rows.jsonl
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import zip_longest
from time import process_time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, CompileConfig, MaxLengthCriteria, PreTrainedModel

from experiments.common.bootstrap import ratio_interval
from experiments.common.environment import describe
from experiments.common.pair_arguments import add_pair_arguments, load_generator
from experiments.common.prompt_files import Prompt, choose_prompts
from experiments.common.report import add_out_argument, print_report
from experiments.common.script import run_script
from experiments.common.streams import timed
from experiments.real.rows import Rows, add_row_arguments, first_divergence
from spec_stack import SpecStackGenerator
from spec_stack.calibrate.documents import MODULES, module_source
from spec_stack.config import DecodeConfig, DraftStep
from spec_stack.controller.base import Policy
from spec_stack.controller.registry import POLICY_NAMES, make_policy

Row = dict[str, Any]
Ask = Callable[[list[int]], Row]
Partings = dict[str, tuple[int, float]]
PLAIN = "plain"
_PARTINGS = "partings"
_ASK_FOR = {
    "code": "Complete this Python function:\n\n```python\n{}\n```",
    "edit": "Add type hints to this code, change nothing else, and give back the whole of it.\n\n```python\n{}\n```",
}
# Behind it the project's own texts to copy begin to copy themselves.
_COPY = "\n\n\n# The same once more"
_DRAFT: dict[str, Any] = {"proposer": "model"}
# Transformers sizes a static cache by the longest answer, and a proposal at the answer's end runs beyond it.
_STATIC_ROOM = 16
_STATIC: dict[str, Any] = {"cache_implementation": "static"}


@dataclass
class Ours:
    """The generator under one policy, which learns, with more options of `stream`."""

    generator: SpecStackGenerator
    num_tokens: int
    policy: Policy
    options: dict[str, Any]

    def __call__(self, prompt_ids: list[int]) -> Row:
        options = {"sparse_prefill": "draft_only", "max_tokens": self.num_tokens} | self.options
        start = partial(self.generator.stream, input_ids=prompt_ids, policy=self.policy, **options)
        answer = timed(start, process_time)
        metrics = answer.metrics
        return {
            "cpu_s": answer.total_s,
            "decode_s": answer.total_s - answer.first_s,
            "token_ids": answer.token_ids,
            "num_steps": metrics.num_steps,
            "num_proposed": metrics.num_proposed,
            "num_accepted": metrics.num_accepted,
        }


@dataclass
class Theirs:
    """Transformers' generate over the same models.

    settings: of the draft's generation configuration; what transformers adapts there, it keeps from call to call.
    options: more arguments of `generate`.
    """

    target: PreTrainedModel
    num_tokens: int
    draft: PreTrainedModel | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.draft is not None:
            self._config = deepcopy(self.draft.generation_config)
            for name, value in self.settings.items():
                setattr(self._config, name, value)

    def __call__(self, prompt_ids: list[int]) -> Row:
        fed: list[int] = []
        hook = self.target.register_forward_pre_hook(
            lambda _, positional, named: fed.append(named["input_ids"].shape[1]), with_kwargs=True
        )
        inputs = torch.tensor([prompt_ids], device=self.target.device)
        if self.draft is not None:
            self.draft.generation_config = self._config
        began = process_time()
        try:
            output = self.target.generate(
                inputs,
                attention_mask=torch.ones_like(inputs),
                do_sample=False,
                repetition_penalty=1.0,
                max_new_tokens=self.num_tokens + _STATIC_ROOM,
                stopping_criteria=[MaxLengthCriteria(len(prompt_ids) + self.num_tokens)],
                assistant_model=self.draft,
                **self.options,
            )
        finally:
            hook.remove()
        seconds = process_time() - began
        token_ids = [int(token) for token in output[0, len(prompt_ids) :]][: self.num_tokens]
        # A forward is fed what is not in the cache, one token or the prompt, and the proposal behind it.
        proposed = sum(fed) - len(prompt_ids) - (len(fed) - 1)
        return {
            "cpu_s": seconds,
            "token_ids": token_ids,
            "num_steps": len(fed),
            "num_proposed": proposed,
            "num_accepted": len(token_ids) - len(fed),
        }


def make_arms(generator: SpecStackGenerator, num_tokens: int, gamma: int) -> dict[str, Callable[[], Ask]]:
    """Return what makes each arm, by name."""
    target, draft, policy = generator.target, generator.draft, DecodeConfig().policy

    def ours(policy: str, options: dict[str, Any], **settings: Any) -> Callable[[], Ask]:
        return lambda: Ours(generator, num_tokens, make_policy(policy, **settings), options)

    def by_draft(name: str) -> Callable[[], Ask]:
        # `speckv` gets the predictor that a user of the pair gets.
        files = generator.pair.predictors
        return ours(name, _DRAFT, **({"predictor": files[name]} if name in files else {}))

    def by_step(draft_step: DraftStep) -> Callable[[], Ask]:
        return lambda: Ours(with_step(generator, draft_step), num_tokens, make_policy(policy), _DRAFT)

    def assisted(settings: dict[str, Any], **options: Any) -> Callable[[], Ask]:
        return lambda: Theirs(target, num_tokens, draft, settings, options)

    def constant(num_assistant: int, **options: Any) -> Callable[[], Ask]:
        return assisted(constant_schedule(num_assistant), **options)

    def look_up(**options: Any) -> Callable[[], Ask]:
        return lambda: Theirs(target, num_tokens, options={"prompt_lookup_num_tokens": 10, **options})

    return {
        PLAIN: ours("fixed", _DRAFT, gamma=0),
        "assisted": assisted({}),
        "assisted 3": constant(3),
        "assisted 5": constant(5),
        "assisted 10": constant(10),
        "assisted 5 static": constant(5, **_STATIC),
        "assisted 5 compiled": lambda: compiled_assisted(target, draft, num_tokens),
        "look-up 10 static": look_up(**_STATIC),
        "look-up 10": look_up(),
        "look-up 10 by 3-grams": look_up(max_matching_ngram_size=3),
        "default": ours(policy, {"proposer": "both"}),
        "draft": by_draft(policy),
        "static": by_step("static"),
        "compiled": by_step("compiled"),
        "fixed": ours("fixed", _DRAFT, gamma=gamma),
        "whole": ours("fixed", _DRAFT | {"sparse_prefill": "off"}, gamma=gamma),
        "own look-up": ours(policy, {"proposer": "ngram"}),
        **{name: by_draft(name) for name in OTHER_POLICIES},
    }


THEIRS = ("assisted", "assisted 3", "assisted 5", "assisted 10", "look-up 10", "look-up 10 by 3-grams")
ARMS = (PLAIN, *THEIRS, "default", "draft", "fixed", "own look-up")
OTHER_POLICIES = tuple(name for name in POLICY_NAMES if name not in ("fixed", DecodeConfig().policy))
FIXED_SHAPES = ("static", "compiled", "assisted 5 static", "assisted 5 compiled", "look-up 10 static")
MORE_ARMS = ("whole", *FIXED_SHAPES, *OTHER_POLICIES)


def as_chat(prompt: Prompt) -> Prompt:
    """The same as a chat's question: for code to complete or to edit is asked in words."""
    if prompt.is_chat:
        return prompt
    text = prompt.text.partition(_COPY)[0].strip()
    return replace(prompt, text=_ASK_FOR.get(prompt.task, "{}").format(text), is_chat=True)


def documents(tokenizer: Any, lengths: Sequence[int], per_length: int) -> list[tuple[str, Prompt]]:
    """Standard-library modules with a key each, cut to each length in tokens."""
    found = []
    for length in lengths:
        for number in range(per_length):
            source = module_source(MODULES[number % len(MODULES)])[: 6 * length]
            ids = tokenizer(source, add_special_tokens=False, verbose=False).input_ids[:length]
            found.append((f"{length}-{number}", Prompt(f"{length} tokens", tokenizer.decode(ids), False)))
    return found


def choose(sources: list[str], per_task: int) -> list[tuple[str, Prompt]]:
    """Prompts with a key each, one of every task in turn."""
    by_task: dict[str, list[tuple[str, Prompt]]] = {}
    for prompt in choose_prompts(sources, 4 * per_task):
        of_task = by_task.setdefault(prompt.task, [])
        if len(of_task) < per_task:
            of_task.append((f"{prompt.task}-{len(of_task)}", as_chat(prompt)))
    return [each for row in zip_longest(*by_task.values()) for each in row if each is not None]


def run_prompt(
    generator: SpecStackGenerator, arms: dict[str, Ask], turn: int, key: str, prompt: Prompt, ids: list[int], rows: Rows
) -> None:
    """Ask the arms that have no row yet, in this prompt's order, and keep their rows and where they part from plain."""
    names = list(arms)
    turn %= len(names)
    for name in names[turn:] + names[:turn]:
        if (key, name) not in rows:
            row = arms[name](ids)
            row["token_ids"] = [token for token in row["token_ids"] if token not in generator.pair.end_ids]
            rows.add(key, name, {"task": prompt.task, **row})
    plain_ids = rows.of_arm(PLAIN)[key]["token_ids"]
    found = {name: first_divergence(generator, ids, plain_ids, rows.of_arm(name)[key]["token_ids"]) for name in names}
    rows.add(key, _PARTINGS, {"partings": {name: parting for name, parting in found.items() if parting}})


def told(key: str, by_arm: dict[str, Row], partings: Partings) -> str:
    """A line of the table: plain's seconds, the others' speed over it, and where an answer parts from plain's."""
    plain = by_arm[PLAIN]
    line = f"{key:12s}{len(plain['token_ids']):5d} tokens {plain['cpu_s']:7.1f} s"
    for name, row in by_arm.items():
        if name != PLAIN:
            line += f"  {name} {plain['cpu_s'] / row['cpu_s']:.2f}"
    return line + (f"  parts from plain (token, logits apart): {partings}" if partings else "")


def summary(rows: Rows, arms: Sequence[str]) -> dict[str, Any]:
    """Speed over plain with intervals, pooled acceptance and tokens a step, by task; over prompts that all arms did."""
    by_arm = {name: rows.of_arm(name) for name in arms}
    keys = [key for key in by_arm[PLAIN] if all(key in of_arm for of_arm in by_arm.values())]
    tasks = list(dict.fromkeys(by_arm[PLAIN][key]["task"] for key in keys))
    report: dict[str, Any] = {"num_prompts": len(keys)}
    for task in [*tasks, "all"] if keys else []:
        where = [key for key in keys if task in (by_arm[PLAIN][key]["task"], "all")]
        print(f"\n{task}: {len(where)} prompts; speed over plain [95 %], acceptance, tokens a step")
        report[task] = {}
        for name in arms:
            done = [by_arm[name][key] for key in where]
            found = compare(done, [by_arm[PLAIN][key] for key in where])
            report[task][name] = found
            speed, low, high = found["speed_over_plain"]
            print(
                f"  {name:22s}{speed:6.2f} [{low:.2f}, {high:.2f}]  "
                f"{found['acceptance']:.2f}  {found['tokens_per_step']:.2f}  {found['cpu_s']:.1f} s"
            )
    return report


def compare(done: Sequence[Row], plain: Sequence[Row]) -> dict[str, Any]:
    """Some prompts' rows of an arm beside plain's."""

    def over_plain(name: str) -> list[float]:
        return ratio_interval([row[name] for row in plain], [row[name] for row in done])

    return {
        "speed_over_plain": over_plain("cpu_s"),
        "decode_over_plain": over_plain("decode_s") if "decode_s" in done[0] else None,
        "cpu_s": sum(row["cpu_s"] for row in done),
        "acceptance": sum(row["num_accepted"] for row in done) / max(sum(row["num_proposed"] for row in done), 1),
        "tokens_per_step": sum(len(row["token_ids"]) for row in done) / sum(row["num_steps"] for row in done),
        "same_tokens": sum(row["token_ids"] == text["token_ids"] for row, text in zip(done, plain, strict=True)),
    }


def constant_schedule(num_assistant: int) -> dict[str, Any]:
    """So many tokens of the assistant in every step."""
    return {
        "num_assistant_tokens": num_assistant,
        "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": 0.0,
    }


def compiled_assisted(target: PreTrainedModel, draft: PreTrainedModel, num_tokens: int) -> Theirs:
    """Five tokens a step, the target compiled; transformers compiles on a CPU only under its tests' switch."""
    config = CompileConfig(mode="default", fullgraph=False)
    config._compile_all_devices = True
    return Theirs(
        with_plain_weights(target), num_tokens, draft, constant_schedule(5), {**_STATIC, "compile_config": config}
    )


def with_step(generator: SpecStackGenerator, draft_step: DraftStep) -> SpecStackGenerator:
    """The same pair with forwards of another kind."""
    draft = generator.draft if draft_step != "compiled" else with_plain_weights(generator.draft)
    return SpecStackGenerator(generator.target, draft, generator.tokenizer, draft_step=draft_step)


def with_plain_weights(model: PreTrainedModel) -> PreTrainedModel:
    """The model loaded anew: torch.compile takes no prepacked weights."""
    return AutoModelForCausalLM.from_pretrained(model.name_or_path, dtype=model.dtype).eval()


def with_random_draft(generator: SpecStackGenerator) -> SpecStackGenerator:
    """The same target beside a draft of the same shape that knows nothing."""
    draft = generator.draft
    torch.manual_seed(0)
    twin = AutoModelForCausalLM.from_config(draft.config).to(device=draft.device, dtype=draft.dtype).eval()
    return SpecStackGenerator(generator.target, twin, generator.tokenizer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", nargs="*", help="TASK=FILE or TASK=FILE:CATEGORY (default: the project's own)")
    parser.add_argument("--documents", type=int, nargs="+", help="tokens of documents to continue, in place of prompts")
    parser.add_argument("--random-draft", action="store_true", help="a draft of random weights")
    add_pair_arguments(parser)
    add_row_arguments(parser)
    parser.add_argument(
        "--arms", nargs="+", choices=(*ARMS, *MORE_ARMS), default=list(ARMS), help="plain is always one of them"
    )
    parser.add_argument("--per-task", type=int, default=5, help="prompts per task (%(default)s)")
    parser.add_argument("--leave-out", nargs="+", default=[], help="keys of prompts that tuned something")
    parser.add_argument("--tokens", type=int, default=64, help="most tokens of an answer (%(default)s)")
    parser.add_argument("--max-prompt-tokens", type=int, default=400, help="longer ones lose their middle")
    parser.add_argument("--gamma", type=int, default=3, help="of the arm fixed: the best one in the simulator")
    add_out_argument(parser)
    arguments = parser.parse_args()
    rows = Rows(arguments.rows, arguments.minutes)
    names = [name for name in (*ARMS, *MORE_ARMS) if name in (PLAIN, *arguments.arms)]
    generator = load_generator(arguments)
    if arguments.random_draft:
        generator = with_random_draft(generator)
    if arguments.documents:
        prompts = documents(generator.tokenizer, arguments.documents, arguments.per_task)[: arguments.limit]
    else:
        prompts = choose(arguments.prompts, arguments.per_task)[: arguments.limit]
    prompts = [(key, prompt) for key, prompt in prompts if key not in arguments.leave_out]
    make = make_arms(generator, arguments.tokens, arguments.gamma)
    arms = {name: make[name]() for name in names}
    for turn, (key, prompt) in enumerate(prompts):
        if any((key, name) not in rows for name in (*names, _PARTINGS)):
            if not rows.has_time:
                break
            most = None if arguments.documents else arguments.max_prompt_tokens
            ids = prompt.encode(generator.tokenizer, most)
            run_prompt(generator, arms, turn, key, prompt, ids, rows)
        partings = rows.of_arm(_PARTINGS)[key]["partings"]
        print(told(key, {name: rows.of_arm(name)[key] for name in names}, partings), flush=True)
    done = rows.of_arm(_PARTINGS)
    report = {
        "experiment": "decode",
        **describe(),
        "num_left": sum(key not in done for key, _ in prompts),
        "partings": {key: row["partings"] for key, row in done.items() if row["partings"]},
        **summary(rows, names),
    }
    print_report(report, arguments.out)


if __name__ == "__main__":
    run_script(main)
