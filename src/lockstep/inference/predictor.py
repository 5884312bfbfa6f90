"""A trained model and everything that it needs for use, from its weights file alone.

Evaluation, prediction, export and the demo use it; no run folder and no data is needed.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from lockstep.config.extensions import MAIN
from lockstep.core import log
from lockstep.core.errors import InputError
from lockstep.core.model import best_classes, log_odds, probabilities
from lockstep.core.model_card import VALUES, ModelCard
from lockstep.core.protocols import Precision
from lockstep.core.run import Run
from lockstep.core.run_dir import RunDir, relative
from lockstep.data.transforms.augment import NoAugment
from lockstep.data.transforms.device import DeviceTransforms
from lockstep.inference.images import ImageLike, stored_images
from lockstep.training.evaluate import outputs_of
from lockstep.training.trained import KEY, Trained, load_trained

THRESHOLD = 0.5  # above this probability a label is predicted


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The prediction of a model for an image.

    Fields:
        label: the most probable class.
        names: the names of all classes, by label.
        probabilities: float (classes,) on the CPU, by label. They add up to 1, unless the model judges each class by
            itself (`Predictor.card.probabilities` is `sigmoid`, as after `loss=bce`).
        log_odds: float64 (classes,), log(p / (1 - p)) of each probability p, also where it rounds to 0 or 1.
    """

    label: int
    names: tuple[str, ...]
    probabilities: Tensor
    log_odds: Tensor

    @property
    def name(self) -> str:
        """The name of the most probable class."""
        return self.names[self.label]

    @property
    def probability(self) -> float:
        """The probability of the most probable class."""
        return float(self.probabilities[self.label])

    def top(self, k: int) -> list[tuple[int, str, float]]:
        """The `k` most probable classes (or all, if there are fewer): label, name and probability."""
        order = self.log_odds.clone()
        order[self.label] = torch.inf  # the first of equal ones
        best = order.topk(min(k, len(order))).indices.tolist()
        return [(label, self.names[label], float(self.probabilities[label])) for label in best]

    def above(self, threshold: float) -> list[tuple[int, str, float]]:
        """The labels above this probability, the most probable first: label, name and probability."""
        least = torch.tensor(threshold, dtype=torch.float64).clamp(0, 1).logit()
        return [row for row in self.top(len(self.names)) if self.log_odds[row[0]] > least]


@dataclass(frozen=True, kw_only=True)
class Predictor(Trained):
    """A trained model on its device, with the preprocessing of its evaluation.

    Fields:
        card: the model card in its weights.
        model: the module, in evaluation mode: normalised images (B, C, h, w) to logits (B, classes).
        precision: the precision that it was evaluated in.
        device: the device of the model.
        transforms: from stored uint8 images (B, C, H, W) to the input of the model.
    """

    transforms: DeviceTransforms

    @property
    def names(self) -> tuple[str, ...]:
        """The name of each class, by label."""
        return self.card.names

    def stored(self, images: ImageLike | Iterable[ImageLike]) -> Tensor:
        """Images as the data set stored its own, uint8 (B, C, H, W) on the CPU; see `stored_images`."""
        return stored_images(images, self.card)

    def cropped(self, stored: Tensor) -> Tensor:
        """The pixels that the model sees of stored images: uint8 (B, C, h, w), cropped to the centre and resized."""
        pixels = replace(self.transforms, scale=torch.ones(()), shift=torch.zeros(())).eval(stored)
        return pixels.round().clamp(0, 255).to(torch.uint8)

    def preprocess(self, images: ImageLike | Iterable[ImageLike]) -> Tensor:
        """The input of `model` for these images, float (B, C, h, w) on the device: cropped, normalised, resized.

        Raises:
            InputError: one is not an image.
        """
        pixels = self.transforms.eval(self.stored(images).to(self.device))
        return pixels.to(self.precision.storage, memory_format=self.transforms.memory_format)

    @torch.no_grad()
    def logits(self, stored: Tensor) -> Tensor:
        """The logits (B, classes) of stored images, uint8 (B, C, H, W), with the same bits as in an evaluation."""
        images = self.transforms.eval(stored.to(self.device))
        return outputs_of(self.model, images, self.precision, self.transforms.memory_format, self.card.eval_views)

    def values(self, images: ImageLike | Iterable[ImageLike]) -> Tensor:
        """The outputs for each image, float (B, outputs) on the CPU: the values of a regression, otherwise logits.

        `images` are as in `predict`. Raises InputError: one is not an image.
        """
        blocks = [self.logits(block).cpu() for block in self.stored(images).split(self.card.eval_batch) if len(block)]
        return torch.cat(blocks) if blocks else torch.zeros(0, self.card.classes)

    def predict(self, images: ImageLike | Iterable[ImageLike]) -> list[Prediction]:
        """The model's prediction for each image.

        Args:
            images: one image, several, or a uint8 tensor (B, C, H, W). An image is the path of a file, its bytes, a
                Pillow image, a uint8 array (H, W) or (H, W, C), or a uint8 tensor (C, H, W).

        Raises:
            InputError: one is not an image, or the model predicts values (see `values`).
        """
        if self.card.targets == VALUES:
            raise InputError(
                f"{KEY}: this model predicts values ({', '.join(self.names)}) and no classes; use Predictor.values"
            )
        logits, kind = self.values(images).to(self.device), self.card.probabilities
        shares, odds = probabilities(logits, kind).cpu(), log_odds(logits, kind).cpu()
        return [
            Prediction(label=label, names=self.names, probabilities=row, log_odds=row_odds)
            for label, row, row_odds in zip(best_classes(logits)[:, 0].tolist(), shares, odds, strict=True)
        ]


def load_predictor(
    path: str | Path, *, device: str | None, precision: Precision | None = None, module: nn.Module | None = None
) -> Predictor:
    """The model at `path`, ready to be used; the arguments and errors are those of `load_trained`."""
    trained = load_trained(path, device=device, precision=precision, module=module)
    if trained.card.packages:
        from lockstep.runtime.user_code import code_of  # few models are of an extension

        for package, code in code_of(vars(trained.card)).items():
            if package != MAIN and trained.card.packages.get(package) != code.facts["sha256"]:
                log.note(f"{path} was trained with other code of {package}")
    transforms = DeviceTransforms.of(
        trained.card,
        NoAugment(),
        device=trained.device,
        precision=trained.precision,
        memory_format=trained.memory_format,
        seed=0,
    )
    return Predictor(**vars(trained), transforms=transforms)


def say_which(file: Path, card: ModelCard) -> None:
    """Say on standard error which run the weights of a file are from, because `latest` moves."""
    run, score = run_of(file), f", {card.score} at step {card.step}" if card.score else ""
    place = relative(file if run is None else run.path)
    log.note(f"{place}: {card.model_name}, trained on {data_shown(run, card)}{score}")


def data_shown(run: RunDir | None, card: ModelCard) -> str:
    """The data that weights were trained on: the name of its folder or file, where the run says it, and its kind."""
    node = None if run is None else Run(run.path).composed.get("dataset")
    name = Path(str(node.get("path") or node.get("name") or "")).name if isinstance(node, dict) else ""
    return f"{name} ({card.data_name})" if name else card.data_name


def run_of(file: Path) -> RunDir | None:
    """The run of a weights file: its best weights, or a file in a checkpoint; None if the file is outside a run."""
    folders = (folder for folder in (file.parent, *file.parents[2:3]) if RunDir(folder).config.is_file())
    return next(map(RunDir, folders), None)
