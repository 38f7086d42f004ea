"""Configurations: every spelling means the same value, and every wrong one gets one sentence that names it."""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from dataclasses import dataclass, replace

import pytest
from annotated_types import Ge, Gt, Le, Lt
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from fedlens import config
from fedlens.algorithms import SPATL, FedAvg, FedDyn, FedProx, FedSLS, FedXDS, FineTuned, Local, Scaffold
from fedlens.core.algorithm import Algorithm
from fedlens.core.cohort import Everyone, Fraction, Uniform
from fedlens.core.errors import BadInput
from fedlens.core.optimizer import Cosine, Exponential
from fedlens.core.transform import Clip, GaussianNoise, Quantise, TopK
from fedlens.data import DATASETS, PARTITIONS
from fedlens.experiment import Evaluation, Execution, Experiment, LocalTraining, RayCluster
from fedlens.models import MODELS


def read(*words, file=None):
    return config.read(file, words)


def sentence(*words, file=None):
    with pytest.raises(BadInput) as caught:
        config.read(file, words)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---- what is meant ----
@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("", Experiment()),
        ("rounds=3 clients=7 seed=-1", Experiment(rounds=3, clients=7, seed=-1)),
        ("cohort=10", Experiment(cohort=Uniform(10))),
        ("cohort=0.1", Experiment(cohort=Fraction(0.1))),
        ("cohort=1.0", Experiment(cohort=Fraction(1.0))),
        ("cohort=1e-1", Experiment(cohort=Fraction(0.1))),
        ("cohort=everyone", Experiment(cohort=Everyone())),
        ("cohort=uniform cohort.count=3", Experiment(cohort=Uniform(3))),
        ("cohort.share=0.5 cohort=fraction", Experiment(cohort=Fraction(0.5))),
        ("cohort.count=3", Experiment(cohort=Uniform(3))),
        ("algorithm=FedProx", Experiment(algorithm=FedProx())),
        ("algorithm=fed-prox algorithm.mu=1", Experiment(algorithm=FedProx(mu=1.0))),
        ("algorithm={is: fedprox, mu: 1}", Experiment(algorithm=FedProx(mu=1.0))),
        ("algorithm=scaffold+ft", Experiment(algorithm=FineTuned(Scaffold()))),
        ("algorithm=FedProx+FT algorithm.base.mu=0.3", Experiment(algorithm=FineTuned(FedProx(mu=0.3)))),
        (
            "algorithm=finetune algorithm.base=fedprox algorithm.base.mu=0.1 algorithm.part=head",
            Experiment(algorithm=FineTuned(FedProx(mu=0.1), part="head")),
        ),
        ("algorithm=finetune algorithm.epochs=2", Experiment(algorithm=FineTuned(FedAvg(), epochs=2))),
        ("algorithm=feddyn algorithm.clip=none", Experiment(algorithm=FedDyn(clip=None))),
        ("algorithm=feddyn algorithm.clip=", Experiment(algorithm=FedDyn(clip=None))),
        ("algorithm=feddyn algorithm.clip=null", Experiment(algorithm=FedDyn(clip=None))),
        ("local.steps=none local.epochs=2", Experiment(local=LocalTraining(epochs=2))),
        ("local.lr=1e-3", Experiment(local=LocalTraining(lr=0.001))),
        ("local.lr=1", Experiment(local=LocalTraining(lr=1.0))),
        ("local.schedule=cosine local.schedule.floor=.5", Experiment(local=LocalTraining(schedule=Cosine(0.5)))),
        ("local={lr: 1e-2, schedule: exponential}", Experiment(local=LocalTraining(lr=0.01, schedule=Exponential()))),
        ("picture=false", Experiment(execution=Execution(picture=False))),
        ("evaluate.targets=0.5,0.8", Experiment(evaluate=Evaluation(targets=(0.5, 0.8)))),
        ("evaluate.targets=[0.5,0.8]", Experiment(evaluate=Evaluation(targets=(0.5, 0.8)))),
        ("evaluate.targets=0.5", Experiment(evaluate=Evaluation(targets=(0.5,)))),
        ("evaluate.personal=none augment=none", Experiment(evaluate=Evaluation(personal="none"))),
        ("data=FashionMNIST", Experiment(data=DATASETS["fashion_mnist"]())),
        ("data=my/digits.npz data.holdout=0.5", Experiment(data=DATASETS["npz"]("my/digits.npz", 0.5))),
        ("partition=Split.json", Experiment(partition=PARTITIONS["file"](path="Split.json"))),
        ("model=my_nets:Net", Experiment(model=MODELS["custom"]("my_nets:Net"))),
        ("model=resnet-18 model.stem=cifar", Experiment(model=MODELS["resnet18"](stem="cifar"))),
        # Text stays as it was typed, whatever else YAML would see in it.
        ("out=2024-11-02", Experiment(execution=Execution(out="2024-11-02"))),
        ("out=007", Experiment(execution=Execution(out="007"))),
        ("out=1.50", Experiment(execution=Execution(out="1.50"))),
        ("out=no", Experiment(execution=Execution(out="no"))),
        ("out=#5", Experiment(execution=Execution(out="#5"))),
        ("out=a=b", Experiment(execution=Execution(out="a=b"))),
    ],
)  # fmt: skip
def test_words(words, meant):
    # Words with spaces in them are written with braces, which hold the spaces together.
    parts, depth = [""], 0
    for letter in words:
        depth += {"{": 1, "}": -1}.get(letter, 0)
        parts = [*parts, ""] if letter == " " and not depth else [*parts[:-1], parts[-1] + letter]
    assert read(*filter(None, parts)) == meant


