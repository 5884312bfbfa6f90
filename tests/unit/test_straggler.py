"""Naming a slow rank from the step times of all ranks; the measurement itself is tested on real ranks."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch

from lockstep.core.world import World
from lockstep.telemetry.straggler import STEPS, Stragglers


def sentences(busy: list[list[float]], step_s: float) -> list[str]:
    """The sentences at the log points of a run, one point every `STEPS` steps; `busy` is by step and rank."""
    stragglers = Stragglers(World.solo())
    points = [torch.tensor(busy[at : at + STEPS]).double().T for at in range(0, len(busy), STEPS)]
    judged = [stragglers.judge(torch.stack([torch.full_like(times, step_s), times], 2)) for times in points]
    return [sentence for sentence in judged if sentence]


@pytest.mark.parametrize("ranks", [2, 3, 1000])
def test_a_slow_rank_is_named_once(ranks: int) -> None:
    (sentence,) = sentences([[0.05, 0.35, *[0.05] * (ranks - 2)]] * 3 * STEPS, 0.4)
    assert sentence.startswith("rank 1 is slow: at each step the others wait 300 of 400 ms for it")


def test_one_hiccup_hides_no_slow_rank_and_a_few_do_not_make_one() -> None:
    usual, slow = [0.05, 0.05, 0.05], [0.05, 0.05, 0.35]
    assert len(sentences([usual] + [slow] * (STEPS - 1), 0.4)) == 1
    hiccups = [[0.05, 3.0 if step % 3 == 0 else 0.05] for step in range(10 * STEPS)]
    assert sentences(hiccups, 0.1) == []
    assert sentences([busy[::-1] for busy in hiccups], 0.1) == []


@pytest.mark.parametrize(("busy", "step_s"), [([0.050, 0.070], 0.4), ([0.001, 0.009], 0.02)])
def test_a_small_difference_is_not_worth_a_word(busy: list[float], step_s: float) -> None:
    assert sentences([busy] * 10 * STEPS, step_s) == []


@pytest.mark.parametrize(("rank", "share"), [(0, 0.75), (1, 0.0), (2, 0.5)])
def test_a_rank_waits_for_the_slowest_one(rank: int, share: float) -> None:
    stragglers = Stragglers(replace(World.solo(), rank=rank, size=3))
    busy = torch.tensor([[0.1], [0.4], [0.2]]).double().expand(3, STEPS)
    for _ in range(2):
        stragglers.judge(torch.stack([torch.full_like(busy, 0.4), busy], 2))
    assert stragglers.waited_share == pytest.approx(share)


def test_a_step_is_timed_from_its_request_to_the_end_of_its_forward_pass() -> None:
    stragglers = Stragglers(replace(World.solo(), size=2))
    stragglers.start()
    time.sleep(0.01)
    stragglers.forward_done()
    stragglers.next_step()
    ((step_s, busy),) = stragglers.history
    assert step_s >= busy >= 0.01
    stragglers.forward_done()
    stragglers.next_step()
    assert stragglers.history[1][1] < busy, "the next step has a time of its own"
    assert stragglers.find() == ""
