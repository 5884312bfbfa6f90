"""The GPUs of a machine as NVML and CUDA name them. NVML is a stub here, because most test machines have no GPU.

What `CUDA_VISIBLE_DEVICES` means is in the CUDA C++ Programming Guide (CUDA Environment Variables): only devices
before the first invalid one are visible, and a UUID may be cut as far as it is unique. The values here are worked out
from it by hand.
"""

import inspect
import os
import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from fake_nvml import FakeNvml
from helpers import resolved
from lockstep.core.world import World
from lockstep.diagnostics import examination
from lockstep.diagnostics.inspection import Finding
from lockstep.runtime import gpus
from lockstep.runtime.gpus import free_bytes, name_in_nvml, path_between, processes_on, visible_gpus
from lockstep.runtime.host import VISIBLE
from lockstep.telemetry.hardware import watched_gpus

WHOLE = ["GPU-aa11", "GPU-ab22", "GPU-ab33", "GPU-cc44"]
# An error of NVML that has a class of its own, and one that has none.
ERRORS = [pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_UNKNOWN]


def driver(monkeypatch: pytest.MonkeyPatch, cut: dict[int, list[str]] | None = None) -> FakeNvml:
    """An NVML with four GPUs, of which some are cut."""
    return FakeNvml(dict.fromkeys(WHOLE, 90), cut).plug_in(monkeypatch.setattr)


NOTHING = ("", "-1", "NoDevFiles", "0,0", "1,0,1", "9,0", "4", "GPU-ab", "GPU-aa,GPU-aa11", "MIG-zz")


@pytest.mark.parametrize(
    ("value", "names"),
    [
        (None, WHOLE),
        *((value, []) for value in NOTHING),
        *((value, ["0"]) for value in ("0,-1,2", "0,9", "0,,1")),
        ("3, 1", ["3", "1"]),
        ("2gpu,1", ["2", "1"]),
        *((value, ["GPU-aa11"]) for value in ("GPU-aa11", "GPU-aa,GPU-zz,GPU-cc", "GPU-aa,1")),
        ("GPU-aa,GPU-c", ["GPU-aa11", "GPU-cc44"]),
        ("GPU-ab3,GPU-ab2", ["GPU-ab33", "GPU-ab22"]),
        ("MIG-d1", ["MIG-d100"]),
        ("MIG-d2,MIG-d1", ["MIG-d200", "MIG-d100"]),
    ],
)
def test_visible_devices_are_as_in_cuda(monkeypatch: pytest.MonkeyPatch, value: str | None, names: list[str]) -> None:
    driver(monkeypatch, {} if value is None else {1: ["MIG-d100", "MIG-d200"]})
    monkeypatch.delenv(VISIBLE, raising=False)
    if value is not None:
        monkeypatch.setenv(VISIBLE, value)
    assert visible_gpus() == names


def test_a_gpu_that_is_cut_is_its_instances_and_each_has_its_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    driver(monkeypatch, {0: ["", "MIG-d1", "", "MIG-d2"], 2: []})
    monkeypatch.delenv(VISIBLE, raising=False)
    assert visible_gpus() == ["MIG-d1", "MIG-d2", "GPU-ab22", "GPU-ab33", "GPU-cc44"]
    monkeypatch.setenv(VISIBLE, "MIG-d2")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: SimpleNamespace(uuid="aa11"))
    assert name_in_nvml(0) == "MIG-d2"
    assert watched_gpus(nn.Linear(1, 1), World.solo("cuda:0")) == ["MIG-d2"]
    assert free_bytes("MIG-d2") == 5
    monkeypatch.setenv(VISIBLE, "3")
    assert name_in_nvml(0) == "GPU-aa11", "CUDA may number GPUs by their speed: it says itself which one it has"


def test_torch_still_has_the_parser_that_is_borrowed_from_it() -> None:
    """Both functions are private. torch counts its devices with them before CUDA is initialised."""
    assert "_parse_visible_devices" in inspect.getsource(torch.cuda._device_count_nvml)
    assert "_transform_uuid_to_ordinals" in inspect.getsource(torch.cuda._device_count_nvml)


