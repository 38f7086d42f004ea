import pytest
import torch

from fedlens.core.tree import Tree, _copies, dot, grad, mean


def tree(**shapes):
    return Tree({name: torch.arange(1.0, size + 1) for name, size in shapes.items()})


def test_arithmetic_agrees_by_name_not_by_order():
    a, b = Tree(p=torch.tensor(1.0), q=torch.tensor(2.0)), Tree(q=torch.tensor(20.0), p=torch.tensor(10.0))
    assert (a + b).p == 11 and (a + b).q == 22
    assert (b - a).p == 9 and (a * b).q == 40 and (b / a).p == 10
    assert (a * 3).q == 6 and (3 * a).q == 6 and (a * torch.tensor(3.0)).q == 6
    assert dot(a, b) == 50


def test_trees_of_other_names_are_refused():
    with pytest.raises(KeyError, match="q"):
        tree(p=1) + tree(p=1, q=1)


def test_traps_are_closed():
    t = tree(p=2)
    with pytest.raises(AttributeError):
        t.x = 1
    with pytest.raises(KeyError, match="values"):
        Tree(values=torch.ones(1))
    with pytest.raises(AttributeError, match="no 'z' among p"):
        t.z  # noqa: B018
    held = t
    t |= tree(q=1)
    assert "q" in t and "q" not in held


def test_laying_over_and_replacing():
    old = Tree(rows=tree(conv1=1), other=torch.ones(1))
    assert (old | Tree(rows=tree(conv2=1))).rows.keys() == {"conv1", "conv2"}
    assert old.replace(rows=tree(conv2=1)).rows.keys() == {"conv2"}
    assert old.within(Tree(rows=tree(conv1=3))).keys() == {"rows"}
    assert old.select(lambda name: name == "conv1").keys() == {"rows"}


def test_empty_trees_pass_through_arithmetic():
    none = Tree(params=Tree(), buffers=Tree())
    assert (none + none).leaves() == [] and (none * 2).nbytes == 0
    assert mean([none, none], [1, 2]).leaves() == []
    assert dot(none, none) == 0


def test_mean_divides_in_double():
    ones = [Tree(p=torch.ones(3, dtype=torch.float64) * v) for v in (1.0, 2.0, 4.0)]
    found = mean(ones, [torch.tensor(13.0), 4, 9]).p
    assert torch.allclose(found, torch.full((3,), (13 + 8 + 36) / 26, dtype=torch.float64), atol=1e-15)


@pytest.mark.parametrize("weights", [[0.0, 0.0], [float("nan"), 1.0], [float("inf"), 1.0], [2.0, -1.0]])
def test_mean_refuses_weights_that_are_none(weights):
    with pytest.raises(ValueError, match="weights"):
        mean([tree(p=1), tree(p=1)], weights)


def test_grad_is_zero_where_nothing_depends():
    params = Tree(p=torch.ones(2, requires_grad=True), q=torch.ones(1, requires_grad=True))
    found = grad((params.p**2).sum(), params)
    assert found.p.tolist() == [2, 2] and found.q.tolist() == [0]


def test_copy_writes_into_the_same_storage():
    a, b = tree(p=2, q=1), tree(p=2, q=1) * 5
    storage = a.p.data_ptr()
    a.copy_(b)
    assert a.p.tolist() == [5, 10] and a.p.data_ptr() == storage
    assert a.nbytes == 12


def test_a_leaf_that_occurs_twice_is_copied_twice():
    leaf, mask = torch.arange(3.0), torch.tensor([True])
    one, two, *masks = _copies([leaf, leaf, mask, mask])  # as on a GPU; elsewhere every leaf is cloned by itself
    one += 1
    assert two.tolist() == leaf.tolist() == [0, 1, 2]
    assert masks[0].data_ptr() != masks[1].data_ptr()
