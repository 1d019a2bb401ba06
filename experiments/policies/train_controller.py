"""Train a step predictor of the `speckv` policy on records of yours, and export it.

A step predictor (ridge, MLP-16, MLP-32) gives a step's acceptance rate from the signals of the step before, as the
paper has it. It is scored on prompts left out, then fitted to all of them and written as JSON with a card. --ship
copies it into the draft's folder, where `from_pretrained`, the command line and `spec-stack doctor` find it. Elsewhere
the policy is given the file: `policy=make_policy("speckv", predictor=FILE)`. It takes records of as many prompts as
--folds, 5 by default; the shipped one has 24.

    python -m experiments.policies.train_controller mine.jsonl --out predictors
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
from pathlib import Path
from typing import Any

import numpy as np
import sklearn

from experiments.common import script
from experiments.common.environment import describe
from experiments.policies.estimators import make_estimator, save_predictor
from spec_stack.bench.recorded import read
from spec_stack.bench.training import as_network, step_examples
from spec_stack.controller.predictor import FILE_NAME, STEP_FEATURES, load_step_predictor

MODELS = ("ridge", "mlp-16", "mlp-32")


def held_out_scores(name: str, inputs: Any, rates: Any, groups: list[str], num_folds: int) -> dict[str, float]:
    """Correlation and error of what a model predicts for prompts that it was not fitted to."""
    folds = {group: number % num_folds for number, group in enumerate(dict.fromkeys(groups))}
    fold_of, predicted = np.array([folds[group] for group in groups]), np.zeros(len(rates))
    for fold in range(num_folds):
        model = make_estimator(name).fit(inputs[fold_of != fold], rates[fold_of != fold])
        predicted[fold_of == fold] = np.clip(model.predict(inputs[fold_of == fold]), 0, 1)
    correlation = float(np.corrcoef(predicted, rates)[0, 1])
    return {"correlation": correlation, "mse": float(((predicted - rates) ** 2).mean())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", nargs="+", type=Path, help="files of records")
    parser.add_argument("--out", type=Path, required=True, help="folder for the exported predictor")
    parser.add_argument("--folds", type=int, default=5)
    parser.add_argument("--ship", type=Path, help=f"the draft's folder, which gets it as {FILE_NAME}")
    parser.add_argument("--model", choices=MODELS, default="mlp-32", help="which one (%(default)s)")
    options = parser.parse_args()
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in options.records)).hexdigest()
    records = read(options.records)
    versions = {"python": platform.python_version(), "numpy": np.__version__, "scikit-learn": sklearn.__version__}
    inputs, rates, groups = step_examples(records)
    num_prompts = len(set(groups))
    if not 2 <= options.folds <= num_prompts:
        raise ValueError(
            f"--folds {options.folds} needs drafted steps of as many prompts (request_ids), two or more; these records "
            f"have {num_prompts}. Record more prompts, or give fewer folds"
        )
    scores = held_out_scores(options.model, inputs, rates, groups, options.folds)
    network = as_network(make_estimator(options.model).fit(inputs, rates))
    card = {
        "kind": "step",
        "model": options.model,
        "features": STEP_FEATURES,
        "data_sha256": digest,
        "num_examples": len(rates),
        "num_prompts": num_prompts,
        "versions": versions,
        "scores": scores,
    }
    for folder, name in ((options.out, f"step-{options.model}.json"), (options.ship, FILE_NAME)):
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            save_predictor(folder / name, network, card)
            load_step_predictor(folder / name)
            print(folder / name)
    print(json.dumps({"experiment": "train_controller", **describe(), **scores, "data_sha256": digest}))


if __name__ == "__main__":
    script.run(main)
