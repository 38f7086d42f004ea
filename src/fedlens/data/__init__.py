"""Data sets, how they are dealt to clients, and how a batch is prepared. Adding one is a class and a line here."""

from .client_names import Names
from .federation import federate
from .images import Images
from .partition.base import ByUser, Domains, File, Iid, Partition, Quantity
from .partition.external import FlBench, Flwr
from .partition.label_skew import Dirichlet, Shards
from .prepare import Prepare
from .source import DataSource
from .sources.femnist import Femnist
from .sources.folders import ClientsFolder, Folder, Npz
from .sources.hub import Hub
from .sources.modalities import Modalities
from .sources.pfllib import Pfllib
from .sources.photos import Celeba, Cinic10, TinyImagenet
from .sources.sample import Sample
from .sources.small import Cifar10, Cifar100, FashionMnist, Mnist, Mnist5k
from .sources.table import Table
from .split import Skew, Split, class_counts, skew

DATASETS: dict[str, type[DataSource]] = {
    "mnist5k": Mnist5k,
    "mnist": Mnist,
    "fashion_mnist": FashionMnist,
    "femnist": Femnist,
    "cifar10": Cifar10,
    "cifar100": Cifar100,
    "cinic10": Cinic10,
    "tiny_imagenet": TinyImagenet,
    "celeba": Celeba,
    "npz": Npz,
    "folder": Folder,
    "clients_folder": ClientsFolder,
    "table": Table,
    "pfllib": Pfllib,
    "hub": Hub,
    "modalities": Modalities,
    "sample": Sample,
}

OWN_FILES = {".npz": "npz", ".csv": "table", ".tsv": "table", ".parquet": "table"}  # data=FILE is short for them

PARTITIONS: dict[str, type[Partition]] = {
    "iid": Iid,
    "dirichlet": Dirichlet,
    "shards": Shards,
    "quantity": Quantity,
    "by_user": ByUser,
    "domains": Domains,
    "file": File,
    "fl_bench": FlBench,
    "flwr": Flwr,
}
