"""`lockstep evaluate`: the scores of a trained model on a split, or of a sweep on all its folds together."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.config import components, composition
from lockstep.config.commands import key_of, shell_command
from lockstep.config.composition import ConfigFiles
from lockstep.config.history import present_words
from lockstep.config.options import can_be_group
from lockstep.config.schema import RECIPES
from lockstep.core import log
from lockstep.core.data_protocols import SPLIT_NAMES, Source
from lockstep.core.errors import InputError
from lockstep.core.formats import FileFormat, stamp
from lockstep.core.model_card import CLASSES, class_name
from lockstep.core.run import FOLD, Run, State, read_overrides
from lockstep.core.run_dir import RunDir, slug
from lockstep.core.safe_write import check_out, write_atomic
from lockstep.core.table import show_json
from lockstep.core.tags import figure_word, telling
from lockstep.core.world import World
from lockstep.data.datasets.files import FileSplit
from lockstep.data.datasets.sizes import with_sizes
from lockstep.inference.predictor import Predictor, load_predictor, run_of, say_which
from lockstep.inference.scoring import (
    EvaluatedSplit,
    Evaluation,
    Trial,
    counts,
    csv_lines,
    evaluated,
    of_all,
    show_figures,
    text_with_unit,
)
from lockstep.job.ranks import on_ranks
from lockstep.job.resolve import with_targets
from lockstep.records.ledger import Ledger
from lockstep.records.runs import by_values, differing, in_names, read_jobs, value_of
from lockstep.records.runs import settings as settings_of
from lockstep.runtime.host import cores
from lockstep.training.resolved_job import fingerprint_of
from lockstep.training.trained import find_weights

FOLDS = "dataset.folds"


@dataclass(frozen=True)
class CrossValidation:
    """The runs of a sweep that differ in the fold alone."""

    values: Mapping[str, str]  # of the keys in which the cross-validations of the sweep differ
    folds: int  # into how many the data are cut
    runs: Mapping[int, Run]  # those that are done, by fold
    missing: Mapping[int, str]  # how far each other fold is

    @property
    def name(self) -> str:
        return " ".join(f"{key}={value}" for key, value in self.values.items())


def evaluate(
    path: str, overrides: Sequence[str], *, split: str, device: str | None, out: str | None, form: str = "table"
) -> None:
    """Evaluate weights or the folds of a sweep, show the result and write `evaluation.json` and `predictions.csv`."""
    if out is not None and not Path(out).is_dir():
        raise InputError(f"--out is {out}, expected a folder that exists")
    of_ranks = [word for word in overrides if key_of(word).partition(".")[0] in ("launcher", "device")]
    of_data = [word for word in overrides if word not in of_ranks]
    evaluation = evaluate_folds if Ledger(Path(path)).exists else evaluate_weights
    on_ranks(partial(evaluation, path, of_data, split=split, out=out, form=form), of_ranks, device)


def evaluate_weights(
    path: str, overrides: Sequence[str], world: World, threads: int | None, *, split: str, out: str | None, form: str
) -> None:
    """Evaluate weights, each rank its share of the images. Collective; main shows and writes the result."""
    file = find_weights(path)
    run = run_of(file)
    predictor = load_predictor(file, device=str(world.device))
    say_which(file, card := predictor.card)
    chosen, source = split_for(predictor, run, overrides, split, threads)
    sha256 = fingerprint_of(source)
    is_other = card.trained_on.get("sha256") not in (None, sha256)
    for note in [*source.notes(), *share_note(source, split)] if is_other else ():  # a run has said those of its own
        log.note(f"warning: {note}")
    if (evaluation := evaluated([(predictor, chosen)], world)) is None:
        return
    facts = {"weights": file.name, "step": card.step, "dataset": type(source).__name__, "split": split}
    place = source.path and str(Path(source.path).absolute())
    facts["data"] = {"path": place, "overrides": [*overrides], "sha256": sha256}
    facts |= evaluation.facts()
    if form == "table":
        name = SPLIT_NAMES[split]
        log.show(f"{facts['images']:,} images of the {name} split of {facts['dataset']}, weights of step {card.step}")
        scores = telling(of_all(evaluation.figures), card.classes)
        log.show("  ".join(f"{figure_word(name)} {text_with_unit(name, value)}" for name, value in scores.items()))
        if split == "val" and card.score:
            log.show(f"in training it was {card.score}")
        evaluation.show()
    # In its own folder a run keeps the evaluation of its own data.
    other = f"-{slug(' '.join(overrides))}" if overrides and run is not None and out is None else ""
    folder = Path(out) if out is not None else Path() if run is None else run.path
    write_files(folder, facts, [evaluation], form, other)


def evaluate_folds(
    path: str, overrides: Sequence[str], world: World, threads: int | None, *, split: str, out: str | None, form: str
) -> None:
    """Evaluate each fold of a sweep on its own images, and score the predictions of each setting together."""
    sweep = Path(path)
    if split != "val":
        command = shell_command(["lockstep", "evaluate", sweep / "best", "--split", split])
        raise InputError(f"--split {split}: a sweep is evaluated on its folds; name one of its runs: {command}")
    evaluations, facts = [], []
    for setting in cross_validations(sweep):
        if (evaluation := evaluated(trials(setting, overrides, world, threads), world)) is not None:
            evaluations.append(evaluation)
            facts.append(report_folds(setting, evaluation, form))
    if evaluations:
        results = facts[0] if len(facts) == 1 else {"settings": facts}
        write_files(Path(out or sweep), results, evaluations, form, other="")


def trials(setting: CrossValidation, overrides: Sequence[str], world: World, threads: int | None) -> Iterator[Trial]:
    """The models of a setting, each with the images of its fold. Raises InputError: a model may have seen some."""
    for fold, run in setting.runs.items():
        predictor = load_predictor(run.folder, device=str(world.device))
        fold_split, source = split_for(predictor, run.run_dir, overrides, "val", threads)
        if predictor.card.trained_on.get("sha256") != fingerprint_of(source):
            raise InputError(
                f"dataset: its examples differ from those of {run.folder}, so the model may have seen some of the "
                "fold; name the files of the training (dataset.path=FOLDER), or train again"
            )
        yield predictor, replace(fold_split, place={"fold": str(fold), **setting.values})


def cross_validations(sweep: Path) -> list[CrossValidation]:
    """The cross-validations of a sweep of which a fold is done. Raises InputError if there is none."""
    jobs = read_jobs(Ledger(sweep))
    for job in jobs:
        if job.state == State.damaged:
            log.show_warning(job.error)
    numbers = re.compile("[0-9]{1,4}")
    runs = [run for run in jobs if all(numbers.fullmatch(settings_of(run).get(key, "")) for key in (FOLD, FOLDS))]
    keys = [key for key in differing(runs) if key != FOLD]
    settings = []
    for members in by_values(runs, keys).values():
        by_fold, folds = {int(settings_of(run)[FOLD]): run for run in members}, int(settings_of(members[0])[FOLDS])
        values = {key: value_of(members[0], key) for key in in_names(runs, keys)}
        states = {fold: str(by_fold[fold].state) if fold in by_fold else "no job" for fold in range(folds)}
        done = {fold: by_fold[fold] for fold, state in states.items() if state == State.done}
        missing = {fold: state for fold, state in states.items() if fold not in done}
        settings.append(CrossValidation(values, folds, done, missing))
    if not any(setting.runs for setting in settings):
        compare = shell_command(["lockstep", "compare", sweep])
        expected = "it has no folds, expected a sweep such as dataset.folds=5 dataset.fold=0,1,2,3,4 -m"
        raise InputError(f"{sweep}: {'no fold is done' if runs else expected}; `{compare}` compares its jobs")
    for setting in settings:
        if not setting.runs:
            log.show_warning(f"{setting.name} is skipped: none of its folds is done")
    return [setting for setting in settings if setting.runs]


def report_folds(setting: CrossValidation, evaluation: Evaluation, form: str) -> dict[str, Any]:
    """Show the results of a setting, and return them: together, by fold, and their mean and spread over the folds."""
    parts, together = evaluation.parts, evaluation.facts()
    folds = [
        {"fold": fold, "run": run.folder.name, "step": part.step, **counts([part]), **of_all(part.figures)}
        for (fold, run), part in zip(setting.runs.items(), parts, strict=True)
    ]
    names = [*of_all(parts[0].figures)]
    columns = torch.tensor([[part.figures[name] for part in parts] for name in names], dtype=torch.float64)
    mean = of_all(dict(zip(names, columns.mean(1).tolist(), strict=True)))
    spread = of_all(dict(zip(names, columns.std(1).tolist(), strict=True))) if len(parts) > 1 else {}
    if form == "table":
        number = f"{together['images']:,} images of {len(parts)} of {setting.folds} folds"
        words = f"{number}, each predicted by the model that was not trained on it"
        log.show(f"{setting.name}: {words}" if setting.name else words)
        if setting.missing:
            missing = ", ".join(f"{fold} ({state})" for fold, state in setting.missing.items())
            log.show_warning(f"no figure counts the folds that are missing: {missing}")
        rows = [{"fold": "mean", **mean}, {"fold": "±", **spread}, {**together, "fold": "together"}]
        show_figures("fold", "fold", [*folds, *rows], [*telling(mean, evaluation.card.classes)])
        evaluation.show()
    facts = {"split": "val", "setting": setting.values, "folds": setting.folds, "missing": setting.missing}
    return {**facts, **together, "mean": mean, "spread": spread, "by_fold": folds}


def write_files(
    folder: Path, facts: Mapping[str, Any], evaluations: Sequence[Evaluation], form: str, other: str
) -> None:
    """Write the two files; their names end with the split, and with `other` data."""
    end = other if (split := facts.get("split", "val")) == "val" else f"-{split}{other}"
    results, predictions = folder / f"evaluation{end}.json", folder / f"predictions{end}.csv"
    for path in (results, predictions):
        check_out(path)
    facts = {**stamp(FileFormat.evaluation), **facts}
    write_atomic(results, json.dumps(facts, indent=1, allow_nan=False) + "\n")
    write_atomic(predictions, csv_lines(evaluations))
    if form == "json":
        show_json(facts)
        return
    for path in (results, predictions):
        log.show(f"wrote {path}")


def split_for(
    predictor: Predictor, run: RunDir | None, overrides: Sequence[str], split: str, threads: int | None = None
) -> tuple[EvaluatedSplit, Source]:
    """A split of a run's data, changed by overrides, for a model; and the data. Raises InputError.

    From now on torch computes in `threads`, or in as many as the run did: the last bits of a sum depend on it.
    """
    card = predictor.card
    source, targets = with_sizes(data_of(run, overrides), card), card.targets
    source = source if targets == CLASSES else with_targets(source, targets)
    numbers = check_data(predictor, source)
    chosen = {"train": source.train, "val": source.eval, "test": source.test}[split]()
    if chosen is None:
        named = f"it with dataset.test_{source.part}=NAME" if source.part else "data that has one"
        raise InputError(f"--split is test, but the data has no test split; name {named}")
    examples = source.read_as(chosen, card)
    if isinstance(examples, FileSplit):
        examples = replace(examples, scaled=False)  # training images too are read as `predict` reads them
    labels, config = numbers[examples.labels] if targets == CLASSES else examples.labels, dict[str, Any]()
    if run is not None:
        config = components.read_config(run.config)
        of_run = components.build_stored("launcher", config.get("launcher")).threads
        threads = threads or (min(of_run, cores()) if isinstance(of_run, int) else None)
    if threads is not None:
        torch.set_num_threads(threads)
    return EvaluatedSplit(examples, labels, config.get("metric")), source


def share_note(source: Source, split: str) -> list[str]:
    """A sentence if the split of other data than the run's is only a share of them."""
    if split == "test" or (share := source.located().val_share) is None:
        return []
    every = "; dataset.train_folder=. dataset.val_folder=. takes all" if source.part == "folder" else ""
    return [f"the {split} split is a share of these images, by dataset.val_share={share:g}{every}"]


