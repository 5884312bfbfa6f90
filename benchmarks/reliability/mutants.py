"""Puts bugs into a copy of the source, one at a time, and runs every quick test that executes the lines of a bug.

    python benchmarks/reliability/mutants.py --json mutants.json     the plausible bugs of the table below
    python benchmarks/reliability/mutants.py --fresh 100 --seed 7    one in each of 100 functions, drawn by a seed

Which tests execute which line is measured first, in about a quarter of an hour, and kept in `build/covering.json`
until `--measure`: do so when tests or source have changed. Exits with 1 if a bug is not found, or if the line of a
bug of the table does not occur exactly once: the table then has to follow the source.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from covering import Covering, first_failing, import_libraries
from fresh_bugs import ROOT, Bug, fresh_bugs, header

NOT_COPIED = (".git", ".venv", "__pycache__", "build", "outputs", "*_cache", "*.egg-info")
MAP = ROOT / "build" / "covering.json"

console = Console(highlight=False, width=160)

# A file of src/lockstep and what the bug breaks; then the lines as they are, and with the bug. The first line may
# begin anywhere in a line of the file, and the last one end anywhere.
TABLE = r"""
training/train_step.py: the mean of the ranks' means, though their shards are uneven
- self.grad_divisor / shard.count
+ 1 / max(1, len(shard.labels))
training/train_step.py: a gradient is clipped while it still has the scale of float16
-         state.scaler.unscale_(state.optimizer)
-         self.listener.reduced()
+         self.listener.reduced()
training/train_step.py: the loss scale never changes after an overflow
- state.scaler.update()
+ pass
training/train_step.py: each parameter's gradient is clipped by its own norm
-                 nn.utils.clip_grads_with_norm_(self.parameters, self.clip_norm, grad_norm)
+                 for parameter in self.parameters:
+                     nn.utils.clip_grad_norm_(parameter, self.clip_norm)
strategy/base.py: DDP communicates for all micro-batches but the last one
- NO_CONTEXT if last or not isinstance(replica, DistributedDataParallel) else replica.no_sync()
+ replica.no_sync() if last and isinstance(replica, DistributedDataParallel) else NO_CONTEXT
data/loading/sampler.py: every epoch has the order of the first one
- permutation(seed, epoch, plan.examples, device)
+ permutation(seed, 0, plan.examples, device)
stochastic/numbers.py: a dropout mask depends on an example's place in its micro-batch
- micro.indices[: len(micro.labels)], FORWARD)
+ torch.arange(len(micro.labels), device=micro.indices.device), FORWARD)
stochastic/numbers.py: a mix partner has a key in the forward pass
- micro.indices[: len(micro.labels)], FORWARD)
+ micro.indices, FORWARD)
data/transforms/device.py: an empty shard that mixes has another dtype than the others
- dtype=self.scale.dtype if self.mix else self.dtype)
+ dtype=self.dtype)
data/transforms/policies.py: a policy that mirrors its frame stops without a frame
- reflect=self.reflect and self.pad > 0, flip
+ reflect=self.reflect, flip
data/loading/shards.py: the images of a step that are shown are of the first size
-         images, _ = next(iter(at_step(self.train_feeds, step)([self._request([whole])])))
+         images, _ = next(iter(self.train_feeds[0]([self._request([whole])])))
data/datasets/listing.py: a group may be trained on and tested
-     for one, other in itertools.combinations(groups, 2):
+     for one, other in itertools.pairwise(groups):
data/datasets/splitting.py: a unit may be in another fold than in earlier runs
-         sides = (((units.place + 1) * folds - 1) // units.total)[units.of]
+         sides = (units.place * folds // units.total)[units.of]
data/datasets/tables.py: two spellings of a path are two images
-         earlier = rows_by_file.setdefault(os.path.abspath(file), row)  # noqa: PTH100, which keeps `..`
+         earlier = rows_by_file.setdefault(str(file), row)
inference/evaluate.py: training images are evaluated at a smaller scale
-         examples = replace(examples, scaled=False)  # training images too are read as `predict` reads them
+         pass
data/datasets/photos.py: a tile of several samples counts as one
- * sum(tags.get(BITS, (8,))) // 8
+ * max(tags.get(BITS, (8,))) // 8
models/of_torchvision.py: the weights that a name asks for are the default ones
-         return weights[tag] if tag else weights.DEFAULT
+         return weights.DEFAULT
data/transforms/device.py: augmentation depends on an example's place in what is read together
- SampleRNG(self.seed, epoch, indices)
+ SampleRNG(self.seed, epoch, torch.arange(len(indices), device=indices.device))
data/transforms/device.py: cutout is at the same place in every epoch
- sample_keys(self.seed, epoch, indices, CUTOUT)
+ sample_keys(self.seed, 0, indices, CUTOUT)
strategy/sync_batchnorm.py: every rank's mean counts alike, however few examples it has
- shares = counts / count.clamp(min=1)
+ shares = torch.full_like(counts, 1 / len(counts))
checkpoint/reading.py: after a resume the average of the weights starts again
- ema.n_averaged.fill_(loaded.state["ema_updates"])
+ pass
training/trainer.py: a resume takes the last step again
- self.loader.train(after=self.progress.step)
+ self.loader.train(after=max(0, self.progress.step - 1))
training/train_step.py: the schedule is a step behind
- schedule.factor(step, plan, scores)
+ schedule.factor(step - 1, plan, scores)
optim/schedule.py: an evaluation changes the rate of its own step, which a resume would not
- warmup < item[0] < step
+ warmup < item[0] <= step
optim/schedule.py: a loss that is slightly larger counts as better on a plateau
- math.copysign(threshold, gain)
+ threshold
training/resolved_job.py: a resume may change how often each class is drawn
-         "sampling": job.train.sampling + f", repeats={job.train.repeats}" * (job.train.repeats > 1),
-         "seed"
+         "seed"
training/evaluate.py: the mean of the blocks' means, though the last block is short
- summed += losses.sum()
+ summed += losses.mean() * loader.eval_batch
checkpoint/files.py: the optimizer's state is not hashed before it is used
- if digest != digests[name]:
+ if digest != digests[name] and name != STATE:
checkpoint/files.py: the worst checkpoint stays in the place of the best one
- key=lambda path: -gains[path]
+ key=lambda path: gains[path]
training/trainer.py: replicas are not compared when a checkpoint is saved between log points
- if not self.plan.due("log", self.progress.step):
+ if self.plan.due("log", self.progress.step):
core/fields.py: a bound that is not in its range is allowed
- value > self.low if self.low_open else value >= self.low
+ value >= self.low
training/trainer.py: only the ranks that know of a round of a halving stop at its end
- return self.world.any(step / self.plan.total_steps >= self.stop.rung_end)
+ return step / self.plan.total_steps >= self.stop.rung_end
telemetry/time_spent.py: the parts of a step divide a time that has the wait for data in it
- steps * seconds / timed for part
+ total.busy * seconds / timed for part
telemetry/hardware_watch.py: a budget is that of the last part of the run
- round(value + self.before.get(name, 0.0), DIGITS)
+ round(value, DIGITS)
training/dry_run.py: each rank takes the number of micro-batches that it needs itself
- return max(needed)
+ return needed[world.rank]
training/averages.py: the decay of the average is not warmed up
- decay = min(self.decay, (1 + update) / (10 + update)) if self.warmup else self.decay
+ decay = self.decay
diagnostics/verdict.py: a rank may use the cores of all ranks of its machine
- cores = evidence.cores / evidence.world.local_size
+ cores = evidence.cores
sweeps/search.py: an evaluation at the very end of a round is not one of it
- if done >= share:
+ if done > share:
sweeps/search.py: the last score of a round counts instead of the best one
- return max(values, key=direction.gain)
+ return values[-1]
sweeps/pool.py: a sweep that is stopped starts the jobs that waited
-                         waiting.clear()
-                         request
+                         request
records/ledger.py: the job that ended last is named the best one
- best = best_of(self.records(), self.identity().direction)
+ best = max(self.records(), key=lambda record: record.ended)
sweeps/pool.py: a retry runs the jobs that are done too
- if record.state is not State.done and not record.runs_here]
+ if (retry or record.state is not State.done) and not record.runs_here]
sweeps/pool.py: a job that a second Ctrl-C kills has failed
- self.has_killed |= number == signal.SIGKILL
+ self.has_killed |= False
sweeps/search.py: the trial of a job that has failed never ends
- record is not None and record.has_ended:
+ record is not None and record.state in (State.done, State.pruned):
strategy/cutting.py: of cuts that balance equally the last one is taken
- return list(min(ways)[1])
+ return list(min(reversed(ways), key=lambda way: way[0])[1])
training/trainer.py: the model that is not averaged counts in the metrics and predictions too
- self.loader, observers if averaged is None else ())
+ self.loader, observers)
training/trainer.py: a checkpoint that is overdue by the clock is not saved
- if improved or overdue or ends or self.plan.due
+ if improved or ends or self.plan.due
training/evaluate.py: an example is named by the number of another one on several ranks
- ((done - 1) * loader.world.size + loader.world.rank) * loader.eval_batch
+ (done - 1 + loader.world.rank * loader.world.size) * loader.eval_batch
data/loading/shards.py: the batch of an incident is that of the step before
- self._steps(step - 1, World.solo())
+ self._steps(max(0, step - 2), World.solo())
data/datasets/decode.py: a photo is decoded at a scale that is enough for its longer side only
- self._decoded(max(height / self.height, width / self.width) if scaled else None)
+ self._decoded(min(size) / max(self.height, self.width) if scaled else None)
data/transforms/crops.py: a random crop has the inverse aspect ratio
- box_height, box_width = (area / aspect).sqrt().round(), (area * aspect).sqrt().round()
+ box_width, box_height = (area / aspect).sqrt().round(), (area * aspect).sqrt().round()
data/transforms/policies.py: the sign of an operation follows from the operation
- draws.uniform(n + 1) < 0.5
+ draws.uniform(n) < 0.5
stochastic/numbers.py: numbers that a batch shares are the same in all steps of an epoch
- key(seed, FORWARD_BATCH, micro.step)
+ key(seed, FORWARD_BATCH, micro.epoch)
telemetry/meter.py: on fewer ranks a resumed epoch has the sums of the last tally only
- sums[-of_epoch:].sum(0)
+ sums[-1:].sum(0)
telemetry/time_spent.py: the wait for the slowest rank is that for the mean one
- busy.max(dim=0).values - busy[own]
+ busy.mean(dim=0) - busy[own]
job/resume.py: a run that began from a checkpoint goes back to it at each resume
- if newest is None and named is not None else newest
+ if named is not None else newest
job/slurm.py: a submission that SLURM refuses removes an empty folder that existed
- for _, new in reversed(provided):
-             remove_empty(new)
+ for run in runs:
+             remove_empty(run.folders)
job/slurm_task.py: a job that is done is queued again near its limit
- again = code not in (0, InputError.exit_code)
+ again = code != InputError.exit_code
launcher/spawn.py: the last error of the ranks is taken for the cause
- errors.sort(key=lambda error: error["time"])
+ errors.sort(key=lambda error: -error["time"])
launcher/elastic.py: the agent of several machines never starts failed ranks again
- max_restarts=self.restarts,
+ max_restarts=0,
runtime/watchdog.py: a silence that goes on counts as a step that takes so long
-             if living:  # a silence that continues says nothing of how long a step takes
-                 self.longest = max(self.longest, self.quiet)
+             self.longest = max(self.longest, self.quiet)
strategy/strict.py: on four ranks a gradient counts twice and another one never
- distance *= 2
+ distance += 1
config/hydra_policy.py: a value of one job of a sweep stays in the next one
- composed = copy.deepcopy(self.jobs[lines])
+ composed = self.jobs[lines]
inference/scoring.py: the calibration error is a share, not a percentage
- (100 if name == CALIBRATION_ERROR else 1)
+ 1
training/evaluate.py: a rank without a block takes no part in the scores
-             observer.update_without()
+             pass
data/loading/shards.py: a corrupt image of one split hides that of the other
- example = (labels is self.eval_labels, index)
+ example = (True, index)
training/evaluate.py: an evaluation keeps the graph of its loss
- @torch.no_grad()
- def evaluate_model(
+ def evaluate_model(
training/trainer.py: a stop before the first step saves a state that never was
- if self.stop.force or not self.stop.begun:
-             raise request
+ if self.stop.force:
+             raise request
training/network.py: a model without batch norm is never frozen
- if not self.switched and not self.norms:
+ if not self.switched or not self.norms:
data/loading/sampler.py: a balanced epoch comes class by class
-     return chosen[torch.argsort(draw(key(seed, ORDER, epoch), chosen), stable=True)]
+     return chosen
data/transforms/device.py: images are mixed in the short format
- return pixels if self.mix else pixels.to(self.dtype)
+ return pixels.to(self.dtype)
training/train_state.py: layers that are frozen until a step are frozen for good
-     if until is None:
-         network.freeze_for_good
+     if True:
+         network.freeze_for_good
training/dry_run.py: the bound of a trial stays for the run
-         resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
+         pass
training/train_step.py: the gradient norm is measured a step after the log point
- self.state, self.plan.due("log", shard.step)
+ self.state, self.plan.due("log", shard.step - 1)
training/train_state.py: a resume loses the figures of the evaluation that was saved last
- self.step + 0.5 if self.is_evaluated else self.step
+ self.step
training/resolved_job.py: a resume may have other images
-         **job.dataset.fingerprint(),
-         "input_shape"
+         "input_shape"
data/loading/shards.py: an example that is repeated has the label of the last one
- labels = self.train_labels[self._examples(indices)]
+ labels = self.train_labels[indices.clamp(max=len(self.train_labels) - 1)]
data/transforms/steps.py: operations follow the shift of the crop
- FIRST_DRAW = 16
+ FIRST_DRAW = 0
data/datasets/preprocess.py: a wide TIFF whose zero is white is a negative
- grey = 255 - grey
+ pass
data/datasets/decode.py: a box that is scaled down loses a part of what it covers
- -(-(start + side) * eighths // 8)
+ (start + side) * eighths // 8
stochastic/functions.py: shared heads of keys go to the wrong queries
- (heads.repeat_interleave(query.shape[-3] // heads.shape[-3], -3) for heads in (key, value))
+ (heads.repeat(1, query.shape[-3] // heads.shape[-3], 1, 1) for heads in (key, value))
stochastic/convert.py: an evaluation drops blocks
-         if not self.training:
-             return original.forward(self, *args, **kwargs)
+         pass
stochastic/numbers.py: examples that share the first word of their key drop the same
- x = torch.add(words[:, 1:], x, alpha=_FIRST)
+ x = x * _FIRST
precision.py: batch norms of bfloat16 weights keep 8 bits
-                 module.float()
+                 pass
inference/export.py: a folder of timm's has its name before its weights are on the disk
-         sync(folder / MODEL)
+         pass
data/datasets/packed.py: packed pixels are not flushed
-         os.fsync(file.fileno())
+         pass
report/runs.py: a run with a score of 0 has none for a filter
- return float(value) < float(limit) if sign
+ return float(value or "none") < float(limit) if sign
inference/scoring.py: each fold counts alike in the loss, whatever its size
- math.fsum(part.figures[name] * (part.images / images) for part in parts)
+ math.fsum(part.figures[name] / len(parts) for part in parts)
inference/scoring.py: columns that the first setting lacks are left out
- for evaluation in evaluations for column in next(evaluation.lines()))
+ for evaluation in evaluations[:1] for column in next(evaluation.lines()))
data/datasets/files.py: repetitions of an example have one crop
- torch.tensor(numbers, dtype=torch.int64))
+ torch.tensor(indices, dtype=torch.int64))
data/datasets/decode.py: the rest of a short read comes from the beginning again
- os.pread(descriptor, size - len(data), offset + len(data))
+ os.pread(descriptor, size - len(data), offset)
data/datasets/builtin.py: the fingerprint of arrays has no labels
- parts = {"images": split.images, "labels": split.labels}
+ parts = {"images": split.images}
data/datasets/builtin.py: a limit leaves the test split whole
- return split if source.limit is None else
+ return split if source.limit is None or name == "test" else
data/datasets/composed.py: items without a group have the number within their Dataset
- else f"item {number}"
+ else f"item {index}"
data/transforms/mixing.py: the share of a CutMix box is that of a square image
- area = images.shape[-2] * images.shape[-1]
+ area = images.shape[-1] ** 2
sweeps/search.py: of a thousand jobs and a factor of ten there are two rounds
- rounds = int(math.log(jobs, factor) + 1e-9) if jobs else 0
+ rounds = int(math.log(jobs, factor)) if jobs else 0
sweeps/view.py: a sweep ends before its slowest job
- return max([of_round, *lefts]) + self.later
+ return of_round + self.later
report/sweep_page.py: each value of a key counts alike, however many jobs have it
- between = math.fsum(len(of) * (math.fsum
+ between = math.fsum(len(records) / len(groups) * (math.fsum
metrics.py: a label with a probability of exactly a half is predicted in its scores
- None if self.of_ranks else lambda odds: odds > 0,
+ None if self.of_ranks else lambda odds: odds >= 0,
training/trainer.py: an epoch that improves never ends for the callbacks
- improved = self.end_by_callback(step) or improved
+ improved = improved or self.end_by_callback(step)
training/trainer.py: a run that patience ends is not saved
- if improved or overdue or ends or
+ if improved or overdue or
training/trainer.py: scores that come while a checkpoint is written are in it
- "scores": [*self.progress.scores]}
+ "scores": self.progress.scores}
training/train_step.py: the second gradient of a closure counts in the running statistics
-             if norms:
-                 with torch.no_grad():
+             if False:
+                 with torch.no_grad():
training/averages.py: the blocks of a rank follow each other in the table
- table[world.rank :: world.size] = torch.stack(rows)
+ table[world.rank * len(rows) : (world.rank + 1) * len(rows)] = torch.stack(rows)
training/build_observers.py: a checkpoint comes before the figures that wait
-             self.write_logged()
-             self._tell("flush")
+             self._tell("flush")
checkpoint/writing.py: a save by the step does not set back the clock of the saves
-         self.saved_at = time.monotonic()
-         tensors, state = host_copies
+         tensors, state = host_copies
checkpoint/writing.py: after a resume from an earlier step the skipped checkpoints push out the new ones
- if step_of(path) <= step_of(written)]
+ if True]
optim/muon.py: biases of all layers have the same rate under layer decay
- scale, orthogonal = group["scale"] * ratio, kind is matrices
+ scale, orthogonal = ratio if kind is others else group["scale"] * ratio, kind is matrices
optim/optimizers.py: a head's rate switches layer decay off
- scales |= dict.fromkeys(head, self.head_lr / self.rate)
+ scales = dict.fromkeys(head, self.head_lr / self.rate)
training/run_record.py: a resume forgets the hours that were spent
- spent["hours"] = spent.get("hours", 0.0) + (
+ spent["hours"] = (
strategy/ddp.py: accelerate waits for the gradients of frozen layers
- return replace(self, find_unused_parameters=True)
+ return self
strategy/zero.py: the gradients of other ranks' parameters are not cleared
-         for parameter in self.owners:
-             parameter.grad = None
+         self.own.zero_grad(set_to_none)
strategy/zero.py: groups and the ranks in a group are swapped
- groups = (self.replicas, world.size // self.replicas) if
+ groups = (world.size // self.replicas, self.replicas) if
stochastic/functions.py: blocks of oblong images have height and width swapped
- tall, wide = min(layer.block_size, height), min(layer.block_size, width)
+ tall, wide = min(layer.block_size, width), min(layer.block_size, height)
training/build_data.py: the boxes of a later size are cut for the first one
- {start: cropping_to(size) for start, size in
+ {start: cropping_to(data.transforms.train_sizes[0]) for start, size in
training/moments.py: a stop on another rank than main has no reason
- next(reason for reason in run.world.gather(run.reason) if reason)
+ run.world.gather(run.reason)[0]
training/objects.py: a loss of the user's is changed, and not a copy of it
- return copy.deepcopy(loss) if isinstance(loss, nn.Module) else FunctionLoss(loss)
+ return loss if isinstance(loss, nn.Module) else FunctionLoss(loss)
training/own_losses.py: a loss of the user's that is negative is refused
- float(whole.detach().abs().nan_to_num(0).max())
+ float(whole.detach().nan_to_num(0).max())
telemetry/loggers.py: a resume from an evaluated step removes the evaluation from metrics.jsonl
- return JsonLines(run.run_dir.metrics, run.after)
+ return JsonLines(run.run_dir.metrics, run.step)
telemetry/meter.py: a task's figure of a step that a stop interrupted counts twice
- for entry in self.unlogged if entry[0] <= after]
+ for entry in self.unlogged]
telemetry/pictures.py: the counts in the picture of a confusion matrix are transposed
- str(counts[label, other]), fill=colour
+ str(counts[other, label]), fill=colour
telemetry/progress.py: times are shown in UTC, and not in the zone of the machine
- time.localtime(seconds)
+ time.gmtime(seconds)
report/bundle.py: a secret of a sweep's job is not hidden in the bundle
- runs = map(Run, (folder, *jobs))
+ runs = map(Run, (folder,))
report/sweep_page.py: where less is better, jobs without a score come before the best one
- key=lambda job: (job.score is None, -monitor.direction.gain(job.score or 0.0)))
+ key=lambda job: -monitor.direction.gain(job.score or 0.0))
strategy/sync_batchnorm.py: without a momentum the statistics are the last batch's
- weight = weight / self.num_batches_tracked.clamp(min=1) if self.momentum is None
+ weight = weight if self.momentum is None
core/table.py: a CSV of rows has no zeros
- ["" if row.get(name) is None else row[name] for name in names]
+ [row.get(name) or "" for name in names]
runtime/host.py: the group of cpuset is taken for the group of cpu
- if not controllers or controller in controllers.split(","):
+ if not controllers or controller in controllers:
launcher/attach.py: after a restart of the ranks under torchrun the run begins in a new folder
-             self.store.set(FOLDER_KEY, str(run_dir.path))
-             self
+             self
core/run.py: from step 100,000,000 on the newest checkpoint is not the first
- return sorted(named, key=step_of, reverse=True)
+ return sorted(named, reverse=True)
job/validate.py: a third callback of one class takes the place of the second one
- others = sum(type(other).__name__ == name for other in named.values())
+ others = int(name in named)
strategy/pipeline.py: a frozen layer of another stage asks for a gradient, which nobody sends
- nn.Parameter(empty, requires_grad=tensor.requires_grad) if parameter else empty
+ nn.Parameter(empty) if parameter else empty
config/extensions.py: a package whose name begins like an extension's is taken for a part of it
- module == self.package or module.startswith(f"{self.package}.")
+ module.startswith(self.package)
core/safe_write.py: folders that a job has created stay, because the outer one is removed first
- if not os.path.lexists(path)), reverse=True)
+ if not os.path.lexists(path)))
runtime/signals.py: a program with an exit handler that hangs ends as if it had succeeded
- threading.Timer(LEAVE_S, os._exit, [code])
+ threading.Timer(LEAVE_S, os._exit, [0])
stochastic/functions.py: the scale of a dropout is rounded to bfloat16
- return (input.mul_(keep) if inplace else input * keep).mul_(1 / (1 - p) if p < 1 else 1.0)
+ scaled = keep.mul_(1 / (1 - p) if p < 1 else 1.0)
+         return input.mul_(scaled) if inplace else input * scaled
checkpoint/writing.py: an export that failed is not tried again
-             self._export(self.unexported)
-             self.unexported = None
+             unexported, self.unexported = self.unexported, None
+             self._export(unexported)
core/run.py: the overrides of a run are in another order than they were typed
- return self.read(self.run_dir.overrides, read_overrides, [])
+ return sorted(self.read(self.run_dir.overrides, read_overrides, []))
data/datasets/folder.py: of several folders to evaluate, the first that the disk lists is taken
- return sorted(entries, key=lambda entry: entry.name)
+ return list(entries)
runtime/watchdog.py: the watchdog says where its own thread was
- sys._current_frames()[threading.main_thread().ident or 0]
+ sys._current_frames()[threading.get_ident()]
strategy/base.py: a model is evaluated without autocast
- with torch.autocast(inputs[0].device.type, self.dtype):
+ with torch.autocast(inputs[0].device.type, self.dtype, enabled=self.training):
sweeps/pool_launcher.py: a sweep returns the records as they were before its jobs ran
- return [ledger.read(record) for record in records]
+ return records
diagnostics/inspection.py: two labels of an image are not found if its copies are in two splits
- two_labels = [pair for pair in pairs if not
+ two_labels = [pair for pair in in_one if not
core/tags.py: a monitor with a dash in its name is minimised
- Direction.minimize if text.startswith("-") else
+ Direction.minimize if "-" in text else
job/resume.py: where the batch was `auto`, the config that the command has is changed along
- return {**values, "batch": batch, "train": {**values["train"], "micro_batches": "auto"}}
+ values["train"]["micro_batches"] = "auto"
+     return {**values, "batch": batch}
runtime/signals.py: the first Ctrl-C after a stop of the run's own counts as a second one
- self.requested, self.reason = True, reason
+ self.requested, self.reason, self.interrupted_at = True, reason, time.monotonic()
strategy/strict.py: on a single rank the sum of the gradients reaches no parameter
- assert isinstance(replica, TreeReplica)
-         replica.finish()
+ assert isinstance(replica, TreeReplica)
+         if dist.is_initialized():
+             replica.finish()
strategy/zero.py: the owners of the parameters depend on the process
- parameters = [parameter for group in whole.param_groups for parameter in group["params"]]
-         super().__init__(whole, assign(parameters, world.size), world)
+ parameters = [*{parameter for group in whole.param_groups for parameter in group["params"]}]
+         super().__init__(whole, assign(parameters, world.size), world)
training/build_observers.py: a sample of the hardware reaches observers in the middle of another call
- def _tell(self, method: str, *values: Any) -> None:
-         with self.lock:
-             for observer in self.observers:
-                 self.call(observer, method, *values)
+ def _tell(self, method: str, *values: Any) -> None:
+         for observer in self.observers:
+             self.call(observer, method, *values)
training/experiment.py: the choice of kernels of an earlier job of the process stays
- torch.backends.cudnn.benchmark = job.train.cudnn_benchmark
+ if job.train.cudnn_benchmark:
+         torch.backends.cudnn.benchmark = True
config/schema.py: a size that comes back later in training has no shape of its own
- return [shape if size is None else (shape[0], *sides(size)) for size in sizes]
+ return [*dict.fromkeys(shape if size is None else (shape[0], *sides(size)) for size in sizes)]
config/suggest.py: a key below a block that exists is looked up in that block without end
- close_to(first, {name.partition(".")[0] for name in names} - {first}) if block else []:
+ close_to(first, {name.partition(".")[0] for name in names}) if block else []:
sweeps/line.py: a line with its keys in another order is another sweep
- return tuple(sorted(swept))
+ return tuple(swept)
training/trained.py: infinite numbers of a file count as those of a new model
- infinite = infinite_buffers(model)
-     check_tensors(model, file, KEY)
-     model.load_state_dict(load_weights(file))
+ check_tensors(model, file, KEY)
+     model.load_state_dict(load_weights(file))
+     infinite = infinite_buffers(model)
config/options.py: classes that are declared after a group was first asked for are missing
- def classes_of(group: str) -> dict[str, type[Any]]:
+ @functools.cache
+ def classes_of(group: str) -> dict[str, type[Any]]:
config/extensions.py: a recipe with a comment above the line of its package is refused
- if GLOBAL.encode() in file.read_bytes()}
+ if file.read_bytes().startswith(GLOBAL.encode())}
job/validate.py: on several machines a compiled model is checked for the ranks of one
-     job.strategy.check_compile(job.launcher.world_size, job.device)
+     job.strategy.check_compile(int(job.launcher.ranks), job.device)
core/run_dir.py: `SWEEP/3` can be job 13 or 103
-         return next(path.parent.glob(f"{int(path.name):03}-*"), path)
+         return next(path.parent.glob(f"*{int(path.name)}-*"), path)
strategy/cutting.py: a parameter that is first used elsewhere than in its module is at the place of its module
-             name: self.first_use.get(name, self.begun.get(modules[name.rpartition(".")[0]], 0))
+             name: self.begun.get(modules[name.rpartition(".")[0]], self.first_use.get(name, 0))
strategy/ddp.py: with layers that are frozen for a time, Accelerate loses the other keys of the strategy
-         return replace(self, find_unused_parameters=True)
+         return type(self)(find_unused_parameters=True)
telemetry/hardware_watch.py: the last sample is missing in the figures of the run
-         self.done.set()
-         if self.is_alive():
-             self.join(LAST_SAMPLE_S)
-             if self.is_alive():
-                 log.warn("NVML does not answer; the last figures of the GPUs are missing")
-                 return self._figures()
-         with close_all(*(part.close for part in self.parts if isinstance(part, Gpus))):
-             return self._figures()
+         self.done.set()
+         figures = self._figures()
+         if self.is_alive():
+             self.join(LAST_SAMPLE_S)
+             if self.is_alive():
+                 log.warn("NVML does not answer; the last figures of the GPUs are missing")
+                 return figures
+         with close_all(*(part.close for part in self.parts if isinstance(part, Gpus))):
+             return figures
data/datasets/files.py: images are divided by the means of ImageNet
-         return per_channel(IMAGENET_STD, self.image_shape[0])
+         return per_channel(IMAGENET_MEAN, self.image_shape[0])
config/components.py: the sentence about a wrong value of an option lacks the group before the key
-             raise InputError(messages.sentence(error, prefix)) from error
+             raise InputError(messages.sentence(error)) from error
core/figures.py: a GPU figure of zero is missing
- for name, value in figures.items() if is_number(value)}
+ for name, value in figures.items() if value and is_number(value)}
core/rng.py: the epoch and the purpose of random numbers are exchanged
-     return draw(key(seed, purpose, epoch), indices)
+     return draw(key(seed, epoch, purpose), indices)
telemetry/pictures.py: the labels are those of the leftmost points, not of the first ones
- [*zip(x, y, labels, strict=True)][:LABELLED]
+ sorted(zip(x, y, labels, strict=True))[:LABELLED]
"""


def bug_of(block: str) -> Bug:
    """The bug that a block of the table describes; ends the command if its text does not occur once."""
    name, *lines = block.splitlines()
    file, _, breaks = name.partition(": ")
    text, instead = ("\n".join(line[2:] for line in lines if line[0] == sign) for sign in "-+")
    source = (ROOT / "src" / "lockstep" / file).read_text()
    if (times := source.count(text)) != 1:
        sys.exit(f"{breaks}: its text occurs {times} times in {file}, expected once:\n{text}")
    first = source.count("\n", 0, source.index(text)) + 1
    changed = range(first, first + text.count("\n") + 1)
    headers = [header(node) for node in ast.walk(ast.parse(source)) if isinstance(node, ast.stmt)]
    touched = [lines for lines in headers if lines.start < changed.stop and changed.start < lines.stop]
    return Bug(
        f"src/lockstep/{file}",
        breaks,
        range(min(lines.start for lines in touched), max(lines.stop for lines in touched)),
        source.replace(text, instead),
    )


def bugs_of_table(table: str) -> list[Bug]:
    return [bug_of(block) for block in re.split(r"\n(?=\S+\.py: )", table.strip())]


def write(file: Path, source: str, clock: int) -> None:
    """Write a module with a time of its own: Python keeps bytecode of a file of the same second and size."""
    file.write_text(source)
    os.utime(file, (clock, clock))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", type=Path, help="other bugs, as in the table of this file")
    parser.add_argument("--fresh", type=int, metavar="N", help="bugs in N functions, drawn by --seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="bugs whose file or description contains this")
    parser.add_argument("--map", type=Path, default=MAP, help="where the tests of each line are kept")
    parser.add_argument("--measure", action="store_true", help="measure anew which tests execute which line")
    parser.add_argument("--patience", type=float, default=600, help="seconds for the tests of a bug")
    parser.add_argument("--json", type=Path, help="where the table goes")
    arguments = parser.parse_args()
    every = (
        fresh_bugs(arguments.fresh, arguments.seed)
        if arguments.fresh
        else bugs_of_table(arguments.table.read_text() if arguments.table else TABLE)
    )
    bugs = [bug for bug in every if arguments.only in f"{bug.file} {bug.breaks}"]
    table = Table("file", "bug", "found by", "tests", "s")
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory(prefix="lockstep-mutants-") as folder:
        copy = Path(folder) / "copy"  # no bug is ever in the checkout
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*NOT_COPIED))
        if arguments.measure or not arguments.map.exists():
            measured = Path(folder) / "measured"
            measured.mkdir()
            arguments.map.parent.mkdir(parents=True, exist_ok=True)
            Covering.measured(copy, measured).write(arguments.map)
        covering = Covering.read(arguments.map)
        import_libraries()
        if wrong := first_failing(copy, sorted(covering.tests)[:1], arguments.patience):
            sys.exit(f"without a bug, the tests end with: {wrong}")
        for bug in bugs:
            began, file, clock = time.monotonic(), copy / bug.file, int(time.time())
            tests = covering.of(bug.file, bug.lines) if bug.in_function else covering.of_file(bug.file)
            before = file.read_text()
            write(file, bug.source, clock + 2 * len(rows))
            try:
                test = first_failing(copy, tests, arguments.patience)
            finally:
                write(file, before, clock + 2 * len(rows) + 1)
            row = {"file": bug.file, "bug": bug.breaks, "test": test, "tests": len(tests)}
            rows.append({**row, "s": round(time.monotonic() - began, 1)})
            verdict = "NOT FOUND" if test == "" else test or "NOT FOUND in this time"
            console.print(f"{bug.file[13:]}: {bug.breaks}: {verdict}", soft_wrap=True, markup=False)
            cells = (bug.file[13:], bug.breaks, verdict, str(len(tests)), f"{rows[-1]['s']:.0f}")
            table.add_row(*map(escape, cells))  # in a test's name, brackets are no markup
    console.print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")
    missed = sum(not row["test"] for row in rows)
    console.print(f"{len(rows) - missed} of {len(rows)} bugs were found")
    sys.exit(missed > 0)


if __name__ == "__main__":
    main()
