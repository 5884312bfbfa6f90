"""A config of someone else runs no code, wherever it asks for some. The places come from the config and from Hydra.

Each case is the whole command, refused in an interpreter that is shared; a few are commands of their own.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra import compose
from hydra.errors import HydraException
from omegaconf import OmegaConf

from forks import Forks
from helpers import ROOT, Done, result, train
from lockstep.config import composition, hydra_policy, hydra_versions, messages, schema
from lockstep.config.composition import ConfigFiles
from lockstep.config.hydra_versions import initialize_config_dir
from lockstep.core.errors import InputError

OBJECTS = ("callbacks", "job_logging", "hydra_logging", "launcher", "sweeper")  # where Hydra makes some
WAYS = (("seed=1",), ("-m",), ("--cfg", "job"), ("--cfg", "hydra"), ("--hel",), ("--info",))


Run = Callable[..., Done]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Commands that end before they need torch."""
    light = Forks("lockstep.cli.main", "lockstep.records.ledger")
    yield lambda *words: result(light.start(*words))
    light.close()


def payload(mark: Path) -> dict[str, Any]:
    """What copies a file to `mark` when it is made an object of; Hydra's own list of refused names has it not."""
    return {"_target_": "shutil.copyfile", "src": __file__, "dst": str(mark)}


def handlers(mark: Path) -> dict[str, Any]:
    """The same for a logging config: a file that is opened, and a factory that is called."""
    return {
        "version": 1,
        "handlers": {"x": {"class": "logging.FileHandler", "filename": str(mark)}},
        "filters": {"x": {"()": "shutil.copyfile", "src": __file__, "dst": str(mark)}},
        "root": {"handlers": ["x"]},
    }


