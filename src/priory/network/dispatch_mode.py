"""The base of all contexts that see each operation of torch."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode


class DispatchMode(TorchDispatchMode):
    """A context that sees each operation below vmap and autograd.

    torch hides such a context from its compiler, and for that imports the compiler at the first operation. This takes
    1.1 s, more than a sampler needs for an ordinary regression. Nothing is compiled inside these contexts.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False
