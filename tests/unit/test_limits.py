"""The cores and the memory that a container leaves a process, in trees of cgroups; threads of native libraries."""

import math
import os
import resource
import subprocess
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from uuid import uuid4

import psutil
import pytest
import torch

from helpers import first_on_path
from lockstep.core import native_threads
from lockstep.core.errors import InputError
from lockstep.core.native_threads import LEAST_ADDRESS_SPACE, check_address_space
from lockstep.core.world import World
from lockstep.runtime import host
from lockstep.runtime.host import CORES, cores, memory_left

GIB = 2**30
NONE_1 = str(2**63 - 4096)  # what version 1 says without a limit


def container(
    monkeypatch: pytest.MonkeyPatch, folder: Path, own: str, files: Mapping[str, str], allowed: int = 64
) -> None:
    """Be a process of these cgroups on a machine of many cores."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text + "\n")
    (folder / "own").write_text(f"{own}\n" if own else "")
    monkeypatch.setattr(host, "CGROUPS", folder)
    monkeypatch.setattr(host, "OWN_GROUPS", folder / "own")
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(allowed)))
    monkeypatch.delenv(CORES, raising=False)


def version_2(limit: int | str, used: int, cached: int = 0, high: int | str = "max") -> dict[str, str]:
    stat = f"anon {used - cached}\ninactive_file {cached}\nactive_file 0"
    return {"memory.max": str(limit), "memory.high": str(high), "memory.current": str(used), "memory.stat": stat}


def version_1(limit: int | str, used: int, cached: int = 0) -> dict[str, str]:
    stat = f"cache {cached}\ninactive_file 1\ntotal_inactive_file {cached}"
    return {"memory.limit_in_bytes": str(limit), "memory.usage_in_bytes": str(used), "memory.stat": stat}


def under(place: str, files: Mapping[str, str]) -> dict[str, str]:
    return {f"{place}/{name}": text for name, text in files.items()}


CASES = {
    "no cgroup": ("", {}, math.inf),
    "version 2, no limit": ("0::/a", under("a", version_2("max", 5 * GIB)), math.inf),
    "version 2, the root of a container": ("0::/", version_2(8 * GIB, 3 * GIB), 5 * GIB),
    "version 2, what is cached comes back": ("0::/", version_2(8 * GIB, 3 * GIB, cached=GIB), 6 * GIB),
    "version 2, counted later than what is cached": ("0::/", version_2(8 * GIB, GIB, cached=2 * GIB), 8 * GIB),
    "version 2, a colon in a name": ("0::/a:b", under("a:b", version_2(8 * GIB, 3 * GIB)), 5 * GIB),
    "version 2, throttled above `high`": ("0::/", version_2(8 * GIB, 3 * GIB, high=4 * GIB), GIB),
    "version 2, over `high` already": ("0::/", version_2(8 * GIB, 5 * GIB, high=4 * GIB), 0),
    "version 2, the pod is full before the container": (
        "0::/pod/c",
        {**under("pod/c", version_2(8 * GIB, GIB)), **under("pod", version_2(10 * GIB, 9 * GIB))},
        GIB,
    ),
    "version 2, the container is full before the pod": (
        "0::/pod/c/sub",
        {**under("pod/c", version_2(8 * GIB, 6 * GIB)), **under("pod", version_2(20 * GIB, 9 * GIB))},
        2 * GIB,
    ),
    "version 2, a path that the container does not show": ("0::/pod/c", version_2(8 * GIB, 3 * GIB), 5 * GIB),
    "version 2, a path outside": ("0::/../../other", version_2(8 * GIB, 3 * GIB), 5 * GIB),
    "version 1, no limit": ("4:memory:/", under("memory", version_1(NONE_1, 0)), 2**63 - 4096),
    "version 1": ("7:cpu:/x\n4:memory:/a", under("memory/a", version_1(4 * GIB, 3 * GIB, GIB)), 2 * GIB),
    "version 1, nested": (
        "4:memory:/a/b\n0::/",
        {**under("memory/a/b", version_1(NONE_1, GIB)), **under("memory/a", version_1(4 * GIB, 3 * GIB))},
        GIB,
    ),
    "version 1, hidden": ("4:hugetlb,memory:/docker/c", under("memory", version_1(4 * GIB, GIB)), 3 * GIB),
}


@pytest.mark.parametrize(("own", "files", "left"), CASES.values(), ids=CASES)
def test_the_memory_is_what_the_nearest_limit_leaves(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, own: str, files: Mapping[str, str], left: float
) -> None:
    container(monkeypatch, tmp_path, own, files)
    assert memory_left() == left
    free = psutil.virtual_memory().available
    assert host.available_memory() == pytest.approx(min(left, free), rel=0.2)
    assert host.free_memory(World.solo()) == pytest.approx(min(left, free) / 1e9, rel=0.2)
    rank = World(rank=5, size=8, local_rank=1, local_size=2, device=torch.device("cpu"))
    assert host.free_memory(rank) == pytest.approx(min(left, free) / 2e9, rel=0.2)


def test_what_only_cache_files_hold_is_available_within_the_limit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    memory = SimpleNamespace(total=16 * GIB, available=6 * GIB, free=GIB, used=10 * GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    for limit, available in (("max", 6 * GIB), (9 * GIB, 6 * GIB), (5 * GIB, 4 * GIB)):
        container(monkeypatch, tmp_path, "0::/", version_2(limit, GIB))
        assert host.available_memory() == available


@pytest.mark.parametrize("own", ["0::/a", "3:cpu,memory:/a"])
def test_a_limit_that_cannot_be_read_is_none(own: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    container(monkeypatch, tmp_path, own, {})
    limits = ("cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us", "memory.max", "memory.high", "memory.current")
    limits += ("memory.stat", "memory.limit_in_bytes", "memory.usage_in_bytes")
    for folder in (tmp_path / "a", *(tmp_path / name / "a" for name in ("cpu", "memory"))):
        for name in limits:
            (folder / name).mkdir(parents=True)  # no file
    assert (cores(), memory_left()) == (64, math.inf)


@pytest.mark.parametrize(
    ("own", "files", "number"),
    [
        ("", {}, 64),
        ("0::/", {"cpu.max": "max 100000"}, 64),
        ("0::/", {"cpu.max": "200000 100000"}, 2),
        ("0::/", {"cpu.max": "150000 100000"}, 2),
        ("0::/", {"cpu.max": "110000 100000"}, 2),
        ("0::/", {"cpu.max": "20000 100000"}, 1),
        ("0::/pod/c", {"pod/c/cpu.max": "max 100000", "pod/cpu.max": "300000 100000"}, 3),
        ("0::/pod/c", {"pod/c/cpu.max": "400000 100000", "pod/cpu.max": "6400000 100000"}, 4),
        ("0::/pod/c", {"pod/c/cpu.max": "400000 100000", "pod/cpu.max": "300000 100000"}, 3),
        ("3:cpu,cpuacct:/a", {"cpu/a/cpu.cfs_quota_us": "-1", "cpu/a/cpu.cfs_period_us": "100000"}, 64),
        ("3:cpu,cpuacct:/a", {"cpu/a/cpu.cfs_quota_us": "500000", "cpu/a/cpu.cfs_period_us": "100000"}, 5),
        ("3:cpu:/a", {"cpu/a/cpu.cfs_quota_us": "150000", "cpu/a/cpu.cfs_period_us": "100000"}, 2),
        ("0::/", {"cpu.max": "99999999 100000"}, 64),
        ("2:cpuset:/b\n3:cpu:/", {"cpu/b/cpu.cfs_quota_us": "1", "cpu/b/cpu.cfs_period_us": "1"}, 64),
    ],
)
def test_the_cores_are_those_of_the_affinity_within_the_quota(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, own: str, files: Mapping[str, str], number: int
) -> None:
    container(monkeypatch, tmp_path, own, files)
    assert cores() == number
    monkeypatch.setenv(CORES, "2")
    assert cores() == min(2, number), "a job beside others has its share"


@pytest.mark.parametrize(
    ("limit", "is_enough"),
    [(resource.RLIM_INFINITY, True), (LEAST_ADDRESS_SPACE, True), (LEAST_ADDRESS_SPACE - 1, False)],
)
def test_a_limit_of_the_address_space_is_refused_if_torch_needs_more(
    monkeypatch: pytest.MonkeyPatch, limit: int, is_enough: bool
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limit, resource.RLIM_INFINITY))
    with nullcontext() if is_enough else pytest.raises(InputError, match=r"to 4\.0 GB, expected at least 4 GB"):
        check_address_space()


def test_without_linux_there_is_no_cgroup(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(host, "OWN_GROUPS", tmp_path / "nothing")
    assert memory_left() == math.inf
    assert cores() >= 1


def test_a_real_limit_is_the_memory_there_is() -> None:
    """The kernel's own count, where this process may make a cgroup."""
    own = next(iter(host.cgroups("memory")), None)
    if own is None or not os.access(own, os.W_OK):
        pytest.skip("no cgroup can be made here")
    group = own / f"lockstep-{uuid4().hex}"
    try:
        group.mkdir()
        limit = next(group / name for name in ("memory.limit_in_bytes", "memory.max") if (group / name).exists())
        limit.write_text(str(GIB))
        code = "import os, sys; open(sys.argv[1], 'w').write(str(os.getpid()));"
        code += "from lockstep.runtime.host import available_memory; print(available_memory())"
        words = [sys.executable, "-c", code, str(group / "cgroup.procs")]
        done = subprocess.run(words, capture_output=True, text=True, check=True)
    except (OSError, StopIteration):
        pytest.skip("no limit can be set here")
    finally:
        if group.exists():
            group.rmdir()
    assert 0.2 * GIB < float(done.stdout) <= GIB


