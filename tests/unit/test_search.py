"""`hydra/sweeper=optuna` beside a launcher that makes up scores; test_sweep.py has it with real jobs."""

import errno
import itertools
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobReturn, JobStatus
from omegaconf import OmegaConf

from hydra_plugins.lockstep.sweeps import OPTUNA_CONFIG
from lockstep.core.errors import InputError, StorageError
from lockstep.core.run import State
from lockstep.core.tags import Direction
from lockstep.records.ledger import Identity, Ledger
from lockstep.records.record import job_key
from lockstep.sweeps.search import Search
from lockstep.sweeps.sweepers import GridSweeper, OptunaSweeper, distribution

optuna = pytest.importorskip("optuna")
LINE = ("seed=3", "x=interval(0,1)", "kind=a,b")


class Launcher:
    """Runs no job: `score` says what each would have returned."""

    def __init__(self, score: Callable[[dict[str, str]], float]) -> None:
        self.score = score
        self.launched: list[list[str]] = []

    def launch(self, jobs: Sequence[Sequence[str]], initial_job_idx: int) -> list[JobReturn]:
        returns = []
        for job in jobs:
            self.launched.append([*job])
            returned = JobReturn(status=JobStatus.COMPLETED)
            returned.return_value = self.score(dict(word.split("=") for word in job))
            returns.append(returned)
        return returns


def sweeper(folder: Path, launcher: Any, **settings: Any) -> OptunaSweeper:
    words = {key: value for key, value in OPTUNA_CONFIG.items() if key != "_target_"} | settings
    searching = OptunaSweeper(**words)
    of_jobs = {"job": {"num": "???"}, "sweep": {"dir": str(folder), "subdir": "${hydra.job.num}"}}
    searching.setup(launcher, OmegaConf.create({"hydra": {**of_jobs, "sweeper": {}}}))
    return searching


def study_in(folder: Path) -> Any:
    """The newest study in the journal of a sweep."""
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(folder / "optuna.log")))
    return optuna.load_study(study_name=storage.get_all_studies()[-1].study_name, storage=storage)


@pytest.mark.parametrize("kind", [GridSweeper, OptunaSweeper])
def test_the_options_of_a_group_are_found_by_their_pattern(kind: type[GridSweeper], tmp_path: Path) -> None:
    launcher = Launcher(lambda job: len(job["loss"]))
    searching = sweeper(tmp_path, launcher, n_trials=20) if kind is OptunaSweeper else GridSweeper({})
    settings = OmegaConf.create({"hydra": {"sweep": {"dir": str(tmp_path)}, "sweeper": {}}})
    loader: Any = SimpleNamespace(get_group_options=lambda *_, **__: ["bce", "focal", "bc"])
    searching.setup(launcher, settings, loader)
    searching.sweep(["loss=glob(b*)", "seed=3"])
    assert {tuple(sorted(job)) for job in launcher.launched} == {(f"loss={loss}", "seed=3") for loss in ("bc", "bce")}


def test_a_study_finds_the_best_and_goes_on_where_it_ended(tmp_path: Path) -> None:
    launcher = Launcher(lambda job: -abs(float(job["x"]) - 0.3) - (job["kind"] == "b"))
    sweeper(tmp_path, launcher, n_trials=25, n_jobs=2).sweep([*LINE])
    assert len(launcher.launched) == 25
    assert all(job[0] == "seed=3" for job in launcher.launched)
    study = study_in(tmp_path)
    assert study.best_value > -0.15
    assert study.best_params["kind"] == "a"
    for trial in study.trials:
        assert trial.value == launcher.score(trial.params), "the score of its own job"
    sweeper(tmp_path, launcher, n_trials=25).sweep([*LINE])
    assert len(launcher.launched) == 25
    sweeper(tmp_path, launcher, n_trials=27).sweep([*LINE])
    assert len({tuple(job) for job in launcher.launched}) == 27, "no job twice"


def test_trials_that_were_cut_are_the_first_that_run_again(tmp_path: Path) -> None:
    def stopped(job: dict[str, str]) -> float:
        raise SystemExit(75)

    cut = Launcher(stopped)
    with pytest.raises(SystemExit):
        sweeper(tmp_path, cut, n_trials=4, n_jobs=2).sweep([*LINE])
    launcher = Launcher(lambda job: 1.0)
    sweeper(tmp_path, launcher, n_trials=4).sweep([*LINE])
    assert launcher.launched[0] == cut.launched[0]
    assert len(launcher.launched) == 4
    assert [trial.state.name for trial in study_in(tmp_path).trials] == ["COMPLETE"] * 4


