"""Composing the config of a job with Hydra, and turning it into plain values."""

from __future__ import annotations

import dataclasses
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from textwrap import TextWrapper
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lockstep.config import hydra_policy, messages
from lockstep.config.commands import program_name
from lockstep.config.invocation import ConfigFiles, Invocation
from lockstep.config.messages import UNEXPECTED, check_word, sentence, translate, unreadable
from lockstep.config.own_hydra import own_hydra
from lockstep.config.schema import CONF, GROUPS, Job
from lockstep.core.errors import InputError
from lockstep.core.fields import leaves

# The keys of a job that are no groups.
VALUES = {field.name for field in dataclasses.fields(Job)} - {*GROUPS}


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


def of_sweep(composed: DictConfig) -> dict[str, Any]:
    """The config of a job that a sweep has composed, as plain values; the name of a job refers to Hydra's choices."""
    HydraConfig.instance().cfg = composed  # type: ignore[assignment]  # `set_config` copies it, which takes 3 ms
    return to_dict(composed)


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


def recompose(stored: Sequence[str], overrides: Sequence[str], configs: ConfigFiles) -> dict[str, Any]:
    """The config of an earlier command, composed from `configs` with its `stored` overrides, then `overrides`.

    Later overrides win. Hydra's own config is then that of this composition: see `of_hydra`.

    Raises:
        InputError: a stored override is one for Hydra itself; a run folder keeps no such override.
    """
    for text in stored:
        check_word(text)
        if hydra_policy.is_of_hydra(text):
            raise InputError(f"the run keeps the override {text!r}, expected keys of a job; remove it")
    config = _compose(configs.name, [*configs.searchpath, *stored, *overrides], with_hydra=True)
    HydraConfig.instance().set_config(config)  # values refer to the choices of the run, not of the present command
    return to_dict(config)


def of_hydra() -> str:
    """Hydra's own config of the newest composition, as YAML. Its choices say which options a job has."""
    return OmegaConf.to_yaml(HydraConfig.instance().cfg)


def fitting(stored: Sequence[str], overrides: Sequence[str], configs: ConfigFiles) -> list[str]:
    """The `stored` overrides that still apply when `overrides` choose other options of groups.

    A key that both options have keeps its value. What only the earlier option has is left out, and so is the removal
    of a key that `overrides` set.
    """
    keys = {text: _keys_set(text) for text in (*stored, *overrides)}
    chosen = [text for text in overrides if not keys[text]]
    if not chosen:
        return [*stored]
    choices = [*configs.searchpath, *(text for text in stored if not keys[text])]
    before, after = (
        {key for key, _ in leaves(OmegaConf.to_container(_compose(configs.name, words), resolve=False))}  # type: ignore[arg-type]
        for words in (choices, [*choices, *chosen])
    )
    gone = tuple(f"{key}." for key in before - after)
    removals = {f"~{messages.key_of(text)}" for text in overrides}
    return [
        text
        for text in stored
        if text.partition("=")[0] not in removals and not any(f"{key}.".startswith(gone) for key in keys[text])
    ]


def _keys_set(text: str) -> list[str]:
    """The keys of the values that an override sets or removes; empty if it chooses an option of a group."""
    parsed = OverridesParser.create().parse_override(text)
    key, value = parsed.key_or_group, parsed.value()
    is_value = isinstance(value, dict) or "." in key or key in VALUES
    return [name for name, _ in leaves({key: value})] if is_value else []


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
    with _composed(overrides) as values:
        yield values, Invocation.current()


def composed(overrides: list[str]) -> dict[str, Any]:
    with _composed(overrides) as values:
        return values


@contextmanager
def _composed(overrides: list[str]) -> Iterator[dict[str, Any]]:
    with composing():
        for word in overrides:
            check_word(word)
        config = _compose("config", overrides, with_hydra=True)
        if config.hydra.mode == RunMode.MULTIRUN:
            raise InputError(
                "hydra.mode=MULTIRUN asks for a sweep, expected one job; a sweep is `lockstep train -m ...`"
            )
        HydraConfig.instance().set_config(config)  # the default name of a job refers to Hydra's choices
        yield to_dict(config)
