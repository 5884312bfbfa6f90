"""Bad input gets one clear sentence, before anything is written.

What the command line adds (exit code, streams, no traceback) is shown with the real command in
`test_command.py`; here the same route, from overrides to the run folder, is taken in this process.
"""

from __future__ import annotations

import os
import re
import shutil
import struct
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torchvision.io import write_jpeg

from helpers import built, created, refusal, train, train_here, tree
from lockstep.config import components, composition, messages
from lockstep.core.errors import InputError
from lockstep.core.run import read_overrides
from lockstep.core.run_dir import RunDir
from lockstep.job.validate import check_data_memory
from lockstep.training.resolved_job import load_job


def prepared(*overrides: str, folder: Path | None = None) -> RunDir:
    """The run folder that `python train.py OVERRIDES` would make."""
    return created(*overrides, folder=folder)[0]


def table(text: str) -> list[tuple[str, str]]:
    """Lines `OVERRIDES -> what the sentence has in it`."""
    rows = (row.partition(" -> ") for row in text.strip().splitlines())
    return [(overrides, sentence.strip()) for overrides, _, sentence in rows]


KEYS = table("""
model.width=8.5 -> model.width is '8.5', expected a whole number: model.width=10, or in a search model.width=int(
resume -> resume has no value, expected resume=latest
epochs -> epochs has no value, expected epochs=VALUE
resume=newest -> name one with resume=PATH, or the newest run with resume=latest
dataset=CIFAR10 -> Did you mean 'cifar10', 'cifar100'?
model=vit_base -> Did you mean 'vit_base_
train.epochs=3 -> train.epochs: there is no such key in the config. Did you mean 'epochs'?
dataset.batch=8 -> dataset.batch: there is no such key in the config. Did you mean 'batch'?
epoch=3 -> epoch: there is no such key in the config. Did you mean 'epochs'?
lr=0.1 -> lr: there is no such key in the config. Did you mean optimizer.lr=
optimizer.beta=1 -> optimizer.beta: there is no such key in the config. Did you mean 'optimizer.betas'?
model.foo=1 -> model.foo: there is no such key in the config. model has width, dropout,
+model.foo=1 -> model.foo is not a key of model=digitnet; it has channels_last, grad_checkpointing, compile,
dataset.skip=1 ->  dataset=csv, folder, hf, imagenet, torchvision, webdataset has skip: choose one
dataset=fake dataset.input_size=8 -> Did you mean 'dataset.size'? dataset=cifar10,
dataset=digits dataset.size=8 -> Did you mean 'dataset.input_size'? dataset=fake has size: add dataset=fake, or
schedule.milestones=[3] ->  schedule=step has milestones: add schedule=step, or remove it.
+foo=1 -> foo: there is no such key in the config.
~epochs -> epochs: this key is required
~model -> model is null, expected one of the group's options: model=NAME
model=timm -> model.name has no value; give it one with model.name=VALUE
name=${no.such.key} -> no.such.key
train.ema=yes_please -> train.ema is 'yes_please', expected
""")
OPTIONS = table("""
dataset=cifar -> dataset=cifar: there is no dataset of that name. Did you mean 'cifar10', 'cifar100'?
dataset=zzzz -> dataset=zzzz: there is no dataset of that name. It is one of cifar10, cifar100, csv, digits
model=null -> a config group takes the name of one of its options: GROUP=NAME
optimizer=timm optimizer.opt=lambb -> optimizer.opt is 'lambb', which timm does not have. Did you mean 'lamb'
""")
TYPES = table("""
epochs=abc -> epochs is 'abc', expected auto or a whole number
epochs=null -> epochs is null, expected a value: epochs=VALUE
schedule.warmup=null -> schedule.warmup is null, expected a value: schedule.warmup=VALUE
train=[1] -> train is a list, expected keys below it: train.KEY=VALUE
optimizer.betas={a:1} -> optimizer.betas is a dictionary, expected a list: optimizer.betas=[VALUE]
tags={a:1} -> tags is a dictionary, expected a list: tags=[VALUE]
optimizer.lr=x -> optimizer.lr is 'x', expected auto or a number above 0
optimizer.betas=3 -> optimizer.betas is 3, expected a list: optimizer.betas=[0.9,0.999]
sweep.objectives=seconds -> sweep.objectives is 'seconds', expected a list: sweep.objectives=[seconds]
launcher.backend=mpi -> launcher.backend is 'mpi', expected one of auto, nccl, gloo: launcher.backend=auto
train=3 -> train is 3, expected keys below it: train.KEY=VALUE
optimizer.lr -> 'optimizer.lr' cannot be read, expected KEY=VALUE
telemetry.gpu=maybe -> telemetry.gpu is 'maybe', expected true or false: telemetry.gpu=true
checkpoint.keep=x -> checkpoint.keep is 'x', expected a whole number: checkpoint.keep=10
checkpoint.keep=3.0 -> checkpoint.keep is not written as a whole number: checkpoint.keep=3
optimizer.weight_decay=x -> optimizer.weight_decay is 'x', expected a number: optimizer.weight_decay=0.1
name=${dataset} -> name refers to all keys of dataset, expected a text; the name of the option is name=${hydra:runti
name=${oc.env:HOME} -> name asks for ${oc.env:...}, which is not allowed; write name=VALUE
name=[a] -> name is '['a']', expected a text: name=TEXT
tags=a -> tags is 'a', expected a list: tags=[a]
init_from -> init_from has no value, expected init_from=latest
epochs=[1 -> 'epochs=[1' cannot be read, expected KEY=VALUE
seed=1,2 -> seed=1,2 names several values; lockstep.sweep(["seed=1,2"]) runs a sweep over them
notes=lr,again -> notes=lr,again names several values; a text with a comma has quotes: 'notes="lr,again"'
""")
RANGES = table("""
steps=-1 -> steps is -1, expected a whole number from 1 to 1,000,000,000: steps=null
seed=9999999999999999999999 -> seed is 9999999999999999999999, expected a whole number from 0
batch=0 -> batch is 0, expected auto or a whole number from 1
batch=2000 -> batch is 2000, but the training split has 1442 examples; use batch=1442 or less
train.micro_batches=65 -> train.micro_batches is 65, but a global batch has 64 examples; use train.micro_batches=64
train.eval_every=0 -> train.eval_every is 0, expected steps (100), epochs (2ep) or a share of the run
train.patience=5x -> train.patience is '5x', expected auto or evaluations (5), epochs (2ep) or a share of the run
train.eval_every=5x -> train.eval_every is '5x', expected steps (100), epochs (2ep) or a share
optimizer.lr=0 -> optimizer.lr is 0, expected auto or a number above 0
launcher.timeout=5parsec -> launcher.timeout is '5parsec', expected a time such as 30s, 10min or 2h
augment=standard augment.scale=[] -> augment.scale is [], expected two rising numbers: augment.scale=[0.08,1]
augment=three_augment -> needs red, green and blue, but the images have 1 channel; use augment=trivialaugment
augment=standard augment.grey=0.2 -> red, green and blue, but the images have 1 channel: augment.grey=0
augment=randaugment_timm -> augment.fill is [124, 116, 104], but the images have 1 channel; give one value for
augment=augmix augment.crop=resized augment.pad=8 -> augment.pad is 8, but augment.crop=resized does not use it;
augment=autoaugment augment.policy=cifar -> augment.policy is 'cifar', expected one of imagenet, cifar10, svhn
""")
LIMITS = table("""
optimizer.lr=nan -> optimizer.lr is nan, expected auto or a number above 0
model=resnet18 +model.options.depth=[nan] -> model.options is {'depth': [nan]}, expected numbers of at most
device=cpu strategy=ddp launcher.ranks=65000 -> launcher.ranks is 65000, but this machine has
device=cpu strategy=ddp launcher.ranks=8 launcher.threads=1024 -> launcher.threads is 1024 and loader.workers is auto,
dataset=fake dataset.size=16384 dataset.examples=100000 -> the images of dataset=fake need 100,663.3 GB, and
device=cpu dataset.input_size=16384 batch=1442 -> a micro-batch of 1442 images need 1,548.3 GB, and this machine
""")
EFFECTS = table("""
model.compile_mode=max_autotune -> model.compile_mode is max_autotune, but model.compile is false
train.cuda_graph=true strategy=ddp launcher.ranks=2 -> under strategy=ddp a step is more than the work of one d
train.cuda_graph=true repro=strict -> train.cuda_graph is true, but under strategy=strict a step is
train.cuda_graph=true optimizer=timm -> optimizer=timm computes with its learning rate in Python
train.cuda_graph=true optimizer.lookahead=6 -> optimizer.lookahead adds to some steps alone, and a replay
train.cuda_graph=true model.compile=true model.compile_mode=reduce_overhead -> model.compile_mode=reduce_overhead reco
precision=bf16_pure train.ema=0.9 -> use precision=bf16, or remove train.ema
loader=streaming loader.workers=0 loader.prefetch=9 -> loader.prefetch is 9, but loader.workers is 0
augment=shift augment.pad=0 augment.reflect=true -> augment.reflect is true, but augment.pad is 0, so nothing is padde
optimizer=timm optimizer.opt=adamw optimizer.momentum=0.5 -> optimizer.momentum is 0.5, but optimizer.opt=adamw has no
optimizer=sgd optimizer.nesterov=true optimizer.momentum=0 -> optimizer.nesterov is true, but optimizer.mom
repro=strict strategy.sync_batchnorm=false -> strategy.sync_batchnorm is false, but under repro=strict
repro=exact strategy=strict -> strategy=strict belongs to repro=strict, but repro=exact is given
dataset.root=there -> dataset.root: there is no such key in the config.
model=resnet18 model.pretrained=true init_from=/nowhere.safetensors -> init_from and model.pretrained=true both set
resume=/nowhere init_from=/nowhere.safetensors -> /nowhere is neither a run folder nor a checkpoint
""")
MACHINE = table("""
device=gpu -> device is 'gpu', expected one of auto, cpu, cuda: device=auto
device=cpu precision=fp16 -> precision=fp16 needs a CUDA GPU, but device is cpu; use precision=bf16
device=cpu precision=tf32 -> precision=tf32 needs a CUDA GPU, but device is cpu; use precision=fp32
device=cpu launcher.backend=nccl -> launcher.backend=nccl needs CUDA GPUs, but device is cpu; use launcher.backend=glo
device=cpu launcher=inline launcher.ranks=2 -> launcher=inline has one rank, but launcher.ranks requests 2
device=cpu launcher=inline strategy=ddp -> launcher=inline has one rank, but strategy=ddp requests 2
strategy=single launcher.ranks=2 device=cpu -> launcher.ranks is 2, but this strategy has one rank
device=cpu strategy=pipeline launcher.ranks=2 model.compile=true -> model.compile is true, but under strategy=pipeline
""")
BOXES = table("""
dataset=imagenet augment=shift -> dataset.crop_from=file cuts the boxes of a random resized crop from the files, and t
dataset=imagenet augment=augmix augment.crop=pad -> and augment.crop is pad; use augment.crop=resized or
dataset=imagenet augment=standard loader=resident -> loader=resident decodes each image once, but dataset.crop_from=fi
""")
PLACES = table("""
dataset=folder -> dataset.path has no value; give it one with dataset.path=VALUE
dataset=folder dataset.path=/nowhere -> dataset.path: there is no folder /nowhere, expected one subfolder
resume=latest -> resume=latest: no run has been started in
init_from=/nowhere.safetensors -> init_from: there are no weights at /nowhere.safetensors, expected a
init_from=/etc/passwd -> init_from: there are no weights at /etc/passwd, expected a .safetensors file
resume=/nowhere -> /nowhere is neither a run folder nor a checkpoint
""")
HOSTILE = table("""
model._target_=os.system -> model._target_ is 'os.system', expected a class of lockstep.models
model._target_=lockstep.models.timm.Timm -> expected a class of lockstep.models; choose one with model=NAME
optimizer._target_=subprocess.run -> optimizer._target_ is 'subprocess.run', expected a class of lockstep.optim
""")
ABSURD = [
    ("model=resnet18 +model.options.depth=[" + "1," * 1000 + "1]", "lists of at most 1,000, and texts without"),
    ("epochs=" + "9" * 250, "epochs is a number of more than 30 digits, expected auto or a whole number"),
    ("loss=" + "a" * 300, "there is no loss of that name"),
    ("resume=" + "a" * 300, "expected a path of at most 3,500 bytes and 255 a name, without control characters"),
    ("dataset=folder dataset.path=" + "a" * 256, "dataset.path is 'aaa"),
]
VALUES = TYPES + RANGES + LIMITS + ABSURD + EFFECTS + MACHINE + BOXES + PLACES + HOSTILE


