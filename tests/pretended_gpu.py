"""Pretend that this machine has GPUs, to run the code that only a run on a GPU takes.

A tensor "on" such a GPU is one in host memory that says that it is on `cuda:0`. Its numbers are those of the CPU, so
a run has the losses of the CPU's to the bit. Operations that mix the devices raise, as CUDA does, and the calls that
would wait for the device are counted. Streams, events and NCCL do nothing, or what gloo does.

It shows that the code runs and in which order it calls what, also for the tests in tests/gpu. It shows nothing about
kernels, about what streams race for, or about speed: for these the tests in tests/gpu need the real thing.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from fake_nvml import FakeNvml
from tape import Tape

NUMBER = "PRETENDED_GPUS"  # of GPUs
NAME = "NVIDIA H100 80GB HBM3"
GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
# Operations whose tensors may be on two devices.
MIXING = {"copy_", "__getitem__", "__setitem__", "_has_compatible_shallow_copy_type"}
WAITING = {"item", "tolist", "__bool__", "__int__", "__float__", "__index__", "numpy", "nonzero"}

on_gpu = WeakTensorKeyDictionary()  # the tensors that say so
lock = threading.RLock()
waits: list[str] = []
waiting_is_an_error = threading.Event()  # what `torch.cuda.set_sync_debug_mode("error")` asks for


def is_on_gpu(tensor: Tensor) -> bool:
    with torch._C.DisableTorchFunction(), lock:
        return tensor in on_gpu


def put(tensor: Tensor, gpu: bool) -> Tensor:
    """Have a tensor say that it is on the GPU, or that it is not."""
    with torch._C.DisableTorchFunction(), lock:
        if gpu:
            on_gpu[tensor] = True
        else:
            on_gpu.pop(tensor, None)
    return tensor


def waited(name: str) -> None:
    """Count a call that would wait for the GPU. Raises RuntimeError where that is an error."""
    waits.append(name)
    if waiting_is_an_error.is_set() and name != "synchronize":
        raise RuntimeError(f"called a synchronizing CUDA operation ({name})")


def set_sync_debug_mode(mode: str) -> None:
    waiting_is_an_error.set() if mode == "error" else waiting_is_an_error.clear()


def is_gpu(device: Any) -> bool:
    return str(device).startswith("cuda") or (isinstance(device, int) and not isinstance(device, bool))


def tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from tensors(value)
    elif isinstance(values, dict):
        yield from tensors([*values.values()])


class Devices(TorchFunctionMode):
    """Follows which tensors are on the GPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), getattr(function, "__name__", "")
        kwargs.pop("pin_memory", None)
        match name:
            case "pin_memory":
                return args[0]
            case "cpu":
                return self.moved(args[0], CPU)
            case "cuda":
                return self.moved(args[0], GPU)
            case "to" if isinstance(args[0], Tensor):
                return self.to(*args, **kwargs)
            case "__deepcopy__":
                return put(function(*args, **kwargs), is_on_gpu(args[0]))
        device = kwargs.get("device")
        if is_gpu(device):
            kwargs["device"] = CPU
        operands = [*tensors([args, kwargs])]
        places = {is_on_gpu(tensor) for tensor in operands if tensor.ndim or len(operands) == 1}
        if len(places) == 2 and name not in MIXING:
            raise RuntimeError(f"Expected all tensors to be on the same device ({name})")
        if True in places and name in WAITING:
            waited(name)
        results = function(*args, **kwargs)
        if name in ("copy_", "__setitem__"):
            return results
        if is_gpu(device) or (device is None and any(map(is_on_gpu, operands))):
            for result in tensors(results):
                put(result, True)
        return results

    def to(
        self, tensor: Tensor, *places: Any, device: Any = None, non_blocking: bool = False, **options: Any
    ) -> Tensor:
        """`Tensor.to`, with its arguments in any of the orders that torch allows."""
        formats = []
        for place in places:
            if isinstance(place, Tensor):
                device, options["dtype"] = place.device, place.dtype
            elif isinstance(place, torch.device | str):
                device = place
            elif isinstance(place, torch.dtype):
                formats.append(place)
        if str(device) == "meta":
            return Tensor.to(tensor, device, *formats, **options)
        changed = put(Tensor.to(tensor, *formats, **options), is_on_gpu(tensor)) if formats or options else tensor
        return changed if device is None else self.moved(changed, device, waits_for=not non_blocking)

    def moved(self, tensor: Tensor, device: Any, *, waits_for: bool = True) -> Tensor:
        if is_on_gpu(tensor) == is_gpu(device):
            return tensor
        if not is_gpu(device) and waits_for:
            waited("cpu")
        return put(tensor.detach().clone() if not tensor.requires_grad else tensor.clone(), is_gpu(device))


