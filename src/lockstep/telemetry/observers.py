"""Several observers of a run as one."""

import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor

from lockstep.core.closing import closing
from lockstep.core.data_protocols import MicroBatch
from lockstep.core.observer import Observer, Outcome
from lockstep.core.predictions import Predictions


class Observers(Observer):
    """Several observers as one. A lock lets one thread in at a time: GPU samples come from another thread."""

    def __init__(self, *observers: Observer) -> None:
        self.observers = observers
        self.lock = threading.RLock()

    def _call_all(self, call: Callable[[Observer], None]) -> None:
        with self.lock:
            for observer in self.observers:
                call(observer)

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        self._call_all(lambda observer: observer.write(step, scalars))

    def first_batch(self, micro: MicroBatch, images: Tensor) -> None:
        self._call_all(lambda observer: observer.first_batch(micro, images))

    def write_gpu(self, step: int, scalars: Mapping[str, float]) -> None:
        self._call_all(lambda observer: observer.write_gpu(step, scalars))

    def evaluated(self, step: int, scores: Mapping[str, float], best: bool) -> None:
        self._call_all(lambda observer: observer.evaluated(step, scores, best))

    def predicted(self, predictions: Predictions) -> None:
        self._call_all(lambda observer: observer.predicted(predictions))

    def saved(self, step: int, checkpoint: Path) -> None:
        self._call_all(lambda observer: observer.saved(step, checkpoint))

    def flush(self) -> None:
        self._call_all(lambda observer: observer.flush())

    def end(self, outcome: Outcome) -> None:
        with self.lock, closing(*(lambda observer=observer: observer.end(outcome) for observer in self.observers)):
            pass
