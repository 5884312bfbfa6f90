"""timm's published weights: read from the caches of the libraries, or refused with one sentence."""

import io
import re
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import timm
import torch
from huggingface_hub import constants
from huggingface_hub.errors import EntryNotFoundError
from safetensors.torch import save_file
from timm.models import adapt_input_conv

import lockstep
from helpers import records, train_here
from lockstep.core.errors import InputError
from lockstep.core.fields import INTERPOLATIONS
from lockstep.models import Timm, zoo

NAME = "resnet18.a1_in1k"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Empty caches of both libraries, and an address on which nothing listens."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{unused.getsockname()[1]}")
        monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "torch"))
        for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.delenv(name, raising=False)
        yield tmp_path


def put_in_hub(cache: Path, name: str) -> dict[str, torch.Tensor]:
    """Put weights into the cache of the hub: a blob, a snapshot that links to it, and a reference to the snapshot."""
    torch.manual_seed(3)
    weights = timm.create_model(name).state_dict()
    repository = cache / "hub" / f"models--{timm.get_pretrained_cfg(name).hf_hub_id.replace('/', '--')}"
    snapshot = repository / "snapshots" / "0123abcd"
    for folder in (repository / "blobs", repository / "refs", snapshot):
        folder.mkdir(parents=True)
    save_file(weights, repository / "blobs" / "f00d")
    (repository / "refs" / "main").write_text("0123abcd")
    (snapshot / "model.safetensors").symlink_to("../../blobs/f00d")
    return weights


def test_weights_in_the_cache_of_the_hub_need_no_network(cache: Path) -> None:
    weights = put_in_hub(cache, NAME)
    option = Timm(name=NAME, pretrained=True)
    option.prepare()
    model = option.build(7, (1, 32, 32)).state_dict()
    assert torch.equal(model["layer4.1.conv2.weight"], weights["layer4.1.conv2.weight"])
    assert torch.equal(model["conv1.weight"], weights["conv1.weight"].sum(1, keepdim=True))
    assert model["fc.weight"].shape == (7, 512)
    bands = option.build(7, (5, 32, 32)).state_dict()["conv1.weight"]
    assert torch.equal(bands, adapt_input_conv(5, weights["conv1.weight"]))