@pytest.mark.parametrize(
    "words",
    [
        ["uplink=clip,topk", "uplink.clip.norm=2", "uplink.topk.share=0.5"],
        ["uplink=clip, topk", "uplink.clip.norm=2", "uplink.topk.share=0.5"],
        ["uplink=[clip, topk]", "uplink.clip.norm=2", "uplink.topk.share=0.5"],
        ["uplink=[{is: clip, norm: 2}, {is: topk, share: 0.5}]"],
        ["uplink={clip: {norm: 2}, topk: {share: 0.5}}"],
        ["uplink={clip: {norm: 2}}", "uplink.topk.share=0.5"],
        ["uplink=[{is: clip, norm: 2}, topk]", "uplink.topk.share=0.5"],
        ["uplink=clip", "uplink.clip.norm=2", "uplink.topk.share=0.5"],
    ],
)
def test_lists_of_transforms(words):
    assert read(*words).uplink == (Clip(2.0), TopK(0.5))
    assert read(*reversed(words)).uplink == (Clip(2.0), TopK(0.5))


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["uplink=topk"], (TopK(),)),
        (["uplink=topk", "uplink.share=0.5"], (TopK(0.5),)),
        (["uplink={is: topk, share: 0.5}"], (TopK(0.5),)),
        (["uplink={topk: }"], (TopK(),)),
        (["uplink.noise.std=1"], (GaussianNoise(1.0),)),
        (["uplink=topk,quantise"], (TopK(), Quantise())),
        (["uplink=quantise,topk"], (Quantise(), TopK())),
        (["uplink=clip,clip"], (Clip(), Clip())),
        (["uplink=none"], ()),
        (["uplink="], ()),
        (["uplink=[]"], ()),
    ],
)
def test_short_lists_of_transforms(words, meant):
    assert read(*words).uplink == meant


SAMPLES = {
    "data": "mnist",
    "clients": "7",
    "cohort": "0.5",
    "algorithm": "fedprox",
    "rounds": "3",
    "local.epochs": "4",
    "local.steps": "5",
    "local.batch_size": "6",
    "local.lr": "0.5",
    "local.momentum": "0.25",
    "local.weight_decay": "1e-4",
    "local.optimizer": "adam",
    "local.schedule": "cosine",
    "partition.alpha": "0.1",
    "partition": "iid",
    "model": "mlp",
    "out": "there",
    "seed": "9",
    "evaluate.every": "2",
    "defences": "median",
    "attack": "noise",
}


@pytest.mark.parametrize("alias", config.ALIASES)
def test_names_of_other_tools(alias, tmp_path):
    key = config.ALIASES[alias]
    ours, theirs = f"{key}={SAMPLES[key]}", f"{alias}={SAMPLES[key]}"
    assert read(theirs) == read(ours) != Experiment()
    assert read(f"--{theirs.replace('_', '-')}") == read(ours)
    file = tmp_path / "theirs.yaml"
    file.write_text(f"{alias}: {SAMPLES[key]}\n")
    assert read(file=file) == read(ours)


