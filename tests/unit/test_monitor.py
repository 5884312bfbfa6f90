"""Which figure decides, in which direction, and when a run that does not become better ends."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers import built, records, resolved, train_here
from lockstep import metrics
from lockstep.config import components
from lockstep.config.options import classes_of
from lockstep.core.errors import InputError
from lockstep.core.model_card import CLASSES
from lockstep.core.plan import Plan, make_plan
from lockstep.core.run import Run
from lockstep.core.tags import (
    FIGURES,
    Direction,
    Figure,
    Monitor,
    chosen_on_itself,
    direction_in,
    direction_of,
    figure_name,
    figure_parts,
    figure_text,
    job_directions,
    monitor_of,
    name_of_tag,
    part_words,
    tagged,
)
from lockstep.inference.predictor import load_predictor
from lockstep.training.evaluate import Patience

SHORT = ("steps=8", "batch=256", "train.eval_every=1", "device=cpu", "model=linear")


def plan(steps: int = 100, every: int = 10) -> Plan:
    size: dict[str, Any] = {
        "examples": 64 * steps,
        "batch": 64,
        "epochs": 1,
        "total_steps": steps,
        "micro_batches": 1,
    }
    return make_plan(**size, log_every=steps, eval_every=every, save_every=steps)


class Falls:
    """A metric of a user that says its direction."""

    higher_is_better = False

    def build(self, classes: int) -> Any:
        raise AssertionError("nobody has to build what says its direction")


class Builds:
    """A metric of a user that builds a metric of torchmetrics, from a number of classes on."""

    higher_is_better = None

    def __init__(self, name: str, least: int = 2) -> None:
        self.name, self.least = name, least

    def build(self, classes: int) -> Any:
        import torchmetrics

        assert classes >= self.least
        return getattr(torchmetrics, self.name)()


class Derived(metrics.MAE):
    """A metric of a user that derives from one of ours."""


METRICS: dict[str, Any] = {
    "error": metrics.Calibration(),
    "f1": metrics.F1(),
    "falls": Falls(),
    "derived": Derived(),
    "theirs": Builds("MeanAbsoluteError"),
    "rises": Builds("R2Score"),
    "many": Builds("MeanAbsoluteError", 1000),
}


@pytest.mark.parametrize(
    ("text", "chosen"),
    [
        *((name, f"-{name}") for name in ("loss", "error", "error/cat", "falls", "derived", "derived/x", "theirs")),
        *((name, name) for name in ("-loss", "top5", "-top1", "f1", "-f1", "rises", "many", "unknown", "-unknown")),
        ("auto", "-falls"),
    ],
)
def test_a_monitor_knows_which_value_is_better(text: str, chosen: str) -> None:
    monitor = monitor_of(text, "falls", METRICS)
    assert str(monitor) == chosen
    assert Monitor.parse(chosen) == monitor
    assert Monitor.parse("metric/my-own") == Monitor("metric/my-own", Direction.maximize), (
        "only the first dash is one"
    )


def test_our_metrics_say_their_direction_and_it_is_the_direction_of_torchmetrics() -> None:
    import torchmetrics

    names = {"MAE": "MeanAbsoluteError", "RMSE": "MeanSquaredError", "R2": "R2Score", "F1": "F1Score"}
    ours = [*classes_of("metric").values()]
    assert len(ours) > 10
    for cls in ours:
        assert isinstance(cls.higher_is_better, bool)
        name = names.get(cls.__name__, cls.__name__)
        theirs = getattr(torchmetrics, name, None) or getattr(torchmetrics.classification, name, None)
        if theirs is not None and theirs.__dict__.get("higher_is_better") is not None:
            assert theirs.higher_is_better is cls.higher_is_better, name


def test_the_usual_monitor_of_each_task_is_a_figure_of_it() -> None:
    usual = {"Multiclass": "top1", "Distill": "top1", "Multilabel": "map", "Regression": "-mae"}
    for cls in classes_of("task").values():
        own = components.metrics_of(cls, {})
        assert str(monitor_of("auto", cls.monitor, own)) == usual[cls.__name__]
        assert Monitor.parse(cls.monitor).name in (*cls.counted, *own)


@pytest.mark.parametrize("typed", ["mae", "-mae"])
def test_a_metric_of_the_task_that_falls_is_monitored_as_one_however_it_is_typed(typed: str) -> None:
    assert resolved("dataset=fake", "device=cpu", "task=regression", f"monitor={typed}").monitor == "-mae"


def test_a_metric_that_the_user_chooses_replaces_the_one_of_its_name_that_the_task_has() -> None:
    for cls in classes_of("task").values():
        own, added = components.metrics_of(cls, {}), {"more": METRICS["theirs"]}
        chosen = dict.fromkeys(own, METRICS["theirs"]) | added
        assert components.metrics_of(cls, chosen) == chosen
        assert [*components.metrics_of(cls, added)] == [*own, *added]


def test_the_direction_of_a_figure_is_known_by_any_of_its_names() -> None:
    known = job_directions(Monitor("f1"), ("top1", "top5"), METRICS, {"my/gap": Direction.minimize})
    falling = ("loss", "loss/val", "loss/val_ema", "test/loss", "error", "metric/error", "error/cat", "test/error")
    assert {direction_in(known, name) for name in (*falling, "my/gap", "-f1")} == {Direction.minimize}
    rising = ("top1", "acc/val_top1", "acc/val_ema_top5", "test/top1", "f1", "metric/f1/cat", "metric/f1")
    assert {direction_in(known, name) for name in rising} == {Direction.maximize}
    assert {direction_in(known, name) for name in ("seconds", "perf/step_ms", "best_step", "g1")} == {None}
    assert (
        direction_in(job_directions(Monitor("f1", Direction.minimize), (), METRICS, {}), "f1") is Direction.minimize
    )
    assert direction_of(METRICS["theirs"]) is Direction.minimize


def test_every_figure_has_its_tag() -> None:
    figures = {"loss": 0.5, "top1": 90.0, "f1/cat": 0.3}
    assert tagged(figures) == {"loss/val": 0.5, "acc/val_top1": 90.0, "metric/f1/cat": 0.3}
    assert tagged(figures, averaged=True) == {"loss/val_ema": 0.5, "acc/val_ema_top1": 90.0, "metric/f1/cat": 0.3}
    assert Monitor("loss").tags == ("loss/val_ema", "loss/val")
    assert Monitor("f1/cat").tags == ("metric/f1/cat",)
    assert [figure_text("top1", 98.611), figure_text("loss", 0.04213)] == ["98.61 % top-1", "loss 0.04213"]
    assert figure_text("f1/top1", 0.98611) == "f1/top1 0.9861", "of a class of this name"
    spreads = figure_text("top5", 98.611, 0.0), figure_text("f1/cat", 0.123456, 0.05)
    assert spreads == ("98.61 ± 0.00 % top-5", "f1/cat 0.1235 ± 0.05")


@pytest.mark.parametrize("words", [("monitor=loss",), ("monitor=loss", "train.ema=0.5"), ("monitor=-top1",)])
def test_the_monitor_decides_which_weights_are_the_best(words: tuple[str, ...], tmp_path: Any) -> None:
    rates = ("optimizer=sgd", "optimizer.lr=8", "schedule=constant")
    keeps = ("checkpoint.every=1", "checkpoint.keep=1", "checkpoint.keep_best=2")
    run = train_here(tmp_path, *SHORT, *rates, *keeps, *words)
    monitor, summary = Monitor.parse(str(Run(run.path).summary["monitor"])), run.read_summary()
    values = {line["step"]: line[tag] for line in records(run) for tag in monitor.tags[:1] if tag in line}
    values = values or {line["step"]: line[monitor.tags[-1]] for line in records(run) if monitor.tags[-1] in line}
    best = min(values, key=lambda step: values[step])
    assert monitor.direction is Direction.minimize
    assert len({*values.values()}) > 3
    assert best != 8, "the last one is kept anyway"
    assert (summary["best_step"], summary["best"], summary["objective"]) == (best, values[best], values[best])
    assert summary["scores"][monitor.name] == values[best]
    card = load_predictor(run.path, device="cpu").card
    assert (card.step, card.scores, card.monitor) == (best, summary["scores"], str(monitor))
    second = sorted(values, key=lambda step: values[step])[1]
    names = {int(path.name.removeprefix("step-")) for path in run.checkpoints.glob("step-*")}
    assert names == {8, best, second}


def test_a_monitor_without_a_value_has_no_best_and_is_told_once(
    tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    class_of_no_image = ("metric=recall", "metric.recall.average=none", "monitor=recall/9")
    words = ("dataset=fake", "dataset.classes=10", "dataset.examples=16", "dataset.channels=1", "dataset.size=8")
    run = train_here(tmp_path, *words, *class_of_no_image, "model=linear", "batch=8", "steps=4", "device=cpu")
    summary, shown = run.read_summary(), capsys.readouterr()
    assert [line["metric/recall/9"] for line in records(run) if "metric/recall/9" in line] == [None, None]
    assert (summary["status"], summary["best"], summary["objective"]) == ("completed", None, None)
    assert (shown.out + shown.err).count("recall/9 has no value after step 2: no best yet") == 1
    assert load_predictor(run.path, device="cpu").card.step == 4, "the run has weights all the same"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("loss=mse",), "loss: MSE is for values, and the targets of this task are classes; use loss=NAME with one"),
        (("metric=mae",), "metric: MAE is for values, and the targets of this task are classes"),
    ],
)
def test_what_does_not_fit_the_task_is_refused(words: tuple[str, ...], expected: str) -> None:
    from lockstep.job.validate import check_job

    assert built().task.targets == CLASSES
    with pytest.raises(InputError, match=expected):
        check_job(resolved(*words))


def ends_at(values: list[float | None], limit: int, min_delta: float, direction: Direction) -> int | None:
    """The evaluation, from 1, after which early stopping ends a run, written as its definition says."""
    best, since = None, 0
    for number, value in enumerate(values, 1):
        gain = None if value is None else value if direction is Direction.maximize else -value
        if gain is not None and (best is None or gain > best + min_delta):
            best, since = gain, 0
        elif number > 1:
            since += 1
        if since >= limit:
            return number
    return None


@given(
    values=st.lists(st.none() | st.sampled_from([0.0, 0.1, 0.5, 0.55, 1.0]), max_size=12),
    limit=st.integers(1, 5),
    min_delta=st.sampled_from([0.0, 0.1]),
    direction=st.sampled_from([*Direction]),
)
def test_patience_ends_where_its_definition_says(
    values: list[float | None], limit: int, min_delta: float, direction: Direction
) -> None:
    patience, monitor = Patience(limit=limit, min_delta=min_delta), Monitor("loss", direction)
    scores = [(10 * number, value) for number, value in enumerate(values, 1)]
    ended = [n for n in range(1, len(values) + 1) if patience.ended(scores[:n], monitor, plan(1000))]
    assert (ended or [None])[0] == ends_at(values, limit, min_delta, direction)
    as_text = replace(patience, limit=str(limit))
    assert ended == [n for n in range(1, len(values) + 1) if as_text.ended(scores[:n], monitor, plan(1000))]


def test_patience_says_which_weights_have_the_scores() -> None:
    patience, scores = Patience(limit=2), [(10, 45.0), (20, 44.0), (30, 43.0)]
    raw, averaged = (patience.ended(scores, Monitor(), plan(), averaged=value) for value in (False, True))
    assert raw.startswith("val top-1 has not been better than 45.00 % (step 10) for 2 evaluations;")
    assert averaged.startswith("val top-1 of the averaged weights has not been better than 45.00 % (step 10)")


def test_patience_can_be_a_duration() -> None:
    scores, monitor, patience = [(10 * n, 1.0 - n) for n in range(1, 9)], Monitor(), Patience(limit="50%")
    assert [bool(patience.ended(scores[:n], monitor, plan())) for n in range(1, 9)] == [*[False] * 5, *[True] * 3]
    for limit in (10, "95%"):
        with pytest.raises(InputError, match="so it never ends early"):
            Patience(limit=limit).check(plan())
    for limit in (9, "90%"):
        Patience(limit=limit).check(plan())


@pytest.mark.parametrize("stop", [None, 1, 3])
def test_a_run_ends_early_at_the_same_step_however_often_it_was_stopped(stop: int | None, tmp_path: Any) -> None:
    words = (*SHORT, "optimizer.lr=1e-9", "train.patience=3", "checkpoint.every=1")
    if stop is not None:
        train_here(tmp_path, *words, stop_at=stop)
    for _ in range(2):  # the second time it has ended already
        run = train_here(tmp_path, *words)
        summary = run.read_summary()
        assert (summary["status"], summary["step"], summary["best_step"]) == ("completed", 4, 1)
        assert summary["stopped_early"].startswith("val top-1 has not been better than")
        assert [line["step"] for line in records(run) if "loss/val" in line] == [1, 2, 3, 4]
    train_here(tmp_path, *words, "train.patience=null")
    assert (run.read_summary()["step"], run.read_summary()["stopped_early"]) == (8, "")


def test_a_tag_is_unicode_also_for_a_class_whose_folder_has_bytes_that_are_no_text() -> None:
    assert tagged({"f1/ow\udcffl": 0.5, "loss": 1.0}) == {"metric/f1/ow\\udcffl": 0.5, "loss/val": 1.0}


def test_the_name_of_a_figure_is_the_same_by_its_tag_and_by_a_monitor_of_either_direction() -> None:
    names = {"loss": "loss/val", "top1": "acc/val_top1", "top5": "acc/val_top5", "f1/cat": "metric/f1/cat"}
    unnamed = ("loss/train", "perf/img_per_s", "my/gap", "seconds")
    for name, tag in {**names, **dict(zip(unnamed, unnamed, strict=True))}.items():
        assert {name_of_tag(f"{sign}{text}") for sign in ("", "-") for text in (name, tag)} == {name}


def test_the_value_that_decides_is_that_of_the_averaged_weights_and_may_be_zero() -> None:
    monitor, falls = Monitor("loss", Direction.minimize), Monitor("f1", Direction.minimize)
    figures = {"loss/val_ema": 0.0, "loss/val": 0.5, "metric/f1": 0.25}
    assert (monitor.value_in(figures), falls.value_in(figures), Monitor("top1").value_in(figures)) == (
        0.0,
        0.25,
        None,
    )
    assert monitor.value_in({"loss/val_ema": None, "loss/val": 0.5}) == 0.5
    assert [monitor.gain(value) for value in (0.5, 0.0, float("nan"), None)] == [-0.5, 0.0, None, None]
    assert [Monitor("top1").gain(value) for value in (0.5, float("nan"))] == [0.5, None]
    assert monitor.gain(float("inf")) == -float("inf"), "a loss that is infinite is the worst one"


def test_a_figure_has_the_category_and_the_title_of_its_chart_and_tags_of_its_own() -> None:
    figures = {figure.tag: figure for figure in FIGURES}
    pages = {"loss/val": "Learning", "metric/": "Learning", "test/": "", "perf/mfu_pct": "Throughput"}
    pages |= {"cpu/cores": "CPU", "gpu/util/": "GPU", "optim/lr": "Optimisation"}
    assert {tag: figures[tag].page for tag in pages} == pages
    assert [figures["gpu/util/"].title, figures["optim/lr"].title] == ["GPU utilisation, %", "Learning rate"]
    tags = ("loss/val", "loss/val_ema", "loss/value", "gpu/util/0", "gpu/util", "gpu/utilisation")
    assert [tag for tag in tags if Figure("loss/val", "").covers(tag)] == ["loss/val"]
    assert [tag for tag in tags if Figure("gpu/util/", "").covers(tag)] == ["gpu/util/0"]


def test_figures_and_parts_of_the_time_in_words() -> None:
    words = {"data": "waiting for data", "host_to_device": "host to device", "forward": "forward"}
    assert {part: part_words(part) for part in words} == words
    names = {
        "top1": "val top-1",
        "top5": "val top-5",
        "loss": "val loss",
        "calibration_error": "val calibration error",
        "my_figure": "val my_figure",
    }
    assert {name: figure_name(name) for name in names} == names
    texts = {"top1": "12.35 % top-1", "calibration_error": "12.35 % calibration error", "f1": "f1 12.35"}
    assert {name: figure_text(name, 12.3456) for name in texts} == texts
    assert [figure_parts("f1", value)[0] for value in (0.00012345, 123456.0, 0.0)] == ["0.0001234", "1.235e+05", "0"]
    assert figure_text("f1", 0.5, 0.0) == "f1 0.5 ± 0"


@pytest.mark.parametrize(
    ("keys", "override"),
    [
        (("val_share", "test_share"), " (dataset.test_share=0.1)"),
        (("test_share",), " (dataset.test_share=0.1)"),
        (("path", "val_share"), " (dataset.val_share=0.1)"),
        (("path",), ""),
    ],
)
def test_a_test_split_is_proposed_where_the_data_can_have_one(keys: tuple[str, ...], override: str) -> None:
    assert chosen_on_itself(keys).endswith(f"a test split gives an honest one{override}")


def test_the_figures_of_a_job_have_the_directions_of_their_metrics_and_options_and_the_monitor_its_own() -> None:
    figures = dict.fromkeys(("loss/val", "acc/val_top1"), Direction.maximize) | {"my/gap": Direction.minimize}
    known = job_directions(Monitor("top1", Direction.minimize), ("top1", "top5"), {"f1": METRICS["f1"]}, figures)
    assert known == {
        "loss/val": Direction.maximize,
        "acc/val_top1": Direction.minimize,
        "acc/val_top5": Direction.maximize,
        "metric/f1": Direction.maximize,
        "my/gap": Direction.minimize,
    }
    named = job_directions(Monitor(), (), {"ow\udcffl": METRICS["falls"]}, {})
    assert named == {"loss/val": "minimize", "metric/ow\\udcffl": "minimize", "acc/val_top1": "maximize"}


def test_a_figure_of_a_class_has_its_own_direction_before_that_of_its_metric() -> None:
    known = {"metric/recall": Direction.maximize, "metric/recall/a": Direction.minimize}
    directions = {
        name: direction_in(known, name) for name in ("recall/a", "recall/b", "metric/recall/a", "test/recall")
    }
    assert directions == {
        "recall/a": Direction.minimize,
        "recall/b": Direction.maximize,
        "metric/recall/a": Direction.minimize,
        "test/recall": Direction.maximize,
    }
    assert direction_in(known, "-anything") is Direction.minimize


def test_a_metric_that_says_yes_or_nothing_rises() -> None:
    for says, direction in ((True, "maximize"), (False, "minimize")):
        built = type("Built", (), {"higher_is_better": says})()
        assert (
            direction_of(type("Own", (), {"higher_is_better": None, "build": lambda *_, built=built: built}))
            == direction
        )
        assert direction_of(type("Own", (), {"higher_is_better": says})) == direction
    nothing = type("Own", (), {"higher_is_better": None, "build": lambda *_: object()})
    assert direction_of(nothing) == "maximize"
