"""Evaluation of a torch module at one or many vectors of weights.

    skeleton            `Network`: a module as a function of one flat vector; the user's module is never changed
    faster_layers       in-place ReLU and max-pooling by slices, in the skeleton alone
    evaluation          `Evaluation`: outputs, and values with gradients, at one or many vectors; chooses a strategy by
                        shapes and layer types
    layer_chain         strategy for sequences of linear layers: one batched product per layer
    vectorise           strategy by vmap, for small dense networks and for densities: `Vectorised`
    failures            NaN instead of an error, at the vectors where torch.linalg fails
    recorded_graph      strategy for samplers: a recorded graph of the whole log joint
    operation_recorder  records the operations of a function
    graph_rules         rewrites a recorded graph with fewer operations
    graph_slices        its rule for tensors that are read in slices, and `simplify_graph`, which applies all rules
    graph_function      turns a rewritten graph into a Python function
    layer_noise         `LayerNoise`: local reparameterisation and flipout of a network
    noisy_layers        their rules for one layer
    dropout_sites       `DropoutUnits`: the weights that dropping a unit sets to zero
    traced_dropout      the dropout that a network contains, found by tracing one pass
    row_masks           `RowMasks`: dropout with one mask per row
    dropout_off         `DropoutOff`: switches off dropout functions

Models own an `Evaluation`; methods and posteriors call the model or its target, and never run a module themselves.
"""

from priory.network.dropout_off import DropoutOff
from priory.network.dropout_sites import DropoutSite, DropoutUnits, sites_by_layer
from priory.network.evaluation import Evaluation
from priory.network.layer_chain import SharedInputs
from priory.network.layer_noise import LayerNoise
from priory.network.recorded_graph import RecordedGraph
from priory.network.row_masks import RowMasks
from priory.network.skeleton import MEMORY_LIMIT, Network
from priory.network.traced_dropout import sites_in_network
from priory.network.vectorise import Vectorised

__all__ = [
    "MEMORY_LIMIT",
    "DropoutOff",
    "DropoutSite",
    "DropoutUnits",
    "Evaluation",
    "LayerNoise",
    "Network",
    "RecordedGraph",
    "RowMasks",
    "SharedInputs",
    "Vectorised",
    "sites_by_layer",
    "sites_in_network",
]
