"""What another value of a key makes of a run, for every key of the schema and of every option."""

import copy
import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from helpers import composed
from lockstep.config import components, options
from lockstep.config.options import classes_of, option
from lockstep.config.roles import fields_with, identity_of, is_sample, role_of, values_with
from lockstep.config.schema import BLOCKS, FIELDS, GROUPS, MANY, Job
from lockstep.core.fields import Role, declared_role, leaves, ranged, with_role
from lockstep.core.run_dir import RunDir
from lockstep.records.ledger import Identity
from lockstep.records.runs import differing, groups, read_runs
from lockstep.report.compare import causes

ANOTHER = {Role.identity, Role.schedule, Role.pixels, Role.start, Role.sample}
SAME = {*Role} - ANOTHER - {Role.rounding}


def test_a_role_makes_another_run_or_says_more_of_the_same_one() -> None:
    assert {role for role in Role if role.makes_another_run} == ANOTHER


def option_fields(group: str) -> dict[str, list[str]]:
    """The fields of each option of a group."""
    return {name: [field.name for field in dataclasses.fields(cls)] for name, cls in classes_of(group).items()}


@functools.cache
def configs() -> dict[str, dict[str, Any]]:
    """A config for every key of the schema and of every option."""
    return dict(_configs())


def _configs() -> Iterator[tuple[str, dict[str, Any]]]:
    plain = composed()
    yield from ((key, plain) for key, _ in leaves(plain) if key.partition(".")[0] not in GROUPS)
    for group in GROUPS:
        for name, names in option_fields(group).items():
            node = options.default_node(group, classes_of(group)[name])
            config = {**plain, group: {name: node} if group in MANY else node}
            prefix = f"{group}.{name}" if group in MANY else group
            yield from ((f"{prefix}.{field}", config) for field in names)


def changed(config: dict[str, Any], key: str) -> dict[str, Any]:
    """The config with another value of a key."""
    config = copy.deepcopy(config)
    *parents, name = key.split(".")
    node = config
    for parent in parents:
        node = node[parent]
    node[name] = [*node[name], 7] if isinstance(node[name], list) else f"not {node[name]}"
    return config


def written(folder: Path, config: dict[str, Any]) -> Path:
    """A run with a config, as it is composed, which is done."""
    run_dir = RunDir.at(folder)
    run_dir.composed.write_text(components.dump(config))
    run_dir.overrides.write_text("[]\n")
    run_dir.start_summary(run="r", started=1.0)
    run_dir.write_summary(status="completed", objective=1.0, monitor=config["monitor"])
    return folder


def test_every_key_of_the_schema_and_of_every_option_has_a_role() -> None:
    roles = {key: role_of(key, config) for key, config in configs().items()}
    assert len(roles) > 200
    assert {*roles.values()} == {*Role}
    named = {
        f"{field.name}.{name}": role
        for field in dataclasses.fields(Job)
        for name, role in field.metadata.get(FIELDS, {}).items()
    }
    assert not named.keys() - roles.keys(), "named in the schema, and a field of no option"
    assert all(roles[key] is role for key, role in named.items())
    ours = {cls for group in GROUPS for cls in classes_of(group).values() if cls.__module__.startswith("lockstep.")}
    own = [cls for cls in ours for field in dataclasses.fields(cls) if declared_role(cls, field.name) is not None]
    assert not own, "the role of a key of Lockstep's own option stands in the schema"
    assert {block for block in BLOCKS if role_of(block) not in (Role.identity,)} >= {"telemetry", "cost", "budget"}


@pytest.mark.slow
@pytest.mark.parametrize("role", Role)
def test_runs_are_told_apart_by_the_keys_that_make_another_run_alone(role: Role, tmp_path: Path) -> None:
    for key, config in configs().items():
        if role_of(key, config) is not role:
            continue
        other = changed(config, key)
        written(tmp_path / "a", config)
        written(tmp_path / "b", other)
        written(tmp_path / "c", {**other, "seed": 7})
        runs = read_runs(tmp_path)
        assert differing(runs[:2]) == ([] if role in SAME else [key]), key
        kind = {Role.rounding: "config, to rounding"}.get(role, "seed" if key == "seed" else "config")
        assert [(row["key"], row["cause"]) for row in causes(runs[:2])] == ([] if role in SAME else [(key, kind)])
        # A row of a table has the samples of a setting, and a run that was made twice with one seed is one sample.
        expected = [2] if role in SAME else [3] if role is Role.sample else [1, 2]
        assert sorted(row["done"] for row in groups(runs)) == expected
        assert bool(Identity(base=config).difference(Identity(base=other))) is (role in ANOTHER), key


def test_a_key_that_no_longer_exists_makes_another_run() -> None:
    gone = ("gone", "gone.key", "train.gone", "model.gone", "strategy.gone", "metric.gone.average")
    assert {role_of(key) for key in gone} == {Role.identity}


def test_a_key_of_an_option_whose_package_is_not_here_has_the_role_of_its_name() -> None:
    config = {group: {"_target_": "gone.Mine", "key": 1} for group in ("model", "strategy", "schedule", "logger")}
    for group in ("model", "schedule"):
        assert role_of(f"{group}.key", config) is role_of(group, config) is role_of(group)
    assert role_of("strategy.key", config) is Role.identity, "what it changes is not known"
    assert identity_of({"model": config["model"]}) == {"model._target_": "gone.Mine", "model.key": 1}


