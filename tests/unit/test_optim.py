"""Optimizers: weight decay, learning rates by layer, and the average of the weights."""

import dataclasses
import inspect
import itertools
from functools import partial
from typing import Any

import pytest
import timm
import torch
from timm.optim import get_optimizer_info, list_optimizers
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from lockstep.core.errors import InputError
from lockstep.optim.muon import Muon
from lockstep.optim.optimizers import SGD, Adam, AdamW, OptimizerOption, Timm, UsualRate
from lockstep.optim.sam import SAM
from lockstep.training.averages import EMA
from lockstep.training.train_step import set_learning_rate

pytestmark = pytest.mark.numerics


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 3))


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    images = torch.ones(2, 1, 8, 8, dtype=next(model.parameters()).dtype)
    model(images).square().sum().backward()
    optimizer.step()


def test_biases_and_norms_do_not_decay() -> None:
    model = network()
    decay, plain = SGD(weight_decay=0.1).build(model).param_groups
    assert decay["weight_decay"] == 0.1
    assert plain["weight_decay"] == 0
    for group, decays in ((decay, True), (plain, False)):
        expected = [parameter for parameter in model.parameters() if (parameter.dim() > 1) == decays]
        assert {*map(id, group["params"])} == {*map(id, expected)}


def test_the_rate_of_each_layer_is_the_decay_times_that_of_the_next() -> None:
    model = timm.create_model("resnet18", num_classes=3, in_chans=1)
    optimizer = AdamW(lr=1.0, weight_decay=0.1, layer_decay=0.5).build(model)
    set_learning_rate(optimizer, 0.8)
    rates = {id(parameter): group["lr"] for group in optimizer.param_groups for parameter in group["params"]}
    assert len(rates) == len(list(model.parameters()))
    assert rates[id(model.fc.weight)] == pytest.approx(0.8)
    assert rates[id(model.layer4[1].conv2.weight)] == pytest.approx(0.4)
    assert rates[id(model.conv1.weight)] == min(rates.values()) < 0.02
    decays = {group["weight_decay"] for group in optimizer.param_groups}
    assert decays == {0.0, 0.1}
    with pytest.raises(InputError, match=r"the layers of this model are not known; use optimizer\.layer_decay=null"):
        SGD(layer_decay=0.5).build(network())


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (SGD(lr=0.1, momentum=0.9), lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)),
        (SGD(lr=0.01, momentum=0.9, nesterov=True), lambda p: torch.optim.SGD(p, 0.01, momentum=0.9, nesterov=True)),
        (Adam(lr=0.01), lambda p: torch.optim.Adam(p, 0.01)),
        (AdamW(lr=0.1, decay_all=True), lambda p: torch.optim.AdamW(p, 0.1)),
        (
            AdamW(lr=0.01, weight_decay=0.1, decay_all=True, betas=[0.8, 0.9], eps=1e-6),
            lambda p: torch.optim.AdamW(p, 0.01, (0.8, 0.9), 1e-6, 0.1),
        ),
    ],
    ids=["sgd", "nesterov", "adam", "adamw", "adamw with options"],
)
def test_the_usual_three_are_those_of_torch(ours: Any, theirs: Any) -> None:
    model, reference = network().double(), network().double()
    optimizers = [(model, ours.build(model)), (reference, theirs(reference.parameters()))]
    for trained, optimizer in optimizers:
        # Drawn gradients, not computed ones: Adam turns a gradient that is only a rounding error into a whole step.
        generator = torch.Generator().manual_seed(1)
        for _ in range(3):
            for parameter in trained.parameters():
                parameter.grad = torch.randn(parameter.shape, dtype=parameter.dtype, generator=generator)
            optimizer.step()
    for parameter, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected, rtol=1e-12, atol=1e-12)
    optimizers[1][1].load_state_dict(optimizers[0][1].state_dict())
    optimizers[0][1].load_state_dict(optimizers[1][1].state_dict())


