"""Every private name of a library that the source uses, and the test that fails in a release without it."""

import ast
import importlib
import pkgutil
import re
from collections.abc import Iterator

import pytest
import torch

from helpers import ROOT

SOURCES = sorted((ROOT / "src").rglob("*.py"))
PRIVATE = re.compile(r"_(?!_)\w*")
# Documented, although they begin with an underscore.
DOCUMENTED = {"_thread", "os._exit", "sys._current_frames", "row._replace"}
# The others, with the reason and the test that covers them. A name with a public equivalent is not for this list.
USED = {
    # The public functions of Hydra and OmegaConf cannot give back a state of before: `config/hydra_policy.py`.
    "hydra.core.singleton.Singleton._instances": "cli/test_guest.py",
    "omegaconf.basecontainer.BaseContainer._resolvers": "cli/test_guest.py",
    # Hydra's flags; without an underscore, and undocumented.
    "hydra.main.get_args_parser": "unit/test_other_words.py",
    # A list of argparse's actions: for the messages that say what a flag takes.
    "self._actions": "unit/test_arguments.py",
    # A fork has nothing to do for its parent; a program ends without unloading its modules.
    "atexit._clear": "unit/test_spawn.py",
    "atexit._run_exitfuncs": "unit/test_program.py",
    "threading._shutdown": "unit/test_program.py",
    # One kernel for many tensors; the public optimizers have no public parts.
    "torch._foreach_add": "unit/test_muon.py",
    "torch._foreach_add_": "unit/test_fused.py",
    "torch._foreach_copy_": "unit/test_fused.py",
    "torch._foreach_lerp_": "unit/test_averages.py",
    "torch._foreach_mul": "unit/test_optim.py",
    "torch._foreach_mul_": "unit/test_muon.py",
    "torch._foreach_norm": "unit/test_muon.py",
    "torch._foreach_reciprocal": "unit/test_muon.py",
    "torch._foreach_sub": "unit/test_fused.py",
    "torch._fused_adam_": "unit/test_fused.py",
    "torch._fused_adamw_": "unit/test_fused.py",
    "torch._fused_sgd_": "unit/test_fused.py",
    # Base classes of layers of torch, timm and others.
    "torch.nn.modules.batchnorm._BatchNorm": "unit/test_batchnorm.py",
    "torch.nn.modules.conv._ConvNd": "unit/test_freezing.py",
    # The end of a recording of a CUDA graph that has failed.
    "torch._C._cuda_endAllocateToPool": "unit/test_graph_step.py",
    "torch._C._cuda_releasePool": "unit/test_graph_step.py",
    # The start and end of a compilation, and the settings of a compiler that is imported only then.
    "torch._dynamo.callback": "cli/test_compile.py",
    "torch._dynamo.config": "cli/test_compile.py",
    "torch._inductor.config": "cli/test_compile.py",
    # torch's reading of CUDA_VISIBLE_DEVICES.
    "torch.cuda._parse_visible_devices": "unit/test_gpus.py",
    "torch.cuda._transform_uuid_to_ordinals": "unit/test_gpus.py",
    # Whether torch uses the CPU's bfloat16 instructions.
    "torch.ops.mkldnn._is_mkldnn_bf16_supported": "unit/test_environment.py",
    # A trial of Optuna that accepts reports, of one that was cut.
    "trial._trial_id": "unit/test_search.py",
}
# The private packages in which a name has no entry of its own.
PACKAGES = {"torch._C"}
UNDOCUMENTED = {"hydra.main.get_args_parser"}


def is_private(name: str) -> bool:
    return name in UNDOCUMENTED or any(PRIVATE.fullmatch(part) for part in name.split("."))


def imports(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Each name that a module of the source imports of a library, and the library's name for it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((item.asname or item.name.partition(".")[0], item.name) for item in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from ((item.asname or item.name, f"{node.module}.{item.name}") for item in node.names)


def defined(tree: ast.Module) -> Iterator[str]:
    """The names that a module of the source defines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.id if isinstance(node, ast.Name) else node.attr


def used(tree: ast.Module, own: set[str]) -> Iterator[str]:
    """The private names of libraries that a module of the source uses; the source defines the names `own`."""
    known = {name: whole for name, whole in imports(tree) if not whole.startswith("lockstep")}
    yield from filter(is_private, known.values())
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            first, _, below = ast.unparse(node).partition(".")
            if first in known or node.attr not in own:
                yield f"{known.get(first, first)}.{below}"
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "setattr"):
            name = node.args[1]
            if isinstance(name, ast.Constant) and is_private(str(name.value)) and name.value not in own:
                yield f"{ast.unparse(node.args[0])}.{name.value}"


def test_every_private_name_is_listed() -> None:
    trees = [ast.parse(path.read_text()) for path in SOURCES]
    own = {name for tree in trees for name in defined(tree)}
    names = {name for tree in trees for name in used(tree, own)}
    assert names - DOCUMENTED - PACKAGES == USED.keys()


@pytest.mark.parametrize("name", [name for name in USED if name.split(".")[0] not in ("self", "trial")])
def test_the_installed_release_has_every_private_name(name: str) -> None:
    if name.startswith("torch._C._cuda"):
        pytest.skip("torch has it with CUDA") if not torch.backends.cuda.is_built() else None
    library = name.partition(".")[0]
    version = getattr(importlib.import_module(library), "__version__", "of Python")
    try:
        assert pkgutil.resolve_name(name) is not None
    except (AttributeError, ImportError):
        pytest.fail(f"{library} {version} has no {name} any more")


def test_every_private_name_is_covered_by_a_test() -> None:
    for name, file in USED.items():
        assert (ROOT / "tests" / file).is_file(), name
