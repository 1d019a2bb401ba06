"""Measure the README's rows anew, each by the script that made it, and print them beside its figures.

Without models: the embedded pair, offline, few prompts, in minutes. It shows that every row can be made, not what a
pair gains. With --target and --draft, folders or hub ids: the README's sizes but for the texts, which are fetched by
name with their licences (OUT/texts/LICENCES.md); hours on two cores. A call goes on where the last one ended. Every
result is OUT/NAME.json, of the form of experiments/results/NAME.json.

    python -m experiments.figures --out OUT [--target TARGET --draft DRAFT] [--minutes 30]
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

from experiments.common import script
from experiments.common.front_page import ANSWERS, EVIDENCE, LENGTHS, ROWS, cells_of
from experiments.common.headlines import CALIBRATION, RESULTS, ROOT
from spec_stack.hf.loading import ASSETS
from spec_stack.prefill.calibration import FILE_NAME, Calibration

# Of a checkpoint, what is read of it.
_FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]


@dataclass(frozen=True)
class Size:
    """How much of each row is measured. documents, prompts: of evidence and of answers, by length."""

    repeats: int
    documents: tuple[int, int, int]
    prompts: tuple[int, int, int]
    answers: tuple[str, ...]
    end_to_end: tuple[str, ...]
    per_task: int
    new_tokens: int


SMALL = Size(1, (2, 1, 1), (6, 4, 4), ("64",), ("2048",), 1, 32)
WHOLE = Size(2, (12, 6, 4), (200, 200, 200), ("64",), ("2048", "4096", "8192"), 5, 128)


@dataclass(frozen=True)
class Pair:
    """Folders of models, the draft's calibration, and the precision that the figures are of."""

    target: Path
    draft: Path
    calibration: Path
    precision: str = "fp32"


EMBEDDED = Pair(ASSETS / "target", ASSETS / "draft", ASSETS / "draft" / FILE_NAME)


def commands(pair: Pair, size: Size, out: Path) -> Iterator[tuple[str, list[str]]]:
    """The result that each command writes, and the module with its arguments."""
    models = ["--target", str(pair.target), "--draft", str(pair.draft), "--precision", pair.precision]
    timed = [*models, "--draft-precision", pair.precision]
    calibration, prefill = ["--calibration", str(pair.calibration)], Calibration.load(pair.calibration).apply()
    lengths = [str(int(length.removesuffix("k")) * 1024) for length in LENGTHS]
    windows = [prefill.window_for(int(length)) for length in lengths]

    def to(name: str) -> list[str]:
        return ["--rows", str(out / f"{name}.jsonl"), "--out", str(out / f"{name}.json")]

    used = [str(window) for window in dict.fromkeys(windows) if window]
    speed = [*timed, *calibration, "--only", "calibrated", *(["--windows", *used] if used else [])]
    speed += ["--repeats", str(size.repeats), "--max-tokens", "4"]
    yield "real_speed", ["real.speed", *speed, "--tokens", *lengths, *to("real_speed")]
    end = [*timed, "--arms", "theirs", "pruned", "--answers", *size.answers, "--prompts", str(size.repeats)]
    yield "real_end_to_end", ["real.end_to_end", *end, "--lengths", *size.end_to_end, *to("real_end_to_end")]
    sizes = zip(lengths, windows, size.documents, size.prompts, ("313", "312", "333"), EVIDENCE, ANSWERS, strict=True)
    for num_tokens, window, documents, prompts, seed, evidence, answers in sizes:
        texts = [*models, *calibration, "--data", str(out / "texts"), "--num-tokens", num_tokens, "--seed", seed]
        # Evidence and answers are of the window that first tokens are of.
        texts += ["--draft-window", str(window)] if window else []
        shapes = ["--shapes", "--per-shape", "1", "--documents", str(documents)]
        yield evidence, ["real.evidence", *texts, *shapes, *to(evidence)]
        asks = ["--shapes", "bare", "briefly", "json", "ahead", "--limit", str(prompts), "--documents", "32"]
        yield answers, ["real.answers", *texts, *asks, "--max-tokens", "32", "--no-contiguous", *to(answers)]
    decode = [*timed, "--arms", "plain", "default", "draft", "look-up 10", "--per-task", str(size.per_task)]
    yield "real_decode", ["real.decode", *decode, "--tokens", str(size.new_tokens), *to("real_decode")]


