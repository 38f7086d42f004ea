"""Data sets, how they are dealt to clients, and how a batch is prepared. Adding one is a class and a line here."""

from .federation import federate
from .images import DataSource, Images
from .own import Npz
from .partition import Dirichlet, Iid, Partition, Shards
from .prepare import Prepare
from .sets import Cifar10, FashionMnist, Mnist, Mnist5k
from .split import Split

DATASETS: dict[str, type[DataSource]] = {cls.name: cls for cls in (Mnist5k, Mnist, FashionMnist, Cifar10, Npz)}
PARTITIONS: dict[str, type[Partition]] = {cls.name: cls for cls in (Iid, Dirichlet, Shards)}

__all__ = ["DATASETS", "PARTITIONS", "DataSource", "Images", "Partition", "Prepare", "Split", "federate"]
