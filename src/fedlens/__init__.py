"""FedLens: federated learning on data that differs, guided by what models look at."""

__version__ = "0.1.0"
