"""The state of an optimizer is restored to the bit, with the options of the resuming run, and only where it fits."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from timm.optim import Lookahead, get_optimizer_info, list_optimizers
from torch import nn

from lockstep.checkpoint.state import optimizer_state, restore_optimizer
from lockstep.core.world import World
from lockstep.optim.muon import Muon
from lockstep.optim.optimizers import SGD, Adam, AdamW, Timm
from lockstep.strategy.zero import ZeROOptimizer
from thread_ranks import ThreadRanks

# Prefixes of the optimizers that cannot be built, or cannot step, without a CUDA device.
CUDA_ONLY = ("bnb", "fused")
TIMM = {
    get_optimizer_info(name).opt_class: name
    for name in list_optimizers()
    if not get_optimizer_info(name).second_order and not name.startswith(CUDA_ONLY)
}


class Trained:
    """A small network of fixed weights and its optimizer."""

    def __init__(self, optimizer: Any, memory_format: torch.memory_format = torch.contiguous_format) -> None:
        torch.manual_seed(0)
        layers = (nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 5))
        self.model = nn.Sequential(*layers).double().to(memory_format=memory_format)
        self.optimizer: torch.optim.Optimizer = optimizer.build(self.model)
        self.generator = torch.Generator().manual_seed(1)

    def train(self, steps: int) -> Trained:
        for _ in range(steps):
            torch.manual_seed(2)  # the trainer seeds each step too: some optimizers draw noise
            for parameter in self.model.parameters():
                # The gradient has the memory layout of the weight, as autograd's have.
                drawn = torch.randn(parameter.shape, dtype=parameter.dtype, generator=self.generator)
                parameter.grad = torch.empty_like(parameter).copy_(drawn)
            self.optimizer.step()
        return self

    def saved(self) -> dict[str, Any]:
        """The optimizer's part of a checkpoint, through a file."""
        file = io.BytesIO()
        torch.save(optimizer_state(self.optimizer, self.model), file)
        file.seek(0)
        loaded: dict[str, Any] = torch.load(file, weights_only=True)
        return loaded

    def resumed(self, saved: dict[str, Any], like: Trained) -> Trained:
        """Resume from the saved state of `like`."""
        restore_optimizer(self.optimizer, self.model, saved)
        self.model.load_state_dict(like.model.state_dict())
        self.generator.set_state(like.generator.get_state())
        return self

    def weights(self) -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in self.model.parameters()]