def test_a_search_that_was_made_shorter_goes_on_with_no_trial_of_before(tmp_path: Path) -> None:
    scores = iter([1.0, 2.0])

    def cut_after_two(job: dict[str, str]) -> float:
        if (score := next(scores, None)) is None:
            raise SystemExit(75)
        return score

    with pytest.raises(SystemExit):
        sweeper(tmp_path, Launcher(cut_after_two), n_trials=5).sweep([*LINE])
    shorter = Launcher(lambda job: 3.0)
    sweeper(tmp_path, shorter, n_trials=2).sweep([*LINE])
    assert shorter.launched == []
    sweeper(tmp_path, shorter, n_trials=3).sweep([*LINE])
    assert len(shorter.launched) == 1


@pytest.mark.parametrize("score", ["nan", "inf", "-inf"])
def test_a_job_without_a_score_fails_its_trial_and_says_why(score: str, tmp_path: Path) -> None:
    sweeper(tmp_path, Launcher(lambda job: float(score)), n_trials=2).sweep([*LINE])
    for trial in study_in(tmp_path).trials:
        assert (trial.state.name, trial.user_attrs["error"]) == ("FAIL", "the job has no score")


class FakePool(Launcher):
    """Runs as the pool does: the search is asked for more jobs at the end of each. `evaluation` is halfway."""

    search: Any = None

    def __init__(
        self, folder: Path, score: Callable[[dict[str, str]], float], evaluation: Callable[[int], float] | None = None
    ) -> None:
        super().__init__(score)
        self.ledger, self.evaluation, self.most_at_once = Ledger(folder), evaluation or (lambda number: 0.0), 0
        if not self.ledger.exists:
            self.ledger.create(Identity(base={}, swept=(), words=()))

    def launch(self, jobs: Sequence[Sequence[str]], initial_job_idx: int) -> list[JobReturn]:
        assert not jobs, "the pool asks for the first ones too"
        waiting = [*self.search.follow()]
        while waiting:
            self.most_at_once = max(self.most_at_once, len(waiting))
            job = waiting.pop(random.Random(len(self.launched)).randrange(len(waiting)))  # any may be the first
            (record,) = self.ledger.enter([(job, "job")])
            assert record.state is not State.done, "a job ran twice"
            (folder := self.ledger.folder / record.folder).mkdir(exist_ok=True)
            (folder / "summary.json").write_text('{"steps": 10}')
            (folder / "metrics.jsonl").write_text(
                f'{{"step": 5, "acc/val_top1": {self.evaluation(record.number)}, "perf/step_ms": 100}}\n'
            )
            (returned,) = super().launch([job], initial_job_idx)
            answers = [self.search.has_enough(record) for _ in range(2)]  # the pool asks again and again
            assert len({*answers}) == 1
            ended = replace(record, state=State.pruned if answers[0] else State.done, objective=returned.return_value)
            waiting += self.search.follow(self.ledger.write(ended))
        return []


def test_the_next_trial_begins_when_one_has_ended_and_no_job_runs_twice(tmp_path: Path) -> None:
    pool = FakePool(tmp_path, lambda job: float(job["x"]))
    sweeper(tmp_path, pool, n_trials=30, n_jobs=3).sweep(["x=1,2,3,4", "y=1,2"])
    assert pool.most_at_once == 3
    assert len(pool.launched) == len({frozenset(job) for job in pool.launched}) <= 8
    trials = study_in(tmp_path).trials
    assert len(trials) == 30, "a trial with the values of another is answered from the ledger"
    assert all(trial.value == float(trial.params["x"]) for trial in trials)
    again = FakePool(tmp_path, lambda job: float(job["x"]))
    sweeper(tmp_path, again, n_trials=32, study_name="other").sweep(["x=1,2,3,4", "y=1,2"])
    assert not [job for job in again.launched if frozenset(job) in {frozenset(known) for known in pool.launched}]


class LatePool(FakePool):
    """Sees the ends of all jobs that ran at once after they are in the ledger."""

    def launch(self, jobs: Sequence[Sequence[str]], initial_job_idx: int) -> list[JobReturn]:
        jobs = self.search.follow()
        while jobs:
            records = self.ledger.enter([(job, "job") for job in jobs])
            for record in records:
                (self.ledger.folder / record.folder).mkdir()
            ended = [self.ledger.end(record, State.done, objective=1.0) for record in records]
            assert not any(map(self.search.has_enough, ended))
            jobs = [job for record in ended for job in self.search.follow(record)]
        return []


def test_values_that_are_drawn_again_as_their_job_ends_are_answered_once(tmp_path: Path) -> None:
    pool = LatePool(tmp_path, lambda job: 1.0)
    sweeper(tmp_path, pool, n_trials=12, n_jobs=3, pruner="median").sweep(["x=1,2,3,4"])
    assert [trial.value for trial in study_in(tmp_path).trials] == [1.0] * 12


