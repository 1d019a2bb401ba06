"""How many requests a second does an SGLang server carry: without speculation, with STANDALONE, with SPEC_STACK?

The QPS experiment of the SpecPrefill paper (section 4.7.1). Each mode's server gets the same requests at the same
Poisson arrivals, at rising rates, until too few of them are answered in full within a timeout. The highest rate
before that is what the mode carries; the time to first token, the time per further token and the whole latency stand
beside it, and how many hidden facts were found, so that speed is not bought with answers unseen.

Modes: "off" is SGLang without our plugin loaded and without speculation; "STANDALONE" is SGLang's own speculation
with the same draft, at the step count that was fastest in a trial here; "dense" is the plugin with keep_rate 1, which
prunes nothing; "SPEC_STACK" is the plugin with its defaults. Each needs a server of its own, so modes take turns in
rounds, and figures are medians over rounds.

Two workloads, one after the other on each server: "single" requests that share nothing, and "conversations" of several
turns with a system prompt in common (`conversations`). A conversation's rate is that of its turns, thinking left out:
conversations begun per second times turns.

Single requests: long documents (standard-library modules) with a fact hidden in each and a share of short ones. Every
request gets as many tokens as it asks for, past the end of its answer, so that all modes do the same work. Every
document opens with a heading of its own, and its fact changes from rate to rate: no prefix cache, and no remembered
selection, answers for a server.

They are sent by SGLang's serving benchmark, `sglang.benchmark.serving`, through its command-line entry point. What it
lacks is added around it. It has no timeout, so requests unanswered when the last one's timeout has passed are aborted
on the server. Its summary leaves failed requests out, so percentiles are taken here over all requests: one that was not
answered is slower than all that were (shown as "-").

On a CPU the server needs the stand-ins of tests/serving/support: torch's own attention, whose prefill is slow and
quadratic, and Python for SGLang's missing index kernels. There the figures compare the modes and tell nothing about
SGLang's speed. Prints a table, ends in one JSON line.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import math
import os
import shlex
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from importlib.metadata import version
from pathlib import Path
from statistics import median
from threading import Event, Thread
from time import perf_counter
from types import ModuleType
from typing import Any

import torch
from transformers import AutoTokenizer

from experiments.common.environment import describe
from experiments.common.script import run_script
from experiments.serving.conversations import Conversations, hold_all
from experiments.serving.load import (
    GOAL,
    PERCENTILES,
    Reply,
    Workload,
    arrival_times,
    figures,
    highest_rate,
    parse_replies,
)
from experiments.serving.server import (
    CPU_ARGUMENTS,
    CPU_ENVIRONMENT,
    HOST,
    PLUGIN,
    ServerError,
    SglangServer,
    free_port,
    other_plugins,
)
from spec_stack.config import how_to_install
from spec_stack.hf.loading import resolve_pair
from spec_stack.hf.prompt import encode_messages

MODES = OFF, STANDALONE, DENSE, SPEC_STACK = "off", "STANDALONE", "dense", "SPEC_STACK"
PLUGIN_MODES = DENSE, SPEC_STACK
WORKLOADS = SINGLE, CONVERSATIONS = "single", "conversations"
TRIAL_S = 120.0
# From the last timeout to the abort: nobody's latency is cut short by the client's own lateness.
GRACE_S = 5.0


def finite(value: Any) -> Any:
    """For JSON, which has no infinity: None, also deep inside."""
    if isinstance(value, Mapping):
        return {key: finite(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@dataclass
class Bench:
    """The servers to compare, and the load on them."""

    options: argparse.Namespace
    workload: Workload
    conversations: Conversations
    folder: Path
    tokenizer: Any
    target: str
    draft: str
    port: int
    pruning: list[dict[str, Any]] = field(default_factory=list)

    def server(self, mode: str, steps: int) -> SglangServer:
        options = self.options
        environment = {} if mode in PLUGIN_MODES else {"SGLANG_PLUGINS": other_plugins()}
        arguments = ["--model-path", self.target, "--device", options.device, "--tp-size", str(options.tp)]
        arguments += CPU_ARGUMENTS if options.device == "cpu" else []
        arguments += shlex.split(options.server_args)
        if mode != OFF:
            algorithm = SPEC_STACK if mode in PLUGIN_MODES else mode
            arguments += ["--speculative-algorithm", algorithm, "--speculative-draft-model-path", self.draft]
        if mode == STANDALONE:
            arguments += ["--speculative-num-steps", str(steps), "--speculative-num-draft-tokens", str(steps + 1)]
            arguments += ["--speculative-eagle-topk", "1"]
        if mode in PLUGIN_MODES:
            arguments += shlex.split(options.spec_stack_args)
        if mode == DENSE:
            arguments += ["--spec-stack-keep-rate", "1"]
        return SglangServer(arguments, environment, self.port, self.folder / "server.log", options.start_limit)

    def warm_up(self, server: SglangServer, mode: str) -> None:
        """Answer a few requests that are not measured; learn from SPEC_STACK's what it does to long prompts."""
        questions = self.workload.questions(self.tokenizer, self.workload.fewest, variant=-1)
        by_length = sorted(questions, key=lambda question: question.num_tokens)
        for question in (by_length[0], by_length[len(by_length) // 2], by_length[-1]):
            sampling = {"temperature": 0, "max_new_tokens": question.max_tokens, "ignore_eos": True}
            prompt_ids = encode_messages(self.tokenizer, question.messages)[0]
            body = {"input_ids": prompt_ids, "sampling_params": sampling}
            report = server.post("/generate", body, limit_s=self.options.start_limit)["meta_info"].get(PLUGIN)
            if (report is not None) != (mode in PLUGIN_MODES):
                raise ServerError(server.explain(f"mode {mode} ran {'with' if report else 'without'} our plugin"))
        if mode == SPEC_STACK:
            self.pruning.append(report)

    def converse(
        self, server: SglangServer, rate: float, variant: int, seed: int
    ) -> tuple[list[Reply], dict[str, Any]]:
        """Begin conversations so that their turns come at the rate; the replies, and tokens per second."""
        options = self.options
        begun_per_s = rate / options.turns
        count = max(options.fewest_conversations, math.ceil(begun_per_s * options.seconds))
        plans = self.conversations.plans(self.tokenizer, count, variant)
        starts_s = arrival_times(begun_per_s, count, seed)
        begun = perf_counter()
        replies = hold_all(plans, starts_s, server.port, options.timeout, self.tokenizer)
        return replies, {"output_throughput": sum(reply.num_tokens for reply in replies) / (perf_counter() - begun)}

    def load(self, server: SglangServer, rate: float, variant: int, seed: int) -> tuple[list[Reply], dict[str, Any]]:
        """Send one rate's requests, at arrivals drawn by the seed; the replies, and what SGLang's benchmark writes."""
        questions = self.workload.questions(self.tokenizer, self.workload.count(rate), variant)
        sent, written = self.folder / "requests.jsonl", self.folder / "replies.jsonl"
        sent.write_text("".join(json.dumps(question.as_row()) + "\n" for question in questions), encoding="utf-8")
        written.unlink(missing_ok=True)
        command = ["--backend", "sglang-oai-chat", "--host", HOST, "--port", str(server.port)]
        command += ["--model", self.target, "--tokenizer", self.target, "--seed", str(seed)]
        command += ["--dataset-name", "openai", "--dataset-path", str(sent), "--num-prompts", str(len(questions))]
        # Its own warm-up would send the first request twice, the second time out of the prefix cache.
        command += ["--request-rate", str(rate), "--warmup-requests", "0", "--disable-tqdm"]
        command += ["--output-file", str(written), "--output-details"]
        last_s = arrival_times(rate, len(questions), seed)[-1]
        with ended_after(server, last_s + (self.options.timeout if math.isfinite(rate) else TRIAL_S) + GRACE_S):
            run_sglang_benchmark(command, server, self.folder / "client.log")
        line = json.loads(written.read_text(encoding="utf-8"))
        return parse_replies(line, questions), line


@contextlib.contextmanager
def ended_after(server: SglangServer, limit_s: float) -> Iterator[None]:
    """Abort what is unanswered after limit_s. A server that does not even do that is stopped, which ends the client."""
    done = Event()

    def watch() -> None:
        if done.wait(limit_s):
            return
        with contextlib.suppress(ServerError):
            server.post("/abort_request", {"abort_all": True}, limit_s=30)
        if not done.wait(60):
            server.stop()

    watcher = Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()


@contextlib.contextmanager
def datasets_named() -> Iterator[None]:
    """Where the package `datasets` is not installed: something of its name, while SGLang's benchmark is imported.

    One of its data sets (MMMU, images) imports it at once. What is sent here comes from a file.
    """
    if importlib.util.find_spec("datasets") is not None:
        yield
        return
    named = ModuleType("datasets")
    named.__spec__ = ModuleSpec("datasets", None)
    vars(named)["load_dataset"] = None
    sys.modules["datasets"] = named
    try:
        yield
    finally:
        del sys.modules["datasets"]


def import_sglang_benchmark() -> Any:
    """Raises ImportError, saying what to install."""
    if importlib.util.find_spec("sglang") is None:
        raise ImportError(f"this Python has no SGLang; use one that has: {how_to_install('sglang')}")
    try:
        with warnings.catch_warnings(action="ignore"), datasets_named():
            return importlib.import_module("sglang.benchmark.serving")
    except ImportError as error:
        raise ImportError(f"SGLang's serving benchmark does not load; install what it lacks: {error}") from error


def run_sglang_benchmark(command: Sequence[str], server: SglangServer, log: Path) -> None:
    """SGLang's command, in this process: importing it takes longer than many a run."""
    serving = import_sglang_benchmark()
    arguments, sys.argv = sys.argv, ["bench_serving", *command]
    try:
        with log.open("w", encoding="utf-8") as out, contextlib.redirect_stdout(out):
            serving.cli_main()
    except (OSError, SystemExit) as error:
        said = log.read_text(encoding="utf-8").splitlines()[-5:]
        raise ServerError(server.explain("\n  ".join([f"SGLang's benchmark gave up: {error}", *said]))) from error
    finally:
        sys.argv = arguments


def try_steps(bench: Bench, candidates: Sequence[int]) -> dict[int, float]:
    """Output tokens per second of STANDALONE at each step count, a handful of requests sent at once."""
    speeds = {}
    for steps in candidates:
        with bench.server(STANDALONE, steps) as server:
            bench.warm_up(server, STANDALONE)
            replies, line = bench.load(server, math.inf, 0, bench.workload.seed)
        speeds[steps] = line["output_throughput"]
        if any(math.isinf(reply.latency_s) for reply in replies):
            speeds[steps] = 0.0
        print(f"  STANDALONE, {steps} steps: {speeds[steps]:.1f} tokens/s, {len(replies)} requests at once", flush=True)
    return speeds


Rates = dict[float, dict[str, float]]


def sweep(bench: Bench, mode: str, steps: int, number: int) -> dict[str, Rates]:
    """One mode's figures per workload and rate in one round, on a server of its own."""
    options = bench.options
    loads = {SINGLE: (bench.load, options.rates), CONVERSATIONS: (bench.converse, options.conversation_rates)}
    with bench.server(mode, steps) as server:
        bench.warm_up(server, mode)
        return {
            name: climb(bench, server, f"{mode:10s} {name:13s}", *loads[name], number) for name in options.workloads
        }


def climb(
    bench: Bench, server: SglangServer, title: str, send: Callable[..., Any], rates: Sequence[float], number: int
) -> Rates:
    """Figures per rate, up to the first rate at which too few requests were answered in time."""
    found = {}
    for variant, rate in enumerate(rates, start=1):
        replies, line = send(server, rate, variant, bench.workload.seed + number)
        found[rate] = figures(replies, bench.options.timeout)
        found[rate]["output_tokens_per_s"] = line["output_throughput"]
        found[rate]["accept_length"] = line.get("accept_length") or 1.0
        share = found[rate]["share_in_time"]
        print(f"  {title} {rate:5.2f}/s: {share:4.0%} of {len(replies)} requests in time", flush=True)
        if share < GOAL:
            break
    return found


def summarise(rounds: Sequence[Mapping[float, Mapping[str, float]]], rates: Sequence[float]) -> dict[str, Any]:
    """Per rate that one mode reached, medians over its rounds (counts are sums); and its highest rate in each round."""
    rows = []
    for rate in rates:
        found = [figures_at[rate] for figures_at in rounds if rate in figures_at]
        if found:
            merge = {name: sum if name.startswith("num_") else median for name in found[0]}
            columns = {name: merge[name]([at_rate[name] for at_rate in found]) for name in merge}
            rows.append({"rate": rate, "rounds": len(found), **columns})
    shares = [{rate: at_rate["share_in_time"] for rate, at_rate in figures_at.items()} for figures_at in rounds]
    highest = [highest_rate(each) for each in shares]
    counts = {name: sum(row[name] for row in rows) for name in ("num_right", "num_answered", "num_requests")}
    return {"highest_rate": median(highest), "highest_rates": highest, **counts, "rows": rows}


def seconds(row: Mapping[str, float], name: str, scale: float = 1, digits: int = 2) -> str:
    values = [row[f"{name}_p{percent}"] * scale for percent in PERCENTILES]
    return " ".join(f"{value:7.{digits}f}" if math.isfinite(value) else f"{'-':>7s}" for value in values)


def print_table(workload: str, modes: Mapping[str, Mapping[str, Any]], timeout_s: float, top: float) -> None:
    print(f"\n{workload}")
    heads = "".join(f"  {title:23s}" for title in ("TTFT, s", "further tokens, ms each", "whole answer, s"))
    print(f"{'':29s}{heads}")
    print(f"mode        rate/s  in time  {('  ' + '    p50     p90     p99') * 3}  tokens/s  per step  facts found")
    for mode, summary in modes.items():
        for row in summary["rows"]:
            print(
                f"{mode:10s}  {row['rate']:6.2f}  {row['share_in_time']:6.0%}   "
                f"  {seconds(row, 'ttft_s')}  {seconds(row, 'seconds_per_token', 1e3, 0)}  {seconds(row, 'latency_s')}"
                f"  {row['output_tokens_per_s']:8.1f}  {row['accept_length']:8.2f}"
                f"  {row['num_right']} of {row['num_answered']} answered"
            )
    if workload == CONVERSATIONS:
        print("only the first turn of a conversation asks for a fact")
    print(f"\nhighest rate with {GOAL:.0%} of the requests answered within {timeout_s:g} s:")
    base = modes[OFF]["highest_rate"] if OFF in modes else 0
    for mode, summary in modes.items():
        more = "; the highest tried, give --rates more" if summary["highest_rate"] >= top else ""
        ratio = f", {summary['highest_rate'] / base:.2f}x off" if base else ""
        each = ", ".join(f"{rate:g}" for rate in summary["highest_rates"])
        right = f"{summary['num_right']} of {summary['num_answered']} facts found"
        print(f"  {mode:10s} {summary['highest_rate']:6.2f} requests/s (rounds: {each}{more}){ratio}; {right}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    pair = parser.add_argument_group("servers")
    pair.add_argument("--target", help="target model, a folder or a hub id (default: the embedded pair)")
    pair.add_argument("--draft", help="draft model")
    pair.add_argument("--device", help="cpu or cuda (default: cuda where there is one)")
    pair.add_argument("--tp", type=int, default=1, help="tensor-parallel size (%(default)s)")
    pair.add_argument("--port", type=int, help="on loopback (default: a free one)")
    pair.add_argument(
        "--server-args",
        default="",
        metavar="'--FLAG VALUE …'",
        help="more launch arguments for every mode, one quoted string; they go over what is set for a CPU: "
        + " ".join(CPU_ARGUMENTS),
    )
    pair.add_argument(
        "--spec-stack-args", default="", metavar="'--FLAG VALUE …'", help="more launch arguments for SPEC_STACK alone"
    )
    pair.add_argument(
        "--standalone-steps",
        type=int,
        nargs="+",
        default=[5],
        metavar="N",
        help="step counts to try for STANDALONE; the fastest is measured (%(default)s)",
    )
    pair.add_argument("--start-limit", type=float, default=180, help="seconds to wait for a server (%(default)s)")
    pair.add_argument(
        "--modes", nargs="+", choices=MODES, default=MODES, help="in the order of their turns (%(default)s)"
    )
    load = parser.add_argument_group("load")
    load.add_argument(
        "--rates",
        type=float,
        nargs="+",
        default=[0.4, 0.6, 0.8, 1.1, 1.5, 2.1, 3.0, 4.2],
        help="requests per second, rising; a mode ends with its first failure (%(default)s)",
    )
    load.add_argument(
        "--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS), help="(default: %(default)s)"
    )
    load.add_argument(
        "--conversation-rates",
        type=float,
        nargs="+",
        default=[0.3, 0.6, 1.0, 1.5, 2.2],
        help="turns per second, rising (%(default)s)",
    )
    load.add_argument("--turns", type=int, default=3, help="of a conversation (%(default)s)")
    load.add_argument("--thinking", type=float, default=1.0, metavar="S", help="between turns, mean (%(default)s)")
    load.add_argument("--system-tokens", type=int, default=512, help="that all conversations share (%(default)s)")
    load.add_argument(
        "--fewest-conversations", type=int, default=4, help="conversations per rate at least (%(default)s)"
    )
    load.add_argument("--timeout", type=float, default=5.0, help="seconds a request may take (%(default)s)")
    load.add_argument("--seconds", type=float, default=12.0, help="how long each rate is kept up (%(default)s)")
    load.add_argument("--fewest", type=int, default=8, help="requests per rate at least (%(default)s)")
    load.add_argument("--rounds", type=int, default=1, help="turns of every mode (%(default)s)")
    load.add_argument(
        "--tokens", type=int, nargs=2, default=[2048, 4096], help="shortest and longest document (%(default)s)"
    )
    load.add_argument("--short-share", type=float, default=0.25, help="share of short requests (%(default)s)")
    load.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="also write the JSON to this file")
    options = parser.parse_args()
    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    options.rates = sorted(set(options.rates))
    options.conversation_rates = sorted(set(options.conversation_rates))
    if min(options.rates[0], options.conversation_rates[0]) <= 0 or options.fewest_conversations < 1:
        raise ValueError("rates must be over 0, and --fewest-conversations 1 or more")
    if options.timeout <= 0 or options.rounds < 1 or min(options.standalone_steps) < 1:
        raise ValueError("the timeout, rounds and step counts must be over 0")
    if options.out and not options.out.parent.is_dir():
        raise ValueError(f"--out {options.out}: there is no folder {options.out.parent}")
    return options


def main() -> None:
    options = parse_arguments()
    workload = Workload(tuple(options.tokens), options.short_share, options.seconds, options.fewest, options.seed)
    conversations = Conversations(
        tuple(options.tokens), options.system_tokens, options.turns, options.thinking, options.seed
    )
    if options.device == "cpu":
        os.environ.update(CPU_ENVIRONMENT)
    if SINGLE in options.workloads or len(set(options.standalone_steps)) > 1:
        import_sglang_benchmark()
    # A stop from outside leaves the blocks too, so that no server outlives this script.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    target, draft = resolve_pair(options.target, options.draft)
    tokenizer = AutoTokenizer.from_pretrained(target)
    # Documents that are too short for the lengths asked for are better known before the first server starts.
    workload.questions(tokenizer, workload.count(options.rates[-1]), variant=0)
    rounds: dict[str, list[dict[str, Rates]]] = {mode: [] for mode in options.modes}
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(
            options, workload, conversations, Path(folder), tokenizer, target, draft, options.port or free_port()
        )
        candidates = sorted(set(options.standalone_steps))
        tries = STANDALONE in options.modes and len(candidates) > 1
        trial = try_steps(bench, candidates) if tries else {candidates[0]: math.nan}
        steps = max(trial, key=lambda count: trial[count])
        for number in range(options.rounds):
            print(f"round {number + 1} of {options.rounds}", flush=True)
            for mode in options.modes:
                rounds[mode].append(sweep(bench, mode, steps, number))
    rates = {SINGLE: options.rates, CONVERSATIONS: options.conversation_rates}
    results: dict[str, dict[str, Any]] = {}
    for name in options.workloads:
        results[name] = {mode: summarise([each[name] for each in found], rates[name]) for mode, found in rounds.items()}
        print_table(name, results[name], options.timeout, rates[name][-1])
    if STANDALONE in rounds:
        print(f"STANDALONE ran {steps} steps, the fastest of {candidates} in the trial")
    for found in bench.pruning[:1]:
        print(
            f"SPEC_STACK prefilled {found['num_kept_tokens']} of {found['num_prompt_tokens']} tokens of the longest "
            f"warm-up prompt ({found['sparse_prefill_reason']})"
        )
    report = {
        "experiment": "bench_serving",
        **describe(),
        "sglang": version("sglang"),
        **{name: value for name, value in vars(options).items() if name not in ("out", "port", "target", "draft")},
        "target": target if options.target else "embedded",
        "draft": draft if options.draft else "embedded",
        "goal": GOAL,
        "standalone_steps_taken": steps,
        "trial_tokens_per_s": trial,
        "pruning": bench.pruning,
        "results": results,
        "all_rounds": {
            mode: [
                {name: {str(rate): found for rate, found in by_rate.items()} for name, by_rate in each.items()}
                for each in found_in_rounds
            ]
            for mode, found_in_rounds in rounds.items()
        },
    }
    line = json.dumps(finite(report))
    if options.out:
        options.out.write_text(line + "\n", encoding="utf-8")
    print(line)


if __name__ == "__main__":
    run_script(main)
