"""RandAugment for a whole batch at once, against torchvision's, which is called image by image.

    python benchmarks/randaugment.py --json randaugment.json

Two operations of magnitude 9 on batches of noise. torchvision's run on Pillow images, as in its reference recipes,
and on tensors. Microseconds per image, medians; CPU, one thread. With `--device cuda` Lockstep's runs on the GPU, as
launched by Python and compiled.
"""

from __future__ import annotations

from functools import partial

import torch
from PIL import Image
from torchvision.transforms import v2

from lockstep.core.rng import SampleRNG
from lockstep.data.transforms.randaugment import randaugment
from measure import Rows, in_turns, parser, report, scaled, timed

BATCHES = {32: 512, 224: 64}  # by the side of an image


def costs(size: int, device: torch.device, repeats: int) -> dict[str, float]:
    """Microseconds per image."""
    batch = BATCHES[size]
    images = torch.randint(256, (batch, 3, size, size), dtype=torch.uint8)
    pillow = [Image.fromarray(image.permute(1, 2, 0).numpy()) for image in images]
    there, indices, transform = images.to(device), torch.arange(batch, device=device), v2.RandAugment()

    def ours(compiled: bool = False) -> None:
        randaugment(there, SampleRNG(0, 0, indices), ops=2, magnitude=9, compiled=compiled)
        if device.type == "cuda":
            torch.cuda.synchronize()

    cases = {
        "torchvision, Pillow": partial(timed, lambda: [transform(image) for image in pillow]),
        "torchvision, tensors": partial(timed, lambda: [transform(image) for image in images]),
        "lockstep": partial(timed, ours),
    }
    if device.type == "cuda":
        cases["lockstep, compiled"] = partial(timed, partial(ours, compiled=True))
    ours()  # warm-up
    return scaled(in_turns(cases, repeats), 1e6 / batch)


def main() -> None:
    options = parser(__doc__, repeats=15)
    options.add_argument("--device", type=torch.device, default=torch.device("cpu"), help="of Lockstep's [cpu]")
    arguments = options.parse_args()
    torch.set_num_threads(1)

    def table() -> Rows:
        return {f"{size} px": costs(size, arguments.device, arguments.repeats) for size in BATCHES}

    report(arguments.json, {"RandAugment, us per image": table})


if __name__ == "__main__":
    main()
