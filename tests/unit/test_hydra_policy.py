"""Hydra runs code that a config names in a few known places, and only after our policy has checked the config."""

import copy
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import yaml
from hydra import compose
from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.core.utils import JobRuntime
from hydra.errors import HydraException
from hydra.types import RunMode
from hydra.version import VersionBase
from omegaconf import DictConfig, OmegaConf

from helpers import ROOT
from lockstep.config import hydra_policy, hydra_versions, messages
from lockstep.config.commands import check_word
from lockstep.config.extensions import Extension
from lockstep.config.hydra_versions import guard_plugins, initialize_config_dir
from lockstep.core.errors import InputError
from lockstep.core.fields import nested


@pytest.mark.parametrize("deep", ["x: " + "[" * 50_000, "x:\n  " + "- " * 50_000 + "1"], ids=["flow", "block"])
def test_a_file_nested_deeply_is_refused_and_overflows_no_stack(tmp_path: Path, deep: str) -> None:
    (tmp_path / "experiment").mkdir()
    file = tmp_path / "experiment" / "sent.yaml"
    file.write_text(deep)
    # From PyYAML 6.0.4 on, libyaml's scanner has a limit of its own, which brackets reach before our check.
    with pytest.raises((InputError, yaml.YAMLError, RecursionError)) as raised:
        composed(f"hydra.searchpath=[{tmp_path}]", "experiment=sent")
    error = raised.value
    sentence = str(error if isinstance(error, InputError) else messages.translate_before_job(error))
    if isinstance(error, RecursionError):  # of OmegaConf 2.3, which reads YAML in Python
        assert "recursion" in sentence
    else:
        assert str(file) in sentence
        assert "nest" in sentence


def first(folder: Path, content: dict[str, Any], *words: str) -> Any:
    """Hydra's config, composed with someone else's file as the primary one, before ours."""
    (folder / "sent.yaml").write_text(yaml.safe_dump(content))
    with initialize_config_dir(str(folder)):
        return compose("sent", [f"hydra.searchpath=[{ROOT / 'conf'}]", *words], return_hydra_config=True).hydra


@pytest.mark.parametrize("group", hydra_policy.OPTIONS)
def test_only_the_command_line_chooses_a_plugin(tmp_path: Path, group: str) -> None:
    with initialize_config_dir(str(ROOT / "conf")):
        options = {*GlobalHydra.instance().config_loader().get_group_options(f"hydra/{group}")}
    own = options & {*hydra_policy.OPTIONS[group]}
    assert options - own <= {"optuna", "ray"}  # Hydra's own, and our pool, are open to all
    ConfigStore.instance().store("other", {"_target_": "plugin.Other"}, f"hydra/{group}", provider="other")
    try:
        for option in {*sorted(options - own)[:1], "other"} | own:
            content = {"defaults": ["config", {f"override hydra/{group}": option}]}
            if option in own:
                assert first(tmp_path, content).runtime.choices[f"hydra/{group}"] == option
                continue
            sentence = f"hydra/{group} is '{option}' in a config file, which may choose"
            with pytest.raises(InputError, match=sentence):
                first(tmp_path, content)
            assert composed(f"hydra/{group}={option}").runtime.choices[f"hydra/{group}"] == option
    finally:
        del ConfigStore.instance().repo["hydra"][group]["other.yaml"]


def test_a_file_gives_the_words_of_the_line_no_other_meaning(tmp_path: Path) -> None:
    with pytest.raises((InputError, HydraException)) as raised:
        first(
            tmp_path,
            {"defaults": ["config", "_self_"], "hydra": {"aliases": {"epochs": "hydra.verbose"}}},
            "epochs=true",
        )
    assert "aliases" in str(raised.value)


@pytest.mark.parametrize("key", ["task", "hydra"])
def test_a_file_has_no_words_that_nobody_typed(tmp_path: Path, key: str) -> None:
    content: dict[str, Any] = {"defaults": ["config", "_self_"]}
    assert first(tmp_path, content, "batch=8").overrides.task == ["batch=8"]
    with pytest.raises(InputError, match=rf"hydra\.overrides\.{key}"):
        first(tmp_path, {**content, "hydra": {"overrides": {key: ["batch=8"]}}})