def test_an_optimizer_of_timm_gets_its_options_and_needs_a_known_name() -> None:
    optimizer = Timm(opt="lamb", options={"trust_clip": True}).build(network())
    assert all(group["trust_clip"] for group in optimizer.param_groups)
    optimizer = Timm(opt="sgdw", momentum=0.5).build(network())
    assert all(group["momentum"] == 0.5 for group in optimizer.param_groups)
    with pytest.raises(InputError, match=r"optimizer.opt is 'lmb', which timm does not have\. Did you mean 'lamb'"):
        Timm(opt="lmb")


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Adam(betas=[0.9]).build(network()), "optimizer.betas is"),
        (lambda: SGD(momentum=0.0, nesterov=True), "optimizer.nesterov is true, but optimizer.momentum is 0.0"),
        (lambda: AdamW(eps=-1.0).build(network()), "optimizer=adamw cannot be built"),
        (lambda: Timm(options={"no_such": 1}).build(network()), "optimizer=timm cannot be built"),
        (lambda: Timm(opt="adahessian"), "needs second derivatives"),
        (lambda: Timm(opt="lookahead_lamb"), "use optimizer.opt=lamb optimizer.lookahead=6"),
        (lambda: SGD(lookahead_alpha=0.8), "optimizer.lookahead_alpha is 0.8, but optimizer.lookahead is null"),
    ],
)
def test_an_impossible_value_is_the_users_mistake(make: Any, says: str) -> None:
    with pytest.raises(InputError, match=says):
        make()


@pytest.mark.parametrize(
    ("decay", "weights"), [(0.9, [0.0, 1 - 3 / 12, 1 - 4 / 13, 1 - 5 / 14]), (0.3, [0.0, 0.75, 0.7, 0.7])]
)
def test_the_warm_up_of_an_average_goes_by_its_step_also_after_a_resume(decay: float, weights: list[float]) -> None:
    model = nn.Linear(1, 1, bias=False).double()
    expected, ema = 0.0, EMA(model, decay, warmup=True)
    for step, value in enumerate([3.0, 5.0, -2.0, 7.0], start=1):
        with torch.no_grad():
            model.weight.fill_(value)
        if step == 3:  # a checkpoint has the average and the number of its updates
            state, ema = ema.state_dict(), EMA(model, decay, warmup=True)
            ema.load_state_dict(state)
        ema.update_parameters(model)
        expected = value if step == 1 else (1 - weights[step - 1]) * expected + weights[step - 1] * value
        assert ema.module.weight.item() == pytest.approx(expected, rel=1e-12)


def test_the_average_of_a_buffer_that_is_infinite_is_infinite() -> None:
    model = network()
    model.register_buffer("bound", torch.tensor(-float("inf")))
    ema = EMA(model, 0.9)
    for _ in range(2):
        ema.update_parameters(model)
    assert torch.equal(ema.module.state_dict()["bound"], model.state_dict()["bound"])


def warmed_up(averages: list[Tensor], values: list[Tensor], averaged: Tensor) -> None:
    """torch's hook of an average, with TensorFlow's rule; `averaged` updates came before."""
    step = int(averaged) + 1
    for average, value in zip(averages, values, strict=True):
        decay = min(0.5, (1 + step) / (10 + step))
        average.copy_(average.lerp(value, 1 - decay) if average.is_floating_point() else value)


@pytest.mark.parametrize("warmup", [False, True])
def test_the_average_is_that_of_torch(warmup: bool) -> None:
    model = network()
    rule = warmed_up if warmup else get_ema_multi_avg_fn(0.5)
    ours, theirs = EMA(model, 0.5, warmup=warmup), AveragedModel(model, multi_avg_fn=rule, use_buffers=True)
    optimizer = SGD(lr=0.01).build(model)
    for _ in range(12):  # the warm-up ends at step 8
        one_step(model, optimizer)
        ours.update_parameters(model)
        theirs.update_parameters(model)
    assert ours.n_averaged == theirs.n_averaged == 12
    reference = theirs.module.state_dict()
    floats = {name: tensor for name, tensor in ours.module.state_dict().items() if tensor.is_floating_point()}
    assert all(torch.equal(tensor, reference[name]) for name, tensor in floats.items())
    assert ours.module[1].num_batches_tracked == 12


def test_an_optimizer_that_loses_the_scale_of_its_groups_is_refused() -> None:
    class Flat(OptimizerOption):
        def make(self, groups: Any) -> torch.optim.Optimizer:
            return torch.optim.SGD([weight for group in groups for weight in group["params"]], lr=0.1)

    with pytest.raises(InputError, match=r"optimizer=flat cannot be built: make\(\) has to pass on the `scale`"):
        Flat().build(network())


@pytest.mark.parametrize("error", [TypeError("odd"), ValueError("odd"), AssertionError("odd")], ids=repr)
def test_whatever_a_library_raises_for_a_value_is_the_users_mistake(error: Exception) -> None:
    class Odd(OptimizerOption):
        def make(self, groups: Any) -> torch.optim.Optimizer:
            raise error

    with pytest.raises(InputError, match="optimizer=odd cannot be built: odd"):
        Odd().build(network())


