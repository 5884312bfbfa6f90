"""What `auto` becomes: ranks, strategy, threads and micro-batches; and which jobs are refused before they start."""

from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from helpers import built, resolved
from lockstep.config.options import classes_of
from lockstep.core import launch_env
from lockstep.core.errors import InputError
from lockstep.core.fields import PATH, rule_of
from lockstep.core.model_card import TrainedInput
from lockstep.core.observer import Callback
from lockstep.core.plan import Plan
from lockstep.data.datasets import CSV
from lockstep.job import resolve, validate
from lockstep.job.validate import check_job, check_threads, named_objects
from lockstep.job.validate_with_data import _needs, check_memory, check_plan, has_value
from lockstep.launcher import Auto, Elastic, Inline, Slurm, Spawn
from lockstep.optim.schedule import Constant
from lockstep.precision import FP16
from lockstep.strategy import DDP, Single, Strict
from lockstep.tasks import Distill, Multiclass
from lockstep.training.resolved_job import plan_of

TUNED = "model.compile_mode=max_autotune"
TWO_RANKS = ("launcher=spawn", "launcher.ranks=2", "device=cpu")


@pytest.fixture(autouse=True)
def _eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve, "cores", lambda: 8)
    monkeypatch.setattr(validate, "cores", lambda: 8)


@pytest.mark.parametrize(
    ("words", "strategy"),
    [
        (["device=cpu"], Single),
        (TWO_RANKS, DDP),
        (["launcher=elastic", "launcher.nodes=2", "launcher.ranks=1", "device=cpu"], DDP),
        (["launcher=elastic", "launcher.nodes=1:3", "launcher.ranks=1", "device=cpu"], DDP),
    ],
)
def test_several_ranks_are_data_parallel_on_one_machine_and_on_many(words: list[str], strategy: type) -> None:
    assert type(resolved(*words).strategy) is strategy


@pytest.mark.parametrize(
    ("words", "threads"),
    [
        (["device=cpu"], 8),
        (TWO_RANKS, 4),
        (["launcher=spawn", "launcher.ranks=16", "device=cpu"], 1),
        ([*TWO_RANKS, "launcher.threads=3"], 3),
        ([*TWO_RANKS, "repro=strict"], 1),
        ([*TWO_RANKS, "repro=strict", "launcher.threads=3"], 3),
    ],
)
def test_the_ranks_share_the_cores_and_a_strict_run_does_not_depend_on_them(words: list[str], threads: int) -> None:
    assert resolved(*words).launcher.threads == threads


def test_the_ranks_of_torchrun_share_the_cores_of_their_own_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    place = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    job = resolved("device=cpu")
    assert (job.launcher.ranks, job.launcher.threads) == (4, 4)


