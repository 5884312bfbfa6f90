"""The launchers, which start the ranks of one job.

A launcher gets an entry point and a run folder, and does not know what the ranks do. (`hydra/launcher=` is a
different thing: it decides how the jobs of a sweep are run.)
"""

from lockstep.config.options import lazy_classes

__getattr__, __dir__ = lazy_classes("launcher")