def of_two_trials(ledger: Ledger, study: optuna.Study, values: Any, *, retries: bool) -> Search:
    """A search for the best `x`, one trial at a time."""
    ledger.create(Identity(base={}, swept=("x",), words=()))
    facts: dict[str, Any] = {"fixed": (), "objectives": ["score"], "trials": 2, "at_once": 1, "prunes": False}
    random_values = lambda ended: optuna.samplers.RandomSampler(seed=ended)  # noqa: E731
    return Search(study=study, space={"x": values}, ledger=ledger, sampler=random_values, retries=retries, **facts)


@pytest.mark.parametrize("retries", [False, True])
def test_a_job_that_failed_runs_again_once_in_a_call_that_asks_for_it(tmp_path: Path, retries: bool) -> None:
    ledger, study = Ledger(tmp_path), optuna.create_study()
    search = of_two_trials(ledger, study, optuna.distributions.CategoricalDistribution(["a"]), retries=retries)
    (record,) = ledger.enter([(["x=a"], "x=a")])
    failed = ledger.end(record, State.failed, exit_code=70, error="it is wrong")
    assert search.ask() == [["x=a"]] * retries
    assert not retries or search.follow(failed) == []
    assert [trial.user_attrs["error"] for trial in study.trials] == ["it is wrong"] * 2


def test_trials_with_the_same_values_each_take_a_place(tmp_path: Path) -> None:
    ledger, study = Ledger(tmp_path), optuna.create_study()
    search = of_two_trials(ledger, study, optuna.distributions.CategoricalDistribution(["a"]), retries=False)
    search.trials, search.at_once = 5, 2
    assert search.ask() == [["x=a"]]
    assert (len(study.trials), search.left, search.ask()) == (2, 3, [])


def test_a_job_under_other_words_is_the_same_job_where_the_launcher_says_so(tmp_path: Path) -> None:
    ledger, study = Ledger(tmp_path), optuna.create_study()
    search = of_two_trials(ledger, study, optuna.distributions.CategoricalDistribution(["1.0"]), retries=False)
    search.identify = lambda words: tuple(float(word.partition("=")[2]) for word in words)
    records = ledger.enter([([f"x={value}"], f"x={value}") for value in ("7", "1e0", "2")])
    for record, score in zip(records, (70.0, 10.0, 20.0), strict=True):
        (tmp_path / record.folder).mkdir()
        ledger.end(record, State.done, objective=score)
    assert search.ask() == []
    assert [trial.value for trial in study.trials] == [10.0, 10.0]


@pytest.mark.parametrize("objective", ["score", "kwh"])
def test_what_a_job_returns_is_its_score_and_no_other_objective(tmp_path: Path, objective: str) -> None:
    ledger, study = Ledger(tmp_path), optuna.create_study()
    search = of_two_trials(ledger, study, optuna.distributions.CategoricalDistribution(["a"]), retries=False)
    search.objectives = [objective]
    (job,) = search.ask()
    ledger.enter([(job, "job")])
    search.tell(job, 5.0)
    assert study.trials[0].values == ([5.0] if objective == "score" else None)


def test_a_trial_ends_when_its_job_has_failed_and_not_when_it_was_stopped(tmp_path: Path) -> None:
    ledger, study = Ledger(tmp_path), optuna.create_study()
    search = of_two_trials(ledger, study, optuna.distributions.FloatDistribution(0.0, 1.0), retries=False)
    (job,) = search.ask()
    (record,) = ledger.enter([(job, "job")])
    assert search.follow(ledger.end(record, State.stopped, exit_code=75)) == []
    assert (search.ended, search.left, study.trials[0].datetime_complete) == (0, 1, None)
    (following,) = search.follow(ledger.end(record, State.failed, exit_code=70, error="it is wrong"))
    assert following != job
    assert (search.ended, search.left) == (1, 0)
    failed, running = study.trials
    assert (failed.state.name, failed.values, failed.user_attrs["error"]) == ("FAIL", None, "it is wrong")
    assert failed.datetime_start <= failed.datetime_complete <= running.datetime_start
    assert running.datetime_complete is None


def test_a_search_that_was_cut_anywhere_draws_what_it_would_have_drawn(tmp_path: Path) -> None:
    def score(job: dict[str, str]) -> float:
        return -abs(float(job["x"]) - 0.3)

    whole = FakePool(tmp_path / "whole", score)
    sweeper(tmp_path / "whole", whole, n_trials=10).sweep([*LINE])
    for cut in (1, 5, 9):
        jobs_left = iter(range(cut))

        def dying(job: dict[str, str], jobs_left: Iterator[int] = jobs_left) -> float:
            if next(jobs_left, None) is None:
                raise SystemExit(75)
            return score(job)

        pool = FakePool(tmp_path / str(cut), dying)
        with pytest.raises(SystemExit):
            sweeper(tmp_path / str(cut), pool, n_trials=10).sweep([*LINE])
        second = FakePool(tmp_path / str(cut), score)
        sweeper(tmp_path / str(cut), second, n_trials=10).sweep([*LINE])
        assert [*pool.launched[:cut], *second.launched] == whole.launched


