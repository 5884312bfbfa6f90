"""The verdict on a run: what limits it, what to change, and what that brings."""

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from helpers import built, resolved
from lockstep.config.schema import Job
from lockstep.core.data_protocols import ImageLoader, Source
from lockstep.core.plan import Plan
from lockstep.core.world import World
from lockstep.data.datasets import CSV, Digits, Folder, Packed
from lockstep.data.loading import Resident, Streaming
from lockstep.diagnostics import verdict
from lockstep.diagnostics.settings import settings_to_try, tried
from lockstep.diagnostics.verdict import Advice, checklist, findings
from lockstep.models import Linear
from lockstep.strategy import DDP, Strict
from lockstep.training import dry_run
from lockstep.training.run_record import Evidence

PLAN = Plan(examples=1000, batch=64, total_steps=320, micro_batches=1, log_every=20, eval_every=16, save_every=16)


@functools.cache
def job() -> Job:
    composed = resolved("model=basicnet", "device=cpu", "launcher=inline", "launcher.threads=2")
    return replace(composed, loader=Streaming(workers=1))


def of_photos() -> Job:
    return replace(job(), dataset=Folder(path="photos"))


def evidence(**facts: Any) -> Evidence:
    """The evidence of a run that spends its time in steps, with these facts."""
    shares = {"forward": 0.4, "backward": 0.5, "optimizer": 0.1}
    usual: dict[str, Any] = {
        "job": job(),
        "world": World.solo(),
        "plan": PLAN,
        "model": nn.Conv2d(1, 1, 1),
        "cores": 8,
    }
    usual |= {"steps": 320, "shares": shares, "spread": dict.fromkeys(shares, 0.01), "mfu": 0.0}
    return Evidence(**{**usual, "hardware": {"cpu_cores": 1.0}, **facts})


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
        ({"shares": {"optimizer": 0.5, "forward": 0.5}, "spread": {}}, "batch=128", 1 / 0.75, "updates the weights"),
    ],
)
def test_verdicts_name_what_takes_most(facts: dict[str, Any], override: str | None, gain: float, words: str) -> None:
    ruling = verdict.verdict(evidence(**facts))
    assert words in ruling.sentence
    assert ruling.override == override
    assert ruling.gain == pytest.approx(gain)
    if override is not None:
        other = ", which makes it another run," * override.startswith(("batch=", "precision="))
        assert str(ruling).endswith(f"; {override}{other} should make the run {gain:.1f}x as fast")


@pytest.mark.parametrize("examples", [64, 65, 127, 128, 129, 1000])
def test_a_larger_batch_is_advised_only_where_the_split_has_as_many_examples(examples: int) -> None:
    plan = replace(PLAN, examples=examples)
    facts = evidence(plan=plan, shares={"optimizer": 0.5, "forward": 0.5}, spread={})
    item = next(item for item in checklist(facts) if item.item == "a larger batch")
    for override in (verdict.verdict(facts).override, item.override):
        assert override == ("batch=128" if examples >= 128 else None)
        if override is not None:
            assert int(override.removeprefix("batch=")) <= examples, "a larger one is refused"
    assert item.state == ("worth trying" if examples >= 128 else "not applicable")


