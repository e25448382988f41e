"""The pages of docs/: their blocks run, and what they say of optimisers is so."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.lr_scheduler import CosineAnnealingLR, CyclicLR, OneCycleLR, StepLR
from torch.optim.swa_utils import AveragedModel, update_bn
from torch.testing import assert_close

import sigmaens as sn
from sigmaens.layers import SigmaNorm

DOCS = Path(__file__).parents[1] / "docs"
PAGES = [page for page in sorted(DOCS.glob("*.md")) if "```python" in page.read_text(encoding="utf-8")]
# Those of test_trainer.py and test_readme.py, which replace downloads and look at what the blocks did.
OWN_TEST = ("backbone.md", "slim.md", "trainers.md")


def blocks(page):
    return re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in OWN_TEST], ids=lambda page: page.name)
def test_blocks_run_one_after_the_other(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    namespace = {}
    for block in blocks(page):
        exec(compile(block, page.name, "exec"), namespace)


def optimizers():
    """What the blocks of docs/optimizers.md leave behind."""
    torch.manual_seed(0)
    namespace = {}
    for block in blocks(DOCS / "optimizers.md"):
        exec(compile(block, "optimizers.md", "exec"), namespace)
    return namespace


def network():
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))


def ratios(schedule, optimizer, steps=12):
    """The rate of γ over that of the others, at every step."""
    found = []
    for _ in range(steps):
        others, gammas = optimizer.param_groups
        found.append(gammas["lr"] / others["lr"])
        optimizer.step()
        schedule.step()
    return found


def sgd(ens):
    return torch.optim.SGD(sn.parameter_groups(ens, lr=1e-3), momentum=0.9)


def rates(optimizer):
    return [group["lr"] for group in optimizer.param_groups]


@pytest.mark.parametrize(
    ("build", "kept"),
    [
        (lambda o: OneCycleLR(o, max_lr=rates(o), total_steps=20), True),
        (lambda o: OneCycleLR(o, max_lr=0.05, total_steps=20), False),
        (lambda o: CyclicLR(o, base_lr=[r / 10 for r in rates(o)], max_lr=rates(o), step_size_up=5), True),
        (lambda o: CyclicLR(o, base_lr=1e-4, max_lr=1e-3, step_size_up=5), False),
        (lambda o: StepLR(o, 3), True),
        (lambda o: CosineAnnealingLR(o, 20), True),
    ],
)
def test_schedules_that_keep_the_ratio_of_the_rates(build, kept):
    optimizer = sgd(sn.SigmaEnsemble(network(), 2))
    assert_close(ratios(build(optimizer), optimizer), [100.0 if kept else 1.0] * 12, rtol=1e-9, atol=0)


def test_a_floor_of_the_cosine_is_the_same_for_all_groups():
    optimizer = sgd(sn.SigmaEnsemble(network(), 2))
    assert ratios(CosineAnnealingLR(optimizer, 11, eta_min=1e-3), optimizer)[-1] == pytest.approx(1)


def test_adamw_decays_weights_and_not_gates():
    ens = sn.SigmaEnsemble(network(), 2)
    before = {name: p.detach().clone() for name, p in ens.named_parameters()}
    for p in ens.parameters():
        p.grad = torch.zeros_like(p)
    torch.optim.AdamW(sn.parameter_groups(ens, lr=0.1, weight_decay=0.5)).step()
    for name, p in ens.named_parameters():
        assert_close(p.detach(), before[name] * (1 if name.endswith("gamma") else 0.95))


def test_muon_gets_the_hidden_matrices_alone():
    found = optimizers()
    muon, adamw, ens = found["muon"], found["adamw"], found["ens"]
    hidden, others = ([p for group in optimizer.param_groups for p in group["params"]] for optimizer in (muon, adamw))
    assert sorted(map(id, hidden + others)) == sorted(map(id, ens.parameters()))
    assert {id(p) for p in hidden} == {id(ens.backbone[i].weight) for i in (1, 4)}
    assert all(id(layer.gamma) in set(map(id, others)) for layer in ens.modules() if isinstance(layer, SigmaNorm))


def test_statistics_are_renewed_for_every_member_and_frozen():
    found = optimizers()
    averaged, ens, x = found["averaged"].module, found["ens"], found["x"]
    assert not any(module.training for module in ens.modules() if isinstance(module, _BatchNorm))
    assert ens.training
    first = averaged.backbone[2]
    inputs = averaged.backbone[1](x.flatten(1))
    # One batch alone: its own mean, the same for all members, since they share what lies below.
    assert_close(first.running_mean, inputs.mean(0).detach().expand(4, -1))
    assert first.num_batches_tracked.tolist() == [1] * 4
    before = ens.backbone[2].running_mean.clone()
    ens(x)
    assert torch.equal(ens.backbone[2].running_mean, before)


def test_update_bn_averages_over_batches():
    torch.manual_seed(0)
    ens = AveragedModel(sn.SigmaEnsemble(network(), 3))
    batches = [torch.randn(8, 4) * (i + 1) for i in range(4)]
    update_bn(batches, ens)
    norm, linear = ens.module.backbone[1], ens.module.backbone[0]
    with torch.no_grad():
        means = torch.stack([linear(batch).mean(0) for batch in batches])
    assert_close(norm.running_mean, means.mean(0).expand(3, -1))


def test_update_bn_tells_the_members_apart():
    torch.manual_seed(0)
    stem = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU()  # without it the means would be the biases, for all alike
    net = nn.Sequential(*stem, nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    averaged = AveragedModel(sn.SigmaEnsemble(net, 3))
    members = [averaged.module.member(m) for m in range(3)]
    batches = [torch.randn(8, 4) * (i + 1) for i in range(4)]
    update_bn(batches, averaged)
    means = averaged.module.backbone[4].running_mean
    for m, member in enumerate(members):  # each alone, as an ordinary network
        update_bn(batches, member)
        assert_close(means[m], member[4].running_mean)
    assert not torch.allclose(means[0], means[1])