NAMES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "OPENBLAS_NUM_THREADS")
SHOW = f"import os; print(*map(os.environ.get, {NAMES}))"
CONFIGURE = "import lockstep.core.native_threads as threads; threads.configure_native_threads()"


@pytest.mark.parametrize(
    ("variables", "imported", "expected"),
    [
        ({}, ["5000 None 1", "5000 None None"], "5000 None 1"),
        ({"OMP_WAIT_POLICY": "active"}, ["None active 1", "None active None"], "None active 1"),
        ({"GOMP_SPINCOUNT": "5", "OPENBLAS_NUM_THREADS": "3"}, [], "5 None 3"),
        ({"OPENBLAS_NUM_THREADS": "1", "LOCKSTEP_OPENBLAS": "1"}, ["5000 None 1", "5000 None None"], "5000 None 1"),
    ],
    ids=str,
)
def test_threads_that_wait_give_their_core_up_unless_the_user_says_otherwise(
    tmp_path: Path, variables: dict[str, str], imported: list[str], expected: str
) -> None:
    """The variables when NumPy and torch are imported, and at the end.

    Both libraries are replaced by modules that print the variables: the real ones take four seconds to import.
    """
    for name in ("numpy", "torch"):
        (tmp_path / f"{name}.py").write_text(SHOW)
    clean = {key: value for key, value in os.environ.items() if key not in (*NAMES, "LOCKSTEP_OPENBLAS")}
    environment = {**clean, "PYTHONPATH": first_on_path(tmp_path), **variables}
    words = [sys.executable, "-c", f"{CONFIGURE}; {SHOW}"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [*imported, expected]


def test_where_torch_is_imported_already_only_libraries_behind_it_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "torch" in sys.modules
    monkeypatch.setattr(os, "environ", {})
    native_threads.configure_native_threads()
    assert os.environ == {"OPENBLAS_NUM_THREADS": "1", "LOCKSTEP_OPENBLAS": "1"}
    os.environ.clear()
    os.environ["OPENBLAS_NUM_THREADS"] = "3"
    native_threads.configure_native_threads()
    assert os.environ == {"OPENBLAS_NUM_THREADS": "3"}


def test_a_process_is_our_own_if_it_has_said_so_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_threads, "_own_processes", set())
    assert not native_threads.is_own_process()
    monkeypatch.setattr(os, "getpid", lambda: -2)  # its group, its session and its parent have other numbers
    native_threads.own_process()
    assert native_threads.is_own_process()
    monkeypatch.setattr(os, "getpid", lambda: -1)  # as in a child of it
    assert not native_threads.is_own_process()
    native_threads.own_process()
    assert native_threads.is_own_process()


