"""Hydra runs code that a config names in a few known places, and only after our policy has checked the config."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra import compose
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from helpers import ROOT
from lockstep.config import hydra_policy, messages
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
        with pytest.raises(InputError, match="expected keys of a job, such as seed: 1,2"):
            loader.load_sweep_config(master, JOBS[-1])
        with pytest.raises(HydraException, match="epoch"):
            loader.load_sweep_config(master, ["epoch=2"])
        with pytest.raises((InputError, HydraException), match="epochs"):
            loader.load_sweep_config(master, ["epochs.x=2"])


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


OUTSIDE = ("../x", "/x", "${name}", "a/${hydra.job.name}", "${now:..}/x", ".${now:.}/x")


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
