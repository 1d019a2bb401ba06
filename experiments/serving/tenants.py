"""Does what another client asked of a document show in what is kept of it for the next one?

Nobody sends a salt, as clients that know of none. For every document A asks to have one of its functions explained,
then B, who shares the document alone, says hello; and B says the same behind a wall of its own, where no one has been.
Prints of how many documents B's kept tokens differ with A before it from those without, which must be 0, of how many
A's differ from B's (the questions are not blind), and how many tokens of B's prompt the draft prefilled beside A, which
says that the draft's KV is shared all the same. Counts, so any machine gives the same. Ends in one JSON line.

    python -m experiments.serving.tenants
"""

from __future__ import annotations

import argparse
import random
import re
import tempfile
from pathlib import Path
from statistics import median

from transformers import AutoTokenizer

from experiments.common.environment import describe
from experiments.common.report import add_out_argument, print_report
from experiments.common.script import run_script
from experiments.serving.client import Answer, Client, Prompts
from experiments.serving.server import CPU_ARGUMENTS, CPU_ENVIRONMENT, SglangServer, free_port
from spec_stack.hf.loading import resolve_pair

Kept = list[list[int]]


def questions(document: str, seed: int) -> tuple[str, str]:
    """A's, about a function of the document, and B's."""
    names = sorted(set(re.findall(r"def (\w+)\(", document))) or ["main"]
    return f"Explain the function {random.Random(seed).choice(names)}.", "hi"


def kept(answer: Answer) -> Kept:
    return list(answer.meta_info["spec_stack"]["kept_spans"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=50, help="(%(default)s)")
    parser.add_argument("--tokens", type=int, default=1200, help="of each document (%(default)s)")
    parser.add_argument("--start-limit", type=float, default=300, metavar="S", help="(default %(default)s)")
    add_out_argument(parser)
    options = parser.parse_args()
    target, draft = resolve_pair(None, None)
    prompts = Prompts(AutoTokenizer.from_pretrained(target))
    arguments = ["--model-path", target, "--device", "cpu", *CPU_ARGUMENTS, "--speculative-algorithm", "SPEC_STACK"]
    arguments += ["--speculative-draft-model-path", draft, "--spec-stack-min-prompt-tokens", "400"]
    num_differing, num_seeing, draft_tokens = 0, 0, []
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        with SglangServer(arguments, CPU_ENVIRONMENT, free_port(), log, options.start_limit) as server:
            shared = Client(server.port)
            for number in range(options.documents):
                document = prompts.text(options.tokens, seed=number)
                a, b = (
                    prompts.chat([{"role": "user", "content": f"{document}\n\n{question}"}])
                    for question in questions(document, number)
                )
                neighbour = shared.ask(a, 2, explain=True)
                beside = shared.ask(b, 2, explain=True)
                alone = Client(server.port, extra_key=f"document {number}").ask(b, 2, explain=True)
                num_differing += kept(beside) != kept(alone) or beside.output_ids != alone.output_ids
                num_seeing += kept(neighbour) != kept(alone)
                draft_tokens.append(beside.meta_info["spec_stack"]["num_draft_tokens"])
    print(f"B's kept tokens differ with A before it: {num_differing} of {options.documents}")
    print(f"A's kept tokens differ from B's:         {num_seeing} of {options.documents}")
    print(f"B's tokens that the draft prefilled beside A, median: {median(draft_tokens):.0f}")
    report = {"experiment": "tenants", **describe(), "documents": options.documents, "tokens": options.tokens}
    report |= {"differ": num_differing, "neighbours_differ": num_seeing, "draft_tokens": median(draft_tokens)}
    print_report(report, options.out)


if __name__ == "__main__":
    run_script(main)
