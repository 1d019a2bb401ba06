"""Decoding, live: `spec_stack.bench.live` over data sets, with more arms, and with commit and machine in its report.

Every prompt goes through all arms, the order turning by one from prompt to prompt, so that a change of the machine's
speed meets all of them; seconds are CPU seconds, since machines are shared: of whole calls, and of ours also of what
follows the first token (decode_s). All arms run the same weights in the same layout. Ours keep over a run what they
learn, as in a generator: *default* (draft and n-gram lookup), *draft* (the draft alone), *fixed* (--gamma tokens a
step, by the draft alone), *own look-up* (no draft), and any registered policy by name, with the draft alone.
Transformers': *assisted* (its dynamic rule), *assisted 3, 5, 10* (so many tokens a step), *look-up 10* and *look-up 10
by 3-grams*, its best setting over recorded texts.

Greedy answers must be those of *plain*; where one parts from it, the row says at which token, and how far apart the two
logits of a dense forward were there. A run goes on where it ended, its policies as new ones. Ends in one JSON line with
intervals of a bootstrap over prompts.

    decode.py code=HumanEval.jsonl.gz math=gsm8k.jsonl chat=mt_bench.jsonl --target T --draft D --rows rows.jsonl
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, replace
from itertools import zip_longest
from time import process_time
from typing import Any

from experiments.common import script
from experiments.common.answers import first_divergence
from experiments.common.bootstrap import ratio_interval
from experiments.common.prompt_files import FilePrompt, choose_prompts
from spec_stack import SpecStackGenerator
from spec_stack.bench.arms import PLAIN, Arm, our_arms, their_arms
from spec_stack.bench.leaderboard import ALL, Leaderboard, Line
from spec_stack.bench.live import left, lines_of, predictors, rows_of, run_prompt
from spec_stack.bench.prompts import Encoded
from spec_stack.bench.recorded import registered
from spec_stack.bench.rows import Row, Rows
from spec_stack.config import DecodeConfig
from spec_stack.controller.registry import POLICIES
from spec_stack.settings.plugins import import_plugins

_PARTINGS = "partings"
_ASK_FOR = {
    "code": "Complete this Python function:\n\n```python\n{}\n```",
    "edit": "Add type hints to this code, change nothing else, and give back the whole of it.\n\n```python\n{}\n```",
}
# Behind it the project's own texts to copy begin to copy themselves.
_COPY = "\n\n\n# The same once more"
# The names of earlier rows, and those of `spec_stack.bench`.
NAMES = {
    PLAIN: PLAIN,
    "assisted": "Transformers, assisted, dynamic",
    "assisted 3": "Transformers, assisted, 3",
    "assisted 5": "Transformers, assisted, 5",
    "assisted 10": "Transformers, assisted, 10",
    "look-up 10": "Transformers, lookup, 10",
    "look-up 10 by 3-grams": "Transformers, lookup, 10 by 3-grams",
    "default": "default",
    "draft": DecodeConfig().policy,
    "fixed": "fixed",
    "own look-up": "n-gram lookup",
}


def make_arms(generator: SpecStackGenerator, num_tokens: int, gamma: int) -> dict[str, Callable[[], Arm]]:
    """Return what makes each arm, by name."""
    policies = registered(options=predictors(generator) | {"fixed": {"gamma": gamma}})
    made = our_arms(generator, policies, num_tokens, process_time) | their_arms(generator, num_tokens, process_time)
    return {
        **{name: made[known] for name, known in NAMES.items()},
        **{name: made[name] for name in POLICIES if name not in (*NAMES, DecodeConfig().policy)},
    }


def as_chat(prompt: FilePrompt) -> FilePrompt:
    """The same as a chat's question: for code to complete or to edit is asked in words."""
    if prompt.is_chat:
        return prompt
    text = prompt.text.partition(_COPY)[0].strip()
    return replace(prompt, text=_ASK_FOR.get(prompt.task, "{}").format(text), is_chat=True)


def choose(sources: list[str], per_task: int) -> list[tuple[str, FilePrompt]]:
    """Prompts with a key each, one of every task in turn."""
    by_task: dict[str, list[tuple[str, FilePrompt]]] = {}
    for prompt in choose_prompts(sources, 4 * per_task):
        of_task = by_task.setdefault(prompt.task, [])
        if len(of_task) < per_task:
            of_task.append((f"{prompt.task}-{len(of_task)}", as_chat(prompt)))
    return [each for row in zip_longest(*by_task.values()) for each in row if each is not None]


