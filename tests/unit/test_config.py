"""The configuration: how it becomes typed objects, and the message for an invalid one."""

import copy
import dataclasses
import enum
import errno
import functools
import importlib
import inspect
import itertools
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import yaml
from hydra.errors import HydraException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import nn

from helpers import ROOT, built, chosen, composed
from lockstep.config import components, composition, extensions, messages, options
from lockstep.config.composition import VALUE_KEYS, ConfigFiles
from lockstep.config.hydra_versions import initialize_config_dir
from lockstep.config.options import classes_of, modules_of, option
from lockstep.config.schema import GROUPS, MANY, Job
from lockstep.core.errors import InputError, RankFailed, StorageError
from lockstep.core.fields import leaves
from lockstep.core.observer import Callback
from lockstep.core.protocols import Model
from lockstep.core.safe_write import FULL
from lockstep.data.transforms.augment import CropFlip
from lockstep.launcher import Spawn
from lockstep.metrics import F1
from lockstep.optim.optimizers import SGD, Timm
from lockstep.runtime import program
from lockstep.tasks import Multilabel

CONF = ROOT / "conf"
OPTIONS = [f"{group}={path.stem}" for group in GROUPS for path in sorted((CONF / group).glob("*.yaml"))]
# Values for the mandatory keys of some options.
MANDATORY = {
    **{f"dataset={name}": ["dataset.path=nowhere"] for name in ("folder", "csv", "hf", "webdataset", "packed")},
    **{f"model={name}": ["model.name=resnet18"] for name in ("timm", "torchvision")},
    "dataset=torchvision": ["dataset.name=SVHN"],
    "task=distill": ["task.teacher=nowhere"],
}


@pytest.fixture(scope="module")
def nodes() -> dict[str, dict[str, Any]]:
    """The node of each option. One config holds an option of every group, because Hydra takes 0.2 s for a config."""
    nodes = {}
    by_group = [[option for option in OPTIONS if option.startswith(f"{group}=")] for group in GROUPS]
    for row in itertools.zip_longest(*by_group):
        options = [option for option in row if option is not None]
        words = [*options, *(override for option in options for override in MANDATORY.get(option, []))]
        job = composition.to_dict(chosen("name=test", *words))
        nodes |= {option: job[option.partition("=")[0]] for option in options}
    return nodes


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_builds_and_gives_its_node_back(option: str, nodes: dict[str, dict[str, Any]]) -> None:
    group, node = option.partition("=")[0], nodes[option]
    if group in MANY:
        ((name, component),) = components.build_many(group, node).items()
        assert name == option.partition("=")[2]
        node = node[name]
    else:
        component = components.build(group, node)
    assert node.keys() == {"_target_", *(field.name for field in dataclasses.fields(component))}
    assert components.node(component) == node
    assert components.build(group, components.node(component)) == component


@pytest.mark.parametrize("option", OPTIONS)
def test_null_is_a_value_of_a_key_or_refused_with_group_and_key(option: str, nodes: dict[str, Any]) -> None:
    group, _, name = option.partition("=")
    node, refused = nodes[option][name] if group in MANY else nodes[option], dict[str, str]()
    for key in node.keys() - {"_target_"}:
        try:
            components.build(group, {**node, key: None})
        except InputError as error:
            refused[f"{group}.{key}"] = str(error)
    for key, says in refused.items():
        assert re.fullmatch(f"{key} is null, expected (a value|.* or .*): {key}=.*", says)


def test_a_value_becomes_the_type_of_its_field() -> None:
    target = "lockstep.optim"
    assert components.build("optimizer", {"_target_": f"{target}.SGD", "lr": "0.5"}) == SGD(lr=0.5)
    assert components.build("optimizer", {"_target_": f"{target}.AdamW", "betas": [0, 1 / 2]}).betas == [0.0, 0.5]
    options = {"_target_": f"{target}.Timm", "options": {"trust_clip": True}}
    assert components.build("optimizer", options) == Timm(options={"trust_clip": True})
    backend = components.build("launcher", {"_target_": "lockstep.launcher.Spawn", "backend": "gloo", "ranks": 2})
    assert backend == Spawn(backend="gloo", ranks=2)


