"""What the benchmarks compute besides times: differences between devices, and counts that hands can repeat."""

import copy
import importlib
import itertools
import math
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import sigmaens as sn
from sigmaens import paths, sources, training
from sigmaens.backbones import narrow_resnet
from sigmaens.cost import peak_memory

ROOT = Path(__file__).parents[1]
TINY = """
settings:
  tiny:
    seeds: [0, 1]
    rows: [single, sigma]
    taus: []
    lambdas: []
    sizes: []
    data: {name: images, train: 20, validation: 5, test: 7, ood: {far: [far]}, ood_images: 3}
    cost: {image: [3, 6, 6], classes: 4}
    backbone: {name: narrow_resnet, width: 4}
    head: fc
    members: 3
    peers: {}
    sigma: {pretrained: false, regularize: "*.bn2", tau: 0.1, weight: 0.01, at_once: 2}
    train: {epochs: 2, batch_size: 8, optimizer: sgd, momentum: 0.9}
  hub:
    seeds: [0]
    rows: [single, sigma]
    taus: []
    lambdas: []
    sizes: []
    data: {name: sst2, max_length: 8, train: 10, validation: 2, test: 2, ood: {}, ood_sentences: 1, rated: null}
    backbone: {name: transformer, model: someone/something}
    head: net.classifier
    members: 2
    peers: {}
    sigma: {pretrained: true, regularize: "*", tau: 0.1, weight: 0.01}
    train: {epochs: 1, batch_size: 8, optimizer: adam}
"""


