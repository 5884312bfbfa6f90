"""What a job of a sweep is, whatever words say it, and which devices it has."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from helpers import composed
from lockstep.cli.needs import kind, needs_of
from lockstep.cli.run import run_job
from lockstep.config.components import build_job
from lockstep.config.composition import Invocation, jobs_of
from lockstep.core.errors import InputError
from lockstep.core.run import State
from lockstep.core.run_dir import RunDir
from lockstep.core.safe_write import Lock
from lockstep.job.resume import Resume
from lockstep.records.ledger import Identity, Ledger
from lockstep.sweeps.devices import Needs

CPU = Needs(cores=4)


def job(*words: str, machine: Needs = CPU, sweep: Path = Path("no-sweep")) -> Needs:
    return needs_of(OmegaConf.create({**composed(*words), "hydra": {"sweep": {"dir": str(sweep)}}}), machine)


@pytest.mark.parametrize(
    ("one", "two"),
    [
        *(([], words) for words in (["batch=64"], ["train={ema: null}"], ["seed=0", "epochs=20"])),
        *(([], words) for words in (["output_root=elsewhere"], ["sweep.retry=true"], ["name=other"])),
        *(([], words) for words in (["telemetry.report=never"], ["cost.usd_per_gpu_hour=2"], ["loader=streaming"])),
        *(([], words) for words in (["strategy=single"], ["launcher.threads=1"], ["strategy.sync_batchnorm=true"])),
        (["seed=5"], ["seed='5'"]),
        (["optimizer.lr=0.1"], ["optimizer.lr=1e-1"]),
        (["epochs=3", "train.ema=0.9"], ["train={ema: 0.9}", "epochs=3"]),
        (["metric=[f1]"], ["metric=f1"]),
    ],
    ids=str,
)
def test_a_default_or_another_spelling_makes_no_other_job(one: list[str], two: list[str]) -> None:
    assert job(*one).identity == job(*two).identity


@pytest.mark.parametrize("word", ["seed=1", "train.ema=0.9", "model=linear", "strategy.sync_batchnorm=false"])
def test_another_value_is_another_job(word: str) -> None:
    assert job(word).identity != job().identity


@pytest.mark.parametrize(
    "word", ["name=other", "telemetry.interval=5", "strategy=single", "launcher.threads=1", "loader=streaming"]
)
def test_another_value_of_a_key_that_the_sweep_varies_is_another_job(word: str, tmp_path: Path) -> None:
    Ledger(tmp_path).create(Identity(swept=(word.partition("=")[0],)))
    assert job(word, sweep=tmp_path).identity != job(sweep=tmp_path).identity


@pytest.mark.parametrize(
    ("words", "gpus"),
    [
        ([], 1),
        (["launcher.ranks=2"], 2),
        (["strategy=ddp"], 4),
        (["strategy=ddp", "launcher.ranks=2"], 2),
        (["strategy=dp", "device=cpu"], 0),
    ],
    ids=str,
)
def test_a_job_has_the_gpus_that_its_strategy_uses(words: list[str], gpus: int) -> None:
    assert job(*words, machine=Needs(gpus=4, cores=4)).gpus == gpus


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("a=1,2 b=3,4,5", "a=1 b=3|a=1 b=4|a=1 b=5|a=2 b=3|a=2 b=4|a=2 b=5"),
        ("a=1,2 a=3", "a=3"),
        ("a=3 b=1,2 a=4,5", "b=1 a=4|b=1 a=5|b=2 a=4|b=2 a=5"),
        ("+d={x:1} +d={y:2} a=1", "+d={x:1} +d={y:2} a=1"),
        ("d={x:1},{y:2} d={z:3}", "d={x:1} d={z:3}|d={y:2} d={z:3}"),
        ("d={x:1} d=e,f", "d={x:1} d=e|d={x:1} d=f"),
        ("a=range(0,3) ~b", "a=0 ~b|a=1 ~b|a=2 ~b"),
        ("+a=1,2 ++b=x", "+a=1 ++b=x|+a=2 ++b=x"),
        ("a='x,y',z", "a='x,y'|a=z"),
        ("hydra.sweeper.n=1 a=[1,2],[3]", "hydra.sweeper.n=1 a=[1,2]|hydra.sweeper.n=1 a=[3]"),
    ],
)
def test_the_last_word_of_a_key_counts_and_all_that_add_to_it(words: str, expected: str) -> None:
    assert [" ".join(job) for job in jobs_of(words.split())] == expected.split("|")


def test_a_job_that_resumes_another_run_is_refused_in_a_sweep() -> None:
    with pytest.raises(InputError, match="resume"):
        job("resume=latest")


def test_a_mistake_in_the_command_that_resumes_a_job_alone_leaves_the_record_of_the_job(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "sweep")
    ledger.create(Identity())
    (record,) = ledger.enter([(["seed=1"], "seed=1")])
    stopped = ledger.end(ledger.start(record), State.stopped, exit_code=75, error="stopped")
    folder, values = ledger.folder / record.folder, {**composed(), "epochs": 0}
    called = Invocation(overrides=("epochs=0",), sweep=False, folder=None, hydra="")
    own = {"composed": values, "values": values, "run": folder, "folder": folder, "overrides": called.overrides}
    with pytest.raises(InputError, match="epochs is 0"):
        run_job(Resume(invocation=called, may_fetch=True, **own), Lock())
    assert ledger.read(record) == stopped
    assert not folder.exists()


def resumed_job(folder: Path, *words: str, sweep: bool) -> float | None:
    """What the job of a run folder returns, as it is resumed by words of its own or by its sweep."""
    called = Invocation(overrides=words, sweep=sweep, folder=None, hydra="")
    own = {"composed": composed(), "values": composed(), "run": folder, "folder": folder}
    return run_job(Resume(invocation=called, may_fetch=True, **own, overrides=called.overrides), Lock())


@pytest.mark.parametrize(("before", "objective"), [(State.stopped, 3.0), (State.failed, 3.0), (State.done, 2.0)])
def test_a_job_resumed_alone_has_its_new_score_in_the_sweep_unless_it_was_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: State, objective: float
) -> None:
    monkeypatch.setattr("lockstep.cli.run._run_here", lambda resume, lock: 3.0)
    ledger = Ledger(tmp_path / "sweep")
    ledger.create(Identity())
    (record,) = ledger.enter([(["seed=1"], "seed=1")])
    RunDir.at(ledger.folder / record.folder)
    ended = ledger.end(ledger.start(record), before, objective=2.0 if before is State.done else None)
    assert resumed_job(ledger.folder / ended.folder, "epochs=30", sweep=False) == 3.0
    now = ledger.read(record)
    assert (now.state, now.objective) == (State.done, objective)
    assert before is not State.done or now == ended


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], 4),
        (["launcher.threads=1"], 1),
        (["launcher.threads=3"], 3),
        (["launcher.threads=2", "launcher.ranks=3", "strategy=ddp"], 6),
        (["launcher.ranks=3", "strategy=ddp"], 4),
    ],
    ids=str,
)
def test_a_job_without_a_gpu_has_the_cores_of_the_machine_or_the_threads_of_its_ranks(
    words: list[str], expected: int
) -> None:
    for of_job in (job(*words), job("device=cpu", *words, machine=Needs(gpus=2, cores=4))):
        assert (of_job.cores, of_job.gpus, of_job.submits, of_job.kind) == (expected, 0, False, "")


def test_a_job_is_built_with_the_objects_of_its_program(monkeypatch: pytest.MonkeyPatch) -> None:
    built_with: list[object] = []
    monkeypatch.setattr(
        "lockstep.cli.needs.components.build_job",
        lambda values, objects: built_with.append(objects) or build_job(values),
    )
    needs_of(OmegaConf.create({**composed(), "hydra": {"sweep": {"dir": "no-sweep"}}}), CPU, {"model": "net"})
    assert built_with == [{"model": "net"}]


def test_a_job_for_a_cluster_takes_nothing_here() -> None:
    of_job = job("launcher=slurm", "launcher.threads=2", machine=Needs(gpus=2, cores=4))
    assert (of_job.cores, of_job.gpus, of_job.submits, of_job.kind) == (0, 0, True, "")
    assert of_job.monitor == "top1"


@pytest.mark.parametrize(
    ("words", "monitor", "figures"),
    [
        ([], "top1", ["loss", "top1", "top5"]),
        (["monitor=loss", "metric=[f1]"], "-loss", ["loss", "top1", "top5", "f1"]),
        (["task=multilabel", "loss=bce"], "map", ["loss", "map", "f1", "subset_accuracy"]),
        (["task=regression", "loss=mse"], "-mae", ["loss", "mae", "rmse", "r2"]),
    ],
    ids=str,
)
def test_a_job_says_by_what_it_is_compared_and_what_its_evaluations_log(
    words: list[str], monitor: str, figures: list[str]
) -> None:
    assert (job(*words).monitor, [*job(*words).figures]) == (monitor, figures)


GPUS = Needs(gpus=2, cores=4)


@pytest.mark.parametrize(
    ("word", "is_one_kind"),
    [
        *((word, True) for word in ("seed=1", "optimizer.lr=0.5", "epochs=3", "name=x", "cost.usd_per_gpu_hour=1")),
        *((word, False) for word in ("batch=8", "model=linear", "dataset.input_size=16", "loader=streaming")),
        *((word, False) for word in ("train.micro_batches=2", "precision=fp64")),
    ],
)
def test_jobs_share_a_gpu_if_what_they_take_of_it_is_equal(word: str, is_one_kind: bool) -> None:
    shared = ("sweep.gpu_share=true",)
    usual, other = (job(*shared, *words, machine=GPUS) for words in ((), (word,)))
    assert usual.gpus == other.gpus == 1
    assert usual.kind
    assert (usual.kind == other.kind) == is_one_kind
    assert (job(word, machine=GPUS).kind, job(*shared, word).kind) == ("", ""), "only where it is asked for"


def test_the_order_of_the_keys_of_a_job_makes_no_other_kind() -> None:
    values = composed("sweep.gpu_share=true")
    assert kind(values) == kind(dict(reversed(values.items())))


@pytest.mark.parametrize(("forks", "submits", "launcher"), [(False, False, "pool"), (True, True, "pool")])
@pytest.mark.parametrize("of_program", [True, False])
def test_a_class_of_a_program_is_refused_where_no_job_is_forked_from_it(
    forks: bool, submits: bool, launcher: str, of_program: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lockstep.cli.needs.can_fork", lambda: forks)
    monkeypatch.setattr("lockstep.cli.needs.extensions.is_importable", lambda cls: not of_program)
    monkeypatch.setattr("lockstep.cli.needs.import_for_ranks", lambda job: None)
    words = ["launcher=slurm"] if submits else []

    def needs(chosen: str) -> Needs:
        choices = {"runtime": {"choices": {"hydra/launcher": chosen}}, "sweep": {"dir": "no-sweep"}}
        return needs_of(OmegaConf.create({**composed(*words), "hydra": choices}), CPU)

    if of_program:
        with pytest.raises(InputError, match=r"^only jobs that are forked on this machine have objects and classes"):
            needs(launcher)
        monkeypatch.setattr("lockstep.cli.needs.can_fork", lambda: True)
        words = []
        assert needs("pool").cores == 4
        with pytest.raises(InputError, match=r"^only jobs that are forked on this machine"):
            needs("basic")
    else:
        assert needs(launcher).submits is submits
        assert needs("basic").submits is submits


def test_a_job_of_a_running_sweep_leaves_its_record_to_the_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lockstep.cli.run._run_here", lambda resume, lock: 3.0)
    ledger = Ledger(tmp_path / "sweep")
    ledger.create(Identity())
    (record,) = ledger.enter([(["seed=1"], "seed=1")])
    running = ledger.start(record)
    assert resumed_job(ledger.folder / record.folder, sweep=True) == 3.0
    assert ledger.read(record) == running
