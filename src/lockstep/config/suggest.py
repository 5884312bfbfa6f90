"""What a user meant: by a misspelt key, a word of another program, or a path in place of an option or KEY=VALUE.

The words come from timm, Lightning, torchvision, Accelerate, torchrun and Hugging Face's Trainer.
"""

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from lockstep.config.commands import override, parsed, shell_command
from lockstep.config.options import is_own, model_of, options_with
from lockstep.config.schema import BLOCKS, GROUPS, Job
from lockstep.core.errors import close_to
from lockstep.core.run_dir import MANIFEST, RunDir

# Our overrides, and the last part of the other programs' keys and flags, with underscores. `{}` is the user's value;
# an override without it stands for a switch that is on. The name of a group alone stands for one of its options.
KEYS: Mapping[str, str] = {
    "epochs={}": "max_epochs num_epochs num_train_epochs n_epochs",
    "steps={}": "max_steps num_steps max_iters train_iters total_steps",
    "batch={}": "batch_size train_batch_size global_batch_size per_device_train_batch_size micro_batch_size bs b",
    "seed={}": "random_seed manual_seed seed_everything",
    "device": "accelerator",
    "name={}": "experiment_name run_name exp_name job_name",
    "output_root={}": "project output_dir out_dir outdir output save_dir default_root_dir log_dir logdir",
    "resume={}": "resume_from_checkpoint resume_from resume_path ckpt_path checkpoint_path",
    "init_from={}": "weights initial_checkpoint pretrained_path finetune load_from",
    "repro=strict": "deterministic",
    "model": "arch a backbone model_name model_name_or_path",
    "model=resnet50d model.pretrained=true": "pretrained",
    "model.compile=true": "torchcompile torch_compile",
    "model.channels_last=true": "channels_last",
    "dataset": "dataset_name",
    "dataset.input_size={}": "img_size image_size imgsz input_size crop_size val_crop_size",
    "train.size={}": "train_crop_size train_size",
    "dataset=folder dataset.path={}": "data data_dir data_path datadir dataset_dir dataset_path train_dir",
    "loader=streaming loader.workers={}": "num_workers workers j dataloader_num_workers",
    "loader=streaming loader.prefetch={}": "prefetch_factor dataloader_prefetch_factor",
    "strategy.sync_batchnorm=true": "sync_bn sync_batchnorm sync_batch_norm use_sync_bn",
    "strategy=ddp strategy.find_unused_parameters=true": "find_unused_parameters ddp_find_unused_parameters",
    "precision": "mixed_precision amp_dtype dtype torch_dtype",
    "precision=bf16": "amp use_amp autocast",
    "precision=fp16": "fp16 half",
    "precision=tf32": "tf32 allow_tf32",
    "launcher.ranks={}": "gpus devices nproc_per_node nproc num_processes n_gpus num_gpus ngpus world_size",
    "launcher=elastic launcher.nodes={}": "nodes num_nodes nnodes num_machines",
    "launcher=elastic launcher.nodes=2 launcher.node_rank={}": "nr machine_rank",
    "launcher=elastic launcher.restarts={}": "max_restarts",
    "launcher=elastic launcher.rendezvous={}": "rdzv_endpoint dist_url",
    "optimizer": "opt optim optimizer_name",
    "optimizer.lr={}": "lr learning_rate base_lr max_lr lr0",
    "optimizer.weight_decay={}": "weight_decay wd",
    "optimizer.eps={}": "adam_epsilon opt_eps epsilon",
    "optimizer=sgd optimizer.momentum={}": "momentum",
    "optimizer=sgd optimizer.nesterov=true": "nesterov",
    "optimizer.layer_decay={}": "layer_decay llrd",
    "schedule": "sched scheduler lr_scheduler lr_scheduler_type lr_schedule lr_policy",
    "schedule.warmup={}": "warmup_steps num_warmup_steps lr_warmup_steps warmup_iters warmup_iterations warmup",
    "schedule.warmup={}ep": "warmup_epochs lr_warmup_epochs",
    "loss": "criterion loss_fn loss_function",
    "loss.label_smoothing={}": "smoothing label_smoothing label_smoothing_factor",
    "train.micro_batches={}": "accumulate_grad_batches gradient_accumulation_steps grad_accum_steps accum_iter",
    "train.clip_norm={}": "gradient_clip_val max_grad_norm clip_grad clip_grad_norm grad_clip grad_norm_clip clip",
    "train.ema=0.999": "model_ema use_ema",
    "train.ema={}": "model_ema_decay ema_decay",
    "train.mixup={}": "mixup_alpha",
    "train.cutmix={}": "cutmix_alpha",
    "train.mix_by={}": "mixup_mode",
    "train.mix_switch={}": "mixup_switch_prob",
    "train.mix_prob={}": "mixup_prob",
    "train.mix_until={}ep": "mixup_off_epoch",
    "train.erase={}": "reprob random_erase random_erasing erasing",
    "train.erase_mode={}": "remode",
    "train.repeats={}": "aug_repeats ra_reps num_repeats",
    "train.repeats=3": "repeated_aug ra_sampler",
    "train.ema_warmup=true": "model_ema_warmup",
    "train.ema_every={}": "model_ema_steps ema_steps",
    "train.swa_from=75%": "swa use_swa stochastic_weight_avg",
    "train.swa_from={}ep": "swa_start swa_epoch_start",
    "train.patience=5": "early_stopping early_stop",
    "train.patience={}": "patience early_stopping_patience",
    "schedule=step schedule.gamma={}": "decay_rate lr_gamma lr_decay_rate",
    "schedule=plateau schedule.patience={}": "lr_patience patience_epochs",
    "schedule=cosine schedule.restarts={}": "lr_restarts num_restarts",
    "schedule=polynomial schedule.power={}": "lr_power decay_power",
    "train.eval_every={}ep": "check_val_every_n_epoch val_interval",
    "train.eval_every={}": "eval_steps val_check_interval",
    "train.cudnn_benchmark=true": "benchmark",
    "checkpoint.every={}": "save_steps checkpoint_interval save_interval checkpoint_every",
    "checkpoint.keep={}": "save_total_limit checkpoint_hist",
    "checkpoint.keep_best={}": "save_top_k",
    "telemetry.interval={}": "log_interval log_every_n_steps logging_steps print_freq",
    "logger=[jsonl,wandb]": "wandb use_wandb log_wandb",
    "augment=randaugment": "aa auto_augment autoaugment",
}
# What other programs have and this one has not, or has always: the words, and the sentence about them.
ABSENT: Mapping[str, str] = {
    "shuffle": "training images are in a new random order in each epoch, which depends on seed and epoch alone; "
    "evaluation keeps the order of the split",
    "pin_memory pin_mem dataloader_pin_memory": "images for a GPU are in pinned memory always",
    "drop_last dataloader_drop_last": "every image counts: the last batch of an epoch may be shorter",
    "persistent_workers dataloader_persistent_workers worker_seeding": "loader workers are threads, which stay for "
    "the whole run and draw no random numbers",
    "recount": "one rectangle of an image is erased, with the probability train.erase",
    "num_classes nb_classes n_classes": "the number of classes comes from the data set",
    "start_epoch last_epoch initial_epoch": "a resumed run knows its step: resume=latest",
    "evaluate eval_only test_only do_eval do_predict": "trained models are evaluated by `lockstep evaluate RUN`",
    "load_best_model_at_end metric_for_best_model eval_metric": "the best weights, by validation top-1, are exported",
    "eval_batch_size per_device_eval_batch_size val_batch_size validation_batch_size": "the size of evaluation "
    "batches is train.eval_batch, images of one device",
}
# Values of a key or a group, and their names in other tools.
VALUES: Mapping[str, str] = {
    "device=cuda": "gpu",
    "launcher.ranks=auto": "-1",
    "resume=latest": "newest last auto true",
    "precision=bf16": "amp mixed bf16-mixed bfloat16 true torch.bfloat16 auto",
    "precision=bf16_pure": "bf16-true",
    "precision=fp16": "16 16-mixed float16 half torch.float16",
    "precision=fp32": "32 32-true float32 float full no torch.float32",
    "precision=fp64": "64 64-true float64 double",
    "launcher=elastic": "torchrun torchelastic torch.distributed.run distributed",
    "launcher=spawn": "mp multiprocessing local accelerate popen pytorch",
    "strategy=ddp": "ddp_spawn ddp_fork ddp_notebook distributed distributeddataparallel torch_ddp",
    "strategy=ddp strategy.find_unused_parameters=true": "ddp_find_unused_parameters_true",
    "strategy=dp": "dataparallel data_parallel",
    "strategy=fsdp": "fsdp2 fully_shard fullyshardeddataparallel deepspeed deepspeed_stage_3",
    "strategy=zero": "deepspeed_stage_1 deepspeed_stage_2 zero1 zero_redundancy",
    "optimizer=adamw": "adamw_torch adamw_torch_fused adamw_hf fusedadamw",
    "optimizer=sgd": "momentum nesterov",
    "optimizer=timm optimizer.opt=lamb": "lamb",
    "optimizer=timm optimizer.opt=lion": "lion",
    "optimizer=timm optimizer.opt=rmsprop": "rmsprop",
    "schedule=cosine": "onecycle onecyclelr cosineannealing cosineannealinglr cosine_annealing cosine_with_warmup",
    "schedule=cosine schedule.restarts=3": "cosineannealingwarmrestarts cosine_with_restarts sgdr",
    "schedule=linear": "linearlr",
    "schedule=polynomial": "poly polynomiallr",
    "schedule=exponential": "exponentiallr exp",
    "schedule=plateau": "reducelronplateau reduce_lr_on_plateau",
    "schedule=chain": "sequentiallr wsd warmup_stable_decay",
    "schedule=step": "steplr multistep multisteplr",
    "schedule=constant": "none constantlr constant_with_warmup",
    "loss=cross_entropy": "ce crossentropy crossentropyloss softmax",
    "loss=bce": "bcewithlogits bcewithlogitsloss bce_with_logits binary",
    "loss=focal": "focal_loss focalloss",
    "train.mix_by=example": "elem",
    "augment=none": "false no off",
    "augment=randaugment": "ra rand rand_augment",
    "augment=trivialaugment": "ta ta_wide trivialaugmentwide trivial_augment",
    "augment=autoaugment": "aa original",
    "augment=three_augment": "3a threeaugment 3augment",
}
OFF = ("false", "0", "no", "off", "none")
WEIGHTS = (".safetensors", ".pth", ".pt", ".bin", ".ckpt")
TABLES = (".csv", ".tsv")
SHARDS = ".tar"
# Files that the package `datasets` writes into a saved data set.
HF_FILES = ("dataset_dict.json", "state.json")