def folder_of(name: str) -> Path:
    """A model's folder; a hub id's is fetched. Raises ValueError for what is neither."""
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=_FILES))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        raise ValueError(f"{name} is no folder, and cannot be fetched from the hub: {error}") from error


def comparison(out: Path, calibration: Path, made: dict[str, list[str]]) -> str:
    """Every row of the README with its figure, that of this run, and the commands."""
    lines = []
    for row in ROWS:
        theirs, own = (cells_of(row, folder, file) for folder, file in ((RESULTS, CALIBRATION), (out, calibration)))
        lines.append(f"{row.what}")
        for name, (cells, number) in (("README", theirs), ("here", own)):
            lines.append(f"  {name:7s}{' | '.join(filter(None, cells)).replace('**', '')}  (n {number})")
        commands_of_row = [f"    {shlex.join(made[file])}" for file in dict.fromkeys(row.files)]
        lines += commands_of_row if commands_of_row[0] not in lines else ["    by the same commands"]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for texts, rows and results")
    parser.add_argument("--target", help="folder or hub id (default: the embedded pair)")
    parser.add_argument("--draft", help="folder or hub id")
    parser.add_argument("--calibration", type=Path, default=CALIBRATION, help="of this draft (Qwen2.5-Coder 0.5B's)")
    parser.add_argument("--minutes", type=float, help="begin no prompt of a command after so many")
    parser.add_argument("--only", nargs="+", default=[], help="names of results (default: all)")
    arguments = parser.parse_args()
    if (arguments.target is None) != (arguments.draft is None):
        raise ValueError("name both --target and --draft, or neither")
    is_small, pair, size = arguments.target is None, EMBEDDED, SMALL
    if not is_small:
        folders = folder_of(arguments.target), folder_of(arguments.draft)
        pair, size = Pair(*folders, arguments.calibration, "bf16"), WHOLE
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    every = dict(commands(pair, size, out))
    if unknown := [name for name in arguments.only if name not in every]:
        raise ValueError(f"--only {', '.join(unknown)} is none of {', '.join(every)}")
    if not (out / "texts" / "LICENCES.md").is_file():
        _run(["real.fetch_texts", str(out / "texts"), *["--offline"] * is_small])
    minutes = [] if arguments.minutes is None else ["--minutes", str(arguments.minutes)]
    selected = {name: command + minutes for name, command in every.items() if name in (arguments.only or every)}
    failed = [
        name for at, (name, command) in enumerate(selected.items(), 1) if _run(command, f"[{at} of {len(selected)}] ")
    ]
    made = {name: ["python", "-m", f"experiments.{command[0]}", *command[1:]] for name, command in every.items()}
    print("\n" + comparison(out, pair.calibration, made))
    if is_small:
        print(
            "\nThe embedded pair is a toy of other sizes and prompts: its figures show that the commands work, no more."
        )
    if failed:
        raise ValueError(f"these commands failed: {', '.join(failed)}")


def _run(command: Sequence[str], place: str = "") -> int:
    """Run a script, and print the seconds; its exit status."""
    module, *given = command
    print(f"\n{place}$ python -m experiments.{module} {shlex.join(given)}", flush=True)
    began = monotonic()
    done = subprocess.run([sys.executable, "-m", f"experiments.{module}", *given], cwd=ROOT, check=False)
    print(f"{place}{monotonic() - began:.0f} s", flush=True)
    return done.returncode


if __name__ == "__main__":
    script.run(main)
