"""Classification data sets of torchvision by their names: `dataset=torchvision dataset.name=Flowers102`."""

from typing import Any, ClassVar

from lockstep.config.options import option
from lockstep.core.errors import InputError, did_you_mean, reason_of
from lockstep.core.fields import TEXT, in_config, pathname, ruled
from lockstep.data.datasets.items import DatasetOption

# The splits to train on, to evaluate and to test, by class: values of `split`, or of `train` if they are true or
# false. Without a split to evaluate, `val_share` cuts one.
TORCHVISION_SPLITS: dict[str, tuple[Any, Any, Any]] = {
    **dict.fromkeys(("CIFAR10", "CIFAR100", "FashionMNIST", "KMNIST", "MNIST", "USPS"), (True, False, None)),
    **dict.fromkeys(("DTD", "FGVCAircraft", "Flowers102", "PCAM", "RenderedSST2"), ("train", "val", "test")),
    **dict.fromkeys(("Food101", "GTSRB", "STL10", "SVHN", "StanfordCars"), ("train", "test", None)),
    **dict.fromkeys(("CLEVRClassification", "Imagenette"), ("train", "val", None)),
    **dict.fromkeys(("Caltech101", "Caltech256", "EuroSAT", "SEMEION", "SUN397"), (None, None, None)),
    "Country211": ("train", "valid", "test"),
    "FER2013": ("train", None, None),
    "OxfordIIITPet": ("trainval", "test", None),
}


@option("dataset")
class Torchvision(DatasetOption):
    """A classification data set of torchvision that is on the disk, such as `dataset.name=Flowers102`.

    Of most of them a test split is published: where there is no other, it is the one to evaluate.
    """

    name: str = ruled("???", TEXT)  # the class in `torchvision.datasets`
    root: str = in_config("${data_root}", pathname("data"))  # the folder that its class takes as `root`

    val_remedy: ClassVar[str] = "evaluate a share of each class with dataset.val_share=0.1"

    def train_dataset(self) -> Any:
        return self._dataset(0)

    def val_dataset(self) -> Any:
        return self._dataset(1)

    def test_dataset(self) -> Any:
        return self._dataset(2)

    def _dataset(self, number: int) -> Any:
        from torchvision import datasets

        if self.name not in TORCHVISION_SPLITS:
            close = did_you_mean(self.name, TORCHVISION_SPLITS)
            raise InputError(
                f"dataset.name is {self.name}, expected one of {', '.join(sorted(TORCHVISION_SPLITS))}.{close} For "
                "any other one, write an option that returns it (docs/extending.md#any-dataset-of-torch)"
            )
        value = TORCHVISION_SPLITS[self.name][number]
        if number and value is None:
            return None
        words = {} if value is None else {"train" if isinstance(value, bool) else "split": value}
        try:
            return getattr(datasets, self.name)(self.root, **words)
        except Exception as error:  # torchvision raises all kinds of errors for missing and damaged files
            typed = "".join(f", {key}={word!r}" for key, word in words.items())
            raise InputError(
                f"data_root: {self.name} cannot be read from {self.root} ({reason_of(error)}); fetch it once with "
                f"python -c \"from torchvision.datasets import *; {self.name}('{self.root}'{typed}, download=True)\""
            ) from error
