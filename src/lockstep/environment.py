"""`env.json`: the versions and the machine that a run ran on. No environment variable is ever written."""

from __future__ import annotations

import json
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from lockstep.world import World

PACKAGES = (
    "lockstep",
    "torch",
    "torchvision",
    "timm",
    "hydra-core",
    "omegaconf",
    "tensorboard",
    "nvidia-ml-py",
    "numpy",
    "safetensors",
)


def as_json(world: World) -> str:
    """The facts of this process's machine as JSON."""
    return json.dumps(facts(world), indent=2) + "\n"


def facts(world: World) -> dict[str, Any]:
    """Versions, devices and the state of the source tree."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in PACKAGES},
        "world_size": world.size,
        "threads": torch.get_num_threads(),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if torch.cuda.is_available() else None,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else None,
        "driver": _driver(),
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "git": _git("rev-parse", "HEAD"),
        "git_changes": bool(_git("status", "--porcelain")),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _driver() -> str | None:
    import pynvml

    try:
        pynvml.nvmlInit()
        driver: str = pynvml.nvmlSystemGetDriverVersion()
        pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return None
    return driver


def _git(*arguments: str) -> str | None:
    """What git says of the current folder; None outside a checkout or without git."""
    try:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
