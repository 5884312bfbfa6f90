"""The parts of a run, put together from a job: every option reaches its part; and the dump of a bad step."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from helpers import records, resolved, run_dir, train_here, weights
from lockstep.checkpoint.writing import Checkpointer
from lockstep.core.batch import Batch
from lockstep.core.errors import InputError, NumericalError, StorageError
from lockstep.core.observer import Callback, TrainingRun
from lockstep.core.run import Run
from lockstep.core.run_dir import RunDir
from lockstep.core.world import World
from lockstep.data.loading.loaders import Resident
from lockstep.data.loading.shards import IGNORE_INDEX
from lockstep.data.transforms.mixing import Mix
from lockstep.models.nets import whitening_filters
from lockstep.runtime import host
from lockstep.runtime.signals import StopRequest
from lockstep.tasks import Multiclass
from lockstep.telemetry import sinks
from lockstep.telemetry.meter import Telemetry
from lockstep.telemetry.profile import training_flops
from lockstep.training import experiment
from lockstep.training.build_data import build_data, build_loader
from lockstep.training.build_observers import Observers, build_observers
from lockstep.training.experiment import build_parts
from lockstep.training.resolved_job import load_job, plan_of
from lockstep.training.run_record import RunRecord
from lockstep.training.train_state import Progress, build_state
from lockstep.training.train_step import StepListener
from thread_ranks import ThreadRanks

JOB = ("model=linear", "batch=8", "steps=3", "train.eval_every=100%", "augment=none", "train.eval_batch=400")
# Options that change the steps, but not the first loss, which is that of the initial weights.
OF_A_STEP = (
    *("optimizer.lr=0.01", "schedule.warmup=2", "train.clip_norm=0.01"),
    "model=digitnet model.width=8 train.freeze=[backbone]",
    *("model=digitnet model.width=8 train.freeze=[backbone] train.freeze_until=1", "model=digitnet model.width=8"),
)
# Options that change the first loss too.
OF_A_LOSS = (
    *("seed=1", "augment=shift", "input.mean=[0.1]", "input.std=[0.7]", "dataset.input_size=12"),
    *("dataset.input_size=12 input.interpolation=bicubic", "loss.label_smoothing=0.2", "train.cutout=4"),
    *("train.erase=1", "train.repeats=2", "train.erase=1 train.erase_mode=pixel"),
)


def test_the_weights_of_parts_are_drawn_by_the_seed_of_their_job() -> None:
    drawn = list[dict[str, torch.Tensor]]()
    for own, seed in ((3, 5), (4, 5), (4, 6)):
        torch.manual_seed(own)
        drawn.append(build_parts(resolved(*JOB, f"seed={seed}")).state.model.state_dict())
    first, again, other = drawn
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


def losses(folder: Path, option: str = "") -> tuple[tuple[float, ...], float]:
    """The losses of training, and that of the evaluation at its end."""
    words = option.split()
    own = [word for word in JOB if word.partition("=")[0] not in {word.partition("=")[0] for word in words}]
    lines = records(train_here(folder, *own, *words))
    return tuple(line["loss/train"] for line in lines if "loss/train" in line), lines[-1]["loss/val"]


def test_every_option_changes_the_losses_that_it_is_for_and_no_two_alike(tmp_path: Path) -> None:
    plain = losses(tmp_path / "plain")
    seen = {option: losses(tmp_path / str(n), option) for n, option in enumerate((*OF_A_STEP, *OF_A_LOSS))}
    for option, (trained, _) in seen.items():
        first = seen[OF_A_STEP[-1]] if "digitnet" in option else plain
        assert (trained[0] == first[0][0]) == (option in OF_A_STEP), option
    assert len({plain[0], *(trained for trained, _ in seen.values())}) == 1 + len(seen)
    views = losses(tmp_path / "views", "train.eval_views=2")
    assert views[0] == plain[0]
    assert views[1] != plain[1]


def folder_of_noise(root: Path) -> None:
    for split in ("train", "val"):
        (root / split / "a").mkdir(parents=True)
        pixels = np.random.default_rng(0).integers(0, 256, (12, 12, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(root / split / "a" / "1.png")


def test_the_data_has_the_options_of_its_job(tmp_path: Path) -> None:
    folder_of_noise(tmp_path)
    words = ("dataset=folder", f"dataset.path={tmp_path}", "dataset.decode_size=8", "dataset.crop_from=file")
    words += ("loader=streaming", "loader.workers=0", "batch=1", "seed=7", "input.interpolation=bicubic")
    words += ("train.mixup=0.25", "train.cutmix=0.5", "train.mix_by=batch", "train.mix_switch=0.1")
    words += ("train.mix_prob=0.9", "epochs=10", "train.mix_until=90%")
    _, data = build_data(resolved(*words), World.solo())
    split: Any = data.train
    assert (split.crop.seed, data.transforms.seed) == (7, 7)
    assert {part.preprocessing.interpolation for part in (data.train, data.val, data.transforms)} == {"bicubic"}  # type: ignore[union-attr]
    assert data.transforms.mix == Mix(classes=1, mixup=0.25, cutmix=0.5, by="batch", switch=0.1, prob=0.9, until=9)


def test_images_that_a_job_reads_once_are_not_decoded_in_advance(tmp_path: Path) -> None:
    folder_of_noise(tmp_path)
    shutil.copy(tmp_path / "train" / "a" / "1.png", tmp_path / "train" / "a" / "2.png")
    words = ("dataset=folder", f"dataset.path={tmp_path}", "dataset.decode_size=8", "batch=1", "model=linear")
    _, once = build_data(resolved(*words, "epochs=1"), World.solo())
    assert once.loader_reason.startswith("3 images to read, 3 to decode in advance")
    job, _ = build_data(resolved(*words, "epochs=2"), World.solo())
    assert isinstance(job.loader, Resident)


def test_two_machines_with_other_files_share_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = []
    for number, name in enumerate("ab"):
        folder_of_noise(tmp_path / name)
        jobs.append(resolved("dataset=folder", f"dataset.path={tmp_path / name}", "dataset.decode_size=8", "batch=1"))
        (tmp_path / name / "train" / "a" / "1.png").rename(tmp_path / name / "train" / "a" / f"{number}.png")

    def refuse(world: World) -> None:
        with pytest.raises(InputError, match="rank 1 here has different data from rank 0"):
            build_data(jobs[world.rank], world)

    ThreadRanks(2, monkeypatch).run(refuse)


def test_the_marks_of_broken_images_end_with_their_run(tmp_path: Path) -> None:
    folder_of_noise(tmp_path)
    words = ("dataset=folder", f"dataset.path={tmp_path}", "dataset.decode_size=8", "batch=1", "dataset.skip=1")
    words += ("loader=streaming", "loader.workers=0")
    job, data = build_data(resolved(*words), World.solo())
    loader = build_loader(job, data, World.solo())
    for labels, split in ((loader.train_labels, data.train), (loader.eval_labels, data.val)):
        labels[0] = IGNORE_INDEX
        assert split.labels.tolist() == [0]


def test_a_network_that_is_initialised_from_data_gets_the_normalised_images_of_the_job() -> None:
    words = ("model=whitenet", "model.widths=[8,8,8]", "dataset=fake", "dataset.size=12", "dataset.examples=30")
    job, data = build_data(resolved(*words, "batch=8"), World.solo())
    state = build_state(job, World.solo(), data.plan, lambda number: data.normalised(number, World.solo()))
    images = (data.train.fetch(list(range(30))) / 255 - 0.5) / 0.25
    torch.testing.assert_close(state.model[0].weight, whitening_filters(images).float())  # type: ignore[index]
    assert len(data.normalised(7, World.solo())) == 7


def test_the_peak_of_a_job_is_that_of_all_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.training.train_state.peak_flops", lambda *args, **options: 1e12)
    job, data = build_data(resolved("model=linear"), World.solo())
    ranks = replace(World.solo(), size=2)
    state = build_state(job, ranks, data.plan, lambda number: data.normalised(number, ranks))
    assert state.peak_rate == 2e12 / training_flops(state.model, job.train_shape)


def test_a_data_set_that_draws_random_numbers_changes_no_initial_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = (*JOB[:3], "augment=none", "device=cpu", "optimizer=sgd", "optimizer.lr=1e-30", "seed=5")
    job = resolved(*words)

    def initial(name: str) -> list[list[float]]:
        models = [build_parts(job).model.state_dict(), weights(train_here(tmp_path / name, *words))]
        return [torch.cat([model[name].flatten() for name in sorted(model)]).tolist() for model in models]

    plain = initial("plain")
    assert plain[0] == plain[1]
    monkeypatch.setattr(type(job.dataset), "prepare", lambda self: torch.rand(3))
    assert initial("drawn") == plain


def test_one_rank_of_each_machine_prepares_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    job, prepared = resolved("model=linear", "strategy=ddp"), list[type]()
    monkeypatch.setattr(type(job.dataset), "prepare", lambda source: prepared.append(type(source)))
    ranks = ThreadRanks(4, monkeypatch)
    ranks.run(lambda world: build_data(job, replace(world, local_rank=world.rank % 2, local_size=2)))
    assert len(prepared) == 2


def test_the_energy_of_a_job_on_several_machines_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = "lockstep.training.build_observers.HardwareWatch"
    monkeypatch.setattr(watch, lambda **options: SimpleNamespace(joules=1.0, **options))
    job, data = build_data(resolved("model=linear"), World.solo())
    state = build_state(job, World.solo(), data.plan, lambda number: data.normalised(number, World.solo()))
    one, two = (RunDir.at(tmp_path / name) for name in ("one", "two"))

    def end_at_once(run: RunDir, world: World) -> None:
        build_observers(job, run, world, data, state, Progress(), StopRequest(), Observers())[0].close()

    end_at_once(one, World.solo())
    ThreadRanks(2, monkeypatch).run(lambda world: end_at_once(two, world))
    assert Run(one.path).spent.keys() - Run(two.path).spent.keys() == {"kwh"}


STRATEGIES = ("dp", "zero", "fsdp", "accelerate")  # on one rank the replica of the others is the model


@pytest.mark.parametrize(
    "option",
    [
        OF_A_STEP[4],
        *(f"strategy={name}" for name in STRATEGIES),
        "repro=strict",
        "model=digitnet model.width=8 model.dropout=0.5 train.micro_batches=3 train.clip_norm=0.1 train.cutmix=1",
        "loss=bce precision=bf16 train.mixup=0.2",
    ],
)
def test_a_loop_of_ones_own_takes_the_steps_of_the_run_to_the_bit(option: str, tmp_path: Path) -> None:
    job = (*JOB, "device=cpu", "launcher.ranks=1", *option.split())
    parts = build_parts(resolved(*job))
    for shard in parts.transforms.train(parts.loader.train(after=0)):
        parts(shard)
    trained = weights(train_here(tmp_path, *job))
    assert not [name for name, value in parts.model.state_dict().items() if not torch.equal(value, trained[name])]


LOSSES = ("bce", "focal", "cross_entropy loss.class_weights=[2,2]")


@pytest.mark.parametrize(("loop", "loss"), [("own", "cross_entropy"), *(("lockstep", loss) for loss in LOSSES)])
def test_the_training_scores_are_means_over_the_images_not_broken(loop: str, loss: str, tmp_path: Path) -> None:
    rng, images, labels = np.random.default_rng(0), [], []
    for split in ("train", "val"):
        for label, name in enumerate("ab"):
            (tmp_path / split / name).mkdir(parents=True)
            for number in range(6):
                path = tmp_path / split / name / f"{number}.png"
                pixels = rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(path)
                if split == "train" and number % 2:
                    path.write_bytes(b"broken")
                elif split == "train":
                    images.append(torch.from_numpy(pixels).double().permute(2, 0, 1).flatten() / 255)
                    labels.append(label)
    job = ("dataset=folder", f"dataset.path={tmp_path}", "dataset.decode_size=8", "dataset.skip=6", "augment=none")
    job += ("model=linear", "batch=12", "precision=fp64", "input.mean=[0,0,0]", "input.std=[1,1,1]")
    job += ("optimizer=sgd", "optimizer.lr=1e-30", "optimizer.weight_decay=0", f"loss={loss.split()[0]}")
    job += (*loss.split()[1:], "steps=1", "train.micro_batches=5", "device=cpu", "loader=streaming")
    if loop == "own":
        parts = build_parts(resolved(*job, "loader.workers=0"))
        (shard,) = parts.transforms.train(parts.loader.train(after=0))
        weight, bias = (parameter.detach().clone() for parameter in parts.model.parameters())
        line = {"loss/train": parts.loss_of_step(shard)}
        shard.labels.fill_(IGNORE_INDEX)
        assert parts.loss_of_step(shard) == 0, "of broken images alone"
    else:
        run = train_here(tmp_path / "run", *job, "telemetry.interval=1")
        (line,) = [line for line in records(run) if "loss/train" in line]
        weight, bias = load_file(run.checkpoints / "step-00000001" / "model.safetensors").values()
        weight, bias = (weight, bias) if weight.ndim == 2 else (bias, weight)
    logits, targets = torch.stack(images) @ weight.T + bias, torch.tensor(labels)
    expected = {
        "cross_entropy": F.cross_entropy(logits, targets),
        "bce": F.binary_cross_entropy_with_logits(logits, F.one_hot(targets).double()),
        "focal": (1 - logits.softmax(1)[range(6), labels]) ** 2 * F.cross_entropy(logits, targets, reduction="none"),
        "cross_entropy loss.class_weights=[2,2]": 2 * F.cross_entropy(logits, targets),
    }
    assert line["loss/train"] == pytest.approx(float(expected[loss].mean()), rel=1e-9)
    if loop == "lockstep":
        assert line["acc/train_top1"] == pytest.approx(100 * float((logits.argmax(1) == targets).double().mean()))


@pytest.mark.parametrize(("task", "loss"), [("multilabel", "bce"), ("regression", "mse")])
def test_the_loss_of_a_step_is_the_mean_over_images_for_any_targets(task: str, loss: str) -> None:
    words = ("dataset=fake", "dataset.examples=8", "dataset.classes=3", "dataset.channels=1", "dataset.size=4")
    parts = build_parts(resolved(*words, "model=linear", f"task={task}", f"loss={loss}", "batch=8", "device=cpu"))
    (shard, *_) = parts.transforms.train(parts.loader.train(after=0))
    with torch.no_grad():
        outputs = parts.model(shard.images)
    function = F.mse_loss if loss == "mse" else F.binary_cross_entropy_with_logits
    assert parts.loss_of_step(shard) == pytest.approx(float(function(outputs, shard.labels)))


@pytest.mark.parametrize("mix", ["mixup", "cutmix"])
@pytest.mark.parametrize("whole", [[2], [0, 7], []])
def test_the_loss_of_a_step_with_mixed_images_counts_no_broken_ones(mix: str, whole: list[int]) -> None:
    words = ("dataset=fake", "dataset.examples=8", "dataset.classes=3", "dataset.channels=1", "dataset.size=4")
    words += ("model=linear", "batch=8", "device=cpu", "precision=fp64", "loss=bce", f"train.{mix}=1")
    parts = build_parts(resolved(*words, "train.micro_batches=3"))
    parts.loss = replace(parts.loss, tolerates_broken=True)
    (shard, *_) = parts.transforms.train(parts.loader.train(after=0))
    labels = shard.labels[whole].clone()
    shard.known_labels.fill_(IGNORE_INDEX)
    shard.labels[whole] = labels  # none is beside another, so each stays as it is
    with torch.no_grad():
        outputs = parts.model(shard.images[whole])
    expected = F.binary_cross_entropy_with_logits(outputs, F.one_hot(labels, 3).double()) if whole else 0
    assert parts.loss_of_step(shard) == pytest.approx(float(expected))


def test_a_figure_of_a_task_has_a_number_for_each_mixed_image() -> None:
    class Noting(Multiclass):
        def losses(self, batch: Batch) -> tuple[Tensor, Tensor]:
            losses, logits = super().losses(batch)
            batch.log("own/loss", losses)
            return losses, logits

    words = ("dataset=fake", "dataset.examples=8", "dataset.classes=3", "dataset.channels=1", "dataset.size=4")
    words += ("model=linear", "batch=8", "device=cpu", "train.mixup=1", "train.micro_batches=3")
    parts, logged = build_parts(resolved(*words)), list[tuple[str, int]]()
    parts.task = Noting()
    parts.listener = StepListener(log=lambda name, values: logged.append((name, len(values))))
    parts.update(next(iter(parts.transforms.train(parts.loader.train(after=0)))))
    assert logged == [("own/loss", examples) for examples in (2, 3, 3)]


@pytest.mark.parametrize("loggers", ["[]", "tensorboard"])
def test_a_run_whose_loggers_write_no_metrics_jsonl_is_completed(loggers: str, tmp_path: Path) -> None:
    train_here(tmp_path / "run", *JOB, f"logger={loggers}")
    assert Run(tmp_path / "run").summary["status"] == "completed"


@pytest.mark.parametrize(
    ("ema", "says"),
    [("train.ema=0.9999 train.ema_warmup=false", "use train.ema_warmup=true"), ("train.ema=null", "")],
)
def test_a_run_ends_with_a_line_about_an_average_that_is_worse_than_the_weights(
    ema: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train_here(tmp_path / "run", "model.width=8", "steps=20", "train.eval_every=20", *ema.split())
    last = records(run)[-1]
    printed = " ".join(capsys.readouterr().out.split())
    average, raw = last.get("acc/val_ema_top1", 0), last["acc/val_top1"]
    scores = f"average {average:.2f} % top-1 at the last step, and the raw weights {raw:.2f} %"
    assert (scores in printed) == bool(says)
    assert says in printed


DIVERGING = ("optimizer=sgd", "optimizer.lr=1e6", "steps=8", "train.eval_every=100%", "checkpoint.every=100%")


def test_a_crash_dump_without_room_on_the_disk_is_a_warning_and_leaves_nothing(
    tmp_path: Path, full_disk: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    with full_disk(20_000), pytest.raises(NumericalError):  # enough for the batch, too little for the weights
        train_here(tmp_path / "run", *DIVERGING)
    assert "incident could not be written" in capsys.readouterr().out
    assert not RunDir(tmp_path / "run").incident.exists()


def test_a_numerical_end_stays_one_when_closing_the_files_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    closed = []

    def failing(sink: sinks.JsonLines) -> None:
        sink.file.close()
        raise StorageError(f"{sink.path} cannot be written")

    def close(part: Telemetry | Checkpointer, whole: Callable[..., None]) -> None:
        closed.append(type(part).__name__)
        whole(part)

    for part in (Telemetry, Checkpointer):
        monkeypatch.setattr(part, "close", lambda self, whole=part.close: close(self, whole))
    monkeypatch.setattr(sinks.JsonLines, "close", failing)
    with pytest.raises(NumericalError):
        train_here(tmp_path / "run", *DIVERGING)
    assert closed == ["Checkpointer", "Telemetry"]
    assert "metrics.jsonl cannot be written" in capsys.readouterr().out
    assert (RunDir(tmp_path / "run").incident / "incident.json").is_file()


@pytest.mark.parametrize(
    ("words", "capability", "says"),
    [
        (("model.compile=true",), (8, 0), True),
        (("model.compile=true",), (7, 0), False),
        (("model.compile=true", "precision=bf16"), (9, 0), False),
        ((), (9, 0), False),
    ],
)
def test_a_compiled_float32_model_is_told_of_the_tensor_cores_that_it_leaves_idle(
    words: tuple[str, ...], capability: tuple[int, int], says: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    job, record = resolved(*words, "device=cpu"), RunRecord(RunDir(tmp_path), World.solo("cuda:0"))
    state: Any = SimpleNamespace(model=None, notes=[])
    data: Any = SimpleNamespace(plan=plan_of(job, 100), train=SimpleNamespace(labels=torch.arange(10)))
    notes = record._notes(job, data, state)
    assert any("without tensor cores; precision=tf32 uses them" in note for note in notes) == says


BALANCED, WEIGHTS = "train.sampling=balanced", f"loss.class_weights={[1.0] * 10}"


@pytest.mark.parametrize(
    ("words", "device", "has_bfloat16", "says"),
    [
        ((), "cpu", False, []),
        (("precision=bf16",), "cpu", False, ["this processor has no instructions for bfloat16"]),
        (("precision=bf16",), "cpu", True, []),
        ((BALANCED,), "cpu", False, []),
        ((WEIGHTS,), "cpu", False, []),
        ((BALANCED, WEIGHTS), "cpu", False, [f"{BALANCED} balances the classes already"]),
        (("precision=bf16",), "cuda:0", False, ["some kernels of a GPU add in an order"]),
        (("repro=strict",), "cuda:0", False, []),
        (("model.compile=true",), "cpu", False, []),
    ],
)
def test_a_run_has_the_notes_of_its_own_limits_alone(
    words: tuple[str, ...],
    device: str,
    has_bfloat16: bool,
    says: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host, "has_bfloat16", lambda: has_bfloat16)
    job, record = resolved(*words, "device=cpu"), RunRecord(RunDir(tmp_path), World.solo(device))
    state: Any = SimpleNamespace(model=torch.nn.Linear(1, 1), notes=[])
    data: Any = SimpleNamespace(plan=plan_of(job, 100), train=SimpleNamespace(labels=torch.arange(10)))
    notes = record._notes(job, data, state)
    assert len(notes) == len(says)
    assert all(note.startswith(begin) for note, begin in zip(notes, says, strict=True))


def test_numbers_that_the_items_of_a_data_set_draw_change_no_initial_weight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("model=linear", "device=cpu", "steps=1")

    def first_weights(folder: Path) -> list[torch.Tensor]:
        alone = build_parts(resolved(*words)).model
        return [*weights(train_here(folder, *words)).values(), *alone.parameters()]

    expected = first_weights(tmp_path / "one")
    monkeypatch.setattr(experiment, "build_data", lambda *parts: (torch.rand(7), build_data(*parts))[1])
    assert all(map(torch.equal, first_weights(tmp_path / "other"), expected))


@dataclass
class Counting(Callback):
    steps: int = 0
    name: str = ""
    calls: ClassVar[list[tuple[str, int]]] = []

    def step_end(self, run: TrainingRun) -> None:
        self.steps += 1
        self.calls.append((self.name, run.step))


def test_runs_of_one_job_have_callbacks_of_their_own(tmp_path: Path) -> None:
    run = run_dir(tmp_path / "run", "model=linear", "device=cpu", "steps=2")
    job = replace(load_job(run.config), callback={"counting": (counting := Counting(name="of the job"))})
    Counting.calls.clear()
    experiment.run(job, run, World.solo(), callbacks={"other": (other := Counting(name="of the program"))})
    assert (counting.steps, other.steps) == (0, 2), "that of the job is copied"
    assert Counting.calls == [(name, step) for step in (1, 2) for name in ("of the job", "of the program")]