@pytest.mark.parametrize(
    ("group", "node", "says"),
    [
        ("optimizer", {"momentun": 0.9}, r"optimizer\.momentun .*Did you mean '(optimizer\.)?momentum'"),
        ("optimizer", {"lr": "fast"}, r"optimizer\.lr.*'fast'"),
        ("optimizer", {"lr": None}, r"optimizer\.lr.*[Nn]"),
        ("optimizer", {"lr": -1}, r"optimizer\.lr is -1"),
        ("optimizer", {"nesterov": "perhaps"}, r"optimizer\.nesterov.*'perhaps'"),
        ("optimizer", {"lr": [1, 2]}, r"optimizer\.lr"),
    ],
)
def test_a_key_or_value_that_does_not_fit_is_named_with_group(group: str, node: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        components.build(group, {"_target_": "lockstep.optim.SGD", **node})


@pytest.mark.parametrize("node", [None, "resnet18", 3, {}, {"lr": 0.1}, []])
def test_a_group_without_an_option_is_refused(node: Any) -> None:
    with pytest.raises(InputError, match="expected one of the group's options: model=NAME"):
        components.build("model", node)


NO_CLASS_OF_THEIRS: dict[str, tuple[Any, ...]] = {
    "model": (
        *("os.system", "lockstep.core.run_dir.RunDir", "lockstep.optim.SGD", "lockstep.models.nets.BasicNet"),
        *("lockstep.models.zoo", "lockstep.models..BasicNet", "BasicNet", "", None, ["lockstep.models.BasicNet"]),
    ),
    "dataset": ("lockstep.data.datasets.ArraySource", "lockstep.data.datasets.ArraySplit"),
    "loader": ("lockstep.data.loading.World", "lockstep.runtime.host.cores"),
    "optimizer": ("lockstep.optim.OptimizerOption",),
    "schedule": ("lockstep.optim.schedule.Plan",),
    "launcher": ("lockstep.launcher.elastic.launch_env", "lockstep.launcher.__doc__"),
    "loss": ("lockstep.losses.MaskedLoss",),
    "strategy": ("lockstep.strategy.base.Single",),
}


@pytest.mark.parametrize(
    ("group", "target"), [(key, name) for key, row in NO_CLASS_OF_THEIRS.items() for name in row]
)
def test_a_node_can_name_no_code_but_the_classes_of_its_group(group: str, target: Any) -> None:
    with pytest.raises(InputError, match=rf"{group}\._target_ is .*, expected a class of {GROUPS[group]}"):
        components.build(group, {"_target_": target})


def star_import(module: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(f"from {module} import *", names)
    return names


@pytest.mark.parametrize("group", GROUPS)
def test_the_package_of_a_group_has_each_class_and_imports_its_module_alone(group: str) -> None:
    package = importlib.import_module(GROUPS[group])
    ours = {cls for cls in classes_of(group).values() if cls.__module__.startswith("lockstep.")}
    assert {cls.__name__: cls.__module__ for cls in ours} == modules_of(group)
    assert all(getattr(package, cls.__name__) is cls for cls in ours)
    assert modules_of(group).keys() <= {*dir(package)} & {*star_import(GROUPS[group])}
    assert vars(package).keys() <= {*dir(package)}, "as of any module"
    assert not hasattr(package, "OptimizerOption" if group == "optimizer" else "Policy")
    targets = re.findall(r"_target_: (\S+)", "".join(path.read_text() for path in (CONF / group).glob("*.yaml")))
    assert {*targets} == {f"{GROUPS[group]}.{name}" for name in modules_of(group)}


def test_hydras_own_keys_mean_nothing_in_a_node() -> None:
    for key in ("_partial_", "_args_", "_convert_", "_recursive_"):
        with pytest.raises(InputError, match=f"model.{key}"):
            components.build("model", {"_target_": "lockstep.models.BasicNet", key: True})


def test_a_key_that_no_job_has_is_the_users_mistake() -> None:
    for change in ({"epoch": 3}, {"train": {"microbatches": 3}}, {"epochs": "many"}):
        with pytest.raises(InputError, match=next(iter(change))):
            components.build_job({**composed(), **change})
    for block in ({"train": 3}, {"telemetry": "off"}, {"checkpoint": None}):
        with pytest.raises(InputError):
            components.build_job({**composed(), **block})
    with pytest.raises(InputError, match="model is null"):
        components.build_job({key: value for key, value in composed().items() if key != "model"})


@pytest.mark.parametrize("number", [*FULL, errno.EACCES])
def test_every_error_of_a_full_disk_is_told_as_one_and_no_other(number: int) -> None:
    translated = messages.translate(OSError(number, "odd", "outputs/run"))
    assert (translated is not None) == (number in FULL)
    if translated is not None:
        assert type(translated) is StorageError
        assert str(translated) == "outputs/run cannot be written (odd); free space there"


def test_an_error_is_shown_line_by_line_and_only_the_users_is_translated(capsys: pytest.CaptureFixture[str]) -> None:
    assert messages.translate(ValueError("odd")) is None
    refused = InputError("no")
    assert messages.translate(refused) is refused
    program.explain(InputError("one", "two"))
    assert capsys.readouterr().err == "lockstep: one\nlockstep: two\n"
    assert str(InputError("of a\nname", "two\x1b")) == "of a\\nname\ntwo\\x1b", "a line for each problem"
    program.explain(RankFailed("rank 1 failed", "Traceback\n  here\n"))
    assert capsys.readouterr().err == "Traceback\n  here\nlockstep: rank 1 failed\n"


def test_an_earlier_command_composes_again_with_the_new_overrides_behind_it() -> None:
    with initialize_config_dir(str(CONF)):
        job = composition.recompose(["name=x", "epochs=3", "augment=crop_flip"], ("epochs=9",), ConfigFiles())
    assert (job["epochs"], job["name"]) == (9, "x")
    assert components.build("augment", job["augment"]) == CropFlip()


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("hydra.job.name=x", "the run keeps the override 'hydra.job.name=x', expected keys of a job; remove it"),
        ("hydra/launcher=basic", "the run keeps the override 'hydra/launcher=basic', expected keys of a job; remove"),
        ("hydra.job.chdir=true", "'hydra.job.chdir=true': a job stays in the folder of its command; remove hydra"),
        ("name=\udc80", "'name=\\udc80' is not valid Unicode; write it in UTF-8"),
    ],
)
def test_a_run_folder_keeps_the_keys_of_a_job_alone(word: str, sentence: str) -> None:
    with pytest.raises(InputError, match=f"^{re.escape(sentence)}"):
        composition.recompose(["seed=1", word], (), ConfigFiles())


def test_an_option_has_the_name_of_its_class_in_snake_case_and_a_group_of_a_users_the_name_of_no_key() -> None:
    names = {"ResNet18": "res_net18", "SGD": "sgd", "AdamW": "adam_w", "MyNet2Go": "my_net2_go", "x": "x"}
    assert {name: options.name_from(name) for name in names} == names
    assert options.can_be_group("debug")
    unfit = (*GROUPS, *vars(Job()), "experiment", "hydra", "a-b", "a/b", "", "a.b")
    assert [name for name in unfit if options.can_be_group(name)] == []


