"""For child processes of a test, through PYTHONPATH: makes torchvision importable with a CPU build of torch.

Its published wheel needs two compiled operators at import. Their schemas are declared right before.
"""

import sys
from typing import Any

_kept: list[Any] = []  # the schemas are removed with their library object


class DeclaresOperators:
    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == "torchvision" and not _kept:
            import torch

            library = torch.library.Library("torchvision", "FRAGMENT")
            _kept.append(library)
            if torch.version.cuda is None:
                library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
                library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


sys.meta_path.insert(0, DeclaresOperators())  # type: ignore[arg-type]
