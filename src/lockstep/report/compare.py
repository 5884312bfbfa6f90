"""One run in detail (`lockstep runs RUN`), and runs side by side with the likely causes of a difference."""

from collections import Counter
from collections.abc import Iterator, Sequence

from lockstep.config.commands import key_of, override, shell_command
from lockstep.config.options import differences, value_text
from lockstep.config.roles import role_of
from lockstep.core import log
from lockstep.core.errors import InputError, percent
from lockstep.core.fields import Role, leaves
from lockstep.core.run import SEED, Run, State
from lockstep.core.run_dir import relative
from lockstep.core.table import Column, shortened, show_rows, show_table
from lockstep.core.tags import figure_text, part_words, telling
from lockstep.records.record import directions_of
from lockstep.records.runs import (
    Row,
    check_columns,
    differing,
    existing,
    groups,
    in_names,
    is_below,
    ordered,
    read_runs,
    value_of,
)
from lockstep.records.tables import show_groups
from lockstep.telemetry.progress import format_duration, format_timestamp

OWN_CODE = "your code"  # of extensions; the causes have Lockstep's, and the commits of both, as `code`
# What may differ between two runs, the likeliest cause of another score first.
CAUSES = (OWN_CODE, "data", "config", "seed", "code", "versions", "machine", "config, to rounding")
# The facts of a checkpoint that identify the data, and the facts of `env.json` that identify the code.
DATA = ("classes", "class_names", "train", "val", "images", "labels", "input_shape", "examples")
CODE = ("git", "git_changes", "packages.lockstep", "extensions")
VERSIONS = ("packages", "python", "cuda", "cudnn", "nccl", "driver")
# What the summary says about a run, by its label.
FINDINGS = {"learning": "learning", "speed": "verdict"}


def show_run(run: Run) -> None:
    """Show what one run was, how it went, and the commands to use it."""
    facts, monitor = run.summary, run.monitor
    scores, tests = (
        ", ".join(
            figure_text(name, value)
            for name, value in telling(facts.get(key) or {}, run.classes).items()
            if value is not None and "/" not in name
        )
        for key in ("scores", "test")
    )
    best_step = f" at step {facts['best_step']:,}" if facts.get("best_step") else ""
    started = [f"started {format_timestamp(run.started)}"] if run.started else []
    duration = [f"took {format_duration(facts['seconds'])}"] if facts.get("seconds") else []
    shares = {name: share for name, share in (facts.get("time") or {}).items() if share and share >= 0.01}
    largest = sorted(shares.items(), key=lambda part: part[1], reverse=True)
    rows = {
        "run": str(relative(run.folder)),
        "state": ", ".join([run.status, *started, *duration]),
        "error": run.error,
        "overrides": " ".join(run.overrides) or "none",
        "best": f"{figure_text(monitor.name, facts['best'])}{best_step}" if facts.get("best") is not None else "",
        "scores": scores,
        "test": tests,
        "time": ", ".join(f"{part_words(name)} {percent(share)}" for name, share in largest),
        **{name: str((facts.get(key) or {}).get("sentence") or "") for name, key in FINDINGS.items()},
    }
    for label, text in rows.items():
        if text:
            log.say_row(label, shortened(text, 4) if label == "overrides" else text)
    if changes := [*differences(run.composed, run.choices)]:
        log.show("")
        heads = ("differs from the default", "value", "default")
        texts = [(key, value_text(value), value_text(usual)) for key, value, usual in changes]
        show_table([Column(head, cells) for head, cells in zip(heads, zip(*texts, strict=True), strict=True)])
    log.show("")
    for label, command in _commands(run):
        log.say_command(label, command)
    if run.state == State.damaged:
        raise InputError(run.error)


def _commands(run: Run) -> Iterator[tuple[str, str]]:
    folder = str(relative(run.path))
    if run.run_dir.weights.is_file():
        for name, more in (("evaluate", ()), ("predict", ("FILE",)), ("export", ()), ("demo", ())):
            yield name, shell_command(["lockstep", name, folder, *more])
    if run.state in (State.stopped, State.killed, State.pruned):
        yield "resume", shell_command(["lockstep", "train", override("resume", folder)])
    yield "report", shell_command(["lockstep", "report", folder])


def compare(
    paths: Sequence[str], *, by: Sequence[str], sort: str | None, form: str, columns: Sequence[str] = ()
) -> None:
    """Show the scores of runs by the keys in `by`, or else by the keys that differ, except the seed.

    `columns` are the figures to show in the place of the score and the metrics, or some of the keys.
    """
    runs, rows, damaged, lists_causes = compare_runs(paths, by=by, sort=sort, columns=columns)
    if form in ("csv", "json"):
        show_rows(rows, form)
    elif lists_causes:
        _show_causes(runs, rows, form)
    else:
        show_groups(runs, rows, columns, form=form, differences=not columns)
        endings = Counter((run.state, run.error) for run in runs if run.error and run.state != State.damaged)
        for (state, error), count in endings.items() if form == "table" else ():
            log.show(f"{count} {state}: {error}")
    if damaged:
        raise InputError(*damaged)


