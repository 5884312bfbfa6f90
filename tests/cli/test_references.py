"""A `${...}` in the line of a sweep has a value in each job: the one that plain Hydra's job of this line has."""

from __future__ import annotations

import json
import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from helpers import ROOT, command, composed, forked, train
from lockstep.core.run_dir import RunDir
from lockstep.records.ledger import Ledger

APP = """import hydra, json
from omegaconf import OmegaConf

@hydra.main(config_path=None, config_name=None)
def app(config):
    print(json.dumps(OmegaConf.to_container(config, resolve=True)))

app()
"""
LINE = (
    "batch=32,48",
    "train.eval_batch=${batch}",
    "train.eval_every=${.eval_batch}",
    "seed=${hydra:job.num}",
    "name=b${batch}-s${seed}-${hydra:job.num}",
    "data_root=${batch},'a ${name}'",
    "cost={usd_per_gpu_hour: ${batch}}",
)
SHORT = ("model=linear", "device=cpu", "steps=1", "logger=jsonl", "telemetry.report=never", "launcher.threads=1")
BASIC = ("hydra/launcher=basic", "hydra/sweeper=basic")
OPTUNA = ("hydra/sweeper=optuna", "hydra.sweeper.n_trials=5", "hydra.sweeper.sampler=random")


def values(config: dict[str, Any]) -> str:
    """The keys of a job that the line sets, with texts as they were typed."""
    chosen = {key: config[key] for key in ("batch", "name", "data_root", "seed")}
    chosen |= {key: config["train"][key] for key in ("eval_batch", "eval_every")}
    return json.dumps({key: str(value) for key, value in chosen.items()} | {"usd": int(*config["cost"].values())})


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What plain Hydra composes of the line, without any config."""
    folder = tmp_path_factory.mktemp("plain")
    (folder / "app.py").write_text(APP)
    quiet = [f"hydra/{kind}_logging=none" for kind in ("job", "hydra")]
    done = command(sys.executable, "app.py", "-m", *(f"+{word}" for word in LINE), *quiet, cwd=folder)
    jobs = [values(json.loads(line)) for line in done.out.splitlines()]
    assert len({*jobs}) == 4, done.err
    return jobs


def sweep(root: Path, *words: str) -> list[Path]:
    """The folders of the jobs of a sweep."""
    done = train("-m", *words, *SHORT, f"output_root={root}")
    assert done.code == 0, done.err
    return sorted(path.parent for path in root.glob("sweeps/*/*/config.yaml"))


def stored(folder: Path) -> str:
    return values(yaml.safe_load(RunDir(folder).composed.read_text()))


@pytest.mark.parametrize("words", [(), BASIC, ("sweep.halving=2",)], ids=" ".join)
def test_a_job_has_the_values_that_plain_hydra_gives_it(
    tmp_path: Path, expected: list[str], words: tuple[str, ...]
) -> None:
    jobs = sweep(tmp_path, *LINE, *words)
    assert [stored(job) for job in jobs] == expected
    for job in jobs:  # the words in its folder mean the same to a process that knows no sweep
        words_alone = yaml.safe_load(RunDir(job).overrides.read_text())
        assert "${" not in str(words_alone)
        assert values(composed(*words_alone)) == stored(job)


def test_a_job_of_a_search_and_of_params_has_the_values_of_its_draw(tmp_path: Path, expected: list[str]) -> None:
    params = dict(word.split("=", 1) for word in LINE[:4])
    params["train.eval_batch"] = r"\${batch}"  # as one writes it for Hydra's own sweeper, which resolves the others
    (tmp_path / "experiment").mkdir()
    recipe = yaml.safe_dump({"hydra": {"sweeper": {"params": params}}})
    (tmp_path / "experiment" / "swept.yaml").write_text(f"# @package _global_\n{recipe}")
    jobs = sweep(tmp_path, "--config-dir", str(tmp_path), "experiment=swept", *LINE[4:], *OPTUNA)
    numbered = [stored(job) for job in jobs]
    unnumbered = [re.sub(r"-s\d-\d|\"seed\": \"\d\"", "", text) for text in (*numbered, *expected)]
    assert len(jobs) >= 2
    assert {*unnumbered[: len(jobs)]} <= {*unnumbered[len(jobs) :]}
    assert all(f"-s{number}-{number}" in text for number, text in enumerate(numbered))


def test_each_job_of_an_array_has_its_values_in_the_script(tmp_path: Path, expected: list[str]) -> None:
    done = train("-m", *LINE, *SHORT, "launcher=slurm", "launcher.dry_run=true", f"output_root={tmp_path}")
    lines = [shlex.split(line) for line in done.out.splitlines() if "train.py" in line]
    jobs = [composed(*words[words.index(str(ROOT / "train.py")) + 1 : -1]) for words in lines]
    assert [values(job) for job in jobs] == expected, done.err


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_a_task_of_ray_has_the_values_of_its_job(tmp_path: Path, expected: list[str]) -> None:
    pytest.importorskip("ray")
    jobs = sweep(tmp_path, "batch=32", *LINE[1:], "hydra/launcher=ray")
    assert [stored(job) for job in jobs] == expected[:2]


def test_a_line_typed_again_finds_its_jobs_and_those_of_a_version_that_resolved_its_words(tmp_path: Path) -> None:
    jobs = sweep(tmp_path, "batch=32,48", "train.eval_batch=${batch}")
    ledger = Ledger(jobs[0].parent)
    first = ledger.records()[0]
    ledger.write(replace(first, overrides=tuple(word.replace("${batch}", "32") for word in first.overrides)))
    assert sweep(tmp_path, "batch=48,32,8", "train.eval_batch=${batch}")[:2] == jobs
    assert [record.started for record in ledger.records()][:1] == [first.started]
    assert [composed(*record.overrides)["train"]["eval_batch"] for record in ledger.records()] == [32, 48, 8]


def test_a_reference_to_the_seed_makes_no_other_setting(tmp_path: Path) -> None:
    words = ("optimizer.lr=0.1,0.2", "seed=1,2", "train.eval_batch=${seed}", "dataset.val_share=0.${seed}")
    folder = sweep(tmp_path, *words)[0].parent
    rows = json.loads(forked("lockstep", "compare", str(folder), "--json").out)
    assert [(row["done"], row.get("train.eval_batch")) for row in rows] == [(2, None), (2, None)]


@pytest.mark.parametrize("word", ["output_root=ROOT/${seed}", "hydra.sweep.dir=ROOT/${ seed }"])
def test_what_all_jobs_share_refers_to_no_key_that_varies(tmp_path: Path, word: str) -> None:
    word = word.replace("ROOT", str(tmp_path))
    done = train("-m", "seed=1,2", *SHORT, f"output_root={tmp_path}", word)
    assert (done.code, [*tmp_path.iterdir()]) == (2, [])
    assert done.err == f"lockstep: {word}: all jobs of a sweep share it, and seed varies; give it one value\n"


def test_a_reference_to_a_group_is_answered_with_the_one_to_its_option(tmp_path: Path) -> None:
    words = ("-m", "model=linear,digitnet", *SHORT[1:], f"output_root={tmp_path}")
    refused = train(*words, "name=${model}")
    assert "name refers to all keys of model, expected a text" in refused.err
    (reference,) = re.findall(r"is name=(\S+)$", refused.err, re.MULTILINE)
    script = train(*words, f"name={reference}", "launcher=slurm", "launcher.dry_run=true").out
    assert "name=linear" in script
    assert "name=digitnet" in script
