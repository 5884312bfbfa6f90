"""What a job of a sweep is, whatever words say it, and which devices it has."""

import pytest
from omegaconf import OmegaConf

from helpers import composed
from lockstep.cli.run import needs_of
from lockstep.core.errors import InputError
from lockstep.sweep.devices import Needs

CPU = Needs(cores=4)


def job(*words: str, machine: Needs = CPU) -> Needs:
    return needs_of(OmegaConf.create(composed(*words)), machine)


@pytest.mark.parametrize(
    ("one", "two"),
    [
        *(([], words) for words in (["batch=64"], ["train={ema: null}"], ["seed=0", "epochs=20"])),
        *(([], words) for words in (["output_root=elsewhere"], ["sweep.retry=true"])),
        (["seed=5"], ["seed='5'"]),
        (["optimizer.lr=0.1"], ["optimizer.lr=1e-1"]),
        (["epochs=3", "train.ema=0.9"], ["train={ema: 0.9}", "epochs=3"]),
        (["metric=[f1]"], ["metric=f1"]),
    ],
    ids=str,
)
def test_a_default_or_another_spelling_makes_no_other_job(one: list[str], two: list[str]) -> None:
    assert job(*one).identity == job(*two).identity


@pytest.mark.parametrize("word", ["seed=1", "train.ema=0.9", "model=linear", "name=other"])
def test_another_value_is_another_job(word: str) -> None:
    assert job(word).identity != job().identity


@pytest.mark.parametrize(
    ("words", "gpus"),
    [([], 1), (["strategy=ddp"], 4), (["strategy=ddp", "launcher.ranks=2"], 2), (["strategy=dp", "device=cpu"], 0)],
    ids=str,
)
def test_a_job_has_the_gpus_that_its_strategy_uses(words: list[str], gpus: int) -> None:
    assert job(*words, machine=Needs(gpus=4, cores=4)).gpus == gpus


def test_a_job_that_resumes_another_run_is_refused_in_a_sweep() -> None:
    with pytest.raises(InputError, match="resume"):
        job("resume=latest")