def compare_runs(
    paths: Sequence[str], *, by: Sequence[str] = (), sort: str | None = None, columns: Sequence[str] = ()
) -> tuple[list[Run], list[Row], list[str], bool]:
    """The runs that `compare` reads, its rows, what is damaged, and whether the rows are causes, not scores."""
    read = [run for path in paths for run in read_runs(existing(path))]
    runs = list({run.folder.resolve(): run for run in read}.values())
    runs = [run for run in runs if "rung" not in run.typed_values] or runs  # rungs have their own table
    damaged = [*dict.fromkeys(run.error for run in runs if run.state == State.damaged)]
    lists_causes = len(runs) == len(paths) == 2 and not (by or columns or damaged)
    rows = causes(runs) if lists_causes else groups(runs, by, [*columns, *([sort] if sort else [])])
    check_columns("--columns", columns, rows)
    rows = rows if sort is None else ordered(rows, sort, directions_of(runs))
    return runs, rows, damaged, lists_causes


def causes(runs: Sequence[Run]) -> list[Row]:
    """The differences between two runs, the likeliest cause of different scores first."""
    keys = differing(runs)
    keys = [*dict.fromkeys([*in_names(runs, keys), *keys])]
    first, second = (_facts(run, keys) for run in runs)
    typed = {key for run in runs for key in run.typed_values}
    absent = {OWN_CODE: "none", "config": "none"}  # a file that a run does not have, and a resume
    rows = [
        {"cause": kind, "key": key, "A": first.get((kind, key), other), "B": second.get((kind, key), other)}
        for kind, key in dict.fromkeys([*first, *second])
        for other in [absent.get(kind, "unknown")]
    ]
    known = {*CAUSES} - ({OWN_CODE} if any(map(_lacks_code, runs)) else set())
    rows = [row for row in rows if row["A"] != row["B"] and row["cause"] in known]
    return sorted(rows, key=lambda row: (CAUSES.index(row["cause"]), row["key"] not in typed, row["key"]))


def _facts(run: Run, keys: Sequence[str]) -> dict[tuple[str, str], str]:
    """What a run was: its values of config `keys`, its data and its environment, by kind of cause and key."""
    facts = {}
    for key in keys:
        is_rounding = role_of(key, run.composed) is Role.rounding
        kind = SEED if key == SEED else "config, to rounding" if is_rounding else "config"
        facts[kind, key] = value_of(run, key) or "none"
    for word in run.overrides:  # a resume adds its own: the steps before it had the learning rates of a shorter plan
        key, value = key_of(word), word.partition("=")[2]
        if value != run.typed_values.get(key, value) and role_of(key, run.composed).makes_another_run:
            facts["config", f"{key} before a resume"] = value
    for package, code in (run.code or {}).items():
        files = {f"{package}/{name}": digest for name, digest in code["files"].items()}
        facts |= {(OWN_CODE, key): str(digest) for key, digest in (files or {package: code.get("sha256")}).items()}
        facts |= {("code", f"{package}.{key}"): str(code.get(key)) for key in ("git", "git_changes")}
    for code in run.earlier_code:
        key = f"{code.get('package')} until step {code.get('until_step')}"
        facts[OWN_CODE, key] = str(code.get("sha256") or "not recorded")
    for key, value in leaves({**run.environment, "code": None, "earlier_code": None}):
        kind = "code" if is_below(key, CODE) else "versions" if is_below(key, VERSIONS) else "machine"
        facts[kind, key.removeprefix("packages.")] = str(value)
    for key, value in leaves(run.identity):
        if is_below(key, DATA):
            facts["data", key] = str(value)
    if run.damage:
        raise InputError(*run.damage)
    return facts


def _show_causes(runs: Sequence[Run], rows: Sequence[Row], form: str) -> None:
    for name, run in zip("AB", runs, strict=True):
        score = "" if run.score is None else figure_text(run.monitor.name, run.score)
        log.show(f"{name}  {run.status}  {score}  {run.folder}")
    if rows:
        heads = {"cause": "likely cause", "key": "key", "A": "A", "B": "B"}
        show_table([Column(head, [row[key] for row in rows]) for key, head in heads.items()], form)
    if unrecorded := [name for name, run in zip("AB", runs, strict=True) if _lacks_code(run)]:
        log.show(f"the code of {' and '.join(unrecorded)} was not recorded")
    elif not rows:
        log.show("the same run: nothing differs that makes another run (data, config, code, versions, machine)")


def _lacks_code(run: Run) -> bool:
    """Whether a run had extensions under a version of Lockstep that did not record their code."""
    return run.code is None and bool(run.environment.get("extensions"))
