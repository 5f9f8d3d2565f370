"""scikit-learn's estimators over this library's EM: scikit-learn's own checks, and its numbers from the same start."""

import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import sklearn.mixture
import torch
from scipy.special import logsumexp
from scipy.stats import multivariate_normal, norm
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import GridSearchCV
from sklearn.utils.estimator_checks import parametrize_with_checks

from priory import latent
from priory.core.errors import InputError
from priory.sklearn import HMM, BayesianGaussianMixture, GaussianMixture

SHAPES = ("full", "tied", "diag", "spherical")


def clouds(n: int = 150, seed: int = 0) -> np.ndarray:
    random = np.random.default_rng(seed)
    centres = np.array([[0.0, 0.0], [4.0, 1.0], [1.0, 5.0]])
    return centres[np.arange(n) % 3] + random.normal(size=(n, 2)) @ np.array([[1.0, 0.4], [0.0, 0.7]])


def start(kind: str) -> dict[str, np.ndarray]:
    precisions = {
        "full": np.stack([np.eye(2), 2 * np.eye(2), 0.5 * np.eye(2)]),
        "tied": np.array([[1.0, 0.2], [0.2, 2.0]]),
        "diag": np.array([[1.0, 2.0], [1.0, 1.0], [0.5, 1.0]]),
        "spherical": np.array([1.0, 2.0, 0.5]),
    }
    means = np.array([[0.5, 0.0], [3.0, 1.0], [2.0, 3.0]])
    return {"weights_init": np.array([0.2, 0.5, 0.3]), "means_init": means, "precisions_init": precisions[kind]}


