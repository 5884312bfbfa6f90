"""The number formats: the devices they need, the types they compute in, and whether they scale the loss."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from lockstep.core.errors import InputError
from lockstep.precision import BF16, FP16, FP32, FP64, TF32, BF16Pure
from lockstep.runtime.guest import NUMBER_FORMATS, guest

CPU = torch.device("cpu")


@pytest.fixture
def _matmul() -> Iterator[None]:
    """Restore the precision of matrix products after the test."""
    before, cudnn = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    yield
    torch.set_float32_matmul_precision(before)
    torch.backends.cudnn.allow_tf32 = cudnn


def test_the_formats_of_gpus_are_refused_on_the_cpu() -> None:
    needs = "needs a CUDA GPU, but device is cpu; use precision"
    with pytest.raises(InputError, match=f"precision=tf32 {needs}=fp32"):
        TF32().check("cpu")
    with pytest.raises(InputError, match=f"precision=fp16 {needs}=bf16 or precision=fp32"):
        FP16().check("cpu")


def test_a_gpu_without_bf16_is_told_what_to_use(monkeypatch: pytest.MonkeyPatch) -> None:
    # A GPU older than Ampere: torch reports bf16 as supported there, because it can emulate it.
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    with pytest.raises(InputError, match="use precision=fp16 or precision=fp32"):
        BF16().check("cuda")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    BF16().check("cuda")


@pytest.mark.parametrize(
    ("precision", "storage", "products"),
    [
        (FP32(), torch.float32, torch.float32),
        (TF32(), torch.float32, torch.float32),
        (FP64(), torch.float64, torch.float64),
        (BF16(), torch.float32, torch.bfloat16),
        (BF16Pure(), torch.bfloat16, torch.bfloat16),
        (FP16(), torch.float32, torch.float16),
    ],
    ids=repr,
)
def test_products_and_parameters_have_the_formats_of_the_precision(
    precision: FP32, storage: torch.dtype, products: torch.dtype
) -> None:
    assert (precision.storage, precision.dtype) == (storage, products)
    layer = precision.convert(nn.Linear(4, 4))
    with precision.autocast(CPU):
        assert layer(torch.ones(2, 4, dtype=storage)).dtype == products
    assert layer.weight.dtype == storage
    wide = torch.float64 if storage == torch.float64 else torch.float32
    norms = nn.BatchNorm2d(2), nn.BatchNorm1d(2), nn.BatchNorm3d(2), nn.SyncBatchNorm(2)
    precision.convert(norms[0])
    within = precision.convert(nn.Sequential(norms[1], nn.Linear(2, 2), nn.Sequential(nn.LayerNorm(2), *norms[2:])))
    for norm in norms:
        statistics = norm.running_mean, norm.running_var
        assert {tensor.dtype for tensor in (*norm.parameters(), *statistics)} == {wide}, "statistics change by little"
    assert {tensor.dtype for layer in (within[1], within[2][0]) for tensor in layer.parameters()} == {storage}


@pytest.mark.parametrize("precision", [FP32(), FP64(), TF32(), BF16()], ids=repr)
def test_the_loss_is_scaled_by_nothing_where_no_scaler_is_needed(precision: FP32) -> None:
    scaler = precision.scaler(CPU)
    assert not scaler.is_enabled()
    assert scaler.scale(torch.tensor(3.0)) == 3
    scaler = FP16().scaler(CPU)
    assert scaler.is_enabled()
    assert scaler.scale(torch.tensor(1.0)) == scaler.get_scale() > 1


@pytest.mark.usefixtures("_matmul")
def test_only_tf32_shortens_the_products_of_float32() -> None:
    for precision, name, cudnn in ((TF32(), "high", True), (FP32(), "highest", False), (BF16(), "highest", False)):
        precision.configure()
        assert torch.get_float32_matmul_precision() == name
        assert torch.backends.cudnn.allow_tf32 is cudnn


@pytest.mark.parametrize("number", range(len(NUMBER_FORMATS)))
@pytest.mark.parametrize("chosen", ["ieee", "tf32"])
def test_a_program_with_the_newer_number_formats_has_them_again_after_a_call(number: int, chosen: str) -> None:
    with guest():
        NUMBER_FORMATS[number].fp32_precision = chosen
        before = [part.fp32_precision for part in NUMBER_FORMATS]
        for precision in (TF32(), FP32()):
            with guest():
                precision.configure()
            assert [part.fp32_precision for part in NUMBER_FORMATS] == before


def test_a_format_is_accepted_where_the_device_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: False)
    for precision in (FP32(), FP64(), BF16(), BF16Pure()):
        precision.check("cpu")
    for precision in (FP32(), FP64(), TF32(), FP16()):
        precision.check("cuda")
    with pytest.raises(InputError, match=r"^precision=bf16 is not supported by this GPU; use precision=fp16 or"):
        BF16Pure().check("cuda")


def test_sums_are_wider_than_products_but_for_float64() -> None:
    wide = {FP64: torch.float64, **dict.fromkeys((FP32, TF32, BF16, BF16Pure, FP16), torch.float32)}
    assert {precision: precision.sums for precision in wide} == wide
    assert [precision for precision in wide if precision.needs_loss_scaler] == [FP16]
    assert [precision for precision in wide if precision.matmul == "high"] == [TF32]
