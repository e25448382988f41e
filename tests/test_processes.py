"""Several processes train as one does: the same steps, statistics, history and predictions, and errors in all."""

import contextlib
import dataclasses
import functools
import json
import multiprocessing
import os
import pickle
import shutil
import signal
import socket
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from test_training import RECIPES, SETTINGS, STEPS, Penalty, fresh, tiny
from torch import nn
from torch.testing import assert_close

from sigmaens import backbones, baselines, data, diversity_loss, paths, training
from sigmaens.ensemble import SigmaEnsemble, save
from sigmaens.layers import SigmaNorm
from sigmaens.slim import Settling
from sigmaens.synchronized import SynchronizedBatchNorm
from sigmaens.training import Recipe

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(sys.platform != "linux", reason="the tests fork their processes"),
]
RECIPE = Recipe(epochs=2, batch_size=8, lr=0.05, schedule="cosine", crop=1, flip=True, sync_batch_norm=True)


def in_processes(function, folder, count=2):
    """Call `function` in processes of one gloo group, and return what each returned or raised, or its exit status."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def work(rank):
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(reset_partial_state=True)
        numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
        os.environ |= {name: str(number) for name, number in numbers.items()}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
        torch.set_num_threads(1)
        try:
            result = function()
        except Exception as error:
            result = error
        (folder / f"{rank}.result").write_bytes(pickle.dumps(result))
        os._exit(0)

    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=work, args=[rank]) for rank in range(count)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        assert process.exitcode is not None, "a process waits for ever"
    files = [folder / f"{rank}.result" for rank in range(count)]
    results = [
        pickle.loads(file.read_bytes()) if process.exitcode == 0 else process.exitcode
        for file, process in zip(files, processes, strict=True)
    ]
    for file in files:
        file.unlink(missing_ok=True)
    return results


class Exact(nn.Module):
    """Continue in float64, so that rounding cannot hide a difference."""

    def forward(self, x):
        return x.double()


def exact(net):
    return nn.Sequential(Exact(), net.double())


def convolutional():
    return exact(backbones.narrow_resnet(3, 1, width=4, blocks=[1]))


def layered():
    return exact(nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 3)))


def make(name):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if name == "σN-Ens, LayerNorm":
            return SigmaEnsemble(layered(), 2, head="1.4")
        if name == "Single, LayerNorm":
            return baselines.DeepEnsemble([layered()])
        if name.startswith("σN-Ens"):
            ensemble = SigmaEnsemble(convolutional(), 2, head="1.fc", regularize="*.bn2")
            ensemble.at_once = 1 if name == "σN-Ens in chunks" else None
            return ensemble
        if name == "Single":
            return baselines.DeepEnsemble([convolutional()])
        options = {"members": 2, "head": "1.fc", "peers": {"packed_ensembles": {"alpha": 2, "gamma": 1}}}
        return baselines.build(name, convolutional, options).double()


def outcome(name, dataset, recipe, slim=None, seed=5, **options):
    """Train a network, and return its state, history and predictions as arrays."""
    model = name() if callable(name) else make(name)
    penalty = Penalty() if isinstance(model, SigmaEnsemble) else None
    history = training.fit(model, dataset, recipe, seed=seed, penalty=penalty, slim=slim, **options)
    state = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    return state, history, training.predict(model, dataset.test.inputs, dataset)


def assert_equal(found, expected, tolerance):
    """Compare outcomes; history and predictions are kept in float32."""
    coarse = max(tolerance, 1e-6)
    assert found[0].keys() == expected[0].keys()
    for name, array in expected[0].items():
        np.testing.assert_allclose(found[0][name], array, rtol=tolerance, atol=tolerance, err_msg=name)
    assert [row.keys() for row in found[1]] == [row.keys() for row in expected[1]]
    for row, other in zip(found[1], expected[1], strict=True):
        assert row == pytest.approx(other, rel=coarse, abs=coarse)
    np.testing.assert_allclose(found[2], expected[2], rtol=coarse, atol=coarse)


NETWORKS = [
    "σN-Ens, LayerNorm",
    "Single, LayerNorm",
    "σN-Ens",
    "σN-Ens in chunks",
    "Single",
    "batch_ensemble",
    "film_ensemble",
    "packed_ensembles",
]


# 25 images make batches of 8, 8 and 9. Of 27, the last has 3, too few for two processes.
@pytest.mark.parametrize(("images", "accumulate"), [(25, 1), (27, 3)])
@pytest.mark.parametrize("name", NETWORKS)
def test_two_processes_train_as_one(tmp_path, name, images, accumulate):
    recipe = dataclasses.replace(RECIPE, accumulate=accumulate)
    job = functools.partial(outcome, name, tiny(images), recipe)
    expected = job()
    for found in in_processes(job, tmp_path):
        assert_equal(found, expected, 1e-9)
    start = make(name).state_dict()
    moved = [key for key, array in expected[0].items() if np.abs(array - start[key].numpy()).max() > 1e-4]
    assert len(moved) == len(expected[0])  # so that there was something to agree on


def test_three_processes_train_as_one(tmp_path):
    recipe = dataclasses.replace(RECIPE, optimizer="adam", lr=1e-3)
    job = functools.partial(outcome, "σN-Ens", tiny(25), recipe)
    expected = job()
    for found in in_processes(job, tmp_path, count=3):
        # Adam divides by the size of a gradient, which makes rounding of the smallest ones larger.
        assert_equal(found, expected, 1e-7)


def test_float32_differs_by_rounding(tmp_path):
    job = functools.partial(outcome, fresh, tiny(25), RECIPE)
    expected = job()
    first, second = in_processes(job, tmp_path)
    assert_equal(first, second, 0)
    assert_equal(first, expected, 1e-4)


def test_without_synchronisation_the_first_process_keeps_its_statistics(tmp_path):
    recipe = dataclasses.replace(RECIPE, epochs=1, batch_size=24, crop=0, flip=False, sync_batch_norm=False)
    dataset = tiny(24)
    seen = []

    def job():
        model = make("Single")
        model.nets[0][1].bn1.register_forward_pre_hook(lambda layer, inputs: seen.append(inputs[0].detach()))
        training.fit(model, dataset, recipe, seed=5)
        return seen[0].numpy(), model.nets[0][1].bn1.running_mean.numpy()

    (own, mean), (other, same) = in_processes(job, tmp_path)
    assert own.shape == other.shape
    np.testing.assert_allclose(mean, 0.1 * own.mean((0, 2, 3)), rtol=1e-12)
    np.testing.assert_array_equal(mean, same)
    assert np.abs(own.mean((0, 2, 3)) - other.mean((0, 2, 3))).max() > 1e-3


@pytest.mark.parametrize("name", ["σN-Ens, LayerNorm", "Single, LayerNorm"])
def test_parts_of_a_batch_make_the_same_step(name):
    whole, parts = (outcome(name, tiny(27), dataclasses.replace(RECIPE, accumulate=n)) for n in (1, 3))
    assert_equal(parts, whole, 1e-9)


def test_batch_norm_sees_one_part_at_a_time():
    seen, model = [], make("Single")
    model.nets[0][1].bn1.register_forward_pre_hook(lambda layer, inputs: seen.append(len(inputs[0])))
    training.fit(model, tiny(27), dataclasses.replace(RECIPE, epochs=1, accumulate=3), seed=0)
    assert seen == [2, 3, 3] * 3 + [3]


@pytest.mark.parametrize("processes", [1, 2, 3, 8])
@pytest.mark.parametrize("accumulate", [1, 2, 4])
def test_every_row_counts_once_and_none_is_alone(processes, accumulate):
    recipe = Recipe(epochs=1, batch_size=8, accumulate=accumulate)
    for rows in range(2, 10):
        of_all = [training._parts(rows, recipe, rank, processes) for rank in range(processes)]
        assert len({len(parts) for parts in of_all}) == 1
        counted = [(own, weight) for parts in of_all for own, weight in parts if weight]
        assert sorted(i for own, _ in counted for i in range(rows)[own]) == list(range(rows))
        assert all(weight == pytest.approx((own.stop - own.start) / rows) for own, weight in counted)
        sizes = [own.stop - own.start for parts in of_all for own, _ in parts]
        assert min(sizes) >= 2
        assert max(sizes) <= max(3, -(-9 // accumulate))
        assert of_all[0][0][1] > 0


def test_slim_training_goes_on_in_two_processes(tmp_path):
    def inner():
        with torch.random.fork_rng():
            torch.manual_seed(0)
            net = exact(backbones.narrow_resnet(3, 1, width=8, blocks=[1, 1]))
            return SigmaEnsemble(net, 2, head="1.fc", regularize="*.bn1")

    def job():
        model, recipe = inner(), Recipe(epochs=7, batch_size=8, lr=0.05, schedule="constant", sync_batch_norm=True)
        penalty = functools.partial(diversity_loss, tau=0.1, weight=0.1)
        history = training.fit(model, tiny(32), recipe, seed=5, penalty=penalty, slim=Settling(patience=1))
        # Closed gates have logits of −∞, which the optimiser moves no more, and which have no relative error.
        state = {name: tensor.double().nan_to_num(neginf=-99).numpy() for name, tensor in model.state_dict().items()}
        return state, history, training.predict(model, tiny().test.inputs, tiny())

    expected = job()
    assert expected[1][-1]["slim"] > 0
    for found in in_processes(job, tmp_path):
        assert_equal(found, expected, 1e-7)


def test_streamed_files_are_shared_out(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    for i in range(11):
        Image.fromarray(rng.integers(0, 256, (24, 20, 3), dtype=np.uint8)).save(tmp_path / f"{i}.png")
    monkeypatch.setenv("SIGMAENS_DATA", str(tmp_path))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})  # one worker for each process
    split = data.Split(np.array([f"{i}.png" for i in range(11)]), np.arange(11) % 3)
    card = {
        **tiny().card,
        "streamed": True,
        "shape": [8, 8, 3],
        "normalisation": {"mean": [0.5] * 3, "std": [0.25] * 3},
    }
    dataset = data.Dataset(split, split, split, ood={}, corrupted={}, card=card)

    def colour():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Flatten(), nn.Linear(192, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 3))
        return SigmaEnsemble(exact(net), 2, head="1.4")

    recipe = Recipe(epochs=1, batch_size=8, lr=0.05, accumulate=2)
    expected = outcome(colour, dataset, recipe)
    for found in in_processes(functools.partial(outcome, colour, dataset, recipe), tmp_path):
        assert_equal(found, expected, 1e-9)


def test_dropout_is_drawn_in_each_process(tmp_path):
    masks = []

    def job():
        dropout = nn.Dropout(0.5)
        dropout.register_forward_hook(lambda layer, inputs, output: masks.append((output != 0).numpy()))
        net = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), dropout, nn.Linear(16, 3))
        training.fit(baselines.DeepEnsemble([net]), tiny(24), dataclasses.replace(RECIPE, epochs=1), seed=5)
        return masks[0]

    first, second = in_processes(job, tmp_path)
    assert first.shape == second.shape == (4, 16)
    assert (first != second).any()


def test_bfloat16_in_two_processes(tmp_path):
    recipe = dataclasses.replace(RECIPE, precision="bf16")
    job = functools.partial(outcome, fresh, tiny(25), recipe)
    expected, full = job(), outcome(fresh, tiny(25), RECIPE)
    first, second = in_processes(job, tmp_path)
    assert_equal(first, second, 0)
    assert all(array.dtype != np.float16 for array in first[0].values())
    for row, other, exact in zip(first[1], expected[1], full[1], strict=True):
        assert row["cross_entropy"] == pytest.approx(other["cross_entropy"], rel=0.02)
        assert row["cross_entropy"] != exact["cross_entropy"]
    errors = [np.abs(first[0][name] - other[0][name]).mean() for other in (expected, full) for name in expected[0]]
    assert max(errors) < 0.01


# Statistics -----------------------------------------------------------------------------------------------------------


def norms():
    from timm.layers import BatchNormAct2d

    torch.manual_seed(0)
    kinds = [nn.BatchNorm2d(5), nn.BatchNorm2d(5, affine=False, momentum=None), BatchNormAct2d(5)]
    kinds += [SigmaNorm(kind, 2) for kind in kinds] + [nn.BatchNorm2d(5, track_running_stats=False)]
    for norm in kinds:
        for parameter in norm.parameters():
            nn.init.normal_(parameter)
    return [norm.double() for norm in kinds]


def test_norms_take_the_statistics_of_all_rows_that_count(tmp_path):
    members, rows = 2, 8
    x = torch.randn(members, rows, 5, 3, 3, dtype=torch.float64) * 2 + 100
    target = torch.randn_like(x)
    own_rows = [slice(0, 5), slice(5, 8), slice(0, 2)]  # the third process only runs along

    def run(own, counted, context):
        results = []
        for norm in norms():
            part = x[:, own].flatten(0, 1).requires_grad_()
            with context:
                y = norm(part)
            (counted * (y * target[:, own].flatten(0, 1)).sum()).backward()
            gradients = [p.grad for p in norm.parameters()]
            shape = (members, -1, *x.shape[2:])
            results.append((y.detach().view(shape), part.grad.view(shape), gradients, norm.state_dict()))
            assert_close(norm.eval()(part), norm(part), rtol=0, atol=0)
        return pickle.dumps(results)

    def job():
        rank = training._accelerator("no").process_index
        return run(own_rows[rank], rank < 2, SynchronizedBatchNorm(rank < 2))

    expected = pickle.loads(run(slice(0, rows), True, contextlib.nullcontext()))
    found = [pickle.loads(result) for result in in_processes(job, tmp_path, count=3)]
    for i, (y, dx, gradients, state) in enumerate(expected):
        results = [process[i] for process in found]
        assert_close(torch.cat([results[0][0], results[1][0]], dim=1), y, rtol=1e-10, atol=1e-10)
        assert_close(torch.cat([results[0][1], results[1][1]], dim=1), dx, rtol=1e-10, atol=1e-10)
        assert results[2][1].abs().max() == 0
        for name, gradient in enumerate(gradients):
            assert_close(sum(result[2][name] for result in results), gradient, rtol=1e-10, atol=1e-10)
        for result in results:
            assert_close(result[3], state, rtol=1e-10, atol=1e-10)


# Errors and kills -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_that_was_killed_ends_all_and_the_run_goes_on(tmp_path, rank):
    state = tmp_path / "deeper" / "fit.pt"
    recipe = dataclasses.replace(RECIPES["sgd and steps"], sync_batch_norm=True)

    def train(step=-1, state=None):
        def end():
            if os.environ["RANK"] == str(rank):
                os.kill(os.getpid(), signal.SIGKILL)

        model, penalty = fresh(), Penalty(step, end)
        history = training.fit(model, tiny(), recipe, seed=5, penalty=penalty, state=state)
        return {name: tensor.numpy() for name, tensor in model.state_dict().items()}, history, penalty.steps

    results = in_processes(functools.partial(train, STEPS + 1, state), tmp_path)
    assert results[rank] == -signal.SIGKILL
    assert isinstance(results[1 - rank], RuntimeError)
    assert len(torch.load(state, weights_only=True)["history"]) == 1
    uninterrupted = in_processes(train, tmp_path)
    shutil.copy(state, tmp_path / "copy.pt")
    alone = train(state=tmp_path / "copy.pt")
    assert alone[2] == 2 * STEPS
    assert_close(alone[0], uninterrupted[0][0], rtol=1e-4, atol=1e-4)
    # The state is the first process's: the other need not find it.
    elsewhere = {"0": state, "1": tmp_path / "nothing.pt"}
    resumed = in_processes(lambda: train(state=elsewhere[os.environ["RANK"]]), tmp_path)
    for found, expected in zip(resumed, uninterrupted, strict=True):
        assert found[2] == 2 * STEPS
        assert found[1] == expected[1]
        for name, array in expected[0].items():
            np.testing.assert_array_equal(found[0][name], array)
    assert not (tmp_path / "nothing.pt").exists()


def test_the_scale_of_float16_is_kept(tmp_path):
    def running(scale):
        model = nn.Linear(2, 2)
        return {"model": model, "scaler": torch.amp.GradScaler("cpu", init_scale=scale)}

    training._keep(tmp_path / "fit.pt", "name", running(8.0), [{"epoch": 0}])
    later = running(2.0)
    later["scaler"].scale(torch.ones(()))  # which makes the first scale
    assert training._resume((tmp_path / "fit.pt").read_bytes(), "name", later) == [{"epoch": 0}]
    assert later["scaler"].get_scale() == 8
    assert training._resume((tmp_path / "fit.pt").read_bytes(), "another", running(2.0)) == []


def test_a_loss_that_is_not_finite_in_one_process_stops_all(tmp_path):
    class Explodes(Penalty):
        def __call__(self, model):
            bad = self.steps == STEPS + 1 and os.environ["RANK"] == "1"
            return super().__call__(model) * (float("nan") if bad else 1)

    state = tmp_path / "fit.pt"

    def job():
        training.fit(fresh(), tiny(), RECIPES["sgd and steps"], seed=5, penalty=Explodes(), state=state)

    for error in in_processes(job, tmp_path):
        assert isinstance(error, ValueError)
        assert str(error) == "the loss became nan at step 4 (epoch 1, seed 5)"
    assert len(torch.load(state, weights_only=True)["history"]) == 1


def test_processes_that_accelerate_does_not_see_or_shards_models_over_are_refused(monkeypatch):
    import accelerate

    class Sharding(SimpleNamespace):
        def __init__(self, **options):
            super().__init__(num_processes=2, distributed_type=accelerate.DistributedType.FSDP)

    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(accelerate, "Accelerator", Sharding)
    with pytest.raises(ValueError, match="set up for FSDP, but fit keeps the whole model in every process: choose"):
        training.fit(fresh(), tiny(), RECIPE, seed=5)
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ValueError, match="3 processes were started, but accelerate has 2"):
        training.fit(fresh(), tiny(), RECIPE, seed=5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"accumulate": 0}, "accumulate must be an integer ≥ 1, not 0"),
        ({"accumulate": 5}, "accumulate must be at most half of 8 rows, not 5"),
        ({"accumulate": 2.0}, r"accumulate must be an integer ≥ 1, not 2\.0"),
        ({"sync_batch_norm": "yes"}, "sync_batch_norm must be true or false, not 'yes'"),
    ],
)
def test_settings_out_of_range_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        Recipe.parse({"epochs": 1, "batch_size": 8, **change})


# From a notebook ------------------------------------------------------------------------------------------------------


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project with one tiny profile."""
    recipe = {**SETTINGS["train"], "epochs": 2, "sync_batch_norm": True}
    settings = {**SETTINGS, "seeds": [0, 1], "train": recipe, "slim": {"regularize": "*.bn1"}}
    settings["variants"] = {"hot": {"sigma": {"tau": 5.0}}}
    (tmp_path / "params.yaml").write_text(json.dumps({"settings": {"tiny": settings}}))
    monkeypatch.chdir(tmp_path)
    dataset = tiny()
    card = {**dataset.card, "format": data._FORMAT, "sha256": data._checksum(data._flatten(dataset))}
    data.save(dataclasses.replace(dataset, card=card), paths.data("tiny"))
    return settings