def note_partings(
    generator: SpecStackGenerator, by_arm: Mapping[str, Mapping[str, Row]], prompt: Encoded, rows: Rows
) -> dict[str, tuple[int, float]]:
    """Where the arms' answers to a prompt part from plain's, kept among the rows."""
    if (prompt.key, _PARTINGS) not in rows:
        ends = generator.pair.end_ids
        answers = {
            name: [token for token in own[prompt.key]["token_ids"] if token not in ends] for name, own in by_arm.items()
        }
        found = {
            name: first_divergence(generator, prompt.token_ids, answers[PLAIN], tokens)
            for name, tokens in answers.items()
        }
        rows.add(prompt.key, _PARTINGS, {"partings": {name: parting for name, parting in found.items() if parting}})
    partings: dict[str, tuple[int, float]] = rows.of_arm(_PARTINGS)[prompt.key]["partings"]
    return partings


def told(key: str, by_arm: Mapping[str, Mapping[str, Row]], partings: Mapping[str, Any]) -> str:
    """A line of the table: plain's seconds, the others' speed over it, and where an answer parts from plain's."""
    plain = by_arm[PLAIN][key]
    line = f"{key:12s}{len(plain['token_ids']):5d} tokens {plain['seconds']:7.1f} s"
    for name, own in by_arm.items():
        if name != PLAIN:
            line += f"  {name} {plain['seconds'] / own[key]['seconds']:.2f}"
    return line + (f"  parts from plain (token, logits apart): {partings}" if partings else "")


def summary(lines: Sequence[Line], by_arm: Mapping[str, Mapping[str, Row]], prompts: Sequence[Encoded]) -> Row:
    """The leaderboard as a report, by task and arm."""
    report: Row = {"num_prompts": len(prompts)}
    for line in lines:
        keys = [prompt.key for prompt in prompts if line.task in (ALL, prompt.task)]
        done, plain = ([by_arm[name][key] for key in keys] for name in (line.policy, PLAIN))
        before, after = ([row["decode_s"] for row in rows if "decode_s" in row] for rows in (plain, done))
        report.setdefault(line.task, {})[line.policy] = {
            "speed_over_plain": [*astuple(line.speed)],
            "decode_over_plain": None if len(after) < len(keys) else ratio_interval(before, after),
            "cpu_s": sum(row["seconds"] for row in done),
            "acceptance": line.acceptance or 0.0,
            "tokens_per_step": line.tokens_per_step,
            "same_tokens": line.num_same,
        }
    return report


def main() -> None:
    parser = script.make_parser(__doc__)
    parser.add_argument("prompts", nargs="*", help="TASK=FILE or TASK=FILE:CATEGORY (default: the project's own)")
    script.add_pair_arguments(parser)
    script.add_row_arguments(parser)
    parser.add_argument("--arms", nargs="+", default=list(NAMES), help="plain is always one of them (%(default)s)")
    parser.add_argument("--per-task", type=int, default=5, help="prompts per task (%(default)s)")
    parser.add_argument("--leave-out", nargs="+", default=[], help="keys of prompts that tuned something")
    parser.add_argument("--tokens", type=int, default=64, help="most tokens of an answer (%(default)s)")
    parser.add_argument("--max-prompt-tokens", type=int, default=400, help="longer ones lose their middle")
    parser.add_argument("--gamma", type=int, default=3, help="of the arm fixed: the best one in the simulator")
    arguments = parser.parse_args()
    rows = Rows(arguments.rows, arguments.minutes)
    import_plugins()
    generator = script.load_generator(arguments)
    prompts = choose(arguments.prompts, arguments.per_task)[: arguments.limit]
    prompts = [(key, prompt) for key, prompt in prompts if key not in arguments.leave_out]
    make = make_arms(generator, arguments.tokens, arguments.gamma)
    if unknown := [name for name in arguments.arms if name not in make]:
        parser.error(f"unknown arms {unknown}; known: {', '.join(make)}")
    names = [name for name in make if name in (PLAIN, *arguments.arms)]
    arms = {name: make[name]() for name in names}
    done = []
    for turn, (key, prompt) in enumerate(prompts):
        token_ids = prompt.encode(generator.tokenizer, arguments.max_prompt_tokens)
        encoded = Encoded(key, prompt.task, token_ids)
        if left(arms, encoded, rows) and not rows.has_time:
            break
        run_prompt(arms, turn, encoded, rows)
        by_arm = rows_of(arms, rows)
        print(told(key, by_arm, note_partings(generator, by_arm, encoded, rows)), flush=True)
        done.append(encoded)
    lines = lines_of(generator.pair.precision, arms, done, rows) if done else []
    print(Leaderboard("decoding", PLAIN, lines).table())
    partings = {key: row["partings"] for key, row in rows.of_arm(_PARTINGS).items() if row["partings"]}
    report = {
        "num_left": len(prompts) - len(done),
        "partings": partings,
        **summary(lines, rows_of(arms, rows), done),
    }
    script.print_report("decode", report, arguments.out)


if __name__ == "__main__":
    script.run(main)