def data_of(run: RunDir | None, overrides: Sequence[str]) -> Source:
    """The data of a run, changed by the overrides; without a run, the data of the overrides.

    A data set that only the run folder names is not downloaded, because somebody else may have written the folder.
    """
    if run is not None and not overrides:
        return components.build_stored("dataset", components.read_config(run.config).get("dataset"))
    has_dataset = any(key_of(override) == "dataset" for override in overrides)
    if run is None and not has_dataset:
        raise InputError("a weights file does not say where data is; name it: dataset=folder dataset.path=FOLDER")
    keys = ("data_root",) if has_dataset else ("data_root", "dataset", RECIPES)
    words = present_words(read_overrides(run.overrides)) if run else []
    stored = {word: key_of(word).partition(".")[0] for word in words}
    stored_data = [word for word, key in stored.items() if key in keys or (can_be_group(key) and not has_dataset)]
    with composition.composing():
        values = composition.recompose([*stored_data, "name=evaluate"], tuple(overrides), ConfigFiles())
    source: Source = components.build("dataset", values["dataset"])
    if "data_root" in map(key_of, overrides) or "data_root" not in map(key_of, stored_data):
        source.prepare()
    return source


def check_data(predictor: Predictor, source: Source) -> Tensor:
    """The model's label of each class of a data set, by name: int64 (classes,). Raises InputError for other data.

    Labels and values must match the model's, in the same order.
    """
    card = predictor.card
    labels = {name: label for label, name in enumerate(card.names)}
    names = [*map(class_name, source.class_names or map(str, range(source.classes)))]
    if card.targets != CLASSES and (source.targets != card.targets or names != [*card.names]):
        raise InputError(
            f"dataset: it has the {source.targets} {', '.join(names)}, expected the {card.targets} "
            f"of the model, {', '.join(card.names)}; name such data, for example the data of its run"
        )
    unknown = next((f" ({name!r} is none of them)" for name in names if name not in labels), "")
    if unknown or (not source.class_names and source.classes != card.classes):
        raise InputError(
            f"dataset: it has {source.classes:,} classes, which are not the {card.classes:,} of the model{unknown}; "
            "name data of these classes, or of some of them"
        )
    for name in ("image_shape", "input_shape", "eval_crop", "fit"):
        if (expected := getattr(card, name)) != (size := getattr(source, name)):
            raise InputError(
                f"dataset: its {name} is {size}, but the model expects {expected}; give the data set the sizes "
                "of the training: dataset.channels, decode_size, input_size, crop and fit"
            )
    return torch.tensor([labels[name] for name in names])
