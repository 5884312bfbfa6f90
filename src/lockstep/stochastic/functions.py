"""torch's functions that draw random numbers, with keyed ones in their place.

`KeyedFunctions` is active while a module that draws runs its forward, and hands the calls over. Shapes, scales and
arguments are those of torch's own functions; what has no entry here is left to torch, and noticed (`convert`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from lockstep.stochastic.keys import Site
from lockstep.stochastic.numbers import below, normal, uniform

# Gives the site of the next draw, which is of this shape.
Take = Callable[[torch.Size], Site]


class KeyedFunctions(TorchFunctionMode):
    """While it is entered, the functions of `KEYED` draw from the sites that `take` gives."""

    def __init__(self, take: Take) -> None:
        super().__init__()
        self.take = take

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        keyed = KEYED.get(func)
        if keyed is None or (kwargs and kwargs.get("generator") is not None):
            return func(*args, **(kwargs or {}))
        return keyed(self.take, *args, **(kwargs or {}))


def _kept(take: Take, like: Tensor, shape: torch.Size, drop: float) -> Tensor:
    """0 with probability `drop`, else 1: of `shape` and the dtype of `like`."""
    return below(take(shape).bits(shape, like), 1 - drop).to(like.dtype)


def _dropped(take: Take, input: Tensor, shape: torch.Size, p: float, inplace: bool) -> Tensor:
    kept = _kept(take, input, shape, p)
    # The scale is not rounded to the input's dtype: in bfloat16 that would move every mean by up to 0.4 %.
    return (input.mul_(kept) if inplace else input * kept).mul_(1 / (1 - p) if p < 1 else 1.0)


def _channels(input: Tensor) -> torch.Size:
    """The shape of one number for each channel of each example."""
    return torch.Size([*input.shape[:2], *[1] * (input.dim() - 2)])


def dropout(take: Take, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Srivastava et al. 2014."""
    if not training or p == 0:
        return input
    return _dropped(take, input, input.shape, p, inplace)


