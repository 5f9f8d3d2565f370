"""BibTeX entries of the papers that the docstrings of methods refer to, as (type, fields), for `pr.cite`.

The keys are those of `priory.methods.citations.Reference`: the first author, the year, and the first word of the title.
"""

from __future__ import annotations

ICML = "International Conference on Machine Learning"
ICLR = "International Conference on Learning Representations"
NIPS = "Advances in Neural Information Processing Systems"
AISTATS = "International Conference on Artificial Intelligence and Statistics"
UAI = "Conference on Uncertainty in Artificial Intelligence"
JMLR = "Journal of Machine Learning Research"


def _paper(author: str, title: str, booktitle: str, year: int) -> tuple[str, dict[str, str]]:
    return "inproceedings", {"author": author, "title": title, "booktitle": booktitle, "year": str(year)}


def _article(author: str, title: str, journal: str, year: int, volume: str = "") -> tuple[str, dict[str, str]]:
    fields = {"author": author, "title": title, "journal": journal, "year": str(year)}
    return "article", {**fields, "volume": volume} if volume else fields


ENTRIES: dict[str, tuple[str, dict[str, str]]] = {
    "attias1999inferring": _paper(
        "Attias, Hagai",
        "Inferring Parameters and Structure of Latent Variable Models by Variational {B}ayes",
        UAI,
        1999,
    ),
    "beal2003variational": (
        "phdthesis",
        {
            "author": "Beal, Matthew J.",
            "title": "Variational Algorithms for Approximate {B}ayesian Inference",
            "school": "Gatsby Computational Neuroscience Unit, University College London",
            "year": "2003",
        },
    ),
    "betancourt2017conceptual": _article(
        "Betancourt, Michael", "A Conceptual Introduction to {H}amiltonian {M}onte {C}arlo", "arXiv:1701.02434", 2017
    ),
    "blundell2015weight": _paper(
        "Blundell, Charles and Cornebise, Julien and Kavukcuoglu, Koray and Wierstra, Daan",
        "Weight Uncertainty in Neural Networks",
        ICML,
        2015,
    ),
    "burda2016importance": _paper(
        "Burda, Yuri and Grosse, Roger and Salakhutdinov, Ruslan", "Importance Weighted Autoencoders", ICLR, 2016
    ),
    "cappe2009on": _article(
        "Capp{\\'e}, Olivier and Moulines, Eric",
        "On-Line Expectation-Maximization Algorithm for Latent Data Models",
        "Journal of the Royal Statistical Society: Series B",
        2009,
        "71",
    ),
    "chen2014stochastic": _paper(
        "Chen, Tianqi and Fox, Emily and Guestrin, Carlos",
        "Stochastic Gradient {H}amiltonian {M}onte {C}arlo",
        ICML,
        2014,
    ),
    "daxberger2021bayesian": _paper(
        "Daxberger, Erik and Nalisnick, Eric and Allingham, James Urquhart and Antor{\\'a}n, Javier and "
        "Hern{\\'a}ndez-Lobato, Jos{\\'e} Miguel",
        "{B}ayesian Deep Learning via Subnetwork Inference",
        ICML,
        2021,
    ),
    "daxberger2021laplace": _paper(
        "Daxberger, Erik and Kristiadi, Agustinus and Immer, Alexander and Eschenhagen, Runa and Bauer, Matthias and "
        "Hennig, Philipp",
        "{L}aplace Redux -- Effortless {B}ayesian Deep Learning",
        NIPS,
        2021,
    ),
    "dempster1977maximum": _article(
        "Dempster, Arthur P. and Laird, Nan M. and Rubin, Donald B.",
        "Maximum Likelihood from Incomplete Data via the {EM} Algorithm",
        "Journal of the Royal Statistical Society: Series B",
        1977,
        "39",
    ),
    "dinh2017density": _paper(
        "Dinh, Laurent and Sohl-Dickstein, Jascha and Bengio, Samy", "Density Estimation Using Real {NVP}", ICLR, 2017
    ),
    "duane1987hybrid": _article(
        "Duane, Simon and Kennedy, A. D. and Pendleton, Brian J. and Roweth, Duncan",
        "Hybrid {M}onte {C}arlo",
        "Physics Letters B",
        1987,
        "195",
    ),
    "gal2016dropout": _paper(
        "Gal, Yarin and Ghahramani, Zoubin",
        "Dropout as a {B}ayesian Approximation: Representing Model Uncertainty in Deep Learning",
        ICML,
        2016,
    ),
    "gal2017concrete": _paper("Gal, Yarin and Hron, Jiri and Kendall, Alex", "Concrete Dropout", NIPS, 2017),
    "graves2011practical": _paper("Graves, Alex", "Practical Variational Inference for Neural Networks", NIPS, 2011),
    "haario2001adaptive": _article(
        "Haario, Heikki and Saksman, Eero and Tamminen, Johanna",
        "An Adaptive {M}etropolis Algorithm",
        "Bernoulli",
        2001,
        "7",
    ),
    "he2019lagging": _paper(
        "He, Junxian and Spokoyny, Daniel and Neubig, Graham and Berg-Kirkpatrick, Taylor",
        "Lagging Inference Networks and Posterior Collapse in Variational Autoencoders",
        ICLR,
        2019,
    ),
    "hoffman2013stochastic": _article(
        "Hoffman, Matthew D. and Blei, David M. and Wang, Chong and Paisley, John",
        "Stochastic Variational Inference",
        JMLR,
        2013,
        "14",
    ),
    "hoffman2014no": _article(
        "Hoffman, Matthew D. and Gelman, Andrew",
        "The No-{U}-Turn Sampler: Adaptively Setting Path Lengths in {H}amiltonian {M}onte {C}arlo",
        JMLR,
        2014,
        "15",
    ),
    "hoffman2021adaptive": _paper(
        "Hoffman, Matthew and Radul, Alexey and Sountsov, Pavel",
        "An Adaptive-{MCMC} Scheme for Setting Trajectory Lengths in {H}amiltonian {M}onte {C}arlo",
        AISTATS,
        2021,
    ),
    "immer2021improving": _paper(
        "Immer, Alexander and Korzepa, Maciej and Bauer, Matthias",
        "Improving Predictions of {B}ayesian Neural Nets via Local Linearization",
        AISTATS,
        2021,
    ),
    "immer2021scalable": _paper(
        'Immer, Alexander and Bauer, Matthias and Fortuin, Vincent and R{\\"a}tsch, Gunnar and Khan, Mohammad Emtiyaz',
        "Scalable Marginal Likelihood Estimation for Model Selection in Deep Learning",
        ICML,
        2021,
    ),
    "izmailov2018averaging": _paper(
        "Izmailov, Pavel and Podoprikhin, Dmitrii and Garipov, Timur and Vetrov, Dmitry and Wilson, Andrew Gordon",
        "Averaging Weights Leads to Wider Optima and Better Generalization",
        UAI,
        2018,
    ),
    "jaakkola1998improving": (
        "incollection",
        {
            "author": "Jaakkola, Tommi S. and Jordan, Michael I.",
            "title": "Improving the Mean Field Approximation via the Use of Mixture Distributions",
            "booktitle": "Learning in Graphical Models",
            "publisher": "Kluwer Academic Publishers",
            "year": "1998",
        },
    ),
    "khan2023bayesian": _article(
        "Khan, Mohammad Emtiyaz and Rue, H{\\aa}vard", "The {B}ayesian Learning Rule", JMLR, 2023, "24"
    ),
    "kingma2014auto": _paper("Kingma, Diederik P. and Welling, Max", "Auto-Encoding Variational {B}ayes", ICLR, 2014),
    "kingma2015adam": _paper(
        "Kingma, Diederik P. and Ba, Jimmy", "Adam: A Method for Stochastic Optimization", ICLR, 2015
    ),
    "kingma2015variational": _paper(
        "Kingma, Diederik P. and Salimans, Tim and Welling, Max",
        "Variational Dropout and the Local Reparameterization Trick",
        NIPS,
        2015,
    ),
    "kristiadi2020being": _paper(
        "Kristiadi, Agustinus and Hein, Matthias and Hennig, Philipp",
        "Being {B}ayesian, Even Just a Bit, Fixes Overconfidence in {ReLU} Networks",
        ICML,
        2020,
    ),
    "lakshminarayanan2017simple": _paper(
        "Lakshminarayanan, Balaji and Pritzel, Alexander and Blundell, Charles",
        "Simple and Scalable Predictive Uncertainty Estimation Using Deep Ensembles",
        NIPS,
        2017,
    ),
    "li2016preconditioned": _paper(
        "Li, Chunyuan and Chen, Changyou and Carlson, David and Carin, Lawrence",
        "Preconditioned Stochastic Gradient {L}angevin Dynamics for Deep Neural Networks",
        "AAAI Conference on Artificial Intelligence",
        2016,
    ),
    "lin2020handling": _paper(
        "Lin, Wu and Schmidt, Mark and Khan, Mohammad Emtiyaz",
        "Handling the Positive-Definite Constraint in the {B}ayesian Learning Rule",
        ICML,
        2020,
    ),
    "lin2021tractable": _paper(
        "Lin, Wu and Nielsen, Frank and Khan, Mohammad Emtiyaz and Schmidt, Mark",
        "Tractable Structured Natural-Gradient Descent Using Local Parameterizations",
        ICML,
        2021,
    ),
    "liu2016stein": _paper(
        "Liu, Qiang and Wang, Dilin",
        "{S}tein Variational Gradient Descent: A General Purpose {B}ayesian Inference Algorithm",
        NIPS,
        2016,
    ),
    "mackay1992practical": _article(
        "MacKay, David J. C.",
        "A Practical {B}ayesian Framework for Backpropagation Networks",
        "Neural Computation",
        1992,
        "4",
    ),
    "maddox2019simple": _paper(
        "Maddox, Wesley J. and Garipov, Timur and Izmailov, Pavel and Vetrov, Dmitry and Wilson, Andrew Gordon",
        "A Simple Baseline for {B}ayesian Uncertainty in Deep Learning",
        NIPS,
        2019,
    ),
    "metropolis1953equation": _article(
        "Metropolis, Nicholas and Rosenbluth, Arianna W. and Rosenbluth, Marshall N. and Teller, Augusta H. and "
        "Teller, Edward",
        "Equation of State Calculations by Fast Computing Machines",
        "The Journal of Chemical Physics",
        1953,
        "21",
    ),
    "miller2017variational": _paper(
        "Miller, Andrew C. and Foti, Nicholas J. and Adams, Ryan P.",
        "Variational Boosting: Iteratively Refining Posterior Approximations",
        ICML,
        2017,
    ),
    "neal2011mcmc": (
        "incollection",
        {
            "author": "Neal, Radford M.",
            "title": "{MCMC} Using {H}amiltonian Dynamics",
            "booktitle": "Handbook of {M}arkov Chain {M}onte {C}arlo",
            "publisher": "Chapman and Hall/CRC",
            "year": "2011",
        },
    ),
    "ong2018gaussian": _article(
        "Ong, Victor M.-H. and Nott, David J. and Smith, Michael S.",
        "{G}aussian Variational Approximation with a Factor Covariance Structure",
        "Journal of Computational and Graphical Statistics",
        2018,
        "27",
    ),
    "osband2018randomized": _paper(
        "Osband, Ian and Aslanides, John and Cassirer, Albin",
        "Randomized Prior Functions for Deep Reinforcement Learning",
        NIPS,
        2018,
    ),
    "pearce2020uncertainty": _paper(
        "Pearce, Tim and Leibfried, Felix and Brintrup, Alexandra and Zaki, Mohamed and Neely, Andy",
        "Uncertainty in Neural Networks: Approximately {B}ayesian Ensembling",
        AISTATS,
        2020,
    ),
    "rezende2015variational": _paper(
        "Rezende, Danilo Jimenez and Mohamed, Shakir", "Variational Inference with Normalizing Flows", ICML, 2015
    ),
    "roberts1996exponential": _article(
        "Roberts, Gareth O. and Tweedie, Richard L.",
        "Exponential Convergence of {L}angevin Distributions and Their Discrete Approximations",
        "Bernoulli",
        1996,
        "2",
    ),
    "roberts1997weak": _article(
        "Roberts, Gareth O. and Gelman, Andrew and Gilks, Walter R.",
        "Weak Convergence and Optimal Scaling of Random Walk {M}etropolis Algorithms",
        "The Annals of Applied Probability",
        1997,
        "7",
    ),
    "roberts1998optimal": _article(
        "Roberts, Gareth O. and Rosenthal, Jeffrey S.",
        "Optimal Scaling of Discrete Approximations to {L}angevin Diffusions",
        "Journal of the Royal Statistical Society: Series B",
        1998,
        "60",
    ),
    "roeder2017sticking": _paper(
        "Roeder, Geoffrey and Wu, Yuhuai and Duvenaud, David",
        "Sticking the Landing: Simple, Lower-Variance Gradient Estimators for Variational Inference",
        NIPS,
        2017,
    ),
    "shen2024variational": _paper(
        "Shen, Yuesong and Daheim, Nico and Cong, Bai and Nickl, Peter and Marconi, Gian Maria and Bazan, Clement and "
        'Yokota, Rio and Gurevych, Iryna and Cremers, Daniel and Khan, Mohammad Emtiyaz and M{\\"o}llenhoff, Thomas',
        "Variational Learning is Effective for Large Deep Networks",
        ICML,
        2024,
    ),
    "snoek2015scalable": _paper(
        "Snoek, Jasper and Rippel, Oren and Swersky, Kevin and Kiros, Ryan and Satish, Nadathur and "
        "Sundaram, Narayanan and Patwary, Mostofa and Prabhat and Adams, Ryan",
        "Scalable {B}ayesian Optimization Using Deep Neural Networks",
        ICML,
        2015,
    ),
    "titsias2014doubly": _paper(
        "Titsias, Michalis and L{\\'a}zaro-Gredilla, Miguel",
        "Doubly Stochastic Variational {B}ayes for Non-Conjugate Inference",
        ICML,
        2014,
    ),
    "varadhan2008simple": _article(
        "Varadhan, Ravi and Roland, Christophe",
        "Simple and Globally Convergent Methods for Accelerating the Convergence of Any {EM} Algorithm",
        "Scandinavian Journal of Statistics",
        2008,
        "35",
    ),
    "vehtari2024pareto": _article(
        "Vehtari, Aki and Simpson, Daniel and Gelman, Andrew and Yao, Yuling and Gabry, Jonah",
        "{P}areto Smoothed Importance Sampling",
        JMLR,
        2024,
        "25",
    ),
    "welling2011bayesian": _paper(
        "Welling, Max and Teh, Yee Whye",
        "{B}ayesian Learning via Stochastic Gradient {L}angevin Dynamics",
        ICML,
        2011,
    ),
    "wilson2020bayesian": _paper(
        "Wilson, Andrew Gordon and Izmailov, Pavel",
        "{B}ayesian Deep Learning and a Probabilistic Perspective of Generalization",
        NIPS,
        2020,
    ),
    "zhang2020cyclical": _paper(
        "Zhang, Ruqi and Li, Chunyuan and Zhang, Jianyi and Chen, Changyou and Wilson, Andrew Gordon",
        "Cyclical Stochastic Gradient {MCMC} for {B}ayesian Deep Learning",
        ICLR,
        2020,
    ),
    "zhang2022pathfinder": _article(
        "Zhang, Lu and Carpenter, Bob and Gelman, Andrew and Vehtari, Aki",
        "Pathfinder: Parallel Quasi-{N}ewton Variational Inference",
        JMLR,
        2022,
        "23",
    ),
}
PRIORY = (
    "software",
    {
        "author": "{Priory developers}",
        "title": "Priory: Approximate {B}ayesian Inference for {PyTorch}",
        "note": "Python package",
        "year": "2026",
    },
)