@pytest.mark.parametrize("cls", [SGD, Adam, AdamW, Timm])
def test_every_optimizer_refuses_half_a_choice_of_look_ahead(cls: Any) -> None:
    with pytest.raises(InputError, match=r"lookahead_alpha is 0\.8, but optimizer\.lookahead is null"):
        cls(lookahead_alpha=0.8)
    ahead = cls(lr=0.1, lookahead=3, lookahead_alpha=0.8).build(network())
    assert (ahead.k, ahead.alpha) == (3, 0.8)


@pytest.mark.parametrize("betas", [[], [0.9], [0.9, 0.99, 0.999]])
def test_adam_has_two_betas(betas: list[float]) -> None:
    with pytest.raises(
        InputError, match=r"optimizer.betas is .*, expected two numbers: optimizer.betas=\[0.9,0.999\]"
    ):
        AdamW(betas=betas)


@pytest.mark.parametrize(
    ("opt", "momentum", "refused"),
    [
        ("adagrad", 0.5, True),
        ("adagrad", 0.9, False),
        ("sgd", 0.5, False),
        ("sgd", 0.0, False),
        ("csgdw", 0.5, False),
        ("rmsprop", 0.5, False),
    ],
)
def test_a_momentum_is_for_optimizers_of_timm_that_have_one(opt: str, momentum: float, refused: bool) -> None:
    has_one = get_optimizer_info(opt).has_momentum
    assert refused == (momentum != 0.9 and not has_one), "timm says so"
    if refused:
        with pytest.raises(InputError, match=f"optimizer.momentum is {momentum}, but optimizer.opt={opt} has none"):
            Timm(opt=opt, momentum=momentum)
    else:
        assert Timm(opt=opt, momentum=momentum).algorithm == opt


@pytest.mark.parametrize(
    ("opt", "lr", "batch", "power"),
    [
        ("sgd", 0.1, 256, 1),
        ("momentum", 0.1, 256, 1),
        ("nesterov", 0.1, 256, 1),
        ("csgdw", 0.1, 256, 1),
        ("adamw", 1e-3, 64, 0.5),
        ("lion", 1e-4, 64, 0.5),
        ("clion", 1e-4, 64, 0.5),
        ("adafactor", 1e-3, 64, 0.5),
    ],
)
def test_the_usual_rate_of_an_optimizer_of_timm_is_that_of_its_kind(
    opt: str, lr: float, batch: int, power: float
) -> None:
    usual = Timm(opt=opt).usual
    assert (usual.lr, usual.batch, usual.power) == (lr, batch, power)
    assert usual.at(4 * batch) == pytest.approx(lr * 4**power)


def test_the_usual_rate_of_all_of_timm_is_that_of_sgd_or_the_default_of_the_class() -> None:
    for info in map(get_optimizer_info, list_optimizers()):
        if "SGD" in str(info.opt_class):
            expected = UsualRate(0.1, 256, 1)
        else:  # a text is the class of a package that need not be installed
            own = (
                None
                if isinstance(info.opt_class, str)
                else inspect.signature(info.opt_class).parameters["lr"].default
            )
            expected = UsualRate(own or 1e-3, 64, 0.5)
        assert info.second_order or Timm(opt=info.name).usual == expected, info.name


def test_an_optimizer_that_is_not_installed_has_the_rate_of_adam(monkeypatch: pytest.MonkeyPatch) -> None:
    info = get_optimizer_info("adamw")
    monkeypatch.setattr(
        "timm.optim.get_optimizer_info", lambda name: dataclasses.replace(info, opt_class="no.such.Class")
    )
    assert Timm(opt="adamw").usual == Adam().usual


def test_the_first_group_is_that_which_decays_and_its_rate_is_logged() -> None:
    for bias_first in (False, True):
        model: Any = nn.Linear(2, 2)
        if bias_first:
            weight = model.weight
            del model.weight
            model.register_parameter("weight", weight)
        first, second = SGD(lr=1.0, weight_decay=0.1).groups(model)
        assert (first["weight_decay"], second["weight_decay"]) == (0.1, 0.0)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("nesterov", [False, True])
