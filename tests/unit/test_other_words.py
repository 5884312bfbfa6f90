"""What other programs call our keys: each proposal can be typed as it stands."""

import functools
import re
import shlex
from pathlib import Path

import pytest
from hydra.errors import HydraException
from hydra.main import get_args_parser

from helpers import chosen, composed
from lockstep.config import command_line, components, messages, suggest
from lockstep.config.other_words import ABSENT, KEYS, VALUE_WORDS
from lockstep.config.schema import GROUPS
from lockstep.config.suggest import (
    OFF,
    explain_absent,
    suggest_for_path,
    suggest_key,
    suggest_option,
    suggest_override,
)
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


# A word of another program with its value, then what it is here; `:`, and a part of the sentence where it is no key.
MEANINGS = """
    max_epochs 90 | epochs=90
    max_steps 500 | steps=500
    manual_seed 3 | seed=3
    run_name a | name=a
    output_dir a | output_root=a
    ckpt_path a | resume=a
    initial_checkpoint a | init_from=a
    deterministic | repro=strict
    torchcompile | model.compile=true
    channels_last | model.channels_last=true
    img_size 96 | dataset.input_size=96
    train_crop_size 96 | train.size=96
    num_workers 8 | loader=streaming loader.workers=8
    prefetch_factor 8 | loader=streaming loader.prefetch=8
    find_unused_parameters | strategy=ddp strategy.find_unused_parameters=true
    fp16 | precision=fp16
    tf32 | precision=tf32
    nproc_per_node 8 | launcher.ranks=8
    nnodes 8 | launcher=elastic launcher.nodes=8
    max_restarts 8 | launcher=elastic launcher.restarts=8
    rdzv_endpoint a:1 | launcher=elastic launcher.rendezvous=a:1
    weight_decay 0.3 | optimizer.weight_decay=0.3
    adam_epsilon 0.3 | optimizer.eps=0.3
    momentum 0.3 | optimizer=sgd optimizer.momentum=0.3
    nesterov | optimizer=sgd optimizer.nesterov=true
    layer_decay 0.3 | optimizer.layer_decay=0.3
    warmup_steps 5 | schedule.warmup=5
    smoothing 0.3 | loss.label_smoothing=0.3
    accum_iter 8 | train.micro_batches=8
    clip_grad 0.3 | train.clip_norm=0.3
    model_ema_decay 0.3 | train.ema=0.3
    model_ema_warmup | train.ema_warmup=true
    model_ema_steps 5 | train.ema_every=5
    mixup_alpha 0.3 | train.mixup=0.3
    cutmix_alpha 0.3 | train.cutmix=0.3
    mixup_mode pair | train.mix_by=pair
    mixup_switch_prob 0.3 | train.mix_switch=0.3
    mixup_prob 0.3 | train.mix_prob=0.3
    mixup_off_epoch 5 | train.mix_until=5ep
    reprob 0.3 | train.erase=0.3
    remode pixel | train.erase_mode=pixel
    ra_reps 5 | train.repeats=5
    repeated_aug | train.repeats=3
    use_swa | train.swa_from=75%
    swa_epoch_start 5 | train.swa_from=5ep
    early_stopping | train.patience=5
    patience 8 | train.patience=8
    decay_rate 0.3 | schedule=step schedule.gamma=0.3
    lr_patience 8 | schedule=plateau schedule.patience=8
    num_restarts 8 | schedule=cosine schedule.restarts=8
    lr_power 2 | schedule=polynomial schedule.power=2
    check_val_every_n_epoch 5 | train.eval_every=5ep
    val_check_interval 500 | train.eval_every=500
    cudnn.benchmark | train.cudnn_benchmark=true
    save_steps 500 | checkpoint.every=500
    save_total_limit 5 | checkpoint.keep=5
    save_top_k 5 | checkpoint.keep_best=5
    log_interval 50 | telemetry.interval=50
    use_wandb | logger=[jsonl,wandb]
    auto_augment | augment=randaugment
    no_aug | augment=none
    no_cuda | device=cpu
    gradient_checkpointing | model.grad_checkpointing=true
    torchcompile_mode default | model.compile_mode=default
    bce_loss | loss=bce
    bce_target_thresh 0.3 | loss=bce loss.threshold=0.3
    bce_sum | loss=bce loss.sum_classes=true
    auto_find_batch_size | train.micro_batches=auto
    tta | train.eval_views=2
    train_interpolation bicubic | input.interpolation=bicubic
    num_cpu_threads_per_process 8 | launcher.threads=8
    profiler | telemetry.profile=true
    wandb_project a | logger=[jsonl,wandb] logger.wandb.project=a
    fsdp | strategy=fsdp
    deepspeed | strategy=zero
    optim adamw_torch | optimizer=adamw
    optim nesterov | optimizer=sgd
    optim lion | optimizer=timm optimizer.opt=lion
    optim rmsprop | optimizer=timm optimizer.opt=rmsprop
    sched onecycle | schedule=cosine
    sched sgdr | schedule=cosine schedule.restarts=3
    sched linearlr | schedule=linear
    sched poly | schedule=polynomial
    sched exponentiallr | schedule=exponential
    sched reduce_lr_on_plateau | schedule=plateau
    sched wsd | schedule=chain
    sched multistep | schedule=step
    sched constant_with_warmup | schedule=constant
    criterion softmax | loss=cross_entropy
    criterion bcewithlogits | loss=bce
    criterion focal_loss | loss=focal
    mixup_mode elem | train.mix_by=example
    dtype bf16-true | precision=bf16_pure
    dtype torch.float16 | precision=fp16
    dtype 32-true | precision=fp32
    dtype double | precision=fp64
    shuffle : random order
    pin_memory : pinned
    drop_last : last batch
    persistent_workers : threads
    recount : rectangle
    nb_classes : number of classes
    start_epoch : resume=latest
    do_eval : lockstep evaluate
    load_best_model_at_end : best weights
    per_device_eval_batch_size : train.eval_batch
    adam_beta2 : optimizer.betas
    norm_weight_decay : optimizer.decay_all
    min_lr : schedule.final
    warmup_ratio : schedule.warmup
    decay_milestones : schedule.milestones
    clip_mode : train.clip_norm
    drop_path : model.drop_path_rate
    color_jitter : augment
    crop_pct : dataset.decode_size
    in_chans : dataset.channels
    train_val_split : dataset.val_share
    overfit_batches : dataset.limit
    fast_dev_run : lockstep doctor
    callbacks : docs/extending.md
    max_time : budget.hours
    eval_strategy : train.eval_every
    disable_tqdm : line of progress
    save_safetensors : safetensors
    detect_anomaly : not finite
    greater_is_better : minus
    push_to_hub : --to timm
    local_rank : CUDA_VISIBLE_DEVICES
    master_port : launcher.rendezvous
    use_distributed_sampler : split over the ranks
    kd_model_name : task=distill
"""
MEANING = re.compile(r"^(\S+)(?: (\S+))? ([|:]) (.*)$")


