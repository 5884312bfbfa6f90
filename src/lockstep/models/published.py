"""The files of timm's published weights: taken from a cache, or else fetched from the network.

timm asks the network before it looks into its cache, and repeats that for most of a minute. Here the cache comes
first, and the network is tried once, for a few seconds.
"""

import functools
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import torch

from lockstep.core.errors import InputError

REACH_S = 5.0  # how long the network may take to answer


def published_weights(name: str) -> dict[str, Any]:
    """The weights of timm's model `name`, fetched if they are not in a cache.

    Returns entries of timm's `pretrained_cfg`: the file, and whether it is in a format of the model's class.

    Raises:
        InputError: timm has no weights for the model, or they are not in a cache and cannot be fetched.
    """
    import timm
    from huggingface_hub import constants
    from huggingface_hub.errors import EntryNotFoundError

    cfg = timm.get_pretrained_cfg(name)
    if cfg is None or not (cfg.hf_hub_id or cfg.url):
        raise InputError(f"model={name}: timm has no published weights for it; leave out model.pretrained")
    url = str(cfg.url or "")
    file = Path(torch.hub.get_dir(), "checkpoints", Path(urlsplit(url).path).name)
    of_url = {"file": str(file), "custom_load": bool(cfg.custom_load)}
    if cfg.hf_hub_id:
        with suppress(EntryNotFoundError):
            return _of_hub(cfg, cached=True)
    if url and file.is_file():
        return of_url
    address = constants.ENDPOINT if cfg.hf_hub_id else url
    reason = "HF_HUB_OFFLINE is set" if cfg.hf_hub_id and constants.is_offline_mode() else _unreachable(address)
    try:
        if not reason and cfg.hf_hub_id:
            return _of_hub(cfg, cached=False)
        if not reason:
            file.parent.mkdir(parents=True, exist_ok=True)
            torch.hub.download_url_to_file(url, str(file), progress=False)
            return of_url
    except Exception as error:  # the libraries raise all kinds of errors
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    place = f"{cfg.hf_hub_id} of {address}" if cfg.hf_hub_id else address
    raise InputError(
        f"model.pretrained: the weights of {name} are not in the cache of this machine, and cannot be fetched from "
        f"{place} ({reason}); use init_from=FILE.safetensors for a file that you have, or model.pretrained=false"
    )


def _of_hub(cfg: Any, *, cached: bool) -> dict[str, Any]:
    """The best file of weights in a repository of the hub; if `cached`, only from this machine."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError
    from timm.models import _hub

    repository, _, revision = cfg.hf_hub_id.partition("@")
    name = cfg.hf_hub_filename or _hub.HF_WEIGHTS_NAME
    download = functools.partial(hf_hub_download, repository, revision=revision or None, local_files_only=cached)
    for safe_name in _hub._get_safe_alternatives(name):
        with suppress(EntryNotFoundError):
            return {"file": download(safe_name), "custom_load": False}
    return {"file": download(name), "custom_load": False}


def _unreachable(address: str) -> str:
    """Why no connection to `address`, or to the proxy in front of it, can be made; empty if one can."""
    parts = urlsplit(address)
    proxy = urlsplit(getproxies().get(parts.scheme, ""))
    host, port = (proxy.hostname, proxy.port) if proxy.hostname else (parts.hostname, parts.port)
    port = port or (443 if parts.scheme == "https" else 80)
    try:
        socket.create_connection((host or "", port), timeout=REACH_S).close()
    except OSError as error:
        return f"{host}: {error.strerror or error}"
    return ""
