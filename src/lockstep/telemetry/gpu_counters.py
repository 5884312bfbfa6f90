"""What NVML tells of a GPU as counters, whose difference between two samples is a figure: NVLink, and GPM.

GPM (GPU performance monitoring) counts what the SMs do, on Hopper and later GPUs. NVML's utilisation is the time in
which anything ran at all; these figures say how much of the GPU it used.
"""

import time
from contextlib import suppress
from typing import Any

import pynvml

# The share of the time, in percent, in which an SM had work, tensor cores were at work, and memory was transferred.
ACTIVE = {
    "sm_active": pynvml.NVML_GPM_METRIC_SM_UTIL,
    "tensor_active": pynvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL,
    "memory_active": pynvml.NVML_GPM_METRIC_DRAM_BW_UTIL,
}
# Counters in KiB, over all links of a GPU if the scope is this one.
LINKS = {
    "nvlink_in_mb_s": pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX,
    "nvlink_out_mb_s": pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX,
}
ALL_LINKS = 2**32 - 1


class Counters:
    """The counters of the GPU with a handle of NVML. Those that it does not offer are left out."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        self.looked, self.links = time.monotonic(), self._links()
        self.samples: list[Any] = []  # of GPM: the last one, and the memory for the next
        try:
            if pynvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice:
                for _ in range(2):
                    self.samples.append(pynvml.nvmlGpmSampleAlloc())
                pynvml.nvmlGpmSampleGet(handle, self.samples[0])
        except pynvml.NVMLError:  # an old driver, a part of a GPU (MIG), or counters that only root may read
            self.close()

    def sample(self) -> dict[str, float]:
        """The figures since the last sample: percent, and MB per second."""
        before, self.looked = self.looked, time.monotonic()
        last, self.links = self.links, self._links()
        passed = max(self.looked - before, 1e-6)
        figures = {name: (self.links[name] - last[name]) * 1024 / 1e6 / passed for name in last if name in self.links}
        return figures | self._active()

    def close(self) -> None:
        """Free the samples."""
        while self.samples:
            with suppress(pynvml.NVMLError):
                pynvml.nvmlGpmSampleFree(self.samples.pop())

    def _links(self) -> dict[str, int]:
        """What went over NVLink so far, in KiB. A GPU without links has no such counter."""
        try:
            values = pynvml.nvmlDeviceGetFieldValues(self.handle, [(field, ALL_LINKS) for field in LINKS.values()])
        except pynvml.NVMLError:
            return {}
        pairs = zip(LINKS, values, strict=True)
        return {name: value.value.ullVal for name, value in pairs if value.nvmlReturn == pynvml.NVML_SUCCESS}

    def _active(self) -> dict[str, float]:
        if not self.samples:
            return {}
        request = pynvml.c_nvmlGpmMetricsGet_t(
            version=pynvml.NVML_GPM_METRICS_GET_VERSION,
            numMetrics=len(ACTIVE),
            sample1=self.samples[0],
            sample2=self.samples[1],
        )
        for metric, number in zip(request.metrics, ACTIVE.values(), strict=False):
            metric.metricId = number
        try:
            pynvml.nvmlGpmSampleGet(self.handle, self.samples[1])
            pynvml.nvmlGpmMetricsGet(request)
        except pynvml.NVMLError:
            self.close()
            return {}
        self.samples.reverse()
        answers = zip(ACTIVE, request.metrics, strict=False)
        return {name: answer.value for name, answer in answers if answer.nvmlReturn == pynvml.NVML_SUCCESS}
