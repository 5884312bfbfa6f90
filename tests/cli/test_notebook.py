"""The notebook of the documentation, executed by a real kernel, and a cell that is interrupted."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from test_guest import app, script  # noqa: F401  # a fixture

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # the kernel's, of the libraries that it uses

ROOT = Path(__file__).parents[2]
MANAGERS: list[AsyncKernelManager] = []  # of this test
LONG = """
import lockstep
try:
    lockstep.train(["epochs=1000", "device=cpu", "hydra.run.dir=run"])
except lockstep.LockstepError as error:
    print("ended:", error)
"""
# The words of the notebook that are other ones here, for few steps.
SHORTER = {"epochs=2": "steps=2", "epochs=3": "steps=3", "telemetry.interval=10": "telemetry.interval=1"}
RESUMED = "import lockstep; print(lockstep.train(['resume=run', 'steps={STEPS}']).summary['status'])"
LATER = ("changed(['train', 'wrong key', 'compose', 'load'])", "changed(['again'])")


def client(notebook: Any, folder: Path) -> NotebookClient:
    """A client whose kernel is an interpreter of these tests."""
    os.environ.pop("PYTEST_CURRENT_TEST", None)  # a kernel in a test does not show what its processes print
    os.environ["OMP_WAIT_POLICY"] = "passive"  # few cores here: no thread spins
    manager = AsyncKernelManager(kernel_cmd=[sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"])
    MANAGERS.append(manager)
    return NotebookClient(notebook, km=manager, timeout=300, resources={"metadata": {"path": str(folder)}})


@pytest.fixture(autouse=True)
def _sockets() -> Iterator[None]:
    """What a kernel's client leaves open is closed before the next test, which would be told of it."""
    yield
    for manager in MANAGERS:
        asyncio.run(manager.shutdown_kernel(now=True))
        manager.context.destroy(linger=0)
    MANAGERS.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gc.collect()


def printed(cell: Any) -> str:
    return "".join(output.get("text", "") or output.get("data", {}).get("text/html", "") for output in cell.outputs)


def results(notebook: Any) -> list[str]:
    """The values of the cells' last lines."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    return [output["data"]["text/plain"] for output in outputs if output["output_type"] == "execute_result"]


def test_the_notebook_of_the_documentation_runs(tmp_path: Path) -> None:
    notebook = nbformat.read(ROOT / "docs" / "notebook.ipynb", as_version=4)
    for (old, new), cell in itertools.product(SHORTER.items(), notebook.cells):
        cell.source = cell.source.replace(old, new)
    client(notebook, tmp_path).execute()
    one, two, difference, longer, parts = results(notebook)
    assert one == two
    assert float(difference) < 1e-12
    assert longer.startswith("(3, ")
    assert parts == "(torch.Size([64, 10]), 460)"
    assert not any("\x1b" in printed(cell) for cell in notebook.cells if "outputs" in cell), "codes of a terminal"
    for cell in notebook.cells[1:4:2]:  # progress is shown, of one rank and of two
        assert "done in" in printed(cell)
    assert "<td>2/2</td>" in printed(notebook.cells[1]), "the evaluations are a table"
    assert "<progress" not in printed(notebook.cells[1]), "the bar is gone at the end"


def test_an_interrupted_cell_saves_and_later_calls_leave_the_kernel_as_it_was(
    app: Path,  # noqa: F811
) -> None:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(LONG)])
    kernel = client(notebook, app)

    async def interrupted() -> str:
        async with kernel.async_setup_kernel():
            cell = asyncio.create_task(kernel.async_execute_cell(notebook.cells[0], 0))
            while "epoch" not in printed(notebook.cells[0]).partition("seed")[2] and not cell.done():
                await asyncio.sleep(0.1)
            await kernel.km.interrupt_kernel()
            await cell
            step = int(printed(notebook.cells[0]).partition("stopped at step ")[2].split()[0])
            for source in (RESUMED.replace("{STEPS}", str(step + 5)), script(app, ""), *LATER):
                notebook.cells.append(nbformat.v4.new_code_cell(source))
                await kernel.async_execute_cell(notebook.cells[-1], len(notebook.cells) - 1)
            return printed(notebook.cells[1])

    try:
        assert asyncio.run(interrupted()).rstrip().endswith("completed")
    except CellExecutionError as error:
        pytest.fail(str(error))
    assert "ended: stopped at step" in printed(notebook.cells[0])
    assert results(notebook) == ["{}", "{}"], printed(notebook.cells[3])


CELLS = """
import lockstep, torch
from lockstep.models.nets import Network
class Block(torch.nn.Module):
    def forward(self, images):
        return images.flatten(1)
class Idle(lockstep.Callback):
    every_rank = True
@lockstep.option("model")
class Own(Network):
    def build(self, classes, input_shape):
        return torch.nn.Sequential(Block(), torch.nn.Linear(64, classes))
words = ["model=own", "device=cpu", "launcher.threads=1", "steps=2"]
"""
TRAINED = "folders = [lockstep.train(words, callbacks=[Idle()], ranks=ranks).folder for ranks in (1, 2)]"
SAME = "[row['key'] for row in lockstep.compare(*folders) if row['cause'] == 'your code']"
CHANGED = "class Block(torch.nn.Module):\n    def forward(self, images):\n        return 2 * images.flatten(1)"
AGAIN = "last = lockstep.train(words, callbacks=[Idle()], ranks=1).folder"
OTHER = "[row['key'] for row in lockstep.compare(folders[0], last)]"


def test_the_classes_of_cells_are_recorded_and_a_changed_one_is_named(tmp_path: Path) -> None:
    cells = [nbformat.v4.new_code_cell(source) for source in (CELLS, TRAINED, SAME, CHANGED, AGAIN, OTHER)]
    notebook = nbformat.v4.new_notebook(cells=cells)
    client(notebook, tmp_path).execute()
    assert results(notebook) == ["[]", "['__main__/Block']"]
    code = json.loads(next((tmp_path / "outputs").glob("*/env.json")).read_text())["code"]
    assert {*code["__main__"]["files"]} == {"Block", "Idle", "Own"}
