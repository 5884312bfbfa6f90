"""The CIFAR-10 speed record as a plain PyTorch loop, with which Lockstep's recipe is compared.

The facts are those of airbench94_muon.py by Keller Jordan (github.com/KellerJordan/cifar10-airbench; the method in
arXiv 2404.00498), which reaches 94.01 % in 2.59 s on an A100: the network and its initial weights, augmentation,
learning rates, types, order of operations, what is compiled, and what the clock includes. The code is our own. It
differs in this:

- The crops of an epoch are one gather instead of 25 masked copies, so the host never waits for the device.
- The record also evaluates after each epoch, with its clock stopped. Here there is one evaluation, and the clock
  never stops.
- On a CPU everything is float32, because half precision is slow or missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from measure import Figures, Stopwatch

WIDTHS = (64, 256, 256)
WHITENED = 5000  # training images from which the first layer is computed
PAD = 2
BIAS_EPOCHS = 3  # epochs in which the first layer's bias is trained
# Learning rates and decay are for the sum of the losses of a batch, not their mean.
BIAS_RATE, HEAD_RATE, FILTER_RATE = 0.053, 0.67, 0.24
DECAY_PER_IMAGE = 2e-6
Split = tuple[Tensor, Tensor]


class Network(nn.Module):
    """Whitened 2x2 patches, three blocks of two convolutions, a linear layer; in `dtype`, except the batch norms."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.whitening = nn.Conv2d(3, 24, 2, dtype=dtype)
        self.whitening.weight.requires_grad = False
        self.filters, self.norms = nn.ModuleList(), nn.ModuleList()
        entering = self.whitening.out_channels
        for width in WIDTHS:
            for _ in range(2):
                self.filters.append(nn.Conv2d(entering, width, 3, padding="same", bias=False, dtype=dtype))
                self.norms.append(nn.BatchNorm2d(width, eps=1e-12, momentum=0.4))
                self.norms[-1].weight.requires_grad = False
                entering = width
        self.head = nn.Linear(entering, 10, bias=False, dtype=dtype)

    @torch.no_grad()
    def reset(self) -> None:
        """Initialise: filters start with identities, the head's weights have a standard deviation of one."""
        for layer in (self.whitening, *self.filters, *self.norms, self.head):
            layer.reset_parameters()
        for weight in self.filters.parameters():
            nn.init.dirac_(weight[: weight.shape[1]])
        self.head.weight.div_(self.head.weight.std())

    @torch.no_grad()
    def whiten(self, images: Tensor) -> None:
        """Set the first layer to the principal directions of the patches of normalised images, with both signs."""
        patches = images.float().unfold(2, 2, 1).unfold(3, 2, 1).permute(0, 2, 3, 1, 4, 5).reshape(-1, 12)
        variances, directions = torch.linalg.eigh(patches.T @ patches / len(patches), UPLO="U")
        filters = (directions / (variances + 5e-4).sqrt()).T.reshape(12, 3, 2, 2)
        self.whitening.weight.copy_(torch.cat([filters, -filters]))

    def forward(self, x: Tensor, train_bias: bool = True) -> Tensor:
        bias = self.whitening.bias
        assert bias is not None
        x = F.gelu(F.conv2d(x, self.whitening.weight, bias if train_bias else bias.detach()))
        for number, (layer, norm) in enumerate(zip(self.filters, self.norms, strict=True)):
            x = layer(x)
            if number % 2 == 0:
                x = F.max_pool2d(x, 2)
            x = F.gelu(norm(x))
        logits: Tensor = self.head(F.max_pool2d(x, 3).flatten(1))
        return logits / self.head.in_features


def orthogonal(update: Tensor) -> Tensor:
    """Three iterations of Newton and Schulz on one matrix, in bfloat16."""
    x = update.bfloat16()
    x = x / (x.norm() + 1e-7)
    if tall := len(x) > x.shape[1]:
        x = x.T
    for _ in range(3):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.T if tall else x


class FilterMuon:
    """Muon for the filters, one after the other: each is scaled to a fixed norm and then updated."""

    def __init__(self, filters: Sequence[nn.Parameter], orthogonal: Callable[[Tensor], Tensor]) -> None:
        self.filters = filters
        self.momenta = [torch.zeros_like(kernel) for kernel in filters]
        self.orthogonal = orthogonal

    @torch.no_grad()
    def step(self, rate: float) -> None:
        for kernel, momentum in zip(self.filters, self.momenta, strict=True):
            assert kernel.grad is not None
            momentum.mul_(0.6).add_(kernel.grad)
            update = self.orthogonal(kernel.grad.add(momentum, alpha=0.6).flatten(1))
            kernel.mul_(len(kernel) ** 0.5 / kernel.norm())
            kernel.add_(update.reshape(kernel.shape), alpha=-rate)


class Batches:
    """Training batches. Half of the images are mirrored in even epochs, the others in odd ones; crops are new."""

    def __init__(self, images: Tensor, labels: Tensor, batch: int) -> None:
        mirrored = torch.rand(len(images), device=images.device) < 0.5
        images = torch.where(mirrored.view(-1, 1, 1, 1), images.flip(-1), images)
        # Channels last, also in the shape: the gather then copies contiguous pixels.
        self.padded = F.pad(images, [PAD] * 4, mode="reflect").permute(0, 2, 3, 1).contiguous()
        self.labels, self.batch = labels, batch

    def __len__(self) -> int:
        """Steps of an epoch, without a last short batch."""
        return len(self.padded) // self.batch

    def epoch(self, number: int) -> Iterator[Split]:
        """The batches of an epoch: the whole training set is augmented at its beginning."""
        images = self._cropped()
        if number % 2 == 1:
            images = images.flip(2)
        order = torch.randperm(len(images), device=images.device)
        for chosen in order.split(self.batch)[: len(self)]:
            yield images[chosen].permute(0, 3, 1, 2), self.labels[chosen]

    def _cropped(self) -> Tensor:
        """A random crop of each image, (n, side, side, 3), by one gather."""
        count, side, device = len(self.padded), self.padded.shape[1] - 2 * PAD, self.padded.device
        rows, columns = torch.randint(2 * PAD + 1, (2, count, 1), device=device) + torch.arange(side, device=device)
        image = torch.arange(count, device=device)
        return self.padded[image[:, None, None], rows[:, :, None], columns[:, None, :]]


