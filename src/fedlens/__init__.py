"""FedLens: federated learning on data that differs, guided by what models look at."""

from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

if TYPE_CHECKING:
    from .experiment import Evaluation, Execution, Experiment, LocalTraining
    from .export.model import Predictions, TrainedModel, load
    from .simulate.resume import resume
    from .simulate.run import Result, run

_PLACES = {
    **dict.fromkeys(("Evaluation", "Execution", "Experiment", "LocalTraining"), "experiment"),
    **dict.fromkeys(("run", "Result"), "simulate.run"),
    "resume": "simulate.resume",
    **dict.fromkeys(("Predictions", "TrainedModel", "load"), "export.model"),
}
__all__ = [
    "Evaluation",
    "Execution",
    "Experiment",
    "LocalTraining",
    "Predictions",
    "Result",
    "TrainedModel",
    "__version__",
    "load",
    "resume",
    "run",
]


def __getattr__(name: str) -> Any:
    """Verbs are imported when they are used, so that `import fedlens` and `fedlens --help` cost nothing."""
    if name not in _PLACES:
        raise AttributeError(f"module 'fedlens' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f".{_PLACES[name]}", __name__), name)
