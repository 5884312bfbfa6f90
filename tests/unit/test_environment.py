"""`env.json`: the software and hardware of a run."""

import json
import platform
import subprocess
from pathlib import Path
from subprocess import TimeoutExpired
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from lockstep import __version__
from lockstep.core.errors import InputError
from lockstep.core.world import World
from lockstep.runtime import environment, host

GLIBC = ("mallopt", "malloc_trim")


def test_the_versions_of_what_matters_are_there() -> None:
    facts = json.loads(json.dumps(environment.facts(World.solo())))
    assert facts["python"] == platform.python_version()
    assert facts["packages"]["lockstep"] == __version__
    assert facts["packages"]["torch"] == torch.__version__.partition("+")[0]
    assert all(facts["packages"][name] for name in ("torchvision", "timm", "hydra-core", "omegaconf", "numpy"))
    assert facts["world_size"] == 1
    assert facts["threads"] == torch.get_num_threads()


def test_no_environment_variable_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_TOKEN", "a-secret-that-nobody-should-see")
    written = json.dumps(environment.facts(World.solo()))
    assert "a-secret-that-nobody-should-see" not in written
    assert "SOME_TOKEN" not in written


def test_a_package_that_is_not_installed_is_null(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "PACKAGES", ("torch", "no-such-package"))
    assert environment.facts(World.solo())["packages"]["no-such-package"] is None


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with one commit, which contains a package."""
    root = tmp_path / "repository"
    (root / "package").mkdir(parents=True)
    (root / "package" / "__init__.py").write_text("")
    author = ("-c", "user.name=someone", "-c", "user.email=someone@example.org")
    for arguments in (("init", "-q"), ("add", "."), (*author, "commit", "-q", "-m", "first")):
        subprocess.run(["git", "-C", str(root), *arguments], check=True)
    return root


def test_the_state_of_the_source_is_its_commit_and_whether_it_was_changed(repository: Path) -> None:
    package = repository / "package"
    clean = environment.source_state(package)
    assert isinstance(clean["git"], str)
    assert len(clean["git"]) == 40
    assert clean["git_changes"] is False
    (package / "new.py").write_text("new")
    assert environment.source_state(package) == {**clean, "git_changes": True}


def test_source_that_no_repository_tracks_is_of_an_unknown_commit(repository: Path, tmp_path: Path) -> None:
    unknown = {"git": "unknown", "git_changes": "unknown"}
    for package in (tmp_path / "alone", repository / ".venv" / "site-packages" / "lockstep"):
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("")
        assert environment.source_state(package) == unknown


def test_neither_the_current_folder_nor_a_variable_is_taken_for_the_source(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = environment.facts(World.solo())["git"]
    monkeypatch.chdir(repository)
    monkeypatch.setenv("GIT_DIR", str(repository / ".git"))
    assert environment.facts(World.solo())["git"] == here != environment.source_state(repository / "package")["git"]


def test_the_facts_of_gpus_are_of_all_of_them_and_none_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "driver_version", lambda: "570.1")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91002)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 3))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: f"GPU {number}")
    for number, libraries in ((2, [91002, "2.28.3"]), (0, [None, None])):
        monkeypatch.setattr(torch.cuda, "is_available", lambda number=number: number > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda number=number: number)
        facts = environment.facts(World.solo())
        assert [facts["cudnn"], facts["nccl"]] == libraries
        assert facts["gpus"] == [f"GPU {at}" for at in range(number)]
        assert facts["driver"] == "570.1"


def test_the_answer_of_git_is_taken_if_its_code_is_one_that_is_expected(repository: Path) -> None:
    changed = ("diff", "--no-index", "--name-only", "/dev/null", "package/__init__.py")
    assert environment.git(repository, "rev-parse", "--show-prefix") == b"\n"
    assert environment.git(repository, "rev-parse", "no-such-commit") is None
    (repository / "package" / "__init__.py").write_text("new\n")
    assert environment.git(repository, *changed) is None
    assert environment.git(repository, *changed, codes=(0, 1)) is not None


@pytest.mark.parametrize(
    "error", [FileNotFoundError("git"), PermissionError("git"), TimeoutExpired("git", 10)], ids=repr
)
def test_a_git_that_is_missing_or_hangs_knows_nothing(
    error: Exception, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = list[Any]()

    def fail(words: list[str], **options: Any) -> None:
        calls.append((words, options))
        raise error

    monkeypatch.setenv("GIT_DIR", "elsewhere")
    monkeypatch.setattr(subprocess, "run", fail)
    assert environment.source_state(repository / "package") == {"git": "unknown", "git_changes": "unknown"}
    ((words, options),) = calls
    assert "--no-optional-locks" in words, "a git of the user works at the same time"
    assert options["timeout"] > 0
    assert not [name for name in options["env"] if name.startswith("GIT_")]
    assert "PATH" in options["env"]


def test_a_commit_without_a_list_of_changes_has_unknown_ones(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = environment.git
    monkeypatch.setattr(
        environment, "git", lambda folder, *words: None if words[0] == "status" else whole(folder, *words)
    )
    assert environment.source_state(repository / "package")["git_changes"] == "unknown"


@pytest.mark.parametrize(
    ("flags", "has"), [("fpu avx2 avx512f", False), ("fpu avx512_bf16", True), ("Features : fp asimd bf16", True)]
)
def test_a_processor_has_bfloat16_if_it_lists_the_flag(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, flags: str, has: bool
) -> None:
    monkeypatch.setattr(Path, "read_text", lambda path: f"flags : {flags}\n")
    monkeypatch.setattr("torch.ops.mkldnn._is_mkldnn_bf16_supported", lambda: True)
    assert host.has_bfloat16() is has
    monkeypatch.setattr("torch.ops.mkldnn._is_mkldnn_bf16_supported", lambda: False)
    assert not host.has_bfloat16(), "torch does not use it"


def test_a_system_that_lists_no_flags_may_have_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(path: Path) -> str:
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "read_text", missing)
    assert host.has_bfloat16()


OUT_OF_MEMORY = [
    *(torch.OutOfMemoryError("CUDA"), MemoryError(), RuntimeError("CUDA error: out of memory")),
    RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("CUDNN_STATUS_ALLOCATION_FAILED"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: can't allocate memory"),
    RuntimeError("could not create a primitive descriptor"),
]


@pytest.mark.parametrize(
    ("error", "is_it"),
    [
        *((error, True) for error in OUT_OF_MEMORY),
        (RuntimeError("shapes differ"), False),
        (ValueError("out of memory"), False),
        (OSError("can't allocate memory"), False),
    ],
    ids=repr,
)
def test_the_libraries_have_their_own_words_for_memory_that_has_run_out(error: Exception, is_it: bool) -> None:
    assert host.is_out_of_memory(error) is is_it


def test_what_takes_as_much_room_as_there_is_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "available_memory", lambda: 3e9)
    host.check_room("the images", 3e9, "loader=streaming")
    with pytest.raises(
        InputError, match=r"^the images need 3\.1 GB, and this machine has 3\.0 GB free; use loader=str"
    ):
        host.check_room("the images", 3.1e9, "loader=streaming")


def test_the_free_memory_of_a_gpu_is_that_of_the_own_one(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {torch.device("cuda:1"): (5e9, 80e9), torch.device("cuda:0"): (7e9, 80e9)}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: sizes[device])
    assert host.free_memory(World.solo("cuda:1")) == 5


def test_a_core_that_waits_for_a_disk_is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    for times, idle in ((SimpleNamespace(idle=3.0, iowait=0.5, user=9.0), 3.5), (SimpleNamespace(idle=3.0), 3.0)):
        monkeypatch.setattr(psutil, "cpu_times", lambda times=times: times)
        assert host.idle_seconds() == idle


@pytest.mark.parametrize(
    ("own", "device", "keep", "calls"),
    [
        (True, "cpu", True, [("mallopt", -4, 0), ("mallopt", -1, 2**31 - 1)]),
        (True, "cpu", False, [("mallopt", -4, 65536), ("mallopt", -1, 131072), ("malloc_trim", 0)]),
        (True, "cuda:0", True, []),
        (False, "cpu", True, []),
    ],
)
def test_freed_memory_is_kept_on_the_cpu_in_processes_of_ours_alone(
    own: bool, device: str, keep: bool, calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    called = list[Any]()
    libc = SimpleNamespace(**{name: lambda *numbers, name=name: called.append((name, *numbers)) for name in GLIBC})
    monkeypatch.setattr(host.ctypes, "CDLL", lambda name: libc)
    monkeypatch.setattr(host, "is_own_process", lambda: own)
    host.keep_freed_memory(World.solo(device), keep=keep)
    assert called == calls
    monkeypatch.setattr(host.ctypes, "CDLL", lambda name: SimpleNamespace())
    host.keep_freed_memory(World.solo(device), keep=keep)  # another C library


def test_the_facts_of_a_run_are_those_of_its_whole_world_and_of_its_extensions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(rank=4, local_rank=0, size=6, local_size=2, device=torch.device("cpu"))
    origins = {"mine": "named by train.py", "own": "installed by own 1.0"}
    active = [SimpleNamespace(package=name, origin=origin) for name, origin in origins.items()]
    monkeypatch.setattr(environment.extensions, "active", lambda: active)
    monkeypatch.setattr(environment, "own_source", lambda: {"git": "abc", "git_changes": False})
    monkeypatch.setattr(torch, "get_num_threads", lambda: 5)
    monkeypatch.setattr(torch.version, "cuda", "12.9")
    facts = environment.facts(world)
    assert facts["extensions"] == origins
    assert (facts["world_size"], facts["threads"], facts["cuda"]) == (6, 5, "12.9")
    assert (facts["platform"], facts["git"], facts["git_changes"]) == (platform.platform(), "abc", False)
    assert [*facts["packages"]] == ["lockstep", *environment.PACKAGES]


def test_a_process_asks_once_for_its_source_and_for_each_package(monkeypatch: pytest.MonkeyPatch) -> None:
    asks = list[object]()
    monkeypatch.setattr(environment, "source_state", lambda folder: asks.append(folder) or {"git": "abc"})
    monkeypatch.setattr(environment, "version", lambda name: asks.append(name) or f"version of {name}")
    for question in (environment.own_source, environment.version_of):
        question.cache_clear()
    try:
        for _ in range(2):
            assert environment.own_source() == {"git": "abc"}
            assert [environment.version_of(name) for name in "ab"] == ["version of a", "version of b"]
    finally:
        for question in (environment.own_source, environment.version_of):
            question.cache_clear()
    assert asks == [Path(environment.__file__).parent, "a", "b"]