def suggest_override(name: str, value: str | None = None) -> str:
    """The overrides for a key or flag of another program, or a key without its block; empty if unknown."""
    block, _, last = name.lower().replace("-", "_").rpartition(".")
    chosen = [word.partition("=")[2] for word in sys.argv[1:] if word.startswith("model=")]
    if last == "pretrained" and any(map(model_of, chosen)):
        return "model.pretrained=true"  # the model is chosen already
    template = next((text for text, names in KEYS.items() if _plain(last) in _plain(names).split()), "")
    if not template and not block:
        template = _own(last)
    if template in GROUPS or template == "device":
        return suggest_option(template, value or "")
    if "{}" not in template:
        return "" if (value or "").lower() in OFF else shell_command(template.split())
    *before, (key, _, form) = *template.split()[:-1], template.split()[-1].partition("=")
    if value is not None and (special := _named_elsewhere(key, value)):
        return shell_command([*before, special])
    text = form.format("VALUE" if value is None else value)
    word = f"{key}={text}"
    return shell_command([*before, word if parsed(word) is not None else override(key, text)])


def _plain(name: str) -> str:
    """A word as people spell it: `batch-size`, `batch_size` and `BatchSize` are one."""
    return re.sub("[-_]", "", name).lower()


def explain_absent(name: str) -> str:
    """The sentence about a key or flag of another program that has no counterpart here; empty if it is none."""
    last = _plain(name.rpartition(".")[2])
    return next((sentence for words, sentence in ABSENT.items() if last in _plain(words).split()), "")


