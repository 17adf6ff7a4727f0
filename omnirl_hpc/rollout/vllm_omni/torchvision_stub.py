"""Lets a CUDA build of torchvision be imported beside a CPU build of torch. Installed by make install
ENGINE=vllm_omni.

torchvision registers shape functions for two operators that its C++ library defines. The library is linked to
CUDA, so on a machine without it the operators do not exist and the import dies at `operator torchvision::nms
does not exist`. Its image transforms, which transformers' Qwen2-VL processor needs, use neither.

This file is copied into site-packages and imported by a .pth file at every start of Python, so it imports
nothing until torchvision is.
"""

import importlib.abc
import importlib.metadata
import sys


class _BeforeTorchvision(importlib.abc.MetaPathFinder):
    """Finds nothing; the first search for torchvision defines the operators."""

    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            if torch.version.cuda is None and "+cpu" not in importlib.metadata.version("torchvision"):
                for operator in ("nms", "qnms"):
                    torch.library.define(
                        f"torchvision::{operator}",
                        "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
                    )
        return None


sys.meta_path.insert(0, _BeforeTorchvision())
