"""`env.json`: the versions of the packages and the machine of a run. It never contains environment variables."""

import functools
import os
import platform
import subprocess
from collections.abc import Collection
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import lockstep
from lockstep.config import extensions
from lockstep.core.world import World
from lockstep.runtime.gpus import driver_version

UNKNOWN = "unknown"
PACKAGES = (
    *("torch", "torchvision", "timm", "hydra-core", "omegaconf", "tensorboard", "nvidia-ml-py", "numpy"),
    "safetensors",
)


def facts(world: World) -> dict[str, Any]:
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {"lockstep": lockstep.__version__, **{name: version_of(name) for name in PACKAGES}},
        "extensions": {extension.package: extension.origin for extension in extensions.active()},
        "world_size": world.size,
        "threads": torch.get_num_threads(),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if torch.cuda.is_available() else None,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else None,
        "driver": driver_version(),
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        **own_source(),
    }


@functools.cache
def version_of(package: str) -> str | None:
    """The version of an installed package. Looked up once, because ten of them take 10 ms."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


@functools.cache
def own_source() -> dict[str, str | bool]:
    """The state of this package's source. Asked once: forks of this process run the code that it has loaded."""
    return source_state(Path(__file__).parent)


def source_state(package: Path) -> dict[str, str | bool]:
    """The commit of the source in `package`, and whether it has changes; unknown unless a repository tracks it."""
    tracked = git(package, "ls-files", "--error-unmatch", "__init__.py") is not None
    commit = git(package, "rev-parse", "HEAD") if tracked else None
    changes = git(package, "status", "--porcelain") if tracked else None
    return {
        "git": UNKNOWN if commit is None else commit.decode().strip(),
        "git_changes": UNKNOWN if changes is None else bool(changes),
    }


def git(folder: Path, *arguments: str, codes: Collection[int] = (0,)) -> bytes | None:
    """The output of a git command in a folder; None if it fails. Variables such as GIT_DIR are ignored."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    command = ["git", "-C", str(folder), "--no-optional-locks", *arguments]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode in codes else None
