"""Hydra runs code that a config names in a few known places, and only after our policy has checked the config."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hydra
import pytest
import yaml
from hydra import compose, initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from helpers import ROOT
from lockstep.config import hydra_keys, hydra_policy, messages
from lockstep.core.errors import InputError

SOURCE = Path(hydra.__file__).parent
# Calls that create an object from a name, import, unpickle, or set up logging.
ACTS = {
    *("instantiate", "_instantiate", "call", "_call_target", "_locate", "get_class", "get_method", "get_object"),
    *("import_module", "__import__", "exec", "eval", "exec_module", "find_spec", "load_module", "dictConfig"),
    *(
        "configure_logging",
        "configure_log",
        "files",
        "instantiate_sweeper",
        "instantiate_launcher",
        "ConfigLoaderImpl",
    ),
}
# Where Hydra's source has one of these calls, and why a config cannot use it to run code.
CHECKED = "only with what `CheckedLoader` has let through"
KNOWN = {
    ("_internal/hydra.py", "ConfigLoaderImpl"): "replaced by CheckedLoader",
    ("_internal/hydra.py", "configure_log"): CHECKED,
    ("_internal/hydra.py", "instantiate_sweeper"): CHECKED,
    ("_internal/callbacks.py", "instantiate"): CHECKED,
    ("_internal/core_plugins/basic_launcher.py", "configure_log"): CHECKED,
    ("_internal/core_plugins/basic_sweeper.py", "instantiate_launcher"): CHECKED,
    ("core/plugins.py", "_instantiate"): CHECKED,
    ("core/plugins.py", "instantiate"): CHECKED,
    ("core/utils.py", "configure_log"): CHECKED,
    ("core/utils.py", "configure_logging"): CHECKED,
    ("main.py", "configure_log"): "behind --experimental-rerun, which `check_flags` refuses",
    ("main.py", "pickle.load"): "behind --experimental-rerun, which `check_flags` refuses",
    ("core/plugins.py", "import_module"): "hydra_plugins and Hydra's own",
    ("core/plugins.py", "exec_module"): "what is installed in hydra_plugins",
    ("core/plugins.py", "find_spec"): "what is installed in hydra_plugins",
    ("core/plugins.py", "load_module"): "what is installed in hydra_plugins",
    ("core/override_parser/overrides_visitor.py", "eval"): "functions of the grammar of overrides, such as range()",
    ("_internal/core_plugins/importlib_resources_config_source.py", "files"): "pkg://, refused where a user names it",
    ("_internal/core_plugins/structured_config_source.py", "import_module"): "structured://, likewise",
}
# The code behind the calls above, and functions for programs: a config reaches them only through those calls.
MACHINERY = ("_internal/instantiate/", "_internal/logging_config.py", "_internal/target_policy.py", "utils.py")
INSIDE = {("_internal/utils.py", "import_module")}  # in `_locate`, which is checked where it is called


def acts() -> Iterator[tuple[str, str]]:
    """Every place in Hydra's source where it may act on a config, and the call there."""
    for path in SOURCE.rglob("*.py"):
        name = path.relative_to(SOURCE).as_posix()
        if "test_utils" in name or name.startswith(MACHINERY):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                if called.startswith("pickle.") and called != "pickle.dump":
                    yield name, called
                elif called.rpartition(".")[2] in ACTS:
                    yield name, called.rpartition(".")[2]


def test_hydra_acts_on_a_config_where_we_know_of_it_and_nowhere_else() -> None:
    assert set(acts()) - INSIDE == KNOWN.keys()


def test_every_way_through_hydra_composes_with_our_loader() -> None:
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        loader = importlib.import_module("hydra.core.global_hydra").GlobalHydra.instance().config_loader()
        assert isinstance(loader, hydra_policy.CheckedLoader)


def test_a_job_is_composed_once_to_what_hydra_composes_twice() -> None:
    overrides, job_overrides = ["seed=1", "hydra.run.dir=here"], ["seed=1", "hydra.run.dir=here", "hydra.mode=RUN"]
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        loader = importlib.import_module("hydra.core.global_hydra").GlobalHydra.instance().config_loader()
        first = loader.load_configuration("config", overrides, RunMode.MULTIRUN, validate_sweep_overrides=False)
        assert loader.load_configuration("config", job_overrides, RunMode.RUN) is first
        again = loader.load_configuration("config", job_overrides, RunMode.RUN)
    assert again is not first
    assert OmegaConf.to_container(first, resolve=False) == OmegaConf.to_container(again, resolve=False)


JOBS = [
    ["seed=3", "optimizer.lr=0.1", "train.ema=0.9"],
    ["optimizer.lr=0.1", "model=resnet18", "batch=8"],
    ["metric=[f1]", "metric.f1.average=micro"],
    ["+model.channels=1", "model.channels=2"],
    ["optimizer.betas=[0.1,0.2]", "experiment=mnist_tutorial", "name=a b"],
    ["hydra/job_logging=none", "seed=2"],
]


