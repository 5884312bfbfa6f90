"""The CIFAR-10 speed recipe against a plain loop of the same recipe: accuracy and seconds, on the same bytes.

    python benchmarks/cifar10_speedrun.py --json cifar10_speedrun.json                   # the data set in data/
    python benchmarks/cifar10_speedrun.py --folder cifar10_jpeg --val-folder test        # images in class folders
    python benchmarks/cifar10_speedrun.py --device cpu --epochs 1 --seeds 0 1            # a smaller question

The reference is written here from PyTorch alone, after airbench94_muon (Jordan 2024, arXiv 2404.00498): its own
network, augmentation, Muon and loop, and `torch.optim.SGD` for what is not a filter. It shares the decoded images
with Lockstep and nothing else. Both train with each seed, in turns, so that the spread over seeds is known. The
seconds are from the end of the first step to the end of the one evaluation with six views: decoding, warm-up and the
compilation of a step are outside. Lockstep runs as `train.py` does, with its telemetry and checkpoint. On a GPU add
`--compile`.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lockstep import config, experiment, resolve
from lockstep.config import Job
from lockstep.data.reading import sample
from lockstep.rundir import RunDir
from lockstep.world import World
from measure import Figures, Rows, console, parser, show, write

ROOT = Path(__file__).parent.parent
BATCH = 2000
WIDTHS = (64, 256, 256)
Split = tuple[Tensor, Tensor]


class Reference(nn.Module):
    """Whitened 2x2 patches, three blocks of two convolutions, a linear layer whose logits are made smaller."""

    def __init__(self) -> None:
        super().__init__()
        self.whitening = nn.Conv2d(3, 24, 2)
        nn.init.zeros_(self.whitening.bias)  # type: ignore[arg-type]
        self.whitening.weight.requires_grad = False
        channels = [24, *WIDTHS]
        self.filters = nn.ModuleList()
        self.norms = nn.ModuleList()
        for block in range(3):
            for inner in range(2):
                entering = channels[block + inner]
                layer = nn.Conv2d(entering, WIDTHS[block], 3, padding="same", bias=False)
                nn.init.dirac_(layer.weight.data[:entering])
                self.filters.append(layer)
                norm = nn.BatchNorm2d(WIDTHS[block], momentum=0.4)
                norm.weight.requires_grad = False
                self.norms.append(norm)
        self.head = nn.Linear(WIDTHS[-1], 10, bias=False)

    def whiten(self, images: Tensor) -> None:
        """Set the first layer from normalised images."""
        patches = images.unfold(2, 2, 1).unfold(3, 2, 1).permute(0, 2, 3, 1, 4, 5).reshape(-1, 12).double()
        variances, directions = torch.linalg.eigh(patches.T @ patches / len(patches))
        filters = (directions / (variances + 5e-4).sqrt()).T.reshape(12, 3, 2, 2)
        self.whitening.weight.data.copy_(torch.cat([filters, -filters]))

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.whitening(x))
        for number, (layer, norm) in enumerate(zip(self.filters, self.norms, strict=True)):
            x = layer(x)
            if number % 2 == 0:
                x = F.max_pool2d(x, 2)
            x = F.gelu(norm(x))
        logits: Tensor = self.head(F.max_pool2d(x, 3).flatten(1)) / 9
        return logits


class ReferenceMuon(torch.optim.Optimizer):
    """One filter after the other, after the published code."""

    def __init__(self, params: Iterator[nn.Parameter], lr: float, momentum: float) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for each in group["params"]:
                buffer = self.state[each].setdefault("momentum", torch.zeros_like(each))
                buffer.mul_(group["momentum"]).add_(each.grad)
                update = each.grad.add(buffer, alpha=group["momentum"]).reshape(len(each), -1)
                each.mul_(len(each) ** 0.5 / each.norm())
                each.add_(_orthogonal(update).view_as(each), alpha=-group["lr"])


def _orthogonal(matrix: Tensor) -> Tensor:
    x = matrix / (matrix.norm() + 1e-7)
    if tall := len(x) > x.shape[1]:
        x = x.T
    for _ in range(3):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.T if tall else x


def reference(job: Job, train: Split, held_out: Split, seed: int) -> Figures:
    """Train the plain loop; the splits are uint8 images and labels on the device."""
    epochs = job.epochs
    device = train[0].device
    torch.manual_seed(seed)
    mean, std = (torch.tensor(each, device=device).view(1, 3, 1, 1) for each in (job.dataset.mean, job.dataset.std))
    images = ((train[0].float() / 255 - mean) / std).contiguous(memory_format=torch.channels_last)
    model = Reference().to(device).to(memory_format=torch.channels_last)
    spread = torch.arange(0, len(images), max(1, len(images) // 5000), device=device)
    model.whiten(images[spread].contiguous())
    if job.model.compile:
        model.compile()
    biases = [model.whitening.bias, *(each.bias for each in model.norms)]
    # The rates are for the sum of a batch's losses, as published; a weight's decay is the same for all.
    decay = 2e-6 * BATCH
    groups = [
        {"params": biases, "lr": 0.053, "weight_decay": decay / 0.053},
        {"params": [model.head.weight], "lr": 0.67 * (9 / 256) ** 2, "weight_decay": decay / (0.67 * (9 / 256) ** 2)},
    ]
    sgd = torch.optim.SGD(groups, momentum=0.85, nesterov=True, fused=True)
    muon = ReferenceMuon(model.filters.parameters(), lr=0.24, momentum=0.6)
    rates = [(group, group["lr"]) for group in sgd.param_groups + muon.param_groups]
    per_epoch = -(-len(images) // BATCH)
    total, step, began = epochs * per_epoch, 0, 0.0
    padded = F.pad(images, [2] * 4, mode="reflect")
    mirrored = torch.rand(len(images), device=device) < 0.5
    for epoch in range(epochs):
        order = torch.randperm(len(images), device=device)
        for chosen in order.split(BATCH):
            for group, rate in rates:
                group["lr"] = rate * (1 - step / total)
            batch = _cropped(padded[chosen], mirrored[chosen] ^ (epoch % 2 == 1))
            with torch.autocast(device.type, torch.bfloat16):
                logits = model(batch)
            loss = F.cross_entropy(logits.float(), train[1][chosen], label_smoothing=0.2, reduction="sum")
            loss.backward()
            for optimizer in (sgd, muon):
                optimizer.step()
                optimizer.zero_grad()
            step += 1
            began = time.perf_counter() if step == 1 else began
    model.eval()
    hits = 0
    with torch.no_grad(), torch.autocast(device.type, torch.bfloat16):
        for pixels, labels in zip(held_out[0].split(BATCH), held_out[1].split(BATCH), strict=True):
            inputs = ((pixels.float() / 255 - mean) / std).contiguous(memory_format=torch.channels_last)
            hits += int((_six_views(model, inputs).argmax(1) == labels).sum())
    return {"top1": 100 * hits / len(held_out[1]), "seconds": time.perf_counter() - began}


def _cropped(padded: Tensor, mirrored: Tensor) -> Tensor:
    """Each image's own crop, by the 25 places that there are."""
    found = padded.new_empty((len(padded), 3, 32, 32)).contiguous(memory_format=torch.channels_last)
    places = torch.randint(25, (len(padded),), device=padded.device)
    for place in range(25):
        top, left = divmod(place, 5)
        found[places == place] = padded[places == place, :, top : top + 32, left : left + 32]
    return torch.where(mirrored.view(-1, 1, 1, 1), found.flip(-1), found)