def test_a_stage_finds_what_its_processes_trained(project, monkeypatch):
    training.together(2, "tiny", "sigma", run="sweep_tau/0.3", tau=0.3, weight=0.0)
    dataset, settings = data.load(paths.data("tiny")), training.varied(project, tau=0.3, weight=0.0)
    for seed in project["seeds"]:
        expected, rows = training.train("sigma", dataset, settings, seed=seed)
        with monkeypatch.context() as patch:
            patch.setattr(training, "_passes", None)  # nothing is left to train
            state = paths.state("tiny", "sweep_tau", "0.3", str(seed))
            found, history = training.train("sigma", dataset, settings, seed=seed, state=state)
        assert_close(found.state_dict(), expected.state_dict(), rtol=1e-4, atol=1e-4)
        assert [row["cross_entropy"] for row in history] == pytest.approx([row["cross_entropy"] for row in rows], 1e-4)


def test_why_its_processes_failed_is_said(project):
    with pytest.raises(ChildProcessError, match=r"^sigmaens.training: no method 'sgima'; there are \(.*\)$"):
        training.together(2, "tiny", "sgima", run="train/sgima")


@pytest.mark.parametrize("processes", [0, True, "2", 1.5])
def test_numbers_of_processes_that_are_none_are_refused(processes):
    with pytest.raises(ValueError, match="processes must be an integer ≥ 1, not "):
        training.together(processes, "tiny", "sigma", run="train/sigma")