def options(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


@pytest.mark.filterwarnings("ignore:It is highly recommended to have 'opt_einsum'")
@pytest.mark.parametrize("opt", TIMM.values())
def test_every_optimizer_of_timm_goes_on_as_if_it_had_not_stopped(opt: str) -> None:
    with torch.compiler.set_stance("force_eager"):  # one optimizer compiles its step, which takes seconds
        option = Timm(opt=opt, lr=0.01, weight_decay=0.1)  # in two groups, each with its own counter
        whole = Trained(option).train(3)
        assert {group["weight_decay"] for group in whole.optimizer.param_groups} == {0.0, 0.1}
        resumed = Trained(option).resumed(whole.saved(), whole)
        for expected, actual in zip(whole.train(2).weights(), resumed.train(2).weights(), strict=True):
            assert torch.equal(expected, actual)


AHEAD = [
    option(lookahead=3, lookahead_alpha=0.4, lr=0.1, weight_decay=0.1) for option in (SGD, Adam, AdamW, Muon, Timm)
]


@pytest.mark.parametrize("optimizer", AHEAD, ids=repr)
def test_look_ahead_is_that_of_timm_to_the_bit(optimizer: Any) -> None:
    ours, theirs = Trained(optimizer), Trained(replace(optimizer, lookahead=None, lookahead_alpha=0.5))
    base, initial = theirs.optimizer, theirs.weights()
    theirs.optimizer = Lookahead(base, alpha=0.4, k=3)
    for runs in (ours, theirs):
        runs.train(1)
    for parameter, slow in zip(theirs.model.parameters(), initial, strict=True):
        base.state[parameter]["lookahead_slow_buff"] = slow  # as in the paper
    for expected, actual in zip(theirs.train(7).weights(), ours.train(7).weights(), strict=True):
        assert torch.equal(expected, actual)


@pytest.mark.parametrize("stop", [1, 3, 4])
@pytest.mark.parametrize("optimizer", AHEAD, ids=repr)
def test_look_ahead_resumes_to_the_bit_from_any_step(optimizer: Any, stop: int) -> None:
    whole = Trained(optimizer).train(stop)
    resumed = Trained(optimizer).resumed(whole.saved(), whole)
    for expected, actual in zip(whole.train(4).weights(), resumed.train(4).weights(), strict=True):
        assert torch.equal(expected, actual)


@pytest.mark.parametrize(
    ("before", "today"),
    [
        (SGD(), SGD(momentum=0.5, nesterov=True, weight_decay=0.1)),
        (SGD(weight_decay=0.1), SGD(weight_decay=0.2, decay_all=True)),
        (Adam(), Adam(betas=[0.5, 0.9], eps=1e-3, weight_decay=0.1)),
        (AdamW(), AdamW(weight_decay=0.0)),
        (Muon(), Muon(momentum=0.5, sgd_momentum=0.3, weight_decay=0.1, iterations=3, fixed_norm=True)),
        (Muon(weight_decay=0.1), Muon(head_lr=0.5, weight_decay=0.0)),
        (Timm(opt="lamb"), Timm(opt="lamb", weight_decay=0.1, options={"betas": [0.5, 0.9], "eps": 1e-3})),
        (Timm(opt="sgdw"), Timm(opt="sgdw", momentum=0.5)),
    ],
    ids=repr,
)
def test_a_resume_obeys_every_option_of_today_and_keeps_what_was_gathered(before: Any, today: Any) -> None:
    whole = Trained(before).train(2)
    resumed = Trained(today).resumed(whole.saved(), whole)
    counters = {"step"} if isinstance(before, Timm) else set()
    for group, fresh in zip(options(resumed.optimizer), options(Trained(today).optimizer), strict=True):
        assert {key: value for key, value in group.items() if key not in counters} == fresh
    there, here = whole.saved()["state"], resumed.saved()["state"]
    assert here.keys() == there.keys()
    assert all(torch.equal(here[name][key], there[name][key]) for name in there for key in there[name])
    resumed.train(1)


def test_a_run_without_momentum_goes_on_with_it_from_zero_and_vice_versa(capsys: pytest.CaptureFixture[str]) -> None:
    plain = Trained(SGD(momentum=0.0)).train(2)
    Trained(SGD(momentum=0.9)).resumed(plain.saved(), plain).train(1)
    assert "no optimizer state for 6 parameters (0.weight, ...)" in capsys.readouterr().out
    heavy = Trained(SGD(momentum=0.9)).train(2)
    resumed = Trained(SGD(momentum=0.0)).resumed(heavy.saved(), heavy)
    assert not resumed.optimizer.state
    resumed.train(1)


@pytest.mark.parametrize("optimizer", [SGD(), Adam(), AdamW(), Muon(), Timm(opt="lamb")], ids=repr)
def test_momenta_lie_in_memory_as_their_weights_do_whatever_layout_they_had(optimizer: Any) -> None:
    whole = Trained(optimizer).train(2)
    resumed = Trained(optimizer, torch.channels_last).resumed(whole.saved(), whole)
    for parameter, gathered in resumed.optimizer.state.items():
        for value in gathered.values():
            assert not isinstance(value, torch.Tensor) or value.dim() == 0 or value.stride() == parameter.stride()
    for expected, actual in zip(whole.train(2).weights(), resumed.train(2).weights(), strict=True):
        torch.testing.assert_close(expected, actual, rtol=1e-10, atol=1e-12)


# What a state is changed to: `w` is the state of a weight, `s` that of all, `k` a key.
WRONG: dict[str, Callable[[dict[str, Any], dict[str, Any], str], Any]] = {
    "another shape": lambda w, s, k: w.update({k: torch.zeros(7, dtype=torch.float64)}),
    "another weight's": lambda w, s, k: w.update({k: s["3.weight"][k].clone().reshape(-1)}),
    "no tensor": lambda w, s, k: w.update({k: "momentum"}),
    "nothing": lambda w, s, k: w.pop(k),
    "more": lambda w, s, k: w.update({"more": w[k]}),
    "another parameter": lambda w, s, k: s.update({"7.weight": s.pop("0.weight")}),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize(
    ("optimizer", "key"), [(SGD(), "momentum_buffer"), (AdamW(), "exp_avg_sq"), (Muon(), "momentum_buffer")], ids=repr
)
def test_a_state_that_does_not_fit_is_refused_before_a_kernel_sees_it(optimizer: Any, key: str, wrong: str) -> None:
    saved = Trained(optimizer).train(1).saved()
    WRONG[wrong](saved["state"]["0.weight"], saved["state"], key)
    fresh = Trained(optimizer)
    with pytest.raises((RuntimeError, ValueError, TypeError)):
        fresh.resumed(saved, fresh)


def test_each_group_goes_on_with_its_own_count() -> None:
    option = Timm(opt="lamb", lr=0.01, weight_decay=0.1)
    saved = Trained(option).train(2).saved()
    for number, group in enumerate(saved["param_groups"]):
        group["step"] = 5 + number
    fresh = Trained(option)
    restore_optimizer(fresh.optimizer, fresh.model, saved)
    assert [group["step"] for group in fresh.optimizer.param_groups] == [5, 6]


def test_momenta_that_only_some_layers_have_are_kept() -> None:
    class Partly(SGD):
        def build(self, model: nn.Module) -> torch.optim.Optimizer:
            first, *later = model.parameters()
            return torch.optim.SGD([{"params": [first], "momentum": 0.9}, {"params": later}], lr=0.1)

    whole = Trained(Partly()).train(2)
    assert [*whole.saved()["state"]] == ["0.weight"]
    resumed = Trained(Partly()).resumed(whole.saved(), whole)
    for expected, actual in zip(whole.train(2).weights(), resumed.train(2).weights(), strict=True):
        assert torch.equal(expected, actual)


def test_a_frozen_parameter_in_a_group_leaves_the_others_their_names() -> None:
    class OfAll(SGD):
        def build(self, model: nn.Module) -> torch.optim.Optimizer:
            next(model.parameters()).requires_grad_(False)
            return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    whole = Trained(OfAll()).train(2)
    names = dict(whole.model.named_parameters())
    assert whole.saved()["param_groups"][0]["params"] == [*names]
    for name, entries in whole.saved()["state"].items():
        assert torch.equal(entries["momentum_buffer"], whole.optimizer.state[names[name]]["momentum_buffer"])
    resumed = Trained(OfAll()).resumed(whole.saved(), whole)
    assert all(map(torch.equal, whole.train(2).weights(), resumed.train(2).weights()))


def test_a_shared_parameter_has_its_first_name() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    groups = optimizer_state(SGD().build(model), model)["param_groups"]
    assert sorted(name for group in groups for name in group["params"]) == ["0.bias", "0.weight", "1.bias"]


class Paired(torch.optim.SGD):
    """An optimizer that keeps a pair of tensors for each parameter."""

    kind: type[Any] = tuple

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                first, second = self.state[weight].get("pair", (torch.zeros(()), torch.zeros(2, 3).T))
                self.state[weight]["pair"] = self.kind([first + 1, second + 2])


@pytest.mark.parametrize("kind", [tuple, list])
def test_a_pair_of_a_state_stays_a_pair_and_has_two(kind: type[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    class OfPairs(SGD):
        def build(self, model: nn.Module) -> torch.optim.Optimizer:
            return Paired(model.parameters(), lr=0.1)

    monkeypatch.setattr(Paired, "kind", kind)
    saved, fresh = Trained(OfPairs()).train(3).saved(), Trained(OfPairs())
    for entries in saved["state"].values():
        entries["pair"] = kind(tensor.contiguous() for tensor in entries["pair"])
    restore_optimizer(fresh.optimizer, fresh.model, saved)
    for entries in fresh.optimizer.state.values():
        first, second = entries["pair"]
        assert (type(entries["pair"]), float(first), second.tolist()) == (kind, 3.0, [[6.0, 6.0]] * 3)
        assert second.stride() == (1, 3), "in the layout of this optimizer"
    saved["state"]["3.bias"]["pair"] = saved["state"]["3.bias"]["pair"][:1]
    with pytest.raises(ValueError, match=r"shorter|longer"):
        restore_optimizer((fresh := Trained(OfPairs())).optimizer, fresh.model, saved)


class Counting(torch.optim.SGD):
    """An optimizer that keeps a number beside the states and the groups."""

    steps = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps += 1
        super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "steps": self.steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.steps = state_dict.pop("steps")
        super().load_state_dict(state_dict)


def test_what_an_optimizer_keeps_beside_states_and_groups_goes_on() -> None:
    class OfCounts(SGD):
        def build(self, model: nn.Module) -> torch.optim.Optimizer:
            return Counting(model.parameters(), lr=0.1, momentum=0.9)

    whole = Trained(OfCounts()).train(3)
    resumed = Trained(OfCounts()).resumed(whole.saved(), whole).train(1)
    assert resumed.saved()["steps"] == 4


def test_an_invalid_count_of_steps_is_refused() -> None:
    saved = Trained(AdamW()).train(1).saved()
    saved["state"]["0.weight"]["step"] = torch.zeros(1000)
    fresh = Trained(AdamW())
    with pytest.raises(RuntimeError, match=r"shape \[\] doesn't match"):
        fresh.resumed(saved, fresh)


def test_a_first_step_that_a_loss_scaler_skips_leaves_the_momenta_at_zero() -> None:
    trained = Trained(SGD(lr=0.1))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for parameter in trained.model.parameters():
        parameter.grad = torch.full_like(parameter, float("inf"))
    scaler.scale(torch.zeros(1))  # a scaler has no state before its first loss
    scaler.unscale_(trained.optimizer)
    scaler.step(trained.optimizer)
    assert all(not state["momentum_buffer"].any() for state in trained.optimizer.state.values())
    skipped, never = trained.train(2).weights(), Trained(SGD(lr=0.1)).train(2).weights()
    assert all(torch.equal(actual, expected) for actual, expected in zip(skipped, never, strict=True))


def test_a_restore_leaves_no_gradient_and_no_step_behind() -> None:
    trained = Trained(AdamW()).train(2)
    fresh = Trained(AdamW())
    restore_optimizer(fresh.optimizer, fresh.model, trained.saved())
    assert [parameter.grad for parameter in fresh.model.parameters()] == [None] * 6
    assert {int(entries["step"]) for entries in fresh.optimizer.state.values()} == {2}


class Plain(torch.optim.SGD):
    def step(self) -> None:  # type: ignore[override]
        super().step()


class Positional(torch.optim.SGD):
    def step(self, function: Any = None) -> None:  # type: ignore[override]
        super().step(function)


@pytest.mark.parametrize("cls", [Plain, Positional])
def test_an_optimizer_resumes_whatever_its_step_takes(cls: type[torch.optim.Optimizer]) -> None:
    class Own(SGD):
        def make(self, groups: Any) -> torch.optim.Optimizer:
            return cls(groups, lr=0.1, momentum=0.9)  # type: ignore[call-arg]

    whole, first = Trained(Own()).train(5), Trained(Own()).train(2)
    second = Trained(Own()).resumed(first.saved(), first).train(3)
    assert all(map(torch.equal, whole.weights(), second.weights()))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda s: s.update({"7.weight": s.pop("0.weight")}), "is of other parameters, e.g. 7.weight"),
        (
            lambda s: s["0.weight"].pop("exp_avg"),
            "of 0.weight has step, exp_avg_sq, expected step, exp_avg, exp_avg_sq",
        ),
        (lambda s: s["0.bias"].clear(), "of 0.bias has nothing, expected step, exp_avg, exp_avg_sq"),
    ],
)
def test_a_state_that_does_not_fit_is_told_with_the_parameter_and_what_it_lacks(
    change: Callable[[dict[str, Any]], object], says: str
) -> None:
    saved = Trained(AdamW()).train(1).saved()
    change(saved["state"])
    fresh = Trained(AdamW())
    with pytest.raises(ValueError, match=f"^the optimizer's state {says}$"):
        restore_optimizer(fresh.optimizer, fresh.model, saved)


def test_a_parameter_without_a_state_starts_at_zero_with_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    whole = Trained(AdamW()).train(2)
    saved = whole.saved()
    del saved["state"]["3.bias"], saved["state"]["0.weight"]
    resumed = Trained(AdamW()).resumed(saved, whole)
    assert "has no optimizer state for 2 parameters (0.weight, ...), which start at zero" in capsys.readouterr().out
    steps = {name: int(entries["step"]) for name, entries in resumed.train(1).saved()["state"].items()}
    assert steps == {name: 1 if name in ("3.bias", "0.weight") else 3 for name in steps}
    assert len(steps) == 6


@pytest.mark.parametrize("option", [SGD(lr=0.1), AdamW(lr=0.1), Muon(lr=0.1), AdamW(lr=0.1, lookahead=2)], ids=repr)
def test_each_rank_takes_the_state_of_its_own_parameters(option: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Trained(option).train(3)
    saved = whole.saved()
    runs = [Trained(option), Trained(option)]

    def resumed(world: World) -> list[torch.Tensor]:
        run = runs[world.rank]
        run.optimizer = ZeROOptimizer(run.optimizer, world)
        return run.resumed(copy.deepcopy(saved), whole).train(2).weights()

    # Each rank draws all gradients, as one rank does.
    monkeypatch.setattr(torch, "manual_seed", lambda seed: None)
    ranks = ThreadRanks(2, monkeypatch).run(resumed)
    for weights in ranks:
        assert len(weights) == 6
    expected = whole.train(2).weights()
    for weights in ranks:
        assert all(map(torch.equal, weights, expected))


def test_a_layer_without_a_gradient_takes_no_part_in_look_ahead() -> None:
    optimizer = SGD(lr=0.5, momentum=0.0, lookahead=2, lookahead_alpha=0.5).build(model := nn.Linear(1, 1))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.0)
    seen = []
    for step in range(1, 5):
        model.weight.grad = torch.full((1, 1), -2.0)
        model.bias.grad = torch.full((1,), -2.0) if step > 1 else None
        optimizer.step()
        seen.append((model.weight.item(), model.bias.item()))
    # A step adds 1, and every second one of a parameter goes back half of the way.
    assert seen == [(1.0, 0.0), (1.0, 1.0), (2.0, 1.0), (2.0, 2.0)]


class ClosureOnly(SGD):
    """An optimizer that cannot step without a closure."""

    def make(self, groups: Any) -> torch.optim.Optimizer:
        return torch.optim.LBFGS([weight for group in groups for weight in group["params"]], lr=0.1, max_iter=2)

    def build(self, model: nn.Module) -> torch.optim.Optimizer:
        return self.make(self.groups(model))


def test_an_optimizer_that_cannot_step_without_a_closure_goes_on_with_its_history() -> None:
    images, labels = torch.randn(2, 3, 6, 6, dtype=torch.float64), torch.tensor([0, 3])

    def train(run: Trained, steps: int) -> Trained:
        run.model.eval()

        def closure() -> torch.Tensor:
            run.optimizer.zero_grad()
            loss = nn.functional.cross_entropy(run.model(images), labels)
            loss.backward()
            return loss

        for _ in range(steps):
            run.optimizer.step(closure)
        return run

    whole, first = train(Trained(ClosureOnly()), 5), train(Trained(ClosureOnly()), 2)
    saved = first.saved()
    assert [*saved["state"]] == ["0.weight"], "it keeps all with its first parameter"
    of_other = Trained(ClosureOnly()).resumed({**saved, "state": {"3.weight": saved["state"]["0.weight"]}}, first)
    assert [*of_other.saved()["state"]] == ["3.weight"], "it is the state of a name"
    resumed = train(Trained(ClosureOnly()).resumed(saved, first), 3)
    assert all(map(torch.equal, resumed.weights(), whole.weights()))
    fresh = train(Trained(ClosureOnly()).resumed({**saved, "state": {}}, first), 3)
    assert not all(map(torch.equal, fresh.weights(), whole.weights())), "the history counts"