def test_the_same_line_in_a_second_terminal_is_refused_and_leaves_the_trials_alone(tmp_path: Path) -> None:
    def score(job: dict[str, str]) -> float:
        with pytest.raises(InputError, match="in use by another sweep"):
            sweeper(tmp_path, Launcher(lambda job: 0.0), n_trials=2).sweep([*LINE])
        return 1.0

    sweeper(tmp_path, FakePool(tmp_path, score), n_trials=2).sweep([*LINE])
    assert [trial.value for trial in study_in(tmp_path).trials] == [1.0, 1.0]


def test_the_lock_of_a_killed_search_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "optuna.log.lock").symlink_to(tmp_path / "optuna.log")
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail("waited"))
    sweeper(tmp_path, FakePool(tmp_path, lambda job: 1.0), n_trials=1).sweep([*LINE])


def test_searches_on_full_disks_end_in_a_sentence_and_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def score(job: dict[str, str]) -> float:
        if len(pool.launched) == 3:
            monkeypatch.setattr(optuna.storages.journal.JournalFileBackend, "append_logs", full)
        return 1.0

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    pool = FakePool(tmp_path, score)
    with pytest.raises(StorageError, match=r"optuna\.log cannot be written"):
        sweeper(tmp_path, pool, n_trials=5).sweep([*LINE])
    monkeypatch.undo()
    with (tmp_path / "optuna.log").open("a") as file:
        file.write('{"op_code": 6, "worker')  # as a full disk leaves it
    second = FakePool(tmp_path, lambda job: 1.0)
    sweeper(tmp_path, second, n_trials=5).sweep([*LINE])
    assert len({frozenset(job) for job in [*pool.launched, *second.launched]}) == 5


def test_searches_with_other_seeds_draw_other_values(tmp_path: Path) -> None:
    drawn = []
    for seed in (0, 1):
        pool = FakePool(tmp_path / str(seed), lambda job: 1.0)
        sweeper(tmp_path / str(seed), pool, n_trials=3, seed=seed).sweep(["x=interval(0,1)"])
        drawn += [tuple(job) for job in pool.launched]
    assert len({*drawn}) == 6


def test_a_job_that_is_worse_than_the_others_is_pruned(tmp_path: Path) -> None:
    pool = FakePool(tmp_path, lambda job: 91.0, lambda number: 90.0 if number < 6 else 10.0)
    sweeper(tmp_path, pool, n_trials=8, pruner="median").sweep([*LINE])
    assert [trial.state.name for trial in study_in(tmp_path).trials] == ["COMPLETE"] * 6 + ["PRUNED"] * 2


def test_a_search_with_several_objectives_keeps_the_trade_offs(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.create(Identity(base={}, swept=(), words=()))

    class Pool(Launcher):
        def launch(self, jobs: Sequence[Sequence[str]], initial_job_idx: int) -> list[JobReturn]:
            returns = super().launch(jobs, initial_job_idx)
            for job, returned in zip(jobs, returns, strict=True):
                (record,) = ledger.enter([(job, "job")])
                (tmp_path / record.folder).mkdir(exist_ok=True)
                (tmp_path / record.folder / "metrics.jsonl").write_text(
                    f'{{"step": 10, "perf/step_ms": {100 * returned.return_value}}}\n'
                )
                ledger.end(record, State.done, objective=returned.return_value)
            return returns

    searching = sweeper(tmp_path, Pool(lambda job: float(job["x"])), n_trials=4)
    searching.settings.sweep = {"objectives": ["score", "seconds"]}
    searching.sweep(["x=1,2,3,4"])
    study = study_in(tmp_path)
    assert [direction.name for direction in study.directions] == ["MAXIMIZE", "MINIMIZE"]
    assert all(trial.values[1] == pytest.approx(trial.values[0]) for trial in study.trials)
    assert len(study.best_trials) == 4, "each is better in one of the two"
    for objectives in (["score", "kwh"], ["kwh"]):  # no job has it
        searching = sweeper(tmp_path, Pool(lambda job: 1.0), n_trials=1, study_name=objectives[0])
        searching.settings.sweep = {"objectives": objectives}
        searching.sweep(["x=1,2"])
        (trial,) = study_in(tmp_path).trials
        assert trial.user_attrs["error"] == f"the job has no {' and '.join(objectives)}"


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("x=interval(0.1,1)", "FloatDistribution(high=1.0, log=False, low=0.1, step=None)"),
        ("x=tag(log,interval(1e-5,0.1))", "FloatDistribution(high=0.1, log=True, low=1e-05, step=None)"),
        ("x=int(interval(8,64))", "IntDistribution(high=64, log=False, low=8, step=1)"),
        ("x=tag(log,int(interval(8,64)))", "IntDistribution(high=64, log=True, low=8, step=1)"),
        ("x=interval(1,2.5)", "FloatDistribution(high=2.5, log=False, low=1.0, step=None)"),
        ("x=interval(0.5,3)", "FloatDistribution(high=3.0, log=False, low=0.5, step=None)"),
        ("x=range(1,8,2)", "IntDistribution(high=7, log=False, low=1, step=2)"),
        ("x=tag(log,range(1,8))", "IntDistribution(high=7, log=True, low=1, step=1)"),
        ("x=range(3,4)", "CategoricalDistribution(choices=('3',))"),
        ("x=range(0.5,2,0.5)", "CategoricalDistribution(choices=('0.5', '1.0', '1.5'))"),
        ("x=a,b", "CategoricalDistribution(choices=('a', 'b'))"),
        ("x=choice([1,2],[3])", "CategoricalDistribution(choices=('[1,2]', '[3]'))"),
    ],
)
def test_spaces_are_written_in_hydras_words(word: str, expected: str) -> None:
    assert str(distribution(OverridesParser.create().parse_override(word))) == expected