def places(node: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every node of a config, and one more below each that holds others."""
    if isinstance(node, dict):
        yield (*path, "added")
        for name, value in node.items():
            yield (*path, str(name))
            yield from places(value, (*path, str(name)))


@functools.cache
def walked() -> list[tuple[str, ...]]:
    """Every place of the composed config, Hydra's part included."""
    with initialize_config_dir(str(ROOT / "conf")):
        whole = compose("config", ["model=resnet18", "optimizer=timm"], return_hydra_config=True)
    return sorted(set(places(OmegaConf.to_container(whole, resolve=False))))


MADE = [("hydra", name, *below) for name in OBJECTS for below in ((), ("x", "y"))]


def nested(place: tuple[str, ...], value: object) -> dict[str, Any]:
    """A config with `value` at `place`."""
    for name in reversed(place):
        value = {name: value}
    assert isinstance(value, dict)
    return value


def config_dir(folder: Path, content: dict[str, Any]) -> list[str]:
    """The words that have a file with this content composed behind the project's own config."""
    (folder / "experiment").mkdir(exist_ok=True)
    (folder / "experiment" / "sent.yaml").write_text("# @package _global_\n" + yaml.safe_dump(content))
    return ["--config-dir", str(folder), "experiment=sent"]


def primary(folder: Path, content: dict[str, Any]) -> list[str]:
    """The same as the first file that Hydra reads, which may have more to say."""
    folder.joinpath("sent.yaml").write_text(yaml.safe_dump({"defaults": ["config", "_self_"], **content}))
    return ["--config-dir", str(folder), "--config-name", "sent"]


def refused(done: Done, mark: Path) -> str:
    """The one sentence of a command that did nothing else."""
    assert not mark.exists()
    assert done.code == 2, done.err
    assert done.err.startswith("lockstep: ")
    assert "Traceback" not in done.err
    return done.err


@pytest.mark.slow
def test_no_node_of_hydras_config_makes_an_object(run: Run, tmp_path: Path) -> None:
    """Every eighth node there is, each by another way through Hydra; where it makes objects, by one of three."""
    written = ("runtime", "job.override_dirname", "job.config_name")  # by Hydra, over what a file says
    inside = [place for place in walked() if place[0] == "hydra" and len(place) > 1]
    inside = [place for place in inside if not ".".join(place[1:]).startswith(written)]
    some = zip(inside[::8], itertools.cycle(WAYS), itertools.cycle((config_dir, primary, primary)), strict=False)
    every = zip(MADE, itertools.cycle(WAYS[:3]), itertools.repeat(primary))
    mark = tmp_path / "mark"
    for place, way, write in itertools.chain(some, every):
        words = write(tmp_path, nested(place, payload(mark)))
        assert len(refused(run("train.py", *words, *way), mark).splitlines()) == 1, (place, way)


@pytest.mark.parametrize("group", OBJECTS[1:3])
def test_no_log_handler_of_a_file_is_made(run: Run, tmp_path: Path, group: str) -> None:
    mark = tmp_path / "mark"
    for write, way in zip((config_dir, primary) * 3, WAYS, strict=False):
        words = write(tmp_path, nested(("hydra", group), handlers(mark)))
        assert f"hydra.{group}." in refused(run("train.py", *words, *way), mark)


# A program of Hydra 1.4 with our whitelist, and without our policy: which config files it reads comes in a line each.
WHITELIST_ALONE = """
import json, sys
import hydra
from lockstep.config import hydra_policy
from lockstep.config.hydra_policy import own_hydra
from lockstep.config.schema import CONF

hydra_policy.CheckedLoader._check = lambda *_: None
trusted = [*hydra_policy.TRUSTED, *sys.argv[1:]]
app = hydra.main(config_path=str(CONF), config_name="config", execution_whitelist=trusted)(lambda config: None)
for line in sys.stdin:
    sys.argv = ["app", *json.loads(line)]
    try:
        with own_hydra():
            app()
    except BaseException as error:
        print("ended:", repr(error))
    else:
        print("ended: done")
"""


@pytest.mark.slow
@pytest.mark.skipif(hydra_versions.IS_13, reason="Hydra 1.3 has no whitelist")
def test_hydra_makes_nothing_outside_the_whitelist_even_without_our_policy(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    factory = {"()": "shutil.copyfile", "src": __file__, "dst": str(mark)}
    logging = [
        {"handlers": {"x": {"class": "shutil.copyfile", "src": __file__, "dst": str(mark)}}},
        {"handlers": {"x": factory}},
        {"filters": {"x": factory}},
        {"formatters": {"x": factory}},
        {"handlers": {"x": {"class": "logging.StreamHandler", "stream": factory}}},
    ]
    trusted = {"_target_": hydra_policy.TRUSTED[0]}
    hostile = [
        *(nested(place, payload(mark)) for place in MADE),
        *(nested(("hydra", name, "x"), {**trusted, "y": payload(mark)}) for name in OBJECTS),
        *(
            nested(("hydra", group), {"version": 1, "root": {"level": "INFO"}, **node})
            for group in OBJECTS[1:3]
            for node in logging
        ),
    ]
    commands = []
    for number, content in enumerate(hostile):
        folder = tmp_path / str(number)
        folder.mkdir()
        many = [] if number % 2 and "launcher" not in content["hydra"] else ["-m", "~hydra.callbacks.report"]
        words = [*many, *([] if "launcher" in content["hydra"] else ["hydra/launcher=basic"])]
        commands.append([*primary(folder, content), f"output_root={tmp_path}", *words])

    def run_all(commands: list[list[str]], *whitelist: str) -> list[str]:
        lines = "".join(json.dumps(words) + "\n" for words in commands)
        command = [sys.executable, "-c", WHITELIST_ALONE, *whitelist]
        environment = {**os.environ, "HYDRA_FULL_ERROR": "1"}
        done = subprocess.run(
            command, input=lines, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True
        )
        return [line for line in done.stdout.splitlines() if line.startswith("ended: ")]

    ends = run_all(commands)
    assert len(ends) == len(commands)
    assert sum("is not in the Hydra execution whitelist" in end for end in ends) >= 10
    assert any("Unknown plugin class : 'shutil.copyfile'" in end for end in ends)
    assert not mark.exists()
    run_all(commands[1:2], "shutil.copyfile")  # the same would run if it were on the list
    assert mark.exists()


def test_a_file_in_a_group_of_hydra_is_no_plugin(run: Run, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    for group, way in zip(OBJECTS, itertools.cycle(WAYS[:2]), strict=False):
        folder = tmp_path / "hydra" / group
        folder.mkdir(parents=True, exist_ok=True)
        content = payload(mark) if group in ("launcher", "sweeper") else {"x": payload(mark)}
        (folder / "sent.yaml").write_text(yaml.safe_dump(content))
        choice = "sent" if way == ("-m",) else f"../{group}/sent"
        refused(run("train.py", "--config-dir", str(tmp_path), f"hydra/{group}={choice}", *way), mark)
        words = primary(tmp_path, {"defaults": ["config", {f"override hydra/{group}": "sent"}, "_self_"]})
        refused(run("train.py", *words, *way), mark)


def test_no_node_of_a_job_makes_an_object(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    ours = [key for key in walked() if key[0] in (*schema.GROUPS, "train", "added")]
    for place in (key for key in ours if key[-1] == "options"):
        words = config_dir(tmp_path, nested(place, payload(mark)))
        choices = ["model=resnet18"] if place[0] == "model" else ["optimizer=timm"] if place[0] == "optimizer" else []
        ended = train(*words, *choices, "device=cpu", "steps=1", f"output_root={tmp_path / 'runs'}")
        refused(ended, mark)
        assert not list(tmp_path.glob("runs/2*")), place  # a folder of a run begins with its time


@pytest.mark.slow
def test_no_option_of_a_group_is_a_class_from_elsewhere(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    for group in schema.GROUPS:
        (tmp_path / group).mkdir()
        many = group in schema.MANY
        node = {"sent": payload(mark)} if many else payload(mark)
        (tmp_path / group / "sent.yaml").write_text(yaml.safe_dump(node))
        ended = train("--config-dir", str(tmp_path), f"{group}=sent", f"output_root={tmp_path / 'runs'}")
        assert f"{group}{'.sent' * many}._target_ is 'shutil.copyfile'" in refused(ended, mark)
    (tmp_path / "logger" / "bare.yaml").write_text(yaml.safe_dump(payload(mark)))
    ended = train("--config-dir", str(tmp_path), "logger=bare", f"output_root={tmp_path / 'runs'}")
    assert "logger is " in refused(ended, mark)


@pytest.mark.parametrize("scheme", ["pkg://", "structured://", "pkg://sent.", "PKG://"])
def test_no_search_path_imports_a_package(run: Run, tmp_path: Path, scheme: str) -> None:
    mark, named = tmp_path / "mark", f"{scheme}sent"
    place = f"import runpy, sys; sys.path.append({str(tmp_path)!r}); "
    program = place + "runpy.run_path('train.py', run_name='__main__')"
    (tmp_path / "sent").mkdir()
    (tmp_path / "sent" / "__init__.py").write_text(f"open({str(mark)!r}, 'w')")
    words = primary(tmp_path, {"hydra": {"searchpath": [named]}})
    assert named in run("-c", program, *words).err
    assert run("-c", program, f"hydra.searchpath=[{named}]", "--cfg", "job").code == 2
    assert not mark.exists()
    run("-c", place + "import sent")
    assert mark.exists(), "it could be imported"


@pytest.mark.parametrize(
    "content",
    [
        {"hydra": {"sweeper": {"params": {"hydra.callbacks.x._target_": "shutil.copyfile"}}}},
        {"hydra": {"sweeper": {"params": {"x": "${sent}"}}}, "sent": {"_target_": "shutil.copyfile"}},
        {"hydra": {"overrides": {"hydra": ["+hydra.callbacks.x._target_=shutil.copyfile"]}}},
        {"hydra": {"job": {"env_set": {"LD_PRELOAD": "/x.so"}}}},
        {"hydra": {"job": {"env_copy": ["HOME"]}}},
        {"hydra": {"job": {"env_copy": ["NO_SUCH"]}}},
        {"hydra": {"output_subdir": "../elsewhere"}},
        {"hydra": "${sent}", "sent": {"callbacks": {}}},
        {"hydra": 3},
        {"hydra": None},
        {"hydra": {"launcher": None}},
        {"hydra": {"callbacks": [1]}},
    ],
)
def test_hydra_is_not_told_by_other_words_either(run: Run, tmp_path: Path, content: dict[str, Any]) -> None:
    refused(
        run("train.py", *primary(tmp_path, content), "-m", "seed=1,2", f"output_root={tmp_path}"), tmp_path / "mark"
    )


def test_no_pickle_is_read_for_a_rerun(run: Run, tmp_path: Path) -> None:
    for flag in ("--experimental-rerun", "--exp"):
        text = refused(run("train.py", flag, str(tmp_path / "config.pickle")), tmp_path / "mark")
        assert "--experimental-rerun" in text


def test_no_kept_override_has_hydra_make_an_object() -> None:
    with initialize_config_dir(str(ROOT / "conf")):
        for key, way in itertools.product(MADE, ("", "+", "++", " ", "  ++", "~", "+model@")):
            asks = "=digitnet" if way == "+model@" else "" if way == "~" else "._target_=shutil.copyfile"
            with pytest.raises((InputError, HydraException)) as raised:
                composition.recompose(["steps=1", f"{way}{'.'.join(key)}{asks}"], (), ConfigFiles())
            assert isinstance(messages.translate(raised.value), InputError)