def test_the_choice_of_an_option_has_the_role_of_its_group_whatever_roles_its_keys_have() -> None:
    named = {"schedule": Role.schedule, "logger": Role.display, "strategy": Role.rounding, "loader": Role.rounding}
    makes = {group for group in GROUPS if role_of(group) is Role.identity}
    assert makes == {"model", "dataset", "task", "augment", "precision", "optimizer", "loss", "metric", "callback"}
    assert {group: role_of(group) for group in named} == named


def test_a_strategy_makes_no_other_run_unless_it_changes_more_than_the_order_of_sums() -> None:
    plain = composed()
    same = [composed(f"strategy={name}") for name in ("single", "ddp", "fsdp", "pipeline")]
    assert all(identity_of(config) == identity_of(plain) for config in same)
    other = composed("strategy=ddp", "strategy.comm_hook=fp16")
    assert identity_of(other) == {**identity_of(plain), "strategy.comm_hook": "fp16"}


def test_a_strategy_with_a_fixed_order_of_sums_is_the_run_of_repro_strict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "_DECLARED", {**options._DECLARED})
    monkeypatch.setattr("lockstep.config.extensions.import_extension", lambda module: True)

    @option("strategy")
    class Mine:
        fixed_order: ClassVar[bool] = True

    strict = identity_of(composed("repro=strict"))
    assert identity_of(composed("strategy=strict")) == strict
    assert identity_of({**composed(), "strategy": options.default_node("strategy", Mine)}) == strict
    assert identity_of({**composed(), "strategy": {"_target_": "gone.Strategy"}}) == identity_of(composed())


def test_a_key_of_an_option_of_a_users_has_the_role_that_its_class_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "_DECLARED", {**options._DECLARED})

    @option("strategy")
    class Mine:
        shards: int = ranged(2, least=1, most=8)
        buckets: int = with_role(Role.rounding, ranged(2, least=1, most=8))
        shown: bool = with_role(Role.display, False)
        dropped: float = ranged(0.0, least=0, most=1)

    config = {"strategy": options.default_node("strategy", Mine)}
    expected = dict.fromkeys(("strategy", "strategy.buckets", "strategy.shards"), Role.rounding)
    expected |= {"strategy.shown": Role.display, "strategy.dropped": Role.identity}
    monkeypatch.setattr("lockstep.config.extensions.import_extension", lambda module: True)
    assert {key: role_of(key, config) for key in expected} == expected
    assert fields_with("strategy", Mine(), Role.rounding) == {"buckets", "shards"}
    chosen = {"strategy": {**config["strategy"], "shown": True, "dropped": 0.5, "buckets": 3}}
    assert identity_of(chosen) == {"strategy.dropped": 0.5}
    assert values_with(chosen, Role.display) == {"strategy.shown": True}


@pytest.mark.parametrize("group", sorted(MANY))
def test_a_key_of_a_named_component_of_a_users_has_the_role_that_its_class_says(
    group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(options, "_DECLARED", {**options._DECLARED})
    monkeypatch.setattr("lockstep.config.extensions.import_extension", lambda module: True)

    @option(group)
    class Mine:
        named: int = ranged(2, least=1, most=8)  # as the component is
        shown: bool = with_role(Role.display, False)
        dropped: float = with_role(Role.identity, ranged(0.0, least=0, most=1))

        def build(self, *_: object) -> Any:
            """Nothing is built here."""

    config = {group: {"named": options.default_node(group, Mine)}}
    usual = role_of(group)
    expected = {"named": usual, "named.named": usual, "named.shown": Role.display, "named.dropped": Role.identity}
    assert {key: role_of(f"{group}.{key}", config) for key in expected} == expected


def test_of_hydras_own_keys_the_sweeper_alone_makes_another_sweep() -> None:
    keys = ("hydra/sweeper", "hydra/launcher", "hydra/job_logging", "hydra.job.name", "hydra.launcher.jobs")
    assert [key for key in keys if role_of(key) is not Role.shared] == ["hydra/sweeper"]


def test_the_values_of_a_config_are_those_of_any_of_the_roles_that_are_named() -> None:
    config = composed("seed=3", "cost.usd_per_gpu_hour=2", "optimizer.lr=0.5")
    assert values_with(config, Role.sample)["seed"] == 3
    both = values_with(config, Role.sample, Role.limit)
    assert both.items() >= {"seed": 3, "cost.usd_per_gpu_hour": 2, "budget.hours": None}.items()
    assert not {"optimizer.lr", "name", "epochs"} & both.keys()
    assert "optimizer.lr" in values_with(config, Role.schedule)
    assert values_with(config) == {}


def test_seeds_and_folds_alone_are_samples_of_one_setting() -> None:
    assert {key for key in configs() if is_sample(key)} == {"seed", "dataset.fold"}
    assert not any(map(is_sample, ("zzz", "hydra.sweep.dir", "hydra/launcher", "hydra/sweeper")))
