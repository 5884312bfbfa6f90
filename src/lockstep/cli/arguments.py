"""The arguments of the commands other than `train`. Imports no torch, so that --help is fast."""

import argparse
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import lockstep
from lockstep.config.command_line import Parser
from lockstep.config.commands import OVERRIDE, key_of, shell_command
from lockstep.core.errors import InputError, did_you_mean
from lockstep.core.launch_env import is_launched, launched_place
from lockstep.core.run_dir import LATEST

DESCRIPTION = "Train and use image classifiers. `lockstep train --help` explains training."
ONE_PROCESS = ("doctor", "show", "lr-find", "prove", "ladder")  # they take a job and start its ranks themselves


def parsers() -> tuple[Parser, dict[str, Parser]]:
    """The parser of the command `lockstep`, and one for each command behind it, by name."""
    parser = Parser(prog="lockstep", description=DESCRIPTION)
    version = f"lockstep {lockstep.__version__}"  # works without an installation, too
    parser.add_argument("--version", action="version", version=version, help="show the version")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("train", help="train a job or a sweep, like train.py in a checkout")
    _of_models(commands)
    _of_runs(commands)
    new = commands.add_parser("new", help="create a starter project: a model, a data set, a test")
    new.add_argument("project", metavar="PROJECT", help="folder to create; its name becomes the package's")
    _before_training(commands)
    _comparing_ways(commands)
    _pack(commands)
    return parser, commands.choices


def arguments() -> argparse.Namespace:
    parser, commands = parsers()
    _check_command(sys.argv[1:], list(commands))
    words = _without_overrides(sys.argv[1:], commands)
    options, rest = parser.parse_known_args(words or ["--help"])
    if options.command in (*ONE_PROCESS, "evaluate") and is_launched() and (size := launched_place().size) > 1:
        alone = f"lockstep {options.command} is one process on each machine; start it without torchrun or srun -n"
        raise InputError(alone + f", with launcher.ranks={size}" * (options.command == "evaluate"))
    if rest and hasattr(options, "rest") and not any(word.startswith("-") for word in rest):
        vars(options)[options.rest] += rest  # argparse does not take positional arguments after an option
    elif rest:
        commands[options.command].unknown(rest)
    return options


def _without_overrides(words: list[str], commands: dict[str, Parser]) -> list[str]:
    """The words without a job's overrides (`evaluate` takes data); `output_root` says which run is `latest`."""
    command = next((word for word in words if word in commands), "train")
    if command in ("train", "new", "pack", *ONE_PROCESS):
        return words
    data = ("dataset", "data_root", "launcher", "device") if command == "evaluate" else ()

    def is_used(flag: str, word: str) -> bool:
        is_override = OVERRIDE.match(word) and key_of(word).partition(".")[0] not in data
        return not is_override or commands[command].takes_value(flag) or Path(word).exists()

    typed = [*pairwise(["", *words])]
    used = [word for flag, word in typed if is_used(flag, word)]
    unused = [word for flag, word in typed if not is_used(flag, word)]
    roots = [word for word in unused if key_of(word) == "output_root" and LATEST in used]
    if unused := [word for word in unused if word not in roots]:
        from lockstep.config.composition import without_keys  # takes 0.3 s

        taken = "settings of data and ranks alone" if command == "evaluate" else "no settings"
        without_keys(unused, {*map(key_of, unused)}, f"lockstep {command} trains nothing, so it takes {taken}")
    newest = str(Path(*[word.partition("=")[2] for word in roots][-1:], LATEST))
    return [newest if word == LATEST else word for word in used]


def _check_command(words: list[str], commands: list[str]) -> None:
    """Reject a first word that is not a command: a misspelt one, or an override."""
    first = next((word for word in words if not word.startswith("-")), None)
    if first is None and words and not {"-h", "--help", "--version"} & set(words):
        raise InputError("expected a command, such as lockstep train; `lockstep --help` lists them")
    if first is None or first in commands:
        return
    if "=" in first:
        raise InputError(
            f"{first} is for training, expected a command before it: {shell_command(['lockstep', 'train', *words])}"
        )
    hint = did_you_mean(first, commands, prefix="lockstep ") or f" They are {', '.join(commands)}."
    raise InputError(f"there is no command {first!r}.{hint}")


