"""What the command says of itself, and how quickly."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from helpers import Done, command
from lockstep import __version__
from lockstep.config.help_page import show_help


@pytest.fixture(scope="module")
def shown() -> Done:
    """`python train.py --help` on a usual terminal, with a line on stderr for every module that is imported."""
    return command(sys.executable, "-X", "importtime", "train.py", "--help", COLUMNS="100")


def imported(done: Done) -> set[str]:
    """The modules that a command has imported, and their packages, which `importlib.import_module` does not show."""
    lines = [line for line in done.err.splitlines() if line.startswith("import time:")]
    names = {line.rpartition("|")[2].strip() for line in lines}
    return names | {name.partition(".")[0] for name in names}


def test_help_fits_a_screen(shown: Done) -> None:
    lines = shown.out.splitlines()
    assert shown.code == 0
    assert len(lines) <= 45
    assert max(map(len, lines)) <= 100


@pytest.mark.parametrize("key", ["optimizer.lr", "dataset.path", "dataset.input_size", "model.pretrained"])
def test_help_names_the_keys_that_most_people_set(key: str, shown: Done) -> None:
    assert key in shown.out.split()


def test_help_is_as_wide_as_the_terminal_and_breaks_no_word(shown: Done) -> None:
    narrow = command(sys.executable, "train.py", "--help", COLUMNS="80")
    assert max(map(len, narrow.out.splitlines())) <= 80
    assert narrow.out.split() == shown.out.split()


def test_the_help_of_options_is_their_keys() -> None:
    done = command(sys.executable, "train.py", "optimizer=sgd", "model=resnet34", "--help")
    assert done.code == 0
    assert "optimizer=sgd, its keys as optimizer.KEY=VALUE:" in done.out
    assert {"momentum: 0.9", "nesterov: false", "stem: imagenet"} <= {
        line.partition("  ")[0] for line in done.out.splitlines()
    }
    assert "_target_" not in done.out
    assert "drop_rate: 0.0" in command(sys.executable, "train.py", "model=resnet18", "--help").out, "of timm"
    assert "Groups, GROUP=OPTION" in command(sys.executable, "train.py", "model=resnt18", "--help").out


def test_help_takes_words_with_any_number_of_equals_signs(capsys: pytest.CaptureFixture[str]) -> None:
    for word in ("notes=a=b=c", "dataset.path=a=b", "=", "model=linear=1"):
        show_help([word, "model=linear"])
        assert "model=linear" in capsys.readouterr().out


def test_the_command_alone_shows_its_help_and_its_version() -> None:
    lockstep = (sys.executable, "-m", "lockstep")
    alone, with_flag = command(*lockstep), command(*lockstep, "--help")
    assert (alone.code, alone.out) == (0, with_flag.out)
    for program in (lockstep, (*lockstep, "train"), (sys.executable, "train.py")):
        assert command(*program, "--version").out == f"lockstep {__version__}\n"


def test_the_list_of_commands_waits_for_no_hydra_and_the_config_for_no_rich() -> None:
    commands = command(sys.executable, "-X", "importtime", "-m", "lockstep", "--help")
    assert not {"hydra", "omegaconf", "rich", "psutil", "torch"} & imported(commands)
    config = command(sys.executable, "-X", "importtime", "train.py", "--cfg", "job")
    assert config.code == 0
    assert not {"rich", "numpy"} & imported(config)


def test_help_does_not_wait_for_torch(shown: Done) -> None:
    assert "hydra" in imported(shown)
    assert not {"torch", "torchvision", "timm", "numpy"} & imported(shown)


def test_the_config_is_shown_without_torch() -> None:
    done = command(sys.executable, "-X", "importtime", "train.py", "--cfg", "job", "--package", "optimizer")
    assert done.code == 0
    assert "lr: auto" in done.out
    assert "torch" not in imported(done)


def test_an_error_of_composition_does_not_wait_for_torch() -> None:
    done = command(sys.executable, "-X", "importtime", "train.py", "epoch=3")
    assert done.code == 2
    assert "torch" not in imported(done)


# What only some jobs use, or what torch imports only for its compiler: 0.1 to 1.2 s each.
UNUSED = (
    *("torch._dynamo", "torch._inductor", "triton", "sympy", "torchvision", "timm", "sklearn", "scipy", "matplotlib"),
    *("pandas", "jinja2", "torch.distributed.elastic.agent", "torch.utils.flop_counter"),
)


def test_a_job_imports_nothing_that_its_config_does_not_use(tmp_path: Path) -> None:
    job = (f"output_root={tmp_path}", "steps=2", "checkpoint.every=1", "device=cpu", "train.ema=0.9")
    done = command(sys.executable, "-X", "importtime", "train.py", *job)
    assert done.code == 0, done.err
    assert {"torch", "tensorboard"} <= imported(done)
    assert sorted(set(UNUSED) & imported(done)) == []


def test_a_job_without_tensorboard_does_not_import_it(tmp_path: Path) -> None:
    job = (f"output_root={tmp_path}", "steps=1", "device=cpu", "logger=jsonl")
    assert not {"tensorboard", "google.protobuf"} & imported(
        command(sys.executable, "-X", "importtime", "train.py", *job)
    )