@pytest.fixture
def benchmark(monkeypatch, one_thread):
    """Import a benchmark, whose folder is no package, by name."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    monkeypatch.chdir(ROOT)
    yield importlib.import_module
    torch.set_flush_denormal(False)


@pytest.fixture
def tiny(benchmark, tmp_path, monkeypatch):
    """A project of two small profiles, and the benchmark that reads it; seeds run one after the other."""
    (tmp_path / "params.yaml").write_text(TINY, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(training, "side_by_side", lambda function, seeds: {seed: function(seed) for seed in seeds})
    return benchmark("profiles")


def run(module, monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["benchmark", *map(str, arguments)])
    return module.main()


def rows_of(text):
    """The rows of all tables in a text, without heads."""
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    rules = {i for i, line in enumerate(lines) if line[0] == "---"}
    return [line for i, line in enumerate(lines) if not {i, i + 1} & rules]


# Steps ----------------------------------------------------------------------------------------------------------------


def gradients(common, network, penalty=None):
    torch.manual_seed(1)
    x, labels = torch.randn(5, 3, 8, 8), torch.randint(4, (5,))
    loss = lambda logits: sn.member_cross_entropy(logits, labels)  # noqa: E731
    contender = common.contend(network, x, loss, torch.contiguous_format)
    contender.penalty = penalty and (lambda: sn.diversity_loss(network, 0.1, 1.0))
    contender.train()
    return {name: p.grad for name, p in network.named_parameters()}


def test_a_step_in_chunks_has_the_gradients_of_all_members_at_once(benchmark):
    common = benchmark("common")
    ens = sn.SigmaEnsemble(narrow_resnet(4, width=4), 3, head="fc", regularize="*.bn2")
    by_two = copy.deepcopy(ens)
    by_two.at_once = 2
    whole, parts = gradients(common, ens, penalty=True), gradients(common, by_two, penalty=True)
    assert whole.keys() == parts.keys()
    for name, gradient in whole.items():
        torch.testing.assert_close(parts[name], gradient, rtol=1e-4, atol=1e-6)
    without = gradients(common, copy.deepcopy(ens))["backbone.stages.0.0.bn2.gamma"]
    assert not torch.allclose(without, whole["backbone.stages.0.0.bn2.gamma"], rtol=1e-2)


def test_networks_one_by_one_take_the_step_of_deep_ensembles(benchmark):
    common, gpu = benchmark("common"), benchmark("gpu")
    nets = [narrow_resnet(4, width=4) for _ in range(3)]
    in_turn, deep = gpu.OneByOne(copy.deepcopy(nets)), gpu.DeepEnsemble(nets)
    assert [logits.shape for logits in in_turn.chunks(torch.randn(5, 3, 8, 8))] == [(5, 1, 4)] * 3
    parts, whole = gradients(common, in_turn), gradients(common, deep)
    for name, gradient in whole.items():
        torch.testing.assert_close(parts[name], gradient, rtol=1e-4, atol=1e-6)


def test_a_time_ends_when_the_device_is_done(benchmark, monkeypatch):
    common = benchmark("common")
    calls = []
    monkeypatch.setattr(common, "wait_for", lambda device: calls.append("wait"))
    contender = common.contend(nn.Linear(2, 2), torch.randn(1, 2), torch.sum, torch.contiguous_format)
    monkeypatch.setattr(contender, "train", lambda: calls.append("train"))
    monkeypatch.setattr(contender, "eval", lambda: calls.append("eval"))
    times = common.measure({"one": contender}, 1, "wall")
    assert calls == ["train", "wait"] * 3 + ["eval", "wait"] * 3  # two rounds warm up
    assert [times[phase]["one"].shape for phase in common.PHASES] == [(1,), (1,)]


# Slim members ---------------------------------------------------------------------------------------------------------


SMALL = ("--batch", 8, "--width", 16, "--size", 16, "--rounds", 1)


@pytest.mark.parametrize(("members", "share"), [(2, 0.5), (4, 0.28), (8, 0.2), (4, 1.0)])
def test_every_channel_has_an_owner_and_the_share_is_open(benchmark, members, share):
    ens = sn.SigmaEnsemble(narrow_resnet(4, width=64), members, head="fc", regularize="*.bn1")
    benchmark("slim").ownership(ens, share)
    gates = torch.cat(list(ens.regularized_gates().values()), dim=1)
    assert ((gates > 0.9) | (gates < 1e-5)).all()
    assert (gates > 0.9).any(dim=0).all()
    assert (gates > 0.9).float().mean().item() == pytest.approx(share, abs=0.02)
    assert all((g > 0.9).all() for name, g in ens.gates().items() if name not in ens.regularized)


def test_the_table_of_slim_members_counts_what_each_network_does(benchmark, monkeypatch, capsys, tmp_path):
    slim = benchmark("slim")
    run(slim, monkeypatch, "--members", 2, 4, "--open", "4=0.3", *SMALL, "--markdown", tmp_path / "slim.md")
    text = (tmp_path / "slim.md").read_text(encoding="utf-8")
    assert capsys.readouterr().out.endswith(text)
    rows = {(int(row[1]), row[2]): row for row in rows_of(text)}
    names = [slim.ONE, "Deep Ensembles", "σN-Ens", "σN-Ens, slim", "BatchEnsemble", "Packed-Ensembles"]
    assert list(rows) == [(members, name) for members in (2, 4) for name in names]
    for members, share in ((2, 0.53), (4, 0.3)):
        ens = sn.SigmaEnsemble(narrow_resnet(10, 3, width=16), members, head="fc", regularize="*.bn1")
        slim.ownership(ens, share)
        image = torch.randn(1, 3, 16, 16)
        one = by_hand(narrow_resnet(10, 3, width=16), image)
        narrow = [by_hand(ens.slim(image).member(m), image) for m in range(members)]
        # The first convolution runs once for all.
        counted = sum(narrow) - (members - 1) * 16 * 16 * 16 * 27
        for name, expected in {slim.ONE: one, "Deep Ensembles": members * one, "σN-Ens, slim": counted}.items():
            assert rows[members, name][5] == f"{expected / 1e6:.0f}"
        for name in ("σN-Ens", "σN-Ens, slim"):
            assert rows[members, name][3] == slim.open_share(ens)
        for cell in (7, 10):
            assert rows[members, slim.ONE][cell] == "1.000 [1.000, 1.000]"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--open", "0=0.3"), "M must be at least 2 and the share in"),
        (("--open", "4=0.1"), "M must be at least 2 and the share in"),
        (("--open", "8=0.3", "--members", 4), "--open: M = 8 is none of --members, [4]"),
        (("--members", 1), "slim members are at least 2"),
        (("--markdown", "no/such/slim.md"), "there is no folder no/such"),
    ],
)
def test_options_are_refused_before_anything_is_measured(benchmark, monkeypatch, capsys, options, message):
    slim = benchmark("slim")
    monkeypatch.setattr(slim, "measure", None)
    with pytest.raises(SystemExit):
        run(slim, monkeypatch, *options)
    assert message in capsys.readouterr().err


def test_memory_in_chunks_is_that_of_a_chunk(benchmark, monkeypatch, tmp_path):
    run(benchmark("memory"), monkeypatch, "--members", 1, 4, "--at-once", 1, *SMALL, "--markdown", tmp_path / "a.md")
    rows = {tuple(row[:2]): row for row in rows_of((tmp_path / "a.md").read_text(encoding="utf-8"))}
    assert list(rows) == [("1", "all"), ("4", "all"), ("4", "1")]
    for cell in (2, 4):
        one, whole, chunks = (float(row[cell]) for row in rows.values())
        assert whole > 3 * one
        assert chunks < 1.6 * one


# On a GPU -------------------------------------------------------------------------------------------------------------


def test_without_a_gpu_one_line_says_so(benchmark, monkeypatch, capsys):
    gpu = benchmark("gpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run(gpu, monkeypatch) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert re.fullmatch(r"gpu\.py: --device cuda: .*; --device cpu runs the same on the CPU\n", said.err)


def test_without_cifar10_one_line_says_so(benchmark, monkeypatch, capsys, tmp_path):
    gpu = benchmark("gpu")

    def missing(*_):
        raise FileNotFoundError("no cifar10 here")

    monkeypatch.setenv("SIGMAENS_DATA", str(tmp_path))
    monkeypatch.setattr(sources, "_download", missing)
    assert run(gpu, monkeypatch, "--device", "cpu", "--markdown", tmp_path / "gpu.md") == 1
    assert capsys.readouterr() == ("", "gpu.py: no cifar10 here\n")
    assert not (tmp_path / "gpu.md").exists()


def test_the_cpu_differs_from_itself_in_lower_precision_alone(benchmark, monkeypatch, capsys, tmp_path):
    gpu = benchmark("gpu")
    rng = np.random.default_rng(0)
    for part, name, i in itertools.product(("train", "test"), sources.CATALOGUE["cifar10"].classes, range(5)):
        folder = tmp_path / "cifar10" / part / name
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(folder / f"{i}.png")
    monkeypatch.setenv("SIGMAENS_DATA", str(tmp_path))
    monkeypatch.setattr(gpu, "FORMATS", {"channels-last": torch.channels_last})
    profile = paths.settings("cifar10")
    monkeypatch.setattr(paths, "settings", lambda _: paths.merge(profile, {"backbone": {"name": "narrow_resnet"}}))
    sizes = {"width": 4, "size": 8, "images": 38, "compared": 12, "epochs": 1, "batch": 16, "rounds": 1}
    options = [word for name, value in sizes.items() for word in (f"--{name}", value)]
    assert run(gpu, monkeypatch, "--device", "cpu", *options, "--markdown", tmp_path / "gpu.md") == 0
    told = capsys.readouterr().out
    assert (tmp_path / "gpu.md").read_text(encoding="utf-8") == told
    assert "40 training and 20 test images" in told  # whole classes
    rows = rows_of(told)
    assert [row[:2] for row in rows[:2]] == [["float32", "3"], ["bf16", "3"]]  # batches of 16, 16 and 8
    compared = {tuple(row[:2]): row[2:] for row in rows[2:6]}
    for network in ("σN-Ens", "σN-Ens, slim"):
        *exact, same, gradient = compared[network, "float32"]
        assert exact == ["0.0e+00"] * 4
        assert (same, gradient.split()[0]) == ("100.0", "0.0e+00")
        relative, gradient = compared[network, "bf16"][1], compared[network, "bf16"][-1].split()[0]
        assert 0 < float(relative) < 0.1
        assert float(gradient) > 1e-3
    names = [gpu.PLAIN, gpu.PLAIN_ROWS, "σN-Ens", "σN-Ens, a member at a time", "σN-Ens, slim", "Deep Ensembles"]
    assert [row[:3] for row in rows[6:]] == [[p, "channels-last", n] for p in ("float32", "bf16") for n in names]
    for row in rows[6:]:
        step, to_plain, to_rows, memory = row[3:7]
        assert float(step) > 0
        assert float(memory) > 0
        assert (to_plain.split()[0] == "1.000") == (row[2] == gpu.PLAIN)
        assert (to_rows.split()[0] == "1.000") == (row[2] == gpu.PLAIN_ROWS)


def test_differences_are_those_of_the_worst_value(benchmark):
    gpu = benchmark("gpu")
    assert gpu.difference(torch.tensor([1.0, -4.0]), torch.tensor([1.5, -5.0])) == (1.0, 0.2)
    assert gpu.difference(torch.zeros(2), torch.zeros(2)) == (0.0, 0.0)
    assert gpu.difference(torch.ones(2), torch.zeros(2)) == (1.0, math.inf)


# Profiles -------------------------------------------------------------------------------------------------------------


def by_hand(network, x):
    """Multiply-adds of an image in the convolutions and linear layers of a network, from their shapes."""
    total = 0

    def add(layer, _, y):
        nonlocal total
        outputs = y[0].numel()
        total += outputs * layer.weight[0].numel()

    hooks = [m.register_forward_hook(add) for m in network.modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
    network.eval()(x)
    for hook in hooks:
        hook.remove()
    return total


def test_passes_of_a_profile_are_those_counted_by_hand(tiny):
    settings = paths.settings("tiny")
    cells, sizes = tiny.cells_of(settings), tiny.sizes_of(settings)
    assert [cell.name for cell in cells] == ["train/single", "train/sigma"]
    assert sizes == tiny.Sizes(train=20, validation=5, test=7, corrupted=7 * 15 * 5, ood=3)
    counted = tiny.passes(cells)
    image = by_hand(narrow_resnet(4, width=4), torch.randn(1, 3, 6, 6))
    # The heads of the members are linear layers too.
    assert counted == {"train/single": (image, image), "train/sigma": (3 * image, 3 * image)}
    predicted = 5 + 7 + 7 + 7 * 75 + 3
    seed = image * (3 * 20 * 2 + predicted)
    assert tiny.work(cells, counted, sizes) == {"train/single": seed, "train/sigma": 3 * seed}


def test_deep_ensembles_and_a_sweep_count_every_network(tiny):
    settings = paths.merge(paths.settings("tiny"), {"rows": ["single", "deep_ensembles", "sigma"], "sizes": [2, 6]})
    settings["peers"] = {"packed_ensembles": {"alpha": 3}}
    cells = tiny.cells_of(settings)
    assert {cell.name: cell.networks for cell in cells} == {
        "train/single": 1,
        "train/deep_ensembles": 3,
        "train/sigma": 1,
        "sweep_members/2": 1,
        "sweep_members/6": 1,
        "sweep_members_packed/2": 1,
        "sweep_members_packed/6": 1,
        "sweep_members_deep": 6,
    }
    counted = tiny.passes(cells)
    image = counted["train/single"][0]
    factors = {"train/deep_ensembles": 3, "sweep_members/2": 2, "sweep_members/6": 6, "sweep_members_deep": 6}
    assert {name: counted[name] for name in factors} == {name: (f * image,) * 2 for name, f in factors.items()}
    total = tiny.work(cells, counted, tiny.sizes_of(settings))
    assert total["sweep_members/6"] == 6 * image * (3 * 20 * 2 + 5 + 7)  # a sweep predicts nothing corrupted
    assert next(cell.name for cell in tiny.largest(cells, counted)).startswith("sweep_members_packed")


@pytest.mark.parametrize(
    ("profile", "families"),
    [
        ("digits", ["image"]),
        ("cifar10_small", ["short"]),
        ("sst2_small", ["text"]),
        ("cifar10_finetune", ["vision"]),
        ("cifar10_scratch", ["vision", "slim"]),
    ],
)
def test_cells_are_those_of_the_pipeline(benchmark, profile, families):
    params = paths.load_params()
    wanted = set()
    for stage in paths.parse_yaml((ROOT / "dvc.yaml").read_text(encoding="utf-8"))["stages"].values():
        lists = {key: re.sub(r"[${}]", "", text) for key, text in stage.get("matrix", {}).items()}
        family = lists.pop("profile", "").removeprefix("profiles.")
        if family not in families or not re.search("02_train|03_finetune", stage["cmd"]):
            continue
        block = [[(key, item) for item in _look_up(params, place)] for key, place in lists.items()]
        for items in itertools.product(*block):
            folder = stage["outs"][0].removeprefix("results/${item.profile}/")
            for key, item in items:
                folder = folder.replace(f"${{item.{key}}}", str(item))
            wanted.add(folder)
    cells = benchmark("profiles").cells_of(paths.settings(profile))
    assert len(wanted) > 2
    assert sorted(cell.name for cell in cells) == sorted(wanted)


def _look_up(block, place):
    for key in place.split("."):
        block = block[key]
    return block


def test_every_profile_has_sizes_and_cells(benchmark):
    profiles = benchmark("profiles")
    for name in paths.load_params()["settings"]:
        settings = paths.settings(name)
        sizes = profiles.sizes_of(settings)
        assert min(sizes.train, sizes.validation, sizes.test, sizes.ood) > 0
        assert sizes.corrupted % sizes.test == 0
        shape, classes = profiles.shape_of(settings)
        assert len(shape) in (1, 3)
        assert classes > 1


def test_memory_of_a_large_step_follows_from_two_small_ones(tiny, monkeypatch):
    # Images so large that activations count for more than gradients, as in networks for which this is done.
    settings = paths.merge(paths.settings("tiny"), {"cost": {"image": [3, 24, 24]}, "train": {"batch_size": 64}})
    for cell in tiny.cells_of(settings):
        image = tiny.passes([cell])[cell.name][0]
        whole = tiny.step_memory(cell, image)
        model = tiny.built(cell)
        contender = tiny.contender_of(model, cell, 64)
        contender.train()
        contender.optimizer.zero_grad()
        weights = sum(4 * p.numel() for p in model.parameters())
        # In training gradients come into being while activations go.
        exact = 2 * weights + peak_memory(contender.train)
        assert exact <= whole <= exact + weights
        with monkeypatch.context() as short_steps:
            short_steps.setattr(tiny, "LONG", 3 * 16 * image)
            assert tiny.timed_rows(cell, image) == 16
            assert tiny.step_memory(cell, image) == pytest.approx(whole, rel=0.02)


def test_a_table_holds_what_was_counted(tiny, monkeypatch, tmp_path, capsys):
    options = ["--profiles", "tiny", "hub", "--rounds", 1, "--rate", 1e-6, "--markdown", tmp_path / "profiles.md"]
    assert run(tiny, monkeypatch, *options) == 0
    one, other = rows_of((tmp_path / "profiles.md").read_text(encoding="utf-8"))
    image = by_hand(narrow_resnet(4, width=4), torch.randn(1, 3, 6, 6))
    total = 2 * 4 * image * (3 * 20 * 2 + 5 + 7 + 7 + 7 * 75 + 3)
    assert one[:4] == ["tiny", "narrow_resnet, width 4", "4", "20 × 2"]
    assert one[4] == tiny.short(total / 1e15)
    assert one[6] == tiny.short(total / 1e6 / 3600)
    assert float(one[5]) > 4 * 6 / 3600  # four notebooks start
    assert other[4:] == ["not counted"] * 4 + ["the configuration of someone/something is on the hub"]
    assert [tiny.short(value) for value in (0.01234, 5.678, 56.78, 5678.9)] == ["0.012", "5.7", "57", "5,679"]


def test_hours_here_come_from_the_measured_rates(tiny, monkeypatch):
    settings = paths.settings("tiny")
    cells = tiny.cells_of(settings)
    counted = tiny.passes(cells)
    monkeypatch.setattr(tiny, "time_steps", lambda seed, **_: {"single": 0.5 + seed, "sigma": 4.0})
    monkeypatch.setattr(tiny.os, "cpu_count", lambda: 2)
    rates = tiny.rates_of(cells, counted, rounds=1, clock="cpu")
    image = counted["train/single"][0]
    assert rates == {"single": 3 * 8 * image / 1.0, "sigma": 3 * 8 * 3 * image / 4.0}  # seeds 0 and 1 took 0.5 and 1.5
    amounts = {"train/single": 3 * 8 * image * 100, "train/sigma": 3 * 8 * 3 * image * 100}
    # 100 steps of either, two seeds on two cores; four notebooks.
    assert tiny.hours_here(cells, amounts, rates, settings, start=5.0) == pytest.approx((100 + 400 + 20) / 3600)
    monkeypatch.setattr(tiny.os, "cpu_count", lambda: 1)
    assert tiny.hours_here(cells, amounts, rates, settings, start=5.0) == pytest.approx((1000 + 20) / 3600)
    # Of a step on a quarter of the batch the update takes one second, and the rest two.
    assert tiny.grown(np.array([3.0]), np.array([1.0]), 4) == 9.0


# Architectures --------------------------------------------------------------------------------------------------------


def examined(module, kind, only):
    return [module.examine(architecture) for architecture in module.architectures(kind, only)]


def test_architectures_are_found_built_and_compared(benchmark):
    module = benchmark("architectures")
    (bert,) = examined(module, "transformers", "BertForSequenceClassification")
    assert (bert.result, bert.passes, bert.precision) == ("exact", "folded", "float64")
    assert bert.norms == "5"  # of the embeddings, and two in each of two blocks
    assert set(bert.differences) == {"conversion", "evaluation", "training"}
    assert max(bert.differences.values()) < 1e-12
    (resnet,) = examined(module, "timm", "byobnet")
    assert resnet.result == "exact"
    assert resnet.differences["statistics"] < 1e-9
    (ibert,) = examined(module, "transformers", "IBertForSequenceClassification")
    assert ibert.result.startswith("refused: layer 'ibert.embeddings.LayerNorm'")
    (skipped,) = examined(module, "transformers", "Qwen3NextForSequenceClassification")
    assert skipped.result == "exact with skip=['model.layers.*.linear_attn.norm']"
    lines = module.report([bert, resnet, ibert, skipped])
    assert "4 architectures: 2 exact, 1 exact with skip, 1 refused." in lines[-2]
    assert "Refused: 1 of 4 (25.0%)" in lines[-2]


@pytest.mark.parametrize(
    ("broken", "told"),
    [
        (lambda logits, ens: logits.flip(1), "evaluation off by"),
        (lambda logits, ens: logits.mean(1, keepdim=True).expand_as(logits), "two members"),
        (lambda logits, ens: logits * (1 + 1e-3 * ens.training), "training off by"),
    ],
)
def test_an_ensemble_that_is_not_its_members_is_found(benchmark, monkeypatch, broken, told):
    module = benchmark("architectures")
    forward = sn.SigmaEnsemble.forward
    monkeypatch.setattr(sn.SigmaEnsemble, "forward", lambda ens, **inputs: broken(forward(ens, **inputs), ens))
    (row,) = examined(module, "transformers", "BertForSequenceClassification")
    assert row.kind == "WRONG"
    assert told in row.result