class Reference:
    """Runs of the record. All use one network object, so that it is compiled only once.

    Args:
        train: uint8 images (n, 3, 32, 32) and labels, on the device.
        test: the same for the test split.
        mean: the mean of each channel, for pixels from 0 to 1.
        std: the standard deviation of each channel, for pixels from 0 to 1.
        epochs: the record has eight.
        batch: images per step; the learning rates are for 2000.
        compiled: whether to compile the network and the Newton-Schulz iteration.
    """

    def __init__(
        self,
        train: Split,
        test: Split,
        *,
        mean: Sequence[float],
        std: Sequence[float],
        epochs: int,
        batch: int,
        compiled: bool,
    ) -> None:
        self.device, self.epochs, self.batch = train[0].device, epochs, batch
        self.dtype = torch.float16 if self.device.type == "cuda" else torch.float32
        self.mean, self.std = (
            torch.tensor(values, device=self.device, dtype=self.dtype).view(1, -1, 1, 1) for values in (mean, std)
        )
        self.train, self.test = ((self._unit(images), labels) for images, labels in (train, test))
        with self.device:
            self.model = Network(self.dtype).to(memory_format=torch.channels_last)
        self.orthogonal = torch.compile(orthogonal) if compiled else orthogonal
        if compiled:
            self.model.compile(mode="max-autotune")

    def __call__(self, seed: int) -> Figures:
        """Train and evaluate once; the clock runs over whitening, augmentation, training and evaluation."""
        torch.manual_seed(seed)
        torch.backends.cudnn.benchmark = True
        self.model.reset()
        decay = (
            DECAY_PER_IMAGE * self.batch
        )  # divided by the rate below, because SGD multiplies it by the rate: all weights decay alike
        rates = [BIAS_RATE, BIAS_RATE, HEAD_RATE]
        params = [[self.model.whitening.bias], [norm.bias for norm in self.model.norms], [self.model.head.weight]]
        sgd = torch.optim.SGD(
            [{"params": some, "weight_decay": decay / rate} for some, rate in zip(params, rates, strict=True)],
            momentum=0.85,
            nesterov=True,
            fused=True,
        )
        muon = FilterMuon(list(self.model.filters.parameters()), self.orthogonal)
        watch = Stopwatch(self.device)
        watch.start()
        self.model.whiten(self._normalised(self.train[0][:WHITENED]))
        batches = Batches(self._normalised(self.train[0]), self.train[1], self.batch)
        self.fit(batches, sgd, rates, muon)
        top1 = self.evaluate()
        watch.stop()
        return {"top1": top1, "seconds": watch.seconds, "compilations": watch.compilations}

    def fit(self, batches: Batches, sgd: torch.optim.SGD, rates: Sequence[float], muon: FilterMuon) -> None:
        """Train the network; nothing here waits for the device. `rates[0]` is for the bias of the first layer."""
        self.model.train()
        step, steps, bias_steps = 0, self.epochs * len(batches), BIAS_EPOCHS * len(batches)
        for epoch in range(self.epochs):
            for images, labels in batches.epoch(epoch):
                logits = self.model(images, train_bias=step < bias_steps)
                F.cross_entropy(logits, labels, label_smoothing=0.2, reduction="sum").backward()
                for number, (group, rate) in enumerate(zip(sgd.param_groups, rates, strict=True)):
                    group["lr"] = rate * (1 - step / (steps if number else bias_steps))
                sgd.step()
                muon.step(FILTER_RATE * (1 - step / steps))
                self.model.zero_grad(set_to_none=True)
                step += 1

    @torch.no_grad()
    def evaluate(self) -> float:
        """Top-1 in percent, from six views of an image."""
        self.model.eval()
        images, labels = self._normalised(self.test[0]), self.test[1]
        logits = torch.cat([self._six_views(some) for some in images.split(self.batch)])
        return 100 * int((logits.argmax(1) == labels).sum()) / len(labels)

    def _six_views(self, images: Tensor) -> Tensor:
        """Weighted logits of image and mirror image: 1/2 in place, 1/4 for each of two shifts by a pixel."""
        side = images.shape[-1]
        padded = F.pad(images, [1] * 4, mode="reflect")
        moved = [self._pair(padded[..., at : at + side, at : at + side]) for at in (0, 2)]
        return 0.5 * self._pair(images) + 0.25 * (moved[0] + moved[1])

    def _pair(self, images: Tensor) -> Tensor:
        images = images.contiguous(memory_format=torch.channels_last)  # one layout, one compilation
        # A CUDA graph reuses its output memory: each product is computed before the next call.
        logits: Tensor = 0.5 * self.model(images) + 0.5 * self.model(images.flip(-1))
        return logits

    def _unit(self, images: Tensor) -> Tensor:
        return (images.to(self.dtype) / 255).contiguous(memory_format=torch.channels_last)

    def _normalised(self, images: Tensor) -> Tensor:
        return (images - self.mean) / self.std