def test_fields_under_the_names_of_other_tools():
    assert read("method.mu=0.5", "method=fedprox") == Experiment(algorithm=FedProx(mu=0.5))
    assert read("dataset.path=a.npz", "dataset=npz") == Experiment(data=DATASETS["npz"]("a.npz"))
    assert read("schedule.decay=0.5", "schedule=exponential").local.schedule == Exponential(0.5)


@pytest.mark.parametrize("ratio", config.RATIOS)
def test_a_ratio_of_one_is_everyone(ratio):
    assert read(f"{ratio}=1", "clients=8").cohort.size(8) == 8
    assert read("cohort=1", "clients=8").cohort.size(8) == 1


WORDS = [
    "algorithm=finetune",
    "algorithm.base=fedprox",
    "algorithm.base.mu=0.1",
    "algorithm.epochs=2",
    "partition.alpha=0.3",
    "partition=dirichlet",
    "uplink.clip.norm=3",
    "uplink=clip,quantise",
    "lr=0.1",
    "local={epochs: 3}",
]


@given(st.permutations(WORDS))
@settings(deadline=None, max_examples=50)
def test_words_in_any_order(words):
    assert read(*words) == Experiment(
        algorithm=FineTuned(FedProx(mu=0.1), epochs=2),
        partition=PARTITIONS["dirichlet"](alpha=0.3),
        uplink=(Clip(3.0), Quantise()),
        local=LocalTraining(lr=0.1, epochs=3),
    )


# ---- files ----
FILE = """
num_clients: 50          # of another tool
algorithm.base.mu: 0.5   # before what it belongs to
algorithm: {is: finetune, base: fedprox}
local:
  lr: 1e-3
  schedule: cosine
uplink: [clip, topk]
out: 2024-11-02
picture: false
"""


def test_command_line_over_file_over_default(tmp_path):
    file = tmp_path / "experiment.yaml"
    file.write_text(FILE)
    written = Experiment(
        clients=50,
        algorithm=FineTuned(FedProx(mu=0.5)),
        local=LocalTraining(lr=0.001, schedule=Cosine()),
        uplink=(Clip(), TopK()),
        execution=Execution(out="2024-11-02", picture=False),
    )
    assert read(file=file) == written
    assert read("clients=9", file=file) == replace(written, clients=9)
    assert read("n_clients=9", "local.epochs=4", file=file) == replace(
        written, clients=9, local=replace(written.local, epochs=4)
    )
    assert read("algorithm.base.mu=2", file=file).algorithm == FineTuned(FedProx(mu=2.0))
    assert read("algorithm.base=local", file=file).algorithm == FineTuned(Local())
    assert read("algorithm={is: fedprox}", file=file).algorithm == FedProx()
    assert read("algorithm={epochs: 1}", file=file).algorithm == FineTuned(FedProx(mu=0.5), epochs=1)
    assert read("uplink.clip.norm=2", file=file).uplink == (Clip(2.0), TopK())
    assert read("uplink=quantise", file=file).uplink == (Quantise(),)


def test_empty_file_is_the_default(tmp_path):
    file = tmp_path / "empty.yaml"
    file.write_text("# nothing yet\n")
    assert read(file=file) == Experiment()


def test_yaml_merges(tmp_path):
    file = tmp_path / "merged.yaml"
    file.write_text("local: &usual {lr: 0.5}\nevaluate: {every: 3}\n")
    assert read(file=file) == Experiment(local=LocalTraining(lr=0.5), evaluate=Evaluation(every=3))
    file.write_text("base: 1\n")
    assert "unknown key base" in sentence(file=file)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rounds: [1, 2", ("expected ',' or ']'", "line 1")),
        ("rounds: 3\n\tclients: 2", ("line 2",)),
        ("rounds: 3\nrounds: 4", ("rounds is set twice",)),
        ("local: {lr: 1, lr: 2}", ("lr is set twice",)),
        ("- rounds\n- 3", ("keys and values", "a list")),
        ("just words", ("keys and values", "'just words'")),
        ("a: *b", ("undefined alias",)),
        ("a: !!python/object:os.system {}", ("could not determine a constructor",)),
        ("rounds: \x00", ("cannot be read as YAML",)),
    ],
)
def test_broken_files(tmp_path, text, words):
    file = tmp_path / "broken.yaml"
    file.write_text(text)
    said = sentence(file=file)
    assert said.startswith(str(file)) and all(word in said for word in words)