def test_momenta_are_there_before_the_first_step(momentum: float, nesterov: bool) -> None:
    if nesterov and not momentum:
        return
    for kind, weight_decay in itertools.product((SGD, SAM), (0.0, 0.1)):  # in one group, or in two
        optimizer = kind(lr=0.1, momentum=momentum, nesterov=nesterov, weight_decay=weight_decay).build(network())
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        assert (len(optimizer.param_groups), len(weights)) == (2 if weight_decay else 1, 6)
        for weight in weights:
            (buffer,) = optimizer.state[weight].values() if momentum else (torch.zeros_like(weight),)
            assert torch.equal(buffer, torch.zeros_like(weight))
        assert len(optimizer.state) == (6 if momentum else 0)


def test_a_network_of_which_only_the_head_is_trained_has_one_rate_under_layer_decay() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    groups = AdamW(layer_decay=0.5).groups(model)
    assert {group["scale"] for group in groups} == {1.0}


@pytest.mark.parametrize("decay_all", [False, True])
@pytest.mark.parametrize("layer_decay", [None, 0.5])
def test_what_is_frozen_is_in_no_group(decay_all: bool, layer_decay: float | None) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    groups = AdamW(weight_decay=0.1, decay_all=decay_all, layer_decay=layer_decay).groups(model)
    assert [[*map(id, group["params"])] for group in groups] == (
        [[id(model[1].weight), id(model[1].bias)]] if decay_all else [[id(model[1].weight)], [id(model[1].bias)]]
    )


@pytest.mark.parametrize(
    ("option", "rate", "at_64", "at_1024"),
    [
        (SGD, 0.1, 0.025, 0.4),
        (SAM, 0.1, 0.025, 0.4),
        (Adam, 1e-3, 1e-3, 4e-3),
        (AdamW, 1e-3, 1e-3, 4e-3),
        (Muon, 0.02, 0.02, 0.08),
        (Timm, 1e-3, 1e-3, 4e-3),
        (partial(SGD, momentum=0.0), 0.1, 0.025, 0.4),
        (partial(SGD, nesterov=True, weight_decay=0.1), 0.1, 0.025, 0.4),
        (partial(SAM, momentum=0.0), 0.1, 0.025, 0.4),
        (partial(Adam, betas=[0.0, 0.9], eps=0.1), 1e-3, 1e-3, 4e-3),
        (partial(AdamW, weight_decay=0.0, lookahead=6), 1e-3, 1e-3, 4e-3),
        (partial(Muon, head_lr=None, momentum=0.0), 0.02, 0.02, 0.08),
        (partial(Timm, opt="sgd", momentum=0.0), 0.1, 0.025, 0.4),
        (partial(Timm, opt="lion", weight_decay=0.1), 1e-4, 1e-4, 4e-4),
    ],
)
def test_the_usual_rate_grows_with_the_batch_and_is_a_tenth_for_trained_weights(
    option: Any, rate: float, at_64: float, at_1024: float
) -> None:
    assert option().rate == option().usual.lr == rate
    assert option().says_usual
    for batch, expected in ((64, at_64), (1024, at_1024)):
        chosen = [option().at_batch(batch, trained=trained).rate for trained in (False, True)]
        assert chosen == pytest.approx([expected, expected / 10], rel=1e-12)
    typed = option(lr=3)
    assert (typed.rate, typed.at_batch(64, trained=True)) == (3.0, typed)


def test_a_rate_of_no_power_is_the_same_for_every_batch() -> None:
    assert [UsualRate(0.5, 100, 0).at(batch) for batch in (1, 100, 400)] == [0.5] * 3
    assert UsualRate(0.5, 100, 1).at(50) == 0.25


def test_an_optimizer_of_timm_gets_its_momentum_and_its_rate_in_timms_way() -> None:
    optimizer = Timm(opt="rmsprop", lr=0.25, momentum=0.5).build(network())
    assert {(group["lr"], group["momentum"]) for group in optimizer.param_groups} == {(0.25, 0.5)}
    nadam = Timm(opt="nadamw", options={"betas": [0.5, 0.75]}).build(network())
    assert {tuple(group["betas"]) for group in nadam.param_groups} == {(0.5, 0.75)}
    assert {(Timm().opt, Timm().momentum, Timm().algorithm)} == {("lamb", 0.9, "lamb")}


