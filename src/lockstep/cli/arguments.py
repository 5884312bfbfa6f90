"""The arguments of the commands other than `train`. Imports no torch, so that --help is fast."""

import argparse
import sys
from typing import Any

from lockstep.config.command_line import Parser
from lockstep.config.commands import shell_command
from lockstep.core.errors import InputError, did_you_mean
from lockstep.core.launch_env import is_launched, launched_place

DESCRIPTION = "Train image classifiers, and use them. `lockstep train --help` is the help of training."
ONE_PROCESS = ("doctor", "show", "lr-find", "prove", "ladder")  # a job's line, whose ranks they start themselves


def arguments() -> argparse.Namespace:
    """The arguments of the command line."""
    parser = Parser(prog="lockstep", description=DESCRIPTION)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("train", help="train a job or a sweep: what train.py does in a checkout")
    _of_models(commands)
    _of_runs(commands)
    new = commands.add_parser("new", help="write a small project of your own: a model, a data set, a test")
    new.add_argument("project", metavar="PROJECT", help="the folder to create, named like its package")
    _before_training(commands)
    _comparing_ways(commands)
    _pack(commands)
    _check_command(sys.argv[1:], list(commands.choices))
    options, rest = parser.parse_known_args()
    if options.command in ONE_PROCESS and is_launched() and launched_place().size > 1:
        raise InputError(
            f"lockstep {options.command} is one process on each machine; start it without torchrun or srun -n"
        )
    if rest and hasattr(options, "rest") and not any(word.startswith("-") for word in rest):
        vars(options)[options.rest] += rest  # argparse does not take positional arguments after an option
    elif rest:
        commands.choices[options.command].unknown(rest)
    return options


def _check_command(words: list[str], commands: list[str]) -> None:
    """Refuse a first word that is no command, such as a misspelt one or an override of training."""
    first = next((word for word in words if not word.startswith("-")), None)
    if first is None and not {"-h", "--help"} & set(words):
        raise InputError("expected a command, such as lockstep train; `lockstep --help` shows all of them")
    if first is None or first in commands:
        return
    if "=" in first:
        raise InputError(
            f"{first} is for training, expected a command before it: {shell_command(['lockstep', 'train', *words])}"
        )
    hint = did_you_mean(first, commands, prefix="lockstep ") or f" They are {', '.join(commands)}."
    raise InputError(f"there is no command {first!r}.{hint}")


def _rest(command: argparse.ArgumentParser, name: str, metavar: str, description: str) -> None:
    """The arguments of a command of which there can be any number, before and after its options."""
    command.add_argument(name, nargs="*", metavar=metavar, help=description)
    command.set_defaults(rest=name)


def _run(command: argparse.ArgumentParser, *, device: bool = True) -> None:
    """The trained model that a command uses, and where."""
    described = "a run folder, `latest`, a checkpoint, or a safetensors file of weights"
    command.add_argument("path", metavar="RUN", help=described)
    if device:
        command.add_argument("--device", choices=("cpu", "cuda"), help="where to compute [a GPU if there is one]")


def _forms(command: argparse.ArgumentParser, *forms: str) -> None:
    """The flags for other forms of the output than a table."""
    flags = command.add_mutually_exclusive_group()
    for form in forms:
        flags.add_argument(
            f"--{form}", dest="form", action="store_const", const=form, default="table", help=f"as {form.upper()}"
        )


def _of_models(commands: Any) -> None:
    evaluate = commands.add_parser(
        "evaluate",
        help="evaluate a trained model, or the folds of a sweep together, on every example of a split",
        description="Evaluate the weights of a run on its own data or other data, or those of a sweep on its folds: "
        "loss, scores, each class, calibration. Writes evaluation.json and predictions.csv.",
    )
    _run(evaluate)
    _rest(evaluate, "overrides", "OVERRIDE", "other data: dataset.path=FOLDER")
    evaluate.add_argument("--split", choices=("val", "train", "test"), default="val", help="which examples [val]")
    evaluate.add_argument("--out", metavar="FOLDER", help="where to write [the run or sweep, or the current folder]")
    predict = commands.add_parser(
        "predict",
        help="predict the classes of image files",
        description="Print the classes of each image. The exit code is 2 if a file is not an image; the other "
        "files are printed anyway.",
    )
    _run(predict)
    predict.add_argument("files", nargs="+", metavar="FILE", help="an image, a folder of images, or a pattern")
    forms = ("table", "csv", "json")
    predict.add_argument("--format", dest="form", choices=forms, default="table", help="output format [table]")
    predict.add_argument("--top", type=int, metavar="K", help="how many classes of each image [3]")
    threshold = "show labels above this probability, for task=multilabel [0.5]"
    predict.add_argument("--threshold", type=float, metavar="P", help=threshold)
    predict.add_argument("--out", metavar="FILE", help="the file to write instead of printing")
    export = commands.add_parser(
        "export",
        help="write a trained model for other programs",
        description="Write a model with its preprocessing as one file: crop, normalisation, resizing, views. It is "
        "compared with its original on real images, and not written if a logit differs by more than 1e-4. Or write a "
        "model of timm as a folder that timm and Transformers load.",
    )
    _run(export, device=False)
    _rest(export, "images", "FILE", "images to compare on [the run's evaluation split]")
    kinds = ("onnx", "torch", "timm")
    form = "ONNX, torch.export's, or a folder of timm's [onnx]"
    export.add_argument("--to", "--format", dest="kind", choices=kinds, default="onnx", help=form)
    export.add_argument("--pixels", choices=("uint8", "float"), default="uint8", help="float: from 0 to 1 [uint8]")
    export.add_argument("--out", metavar="PATH", help="the file or folder to write [next to the weights]")
    demo = commands.add_parser("demo", help="a page on this machine: drop a photo, see its classes")
    _run(demo)
    demo.add_argument("--port", type=int, default=8000, help="the port to listen on; 0 chooses a free one [8000]")


