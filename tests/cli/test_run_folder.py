"""What a plain run leaves in its folder and shows on the terminal."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from helpers import FAKE, ROOT, Done, forked, on_a_terminal, records, train
from lockstep.training.run_record import SHORTEST_S

ESCAPE = "\x1b"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def done(root: Path) -> Done:
    """Two ranks of three steps, in a folder of the user's choice."""
    return train(
        "steps=3", "strategy=ddp", "telemetry.interval=1", f"output_root={root}", f"hydra.run.dir={root / 'mine'}"
    )


@pytest.fixture(scope="module")
def run(root: Path, done: Done) -> Path:
    assert done.code == 0, done.err
    return root / "mine"


def test_the_folder_holds_these_files_and_no_others(run: Path) -> None:
    files = {str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()}
    events = {name for name in files if name.startswith(("events.out.tfevents.", "val/events.out.tfevents."))}
    assert len(events) == 3, "of training, of evaluations, and of the verdict"
    step = "checkpoints/step-00000003"
    assert files - events == {
        ".hydra/config.yaml",
        ".hydra/hydra.yaml",
        ".hydra/overrides.yaml",
        "checkpoints/best",
        "checkpoints/last",
        f"{step}/facts.json",
        f"{step}/manifest.json",
        f"{step}/model.safetensors",
        f"{step}/state.pt",
        "command.txt",
        "config.yaml",
        "env.json",
        "logs/rank0.log",
        "logs/rank1.log",
        "metrics.csv",
        "metrics.jsonl",
        "model.safetensors",
        "summary.json",
        "train.log",
        "validation.json",
    }


def interpolations(node: Any) -> list[str]:
    """Every value of a config that still has to be resolved."""
    if isinstance(node, Mapping):
        return [interpolation for value in node.values() for interpolation in interpolations(value)]
    return [str(node)] if re.search(r"\$\{|\?\?\?", str(node)) else []


def test_the_config_is_resolved(run: Path) -> None:
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert interpolations(config) == []
    assert config["device"] != "auto"
    for group in ("strategy", "launcher", "loader"):
        assert not config[group]["_target_"].endswith(".Auto")
        assert "auto" not in config[group].values()
    assert config["launcher"]["ranks"] == 2
    assert config["strategy"]["_target_"] == "lockstep.strategy.DDP"


def test_the_command_can_be_typed_again(run: Path, root: Path) -> None:
    assert (run / "command.txt").read_text() == (
        f"python train.py steps=3 strategy=ddp telemetry.interval=1 output_root={root}\n"
    )


def test_the_summary_says_how_it_ended(run: Path) -> None:
    summary = json.loads((run / "summary.json").read_text())
    assert summary["status"] == "completed"
    assert summary["exit_code"] == 0
    assert summary["step"] == 3
    assert summary["objective"] == summary["best"] == records(run)[-1]["acc/val_top1"]


def test_tensorboard_has_the_tags(run: Path) -> None:
    events = EventAccumulator(str(run)).Reload()
    tags = {*events.Tags()["scalars"], *EventAccumulator(str(run / "val")).Reload().Tags()["scalars"]}
    assert tags >= {"loss", "acc/top1", "optim/lr", "optim/grad_norm"}
    assert tags >= {"perf/img_per_s", "perf/data_wait_pct", "perf/step_ms"}
    assert [scalar.step for scalar in events.Scalars("loss")] == [1, 2, 3]
    plugins = {metadata.plugin_data.plugin_name for metadata in events.summary_metadata.values()}
    assert {"hparams", "custom_scalars"} <= plugins


def test_latest_points_to_the_run(run: Path, root: Path) -> None:
    # A text file and not a link: TensorBoard would show the run twice.
    assert (root / "latest").read_text() == f"{os.path.relpath(run, root)}\n"


def test_each_rank_has_a_log_and_main_logs_what_it_says(run: Path, done: Done) -> None:
    log = (run / "train.log").read_text()
    lines = [text for text in done.out.splitlines() if text]
    assert not [text for text in lines if text not in log]


def test_a_folder_that_is_named_again_goes_on_with_its_run(run: Path, tmp_path: Path) -> None:
    """What a cluster's requeue does: the same command, in the same folder."""
    run = Path(shutil.copytree(run, tmp_path / "mine"))
    again = train("steps=4", "telemetry.interval=1", f"output_root={tmp_path}", f"hydra.run.dir={run}")
    assert again.code == 0, again.err
    assert [line["step"] for line in records(run) if "loss/train" in line] == [1, 2, 3, 4]


def test_the_end_of_a_run_has_one_figure_for_the_wait_for_data(tmp_path: Path) -> None:
    """Reading is as slow as training here, and the wait is in the time, and in the verdict if it says so."""
    words = (*FAKE, "dataset.size=64", "dataset.examples=600", "loader=streaming", "loader.workers=0", "model=linear")
    done = train(*words, "epochs=10", "logger=jsonl", f"output_root={tmp_path}")
    assert done.code == 0, done.err
    end = done.out[done.out.index("done in") :]
    shares = re.findall(r"waiting for data (\d+) %|waits for images in (\d+) %", end)
    assert 1 <= len(shares) <= 2
    assert len({first or second for first, second in shares}) == 1
    assert end.count("wait") == len(shares)
    assert re.search(r"learning  .*always saying the largest class gets \d+\.\d\d %", end)
    (summary,) = {path.resolve() for path in tmp_path.glob("*/summary.json")}
    is_long = json.loads(summary.read_text())["seconds"] >= SHORTEST_S  # on a busy machine it may be
    assert bool(re.search(r"   speed  ", end)) == is_long, "a short run says nothing about its speed"
    assert re.search(r"best \d+\.\d\d % top-1 at step \d+ \(epoch \d+\)", end)


def test_a_terminal_shows_a_bar(tmp_path: Path) -> None:
    quick = ("telemetry.interval=2", "logger=jsonl")
    code, seen = on_a_terminal("steps=8", *quick, f"output_root={tmp_path}")
    assert code == 0
    assert "━" in seen
    assert "8/8" in seen
    assert seen.startswith(f"{ESCAPE}[?25lloading torch"), "a sign of life, seconds before the banner"
    # The cursor is hidden while torch is loaded and while the bar moves, and shown again.
    assert seen.count(f"{ESCAPE}[?25l") == seen.count(f"{ESCAPE}[?25h") == 2


def test_the_current_folder_is_the_run_folder_where_the_command_says_so(tmp_path: Path) -> None:
    words = (str(ROOT / "train.py"), "hydra.run.dir=.", "model=linear", "steps=2")
    done = forked(*words, cwd=tmp_path)
    assert (done.code, (tmp_path / "summary.json").exists()) == (0, True), done.err
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "mine").touch()
    refused = forked(*words, cwd=tmp_path / "below")
    assert (refused.code, "has files in it that are not of a run" in refused.err) == (2, True), refused.err


@pytest.mark.parametrize(
    ("word", "example"), [("logger=null", "a list of names of its options: logger=[]"), ("model=3", ": model=")]
)
def test_a_group_that_is_set_to_no_name_is_named(tmp_path: Path, word: str, example: str) -> None:
    done = train(word, f"output_root={tmp_path}")
    assert done.code == 2
    assert f"{word!r}: a config group takes " in done.err
    assert example in done.err