JOBS = [
    ["seed=3", "optimizer.lr=0.1", "train.ema=0.9"],
    ["optimizer.lr=0.1", "model=resnet18", "batch=8"],
    ["metric=[f1]", "metric.f1.average=micro"],
    ["+model.channels=1", "model.channels=2"],
    ["optimizer.betas=[0.1,0.2]", "experiment=mnist_tutorial", "name=a b"],
    ["train={ema: 0.9}", "train={clip_norm: 1}"],
    ["train={ema: 0.9, clip_norm: 2}", "train.ema=0.5", "train={ema: 0.8}", "optimizer={lr: 0.5}"],
    ["train.ema=0.5", "++train={clip_norm: 1}", "train.clip_norm=2"],
    ["hydra/job_logging=none", "seed=2"],
]


def test_a_job_of_a_sweep_has_no_value_of_another_one() -> None:
    with initialize_config_dir(str(ROOT / "conf")):
        loader = GlobalHydra.instance().config_loader()
        master = loader.load_configuration("config", ["name=test"], RunMode.MULTIRUN)
        first = loader.load_sweep_config(master, ["seed=3", "optimizer.betas=[0.1,0.2]"])
        second = loader.load_sweep_config(master, ["epochs=2"])
        assert (first.seed, first.epochs, [*first.optimizer.betas]) == (3, 20, [0.1, 0.2])
        assert (second.seed, second.epochs, [*second.optimizer.betas]) == (0, 2, [0.9, 0.999])
        words = [[*job.hydra.overrides.task][-1] for job in (first, second)]
        assert words == ["optimizer.betas=[0.1,0.2]", "epochs=2"]


def test_a_job_of_a_sweep_is_composed_to_what_hydra_composes() -> None:
    with initialize_config_dir(str(ROOT / "conf")):
        loader = GlobalHydra.instance().config_loader()
        words = ["hydra.job.chdir=false", "seed=1,2", "model.width=8"]
        master = loader.load_configuration("config", words, RunMode.MULTIRUN)
        for job in JOBS[:-1]:
            expected = loader.loader.load_sweep_config(master, ["epochs=2", *job])
            guard_plugins(expected)
            config = loader.load_sweep_config(master, ["epochs=2", *job])
            assert plain(config) == plain(expected), job
        unknown = loader.load_configuration("config", ["name=test", "run_group=${nowhere}"], RunMode.MULTIRUN)
        assert loader.load_sweep_config(unknown, ["run_group=mine"]).run_group == "mine"
        with pytest.raises(InputError, match="expected keys of a job, such as seed: 1,2"):
            loader.load_sweep_config(master, JOBS[-1])
        with pytest.raises(HydraException, match="epoch"):
            loader.load_sweep_config(master, ["epoch=2"])
        with pytest.raises((InputError, HydraException), match="epochs"):
            loader.load_sweep_config(master, ["epochs.x=2"])


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("hydra: {verbose: true}", r"^hydra\.verbose is true in a config file, which may set only "),
        ("output_root: /elsewhere", r"^output_root is '/elsewhere' in a config file or in the run folder"),
    ],
)
def test_a_file_that_a_job_of_a_sweep_chooses_is_checked_as_that_of_one_job(
    line: str, sentence: str, tmp_path: Path
) -> None:
    (tmp_path / "experiment").mkdir()
    for name, text in (("sent", f"{line}\n"), ("harmless", "seed: 3\n")):
        (tmp_path / "experiment" / f"{name}.yaml").write_text(f"# @package _global_\n{text}")
    with initialize_config_dir(str(ROOT / "conf")):
        loader = GlobalHydra.instance().config_loader()
        words = [f"hydra.searchpath=[{tmp_path}]", "name=test", "experiment=harmless,sent"]
        master = loader.load_configuration("config", words, RunMode.MULTIRUN)
        assert loader.load_sweep_config(master, ["experiment=harmless"]).seed == 3
        with pytest.raises(InputError, match=sentence):
            loader.load_sweep_config(master, ["experiment=sent"])