def test_files_that_are_none(tmp_path):
    (tmp_path / "digits.yaml").write_text("rounds: 1")
    assert sentence(file=tmp_path / "digit.yaml").endswith(f"did you mean '{tmp_path / 'digits.yaml'}'?")
    assert "is a folder" in sentence(file=tmp_path)
    (tmp_path / "config.yaml").write_text("rounds: 1")
    assert "fedlens resume" in sentence(file=tmp_path)
    assert sentence(file="fedprox").endswith("did you mean algorithm=fedprox?")
    assert sentence(file="resnet18").endswith("did you mean model=resnet18?")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    assert "cannot be read as YAML" in sentence(file=tmp_path / "binary.yaml")


# ---- round trips ----
def numbers(kind, bounds):
    low = max((b.ge if isinstance(b, Ge) else b.gt for b in bounds if isinstance(b, Ge | Gt)), default=None)
    high = min((b.le if isinstance(b, Le) else b.lt for b in bounds if isinstance(b, Le | Lt)), default=None)
    if kind is int:
        return st.integers(-(2**40) if low is None else low, 2**40 if high is None else high)
    return st.floats(
        low,
        high,
        allow_nan=False,
        allow_infinity=False,
        exclude_min=any(isinstance(b, Gt) for b in bounds),
        exclude_max=any(isinstance(b, Lt) for b in bounds),
    )


def values(kind, default, depth=2):
    """Any value of a field's type."""
    origin, kinds = typing.get_origin(kind), typing.get_args(kind)
    if kind in config.REGISTRIES:
        classes = list(config.REGISTRIES[kind].values())
        plain_ones = [c for c in classes if all(inner not in config.REGISTRIES for inner in config._types(c).values())]
        return st.sampled_from(classes if depth else plain_ones).flatmap(lambda cls: instances(cls, depth - 1))
    if origin is typing.Annotated:
        return numbers(kinds[0], kinds[1:])
    if origin is typing.Literal:
        return st.sampled_from(kinds)
    if origin in (typing.Union, types.UnionType):
        return st.one_of(*(st.none() if k is types.NoneType else values(k, default, depth) for k in kinds))
    if origin is tuple and (kinds[0] in config.REGISTRIES or typing.get_origin(kinds[0]) is typing.Annotated):
        return st.lists(values(kinds[0], None, depth), max_size=3).map(tuple)
    if origin is dict:
        return st.dictionaries(st.text("abc", min_size=1), st.integers() | st.booleans(), max_size=2)
    simple = {bool: st.booleans(), int: st.integers(), float: numbers(float, ()), str: text}
    if kind in simple:
        return simple[kind]
    return instances(kind, depth) if dataclasses.is_dataclass(kind) else st.just(default)


text = st.text(st.characters(codec="utf-8", exclude_categories=("C",)), max_size=12) | st.sampled_from(
    ["1e-3", "007", "yes", "null", "2024-11-02", "1:30", "0x1F", "none", "a: b", "- a", ".nan", "~", "=", "<<"]
)


@st.composite
def instances(draw, cls, depth=2):
    fields = dataclasses.fields(cls)
    kinds = typing.get_type_hints(cls, include_extras=True)
    drawn = {f.name: draw(values(kinds[f.name], f.default, depth)) for f in fields if draw(st.booleans())}
    try:
        return cls(**drawn)
    except BadInput:  # some values do not go together
        assume(False)


PARTS = [(kind, name) for kind, registry in config.REGISTRIES.items() for name in registry]


