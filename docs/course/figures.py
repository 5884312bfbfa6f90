"""Draw the figures of the course as SVG: `python docs/course/figures.py [FOLDER]`, by default beside this file.

Where a figure shows numbers, they are computed here by the functions that training uses, from models that are built.
Only the times of `frameworks` are measured elsewhere; docs/evidence/benchmarks.md has them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
import torch
import torch.distributed as dist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.utils.data import DistributedSampler
from torchvision.models import resnet18

import pitfall_memory_on_device_0 as device_0
from lockstep.core.plan import share
from lockstep.core.rng import permutation
from lockstep.strategy.zero import assign
from ranks import examples, on_ranks

HERE = Path(__file__).parent
MEASURED = HERE.parent / "evidence" / "figures.json"
COLOURS = ("#33658a", "#f26419", "#55a630", "#9d4edd", "#f6ae2d", "#7d8597")
MIB = 2**20


def gradients_of_resnet18() -> list[Tensor]:
    """The parameters of ResNet-18 in the order in which backward fills their gradients, without memory."""
    with torch.device("meta"):
        return list(resnet18().parameters())[::-1]


def stacked(axes: Axes, rows: Sequence[str], parts: Mapping[str, Sequence[float]]) -> None:
    """A horizontal bar for each row, stacked from parts, with a legend above."""
    left = [0.0] * len(rows)
    for colour, (name, widths) in zip(COLOURS, parts.items(), strict=False):
        axes.barh(rows, widths, left=left, color=colour, label=name)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.legend(ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)


def one_device(axes: Axes) -> None:
    """What one device holds while it trains ResNet-18 with AdamW in float32, without the activations."""
    weights = sum(parameter.numel() for parameter in gradients_of_resnet18()) * 4 / MIB
    parts = {"weights": [weights], "gradients": [weights], "AdamW's two averages": [2 * weights]}
    stacked(axes, ["ResNet-18"], parts)
    axes.set_xlabel("MiB; the activations, which grow with the batch, come on top")


def data_parallel(axes: Axes) -> None:
    memory = device_0.data_parallel(on_ranks(device_0.counted, device_0.DEVICES)[0])
    names = device_0.Memory._fields
    rows = [f"device {device}" for device in range(len(memory))]
    stacked(axes, rows, {name: [getattr(device, name) / 1024 for device in memory] for name in names})
    axes.set_xlabel("KiB under DataParallel (counted, one linear model)")


def shards(axes: Axes) -> None:
    """Which rank gets which positions of an epoch of 22 examples in batches of 8, on 3 ranks."""
    ranks, number, batch = 3, 22, 8
    cut = [0] * number
    for start in range(0, number, batch):
        size = min(batch, number - start)
        for rank in range(ranks):
            part = share(size, ranks, rank)
            cut[start + part.start : start + part.stop] = [rank] * (part.stop - part.start)
    strided = [-1] * (number + 2)
    for rank in range(ranks):
        sampler: DistributedSampler[int] = DistributedSampler(range(number), ranks, rank, shuffle=False)  # type: ignore[arg-type]
        for place, _ in enumerate(sampler):
            strided[place * ranks + rank] = rank
    repeated = [f"{place % number}" for place in range(len(strided))]
    for row, (owners, order) in enumerate(((cut, permutation(0, 0, number).tolist()), (strided, repeated))):
        for place, owner in enumerate(owners):
            axes.barh(row, 0.9, left=place, color=COLOURS[owner], height=0.6)
            axes.text(place + 0.45, row, str(order[place]), ha="center", va="center", color="white", fontsize=8.5)
    for step in range(batch, number, batch):
        axes.plot([step - 0.05] * 2, [-0.45, 0.45], color="black", linewidth=1)
    axes.set_yticks([0, 1], ["Lockstep, shuffled", "DistributedSampler, in order"])
    axes.invert_yaxis()
    axes.set_xlabel("place in the epoch; colour: rank, number: example, line: end of a global batch")


def gradients(axes: Axes) -> None:
    """The messages of one step: which bytes travel together."""
    parameters = gradients_of_resnet18()
    first, later = dist._DEFAULT_FIRST_BUCKET_BYTES, 25 * MIB
    buckets, _ = dist._compute_bucket_assignment_by_size(
        [torch.empty_like(p, device="cpu") for p in parameters], [first, later]
    )
    sizes = {
        "by hooks": [parameter.numel() * 4 for parameter in parameters],
        "DDP's buckets": [sum(parameters[index].numel() for index in bucket) * 4 for bucket in buckets],
    }
    for row, messages in enumerate(sizes.values()):
        left = 0.0
        for number, message in enumerate(messages):
            axes.barh(row, message / MIB, left=left, color=COLOURS[number % 2], edgecolor="white", linewidth=0.3)
            left += message / MIB
    axes.set_yticks(range(2), [f"{name}: {len(messages)} messages" for name, messages in sizes.items()])
    axes.invert_yaxis()
    axes.set_xlabel("MiB of ResNet-18's gradients, in the order in which backward fills them")


def batchnorm(axes: Axes) -> None:
    """How far the mean of a shard is from the mean of its global batch of 256, in standard deviations."""
    inputs, _ = examples(256)
    shuffled = inputs[torch.randperm(256, generator=torch.Generator().manual_seed(0))]
    sizes = [2, 4, 8, 16, 32, 64, 128, 256]
    for name, values, colour in (("shuffled", shuffled, COLOURS[0]), ("sorted by class", inputs, COLOURS[1])):
        errors = [
            float(
                ((torch.stack([part.mean(0) for part in values.split(size)]) - values.mean(0)) / values.std(0))
                .abs()
                .mean()
            )
            for size in sizes
        ]
        axes.plot(sizes, errors, "o-", color=colour, label=name)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, map(str, sizes))  # without the small digits of powers
    axes.set_xlabel("examples of one rank, of a global batch of 256")
    axes.set_ylabel("error of its mean (std)")
    axes.legend(frameon=False)


def precision(axes: Axes) -> None:
    """The real gradients of a small network, and the smallest numbers of the formats."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)).double()
    inputs, labels = examples(512)
    (nn.functional.cross_entropy(model(inputs), labels) / 1000).backward()
    values = torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])
    exponents = values[values != 0].abs().log2()
    counts, edges = torch.histogram(exponents.clamp(min=-40), bins=26, range=(-40.0, -8.0))
    axes.bar(edges[:-1].tolist(), counts.tolist(), width=1.1, align="edge", color=COLOURS[0])
    lost, inexact = (100 * float((exponents < limit).double().mean()) for limit in (-25, -14))
    axes.set_title(
        f"fp16 turns {lost:.0f} % into zero, and rounds {inexact - lost:.0f} % to fewer digits", fontsize=9
    )
    for name, smallest in (("fp16: smallest normal", -14), ("fp16: smallest of all", -24)):
        axes.axvline(smallest, color=COLOURS[1])
        axes.text(smallest + 0.2, float(counts.max()) * 0.9, name, rotation=90, va="top")
    axes.set_xlabel(
        "log2 of the gradients of a small network, for a loss divided by 1,000; bf16 and fp32 go down to -126"
    )
    axes.set_ylabel("gradients")