def suggest_option(group: str, value: str) -> str:
    """The overrides to type for the option of a group that another program calls `value`; empty if unknown."""
    if is_own(group, value):
        return shell_command([f"{group}={value}"])
    if group == "device" and value in ("cpu", "cuda", "auto"):
        return f"device={value}"
    return _named_elsewhere(group, value)


def _named_elsewhere(key: str, value: str) -> str:
    names = {words: name.split() for words, name in VALUES.items() if words.split("=")[0] == key}
    return next((words for words, others in names.items() if value.lower() in others), "")


def _own(last: str) -> str:
    """The override for a key of the job or of one of its blocks, from the last part of its name; empty if none."""
    places: dict[str, type[Any]] = {"": Job, **{f"{block}.": cls for block, cls in BLOCKS.items()}}
    having = (place for place, cls in places.items() if last in {field.name for field in fields(cls)} - {*BLOCKS})
    return last if last in GROUPS else next((f"{place}{last}={{}}" for place in having), "")


def suggest_for_path(group: str, word: str) -> str:
    """` Did you mean ...?` for a path after `GROUP=`, or alone (`group` is empty); empty if no override fits."""
    path = Path(os.path.expanduser(word))  # noqa: PTH111, raises nothing
    try:
        exists, is_folder, is_run = path.exists(), path.is_dir(), RunDir(path).composed.exists()
    except (OSError, ValueError):  # the path is too long, or has a NUL byte
        return ""
    weights, listed = path.suffix in WEIGHTS, path.suffix in (*TABLES, SHARDS)
    overrides: list[str] = []
    if weights or is_run:
        start_override = override("resume" if is_run and not group else "init_from", word)
        overrides = {"": [start_override], "model": ["model=NAME", start_override]}.get(group, [])
    elif (group == "dataset" and (is_folder or listed or (os.sep in word and not exists))) or (
        not group and exists and (is_folder or listed)
    ):
        overrides = _data_set_at(path, word)
    return f" Did you mean {shell_command(overrides)}?" if overrides else ""