@pytest.mark.parametrize(("gain", "named"), [(verdict.WORTH, True), (verdict.WORTH - 1e-9, False), (None, True)])
def test_a_change_that_brings_a_tenth_is_worth_it(
    gain: float | None, named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    finding = verdict.Advice(sentence="found", evidence="", gain=gain)
    monkeypatch.setattr(verdict, "findings", lambda evidence: iter([finding]))
    assert (verdict.verdict(evidence()) is finding) == named


def test_of_several_findings_the_largest_gain_is_named() -> None:
    shares = {"data": 0.3, "evaluation": 0.2, "forward": 0.5}
    facts = evidence(shares=shares)
    overrides = {finding.override for finding in findings(facts)}
    assert overrides == {"loader.workers=2", "train.eval_every=2ep"}
    assert verdict.verdict(facts).override == "loader.workers=2"


def test_a_gain_that_is_known_is_named_before_one_that_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    unknown, small, large = (Advice(sentence=str(gain), evidence="", gain=gain) for gain in (None, 1.2, 1.5))
    for order in ((unknown, small, large), (large, unknown, small), (small, unknown)):
        monkeypatch.setattr(verdict, "findings", lambda facts, order=order: [*order])
        assert verdict.verdict(evidence()) is (large if large in order else small)


@pytest.mark.parametrize("source", [Folder(path="photos"), CSV(path="a.csv"), Packed(path="pack"), Digits()])
@pytest.mark.parametrize("loader", [Streaming(workers=1), Resident()])
@pytest.mark.parametrize("cores", [1.0, 7.9])
def test_packing_is_advised_only_where_files_are_decoded(source: Source, loader: ImageLoader, cores: float) -> None:
    of_source, shares = replace(job(), dataset=source, loader=loader), {"data": 0.5, "forward": 0.5}
    ruling = verdict.verdict(evidence(job=of_source, shares=shares, hardware={"cpu_cores": cores}))
    read_while_it_trains = isinstance(loader, Streaming)
    decoded = isinstance(source, Folder | CSV)
    assert ("lockstep pack" in ruling.sentence) == (read_while_it_trains and decoded and cores > 7)
    assert ("waits for images" in ruling.sentence) == read_while_it_trains
    assert (ruling.override is not None) == (read_while_it_trains and cores < 7)


@pytest.mark.parametrize(("idle", "override"), [(0.2, None), (7.0, "loader.workers=3"), (60.0, "loader.workers=3")])
def test_cores_that_other_programs_use_are_not_idle(idle: float, override: str | None) -> None:
    """On a machine with more cores than this process may use, more than these can be idle."""
    hardware = {"cpu_cores": 1.0, "idle_cores": idle}
    ruling = verdict.verdict(evidence(shares={"data": 0.5, "forward": 0.5}, hardware=hardware))
    assert ruling.override == override


def test_the_ranks_of_a_machine_share_its_cores() -> None:
    world = World(rank=0, local_rank=0, size=40, local_size=4, device=torch.device("cpu"))
    shares = {"data": 0.5, "forward": 0.5}
    facts = evidence(job=of_photos(), world=world, shares=shares, hardware={"cpu_cores": 7.6})
    assert "lockstep pack" in verdict.verdict(facts).sentence
    assert verdict.verdict(facts).evidence.endswith(" 0.1 of 2 cores of a rank idle")
    facts = evidence(world=world, shares={"data": 0.9, "forward": 0.1})
    assert verdict.verdict(facts).override == "loader.workers=8", "four for each of its cores"
    (more_threads,) = findings(evidence(world=replace(world, local_size=8), shares={"forward": 1.0}))
    shown = (more_threads.sentence, more_threads.override)
    assert shown == ("2 threads of a rank share 1 core", "launcher.threads=1")
    of_four = replace(job(), launcher=replace(job().launcher, threads=4))  # type: ignore[type-var]
    (more_threads,) = findings(evidence(job=of_four, world=world, shares={"forward": 1.0}))
    assert more_threads.override == "launcher.threads=2"


@pytest.mark.parametrize("part", ["evaluation", "checkpoint"])
def test_what_happens_once_in_a_run_cannot_happen_less_often(part: str) -> None:
    plan = replace(PLAN, eval_every=161, save_every=161)
    assert not list(findings(evidence(plan=plan, shares={part: 0.5, "forward": 0.5})))


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


@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
@pytest.mark.parametrize("part", ["optimizer", "communication"])
def test_a_part_of_the_steps_is_advised_on_only_as_far_as_it_is_certain(part: str, share: float) -> None:
    """By Amdahl's law, with half of the part that is certain."""
    for spread in (0.0, 0.1, share, 2 * share):
        ruling = verdict.verdict(evidence(shares={part: share, "forward": 1 - share}, spread={part: spread}))
        gain = 1 / (1 - max(0.0, share - spread) / 2)
        if gain >= 1.1:
            assert ruling.gain == pytest.approx(gain)
        else:
            assert str(ruling).startswith("nothing could be measured: the timed steps differ too much")
            assert (ruling.gain, ruling.override) == (None, None)


@pytest.mark.parametrize("part", ["data", "evaluation", "checkpoint", "communication", "slowest_rank", "optimizer"])
def test_a_run_of_few_steps_says_that_nothing_could_be_measured(part: str) -> None:
    ruling = verdict.verdict(evidence(steps=10, shares={part: 0.7, "step": 0.3}, spread={}))
    assert str(ruling) == "nothing could be measured: 10 steps are too few, 50 are enough"
    few = {item.item: item for item in checklist(evidence(steps=10, shares={"data": 0.9, "step": 0.1}, spread={}))}
    assert few["workers and prefetch"].override is None


@pytest.mark.parametrize("precision", ["bf16", "bf16_pure"])
@pytest.mark.parametrize("steps", [10, 320])
def test_bfloat16_without_instructions_for_it_is_named_without_a_trial(
    monkeypatch: pytest.MonkeyPatch, precision: str, steps: int
) -> None:
    slow = replace(job(), precision=built(f"precision={precision}").precision)
    for has in (False, True):
        monkeypatch.setattr("lockstep.runtime.host.has_bfloat16", lambda has=has: has)
        ruling = verdict.verdict(evidence(job=slow, steps=steps))
        assert (ruling.override == "precision=fp32") == (not has)
    monkeypatch.setattr("lockstep.runtime.host.has_bfloat16", lambda: False)
    assert verdict.verdict(evidence()).override is None, "float32 needs none"
    on_gpu = evidence(job=slow, steps=steps, world=World.solo("cuda:0"))
    assert verdict.verdict(on_gpu).override is None


def test_the_checklist_says_what_is_done_what_is_worth_trying_and_what_does_not_apply() -> None:
    items = {item.item: item for item in checklist(evidence())}
    states = {"channels_last": "worth trying", "torch.compile": "worth trying", "workers and prefetch": "done"}
    states |= dict.fromkeys(("TF32", "cudnn.benchmark"), "not applicable")
    assert {item: items[item].state for item in states} == states
    assert items["channels_last"].reason == "lockstep doctor tries it"
    assert items["torch.compile"].override == "model.compile=true"
    waiting = {item.item: item for item in checklist(evidence(shares={"data": 0.5, "forward": 0.5}))}
    assert waiting["workers and prefetch"].override == "loader.workers=3"
    plain = {item.item: item for item in checklist(evidence(model=nn.Linear(1, 1)))}
    assert plain["channels_last"].reason == "the model has no convolutions"


@pytest.mark.parametrize(
    ("name", "precision", "state", "ratio"),
    [
        ("NVIDIA A100-SXM4-80GB", "fp32", "worth trying", "8.0x"),  # 156 and 19.5 TFLOPS in NVIDIA's data sheet
        ("NVIDIA H100 80GB HBM3", "fp32", "worth trying", "7.4x"),  # 494 and 67
        ("NVIDIA A100-SXM4-80GB", "tf32", "done", "8.0x"),
        ("NVIDIA A100-SXM4-80GB", "bf16", "not applicable", ""),
        ("Tesla V100-SXM2-16GB", "fp32", "not applicable", ""),  # has no TF32
    ],
)
def test_what_float32_costs_on_a_gpu_with_tf32_is_in_the_checklist(
    monkeypatch: pytest.MonkeyPatch, name: str, precision: str, state: str, ratio: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    of_gpu = replace(job(), precision=built(f"precision={precision}").precision)
    items = {item.item: item for item in checklist(evidence(job=of_gpu, world=World.solo("cuda:0")))}
    assert items["TF32"].state == state
    assert ratio in items["TF32"].reason
    assert items["TF32"].override == ("precision=tf32" if state == "worth trying" else None)


def test_the_settings_to_try_are_one_change_of_the_present_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.runtime.host.has_bfloat16", lambda: True)
    variants = settings_to_try(job(), World.solo(), nn.Conv2d(1, 1, 1), cores=2)
    assert set(variants) == {"precision=bf16", "model.channels_last=true", "batch=128", "launcher.threads=1"}
    assert variants["batch=128"] == replace(job(), batch=128)
    monkeypatch.setattr("lockstep.runtime.host.has_bfloat16", lambda: False)
    half = replace(job(), precision=built("precision=bf16").precision)
    assert "precision=fp32" in settings_to_try(half, World.solo(), nn.Linear(1, 1), cores=1)
    assert "model.channels_last=true" not in settings_to_try(half, World.solo(), nn.Linear(1, 1), cores=1)


@pytest.mark.parametrize(("local_size", "threads"), [(1, {1, 8}), (2, {1, 4}), (4, {1, 2}), (16, {1})])
def test_the_ranks_of_a_machine_share_its_cores_in_the_settings_to_try(local_size: int, threads: set[int]) -> None:
    world = World(rank=0, local_rank=0, size=16, local_size=local_size, device=torch.device("cpu"))
    of_two = replace(job(), launcher=replace(job().launcher, threads=3))  # type: ignore[type-var]
    words = settings_to_try(of_two, world, nn.Linear(1, 1), cores=8)
    assert {word for word in words if "threads" in word} == {f"launcher.threads={number}" for number in threads}


def test_trials_leave_everything_as_it_was() -> None:
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    small = replace(job(), batch=4, model=Linear())
    one_thread = replace(job().launcher, threads=1)  # type: ignore[type-var]
    settings = {"batch=32": replace(small, batch=32), "threads": replace(small, launcher=one_thread)}
    gains = tried(small, settings, World.solo(), seconds=1000)
    assert set(gains) == {"batch=32", "threads"}
    assert all(gain.factor > 0 for gain in gains.values())
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads
    assert tried(small, settings, World.solo(), seconds=0.0) == {}


@pytest.mark.parametrize(
    ("present", "other", "factor", "spread", "is_clear"),
    [
        ([1, 1, 1, 1, 1], [2, 2, 2, 2, 2], 0.5, 0.0, True),
        ([8, 8, 8, 8, 8], [1, 1, 1, 1, 1], 8.0, 0.0, True),
        ([1, 4, 1, 3, 1], [1, 4, 1, 3, 1], 1.0, 0.0, False),  # other work that slows both in turn hides nothing
        ([2, 8, 2, 6, 2], [1, 4, 1, 3, 1], 2.0, 0.0, True),
        ([1.7, 1, 2, 1.7, 1], [1, 1, 1, 1, 1], 1.7, 1.0, False),  # as far apart as the gain is large
        ([1, 1, 1, 1, 1], [1, 1, 2, 1, 1], 1.0, 0.5, False),
    ],
)
def test_a_gain_is_clear_where_it_is_larger_than_the_spread_of_its_turns(
    monkeypatch: pytest.MonkeyPatch, present: Any, other: Any, factor: float, spread: float, is_clear: bool
) -> None:
    turns = [seconds for pair in zip(present, other, strict=True) for seconds in pair]
    seconds = iter([1.0, 1.0, 1.0, *turns])  # the warm-ups, and the step by which the room is measured
    monkeypatch.setattr(dry_run, "timed", lambda step, device: next(seconds))
    gain = tried(job(), {"other": job()}, World.solo(), seconds=1000)["other"]
    assert gain == pytest.approx((factor, spread))
    assert gain.is_clear == is_clear


def test_a_gain_is_of_images_and_not_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dry_run, "dry_run_step", lambda job, world, examples: examples)
    monkeypatch.setattr(dry_run, "timed", lambda step, device: {PLAN.batch: 1.0, 2 * PLAN.batch: 1.5}[step])
    double = replace(job(), batch=2 * PLAN.batch)
    assert tried(job(), {"double": double}, World.solo(), seconds=1000)["double"].factor == pytest.approx(2 / 1.5)


def test_a_setting_without_room_in_memory_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    small, usual = replace(job(), batch=4), dry_run.dry_run_step

    def short_of_memory(job: Job, world: World, examples: int) -> Any:
        def fail() -> None:
            raise torch.OutOfMemoryError("out of memory")

        return fail if examples > 4 else usual(job, world, examples)

    monkeypatch.setattr(dry_run, "dry_run_step", short_of_memory)
    assert tried(small, {"batch=8": replace(small, batch=8)}, World.solo(), seconds=30) == {}
    assert tried(replace(small, batch=8), {"batch=4": small}, World.solo(), seconds=30) == {}


@pytest.mark.parametrize(
    ("facts", "override"),
    [
        (
            {"plan": replace(PLAN, eval_every=160), "shares": {"evaluation": 0.5, "forward": 0.5}},
            "train.eval_every=20ep",
        ),
        ({"steps": 50, "shares": {"slowest_rank": 0.3, "evaluation": 0.4, "forward": 0.3}}, "train.eval_every=2ep"),
        ({"hardware": {"cpu_cores": 7.5}, "shares": {"data": 0.5, "forward": 0.5}}, "loader.workers=3"),
        ({"world": World.solo("cuda:0"), "hardware": {"gpu_util": 90.0}, "mfu": 12.0}, "model.compile=true"),
    ],
    ids=["twice in a run", "fifty steps", "half a core", "90 %"],
)
def test_a_limit_that_is_just_reached_counts(facts: dict[str, Any], override: str) -> None:
    assert override in [finding.override for finding in findings(evidence(**facts))]


def test_as_many_threads_as_cores_and_sixteen_images_of_a_rank_are_enough() -> None:
    assert [*findings(evidence(cores=2, shares={"forward": 1.0}))] == []
    of_two = World(rank=0, local_rank=0, size=2, local_size=2, device=torch.device("cpu"))
    for batch, state in ((32, "done"), (30, "worth trying")):
        alone = replace(job(), batch=batch, strategy=DDP(sync_batchnorm=False))
        facts = evidence(job=alone, world=of_two, model=nn.BatchNorm2d(1))
        items = {item.item: item.state for item in checklist(facts)}
        assert items["synchronised batch norm"] == state, batch


def advice(**facts: Any) -> list[tuple[str | None, float | None]]:
    return [(finding.override, finding.gain) for finding in findings(evidence(**facts))]


@pytest.mark.parametrize("part", ["data", "evaluation", "checkpoint", "slowest_rank", "optimizer", "communication"])
def test_a_part_is_considered_from_a_twentieth_of_the_time_on(part: str) -> None:
    for share, shown in ((0.05, True), (0.049, False)):
        shares = {part: share, "forward": 1 - share}
        assert bool(advice(shares=shares, spread={})) == shown


@pytest.mark.parametrize("steps", [49, 50])
def test_the_data_are_judged_from_fifty_steps_on(steps: int) -> None:
    assert len(advice(steps=steps, shares={"data": 0.5, "forward": 0.5}, spread={})) == (steps == 50)


def test_the_time_that_more_workers_save_is_what_they_can_read() -> None:
    """Eight threads of two cores each read as fast as before; they cannot hide nine tenths of the time."""
    reader = replace(job(), loader=Streaming(workers=6))
    shares = {"data": 0.9, "forward": 0.1}
    assert advice(job=reader, cores=2, shares=shares) == [("loader.workers=48", pytest.approx(1 / (6 / 48)))]
    none = replace(job(), loader=Streaming(workers=0))
    assert advice(job=none, shares={"data": 0.1, "forward": 0.9}) == [("loader.workers=3", pytest.approx(1 / 0.9))]
    one_core = replace(job(), launcher=replace(job().launcher, threads=1))  # type: ignore[type-var]
    few = advice(job=one_core, cores=1, hardware={"cpu_cores": 0.25}, shares=shares)
    assert few == [("loader.workers=4", pytest.approx(1 / 0.25))]


def test_cores_of_which_nothing_is_known_are_not_idle() -> None:
    (finding,) = findings(evidence(hardware={}, shares={"data": 0.5, "forward": 0.5}))
    assert (finding.override, finding.gain) == (None, 2.0)
    assert finding.evidence == "1 workers, 0.0 of 8 cores of a rank idle"
    over = findings(evidence(hardware={"cpu_cores": 9.0}, shares={"data": 0.5, "forward": 0.5}))
    assert next(over).evidence.startswith("1 workers, 0.0 of 8")


@pytest.mark.parametrize(("every", "override"), [(16, "2ep"), (20, "40"), (24, "3ep"), (4, "8")])
def test_a_longer_interval_is_given_in_epochs_where_it_is_whole_ones(every: int, override: str) -> None:
    plan = replace(PLAN, eval_every=every)
    shares = {"evaluation": 0.5, "forward": 0.5}
    assert advice(plan=plan, shares=shares) == [(f"train.eval_every={override}", pytest.approx(1 / 0.75))]


def test_a_change_without_a_known_gain_may_help() -> None:
    known = verdict.Advice(sentence="it waits", evidence="", override="a=1")
    assert str(known) == "it waits; a=1 may help"
    assert str(replace(known, another_run=True)) == "it waits; a=1, which makes it another run, may help"
    assert str(replace(known, gain=2.0)) == "it waits; a=1 should make the run 2.0x as fast"
    assert str(replace(known, override=None, gain=2.0)) == "it waits"


@pytest.mark.parametrize(("steps", "words"), [(1, "1 step is too few, 50 are"), (49, "49 steps are too few, 50 are")])
def test_a_run_of_too_few_steps_says_how_many_it_had(steps: int, words: str) -> None:
    ruling = verdict.verdict(evidence(steps=steps, spread={"forward": 0.125}))
    assert str(ruling).endswith(f"{words} enough")
    assert ruling.evidence == "the shares of a step are exact to 12 %"
    assert verdict.verdict(evidence(steps=steps, spread={})).evidence == ""
    assert str(verdict.verdict(evidence(steps=50, spread={}))).startswith("nothing stands out")


@pytest.mark.parametrize(("spread", "measured"), [(0.1, True), (2 / 11, False), (5.0, False)])
def test_shares_that_are_too_uncertain_say_nothing(spread: float, measured: bool) -> None:
    """A share of 2/11 would be worth a change: 1 / (1 - 1/11) is 1.1."""
    ruling = verdict.verdict(evidence(spread={"forward": spread}))
    assert str(ruling).startswith("nothing stands out" if measured else "nothing could be measured: the timed steps")
    assert verdict.verdict(evidence(shares={}, spread={})).evidence == "the largest part is step with 0 %"
    assert verdict.verdict(evidence()).evidence == "the largest part is backward with 50 %"


@pytest.mark.parametrize(
    ("hardware", "mfu", "shares", "override"),
    [
        ({"gpu_util": 90.0}, 19.9, {"forward": 1.0}, "model.compile=true"),
        ({"gpu_util": 90.0}, 20.0, {"forward": 1.0}, None),
        ({"gpu_util": 89.9}, 19.9, {"forward": 1.0}, "train.cuda_graph=true"),
        ({"gpu_util": 40.0}, 0.0, {"forward": 0.91, "augmentation": 0.09}, "train.cuda_graph=true"),
        ({"gpu_util": 40.0}, 0.0, {"forward": 0.89, "augmentation": 0.11}, None),
    ],
)
def test_what_keeps_a_gpu_busy_is_told_at_its_borders(
    hardware: dict[str, float], mfu: float, shares: dict[str, float], override: str | None
) -> None:
    world = World.solo("cuda:0")
    assert [name for name, _ in advice(world=world, hardware=hardware, mfu=mfu, shares=shares)] == [override] * bool(
        override
    )
    compiled = replace(job(), model=replace(job().model, compile=True))
    captured = replace(compiled, train=replace(job().train, cuda_graph=True))
    again = advice(job=captured, world=world, hardware=hardware, mfu=mfu, shares=shares)
    assert again == [(None, None)] * bool(override), "it is done already"


def test_the_checklist_says_of_each_point_whether_it_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    def states(**facts: Any) -> dict[str, tuple[str, str | None]]:
        return {item.item: (item.state, item.override) for item in checklist(evidence(**facts))}

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    monkeypatch.setattr("lockstep.runtime.host.has_bfloat16", lambda: False)
    assert states()["mixed precision"] == ("not applicable", None)
    assert states(world=World.solo("cuda:0"))["mixed precision"] == ("worth trying", "precision=bf16")
    monkeypatch.setattr("lockstep.runtime.host.has_bfloat16", lambda: True)
    assert states()["mixed precision"] == ("worth trying", "precision=bf16")
    for precision, state in (("fp16", "done"), ("bf16", "done"), ("tf32", "worth trying")):
        narrow = replace(job(), precision=built(f"precision={precision}").precision)
        assert states(job=narrow)["mixed precision"][0] == state, precision
    fast = replace(job().model, compile=True, channels_last=True)
    tuned = replace(job(), model=fast, train=replace(job().train, cudnn_benchmark=True))
    on_gpu = states(job=tuned, world=World.solo("cuda:0"))
    done = ("channels_last", "torch.compile", "cudnn.benchmark")
    assert {name: on_gpu[name] for name in done} == dict.fromkeys(done, ("done", None))
    untuned = states(world=World.solo("cuda:0"))["cudnn.benchmark"]
    assert untuned == ("worth trying", "train.cudnn_benchmark=true")
    linear = states(world=World.solo("cuda:0"), model=nn.Linear(1, 1))
    assert (linear["cudnn.benchmark"][0], linear["channels_last"][0]) == ("not applicable",) * 2
    assert states()["synchronised batch norm"][0] == "not applicable", "the model has none"
    of_two = World(rank=0, local_rank=0, size=2, local_size=2, device=torch.device("cpu"))
    small: dict[str, Any] = {"model": nn.BatchNorm2d(1), "job": replace(job(), batch=4)}
    assert states(**small)["synchronised batch norm"] == ("done", None), "one rank has all images"
    apart = {**small, "job": replace(small["job"], strategy=DDP(sync_batchnorm=False))}
    assert states(**apart, world=of_two)["synchronised batch norm"][1] == "strategy.sync_batchnorm=true"
    assert states(**apart)["synchronised batch norm"][0] == "done"
    for strategy in (DDP(sync_batchnorm=True), Strict()):
        together = {**small, "job": replace(small["job"], strategy=strategy)}
        assert states(**together, world=of_two)["synchronised batch norm"][0] == "done"


def test_a_share_of_the_time_is_in_percent_in_the_checklist() -> None:
    items = {item.item: item.reason for item in checklist(evidence(shares={"data": 0.5, "forward": 0.5}))}
    assert items["workers and prefetch"] == "1 workers, 50 % of the time waiting"


def test_layers_with_four_dimensions_are_convolutions() -> None:
    for model, has in ((nn.Conv2d(1, 1, 1), True), (nn.Conv1d(1, 1, 1), False), (nn.Conv3d(1, 1, 1), False)):
        assert verdict.has_convolutions(model) == has
        assert verdict.has_convolutions(model.requires_grad_(False)) == has, "also where they are frozen"
    without = replace(job(), model=replace(job().model, channels_last=None))
    assert not verdict.takes_channels_last(without, nn.Conv2d(1, 1, 1)), "a model of an extension has no such key"


def test_a_setting_to_try_is_one_that_the_job_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.runtime.host.has_bfloat16", lambda: False)
    convolution = nn.Conv2d(1, 1, 1)
    usual = settings_to_try(job(), World.solo(), convolution, cores=2)
    assert {*usual} == {"model.channels_last=true", "batch=128", "launcher.threads=1"}
    on_gpu = settings_to_try(job(), World.solo("cuda:0"), convolution, cores=2)
    assert {*on_gpu} == {"precision=bf16", "model.channels_last=true", "batch=128"}
    last = replace(job(), model=replace(job().model, channels_last=True))
    assert "model.channels_last=true" not in settings_to_try(last, World.solo(), convolution, cores=2)
    pure = replace(job(), precision=built("precision=bf16_pure").precision)
    assert "precision=fp32" not in settings_to_try(pure, World.solo(), convolution, cores=2), "its weights are bf16"
    large = replace(job(), batch=len(job().dataset.train()))
    assert not [word for word in settings_to_try(large, World.solo(), convolution, cores=2) if "batch" in word]


@pytest.mark.parametrize(("seconds", "is_tried"), [(11.0, True), (10.9, False)])
def test_a_setting_is_tried_if_its_turns_fit_into_the_time(
    seconds: float, is_tried: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step takes a second, so the warm-up and five turns of two steps take eleven."""
    monkeypatch.setattr(dry_run, "timed", lambda step, device: 1.0)
    monkeypatch.setattr("lockstep.diagnostics.settings.time.perf_counter", lambda: 0.0)
    assert bool(tried(job(), {"other": job()}, World.solo(), seconds=seconds)) == is_tried


OF_FOUR = World(rank=0, local_rank=0, size=8, local_size=4, device=torch.device("cpu"))


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({"plan": replace(PLAN, eval_every=20), "shares": {"evaluation": 0.5, "forward": 0.5}}, "one every 20 steps"),
        ({"plan": replace(PLAN, save_every=40), "shares": {"checkpoint": 0.5, "forward": 0.5}}, "one every 40 steps"),
        ({"world": OF_FOUR, "shares": {"slowest_rank": 0.5, "forward": 0.5}}, "8 ranks"),
        (
            {"world": OF_FOUR, "shares": {"communication": 0.5, "forward": 0.5}},
            "8 ranks, 8 images of a rank at a time",
        ),
        ({"world": OF_FOUR, "cores": 4, "shares": {"forward": 1.0}}, "4 cores, 4 ranks on this machine"),
        (
            {"world": World.solo("cuda:0"), "hardware": {"gpu_util": 40.0}, "shares": {"forward": 0.6, "step": 0.36}},
            "96 % of the time are steps",
        ),
    ],
    ids=["evaluation", "checkpoint", "slowest rank", "communication", "threads", "GPU"],
)
def test_the_evidence_of_a_finding_has_its_own_figures(facts: dict[str, Any], expected: str) -> None:
    (finding,) = findings(evidence(**facts))
    assert finding.evidence == expected


@pytest.mark.parametrize(("work", "gain"), [(1.0, 2.0), (0.6, 1 / 0.7)])
def test_float32_halves_the_steps_of_a_processor_without_bfloat16(
    work: float, gain: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lockstep.runtime.host.has_bfloat16", lambda: False)
    slow = replace(job(), precision=built("precision=bf16").precision)
    (finding,) = findings(evidence(job=slow, steps=10, shares={"backward": work, "data": 1 - work}))
    assert finding.gain == pytest.approx(gain)
    assert finding.another_run
    assert finding.sentence == "this processor has no instructions for bf16"
    assert finding.evidence == "a step takes at least 2 times as long as in float32"


def test_the_points_of_the_checklist_have_their_order_and_their_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    monkeypatch.setattr("lockstep.runtime.host.has_bfloat16", lambda: True)

    def reasons(**facts: Any) -> dict[str, str]:
        return {item.item: item.reason for item in checklist(evidence(**facts))}

    trial = "lockstep doctor tries it"
    usual = {
        "mixed precision": trial,
        "TF32": "no float32 on a GPU that is known to be faster in TF32",
        "workers and prefetch": "1 workers, 0 % of the time waiting",
        "a larger batch": f"{trial}; it makes another run",
        "synchronised batch norm": "the model has no batch norm",
        "channels_last": trial,
        "cudnn.benchmark": "cuDNN is for convolutions on a GPU",
        "torch.compile": "takes about a minute at the first start",
    }
    assert [*reasons().items()] == [*usual.items()]
    monkeypatch.setattr("lockstep.runtime.host.has_bfloat16", lambda: False)
    other = reasons(plan=replace(PLAN, examples=1100, batch=551), world=OF_FOUR, model=nn.BatchNorm2d(1))
    assert other == usual | {
        "mixed precision": "this processor has no instructions for bfloat16",
        "a larger batch": "twice the batch is more than the 1,100 examples of the training split",
        "synchronised batch norm": "8 images of a rank at a time",
        "channels_last": "the model has no convolutions",
    }
    on_gpu = reasons(world=World.solo("cuda:0"))
    assert on_gpu == usual | {"cudnn.benchmark": "not the same bits every time"}


def test_each_setting_is_timed_with_its_own_threads_on_the_images_of_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    def timed(step: tuple[int, int], device: object) -> float:
        calls.append((*step, torch.get_num_threads()))
        return 1.0

    calls: list[tuple[int, ...]] = []
    monkeypatch.setattr(dry_run, "dry_run_step", lambda job, world, examples: (world.size, examples))
    monkeypatch.setattr(dry_run, "timed", timed)
    one_thread = replace(job().launcher, threads=1)  # type: ignore[type-var]
    other = replace(job(), launcher=one_thread, batch=32)
    tried(job(), {"other": other}, replace(OF_FOUR, size=2, local_size=2), seconds=1000)
    present, changed = (1, 32, 2), (1, 16, 1)
    assert calls == [present, present, changed, *[present, changed] * 5]


@pytest.mark.parametrize(
    ("step", "batch", "seconds", "is_tried"),
    [(2.0, 64, 22.0, True), (2.0, 64, 21.9, False), (1.0, 128, 17.0, True), (1.0, 128, 16.9, False)],
)
def test_the_room_of_a_setting_is_in_steps_of_the_job(
    step: float, batch: int, seconds: float, is_tried: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With twice the batch, the warm-up takes two steps, and five turns take fifteen."""
    monkeypatch.setattr(dry_run, "dry_run_step", lambda job, world, examples: examples)
    monkeypatch.setattr(dry_run, "timed", lambda examples, device: step)
    monkeypatch.setattr("lockstep.diagnostics.settings.time.perf_counter", lambda: 0.0)
    assert bool(tried(job(), {"other": replace(job(), batch=batch)}, World.solo(), seconds=seconds)) == is_tried


def test_settings_that_do_not_fit_into_the_time_do_not_keep_others_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dry_run, "dry_run_step", lambda job, world, examples: examples)
    monkeypatch.setattr(dry_run, "timed", lambda examples, device: 1.0)
    monkeypatch.setattr("lockstep.diagnostics.settings.time.perf_counter", lambda: 0.0)
    settings = {"long": replace(job(), batch=128), "short": job()}
    assert [*tried(job(), settings, World.solo(), seconds=12.0)] == ["short"]
