"""The identity of a rank; the collectives of several ranks are tested on real ranks."""

import os
import resource
import sys
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from helpers import forks, result
from lockstep.core.errors import InputError, Stopped
from lockstep.core.launch_env import ATTEMPT, Place, is_launched, launched_place
from lockstep.core.world import World
from lockstep.job import worker
from lockstep.job.worker import allow_connections, join, own_gpu
from lockstep.runtime import addresses
from lockstep.strategy import Single
from lockstep.training.agreement import StopConsensus
from thread_ranks import ThreadRanks


def test_a_world_of_one_needs_no_process_group() -> None:
    solo = World.solo()
    tensor = torch.ones(2)
    assert solo.is_main
    assert (solo.rank, solo.size, solo.local_rank, solo.local_size) == (0, 1, 0, 1)
    assert solo.sum(tensor) is tensor
    assert solo.broadcast("word") == "word"
    solo.barrier()
    Single().share_buffers(nn.BatchNorm2d(2), solo)
    consensus = StopConsensus(World.solo())
    assert [consensus.agree(False, True), consensus.agree(True, False)] == [[False, True], [True, False]]
    consensus.close()


@pytest.mark.parametrize("asked_at", [0, 2])
@pytest.mark.parametrize("slow_from", [0, 2, 9])
@pytest.mark.parametrize("asker", [0, 2])
def test_all_ranks_see_the_request_of_any_rank_at_the_same_step(
    asker: int, slow_from: int, asked_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answers(world: World) -> list[list[bool]]:
        consensus = StopConsensus(world)
        seen = []
        for step in range(5):
            requests = [False, world.rank == asker and step == asked_at]
            busy = world.rank == 1 and step >= slow_from  # for a second
            seen.append(consensus.agree(*requests, busy=float(busy)))
        consensus.close()
        return seen

    # The first message is waited for, and every one after the slowest rank's first long step.
    seen_at = asked_at if asked_at == 0 or slow_from == 0 else asked_at + 1
    expected = [[False, step == seen_at] for step in range(5)]
    assert ThreadRanks(3, monkeypatch).run(answers) == [expected] * 3


@pytest.mark.parametrize("asker", [None, 0, 1, 2])
def test_any_is_whether_one_rank_has_set_it(asker: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = ThreadRanks(3, monkeypatch)
    assert ranks.run(lambda world: world.any(world.rank == asker)) == [asker is not None] * 3


def test_ranks_on_machines_of_their_own_gather_and_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def met(world: World) -> tuple[list[int], int]:
        everyone = world.gather(world.rank)
        arrived.append(world.rank)
        world.barrier()
        return everyone, len(arrived)

    arrived = list[int]()
    ranks = ThreadRanks(3, monkeypatch)
    waited = list[int]()
    monkeypatch.setattr(dist, "barrier", lambda: waited.append(ranks.barrier.wait()))
    assert ranks.run(met) == [([0, 1, 2], 3)] * 3
    assert len(waited) == 3


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such limit")
@pytest.mark.parametrize("soft", [1024, 2559, 2560, resource.RLIM_INFINITY])
@pytest.mark.parametrize("hard", [2559, 2560, 4000, resource.RLIM_INFINITY])
def test_a_rank_may_connect_to_every_other(monkeypatch: pytest.MonkeyPatch, soft: int, hard: int) -> None:
    limits = [(soft, hard)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, limit: limits.append(limit))
    allow_connections(256)
    if soft in (1024, 2559) and hard == 2559:
        with pytest.raises(InputError, match=r"opens up to 2560 files .* the system allows 2559; .*ulimit -n 2560"):
            allow_connections(1024)
    else:
        allow_connections(1024)
    assert limits[1:] == ([(2560, hard)] if soft in (1024, 2559) and hard != 2559 else [])


def test_a_process_is_a_rank_when_a_launcher_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert not is_launched()
    monkeypatch.setenv("RANK", "3")
    assert not is_launched()
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert is_launched()
    assert launched_place() == Place(rank=3, size=4, local_rank=3, local_size=4)
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert launched_place() == Place(rank=3, size=4, local_rank=1, local_size=2)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *(("RANK", "main"), ("RANK", "2"), ("WORLD_SIZE", "0"), ("WORLD_SIZE", "65537"), ("WORLD_SIZE", "")),
        *(("LOCAL_RANK", ""), ("LOCAL_RANK", "-1"), ("LOCAL_RANK", "2")),
        *(("LOCAL_WORLD_SIZE", "0"), ("LOCAL_WORLD_SIZE", "3")),
    ],
)
def test_an_invalid_rank_or_world_size_is_refused(name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in {"RANK": "0", "WORLD_SIZE": "2", name: text}.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(InputError, match=f"{name}='{text}'.*expected a number"):
        launched_place()


def test_a_lone_rank_needs_no_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with join(device="cpu", backend="gloo", timeout=10, threads=1) as world:
        assert world == World.solo()
        assert not world.has_group
        assert not dist.is_initialized()


@pytest.mark.parametrize(("visible", "numbers"), [(1, [0, 0, 0]), (4, [0, 1, 2])])
def test_a_rank_that_sees_one_gpu_has_that(monkeypatch: pytest.MonkeyPatch, visible: int, numbers: list[int]) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    assert [own_gpu(rank) for rank in range(3)] == numbers
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [own_gpu(rank) for rank in range(2)] == [0, 1]
    with pytest.raises(InputError, match=r"local rank 2 has no GPU: its process sees 2; start at most 2 ranks"):
        own_gpu(2)


def join_and_stop(text: str, port: str) -> None:
    """Join a process group as one of three ranks, the last on another machine, and raise `Stopped` in it."""
    rank = int(text)
    machine = addresses.machine()
    addresses.machine = lambda: "another" if rank == 2 else machine
    os.environ.update(RANK=text, WORLD_SIZE="3", MASTER_ADDR="localhost", MASTER_PORT=port)
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    try:
        with join(device="cpu", backend="gloo", timeout=240, threads=1) as world:
            assert (world.rank, world.local_rank, world.size) == (rank, rank, 3)
            assert (world.device, torch.get_num_threads()) == (torch.device("cpu"), 1)
            assert world.sum(torch.tensor([rank + 1])).tolist() == [6]
            pids = world.gather(os.getpid())
            assert world.local_peer_pids == ({} if rank == 2 else {1 - rank: pids[1 - rank]})
            raise Stopped("saved")
    except Stopped:
        assert not dist.is_initialized()


def test_ranks_join_their_group_and_leave_it() -> None:
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    ranks = [forks().start("test_world:join_and_stop", str(rank), str(store.port)) for rank in range(3)]
    for done in map(result, ranks):
        assert done.code == 0, done.err


@pytest.mark.parametrize(("busy", "waits"), [(0.05, False), (0.1, False), (0.2, True), (0.9, True)])
def test_steps_over_a_tenth_of_a_second_are_long(busy: float, waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def can_wait(world: World) -> list[tuple[bool, float | None]]:
        consensus, seen = StopConsensus(world), []
        for seconds in (busy, 0.0, 0.0):
            consensus.agree(False, busy=seconds if world.rank == 1 else 0.0)
            seen.append((consensus.can_wait, consensus.longest_s))
        consensus.close()
        return [seen[0], seen[-1]]

    assert ThreadRanks(2, monkeypatch).run(can_wait) == [[(waits, busy), (False, 0.0)]] * 2


class Unfinished:
    """A collective that is done once it is waited for."""

    def __init__(self, message: torch.Tensor) -> None:
        self.message, self.waits = message, 0

    def wait(self) -> None:
        self.waits += 1
        self.message.copy_(torch.tensor([0, 1, 50_000]))  # the largest requests, and the microseconds of a busy rank


def test_a_message_is_read_when_it_has_arrived_and_each_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = list[tuple[list[int], Unfinished]]()

    def all_reduce(message: torch.Tensor, op: object, group: object, async_op: bool) -> Unfinished:
        assert (op, group, async_op) == (dist.ReduceOp.MAX, "control", True)
        sent.append((message.tolist(), Unfinished(message)))
        return sent[-1][1]

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    control: Any = "control"
    consensus = StopConsensus(replace(World.solo(), size=2, control=control))
    assert consensus.agree(False, False, busy=0.025) == [False, True], "the first one is waited for"
    assert consensus.longest_s == 0.05
    assert consensus.agree(True, False, busy=1e-6) == [False, False], "and a later one is read a step later"
    assert consensus.agree(False, False) == [False, True]
    assert [values for values, _ in sent] == [[0, 0, 25_000], [1, 0, 1], [0, 0, 0]]
    for _ in range(2):
        consensus.close()
    assert [work.waits for _, work in sent] == [1, 1, 1]


def test_values_are_gathered_in_the_order_of_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def gathered(world: World) -> tuple[list[int], list[int], int]:
        return world.gather(world.rank), world.gather_to_main(world.rank), world.broadcast(world.rank)

    other_ranks = ([0, 1, 2], [], 0)
    assert ThreadRanks(3, monkeypatch).run(gathered) == [([0, 1, 2], [0, 1, 2], 0), other_ranks, other_ranks]


def test_main_is_the_first_rank_of_the_job_and_a_lone_one_may_have_a_group() -> None:
    places = [(rank, local) for rank in range(4) for local in (rank % 2,)]
    worlds = [
        World(rank=rank, local_rank=local, size=4, local_size=2, device=torch.device("cpu")) for rank, local in places
    ]
    assert [(own.is_main, own.has_group) for own in worlds] == [(True, True), *[(False, True)] * 3]
    solo = World.solo("meta")
    assert (solo.device, solo.is_main, solo.has_group) == (torch.device("meta"), True, False)
    assert replace(solo, control=object()).has_group, "of a launcher, under strategy=ddp"
    assert (solo.any(True), solo.any(False), solo.gather("a"), solo.gather_to_main("a")) == (
        True,
        False,
        ["a"],
        ["a"],
    )


def test_small_messages_take_the_group_of_the_host_and_values_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    control, device = object(), torch.device("meta")
    calls: list[tuple[str, object]] = []
    for name in ("all_reduce", "broadcast_object_list", "all_gather_object", "send_object_list", "barrier"):
        monkeypatch.setattr(
            dist,
            name,
            lambda *_, name=name, **options: calls.append((name, options.get("group", options.get("device")))),
        )
    other = World(rank=1, local_rank=1, size=2, local_size=2, device=device, control=control)
    assert other.gather_to_main("a") == []
    for collective in (other.any, other.broadcast, other.gather):
        collective(False)
    tensor = torch.zeros(1)
    assert other.sum(tensor) is World.solo().sum(tensor) is tensor, "in place"
    other.barrier()
    expected = [("send_object_list", control), ("all_reduce", control), ("broadcast_object_list", device)]
    assert calls == [*expected, ("all_gather_object", control), ("all_reduce", None), ("barrier", None)]


class Group:
    """What a rank calls of `torch.distributed`, with the answers of two ranks on two machines."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **place: str) -> None:
        self.calls: list[Any] = []
        usual = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        for name, value in {**usual, "MASTER_ADDR": "main", "MASTER_PORT": "7000", **place}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv(ATTEMPT, raising=False)
        for name in ("init_process_group", "destroy_process_group", "TCPStore", "PrefixStore"):
            monkeypatch.setattr(dist, name, lambda *words, name=name, **named: self.call(name, words, named))
        monkeypatch.setattr(dist, "new_group", lambda **named: self.call("new_group", (), named))
        monkeypatch.setattr(dist, "all_gather_object", self.gather)
        monkeypatch.setattr(torch, "set_num_threads", lambda number: self.calls.append(("threads", number)))
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: self.calls.append(("device", device)))
        monkeypatch.setattr(addresses, "choose_interface", lambda **named: self.calls.append(("interface", named)))
        monkeypatch.setattr(addresses, "machine", lambda: "here")
        monkeypatch.setattr(worker, "allow_connections", lambda ranks: self.calls.append(("files", ranks)))

    def call(self, name: str, words: tuple[Any, ...], named: dict[str, Any]) -> str:
        self.calls.append((name, *words, named))
        return name

    def gather(self, processes: list[Any], own: Any, group: Any) -> None:
        assert group == "new_group"
        processes[:] = [("elsewhere", 7), own, ("here", 8), ("here", 9)][: len(processes)]

    @property
    def names(self) -> list[str]:
        return [call[0] for call in self.calls]


@pytest.mark.parametrize(("device", "backend"), [("cpu", "gloo"), ("cuda", "nccl"), ("cuda", "gloo")])
@pytest.mark.parametrize("local_size", [1, 2])
def test_a_rank_joins_its_group_with_its_device_its_place_and_its_time_limit(
    device: str, backend: str, local_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = Group(monkeypatch, WORLD_SIZE="4", LOCAL_RANK=f"{local_size - 1}", LOCAL_WORLD_SIZE=f"{local_size}")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    on = torch.device("cpu") if device == "cpu" else torch.device("cuda", local_size - 1)
    limit = {"timeout": timedelta(seconds=90)}
    with join(device=device, backend=backend, timeout=90, threads=3) as world:
        assert (world.rank, world.size, world.local_size, world.device) == (1, 4, local_size, on)
        assert (world.control, world.local_peer_pids) == ("new_group", {2: 8, 3: 9})
        assert "destroy_process_group" not in group.names
    own = {"store": None, "rank": 1, "world_size": 4, **limit, "device_id": on if backend == "nccl" else None}
    assert group.calls == [
        ("threads", 3),
        *[("device", on)] * (device == "cuda"),
        ("interface", {"one_machine": False}),
        ("files", 4),
        ("init_process_group", backend, own),
        ("new_group", {"backend": "gloo", **limit}),
        ("destroy_process_group", {}),
    ]


def test_ranks_of_one_machine_listen_there_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Group(monkeypatch, LOCAL_RANK="1", LOCAL_WORLD_SIZE="2")
    with join(device="cpu", backend="gloo", timeout=90, threads=1):
        assert ("interface", {"one_machine": True}) in group.calls


@pytest.mark.parametrize(
    ("error", "leaves"),
    [(None, True), (Stopped("saved"), True), (ValueError("odd"), False), (InputError("no"), False)],
)
def test_a_group_is_left_at_the_end_and_after_a_stop_and_never_waited_for_after_an_error(
    error: Exception | None, leaves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = Group(monkeypatch)
    with (
        nullcontext() if error is None else pytest.raises(type(error)),
        join(device="cpu", backend="gloo", timeout=90, threads=1),
    ):
        if error is not None:
            raise error
    assert group.names.count("destroy_process_group") == leaves


def test_ranks_of_an_attempt_meet_in_its_part_of_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Group(monkeypatch)
    monkeypatch.setenv(ATTEMPT, "second")
    with join(device="cpu", backend="gloo", timeout=90, threads=1):
        pass
    options = {"is_master": False, "wait_for_workers": False, "timeout": timedelta(seconds=90)}
    assert ("TCPStore", "main", 7000, options) in group.calls
    assert ("PrefixStore", "second", "TCPStore", {}) in group.calls
    assert next(call for call in group.calls if call[0] == "init_process_group")[-1]["store"] == "PrefixStore"


@pytest.mark.parametrize("words", ["Duplicate GPU detected : rank 0 and rank 1", "connection refused"])
def test_two_ranks_on_one_gpu_are_told_so_and_another_fault_is_itself(
    words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError(words)

    Group(monkeypatch)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(dist, "init_process_group", fail)
    kind = InputError if "GPU" in words else RuntimeError
    with pytest.raises(kind) as raised, join(device="cuda", backend="nccl", timeout=90, threads=1):
        pass
    says = "several ranks have the same GPU (cuda:0), which NCCL does not allow; start as many ranks on this machine"
    assert str(raised.value).startswith(says if kind is InputError else words)


@pytest.mark.parametrize("launched", [True, False])
@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_lone_rank_has_a_group_if_it_asks_for_one_and_a_launcher_has_started_it(
    launched: bool, alone: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = Group(monkeypatch, RANK="0", WORLD_SIZE="1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(dist, "all_gather_object", lambda processes, own, group: processes.__setitem__(0, own))
    if not launched:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            monkeypatch.delenv(name)
    with join(device=device, backend="gloo", timeout=90, threads=5, alone=alone) as world:
        assert world.device == (torch.device("cuda", 0) if device == "cuda" else torch.device("cpu"))
        assert (world.size, world.has_group, world.local_peer_pids) == (1, launched and alone, {})
    assert group.calls[0] == ("threads", 5)
    assert ("init_process_group" in group.names) is (launched and alone)