def _data_set_at(path: Path, word: str) -> list[str]:
    """The overrides that choose the data set at a path."""
    name = "folder"
    if path.suffix in TABLES:
        name = "csv"
    elif path.suffix == SHARDS:
        name, word = "webdataset", str(Path(word).parent)
    elif (path / MANIFEST).exists():
        name = "packed"
    elif any((path / file).exists() for file in HF_FILES):
        name = "hf"
    elif path.is_dir() and next(path.glob(f"*{SHARDS}"), None):
        name = "webdataset"
    return [f"dataset={name}", override("dataset.path", word)]


def note(proposal: str) -> str:
    """What to know about a proposal: in most other tools, the batch size is per device."""
    return " (batch counts the images of all devices)" if "batch=" in proposal else ""


def suggest_key(key: str, value: str | None, names: list[str]) -> str:
    """What the user probably meant by a `key` that is none of `names`; empty if nothing is near."""
    block, _, last = key.rpartition(".")
    siblings = [name for name in names if name.rpartition(".")[0] == block and not name.endswith("._target_")]
    # A key without its block (`lr`), or in a misspelt block: look for the same last part.
    same_last_part = [name for name in names if name.rpartition(".")[2] == last][:3]
    if sentence_about := explain_absent(key):
        return f" Here {sentence_about}."
    if key == "dataset.path" and (suggestion := suggest_for_path("dataset", value or "")):
        return suggestion
    if block and (option_names := options_with(block, last)):
        choose = f"add {override(block, option_names[0])}" if len(option_names) == 1 else "choose one of them"
        return f" {block}={', '.join(option_names)} has it: {choose}, or remove it."
    if (proposal := suggest_override(key, value)) and not proposal.startswith(f"{key}="):
        return f" Did you mean {proposal}{note(proposal)}?"
    if block and siblings:
        near = [f"{block}.{name}" for name in close_to(last, [name.rpartition(".")[2] for name in siblings])]
        if not (near := same_last_part or near):
            return f" {block} has {', '.join(name.rpartition('.')[2] for name in siblings)}."
    elif same_last_part:
        near = same_last_part
    elif blocks := close_to(key.partition(".")[0], {name.partition(".")[0] for name in names}) if block else []:
        return suggest_key(f"{blocks[0]}.{key.partition('.')[2]}", value, names)
    else:
        near = close_to(key, [name for name in names if "." not in name]) or close_to(key, names)
    shown_names = [repr(name) if value is None else shell_command([f"{name}={value}"]) for name in near]
    return f" Did you mean {' or '.join(shown_names)}?" if near else ""