@pytest.mark.parametrize(
    ("pretrained", "offline", "says"),
    [(True, True, "HF_HUB_OFFLINE is set"), (True, False, "127.0.0.1: "), ("auto", True, "HF_HUB_OFFLINE is set")],
)
def test_unavailable_weights_are_one_sentence_at_once(
    cache: Path, monkeypatch: pytest.MonkeyPatch, pretrained: bool | str, offline: bool, says: str
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    began = time.monotonic()
    with pytest.raises(InputError, match=f"are not in the cache of this machine.*{says}.*init_from=FILE.safetensors"):
        Timm(name=NAME, pretrained=pretrained).prepare()
    assert time.monotonic() - began < 20  # with its retries the hub takes 50 s


@pytest.mark.slow
def test_a_resume_and_inference_need_no_published_weights(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(cache)  # `outputs/latest` is written there
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    name = "test_resnet.r160_in1k"
    data = ("dataset=fake", "dataset.classes=3", "dataset.size=32", "dataset.examples=8", "batch=4")
    start = (*data, f"model={name}", "model.pretrained=true", "input.interpolation=bilinear")
    put_in_hub(cache, name)
    run = train_here(cache / "run", *start, "steps=1")
    tuned = train_here(cache / "tuned", *data, f"model={name}", f"init_from={run.path}", "steps=1")
    shutil.rmtree(cache / "hub")
    for again, gone in ((run, ()), (tuned, (run.path,))):
        for folder in gone:
            shutil.rmtree(folder)
        lockstep.train([f"resume={again.path}", "steps=2"])
        assert [line["step"] for line in records(again) if "loss/train" in line] == [1, 2]
        assert len(lockstep.load(again.path, device="cpu").names) == 3


def test_weights_of_an_address_are_found_in_the_cache_of_torch(cache: Path) -> None:
    name = next(candidate for candidate in timm.list_pretrained() if not timm.get_pretrained_cfg(candidate).hf_hub_id)
    facts = timm.get_pretrained_cfg(name)
    file = cache / "torch" / "checkpoints" / facts.url.rpartition("/")[2]
    file.parent.mkdir(parents=True)
    file.touch()
    assert zoo.published_weights(name) == {"file": str(file), "custom_load": bool(facts.custom_load)}


@pytest.mark.parametrize(
    ("name", "shape", "size"),
    [("vit_tiny_patch16_224", (3, 8, 8), 224), ("inception_v3", (3, 32, 32), 299), ("levit_128s", (1, 8, 8), 224)],
)
def test_a_model_that_cannot_take_images_says_which_it_can(name: str, shape: tuple[int, int, int], size: int) -> None:
    with pytest.raises(
        InputError, match=rf"model={name} cannot be built for images .*use dataset\.input_size={size}"
    ):
        Timm(name=name).build(10, shape)


def test_all_weights_of_timm_are_evaluated_on_a_part_of_a_stored_image() -> None:
    inputs = {name: Timm(name=name).trained_input() for name in timm.list_pretrained()}
    crops = {name: trained.eval_crop for name, trained in inputs.items() if trained is not None}
    assert len(crops) > 1000
    assert {name: crop for name, crop in crops.items() if not 0.5 < crop <= 1} == {}
    assert crops["volo_d5_512.sail_in1k"] == 1, "of 1.15"
    assert {trained.interpolation for trained in inputs.values() if trained is not None} == {*INTERPOLATIONS}
    for name, trained in inputs.items():
        cfg = timm.get_pretrained_cfg(name)
        assert trained is not None, name
        assert (trained.input_shape, trained.mean, trained.std) == (cfg.input_size, cfg.mean, cfg.std), name
        assert trained.eval_crop == min(1.0, cfg.crop_pct), name
        assert trained.interpolation == (cfg.interpolation if cfg.interpolation in INTERPOLATIONS else "bilinear")


def test_weights_of_a_revision_are_not_those_of_another(cache: Path) -> None:
    repository = cache / "hub" / "models--mine--net"
    for revision in ("main", "v2"):
        (snapshot := repository / "snapshots" / f"of_{revision}").mkdir(parents=True)
        (snapshot / "model.safetensors").touch()
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / revision).write_text(f"of_{revision}")
    for name, revision in (("mine/net", "main"), ("mine/net@v2", "v2"), ("mine/net@main", "main")):
        facts = SimpleNamespace(hf_hub_id=name, hf_hub_filename=None, url="")
        assert zoo._of_hub(facts, cached=True)["file"].endswith(f"of_{revision}/model.safetensors")


def facts(**own: Any) -> SimpleNamespace:
    """What timm knows of published weights."""
    return SimpleNamespace(**{"hf_hub_id": None, "hf_hub_filename": None, "url": "", "custom_load": False, **own})


def in_hub(cache: Path, *names: str) -> Path:
    """Empty files in the cache of the hub for `mine/net`; their folder."""
    repository = cache / "hub" / "models--mine--net"
    for folder in (snapshot := repository / "snapshots" / "s", repository / "refs"):
        folder.mkdir(parents=True, exist_ok=True)
    (repository / "refs" / "main").write_text("s")
    for name in names:
        (snapshot / name).touch()
    return snapshot


def in_torch(cache: Path, name: str) -> str:
    """An empty file in the cache of torch."""
    (folder := cache / "torch" / "checkpoints").mkdir(parents=True, exist_ok=True)
    (folder / name).touch()
    return str(folder / name)


def test_of_a_repository_come_safe_weights_or_else_those_that_it_has(cache: Path) -> None:
    own, usual = facts(hf_hub_id="mine/net", hf_hub_filename="own.bin"), facts(hf_hub_id="mine/net")
    for name, of in (("pytorch_model.bin", usual), ("model.safetensors", usual), ("own.bin", own)):
        with pytest.raises(FileNotFoundError):
            zoo._of_hub(own, cached=True)
        folder = in_hub(cache, name)
        assert zoo._of_hub(of, cached=True) == {"file": str(folder / name), "custom_load": False}


def test_weights_are_looked_for_in_the_hub_and_then_at_their_address(cache: Path) -> None:
    both, address = (
        facts(hf_hub_id="mine/net", url="https://h/a.npz?v=1/2", custom_load=True),
        facts(url="https://h/b"),
    )
    assert zoo._cached(both) is zoo._cached(address) is zoo._cached(facts()) is None
    assert zoo._cached(both) is None
    file = in_torch(cache, "a.npz")
    assert zoo._cached(both) == {"file": file, "custom_load": True}
    assert zoo._cached(address) is None
    folder = in_hub(cache, "model.safetensors")
    assert zoo._cached(both) == {"file": str(folder / "model.safetensors"), "custom_load": False}


@pytest.mark.parametrize("offline", [False, True])
def test_only_the_hub_is_barred_where_it_is_offline(
    cache: Path, monkeypatch: pytest.MonkeyPatch, offline: bool
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    monkeypatch.setattr(zoo, "unreachable", "{} is far".format)
    both = facts(hf_hub_id="mine/net", url="https://h/a")
    hub = constants.ENDPOINT
    assert zoo._barred(both) == ("HF_HUB_OFFLINE is set" if offline else f"{hub} is far")
    assert zoo._barred(facts(url="https://h/a")) == "https://h/a is far"
    begin = "the weights of net are not in the cache of this machine, and cannot be fetched from"
    assert zoo._not_here(both, "net", "why") == f"{begin} mine/net of {hub} (why)"
    assert zoo._not_here(facts(url="https://h/a"), "net", "why") == f"{begin} https://h/a (why)"


def test_weights_within_reach_are_fetched_and_others_told_with_the_reason(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fetch(url: str, file: str, **options: Any) -> None:
        fetched.append(url)
        if "odd" in url:
            raise RuntimeError("invalid hash\nof a file")
        Path(file).touch()

    def of_hub(cfg: Any, *, cached: bool) -> dict[str, Any]:
        if cached:
            raise EntryNotFoundError("gone")
        return {"file": "of the hub"}

    fetched: list[str] = []
    reasons = dict.fromkeys(("https://h/a.pth", "https://h/odd.pth", "hub"), "")
    known = {name: facts(url=name) for name in reasons} | {"hub": facts(hf_hub_id="mine/net")}
    monkeypatch.setattr(zoo, "_published", known.get)
    monkeypatch.setattr(zoo, "_of_hub", of_hub)
    monkeypatch.setattr(zoo, "_barred", lambda cfg: reasons[cfg.url or "hub"])
    monkeypatch.setattr(torch.hub, "download_url_to_file", fetch)
    assert zoo.published_weights("hub") == {"file": "of the hub"}
    for _ in range(2):  # the second time it is in the cache
        weights = zoo.published_weights("https://h/a.pth")
        assert weights == {"file": str(cache / "torch" / "checkpoints" / "a.pth"), "custom_load": False}
    with pytest.raises(
        InputError, match=r"^model.pretrained: the weights of https://h/odd.pth .* \(invalid hash\); use"
    ):
        zoo.published_weights("https://h/odd.pth")
    assert fetched == ["https://h/a.pth", "https://h/odd.pth"]
    reasons |= dict.fromkeys(reasons, "far away")
    for name in ("https://h/odd.pth", "hub"):
        with pytest.raises(InputError, match=r"\(far away\)"):
            zoo.published_weights(name)
    assert len(fetched) == 2


def test_weights_are_missing_if_they_are_neither_here_nor_within_reach(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    none = next(name for name in timm.list_models() if not timm.is_model_pretrained(name))
    reasons = ["", "far away"]
    monkeypatch.setattr(zoo, "_barred", lambda cfg: reasons[0])
    for reason, sentence in (("", ""), ("far away", r"the weights of resnet18\.a1_in1k are not .* \(far away\)")):
        reasons[0] = reason
        zoo.missing_weights.cache_clear()
        assert re.fullmatch(sentence, Timm(name=NAME).missing_weights())
        assert zoo.missing_weights(none) == f"timm has no published weights for {none}"
        with pytest.raises(InputError, match=f"model={none}: timm has no published weights for it; remove model.pre"):
            zoo.published_weights(none)
        Timm(name=none).prepare()  # without its weights
        assert Timm(name=none).trained_input() is None
    put_in_hub(cache, NAME)
    zoo.missing_weights.cache_clear()
    assert zoo.missing_weights(NAME) == ""
    zoo.missing_weights.cache_clear()


@pytest.mark.parametrize("code", [404, 503])
def test_a_host_that_answers_anything_is_within_reach_and_is_asked_for_nothing(cache: Path, code: int) -> None:
    class Refuses(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_error(code)

        def log_message(self, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Refuses) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        address = f"http://127.0.0.1:{server.server_port}/weights?key=1"
        assert zoo.unreachable(address) == ""
        thread.join()
    assert re.fullmatch(r"127\.0\.0\.1: \[Errno \d+\] Connection refused", zoo.unreachable(address))


def test_a_host_has_a_few_seconds_to_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = io.BytesIO()
    monkeypatch.setattr(zoo, "urlopen", lambda request, timeout: answer if timeout == 5 else None)
    assert zoo.unreachable("http://h/a") == ""
    assert answer.closed