def test_the_default_of_a_key_is_the_one_of_the_default_job_and_of_the_first_option_that_has_it() -> None:
    job = composed()
    for key, value in leaves(job):
        if key.partition(".")[0] in (*VALUE_KEYS,) and key != "name":
            assert options.default_of_key(key) == value, key
    assert options.default_of_key("optimizer.nesterov") is SGD().nesterov
    assert options.default_of_key("optimizer.none_has_it") is options.default_of_key("none_has_it") is None


def test_the_values_of_a_config_are_in_its_own_words() -> None:
    words = {"null": None, "true": True, "false": False, "none": [], "a, null, 1.5": ["a", None, 1.5], "0": 0, "": ""}
    assert {options.value_text(value): value for value in words.values()} == words


KEYS_OF_MANY = [
    (g, c, f.name) for g in sorted(MANY) for c in classes_of(g).values() for f in dataclasses.fields(c) if f.init
]


@pytest.mark.parametrize(("group", "cls", "key"), KEYS_OF_MANY, ids=lambda value: getattr(value, "__name__", value))
def test_a_wrong_value_of_a_named_component_is_refused_by_its_name(group: str, cls: type[Any], key: str) -> None:
    with pytest.raises(InputError, match=rf"^{group}\.mine\.{key} is "):
        components.build_many(group, {"mine": {**components.node(cls()), key: [["wrong"]]}})