def test_a_word_of_another_program_is_what_it_means_there() -> None:
    lines = [line.strip() for line in MEANINGS.strip().splitlines()]
    wrong = []
    for name, value, sign, here in (MEANING.findall(line)[0] for line in lines):
        if sign == "|" and suggest_override(name, value or None).replace("'", "") != here:
            wrong.append(f"{name}: {suggest_override(name, value or None)}")
        if sign == ":" and here not in explain_absent(name):
            wrong.append(f"{name}: {explain_absent(name)}")
    assert wrong == []
    assert len(lines) > 120


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


def test_a_key_of_a_named_component_is_proposed_whole() -> None:
    with pytest.raises(HydraException) as caught:
        composed("metric=[f1]", "metric.f1.averag=micro")
    assert str(messages.translate(caught.value)).endswith(" Did you mean 'metric.f1.average'?")


@pytest.mark.parametrize(
    ("typed", "key", "meant"),
    [
        ("train.mixpu=0.2", "train.mixpu", "train.mixup=0.2"),
        ("train.mixpu.x=0.2", "train.mixpu", "'train.mixup'"),  # the value is of another key
        ("epochs=3", "train.mixpu", "'train.mixup'"),  # the key comes from a file
        ("trian.mixup=0.2", "trian", "train.mixup=0.2"),  # Hydra names the block alone
        ("train.mixpu=a=b", "train.mixpu", "train.mixup=a=b"),
    ],
)
def test_a_proposed_key_has_the_value_that_was_typed_for_it(
    typed: str, key: str, meant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["train.py", typed])
    sentence = messages._no_such_key(key, ["train.mixup", "train.cutmix", "epochs"])
    assert sentence == f"{key}: there is no such key in the config. Did you mean {meant}?"