@pytest.mark.parametrize("code", ERRORS)
def test_a_driver_that_refuses_says_nothing_and_ends_nothing(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    nvml = driver(monkeypatch)
    nvml.refused = dict.fromkeys(("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetMemoryInfo"), code)
    assert (processes_on("0"), free_bytes("GPU-aa11")) == ([], 0)
    nvml.refused = {"nvmlDeviceGetP2PStatus": code}
    assert path_between("0", "1") == "unknown path"
    nvml.refused = {"nvmlInit": code}
    monkeypatch.delenv(VISIBLE, raising=False)
    assert visible_gpus() == []
    monkeypatch.setenv(VISIBLE, "0,-1,2")
    assert visible_gpus() == ["0"]


def test_paths_have_the_words_of_nvidia_smi(monkeypatch: pytest.MonkeyPatch) -> None:
    driver(monkeypatch)
    assert path_between("GPU-aa11", "1") == "NVLink"
    assert path_between("3", "0") == "SYS without P2P"


class Wires:
    """Copies between pretended GPUs. Over a broken path nothing arrives: the target keeps what lay in its memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, broken: set[tuple[int, int]]) -> None:
        self.broken, self.place, self.memory = broken, WeakTensorKeyDictionary(), dict[int, Tensor]()
        monkeypatch.setattr(Tensor, "to", lambda tensor, device: self.copy(tensor, int(device.removeprefix("cuda:"))))

    def copy(self, tensor: Tensor, target: int) -> Tensor:
        is_lost = (self.place.get(tensor), target) in self.broken
        arrived = self.memory.get(target, torch.zeros_like(tensor)) if is_lost else tensor
        self.memory[target] = arrived.clone()
        copied = arrived.clone()
        self.place[copied] = target
        return copied


def add_by_gloo(tensors: list[Tensor]) -> None:
    """What NCCL does, by gloo: each tensor is a rank's."""
    store, wait = dist.HashStore(), timedelta(seconds=60)

    def add(rank: int) -> None:
        group = dist.ProcessGroupGloo(store, rank, len(tensors), wait)
        group.allreduce([tensors[rank]]).wait()

    threads = [threading.Thread(target=add, args=[rank]) for rank in range(len(tensors))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def examined(
    monkeypatch: pytest.MonkeyPatch, add: Callable[[list[Tensor]], None], ranks: int = 4, **broken: Any
) -> list[Finding]:
    """What `doctor` says of a job on GPUs, after the lines of the single ones."""
    driver(monkeypatch)
    Wires(monkeypatch, **{"broken": set(), **broken})
    fakes = {
        "mem_get_info": lambda number: (80 * 2**30, 80 * 2**30),
        "get_device_name": lambda number: "NVIDIA H100",
        "get_device_properties": lambda number: SimpleNamespace(uuid=WHOLE[number].removeprefix("GPU-")),
        "synchronize": lambda: None,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch.cuda.nccl, "all_reduce", add)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 3))
    job = resolved("model=linear", "device=cpu", "strategy=ddp", "launcher=spawn", "launcher.threads=1")
    launcher = replace(job.launcher, ranks=ranks, backend="nccl")
    return [*examination.devices(replace(job, device="cuda", launcher=launcher))][ranks + 1 :]


def test_gpus_that_copy_and_add_right_are_fine_and_their_paths_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    topology, copies, nccl = examined(monkeypatch, add_by_gloo)
    assert topology.text == "NVLink (see nvidia-smi topo -m) between GPUs 0-1, 0-2, 0-3, 1-2, 1-3, 2-3"
    assert (copies.level, copies.text) == ("ok", "numbers that are copied between 4 GPUs arrive as they were")
    assert (nccl.level, nccl.text) == ("ok", "2.28.3 adds over 4 GPUs")
    (alone,) = examined(monkeypatch, add_by_gloo, ranks=1)
    assert alone.text == "2.28.3 adds over 1 GPU"


@pytest.mark.parametrize("pair", [(0, 1), (3, 0)])
def test_a_pair_of_gpus_with_broken_copies_is_named_and_nccl_is_not_started(
    monkeypatch: pytest.MonkeyPatch, pair: tuple[int, int]
) -> None:
    started: list[object] = []
    monkeypatch.delenv("NCCL_P2P_DISABLE", raising=False)
    _, copies = examined(monkeypatch, started.append, broken={pair})
    assert copies.level == "error"
    says = f"numbers that are copied from GPU {pair[0]} to {pair[1]} arrive changed: set NCCL_"
    assert copies.text.startswith(says)
    assert not started, "it may never return"


