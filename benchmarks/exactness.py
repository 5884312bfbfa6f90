"""What dropout by the keys of the examples costs, in turns with torch's dropout: medians on the CPU, one thread.

python benchmarks/exactness.py --json exactness.json
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import timm
import torch
from torch import nn

from lockstep.core.data_protocols import Shard
from lockstep.models.nets import DigitNet
from lockstep.stochastic import KeyedModel, key_draws
from lockstep.stochastic.numbers import forward_keys
from measure import Rows, in_turns, parser, report, scaled, timed


def masks() -> Rows:
    """Microseconds of a forward and backward pass in training: by torch's generator and by keys."""
    keys = forward_keys(0, Shard(1, 0, torch.empty(64), torch.zeros(64), torch.arange(64), 64, 0, 1))

    def one_pass(model: nn.Module, inputs: tuple[Any, ...]) -> None:
        model(*inputs).sum().backward()

    rows = {}
    shapes = {f"Dropout, 64 x {n:,}": (n,) for n in (512, 9216, 65536)}
    layers: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
        name: (nn.Sequential(nn.Identity(), nn.Dropout(0.5)), shape) for name, shape in shapes.items()
    }
    layers["digitnet"] = (DigitNet().build(10, (1, 8, 8)), (1, 8, 8))
    options: dict[str, Any] = {"drop_rate": 0.1, "drop_path_rate": 0.1, "num_classes": 10}
    layers["resnet18 at 32 px, dropout and drop path"] = (timm.create_model("resnet18", **options), (3, 32, 32))
    small: dict[str, Any] = {**options, "img_size": 32, "patch_size": 4, "attn_drop_rate": 0.1, "proj_drop_rate": 0.1}
    vit = timm.create_model("vit_tiny_patch16_224", **small)
    layers["vit_tiny, 64 patches, four kinds of dropout"] = (vit, (3, 32, 32))
    for name, (model, shape) in layers.items():
        model.train()
        plain = copy.deepcopy(model)
        keyed = KeyedModel(model, key_draws(model, torch.zeros(1, *shape), 0))
        images = torch.randn(64, *shape, requires_grad=True)
        cases = {
            "torch": partial(timed, partial(one_pass, plain, (images,))),
            "keyed": partial(timed, partial(one_pass, keyed, (images, keys))),
        }
        rows[name] = scaled(in_turns(cases, 10), 1e6)
    return rows


def main() -> None:
    arguments = parser(__doc__).parse_args()
    torch.set_num_threads(1)
    report(arguments.json, {"masks of a forward pass, us": masks})


if __name__ == "__main__":
    main()
