"""What `lockstep runs RUN` shows of one run: what it was, how it went, and the commands to use it."""

from collections.abc import Iterator

from lockstep.config.commands import override, shell_command
from lockstep.config.options import differences, value_text
from lockstep.core import log
from lockstep.core.errors import InputError
from lockstep.core.monitor import figure_text, telling
from lockstep.core.run import Run, State
from lockstep.core.run_dir import relative
from lockstep.core.table import Column, shortened, show_table
from lockstep.telemetry.progress import format_duration, format_timestamp

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
    largest = sorted((facts.get("time") or {}).items(), key=lambda part: part[1] or 0, reverse=True)
    rows = {
        "run": str(relative(run.folder)),
        "state": ", ".join([run.status, *started, *duration]),
        "error": run.error,
        "overrides": " ".join(run.overrides) or "none",
        "best": f"{figure_text(monitor.name, facts['best'])}{best_step}" if facts.get("best") is not None else "",
        "scores": scores,
        "test": tests,
        "time": ", ".join(f"{name.replace('_', ' ')} {share:.0%}" for name, share in largest if (share or 0) >= 0.01),
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