# Sentences with a proposal that is computed.
COMPUTED = [
    "strategy=strict strategy.shards=3",
    "strategy=strict strategy.shards=1 launcher.ranks=2 device=cpu",
    "repro=strict train.micro_batches=2",
    "device=cpu strategy=pipeline launcher.ranks=2 strategy.cuts=[]",
    "device=cpu strategy=pipeline launcher.ranks=2 strategy.cuts=[a,b]",
    "device=cpu launcher=elastic launcher.nodes=1:2 repro=strict",
    "device=cpu launcher=elastic launcher.node_rank=1",
    "model.width=30",
    "dataset.input_size=3",
    "model=whitenet dataset.input_size=5",
    "batch=2000 train.micro_batches=1500",
    "batch=0.5",
]
# What stands behind `use`, `give` or `add`, or at the end behind a colon.
ADVICE = re.compile(
    r"(?:(?:; |\bor )(?:use|give|add) |[^;,]: )"
    r"((?:[a-z_]+(?:\.[a-z_]+)*=(?![A-Z])\S+ ?)+)(?=$|[,;.]| or | for | has )"
)


def test_a_resume_of_something_else_names_the_line_for_it(tmp_path: Path) -> None:
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep/sweep.json").touch()
    (tmp_path / "some weights.safetensors").touch()
    for path, remedy in (
        ("sweep", f"it is a sweep, which continues with -m sweep.resume={tmp_path}/sweep"),
        ("some weights.safetensors", f"'init_from={tmp_path}/some weights.safetensors'"),
    ):
        sentence = refusal(tmp_path / "runs", f"resume='{tmp_path / path}'")
        assert "is neither a run folder nor a checkpoint; " in sentence
        assert remedy in sentence


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [*KEYS, *OPTIONS, *VALUES, *((overrides, "") for overrides in COMPUTED)],
    ids=lambda text: text[:40],
)
def test_a_mistake_is_said_in_one_line_writes_nothing_and_what_it_proposes_can_be_typed(
    tmp_path: Path, overrides: str, sentence: str
) -> None:
    words = overrides.split()
    message = refusal(tmp_path / "runs", *words)
    assert sentence in message
    assert len(message.splitlines()) == 1
    assert len(message) < 400
    if (overrides, sentence) in (*KEYS, *OPTIONS):  # a name that was meant, and no line
        return
    for advice in ADVICE.findall(message):
        proposed = re.sub(r"[,;.]$", "", advice.strip()).split()
        keys = [word.partition("=")[0] for word in proposed]
        unchanged = [word for word in words if word.partition("=")[0].strip("+") not in keys]
        if "dataset=fake" in words and "dataset.examples=" in advice:  # so many images take half a minute to make
            check_data_memory(built(*unchanged, *proposed).dataset)
            continue
        with suppress(Exception):
            prepared(f"output_root={tmp_path / 'typed'}", *unchanged, *proposed)
            continue
        assert refusal(tmp_path / "runs", *unchanged, *proposed)[:30] != message[:30]


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("dataset=own", "dataset=folder dataset.path=own"),
        ("dataset='of mine'", "dataset=folder 'dataset.path=of mine'"),
        ("dataset=list.csv", "dataset=csv dataset.path=list.csv"),
        ("dataset=tars", "dataset=webdataset dataset.path=tars"),
        ("dataset=saved", "dataset=hf dataset.path=saved"),
        ("dataset=split", "dataset=hf dataset.path=split"),
        ("dataset=made", "dataset=packed dataset.path=made"),
        ("dataset=list.tsv", "dataset=csv dataset.path=list.tsv"),
        ("dataset=tars/train-0.tar", "dataset=webdataset dataset.path=tars"),
        ("dataset=no/such", "dataset=folder dataset.path=no/such"),
        ("model=w.safetensors", "model=NAME init_from=w.safetensors"),
        ("dataset=a=b", "dataset=folder 'dataset.path=\"a=b\"'"),
        ("own", "dataset=folder dataset.path=own"),
        ("run", "resume=run"),
        ("model=run", "model=NAME init_from=run"),
        ("w.safetensors", "init_from=w.safetensors"),
    ],
)
def test_a_path_in_place_of_a_name_is_answered_with_the_overrides_that_take_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: str, meant: str
) -> None:
    photos, folders = ("own/a.jpg", "of mine/a.jpg", "a=b/a.jpg"), ("tars/train-0.tar", "saved/dataset_dict.json")
    folders += ("split/state.json", "made/manifest.json")
    for file in (*photos, *folders, "run/.hydra/config.yaml", "w.safetensors"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    monkeypatch.chdir(tmp_path)
    assert refusal(tmp_path / "outputs", word).endswith(f" Did you mean {meant}?")


@pytest.mark.parametrize(
    ("key", "path"),
    [
        ("data_root", "'~nobody-of-that-name/x'"),
        ("resume", "'a\nb'"),
        ("init_from", "'\udc80'"),
        ("dataset=folder dataset.path", "' '"),
    ],
)
def test_a_path_that_none_can_have_is_refused_by_its_key(tmp_path: Path, key: str, path: str) -> None:
    *words, last = key.split()
    message = refusal(tmp_path / "runs", *words, f"{last}={path}")
    assert message.startswith(f"{last} is ")


JOBS = [
    (),
    ("batch=auto", "launcher.threads=auto"),
    ("optimizer=muon", "schedule=cosine", "augment=randaugment", "metric=[auroc,f1]", "precision=fp64"),
    ("strategy=ddp", "launcher.ranks=2", "train.ema=0.9"),
]


@pytest.mark.parametrize("words", JOBS, ids=" ".join)
def test_a_rank_in_this_process_has_the_job_that_other_ranks_read(words: tuple[str, ...], tmp_path: Path) -> None:
    run_dir, job = created("dataset=fake", "model=linear", "device=cpu", f"output_root={tmp_path}", *words)
    assert load_job(run_dir.config) == job


def test_a_network_that_memory_has_no_room_for_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.runtime.host.available_memory", lambda: 8e9)
    assert refusal(tmp_path / "runs", "device=cpu", "model.width=16384") == (
        "2 x 24,162,304,010 parameters and the buffers need 193.3 GB, and this machine has 8.0 GB free; "
        "use a smaller model or input"
    )


def test_a_pipe_is_no_folder(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for key in ("data_root", "output_root", "resume", "init_from"):
        data = "dataset=mnist" if key == "data_root" else "dataset=digits"
        with pytest.raises(InputError, match=f"{key}|pipe"):
            prepared(data, f"output_root={tmp_path / 'runs'}", f"{key}={tmp_path / 'pipe'}")
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]


@pytest.mark.parametrize(
    "word",
    ["name=" + "a" * 20_000, "name=" + "[" * 999 + "]" * 999, "seed=" + "9" * 5000, "a" * 300 + "=b", "a=\udc80"],
    ids=lambda word: word[:4],
)
def test_a_word_that_overtaxes_the_parser_is_refused_in_one_short_sentence(tmp_path: Path, word: str) -> None:
    assert len(refusal(tmp_path / "runs", word)) < 800


def test_what_composing_raises_without_a_word_of_its_own_becomes_a_sentence() -> None:
    unexpected = (ValueError, TypeError, AttributeError, IndexError, KeyError, ZeroDivisionError, RecursionError)
    for cls in (*unexpected, OverflowError, AssertionError):
        message = messages.translate_before_job(error := cls("too large"))
        begin = f"the config cannot be composed ({cls.__name__}: {error}); look at the values"
        assert str(message).startswith(begin)
    for error in (ImportError("broken"), RuntimeError("broken"), OSError("broken")):
        assert messages.translate_before_job(error) is None


TORCHRUN, SRUN = {"TORCHELASTIC_RUN_ID": "none"}, {"SLURM_PROCID": "0"}


@pytest.mark.parametrize(
    ("starter", "overrides", "says"),
    [
        (
            TORCHRUN,
            ("launcher.ranks=4",),
            "launcher.ranks is 4, but torchrun has started 2; use launcher.ranks=auto, or start 4 (torchrun --nproc",
        ),
        (SRUN, ("launcher.ranks=4",), "but srun has started 2; use launcher.ranks=auto, or start 4 (srun --ntasks)"),
        ({}, ("launcher=spawn",), "use launcher=auto, or launcher=spawn without RANK and WORLD_SIZE"),
        (TORCHRUN, ("launcher=elastic", "launcher.restarts=3"), "use launcher=auto and torchrun --max-restarts=3"),
        (TORCHRUN, ("launcher=spawn",), "launcher=spawn starts ranks, but torchrun has started them; use launcher=a"),
        (SRUN, ("launcher=slurm",), "but srun has started them; use launcher=auto, or launcher=slurm without srun"),
    ],
)
def test_what_another_launcher_has_decided_is_not_asked_for_again(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    starter: dict[str, str],
    overrides: tuple[str, ...],
    says: str,
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", **starter}.items():
        monkeypatch.setenv(name, value)
    assert says in refusal(tmp_path / "runs", "device=cpu", *overrides)
    prepared(f"output_root={tmp_path / 'other'}", "device=cpu", "launcher.ranks=2")


def test_the_batch_of_batch_auto_is_the_one_that_the_job_has_without_it(tmp_path: Path) -> None:
    for number, words in enumerate((["++batch=auto"], ["batch=32", "batch=auto"], ["batch='auto'", "batch=32"])):
        config = components.read_config(prepared(f"output_root={tmp_path / str(number)}", "name=test", *words).config)
        assert (config["batch"], config["train"]["micro_batches"]) == ((64, "auto"), (32, "auto"), (32, 1))[number]


def recipe_refusal(tmp_path: Path, line: str) -> str:
    """The sentence that a recipe with this line is refused with."""
    conf = tmp_path / "more" / "experiment"
    conf.mkdir(parents=True)
    (conf / "mine.yaml").write_text(f"# @package _global_\n{line}\n")
    return refusal(tmp_path / "runs", f"hydra.searchpath=[{conf.parent}]", "experiment=mine")


def test_a_recipe_cannot_say_batch_auto_which_hides_its_own_batch(tmp_path: Path) -> None:
    message = recipe_refusal(tmp_path, "batch: auto")
    assert message.startswith("batch=auto keeps the batch that a job has without it, so it only works on the command")


def test_all_that_is_wrong_with_the_groups_is_said_at_once(tmp_path: Path) -> None:
    message = refusal(tmp_path / "runs", "optimizer.lr=0", "augment=shift", "augment.pad=-1", "launcher.ranks=0")
    assert [line.split()[0] for line in message.splitlines()] == ["augment.pad", "launcher.ranks", "optimizer.lr"]


def test_a_key_of_a_recipe_is_left_out_where_another_option_is_typed_and_a_typed_one_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ("experiment=photos", "dataset=fake", "batch=4", "callback=[agc]", "metric=[f1]", "logger=jsonl")
    job = components.build_job(composition.composed([*words, "model=linear"]))
    assert type(job.model).__name__ == "Linear"
    assert "experiment=photos sets model.pretrained: not for model=linear" in capsys.readouterr().err
    typed = composition.composed([*words, "model=linear", "model.pretrained=true"])
    with pytest.raises(InputError, match=r"model\.pretrained is not a key of model=linear"):
        components.build_job(typed)


def test_a_wrong_key_in_a_recipe_names_the_file(tmp_path: Path) -> None:
    message = recipe_refusal(tmp_path, "epoch: 3")
    assert message == "experiment/mine.yaml: epoch: there is no such key in the config. Did you mean 'epochs'?"


def test_a_recipe_that_is_not_yaml_is_named_with_the_place(tmp_path: Path) -> None:
    message = recipe_refusal(tmp_path, "epochs: [3")
    assert message.startswith("a config file is not YAML: ")
    assert 'experiment/mine.yaml", line 3' in message


@pytest.mark.parametrize(
    "line",
    [
        "epochs: " + "9" * 5000,
        "name: " + "[" * 3000 + "]" * 3000,
        "train: {clip_norm: " + "9" * 400 + "}",
        "optimizer: {lr: .nan}",
        'data_root: "a\\0b"',
    ],
    ids=lambda text: text[:20],
)
def test_a_recipe_with_an_absurd_value_is_refused_in_one_short_sentence(tmp_path: Path, line: str) -> None:
    assert len(recipe_refusal(tmp_path, line)) < 800


def pictures(folder: Path, train: str = "ab", val: str = "ab") -> Path:
    """A folder data set with two images per class."""
    for split, classes in (("train", train), ("val", val)):
        (folder / split).mkdir(parents=True)
        for name in classes:
            (folder / split / name).mkdir()
            for number in range(2):
                write_jpeg(torch.zeros(3, 8, 8, dtype=torch.uint8), str(folder / split / name / f"{number}.jpg"))
    return folder


@pytest.mark.parametrize(
    ("train", "val", "emptied", "sentence"),
    [
        ("", "", "", "train has no subfolders, expected one per class"),
        ("ab", "abc", "", "val/c is a class that"),
        ("ab", "ab", "train/b", "train/b has no images (.apng, .avif, .bmp"),
        ("ab", "ab", "val/a", "val/a has no images (.apng, .avif, .bmp"),
    ],
)
def test_a_folder_that_is_no_data_set_is_named(
    tmp_path: Path, train: str, val: str, emptied: str, sentence: str
) -> None:
    folder = pictures(tmp_path / "pictures", train, val)
    if emptied:
        for image in (folder / emptied).iterdir():
            image.unlink()
    message = refusal(tmp_path / "runs", "dataset=folder", f"dataset.path={folder}", "batch=1")
    assert message.startswith("dataset.path: ")
    assert sentence in message


def offline(self: object) -> None:
    """Stands for torchvision's data sets on a machine without a network: only the download is faked."""
    raise RuntimeError("Error downloading train-images-idx3-ubyte.gz")


def test_missing_data_without_a_network_leaves_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.data.datasets.builtin.MNIST.fetch", offline)
    message = refusal(tmp_path / "runs", "dataset=mnist", f"data_root={tmp_path / 'data'}")
    assert "data_root: MNIST" in message
    assert "cannot be downloaded (Error downloading train-images-idx3-ubyte.gz); put train" in message
    assert f"t10k-labels-idx1-ubyte.gz (compressed or not) into {tmp_path}/data/MNIST/raw, or name" in message
    assert message.endswith("name another folder with data_root=FOLDER")
    assert list(tmp_path.iterdir()) == []


def write_mnist(root: Path, label: int) -> None:
    """The four files of MNIST with 64 black images each, and one training label as given."""
    raw = root / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for prefix in ("train", "t10k"):
        labels = bytearray(64)
        labels[5] = label if prefix == "train" else 0
        (raw / f"{prefix}-images-idx3-ubyte").write_bytes(struct.pack(">4I", 2051, 64, 28, 28) + bytes(64 * 28 * 28))
        (raw / f"{prefix}-labels-idx1-ubyte").write_bytes(struct.pack(">2I", 2049, 64) + bytes(labels))


def test_a_label_out_of_range_is_named_with_its_example(tmp_path: Path) -> None:
    write_mnist(tmp_path / "data", label=12)
    message = refusal(tmp_path / "runs", "dataset=mnist", f"data_root={tmp_path / 'data'}")
    assert message == "dataset: example 5 of the training split has label 12, expected 0 to 9"
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["MNIST"]


def test_more_ranks_than_gpus_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine of the tests has no GPU: torch.cuda is made to say that there are two."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    message = refusal(tmp_path / "runs", "strategy=ddp", "launcher.ranks=3")
    assert message == (
        "launcher.ranks is 3, but this machine has 2 GPUs, and each rank needs one; "
        "use launcher.ranks=2 or device=cpu"
    )


@pytest.mark.parametrize("mode", ["reduce_overhead", "max_autotune"])
@pytest.mark.parametrize("micro_batches", ["4", "auto"])
def test_cuda_graphs_cannot_add_gradients_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, micro_batches: str
) -> None:
    """torch.cuda is made to say that there is one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    graphs = ("model.compile=true", f"model.compile_mode={mode}", f"train.micro_batches={micro_batches}")
    assert refusal(tmp_path / "runs", *graphs) == (
        f"model.compile_mode={mode} records CUDA graphs, which cannot add up the gradients of micro-batches, and "
        f"train.micro_batches is {micro_batches}; use model.compile_mode=default"
    )
    prepared(f"output_root={tmp_path / 'other'}", "device=cpu", *graphs)


def test_copies_of_a_compiled_model_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.cuda is made to say that there are two."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert refusal(tmp_path / "runs", "strategy=dp", "model.compile=true") == (
        "strategy=dp has a copy of the model on each of 2 GPUs, and all copies would call the code that is "
        "compiled for the first; use strategy=ddp or model.compile=false"
    )


def test_a_gpu_that_is_not_there_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.cuda is made to say that there is none, wherever the test runs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    message = refusal(tmp_path / "runs", "device=cuda")
    assert message == "device=cuda, but torch finds no CUDA GPU on this machine; use device=cpu or device=auto"


@pytest.mark.parametrize("name", ["../../x", "/etc/x", "a" * 300, "ä" * 300, "..", "-rf"])
def test_no_name_leaves_the_output_root(tmp_path: Path, name: str) -> None:
    run = prepared(f"output_root={tmp_path / 'runs'}", f"name='{name}'")
    assert run.path.parent == tmp_path / "runs"
    assert len(run.path.name.encode()) < 200
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


def test_a_folder_with_files_of_others_does_not_become_a_run_folder(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(InputError, match="has files in it that are not of a run"):
        prepared(folder=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps that is done."""
    return train_here(tmp_path_factory.mktemp("runs") / "done", "steps=3", "name=test").path


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            "steps=6 batch=32",
            "is a checkpoint of another run (batch: here 32, there 64); resume with the same values",
        ),
        ("steps=6 optimizer=sgd", "is a checkpoint of another run (optimizer: here SGD, there AdamW)"),
        ("steps=6 seed=1 model.width=8", "(model: here DigitNet(width=8), there DigitNet(); seed: here 1, there 0)"),
        ("", "has finished step 3 of 3, so nothing is left to do; train longer with steps=6"),
        (
            "steps=6 init_from=/there",
            "resume has the weights of its checkpoint, and init_from names others; remove",
        ),
    ],
)
def test_a_resume_of_another_run_is_refused_with_the_difference(
    finished: Path, tmp_path: Path, overrides: str, sentence: str
) -> None:
    before = tree(finished)
    checkpoint = finished / "checkpoints" / "step-00000003"
    for place in (finished, checkpoint):
        added = ("steps=3",) if place == checkpoint and not overrides else ()
        assert sentence in refusal(tmp_path / "runs", f"resume={place}", *added, *overrides.split())
    assert tree(finished) == before