def chain(n: int = 300, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Rows of a chain of two states, and the states."""
    random = np.random.default_rng(seed)
    states = np.zeros(n, dtype=int)
    for t in range(1, n):
        states[t] = states[t - 1] if random.random() < 0.9 else 1 - states[t - 1]
    return np.array([[0.0, 0.0], [3.0, -2.0]])[states] + random.normal(size=(n, 2)), states


# scikit-learn's own.


@pytest.mark.filterwarnings("ignore::priory.core.errors.PrioryWarning", "ignore::UserWarning")
@parametrize_with_checks([GaussianMixture(), BayesianGaussianMixture(), HMM()])
def test_scikit_learns_checks_pass(estimator, check):
    check(estimator)


@pytest.mark.parametrize("kind", SHAPES)
def test_fifty_iterations_from_the_same_start_are_scikit_learns(kind: str):
    X = clouds()
    theirs = sklearn.mixture.GaussianMixture(3, covariance_type=kind, tol=0, max_iter=50, reg_covar=0, **start(kind))
    with pytest.warns(ConvergenceWarning):
        theirs.fit(X)
    ours = GaussianMixture(3, covariance_type=kind, tol=0, max_iter=50, **start(kind)).fit(X)
    assert ours.n_iter_ == 50
    for name in ("weights_", "means_", "covariances_", "precisions_", "precisions_cholesky_"):
        np.testing.assert_allclose(getattr(ours, name), getattr(theirs, name), rtol=1e-7, atol=1e-9)
    for name in ("predict", "predict_proba", "score_samples"):
        np.testing.assert_allclose(getattr(ours, name)(X), getattr(theirs, name)(X), rtol=1e-7, atol=1e-9)
    for name in ("score", "bic", "aic"):
        assert getattr(ours, name)(X) == pytest.approx(getattr(theirs, name)(X), rel=1e-9)
    assert ours.lower_bound_ == pytest.approx(ours.score(X), rel=1e-10)
    assert np.all(np.diff(ours.lower_bounds_) > -1e-10)


def test_the_bayesian_mixture_ends_where_scikit_learns_does():
    X = clouds()
    options = {
        "weight_concentration_prior_type": "dirichlet_distribution",
        "weight_concentration_prior": 0.7,
        "mean_precision_prior": 0.5,
        "mean_prior": [1.0, 2.0],
        "degrees_of_freedom_prior": 5.0,
        "covariance_prior": np.array([[2.0, 0.3], [0.3, 1.0]]),
        "tol": 1e-13,
        "max_iter": 1000,
        "random_state": 0,
    }
    theirs = sklearn.mixture.BayesianGaussianMixture(n_components=3, reg_covar=0, **options).fit(X)
    ours = BayesianGaussianMixture(3, **options).fit(X)
    mine, other = ours.means_[:, 0].argsort(), theirs.means_[:, 0].argsort()
    for name in ("weights_", "means_", "covariances_", "degrees_of_freedom_", "mean_precision_", "precisions_"):
        np.testing.assert_allclose(getattr(ours, name)[mine], getattr(theirs, name)[other], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(ours.predict_proba(X)[:, mine], theirs.predict_proba(X)[:, other], atol=1e-5)


# What scikit-learn's don't do.


@pytest.mark.parametrize("kind", SHAPES)
def test_weights_are_repetitions(kind: str):
    X, times = clouds(), np.arange(150) % 4
    options = {"covariance_type": kind, "tol": 0, "max_iter": 20, **start(kind)}
    weighted = GaussianMixture(3, **options).fit(X, sample_weight=times)
    repeated = GaussianMixture(3, **options).fit(np.repeat(X, times, axis=0))
    np.testing.assert_allclose(weighted.means_, repeated.means_, rtol=1e-8)
    np.testing.assert_allclose(weighted.covariances_, repeated.covariances_, rtol=1e-7)
    assert weighted.lower_bound_ == pytest.approx(repeated.lower_bound_, rel=1e-10)


def test_weights_of_the_bayesian_mixture_are_repetitions_also_in_its_priors():
    X, times = clouds(), 1 + np.arange(150) % 3
    options = {"n_components": 3, "tol": 1e-12, "max_iter": 300, "random_state": 0}
    weighted = BayesianGaussianMixture(**options).fit(X, sample_weight=times)
    repeated = BayesianGaussianMixture(**options).fit(np.repeat(X, times, axis=0))
    np.testing.assert_allclose(weighted.mean_prior_, repeated.mean_prior_, rtol=1e-12)
    np.testing.assert_allclose(weighted.covariance_prior_, repeated.covariance_prior_, rtol=1e-12, atol=1e-12)
    assert weighted.lower_bound_ == pytest.approx(repeated.lower_bound_, rel=1e-8)


def test_a_missing_value_is_marginalised_out():
    X = clouds()
    mixture = GaussianMixture(3, random_state=0).fit(X)
    marginal = [
        np.log(w) + multivariate_normal.logpdf(X[:5, 1], m[1], c[1, 1])
        for w, m, c in zip(mixture.weights_, mixture.means_, mixture.covariances_, strict=True)
    ]
    holes = X[:5].copy()
    holes[:, 0] = np.nan
    np.testing.assert_allclose(mixture.score_samples(holes), logsumexp(marginal, axis=0), rtol=1e-9)
    X[::7, 0], X[4::7, 1] = np.nan, np.nan
    again = GaussianMixture(3, random_state=0, max_iter=500).fit(X)
    order = [int(np.square(again.means_ - mean).sum(1).argmin()) for mean in mixture.means_]
    assert sorted(order) == [0, 1, 2]
    assert np.abs(again.means_[order] - mixture.means_).max() < 0.4  # about 4 standard errors of the rows that are gone


@pytest.mark.parametrize("kind", SHAPES)
def test_minibatches_average_the_statistics(kind: str):
    X = clouds()
    online = GaussianMixture(3, covariance_type=kind, learning_decay=0.6, **start(kind))
    model, _ = latent.GaussianMixture(3, kind).meet(X[:50])  # a frame of the first rows: S is the same in any
    given = start(kind)
    spread = 1 / given["precisions_init"] if kind in ("diag", "spherical") else np.linalg.inv(given["precisions_init"])
    theta = {"weights": given["weights_init"], "means": given["means_init"], "covariances": spread}
    theta = {name: torch.as_tensor(t) for name, t in theta.items()}
    total = torch.zeros(())
    for t, batch in enumerate((X[:50], X[50:100], X[100:])):
        online.partial_fit(batch)
        (found,) = latent.expect(model, [theta], [(torch.as_tensor(batch),)], 1 / 50)
        rate = (t + 1) ** -0.6
        total = (1 - rate) * total + rate * found.statistics["sums"]
        theta = model.m_step({"sums": total}, theta)
        assert online.lower_bound_ == pytest.approx(float(found.bound), rel=1e-9)
    np.testing.assert_allclose(online.weights_, theta["weights"].numpy(), rtol=1e-9)
    np.testing.assert_allclose(online.means_, theta["means"].numpy(), rtol=1e-8, atol=1e-9)
    np.testing.assert_allclose(online.covariances_, theta["covariances"].numpy(), rtol=1e-7, atol=1e-9)
    assert online.n_samples_seen_ == 150


def test_a_batch_after_a_fit_counts_as_much_as_its_rows():
    X = clouds(600)
    whole = GaussianMixture(3, tol=1e-9, max_iter=1000, random_state=0, learning_decay=1.0).fit(X)
    means = whole.means_.copy()
    whole.partial_fit(X[:60])  # 10 batches were seen, so r = 1/11
    assert 0 < np.abs(whole.means_ - means).max() < 0.1
    assert whole.n_samples_seen_ == 660
    fixed = clone(whole).set_params(warm_start=True).fit(X)
    fixed.n_samples_seen_ = 0
    before = fixed.means_.copy()
    fixed.partial_fit(X)  # with r = 1 it is an iteration of EM, which has settled
    np.testing.assert_allclose(fixed.means_, before, atol=1e-3)


def test_the_bound_chooses_the_number_of_components():
    X = clouds(300)
    options = {"weight_concentration_prior_type": "dirichlet_distribution", "weight_concentration_prior": 1.0}
    found = [
        BayesianGaussianMixture(k, n_init=3, max_iter=500, mean_precision_prior=0.01, random_state=0, **options)
        .fit(X)
        .log_evidence_
        for k in (1, 2, 3, 4, 5)
    ]
    assert int(np.argmax(found)) == 2


def test_spare_components_of_the_bayesian_mixture_stay_empty():
    mixture = BayesianGaussianMixture(8, n_init=3, max_iter=2000, random_state=0).fit(clouds(300))
    assert np.sum(mixture.weights_ > 0.02) == 3
    assert np.all(np.diff(mixture.lower_bounds_) > -1e-8)
    assert mixture.weights_.sum() == pytest.approx(1, abs=1e-12)


# Draws.


@pytest.mark.parametrize("kind", SHAPES)
def test_sampled_rows_have_the_fitted_moments(kind: str):
    mixture = GaussianMixture(3, covariance_type=kind, random_state=0).fit(clouds())
    X, labels = mixture.sample(30_000)
    for k in range(3):
        rows = X[labels == k]
        spread = {"full": lambda k: mixture.covariances_[k], "tied": lambda _: mixture.covariances_}.get(
            kind, lambda k: np.eye(2) * mixture.covariances_[k]
        )(k)
        deviation = np.sqrt(np.diag(spread))
        assert len(rows) == pytest.approx(30_000 * mixture.weights_[k], abs=5 * np.sqrt(30_000 / 4))
        # 24 comparisons at 5 standard errors: false alarms below 2e-5
        assert np.all(np.abs(rows.mean(0) - mixture.means_[k]) < 5 * deviation / np.sqrt(len(rows)))
        away = (rows - mixture.means_[k]) / deviation
        error = (away.T @ away / len(rows) - spread / np.outer(deviation, deviation)) * np.sqrt(len(rows) / 2)
        assert np.all(np.abs(error) < 5)


@pytest.mark.parametrize("kind", ["full", "diag"])
def test_the_bayesian_mixture_samples_from_the_density_that_scores_rows(kind: str):
    mixture = BayesianGaussianMixture(covariance_type=kind, random_state=0).fit(clouds(6))
    X, _ = mixture.sample(200_000)
    middle = np.arange(-49.75, 50, 0.5)
    grid = np.stack(np.meshgrid(middle, middle), -1).reshape(-1, 2)
    density = np.exp(mixture.score_samples(grid)) * 0.5**2
    assert density.sum() == pytest.approx(1, abs=1e-3)  # the tails of t go further
    for column, edge in ((0, -1.0), (0, 4.0), (1, -1.0), (1, 5.0)):
        share, drawn = density[grid[:, column] < edge].sum(), (X[:, column] < edge).mean()
        # 8 comparisons at 5 standard errors: false alarms below 5e-6
        assert drawn == pytest.approx(share, abs=5 * np.sqrt(share * (1 - share) / 200_000) + 1e-3)


# Hidden Markov.


def forward(model: HMM, X: np.ndarray) -> tuple[float, np.ndarray]:
    """log p(X) and p(z_t | X) of one sequence, by sums over all paths two steps at a time."""
    k = model.n_components
    each = [multivariate_normal.logpdf(X, model.means_[j], model.covars_[j]) for j in range(k)]
    log_b, log_a = np.stack(each, 1), np.log(model.transmat_)
    ahead, back = np.empty_like(log_b), np.zeros_like(log_b)
    ahead[0] = np.log(model.startprob_) + log_b[0]
    for t in range(1, len(X)):
        ahead[t] = log_b[t] + logsumexp(ahead[t - 1][:, None] + log_a, axis=0)
    for t in range(len(X) - 2, -1, -1):
        back[t] = logsumexp(log_a + log_b[t + 1] + back[t + 1], axis=1)
    evidence = logsumexp(ahead[-1])
    return evidence, np.exp(ahead + back - evidence)


def test_the_chain_scores_and_smooths_sequences_by_their_lengths():
    X, states = chain()
    model = HMM(2, random_state=0).fit(X, lengths=[120, 80, 100])
    parts = [X[:120], X[120:200], X[200:]]
    exact = [forward(model, part) for part in parts]
    total = sum(evidence for evidence, _ in exact)
    assert model.score(X, lengths=[120, 80, 100]) == pytest.approx(total, rel=1e-9)
    assert model.lower_bound_ == pytest.approx(total, rel=1e-9)
    smoothed = np.concatenate([q for _, q in exact])
    np.testing.assert_allclose(model.predict_proba(X, lengths=[120, 80, 100]), smoothed, atol=1e-8)
    assert model.score(X) == pytest.approx(forward(model, X)[0], rel=1e-9)
    agreed = (model.predict(X, lengths=[120, 80, 100]) == states).mean()
    assert max(agreed, 1 - agreed) > 0.95
    free = 1 + 2 + 4 + 6
    assert model.bic(X) == pytest.approx(-2 * model.score(X) + free * np.log(300))
    assert model.aic(X) == pytest.approx(-2 * model.score(X) + 2 * free)


def test_a_missing_step_is_marginalised_out_of_the_chain():
    X, _ = chain(40)
    model = HMM(2, random_state=0).fit(X)
    holes = X.copy()
    holes[7] = np.nan
    log_b = np.stack([multivariate_normal.logpdf(X, model.means_[j], model.covars_[j]) for j in range(2)], 1)
    log_b[7] = 0
    message = np.log(model.startprob_) + log_b[0]
    for t in range(1, 40):
        message = log_b[t] + logsumexp(message[:, None] + np.log(model.transmat_), axis=0)
    assert model.score(holes) == pytest.approx(logsumexp(message), rel=1e-9)
    assert np.isfinite(model.predict_proba(holes)).all()


def test_a_missing_value_is_marginalised_out_of_the_chain_and_its_path_is_scored():
    X, _ = chain(40)
    model = HMM(2, random_state=0).fit(X)
    holes = X.copy()
    holes[7, 1] = np.nan
    log_b = np.stack([multivariate_normal.logpdf(X, model.means_[j], model.covars_[j]) for j in range(2)], 1)
    log_b[7] = norm.logpdf(X[7, 0], model.means_[:, 0], np.sqrt(model.covars_[:, 0, 0]))
    message = np.log(model.startprob_) + log_b[0]
    for t in range(1, 40):
        message = log_b[t] + logsumexp(message[:, None] + np.log(model.transmat_), axis=0)
    assert model.score(holes) == pytest.approx(logsumexp(message), rel=1e-9)
    log_p, path = model.decode(holes)
    pairs = np.log(model.transmat_)[path[:-1], path[1:]].sum()
    wanted = np.log(model.startprob_)[path[0]] + pairs + log_b[np.arange(40), path].sum()
    assert log_p == pytest.approx(wanted, rel=1e-9)
    np.testing.assert_array_equal(path, model.predict(holes))
    refitted = HMM(2, random_state=0).fit(holes)
    assert refitted.lower_bound_ >= model.score(holes) - 1e-6


@pytest.mark.parametrize("emissions", ["gaussian", "poisson", "categorical"])
def test_a_fit_to_a_sampled_sequence_recovers_the_chain(emissions: str):
    _, states = chain(3000)
    random = np.random.default_rng(1)
    made = {
        "gaussian": lambda: 4.0 * states[:, None] + random.normal(size=(3000, 1)),
        "poisson": lambda: random.poisson(1 + 7 * states)[:, None],
        "categorical": lambda: np.where(random.random(3000) < 0.9, states, 2)[:, None],
    }
    model = HMM(2, emissions=emissions, random_state=0, max_iter=300).fit(made[emissions]())
    X, hidden = model.sample(6000)
    assert X.shape == (6000, 1)
    stay = (hidden[1:] == hidden[:-1]).mean()
    share = np.linalg.matrix_power(model.transmat_, 200)[0]
    # 5 standard errors of a share that is correlated over about 10 steps: false alarms below 1e-6
    assert stay == pytest.approx((share * np.diag(model.transmat_)).sum(), abs=5 * 0.3 / np.sqrt(6000))
    again = HMM(2, emissions=emissions, random_state=0, max_iter=300).fit(X)
    name = {"gaussian": "means_", "poisson": "lambdas_", "categorical": "emissionprob_"}[emissions]
    old, fresh = (getattr(m, name) for m in (model, again))
    fresh = fresh[[int(np.square(fresh - row).sum(1).argmin()) for row in old]]
    np.testing.assert_allclose(fresh, old, atol=0.25)  # 5 standard errors of a rate near 8 from 3,000 steps
    assert (again.predict(X) == again.predict_proba(X).argmax(1)).mean() > 0.8


# As an estimator.


def test_an_estimator_can_be_pickled_cloned_and_used_in_a_grid_search():
    X = clouds()
    for estimator in (GaussianMixture(2, random_state=0), BayesianGaussianMixture(2, random_state=0)):
        fitted = estimator.fit(X)
        same = pickle.loads(pickle.dumps(fitted))
        np.testing.assert_array_equal(same.predict_proba(X), fitted.predict_proba(X))
        np.testing.assert_array_equal(clone(fitted).fit(X).means_, fitted.means_)
        np.testing.assert_array_equal(clone(fitted).fit_predict(X), fitted.predict(X))
    found = GridSearchCV(GaussianMixture(random_state=0, max_iter=300, n_init=3), {"n_components": [1, 3]}).fit(X)
    assert found.best_params_ == {"n_components": 3}


def test_a_warm_start_continues_where_the_last_fit_ended():
    X = clouds()
    once = GaussianMixture(3, tol=0, max_iter=20, random_state=0, **start("full")).fit(X)
    twice = GaussianMixture(3, tol=0, max_iter=10, random_state=0, warm_start=True, **start("full")).fit(X).fit(X)
    np.testing.assert_allclose(twice.means_, once.means_, rtol=1e-9)
    bayes = BayesianGaussianMixture(3, tol=1e-12, max_iter=2000, random_state=0, warm_start=True).fit(X)
    assert bayes.fit(X).n_iter_ <= 2


def test_single_precision_stays_single():
    X = clouds().astype(np.float32)
    assert GaussianMixture(3, random_state=0).fit(X).means_.dtype == np.float32
    assert HMM(2, random_state=0).fit(X).means_.dtype == np.float32


def test_too_few_iterations_raise_a_convergence_warning():
    for estimator in (GaussianMixture(3, max_iter=1), BayesianGaussianMixture(3, max_iter=1), HMM(3, max_iter=1)):
        with pytest.warns(ConvergenceWarning, match="did not converge in 1 iterations. Raise max_iter"):
            estimator.fit(clouds())
        assert estimator.converged_ is False


BAD = [
    (GaussianMixture(0), "The 'n_components' argument of GaussianMixture must be an integer >= 1, got 0."),
    (GaussianMixture(tol=-1), "The 'tol' argument of GaussianMixture must be a number >= 0, got -1."),
    (GaussianMixture(max_iter=0), "The 'max_iter' argument of GaussianMixture must be an integer >= 1, got 0."),
    (GaussianMixture(n_init=0), "The 'n_init' argument of GaussianMixture must be an integer >= 1, got 0."),
    (
        GaussianMixture(covariance_type="round"),
        "The 'covariance_type' argument of GaussianMixture must be one of full, tied",
    ),
    (
        GaussianMixture(init_params="best"),
        "The 'init_params' argument of GaussianMixture must be one of kmeans, k-means",
    ),
    (GaussianMixture(reg_covar=0), "The 'reg_covar' argument of GaussianMixture must lie between 0 and 1, got 0."),
    (
        GaussianMixture(2, means_init=[0.0]),
        r"The 'means_init' argument of GaussianMixture must have the shape "
        r"\(2, 2\)",
    ),
    (
        GaussianMixture(weights_init=[2.0]),
        "The 'weights_init' argument of GaussianMixture must be positive and add up to 1",
    ),
    (
        GaussianMixture(precisions_init=[[[1.0, 2.0], [2.0, 1.0]]]),
        "The 'precisions_init' argument of GaussianMixture must be po",
    ),
    (BayesianGaussianMixture(covariance_type="tied"), "must be one of full, diag, got 'tied'."),
    (BayesianGaussianMixture(weight_concentration_prior_type="p"), "must be one of dirichlet_process, dirichlet_d"),
    (
        BayesianGaussianMixture(weight_concentration_prior=0),
        "'weight_concentration_prior' argument of Bay.* must be a positive",
    ),
    (
        BayesianGaussianMixture(mean_precision_prior="a"),
        "The 'mean_precision_prior' argument of Bay.* must be a positive",
    ),
    (
        BayesianGaussianMixture(degrees_of_freedom_prior=2),
        "The 'degrees_of_freedom_prior' argument of Bay.* must be above 3",
    ),
    (BayesianGaussianMixture(mean_prior=[0.0]), r"The 'mean_prior' argument of Bay.* must have the shape \(2,\)"),
    (
        BayesianGaussianMixture(covariance_prior=-np.eye(2)),
        "The 'covariance_prior' argument of Bay.* must be positive definite",
    ),
    (HMM(emissions="normal"), "The 'emissions' argument of HMM must be one of gaussian, categorical, poisson"),
    (HMM(min_covar=2), "The 'min_covar' argument of HMM must lie between 0 and 1, got 2."),
    (HMM(emissions="categorical"), "The 'X' argument of HMM must be one column of integers >= 0"),
]


@pytest.mark.parametrize(("estimator", "sentence"), BAD)
def test_invalid_options_are_refused(estimator, sentence: str):
    with pytest.raises(InputError, match=sentence):
        estimator.fit(clouds(12))


def test_invalid_arguments_of_methods_are_refused():
    X = clouds(12)
    with pytest.raises(
        InputError,
        match=r"The 'n_samples' argument of GaussianMixture.sample must be an "
        r"integer >= 1.",
    ):
        GaussianMixture().fit(X).sample(0)
    with pytest.raises(InputError, match=r"The 'learning_decay' argument of GaussianMixture must be above 0.5"):
        GaussianMixture(learning_decay=0.2).partial_fit(X)
    with pytest.raises(InputError, match=r"The 'lengths' argument of HMM must be integers >= 1 that add up to 12"):
        HMM().fit(X, lengths=[5, 6])
    X[-1] = np.nan
    with pytest.raises(
        InputError,
        match=r"The 'X' argument of HMM must have a value in the last row of each "
        r"sequence.",
    ):
        HMM().fit(X)


def test_without_scikit_learn_the_import_says_what_to_install():
    block = "import sys; sys.modules['sklearn'] = None\nimport priory.sklearn"
    source = Path(__file__).resolve().parents[2] / "src"
    done = subprocess.run(
        [sys.executable, "-c", block], capture_output=True, text=True, env={"PYTHONPATH": str(source)}, check=False
    )
    assert done.stderr.strip().endswith("MissingExtra: This needs 'sklearn': pip install 'priory[sklearn]'.")