def test_with_p2p_turned_off_a_broken_pair_is_a_warning_and_nccl_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    _, copies, nccl = examined(monkeypatch, add_by_gloo, broken={(0, 2), (2, 0)})
    assert (copies.level, nccl.level) == ("warning", "ok")


def lose_a_rank(tensors: list[Tensor]) -> None:
    add_by_gloo(tensors[:-1])


def lose_a_number(tensors: list[Tensor]) -> None:
    add_by_gloo(tensors)
    tensors[2][-1] += 1


def fail(tensors: list[Tensor]) -> None:
    raise RuntimeError("NCCL Error 1: unhandled cuda error")


@pytest.mark.parametrize(
    ("add", "says"),
    [
        (lambda tensors: None, "adds wrong over 4 GPUs: set NCCL_P2P_DISABLE=1"),
        (lose_a_rank, "adds wrong over 4"),
        (lose_a_number, "adds wrong over 4"),
        (fail, "does not work here (NCCL Error 1: unhandled cuda error); launcher.backend=gloo"),
    ],
)
def test_a_sum_of_nccl_that_is_wrong_is_an_error(
    monkeypatch: pytest.MonkeyPatch, add: Callable[[list[Tensor]], None], says: str
) -> None:
    nccl = examined(monkeypatch, add)[-1]
    assert nccl.level == "error"
    assert nccl.text.startswith(says)


def test_the_other_processes_of_a_gpu_are_those_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    computing = [SimpleNamespace(pid=pid) for pid in (7, os.getpid(), 9)]
    monkeypatch.setattr(gpus, "_nvml", nullcontext)
    monkeypatch.setattr(gpus, "_handle", lambda gpu: gpu)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetComputeRunningProcesses", lambda handle: computing)
    assert gpus.processes_on("0") == [7, 9]


@pytest.mark.parametrize(
    ("level", "word"), [(0, "one board"), (10, "PIX"), (20, "PXB"), (30, "PHB"), (40, "NODE"), (50, "SYS")]
)
@pytest.mark.parametrize("refused", [0, 1, 4])
def test_a_path_says_what_lies_between_two_gpus_and_whether_they_copy_to_each_other(
    level: int, word: str, refused: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver(monkeypatch)
    codes = {pynvml.NVML_P2P_CAPS_INDEX_WRITE: refused, pynvml.NVML_P2P_CAPS_INDEX_NVLINK: 1}
    pairs: list[tuple[str, str]] = []

    def status(first: str, second: str, index: int) -> int:
        pairs.append((first, second))
        return codes[index]

    monkeypatch.setattr(pynvml, "nvmlDeviceGetP2PStatus", status)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetTopologyCommonAncestor", lambda first, second: level)
    assert path_between("GPU-cc44", "1") == word + " without P2P" * bool(refused)
    assert {*pairs} == {("GPU-cc44", "GPU-ab22")}
    codes[pynvml.NVML_P2P_CAPS_INDEX_NVLINK] = 0
    assert path_between("0", "1") == "NVLink"


def test_the_driver_says_its_version_and_nvml_is_shut_down_after_each_question(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nvml = driver(monkeypatch)
    monkeypatch.setattr(pynvml, "nvmlSystemGetDriverVersion", lambda: "570.86.15")
    assert gpus.driver_version() == "570.86.15"
    assert free_bytes("2") == 5
    assert processes_on("GPU-cc44") == [7]
    nvml.refused = {"nvmlDeviceGetMemoryInfo": ERRORS[0]}
    assert free_bytes("2") == 0
    assert nvml.calls["nvmlInit"] == nvml.calls["nvmlShutdown"] == 4
    nvml.refused = {"nvmlInit": ERRORS[0]}
    assert gpus.driver_version() is None
    assert nvml.calls["nvmlShutdown"] == 4, "it was not begun"


def test_the_name_of_a_gpu_of_cuda_is_its_own_and_of_an_instance_that_of_its_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gpus, "visible_gpus", lambda: ["GPU-aa11", "MIG-d1", "MIG-d2"])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: SimpleNamespace(uuid=f"uuid{number}"))
    assert [name_in_nvml(number) for number in range(4)] == ["GPU-uuid0", "MIG-d1", "MIG-d2", "GPU-uuid3"]