@pytest.mark.parametrize(("kind", "name"), PARTS, ids=lambda part: getattr(part, "__name__", part))
def test_every_part_survives(kind, name):
    default = config.REGISTRIES[kind][name]()
    written = json.loads(json.dumps(config.to_dict(default)))
    assert written["is"] == name
    assert config.resolve(kind, written) == default == config.resolve(kind, name) == config.resolve(kind, default)

    @given(instances(config.REGISTRIES[kind][name]))
    @settings(deadline=None, max_examples=10, suppress_health_check=[HealthCheck.filter_too_much])  # some refuse most
    def survives(value):
        assert config.resolve(kind, json.loads(json.dumps(config.to_dict(value)))) == value
        assert config.resolve(kind, value) == value

    survives()


@given(experiment=instances(Experiment))
@settings(deadline=None, max_examples=100)
def test_every_experiment_survives(tmp_path_factory, experiment):
    file = tmp_path_factory.getbasetemp() / "survivor.yaml"
    file.write_text(config.to_yaml(experiment), "utf-8")
    assert config.read(file) == experiment
    assert config.resolve(Experiment, json.loads(json.dumps(config.to_dict(experiment)))) == experiment
    assert config.check(experiment) == experiment


# ---- what is refused, and how ----
@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("roundz=3", "unknown key roundz; did you mean 'rounds'?"),
        ("local.lrr=3", "unknown key local.lrr; did you mean 'local.lr'?"),
        ("local.batch=3", "unknown key local.batch; did you mean 'local.batch_size'?"),
        ("algorithm.eta=3", "unknown key algorithm.eta of fedavg; did you mean 'algorithm.server_lr'?"),
        ("eta=3", "unknown key eta; did you mean 'local.lr'?"),
        ("num_client=3", "unknown key num_client; did you mean 'clients'?"),
        ("mu=0.1", "unknown key mu; did you mean 'algorithm.mu'?"),
        ("floor=0.1", "unknown key floor; did you mean 'local.schedule.floor'?"),
        ("local.rounds=3", "unknown key local.rounds; did you mean 'rounds'?"),
        ("algorithm.rounds=3", "unknown key algorithm.rounds of fedavg; did you mean 'rounds'?"),
        ("uplink.clip.epsilon=3", "unknown key uplink.clip.epsilon of clip; known are uplink.clip.norm"),
        ("local={learning_rate: 3}", "unknown key local.learning_rate; did you mean 'local.lr'?"),
        ("cohort=everyone cohort.zzz=3", "unknown key cohort.zzz of everyone; it has no settings"),
        ("algorithm=fedprx", "algorithm 'fedprx' is unknown; did you mean 'fedprox'?"),
        ("algorithm=fedprx+ft", "algorithm.base 'fedprx' is unknown; did you mean 'fedprox'?"),
        ("model=resnet19", "model 'resnet19' is unknown; did you mean 'resnet18'?"),
        ("partition=dirichlt", "partition 'dirichlt' is unknown; did you mean 'dirichlet'?"),
        ("data=cifar11", "data 'cifar11' is unknown; did you mean 'cifar10'?"),
        ("local.schedule=cosin", "local.schedule 'cosin' is unknown; did you mean 'cosine'?"),
        ("uplink=clp", "uplink 'clp' is unknown; did you mean 'clip'?"),
        ("uplink.clp.norm=1", "uplink 'clp' is unknown; did you mean 'clip'?"),
        ("uplink.clip=5", "uplink.clip is 5, but it should be one of its settings: norm"),
        ("rounds=ten", "rounds is 'ten', but it should be a valid integer"),
        ("rounds=2.5", "rounds is 2.5, but it should be a valid integer"),
        ("rounds=", "rounds is '', but it should be a valid integer"),
        ("rounds=true", "rounds is true, but it should be a number"),
        ("local.lr=false", "local.lr is false, but it should be a number"),
        ("rounds=0", "rounds is 0, but it should be greater than or equal to 1"),
        ("rounds=1000000", "rounds is 1000000, but it should be less than or equal to 999999"),
        ("cohort=0", "cohort.count is 0, but it should be greater than or equal to 1"),
        ("cohort=0.0", "cohort.share is 0.0, but it should be greater than 0"),
        ("alpha=0", "partition.alpha is 0, but it should be greater than 0"),
        ("alpha=nan", "partition.alpha is 'nan', but it should be a finite number"),
        ("alpha=.nan", "partition.alpha is nan, but it should be a finite number"),
        ("lr=inf", "local.lr is 'inf', but it should be a finite number"),
        ("lr=-1", "local.lr is -1, but it should be greater than 0"),
        ("momentum=1", "local.momentum is 1, but it should be less than 1"),
        ("data=folder data.path=x data.holdout=1", "data.holdout is 1, but it should be less than 1"),
        ("local=5", "local is 5, but it should have fields such as epochs, steps, batch_size, optimizer, lr, momentum, "
                    "weight_decay, schedule, class_weights"),
        ("augment=flop", "augment is 'flop', but it should be 'none', 'flip', 'crop_flip' or 'randaugment'"),
        ("precision=fp16", "precision is 'fp16', but it should be 'auto', 'fp32', 'tf32', 'bf16' or 'fp64'"),
        ("picture=maybe", "picture is 'maybe', but it should be true or false"),
        ("evaluate.targets=0.5,2", "evaluate.targets is ['0.5', '2'], but it should be less than or equal to 1"),
        ("algorithm=feddyn algorithm.server_lr=2", "feddyn has no server_lr: its server step is fixed by alpha"),
        ("rounds", "'rounds' is not of the form key=value"),
        ("=3", "'=3' is not of the form key=value"),
        ("algorithm=nowhere:Mine", "algorithm 'nowhere:Mine' cannot be imported: ModuleNotFoundError: No module named "
                                   "'nowhere'"),
        ("algorithm=math:pi", "algorithm 'math:pi' is not a frozen dataclass derived from Algorithm"),
        ("model=mlp cohort=fedlens.algorithms:FedAvg",
         "cohort 'fedlens.algorithms:FedAvg' is not a frozen dataclass derived from Cohort"),
    ],
)  # fmt: skip
def test_refused(word, said):
    assert sentence(*([word] if "{" in word or "[" in word else word.split(" "))) == said