def test_more_processes_than_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match="processes must be at most the number of GPUs, 2, not 3"):
        training.together(3, "tiny", "sigma", run="train/sigma")


def test_one_process_is_the_stages_own(project, monkeypatch):
    monkeypatch.setattr(training.subprocess, "run", None)
    training.together(1, "tiny", "sigma", run="train/sigma")


def test_the_command_line_trains_in_one_process_too(project, capsys, monkeypatch):
    assert training.main(["tiny", "sigma", "sweep_variants/hot", "--seeds", "1", "--variant", "hot"]) == 0
    assert capsys.readouterr().out.startswith("tiny sweep_variants/hot seed 1: 2 epochs, cross-entropy ")
    settings = training.varied(project, variant="hot")
    assert settings["sigma"] == {**project["sigma"], "regularize": "*.bn1", "tau": 5.0}
    monkeypatch.setattr(training, "_passes", None)
    state = paths.state("tiny", "sweep_variants", "hot", "1")
    assert len(training.train("sigma", data.load(paths.data("tiny")), settings, seed=1, state=state)[1]) == 2
    # The state of the comparison's own run is not overwritten by that of another.
    assert training.main(["tiny", "sigma", "--tau", "0.9", "--weight", "0"]) == 1
    assert "--tau and --weight: name the folder of this run" in capsys.readouterr().err
    assert training.main(["tiny", "sigma", "--seeds", "1", "7"]) == 1
    assert f"--seeds: [7] are none of the profile's, {project['seeds']}" in capsys.readouterr().err
    assert not paths.state("tiny", "train").exists()
    assert training.main(["tiny", "sigma", "sweep_variants/cold", "--variant", "cold"]) == 1
    assert capsys.readouterr().err == "sigmaens.training: no variant 'cold'; the profile has ['hot']\n"
    assert training.main(["huge", "sigma"]) == 1
    assert "profile 'huge' has no settings" in capsys.readouterr().err


def test_the_command_line_fine_tunes_the_single_checkpoint(project, capsys, monkeypatch):
    dataset = data.load(paths.data("tiny"))
    assert training.main(["tiny", "finetune", "--seeds", "0"]) == 1
    assert "no checkpoint" in capsys.readouterr().err
    checkpoint = paths.results("tiny", "train", "single", "seed0.safetensors")
    checkpoint.parent.mkdir(parents=True)
    save(training.train("single", dataset, project, seed=0)[0], checkpoint)
    assert training.main(["tiny", "finetune", "--seeds", "0"]) == 0
    assert capsys.readouterr().out.startswith("tiny finetune seed 0: 2 epochs")
    monkeypatch.setattr(training, "_passes", None)
    state = paths.state("tiny", "finetune", "0")
    assert len(training.finetune(checkpoint, dataset, project, seed=0, state=state)[1]) == 2
