"""An NVML without a GPU: what the driver would answer, and what it refuses."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pynvml

# What GPM says of a GPU: percent, and whether it knows.
SHARES = {
    pynvml.NVML_GPM_METRIC_SM_UTIL: (80.0, pynvml.NVML_SUCCESS),
    pynvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL: (12.5, pynvml.NVML_SUCCESS),
    pynvml.NVML_GPM_METRIC_DRAM_BW_UTIL: (0.0, pynvml.NVML_ERROR_NOT_SUPPORTED),
}


class FakeNvml:
    """Answers for GPUs, whose handles are their UUIDs.

    Fields:
        load: the utilisation of each GPU, by UUID.
        cut: the instances (MIG) of some GPUs, by number; the name of an empty slot is empty.
        refused: the codes with which queries fail, by name.
        lost_after: all queries fail once so many utilisations were asked for.
        calls: how often each query was made.
        answers: not set while the driver hangs.
    """

    def __init__(self, load: dict[str, int], cut: dict[int, list[str]] | None = None) -> None:
        self.load, self.cut, self.uuids = load, cut or {}, [*load]
        self.refused: dict[str, int] = {}
        self.lost_after: int | None = None
        self.calls: Counter[str] = Counter()
        self.answers = threading.Event()
        self.answers.set()
        self.sizes = itertools.repeat(2_500_000_000)
        self.millijoules = itertools.count(1500, 1500)
        handles = {name: name for name in itertools.chain(load, *self.cut.values())}
        self.queries: dict[str, Callable[..., Any]] = {
            "nvmlInit": lambda: None,
            "nvmlShutdown": lambda: None,
            "nvmlDeviceGetCount": lambda: len(self.uuids),
            "nvmlDeviceGetHandleByIndex": lambda number: self.uuids[number],
            "nvmlDeviceGetHandleByUUID": lambda uuid: handles.get(uuid) or fail(pynvml.NVML_ERROR_NOT_FOUND),
            "nvmlDeviceGetUUID": str,
            "nvmlDeviceGetMigMode": lambda gpu: [int(self.uuids.index(gpu) in self.cut), 0],
            "nvmlDeviceGetMaxMigDeviceCount": lambda gpu: 7,
            "nvmlDeviceGetMigDeviceHandleByIndex": self.instance,
            "nvmlDeviceGetComputeRunningProcesses": lambda gpu: [SimpleNamespace(pid=7)],
            "nvmlDeviceGetTopologyCommonAncestor": lambda *pair: pynvml.NVML_TOPOLOGY_SYSTEM,
            "nvmlDeviceGetP2PStatus": lambda first, second, index: int(not first.startswith("GPU-a")),
            "nvmlDeviceGetMemoryInfo": lambda gpu: SimpleNamespace(free=5, used=next(self.sizes)),
            "nvmlDeviceGetUtilizationRates": self.utilization,
            "nvmlDeviceGetPowerUsage": lambda gpu: 350_000,
            "nvmlDeviceGetTemperature": lambda gpu, sensor: 55,
            "nvmlDeviceGetClockInfo": lambda gpu, clock: 1980,
            "nvmlDeviceGetCurrentClocksEventReasons": self.reasons,
            "nvmlDeviceGetTotalEnergyConsumption": lambda gpu: (
                1500 * self.calls["nvmlDeviceGetTotalEnergyConsumption"]
            ),
            "nvmlGpmQueryDeviceSupport": lambda gpu: SimpleNamespace(isSupportedDevice=1),
            "nvmlGpmSampleAlloc": pynvml.c_nvmlGpmSample_t,
            "nvmlGpmSampleGet": lambda gpu, sample: None,
            "nvmlGpmMetricsGet": self.shares,
        }

    def plug_in(self, replace: Callable[[Any, str, Any], None] = setattr) -> FakeNvml:
        """Put this NVML in the place of the real one, by `monkeypatch.setattr` or for good."""
        for name, answer in self.queries.items():
            replace(pynvml, name, self.query(name, answer))
        return self

    def query(self, name: str, answer: Callable[..., Any]) -> Callable[..., Any]:
        def asked(*arguments: Any) -> Any:
            self.calls[name] += 1
            if name in self.refused:
                fail(self.refused[name])
            if self.lost_after is not None and self.calls["nvmlDeviceGetUtilizationRates"] > self.lost_after:
                fail(pynvml.NVML_ERROR_GPU_IS_LOST)
            return answer(*arguments)

        return asked

    def instance(self, gpu: str, number: int) -> str:
        slots = dict(enumerate(self.cut[self.uuids.index(gpu)]))
        return slots.get(number) or fail(pynvml.NVML_ERROR_NOT_FOUND)

    def utilization(self, gpu: str) -> SimpleNamespace:
        self.answers.wait(60)
        return SimpleNamespace(gpu=self.load[gpu])

    @staticmethod
    def reasons(gpu: str) -> int:
        return pynvml.nvmlClocksEventReasonSwThermalSlowdown if gpu == "GPU-bb" else 1

    @staticmethod
    def shares(request: Any) -> None:
        for metric in request.metrics[: request.numMetrics]:
            metric.value, metric.nvmlReturn = SHARES[metric.metricId]


def fail(code: int) -> Any:
    raise pynvml.NVMLError(code)