def plain(config: DictConfig) -> Any:
    return OmegaConf.to_container(config, resolve=False)


def test_what_our_own_config_says_to_hydra_is_what_the_policy_says_it_does() -> None:
    node = OmegaConf.to_container(OmegaConf.load(ROOT / "conf" / "config.yaml").hydra, resolve=False)
    free = {*hydra_policy.FREE, *hydra_policy.FOLDER_KEYS}
    assert {key: value for key, value in nested(node) if not {key, key[:1]} & free} == hydra_policy.OURS


def composed(*overrides: str) -> Any:
    with initialize_config_dir(str(ROOT / "conf")):
        return compose("config", overrides=list(overrides), return_hydra_config=True).hydra


def test_the_command_line_sets_what_runs_no_code() -> None:
    words = ["hydra.launcher.jobs=2", "+hydra.job.env_set.A=b"]
    settings = composed(*words, "hydra.run.dir=here", "hydra.verbose=true", "~hydra.callbacks.report")
    assert settings.launcher.jobs == 2
    assert settings.job.env_set == {"A": "b"}
    assert composed("+hydra.job.env_set={A: b, C: d}").job.env_set == {"A": "b", "C": "d"}


CODE = [
    "+hydra.callbacks.x._target_=shutil.copyfile",
    "+hydra.callbacks.x={_target_: shutil.copyfile}",
    "+hydra.callbacks.x=[{_target_: shutil.copyfile}]",
    "+hydra.callbacks.x=${dataset}",
    "hydra.callbacks.report._target_=shutil.copyfile",
    "hydra.launcher._target_=shutil.copyfile",
    "hydra.sweeper._target_=shutil.copyfile",
    *(f"+hydra.{group}.handlers.x={{class: shutil.copyfile}}" for group in hydra_policy.LOG_CONFIGS),
    *(f"+hydra.{group}.formatters.x={{stream: 'ext://shutil.copyfile'}}" for group in hydra_policy.LOG_CONFIGS),
    *(f"+hydra.{group}.filters=${{dataset}}" for group in hydra_policy.LOG_CONFIGS),
]


@pytest.mark.parametrize("word", CODE)
def test_no_word_of_the_command_line_names_code_that_hydra_runs(word: str) -> None:
    with pytest.raises(InputError, match="which names code; Hydra makes objects only of its own classes"):
        composed(word)


@pytest.mark.parametrize("group", ["launcher", "sweeper"])
def test_hydra_makes_no_object_of_a_setting_of_a_plugin(group: str) -> None:
    with initialize_config_dir(str(ROOT / "conf")):
        word = f"+hydra.{group}.x={{_target_: builtins.print}}"
        config = compose("config", [word, f"hydra/{group}=basic"], return_hydra_config=True)
        plugins = Plugins.instance()
        make = plugins.instantiate_launcher if group == "launcher" else plugins.instantiate_sweeper
        with pytest.raises(Exception, match="unexpected keyword argument 'x'"):
            make(hydra_context=None, task_function=None, config=config)  # type: ignore[arg-type]


def sent(folder: Path, content: dict[str, Any], *words: str) -> Any:
    """Hydra's config, composed with a file of someone else."""
    (folder / "experiment").mkdir(exist_ok=True)
    (folder / "experiment" / "sent.yaml").write_text("# @package _global_\n" + yaml.safe_dump(content))
    return composed(f"hydra.searchpath=[{folder}]", "experiment=sent", *words)


FOLDERS = [".".join(key) for key in hydra_policy.FOLDER_KEYS]


OUTSIDE = ("..", "${output_root}/..", "../x", "/x", "${name}", "a/${hydra.job.name}", "${now:..}/x", ".${now:.}/x")