def frameworks(axes: Axes) -> None:
    """Time of an epoch, as times the plain loop's: the figures of benchmarks/evidence.py, without logging for two."""
    measured = json.loads(MEASURED.read_text())["overhead"]["tables"]["us per step"]["linear, batch 64"]
    names = {"plain loop": "bare", "Lockstep": "Lockstep", "Accelerate": "Accelerate"}
    names |= {name: f"{name}, no logging" for name in ("HF Trainer", "Lightning")}
    times = {name: measured[row] / measured["bare"] for name, row in names.items()}
    axes.barh(list(times), list(times.values()), color=COLOURS[0])
    axes.invert_yaxis()
    axes.set_xlabel("time of an epoch with a linear model, as times the plain loop's")


def passes(stages: int, micro_batches: int, most: Callable[[int], int]) -> list[list[tuple[int, int, bool]]]:
    """When each stage runs which pass, as (start, micro-batch, is backward). Each pass takes one unit of time.

    `most(stage)` is the number of micro-batches whose activations a stage holds at most.
    """
    forward, backward = [[-1] * micro_batches for _ in range(stages)], [[-1] * micro_batches for _ in range(stages)]
    done: list[list[tuple[int, int, bool]]] = [[] for _ in range(stages)]
    for now in range(8 * (stages + micro_batches)):
        for stage in range(stages):
            ahead = sum(time >= 0 for time in forward[stage])
            behind = sum(time >= 0 for time in backward[stage])
            after = forward if stage == stages - 1 else backward
            later = stage if stage == stages - 1 else stage + 1
            if behind < ahead and (ahead == micro_batches or ahead - behind >= most(stage)):
                if 0 <= after[later][behind] < now:
                    backward[stage][behind] = now
                    done[stage].append((now, behind, True))
            elif ahead < micro_batches and (stage == 0 or 0 <= forward[stage - 1][ahead] < now):
                forward[stage][ahead] = now
                done[stage].append((now, ahead, False))
    return done


