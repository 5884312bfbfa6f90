"""The rank of this process. Keys: see `conf/launcher/`."""

from lockstep.config.options import option
from lockstep.core.fields import TIME_CHECK, choice, ranged, ruled
from lockstep.core.protocols import Entry, Launcher
from lockstep.core.run import Run
from lockstep.core.run_dir import RunDir
from lockstep.runtime.signals import StopNow, not_begun


@option("launcher")
class Inline(Launcher):
    """The rank is the command's own process. Also under torchrun, which has started the ranks already."""

    # processes of the job; `auto`: one per GPU, or, without a GPU, as many as the strategy needs
    ranks: int | str = ranged("auto", least=1, most=65_536, words=("auto",))
    # library of the collectives; `auto`: `nccl` on CUDA, `gloo` on the CPU
    backend: str = choice("auto", "auto", "nccl", "gloo")
    # the job ends as hanging after this long without progress, which is a finished step, micro-batch, evaluation
    # block or save. Before the first step, computing is progress too
    timeout: str = ruled("10min", TIME_CHECK)
    # CPU threads per rank; `auto` shares the cores out evenly. A waiting thread gives up its core after about 250 us,
    # unless the environment has `GOMP_SPINCOUNT` or `OMP_WAIT_POLICY`
    threads: int | str = ranged("auto", least=1, most=1024, words=("auto",))

    def launch(self, entry: Entry, run_dir: RunDir) -> float | None:
        try:
            self.run(entry, run_dir)
        except StopNow:  # the stop came before the rank had set its handlers, or after it had restored them
            raise not_begun(Run(run_dir.path).saved) from None
        return Run(run_dir.path).summary.get("objective")

    def run(self, entry: Entry, run_dir: RunDir) -> None:
        entry.here(run_dir.path)


@option("launcher")
class Auto(Inline):
    """`inline` for one rank and under torchrun, `spawn` for several ranks and in a sweep."""
