"""torch.distributions on the device against CPU torch: every distribution's samples by their support, mean and gradients; its
densities, their gradients and what else it can say; divergences."""

import jax
import pytest
import torch
from torch import distributions as D

NUMBER = 2000  # samples, for the mean to be known to some hundredths
COVARIANCE = [[2.0, 0.5], [0.5, 1.0]]
PAIR, ROWS = [0.2, 0.7], [[0.2, 0.7, 0.1], [1.0, 2.0, 3.0]]


@pytest.fixture(autouse=True, scope="module")
def compiled_quickly():
    """A few hundred small programs are compiled here, each for one call: most of the time would be XLA's optimizations."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def mixture(logits, loc, scale):
    return D.MixtureSameFamily(D.Categorical(logits=logits), D.Normal(loc, scale))


def squashed(loc, scale):
    return D.TransformedDistribution(D.Normal(loc, scale), [D.SigmoidTransform(), D.AffineTransform(1.0, 2.0)])


# What makes it, and of which tensors.
DISTRIBUTIONS = {
    "Bernoulli": (D.Bernoulli, {"logits": PAIR}),
    "Beta": (D.Beta, {"concentration1": [0.5, 2.0], "concentration0": [1.5, 3.0]}),
    "Binomial": (lambda probs: D.Binomial(torch.tensor([5.0, 9.0], device=probs.device), probs), {"probs": PAIR}),
    "Categorical": (D.Categorical, {"logits": ROWS}),
    "Cauchy": (D.Cauchy, {"loc": PAIR, "scale": [1.0, 2.0]}),
    "Chi2": (D.Chi2, {"df": [2.0, 5.0]}),
    "ContinuousBernoulli": (D.ContinuousBernoulli, {"probs": PAIR}),
    "Dirichlet": (D.Dirichlet, {"concentration": [[0.5, 2.0, 1.0], [3.0, 4.0, 5.0]]}),
    "Exponential": (D.Exponential, {"rate": [0.5, 2.0]}),
    "FisherSnedecor": (D.FisherSnedecor, {"df1": [5.0, 7.0], "df2": [9.0, 12.0]}),
    "Gamma": (D.Gamma, {"concentration": [0.5, 2.0], "rate": [1.0, 2.0]}),
    "Geometric": (D.Geometric, {"probs": PAIR}),
    "Gumbel": (D.Gumbel, {"loc": PAIR, "scale": [1.0, 2.0]}),
    "HalfCauchy": (D.HalfCauchy, {"scale": [1.0, 2.0]}),
    "HalfNormal": (D.HalfNormal, {"scale": [1.0, 2.0]}),
    "Independent": (lambda loc, scale: D.Independent(D.Normal(loc, scale), 1), {"loc": PAIR, "scale": [1.0, 2.0]}),
    "InverseGamma": (D.InverseGamma, {"concentration": [5.0, 6.0], "rate": [1.0, 2.0]}),
    "Kumaraswamy": (D.Kumaraswamy, {"concentration1": [2.0, 3.0], "concentration0": [1.5, 3.0]}),
    "LKJCholesky": (lambda concentration: D.LKJCholesky(3, concentration), {"concentration": [0.5, 2.0]}),
    "Laplace": (D.Laplace, {"loc": PAIR, "scale": [1.0, 2.0]}),
    "LogNormal": (D.LogNormal, {"loc": PAIR, "scale": [0.1, 0.2]}),
    "LogisticNormal": (D.LogisticNormal, {"loc": PAIR, "scale": [1.0, 2.0]}),
    "LowRankMultivariateNormal": (
        D.LowRankMultivariateNormal,
        {"loc": PAIR, "cov_factor": [[1.0], [2.0]], "cov_diag": [1.0, 2.0]},
    ),
    "MixtureSameFamily": (mixture, {"logits": PAIR, "loc": PAIR, "scale": [1.0, 2.0]}),
    "Multinomial": (lambda logits: D.Multinomial(6, logits=logits), {"logits": ROWS}),
    "MultivariateNormal": (D.MultivariateNormal, {"loc": PAIR, "covariance_matrix": COVARIANCE}),
    "NegativeBinomial": (D.NegativeBinomial, {"total_count": [5.0, 9.0], "probs": PAIR}),
    "Normal": (D.Normal, {"loc": PAIR, "scale": [1.0, 2.0]}),
    "OneHotCategorical": (D.OneHotCategorical, {"logits": ROWS}),
    "OneHotCategoricalStraightThrough": (D.OneHotCategoricalStraightThrough, {"logits": ROWS}),
    "Pareto": (D.Pareto, {"scale": [1.0, 2.0], "alpha": [3.0, 5.0]}),
    "Poisson": (D.Poisson, {"rate": [1.0, 20.0]}),
    "RelaxedBernoulli": (D.RelaxedBernoulli, {"temperature": 0.7, "logits": PAIR}),
    "RelaxedOneHotCategorical": (D.RelaxedOneHotCategorical, {"temperature": 0.7, "logits": ROWS}),
    "StudentT": (D.StudentT, {"df": [5.0, 7.0], "loc": PAIR, "scale": [1.0, 2.0]}),
    "TransformedDistribution": (squashed, {"loc": PAIR, "scale": [1.0, 2.0]}),
    "Uniform": (D.Uniform, {"low": PAIR, "high": [1.0, 2.0]}),
    "VonMises": (D.VonMises, {"loc": PAIR, "concentration": [1.0, 2.0]}),
    "Weibull": (D.Weibull, {"scale": [1.0, 2.0], "concentration": [1.5, 2.5]}),
    "Wishart": (D.Wishart, {"df": 4.0, "covariance_matrix": COVARIANCE}),
}
if hasattr(D, "GeneralizedPareto"):
    DISTRIBUTIONS["GeneralizedPareto"] = (
        D.GeneralizedPareto,
        {"loc": PAIR, "scale": [1.0, 2.0], "concentration": [0.1, 0.2]},
    )
BASES = {"Distribution", "ExponentialFamily"}


def made(name, device):
    """The distribution, and the tensors it is of, by name."""
    make, values = DISTRIBUTIONS[name]
    tensors = {key: torch.tensor(value, device=device).requires_grad_() for key, value in values.items()}
    return make(**tensors), tensors


def close(ours, theirs, what, rtol=1e-4, atol=1e-5):
    torch.testing.assert_close(
        ours.detach().cpu(),
        theirs.detach(),
        rtol=rtol,
        atol=atol,
        equal_nan=True,
        msg=lambda said: f"{what}: {said}",
    )


def gradients(result, tensors):
    return torch.autograd.grad(result.sum(), list(tensors.values()), allow_unused=True, retain_graph=True)


def said_by(distribution, tensors, at):
    """What it says of itself, and of points `at`, with the gradients of its density there; by name."""
    density = distribution.log_prob(at)
    found = {"log_prob": density, "gradients": gradients(density, tensors)}
    say = {
        "entropy": distribution.entropy,
        "mean": lambda: distribution.mean,
        "variance": lambda: distribution.variance,
        "icdf": lambda: distribution.icdf(torch.full_like(at, 0.3)),
        "kl": lambda: D.kl_divergence(distribution, distribution),
    }
    for name, value in say.items():
        try:
            found[name] = value()
        except (NotImplementedError, AttributeError) as error:  # AttributeError: a base distribution has none
            found[name] = type(error)
    return found


def test_all_distributions_are_here():
    named = {x for x in D.__all__ if isinstance(getattr(D, x), type) and issubclass(getattr(D, x), D.Distribution)}
    assert named - BASES == set(DISTRIBUTIONS)


@pytest.mark.filterwarnings("ignore:Singular sample detected")
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_distribution(name):
    ours, our_tensors = made(name, "jax")
    theirs, their_tensors = made(name, "cpu")
    draw = "rsample" if theirs.has_rsample else "sample"
    drawn = getattr(ours, draw)((NUMBER,))
    like = getattr(theirs, draw)((NUMBER,))
    assert (drawn.shape, drawn.dtype, drawn.device.type) == (like.shape, like.dtype, "jax")
    assert ours.support.check(drawn).all()

    # what it says, at some of torch's samples
    at = like[:4].detach()
    expected = said_by(theirs, their_tensors, at)
    actual = said_by(ours, our_tensors, at.to("jax"))
    for what, value in expected.items():
        if isinstance(value, type):
            assert actual[what] is value, what
        elif what != "gradients":
            close(actual[what], value, what)
    for mine, other in zip(actual["gradients"], expected["gradients"], strict=True):
        assert (mine is None) == (other is None)
        if other is not None:
            close(mine, other, "gradient of log_prob", rtol=1e-3, atol=1e-4)

    # the samples' mean, within six of its standard errors; VonMises is said to vary by an angle's measure
    mean, variance = expected["mean"], expected["variance"]
    if not isinstance(mean, type) and mean.isfinite().all() and variance.isfinite().all() and name != "VonMises":
        error = (drawn.detach().cpu().mean(0) - mean).abs()
        assert (error <= 6 * (variance / NUMBER).sqrt() + 1e-3).all(), f"mean is {error} off"
    if name == "Wishart":  # torch writes to what its own backward needs, if it corrects a sample
        for sample, tensors in ((drawn, our_tensors), (like, their_tensors)):
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                gradients(sample, tensors)
    elif theirs.has_rsample:
        for mine, other in zip(gradients(drawn, our_tensors), gradients(like, their_tensors), strict=True):
            assert (mine is None) == (other is None)
            if mine is None:
                continue
            assert mine.isfinite().all()
            if name not in {"Cauchy", "HalfCauchy"}:  # whose scales' gradients have no mean
                close(mine / NUMBER, other / NUMBER, "gradient of the samples' mean", rtol=0.2, atol=0.2)


@pytest.mark.parametrize(
    "one, other",
    [
        ("Normal", "Laplace"),
        ("Gamma", "Gumbel"),
        ("Uniform", "Normal"),
        ("Exponential", "Gamma"),
        ("Poisson", "Normal"),
    ],
)
def test_divergence_between_two(one, other):
    def divergence(device):
        return D.kl_divergence(made(one, device)[0], made(other, device)[0])

    try:
        expected = divergence("cpu")
    except NotImplementedError:
        with pytest.raises(NotImplementedError):
            divergence("jax")
    else:
        close(divergence("jax"), expected, "kl")
