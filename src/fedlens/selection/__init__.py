"""Which filters of a network matter: its layer graph, an agent that chooses, and the smaller network that is left."""

from .agent import pretrained_agent, save_agent
from .graph import LayerGraph, layer_graph
from .pruning import Choice, Costs, Kept, masked, sliced