@pytest.fixture
def _declared_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test declares as an option is one in this test alone."""
    monkeypatch.setattr(options, "_DECLARED", {**options._DECLARED})


def built_by_nobody(*_: object) -> None:
    """The method that the protocols of most groups ask for."""


def own_class(**attributes: Any) -> type[Any]:
    hints = {name: attributes.pop(f"{name}_hint") for name in ("width",) if f"{name}_hint" in attributes}
    return type("Own", (), {"__module__": __name__, "__annotations__": hints, "build": built_by_nobody, **attributes})


def unfinished() -> type[Any]:
    class Own(Model):
        width: int = 3

    return Own


NO_OPTION: list[tuple[str, str | None, Callable[[], type[Any]], str]] = [
    ("modle", None, own_class, "Own declares an option of 'modle', which is not a group. Did you mean 'model'?"),
    (
        "zzz",
        None,
        own_class,
        "Own declares an option of 'zzz', which is not a group. The groups are model, dataset, ",
    ),
    ("model", "linear", own_class, "model=linear is an option of Lockstep; give Own another name"),
    ("model", "resnet50d", own_class, "model=resnet50d is an option of Lockstep; give Own another name"),
    ("model", "taken", own_class, "model=taken is declared at "),
    (
        *("model", None, lambda: own_class(width=3)),
        "Own.width has no type, so it is no key of the config; write `width: int = 3`, or ClassVar if",
    ),
    (
        *("model", None, lambda: own_class(width=None, width_hint=nn.Module)),
        "a field of Own has a type that a config cannot hold (",
    ),
    (
        *("model", None, lambda: type("Own", (), {})),
        "Own has no build, which an option of model needs; write what lockstep.core.protocols.Model says",
    ),
    (
        *("model", None, lambda: type("Own", (), {"__module__": "builtins"})),  # as of `exec`
        "Own has no build, which an option of model needs; write what lockstep.core.protocols.Model says",
    ),
    (
        "model",
        None,
        unfinished,
        "Own has no build, which an option of model needs; write what lockstep.core.protocols",
    ),
    (
        *("launcher", None, lambda: own_class(ranks=property(built_by_nobody))),
        "Own has no backend and no launch and no threads and no timeout, which an option of launcher needs; ",
    ),
]


@pytest.mark.usefixtures("_declared_here")
@pytest.mark.parametrize(("group", "name", "make", "sentence"), NO_OPTION)
def test_a_class_that_can_be_no_option_is_refused_at_its_place(
    group: str, name: str | None, make: Callable[[], type[Any]], sentence: str
) -> None:
    option("model", "taken")(type("Other", (), {"build": built_by_nobody}))
    before = {**options._DECLARED}
    with pytest.raises(InputError) as refused:
        option(group, name)(make())
    place, _, says = str(refused.value).partition(": ")
    assert place.rpartition(":")[0] in (__file__, "") or place in (__name__, "builtins")
    assert says.startswith(sentence)
    assert before == options._DECLARED


@pytest.mark.usefixtures("_declared_here")
def test_an_option_has_what_its_group_has_by_default_and_its_own_in_place_of_it() -> None:
    @option("model")
    class OfMine:
        shared: ClassVar[list[int]] = [1]
        _private = 3
        width: int = 3
        sizes: list[list[int]] = [[1], [2]]  # noqa: RUF012
        names: dict[str, int] = {"a": 1}  # noqa: RUF012
        compile_mode = "max_autotune"  # the protocol says its type

        def build(self, *_: object) -> Any: ...

        def check(self) -> str:
            return "mine"

        @property
        def area(self) -> int:
            return self.width**2

    of: Any = OfMine
    one, two = of(), of(width=4)
    assert [field.name for field in dataclasses.fields(of)] == ["width", "sizes", "names"]
    assert (one.width, two.width, two.area, one.check(), one.compile_mode) == (3, 4, 16, "mine", "max_autotune")
    one.sizes[0].append(9)
    one.names["b"] = 2
    assert (two.sizes, two.names) == ([[1], [2]], {"a": 1}), "each object has its own"
    assert one.shared is two.shared
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.width = 5
    with pytest.raises(TypeError, match="positional argument"):
        of(3)
    for name in ("has_usual_size", "trained_input", "missing_weights"):
        assert inspect.getattr_static(of, name) is inspect.getattr_static(Model, name)
    assert options.declared("model")["of_mine"] is of
    assert (options.option_name(of), options.option_name(int)) == ("of_mine", "int")
    assert options.class_path(of).startswith(f"{__name__}.test_an_option_has_what")
    assert options.class_path(SGD) == "lockstep.optim.SGD"
    callback = option("callback", "counts")(
        type("Counts", (Callback,), {"steps": 0, "__annotations__": {"steps": int}})
    )
    counting = callback()
    counting.steps = 3
    assert options.declared("callback")["counts"] is callback
    option("callback", "counts")(callback)  # again, as a module that is imported twice
    assert option("model", "again")(of) is of, "a second name"


class Colour(enum.Enum):
    red = 1
    blue = 2


@dataclasses.dataclass(frozen=True)
class Frame:
    colour: Colour = Colour.red


def containers(node: Any) -> Iterator[Any]:
    """The lists and the mappings in a plain value, and itself if it is one."""
    if isinstance(node, list | dict):
        yield node
        for value in node.values() if isinstance(node, dict) else node:
            yield from containers(value)


def test_what_is_done_to_a_plain_config_changes_no_job() -> None:
    job = built("optimizer=timm", "+optimizer.options={a: {b: [1, [2]]}}", "metric=[f1]", "train.freeze=[x]")
    plain = {key: value for key, value in components.plain(job).items() if key != "tags"}
    before = copy.deepcopy(plain)
    assert all(part in [*containers(plain)] for part in ([1, [2]], [2], ["x"]))
    for node in [*containers(plain)]:
        node.append("more") if isinstance(node, list) else node.update(more=1)
    assert {**before, "tags": []} == components.plain(job)


@pytest.mark.usefixtures("_declared_here")
def test_a_node_has_the_names_of_an_enum_and_the_usual_loss_of_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.config.extensions.import_extension", lambda module: True)

    @option("model")
    class Painted:
        colour: Colour = Colour.red
        frame: Frame = dataclasses.field(default_factory=Frame)

        def build(self, *_: object) -> Any: ...

    of: Any = Painted
    node = options.default_node("model", of)
    assert node == {"_target_": options.class_path(of), "colour": "red", "frame": {"colour": "red"}}
    blue = {**node, "colour": "blue", "frame": {"colour": "blue"}}
    assert components.build("model", blue) == of(colour=Colour.blue, frame=Frame(Colour.blue))
    assert components.node(of(colour=Colour.blue, frame=Frame(Colour.blue))) == blue
    defaults = {
        name: options.default_node("task", cls).get("defaults") for name, cls in options.declared("task").items()
    }
    assert defaults["multilabel"] == [{"override /loss@_global_.loss": "bce"}]
    assert defaults["multiclass"] is None


def test_what_is_lockstep_s_own_is_told_by_its_package() -> None:
    modules = {"lockstep.optim": True, "lockstep.a.b": True, "lockstep": False, "lockstep_more.x": False, "x": False}
    modules["lockstep.training.objects"] = False
    assert {module: options.is_ours(type("A", (), {"__module__": module})) for module in modules} == modules
    builtin = {("model", "linear"): True, ("model", "resnet50d.ra2_in1k"): True, ("loss", "resnet50d"): False}
    builtin |= {("model", "torchvision.resnet18"): True, ("loss", "linear"): False, ("none", "linear"): False}
    assert {names: options.is_builtin(*names) for names in builtin} == builtin


def test_what_differs_from_the_defaults_is_the_options_and_then_the_keys() -> None:
    choices = {
        group: name
        for item in yaml.safe_load((CONF / "config.yaml").read_text())["defaults"]
        for group, name in (item.items() if isinstance(item, dict) else ())
    }
    assert [*options.differences(composed(), choices)] == [*options.differences({}, choices)] == []
    words = ["seed=3", "optimizer=sgd", "optimizer.momentum=0.5", "metric=[f1,recall]", "metric.f1.average=micro"]
    rows = [*options.differences(composed(*words, "train.ema=0.9"), {**choices, "optimizer": "sgd"})]
    assert rows == [
        *(("optimizer", "sgd", "adamw"), ("metric", ["f1", "recall"], [])),
        *(("seed", 3, 0), ("train.ema", 0.9, None), ("optimizer.momentum", 0.5, 0.9)),
        ("metric.f1.average", "micro", "macro"),
    ]
    recipe = [*options.differences(composed(), {**choices, "experiment": "photos", "loss": "bce"})]
    assert recipe[:2] == [("loss", "bce", "cross_entropy"), ("experiment", "photos", None)]
    of_timm = [*options.differences(composed("model=resnet50d"), {**choices, "model": "resnet50d"})]
    assert of_timm == [("model", "resnet50d", "digitnet")], "without a file, its keys have no defaults"


def test_the_annotations_of_a_config_are_those_that_say_something() -> None:
    config = {"notes": "x", "tags": ["a", "b"], "run_group": None, "seed": 3}
    assert [*options.annotations_of(config).items()] == [("tags", "a, b"), ("notes", "x")]
    assert options.annotations_of({"notes": "", "tags": []}) == {}


@pytest.mark.parametrize("group", [*GROUPS, "experiment"])
def test_the_options_of_a_group_are_listed_by_name(group: str) -> None:
    names = options.options_of(group)
    assert names == sorted(names) != []


@pytest.mark.usefixtures("_declared_here")
def test_the_options_of_a_group_are_those_with_files_and_all_that_is_declared() -> None:
    before = options.options_of("model")
    for name in ("zz_mine", "aa_mine"):
        option("model", name)(own_class())
    assert options.options_of("model") == sorted([*before, "aa_mine", "zz_mine"])
    assert options.options_of("none") == options.options_of("mod") == []


def test_a_group_that_is_like_no_other_is_told_all_that_there_are() -> None:
    assert options.known("zzz", ["model", "experiment", "mine"]) == " The groups are model, experiment, mine."
    assert options.known("modell", ["model", "mine"]) == " Did you mean 'model'?"


def test_the_modules_of_a_group_are_imported_in_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    imported: list[str] = []
    modules = [*dict.fromkeys(options.modules_of("dataset").values())]
    monkeypatch.setattr(importlib, "import_module", imported.append)
    options.classes_of("dataset")
    assert imported == modules == sorted(modules)
    assert len(modules) > 5


def test_several_options_of_a_group_have_the_order_of_their_config() -> None:
    nodes = {name: components.node(F1()) for name in ("second", "first", "third")}
    built = components.build_many("metric", nodes)
    assert [*built] == ["second", "first", "third"]
    job = dataclasses.replace(components.build_job(composed()), metric=built)
    assert [*components.plain(job)["metric"]] == ["second", "first", "third"]


@pytest.mark.parametrize("nodes", ["f1", ["f1"], [], "", 0, 3, {"_target_": "lockstep.metrics.F1"}], ids=repr)
def test_a_group_of_many_that_is_no_mapping_of_names_is_refused(nodes: Any) -> None:
    with pytest.raises(InputError, match=r"^metric is .*, expected names of its options: metric=\[NAME,NAME\]$"):
        components.build_many("metric", nodes)
    assert components.build_many("metric", None) == components.build_many("metric", {}) == {}
    with pytest.raises(InputError, match=r"^metric has the name 'a\\nb', expected"):
        components.build_many("metric", {"good": components.node(F1()), "a\nb": components.node(F1())})


def test_a_component_takes_true_and_false_alone_and_says_what_it_has() -> None:
    node = {"_target_": "lockstep.optim.SGD"}
    assert [components.build("optimizer", {**node, "nesterov": value}).nesterov for value in (0, 1)] == [False, True]
    with pytest.raises(
        InputError, match=r"^optimizer\.nesterov is 2, expected true or false: optimizer\.nesterov=true$"
    ):
        components.build("optimizer", {**node, "nesterov": 2})
    with pytest.raises(InputError) as refused:
        components.build("optimizer", {**node, "momentum": -1, "nesterov": 2, "decay_all": 3})
    momentum, *switches = str(refused.value).splitlines()
    assert momentum.startswith("optimizer.momentum is -1")
    assert switches == [
        f"optimizer.{key} is {value}, expected true or false: optimizer.{key}=true"
        for key, value in (("nesterov", 2), ("decay_all", 3))
    ]
    with pytest.raises(InputError, match=r"^precision\.x is not a key of precision=fp32; it has none\.$"):
        components.build("precision", {"_target_": "lockstep.precision.FP32", "x": 1})
    kinds = [components.build("precision", {"_target_": f"lockstep.precision.{name}"}) for name in ("FP32", "FP64")]
    assert [type(kind).__name__ for kind in kinds] == ["FP32", "FP64"], "of equal values, each is of its class"
    with pytest.raises(InputError, match=r"; a recipe chooses it with `- override /model: resnet18`$"):
        components.build("model", "resnet18")
    with pytest.raises(InputError, match=r"model=NAME$"):
        components.build("model", None)


def test_all_that_is_wrong_with_a_job_is_said_and_the_objects_of_a_program_are_its_parts() -> None:
    values = composed("metric=[f1]")
    wrong = {**values, "seed": -1, "epochs": 0}
    wrong["train"] = {**values["train"], "mixup": -1, "cutmix": -2}
    with pytest.raises(InputError) as refused:
        components.build_job(wrong)
    keys = [line.partition(" ")[0] for line in str(refused.value).splitlines()]
    assert sorted(keys) == ["epochs", "seed", "train.cutmix", "train.mixup"]
    module = nn.Linear(2, 2)
    node = {"_target_": "lockstep.training.objects.ModelObject", "type": "Linear"}
    job = components.build_job({**values, "model": node}, {"model": module})
    assert vars(job.model)["original"] is module
    assert vars(components.build_job({**values, "model": node}).model)["original"] is None


def test_the_options_of_a_group_that_need_no_key_are_listed_with_those_of_extensions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loaded: list[str] = []
    mine = SimpleNamespace(load=lambda: loaded.append("mine"), has=lambda module: False)
    monkeypatch.setattr("lockstep.config.extensions.active", lambda: (mine,))
    listed = components.all_options("dataset")
    assert loaded == ["mine"]
    assert [*listed] == sorted(listed)
    assert {"digits", "fake"} <= listed.keys()
    assert not {"folder", "csv", "hf", "packed", "torchvision", "webdataset"} & listed.keys()


@pytest.mark.usefixtures("_declared_here")
def test_a_task_brings_its_metrics_and_the_config_may_change_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.config.extensions.import_extension", lambda module: True)
    assert [*components.metrics_of(Multilabel(), {})] == ["map", "f1", "subset_accuracy"]
    micro, more = F1(average="micro"), F1(average="none")
    chosen_ones = components.metrics_of(Multilabel, {"more": more, "f1": micro})
    assert [*chosen_ones] == ["map", "f1", "subset_accuracy", "more"]
    assert (chosen_ones["f1"], chosen_ones["more"]) == (micro, more)

    @option("metric", "of_mine")
    class Mine:
        half: float = 0.5

        def build(self, *_: object) -> Any: ...

    of: Any = SimpleNamespace(metrics=("of_mine", "mae"))
    assert [type(metric).__name__ for metric in components.metrics_of(of, {}).values()] == ["Mine", "MAE"]


def test_a_config_is_written_as_people_read_it(tmp_path: Path) -> None:
    shared = [1, 2]
    text = components.dump({"b": shared, "a": shared, "name": "é日"})
    assert text == "b:\n- 1\n- 2\na:\n- 1\n- 2\nname: é日\n"
    assert components.dump(("seed=1", "name=é")) == "- seed=1\n- name=é\n"
    (file := tmp_path / "config.yaml").write_text(text)
    assert components.read_config(file) == {"b": [1, 2], "a": [1, 2], "name": "é日"}
    for wrong in ("", "{}", "[]", "- a", "a", "a: ${b}\n", "a: {b: ['x ${c}']}\n"):
        file.write_text(wrong)
        with pytest.raises(InputError, match=r"is not a config of a run: expected keys and their resolved values$"):
            components.read_config(file)


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("+model=linear", "the job has this group already, so it is chosen without +: model=linear"),
        ("+experiment=photos", "chosen without +: experiment=photos"),
        ("~model", "the job cannot be without this group; remove ~model"),
        ("~logger", "take none of its options with logger=[]"),
        ("model=[linear,basicnet]", "'model=[linear,basicnet]': a config group takes the name of one of its options"),
        ("model=[linear]", "a config group takes the name of one of its options: model=basicnet"),
        ("model=[]", "a config group takes the name of one"),
        ("logger=[1]", "'logger=[1]': a config group takes a list of names of its options: logger=[]"),
        ("logger=[[jsonl]]", "a config group takes a list of names"),
        ("callback=[agc,null]", "a config group takes a list of names of its options: callback=[]"),
        ("experiment=[true]", "a config group takes the name of one of its options: experiment="),
    ],
)
def test_a_group_is_chosen_by_names_and_without_a_sign(word: str, says: str) -> None:
    with pytest.raises(InputError, match=re.escape(says)):
        composition.typed_words(["epochs=3", word])


@pytest.mark.parametrize(
    "word",
    [
        *("model=linear", "model=linear,basicnet", "logger=[]", "logger=[jsonl,tensorboard]", "logger=[jsonl],[]"),
        *("experiment=[photos]", "experiment=mine/one", "+model.width=3", "~model.width", "callback=[broken"),
        *("++logger.own.folder=a", "model={width:3}", "train.sizes=[1]", "~experiment"),
    ],
)
def test_other_words_of_a_group_are_hydras(word: str) -> None:
    assert composition.typed_words([word]) == [word]


@pytest.mark.parametrize(
    ("words", "proposal"),
    [
        (["epochs=3 seed=1"], "epochs=3 seed=1"),
        (["epochs=3 fast"], ""),
        (["name=a", "b", "seed=1"], "'name=a b'"),
        (["name='a", "b", "c'"], "'name='\"'\"'a b c'\"'\"''"),
        (["epochs=3"], ""),
    ],
    ids=str,
)
def test_words_in_one_pair_of_quotes_are_proposed_if_all_of_them_are_overrides(
    words: list[str], proposal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["train.py", *words])
    assert messages._quoted(words[0]) == proposal


@pytest.mark.parametrize(
    ("words", "proposal"),
    [
        (["name", "a:b"], "name=a:b"),
        (["name", "{a"], "'name=\"{a\"'"),
        (["name", "x y"], "'name=x y'"),
        (["name=", "[1"], "'name=\"[1\"'"),
        (["name", "=", "a"], "name=a"),
        (["name", "=a"], "name=a"),
        (["name", "seed=1"], ""),
        (["name", "-m"], ""),
        (["name"], ""),
    ],
    ids=str,
)
def test_a_key_and_the_value_behind_a_space_are_proposed_in_the_words_that_hydra_reads(
    words: list[str], proposal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["train.py", *words])
    assert messages._joined(words[-1] if words[0].endswith("=") else words[0]) == proposal
    assert all(messages.parsed(word) is not None for word in shlex.split(proposal))


AMBIGUOUS = {
    "metric=f1,auroc": "{} runs a sweep over them, and where a list is expected, it is written 'metric=[f1,auroc]'",
    "seed=1,2": "{} runs a sweep over them, and where a list is expected, it is written 'seed=[1,2]'",
    "model=linear,basicnet": "{} runs a sweep over them",
    "experiment=a,b": "{} runs a sweep over them",
    'name=a "b",c': 'a text with a comma has quotes: \'name="a \\"b\\",c"\'',
}


@pytest.mark.parametrize("is_own", [True, False])
@pytest.mark.parametrize("word", AMBIGUOUS)
def test_a_word_with_several_values_is_a_sweep_a_list_or_a_text_with_a_comma(
    word: str, is_own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lockstep.config.commands._WORDS", ["python", "mine.py"])
    monkeypatch.setattr(messages, "is_own_process", lambda: is_own)
    error = messages.translate(HydraException(f"Ambiguous value for argument '{word}'\n1. To use it as a list, ..."))
    way = f"`{shlex.join(['python', 'mine.py', '-m', word])}`" if is_own else f'lockstep.sweep(["{word}"])'
    assert str(error) == f"{word} names several values; {AMBIGUOUS[word].format(way)}"


def test_what_hydra_proposes_that_leads_nowhere_is_left_out() -> None:
    for hint in ("To append to your config use +a=1", "Or add a second + to override"):
        assert (
            str(messages.translate(HydraException(f"Could not  override 'a'.\n{hint}"))) == "Could not override 'a'."
        )
    gone = messages.translate(HydraException("Could not delete from config. The value of 'a' is 1 and not 'b=2'."))
    assert str(gone) == "b=2 has no such value that could go; remove ~b=2"
    swept = HydraException("Sweeping over Hydra's configuration is not supported : 'hydra.sweeper.params.seed=1,2'")
    assert str(messages.translate(swept)) == "the values of a sweep are words of its line: -m seed=1,2"


def test_a_lack_of_memory_is_told_as_one_and_a_full_disk_without_a_name_as_a_file() -> None:
    lacking = messages.translate(MemoryError())
    assert str(lacking).startswith("out of memory")
    assert not isinstance(lacking, InputError)
    assert str(messages.translate(OSError(errno.ENOSPC, "full"))).startswith("a file cannot be written (full); free")


A_SWEEP = "is a flag, expected KEY=VALUE; a sweep is lockstep.sweep([...]), or lockstep train -m"
READ_AS = {
    "-m": f"'-m' {A_SWEEP}",
    "--multirun": f"'--multirun' {A_SWEEP}",
    "--cfg": "'--cfg' is a flag, expected KEY=VALUE",
    "resume": "resume has no value, expected resume=latest",
    "init_from": "init_from has no value, expected init_from=latest",
    "epochs": "epochs has no value, expected epochs=VALUE",
    "a b": "'a b' cannot be read, expected KEY=VALUE; a value with spaces, commas, brackets or accents needs quotes",
    "a=[": "'a=[' cannot be read, expected KEY=VALUE; a value with spaces, commas, brackets or accents needs quotes",
}


@pytest.mark.parametrize("word", READ_AS)
def test_a_word_that_cannot_be_read_is_answered_by_what_it_looks_like(
    word: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["train.py", "seed=1", word])
    error = messages.translate(OverrideParseException(override=word, message="odd"))
    assert type(error) is InputError
    assert str(error).startswith(READ_AS[word])
    assert len(str(error)) > len(READ_AS[word]) or "needs quotes" not in READ_AS[word]
    assert str(error) == READ_AS[word] or "needs quotes" in READ_AS[word]


def test_a_model_of_a_library_is_known_by_its_name_there_with_or_without_a_tag() -> None:
    models = {
        "resnet50d": ("timm", "resnet50d"),
        "resnet50d.ra2_in1k": ("timm", "resnet50d.ra2_in1k"),
        "torchvision.resnet50": ("torchvision", "resnet50"),
        "torchvision.resnet50.IMAGENET1K_V2": ("torchvision", "resnet50.IMAGENET1K_V2"),
    }
    models |= dict.fromkeys(("torchvision", "torchvision.", "torchvision.resnet50d", "timm.resnet50d", "zzz"))
    assert {name: options.model_of(name) for name in models} == models
    tags = options.tagged_names("torchvision.resnet50")
    assert tags == [f"torchvision.resnet50.IMAGENET1K_V{number}" for number in (1, 2)]
    assert options.tagged_names("resnet50d")[0] == min(options.tagged_names("resnet50d"))
    assert {name.partition(".")[0] for name in options.tagged_names("resnet50")} == {"resnet50"}, "of no longer name"
    assert options.tagged_names("zzz") == options.tagged_names("torchvision.zzz") == []


def test_the_first_option_that_has_a_key_says_its_default() -> None:
    first = yaml.safe_load((CONF / "schedule" / "exponential.yaml").read_text())["gamma"]
    assert options.usual("schedule", "gamma") == options.default_of_key("schedule.gamma") == first
    assert options.options_with("schedule", "gamma") == ["exponential", "plateau", "step"]
    assert options.options_with("optimizer", "nesterov") == ["sam", "sgd"], "also where it is off"
    assert options.options_with("schedule", "zzz") == options.options_with("zzz", "gamma") == []
    assert options.usual("zzz", "gamma") is None


def test_the_package_of_a_group_lacks_other_names_as_a_module_does() -> None:
    models = importlib.import_module("lockstep.models")
    with pytest.raises(AttributeError, match=r"^module 'lockstep\.models' has no attribute 'Nothing'$"):
        _ = models.Nothing
    assert dir(models) == sorted(dir(models))
    assert {"Linear", "__name__"} <= {*dir(models)}


@pytest.mark.usefixtures("_declared_here")
def test_an_option_may_change_what_its_base_classes_have_without_a_type() -> None:
    class Base:
        depth = 3
        width: int

    @option("model", "of_a_base")
    class OfBase(Base):
        depth = 4
        width = 5

        def build(self, *_: object) -> Any: ...

    assert options.declared("model")["of_a_base"] is OfBase
    assert (OfBase.depth, OfBase.width) == (4, 5)


@pytest.mark.usefixtures("_declared_here")
def test_classes_of_another_process_are_declared_under_its_names() -> None:
    options.declare({("model", "of_theirs"): F1, ("metric", "of_theirs"): SGD})
    assert options.declared("model")["of_theirs"] is F1
    options.declare({("model", "of_theirs"): SGD})
    assert options.declared("model")["of_theirs"] is SGD, "the last one counts, as in a cell that runs again"
    assert options.declared("metric")["of_theirs"] is SGD
    assert "f1" in options.declared("metric"), "those of before are there, too"
    assert options.classes_of("metric")["of_theirs"] is SGD
    options.declare({("metric", "of_theirs"): F1})
    assert options.classes_of("metric")["of_theirs"] is F1, "also where the group has been asked for before"


@pytest.mark.usefixtures("_declared_here")
def test_a_class_that_is_declared_again_is_built_instead_of_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.config.extensions.import_extension", lambda module: True)
    for _ in range(2):

        @option("model", "again")
        class Again:
            width: int = 3

            def build(self, *_: object) -> Any: ...

        assert type(components.build("model", options.default_node("model", Again))) is Again


@pytest.mark.parametrize("group", GROUPS)
def test_the_modules_of_a_group_have_an_order_that_no_disk_decides(
    group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = Path.glob
    monkeypatch.setattr(Path, "glob", lambda *words: sorted(listed(*words), reverse=True))
    modules = [*dict.fromkeys(modules_of.__wrapped__(group).values())]
    assert modules == sorted(modules)


def without_key(message: str, key: str = "") -> OmegaConfBaseException:
    error = OmegaConfBaseException(message)
    error.full_key = error.key = key
    return error


def test_a_value_without_a_key_is_that_of_the_word_with_a_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["train.py", "seed=1", "+train.ema=${x}", "name=${y}"])
    message = "Interpolation key 'x' not found"
    assert messages.sentence(without_key(f"{message}\n    more of it")) == f"train.ema: {message}"
    assert messages.sentence(without_key(message, "batch")) == f"batch: {message}"
    assert messages.sentence(without_key(message, "batch"), "train.") == f"train.batch: {message}"
    assert messages.sentence(without_key("odd")) == "odd"
    assert messages.sentence(without_key("a: odd", "a")) == "a: odd", "the key once"
    monkeypatch.setattr("sys.argv", ["train.py", "seed=1"])
    assert messages.sentence(without_key(message)) == message
    of_group = "a group is a reference, expected the name of an option: GROUP=NAME"
    assert messages.sentence(without_key("odd", "_dummy_")) == of_group


def test_the_extensions_are_named_with_their_origins(monkeypatch: pytest.MonkeyPatch) -> None:
    both = tuple(extensions.Extension(name, f"of {name}", Path()) for name in ("b", "a"))
    monkeypatch.setattr(extensions, "active", lambda: both)
    assert extensions.named_extensions() == "b (of b), a (of a)"
    monkeypatch.setattr(extensions, "active", tuple)
    assert extensions.named_extensions() == "none"


def test_values_that_no_number_holds_are_the_users_mistake() -> None:
    values = composed()
    for wrong in ({"train": {**values["train"], "clip_norm": 10**400}}, {"cost": {"usd_per_gpu_hour": 10**400}}):
        with pytest.raises(InputError):
            components.build_job({**values, **wrong})
    with pytest.raises(InputError, match=r"^optimizer\.lr|^the config cannot be composed"):
        components.build("optimizer", {"_target_": "lockstep.optim.SGD", "lr": 10**400})


def test_values_that_are_nested_too_deeply_are_the_users_mistake() -> None:
    options = functools.reduce(lambda inner, _: {"a": inner}, range(900), {"a": 1})
    with pytest.raises(InputError, match=r"^the config cannot be composed \(RecursionError: "):
        components.build("optimizer", {"_target_": "lockstep.optim.Timm", "opt": "lamb", "options": options})


def test_a_reference_to_nothing_is_named_by_its_key_and_a_value_that_is_missing_too() -> None:
    values = composed()
    with pytest.raises(InputError, match=r"^name: Interpolation key 'no\.such\.key' not found"):
        composition.to_dict(OmegaConf.create({**values, "name": "${no.such.key}"}))
    with pytest.raises(InputError, match=r"^model\.width has no value; give it one with model\.width=VALUE$"):
        composition.to_dict(OmegaConf.create({**values, "model": {**values["model"], "width": "???"}}))
    del values["seed"]
    with pytest.raises(InputError, match=r"^seed: this key is required; remove ~seed$"):
        composition.to_dict(OmegaConf.create(values))


def test_the_keys_of_all_dictionaries_are_texts_as_in_the_files_of_runs() -> None:
    values = composed()
    values["train"]["sizes"] = values["model"]["options"] = {0: {1: 2}}
    plain = composition.to_dict(OmegaConf.create(values))
    assert plain["train"]["sizes"] == plain["model"]["options"] == {"0": {"1": 2}}


class FirstOfTwo:
    def build(self, *_: object) -> Any: ...


class SecondOfTwo:
    untyped = 3

    def build(self, *_: object) -> Any: ...


def line_of(name: str) -> int:
    return Path(__file__).read_text().splitlines().index(f"class {name}:") + 1


@pytest.mark.usefixtures("_declared_here")
def test_a_wrong_option_is_named_with_the_file_and_the_line_of_its_class_and_of_the_other() -> None:
    first, second = (f"{__file__}:{line_of(name)}" for name in ("FirstOfTwo", "SecondOfTwo"))
    with pytest.raises(InputError, match=rf"^{re.escape(second)}: SecondOfTwo\.untyped has no type"):
        option("model", "one_of_two")(SecondOfTwo)
    option("model", "one_of_two")(FirstOfTwo)
    del SecondOfTwo.untyped
    says = re.escape(f"{second}: model=one_of_two is declared at {first} too; rename one of them")
    with pytest.raises(InputError, match=f"^{says}$"):
        option("model", "one_of_two")(SecondOfTwo)


@pytest.mark.usefixtures("_declared_here")
def test_a_class_that_a_notebook_defines_again_takes_the_place_of_the_first() -> None:
    first, again = own_class(width=3, width_hint=int), own_class(width=4, width_hint=int)
    option("model", "mine")(first)
    option("model", "mine")(again)
    assert options.declared("model")["mine"]().width == 4
