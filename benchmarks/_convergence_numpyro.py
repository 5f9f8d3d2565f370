"""SVI of NumPyro on a Gaussian target, for `convergence.py`.

Run in an environment with NumPyro, without Priory or torch. Reads {"mean", "covariance"} as JSON from the standard
input, and writes loc, scale factor and seconds of each guide: `AutoNormal` and `AutoMultivariateNormal` with Adam at
0.01 for 10,000 steps, in 64 bits.
"""
# pyright: reportMissingImports=false

from __future__ import annotations

import json
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoMultivariateNormal, AutoNormal

jax.config.update("jax_enable_x64", True)
STEPS, RATE = 10_000, 0.01


def main() -> None:
    given = json.load(sys.stdin)
    mean = jnp.asarray(given["mean"])
    precision = jnp.linalg.inv(jnp.asarray(given["covariance"]))

    def model() -> None:
        x = numpyro.sample("x", dist.ImproperUniform(dist.constraints.real, (), (len(mean),)))
        numpyro.factor("target", -0.5 * (x - mean) @ precision @ (x - mean))

    found = {}
    for guide in (AutoNormal(model), AutoMultivariateNormal(model)):
        began = time.process_time()
        svi = SVI(model, guide, numpyro.optim.Adam(RATE), Trace_ELBO())
        fitted = jax.block_until_ready(svi.run(jax.random.PRNGKey(0), STEPS, progress_bar=False))
        seconds, params = time.process_time() - began, fitted.params
        if isinstance(guide, AutoNormal):
            loc, tril = params["x_auto_loc"], params["x_auto_scale"]
        else:
            loc, tril = params["auto_loc"], params["auto_scale_tril"]
        parts = {"loc": np.asarray(loc).tolist(), "tril": np.asarray(tril).tolist()}
        found[type(guide).__name__] = {**parts, "seconds": seconds}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