class Event:
    def __init__(self, *options: Any, **named: Any) -> None:
        self.recorded: float | None = None

    def record(self, stream: Any = None) -> None:
        self.recorded = time.perf_counter()

    def synchronize(self) -> None:
        assert self.recorded is not None

    wait = synchronize

    def query(self) -> bool:
        return self.recorded is not None

    def elapsed_time(self, later: Event) -> float:
        assert self.recorded is not None
        assert later.recorded is not None
        return 1000 * (later.recorded - self.recorded)


class Stream:
    number: ClassVar[int] = 0  # of the streams besides the default one

    def __init__(self, *options: Any, **named: Any) -> None:
        Stream.number += 1

    def wait_stream(self, other: Stream) -> None: ...

    def wait_event(self, event: Event) -> None:
        event.synchronize()

    def synchronize(self) -> None:
        waits.append("synchronize")

    def record_event(self) -> Event:
        event = Event()
        event.record()
        return event


class Memory:
    """The peak of the memory: a trial leaves a high one, which `reset` lowers."""

    peak = 2**30

    def freed(self) -> None:
        self.peak = 80 * 2**30

    def reset(self, device: Any = None) -> None:
        self.peak = 2**30

    def reserved(self, device: Any = None) -> int:
        return self.peak


def plug_in() -> None:
    """Pretend, in this process and all its threads, that there are GPUs."""
    from lockstep.strategy import sync_batchnorm

    default_stream, memory = Stream(), Memory()
    Stream.number = 0
    number, properties = int(os.environ[NUMBER]), SimpleNamespace(name=NAME, uuid="aa", total_memory=80 * 2**30)
    properties.multi_processor_count = 132
    fakes: dict[str, Any] = {
        "Event": Event,
        "Stream": Stream,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: number,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "get_device_name": lambda device=None: NAME,
        "get_device_properties": lambda device=None: properties,
        "get_device_capability": lambda device=None: (9, 0),
        "is_bf16_supported": lambda **options: True,
        "mem_get_info": lambda device=None: (79 * 2**30, 80 * 2**30),
        "empty_cache": memory.freed,
        "reset_peak_memory_stats": memory.reset,
        **dict.fromkeys(("max_memory_reserved", "max_memory_allocated"), memory.reserved),
        "manual_seed_all": lambda seed: None,
        "get_rng_state_all": list,
        "set_rng_state_all": lambda states: None,
        "get_rng_state": lambda device=None: None,
        "set_rng_state": lambda state, device=None: None,
        **dict.fromkeys(("current_stream", "default_stream"), lambda device=None: default_stream),
        "stream": lambda stream: contextlib.nullcontext(),
        "device": lambda device: contextlib.nullcontext(),
        "graph_pool_handle": lambda: (0, 1),
        "default_generators": [SimpleNamespace(clone_state=lambda: None, graphsafe_set_state=lambda state: None)],
        "set_stream": lambda stream: None,
        "_lazy_init": lambda: None,
        "synchronize": lambda device=None: waited("synchronize"),
        "set_sync_debug_mode": set_sync_debug_mode,
        "CUDAGraph": Tape,
        "graph": lambda tape, **options: tape,
    }
    for name, fake in fakes.items():
        setattr(torch.cuda, name, fake)
    torch.cuda.nccl.version = lambda: (2, 28, 3)
    torch.backends.cudnn.version = lambda: 91000  # type: ignore[assignment]
    torch.optim.Optimizer._accelerator_graph_capture_health_check = lambda self: None  # type: ignore[method-assign]
    _plug_in_tensors()
    _plug_in_autocast()
    _plug_in_groups()
    sync_batchnorm.CUDAKernels = sync_batchnorm.PlainKernels
    FakeNvml(dict.fromkeys(["GPU-aa", "GPU-bb"][:number], 90)).plug_in()
    Devices().__enter__()
    run = threading.Thread.run

    def run_with_devices(thread: threading.Thread) -> None:
        with Devices():  # a mode is one thread's
            run(thread)

    threading.Thread.run = run_with_devices  # type: ignore[method-assign]


