"""A step as one graph of plain operators, compiled once for all numbers of clients.

The step is traced by running it on shapes alone. The graph has no transforms, rules or layers left,
only plain operators. It compiles faster, and a layer may have a gradient of its own. `vmap` writes
the number of clients into the graph, as a factor of constants. So the step is traced for several
numbers of clients, and the constants that grow with them become products with that number.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.source import ConstantSource
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils._pytree import tree_flatten, tree_unflatten

Flat = Callable[..., Sequence[Tensor]]

WIDTHS = (
    5,
    7,
    11,
)  # numbers of clients that are traced; primes, so no constant fits by chance


_GROUPED = (torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default)


class Unlike(ValueError):
    """Graphs that differ by more than the number of clients."""


class Compiled:
    """A step that is compiled when it is called: once for one client, once for any number more.

    A graph that depends on the number of clients in another way is compiled for each of them.

    Args:
        step: takes two trees of tensors with one row a client (and scalars), then other tensors; of
            one shape throughout, but for the number of clients. To be taken more than once, it
            returns a tree like the first.
        backend: what compiles.
    """

    def __init__(self, step: Callable[..., Any], backend: str) -> None:
        self._step = step
        self._backend = backend
        self._graphs: list[_Graph] = []
        self._of: dict[int, Flat] = {}  # by number of clients
        self._returned: Any = None  # the structure of what the step returns

    @property
    def count(self) -> int:
        """How often the step was compiled."""
        return len(self._graphs)

    @property
    def fixed(self) -> bool:
        """Whether it must be compiled for every number of clients."""
        return any(graph.clients > 1 and not graph.free for graph in self._graphs)

    def __call__(self, progress: Any, batches: Any, *data: Tensor, count: int = 1) -> Any:
        """Take the step `count` times, each time from what the last one returned."""
        leaves, given = tree_flatten((progress, batches, *data))
        clients = len(leaves[0])
        if clients not in self._of:

            def flat(*inputs: Tensor) -> Sequence[Tensor]:
                after = self._step(*tree_unflatten(inputs, given))
                outputs, self._returned = tree_flatten(after)
                return outputs

            if not any(graph.fits(leaves) for graph in self._graphs):
                rows = len(leaves) - len(data)
                mapped = [i < rows and leaf.dim() > 0 for i, leaf in enumerate(leaves)]
                self._graphs.append(_Graph(flat, leaves, mapped, self._backend))
            self._of[clients] = next(g.run for g in self._graphs if g.fits(leaves))
        advance = self._of[clients]
        moved = leaves
        for _ in range(count):
            moved = [*advance(*leaves)]
            leaves[: len(moved)] = moved
        return tree_unflatten(moved, self._returned)


class _Graph:
    """One compiled graph.

    Args:
        flat: the step, from tensors to tensors.
        leaves: inputs it is wanted for.
        mapped: which of them have one row a client.
        backend: what compiles.
    """

    def __init__(self, flat: Flat, leaves: list[Tensor], mapped: list[bool], backend: str) -> None:
        self.clients = len(leaves[0])
        graph = _any_number(flat, leaves, mapped)
        self.free = True
        if graph is None:
            graph = traced(flat, leaves, mapped, self.clients)
            self.free = False
        self._shapes = ShapeEnv()
        mode = FakeTensorMode(shape_env=self._shapes, allow_non_fake_inputs=True)
        self._inputs = [
            mode.from_tensor(
                leaf,
                # without a name, or the value of a scalar would become a constant
                source=ConstantSource(f"input{i}") if leaf.dim() else None,
                symbolic_context=_sizes(leaf, mapped[i] and self.free),
            )
            for i, leaf in enumerate(leaves)
        ]
        with tracing(TracingContext(mode)):
            self.run: Flat = torch._dynamo.lookup_backend(backend)(graph, [*self._inputs])

    def fits(self, leaves: list[Tensor]) -> bool:
        """Whether the graph can be used for these inputs."""
        if not self.free:
            return len(leaves[0]) == self.clients
        return self._shapes.evaluate_guards_for_args(self._inputs, leaves, ignore_static=False)


def _sizes(leaf: Tensor, free: bool) -> StatelessSymbolicContext[Any, Any]:
    """Mark all sizes of a tensor as fixed, or all but the first."""
    fixed = [DimDynamic.STATIC] * leaf.dim()
    return StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DUCK, *fixed[1:]] if free else fixed)


def _any_number(flat: Flat, leaves: list[Tensor], mapped: list[bool]) -> GraphModule | None:
    """Return a graph for any number of clients above one, or None where there is none."""
    if len(leaves[0]) == 1:
        return None
    try:
        return generalised([traced(flat, leaves, mapped, clients) for clients in WIDTHS])
    except Unlike:
        return None


def traced(flat: Flat, leaves: list[Tensor], mapped: list[bool], clients: int) -> GraphModule:
    """Return the graph of the step for a number of clients; nothing is computed."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        inputs = [
            leaf.new_empty((clients, *leaf.shape[1:]) if has_rows else leaf.shape)
            for leaf, has_rows in zip(leaves, mapped, strict=True)
        ]
        return make_fx(flat, tracing_mode="real", _allow_non_fake_inputs=True)(*inputs)


def generalised(graphs: Sequence[GraphModule]) -> GraphModule:
    """Return the first graph with its number of clients read from the first input.

    Args:
        graphs: of one step, for the numbers of clients in `WIDTHS`.
    """
    graph = graphs[0].graph
    nodes = [list(each.graph.nodes) for each in graphs]
    inputs = [node for node in nodes[0] if node.op == "placeholder"]
    with graph.inserting_after(inputs[-1]):
        clients = graph.call_function(torch.ops.aten.sym_size.int, (inputs[0], 0))
    if len({len(each) for each in nodes}) > 1:
        raise Unlike("graphs of different length")
    for same in zip(*nodes, strict=True):
        flat = [tree_flatten((node.args, node.kwargs)) for node in same]
        kinds = [(node.op, node.target, spec) for node, (_, spec) in zip(same, flat, strict=True)]
        if any(kind != kinds[0] for kind in kinds):
            raise Unlike(f"{same[0]} is another operator for another number of clients")
        values = zip(*(leaves for leaves, _ in flat), strict=True)
        arguments = [_argument(same[0], clients, each) for each in values]
        if same[0].target in _GROUPED and arguments != flat[0][0]:
            raise Unlike(f"{same[0]} has a group for each client, a number that compilers fix")
        same[0].args, same[0].kwargs = tree_unflatten(arguments, flat[0][1])
    graphs[0].recompile()
    return graphs[0]


def _argument(node: Node, clients: Node, values: tuple[Any, ...]) -> Any:
    """Return an argument of a node: as it is, or as a multiple of the number of clients."""
    if isinstance(values[0], Node) or len({repr(value) for value in values}) == 1:
        return values[0]
    factor = values[0] // WIDTHS[0] if isinstance(values[0], int) else 0
    if not factor or any(v != factor * n for v, n in zip(values, WIDTHS, strict=True)):
        raise Unlike(f"{node} takes {values} for {WIDTHS} clients")
    with node.graph.inserting_before(node):
        return node.graph.call_function(operator.mul, (clients, factor))
