"""Keyed replacements of torch's functions that draw random numbers.

`KeyedFunctions` is active while a module that draws runs its forward, and replaces the calls. Shapes, scales and
arguments are the same as in torch's functions. A function without an entry is left to torch; `convert` detects it.
"""

import functools
import math
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from lockstep.stochastic.numbers import below, normal, uniform_from_bits

# Returns the random bits of the next draw, int32, for a tensor of this shape on the device of this other tensor.
NextBits = Callable[[torch.Size, Tensor], Tensor]


class KeyedFunctions(TorchFunctionMode):
    """A context in which the functions of `KEYED` draw the bits that `next_bits` returns."""

    def __init__(self, next_bits: NextBits) -> None:
        super().__init__()
        self.next_bits = next_bits

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        keyed, options = KEYED.get(func), dict(kwargs or {})
        if keyed is None or options.pop("generator", None) is not None:
            return func(*args, **(kwargs or {}))
        return keyed(self.next_bits, *args, **options)


def _channels(input: Tensor) -> torch.Size:
    """The shape of one number per channel and example."""
    return torch.Size([*input.shape[:2], *[1] * (input.dim() - 2)])


def _keyed_dropout(shape_of: Callable[[Tensor], torch.Size]) -> Callable[..., Tensor]:
    """One of torch's dropouts, which always pass `p` and `training` on, with a mask of the shape that it draws."""

    def keyed(next_bits: NextBits, input: Tensor, p: float, training: bool = True, inplace: bool = False) -> Tensor:
        if not (training and p):
            return input
        keep = below(next_bits(shape_of(input), input), 1 - p).to(input.dtype)
        # The scale is not rounded to the input's dtype: in bfloat16 that would change every mean by up to 0.4 %.
        return (input.mul_(keep) if inplace else input * keep).mul_(1 / (1 - p) if p < 1 else 1.0)

    return keyed


dropout = _keyed_dropout(Tensor.size)  # Srivastava et al. 2014
feature_dropout = _keyed_dropout(_channels)  # of whole channels (Tompson et al. 2015)


def scaled_dot_product_attention(
    next_bits: NextBits,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention with dropout of its weights. Not fused, because torch's fused kernels draw their own numbers."""
    if dropout_p == 0:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if enable_gqa:
        key, value = (heads.repeat_interleave(query.shape[-3] // heads.shape[-3], -3) for heads in (key, value))
    scores = (query * (query.shape[-1] ** -0.5 if scale is None else scale)) @ key.transpose(-2, -1)
    if is_causal:
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~visible, -math.inf)
    if attn_mask is not None:
        boolean = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, -math.inf) if boolean else scores + attn_mask
    return dropout(next_bits, scores.softmax(-1), dropout_p) @ value


def multi_head_attention_forward(next_bits: NextBits, *args: Any, **kwargs: Any) -> Any:
    """torch's own code, but its calls of random functions go to keyed functions.

    Torch disables a mode within a function that the mode handles, so the code runs with replaced globals.
    """
    names = {
        **vars(F),
        "dropout": functools.partial(dropout, next_bits),
        "scaled_dot_product_attention": functools.partial(scaled_dot_product_attention, next_bits),
        "has_torch_function": lambda _: False,
    }
    plain = F.multi_head_attention_forward
    assert isinstance(plain, FunctionType)
    return FunctionType(plain.__code__, names, plain.__name__, plain.__defaults__, plain.__closure__)(*args, **kwargs)


def drop_block(next_bits: NextBits, layer: Any, x: Tensor) -> Tensor:
    """Dropout of blocks of pixels (Ghiasi et al. 2018), like timm's `DropBlock2d` except for the scale.

    The scale is computed per example, as in the paper's algorithm 1; timm computes it over the micro-batch.
    """
    examples, channels, height, width = x.shape
    tall, wide = min(layer.block_size, height), min(layer.block_size, width)
    places = (height - tall + 1) * (width - wide + 1)
    gamma = layer.gamma_scale * layer.drop_prob * height * width / (tall * wide) / places
    shape = torch.Size([examples, 1 if layer.couple_channels else channels, height, width])
    with torch.no_grad():
        centres = below(next_bits(shape, x), gamma).to(x.dtype)
        blocks = F.max_pool2d(centres, (tall, wide), stride=1, padding=(tall // 2, wide // 2))
        blocks = blocks[..., (tall + 1) % 2 :, (wide + 1) % 2 :]  # an even size gives one row and column too many
        keep = 1 - blocks
        if layer.with_noise:
            noise = normal(next_bits(shape, x), x.dtype) * blocks
        elif layer.scale_by_keep:
            keep /= keep.mean((1, 2, 3), keepdim=True).clamp(min=1e-7)
    return x * keep + noise if layer.with_noise else x * keep


def _fill(blank: Tensor, numbers: Tensor) -> Tensor:
    with torch.no_grad():
        return blank.copy_(numbers)


def uniform_(next_bits: NextBits, blank: Tensor, low: float = 0.0, high: float = 1.0) -> Tensor:
    numbers = uniform_from_bits(next_bits(blank.shape, blank), blank.dtype)
    return _fill(blank, numbers * (high - low) + low)


def normal_(next_bits: NextBits, blank: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor:
    numbers = normal(next_bits(blank.shape, blank), blank.dtype)
    return _fill(blank, numbers * std + mean)


def bernoulli_(next_bits: NextBits, blank: Tensor, p: float | Tensor = 0.5) -> Tensor:
    bits = next_bits(blank.shape, blank)
    return _fill(blank, uniform_from_bits(bits, torch.float32) < p if isinstance(p, Tensor) else below(bits, p))


def bernoulli(next_bits: NextBits, input: Tensor, p: float | None = None) -> Tensor:
    return bernoulli_(next_bits, torch.empty_like(input), input if p is None else p)


def _keyed_random(fill: Callable[..., Tensor], blank: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A function that makes a tensor as `blank` does, and fills it with random numbers."""
    return lambda next_bits, *args, **options: fill(next_bits, blank(*args, **options))


KEYED: dict[Any, Callable[..., Any]] = {
    F.dropout: dropout,
    torch.dropout: dropout,
    torch.dropout_: lambda next_bits, input, p, training: dropout(next_bits, input, p, training, inplace=True),
    F.dropout1d: feature_dropout,
    F.dropout2d: feature_dropout,
    F.dropout3d: feature_dropout,
    torch.feature_dropout: feature_dropout,
    F.multi_head_attention_forward: multi_head_attention_forward,
    F.scaled_dot_product_attention: scaled_dot_product_attention,
    torch.Tensor.uniform_: uniform_,
    torch.Tensor.normal_: normal_,
    torch.Tensor.bernoulli_: bernoulli_,
    torch.Tensor.bernoulli: bernoulli,
    torch.bernoulli: bernoulli,
    torch.rand: _keyed_random(uniform_, torch.empty),
    torch.rand_like: _keyed_random(uniform_, torch.empty_like),
    torch.randn: _keyed_random(normal_, torch.empty),
    torch.randn_like: _keyed_random(normal_, torch.empty_like),
}
