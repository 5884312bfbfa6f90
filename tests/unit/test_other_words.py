"""What other programs call our keys: each proposal can be typed as it stands."""

import functools
import shlex

import pytest
from hydra.errors import HydraException
from hydra.main import get_args_parser

from helpers import composed
from lockstep.config import command_line, components, messages
from lockstep.config.other_words import ABSENT, KEYS, VALUE_WORDS
from lockstep.config.schema import GROUPS
from lockstep.config.suggest import OFF, suggest_for_path, suggest_option, suggest_override
from lockstep.core.errors import InputError

# A value of the other program for a word whose override takes no number.
SAMPLES = {"device": "gpu", "precision": "amp", "optimizer": "sgd", "schedule": "cosine", "loss": "ce"}
SAMPLES |= {"model": "resnet18", "dataset": "cifar10", "betas": "0.9", "rendezvous": "host:29500"}
SAMPLES |= {"erase_mode": "pixel", "mix_by": "batch"}
SAMPLES |= {"compile_mode": "default", "interpolation": "bicubic", "logger": "wandb", "project": "photos"}
SMALL = ("threshold", "ema", "momentum", "label_smoothing", "layer_decay", "erase", "mix_switch", "mix_prob")
WORDS = [(word, template) for template, words in KEYS.items() for word in words.split()]
NAMES = [(words.split("=")[0], name) for words, names in VALUE_WORDS.items() for name in names.split()]


@functools.cache  # many words have the same proposal
def check(proposal: str) -> None:
    """The proposal, pasted, is a job."""
    components.build_job(composed(*shlex.split(proposal)))


def compose_as_typed(words: list[str]) -> None:
    command_line.checked_words(words, get_args_parser())
    composed(*words)


@pytest.mark.parametrize(("template", "words"), KEYS.items(), ids=KEYS)
def test_what_is_proposed_for_a_key_can_be_typed(template: str, words: str) -> None:
    key = template.split()[-1].partition("=")[0]
    last = key.rpartition(".")[2]
    value = SAMPLES.get(last, "0.1" if last in SMALL else "2")
    spellings = [(word, word.replace("_", "-"), word.upper(), f"trainer.{word}") for word in words.split()]
    (proposal,) = {suggest_override(name, value) for names in spellings for name in names}
    assert value in proposal or "{}" not in template
    check(proposal)
    assert all(key in suggest_override(word) for word in words.split()) or template in {*GROUPS, "device"}


def test_a_number_of_epochs_stays_one() -> None:
    of_epochs = [(word, template) for word, template in WORDS if "epoch" in word and "{}" in template]
    keys = ("epochs={}", "patience={}")  # which count epochs, or evaluations
    assert len(of_epochs) > 5
    assert [word for word, template in of_epochs if not template.endswith(("={}ep", *keys))] == []


@pytest.mark.parametrize("off", OFF)
def test_no_switch_that_is_off_has_an_override(off: str) -> None:
    switches = [word for word, template in WORDS if "{}" not in template and template not in {*GROUPS, "device"}]
    proposals = {suggest_override(word, text) for word in switches for text in (off, off.upper(), off.title())}
    assert proposals == {""}


@pytest.mark.slow
def test_what_is_proposed_for_a_value_can_be_typed() -> None:
    for group, name in NAMES:
        proposal = suggest_option(group, name.upper())
        assert proposal.startswith(f"{group}=")
        check(proposal)


def test_no_word_stands_for_two_keys_or_is_one_of_ours() -> None:
    words = [word for word, _ in WORDS]
    assert len(words) == len(set(words))
    assert len(NAMES) == len(set(NAMES))
    assert not set(words) & set(composed())


