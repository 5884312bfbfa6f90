"""`lockstep export --to timm`: a trained model of timm as a folder that timm and Transformers load."""

import json
import tempfile
from pathlib import Path
from typing import Any

import torch

from lockstep.config.commands import shell_command
from lockstep.core import log
from lockstep.core.errors import InputError, LockstepError
from lockstep.core.model_card import CROP, PAD, SQUASH, ModelCard
from lockstep.core.monitor import figure_text
from lockstep.core.run import read_overrides
from lockstep.core.run_dir import RunDir
from lockstep.core.safe_read import read_json
from lockstep.core.safe_write import storing, write_atomic
from lockstep.inference.predictor import Predictor

IMAGES = 8  # on which the folder's model is compared with the run's


def export_folder(predictor: Predictor, run: RunDir | None, target: Path) -> None:
    """Write `target`: config.json, model.safetensors and a model card, README.md.

    Raises:
        InputError: the folder exists, or the model is not one that timm can build.
        LockstepError: timm builds a model with other logits.
        StorageError: the folder cannot be written.
    """
    import timm

    model, card = predictor.model, predictor.card
    if target.exists() or not target.absolute().parent.is_dir():
        raise InputError(f"--out is {target}, expected a new folder in a folder that exists")
    facts_of_timm: Any = getattr(model, "pretrained_cfg", None)
    if facts_of_timm is None:
        raise InputError(f"--to timm: this model is no model of timm ({card.model['_target_']}); use --to onnx")
    shape = card.input_shape
    facts: dict[str, Any] = {
        "input_size": shape,
        "mean": card.mean,
        "std": card.std,
        "interpolation": card.interpolation,
        "crop_pct": card.eval_crop,
        "crop_mode": {CROP: "center", PAD: "border", SQUASH: "squash"}[card.fit],
    }
    arguments = dict(card.model.get("options") or {})
    if shape[0] != 3:
        arguments["in_chans"] = shape[0]
    if facts_of_timm["fixed_input_size"]:
        arguments.setdefault("img_size", shape[1:])
    config = {"pretrained_cfg": facts, "label_names": list(card.names)}
    with storing(target), tempfile.TemporaryDirectory(dir=target.absolute().parent, prefix=".export-") as place:
        folder = Path(place, target.name)
        timm.models.save_for_hf(model, str(folder), config, arguments, safe_serialization=True)
        written = read_json(folder / "config.json")
        # config.json also has it next to model_args, and Transformers accepts it only once.
        written.get("model_args", {}).pop("num_classes", None)
        write_atomic(folder / "config.json", json.dumps(written, indent=2) + "\n")
        write_atomic(folder / "README.md", readme(card, run, target.name))
        images = torch.randn((IMAGES, *shape), generator=torch.Generator().manual_seed(0))
        try:
            loaded = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
            with torch.no_grad():
                equal = torch.equal(loaded(images), model(images))
        except RuntimeError as error:  # tensors do not fit
            reason = str(error).partition("\n")[0]
            raise InputError(f"--to timm: timm cannot build this model ({reason}); use --to onnx") from error
        if not equal:
            raise LockstepError("--to timm: the model that timm builds has other logits; nothing was written")
        folder.rename(target)
    log.show(f'wrote {target}: timm.create_model("local-dir:{target}", pretrained=True) has the logits of the run')


def readme(card: ModelCard, run: RunDir | None, name: str) -> str:
    """The model card in Markdown, with the fields that the hub of Hugging Face reads at its top."""
    words = [] if run is None else ["lockstep", "train", *read_overrides(run.overrides)]
    scores = [f"- {figure_text(figure, value)}" for figure, value in card.scores.items()]
    code = [
        "import timm",
        "",
        f'model = timm.create_model("local-dir:{name}", pretrained=True).eval()',
        "transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))",
    ]
    lines = [
        *("---", "library_name: timm", "pipeline_tag: image-classification", "tags: [image-classification, timm]"),
        *("---", "", f"# {name}", ""),
        f"`{card.model_name}`, trained on {card.data_name} with Lockstep {card.lockstep}, "
        f"step {card.step:,}{', averaged weights' * card.averaged}.",
        "",
        *(["On the evaluation split:", "", *scores, ""] if scores else []),
        f"Images: {'x'.join(map(str, card.input_shape))} (channels, height, width), {card.fit}, the central "
        f"{card.eval_crop:.1%}, {card.interpolation}; mean {list(card.mean)}, "
        f"standard deviation {list(card.std)}. Outputs: {card.classes:,} {card.targets} ({card.probabilities}).",
        *([f"The scores are of {card.eval_views} views; this model takes one."] if card.eval_views > 1 else []),
        "",
        *(["```bash", shell_command(words), "```", ""] if words else []),
        *("```python", *code, "```", ""),
    ]
    return "\n".join(lines)
