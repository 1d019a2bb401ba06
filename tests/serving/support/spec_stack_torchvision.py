"""PyPI's torchvision is a CUDA build whose operators cannot load beside a CPU torch, and then fails at import, where it
registers fakes for them. Declaring the two schemas just before is enough: no such operator is ever run.
"""

from __future__ import annotations

import importlib.abc
import sys
from typing import Any


class _DeclareOperators(importlib.abc.MetaPathFinder):
    library: Any = None

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            self.library = torch.library.Library("torchvision", "DEF")
            for operator in ("nms", "qnms"):
                self.library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            KEPT.append(self.library)


KEPT: list[Any] = []
sys.meta_path.insert(0, _DeclareOperators())
