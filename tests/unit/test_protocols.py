"""Options that derive from nothing: each has what its protocol has a default for."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from lockstep.config import options
from lockstep.config.options import protocol_of
from lockstep.config.schema import GROUPS
from lockstep.core.batch import Batch
from lockstep.core.data_protocols import Shard, Source, splits_of
from lockstep.core.errors import InputError
from lockstep.core.model import UpdateScope
from lockstep.core.protocols import Entry
from lockstep.core.world import World

QUESTIONS = {group: [name for name in dir(protocol_of(group)) if name[0] != "_"] for group in GROUPS}
REQUIRED = {group: sorted(protocol_of(group).__abstractmethods__) for group in GROUPS}


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "_DECLARED", {})


def plain(group: str, *without: str, **values: Any) -> Any:
    """An option of a class of its own that has what its group requires, and `values` for the rest."""
    required = {name: lambda self, *_: None for name in REQUIRED[group] if name not in without}
    return options.option(group, "own")(type("Own", (), {**required, **values}))


@pytest.mark.parametrize("group", GROUPS)
def test_a_plain_class_answers_every_question_of_its_protocol(group: str) -> None:
    own = plain(group)()
    for name in {*QUESTIONS[group]} - {"memory_format", "node_range", "world_size", *REQUIRED[group]}:
        answer, protocol = getattr(own, name), vars(protocol_of(group)).get(name)
        assert callable(answer) == callable(protocol) or isinstance(protocol, property | None), name


@pytest.mark.parametrize("group", [group for group in GROUPS if REQUIRED[group]])
def test_a_class_without_what_its_group_requires_is_one_sentence(group: str) -> None:
    for name in REQUIRED[group]:
        with pytest.raises(InputError, match=f"Own has no {name}, which an option of {group} needs; write"):
            plain(group, name)
    derived = type("Own", (protocol_of(group),), {})
    with pytest.raises(InputError, match=f"Own has no {' and no '.join(REQUIRED[group])}, which an option of"):
        options.option(group, "own")(derived)


@pytest.mark.parametrize("group", GROUPS)
def test_what_a_plain_class_has_itself_is_not_replaced(group: str) -> None:
    for name in QUESTIONS[group]:
        assert vars(plain(group, **{name: property(lambda self: "own")}))[name].fget(None) == "own"
        annotated = {"__annotations__": {name: ClassVar[str]}, name: "own"}
        assert getattr(plain(group, **annotated), name) == "own"
        without_default = plain(group, name, __annotations__={name: str})
        assert getattr(without_default(**{name: "own"}), name) == "own"


def test_a_member_of_the_protocol_needs_no_annotation() -> None:
    assert plain("metric", higher_is_better=False).higher_is_better is False
    with pytest.raises(InputError, match=r"Own\.lower has no type, so it is no key of the config"):
        plain("metric", lower=False)


def test_defaults_of_a_protocol_do_what_it_says() -> None:
    metric = plain("metric", build=lambda self, classes: classes)()
    assert metric.build_for("classes", ["crane", "dog", "crane"]) == 3, "two classes of ImageNet have one name"
    assert plain("strategy")().grad_divisor(World.solo()) == 1
    assert plain("model", channels_last=True)().memory_format is torch.channels_last
    assert plain("optimizer")().algorithm == "Own"


def test_a_data_set_is_fetched_with_all_its_splits() -> None:
    names = list[str]()
    splits = {name: lambda self, name=name: names.append(name) for name in ("train", "eval", "test")}
    plain("dataset", **splits)().prepare()
    assert names == [*splits]


@pytest.mark.parametrize("group", ["callback", "schedule"])
def test_each_object_of_an_option_has_lists_and_dictionaries_of_its_own(group: str) -> None:
    annotations = {"__annotations__": {"steps": list[int], "names": dict[str, int], "words": ClassVar[list[str]]}}
    own = plain(group, steps=[1], names={"a": 1}, words=["x"], **annotations)
    one, other = own(), own()
    assert one.words is other.words is own.words, "what belongs to the class is no field"
    assert one == other
    one.steps.append(2)
    one.names["b"] = 2
    assert (other.steps, other.names, own().steps, own().names) == ([1], {"a": 1}, [1], {"a": 1})


@pytest.mark.parametrize("group", ["callback", "schedule"])
def test_each_object_of_an_option_has_the_inner_lists_and_dictionaries_of_its_default_for_itself(group: str) -> None:
    annotations = {"__annotations__": {"rows": list[list[int]], "names": dict[str, dict[str, int]]}}
    own = plain(group, rows=[[1]], names={"a": {"b": 1}}, **annotations)
    one, other = own(), own()
    one.rows[0].append(2)
    one.names["a"]["b"] = 2
    for untouched in (other, own()):
        assert (untouched.rows, untouched.names) == ([[1]], {"a": {"b": 1}})


def test_the_preprocessing_of_a_data_set_has_all_that_it_says() -> None:
    values = {"image_shape": (3, 9, 8), "input_shape": (3, 5, 4), "eval_crop": 0.5, "fit": "pad"}
    values |= {"mean": (0.1, 0.2, 0.3), "std": (0.4, 0.5, 0.6)}
    preprocessing = protocol_of("dataset").preprocessing.fget(SimpleNamespace(**values))
    assert {name: getattr(preprocessing, name) for name in values} == values


class Cut:
    """A tensor of which each rank has a part."""

    device_mesh = SimpleNamespace(device_type="cpu")
    gathered = 0

    def detach(self) -> Cut:
        return self

    def to(self, device: str) -> Cut:
        assert device == "cpu"
        return self

    def full_tensor(self) -> Any:
        self.gathered += 1
        return SimpleNamespace(cpu=lambda: "in host memory")


def test_a_strategy_without_methods_of_its_own_has_whole_models_and_means_over_the_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own, rank = plain("strategy")(), replace(World.solo(), size=4)
    assert (own.ranks(8), own.devices(3, 8), own.grad_divisor(rank), own.micro_batches(3, 2)) == (1, 3, 4, 3)
    assert own.micro_batches("auto", 2) == "auto"
    assert own.devices(8, 3) == 8, "too many are refused where they are counted"
    cut, tensor = Cut(), torch.zeros(2)
    tensors: Any = [cut, tensor]
    assert [*own.whole_tensors(tensors, keep=True)] == ["in host memory", tensor]
    assert [*own.whole_tensors(tensors, keep=False)] == [cut, tensor]
    assert cut.gathered == 2, "each rank takes part"
    three, none, four = (nn.Parameter(torch.zeros(2)) for _ in range(3))
    three.grad, four.grad = torch.tensor([3.0, 0.0]), torch.tensor([0.0, 4.0])
    assert own.gradient_norm([three, none, four]).item() == pytest.approx(5)
    monkeypatch.setattr(nn.utils, "get_total_norm", lambda gradients: cut)
    assert own.gradient_norm([three]).cpu() == "in host memory", "of all parts"
    assert own.data_world(rank) is rank
    assert own.wrap(model := nn.Linear(2, 2), rank, None, ()) is model


def test_autocast_is_for_a_format_of_products_other_than_that_of_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "autocast", lambda *words, **options: (*words, options))
    half, double = {"dtype": torch.float16}, {"storage": torch.float64, "dtype": torch.float64}
    cuda = torch.device("cuda")
    assert plain("precision", **half)().autocast(cuda) == ("cuda", {"dtype": torch.float16})
    for same in ({}, double):
        assert isinstance(plain("precision", **same)().autocast(cuda), nullcontext)


def test_a_model_without_methods_of_its_own_is_stored_channel_by_channel_unless_it_says_otherwise() -> None:
    formats = {None: torch.contiguous_format, False: torch.contiguous_format, True: torch.channels_last}
    for last, expected in formats.items():
        assert plain("model", channels_last=last)().memory_format is expected


def test_what_an_option_says_of_one_thing_says_nothing_of_another() -> None:
    assert not plain("launcher", starts_ranks=True)().can_fork()
    model = plain("model", pretrained=True, compile=True)()
    assert (model.has_usual_size, model.has_published()) == (False, None)
    assert not plain("loader", workers=3, prefetch=2)().decodes_once


def test_a_data_set_is_prepared_split_by_split_and_described_by_its_parts() -> None:
    class Parts(Source):
        image_shape, mean, std, fit, eval_crop = (3, 8, 9), (0.1, 0.2, 0.3), (0.4, 0.5, 0.6), "pad", 0.5
        class_names = ("a", "b")

        def fingerprint(self) -> Any:
            raise AssertionError

        def train(self) -> Any:
            return calls.append("train") or "train split"

        def eval(self) -> Any:
            return calls.append("eval") or "evaluation split"

        def test(self) -> Any:
            return calls.append("test")

    calls: list[str] = []
    own = Parts()
    own.prepare()
    assert calls == ["train", "eval", "test"]
    assert [*splits_of(own).items()] == [("train", "train split"), ("val", "evaluation split")]
    described = own.preprocessing
    assert (described.image_shape, described.input_shape) == ((3, 8, 9), (3, 8, 9))
    assert (described.mean, described.std, described.fit, described.eval_crop) == (own.mean, own.std, "pad", 0.5)
    assert (own.classes, own.changes, own.crops_files) == (2, False, False)
    assert type("Crops", (Parts,), {"crops_files": True})().changes
    has = {"reads_files": True, "path": "somewhere", "examples": 7, "eval": lambda self: [], "test": Source.test}
    of_files: Any = type("Reads", (Parts,), has)()
    assert [of_files.crops_files, of_files.changes, of_files.downloads] == [False] * 3
    assert (of_files.generated_bytes, of_files.usual_augment, of_files.test()) == (0, "none", None)
    assert splits_of(of_files) == {"train": "train split", "val": []}, "one without examples is there"


def test_the_first_examples_of_a_piece_have_no_partner_and_all_of_them_are_the_piece() -> None:
    rows = torch.arange(4)
    shard = Shard(1, 0, rows, rows + 10, rows + 20, 3, 0, 1, mix_partner=True)
    assert shard.labels.tolist() == [10, 11, 12]
    assert shard.first(3) is shard
    first = shard.first(2)
    assert [part.tolist() for part in (first.images, first.labels, first.indices)] == [[0, 1], [10, 11], [20, 21]]
    assert (first.mix_partner, first.known_labels.tolist()) == (False, [10, 11])
    none = shard.first(0)
    assert [len(part) for part in (none.images, none.labels, none.known_labels, none.indices)] == [0] * 4
    assert (none.mix_partner, none.count, none.step, none.number) == (False, 3, 1, 0)
    ((whole, is_last),) = shard.micro_batches(1)
    assert (whole is shard, is_last) == (True, True)
    pieces = shard.micro_batches(5)
    assert [is_last for _, is_last in pieces] == [False] * 4 + [True]
    assert [piece.mix_partner for piece, _ in pieces] == [len(piece.labels) > 0 for piece, _ in pieces]


# What an option has that says nothing, by group; `library_name` and `imports` are the same in each.
DEFAULTS: dict[str, dict[str, Any]] = {
    "strategy": {
        **dict.fromkeys(("recordable", "whole_model", "one_pass", "same_work"), True),
        **dict.fromkeys(("fixed_order", "adapts", "joins_alone"), False),
        "widest": UpdateScope.model,
        "sync_batchnorm": None,
    },
    "precision": {
        **dict.fromkeys(("dtype", "storage", "sums"), torch.float32),
        "matmul": "highest",
        "needs_loss_scaler": False,
    },
    "launcher": {"starts_ranks": False, "submits": False, "restarts": 0, "node_range": (1, 1)},
    "model": {
        **dict.fromkeys(("compile", "grad_checkpointing", "pretrained", "has_usual_size"), False),
        "compile_mode": "default",
        "channels_last": None,
        "memory_format": torch.contiguous_format,
    },
    "optimizer": {
        **dict.fromkeys(("recordable", "needs_closure", "decay_embeddings"), False),
        "scope": UpdateScope.model,
        "weight_decay": 0.0,
        "lookahead": None,
        "algorithm": "Own",
    },
    "loss": {"probabilities": "softmax", "targets": ("classes", "labels", "values")}
    | {"class_weights": None, "balanced": False},
    "task": {
        **dict.fromkeys(("metrics", "figures", "counted"), ()),
        "targets": "classes",
        "probabilities": None,
        "usual_loss": None,
        "monitor": "loss",
    },
    "metric": {"higher_is_better": None, "targets": ("classes", "labels", "values"), "average": ""},
    "dataset": {
        **dict.fromkeys(("reads_files", "crops_files", "changes", "downloads"), False),
        "path": "",
        "part": "",
        "val_share": None,
        "examples": 1,
        "generated_bytes": 0,
        "eval_crop": 1.0,
        "fit": "crop",
        "targets": "classes",
        "class_names": (),
        "classes": 0,
        "usual_augment": "none",
    },
    "loader": {"decodes_once": False, "workers": 0, "prefetch": 0},
    "logger": {"figures": (), "package": None},
    "callback": {"figures": (), "every_rank": False, "commands": ()},
}
SILENT: dict[str, dict[str, tuple[tuple[Any, ...], Any]]] = {
    "launcher": {
        "can_fork": ((), False),
        "try_address": ((), "the ranks of one machine meet at a port that is free when they start"),
    },
    "model": {"has_published": ((), None), "trained_input": ((), None), "missing_weights": ((), "")},
    "task": {"identity": ((), {})},
    "metric": {"notes": (((),), [])},
    "dataset": {"notes": ((), [])},
    "strategy": {"notes": ((None, None, None), [])},
    "loader": {
        "held_gb": ((None,), 0.0),
        "stride": ((1, 64, None), 1),
        "order_device": ((None,), torch.device("cpu")),
    },
    "callback": {"findings": ((None,), {}), "state_dict": ((), {})},
}
ITSELF = {"launcher": ("in_allocation", "as_rank"), "task": ("absolute",), "dataset": ("located",)}
ITSELF |= {"strategy": ("with_changing_graph",)}


@pytest.mark.parametrize("group", GROUPS)
def test_an_option_that_says_nothing_has_these_answers(group: str) -> None:
    own, defaults = plain(group)(), {"imports": (), "library_name": None, **DEFAULTS.get(group, {})}
    answers = {name: getattr(own, name) for name in QUESTIONS[group] if name not in ("preprocessing", "world_size")}
    assert {name: answer for name, answer in answers.items() if not callable(answer)} == defaults
    for name, (words, expected) in SILENT.get(group, {}).items():
        assert getattr(own, name)(*words) == expected, name
    for name in ITSELF.get(group, ()):
        assert getattr(own, name)() is own
    if group == "loader":
        assert own.choose(None) == (own, "as configured")
    if group == "dataset":
        assert own.read_as("a split", None) == own.read_as("a split", None, "a crop") == "a split"
    if group == "augment":
        assert own.for_data(None) is own
        assert own.on_device("bilinear", cropped=True) == own.apply


def test_a_task_without_methods_of_its_own_has_the_losses_and_hits_of_a_plain_network() -> None:
    task: Any = plain("task", predict=lambda self, outputs: outputs)()
    images, targets = torch.tensor([[2.0, 1.0], [0.0, 3.0], [5.0, 4.0]]), torch.tensor([0, 1, 1])
    logged: list[Any] = []
    batch = Batch(
        images, targets, lambda x: x + 1, lambda outputs, classes: outputs[:, 0] * 10 + classes, logged.append
    )
    for method in (task.losses, task.evaluate):
        losses, outputs = method(batch)
        assert (losses.tolist(), outputs.tolist()) == ([30.0, 11.0, 61.0], (images + 1).tolist())
    hits = task.hits(images, targets)
    assert (hits.tolist(), hits.dtype, hits.shape) == (2, torch.int64, ())
    assert task.hits(images, torch.tensor([-1, 1, 0])) == 2, "a broken image is no hit of the first class"
    counts = task.counts(outputs, targets.to("meta"))
    assert (counts.shape, counts.dtype, counts.device.type) == ((0,), torch.int64, "meta")
    assert (task.ready(None, None), logged) == (task, [])


def test_options_that_change_nothing_give_back_what_they_get() -> None:
    optimizer, strategy, module = plain("optimizer")(), plain("strategy")(), nn.Linear(2, 2)
    assert optimizer.at_batch(64, trained=True) is optimizer
    built = SimpleNamespace(build=lambda model: ("over", model))
    assert strategy.build_optimizer(built, module, World.solo()) == ("over", module)
    assert strategy.reduce(module) is strategy.shard(module, None, None, None) is None
    precision = plain("precision", storage=torch.float64)()
    assert precision.convert(module) is module
    assert module.weight.dtype is torch.float64
    assert plain("augment")().check_channels(7) is None
    assert [plain("launcher", ranks=3, node_range=nodes)().world_size for nodes in ((1, 1), (2, 4))] == [3, 12]


def test_a_strategy_of_a_users_is_in_its_own_context_for_each_micro_batch() -> None:
    @contextmanager
    def accumulate(self: Any, replica: nn.Module, last: bool) -> Any:
        calls.append(("begin", replica, last))
        yield
        calls.append("end")

    calls: list[Any] = []
    replica = nn.Identity()
    plain("strategy", accumulate=accumulate)().run_micro_batches(
        replica,
        [("a", False), ("b", True)],
        World.solo(),
        forward=lambda micro: f"loss of {micro}",
        backward=calls.append,
        between=lambda: calls.append("between"),
    )
    first, last = (["loss of a", "end", "between"], ["loss of b", "end"])
    assert calls == [("begin", replica, False), *first, ("begin", replica, True), *last]


@pytest.mark.parametrize(("size", "senders"), [(1, []), (2, [0, 0])])
def test_every_buffer_of_several_ranks_is_that_of_the_first(
    size: int, senders: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[tuple[Any, int]] = []
    monkeypatch.setattr(torch.distributed, "broadcast", lambda buffer, src: sent.append((buffer, src)))
    model = nn.Sequential(nn.Linear(2, 2))
    for name in ("one", "other"):
        model[0].register_buffer(name, torch.zeros(2))
    plain("strategy")().share_buffers(model, replace(World.solo(), size=size))
    assert [src for _, src in sent] == senders
    assert all(buffer is own for (buffer, _), own in zip(sent, model.buffers(), strict=False))


def test_a_rank_of_a_process_of_its_own_runs_the_module_of_its_function() -> None:
    entry = Entry(splits_of, objects=(1,))  # type: ignore[arg-type]
    assert (entry.module, entry.objects) == ("lockstep.core.data_protocols", (1,))
    assert (Entry(splits_of).objects, Entry(splits_of).remedy) == (  # type: ignore[arg-type]
        (),
        "use train.micro_batches=auto, or fewer ranks",
    )


def test_pieces_of_a_piece_are_those_of_the_whole_batch_whatever_is_cut_first() -> None:
    rows = torch.arange(11)

    def pieces_of(shards: Any, parts: int) -> list[Any]:
        return [(piece, last) for shard in shards for piece, last in shard.micro_batches(parts)]

    whole = Shard(4, 2, rows * 10, rows + 100, rows, 11, 0, 1)
    halves = [piece for piece, _ in pieces_of([whole], 2)]
    assert [half.indices.tolist() for half in halves] == [[*range(5)], [*range(5, 11)]]
    twice, once = pieces_of(halves, 2), pieces_of([whole], 4)
    assert [last for _, last in twice] == [False, True] * 2
    for (one, _), (other, _) in zip(twice, once, strict=True):
        assert one.indices.tolist() == other.indices.tolist()
        assert one.images.tolist() == (one.indices * 10).tolist()
        assert one.labels.tolist() == (one.indices + 100).tolist()
        assert (one.number, one.pieces, one.count, one.step, one.epoch) == (other.number, 4, 11, 4, 2)