def feature_dropout(
    take: Take, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    """Whole channels (Tompson et al. 2015)."""
    if not training or p == 0:
        return input
    return _dropped(take, input, _channels(input), p, inplace)


# What SELU tends to for very negative inputs (Klambauer et al. 2017).
_ALPHA = -1.7580993408473766


def _alpha(take: Take, input: Tensor, shape: torch.Size, p: float, inplace: bool) -> Tensor:
    scale = 1 / math.sqrt((_ALPHA**2 * p + 1) * (1 - p)) if p < 1 else 0.0
    kept = _kept(take, input, shape, p)
    offset = (1 - kept) * (_ALPHA * scale) - _ALPHA * scale * p
    return input.mul_(kept * scale).add_(offset) if inplace else input * (kept * scale) + offset


def alpha_dropout(take: Take, input: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False) -> Tensor:
    """Keeps mean and variance behind SELU (Klambauer et al. 2017)."""
    return _alpha(take, input, input.shape, p, inplace) if training and p else input


def feature_alpha_dropout(
    take: Take, input: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False
) -> Tensor:
    """The same for whole channels."""
    return _alpha(take, input, _channels(input), p, inplace) if training and p else input


def rrelu(
    take: Take,
    input: Tensor,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
    inplace: bool = False,
) -> Tensor:
    """Negative inputs times a random slope (Xu et al. 2015)."""
    if not training:
        return F.rrelu(input, lower, upper, training, inplace)
    slope = uniform(take(input.shape).bits(input.shape, input), input.dtype) * (upper - lower) + lower
    factor = torch.where(input < 0, slope, torch.ones_like(slope))
    return input.mul_(factor) if inplace else input * factor


def scaled_dot_product_attention(
    take: Take,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention whose weights are dropped. Not fused: torch's fused kernels draw for themselves."""
    if dropout_p == 0:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if enable_gqa:
        key, value = (each.repeat_interleave(query.shape[-3] // each.shape[-3], -3) for each in (key, value))
    scores = (query * (query.shape[-1] ** -0.5 if scale is None else scale)) @ key.transpose(-2, -1)
    if is_causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~seen, -math.inf)
    if attn_mask is not None:
        masked = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, -math.inf) if masked else scores + attn_mask
    return dropout(take, scores.softmax(-1), dropout_p) @ value


def multi_head_attention_forward(take: Take, *args: Any, **kwargs: Any) -> Any:
    """torch's own code, with the keyed functions where it calls those that draw.

    A mode is not entered again within a function that it was asked about, so the code gets names of its own.
    """
    names = {
        **vars(F),
        "dropout": functools.partial(dropout, take),
        "scaled_dot_product_attention": functools.partial(scaled_dot_product_attention, take),
        "has_torch_function": lambda _: False,
    }
    plain = F.multi_head_attention_forward
    assert isinstance(plain, FunctionType)
    return FunctionType(plain.__code__, names, plain.__name__, plain.__defaults__, plain.__closure__)(*args, **kwargs)


def drop_block(take: Take, layer: Any, x: Tensor) -> Tensor:
    """Blocks of pixels (Ghiasi et al. 2018), as timm's `DropBlock2d`, but for the scale of what is kept.

    That is of each example, as in the paper's algorithm 1; timm takes it over the micro-batch.
    """
    examples, channels, height, width = x.shape
    tall, wide = min(layer.block_size, height), min(layer.block_size, width)
    places = (height - tall + 1) * (width - wide + 1)
    gamma = layer.gamma_scale * layer.drop_prob * height * width / (tall * wide) / places
    shape = torch.Size([examples, 1 if layer.couple_channels else channels, height, width])
    with torch.no_grad():
        centres = below(take(shape).bits(shape, x), gamma).to(x.dtype)
        blocks = F.max_pool2d(centres, (tall, wide), stride=1, padding=(tall // 2, wide // 2))
        blocks = blocks[..., (tall + 1) % 2 :, (wide + 1) % 2 :]  # an even block gives one row and column too many
        kept = 1 - blocks
        if layer.with_noise:
            noise = normal(take(shape).bits(shape, x), x.dtype) * blocks
        elif layer.scale_by_keep:
            kept /= kept.mean((1, 2, 3), keepdim=True).clamp(min=1e-7)
    return x * kept + noise if layer.with_noise else x * kept


def _filled(blank: Tensor, numbers: Tensor) -> Tensor:
    with torch.no_grad():
        return blank.copy_(numbers)


def uniform_(take: Take, blank: Tensor, low: float = 0.0, high: float = 1.0, *, generator: None = None) -> Tensor:
    drawn = uniform(take(blank.shape).bits(blank.shape, blank), blank.dtype)
    return _filled(blank, drawn * (high - low) + low)


def normal_(take: Take, blank: Tensor, mean: float = 0.0, std: float = 1.0, *, generator: None = None) -> Tensor:
    drawn = normal(take(blank.shape).bits(blank.shape, blank), blank.dtype)
    return _filled(blank, drawn * std + mean)


def bernoulli_(take: Take, blank: Tensor, p: float | Tensor = 0.5, *, generator: None = None) -> Tensor:
    bits = take(blank.shape).bits(blank.shape, blank)
    return _filled(blank, uniform(bits, torch.float32) < p if isinstance(p, Tensor) else below(bits, p))


def bernoulli(take: Take, input: Tensor, p: float | None = None, *, generator: None = None) -> Tensor:
    return bernoulli_(take, torch.empty_like(input), input if p is None else p)


def rand(take: Take, *size: Any, **options: Any) -> Tensor:
    return uniform_(take, torch.empty(*size, **options))


def rand_like(take: Take, input: Tensor, **options: Any) -> Tensor:
    return uniform_(take, torch.empty_like(input, **options))


def randn(take: Take, *size: Any, **options: Any) -> Tensor:
    return normal_(take, torch.empty(*size, **options))


def randn_like(take: Take, input: Tensor, **options: Any) -> Tensor:
    return normal_(take, torch.empty_like(input, **options))


KEYED: dict[Any, Callable[..., Any]] = {
    F.dropout: dropout,
    torch.dropout: dropout,
    torch.dropout_: lambda take, input, p, training: dropout(take, input, p, training, inplace=True),
    F.dropout1d: feature_dropout,
    F.dropout2d: feature_dropout,
    F.dropout3d: feature_dropout,
    torch.feature_dropout: feature_dropout,
    F.alpha_dropout: alpha_dropout,
    torch.alpha_dropout: alpha_dropout,
    F.feature_alpha_dropout: feature_alpha_dropout,
    torch.feature_alpha_dropout: feature_alpha_dropout,
    F.rrelu: rrelu,
    F.multi_head_attention_forward: multi_head_attention_forward,
    F.scaled_dot_product_attention: scaled_dot_product_attention,
    torch.Tensor.uniform_: uniform_,
    torch.Tensor.normal_: normal_,
    torch.Tensor.bernoulli_: bernoulli_,
    torch.Tensor.bernoulli: bernoulli,
    torch.bernoulli: bernoulli,
    torch.rand: rand,
    torch.rand_like: rand_like,
    torch.randn: randn,
    torch.randn_like: randn_like,
}