@pytest.mark.parametrize(
    ("words", "key", "meant"),
    [
        (("metric=[f1]", "metric.f1.avrage=x"), "metric.f1.avrage", "Did you mean 'metric.f1.average'?"),
        (
            ("callback=[agc]", "callback.agc.cliping=1"),
            "callback.agc.cliping",
            "Did you mean 'callback.agc.clipping'?",
        ),
        (("metric=[f1]", "metric.f2.average=x"), "metric.f2", "metric has f1."),
        (
            ("optimizer=timm", "+optimizer.options={a: {beta: 1}}", "optimizer.options.a.bet=2"),
            *("optimizer.options.a.bet", "Did you mean 'optimizer.options.a.beta'?"),
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_key_deep_in_a_config_is_proposed_whole(words: tuple[str, ...], key: str, meant: str) -> None:
    with pytest.raises(HydraException) as caught:
        chosen(*words)
    assert str(messages.translate(caught.value)) == f"{key}: there is no such key in the config. {meant}"


def test_a_proposal_has_no_target_the_value_that_was_typed_and_a_note_about_the_batch() -> None:
    names = ["model._target_", "model.width", "train.mixup"]
    assert suggest.suggest_key("model.zzz", "3", names) == " model has width."
    values = {None: "'train.mixup'", "": "train.mixup=", "0": "train.mixup=0", "a b": "'train.mixup=a b'"}
    for value, proposal in values.items():
        assert suggest.suggest_key("train.mixpu", value, names) == f" Did you mean {proposal}?"
    note = " (batch counts the images of all devices)"
    proposals = {"batch=8": note, "epochs=3 batch=8": note, "epochs=3": ""}
    assert {proposal: suggest.size_note(proposal) for proposal in proposals} == proposals


def test_a_word_without_a_counterpart_has_a_sentence() -> None:
    for words in ABSENT:
        for word in words.split():
            assert word not in {key for key, _ in WORDS}
            with pytest.raises(InputError, match=rf"--{word} is not a flag of this program: .{{20,}}"):
                command_line.checked_words([f"--{word}", "3"], get_args_parser())
    with pytest.raises(HydraException) as caught:
        composed(f"{word}=3")
    assert f"{word}: there is no such key in the config. Here " in str(messages.translate(caught.value))


@pytest.mark.parametrize(
    ("name", "value", "proposal"),
    [
        ("mixup", None, "train.mixup=VALUE"),
        ("mixup", "0.2", "train.mixup=0.2"),
        ("keep-best", "2", "checkpoint.keep_best=2"),
        ("Epochs", "3", "epochs=3"),
        ("usd_per_gpu_hour", "2", "cost.usd_per_gpu_hour=2"),
        ("optimizer", "sgd", "optimizer=sgd"),
        ("optimizer", None, ""),
        ("train", "3", ""),
        ("my.mixup", "0.2", ""),
        ("my.lr", "0.2", "optimizer.lr=0.2"),
        ("lr", "[1,2", "'optimizer.lr=\"[1,2\"'"),
        ("name", "a b", "'name=a b'"),
        ("device", "cpu", "device=cpu"),
        ("accelerator", "tpu", ""),
        ("amp", "FALSE", ""),
        ("amp", None, "precision=bf16"),
        ("amp", "true", "precision=bf16"),
        ("devices", "-1", "launcher.ranks=auto"),
        ("devices", "4", "launcher.ranks=4"),
        ("nnodes", "-1", "launcher=elastic launcher.nodes=-1"),
        ("swa_start", None, "train.swa_from=VALUEep"),
        ("pretrained", "true", "model=resnet50d model.pretrained=true"),
    ],
)
def test_a_word_is_proposed_with_its_place_and_its_value(name: str, value: str | None, proposal: str) -> None:
    assert suggest_override(name, value) == proposal


@pytest.mark.parametrize(
    ("line", "proposal"),
    [
        ("model=resnet18", "model.pretrained=true"),
        ("seed=1 model=torchvision.resnet18", "model.pretrained=true"),
        ("model=linear", "model=resnet50d model.pretrained=true"),
        ("seed=1", "model=resnet50d model.pretrained=true"),
    ],
)
def test_pretrained_weights_are_those_of_the_model_of_the_line(
    line: str, proposal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["train.py", *line.split()])
    assert suggest_override("pretrained", "true") == proposal


def test_an_option_is_proposed_by_its_own_name_or_that_of_another_program() -> None:
    options = {("optimizer", "sgd"): "optimizer=sgd", ("optimizer", "LAMB"): "optimizer=timm optimizer.opt=lamb"}
    options |= {
        ("device", "cuda"): "device=cuda",
        ("device", "auto"): "device=auto",
        ("device", "GPU"): "device=cuda",
    }
    options |= {("device", "tpu"): "", ("model", "resnet18"): "model=resnet18", ("loss", "sgd"): ""}
    options |= {
        ("precision", "amp"): "precision=bf16",
        ("device", "amp"): "",
        ("schedule", "None"): "schedule=constant",
    }
    assert {names: suggest_option(*names) for names in options} == options


NAMES_OF_JOB = [
    *("epochs", "batch", "name", "train.mixup", "train.eval_every", "optimizer.lr", "optimizer.betas"),
    *("optimizer._target_", "telemetry.interval", "a.size_of", "b.size_of", "c.size_of", "d.size_of", "mine"),
    "callback.of_mine_which_has_a_name.patience",
]
MEANT: dict[tuple[str, str | None], str] = {
    ("trian.mixup", "0.2"): " Did you mean train.mixup=0.2?",
    ("trian.mixpu", None): " Did you mean 'train.mixup'?",
    ("calback.of_mine_which_has_a_name.patiense", "3"): (
        " Did you mean callback.of_mine_which_has_a_name.patience=3?"
    ),
    ("foo.eval_every", "3"): " Did you mean train.eval_every=3?",
    ("train.interval", None): " Did you mean 'telemetry.interval'?",
    ("eval_evry", None): " Did you mean 'train.eval_every'?",
    ("epoch", "3"): " Did you mean epochs=3?",
    ("optimizer.bets", None): " Did you mean 'optimizer.betas'?",
    ("optimizer.zzz", None): " optimizer has lr, betas.",
    ("train.batch_size", "8"): " Did you mean batch=8 (batch counts the images of all devices)?",
    ("train.learning_rate", "8"): " Did you mean optimizer.lr=8?",
    ("zzz", "8"): "",
    ("zzz.yyy", "8"): "",
    ("train.zzz.yyy", "8"): "",
    ("foo.size_of", "8"): " Did you mean a.size_of=8 or b.size_of=8 or c.size_of=8?",
    ("size_of", None): " Did you mean 'a.size_of' or 'b.size_of' or 'c.size_of'?",
    ("dataset.size", "8"): " dataset=fake has size: add dataset=fake, or remove it.",
    ("schedule.gamma", "8"): " schedule=exponential, plateau, step has gamma: choose one of them, or remove it.",
    (
        "train.shuffle",
        "8",
    ): " Here training images are in a new random order in each epoch, which depends on seed and "
    "epoch alone; evaluation keeps the order of the split.",
}


@pytest.mark.parametrize(("key", "value"), MEANT)
def test_the_key_that_was_probably_meant_is_in_its_block_or_its_name_is(key: str, value: str | None) -> None:
    assert suggest_key(key, value, NAMES_OF_JOB) == MEANT[key, value]


def test_a_key_of_hydra_is_looked_for_among_hydras_and_no_others() -> None:
    names = ["hydra.job.name", "job.name", "names"]
    assert messages._no_such_key("hydra.job.nam", names).endswith(" Did you mean 'hydra.job.name'?")
    assert messages._no_such_key("job.nam", names).endswith(" Did you mean 'job.name'?")
    assert "hydra" not in messages._no_such_key("verbose", ["hydra.verbose", "epochs"])
    assert messages._no_such_key("hydra.mixup", ["train.mixup", "hydra.job"]).endswith("config. hydra has job.")
    sentence = "job/name: there is no such key; keys are written with dots: job.name=None"
    assert messages._no_such_key("job/name", names) == sentence


@pytest.mark.parametrize(
    ("group", "word"),
    [
        *(("dataset", "plain"), ("dataset", "a\0b"), ("dataset", "a" * 5000), ("", "a" * 5000), ("", "nothing.csv")),
        *(
            ("dataset", "run"),
            ("loss", "run"),
            ("loss", "w.pt"),
            ("model", "no/such"),
            ("", "no/such"),
            ("model", "there"),
            ("", "file.txt"),
            ("", ""),
        ),
    ],
)
def test_a_word_that_is_no_path_of_data_or_weights_has_no_proposal(
    group: str, word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    (tmp_path / "file.txt").touch()
    (tmp_path / "run" / ".hydra").mkdir(parents=True)
    (tmp_path / "run" / ".hydra" / "config.yaml").touch()
    assert suggest_for_path(group, word) == ""


def test_a_folder_of_the_home_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "photos").mkdir()
    for group in ("", "dataset"):
        proposal = suggest_for_path(group, "~/photos")
        assert "dataset=folder" in proposal
        assert "~/photos" in proposal
    assert "dataset=webdataset dataset.path=no" in suggest_for_path("dataset", "no/shard.tar")


@pytest.mark.parametrize("length", [199, 200, 201])
def test_the_reason_of_a_config_that_cannot_be_composed_is_one_line_of_at_most_200_letters(length: int) -> None:
    reason = "".join(chr(ord("a") + number % 26) for number in range(length))
    text = str(messages.unreadable(ValueError(reason)))
    shown_reason = reason if length <= 200 else f"{reason[:197]}..."
    assert text.startswith(f"the config cannot be composed (ValueError: {shown_reason}); look at the values")
    assert text.endswith("HYDRA_FULL_ERROR=1 shows where")
    assert "(KeyError: 'a b')" in str(messages.unreadable(KeyError("a b")))
    assert "(ValueError: a b)" in str(messages.unreadable(ValueError("a\n  b")))
    assert "(TypeError: no reason given)" in str(messages.unreadable(TypeError()))


GROUP_WORDS = {
    "logger=null": "'logger=null': a config group takes a list of names of its options: logger=[]",
    "+model=3": "'+model=3': a config group takes the name of one of its options: model=basicnet",
    "experiment={a: 1}": "'experiment={a: 1}': a config group takes the name of one of its options: experiment=",
    "model=linear": "a config group takes the name of one of its options: GROUP=NAME, such as model=resnet18",
    "logger=[]": "a config group takes the name of one of its options: GROUP=NAME, such as model=resnet18",
}


@pytest.mark.parametrize("word", GROUP_WORDS)
def test_a_group_without_a_name_is_the_first_such_word_of_the_line(
    word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["train.py", "seed=null", word])
    error = messages.translate_before_job(ValueError("Config group override deletion requires ..."))
    assert str(error).startswith(GROUP_WORDS[word])
    monkeypatch.setattr("sys.argv", ["train.py", word, "loss=null"])
    expected = "'loss=null'" if "such as" in GROUP_WORDS[word] else GROUP_WORDS[word]
    assert str(messages.translate_before_job(ValueError("Config group override"))).startswith(expected)


def test_a_file_that_cannot_be_written_before_a_job_is_named_with_the_keys_of_folders() -> None:
    error = messages.translate_before_job(PermissionError(13, "Permission denied", "/there/x"))
    assert str(error) == (
        "/there/x cannot be written (Permission denied); name another folder with output_root=FOLDER, or with "
        "hydra.run.dir=FOLDER"
    )


FOUND_NOTHING = {
    ("model/zzzzzz", ()): "model=zzzzzz: there is no model of that name. It is one of basicnet, digitnet, linear, ",
    ("logger/zzzzzz.yaml", ()): "logger=zzzzzz: there is no logger of that name. It is one of jsonl, mlflow, tensor",
    ("loss/focl", ("focal", "bce")): "loss=focl: there is no loss of that name. Did you mean 'focal'?",
    ("loss/of/another/focl", ("focal", "bce")): (
        "loss=of/another/focl: there is no loss of that name. Did you mean 'focal'?"
    ),
    ("optimizer/lion", ()): "optimizer=lion: there is no optimizer of that name. Did you mean optimizer=timm opti",
    ("mine/zzz", ("a", "b")): "mine=zzz: there is no mine of that name. It is one of a, b.",
    ("mine/zzz", ()): "mine=zzz: there is no mine of that name. `lockstep train --help` shows the groups.",
    ("nope", ()): "there is no config named 'nope'; remove --config-name for the default one",
}


@pytest.mark.parametrize(("path", "options"), FOUND_NOTHING)
def test_an_option_that_is_not_there_is_named_with_those_that_are(
    path: str, options: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("lockstep.config.commands._WORDS", ["lockstep", "train"])
    sentence = messages._no_such_file(path, [*options])
    assert sentence.startswith(FOUND_NOTHING[path, options])
    assert sentence.endswith(", or a model of timm or torchvision.") == path.startswith("model/")
    (tmp_path / "pyproject.toml").write_text('[project.entry-points."lockstep.extensions"]\na = "mine"\n')
    note = " The package mine of this folder is not installed: use python train.py, or pip install -e ."
    assert messages._no_such_file(path, [*options]) == sentence + note * ("/" in path)


def test_a_path_of_a_data_set_without_one_chooses_the_data_set_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos").mkdir()
    names = ["dataset.size", "epochs"]
    assert suggest_key("dataset.path", "photos", names) == " Did you mean dataset=folder dataset.path=photos?"
    of_table = " Did you mean dataset=csv dataset.path=a.csv?"
    assert suggest_key("dataset.path", "a.csv", names) == of_table
    for value in (None, "", "nothing"):  # None: the key comes from a file
        assert "choose one of them" in suggest_key("dataset.path", value, names)


@pytest.mark.parametrize(
    ("line", "word", "proposal"),
    [
        ("lr 0.1", "lr", "optimizer.lr=0.1"),
        ("batch_size 8", "batch_size", "batch=8"),
        ("seed=1 mixup 0.2", "mixup", "train.mixup=0.2"),
        ("zzz 8", "zzz", ""),
        ("train.ema 0.9", "train.ema", "train.ema=0.9"),
        ("a/b 8", "a/b", ""),
        ("epochs", "lr", ""),
    ],
)
def test_a_word_of_another_program_and_the_value_behind_it_are_proposed_as_ours(
    line: str, word: str, proposal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["train.py", *line.split()])
    assert messages._joined(word) == proposal
