"""How fast does a server decode under each of its policies for gamma, live, at 1, 4 and 8 requests at once?

Arms are what requests ask for, of one server: plain decoding (gamma 0), every fixed gamma of the defaults, and every
policy. Two loads: closed batches, whose requests are sent together and all waited for, and a steady one, where as many
clients ask for the next prompt each as soon as they have their reply. All requests of a batch ask for the same.
Batches (under steady load, four prompts for each client) go to all arms in turn, in an order that rotates, over again
until there are --batches; a policy keeps what it learned over the whole run, as on a server. An untimed round puts the
prompts into the server's cache, so that the time of a batch, from sending it to its last token, is decoding. On a CPU
the time is the CPU seconds of the server's scheduler, which other work on the machine does not change.

Also, untimed: how each policy's gamma goes with what was known when it was chosen. Replies report every step's
confidences, and how many steps earlier the newest known one was (the lag); "low" and "high" are the mean gammas after
proposals that the draft was least and most sure of, by thirds.

Prints, by requests at once and arm: tokens per second, tokens per step, the gain over the best fixed gamma in hindsight
with a bootstrap interval over batches, and replies that are not plain decoding's. On a CPU it needs the stand-ins of
tests/serving/support, so compare arms, not times. Ends in one JSON line.

    batch_policies.py code=HumanEval.jsonl.gz math=gsm8k.jsonl chat=mt_bench.jsonl \\
        summary=spec_bench.jsonl:summarization
"""

from __future__ import annotations

import argparse
import shlex
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from time import perf_counter
from typing import Any

import numpy as np
import psutil
from tqdm import tqdm
from transformers import AutoTokenizer

from experiments.common.environment import describe
from experiments.common.prompt_files import choose_prompts
from experiments.common.report import add_out_argument, print_report
from experiments.common.script import run_script
from experiments.policies.bench_policies import gain
from experiments.serving.client import Answer, Client
from experiments.serving.server import CPU_ARGUMENTS, CPU_ENVIRONMENT, ServerError, SglangServer, free_port
from spec_stack.hf.loading import resolve_pair
from spec_stack.sglang.server_args import ServerConfig

PLAIN = "plain"
LOADS = ("closed", "steady")
_PER_CLIENT = 4
Clock = Callable[[], float]
POLICIES = ("throughput", "ema", "heuristic")


@dataclass
class Arm:
    """A variant of the requests, and how its batches went: the seconds of each, of all the tokens and the gammas."""

    custom: dict[str, Any]
    seconds: list[float] = field(default_factory=list)
    num_tokens: int = 0
    replies: list[list[int]] = field(default_factory=list)
    gammas: list[int] = field(default_factory=list)
    num_accepted: int = 0

    def ask(
        self,
        client: Client,
        prompts: Sequence[list[int]],
        num_new: int,
        *,
        clock: Clock | None = None,
        at_once: int | None = None,
    ) -> list[Answer]:
        """Send all prompts, at most `at_once` of them at a time, and wait for the last token of the last reply.

        clock: what its seconds are read from; None leaves the batch uncounted.
        """
        begun = clock() if clock is not None else 0.0
        with ThreadPoolExecutor(at_once or len(prompts)) as pool:
            answers = list(pool.map(lambda ids: client.ask(ids, num_new, **self.custom), prompts))
        if clock is not None:
            self.seconds.append(clock() - begun)
            for answer in answers:
                report = answer.meta_info["spec_stack"]
                self.num_tokens += len(answer.output_ids)
                self.replies.append(answer.output_ids)
                self.gammas += report["gamma_trace"]
                self.num_accepted += report["num_accepted"]
        return answers

    def summary(self) -> dict[str, Any]:
        steps = max(len(self.gammas), 1)
        return {
            "tokens_per_s": self.num_tokens / sum(self.seconds),
            "tokens_per_step": 1 + self.num_accepted / steps,
            "mean_gamma": sum(self.gammas) / steps,
            "seconds": self.seconds,
        }


def scheduler_clock(server: SglangServer) -> Clock:
    """The CPU seconds of a server's scheduler, which runs both models."""
    found = [it for it in psutil.Process(server.pid).children(recursive=True) if "scheduler" in " ".join(it.cmdline())]
    if len(found) != 1:
        raise ServerError(f"{len(found)} processes of the server are called a scheduler, and not 1")

    def seconds() -> float:
        times = found[0].cpu_times()
        return float(times.user + times.system)

    return seconds