@pytest.mark.parametrize(
    ("key", "folder"),
    [*((key, "a/../../x") for key in (*FOLDERS, "output_subdir")), *(("run.dir", path) for path in OUTSIDE)],
)
def test_a_file_places_no_run_outside(tmp_path: Path, key: str, folder: str) -> None:
    inside = {"sweep.subdir": "expected a folder below its sweep's", "output_subdir": ""}
    inside = inside.get(key, r"\$\{output_root\} or")
    with pytest.raises(InputError, match=rf"hydra.{key} is .*{inside}"):
        sent(tmp_path, {"hydra": OmegaConf.to_container(OmegaConf.from_dotlist([f"{key}={folder}"]), resolve=False)})


@pytest.mark.parametrize("key", FOLDERS)
def test_a_file_names_folders_inside_and_the_command_line_any(tmp_path: Path, key: str) -> None:
    node = OmegaConf.to_container(OmegaConf.from_dotlist([f"{key}=a/${{now:%Y}}-${{hydra.job.num}}"]), resolve=False)
    assert OmegaConf.to_container(sent(tmp_path, {"hydra": node}).run, resolve=False)
    composed(f"hydra.{key}=../x", "hydra.verbose=true")


@pytest.mark.parametrize("where", ["file", "command line", "reference"])
def test_no_refusal_prints_a_variable_that_hydra_would_copy(
    tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCKSTEP_TEST_SECRET", "hunter2")
    copies: dict[str, Any] = {"job": {"env_copy": ["LOCKSTEP_TEST_SECRET"]}}
    words = ["hydra.job.env_copy=[LOCKSTEP_TEST_SECRET]"] if where == "command line" else []
    content = {"file": {"hydra": copies}, "reference": {"hydra": {"job": "${name}"}, "name": copies["job"]}}
    with pytest.raises((InputError, HydraException)) as raised:
        sent(tmp_path, content.get(where, {}), *words)
    assert "hunter2" not in str(raised.value)


@pytest.mark.filterwarnings(r"ignore:\n'hydra.*is validated against ConfigStore schema")  # of Hydra 1.3
@pytest.mark.parametrize("group", ["launcher", "sweeper"])
def test_a_file_in_place_of_one_of_hydras_own_gets_one_sentence(tmp_path: Path, group: str) -> None:
    (tmp_path / "hydra" / group).mkdir(parents=True)
    (tmp_path / "hydra" / group / "basic.yaml").write_text("_target_: shutil.copyfile\n")
    with pytest.raises(InputError, match=r"shutil\.copyfile"), initialize_config_dir(str(tmp_path)):
        compose(overrides=[], return_hydra_config=True)


def test_only_a_word_that_would_move_what_a_job_writes_is_refused() -> None:
    for word in (
        "hydra.job.chdir=false",
        "++hydra.job.chdir= False",
        "hydra.job.name=x",
        "model.chdir=true",
        "chdir",
    ):
        check_word(word)
    moving = ("hydra.job.chdir=true", "+hydra.job.chdir=null", "hydra.job={chdir: true}", "hydra.output_subdir=x")
    for word in (*moving, "++hydra={}"):
        with pytest.raises(InputError, match="; remove"):
            check_word(word)


def test_a_word_that_no_file_can_have_is_refused_and_another_alphabet_is_not() -> None:
    check_word("name=naïve 日本語 👩\u200d💻")
    for word in ("name=a\udc80", "\udcff=1"):
        with pytest.raises(InputError, match="is not valid Unicode; write it in UTF-8"):
            check_word(word)


def test_hydra_works_for_lockstep_in_its_own_context_alone_and_has_its_state_again_after_an_error() -> None:
    class Plain(GlobalHydra):
        """The place of another program's Hydra."""

    @hydra_policy.own_hydra()
    def of_lockstep() -> None:
        assert hydra_policy.works_for_lockstep()
        assert not any(kind.instance() is one for kind, one in of_a_program.items())
        assert "of_a_program.yaml" not in ConfigStore.instance().repo
        assert {"hydra", "job.yaml"} <= ConfigStore.instance().repo.keys()
        assert not any(map(OmegaConf.has_resolver, ("of_a_program", "oc.env")))
        stamps = OmegaConf.create({"a": "${stamp_hex:}", "b": "${stamp_hex:}"})
        assert stamps.a == stamps.b
        assert len(stamps.a) == 4
        raise KeyError

    ConfigStore.instance().store("of_a_program", {"a": 1})
    hydra_versions.register_resolver("of_a_program", lambda: "secret")
    before, store = GlobalHydra.instance(), ConfigStore.instance()
    of_a_program: dict[Any, Any] = {kind: kind.instance() for kind in (HydraConfig, JobRuntime, VersionBase)}
    try:
        GlobalHydra.set_instance(Plain())
        assert not hydra_policy.works_for_lockstep()
        with pytest.raises(KeyError):
            of_lockstep()
        assert isinstance(GlobalHydra.instance(), Plain)
        assert ConfigStore.instance() is store
        assert all(kind.instance() is one for kind, one in of_a_program.items())
        assert OmegaConf.has_resolver("of_a_program")
    finally:
        GlobalHydra.set_instance(before)
        OmegaConf.clear_resolver("of_a_program")
        del ConfigStore.instance().repo["of_a_program.yaml"]


def test_a_loader_is_copied_with_what_it_has() -> None:
    with initialize_config_dir(str(ROOT / "conf")):
        loader = GlobalHydra.instance().config_loader()
        other = copy.copy(loader)
        assert (type(other), other.loader) == (type(loader), loader.loader)
        with pytest.raises(AttributeError):
            loader.__no_such_name__  # noqa: B018


OF_13: dict[str, Any] = {
    "overrides": {"hydra": [], "task": []},
    "job": {
        "override_dirname": "",
        "config": {"override_dirname": {"kv_sep": "~", "item_sep": ";", "exclude_keys": ["seed"]}},
    },
}


@pytest.mark.parametrize("is_13", [True, False])
def test_the_words_of_a_config_are_set_and_hydra_13_names_folders_after_them(
    is_13: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hydra_versions, "IS_13", is_13)
    config: Any = OmegaConf.create({"hydra": OF_13})
    words = ["seed=4", "b=2", "seed=3", "+a=1", "seed=4"]  # the last of a key counts, and is there twice
    hydra_versions.set_overrides(config, ["hydra.x=1"], words)
    assert (config.hydra.overrides.hydra, config.hydra.overrides.task) == (["hydra.x=1"], words)
    assert config.hydra.job.override_dirname == ("+a~1;b~2" if is_13 else "")
    trusted = ["a.B", "c.D"]
    assert hydra_versions.trusting(trusted) == (hydra_versions.BASE if is_13 else {"execution_whitelist": trusted})
    override: Any = SimpleNamespace(is_list_extend=lambda: True)
    assert hydra_versions.is_list_extend(override) is not is_13


@pytest.mark.parametrize("is_13", [True, False])
def test_configs_are_composed_with_the_defaults_of_one_version(is_13: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    base = {"version_base": "1.3"} if is_13 else {}
    monkeypatch.setattr(hydra_versions, "IS_13", is_13)
    monkeypatch.setattr(hydra_versions, "BASE", base)
    monkeypatch.setattr(hydra_versions.hydra, "initialize_config_dir", lambda *words, **options: (words, options))
    assert initialize_config_dir("/a") == (("/a",), base)


def test_hydra_13_makes_no_object_of_a_setting_and_leaves_the_references_of_our_parameters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    params = {"a": "${b}", "c": "x ${d}${e}", "f": r"\${g}", "h": 3}
    nodes = {
        "launcher": {"_target_": "hydra_plugins.lockstep.sweeps.PoolPlugin", "jobs": None},
        "sweeper": {"_target_": "hydra_plugins.lockstep.sweeps.GridPlugin", "params": dict(params)},
    }
    config: Any = OmegaConf.create({"hydra": nodes})
    monkeypatch.setattr(hydra_versions, "IS_13", False)
    guard_plugins(config)
    assert plain(config.hydra) == nodes, "1.4 does it itself"
    monkeypatch.setattr(hydra_versions, "IS_13", True)
    guard_plugins(config)
    guarded = {**params, "a": r"\${b}", "c": r"x \${d}\${e}"}
    assert plain(config.hydra.sweeper) == {**nodes["sweeper"], "params": guarded, "_recursive_": False}
    assert plain(config.hydra.launcher) == {**nodes["launcher"], "_recursive_": False}
    theirs: Any = OmegaConf.create({"hydra": {"launcher": "x", "sweeper": {"_target_": "x.Y", "params": params}}})
    guard_plugins(theirs)
    assert plain(theirs.hydra.sweeper) == {"_target_": "x.Y", "params": params, "_recursive_": False}


OF_HYDRA = ("hydra.x=1", "+hydra.x=1", "~hydra.x", "hydra/launcher=basic", "x@hydra=y", "x@hydra.job=y")
NOT_OF_HYDRA = ("seed=1", "name=hydra", "model.hydra=1", "~model", "x@model=y", "my/hydra=x")


def test_a_word_is_of_hydra_by_its_key_or_by_its_package() -> None:
    words = dict.fromkeys(OF_HYDRA, True) | dict.fromkeys(NOT_OF_HYDRA, False)
    assert {word: hydra_policy.is_of_hydra(word) for word in words} == words


FREE: dict[str, Any] = {
    "mode": "RUN",
    "help": {"header": "x"},
    "hydra_help": {"template": "x"},
    "sweeper": {"params": {"seed": "1,2"}},
}


@pytest.mark.parametrize("key", FREE)
def test_a_file_may_say_these_to_hydra(key: str, tmp_path: Path) -> None:
    settings = sent(tmp_path, {"hydra": {key: FREE[key]}})[key]
    if isinstance(FREE[key], dict):
        settings = OmegaConf.to_container(settings, resolve=False)
        assert {**settings, **FREE[key]} == settings
    else:
        assert settings.name == FREE[key]


PLACES: dict[tuple[str, str], bool] = {
    ("run.dir", "."): True,
    ("run.dir", "${output_root}"): True,
    ("run.dir", "${output_root}/x"): True,
    ("run.dir", "x/${now:%Y-%m}_${stamp_hex:}/${hydra:job.num}"): True,
    ("run.dir", "${output_root}x"): False,
    ("run.dir", "x${output_root}"): False,
    ("run.dir", "${output_root}/../x"): False,
    ("sweep.dir", "${output_root}/x-${stamp_hex:}"): True,
    ("sweep.dir", "${output_root}/${output_root}"): False,
    ("sweep.subdir", "a/${hydra:job.num}"): True,
    ("sweep.subdir", "${output_root}/x"): False,
    ("sweep.subdir", "/x"): False,
}


@pytest.mark.parametrize(("key", "folder"), PLACES)
def test_a_file_names_a_folder_inside_by_these_references_alone(key: str, folder: str, tmp_path: Path) -> None:
    block, _, name = key.partition(".")
    content = {"hydra": {block: {name: folder}}}
    if PLACES[key, folder]:
        settings = OmegaConf.to_container(sent(tmp_path, content), resolve=False)
        assert settings[block][name] == folder  # type: ignore[index, call-overload]
    else:
        with pytest.raises(InputError, match=rf"^hydra\.{key} is .*, expected a folder below .*=FOLDER$"):
            sent(tmp_path, content)


def test_a_file_of_others_moves_the_runs_only_where_the_line_agrees(tmp_path: Path) -> None:
    assert sent(tmp_path, {"output_root": "runs/mine"}).job.chdir is False
    for root in ("/elsewhere", "../elsewhere"):
        with pytest.raises(InputError, match=rf"^output_root is '{root}' in a config file or in the run"):
            sent(tmp_path, {"output_root": root})
        sent(tmp_path, {"output_root": root}, f"output_root={root}")
        sent(tmp_path, {"output_root": root}, "output_root=/elsewhere/too")


def test_a_file_of_an_extension_places_the_runs_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    (tmp_path / "conf" / "experiment" / "mine.yaml").write_text("# @package _global_\noutput_root: /elsewhere\n")
    monkeypatch.setitem(sys.modules, "groups_of_mine", ModuleType("groups_of_mine"))
    monkeypatch.setattr("lockstep.config.extensions.active", lambda: (Extension("groups_of_mine", "it", tmp_path),))
    assert composed("experiment=mine").runtime.choices.experiment == "mine"
    with pytest.raises(InputError, match=r"^output_root is '/elsewhere' in a config file or in the run"):
        composed("experiment=mine", f"hydra.searchpath=[{tmp_path}]")


def test_what_a_file_may_not_say_is_refused_with_all_that_it_may(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^hydra\.verbose is true in a config file, which may set only ") as refused:
        sent(tmp_path, {"hydra": {"verbose": True}})
    listed = str(refused.value).partition("may set only ")[2].partition(", so that")[0].split(", ")
    assert listed == [
        *("hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir"),
        *("hydra.sweeper.params", "hydra.mode", "hydra.searchpath", "hydra.help", "hydra.hydra_help"),
    ]


def test_a_choice_of_a_users_group_is_recorded_as_it_was_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "conf" / "debug").mkdir(parents=True)
    for name, steps in (("fast", 3), ("slow", 30)):
        (tmp_path / "conf" / "debug" / f"{name}.yaml").write_text(f"# @package _global_\nsteps: {steps}\n")
    monkeypatch.setitem(sys.modules, "groups_of_mine", ModuleType("groups_of_mine"))
    mine = Extension("groups_of_mine", "it", tmp_path)
    monkeypatch.setattr("lockstep.config.extensions.active", lambda: (mine,))
    of_hydra = "hydra.job.num=7"
    with initialize_config_dir(str(ROOT / "conf")):
        one = compose("config", [of_hydra, "seed=1", "debug=fast"], return_hydra_config=True)
        loader = GlobalHydra.instance().config_loader()
        master = loader.load_configuration("config", [of_hydra, "name=test", "debug=fast,slow"], RunMode.MULTIRUN)
        jobs = [loader.load_sweep_config(master, ["debug=slow", f"seed={seed}"]) for seed in (1, 2)]
    assert one.steps == 3
    assert (one.hydra.overrides.hydra, one.hydra.overrides.task) == ([of_hydra], ["seed=1", "debug=fast"])
    for seed, job in enumerate(jobs, start=1):
        assert (job.steps, job.seed) == (30, seed)
        assert job.hydra.overrides.task == ["debug=slow", f"seed={seed}"]
        assert job.hydra.overrides.hydra == [of_hydra]


def test_a_file_of_an_extension_chooses_a_plugin_and_sets_it_and_a_strangers_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def recipe(folder: Path, **more: Any) -> None:
        settings = {"sweeper": {"trials": 3}, **more}
        content = {"defaults": [{"override /hydra/sweeper": "other"}], "hydra": settings}
        (folder / "experiment").mkdir(parents=True, exist_ok=True)
        (folder / "experiment" / "mine.yaml").write_text(f"# @package _global_\n{yaml.safe_dump(content)}")

    stored = {"_target_": "plugin.Other", "trials": 1, "folds": 2}
    ConfigStore.instance().store("other", stored, "hydra/sweeper", provider="other")
    monkeypatch.setitem(sys.modules, "groups_of_mine", ModuleType("groups_of_mine"))
    monkeypatch.setattr("lockstep.config.extensions.active", lambda: (Extension("groups_of_mine", "it", tmp_path),))
    try:
        recipe(tmp_path / "conf")
        settings = composed("experiment=mine")
        assert settings.runtime.choices["hydra/sweeper"] == "other"
        assert settings.sweeper.items() >= {**stored, "trials": 3}.items()
        assert settings.overrides.hydra == []
        typed_too = composed("experiment=mine", "hydra.sweeper.folds=5")
        assert typed_too.sweeper.items() >= {**stored, "trials": 3, "folds": 5}.items()
        for more in ({"verbose": True}, {"job": {"env_set": {"A": "b"}}}):
            recipe(tmp_path / "conf", **more)
            with pytest.raises(
                InputError, match=r"^hydra\.(verbose|job\.env_set\.A) is .* in a config file, which may"
            ):
                composed("experiment=mine")
        monkeypatch.setattr("lockstep.config.extensions.active", tuple)
        recipe(tmp_path / "sent")
        words = (f"hydra.searchpath=[{tmp_path / 'sent'}]", "experiment=mine")
        for typed in ((), ("hydra/sweeper=other",)):
            with pytest.raises(
                InputError, match=r"^hydra\.sweeper\.trials is 3 in a config file, which may set only "
            ):
                composed(*words, *typed)
    finally:
        del ConfigStore.instance().repo["hydra"]["sweeper"]["other.yaml"]


SOURCES = {
    ("main", "pkg://x"): False,
    ("command-line", "pkg://x"): False,
    ("command-line", "structured://"): False,
    ("hydra.searchpath", "PKG://x"): False,
    ("hydra.searchpath in main", "pkg://x"): False,
    ("extension mine", "pkg://x"): False,
    ("main", "file:///x"): True,
    ("command-line", "/x/y"): True,
    ("main", "/x/12:30"): True,
    ("hydra.searchpath", "x:y/z"): True,
    ("hydra.searchpath", "x"): True,
    ("hydra", "pkg://hydra.conf"): True,
    ("optuna", "pkg://optuna.conf"): True,
    ("schema", "structured://"): True,
}


@pytest.mark.parametrize(("provider", "path"), SOURCES)
def test_a_source_of_the_users_is_a_folder_and_a_plugins_may_be_a_package(provider: str, path: str) -> None:
    search = ConfigSearchPathImpl()
    search.append(provider, path)
    loader = SimpleNamespace(get_search_path=lambda: search)
    if SOURCES[provider, path]:
        hydra_policy.CheckedLoader(loader)
    else:
        with pytest.raises(InputError, match=rf"^the search path for configs has '{path}', which would import code;"):
            hydra_policy.CheckedLoader(loader)


@pytest.mark.parametrize(
    ("in_file", "typed"),
    [(["pkg://x"], None), (["x", "pkg://x"], "x"), (None, "pkg://x"), (["x"], "x,pkg://x")],
    ids=repr,
)
def test_neither_the_first_config_nor_the_line_beside_it_adds_a_package_to_the_search_path(
    tmp_path: Path, in_file: list[str] | None, typed: str | None
) -> None:
    (tmp_path / "sent.yaml").write_text(yaml.safe_dump({} if in_file is None else {"hydra": {"searchpath": in_file}}))
    words = [f"hydra.searchpath=[{typed}]"] * (typed is not None)
    sentence = r"^the search path for configs has 'pkg://x', which would import code;"
    with initialize_config_dir(str(tmp_path)), pytest.raises(InputError, match=sentence):
        compose("sent", words)


@pytest.mark.parametrize("text", ["ext://x", "cfg://x", "${dataset}", "a_target_b"])
@pytest.mark.parametrize("group", [*hydra_policy.LOG_CONFIGS, "callbacks"])
def test_a_text_that_logging_would_look_up_is_code(group: str, text: str) -> None:
    with pytest.raises(InputError, match=rf"^hydra\.{group}\.x\.y is .*, which names code"):
        composed(f"+hydra.{group}.x.y='{text}'")


@pytest.mark.parametrize("key", ["_target_", "()", "class"])
@pytest.mark.parametrize("group", [*hydra_policy.LOG_CONFIGS, "callbacks"])
def test_a_key_that_says_what_to_call_is_code(tmp_path: Path, group: str, key: str) -> None:
    with pytest.raises(InputError, match=rf"^hydra\.{group}\.x\.{re.escape(key)} is 'mine\.Part', which names code"):
        sent(tmp_path, {"hydra": {group: {"x": {key: "mine.Part"}}}})