@pytest.mark.parametrize(
    ("variables", "remedy"),
    [
        ({"TORCHELASTIC_RUN_ID": "none"}, "launcher=auto and torchrun --max-restarts=2"),
        ({"SLURM_PROCID": "1"}, "launcher=auto, or launcher=elastic without srun"),
        ({}, "launcher=auto, or launcher=elastic without RANK and WORLD_SIZE"),
    ],
)
def test_a_launcher_beside_ranks_that_were_started_is_told_the_way_of_who_started_them(
    variables: dict[str, str], remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TORCHELASTIC_RUN_ID", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    place = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    for name, value in {**place, **variables}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError) as refused:
        resolved("device=cpu", "launcher=elastic", "launcher.restarts=2")
    assert str(refused.value).startswith("launcher=elastic starts ranks, but ")
    assert str(refused.value).endswith(f"has started them; use {remedy}")


@pytest.mark.parametrize(("ranks", "shards", "micro_batches"), [(1, 4, 4), (2, 4, 2), (4, 4, 1), (2, 8, 4)])
def test_the_virtual_shards_of_strict_runs_are_dealt_to_ranks(ranks: int, shards: int, micro_batches: int) -> None:
    launcher = ["launcher=spawn", f"launcher.ranks={ranks}", "device=cpu"] if ranks > 1 else ["device=cpu"]
    job = resolved(*launcher, "strategy=strict", f"strategy.shards={shards}")
    assert (type(job.strategy), job.repro, job.train.micro_batches) == (Strict, "strict", micro_batches)


BELOW = ("_folder", "_shards")  # keys of names below another path


@pytest.mark.parametrize("option", classes_of("dataset").values())
def test_every_path_of_a_data_set_is_the_same_from_another_folder(
    option: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").symlink_to(tmp_path / "where it is now")
    keys = [field.name for field in fields(option) if rule_of(option, field.name) is PATH]
    absolute = resolve._with_absolute_paths(option(**dict.fromkeys(keys, "a/b")))
    for key in keys:
        assert getattr(absolute, key) == ("a/b" if key.endswith(BELOW) else str(tmp_path / "a/b")), key


def test_the_weights_and_the_teacher_of_a_job_are_the_same_from_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "w.safetensors").touch()
    monkeypatch.setattr(resolve, "_trained_input", lambda job, resumed: None)
    job = resolved("device=cpu", "init_from=w.safetensors", "task=distill", "task.teacher=w.safetensors")
    assert job.init_from == str(tmp_path / "w.safetensors")
    assert isinstance(job.task, Distill)
    assert job.task.teacher == str(tmp_path / "w.safetensors")


def test_the_folders_of_a_job_and_its_teacher_are_the_same_from_another_folder_and_begin_at_the_users_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (weights := tmp_path / "w.safetensors").touch()
    assert Distill(teacher=weights.name).absolute().teacher == str(weights)
    places = {"a/b": tmp_path / "a/b", "~/a": tmp_path / "home/a", "/a": Path("/a")}
    for text, place in places.items():
        job = resolved("device=cpu", f"output_root='{text}'", f"data_root='{text}'")
        assert job.output_root == job.data_root == str(place)
        assert resolve._with_absolute_paths(CSV(path=text, images=text)) == CSV(path=str(place), images=str(place))


def test_a_graph_that_grows_during_the_run_is_not_fixed() -> None:
    thawed = ["train.freeze=[backbone]", "train.freeze_until=1ep"]
    assert resolved(*TWO_RANKS, *thawed).strategy == DDP(static_graph=False, find_unused_parameters=True)
    assert resolved(*TWO_RANKS, thawed[0]).strategy == DDP()


WITHOUT_EFFECT = {
    "repro=strict train.cudnn_benchmark=true": r"choose by time .* use train\.cudnn_benchmark=false, or",
    f"{TUNED} repro=strict model.compile=true": r"choose by time .* use model\.compile_mode=default, or",
    "precision=bf16_pure train.ema=0.9": r"train\.ema is 0\.9, but under precision=bf16_pure",
    "train.ema_warmup=false": r"train\.ema_warmup is false, but train\.ema is null",
    "train.ema_every=32": r"train\.ema_every is 32, but train\.ema is null",
    "train.swa_every=2ep": r"train\.swa_every is 2ep, but train\.swa_from is null, so nothing is averaged",
    "train.swa_images=5": r"train\.swa_images is 5, but train\.swa_from is null",
    "train.swa_from=1ep train.ema=0.9": r"train\.ema and train\.swa_from both average the weights",
    "train.swa_from=1ep precision=bf16_pure": r"train\.swa_from is 1ep, but under precision=bf16_pure",
    "train.erase_mode=pixel": r"train\.erase_mode is pixel, but train\.erase is 0, so nothing is erased",
    "train.repeats=3 batch=64": r"train\.repeats is 3, but batch is 64, .* use batch=63, or remove",
    "train.repeats=3 batch=2": r"train\.repeats is 3, but batch is 2, .* use batch=3, or remove",
    "train.repeats=2 train.sampling=balanced": r"sampling=balanced and train\.repeats both repeat",
    "train.mix_switch=0.1 train.mixup=1": r"mix_switch is 0\.1, but train\.mixup and train\.cutmix are not both",
    "train.freeze_until=1ep": r"train\.freeze_until is 1ep, but train\.freeze is empty",
    "train.sampling=balanced loss.balanced=true": r"train\.sampling=balanced and loss\.balanced=true both",
    "train.sampling=balanced loss=focal loss.balanced=true": r"sampling=balanced and loss\.balanced=true",
    TUNED: r"but model\.compile is false, so nothing is compiled",
    "launcher=elastic launcher.nodes=1:2 repro=strict launcher.ranks=2": r"use launcher\.nodes=2, or",
}
WITHOUT_EFFECT |= {
    f"train.{word}": r"train\.mix_.* is .*, but train\.mixup and train\.cutmix are 0, so nothing is mixed"
    for word in ("mix_by=batch", "mix_prob=0.5", "mix_until=90%")
}


@pytest.mark.parametrize("words", WITHOUT_EFFECT)
def test_a_key_without_the_effect_that_it_asks_for_is_refused(words: str) -> None:
    with pytest.raises(InputError, match=WITHOUT_EFFECT[words]):
        check_job(resolved("device=cpu", *words.split()))


def test_a_key_that_has_its_effect_is_allowed() -> None:
    alone = ("precision=bf16_pure", "train.cudnn_benchmark=true")
    pairs = ("precision=bf16 train.ema=0.9", "train.sampling=balanced loss=bce", "loss=focal loss.balanced=true")
    for words in (*alone, *pairs):
        check_job(resolved("device=cpu", *words.split()))


def test_the_threads_of_all_ranks_are_counted() -> None:
    words = ["launcher=spawn", "launcher.ranks=32", "launcher.threads=16", "device=cpu"]
    with pytest.raises(InputError, match=r"which on 32 ranks are 2,112 threads, expected at most 1,024"):
        check_threads(resolved(*words, "loader=streaming", "loader.workers=50"))
    check_threads(resolved(*words, "loader=streaming", "loader.workers=16"))
    many = resolved("launcher=spawn", "launcher.ranks=33", "device=cpu")
    with pytest.raises(InputError, match="this machine has 8 CPU cores, expected at most 32 ranks"):
        check_threads(many)
    check_threads(replace(many, device="cuda"))


@pytest.mark.parametrize(("cores", "ranks", "threads"), [(1, 8, 1024), (2, 8, 1024), (3, 12, 1024), (80, 320, 1280)])
def test_a_machine_takes_the_most_ranks_and_threads_and_no_more(
    monkeypatch: pytest.MonkeyPatch, cores: int, ranks: int, threads: int
) -> None:
    monkeypatch.setattr("lockstep.job.validate.cores", lambda: cores)
    several = resolved("launcher=spawn", "launcher.ranks=2", "launcher.threads=1", "device=cpu", "loader.workers=0")
    one = replace(several, launcher=replace(several.launcher, ranks=1))
    for job, most in ((several, "ranks"), (one, "threads")):
        limit = {"ranks": ranks, "threads": threads}[most]
        check_threads(replace(job, launcher=replace(job.launcher, **{most: limit})))
        with pytest.raises(InputError, match=f"expected at most {limit:,}"):
            check_threads(replace(job, launcher=replace(job.launcher, **{most: limit + 1})))


def plan(batch: int, **changed: int) -> Plan:
    job = replace(resolved("device=cpu"), batch=batch)
    return replace(plan_of(job, 10**9), **changed)


@pytest.mark.parametrize(("micro_batches", "fits"), [(1, False), (20_000, True)])
def test_a_micro_batch_fits_into_memory(monkeypatch: pytest.MonkeyPatch, micro_batches: int, fits: bool) -> None:
    monkeypatch.setattr("lockstep.runtime.host.available_memory", lambda: 10**9)
    job = resolved("device=cpu", f"train.micro_batches={micro_batches}")
    needs = plan(10**7, micro_batches=micro_batches)  # images of 8x8 floats: 2.6 GB
    if fits:
        check_memory(job, needs)
        return
    with pytest.raises(InputError, match=r"a micro-batch of 10000000 images .*train\.micro_batches=auto"):
        check_memory(job, needs)


@pytest.mark.parametrize(("micro_batches", "images"), [(1, 10), (4, 3), (5, 2), ("auto", 1)])
def test_a_micro_batch_is_as_large_as_the_largest_one(micro_batches: int | str, images: int) -> None:
    job = resolved("device=cpu", f"train.micro_batches={micro_batches}")
    needs = plan(10, micro_batches=1 if micro_batches == "auto" else int(micro_batches))
    assert next(_needs(job, needs))[0] == f"a micro-batch of {images} images"


@pytest.mark.parametrize(("steps", "images"), [(7, 70), (8, 80), (9, 80)])
def test_no_more_is_read_ahead_than_workers_keep_and_a_run_has(steps: int, images: int) -> None:
    job = resolved("device=cpu", "loader=streaming", "loader.workers=2", "loader.prefetch=4")
    assert [*_needs(job, plan(10, total_steps=steps))][-1][0] == f"{images} images that are read ahead"


def test_images_to_train_on_to_evaluate_and_to_read_are_each_counted_in_their_own_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = resolved("device=cpu", "train.size=12", "train.eval_batch=5", "loader=streaming", "loader.workers=1")
    for name, shape in (("image_shape", (1, 20, 16)), ("input_shape", (1, 8, 8))):
        monkeypatch.setattr(type(job.dataset), name, shape)
    ahead = 10 * int(job.loader.prefetch)
    assert [size for _, size, _ in _needs(job, plan(10))] == [4 * 10 * 12**2, 4 * 5 * 8**2, ahead * 20 * 16]


@pytest.mark.parametrize("wrong", [1, 3])
def test_a_schedule_is_tried_at_its_first_and_its_last_step_before_a_run(
    monkeypatch: pytest.MonkeyPatch, wrong: int
) -> None:
    monkeypatch.setattr(Constant, "factor", lambda self, step, plan, scores: -1.0 if step == wrong else 0.5)
    with pytest.raises(InputError, match=f"^the schedule Constant gives step {wrong} the factor -1"):
        check_plan(resolved("device=cpu", "schedule=constant", "steps=3"))


def test_a_block_of_evaluation_has_as_many_pixels_and_at_least_an_image() -> None:
    job = resolved("device=cpu")
    for side, images in ((8, 256), (128, 256), (129, 252), (2048, 1), (2049, 1)):
        data = SimpleNamespace(input_shape=(3, side, side))
        assert resolve._eval_batch(built().train, data) == images  # type: ignore[arg-type]
    assert job.train.eval_batch == 256


@pytest.mark.parametrize("value", [False, True])
def test_what_auto_becomes_has_the_keys_that_were_set_for_auto(value: bool) -> None:
    own = (f"strategy.sync_batchnorm={str(value).lower()}", "launcher.timeout=7min", "launcher.threads=3")
    for ranks, strategy, launcher in ((1, Single, Inline), (2, DDP, Spawn)):
        job = resolved("device=cpu", f"launcher.ranks={ranks}", *own, "launcher.backend=gloo")
        assert (type(job.strategy), type(job.launcher)) == (strategy, launcher)
        assert job.launcher == launcher(ranks=ranks, timeout="7min", threads=3, backend="gloo")
        assert job.strategy == (DDP(sync_batchnorm=value) if ranks > 1 else Single())


@pytest.mark.parametrize(("device", "ranks", "copies"), [("cpu", 1, 2), ("cpu", 3, 6), ("cuda", 2, 2)])
def test_a_model_is_there_once_for_each_rank_and_with_its_gradients_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch, device: str, ranks: int, copies: int
) -> None:
    counted = list[int]()
    monkeypatch.setattr(
        "lockstep.job.validate_with_data.check_model_size", lambda model, copies: counted.append(copies)
    )
    job = resolved("device=cpu", "launcher=spawn", f"launcher.ranks={ranks}")
    check_memory(replace(job, device=device), plan(10))
    place = {"RANK": "0", "WORLD_SIZE": "24", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "5"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    check_memory(replace(job, device=device), plan(10))
    assert counted == [copies, 10 if device == "cpu" else 5], "of the ranks of this machine"


@pytest.mark.parametrize("keys", [(), ("mean",), ("std",), ("mean", "std")], ids=repr)
def test_a_mean_and_a_deviation_that_are_set_are_taken_and_others_are_of_the_data(keys: tuple[str, ...]) -> None:
    usual = resolved("device=cpu").input
    own = resolved("device=cpu", *(f"input.{key}=[0.25]" for key in keys)).input
    expected = {key: [0.25] if key in keys else getattr(usual, key) for key in ("mean", "std")}
    assert {key: getattr(own, key) for key in expected} == expected
    assert [0.25] not in (usual.mean, usual.std)


def test_each_callback_of_a_program_has_a_name_of_its_own() -> None:
    class Watch(Callback):
        """One of several."""

    class Look(Watch):
        """Another class."""

    callbacks = [Watch(), Look(), Watch(), Watch(), Look()]
    named = named_objects(resolved("device=cpu"), callbacks)
    assert [*named] == ["Watch", "Look", "Watch2", "Watch3", "Look2"]
    assert all(own is callback for own, callback in zip(named.values(), callbacks, strict=True))


def test_a_launcher_of_one_rank_is_not_asked_for_two() -> None:
    with pytest.raises(InputError, match=r"launcher=inline has one rank, but strategy=ddp requests 2"):
        resolve.resolve(built("launcher=inline", "strategy=ddp", "device=cpu"), sweep=False)


WITHOUT_PRICE = {
    "cpu": "budget.usd is 2.5, but there is no GPU here, so nothing has a price; use budget.hours",
    "cuda": "budget.usd is 2.5, but cost.usd_per_gpu_hour is not set, so nothing has a price; use budget.hours, or "
    "add cost.usd_per_gpu_hour=PRICE",
}


@pytest.mark.parametrize(
    ("device", "price", "refused"), [("cpu", 1.0, True), ("cuda", None, True), ("cuda", 0, False)]
)
def test_a_budget_in_money_needs_a_gpu_and_its_price(device: str, price: float | None, refused: bool) -> None:
    job = replace(resolved("device=cpu", "budget.usd=2.5"), device=device)
    job = replace(job, cost=replace(job.cost, usd_per_gpu_hour=price))
    if refused:
        with pytest.raises(InputError) as raised:
            validate.check_effects(job)
        assert str(raised.value) == WITHOUT_PRICE[device]
    else:
        validate.check_effects(job)
        validate.check_effects(replace(job, device="cpu", budget=replace(job.budget, usd=None)))


UNUSED = {
    "train.min_delta=0.5": "train.min_delta is 0.5, but train.patience is null, so no run ends early; remove it",
    "train.erase_mode=rand": "train.erase_mode is rand, but train.erase is 0, so nothing is erased; remove it",
    "train.ema_warmup=false": "train.ema_warmup is false, but train.ema is null, so nothing is averaged; remove it",
    "train.mix_by=batch": "train.mix_by is batch, but train.mixup and train.cutmix are 0, so nothing is mixed; rem",
    "train.mix_switch=0.25 train.cutmix=1": "train.mix_switch is 0.25, but train.mixup and train.cutmix are not both",
}


@pytest.mark.parametrize("words", UNUSED)
def test_a_key_of_what_is_off_is_refused_with_its_value(words: str) -> None:
    with pytest.raises(InputError) as raised:
        validate.check_effects(resolved("device=cpu", *words.split()))
    assert str(raised.value).startswith(UNUSED[words])


@pytest.mark.parametrize(
    "words",
    [
        "train.min_delta=0.5 train.patience=2",
        "train.erase_mode=rand train.erase=0.1",
        "train.ema_warmup=false train.ema_every=2 train.ema=0.9",
        "train.swa_every=2ep train.swa_images=5 train.swa_from=1ep",
        "train.mix_by=batch train.mix_prob=0.5 train.mix_until=90% train.cutmix=1",
        "train.mix_by=batch train.mixup=1",
        "train.mix_switch=0.25 train.cutmix=1 train.mixup=0.2",
        "train.repeats=2 batch=64",
        "train.freeze=[backbone] train.freeze_until=1ep",
        "launcher=elastic launcher.nodes=1:2 launcher.ranks=2 launcher.rendezvous=a:1",
        "launcher=elastic launcher.nodes=2 launcher.ranks=2 launcher.rendezvous=a:1 repro=strict",
        "model.compile=true model.compile_mode=max_autotune",
    ],
)
def test_a_key_of_what_is_on_has_its_effect(words: str) -> None:
    job = resolved("device=cpu", *words.split())
    validate.check_effects(job)
    validate.check_conflicts(job)


@pytest.mark.parametrize(("task", "targets"), [("multilabel", "labels"), ("regression", "values")])
def test_classes_alone_are_balanced(task: str, targets: str) -> None:
    words = (f"task={task}", "dataset=fake", "dataset.classes=3", "train.sampling=balanced", "device=cpu")
    with pytest.raises(InputError) as raised:
        validate.check_targets(resolved(*words))
    says = f"train.sampling=balanced balances classes, and the targets of this task are {targets}; remove it"
    assert str(raised.value) == says


def test_objects_that_a_job_cannot_have_are_named_by_their_class() -> None:
    class Watch(Callback):
        """A callback."""

    job, other = resolved("device=cpu"), SimpleNamespace()
    with pytest.raises(InputError, match=r"^callbacks has an object of SimpleNamespace, which is no lockstep\.Callb"):
        named_objects(job, [Watch(), other])  # type: ignore[list-item]
    submitting = replace(job, launcher=replace(Slurm(), ranks=1))
    with pytest.raises(InputError, match=r"^callbacks has an object of Watch, which other machines cannot have; "):
        named_objects(submitting, [Watch()])
    assert named_objects(submitting, []) == {}


def test_a_logger_without_its_package_is_named_and_one_that_needs_none_is_not() -> None:
    loggers: Any = {"plain": None, "there": "torch", "gone": "no_such_package"}
    loggers = {name: SimpleNamespace(package=package) for name, package in loggers.items()}
    with pytest.raises(InputError, match=r"^logger=gone needs the package no_such_package, which is not installed"):
        validate.check_packages(loggers)
    validate.check_packages({name: own for name, own in loggers.items() if name != "gone"})


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (("train.cudnn_benchmark=true",), "train.cudnn_benchmark=false"),
        (("model.compile=true", TUNED), "model.compile_mode=default"),
        (
            ("train.cudnn_benchmark=true", "model.compile=true", TUNED),
            "train.cudnn_benchmark=false model.compile_mode=default",
        ),
        (("model.compile=true", "model.compile_mode=reduce_overhead"), ""),
        ((TUNED,), ""),
    ],
)
def test_kernels_that_are_chosen_by_time_are_refused_for_the_same_bits_alone(
    words: tuple[str, ...], remedy: str
) -> None:
    validate._check_kernels(resolved("device=cpu", *words))
    strict = resolved("device=cpu", "repro=strict", *words)
    if not remedy:
        validate._check_kernels(strict)
        return
    with pytest.raises(InputError) as raised:
        validate._check_kernels(strict)
    assert str(raised.value) == (
        "repro=strict has the same bits every time, but these options choose by time among kernels that round in "
        f"different ways; use {remedy}, or repro=exact"
    )