def arms_of(fixed_gammas: Sequence[int], policies: Sequence[str]) -> dict[str, Arm]:
    fixed = {f"fixed-{gamma}": Arm({"gamma": gamma}) for gamma in fixed_gammas}
    return {PLAIN: Arm({"gamma": 0}), **fixed, **{name: Arm({"policy": name}) for name in policies}}


def compare(
    client: Client, batches: Sequence[Sequence[list[int]]], size: int, clock: Clock, options: argparse.Namespace
) -> dict[str, Any]:
    """By arm, of batches of which `size` prompts run at once."""
    arms = arms_of(options.fixed, options.policies)
    for batch in batches:
        arms[PLAIN].ask(client, batch, 2, at_once=size)
    for arm in arms.values():  # what a policy tries at first is not its speed
        arm.ask(client, batches[-1][: 2 * size], options.tokens, at_once=size)
    if options.no_plain:
        del arms[PLAIN]
    names = list(arms)
    asked = [batches[at % len(batches)] for at in range(options.batches)]
    for at, batch in enumerate(tqdm(asked, desc=f"{size} at once", leave=False)):
        turn = at % len(names)
        for name in [*names[turn:], *names[:turn]]:
            arms[name].ask(client, batch, options.tokens, clock=clock, at_once=size)
    best = min((name for name in names if name.startswith("fixed-")), key=lambda name: sum(arms[name].seconds))
    found: dict[str, Any] = {"best_fixed": best, "arms": {}}
    for name, arm in arms.items():
        found["arms"][name] = arm.summary() | {
            "over_best_fixed": gain(np.array(arm.seconds), np.array(arms[best].seconds)),
            "over_plain": gain(np.array(arm.seconds), np.array(arms[PLAIN].seconds)) if PLAIN in arms else None,
            "other_replies": sum(a != b for a, b in zip(arm.replies, arms[names[0]].replies, strict=True)),
            "num_replies": len(arm.replies),
        }
    return found


def follows_signals(
    gammas: Sequence[int], lags: Sequence[int], confidences: Sequence[Sequence[float]]
) -> list[tuple[float, int]]:
    """Return one reply's (mean confidence of the newest proposal known, gamma chosen), for steps that knew of one."""
    pairs = []
    for step, (gamma, lag) in enumerate(zip(gammas, lags, strict=True)):
        if step >= lag and confidences[step - lag]:
            pairs.append((mean(confidences[step - lag]), gamma))
    return pairs


def signal_traces(client: Client, batches: Sequence[Sequence[list[int]]], policy: str, num_new: int) -> dict[str, Any]:
    """The mean gamma after proposals the draft was least, and most, sure of; and one reply's traces."""
    arm, pairs, example = Arm({"policy": policy, "signals": True}), [], {}
    lags: dict[int, int] = defaultdict(int)
    for batch in batches:
        for answer in arm.ask(client, batch, num_new):
            report = answer.meta_info["spec_stack"]
            traces = [report[name] for name in ("gamma_trace", "lag_trace", "confidence_trace")]
            pairs += follows_signals(*traces)
            for lag in traces[1]:
                lags[lag] += 1
            example = example or dict(zip(("gamma", "lag", "confidence"), traces, strict=True))
    third = len(pairs) // 3
    if not third:
        return {"num_steps": len(pairs), "lags": dict(lags)}
    parts = [np.mean(part, axis=0) for part in (sorted(pairs)[:third], sorted(pairs)[-third:])]
    named = [{"confidence": float(confidence), "gamma": float(gamma)} for confidence, gamma in parts]
    return {
        "num_steps": len(pairs),
        "lags": dict(lags),
        **dict(zip(("low", "high"), named, strict=True)),
        "example": {name: trace[:12] for name, trace in example.items()},
    }


