"""Train the step predictors of the `speckv` policy on records of yours, and export them.

A step predictor (ridge, MLP-16, MLP-32) gives a step's acceptance rate from the signals of the step before, as the
paper has it. Each is scored on prompts left out, then fitted to all of them and written as JSON with a card. --ship
copies one, an MLP unless told otherwise, into the draft's folder, where `from_pretrained`, the command line, the SGLang
plugin and `spec-stack doctor` find it. Models loaded otherwise, and drafts from a hub, are given the file:
`SpecStackGenerator(..., predictors={"speckv": FILE})`, `make_policy("speckv", predictor=FILE)` or, of a server,
`--spec-stack-predictor FILE`.

    python -m experiments.policies.train_controller mine.jsonl --out predictors
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import shutil
from pathlib import Path

import numpy as np
import sklearn

from experiments.common.environment import describe
from experiments.common.script import run_script
from experiments.policies.evaluate_policies import read as read_file
from experiments.policies.training import as_network, make_estimator, step_examples
from spec_stack.controller.base import StepRecord
from spec_stack.controller.predictor import FILE_NAME, KIND, STEP_FEATURES, Card, load_step_predictor, save_predictor

MODELS = ("ridge", "mlp-16", "mlp-32")


def read(paths: list[Path]) -> tuple[list[StepRecord], str]:
    """The records and a hash of the files they come from."""
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.read_bytes())
    return [record for path in paths for record in read_file(path)], digest.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", nargs="+", type=Path, help="files of records")
    parser.add_argument("--out", type=Path, required=True, help="folder for the exported predictors")
    parser.add_argument("--folds", type=int, default=5)
    parser.add_argument("--policies", default="", help="train on runs of policies whose names begin so (default: all)")
    parser.add_argument("--ship", type=Path, help=f"the draft's folder, which gets one of them as {FILE_NAME}")
    parser.add_argument("--model", choices=MODELS, default="mlp-32", help="which one (%(default)s)")
    options = parser.parse_args()
    records, data_hash = read(options.records)
    records = [record for record in records if record.policy.startswith(options.policies)]
    if not records:
        raise ValueError(f"no run of a policy that begins with {options.policies!r} in {options.records}")
    options.out.mkdir(parents=True, exist_ok=True)
    versions = {"python": platform.python_version(), "numpy": np.__version__, "scikit-learn": sklearn.__version__}

    step_inputs, rates, step_groups = step_examples(records)
    step_scores: dict[str, float] = {}
    step_errors: dict[str, float] = {}
    for name in MODELS:
        held_out = np.zeros(len(rates))
        folds = {group: number % options.folds for number, group in enumerate(dict.fromkeys(step_groups))}
        fold_of = np.array([folds[group] for group in step_groups])
        for fold in range(options.folds):
            model = make_estimator(name).fit(step_inputs[fold_of != fold], rates[fold_of != fold])
            held_out[fold_of == fold] = np.clip(model.predict(step_inputs[fold_of == fold]), 0, 1)
        correlation = float(np.corrcoef(held_out, rates)[0, 1])
        scores = {"correlation": correlation, "mse": float(((held_out - rates) ** 2).mean())}
        step_scores[name], step_errors[name] = correlation, scores["mse"]
        path = options.out / f"step-{name}.json"
        network = as_network(make_estimator(name).fit(step_inputs, rates))
        num_prompts = len(set(step_groups))
        card = Card(KIND, name, STEP_FEATURES, data_hash, len(rates), num_prompts, versions, scores)
        save_predictor(path, network, card)
        load_step_predictor(path)
        print(
            f"step {name:7s} causal (previous step's signals): correlation {correlation:.3f}, mse {scores['mse']:.4f}"
        )
    step_winner = min(step_errors, key=step_errors.__getitem__)
    if options.ship is not None:
        options.ship.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(options.out / f"step-{options.model}.json", options.ship / FILE_NAME)
        print(f"{options.ship / FILE_NAME} is {options.model}")
    line = {
        "experiment": "train_controller",
        **describe(),
        "step_winner": step_winner,
        "step_correlation": step_scores,
        "data_sha256": data_hash,
    }
    print(json.dumps(line))


if __name__ == "__main__":
    run_script(main)