@pytest.mark.parametrize("frozen", [False, True])
def test_sam_without_a_closure_steps_as_sgd_and_leaves_out_what_has_no_gradient(frozen: bool) -> None:
    ours, theirs = network(), network()
    one_step(ours, SAM(lr=0.01, rho=0.5).build(ours))
    one_step(theirs, SGD(lr=0.01).build(theirs))
    assert all(map(torch.equal, ours.parameters(), theirs.parameters()))
    optimizer = SAM(lr=0.01, rho=0.5).build(model := network())
    images = torch.rand(8, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    seen: list[bool] = []

    @torch.enable_grad()
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(images).square().sum()
        loss.backward()
        if frozen:
            model[0].weight.grad = None  # type: ignore[index]
        seen.append(torch.equal(model[4].weight, before[4]))  # type: ignore[index]
        return loss

    loss = optimizer.step(closure)
    assert loss is not None
    assert seen == [True, False], "the second gradient is that of other weights"
    moved = [not torch.equal(*pair) for pair in zip(model.parameters(), before, strict=True)]
    assert moved[0] != frozen
    assert moved[4]


@pytest.mark.parametrize(
    "options", [{}, {"momentum": 0.0}, {"nesterov": True, "weight_decay": 0.5, "decay_all": True}]
)
def test_sam_steps_from_where_it_is_with_the_gradient_of_the_worst_weights_nearby(options: dict[str, Any]) -> None:
    own, rule = network().double(), network().double()
    images = torch.rand(3, 8, 1, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    ours = SAM(lr=0.01, rho=0.5, **options).build(own)
    momentum, decay = options.get("momentum", 0.9), options.get("weight_decay", 0.0)
    theirs = torch.optim.SGD(rule.parameters(), 0.01, momentum, 0.0, decay, options.get("nesterov", False))
    for batch in images:

        @torch.enable_grad()
        def loss_of(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor = batch) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = model(batch).square().sum()
            loss.backward()
            return loss

        first = loss_of(rule, theirs)
        present = [weight.detach().clone() for weight in rule.parameters()]
        slopes = [weight.grad.clone() for weight in rule.parameters() if weight.grad is not None]
        length = torch.cat([slope.flatten() for slope in slopes]).norm()
        with torch.no_grad():
            for weight, slope in zip(rule.parameters(), slopes, strict=True):
                weight += 0.5 * slope / length
            loss_of(rule, theirs)
            for weight, was in zip(rule.parameters(), present, strict=True):
                weight.copy_(was)
        theirs.step()
        assert ours.step(lambda: loss_of(own, ours)).item() == pytest.approx(first.item(), rel=1e-9)
        for actual, expected in zip(own.parameters(), rule.parameters(), strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


def test_sam_stands_still_where_there_is_no_slope() -> None:
    optimizer = SAM(lr=0.5, rho=0.5).build(model := nn.Linear(2, 1))
    before = [parameter.detach().clone() for parameter in model.parameters()]

    def closure() -> float:
        assert all(parameter.isfinite().all() for parameter in model.parameters())
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        return 0.0

    assert optimizer.step(closure) == 0
    assert all(map(torch.equal, model.parameters(), before))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (
            lambda: SGD(head_lr=0.5).build(frozen_head()),
            r"^optimizer\.head_lr is 0\.5, but no layer that gives the logi",
        ),
        (
            lambda: SGD(momentum=0.0, nesterov=True),
            r"above 0; use optimizer\.momentum=0\.9 or optimizer\.nesterov=false$",
        ),
        (
            lambda: Timm(opt="lookahead_sgdw"),
            r"is lookahead_sgdw, .* use optimizer\.opt=sgdw optimizer\.lookahead=6$",
        ),
        (lambda: Timm(opt="adahessian"), r"^optimizer\.opt is 'adahessian', which needs second derivatives"),
        (lambda: Adam(betas=[0.5]), r"^optimizer\.betas is \[0\.5\], expected two numbers"),
        (
            lambda: Adam(lookahead_alpha=0.25),
            r"so there are no slow weights; add optimizer\.lookahead=6, or remove it$",
        ),
    ],
)
def test_a_value_that_does_not_fit_is_told_with_its_remedy(make: Any, says: str) -> None:
    with pytest.raises(InputError, match=says):
        make()


def frozen_head() -> nn.Module:
    model: Any = network()
    model[4].requires_grad_(False)
    return model


@pytest.mark.parametrize("cut", [False, True])
def test_the_fused_kernel_of_sgd_is_for_whole_parameters(cut: bool) -> None:
    model = nn.Linear(2, 2)
    for parameter in model.parameters():
        if cut:
            parameter.full_tensor = lambda: None  # type: ignore[attr-defined]  # as a tensor has that is cut
    defaults = SGD(lr=0.25, momentum=0.5, nesterov=True, lookahead=2).build(model).defaults
    assert (defaults["foreach"], defaults["fused"]) == ((True, None) if cut else (None, True))
    assert (defaults["lr"], defaults["momentum"], defaults["nesterov"]) == (0.25, 0.5, True)
