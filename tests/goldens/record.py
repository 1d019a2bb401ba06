"""`python -m tests.goldens.record` writes the golden outputs anew; names after it, those scenarios alone."""

from __future__ import annotations

import json
import sys

import torch

from tests.goldens.test_goldens import EXPECTED, SCENARIOS


def main(names: list[str]) -> None:
    torch.set_num_threads(1)
    known = json.loads(EXPECTED.read_text(encoding="utf-8")) if EXPECTED.exists() else {}
    made = {name: SCENARIOS[name]() for name in names or SCENARIOS}
    for name, value in made.items():
        print(f"{name}: {'as before' if known.get(name) == value else 'changed' if name in known else 'new'}")
    goldens = {name: (known | made)[name] for name in SCENARIOS}
    lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in goldens.items()]
    EXPECTED.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
