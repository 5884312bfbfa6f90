"""A photograph of a process: what a call of a library may find there, and must leave there.

`photograph()` is a dict of plain values and of objects (which are the same only if they are the same object), and
`changes(before, after)` says what differs. It imports what it looks at, so the first one is taken after the imports.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import logging
import multiprocessing
import os
import random
import resource
import signal
import sys
import tempfile
import threading
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hydra
import matplotlib as mpl
import numpy as np
import omegaconf
import psutil
import six  # noqa: F401  # it and joblib, of scikit-learn, register themselves with the interpreter
import sklearn.datasets  # noqa: F401
import torch
import torch._dynamo  # what torch itself replaces and registers when it compiles, or is deterministic
import torch._inductor.config
import torch.utils.tensorboard
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.core.singleton import Singleton
from hydra.core.utils import JobRuntime
from hydra.version import VersionBase
from omegaconf.basecontainer import BaseContainer
from PIL import Image, ImageFile

MODULES = ("hydra", "omegaconf", "torch", "numpy", "yaml", "logging", "warnings", "multiprocessing", "signal")
CHANGING = ("_abc", "_cache", "__warningregistry__", "_handlers", "_handlerList", "__doc__", "__annotations__")


class Same:
    """An object that is equal to itself alone. It keeps the object, so that another one cannot have its address."""

    def __init__(self, thing: object) -> None:
        self.thing = thing

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.thing is other.thing

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<{type(self.thing).__name__} {hex(id(self.thing))}>"


def photograph() -> dict[str, Any]:
    """Everything about this process that the functions of a library could change for their caller."""
    Plugins.instance()  # whoever uses Hydra has it look for its plugins
    torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # its library keeps a pipe
    return dict(_everything())


def changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """What differs, a line each. What is only there afterwards is a change too, but for attributes of modules."""
    lines = []
    for name in sorted({*before, *after}):
        if name.startswith("attribute ") and name not in before:  # a submodule was imported
            continue
        old, new = before.get(name, "nothing"), after.get(name, "nothing")
        if isinstance(old, dict) and isinstance(new, dict):
            parts = {key: (old.get(key), new.get(key)) for key in {**old, **new} if old.get(key) != new.get(key)}
            if name == "logging":  # a module has its own logger when it is imported
                parts = {key: pair for key, pair in parts.items() if key in old or pair[1][-2]}
            lines += [f"{name}[{key}]: {str(one)[:300]} -> {str(two)[:300]}" for key, (one, two) in parts.items()]
        elif old != new:
            lines.append(f"{name}: {str(old)[:300]} -> {str(new)[:300]}")
    return lines


def _everything() -> Iterator[tuple[str, Any]]:
    yield from _of_hydra()
    yield from _of_torch()
    yield from _of_python()
    yield from _of_the_system()
    with warnings.catch_warnings(action="ignore"):  # a deprecated class warns of itself when it is looked at
        for module in [module for name, module in sys.modules.items() if name.split(".")[0] in MODULES]:
            yield from _attributes(module)


def _of_hydra() -> Iterator[tuple[str, Any]]:
    yield "resolvers", {name: Same(one) for name, one in BaseContainer._resolvers.items()}
    yield "ConfigStore", Same(ConfigStore.instance())
    yield "stored configs", {path: Same(node) for path, node in _stored(ConfigStore.instance().repo)}
    yield "GlobalHydra", Same(GlobalHydra.instance())
    yield "Hydra", Same(GlobalHydra.instance().hydra)
    yield "HydraConfig", Same(HydraConfig.instance().cfg)
    yield "JobRuntime", JobRuntime.instance().get("name")
    yield "version_base", VersionBase.instance().getbase()
    yield "singletons", {kind.__name__: Same(one) for kind, one in Singleton._instances.items()}
    yield "plugins", sorted(map(repr, Plugins.instance().discover()))
    yield "versions", (hydra.__version__, omegaconf.__version__)


def _stored(repo: dict[str, Any], path: str = "") -> Iterator[tuple[str, object]]:
    for name, node in repo.items():
        if isinstance(node, dict):
            yield from _stored(node, f"{path}/{name}")
        else:
            yield f"{path}/{name}", node


def _of_torch() -> Iterator[tuple[str, Any]]:
    yield "torch random", torch.get_rng_state().tolist()
    yield "numpy random", [part.tolist() if hasattr(part, "tolist") else part for part in np.random.get_state()]
    yield "Python random", random.getstate()
    yield "threads", (torch.get_num_threads(), torch.get_num_interop_threads())
    yield (
        "deterministic",
        (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.utils.deterministic.fill_uninitialized_memory,
        ),
    )
    backends = torch.backends
    for name, part in {
        "torch": backends,
        "cudnn": backends.cudnn,
        "cudnn.conv": backends.cudnn.conv,
        "cudnn.rnn": backends.cudnn.rnn,
        "matmul": backends.cuda.matmul,
        "mkldnn.matmul": backends.mkldnn.matmul,
        "mkldnn": backends.mkldnn,
        "mkldnn.conv": backends.mkldnn.conv,
    }.items():
        yield f"precision of {name}", part.fp32_precision
    yield "cuDNN", (backends.cudnn.enabled, backends.cudnn.benchmark, backends.cudnn.deterministic)
    yield "default dtype", (torch.get_default_dtype(), str(torch.get_default_device()))
    yield "gradients", (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_anomaly_enabled())
    yield "autocast", (torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled())
    yield "denormals", bool((torch.tensor([1e-310], dtype=torch.float64) * 1).item() == 0)
    yield "sharing", torch.multiprocessing.get_sharing_strategy()
    yield "print options", vars(torch._tensor_str.PRINT_OPTS).copy()
    yield "process group", torch.distributed.is_initialized()


def _of_python() -> Iterator[tuple[str, Any]]:
    yield "environment", dict(os.environ)
    for name in ("path", "argv", "meta_path", "path_hooks"):
        yield f"sys.{name}", list(getattr(sys, name))
    for name in ("excepthook", "unraisablehook", "displayhook", "stdout", "stderr", "stdin"):
        yield f"sys.{name}", Same(getattr(sys, name))
    yield "threading.excepthook", Same(threading.excepthook)
    yield "limits of Python", (sys.getrecursionlimit(), sys.getswitchinterval(), sys.get_int_max_str_digits())
    yield "traces", (Same(sys.gettrace()), Same(sys.getprofile()))
    yield "warnings", [*warnings.filters]
    yield "showwarning", Same(warnings.showwarning)
    yield "logging", {name: _logger(logger) for name, logger in _loggers()}
    yield "garbage", (gc.isenabled(), gc.get_threshold(), gc.get_freeze_count(), gc.get_debug(), len(gc.callbacks))
    yield "faulthandler", faulthandler.is_enabled()
    yield "exit handlers", atexit._ncallbacks()
    yield "start method", multiprocessing.get_start_method(allow_none=True)
    yield "threads of Python", sorted(thread.name for thread in threading.enumerate())
    yield "Pillow", (Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES, Image.WARN_POSSIBLE_FORMATS)
    yield "matplotlib", dict(mpl.rcParams)


def _loggers() -> Iterator[tuple[str, logging.Logger]]:
    yield "root", logging.getLogger()
    for name, logger in logging.getLogger().manager.loggerDict.items():
        if isinstance(logger, logging.Logger):
            yield name, logger


def _logger(logger: logging.Logger) -> Any:
    handlers = [Same(handler) for handler in logger.handlers if not isinstance(handler, logging.NullHandler)]
    return logger.level, logger.propagate, logger.disabled, handlers, [*logger.filters]


def _of_the_system() -> Iterator[tuple[str, Any]]:
    signals = sorted(signal.valid_signals())
    yield "signals", {number: Same(signal.getsignal(number)) for number in signals}
    yield "signals of the kernel", _status("SigBlk", "SigIgn", "SigCgt")
    wakeup = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
    yield "wakeup", wakeup
    yield "timer", signal.getitimer(signal.ITIMER_REAL)
    limits = [name for name in dir(resource) if name.startswith("RLIMIT_")]
    yield "limits", {name: resource.getrlimit(getattr(resource, name)) for name in limits}
    umask = os.umask(0)
    os.umask(umask)
    yield "folder", (str(Path.cwd()), umask)
    yield "cores", (os.sched_getaffinity(0), os.getpriority(os.PRIO_PROCESS, 0))
    yield "children", sorted(str(child.cmdline()) for child in psutil.Process().children(recursive=True))
    yield "files", sorted(_targets())
    yield "temporary folder", sorted(path.name for path in Path(tempfile.gettempdir()).iterdir())


def _status(*names: str) -> list[str]:
    return [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(names)]


def _targets() -> Iterator[str]:
    for link in [*Path("/proc/self/fd").iterdir()]:
        try:
            target = str(link.readlink())
        except OSError:
            continue  # the one of this listing
        if not target.startswith("/proc/"):
            yield target


def _attributes(module: types.ModuleType) -> Iterator[tuple[str, Any]]:
    """The functions and classes of a module, and those of its classes, which somebody may have replaced."""
    for name, value in [*vars(module).items()]:
        if isinstance(value, type | types.FunctionType | types.BuiltinFunctionType) and name not in CHANGING:
            yield f"attribute {module.__name__}.{name}", Same(value)
        if isinstance(value, type) and value.__module__ == module.__name__:
            for part, inner in [*vars(value).items()]:
                if callable(inner) or isinstance(inner, staticmethod | classmethod | property):
                    yield f"attribute {module.__name__}.{name}.{part}", Same(inner)