@pytest.mark.parametrize(
    ("word", "said", "names"),
    [
        ("algorithm.mu=0.1", "unknown key algorithm.mu of fedavg; it belongs to ", {"fedprox"}),
        ("algorithm.part=head", "unknown key algorithm.part of fedavg; it belongs to ", {"finetune"}),
        ("partition=iid alpha=1", "unknown key partition.alpha of iid; it belongs to ", {"dirichlet", "quantity"}),
        ("uplink=clip uplink.clip.share=1", "unknown key uplink.clip.share of clip; it belongs to ", {"topk"}),
        ("algorithm.xyz=1", "unknown key algorithm.xyz of fedavg; known are ", {"algorithm.server_lr"}),
        ("cohort=all", "cohort 'all' is unknown; known are ", {"everyone", "fraction", "uniform"}),
        ("cohort=true", "cohort True is unknown; known are ", {"everyone", "fraction", "uniform"}),
        ("cohort=[1,2]", "cohort [1, 2] is unknown; known are ", {"everyone", "fraction", "uniform"}),
        ("uplink=5", "uplink 5 is unknown; known are ", {"clip", "noise", "quantise", "topk"}),
        ("uplink=[{norm: 5}]", "uplink has no name, only norm; known are ", {"clip", "noise", "quantise", "topk"}),
    ],
)
def test_refused_with_a_list(word, said, names):
    """There may be more of them than these."""
    found = sentence(*([word] if "[" in word else word.split(" ")))
    assert found.startswith(said) and names <= set(found.removeprefix(said).split(", "))


@pytest.mark.parametrize(
    ("built", "words"),
    [
        (Experiment(rounds=0), ["rounds=0"]),
        (Experiment(clients="many"), ["clients=many"]),
        (Experiment(cohort=Uniform(0)), ["cohort=0"]),
        (Experiment(cohort=0), ["cohort=0"]),
        (Experiment(local=LocalTraining(lr=-1)), ["lr=-1"]),
        (Experiment(local=LocalTraining(schedule=Exponential(0))), ["schedule=exponential", "schedule.decay=0"]),
        (Experiment(evaluate=Evaluation(every=-1)), ["eval_every=-1"]),
        (Experiment(partition=PARTITIONS["dirichlet"](alpha=0)), ["alpha=0"]),
        (Experiment(algorithm="fedprx"), ["algorithm=fedprx"]),
        (Experiment(algorithm=FedProx(mu=-1)), ["algorithm=fedprox", "algorithm.mu=-1"]),
        (Experiment(algorithm=FineTuned(FedProx(mu=-1))), ["algorithm=fedprox+ft", "algorithm.base.mu=-1"]),
        (Experiment(uplink="clp"), ["uplink=clp"]),
        (Experiment(execution=Execution(engine="fast")), ["engine=fast"]),
        (Experiment(local=None), ["local=null"]),
    ],
)
def test_python_gets_the_same_sentences(built, words):
    with pytest.raises(BadInput) as caught:
        config.check(built)
    assert str(caught.value) == sentence(*words)


