"""The verdict on a run: what limits it, what to change, and what that brings."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from helpers import built, resolved
from lockstep.config.schema import Job
from lockstep.core.plan import Plan
from lockstep.core.world import World
from lockstep.data.loading import Streaming
from lockstep.training import dry_run, verdict
from lockstep.training.dry_run import Setting, agreed, settings_to_try, times_as_long, tried
from lockstep.training.explain import checklist
from lockstep.training.verdict import Evidence, findings

PLAN = Plan(examples=1000, batch=64, total_steps=320, micro_batches=1, log_every=20, eval_every=16, save_every=16)


@functools.cache
def job() -> Job:
    composed = resolved("model=basicnet", "device=cpu", "launcher=inline", "launcher.threads=2")
    return replace(composed, loader=Streaming(workers=1))


def evidence(**facts: Any) -> Evidence:
    """The evidence of a run that spends its time in steps, with these facts."""
    usual: dict[str, Any] = {
        "job": job(),
        "world": World.solo(),
        "plan": PLAN,
        "model": nn.Conv2d(1, 1, 1),
        "shares": {"forward": 0.4, "backward": 0.5, "optimizer": 0.1},
        "hardware": {"cpu_cores": 1.0},
        "mfu": 0.0,
        "factors": {},
        "cores": 8,
    }
    return Evidence(**{**usual, **facts})


def test_a_run_that_computes_all_the_time_has_nothing_to_change() -> None:
    ruling = verdict.verdict(evidence())
    assert str(ruling) == "nothing stands out: 100 % of the time are the model's own steps"
    assert (ruling.gain, ruling.override) == (None, None)


@pytest.mark.parametrize(
    ("facts", "override", "gain", "words"),
    [
        # Two threads read twice as much, so that the steps are the limit again: they are 60 % of the time now.
        ({"shares": {"data": 0.4, "forward": 0.6}}, "loader.workers=3", 1 / 0.6, "waits for images in 40 %"),
        # 90 % of waiting would need 13 threads for the steps to be the limit.
        ({"shares": {"data": 0.9, "forward": 0.1}}, "loader.workers=13", 10.0, "waits for images in 90 %"),
        ({"shares": {"evaluation": 0.5, "forward": 0.5}}, "train.eval_every=2ep", 1 / 0.75, "evaluations take 50 %"),
        ({"shares": {"checkpoint": 0.4, "forward": 0.6}}, "checkpoint.every=2ep", 1 / 0.8, "checkpoints take 40 %"),
        ({"shares": {"communication": 0.5, "forward": 0.5}}, "batch=128", 1 / 0.75, "exchange gradients in 50 %"),
        ({"shares": {"slowest_rank": 0.5, "forward": 0.5}}, None, 2.0, "wait for the slowest one in 50 %"),
        ({"factors": {"precision=bf16": 2.0}}, "precision=bf16", 2.0, "steps compute in fp32"),
        (
            {"factors": {"launcher.threads=1": 1.5}, "shares": {"forward": 0.5, "evaluation": 0.01, "data": 0.04}},
            "launcher.threads=1",
            1 / (0.5 + 0.5 / 1.5),
            "threads are not the best number",
        ),
        ({"factors": {"model.channels_last=true": 1.3}}, "model.channels_last=true", 1.3, "order of memory"),
        ({"factors": {"batch=128": 1.6}}, "batch=128", 1.6, "the optimizer alone takes 10 %"),
    ],
)
def test_the_verdict_names_what_takes_most(
    facts: dict[str, Any], override: str | None, gain: float, words: str
) -> None:
    ruling = verdict.verdict(evidence(**facts))
    assert words in ruling.sentence
    assert ruling.override == override
    assert ruling.gain == pytest.approx(gain)
    if override is not None:
        assert f"{override} should make the run {gain:.1f}x as fast" in str(ruling)
        assert str(ruling).endswith(", and is another run") == override.startswith(("batch=", "precision="))


def test_of_several_findings_the_largest_gain_is_named() -> None:
    shares = {"data": 0.3, "evaluation": 0.2, "forward": 0.5}
    facts = evidence(shares=shares, factors={"precision=bf16": 3.0})
    overrides = {finding.override for finding in findings(facts)}
    assert overrides == {"loader.workers=2", "train.eval_every=2ep", "precision=bf16"}
    assert verdict.verdict(facts).override == "precision=bf16"


def test_where_the_cores_are_busy_more_workers_are_no_advice() -> None:
    facts = evidence(shares={"data": 0.5, "forward": 0.5}, hardware={"cpu_cores": 7.9})
    ruling = verdict.verdict(facts)
    assert "lockstep pack" in ruling.sentence
    assert ruling.override is None


def test_the_ranks_of_a_machine_share_its_cores() -> None:
    world = World(rank=0, local_rank=0, size=8, local_size=4, device=torch.device("cpu"))
    facts = evidence(world=world, shares={"data": 0.5, "forward": 0.5}, hardware={"cpu_cores": 7.6})
    assert "lockstep pack" in verdict.verdict(facts).sentence, "a rank has 2 cores, and 0.1 of them are idle"
    facts = evidence(world=world, shares={"data": 0.9, "forward": 0.1})
    assert verdict.verdict(facts).override == "loader.workers=8", "four for each of its cores"
    (more_threads,) = findings(evidence(world=replace(world, local_size=8)))
    assert (more_threads.sentence, more_threads.override) == (
        "2 threads of a rank share 1 core",
        "launcher.threads=1",
    )


def test_no_more_workers_are_advised_than_four_a_core() -> None:
    ruling = verdict.verdict(evidence(shares={"data": 0.9, "forward": 0.1}, cores=2))
    assert (ruling.override, ruling.gain) == ("loader.workers=8", 8.0)


@pytest.mark.parametrize("part", ["evaluation", "checkpoint"])
def test_what_happens_once_in_a_run_cannot_happen_less_often(part: str) -> None:
    plan = replace(PLAN, eval_every=161, save_every=161)
    assert not list(findings(evidence(plan=plan, shares={part: 0.5, "forward": 0.5})))


def test_small_things_are_not_worth_a_word() -> None:
    shares = {"data": 0.04, "evaluation": 0.03, "communication": 0.04, "forward": 0.89}
    assert verdict.verdict(evidence(shares=shares, factors={"precision=bf16": 1.05})).override is None


def test_a_small_gain_hides_no_advice_whose_gain_is_unknown() -> None:
    facts = evidence(cores=1, shares={"evaluation": 0.1, "forward": 0.9})
    gains = {finding.override: finding.gain for finding in findings(facts)}
    assert gains == {"train.eval_every=2ep": pytest.approx(1 / 0.95), "launcher.threads=1": None}
    assert verdict.verdict(facts).override == "launcher.threads=1"


@pytest.mark.parametrize(
    ("hardware", "mfu", "words", "override"),
    [
        ({"gpu_util": 98.0}, 12.0, "busy 98 % of the time, but at 12 % of its peak rate", "model.compile=true"),
        ({"gpu_util": 40.0}, 12.0, "busy 40 % of the time, and waits for the host", "train.cuda_graph=true"),
        ({"gpu_util": 98.0}, 50.0, "nothing stands out", None),
        ({"gpu_util": 98.0}, 0.0, "nothing stands out", None),
        ({}, 0.0, "nothing stands out", None),
    ],
)
def test_utilisation_of_a_gpu_is_called_what_it_is(
    hardware: dict[str, float], mfu: float, words: str, override: str | None
) -> None:
    ruling = verdict.verdict(evidence(world=World.solo("cuda:0"), hardware=hardware, mfu=mfu))
    assert words in str(ruling)
    assert ruling.override == override


def test_more_threads_than_cores_are_named_even_untried() -> None:
    crowded = replace(job(), launcher=replace(job().launcher, threads=16))  # type: ignore[type-var]
    ruling = verdict.verdict(evidence(job=crowded))
    assert str(ruling) == "16 threads of a rank share 8 cores; launcher.threads=8 may help"
    tried_too = evidence(job=crowded, factors={"launcher.threads=8": 1.4})
    assert str(verdict.verdict(tried_too)).endswith("launcher.threads=8 should make the run 1.4x as fast")


def test_the_checklist_says_what_is_done_what_is_worth_trying_and_what_does_not_apply() -> None:
    items = {item.item: item for item in checklist(evidence(factors={"model.channels_last=true": 1.01}))}
    assert items["channels_last"].state == "not applicable"
    assert items["channels_last"].reason == "tried: 1.01x in a step"
    assert (items["torch.compile"].state, items["torch.compile"].override) == ("worth trying", "model.compile=true")
    assert items["cudnn.benchmark"].state == "not applicable"
    assert items["workers and prefetch"].state == "done"
    waiting = {item.item: item for item in checklist(evidence(shares={"data": 0.5, "forward": 0.5}))}
    assert waiting["workers and prefetch"].override == "loader.workers=3"
    plain = {item.item: item for item in checklist(evidence(model=nn.Linear(1, 1)))}
    assert plain["channels_last"].reason == "the model has no convolutions"


@pytest.mark.parametrize(
    ("factors", "factor"), [([1.3, 1.2, 2.0], 1.3), ([0.5, 0.7, 0.9], 0.7), ([1.4, 1.3, 0.8], 1.0), ([1.2], 1.2)]
)
def test_trials_that_do_not_agree_say_nothing(factors: list[float], factor: float) -> None:
    assert agreed(factors) == factor


def test_the_settings_to_try_are_one_change_of_the_present_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.runtime.host.has_bfloat16", lambda: True)
    present, variants = settings_to_try(job(), World.solo(), nn.Conv2d(1, 1, 1), cores=torch.get_num_threads())
    threads = set() if torch.get_num_threads() == 1 else {"launcher.threads=1"}
    assert set(variants) == {"precision=bf16", "model.channels_last=true", "batch=128", *threads}
    assert variants["batch=128"] == replace(present, examples=128)
    monkeypatch.setattr("lockstep.runtime.host.has_bfloat16", lambda: False)
    half = replace(job(), precision=built("precision=bf16").precision)
    assert "precision=fp32" in settings_to_try(half, World.solo(), nn.Linear(1, 1), cores=1)[1]
    assert "model.channels_last=true" not in settings_to_try(half, World.solo(), nn.Linear(1, 1), cores=1)[1]


def test_trials_measure_settings_in_turns_and_leave_everything_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    present = Setting(job(), 4, torch.get_num_threads())
    twice = replace(present, examples=32)
    state = torch.get_rng_state()
    factors = tried(present, {"batch=32": twice, "threads": replace(present, threads=1)}, device=CPU, seconds=30)
    assert set(factors) == {"batch=32", "threads"}
    assert 0.3 < factors["batch=32"] < 30
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == present.threads
    assert tried(present, {"batch=32": twice}, device=CPU, seconds=0.0) == {}


def test_settings_are_compared_by_images_and_not_by_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dry_run, "timed", lambda step, device: 0.001)
    present = Setting(job(), 4, torch.get_num_threads())
    assert tried(present, {"batch=32": replace(present, examples=32)}, device=CPU, seconds=30) == {"batch=32": 8.0}


def test_a_setting_without_room_in_memory_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    present = Setting(job(), 4, 1)
    usual = dry_run.dry_run_step

    def short_of_memory(job: Job, world: World, examples: int) -> Any:
        if examples > 4:
            raise torch.OutOfMemoryError("out of memory")
        return usual(job, world, examples)

    monkeypatch.setattr(dry_run, "dry_run_step", short_of_memory)
    assert tried(present, {"batch=8": replace(present, examples=8)}, device=CPU, seconds=30) == {}


CPU = torch.device("cpu")


def test_how_long_a_format_takes_is_tried_before_the_first_step() -> None:
    factor = times_as_long(replace(job(), precision=built("precision=fp64").precision), World.solo())
    assert factor is not None
    assert factor > 0  # clocks on a shared machine say no more