def _port(command: argparse.ArgumentParser) -> None:
    command.add_argument("--port", type=int, default=8000, help="port to listen on; 0 chooses a free one [8000]")


def _rest(command: argparse.ArgumentParser, name: str, metavar: str, description: str, **options: Any) -> None:
    """The arguments of a command of which there can be any number, before and after its options."""
    command.add_argument(name, **{"nargs": "*", "default": [], **options}, metavar=metavar, help=description)
    command.set_defaults(rest=name)


def _run(command: argparse.ArgumentParser, *, device: bool = True) -> None:
    """The trained model that a command uses, and where."""
    described = "a run folder, `latest`, a checkpoint, or a safetensors file"
    command.add_argument("path", metavar="RUN", help=described)
    if device:
        command.add_argument("--device", choices=("cpu", "cuda"), help="device to compute on [a GPU if there is one]")


FORMS = {"csv": "as CSV", "json": "as JSON", "latex": "as a LaTeX table (booktabs)", "markdown": "as Markdown"}


def _forms(command: argparse.ArgumentParser, *forms: str) -> None:
    """The flags for other forms of the output than a table."""
    flags = command.add_mutually_exclusive_group()
    for form in forms:
        flags.add_argument(
            f"--{form}", dest="form", action="store_const", const=form, default="table", help=FORMS[form]
        )


def _columns(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--columns",
        type=lambda text: text.split(","),
        default=[],
        metavar="NAME,NAME",
        help="figures to show, such as metric/f1,loss/val,seconds, or some of the keys",
    )


def _of_models(commands: Any) -> None:
    evaluate = commands.add_parser(
        "evaluate",
        help="evaluate a trained model on a split, or a cross-validation on its folds",
        description="Evaluate a run on its own or other data, or a sweep on its folds: loss, scores, each class, "
        "calibration. Writes evaluation.json and predictions.csv (evaluation-test.json, ... with --split test, and "
        "names with the overrides for other data). launcher.ranks=N shares the images among N GPUs or processes.",
    )
    _run(evaluate)
    _rest(evaluate, "overrides", "OVERRIDE", "other data, such as dataset.path=FOLDER, or launcher.ranks=N")
    evaluate.add_argument("--split", choices=("val", "train", "test"), default="val", help="split to evaluate [val]")
    evaluate.add_argument("--out", metavar="FOLDER", help="output folder [the run or sweep, or the current folder]")
    _forms(evaluate, "json")
    predict = commands.add_parser(
        "predict",
        help="predict the classes of image files",
        description="Print the most probable classes of each image. The exit code is 2 if a file is not an image; "
        "all other files are still printed.",
    )
    _run(predict)
    _rest(predict, "files", "FILE", "an image, a folder of images, or a pattern", nargs="+")
    _forms(predict, "csv", "json")
    predict.add_argument("--top", type=int, metavar="K", help="classes to show per image [3]")
    threshold = "least probability of a label, for task=multilabel [0.5]"
    predict.add_argument("--threshold", type=float, metavar="P", help=threshold)
    predict.add_argument("--out", metavar="FILE", help="file to write: .csv, .json or .jsonl")
    export = commands.add_parser(
        "export",
        help="export a trained model to ONNX, torch.export or timm",
        description="Export a model with its normalisation and its views as one file. The file is compared with the "
        "original on real images, and rejected if a logit differs by more than 1e-4 and by more than 1e-3 of the "
        "largest one. preprocess.py beside it resizes and crops photos for it, as the evaluation does. --to timm "
        "writes a folder that timm and Transformers load.",
    )
    _run(export, device=False)
    _rest(export, "images", "FILE", "images for the comparison [the run's evaluation split]")
    kinds = ("onnx", "torch", "timm")
    form = "output format [onnx]"
    export.add_argument("--to", "--format", dest="kind", choices=kinds, default="onnx", help=form)
    export.add_argument(
        "--pixels",
        choices=("uint8", "float"),
        default="uint8",
        help="type of the input; float is from 0 to 1 [uint8]",
    )
    export.add_argument("--out", metavar="PATH", help="file or folder to write [next to the weights]")
    demo = commands.add_parser("demo", help="serve a local page that classifies dropped photos")
    _run(demo)
    _port(demo)


