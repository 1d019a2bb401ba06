"""Recorded agents, replayed on an SGLang server: what does a turn wait for, and what is prefilled of it?

The same log and the same turns as `experiments.real.agents`, sent as token ids to one server, arm by arm from empty
caches: *dense* is the radix cache alone (sparse_prefill off), *default* what a request gets that asks for nothing. Then
the whole conversation's last turn from empty caches (*cold*), and again after a client hung up on it halfway
(*retried*). A row is printed after every reply: seconds to its first streamed chunk, what was cached, given to the
target and recalled, and whether the system message or a schema lost a token (there must be none). On a CPU it needs the
stand-ins of tests/serving/support. Ends in one JSON line.

    replay_agents.py sessions.jsonl --most-tokens 16000
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from experiments.common.environment import describe
from experiments.common.report import add_out_argument, print_report
from experiments.common.script import run_script
from experiments.real.agents import TOOLS, compare, shared_tokens, turns_of
from experiments.serving.client import Answer, Client
from experiments.serving.server import CPU_ARGUMENTS, CPU_ENVIRONMENT, SglangServer, free_port
from spec_stack.cli.demo import hide_fact
from spec_stack.hf.loading import resolve_pair

DENSE, DEFAULT = "dense", "default"
ARMS: dict[str, dict[str, Any]] = {DENSE: {"sparse_prefill": "off"}, DEFAULT: {}}
_NUM_NEW = 4


def row_of(answer: Answer, num_tokens: int, protected: int) -> dict[str, Any]:
    """What a reply waited for, and what its report says of its prompt."""
    report = answer.meta_info.get("spec_stack", {})
    spans = report.get("kept_spans")
    held = {at for start, stop in spans for at in range(start, min(stop, protected))} if spans else range(protected)
    return {
        "ttft_s": answer.ttft_s,
        "num_tokens": num_tokens,
        "cached": answer.meta_info["cached_tokens"],
        "given": report.get("num_kept_tokens") or num_tokens,
        "recalled": report.get("num_recalled_tokens") or 0,
        "outcome": report.get("outcome"),
        "system_tokens_lost": protected - len(held),
    }


def replay(client: Client, turns: Sequence[Sequence[int]], protected: int) -> dict[str, list[dict[str, Any]]]:
    """One conversation, by arm: its turns in order, then its last one cold and, of the default, retried."""
    found: dict[str, list[dict[str, Any]]] = {}
    for arm, custom in ARMS.items():
        client.forget()
        found[arm] = [
            row_of(client.ask(ids, _NUM_NEW, explain=arm == DEFAULT, **custom), len(ids), protected) for ids in turns
        ]
        client.forget()
        cold = client.ask(turns[-1], _NUM_NEW, explain=arm == DEFAULT, **custom)
        found[f"cold {arm}"] = [row_of(cold, len(turns[-1]), protected)]
    client.forget()
    client.hang_up(turns[-1], found[f"cold {DEFAULT}"][0]["ttft_s"] / 2)
    retried = client.ask(turns[-1], _NUM_NEW, explain=True)
    found["retried"] = [row_of(retried, len(turns[-1]), protected)]
    return found


def summarise(found: Mapping[str, Mapping[str, Sequence[Mapping[str, Any]]]]) -> dict[str, Any]:
    """Print the ratios of first tokens to the dense arm's, by kind of turn: median, least and most."""
    kinds: dict[str, list[tuple[float, float]]] = {}
    for arms in found.values():
        for turn, (own, dense) in enumerate(zip(arms[DEFAULT], arms[DENSE], strict=True)):
            pruned = own["given"] < own["num_tokens"] and own["outcome"] == "pruned"
            kind = (
                "first turns, after which it is warm"
                if not turn
                else f"warm turns, {'pruned' if pruned else 'nothing pruned'}"
            )
            kinds.setdefault(kind, []).append((own["ttft_s"], dense["ttft_s"]))
        cold, dense_cold = (arms[f"cold {arm}"][0]["ttft_s"] for arm in (DEFAULT, DENSE))
        kinds.setdefault("cold, whole conversation", []).append((cold, dense_cold))
        kinds.setdefault("retried, over a cold turn", []).append((arms["retried"][0]["ttft_s"], cold))
    report = {kind: compare(kind, pairs) for kind, pairs in kinds.items()}
    lost = sum(row["system_tokens_lost"] for arms in found.values() for rows in arms.values() for row in rows)
    print(f"tokens of system messages and schemas that were dropped: {lost}")
    return {"kinds": report, "system_tokens_lost": lost}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sessions", type=Path, help="conversations as JSON Lines")
    parser.add_argument("--target", help="model folder or name (default: the embedded pair's)")
    parser.add_argument("--draft", help="model folder or name (default: the embedded pair's)")
    parser.add_argument("--most-tokens", type=int, default=16000, help="pass over longer conversations (%(default)s)")
    parser.add_argument("--most-turns", type=int, default=12, help="of a conversation, the last ones (%(default)s)")
    parser.add_argument("--pool-tokens", type=int, default=80000, help="the target's (%(default)s)")
    parser.add_argument("--chunk", type=int, default=512, help="--chunked-prefill-size (%(default)s)")
    add_out_argument(parser)
    arguments = parser.parse_args()
    target, draft = resolve_pair(arguments.target, arguments.draft)
    tokenizer = AutoTokenizer.from_pretrained(target)
    launch = ["--model-path", str(target), "--device", "cpu", "--chunked-prefill-size", str(arguments.chunk)]
    launch += [*CPU_ARGUMENTS, "--max-total-tokens", str(arguments.pool_tokens), "--sleep-on-idle"]
    launch += ["--speculative-algorithm", "SPEC_STACK", "--speculative-draft-model-path", str(draft)]
    read = [json.loads(line) for line in arguments.sessions.read_text(encoding="utf-8").splitlines() if line.strip()]
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        with SglangServer(launch, CPU_ENVIRONMENT, free_port(), log, 300) as server:
            client = Client(server.port, extra_key="agents")
            for seed in (1, 2):
                warm = tokenizer.apply_chat_template(hide_fact(tokenizer, 3000, seed).messages, tokenize=False)
                client.ask(tokenizer(warm, add_special_tokens=False).input_ids, _NUM_NEW)
            for at, row in enumerate(read):
                key, tools = str(row.get("id", at)), list(row.get("tools") or TOOLS)
                texts = [
                    tokenizer.apply_chat_template(turn, tools=tools, tokenize=False, add_generation_prompt=True)
                    for turn in turns_of(row)[-arguments.most_turns :]
                ]
                turns = [tokenizer(text, add_special_tokens=False, verbose=False).input_ids for text in texts]
                if len(turns[-1]) > arguments.most_tokens:
                    print(f"{key}: {len(turns[-1])} tokens, over {arguments.most_tokens}; passed over", flush=True)
                    continue
                found[key] = replay(client, turns, shared_tokens(tokenizer, turns_of(row)[0], tools))
                for arm, rows in found[key].items():
                    for number, told in enumerate(rows):
                        print(f"{key[:34]:34s} {arm:12s} {number:3d}  {json.dumps(told)}", flush=True)
    report = {"experiment": "replay_agents", **describe(), **summarise(found), "turns": found}
    print_report(report, arguments.out)


if __name__ == "__main__":
    run_script(main)