@pytest.mark.parametrize(
    ("settings", "words", "sentence"),
    [
        ({"sampler": "nope"}, LINE, "hydra.sweeper.sampler is 'nope', expected one of tpe, random, qmc"),
        ({"n_trials": 0}, LINE, "hydra.sweeper.n_trials is 0, expected a whole number from 1"),
        ({"storage": "nonsense"}, LINE, r"storage: nonsense cannot be used \(\w+: .*; start anew with sweep\.resume"),
        ({"pruner": "median"}, LINE, "hydra.sweeper.pruner works with hydra/launcher=pool"),
        ({}, ("seed=1",), "has nothing to search; add for example optimizer.lr=0.001,0.01"),
        ({}, ("x=interval(1,0)",), r"'x=interval\(1,0\)' is not a search space"),
        ({}, ("x=interval(nan,1)",), r"'x=interval\(nan,1\)' is not a search space \(an end is not finite\)"),
        ({}, ("x=interval(1,inf)",), r"'x=interval\(1,inf\)' is not a search space \(an end is not finite\)"),
        ({}, ("x=tag(log,choice(1,2))",), "tag log: only log is known, for interval"),
        ({}, ("x=tag(log,range(1,8,2))",), "is not a search space"),
        ({}, ("x=tag(log,range(0.1,1.0,0.1))",), "a range of whole numbers can have it"),
        ({}, ("x=tag(lgo,interval(0.1,1))",), "tag lgo: only log is known"),
    ],
)
def test_what_cannot_be_searched_is_refused(
    tmp_path: Path, settings: dict[str, Any], words: tuple[str, ...], sentence: str
) -> None:
    with pytest.raises(InputError, match=sentence):
        sweeper(tmp_path, SimpleNamespace(), **settings).sweep([*words])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", ["garbage", '{"op_code": 4, "worker_id": "x"}'])
def test_a_damaged_study_is_one_sentence(tmp_path: Path, text: str) -> None:
    sweeper(tmp_path, Launcher(lambda job: 1.0), n_trials=1).sweep([*LINE])
    with (tmp_path / "optuna.log").open("a") as file:
        file.write(text + "\n")
    with pytest.raises(InputError, match=r"optuna\.log of the sweep cannot be used \(\w+: .*sweep\.resume=new"):
        sweeper(tmp_path, Launcher(lambda job: 1.0), n_trials=2).sweep([*LINE])


