"""Fit the small MLP that the default policy asks per drafted token, on texts of a real pair.

Asks: how well do the draft's confidence and entropy, at a token and at the one before it, tell whether the target takes
the token, and, the token being right, the one behind it? One network answers both; an input says which is asked. Reads
the texts of `record_texts.py`. Prints log loss and AUC on texts that were left out (five parts, by text), beside a
logistic regression and the confidence itself; --out fits all of them and writes the weights. Ends in one JSON line.

    train_survival.py texts.jsonl --out spec_stack/assets/survival.json
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import sklearn
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss, roc_auc_score
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from experiments.common.environment import describe
from experiments.common.script import run_script
from experiments.policies.simulated_pair import Text, read_texts
from spec_stack.controller.acceptance import KIND, SURVIVAL_FEATURES, survival_features
from spec_stack.controller.base import DraftSignals
from spec_stack.controller.predictor import Card, save_predictor
from spec_stack.offline.training import as_network

NUM_PARTS = 5
Array = np.ndarray[Any, Any]


def examples(texts: Sequence[Text]) -> tuple[Array, Array, Array]:
    """Inputs (n, 6), outcomes (n,), and the text of each (n,): a token's own, and, behind a right one, the next's."""
    inputs, outcomes, groups = [], [], []
    for number, text in enumerate(texts):
        signals = DraftSignals([row[0] for row in text.draft_rows], [row[1] for row in text.draft_rows])
        right = text.is_right
        for index, is_right in enumerate(right):
            of_own, of_next = survival_features(signals, index)
            inputs.append(of_own)
            outcomes.append(is_right)
            if is_right and index + 1 < len(right):
                inputs.append(of_next)
                outcomes.append(right[index + 1])
            groups += [number] * (len(inputs) - len(groups))
    return np.array(inputs), np.array(outcomes, dtype=int), np.array(groups)


def mlp(hidden: int, seed: int) -> Any:
    """An unfitted network on scaled inputs."""
    return make_pipeline(StandardScaler(), MLPClassifier((hidden,), max_iter=300, alpha=0.3, random_state=seed))


def left_out_scores(make: Callable[[], Any], inputs: Array, outcomes: Array, groups: Array) -> dict[str, float]:
    """Log loss and AUC of what estimators say of texts that they have not seen."""
    said = np.zeros(len(outcomes))
    for part in range(NUM_PARTS):
        out = groups % NUM_PARTS == part
        said[out] = make().fit(inputs[~out], outcomes[~out]).predict_proba(inputs[out])[:, 1]
    return scores(said, outcomes)


def scores(said: Array, outcomes: Array) -> dict[str, float]:
    """Score chances by log loss and AUC."""
    return {"log_loss": float(log_loss(outcomes, said)), "auc": float(roc_auc_score(outcomes, said))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", nargs="+", type=Path, help="files that record_texts.py wrote")
    parser.add_argument("--hidden", type=int, default=12, help="width of the hidden layer (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="file for the weights, fitted on all texts")
    arguments = parser.parse_args()
    if arguments.hidden < 1:
        parser.error("--hidden must be 1 or more")
    texts = read_texts(arguments.texts)
    if len(texts) < NUM_PARTS:
        parser.error(f"{len(texts)} texts cannot be judged in {NUM_PARTS} parts")
    inputs, outcomes, groups = examples(texts)
    found = {
        "mlp": left_out_scores(lambda: mlp(arguments.hidden, arguments.seed), inputs, outcomes, groups),
        "logistic": left_out_scores(
            lambda: make_pipeline(StandardScaler(), LogisticRegression(max_iter=500)), inputs, outcomes, groups
        ),
        "confidence": scores(np.exp(inputs[:, 0]), outcomes),
    }
    print(f"{len(texts)} texts, {len(outcomes)} examples, {outcomes.mean():.3f} right; on texts left out:")
    for name, of_model in found.items():
        print(f"  {name:12s}log loss {of_model['log_loss']:.4f}  AUC {of_model['auc']:.4f}")
    if arguments.out is not None:
        digest = hashlib.sha256(b"".join(path.read_bytes() for path in arguments.texts)).hexdigest()
        card = Card(
            kind=KIND,
            model=f"mlp-{arguments.hidden}",
            features=SURVIVAL_FEATURES,
            data_sha256=digest,
            num_examples=len(outcomes),
            num_prompts=len(texts),
            versions={"python": platform.python_version(), "scikit-learn": sklearn.__version__},
            scores=found["mlp"],
        )
        fitted = mlp(arguments.hidden, arguments.seed).fit(inputs, outcomes)
        save_predictor(arguments.out, as_network(fitted), card)
    print(json.dumps({"experiment": "train_survival", **describe(), "texts": len(texts), "scores": found}))


if __name__ == "__main__":
    run_script(main)
