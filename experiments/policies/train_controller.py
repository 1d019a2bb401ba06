"""Train the step predictors of the `speckv` policy on records and export them; and say whether an MLP earns its place
over a linear model, there and in the token models that `throughput` was tried with.

Step predictors (ridge, MLP-16) give a step's acceptance rate from the signals of the step before. --ship puts the one
that errs least on prompts left out where the embedded pair's `speckv` finds it; files are JSON with a card. Token
models give P(all tokens drafted so far and the next one are accepted). They are calibrated and scored on prompts left
out, the difference in log loss is bootstrapped over prompts, and the one named in the last line wins only where that
interval excludes zero (else the linear one, being cheaper). They are not exported: none has given more tokens/s than
what `throughput` learns online.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import shutil
from pathlib import Path
from time import perf_counter

import numpy as np
import sklearn

from experiments.common.script import run_script
from experiments.policies import published
from experiments.policies.token_model import TOKEN_MODELS, FittedToken, fit_token_model, token_examples
from spec_stack.controller.base import StepRecord
from spec_stack.controller.predictor import KIND, STEP_FEATURES, Card, Network, load_step_predictor, save_predictor
from spec_stack.offline.records import read_records
from spec_stack.offline.training import as_network, make_estimator, step_examples


def read(paths: list[Path]) -> tuple[list[StepRecord], str]:
    """The records and a hash of the files they come from."""
    if published.is_published(paths):
        folder = paths[0] if paths[0].is_dir() else paths[0].parent
        files = [folder / published.STEPS_FILE, folder / published.RUNS_FILE]
        records = published.load(paths[0]).records
    else:
        files, records = paths, read_records(*paths)
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    return records, digest.hexdigest()


def losses(fitted: FittedToken, accepted: np.ndarray) -> np.ndarray:
    """Log loss of every held-out example."""
    chance = np.clip(fitted.out_of_fold, 1e-12, 1 - 1e-12)
    return -np.where(accepted > 0.5, np.log(chance), np.log(1 - chance))


def interval_by_prompt(values: np.ndarray, groups: list[str], num_resamples: int = 2000) -> tuple[float, float, float]:
    """Mean and its 95 % interval, resampling prompts."""
    rng = np.random.default_rng(0)
    names = sorted(set(groups))
    index = {name: number for number, name in enumerate(names)}
    which = np.array([index[group] for group in groups])
    sums, counts = np.bincount(which, values), np.bincount(which)
    picked = rng.integers(0, len(names), (num_resamples, len(names)))
    means = sums[picked].sum(axis=1) / counts[picked].sum(axis=1)
    low, high = np.percentile(means, [2.5, 97.5])
    return float(values.mean()), float(low), float(high)


def microseconds(network: Network, row: list[float], repeats: int = 20_000) -> float:
    began = perf_counter()
    for _ in range(repeats):
        network.output(row)
    return 1e6 * (perf_counter() - began) / repeats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", nargs="+", type=Path, help="record files, or the SpecKV authors' folder")
    parser.add_argument("--out", type=Path, required=True, help="folder for the exported predictors")
    parser.add_argument("--folds", type=int, default=5)
    parser.add_argument("--policies", default="", help="train on runs of policies whose names begin so (default: all)")
    parser.add_argument("--ship", type=Path, help="folder that gets the better step predictor as step.json")
    options = parser.parse_args()
    records, data_hash = read(options.records)
    records = [record for record in records if record.policy.startswith(options.policies)]
    if not records:
        raise ValueError(f"no run of a policy that begins with {options.policies!r} in {options.records}")
    options.out.mkdir(parents=True, exist_ok=True)
    versions = {"python": platform.python_version(), "numpy": np.__version__, "scikit-learn": sklearn.__version__}

    inputs, accepted, groups = token_examples(records)
    base = float(accepted.mean())
    entropy = -(base * np.log(base) + (1 - base) * np.log(1 - base))
    print(
        f"token examples {len(accepted)} from {len(set(groups))} prompts; accepted {base:.3f} (log loss {entropy:.4f})"
    )
    print(f"{'model':10s} {'log loss':>9s} {'brier':>7s} {'auc':>7s} {'ece':>7s} {'µs/call':>8s}")
    fits: dict[str, FittedToken] = {}
    for name in TOKEN_MODELS:
        fits[name] = fitted = fit_token_model(name, inputs, accepted, groups, options.folds)
        speed = microseconds(fitted.network, inputs[0].tolist())
        scores = fitted.scores
        print(
            f"{name:10s} {scores['log_loss']:9.4f} {scores['brier']:7.4f} {scores['auc']:7.4f} "
            f"{scores['ece']:7.4f} {speed:8.2f}"
        )
    difference = losses(fits["mlp"], accepted) - losses(fits["logistic"], accepted)
    mean, low, high = interval_by_prompt(difference, groups)
    winner = "mlp" if high < 0 else "logistic"
    print(f"log loss, mlp - logistic: {mean:+.4f} [{low:+.4f}, {high:+.4f}] over prompts: {winner} wins")

    step_inputs, rates, step_groups = step_examples(records)
    step_scores: dict[str, float] = {}
    step_errors: dict[str, float] = {}
    for name in ("ridge", "mlp-16"):
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
        shutil.copyfile(options.out / f"step-{step_winner}.json", options.ship / "step.json")
        print(f"{options.ship / 'step.json'} is {step_winner}")
    line = {
        "winner": winner,
        "step_winner": step_winner,
        "log_loss_mlp_minus_logistic": [mean, low, high],
        "token": {name: dict(fitted.scores) for name, fitted in fits.items()},
        "step_correlation": step_scores,
        "data_sha256": data_hash,
        "out": str(options.out),
    }
    print(json.dumps(line))


if __name__ == "__main__":
    run_script(main)
