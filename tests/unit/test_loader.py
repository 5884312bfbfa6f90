"""How images reach the device: both loaders yield the same shards, and leave no thread behind."""

import itertools
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from helpers import preprocessing
from lockstep.core.data_protocols import Crop, LoaderContext, Shard, Source
from lockstep.core.errors import InputError
from lockstep.core.plan import Plan, share
from lockstep.core.rng import permutation
from lockstep.core.world import World
from lockstep.data.datasets.builtin import Digits
from lockstep.data.datasets.files import FileSplit
from lockstep.data.datasets.folder import Folder
from lockstep.data.loading.loaders import BATCHES_AHEAD, Auto, Resident, Streaming, read_once
from lockstep.data.loading.reading import (
    decode_all,
    map_in_order,
    read_images,
    reading_rate,
    sample,
    workers_needed,
)
from lockstep.data.loading.shards import IGNORE_INDEX, Loader
from lockstep.data.transforms.crops import RandomResizedCrop
from lockstep.runtime.host import GB, cores
from thread_ranks import ThreadRanks

PLAN = Plan(examples=50, batch=16, total_steps=9, micro_batches=1, log_every=1, eval_every=1, save_every=1)


def world(rank: int = 0, size: int = 1) -> World:
    """A rank's identity; a loader needs no process group."""
    return World(rank=rank, local_rank=rank, size=size, local_size=size, device=torch.device("cpu"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """Fifty small images in two classes, and ten to evaluate."""
    root = tmp_path_factory.mktemp("images")
    generator = np.random.default_rng(0)
    for split, count in (("train", 25), ("val", 5)):
        for label in ("a", "b"):
            (root / split / label).mkdir(parents=True)
            for number in range(count):
                pixels = generator.integers(0, 256, (12, 10, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(root / split / label / f"{number:02}.png")
    return Folder(path=str(root), decode_size=8)


def loader(source: Source, kind: Any, where: World | None = None, *, partners: bool = False) -> Loader:
    here = where or world()
    train, val = source.train(), source.eval()
    of_train = {"train_labels": train.labels.clone(), "train_feeds": {0: kind.feed(train, here)}, "skip": train.skip}
    of_val = {"eval_labels": val.labels.clone(), "eval_feed": kind.feed(val, here), "eval_batch": 4}
    return Loader(world=here, plan=PLAN, seed=0, partners=partners, **of_train, **of_val)


def shards(data_loader: Loader, after: int = 0) -> Iterator[Shard]:
    """The shards of a loader, with the images as they are stored."""
    return (shard for stride in data_loader.train(after) for shard in stride.shards(stride.images))


def equal(one: Shard, other: Shard) -> bool:
    """Whether two shards are the same in every field."""
    names = ("images", "labels", "known_labels", "indices")
    tensors = all(torch.equal(getattr(one, name), getattr(other, name)) for name in names)
    return tensors and (one.step, one.epoch, one.count) == (other.step, other.epoch, other.count)


@pytest.fixture(params=["array", "folder"])
def source(request: pytest.FixtureRequest, folder: Folder) -> Source:
    return folder if request.param == "folder" else Digits()


@pytest.mark.parametrize("where", [world(), world(1, 3)], ids=["one rank", "rank 1 of 3"])
@pytest.mark.parametrize("workers", [0, 2])
def test_streaming_gives_the_shards_of_resident(source: Source, workers: int, where: World) -> None:
    for after in (0, 5):
        kinds = (Resident(), Streaming(workers=workers))
        pairs = zip(*(shards(loader(source, kind, where), after) for kind in kinds), strict=True)
        steps = [resident.step for resident, streamed in pairs if equal(resident, streamed)]
        assert steps == list(range(after + 1, 10))


@pytest.mark.parametrize("workers", [0, 2])
def test_streaming_evaluates_the_blocks_of_resident_again_and_again(source: Source, workers: int) -> None:
    resident, streaming = loader(source, Resident()), loader(source, Streaming(workers=workers))
    for _ in range(2):
        blocks = list(zip(resident.eval(), streaming.eval(), strict=True))
        assert all(torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) for a, b in blocks)
        assert sum(len(labels) for (_, labels), _ in blocks) == len(source.eval())


def test_a_shard_holds_the_images_and_labels_of_its_indices(source: Source) -> None:
    split = source.train()
    for shard in shards(loader(source, Resident())):
        assert torch.equal(shard.images, split.fetch(shard.indices.tolist()))
        assert torch.equal(shard.labels, split.labels[shard.indices])
        assert shard.images.dtype == torch.uint8


@pytest.mark.parametrize("workers", [0, 2])
def test_a_streamed_image_is_the_box_of_its_epoch(folder: Folder, workers: int) -> None:
    split = replace(folder.train(), crop=Crop(RandomResizedCrop().boxes, seed=0, size=(6, 6)))
    indices = torch.arange(4)
    (first, _), (second, _) = Streaming(workers=workers).feed(split, world())([(0, indices), (1, indices)])
    assert not torch.equal(first, second)
    assert torch.equal(second, split.fetch(indices.tolist(), 1))


@pytest.mark.parametrize("where", [world(), world(1, 3)], ids=["one rank", "rank 1 of 3"])
@pytest.mark.parametrize("partners", [False, True])
def test_the_global_batch_of_a_step_is_read_again_as_it_was(folder: Folder, partners: bool, where: World) -> None:
    own = loader(folder, Resident(), where, partners=partners)
    for shard in shards(loader(folder, Resident(), partners=partners)):
        batch = own.global_batch(shard.step)
        (again,) = batch.shards(batch.images)
        assert (again.step, again.epoch, again.count) == (shard.step, shard.epoch, shard.count)
        for name in ("images", "labels", "indices"):
            assert torch.equal(getattr(again, name), getattr(shard, name)[: shard.count])


def test_the_images_of_a_step_are_those_of_its_own_reader() -> None:
    """Another size of the images begins with another reader."""
    whole = loader(Digits(), Resident())
    inverse = replace(Digits().train(), images=255 - Digits().train().images)
    feed = Resident().feed(inverse, world())
    later = replace(whole, train_feeds={**whole.train_feeds, 2: feed, 99: feed})
    assert [shard.step for shard in shards(later)] == [*range(1, 10)], "the run is over before the third one"
    for shard in itertools.islice(shards(later), 4):
        assert torch.equal(later.global_batch(shard.step).images, shard.images)
        images = shard.images if shard.step <= 2 else 255 - shard.images
        assert torch.equal(images, whole.global_batch(shard.step).images)
    for (_, one), (_, other) in zip(*(of.one_by_one(torch.arange(50), 0) for of in (whole, later)), strict=True):
        assert torch.equal(other.images, one.images if one.steps[0].step <= 2 else 255 - one.images)
    for epoch in (0, 1):  # read at its end
        pairs = zip(*(of.blocks_of_epoch(epoch, 3) for of in (whole, later)), strict=True)
        assert all(torch.equal(other.images, 255 - one.images) for one, other in pairs)


@pytest.mark.parametrize(
    ("after", "expected"), [(0, ["first", "second"]), (1, ["first", "second"]), (2, ["second"]), (9, [])]
)
def test_a_reader_whose_steps_are_over_is_not_asked_for_images(after: int, expected: list[str]) -> None:
    whole, begun = loader(Digits(), Resident()), list[str]()

    def feed(name: str) -> Any:
        return lambda requests: begun.append(name) or whole.train_feeds[0](requests)

    later = replace(whole, train_feeds={0: feed("first"), 2: feed("second")})
    assert [shard.step for shard in shards(later, after)] == [*range(after + 1, 10)]
    assert begun == expected


@pytest.mark.parametrize("order_of", [None, lambda epoch: 50 * (epoch + 1) + torch.arange(50).flip(0)])
@pytest.mark.parametrize("partners", [False, True])
def test_examples_are_looked_at_one_by_one_as_their_epoch_has_them(
    folder: Folder, partners: bool, order_of: Callable[[int], torch.Tensor] | None
) -> None:
    alone, own = (
        replace(loader(folder, Streaming(workers=0), where, partners=partners), order_of=order_of)
        for where in (world(), world(1, 3))
    )
    expected = {
        int(piece.indices[0]) % 50: piece
        for shard in itertools.islice(shards(alone, after=4), 4)  # the steps of the second epoch
        for piece, _ in shard.micro_batches(shard.count)
    }
    decoded = dict(own.one_by_one(torch.tensor([3, 49, 0, 17]), epoch=1))
    assert [*decoded] == [example for example in expected if example in {3, 49, 0, 17}]
    for example, group in decoded.items():
        (piece,) = group.shards(group.images)
        assert equal(piece, expected[example])
        assert piece.labels.tolist() == [folder.train().labels[example]]
        assert (piece.number, piece.pieces) == (expected[example].number, expected[example].pieces)


def test_an_example_is_looked_at_once_and_in_its_epoch_alone(folder: Folder) -> None:
    """An epoch of repeated examples shows a part of them, each of these twice."""
    own = loader(folder, Streaming(workers=0))
    own = replace(own, order_of=lambda epoch: torch.arange(50) % 25 + 25 * (epoch % 2))
    for epoch, seen in ((0, [3, 20]), (1, [30])):
        assert [example for example, _ in own.one_by_one(torch.tensor([30, 20, 3]), epoch)] == seen


@pytest.mark.parametrize("crops", [False, True])
def test_only_a_split_that_cuts_boxes_is_asked_for_the_repetitions_of_an_example(crops: bool) -> None:
    requested = list[int]()

    def feed(requests: Any) -> Iterator[Any]:
        for _, indices in requests:
            requested.extend(indices.tolist())
            yield torch.zeros(len(indices), 1, 8, 8, dtype=torch.uint8), {}

    own = replace(loader(Digits(), Resident()), train_feeds={0: feed}, crops=crops)
    own = replace(own, order_of=lambda epoch: 100 + torch.arange(50))
    (first, *_) = shards(own)
    assert first.indices.tolist() == [*range(100, 116)]
    assert torch.equal(first.labels, Digits().train().labels[:16])
    assert requested[:16] == ([*range(100, 116)] if crops else [*range(16)])


def test_the_steps_of_an_epoch_are_read_together_up_to_their_number() -> None:
    own = replace(loader(Digits(), Resident()), stride=3)
    assert [[step.step for step in group.steps] for group in own.train(0)] == [[1], [2, 3, 4], [5, 6, 7], [8], [9]]


def test_a_sample_is_spread_over_the_split_and_has_no_broken_image(folder: Folder, damaged: Folder) -> None:
    split = folder.train()
    assert torch.equal(sample(split, 5), split.fetch([0, 10, 20, 30, 40]))
    assert torch.equal(sample(split, 4), split.fetch([0, 12, 25, 37]))
    assert torch.equal(sample(split, 99), split.fetch(list(range(50))))
    assert sample(replace(damaged.train(), skip=1), 2).shape == (1, 3, 8, 8)


def test_images_of_one_number_that_are_broken_in_both_splits_are_two(damaged: Folder) -> None:
    source = replace(damaged, skip=2)
    both = replace(loader(source, Streaming(workers=0)), plan=replace(PLAN, examples=2, batch=2))
    _ = [*both.train(after=0), *both.eval()]
    assert both.train_labels.tolist() == both.eval_labels.tolist() == [0, IGNORE_INDEX]
    assert both.count_skipped() == 2
    one = replace(loader(replace(damaged, skip=1), Streaming(workers=0)), plan=both.plan)
    with pytest.raises(InputError, match=r"dataset\.skip is 1"):
        _ = [*one.train(after=0), *one.eval()]


def test_the_ranks_of_a_machine_decode_a_share_each_and_know_all_images_and_all_broken_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [tmp_path / f"{number:03}.png" for number in range(300)]
    for number, path in enumerate(paths):
        Image.fromarray(np.full((4, 4, 3), number % 256, dtype=np.uint8)).save(path)
    for number in (7, 290):
        paths[number].write_bytes(b"no image")
    split = FileSplit(paths, torch.zeros(300, dtype=torch.int64), preprocessing(4, 4), skip=2)
    expected, broken = read_images(split, list(range(300)))

    def decoded(here: World) -> tuple[bool, list[int], str]:
        peers = {rank: 0 for rank in range(2) if rank != here.rank}
        neighbour = replace(here, control=object(), local_peer_pids=peers)
        images, left_out = decode_all(split, neighbour, threads=1)
        with pytest.raises(InputError) as caught:
            decode_all(replace(split, skip=0), neighbour, threads=1)
        return torch.equal(images, expected), sorted(left_out), str(caught.value)[:16]

    # Both read a share of 150 images: with a chunk behind those that are timed.
    assert sorted(broken) == [7, 290]
    assert ThreadRanks(2, monkeypatch).run(decoded) == [(True, [7, 290], "dataset: image 7")] * 2


def test_a_broken_image_that_several_ranks_read_counts_once(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    def skipped(here: World) -> int:
        own = replace(loader(folder, Resident(), here), skip=9)
        own.broken_seen.update({(False, 3), (False, 7 + here.rank), (True, 3)})
        return own.count_skipped()

    assert ThreadRanks(3, monkeypatch).run(skipped) == [5] * 3


def pieces_of(count: int, ranks: int, parts: int, partner: bool) -> list[Shard]:
    """All micro-batches of a global batch, rank by rank. Image, label and index of example i are i."""
    pieces = []
    for rank in range(ranks):
        place = share(count, ranks, rank)
        known = partner and place.start < place.stop
        rows = (torch.arange(count + 1) % max(count, 1))[place.start : place.stop + known]
        shard = Shard(1, 0, rows, rows, rows, count, rank, ranks, known)
        pieces += [piece for piece, _ in shard.micro_batches(parts)]
    return pieces


@given(st.integers(0, 60), st.integers(1, 6), st.integers(1, 6), st.booleans())
def test_pieces_depend_on_ranks_times_micro_batches_alone(count: int, ranks: int, parts: int, partner: bool) -> None:
    pieces = pieces_of(count, ranks, parts, partner)
    assert [piece.number for piece in pieces] == list(range(ranks * parts))
    assert [index for piece in pieces for index in piece.labels.tolist()] == list(range(count))
    for ours, theirs in zip(pieces, pieces_of(count, 1, ranks * parts, partner), strict=True):
        assert equal(ours, theirs)
        assert len(ours.indices) == len(ours.labels) + (partner and len(ours.labels) > 0)


def task(source: Source, where: World | None = None, **changes: Any) -> LoaderContext:
    """The loader's context in a run over `source` whose model trains on 100 images per second."""
    defaults = {"gigabytes": 0.5, "reads": 1000, "changes": False, "training_rate": lambda: 100.0}
    return LoaderContext(world=where or world(), splits=(source.train(), source.eval()), **{**defaults, **changes})


def test_auto_keeps_small_data_on_the_device_and_streams_other_data(folder: Folder) -> None:
    kind, reason = Auto(resident_gb=1.0).choose(task(Digits()))
    assert isinstance(kind, Resident)
    assert reason == "500 MB fit in 1.0 GB"
    kind, reason = Auto(resident_gb=1.0).choose(task(Digits(), gigabytes=21.6))
    assert kind == Streaming(workers=0)
    assert reason == "21.6 GB do not fit in 1.0 GB; images in memory"
    for own in ({"workers": 3}, {"workers": 3, "prefetch": 5}):
        assert Auto(resident_gb=1.0, **own).choose(task(Digits(), gigabytes=21.6))[0] == Streaming(**own)
    assert Auto(prefetch=5).choose(task(Digits()))[0] == Streaming(workers=1, prefetch=5)
    assert Auto().choose(task(folder, reads=61))[0] == Resident()
    kind, reason = Auto().choose(task(folder, reads=60))
    assert isinstance(kind, Streaming)
    assert reason.startswith("60 images to read, 60 to decode in advance; ")
    kind, reason = Auto().choose(task(folder, changes=True))
    assert isinstance(kind, Streaming)
    assert reason.startswith("each epoch reads other pixels; ")


def test_what_images_will_hold_of_the_device_is_known_before(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = World(rank=0, local_rank=0, size=2, local_size=2, device=torch.device("cuda"))
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (16 * GB, 80 * GB))
    # The images, and a sixteenth of the free memory for the images that are augmented together.
    assert Resident().held_gb(task(Digits(), gpu)) == 0.5 + 1
    assert Resident().held_gb(task(Digits(), world(0, 2))) == 0  # they are in the host's memory already
    assert Resident().held_gb(task(folder, world(0, 2))) == 0.25  # one copy for both ranks
    assert Auto().held_gb(task(folder, world(0, 2))) == 0.25
    assert Auto(workers=3).held_gb(task(folder)) == Streaming().held_gb(task(folder)) == 0


def threads_on(number: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The threads that each decoding and each feed gets from now on, on a machine of so many cores."""
    started = list[int]()

    def decode(split: Any, world: World, *, threads: int) -> Any:
        started.append(threads)
        return split.fetch([0]), {}

    monkeypatch.setattr("lockstep.data.loading.loaders.cores", lambda: number)
    monkeypatch.setattr("lockstep.data.loading.reading.reading_rate", lambda split: 100.0)
    monkeypatch.setattr("lockstep.data.loading.reading.decode_all", decode)
    monkeypatch.setattr(Streaming, "feed", lambda loader, split, world: started.append(loader.workers))
    return started


@pytest.mark.parametrize("size", [2, 6])
def test_ranks_of_other_machines_take_nothing_of_this_one(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    where = World(rank=0, local_rank=0, size=size, local_size=2, device=torch.device("cpu"))
    started = threads_on(8, monkeypatch)
    Resident().feed(folder.train(), where)
    read_once(folder.eval(), where)
    assert started == [4, 4]
    for model in (None, 1e9):
        assert Streaming().choose(task(folder, where, training_rate=lambda: model))[0] == Streaming(workers=4)  # noqa: B023
    assert Resident().held_gb(task(folder, where)) == 0.25


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_images_are_read_by_the_workers_and_without_any_by_the_training(
    workers: int, folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = set[str]()

    def read_images(split: Any, indices: list[int], epoch: int) -> tuple[torch.Tensor, dict[int, str]]:
        threads.add(threading.current_thread().name)
        return torch.zeros(len(indices), 1), {}

    monkeypatch.setattr("lockstep.data.loading.reading.read_images", read_images)
    read = Streaming(workers=workers).feed(folder.train(), World.solo())
    assert len(list(read((0, torch.arange(2)) for _ in range(9)))) == 9
    own = threading.current_thread().name
    assert threads == {own} if not workers else own not in threads and len(threads) <= workers


def test_few_batches_on_a_gpu_wait_for_their_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    train, events, numbers = Digits().train(), list[str](), itertools.count()

    def event(blocking: bool = False) -> Any:
        waits = f"{'asleep' if blocking else 'busy'} until batch {next(numbers)} has begun"
        return SimpleNamespace(record=lambda stream: None, synchronize=lambda: events.append(waits))

    def copied(image: torch.Tensor, device: torch.device, non_blocking: bool) -> torch.Tensor:
        events.append("copy")
        return image

    stream = SimpleNamespace(record_event=lambda: None, wait_event=lambda event: None)
    fakes = {"Event": event, "Stream": lambda device: stream, "current_stream": lambda device: stream}
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda image: image)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda image, stream: None)
    monkeypatch.setattr(torch.Tensor, "to", copied)
    read = Streaming(workers=0).feed(train, World.solo("cuda:7"))
    assert len(list(read((0, torch.arange(4)) for _ in range(BATCHES_AHEAD + 3)))) == BATCHES_AHEAD + 3
    # A batch is copied while the one before it is handed over.
    assert events == [
        *["copy"] * (BATCHES_AHEAD + 1),
        *("asleep until batch 0 has begun", "copy", "asleep until batch 1 has begun", "copy"),
    ]


@pytest.mark.parametrize(("free_gb", "steps"), [(160, 43), (80, 33), (8, 3), (0.1, 1)])
def test_on_a_gpu_the_steps_of_an_epoch_are_read_together_as_far_as_memory_allows(
    monkeypatch: pytest.MonkeyPatch, free_gb: float, steps: int
) -> None:
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (free_gb * GB, 80 * GB))
    gpu = World.solo("cuda")
    assert Resident().stride(2000, 3 * 32 * 32, gpu) == steps
    assert [Streaming().stride(shard, 3 * 32 * 32, gpu) for shard in (1, 2, 2000)] == [1, 1, 1]


def test_auto_leaves_half_of_a_ranks_share_of_the_memory_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.runtime.host.available_memory", lambda: 10 * GB)
    for where, gigabytes, kind in ((world(), 6, Streaming), (world(), 3, Resident), (world(0, 4), 3, Streaming)):
        assert isinstance(Auto(resident_gb=1e6).choose(task(Digits(), where, gigabytes=gigabytes))[0], kind)


def test_auto_workers_keep_up_with_the_model_and_say_both_rates(folder: Folder) -> None:
    kind, reason = Streaming().choose(task(folder, training_rate=lambda: 1.0))
    assert kind == Streaming(workers=1)  # tiny images: one worker reads thousands per second
    assert re.fullmatch(r"model 1 img/s, one worker [\d,]+ img/s", reason)
    assert Streaming().choose(task(folder, world(0, 1000), training_rate=lambda: 1e9))[0] == Streaming(workers=1)


@pytest.mark.parametrize("model", [None, 1e9])
@pytest.mark.parametrize(("reader", "workers"), [(20_000.0, cores()), (25_000.0, 1), (30_000.0, 1)])
def test_light_images_get_one_worker_where_others_get_a_core_each(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, model: float | None, reader: float, workers: int
) -> None:
    monkeypatch.setattr("lockstep.data.loading.reading.reading_rate", lambda split: reader)
    kind, reason = Streaming().choose(task(folder, training_rate=lambda: model))
    assert kind == Streaming(workers=workers)
    rate = "not tried" if model is None else "1,000,000,000 img/s"
    assert reason.startswith(f"model {rate}, one worker ")


def test_a_configured_number_of_workers_costs_no_dry_run(folder: Folder) -> None:
    def tried() -> float:
        raise AssertionError

    for kind in (Streaming(workers=3), Auto(workers=3, resident_gb=0), Resident()):
        kind.choose(task(folder, training_rate=tried))
    Auto().choose(task(Digits(), training_rate=tried))


def test_workers_are_as_many_as_the_rates_ask_for() -> None:
    own = [workers_needed(model, 1000, 8, own_cores=True) for model in (100, 900, 2000, 1e6)]
    assert own == [1, 2, 3, 8], "with headroom"
    shared = [workers_needed(model, 1000, 8, own_cores=False) for model in (100, 2000, 1e9)]
    assert shared == [1, 2, 8], "the shared cores spend a fifth of their time on reading"


@pytest.fixture
def damaged(tmp_path: Path) -> Iterator[Folder]:
    """Two images; one of them cannot be decoded."""
    for split in ("train", "val"):
        (tmp_path / split / "a").mkdir(parents=True)
        Image.fromarray(np.zeros((8, 8, 3), dtype=np.uint8)).save(tmp_path / split / "a" / "0.png")
        (tmp_path / split / "a" / "1.png").write_bytes(b"no image")
    return Folder(path=str(tmp_path), decode_size=8)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_unreadable_image_is_an_error_with_its_sentence_from_a_worker_too(damaged: Folder, workers: int) -> None:
    feed = Streaming(workers=workers).feed(damaged.train(), world())
    with pytest.raises(InputError, match=r"^dataset: image 1, .*/train/a/1\.png, cannot be decoded"):
        list(feed([(0, torch.tensor([0])), (0, torch.tensor([0, 1]))]))
    assert readers_end()


def spoil(folder: Folder, into: Path, *names: str) -> Path:
    """A copy of a folder in which some files cannot be decoded."""
    shutil.copytree(folder.path, into)
    for name in names:
        (into / name).write_bytes(b"no image")
    return into


LOADERS = [Resident(), Streaming(workers=0), Streaming(workers=2)]


@pytest.mark.parametrize("kind", LOADERS, ids=repr)
@pytest.mark.parametrize("partners", [False, True])
def test_broken_images_are_blank_and_without_a_label_and_the_others_as_ever(
    folder: Folder, tmp_path: Path, kind: Any, partners: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    path = spoil(folder, tmp_path / "copy", "train/a/03.png", "train/b/00.png", "val/b/04.png")
    source = Folder(path=str(path), decode_size=8, skip=3)
    ours, whole = (loader(source_or_folder, kind, partners=partners) for source_or_folder in (source, folder))
    for damaged, intact in zip(shards(ours), shards(whole), strict=True):
        broken = torch.isin(damaged.indices, torch.tensor([3, 25]))
        assert torch.equal(damaged.known_labels, intact.known_labels.masked_fill(broken, IGNORE_INDEX))
        assert torch.equal(damaged.images, intact.images.masked_fill(broken[:, None, None, None], 0))
        assert (damaged.count, len(damaged.labels)) == (intact.count, len(intact.labels))
    for _ in range(2):
        labels = torch.cat([labels for _, labels in ours.eval()])
        assert labels.tolist() == [0] * 5 + [1] * 4 + [IGNORE_INDEX]
    assert ours.count_skipped() == 3
    warnings = capsys.readouterr().out.splitlines()
    assert len(warnings) == 3
    for index, name in {3: "train/a/03.png", 25: "train/b/00.png", 9: "val/b/04.png"}.items():
        assert sum(f"warning: image {index}, {path}/{name}, cannot be decoded (" in line for line in warnings) == 1
    assert warnings[2].endswith("skipped, 3 of at most 3")


@pytest.mark.parametrize("workers", [0, 2])
def test_a_broken_image_does_not_change_the_boxes_of_others(folder: Folder, tmp_path: Path, workers: int) -> None:
    crop = Crop(RandomResizedCrop().boxes, seed=0, size=(6, 6))
    path = spoil(folder, tmp_path / "copy", "train/a/03.png")
    whole = replace(folder.train(), crop=crop)
    spoiled = replace(Folder(path=str(path), decode_size=8, skip=1).train(), crop=crop)
    requests = [(epoch, torch.arange(10)) for epoch in (0, 1)]
    ours, theirs = (list(Streaming(workers=workers).feed(split, world())(requests)) for split in (spoiled, whole))
    for (some, broken), (expected, _) in zip(ours, theirs, strict=True):
        assert list(broken) == [3]
        expected[3] = 0
        assert torch.equal(some, expected)


@pytest.mark.parametrize("kind", LOADERS, ids=repr)
def test_more_broken_images_than_allowed_end_the_run(folder: Folder, tmp_path: Path, kind: Any) -> None:
    path = spoil(folder, tmp_path / "copy", "train/a/03.png", "train/b/00.png", "val/b/04.png")
    ours = loader(Folder(path=str(path), decode_size=8, skip=2), kind)
    list(ours.train(after=0))
    with pytest.raises(InputError, match=r"dataset.skip is 2, but image 9, .*04.png.* too; .*dataset.skip=4"):
        list(ours.eval())


def readers() -> list[threading.Thread]:
    """The threads that read batches."""
    return [thread for thread in threading.enumerate() if thread.name.startswith("loader")]


def readers_end() -> bool:
    """Whether all of them end once their current read is done; the loader itself does not wait for that."""
    for reader in readers():
        reader.join(timeout=20)
    return readers() == []


def test_no_worker_is_left_when_training_ends_or_is_broken_off(folder: Folder) -> None:
    assert readers_end(), "of the tests before"
    streaming = loader(folder, Streaming(workers=2))
    batches = streaming.train(after=0)
    next(batches)
    assert len(readers()) in (1, 2), "the second one is started when the first is busy"
    batches.close()  # type: ignore[attr-defined]
    assert readers_end()
    list(streaming.train(after=7))
    list(streaming.eval())
    assert readers_end()


def test_as_many_workers_as_are_asked_for_read_at_the_same_time() -> None:
    meeting = threading.Barrier(3)

    def read(number: int) -> int:
        meeting.wait(timeout=20)
        return number

    assert [*map_in_order(read, range(6), workers=3, prefetch=1)] == [*range(6)]


@pytest.mark.parametrize("end", ["an error", "the end of training"])
def test_a_read_that_never_ends_holds_up_no_other_end(end: str) -> None:
    released, done = threading.Event(), []

    def read(number: int) -> int:
        if number:
            done.append(released.wait(5))
        elif end == "an error":
            raise OSError("gone")
        return number

    reads = map_in_order(read, range(3), workers=2, prefetch=1)
    with pytest.raises(OSError, match="gone") if end == "an error" else closing(reads):  # type: ignore[type-var]
        assert next(reads) == 0
    assert not done
    released.set()
    assert readers_end()


@pytest.mark.parametrize(("workers", "prefetch"), [(1, 1), (2, 3)])
def test_workers_read_no_further_ahead_than_asked(folder: Folder, workers: int, prefetch: int) -> None:
    numbers = iter(range(100))
    feed = Streaming(workers=workers, prefetch=prefetch).feed(folder.train(), world())
    batches = feed((0, torch.tensor([number % 50])) for number in numbers)
    for count in range(1, 5):
        next(batches)
        assert next(numbers) == 2 * count - 1 + workers * prefetch


def test_a_loader_says_how_images_reach_the_device_and_what_reads_ahead() -> None:
    assert str(Resident()) == "all images in memory"
    words = {0: "0 workers", 1: "1 worker", 2: "2 workers"}
    assert [str(Streaming(workers=number)) for number in words] == [
        f"images read as they are needed, {of}" for of in words.values()
    ]
    for workers, prefetch in ((0, 2), (1, 5), (1, 1), ("auto", 5)):
        Streaming(workers=workers, prefetch=prefetch).check()
    for prefetch in (1, 3):
        with pytest.raises(InputError, match=rf"prefetch is {prefetch}, but loader\.workers is 0, and only workers"):
            Streaming(workers=0, prefetch=prefetch).check()
    device = World.solo("cuda:1").device
    assert Resident().order_device(World.solo("cuda:1")) == device


@pytest.mark.parametrize(
    ("images", "seconds", "most"), [(1000, 1e-3, 304), (1000, 1e-2, 32), (20, 1e-3, 304), (300, 1e-3, 304)]
)
def test_the_rate_of_a_worker_is_that_of_a_few_images_without_the_first(
    monkeypatch: pytest.MonkeyPatch, images: int, seconds: float, most: int
) -> None:
    clock, chunks = [0.0], list[list[int]]()

    class Timed:
        def __len__(self) -> int:
            return images

        def fetch(self, indices: list[int], epoch: int = 0) -> torch.Tensor:
            clock[0] += 100 if not chunks else seconds * len(indices)  # the first one imports the decoders
            chunks.append(indices)
            return torch.zeros(len(indices), 1, 1, 1)

    monkeypatch.setattr("lockstep.data.loading.reading.time", SimpleNamespace(perf_counter=lambda: clock[0]))
    timed: Any = Timed()
    rate = reading_rate(timed)
    assert rate == pytest.approx(1 / seconds)
    first, *timed_chunks = chunks
    assert first == [0]
    step = max(1, images // 256)
    every = [index for chunk in timed_chunks for index in chunk]
    expected = [*range(0, images, step)]
    assert every == expected[: len(every)]
    assert {len(chunk) for chunk in timed_chunks[:-1]} <= {16}
    assert len(every) == min(len(expected), most)


@pytest.mark.parametrize(("shard", "steps"), [(0, 2**20), (1, 341), (100, 3), (341, 1), (342, 1)])
def test_on_a_cpu_as_many_steps_are_read_together_as_have_a_million_values(shard: int, steps: int) -> None:
    assert Resident().stride(shard, 3 * 32 * 32, world()) == steps


def test_each_of_many_ranks_on_few_cores_has_a_thread_and_images_in_memory_need_none(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, crowded = threads_on(2, monkeypatch), world(0, 8)
    Resident().feed(folder.train(), crowded)
    assert Streaming().choose(task(folder, crowded))[0] == Streaming(workers=1)
    for source_or_digits in (folder, Digits()):
        read_once(source_or_digits.eval(), crowded)
    assert started == [1, 1, 0]


@pytest.mark.parametrize(("device", "workers"), [("cpu", 1), ("cuda", 2)])
def test_reading_takes_the_cores_of_the_training_on_a_cpu_alone(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, device: str, workers: int
) -> None:
    monkeypatch.setattr("lockstep.data.loading.loaders.cores", lambda: 4)
    monkeypatch.setattr("lockstep.data.loading.reading.reading_rate", lambda split: 1000.0)
    chosen, _ = Streaming().choose(task(folder, World.solo(device), training_rate=lambda: 1000.0))
    # A quarter more than 1,000 images per second, or than the 800 that are left where both share four cores.
    assert chosen == Streaming(workers=workers)


def test_a_step_waits_for_the_copy_of_its_images_whose_memory_stays_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    events, streams = list[str](), list[Any]()

    def pinned(image: torch.Tensor) -> torch.Tensor:
        events.append("pinned")
        return image

    @contextmanager
    def on(stream: Any) -> Iterator[None]:
        events.append(f"begin on {stream.name}")
        yield
        events.append("end")

    def copied(image: torch.Tensor, device: torch.device, non_blocking: bool) -> torch.Tensor:
        events.append("copied" if non_blocking else "waited for")
        return image

    def made(device: torch.device) -> Any:
        streams.append(copying)
        return copying

    copying = SimpleNamespace(record_event=lambda: "the copy", name="a stream for copies")
    stepping = SimpleNamespace(wait_event=lambda event: events.append(f"the step waits for {event}"), name="the step")
    event = SimpleNamespace(record=lambda stream: None, synchronize=lambda: None)
    fakes = {"Stream": made, "current_stream": lambda device: stepping, "stream": on}
    for name, fake in {**fakes, "Event": lambda blocking: event}.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pinned)
    monkeypatch.setattr(torch.Tensor, "to", copied)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda image, stream: events.append(f"kept for {stream.name}"))
    copy = ["pinned", "begin on a stream for copies", "copied", "end"]
    for _ in range(2):
        read = Streaming(workers=0).feed(Digits().train(), World.solo("cuda:6"))
        assert len(list(read([(0, torch.arange(4))]))) == 1
    assert events == [*copy, "the step waits for the copy", "kept for the step"] * 2
    assert len(streams) == 1, "one for all readers of a GPU"


def test_images_that_just_fit_become_resident_and_a_given_loader_says_so(folder: Folder) -> None:
    kind, reason = Auto(resident_gb=0.5).choose(task(Digits()))
    assert (kind, reason) == (Resident(), "500 MB fit in 500 MB")
    for own in ({"workers": 3}, {"workers": 3, "prefetch": 5}):
        reason = Auto(**own).choose(task(folder))[1]
        assert reason == "loader.workers or loader.prefetch is given; as configured"


def test_what_is_read_ahead_is_dropped_when_nobody_wants_it() -> None:
    released, started = threading.Event(), list[int]()

    def read(number: int) -> int:
        started.append(number)
        return number if not number else int(released.wait(5))

    reads = map_in_order(read, range(9), workers=1, prefetch=3)
    assert next(reads) == 0
    reads.close()  # type: ignore[attr-defined]
    released.set()
    assert readers_end()
    assert max(started) <= 1


class Numbered:
    """A split of images of one pixel, the number of the example; keeps which were read."""

    skip, labels = 0, torch.zeros(300)

    def __init__(self) -> None:
        self.read = list[int]()

    def __len__(self) -> int:
        return 300

    def fetch(self, indices: list[int], epoch: int = 0) -> torch.Tensor:
        self.read += indices
        return (torch.tensor(indices, dtype=torch.int64) % 256).to(torch.uint8).view(-1, 1, 1, 1)


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="ranks share memory on Linux")
def test_the_ranks_of_every_machine_share_its_memory_and_leave_no_file_open(monkeypatch: pytest.MonkeyPatch) -> None:
    def decoded(here: World) -> tuple[list[int], bool, list[int]]:
        own: Any = Numbered()
        peers = {rank: 0 for rank in range(4) if rank // 2 == here.rank // 2 and rank != here.rank}
        images, _ = decode_all(own, replace(here, control=object(), local_peer_pids=peers), threads=1)
        here.barrier()
        equal = torch.equal(images, Numbered().fetch([*range(300)]))
        here.barrier()
        images[here.rank] = 200
        here.barrier()
        return own.read, equal, images[:4].flatten().tolist()

    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    shares, own_memory = [[*range(150)], [*range(150, 300)]] * 2, [[200, 200, 2, 3]] * 2 + [[0, 1, 200, 200]] * 2
    expected = [(share, True, memory) for share, memory in zip(shares, own_memory, strict=True)]
    assert ThreadRanks(4, monkeypatch).run(decoded) == expected
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


@pytest.mark.parametrize(("seconds", "workers"), [(30e-6, 1), (50e-6, 5)])
def test_images_are_decoded_by_several_threads_where_that_takes_longer_than_python(
    monkeypatch: pytest.MonkeyPatch, seconds: float, workers: int
) -> None:
    clock, chosen = [0.0], list[int]()

    class Timed(Numbered):
        def fetch(self, indices: list[int], epoch: int = 0) -> torch.Tensor:
            clock[0] += seconds * len(indices) if self.read else 100  # the first chunk imports the decoders
            return super().fetch(indices)

    def mapped(function: Any, items: Any, *, workers: int, prefetch: int) -> Any:
        chosen.append(workers)
        return map(function, items)

    monkeypatch.setattr("lockstep.data.loading.reading.time", SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr("lockstep.data.loading.reading.map_in_order", mapped)
    timed: Any = Timed()
    images, _ = decode_all(timed, World.solo(), threads=5)
    assert chosen == [workers]
    assert (timed.read, len(images)) == ([*range(300)], 300)


def test_more_broken_images_than_allowed_on_all_ranks_together_end_the_run(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def skipped(here: World) -> None:
        own = replace(loader(folder, Resident(), here), skip=3)
        of_ranks = ((3, 7, 8), (3, 9), ())
        own.broken_seen.update((False, number) for number in of_ranks[here.rank])
        says = r"^dataset.skip is 3, but 4 images cannot be decoded; .* skip more of them with dataset.skip=6$"
        with pytest.raises(InputError, match=says):
            own.count_skipped()

    ThreadRanks(3, monkeypatch).run(skipped)


def test_the_order_of_the_examples_is_computed_where_the_loader_says() -> None:
    devices = list[str]()

    def feed(requests: Any) -> Iterator[Any]:
        devices.append(next(requests)[1].device.type)
        yield from ()

    whole = loader(Digits(), Resident())
    for device in (None, torch.device("cpu"), torch.device("meta")):
        assert list(replace(whole, train_feeds={0: feed}, order_device=device).train(after=0)) == []
    assert devices == ["cpu", "cpu", "meta"]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("machines", [1, 2])
def test_every_rank_knows_the_blocks_of_the_first_one_and_the_first_image(
    folder: Folder, rank: int, machines: int
) -> None:
    where = replace(world(rank, 2), local_rank=rank // machines, local_size=2 // machines)
    own, split = loader(folder, Streaming(workers=0), where), folder.eval()
    assert own.eval_rounds == 2
    blocks = [range(4), range(8, 10)] if rank == 0 else [range(4, 8)]
    for (images, labels), block in zip(own.eval(), blocks, strict=True):
        assert torch.equal(images, split.fetch([*block]))
        assert torch.equal(labels, split.labels[block.start : block.stop])
    assert torch.equal(own.eval_image(), split.fetch([0]))


@pytest.mark.parametrize(("epoch", "last"), [(0, 4), (1, 8), (2, 9)])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_each_rank_has_its_blocks_of_an_epoch_and_the_first_ones_again(epoch: int, last: int, ranks: int) -> None:
    split, order = Digits().train(), permutation(0, epoch, PLAN.examples)
    turns = {1: [[0, 1, 2, 3]], 2: [[0, 2], [1, 3]], 3: [[0, 3], [1, 0], [2, 1]]}[ranks]
    for rank, own in enumerate(turns):
        groups = [*loader(Digits(), Resident(), world(rank, ranks)).blocks_of_epoch(epoch, 4)]
        for group, turn in zip(groups, own, strict=True):
            block = order[4 * turn : 4 * turn + 4]
            assert torch.equal(group.indices, block)
            assert torch.equal(group.known_labels, split.labels[block])
            assert torch.equal(group.images, split.fetch(block.tolist()))
            (shard,) = group.shards(group.images)
            assert (shard.step, shard.epoch, shard.count, shard.number, shard.pieces) == (last, epoch, 4, 0, 1)


def test_the_last_block_of_an_epoch_may_be_short() -> None:
    groups = [*loader(Digits(), Resident()).blocks_of_epoch(0, 13)]
    counts = [shard.count for group in groups for shard in group.shards(group.images)]
    assert counts == [len(group.indices) for group in groups] == [4] * 12 + [2]


def test_broken_images_of_the_blocks_of_an_epoch_are_skipped_too(damaged: Folder) -> None:
    plan = replace(PLAN, examples=2, batch=2)
    own = replace(loader(replace(damaged, skip=1), Streaming(workers=0)), plan=plan)
    labels = torch.cat([group.known_labels for group in own.blocks_of_epoch(0, 1)])
    assert sorted(labels.tolist()) == [IGNORE_INDEX, 0]
    with pytest.raises(InputError, match=r"cannot be decoded"):
        list(replace(loader(damaged, Streaming(workers=0)), plan=plan).blocks_of_epoch(0, 1))


def test_an_image_that_ends_the_decoding_says_where_for_other_ranks() -> None:
    class Refusing(Numbered):
        def fetch(self, indices: list[int], epoch: int = 0) -> torch.Tensor:
            if 250 in indices:
                raise InputError("dataset: no image 250")
            return super().fetch(indices)

    split: Any = Refusing()
    for threads in (1, 2):
        with pytest.raises(InputError, match=r"^dataset: no image 250") as caught:
            decode_all(split, World.solo(), threads=threads)
        assert "in fetch" in "".join(caught.value.__notes__)


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="ranks share memory on Linux")
@pytest.mark.parametrize("reached", ["another file", "no process", "nothing", "by one rank alone"])
def test_ranks_that_cannot_reach_the_memory_of_their_neighbours_decode_all_images_themselves(
    reached: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = os.memfd_create
    if reached == "another file":  # as on another machine of the same name
        monkeypatch.setattr(os, "memfd_create", lambda name: create(f"other-{name}"))
    elif reached == "no process":
        monkeypatch.setattr(os, "getpid", lambda: 2**30)
    elif reached == "nothing":
        monkeypatch.delattr(os, "memfd_create")
    else:
        from_file, number = torch.from_file, itertools.count()

        def mapped(*place: Any, **how: Any) -> torch.Tensor:
            if next(number):
                raise OSError("no memory")
            return from_file(*place, **how)

        monkeypatch.setattr(torch, "from_file", mapped)

    def decoded(here: World) -> tuple[int, bool]:
        own: Any = Numbered()
        neighbour = replace(here, control=object(), local_peer_pids={1 - here.rank: 0})
        images, _ = decode_all(own, neighbour, threads=1)
        return len(own.read), torch.equal(images, Numbered().fetch([*range(300)]))

    assert ThreadRanks(2, monkeypatch).run(decoded) == [(300, True)] * 2
