"""How a torch module is evaluated at one parameter vector or at many."""