SPINNING = """
import contextlib, os, time, torch
from lockstep.runtime.guest import sleeping_soon
torch.set_num_threads(2)
numbers = torch.zeros(2**18)
def used():
    numbers.add_(1)
    before = time.process_time()
    for _ in range(30):
        numbers.add_(1)
        time.sleep(0.02)
    return time.process_time() - before
usual = used()
with sleeping_soon():
    torch.set_num_threads(2)
    soon = used()
print(usual, soon, used())
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="torch has another OpenMP there")
def test_waiting_threads_of_a_program_that_has_imported_torch_sleep_soon(tmp_path: Path) -> None:
    """Counted in the time on a core that they use while there is no work, however busy the machine is."""
    variables = {name: value for name, value in os.environ.items() if name not in NAMES}
    done = subprocess.run(
        [sys.executable, "-c", SPINNING], env=variables, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    usual, soon, again = map(float, done.stdout.split())
    assert soon < usual / 3
    assert soon < again / 3, "as it was"


def test_the_limit_that_counts_is_that_of_the_address_space(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = dict.fromkeys((resource.RLIMIT_DATA, resource.RLIMIT_CORE, resource.RLIMIT_STACK), 0)
    limits[resource.RLIMIT_AS] = resource.RLIM_INFINITY
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limits[kind], resource.RLIM_INFINITY))
    check_address_space()
    limits[resource.RLIMIT_AS] = 2_560_000_000
    with pytest.raises(InputError) as caught:
        native_threads.configure_native_threads()
    assert str(caught.value) == (
        "this shell limits the address space of a process to 2.6 GB, expected at least 4 GB, most of it for "
        "PyTorch's libraries: ulimit -v unlimited"
    )


@pytest.mark.parametrize(
    ("variables", "imported", "expected"),
    [
        ({}, [("numpy", "1"), ("torch", None)], "1"),
        ({"OPENBLAS_NUM_THREADS": "3"}, [], "3"),
        ({"OPENBLAS_NUM_THREADS": "1", "LOCKSTEP_OPENBLAS": "1"}, [("numpy", "1"), ("torch", None)], "1"),
    ],
    ids=str,
)
def test_libraries_are_imported_with_one_thread_and_torch_as_the_user_has_it(
    variables: dict[str, str], imported: list[tuple[str, str]], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "OPENBLAS_NUM_THREADS"
    imports: list[tuple[str, str | None]] = []
    monkeypatch.setattr(
        native_threads.importlib, "import_module", lambda module: imports.append((module, os.environ.get(name)))
    )
    monkeypatch.setattr(os, "environ", {**variables})
    with monkeypatch.context() as patched:
        patched.delitem(sys.modules, "torch")
        native_threads.configure_native_threads()
    assert (imports, os.environ[name]) == (imported, expected)
    assert os.environ["GOMP_SPINCOUNT"] == "5000"
    assert ("LOCKSTEP_OPENBLAS" in os.environ) == bool(imported)


@pytest.mark.parametrize(
    ("variables", "spins"),
    [({}, "5000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "passive"}, None)],
    ids=str,
)
def test_threads_of_torch_sleep_soon_unless_the_user_has_chosen_when(
    variables: dict[str, str], spins: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", {**variables})
    native_threads.sleep_soon()
    assert os.environ == variables, "torch is imported, so it is too late"
    with monkeypatch.context() as patched:
        patched.delitem(sys.modules, "torch")
        native_threads.sleep_soon()
    assert os.environ.get("GOMP_SPINCOUNT") == spins


@pytest.mark.parametrize(("count", "number"), [(6, 6), (None, 1)])
def test_without_an_affinity_the_cores_are_those_of_the_machine(
    count: int | None, number: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    container(monkeypatch, tmp_path, "", {})
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: count)
    assert cores() == number
    monkeypatch.setenv(CORES, "3")
    assert cores() == min(3, number)
