"""The configuration: how it becomes typed objects, and the message for an invalid one."""

import dataclasses
import errno
import importlib
import itertools
import re
from typing import Any

import pytest

from helpers import ROOT, chosen, composed
from lockstep.config import components, composition, messages
from lockstep.config.composition import ConfigFiles
from lockstep.config.hydra_versions import initialize_config_dir
from lockstep.config.options import classes_of, modules_of
from lockstep.config.schema import GROUPS, MANY
from lockstep.core.errors import InputError, RankFailed, StorageError
from lockstep.core.safe_write import FULL
from lockstep.data.transforms.augment import CropFlip
from lockstep.launcher import Spawn
from lockstep.optim.optimizers import SGD, Timm
from lockstep.runtime import program

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
    with pytest.raises(InputError, match="model is None"):
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
    program.explain(RankFailed("rank 1 failed", "Traceback\n  here\n"))
    assert capsys.readouterr().err == "Traceback\n  here\nlockstep: rank 1 failed\n"


def test_an_earlier_command_composes_again_with_the_new_overrides_behind_it() -> None:
    with initialize_config_dir(str(CONF)):
        job = composition.recompose(["name=x", "epochs=3", "augment=crop_flip"], ("epochs=9",), ConfigFiles())
    assert (job["epochs"], job["name"]) == (9, "x")
    assert components.build("augment", job["augment"]) == CropFlip()