def _of_runs(commands: Any) -> None:
    runs = commands.add_parser(
        "runs",
        help="list the runs and sweeps of a folder",
        description="List the runs and sweeps of a folder: when each started, what differed, its score, its state, "
        "its size. For the folder of a sweep, list its jobs. The exit code is 2 if a run is damaged; the others are "
        "listed anyway.",
    )
    runs.add_argument("folder", nargs="?", default="outputs", metavar="FOLDER", help="with runs in it [outputs]")
    runs.add_argument("--sort", default="when", metavar="COLUMN", help="a column, or a key of the config [when]")
    condition = "state=done, model=resnet18, 'score>90'; may be repeated"
    runs.add_argument("--filter", dest="filters", action="append", default=[], metavar="CONDITION", help=condition)
    _forms(runs, "json")
    compare = commands.add_parser(
        "compare",
        help="compare the scores of runs by what differs between them",
        description="Compare runs by the keys in which they differ: the mean and the spread over the seeds, the best "
        "first, and the interval of each difference to the best. For two runs, show what differs in data, config, "
        "code, versions and machine, the likeliest cause of another score first.",
    )
    paths = "a sweep, a run, `latest`, or a folder of them"
    compare.add_argument("paths", nargs="+", metavar="SWEEP|RUN", help=paths)
    compare.set_defaults(rest="paths")
    by = "compare the values of this key alone; may be repeated"
    compare.add_argument("--by", action="append", default=[], metavar="KEY", help=by)
    sort = "a key or a figure, as --csv names it [score, the best first]"
    compare.add_argument("--sort", metavar="COLUMN", help=sort)
    _forms(compare, "csv", "json")
    report = commands.add_parser("report", help="write a run or a sweep as one page: report.html in its folder")
    report.add_argument("path", metavar="RUN|SWEEP", help="a run, `latest`, or a sweep with its changed jobs")
    clean = commands.add_parser(
        "clean",
        help="show which checkpoints of runs can be removed, and remove them",
        description="Show which checkpoints of the runs and sweeps in a folder can be removed, and their size. "
        "The newest checkpoint and the best one of each run stay, and all of a run that is running. Nothing is "
        "removed without --yes.",
    )
    clean.add_argument("folders", nargs="*", default=["outputs"], metavar="FOLDER", help="with runs in it [outputs]")
    clean.add_argument("--yes", action="store_true", help="remove what is shown")
    clean.add_argument("--keep", type=int, default=1, metavar="N", help="how many of the newest stay in each run [1]")
    everything = (
        "all checkpoints of completed runs but the best of a sweep: their best weights stay, but no resume can train "
        "them longer"
    )
    clean.add_argument("--all", dest="everything", action="store_true", help=everything)


