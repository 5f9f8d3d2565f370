"""The equivalence between penalties and priors in variational inference.

Public entry points and results:

    from_penalty          `prior_from_penalty`: checks the arguments and dispatches on family and input
    from_prior            `penalty_from_prior`
    heat_equation         `heat_residual`, `heat_residual_matrix`
    result, certificate   `Equivalence`, `Certificate`
    inputs                `Table`, and how a penalty may be given: as a function or as a table

Inversion, by kind of family and of input:

    from_function         location-scale families, penalty given as a function (uses `deconvolution`, `grid`)
    from_table            location-scale families, penalty given as a table, or scale fixed (uses `spline`)
    atoms_from_function   Dirac, dropout, spike and slab, penalty given as a function
    atoms_from_table      Dirac, dropout, spike and slab, penalty given as a table

References:
    Wolinski, Charpiat and Ollivier (2020), An equivalence between Bayesian priors and penalties in variational
    inference, arXiv:2002.00178.
"""
