"""PyTorch optimizers whose steps are plain PyTorch over lists of tensors, compiled once for all models and fused.

>>> import torch, compiled_optim as co
>>> model = torch.nn.Linear(4, 2)
>>> opt = co.AdamW(model, lr=3e-4, compile=False)  # compile=True is the default
>>> model(torch.ones(1, 4)).sum().backward()
>>> opt.step()
>>> opt.zero_grad()
"""

from importlib.metadata import version
from importlib.util import find_spec

if find_spec("compiled_optim.backends") is None:
    raise ImportError(
        "compiled_optim is imported from its source directory, where compiled_optim.backends is missing; run Python in "
        "another directory, or install the package with `pip install -e .`"
    )

from compiled_optim import torch_private  # noqa: F401 # first, because it raises if torch is too old
from compiled_optim.diagnostics.compare import Comparison
from compiled_optim.diagnostics.explain import Explanation
from compiled_optim.engine.rule import Clip
from compiled_optim.errors import BackendUnavailableError, ReallocationError, RuleError
from compiled_optim.optimizer import Optimizer
from compiled_optim.rules.adadelta import Adadelta
from compiled_optim.rules.adafactor import Adafactor
from compiled_optim.rules.adagrad import Adagrad
from compiled_optim.rules.adam import Adam, AdamW
from compiled_optim.rules.adamax import Adamax
from compiled_optim.rules.adamp import AdamP
from compiled_optim.rules.adan import Adan
from compiled_optim.rules.asgd import ASGD
from compiled_optim.rules.bertadam import BertAdam
from compiled_optim.rules.lamb import Lamb
from compiled_optim.rules.lars import Lars
from compiled_optim.rules.lion import Lion
from compiled_optim.rules.muon import Muon
from compiled_optim.rules.nadam import NAdam
from compiled_optim.rules.prodigy import Prodigy
from compiled_optim.rules.radam import RAdam
from compiled_optim.rules.rmsprop import RMSprop, RMSpropTF
from compiled_optim.rules.rprop import Rprop
from compiled_optim.rules.schedule_free import ScheduleFreeAdamW, ScheduleFreeSGD
from compiled_optim.rules.sgd import SGD
from compiled_optim.rules.sgdp import SGDP
from compiled_optim.tensors import Tensors

__all__ = [
    "ASGD",
    "SGD",
    "SGDP",
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamP",
    "AdamW",
    "Adamax",
    "Adan",
    "BackendUnavailableError",
    "BertAdam",
    "Clip",
    "Comparison",
    "Explanation",
    "Lamb",
    "Lars",
    "Lion",
    "Muon",
    "NAdam",
    "Optimizer",
    "Prodigy",
    "RAdam",
    "RMSprop",
    "RMSpropTF",
    "ReallocationError",
    "Rprop",
    "RuleError",
    "ScheduleFreeAdamW",
    "ScheduleFreeSGD",
    "Tensors",
]

__version__ = version("compiled_optim")