def pipeline(axes: Axes) -> None:
    stages, micro_batches = 4, 8
    for row, (name, most) in enumerate(
        {"gpipe": lambda stage: micro_batches, "1f1b": lambda stage: stages - stage}.items()
    ):
        for stage, done in enumerate(passes(stages, micro_batches, most)):
            place = row * (stages + 1) + stage
            for start, number, is_backward in done:
                axes.barh(place, 0.95, left=start, height=0.9, color=COLOURS[int(is_backward)])
                axes.text(start + 0.47, place, str(number), ha="center", va="center", color="white", fontsize=8.5)
        axes.text(-0.3, row * (stages + 1) + 1.5, name, ha="right", va="center")
    axes.set_yticks([])
    axes.invert_yaxis()
    axes.set_xlabel("time in passes; a row is a stage, a number a micro-batch; blue: forward, orange: backward")


def sharding(axes: Axes) -> None:
    """The bytes of each of 4 ranks for ResNet-18 with AdamW; `zero` gives whole parameters to ranks."""
    ranks, parameters = 4, gradients_of_resnet18()
    whole = sum(parameter.numel() for parameter in parameters) * 4 / MIB
    owners = assign(parameters, ranks)
    owned = [sum(p.numel() for p, owner in owners.items() if owner == rank) * 8 / MIB for rank in range(ranks)]
    rows = ["ddp, each rank", *(f"zero, rank {rank}" for rank in range(ranks)), "fsdp, each rank"]
    parts = {
        "weights": [whole] * 5 + [whole / ranks],
        "gradients": [whole] * 5 + [whole / ranks],
        "AdamW's two averages": [2 * whole, *owned, 2 * whole / ranks],
    }
    stacked(axes, rows, parts)
    axes.set_xlabel("MiB, without activations and without what fsdp gathers for a moment")


def nodes(axes: Axes) -> None:
    """How long a ring takes to average ResNet-18's gradients: 2 (W-1)/W of the bytes over the slowest link."""
    size = sum(parameter.numel() for parameter in gradients_of_resnet18()) * 4
    ranks = [2, 4, 8, 16, 32, 64]
    for colour, gigabits in zip(COLOURS, (1, 10, 100, 400), strict=False):
        axes.plot(
            ranks,
            [2 * (w - 1) / w * size * 8 / gigabits / 1e6 for w in ranks],
            "o-",
            color=colour,
            label=f"{gigabits} Gbit/s",
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(ranks, map(str, ranks))  # without the small digits of powers
    axes.set_yticks([1, 10, 100, 1000], ["1", "10", "100", "1,000"])
    axes.set_xlabel("ranks")
    axes.set_ylabel("ms per step")
    axes.legend(frameon=False, ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0))


FIGURES: tuple[Callable[[Axes], None], ...] = (
    one_device,
    data_parallel,
    shards,
    gradients,
    batchnorm,
    precision,
    frameworks,
    pipeline,
    sharding,
    nodes,
)


def draw(folder: Path) -> None:
    """Write `NAME.svg` for each figure; two calls with the same packages write the same bytes.

    They are as wide as the text of the site, 48em of 16 pixels (96 are an inch). The font of 9 points has 12 pixels.
    """
    with mpl.rc_context({"svg.hashsalt": "lockstep", "svg.fonttype": "none", "font.size": 9}):
        for content in FIGURES:
            figure = Figure(figsize=(8, 3.2 if content is pipeline else 2.6), layout="constrained")
            axes = figure.subplots()
            axes.spines[["top", "right"]].set_visible(False)
            content(axes)
            figure.savefig(folder / f"{content.__name__}.svg", metadata={"Date": None})


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE)