@pytest.mark.parametrize(
    ("space", "storage"),
    [
        (("kind=a,c",), None),
        (("kind=a,b", "x=interval(0,2)"), None),
        (("x=interval(0,1)",), "sqlite:///{}/shared.db"),
    ],
)
def test_a_changed_space_is_a_new_study_also_where_all_trials_have_run(
    tmp_path: Path, storage: str | None, space: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    place = storage and storage.format(tmp_path)
    for words, trials, says in ((LINE[1:], 2, False), (LINE[1:], 0, False), (space, 2, True), (space, 0, False)):
        pool = FakePool(tmp_path / "sweep", lambda job: 1.0)
        sweeper(tmp_path / "sweep", pool, n_trials=2, storage=place).sweep([*words])
        assert len(pool.launched) == trials or "kind=a,c" in words, "kind=a may be known from the first study"
        assert ("a new study begins" in capsys.readouterr().out) == says


def test_each_sweep_has_its_own_study_in_a_storage_that_they_share(tmp_path: Path) -> None:
    storage = f"sqlite:///{tmp_path}/shared.db"
    for folder in ("one", "other", "one"):
        pool = FakePool(tmp_path / folder, lambda job: 1.0)
        sweeper(tmp_path / folder, pool, n_trials=1, storage=storage, study_name="mine").sweep([*LINE])
        assert len(pool.launched) == 1
        if folder == "one":  # the second time, another sweep is made at its place
            shutil.rmtree(tmp_path / folder)
    studies = optuna.get_all_study_summaries(storage)
    assert [(study.n_trials, study.study_name.partition("-")[0]) for study in studies] == [(1, "mine")] * 3


def test_a_study_is_of_one_sweep_direction_space_and_set_of_objectives(tmp_path: Path) -> None:
    identity = Identity(base={}, swept=(), words=())
    parse = OverridesParser.create().parse_override
    x, kind, wide = (distribution(parse(word)) for word in ("x=interval(0,1)", "kind=a,b", "x=interval(0,2)"))
    space = {"x": x, "kind": kind}
    names = []
    for other, objectives, own in (
        (identity, ["score"], space),
        (identity, ["score"], dict(reversed(space.items()))),
        (replace(identity, id="another"), ["score"], space),
        (replace(identity, direction=Direction.minimize), ["score"], space),
        (identity, ["score", "seconds"], space),
        (identity, ["seconds", "score"], space),
        (identity, ["score"], space | {"x": wide}),
        (identity, ["score"], {"x": x}),
    ):
        searching = sweeper(tmp_path, Launcher(lambda job: 1.0), study_name="mine")
        searching.settings.sweep = {"objectives": objectives}
        names.append(searching._name(other, own))
    assert names[0] == names[1]
    assert len({*names}) == len(names) - 1


def test_a_journal_that_is_cut_behind_any_line_counts_each_trial_once(tmp_path: Path) -> None:
    whole = FakePool(tmp_path / "whole", lambda job: float(job["x"]))
    sweeper(tmp_path / "whole", whole, n_trials=3).sweep([*LINE])
    lines = (tmp_path / "whole" / "optuna.log").read_text().splitlines(keepends=True)
    for number in range(1, len(lines)):
        copy = tmp_path / str(number)
        shutil.copytree(tmp_path / "whole", copy)
        (copy / "optuna.log").write_text("".join(lines[:number]))
        again = FakePool(copy, lambda job: float(job["x"]))
        sweeper(copy, again, n_trials=3).sweep([*LINE])
        assert again.launched == [], "the ledger knows the jobs"
        trials = study_in(copy).trials
        values = [trial.value for trial in trials if trial.state.name == "COMPLETE"]
        assert values == [float(job[-2].partition("=")[2]) for job in whole.launched]
        assert {trial.state.name for trial in trials} <= {"COMPLETE", "FAIL"}, "one that was cut has ended too"


@pytest.mark.parametrize(
    ("call", "storage"),
    [("ask", None), ("set_user_attr", None), ("tell", None), ("tell", "sqlite:///{}/shared.db")],
)
def test_a_search_that_is_killed_in_any_call_of_optuna_counts_each_trial_once(
    tmp_path: Path, storage: str | None, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, jobs = storage and storage.format(tmp_path), list[list[str]]()
    owner: Any = optuna.Trial if call == "set_user_attr" else optuna.Study
    original, calls = getattr(owner, call), itertools.count(1)
    for is_late in (False, True, False, True, False):  # killed before the call does something, and behind it

        def dying(*arguments: Any, is_late: bool = is_late, **named: Any) -> Any:
            is_last = next(calls) % 3 == 0
            returned = original(*arguments, **named) if is_late or not is_last else None
            if is_last:
                raise SystemExit(9)
            return returned

        monkeypatch.setattr(owner, call, dying)
        pool = FakePool(tmp_path / "sweep", lambda job: 1.0)
        with suppress(SystemExit):
            sweeper(tmp_path / "sweep", pool, n_trials=7, storage=place).sweep([*LINE])
        jobs += pool.launched
    monkeypatch.undo()
    last = FakePool(tmp_path / "sweep", lambda job: 1.0)
    sweeper(tmp_path / "sweep", last, n_trials=7, storage=place).sweep([*LINE])
    whole = FakePool(tmp_path / "whole", lambda job: 1.0)
    sweeper(tmp_path / "whole", whole, n_trials=7).sweep([*LINE])
    assert [*jobs, *last.launched] == whole.launched


def test_without_optuna_the_sentence_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install 'lockstep\[optuna\]'"):
        sweeper(tmp_path, SimpleNamespace()).sweep([*LINE])


@pytest.mark.parametrize(
    ("block", "sentence"),
    [
        (
            {"objectives": ["score", "seconds"]},
            "pruner prunes by the score alone; remove it, or other sweep.objectives",
        ),
        ({"objectives": ["seconds"]}, "pruner prunes by the score alone; remove it, or other sweep.objectives"),
        ({"halving": 3}, "sweep.halving is for all combinations; use hydra.sweeper.pruner=halving instead"),
    ],
)
def test_a_search_is_cut_by_its_own_pruner_alone_and_by_the_score(
    tmp_path: Path, block: dict[str, Any], sentence: str
) -> None:
    searching = sweeper(tmp_path / "sweep", FakePool(tmp_path / "sweep", lambda job: 1.0), pruner="median")
    searching.settings.sweep = block
    with pytest.raises(InputError, match=sentence):
        searching.sweep([*LINE])


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"n_jobs": 0}, "hydra.sweeper.n_jobs is 0, expected a whole number from 1"),
        ({"seed": -1}, "hydra.sweeper.seed is -1, expected a whole number from 0"),
        ({"pruner": "nope"}, "hydra.sweeper.pruner is 'nope', expected one of none, median, halving"),
        ({"direction": "up"}, "hydra.sweeper.direction is 'up', expected one of maximize, minimize"),
        ({"n_trials": 1.5}, "hydra.sweeper.n_trials is 1.5, expected a whole number from 1"),
    ],
)
def test_a_wrong_setting_of_a_search_is_named_with_what_it_may_be(
    tmp_path: Path, settings: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(InputError, match=f"^{sentence}"):
        sweeper(tmp_path, SimpleNamespace(), **settings).sweep([*LINE])


@pytest.mark.parametrize(
    ("sampler", "kind"), [("tpe", "TPESampler"), ("random", "RandomSampler"), ("qmc", "QMCSampler")]
)
def test_a_sampler_is_optunas_with_the_seed_of_the_search_and_of_its_trials(
    sampler: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds: dict[tuple[int, int], int] = {}

    def noted(seed: int) -> str:
        seeds[searching.study["seed"], ended] = seed
        return kind

    monkeypatch.setattr(optuna.samplers, kind, noted)
    for own, ended in ((0, 0), (0, 1), (1, 0), (1, 1), (0, 0)):
        searching = sweeper(tmp_path, SimpleNamespace(), sampler=sampler, seed=own)
        assert searching._sampler(ended) == kind
    expected = {pair: int(np.random.SeedSequence(pair).generate_state(1)[0]) for pair in seeds}
    assert seeds == expected
    assert len({*seeds.values()}) == 4


@pytest.mark.parametrize(
    ("pruner", "kind"), [("none", "NopPruner"), ("median", "MedianPruner"), ("halving", "SuccessiveHalvingPruner")]
)
def test_a_search_has_the_pruner_that_it_names_and_the_directions_of_its_objectives(
    pruner: str, kind: str, tmp_path: Path
) -> None:
    for objectives, score, directions in (
        (["score"], Direction.minimize, ["MINIMIZE"]),
        (["score", "seconds"], Direction.maximize, ["MAXIMIZE", "MINIMIZE"]),
        ([], Direction.maximize, ["MAXIMIZE"]),
    ):
        optuna.logging.set_verbosity(optuna.logging.INFO)
        searching = sweeper(tmp_path, SimpleNamespace(), pruner=pruner)
        searching.settings.sweep = {"objectives": objectives}
        study = searching._open(tmp_path, f"of {len(objectives)}", score)
        assert type(study.pruner).__name__ == kind
        assert optuna.logging.get_verbosity() == optuna.logging.WARNING
        assert [direction.name for direction in study.directions] == directions
        assert study.study_name == f"of {len(objectives)}"


def test_each_job_has_the_words_that_the_search_does_not_draw(tmp_path: Path) -> None:
    launcher = Launcher(lambda job: 1.0)
    sweeper(tmp_path / "of" / "two", launcher, n_trials=2).sweep(["a=1", "x=5", "x=1,2", "b={c: 3}", "+d=4"])
    assert [job[:-1] for job in launcher.launched] == [["a=1", "b={c: 3}", "+d=4"]] * 2
    assert {job[-1] for job in launcher.launched} <= {"x=1", "x=2"}
    words = ["x={y: 3}", "x.y=1,2", "x.y=7"]
    again = Launcher(lambda job: 1.0)
    sweeper(tmp_path / "again", again, n_trials=1).sweep(words[:2])
    assert again.launched[0][0] == "x={y: 3}"
    of_group = Launcher(lambda job: 1.0)
    sweeper(tmp_path / "group", of_group, n_trials=1).sweep(["x=5", "x={y: 3}", "x=1,2"])
    assert of_group.launched[0][:-1] == ["x={y: 3}"], "it adds keys to any option"


def test_a_search_tells_the_launcher_how_many_trials_have_ended_and_keeps_its_settings(tmp_path: Path) -> None:
    class Pool(SimpleNamespace):
        def launch(self, jobs: Sequence[Sequence[str]], initial_job_idx: int) -> list[JobReturn]:
            calls.append((jobs, initial_job_idx, self.search))
            return []

    calls: list[Any] = []
    pool = Pool(search=None, identify=len)
    searching = sweeper(tmp_path, pool, n_trials=9, n_jobs=4, pruner="median")
    searching.settings.sweep = {"retry": True}
    searching.sweep([*LINE])
    ((jobs, first, search),) = calls
    assert (jobs, first, search.trials, search.at_once) == ([], 0, 9, 4)
    assert (search.retries, search.prunes, search.identify, search.fixed) == (True, True, len, ["seed=3"])
    assert ({*search.space}, search.objectives, search.left) == ({"x", "kind"}, ["score"], 9)
    sweeper(tmp_path / "other", other := Pool(search=None), n_trials=9).sweep([*LINE])
    assert (other.search.retries, other.search.prunes, other.search.identify) == (False, False, job_key)
    identity = Ledger(tmp_path).identity()
    assert (identity.swept, identity.direction) == (("kind", "x"), Direction.maximize)


def test_a_launcher_without_a_ledger_hears_the_number_of_its_first_job(tmp_path: Path) -> None:
    class Numbered(Launcher):
        def launch(self, jobs: Sequence[Sequence[str]], initial_job_idx: int) -> list[JobReturn]:
            numbers.append((initial_job_idx, len(jobs)))
            return super().launch(jobs, initial_job_idx)

    numbers: list[tuple[int, int]] = []
    for trials in (3, 5):
        sweeper(tmp_path, Numbered(lambda job: 1.0), n_trials=trials, n_jobs=2).sweep([*LINE])
    assert numbers == [(0, 2), (2, 1), (3, 2)]


def test_the_error_of_a_job_ends_a_line_of_all_combinations() -> None:
    def launch(jobs: Any, initial_job_idx: int) -> list[JobReturn]:
        launched.append((jobs, initial_job_idx))
        return [JobReturn(status=JobStatus.FAILED, _return_value=KeyError("odd"))]

    launched: list[Any] = []
    grid = GridSweeper({})
    grid.setup(SimpleNamespace(launch=launch), OmegaConf.create({"hydra": {"sweeper": {}}}))
    with pytest.raises(KeyError, match="odd"):
        grid.sweep(["a=1,2"])
    assert launched == [([["a=1"], ["a=2"]], 0)]


def test_a_search_reports_each_evaluation_in_thousandths_of_the_steps_and_in_their_order(tmp_path: Path) -> None:
    class Trial(SimpleNamespace):
        def report(self, score: float, step: int) -> None:
            reported.append((step, score))

        def should_prune(self) -> bool:
            return False

    reported: list[tuple[int, float]] = []
    ledger, study = Ledger(tmp_path), optuna.create_study()
    search = of_two_trials(ledger, study, optuna.distributions.CategoricalDistribution(["a"]), retries=False)
    study.ask()
    (record,) = ledger.enter([(["x=a"], "x=a")])
    (tmp_path / record.folder).mkdir()
    (tmp_path / record.folder / "summary.json").write_text('{"steps": 16}')
    lines = [f'{{"step": {step}, "acc/val_top1": {score}}}\n' for step, score in ((1, 9.0), (4, 7.0), (16, 8.0))]
    (tmp_path / record.folder / "metrics.jsonl").write_text("".join(lines))
    search.prunes, search.open = True, {search.identify(["x=a"]): [Trial(number=0), None]}  # type: ignore[list-item]
    assert search.has_enough(record) is False
    assert reported == [(62, 9.0), (250, 7.0), (1000, 8.0)]
    assert search.has_enough(ledger.enter([(["x=b"], "x=b")])[0]) is False
    search.prunes = False
    reported.clear()
    assert (search.has_enough(record), reported) == (False, [])


@pytest.mark.parametrize("key", ["seed", "dataset.fold"])
def test_a_search_draws_no_seed_and_no_fold(key: str, tmp_path: Path) -> None:
    sentence = (
        f"so the luckiest {key} would win; give {key} one value, or sweep all combinations, with sweep.halving=3"
    )
    with pytest.raises(InputError, match=sentence):
        sweeper(tmp_path, Launcher(lambda job: 1.0)).sweep(["x=1,2", f"{key}=1,2"])
