"""What a device does in a step: its operations, the peak rate of a GPU, and a profile of a few steps.

MFU is computed from the first two. The profile is a trace for Chrome's viewer, and a table of operators.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn
from torch.profiler import ProfilerActivity

from lockstep.core import log
from lockstep.core.data_protocols import Shard
from lockstep.core.model import forward_on_meta
from lockstep.core.safe_write import make_folder, storing, write_atomic
from lockstep.core.tags import MFU

AFTER, PROFILED_STEPS = 50, 3  # the profile begins after so many steps, when the first ones' warm-up is over
OPERATORS = 30  # rows of the table


def profiled(shards: Iterator[Shard], folder: Path, total: int, *, on_gpu: bool) -> Iterator[Shard]:
    """Pass shards on, and profile `PROFILED_STEPS` of this process's `total` steps; of few ones, those in the middle.

    Writes `trace.json.gz` and `operators.txt` to `folder`.
    """
    activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * on_gpu]
    # Events accumulate over one cycle only; without this, torch 2.11 warns that it would clear them.
    profiler = torch.profiler.profile(activities=activities, acc_events=True)
    steps = min(PROFILED_STEPS, total)
    first = min(AFTER, (total - steps) // 2) + 1
    for number, shard in enumerate(shards, start=1):
        if number == first:
            profiler.start()
        yield shard
        if number == first + steps - 1:
            if on_gpu:
                torch.cuda.synchronize()
            profiler.stop()
            trace = folder / "trace.json.gz"
            with storing(folder):
                make_folder(folder)
                profiler.export_chrome_trace(str(trace))
            own = "self_cuda_time_total" if on_gpu else "self_cpu_time_total"
            table = profiler.key_averages().table(sort_by=own, row_limit=OPERATORS)
            write_atomic(folder / "operators.txt", f"{table}\n")
            log.say_row("profile", f"{steps} steps in {trace}, for chrome://tracing or ui.perfetto.dev")


# Dense peak rates in 1e12 operations per second: fp32, tf32, and bf16 or fp16 with sums in fp32. From NVIDIA's data
# sheets and architecture papers; where those give rates with sparsity, half of them. The keys are CUDA's names of
# cards without the memory. Names must match exactly: laptop parts, slices of a card (MIG) and variants for one market
# have other rates than the card that their name begins with.
PEAK_TFLOPS: dict[tuple[str, ...], tuple[float, float, float]] = {
    ("GB300", "GB200"): (80, 1250, 2500),
    ("B300", "B200"): (75, 1125, 2250),
    ("B100",): (60, 875, 1750),
    ("GH200", "H200", "H100", "H800"): (67, 494, 989),
    ("H200 NVL", "H100 NVL"): (60, 418, 836),
    ("H100 PCIe", "H800 PCIe"): (51, 378, 756),
    ("H20",): (44, 74, 148),
    ("A100-SXM4", "A100-PCIE", "A100 PCIe", "A800-SXM4", "A800 PCIe"): (19.5, 156, 312),
    ("A40",): (37.4, 74.8, 150),
    ("A30",): (10.3, 82, 165),
    ("A10",): (31.2, 62.5, 125),
    ("A10G",): (35, 35, 70),
    ("A2",): (4.5, 9, 18),
    ("L40S",): (91.6, 183, 362),
    ("L40",): (90.5, 90.5, 181),
    ("L20",): (59.8, 59.8, 119.5),
    ("L4",): (30.3, 60, 121),
    ("RTX 6000 Ada Generation",): (91.1, 182, 364),
    ("RTX A6000",): (38.7, 77.4, 155),
    ("V100-SXM2", "V100-SXM3"): (15.7, 15.7, 125),
    ("V100-PCIE",): (14, 14, 112),
    ("T4",): (8.1, 8.1, 65),
    ("RTX 5090",): (105, 105, 210),
    ("RTX 4090",): (82.6, 82.6, 165),
    ("RTX 4080",): (48.7, 48.7, 97.5),
    ("RTX 3090",): (35.6, 35.6, 71),
    ("RTX 3090 Ti",): (40, 40, 80),
    ("RTX 2080 Ti",): (13.4, 13.4, 53.8),
}
# Parts of CUDA's names that are not in the keys: the maker and the family, and the size and kind of the memory.
NOT_IN_KEYS = re.compile(r"^(NVIDIA )?(Tesla |GeForce )?|[- ]\d+G(B\b|\b)|[- ]HBM\w+")


def training_flops(model: nn.Module, input_shape: tuple[int, int, int]) -> float:
    """Floating-point operations of one example's forward and backward pass: three times as many as the forward pass.

    They are counted on torch's meta device, so nothing is computed and `model` is not changed. 0, with a line in the
    log, for a model whose forward pass depends on values.
    """
    from torch.utils.flop_counter import FlopCounterMode  # imports triton

    counter = FlopCounterMode(display=False)
    try:
        with counter:
            forward_on_meta(model, input_shape)
    except Exception as error:  # a forward pass can raise anything, and this figure must not end a run
        log.logger.info("the operations of the model cannot be counted, so there is no %s: %s", MFU, error)
        return 0.0
    return 3.0 * counter.get_total_flops()


def peak_flops(device: torch.device, dtype: torch.dtype, *, tf32: bool) -> float:
    """Peak operations per second of one GPU in a dtype; 0, with a line in the log, for an unknown GPU."""
    if device.type != "cuda" or dtype is torch.float64:
        return 0.0
    name = torch.cuda.get_device_name(device)
    short = NOT_IN_KEYS.sub("", name)
    rates = next((rates for names, rates in PEAK_TFLOPS.items() if short in names), None)
    if rates is None:
        log.logger.info("the peak rate of %s is not known, so there is no %s", name, MFU)
        return 0.0
    return 1e12 * rates[2 if dtype is not torch.float32 else 1 if tf32 else 0]