@pytest.mark.parametrize(
    ("compiles", "mode", "micro_batches", "device", "refused"),
    [
        (True, "reduce_overhead", 4, "cuda", True),
        (True, "max_autotune", "auto", "cuda", True),
        (True, "default", 4, "cuda", False),
        (True, "reduce_overhead", 1, "cuda", False),
        (True, "reduce_overhead", 4, "cpu", False),
        (False, "reduce_overhead", 4, "cuda", False),
    ],
)
def test_only_graphs_of_a_gpu_cannot_add_up_gradients(
    compiles: bool,
    mode: str,
    micro_batches: int | str,
    device: str,
    refused: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worlds: list[tuple[int, str]] = []
    monkeypatch.setattr(DDP, "check_compile", lambda self, size, device: worlds.append((size, device)))
    job = replace(resolved(*TWO_RANKS), device=device, launcher=Elastic(ranks=2, nodes="3"))
    job = replace(job, model=replace(job.model, compile=compiles, compile_mode=mode))
    job = replace(job, train=replace(job.train, micro_batches=micro_batches))
    if refused:
        with pytest.raises(InputError) as raised:
            validate._check_compile(job)
        assert str(raised.value) == (
            f"model.compile_mode={mode} records CUDA graphs, which cannot add up the gradients of micro-batches, and "
            f"train.micro_batches is {micro_batches}; use model.compile_mode=default"
        )
    else:
        validate._check_compile(job)
    assert worlds == [(6, device)] * compiles, "with the ranks of all machines"


CUT = "dataset.crop_from=file cuts the boxes of a random resized crop from the files, and "


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("augment=shift",), f"{CUT}the augmentation is CropFlip; use augment=standard or dataset.crop_from=square"),
        (
            ("augment=augmix", "augment.crop=pad"),
            f"{CUT}augment.crop is pad; use augment.crop=resized or dataset.crop_from=square",
        ),
        (
            ("augment=standard", "loader=resident"),
            "loader=resident decodes each image once, but dataset.crop_from=file cuts another box from the file in "
            "each epoch; use loader=streaming or dataset.crop_from=square",
        ),
        (("augment=standard", "loader=streaming"), ""),
    ],
)
def test_boxes_are_cut_from_files_that_are_read_in_each_epoch_for_a_random_resized_crop(
    words: tuple[str, ...], says: str
) -> None:
    data = ("dataset=folder", "dataset.path=nowhere", "dataset.decode_size=16", "model=linear", "device=cpu")
    job = resolved(*data, *words, "dataset.crop_from=file")
    if says:
        with pytest.raises(InputError) as raised:
            validate._check_crop(job)
        assert str(raised.value) == says
    else:
        validate._check_crop(job)
    validate._check_crop(replace(job, dataset=replace(job.dataset, crop_from="square")))