def test_python_may_be_as_short_as_the_command_line():
    short = Experiment(cohort=0.5, algorithm="scaffold+ft", model="mlp", uplink="clip,topk", data="mnist")
    assert config.check(short) == read(
        "cohort=0.5", "algorithm=scaffold+ft", "model=mlp", "uplink=clip,topk", "data=mnist"
    )


# ---- parts of the user's own ----
@dataclass(frozen=True)
class Mine(Algorithm):
    """Not in any registry."""

    strength: float = 0.5


def test_own_parts_survive_by_the_name_of_their_class(tmp_path):
    experiment = Experiment(algorithm=FineTuned(Mine(strength=2.0)))
    assert config.to_dict(experiment)["algorithm"]["base"]["is"] == f"{__name__}:Mine"
    file = tmp_path / "own.yaml"
    file.write_text(config.to_yaml(experiment))
    assert config.read(file) == experiment == config.check(experiment)
    assert read(f"algorithm={__name__}:Mine", "algorithm.strength=2").algorithm == Mine(strength=2.0)
    assert sentence(f"algorithm={__name__}:Mine", "algorithm.strenth=2").endswith("did you mean 'algorithm.strength'?")
    with pytest.raises(BadInput, match=r"^algorithm\.strength is 'very', but it should be a valid number$"):
        config.check(Experiment(algorithm=Mine(strength="very")))


def test_a_name_that_yaml_takes_for_an_answer():
    assert config.read(None, ["algorithm=fedsls", "algorithm.target=true"]).algorithm.target == "true"


@pytest.mark.parametrize(("word", "whose"), [("local.epochs=2", True), ("local.mu=2", False), ("rounds=2", False)])
def test_what_is_a_section_of_the_experiment(word, whose):
    assert config.is_section(word) == whose


def test_execution_is_a_section_in_python_and_flat_when_it_is_typed(tmp_path):
    where = Execution(device="cpu", ray=RayCluster("here:1"), out="1e5")
    assert read("device=cpu", "ray.address=here:1", "out=1e5") == Experiment(execution=where)
    typed = ["execution.device=cpu", "execution={ray: {address: 'here:1'}}", "out=1e5"]
    assert read(*typed) == Experiment(execution=where)
    file = tmp_path / "section.yaml"
    file.write_text("execution: {device: cuda, out: '1e5'}\nray: {address: 'here:1'}")
    assert read("device=cpu", file=file) == Experiment(execution=where)
    assert config.to_dict(Experiment(execution=where))["ray"] == {"address": "here:1"}
    assert sentence("execution=5").startswith("execution is 5, but it should have fields such as devices, engine")


def test_one_rule_says_what_can_change_a_result():
    same = Experiment().with_execution(engine="lanes", workers=2, out="x", track=("wandb",), compile=False, keep=3)
    assert config.science(same) == config.science(Experiment())
    assert config.science(same.with_execution(compile=True)) == config.science(same) | {"compile": True}
    assert sentence("compile=perhaps") == "compile is 'perhaps', but it should be true, false or auto"
    assert config.affects_results("precision") and config.affects_results("devices.up")
    assert not config.affects_results("ray.address")