def print_rows(size: int, load: str, found: dict[str, Any]) -> None:
    print(f"\n{load}, {size} at once; best fixed gamma in hindsight: {found['best_fixed']}")
    print("                 tokens/s  a step  mean gamma   over best fixed            over plain   other replies")
    for name, row in found["arms"].items():
        (middle, low, high), over_plain = row["over_best_fixed"], (row["over_plain"] or [float("nan")])[0]
        print(
            f"  {name:14s}{row['tokens_per_s']:9.1f}{row['tokens_per_step']:8.2f}{row['mean_gamma']:12.2f}"
            f"   {middle:+7.1%} [{low:+6.1%}, {high:+6.1%}]   {over_plain:+8.1%}   "
            f"{row['other_replies']} of {row['num_replies']}"
        )
    for name, traces in found.get("signals", {}).items():
        if "low" in traces:
            low, high = traces["low"], traces["high"]
            print(
                f"  {name}: mean gamma {low['gamma']:.2f} after a mean confidence of {low['confidence']:.2f}, "
                f"{high['gamma']:.2f} after {high['confidence']:.2f}; lags {traces['lags']}"
            )


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", nargs="*", help="TASK=FILE or TASK=FILE:CATEGORY (default: the project's own)")
    parser.add_argument("--per-task", type=int, default=6, help="prompts per task (%(default)s)")
    parser.add_argument("--max-prompt-tokens", type=int, default=512, help="longer ones lose their middle")
    parser.add_argument("--tokens", type=int, default=96, help="tokens per reply (%(default)s)")
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 4, 8], help="requests at once (default 1 4 8)")
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS))
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--fixed", nargs="+", type=int, default=[gamma for gamma in ServerConfig().gammas if gamma])
    parser.add_argument("--no-plain", action="store_true", help="leave plain decoding out, which is the slowest")
    parser.add_argument("--no-signals", action="store_true", help="leave out how gamma goes with the signals")
    parser.add_argument("--batches", type=int, default=24, help="of each load and size, by every arm (%(default)s)")
    parser.add_argument("--target", help="model folder or name (default: the embedded pair's)")
    parser.add_argument("--draft", help="model folder or name (default: the embedded pair's)")
    parser.add_argument("--device", default="cpu", help="(default %(default)s)")
    parser.add_argument("--start-limit", type=float, default=300, metavar="S", help="(default %(default)s)")
    parser.add_argument("--server-args", default="", metavar="'--FLAG VALUE …'", help="more launch arguments")
    add_out_argument(parser)
    options = parser.parse_args(argv)
    if min(options.at_once) < 1 or options.tokens < 8 or options.batches < 1:
        parser.error("--at-once and --batches must be 1 or more, --tokens 8 or more")
    return options


def main(argv: Sequence[str] | None = None) -> None:
    options = parse_args(argv)
    target, draft = resolve_pair(options.target, options.draft)
    tokenizer = AutoTokenizer.from_pretrained(target)
    chosen = choose_prompts(options.prompts, options.per_task)
    encoded = [prompt.encode(tokenizer, options.max_prompt_tokens) for prompt in chosen]
    # Neighbours in a batch are of different tasks.
    encoded = [encoded[at] for start in range(options.per_task) for at in range(start, len(encoded), options.per_task)]
    if len(encoded) < max(options.at_once):
        raise ValueError(f"{len(encoded)} prompts are not enough for {max(options.at_once)} at once; raise --per-task")
    arguments = ["--model-path", target, "--device", options.device, "--sleep-on-idle"]
    arguments += CPU_ARGUMENTS if options.device == "cpu" else []
    arguments += ["--speculative-algorithm", "SPEC_STACK", "--speculative-draft-model-path", draft]
    arguments += shlex.split(options.server_args)
    environment = CPU_ENVIRONMENT if options.device == "cpu" else {}
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        with SglangServer(arguments, environment, free_port(), log, options.start_limit) as server:
            client = Client(server.port)
            clock = scheduler_clock(server) if options.device == "cpu" else perf_counter
            for load, size in [(load, size) for load in options.loads for size in options.at_once]:
                step = size if load == "closed" else min(_PER_CLIENT * size, len(encoded))
                batches = [encoded[at : at + step] for at in range(0, len(encoded) - step + 1, step)]
                rows = found[f"{load} {size}"] = compare(client, batches, size, clock, options)
                if load == "closed" and not options.no_signals:
                    rows["signals"] = {
                        name: signal_traces(client, batches, name, options.tokens)
                        for name in options.policies
                        if name == "throughput"
                    }
                print_rows(size, load, rows)
    report = {
        "experiment": "batch_policies",
        **describe(),
        "device": options.device,
        "server_args": options.server_args,
    }
    print_report({**report, "at_once": found}, options.out)


if __name__ == "__main__":
    run_script(main)