def _before_training(commands: Any) -> None:
    doctor = commands.add_parser(
        "doctor",
        help="check before a long run that it would start, and how long it would take",
        description="Check a job, or every job of a sweep, on this machine: keys, devices, classes, broken and "
        "repeated images, the batch, the disk, the memory of a real step, the time. Writes nothing. The exit code is "
        "2 if a run would not start.",
    )
    _rest(doctor, "overrides", "OVERRIDE", "as for `lockstep train`: model=resnet18")
    doctor.add_argument("-m", "--multirun", action="store_true", help="the line is one of a sweep")
    doctor.add_argument("--all", dest="everything", action="store_true", help="look at all images [for 30 seconds]")
    _forms(doctor, "json")
    show = commands.add_parser(
        "show",
        help="draw the augmented training images of a job as one picture",
        description="Write a picture with the images that the model of a job would get: a row for each image, a "
        "column for each epoch, the normalisation undone, the classes under the images. The pixels are those of "
        "`lockstep train`.",
    )
    _rest(show, "overrides", "OVERRIDE", "as for `lockstep train`: dataset=cifar10")
    show.add_argument("--images", type=int, default=6, metavar="N", help="how many images, from the first step [6]")
    show.add_argument("--epochs", type=int, default=6, metavar="N", help="in how many epochs [6]")
    show.add_argument("--out", metavar="FILE", help="the picture [show.png in the current folder]")
    find = commands.add_parser(
        "lr-find",
        help="try rising learning rates for a few steps, and suggest one",
        description="Train a job for a few steps while its learning rate rises from --low to --high, on one device, "
        "and write the loss over the rate as a picture. No run folder is made. Suggested is a tenth of the rate at "
        "which the loss is lowest (Smith 2017, the learning rate range test).",
    )
    _rest(find, "overrides", "OVERRIDE", "as for `lockstep train`: model=resnet18")
    steps = "the most, whatever the job has; it ends when the loss explodes [100]"
    find.add_argument("--steps", type=int, default=100, help=steps)
    find.add_argument("--low", type=float, default=1e-6, metavar="RATE", help="the first rate [1e-6]")
    find.add_argument("--high", type=float, default=10.0, metavar="RATE", help="the last rate [10]")
    find.add_argument("--out", metavar="FILE", help="the picture [lr-find.svg in output_root]")


def _comparing_ways(commands: Any) -> None:
    prove = commands.add_parser(
        "prove",
        help="show on this machine that a config is the same run under every strategy and world size",
        description="Train a config for a few steps under every strategy on two ranks, and under ddp on three and "
        "four, kill some of the runs and resume them, and compare losses, weights and samples. The exit code is 0 if "
        "all agree, 70 if one does not, 2 if the config does not fit.",
    )
    _rest(prove, "overrides", "OVERRIDE", "as for `lockstep train`: model=resnet18")
    prove.add_argument("--steps", type=int, default=20, help="of each run, whatever the job has [20]")
    prove.add_argument("--ranks", metavar="N,N", help="numbers of ranks [2,3,4, or up to the number of GPUs]")
    everything = "every strategy and every kill on every number of ranks"
    prove.add_argument("--all", dest="everything", action="store_true", help=everything)
    ladder = commands.add_parser(
        "ladder",
        help="train a job on each rung from one device to many, and compare speed, memory and results",
        description="Train a job in turns on one device, with DataParallel, DDP, gradients averaged by hand, mixed "
        "precision, Accelerate, ZeRO, FSDP and as a pipeline, and show what each brings here. The same line goes on "
        "where it was stopped.",
    )
    _rest(ladder, "overrides", "OVERRIDE", "as for `lockstep train` [MNIST]")
    ladder.add_argument("--ranks", type=int, metavar="N", help="ranks of the rungs with several [GPUs, or CPU cores]")
    ladder.add_argument("--repeat", dest="repeats", type=int, default=3, metavar="N", help="turns [3]")
    ladder.add_argument("--only", metavar="RUNG,RUNG", help="the rungs besides the first: ddp,fsdp [all]")
    script = "a script of yours as a rung"
    ladder.add_argument("--script", dest="scripts", action="append", default=[], metavar="FILE", help=script)
    _forms(ladder, "csv", "json")


def _pack(commands: Any) -> None:
    pack = commands.add_parser(
        "pack",
        usage="lockstep pack TARGET OVERRIDE ...\n"
        "       lockstep pack [--size SIZE] [--skip N] [--val-share SHARE] SOURCE TARGET [OVERRIDE ...]\n"
        "       lockstep pack --check TARGET",
        help="decode the images of a data set once, for dataset=packed",
        description="Decode the images of a data set, and keep the pixels and the targets in the new folder TARGET. "
        "With SOURCE it is dataset=folder dataset.path=SOURCE. The exit code is 2 if the source does not fit or "
        "TARGET exists, 74 if TARGET cannot be written.",
    )
    words = "[SOURCE] TARGET, and overrides as for `lockstep train`: dataset=csv task=multilabel"
    _rest(pack, "words", "WORD", words)
    pack.add_argument("--size", dest="decode_size", help="dataset.decode_size: the side of a stored image [256]")
    pack.add_argument("--skip", metavar="N", help="dataset.skip: how many broken images may be left out [0]")
    share = "dataset.val_share: the share to evaluate where there is no evaluation split"
    pack.add_argument("--val-share", metavar="SHARE", help=share)
    pack.add_argument("--check", metavar="TARGET", help="read a packed folder whole and compare it with its hashes")