# ---- data that lies apart by client ----
@pytest.fixture
def sites(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for number in range(6):
        (tmp_path / "sites" / f"site{number}" / "cat").mkdir(parents=True)
    (tmp_path / "sites" / ".cache").mkdir()
    (tmp_path / "few" / "site").mkdir(parents=True)
    (tmp_path / "two" / "train").mkdir(parents=True)
    for number in range(2):
        (tmp_path / "two" / "train" / f"{number}.npz").touch()
    return ["data=clients_folder", "data.path=sites"]


def test_data_that_lies_apart_stays_apart(sites):
    by_user, usual = PARTITIONS["by_user"], Experiment()
    found = read(*sites)
    assert (found.partition, found.clients, found.cohort) == (by_user(), 6, usual.cohort)
    assert read(*sites, "clients=4") == replace(found, clients=4)
    assert read(*sites, "partition=by-user") == found == read(*sites, "partition=null")
    assert read(*sites, "partition.more=merge", "num_clients=4").partition == by_user(more="merge")
    assert read(*sites, "partition.test=holdout").partition == by_user(test="holdout")
    pfllib = read("data=pfllib", "data.path=two")
    assert (pfllib.partition, pfllib.clients, pfllib.cohort) == (by_user(), 2, Everyone())
    few = ["data=clients_folder", "data.path=few"]
    assert [read(*few, word).cohort for word in ("cohort=2", "clients=1")] == [Uniform(2), usual.cohort]


def test_data_that_lies_apart_is_dealt_anew_when_that_is_asked_for(sites):
    dirichlet, usual = PARTITIONS["dirichlet"], Experiment()
    for words, partition in (
        (["partition=iid"], PARTITIONS["iid"]()),
        (["alpha=0.1"], dirichlet(alpha=0.1)),
        (["partition.alpha=0.1", "partition.min_size=1"], dirichlet(alpha=0.1, min_size=1)),
        (["partition=split.json"], PARTITIONS["file"]("split.json")),
    ):
        found = read(*sites, *words)
        assert (found.partition, found.clients, found.cohort) == (partition, usual.clients, usual.cohort)
    others = [name for name in DATASETS if name not in ("clients_folder", "pfllib")]
    assert all(read(f"data={name}").partition == dirichlet() for name in others)


def test_data_that_lies_apart_from_a_file_and_back(sites, tmp_path):
    file = tmp_path / "own.yaml"
    file.write_text("data: {is: clients_folder, path: sites}\nrounds: 3\n")
    found = read(file=file)
    assert found == replace(read(*sites), rounds=3)
    assert read("partition=iid", file=file).partition == PARTITIONS["iid"]()
    written = tmp_path / "config.yaml"
    written.write_text(config.to_yaml(found))
    (tmp_path / "sites").rename(tmp_path / "elsewhere")
    assert read(file=written) == found  # what was used is all there; nobody looks at the folders again
    assert read(*sites).clients == read().clients  # who prepares a deployment need not have the data
    for there, what in (
        (False, "but there is no such file or folder"),
        (True, "which is a file; clients_folder needs"),
    ):
        (tmp_path / "sites").touch() if there else None
        with pytest.raises(BadInput, match=f"data.path is 'sites', {what}"):
            read(*sites).data.load()


def test_presets_go_by_a_name_and_give_way_to_what_is_set_beside_them():
    even = config.read(words=["algorithm=fedsls/even"]).algorithm
    assert even == FedSLS(normalize="mean", blend=0.5, blend_with="uniform")
    assert config.read(words=["algorithm=FedSLS/Even", "algorithm.blend=0.3"]).algorithm == replace(even, blend=0.3)
    assert config.read(words=["algorithm=fedsls/even+ft"]).algorithm == FineTuned(base=even)
    bounded = config.read(words=["algorithm=fedxds/bounded", "algorithm.base=scaffold"]).algorithm
    assert bounded == FedXDS(accounting="bounded", base=type(bounded.base)())
    assert config.read(words=["algorithm=spatl/smaller"]).algorithm == SPATL(spend=True, settle=True)
    with pytest.raises(BadInput, match=r"^algorithm scaffold has no preset 'smaller'; it has its defaults"):
        config.read(words=["algorithm=scaffold/smaller"])
    with pytest.raises(BadInput, match=r"^algorithm fedsls has no preset 'evn'; did you mean 'even'\?$"):
        config.read(words=["algorithm=fedsls/evn"])
    with pytest.raises(BadInput, match=r"^algorithm fedavg has no preset 'even'; it has its defaults alone$"):
        config.read(words=["algorithm=fedavg/even"])