def test_a_job_of_a_sweep_is_composed_to_what_hydra_composes() -> None:
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        loader = importlib.import_module("hydra.core.global_hydra").GlobalHydra.instance().config_loader()
        words = ["hydra.job.chdir=false", "seed=1,2", "model.width=8"]
        master = loader.load_configuration("config", words, RunMode.MULTIRUN)
        for job in JOBS[:-1]:
            for overrides in (job, [*job[::-1], "epochs=2"][::-1]):
                expected = ConfigLoaderImpl.load_sweep_config(loader, master, [*overrides])
                config = loader.load_sweep_config(master, [*overrides])
                assert plain(config) == plain(expected), overrides
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
    values = {key: value for key, value in hydra_keys.leaves(node) if not hydra_keys.is_below(key, hydra_keys.FREE)}
    assert values == hydra_keys.OURS


def composed(*overrides: str) -> Any:
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return compose("config", overrides=list(overrides), return_hydra_config=True).hydra


@pytest.mark.parametrize("group", ["job_logging", "hydra_logging"])
@pytest.mark.parametrize("option", ["none", "default", "disabled"])
def test_the_command_line_chooses_among_hydras_own_options(group: str, option: str) -> None:
    assert composed(f"hydra/{group}={option}").runtime.choices[f"hydra/{group}"] == option


def test_the_command_line_sets_what_runs_no_code() -> None:
    words = ["hydra.sweeper.max_batch_size=2", "+hydra.job.env_set.A=b"]
    settings = composed(*words, "hydra.run.dir=here", "hydra.verbose=true", "~hydra.callbacks.report")
    assert settings.sweeper.max_batch_size == 2
    assert settings.job.env_set == {"A": "b"}


@pytest.mark.parametrize(
    "word",
    [
        "+hydra.callbacks.x._target_=os.mkdir",
        "hydra.callbacks.report._target_=os.mkdir",
        "hydra.launcher._target_=os.mkdir",
        "+hydra.launcher.x={_target_:os.mkdir}",
        "+hydra.sweeper.params.x={y:[{_target_:os.mkdir}]}",
        "+hydra.launcher.x=${train}",
        "+hydra.job_logging.handlers.x.class=os.mkdir",
        "+hydra={callbacks:{x:{_target_:os.mkdir}}}",
        "+model@hydra.callbacks.x=digitnet",
        "hydra.job.env_copy=[NO_SUCH_VARIABLE]",
        "+hydra.sweeper.params.seed=1",
        "hydra.searchpath=[pkg://antigravity]",
        "hydra.searchpath=[structured://antigravity]",
    ],
)
def test_the_command_line_names_no_code_and_breaks_no_hydra(word: str) -> None:
    with pytest.raises((InputError, HydraException)) as raised:
        composed(word)
    assert isinstance(messages.translate(raised.value), InputError)


@pytest.mark.parametrize("words", [[], ["hydra.run.dir=here", "epochs=3"]])
def test_a_usual_command_line_is_composed_once(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hydra_policy, "_without_files", None)
    composed(*words)


def test_the_configs_of_hydra_in_a_job_are_as_hydra_alone_composes_them() -> None:
    words = (*(f"hydra/{group}=none" for group in hydra_keys.LOGGING), "hydra/launcher=pool")
    alone = hydra_policy._without_files((("hydra", "pkg://hydra.conf"), ("schema", "structured://")), words)
    named = {path.rpartition("/")[::2] for path, _ in hydra_policy.HYDRA_CONFIGS} - {("hydra", "config")}
    chosen = {key[-1]: value for key, value in alone.items() if key[:2] == ("runtime", "choices")}
    assert named == {item for item in chosen.items() if item[1] is not None}


def sent(folder: Path, content: dict[str, Any], *words: str) -> Any:
    """Hydra's config, composed with a file of someone else."""
    (folder / "experiment").mkdir(exist_ok=True)
    (folder / "experiment" / "sent.yaml").write_text("# @package _global_\n" + yaml.safe_dump(content))
    return composed(f"hydra.searchpath=[{folder}]", "experiment=sent", *words)


FOLDERS = [".".join(key) for key in hydra_keys.FOLDERS]


@pytest.mark.parametrize("key", [*FOLDERS, "output_subdir"])
@pytest.mark.parametrize(
    "folder", ["../x", "a/../../x", "/x", "${name}", "a/${hydra.job.name}", "${now:..}/x", ".${now:.}/x", "a${name}"]
)
def test_a_file_places_no_run_outside(tmp_path: Path, key: str, folder: str) -> None:
    inside = {"sweep.subdir": "expected a folder below its sweep's", "output_subdir": ""}.get(
        key, r"\$\{output_root\} or"
    )
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


@pytest.mark.parametrize("group", ["launcher", "sweeper"])
def test_a_file_in_place_of_one_of_hydras_own_gets_one_sentence(tmp_path: Path, group: str) -> None:
    (tmp_path / "hydra" / group).mkdir(parents=True)
    (tmp_path / "hydra" / group / "basic.yaml").write_text("_target_: shutil.copyfile\n")
    with (
        pytest.raises(InputError, match=r"shutil\.copyfile"),
        initialize_config_dir(str(tmp_path), version_base="1.3"),
    ):
        compose(overrides=[], return_hydra_config=True)
