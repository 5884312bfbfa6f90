"""`lockstep new PROJECT`: write a small project for the user, from the files in `template/`."""

import importlib.util
import keyword
import os
import shutil
import tempfile
from pathlib import Path

from lockstep.config.commands import shell_command
from lockstep.core import log
from lockstep.core.errors import InputError
from lockstep.core.safe_write import storing

TEMPLATE = Path(__file__).parents[1] / "template"
NAME = "my_project"  # in the names and the texts of the template


def new(project: str) -> None:
    """Write a new project into the folder `project`, whose last part is the name of its package."""
    folder = Path(project)
    name = folder.name
    if not name.isidentifier() or keyword.iskeyword(name) or not name.isascii():
        raise InputError(
            f"{project!r} cannot be the name of a Python package; use letters, digits and _: lockstep new mine"
        )
    if not folder.absolute().parent.is_dir():
        raise InputError(f"{folder.absolute().parent} is not a folder, expected one in which to create {name}")
    if os.path.lexists(folder):
        raise InputError(f"{folder} exists; name a new folder: {shell_command(['lockstep', 'new', f'{folder}2'])}")
    if importlib.util.find_spec(name) is not None:
        raise InputError(f"there is a package {name} in this environment already; use another name")
    with storing(folder), tempfile.TemporaryDirectory(dir=folder.absolute().parent, prefix=f".{name}.") as temporary:
        sources = (path for path in TEMPLATE.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
        for source in sources:
            target = Path(temporary, name, *(part.replace(NAME, name) for part in source.relative_to(TEMPLATE).parts))
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(source.read_text().replace(NAME, name))
        shutil.move(Path(temporary, name), folder)
    command = f"{shell_command(['cd', folder])} && python train.py experiment=first"
    log.show(f"created {folder}; continue with: {command}")