class Attribute(property):
    """A property of tensors; torch 2.11 asks which class it is of."""

    __objclass__ = Tensor


def _plug_in_tensors() -> None:
    """The attributes of tensors, which no mode sees."""
    base = torch._C.TensorBase

    def own(attribute: Any, tensor: Tensor) -> Any:
        with torch._C.DisableTorchFunction():
            return attribute.__get__(tensor)

    def replace(attribute: Any, tensor: Tensor, value: Any) -> None:
        with torch._C.DisableTorchFunction():
            attribute.__set__(tensor, value)

    def data_of(tensor: Tensor) -> Tensor:
        return put(own(base.data, tensor), is_on_gpu(tensor))

    def set_data(tensor: Tensor, value: Tensor) -> None:
        replace(base.data, tensor, value)
        put(tensor, is_on_gpu(value))

    def grad_of(tensor: Tensor) -> Tensor | None:
        grad: Tensor | None = own(base.grad, tensor)
        return grad if grad is None else put(grad, is_on_gpu(tensor))

    def set_grad(tensor: Tensor, value: Tensor | None = None) -> None:
        replace(base.grad, tensor, value)

    attributes: dict[str, Any] = {
        "is_cuda": Attribute(is_on_gpu),
        "is_cpu": Attribute(lambda tensor: not is_on_gpu(tensor)),
        "device": Attribute(lambda tensor: GPU if is_on_gpu(tensor) else own(base.device, tensor)),
        "data": Attribute(data_of, set_data),
        "grad": Attribute(grad_of, set_grad, set_grad),
        "get_device": lambda tensor: 0 if is_on_gpu(tensor) else -1,
        "record_stream": lambda tensor, stream: None,
    }
    for name, attribute in attributes.items():
        setattr(Tensor, name, attribute)
    copied = nn.Parameter.__deepcopy__
    nn.Parameter.__deepcopy__ = lambda self, memo: put(copied(self, memo), is_on_gpu(self))


def _plug_in_autocast() -> None:
    begin: Callable[..., None] = torch.autocast.__init__

    def begin_on_cpu(self: Any, device_type: str, *options: Any, **named: Any) -> None:
        begin(self, "cpu" if is_gpu(device_type) else device_type, *options, **named)

    torch.autocast.__init__ = begin_on_cpu  # type: ignore[assignment, method-assign]


def _plug_in_groups() -> None:
    """Process groups over gloo, whatever they are asked to be."""
    begin, new_group = dist.init_process_group, dist.new_group

    def init_process_group(backend: str | None = None, *options: Any, device_id: Any = None, **named: Any) -> None:
        begin(backend and "gloo", *options, **named)

    def gloo_group(*options: Any, device_id: Any = None, backend: Any = None, **named: Any) -> Any:
        return new_group(*options, backend="gloo", **named)

    dist.init_process_group, dist.new_group = init_process_group, gloo_group


def train(*words: str) -> None:
    """`python train.py WORDS`; the last lines count its streams, and its waits for the GPU."""
    from lockstep.cli.train import train_command

    plug_in()
    sys.argv = ["train.py", *words]
    try:
        train_command()
    finally:
        print("streams:", Stream.number)
        print("waits:", len(waits), *sorted({*waits}))
