"""A machine that does not reach itself at 127.0.0.1: its loopback interface is off, or has an IPv6 address alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import forks
import namespaces
from helpers import forked, train_here

SENTENCE = "this machine cannot reach itself at 127.0.0.1"
RANKS = ("train.py", "steps=1", "strategy=ddp", "launcher.ranks=2")
SERVERS = ("watch", "demo")


def on_machine(addresses: str, *words: str) -> None:
    """Become a process of a new machine whose loopback interface has no addresses, or `ipv6`; run a command there."""
    namespaces._linux("unshare", namespaces.CLONE_NEWNET)
    if addresses == "ipv6":
        for line in ("ip link set lo up", "ip addr del 127.0.0.1/8 dev lo"):
            subprocess.run(line.split(), check=True)
    forks.run(sys.path, *words)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if forked(f"{__name__}:on_machine", "ipv6", "-c", "").code:
        pytest.skip("needs to make network namespaces, which this machine refuses")
    return train_here(tmp_path_factory.mktemp("run") / "run", "steps=1", "model=linear").path


@pytest.mark.parametrize("addresses", ["none", "ipv6"])
@pytest.mark.parametrize(
    "words",
    [
        RANKS,
        (*RANKS, "launcher=elastic"),
        ("lockstep", "doctor", *RANKS[1:]),
        *(("lockstep", name) for name in SERVERS),
    ],
    ids=["spawn", "elastic", "doctor", *SERVERS],
)
def test_what_needs_the_loopback_address_says_in_one_sentence_that_it_is_missing(
    tmp_path: Path, run: Path, addresses: str, words: tuple[str, ...]
) -> None:
    serves = words[1] in SERVERS
    more = (str(run), "--port", "0") if serves else (f"output_root={tmp_path}/runs",)
    done = forked(f"{__name__}:on_machine", addresses, *words, *more, cwd=tmp_path if serves else None)
    assert (done.code, "Traceback" in done.err) == (2, False), done.err
    assert SENTENCE in done.out + done.err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("addresses", ["none", "ipv6"])
def test_one_process_needs_no_loopback_address(tmp_path: Path, run: Path, addresses: str) -> None:
    folder = tmp_path / "run"
    done = forked(f"{__name__}:on_machine", addresses, "train.py", "steps=1", f"hydra.run.dir={folder}")
    assert done.code == 0, done.err