@pytest.fixture(scope="module")
def of_pictures(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run of two steps on three classes of two pictures, and their folder."""
    root = tmp_path_factory.mktemp("of pictures")
    data = pictures(root / "data", "abc", "ab")
    job = ("dataset=folder", f"dataset.path={data}", "dataset.decode_size=8", "batch=3", "steps=2", "augment=none")
    return train_here(root / "run", *job).path, data


@pytest.mark.parametrize(
    ("moved", "sentence"),
    [
        ({}, ""),
        ({"train/b/0.jpg": "train/b/7.jpg"}, "(train.b: here 2 files ("),
        ({"train/a/0.jpg": "train/b/7.jpg"}, "(train.a: here 1 file ("),
        (
            {"train/b": "train/x", "val/b": "val/x"},
            "(class_names[1]: here c, there b; class_names[2]: here x, there c; train.x: here 2 files",
        ),
    ],
    ids=str,
)
def test_other_pictures_are_told_and_the_same_ones_elsewhere_are_not(
    of_pictures: tuple[Path, Path], tmp_path: Path, moved: dict[str, str], sentence: str
) -> None:
    run, data = of_pictures
    elsewhere, before = tmp_path / "elsewhere", tree(run)
    shutil.copytree(data, elsewhere)
    for path, to in moved.items():
        (elsewhere / path).rename(elsewhere / to)
    job = ("dataset=folder", f"dataset.path={elsewhere}", "steps=4")
    if not sentence:
        same = ("dataset.decode_size=8", "batch=3", f"output_root={tmp_path}")
        prepared(f"resume={run / 'checkpoints' / 'step-00000002'}", *job, *same)
        return
    message = refusal(tmp_path / "runs", f"resume={run}", *job)
    assert "is a checkpoint of another run (" in message
    assert sentence in message
    assert tree(run) == before


@pytest.mark.parametrize(
    ("lost", "today", "sentence"),
    [
        (["optimizer.lr=0.5"], (), "(optimizer.lr was 0.5 and is 'auto')"),
        (["optimizer.lr=0.5"], ("steps=6", "optimizer=adam"), ""),
        (["optimizer.lr=0.5"], ("steps=6", "optimizer.lr=0.001"), ""),
        (
            ["model=basicnet"],
            ("steps=6",),
            "(model._target_ was 'lockstep.models.BasicNet' and is 'lockstep.models.Digi",
        ),
        (
            ["steps=3", "model=basicnet", "optimizer.lr=0.5", "~augment.pad"],
            ("epochs=9",),
            "(steps was 3 and is null, ",
        ),
        ([], ("steps=6", "model.compile=true", "loader=streaming"), ""),
    ],
    ids=str,
)
def test_a_run_whose_overrides_lost_a_line_is_refused_unless_today_says_what_it_said(
    tmp_path: Path, lost: list[str], today: tuple[str, ...], sentence: str
) -> None:
    chosen = ("model=basicnet", "optimizer.lr=0.5", "augment=shift", "~augment.pad")
    first = ("name=test", "steps=3", *chosen, f"output_root={tmp_path}")
    run = prepared(*first)
    run.overrides.write_text(
        components.dump([override for override in read_overrides(run.overrides) if override not in lost])
    )
    before = tree(run.path)
    if not sentence:
        prepared(f"resume={run.path}", *today)
        return
    with pytest.raises(InputError, match="no longer composes to its config") as caught:
        prepared(f"resume={run.path}", *today)
    assert sentence in str(caught.value)
    assert tree(run.path) == before


def test_a_run_whose_composed_config_is_gone_goes_on_with_a_warning_and_has_it_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = prepared("name=test", "steps=3", f"output_root={tmp_path}")
    config = (run.hydra / "config.yaml").read_text()
    for damaged in (None, "- a list\n"):
        (run.hydra / "config.yaml").unlink()
        if damaged is not None:
            (run.hydra / "config.yaml").write_text(damaged)
        prepared(f"resume={run.path}", f"output_root={tmp_path}")
        assert "the overrides of the run cannot be compared with it" in capsys.readouterr().out
        assert (run.hydra / "config.yaml").read_text() == config


REFUSED = (
    ("resume=nowhere",),
    ("resume=latest",),
    ("batch=auto", "train.micro_batches=3"),
    ("launcher=slurm", "launcher.dry_run=true", "resume=nowhere"),
    ("launcher=elastic", "launcher.nodes=2"),
)


@pytest.mark.parametrize("overrides", REFUSED, ids=" ".join)
def test_a_refused_job_leaves_no_folder_wherever_it_is_refused(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    done = train(*overrides, "hydra.run.dir=new", cwd=tmp_path)
    assert (done.code, [*tmp_path.iterdir()]) == (2, []), done.err