@pytest.mark.parametrize("check", ["_check_crop", "check_threads", "check_data_memory", "check_packages"])
def test_each_check_of_a_job_has_its_line(check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise InputError(f"{check} says no")

    monkeypatch.setattr(validate, check, refuse)
    with pytest.raises(InputError) as raised:
        check_job(resolved("device=cpu", "train.swa_images=5", "augment=standard", "augment.grey=0.2"))
    crop = [] if check == "_check_crop" else ["augment.grey=0.2"]
    lines = [str(problem).split()[0] for problem in raised.value.args]
    assert sorted(lines) == sorted([check, "train.swa_images", *crop])


def test_the_ranks_that_others_have_started_are_counted_by_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    job = resolved("device=cpu", "loader.workers=0")
    launched = replace(job, launcher=replace(job.launcher, ranks=2048, threads=1))
    for name, value in {"RANK": "0", "WORLD_SIZE": "2048", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1024"}.items():
        monkeypatch.setenv(name, value)
    check_threads(launched)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1025")
    with pytest.raises(InputError, match=r"which on 1025 ranks are 1,025 threads, expected at most 1,024"):
        check_threads(launched)


@pytest.mark.parametrize("sides", [(1024, 8), (8, 1024), (1025, 8), (8, 1025)])
@pytest.mark.parametrize("usual", [True, False])
def test_a_model_is_measured_if_it_or_its_images_are_large(
    sides: tuple[int, int], usual: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[object] = []
    job = resolved("device=cpu")
    monkeypatch.setattr(type(job.dataset), "input_shape", (1, *sides))
    monkeypatch.setattr(type(job.model), "has_usual_size", usual)
    monkeypatch.setattr("lockstep.job.validate_with_data.sketch", lambda *own: own)
    monkeypatch.setattr(
        "lockstep.job.validate_with_data.check_model_size", lambda model, copies: measured.append(model)
    )
    check_memory(job, plan(1))
    assert measured == [(job.model, 10, (1, *sides))] * (not usual or max(sides) == 1025)


def test_each_need_of_memory_has_its_name_and_its_remedy() -> None:
    streaming = ("loader=streaming", "loader.prefetch=4")
    job = resolved("device=cpu", "train.eval_batch=5", *streaming, "loader.workers=2")
    smaller = "a smaller dataset.input_size"
    (micro, block, ahead) = _needs(job, replace(plan(10), examples=3))
    assert (micro[0], micro[2]) == ("a micro-batch of 10 images", f"train.micro_batches=auto or {smaller}")
    assert (block[0], block[2]) == ("an evaluation block of 3 images", f"train.eval_batch=1 or {smaller}")
    assert (ahead[0], ahead[2]) == ("80 images that are read ahead", "loader.prefetch=2")
    assert [*_needs(job, plan(10))][1][0] == "an evaluation block of 5 images"
    for workers in ("0", "auto"):
        words = ("loader=streaming", f"loader.workers={workers}")
        assert len([*_needs(resolved("device=cpu", *words), plan(10))]) == 2


def test_a_gpu_needs_no_memory_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.runtime.host.available_memory", lambda: 1)
    job = resolved("device=cpu")
    monkeypatch.setattr(type(job.model), "has_usual_size", True)
    check_memory(replace(job, device="cuda"), plan(10))
    with pytest.raises(InputError, match=r"^a micro-batch of 10 images need"):
        check_memory(job, plan(10))


def named_data(*names: str, **changed: Any) -> Any:
    job = resolved("device=cpu")
    own = {"class_names": names, "classes": len(names), **changed}
    return replace(job, dataset=SimpleNamespace(**own))  # type: ignore[arg-type]


def test_one_class_and_names_that_weights_have_no_room_for_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"^dataset: it has one class, mug, so there is nothing to tell apart"):
        check_plan(named_data("mug"))
    with pytest.raises(InputError, match=r"^dataset: it has one class so there is nothing to tell apart"):
        check_plan(named_data(classes=1))
    length = len('["aa", "bbb"]')
    monkeypatch.setattr("lockstep.job.validate_with_data.NAMES_LIMIT", length - 1)
    says = rf"^dataset: the names of its 2 classes take {length} characters, expected at most {length - 1}, because"
    with pytest.raises(InputError, match=says):
        check_plan(named_data("aa", "bbb"))
    monkeypatch.setattr("lockstep.job.validate_with_data.NAMES_LIMIT", length)
    with pytest.raises(AttributeError):  # it goes on to the images, of which these data have none
        check_plan(named_data("aa", "bbb"))


@pytest.mark.parametrize(
    "words",
    [
        ("train.swa_from=4", "steps=3"),
        ("train.patience=4", "steps=3", "train.eval_every=1"),
        ("monitor=f1",),
    ],
    ids=" ".join,
)
def test_what_no_run_of_this_length_has_is_refused_with_its_data(words: tuple[str, ...]) -> None:
    with pytest.raises(InputError, match=words[0].partition("=")[0]):
        check_plan(resolved("device=cpu", "model=linear", *words))


def test_a_metric_that_does_not_fit_the_classes_is_refused_with_its_data(monkeypatch: pytest.MonkeyPatch) -> None:
    job = resolved("device=cpu", "model=linear", "metric=[f1]")

    def refuse(metric: Any, names: Any) -> list[str]:
        raise InputError(f"f1 has no use for {len(names)} classes")

    monkeypatch.setattr(type(job.metric["f1"]), "notes", refuse)
    with pytest.raises(InputError, match="f1 has no use for 10 classes"):
        check_plan(job)


def test_few_images_that_show_no_value_of_a_metric_are_followed_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.job.validate_with_data.TRIED_LABELS", 1)
    job = resolved("device=cpu", "model=linear", "metric=[auroc]", "monitor=auroc")
    check_plan(job)
    labels = job.dataset.eval().labels
    assert not has_value(job, "auroc", labels[:1])
    assert has_value(job, "auroc", labels)


def in_agent(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    place = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    for variable, value in {**place, "TORCHELASTIC_RUN_ID": name}.items():
        monkeypatch.setenv(variable, value)


def test_a_rank_of_our_agent_is_one_of_those_that_its_launcher_has_started(monkeypatch: pytest.MonkeyPatch) -> None:
    in_agent(monkeypatch, launch_env.AGENT)
    own = ("launcher.nodes=2", "launcher.ranks=2", "launcher.timeout=7min", "launcher.rendezvous=a:1")
    job = resolved("device=cpu", "launcher=elastic", *own)
    assert job.launcher == Inline(ranks=4, timeout="7min", threads=4, backend="gloo")
    assert type(job.strategy) is DDP
    in_agent(monkeypatch, "none")
    with pytest.raises(InputError, match=r"^launcher\.ranks is 2, but torchrun has started 4"):
        resolved("device=cpu", "launcher=elastic", *own)


@pytest.mark.parametrize(("ranks", "sweep", "launcher"), [(1, False, Inline), (1, True, Spawn), (2, False, Spawn)])
def test_a_lone_rank_is_this_process_unless_other_jobs_are(ranks: int, sweep: bool, launcher: type) -> None:
    words = ("device=cpu", f"launcher.ranks={ranks}")
    assert type(resolve.resolve(built(*words), sweep=sweep).launcher) is launcher


def test_the_virtual_shards_are_dealt_to_the_ranks_of_all_machines() -> None:
    words = ("launcher=elastic", "launcher.nodes=2", "launcher.ranks=1", "device=cpu", "launcher.rendezvous=a:1")
    job = resolved(*words, "strategy=strict", "strategy.shards=8")
    assert (job.train.micro_batches, job.launcher.world_size) == (4, 2)


def test_the_gpus_of_a_machine_decide_its_ranks_and_its_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for gpus, ranks in ((1, 1), (2, 2), (8, 8)):
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        for words in ((), ("device=cuda",)):
            job = resolved("strategy=ddp", *words)
            assert (job.launcher.ranks, job.launcher.backend, job.device) == (ranks, "nccl", "cuda")
        assert resolved("strategy=ddp", f"launcher.ranks={gpus}").launcher.ranks == gpus
    assert resolved("strategy=ddp", "launcher.backend=gloo").launcher.backend == "gloo"
    on_cpu = resolved("strategy=ddp", "device=cpu", "launcher.ranks=9").launcher
    assert (on_cpu.ranks, on_cpu.backend) == (9, "gloo")
    assert resolved("strategy=ddp", "device=cpu").launcher.ranks == 2, "whatever its GPUs are"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    says = r"^launcher\.ranks is 2, but this machine has 1 GPU, and each rank needs one; use launcher\.ranks=1 or dev"
    with pytest.raises(InputError, match=says):
        resolved("strategy=ddp", "launcher.ranks=2")


def test_work_without_a_strategy_has_the_ranks_and_threads_of_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher, device = resolve.resolve_launcher(Auto(ranks=4), "cpu")
    assert (launcher, device) == (Spawn(ranks=4, threads=2, backend="gloo"), "cpu")
    launcher, _ = resolve.resolve_launcher(Auto(threads=3), "cpu")
    assert launcher == Inline(ranks=1, threads=3, backend="gloo")
    with pytest.raises(InputError, match=r"^launcher=inline has one rank, but launcher\.ranks requests 2; use"):
        resolve.resolve_launcher(Inline(ranks=2), "cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve.resolve_launcher(Auto(), "auto")[1] == "cpu"
    with pytest.raises(InputError, match=r"^device=cuda, but torch finds no CUDA GPU on this machine"):
        resolve.resolve_launcher(Auto(), "cuda")


@pytest.mark.parametrize("key", ["mean", "std"])
def test_there_is_a_mean_and_a_deviation_for_each_channel(key: str) -> None:
    for data, numbers, channels in (("digits", "[0.5, 0.25]", "1 channel"), ("fake", "[0.5]", "3 channels")):
        says = f"input.{key} is {numbers}, but the images have {channels}, expected a number for each; remove it"
        with pytest.raises(InputError) as raised:
            resolved("device=cpu", f"dataset={data}", f"input.{key}={numbers}")
        assert str(raised.value) == says


@pytest.mark.parametrize(("words", "chosen"), [((), "bicubic"), (("input.interpolation=bilinear",), "bilinear")])
def test_images_are_as_for_the_weights_unless_the_job_says_how(words: tuple[str, ...], chosen: str) -> None:
    job = built("device=cpu", "dataset=fake", "dataset.channels=3", *words)
    numbers = {"mean": (0.1, 0.2, 0.3), "std": (0.4, 0.5, 0.6)}
    trained = TrainedInput(input_shape=(3, 8, 8), eval_crop=1.0, interpolation="bicubic", **numbers)
    block = resolve._input(job.input, job.dataset, trained)
    assert (block.mean, block.std, block.interpolation) == ([0.1, 0.2, 0.3], [0.4, 0.5, 0.6], chosen)
    own = resolve._input(job.input, job.dataset, None)
    assert (own.mean, own.std) == ([*job.dataset.mean], [*job.dataset.std])
    assert own.interpolation == (chosen if words else "bilinear")


@pytest.mark.parametrize(
    ("resumed", "init_from", "pretrained", "source"),
    [
        ("run", None, False, "run"),
        ("run", "start", False, "run"),
        ("cardless", "start", False, "start"),
        (None, "start", False, "start"),
        (None, "start", True, "published"),
        (None, "cardless", False, "published"),
        (None, None, True, "published"),
        (None, None, False, None),
    ],
)
def test_the_images_of_a_resumed_run_are_its_own_and_else_those_of_its_first_weights(
    resumed: str | None,
    init_from: str | None,
    pretrained: bool,
    source: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("lockstep.checkpoint.weights.weights_file", lambda place: place / "model.safetensors")
    monkeypatch.setattr(
        "lockstep.checkpoint.weights.find_card",
        lambda file: None if file.parent.name == "cardless" else str(file.relative_to(tmp_path)),
    )
    job: Any = SimpleNamespace(
        init_from=init_from and f"~/{init_from}",
        model=SimpleNamespace(pretrained=pretrained, trained_input=lambda: "published"),
        starts_trained=pretrained or init_from is not None,
    )
    expected = source if source in (None, "published") else f"{source}/model.safetensors"
    assert resolve._trained_input(job, resumed and tmp_path / resumed) == expected  # type: ignore[arg-type]


def test_what_cannot_be_recorded_as_one_graph_is_refused_each_with_its_remedy() -> None:
    class Counts(Multiclass):
        """A task that logs figures."""

        figures = ("-my/gap", "my/share")

    job = resolved("device=cpu", "train.cuda_graph=true")
    validate._check_graph(job)
    obstacles: dict[str, dict[str, Any]] = {
        "this task logs my/gap, my/share, which no replay does; use another task": {"task": Counts()},
        "under precision=fp16 a step counts only if no gradient overflows; use precision=bf16": {"precision": FP16()},
        "under strategy=ddp a step is more than the work of one device; use repro=exact": {"strategy": DDP()},
    }
    for sentence, changed in obstacles.items():
        with pytest.raises(InputError) as raised:
            validate._check_graph(replace(job, **changed))
        (problem,) = map(str, raised.value.args)
        assert problem.startswith(f"train.cuda_graph is true, but {sentence}")
    off = replace(job, train=replace(job.train, cuda_graph=False), precision=FP16(), strategy=DDP())
    validate._check_graph(off)
    with pytest.raises(InputError) as raised:
        validate._check_graph(replace(job, precision=FP16(), strategy=DDP()))
    assert len(raised.value.args) == 2, "a line for each"


@pytest.mark.parametrize(("examples", "fitting"), [(1000, 250), (8, 2), (3, 1), (2, 1)])
def test_as_many_images_are_proposed_as_half_of_the_memory_has_room_for(
    examples: int, fitting: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Made(SimpleNamespace):
        """Data that a job generates."""

    free = 4 * 10**9
    monkeypatch.setattr(validate, "available_memory", lambda: free)
    monkeypatch.setattr("lockstep.runtime.host.available_memory", lambda: free)
    data: Any = Made(examples=examples, generated_bytes=2 * free)
    with pytest.raises(InputError, match=rf"^the images of dataset=made need 8\.0 GB.*dataset\.examples={fitting}$"):
        validate.check_data_memory(data)
    validate.check_data_memory(Made(examples=examples, generated_bytes=0))  # type: ignore[arg-type]
    validate.check_data_memory(Made(examples=examples, generated_bytes=free // 8))  # type: ignore[arg-type]


OBLONG = ("device=cpu", "dataset=fake", "dataset.channels=3", "dataset.size=[16,24]", "model=linear")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("train.size=[8,24]", "train.size is [8,24], which this model for images of 16x24 does not take ("),
        ("train.size=8", "train.size is 8, which this model for images of 16x24 does not take ("),
        ("train.sizes={0: [16,24], 3: [24,8]}", "train.sizes is [24,8], which this model for images of 16x24"),
        ("train.size=[16,24]", "train.size is [16, 24], which is the size of the evaluation too; remove it"),
        ("train.sizes={0: [16,24]}", "train.sizes is [16, 24], which is the size of the evaluation too; remove it"),
    ],
)
def test_a_size_of_two_sides_is_said_in_their_order(words: str, says: str) -> None:
    with pytest.raises(InputError) as raised:
        validate._check_train_size(resolved(*OBLONG, words))
    assert str(raised.value).startswith(says)
    if "this model" in says:
        size = says.partition(" is ")[2].partition(", which")[0]
        remedy = f"; use dataset.input_size={size} for both, or a network of convolutions, such as model=resnet50"
        assert str(raised.value).endswith(remedy)
    validate._check_train_size(resolved(*OBLONG))


@pytest.mark.parametrize(
    ("strategy", "name"), [("ddp", "DDP"), ("zero", "ZeRO"), ("fsdp", "FSDP"), ("dp", "DataParallel")]
)
def test_a_strategy_that_adds_in_another_order_is_refused_for_the_same_bits(strategy: str, name: str) -> None:
    words = ("device=cpu", f"strategy={strategy}", "launcher.ranks=2")
    with pytest.raises(InputError) as raised:
        resolved(*words, "repro=strict")
    assert str(raised.value) == (
        f"repro=strict adds gradients in a fixed order, which {name} does not keep; "
        "remove strategy=..., or use repro=exact"
    )


def test_batch_norm_per_rank_is_refused_for_the_same_bits() -> None:
    with pytest.raises(InputError) as raised:
        resolved("device=cpu", "repro=strict", "strategy.sync_batchnorm=false")
    assert str(raised.value) == (
        "strategy.sync_batchnorm is false, but under repro=strict batch norm works per virtual shard; remove "
        "strategy.sync_batchnorm, or use repro=exact"
    )


@pytest.mark.parametrize(
    ("words", "thaws"),
    [((), False), (("train.freeze=[conv1]",), False), (("train.freeze=[conv1]", "train.freeze_until=1ep"), True)],
)
def test_layers_that_thaw_change_what_is_communicated(words: tuple[str, ...], thaws: bool) -> None:
    usual = DDP()
    for of_job in (("strategy=ddp",), ()):
        job = resolved("device=cpu", "launcher.ranks=2", "launcher=spawn", *of_job, *words)
        assert job.strategy == (usual.with_changing_graph() if thaws else usual)
    assert usual != usual.with_changing_graph()


def test_a_block_of_evaluation_is_as_large_as_it_is_typed() -> None:
    for typed in (1, 257, 1000):
        assert resolved("device=cpu", f"train.eval_batch={typed}").train.eval_batch == typed


@pytest.mark.parametrize(
    ("variable", "label", "way"),
    [
        ("TORCHELASTIC_RUN_ID", "torchrun", "torchrun --nproc-per-node"),
        ("SLURM_PROCID", "srun", "srun --ntasks"),
        ("ANYTHING", "whoever set RANK and WORLD_SIZE", "by WORLD_SIZE"),
    ],
)
def test_a_number_of_ranks_beside_ranks_that_were_started_is_refused_whatever_the_launcher(
    variable: str, label: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TORCHELASTIC_RUN_ID", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    place = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    for name, value in {**place, variable: "1"}.items():
        monkeypatch.setenv(name, value)
    assert resolved("device=cpu", "launcher.ranks=2").launcher.ranks == 2
    for ranks in (1, 3):
        with pytest.raises(InputError) as raised:
            resolved("device=cpu", f"launcher.ranks={ranks}")
        assert str(raised.value) == (
            f"launcher.ranks is {ranks}, but {label} has started 2; use launcher.ranks=auto, or start {ranks} ({way})"
        )


@pytest.mark.parametrize("words", [(), ("strategy=single",), ("strategy=strict",), ("strategy.sync_batchnorm=true",)])
def test_a_strategy_that_says_no_order_may_be_strict(words: tuple[str, ...]) -> None:
    assert type(resolved("device=cpu", "repro=strict", *words).strategy) is Strict


NODES = "launcher=elastic launcher.ranks=1 launcher.rendezvous=a:1 repro=strict launcher.nodes="
AVERAGE = (
    "but under precision=bf16_pure an average is in bfloat16 too, where a number moves by 1/256 of itself or not "
)
CONFLICTS = {
    f"{NODES}2:4": "launcher.nodes is 2:4, but repro=strict deals its virtual shards to a fixed number of ranks; use "
    "launcher.nodes=4, or repro=exact",
    "precision=bf16_pure train.ema=0.9": (
        f"train.ema is 0.9, {AVERAGE}at all; use precision=bf16, or remove train.ema"
    ),
    "precision=bf16_pure train.swa_from=1ep": (
        f"train.swa_from is 1ep, {AVERAGE}at all; use precision=bf16, or remove train.swa_from"
    ),
    "batch=10 train.repeats=4": "train.repeats is 4, but batch is 10, so a global batch cannot hold its examples so "
    "often; use batch=8, or remove train.repeats",
}


@pytest.mark.parametrize("words", CONFLICTS)
def test_keys_that_do_not_go_together_are_named_with_their_values_and_remedies(words: str) -> None:
    with pytest.raises(InputError) as raised:
        validate.check_conflicts(resolved("device=cpu", *words.split()))
    assert str(raised.value) == CONFLICTS[words]
    validate.check_conflicts(resolved("device=cpu", "precision=bf16_pure", "train.repeats=8", "batch=64"))


@pytest.mark.parametrize(
    ("group", "name", "of", "some"),
    [
        ("loss", "mse", "values", {"cross_entropy", "bce", "focal"}),
        ("metric", "mae", "values", {"accuracy", "f1", "kappa"}),
    ],
)
def test_what_is_of_other_targets_is_answered_with_the_options_for_these(
    group: str, name: str, of: str, some: set[str]
) -> None:
    with pytest.raises(InputError) as raised:
        validate.check_targets(resolved("device=cpu", f"{group}={name}"))
    head, _, names = str(raised.value).partition("NAME with one of ")
    assert head == (f"{group}: {name.upper()} is for {of}, and the targets of this task are classes; use {group}=")
    proposed, options = names.split(", "), classes_of(group)
    assert proposed == sorted(proposed)
    assert some <= {*proposed}
    assert {*proposed} == {option for option, cls in options.items() if "classes" in cls.targets}
