"""What `auto` becomes: ranks, strategy, threads and micro-batches; and which jobs are refused before they start."""

from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from helpers import built, resolved
from lockstep.config.options import classes_of
from lockstep.core.errors import InputError
from lockstep.core.fields import PATH, rule_of
from lockstep.core.observer import Callback
from lockstep.core.plan import Plan
from lockstep.data.datasets import CSV
from lockstep.job import resolve, validate
from lockstep.job.validate import check_job, check_threads, named_objects
from lockstep.job.validate_with_data import _needs, check_memory, check_plan
from lockstep.launcher import Inline, Spawn
from lockstep.optim.schedule import Constant
from lockstep.strategy import DDP, Single, Strict
from lockstep.tasks import Distill
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
    keys = [field.name for field in fields(option) if rule_of(option, field.name) is PATH]
    absolute = resolve._with_absolute_paths(option(**dict.fromkeys(keys, "a/b")))
    for key in keys:
        assert getattr(absolute, key) == ("a/b" if key.endswith(BELOW) else str(tmp_path / "a/b")), key


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
    with pytest.raises(InputError, match="this machine has 8 CPU cores, expected at most 32 ranks"):
        check_threads(resolved("launcher=spawn", "launcher.ranks=33", "device=cpu"))


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
    assert counted == [copies]


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