def _of_runs(commands: Any) -> None:
    runs = commands.add_parser(
        "runs",
        help="list the runs and sweeps in a folder, or show one run",
        description="List the runs and sweeps in a folder, or the jobs of a sweep: start, differing keys, score, "
        "size, state. For one run, show its overrides, scores, time and commands to use it. The exit code is 2 if a "
        "run is damaged; all others are still listed.",
    )
    folder = "folder of runs, a sweep, a run, or `latest` [outputs]"
    runs.add_argument("folder", nargs="?", default="outputs", metavar="FOLDER", help=folder)
    sort = "column, config key or logged figure to sort by [when]"
    runs.add_argument("--sort", default="when", metavar="COLUMN", help=sort)
    _columns(runs)
    condition = "state=done, model=resnet18, 'score>90'; may be repeated"
    runs.add_argument("--filter", dest="filters", action="append", default=[], metavar="CONDITION", help=condition)
    _forms(runs, *FORMS)
    compare = commands.add_parser(
        "compare",
        help="group runs by the keys that differ, and compare scores",
        description="Group runs by the keys that differ, and show mean and spread over the seeds, best first, with "
        "the interval of each difference to the best. For two runs, list the differences in data, config, code, "
        "versions and machine, likeliest cause first.",
    )
    paths = "a sweep, a run, `latest`, or a folder of them"
    _rest(compare, "paths", "SWEEP|RUN", paths, nargs="+")
    by = "group by this key only; may be repeated"
    compare.add_argument("--by", action="append", default=[], metavar="KEY", help=by)
    sort = "column, config key or logged figure to sort by [score, best first]"
    compare.add_argument("--sort", metavar="COLUMN", help=sort)
    _columns(compare)
    _forms(compare, *FORMS)
    report = commands.add_parser("report", help="write report.html, a page about a run or a sweep, into its folder")
    report.add_argument("path", metavar="RUN|SWEEP", help="a run, `latest`, or a sweep")
    bundle = "write a zip for a bug report here instead: config, versions and logs, no data, weights or secrets"
    report.add_argument("--bundle", action="store_true", help=bundle)
    watch = commands.add_parser("watch", help="serve the report of a run or a sweep locally while it trains")
    folders = "a run, `latest`, a sweep, or a folder to show the newest of [outputs]"
    watch.add_argument("path", nargs="?", default="outputs", metavar="RUN|SWEEP|FOLDER", help=folders)
    _port(watch)
    clean = commands.add_parser(
        "clean",
        help="show, and with --yes remove, checkpoints that are not needed",
        description="Show which checkpoints in a folder of runs and sweeps can be removed, and their size. Each run "
        "keeps its newest and its best checkpoint; active runs keep all. Nothing is removed without --yes.",
    )
    _rest(clean, "folders", "FOLDER", "folder to search for runs [outputs]", default=["outputs"])
    clean.add_argument("--yes", action="store_true", help="remove what is shown")
    clean.add_argument("--keep", type=int, default=1, metavar="N", help="newest checkpoints to keep per run [1]")
    everything = (
        "remove all checkpoints of completed runs, except the best of a sweep; the best weights stay, but these runs "
        "can no longer be resumed"
    )
    clean.add_argument("--all", dest="everything", action="store_true", help=everything)
    _forms(clean, "json")