@pytest.mark.parametrize(
    ("words", "proposal"),
    [
        ("learning_rate=0.1", "optimizer.lr=0.1"),
        ("gpus=2", "launcher.ranks=2"),
        ("devices=-1", "launcher.ranks=auto"),
        ("precision=amp", "precision=bf16"),
        ("launcher=torchrun", "launcher=elastic"),
        ("model.sync_bn=true", "strategy.sync_batchnorm=true"),
        ("train.batch_size=32", "batch=32"),
        ("--batch-size=32 --epochs 3", "batch=32 epochs=3"),
        ("--amp --opt lamb", "precision=bf16 optimizer=timm optimizer.opt=lamb"),
        ("--warmup-epochs 5", "schedule.warmup=5ep"),
        ("--model-ema", "train.ema=0.999"),
        ("--data-dir 'my photos, all'", "dataset=folder 'dataset.path=\"my photos, all\"'"),
        ("--nodes 2 --gpus 2 --epochs 5", "launcher=elastic launcher.nodes=2 launcher.ranks=2 epochs=5"),
        ("--nr 1", "launcher=elastic launcher.nodes=2 launcher.node_rank=1"),
        ("--prefetch-factor=4", "loader=streaming loader.prefetch=4"),
        ("--per_device_train_batch_size 16", "batch=16"),
        ("--accelerator auto", "device=auto"),
        ("--accelerator cpu", "device=cpu"),
        ("--accelerator gpu", "device=cuda"),
    ],
)
def test_the_sentence_has_the_value_of_the_user(words: str, proposal: str, monkeypatch: pytest.MonkeyPatch) -> None:
    command = shlex.split(words)
    monkeypatch.setattr("sys.argv", ["train.py", *command])
    with pytest.raises((InputError, HydraException)) as caught:
        compose_as_typed(command)
    sentence = str(messages.translate(caught.value))
    note = " (batch counts the images of all devices)" if "batch=" in proposal else ""
    assert sentence.endswith((f" Did you mean {proposal}{note}?", f"KEY=VALUE{note}: {proposal}"))
    check(proposal)


def test_a_switch_that_is_off_and_an_unknown_word_have_no_proposal() -> None:
    words = (("use_amp", "false"), ("zzz", "1"), ("model.name", "x"), ("opt", "zzz"))
    assert {suggest_override(*word) for word in words} == {""}
    sentence = messages._no_such_key("zzz", ["train.mixup", "epochs"])
    assert sentence == "zzz: there is no such key in the config. `lockstep train --cfg job` shows them all."
    with pytest.raises(InputError, match=r"--zzz is not a flag .*--cfg job"):
        command_line.checked_words(["--zzz"], get_args_parser())
    with pytest.raises(InputError, match=r"^--config may be --config-path, --config-name, .*: --config-name NAME$"):
        command_line.checked_words(["--config", "x"], get_args_parser())


@pytest.mark.parametrize("suffix", [".safetensors", ".pth", ".pt", ".bin", ".ckpt"])
def test_a_file_of_weights_is_what_a_run_starts_from(suffix: str) -> None:
    assert suggest_for_path("", f"w{suffix}") == f" Did you mean init_from=w{suffix}?"
    assert suggest_for_path("model", f"w{suffix}") == f" Did you mean model=NAME init_from=w{suffix}?"


@pytest.mark.parametrize(
    "key", ["train.epochs", "train.data_root", "train.monitor", "optimizer.epochs", "dataset.epochs"]
)
def test_a_key_of_the_job_that_is_typed_in_a_block_is_found(key: str) -> None:
    with pytest.raises(HydraException) as caught:
        composed(f"{key}=3")
    assert f" Did you mean '{key.partition('.')[2]}'" in str(messages.translate(caught.value))


@pytest.mark.parametrize(
    ("typed", "key", "meant"),
    [
        ("train.mixpu=0.2", "train.mixpu", "train.mixup=0.2"),
        ("train.mixpu.x=0.2", "train.mixpu", "'train.mixup'"),  # the value is of another key
        ("epochs=3", "train.mixpu", "'train.mixup'"),  # the key comes from a file
        ("trian.mixup=0.2", "trian", "train.mixup=0.2"),  # Hydra names the block alone
    ],
)
def test_a_proposed_key_has_the_value_that_was_typed_for_it(
    typed: str, key: str, meant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["train.py", typed])
    sentence = messages._no_such_key(key, ["train.mixup", "train.cutmix", "epochs"])
    assert sentence == f"{key}: there is no such key in the config. Did you mean {meant}?"


def test_a_word_without_a_counterpart_has_a_sentence() -> None:
    for words in ABSENT:
        for word in words.split():
            assert word not in {key for key, _ in WORDS}
            with pytest.raises(InputError, match=rf"--{word} is not a flag of this program: .{{20,}}"):
                command_line.checked_words([f"--{word}", "3"], get_args_parser())
    with pytest.raises(HydraException) as caught:
        composed(f"{word}=3")
    assert f"{word}: there is no such key in the config. Here " in str(messages.translate(caught.value))
