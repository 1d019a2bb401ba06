"""Do pretrained weights answer as Transformers says? Greedy text of the project's own prompts, three ways.

Per prompt: Transformers' own `generate`, this package without a draft, and with one. One prompt is longer than the
sliding windows of small models. Where texts part, the row has the token and how far apart the two logits were there:
a tie of the precision is no error, anything else is. Prints a row per prompt, ends in one JSON line.

    python -m experiments.exactness.pretrained --target TARGET --draft DRAFT --precision fp32
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from experiments.common import script
from experiments.common.answers import first_divergence
from experiments.common.prompt_files import choose_prompts
from spec_stack import SpecStackGenerator
from spec_stack.hf.precision import TIE_TOLERANCE


def transformers_text(generator: SpecStackGenerator, prompt: list[int], num_tokens: int) -> list[int]:
    """What transformers' generate makes of a prompt."""
    ids = torch.tensor([prompt], device=generator.target.device)
    made = generator.target.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        repetition_penalty=1.0,
        max_new_tokens=num_tokens,
        eos_token_id=None,
        pad_token_id=0,
    )
    return list(made[0, len(prompt) :].tolist())


def prompts_of(generator: SpecStackGenerator, per_task: int, longest: int) -> list[list[int]]:
    """The project's own prompts, as plain text where there is no chat template, and all of their texts as one."""
    has_template = bool(getattr(generator.tokenizer, "chat_template", None))
    chosen = [replace(prompt, is_chat=prompt.is_chat and has_template) for prompt in choose_prompts([], per_task)]
    everything = "\n\n".join(prompt.text for prompt in choose_prompts([], 6))
    own = [prompt.encode(generator.tokenizer) for prompt in chosen]
    return [*own, (generator.tokenizer(everything).input_ids * 8)[:longest]]


def main() -> None:
    parser = script.make_parser(__doc__)
    script.add_pair_arguments(parser)
    parser.add_argument("--per-task", type=int, default=1, help="prompts per task (%(default)s)")
    parser.add_argument("--longest", type=int, default=1200, help="tokens of the long prompt (%(default)s)")
    parser.add_argument("--max-tokens", type=int, default=32, help="length of the answers (%(default)s)")
    arguments = parser.parse_args()
    generator = script.load_generator(arguments)
    tolerance = TIE_TOLERANCE[arguments.precision]
    prompts = prompts_of(generator, arguments.per_task, arguments.longest)
    rows: list[dict[str, Any]] = []
    for prompt in prompts:
        wanted = transformers_text(generator, prompt, arguments.max_tokens)
        row: dict[str, Any] = {"prompt_tokens": len(prompt)}
        for name, gamma in (("plain", 0), ("speculation", 4)):
            result = generator.generate(
                input_ids=prompt,
                max_tokens=arguments.max_tokens,
                gamma=gamma,
                proposer="model",
                sparse_prefill="draft_only",
                ignore_eos=True,
            )
            row[name] = first_divergence(generator, prompt, wanted, result.token_ids)
            row["accepted"] = [result.metrics.num_accepted, result.metrics.num_proposed]
        rows.append(row)
        told = "  ".join(
            f"{name} {'the same' if row[name] is None else row[name]}" for name in ("plain", "speculation")
        )
        print(f"{len(prompt):6d} tokens  {told}  {row['accepted'][0]} of {row['accepted'][1]} accepted", flush=True)
    parted = [row[name] for row in rows for name in ("plain", "speculation") if row[name] is not None]
    report = {
        "model_type": generator.target.config.model_type,
        "precision": arguments.precision,
        "n": len(rows),
        "same": {name: sum(row[name] is None for row in rows) for name in ("plain", "speculation")},
        "ties": sum(abs(gap) <= tolerance for _, gap in parted),
        "errors": sum(abs(gap) > tolerance for _, gap in parted),
        "tolerance": tolerance,
        "rows": rows,
    }
    script.print_report("pretrained", report, arguments.out)


if __name__ == "__main__":
    script.run(main)