def _before_training(commands: Any) -> None:
    doctor = commands.add_parser(
        "doctor",
        help="check that a job will start, and estimate its time",
        description="Check a job, or every job of a sweep, on this machine: keys, devices, classes, corrupt and "
        "duplicate images, batch, disk space, memory of a real step, time. Writes nothing. The exit code is 2 if a "
        "run would not start.",
    )
    _rest(doctor, "overrides", "OVERRIDE", "as for `lockstep train`: model=resnet18")
    doctor.add_argument("-m", "--multirun", action="store_true", help="treat the overrides as a sweep")
    doctor.add_argument("--all", dest="everything", action="store_true", help="check every image [stop after 16 s]")
    _forms(doctor, "json")
    show = commands.add_parser(
        "show",
        help="draw a job's augmented training images",
        description="Write a picture of the images that a job's model would get, before normalisation: a row per "
        "image, a column per epoch, classes below. The pixels are the same as in `lockstep train`.",
    )
    _rest(show, "overrides", "OVERRIDE", "as for `lockstep train`: dataset=cifar10")
    show.add_argument("--images", type=int, default=6, metavar="N", help="number of images, from the first step [6]")
    show.add_argument("--epochs", type=int, default=6, metavar="N", help="number of epochs to draw [6]")
    show.add_argument("--out", metavar="FILE", help="file to write [show.png in the current folder]")
    find = commands.add_parser(
        "lr-find",
        help="try rising learning rates for a few steps, and suggest one",
        description="Train a job for a few steps on one device while its learning rate rises from --low to --high, "
        "and draw the loss over the rate. The suggestion is a tenth of the rate with the lowest loss (Smith 2017, "
        "the learning rate range test). No run folder is created.",
    )
    _rest(find, "overrides", "OVERRIDE", "as for `lockstep train`: model=resnet18")
    steps = "maximum steps, overriding the job's; stops early if the loss explodes [100]"
    find.add_argument("--steps", type=int, default=100, help=steps)
    find.add_argument("--low", type=float, default=1e-6, metavar="RATE", help="first rate [1e-6]")
    find.add_argument("--high", type=float, default=10.0, metavar="RATE", help="last rate [10]")
    find.add_argument("--out", metavar="FILE", help="file to write [lr-find.svg in output_root]")
    _forms(find, "json")


def _comparing_ways(commands: Any) -> None:
    prove = commands.add_parser(
        "prove",
        help="verify that a config is the same run under every strategy and number of ranks",
        description="Train a config for a few steps under every strategy on two ranks, and under its own and "
        "ddp on three and four; kill and resume some runs; compare losses, weights and samples. The exit code is 0 "
        "if all agree, 70 if one does not, 2 if the config does not fit.",
    )
    _rest(prove, "overrides", "OVERRIDE", "as for `lockstep train`: model=resnet18")
    prove.add_argument("--steps", type=int, default=20, help="steps per run, overriding the job's [20]")
    prove.add_argument("--ranks", metavar="N,N", help="numbers of ranks [2,3,4, or up to the number of GPUs]")
    everything = "test every strategy and every kill on every number of ranks"
    prove.add_argument("--all", dest="everything", action="store_true", help=everything)
    _forms(prove, "json")
    ladder = commands.add_parser(
        "ladder",
        help="train a job with every strategy, from one device to many, and compare speed and results",
        description="Train a job on one device, with mixed precision and with every strategy, and compare speed, "
        "memory and results. Rerun the command to resume.",
    )
    _rest(ladder, "overrides", "OVERRIDE", "as for `lockstep train` [MNIST]")
    ladder.add_argument("--ranks", type=int, metavar="N", help="number of ranks [GPUs, or 2]")
    ladder.add_argument(
        "--repeat", dest="repeats", type=int, default=3, metavar="N", help="repeats of each setup [3]"
    )
    ladder.add_argument("--only", metavar="SETUP,SETUP", help="setups besides one device, such as ddp,fsdp [all]")
    script = "add your own script to the comparison"
    ladder.add_argument("--script", dest="scripts", action="append", default=[], metavar="FILE", help=script)
    _forms(ladder, "csv", "json")


def _pack(commands: Any) -> None:
    pack = commands.add_parser(
        "pack",
        usage="lockstep pack TARGET OVERRIDE ...\n"
        "       lockstep pack [--size SIZE] [--skip N] [--val-share SHARE] SOURCE TARGET [OVERRIDE ...]\n"
        "       lockstep pack --check TARGET",
        help="decode the images of a data set once, for dataset=packed",
        description="Decode the images of a data set into the new folder TARGET, with their targets. SOURCE stands "
        "for dataset=folder dataset.path=SOURCE. The exit code is 2 if the source does not fit or TARGET exists, 74 "
        "if TARGET cannot be written.",
    )
    words = "[SOURCE] TARGET, and overrides as for `lockstep train`: dataset=csv task=multilabel"
    _rest(pack, "words", "WORD", words)
    pack.add_argument("--size", dest="decode_size", help="dataset.decode_size: side of a stored image [256]")
    pack.add_argument("--skip", metavar="N", help="dataset.skip: corrupt images to skip at most [0]")
    share = "dataset.val_share: share to evaluate if there is no evaluation split"
    pack.add_argument("--val-share", metavar="SHARE", help=share)
    pack.add_argument("--check", metavar="TARGET", help="verify the hashes of a packed folder")
