"""Composing the config of a job with Hydra, and turning it into plain values."""

from __future__ import annotations

import dataclasses
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from textwrap import TextWrapper
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lockstep.config import hydra_policy, messages
from lockstep.config.commands import program_name
from lockstep.config.invocation import ConfigFiles, Invocation
from lockstep.config.messages import UNEXPECTED, check_word, sentence, translate, unreadable
from lockstep.config.own_hydra import own_hydra
from lockstep.config.schema import CONF, Job
from lockstep.core.errors import InputError


def showed_help() -> bool:
    """Show the help if the command line asks for it. Hydra would first look through all config groups (0.3 s)."""
    wants_help = not {"-h", "--help"}.isdisjoint(sys.argv)
    if wants_help:
        text: str = yaml.safe_load((CONF / "config.yaml").read_text())["hydra"]["help"]["template"]
        columns = shutil.get_terminal_size((100, 40)).columns
        wrapper = TextWrapper(columns, subsequent_indent=" " * 14, break_long_words=False, break_on_hyphens=False)
        lines = text.replace("python train.py", program_name()).splitlines()
        sys.stdout.write("".join(f"{wrapper.fill(line)}\n" for line in lines))
    return wants_help


def to_dict(composed: DictConfig) -> dict[str, Any]:
    """The composed config of a job as plain values, every interpolation resolved.

    Raises:
        InputError: a value is missing (`???`) or an interpolation does not resolve.
    """
    job = OmegaConf.masked_copy(composed, [str(key) for key in composed if key != "hydra"])
    try:
        plain = OmegaConf.to_container(job, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise InputError(sentence(error)) from error
    except UNEXPECTED as error:
        raise unreadable(error) from error
    assert isinstance(plain, dict)
    for key in (field.name for field in dataclasses.fields(Job)):
        if key not in plain:
            raise InputError(f"{key}: a job cannot do without this key; leave out ~{key}")
        if "${" in repr(plain[key]):  # it was escaped; the ranks read the config from a file and would resolve it
            raise InputError(f"{key} has ${{ in its value, which a config reads as a reference; leave it out")
    return {str(key): value for key, value in plain.items()}


def recompose(stored: list[str], overrides: tuple[str, ...], configs: ConfigFiles) -> dict[str, Any]:
    """The config of an earlier command, composed from `configs` with its `stored` overrides, then `overrides`.

    Later overrides win.

    Raises:
        InputError: a stored override is one for Hydra itself; a run folder keeps no such override.
    """
    for text in stored:
        check_word(text)
        if hydra_policy.is_of_hydra(text):
            raise InputError(f"the run keeps the override {text!r}, expected keys of a job; remove it")
    return to_dict(_compose(configs.name, [*configs.searchpath, *stored, *overrides]))


def _compose(name: str, overrides: list[str], *, with_hydra: bool = False) -> DictConfig:
    try:
        return compose(name, overrides=overrides, return_hydra_config=with_hydra)
    except Exception as error:
        raise translate(error) or messages.translate_before_job(error) or error from error


@contextmanager
def composing() -> Iterator[None]:
    """A context in which configs can be composed without Hydra's `main`."""
    with own_hydra(), initialize_config_dir(str(CONF)):
        yield


@contextmanager
def invoked(overrides: list[str]) -> Iterator[tuple[dict[str, Any], Invocation]]:
    """The config that the command line `overrides` would compose, as plain values, and this command, without `main`.

    In the context, further configs can be composed, such as those of the run that the command resumes.

    Raises:
        InputError: an override does not fit.
    """
    with composing():
        for word in overrides:
            check_word(word)
        config = _compose("config", overrides, with_hydra=True)
        if config.hydra.mode == RunMode.MULTIRUN:
            raise InputError(
                "hydra.mode=MULTIRUN asks for a sweep, expected one job; a sweep is `lockstep train -m ...`"
            )
        HydraConfig.instance().set_config(config)  # the default name of a job refers to Hydra's choices
        yield to_dict(config), Invocation.current()


def composed(overrides: list[str]) -> dict[str, Any]:
    """The values of `invoked` alone."""
    with invoked(overrides) as (values, _):
        return values