def _six_views(model: nn.Module, images: Tensor) -> Tensor:
    """Twice the mirrored pair in place and once each of two moved ones."""

    def pair(x: Tensor) -> Tensor:
        logits: Tensor = model(x).float() + model(x.flip(-1)).float()
        return logits

    padded = F.pad(images, [1] * 4, mode="reflect")
    moved = pair(padded[:, :, :32, :32].contiguous(memory_format=torch.channels_last))
    moved += pair(padded[:, :, 2:, 2:].contiguous(memory_format=torch.channels_last))
    return 2 * pair(images) + moved


def lockstep(job: Sequence[str], seed: int) -> Figures:
    """The real run, in a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        run = RunDir.at(Path(folder) / "run")
        composed = config.composed(ROOT / "conf", [*job, f"seed={seed}", f"output_root={folder}"])
        resolved = resolve.resolve(composed, sweep=False)
        run.config.write_text(config.dump(resolved))
        run.overrides.write_text(config.dump_list([]))
        ends: list[float] = []
        evaluations = -(-len(config.build_all(resolved).dataset.eval()) // BATCH)
        with console.capture():
            experiment.run(
                World.solo(resolved["device"]),
                run,
                alive=lambda: ends.append(time.perf_counter()),
            )
        steps = int(run.read_summary()["step"])
        # Signs of life: one for each step, for each block of the evaluation, and for the save.
        return {"top1": float(run.read_summary()["best"]), "seconds": ends[steps + evaluations - 1] - ends[0]}


def on_device(split: Any, device: str) -> Split:
    """All images of a split and their labels."""
    return sample(split, len(split)).to(device), split.labels.to(device)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--folder", type=Path, help="CLASS/*.jpg in train and the evaluation split's folder")
    options.add_argument("--val-folder", default="val", help="name of that folder")
    options.add_argument("--data-root", default="data", help="where CIFAR-10 is without --folder")
    options.add_argument("--device", default="auto", help="auto, cpu or cuda")
    options.add_argument("--epochs", type=int, default=8)
    options.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options.add_argument("--compile", action="store_true", help="torch.compile both networks")
    arguments = options.parse_args()
    words = [
        "experiment=cifar10_speedrun",
        "name=speedrun",
        f"device={arguments.device}",
        f"epochs={arguments.epochs}",
        f"model.compile={str(arguments.compile).lower()}",
        f"data_root={arguments.data_root}",
    ]
    if arguments.folder is not None:
        words += ["dataset=folder", f"dataset.path={arguments.folder}", f"dataset.val_folder={arguments.val_folder}"]
        words += ["dataset.decode_size=32"]
    job = config.build_all(resolve.resolve(config.composed(ROOT / "conf", words), sweep=False))
    job.dataset.prepare()
    train, held_out = (on_device(split, job.device) for split in (job.dataset.train(), job.dataset.eval()))
    contenders: dict[str, Callable[[int], Figures]] = {
        "reference": partial(reference, job, train, held_out),
        "lockstep": partial(lockstep, words),
    }
    found: dict[str, list[Figures]] = {name: [] for name in contenders}
    for seed in arguments.seeds:
        for name, measure in contenders.items():
            found[name].append(measure(seed))
            console.print(f"seed {seed}, {name}: {found[name][-1]}")
    tables: dict[str, Rows] = {f"{arguments.epochs} epochs": {}}
    for figure in ("top1", "seconds"):
        each = {name: [one[figure] for one in figures] for name, figures in found.items()}
        tables[f"{arguments.epochs} epochs"][figure] = {
            name: statistics.mean(values) for name, values in each.items()
        }
        if len(arguments.seeds) > 1:
            spread = {name: statistics.stdev(values) for name, values in each.items()}
            tables[f"{arguments.epochs} epochs"][f"{figure}, over seeds +-"] = spread
    for title, rows in tables.items():
        show(title, rows, ratios=False)
    write(arguments.json, tables, seeds=arguments.seeds)


if __name__ == "__main__":
    main()
