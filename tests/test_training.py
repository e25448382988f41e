"""The training loop: repeatable to the last bit, resumable after a kill, strict about what it is given."""

import contextlib
import dataclasses
import functools
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from sigmaens import backbones, baselines, data, diversity_loss, member_cross_entropy, save, training
from sigmaens.ensemble import SigmaEnsemble
from sigmaens.training import Recipe

SETTINGS = {
    "backbone": {"name": "narrow_resnet", "width": 4, "blocks": [1]},
    "members": 2,
    "head": "fc",
    "train": {"epochs": 3, "batch_size": 8, "lr": 0.05, "milestones": [1, 2], "crop": 1, "flip": True},
    "sigma": {"regularize": "*.bn2", "tau": 0.1, "weight": 1e-3},
    "finetune": {
        "tau": 0.5,
        "weight": 1e-4,
        "train": {"epochs": 2, "batch_size": 8, "optimizer": "adam", "lr": 1e-3, "schedule": "constant"},
    },
}
RECIPES = {
    "sgd and steps": Recipe.parse(SETTINGS["train"]),
    "sgd and one cycle": Recipe(epochs=3, batch_size=8, schedule="one_cycle", nesterov=True),
    "adam and cosine": Recipe(epochs=3, batch_size=8, optimizer="adam", lr=1e-3, schedule="cosine", warmup=5, crop=1),
}
STEPS = 3  # an epoch: 25 images in batches of 8, 8 and 9


def tiny(images=25, classes=3):
    """Bright, middle and dark noise of 8×8 pixels: as learnable as it is small."""
    rng = np.random.default_rng(0)
    labels = np.arange(images) % classes
    pixels = rng.integers(0, 100, (images, 8, 8, 1)) + 70 * labels[:, None, None, None]
    split = data.Split(pixels.astype(np.uint8), labels.astype(np.int64))
    card = {
        "kind": "image",
        "classes": [str(k) for k in range(classes)],
        "normalisation": {"mean": [0.5], "std": [0.25]},
        "sha256": f"{images} images",
    }
    return data.Dataset(split, split, split, ood={}, corrupted={}, card=card)


def fresh(method="sigma", seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return baselines.build(
            method, lambda: backbones.build(classes=3, in_channels=1, **SETTINGS["backbone"]), SETTINGS
        )


class Killed(Exception):
    pass


class Penalty:
    """The diversity loss, which calls `end` at the given step, counted over all epochs."""

    def __init__(self, step=-1, end=None):
        self.steps, self.step, self.end = 0, step, end

    def __call__(self, model):
        if self.steps == self.step:
            self.end()
        self.steps += 1
        return diversity_loss(model, tau=0.1, weight=1e-3)


def die():
    raise Killed


def killed_for_good(state):
    """Train with steps until the system kills the process in the second epoch; run in a process of its own."""
    penalty = Penalty(STEPS + 1, lambda: os.kill(os.getpid(), signal.SIGKILL))
    training.fit(fresh(), tiny(), RECIPES["sgd and steps"], seed=5, penalty=penalty, state=Path(state))


@functools.cache
def uninterrupted(name):
    model = fresh()
    history = training.fit(model, tiny(), RECIPES[name], seed=5, penalty=Penalty())
    return model.state_dict(), history


def assert_same(found, expected):
    assert_close(found[0], expected[0], rtol=0, atol=0)
    assert found[1] == expected[1]


@pytest.mark.parametrize("step", [1, STEPS, STEPS + 1, 3 * STEPS - 1])
@pytest.mark.parametrize("name", RECIPES)
def test_a_run_that_broke_off_ends_as_one_that_did_not(tmp_path, name, step):
    state = tmp_path / "deeper" / "fit.pt"
    with pytest.raises(Killed):
        training.fit(fresh(), tiny(), RECIPES[name], seed=5, penalty=Penalty(step, die), state=state)
    assert state.exists() == (step >= STEPS)
    torch.manual_seed(99)
    model, penalty = fresh(), Penalty()
    history = training.fit(model, tiny(), RECIPES[name], seed=5, penalty=penalty, state=state)
    assert penalty.steps == 3 * STEPS - step // STEPS * STEPS  # whole epochs are not repeated
    assert_same((model.state_dict(), history), uninterrupted(name))


def test_a_run_that_was_killed_ends_as_one_that_was_not(tmp_path):
    state = tmp_path / "fit.pt"
    script = "import sys, test_training; test_training.killed_for_good(sys.argv[1])"
    killed = subprocess.run([sys.executable, "-c", script, state], cwd=Path(__file__).parent, timeout=300)
    assert killed.returncode == -signal.SIGKILL
    model, penalty = fresh(), Penalty()
    history = training.fit(model, tiny(), RECIPES["sgd and steps"], seed=5, penalty=penalty, state=state)
    assert penalty.steps == 2 * STEPS
    assert_same((model.state_dict(), history), uninterrupted("sgd and steps"))


def test_a_finished_run_is_taken_from_its_state(tmp_path):
    state = tmp_path / "fit.pt"
    recipe = RECIPES["adam and cosine"]
    training.fit(fresh(), tiny(), recipe, seed=5, penalty=Penalty(), state=state)
    model, penalty = fresh(), Penalty()
    history = training.fit(model, tiny(), recipe, seed=5, penalty=penalty, state=state)
    assert penalty.steps == 0
    assert_same((model.state_dict(), history), uninterrupted("adam and cosine"))


@pytest.mark.parametrize("change", ["seed", "recipe", "data", "initial weights", "tau", "model"])
def test_the_state_of_another_run_is_ignored(tmp_path, change):
    def run(state, *changes):
        recipe = Recipe(epochs=1, batch_size=8, lr=0.01 if "recipe" in changes else 0.05)
        dataset = tiny(26 if "data" in changes else 25)
        model = fresh("single" if "model" in changes else "sigma", seed=int("initial weights" in changes))
        penalty = functools.partial(diversity_loss, tau=0.2 if "tau" in changes else 0.1)
        penalty = penalty if "model" not in changes else None
        history = training.fit(model, dataset, recipe, seed=int("seed" in changes), penalty=penalty, state=state)
        return model.state_dict(), history

    state = tmp_path / "fit.pt"
    run(state)
    assert_same(run(state, change), run(None, change))


def test_forgetting_removes_the_state(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "fit.pt").write_bytes(b"")
    training.forget(tmp_path / "run")
    training.forget(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_one_plain_epoch_is_the_textbook_loop():
    recipe = Recipe(epochs=1, batch_size=8, lr=0.05, weight_decay=0.01, schedule="constant", gamma_multiplier=10)
    dataset, model, twin = tiny(), fresh(), fresh()
    history = training.fit(model, dataset, recipe, seed=3, penalty=Penalty())
    x = data.to_tensor(dataset.train.inputs, dataset.mean, dataset.std)
    y = torch.from_numpy(dataset.train.labels)
    gammas = [p for name, p in twin.named_parameters() if name.endswith("gamma")]
    others = [p for name, p in twin.named_parameters() if not name.endswith("gamma")]
    momenta = {p: torch.zeros_like(p) for p in twin.parameters()}
    order = torch.randperm(25, generator=torch.Generator().manual_seed(3 + 1_000_003))
    losses = []
    for batch in order.split([8, 8, 9]):
        logits = twin.train()(x[batch])
        nll = sum(F.cross_entropy(logits[:, m], y[batch]) for m in range(2)) / 2
        penalty = diversity_loss(twin, tau=0.1, weight=1e-3)
        gradients = dict(zip(momenta, torch.autograd.grad(nll + penalty, list(momenta)), strict=True))
        with torch.no_grad():
            for p in [*gammas, *others]:
                decay, lr = (0, 0.5) if any(p is gamma for gamma in gammas) else (0.01, 0.05)
                momenta[p] = 0.9 * momenta[p] + gradients[p] + decay * p
                p -= lr * momenta[p]
        losses.append((nll.item(), penalty.item()))
    assert_close(model.state_dict(), twin.state_dict(), rtol=1e-3, atol=1e-4)
    assert history[0]["cross_entropy"] == pytest.approx(np.mean(losses, axis=0)[0], rel=1e-4)
    assert history[0]["penalty"] == pytest.approx(np.mean(losses, axis=0)[1], rel=1e-4)


def test_training_learns_and_the_history_keeps_the_losses_apart():
    dataset = tiny(60)
    model = fresh()
    recipe = Recipe(epochs=6, batch_size=16, lr=0.05, milestones=(4,), gamma_multiplier=10)
    history = training.fit(model, dataset, recipe, seed=0, penalty=Penalty())
    assert [row["epoch"] for row in history] == list(range(6))
    assert [row["lr"] for row in history] == pytest.approx([0.05] * 4 + [0.005] * 2)
    assert history[-1]["cross_entropy"] < 0.5 * history[0]["cross_entropy"]
    features = sum(gates.shape[1] for gates in model.regularized_gates().values())
    assert all(-10 * features < row["penalty"] / 1e-3 < -2 * np.log(2) * features for row in history)
    logits = training.predict(model, dataset.test.inputs, dataset, batch_size=7)
    assert logits.dtype == np.float32
    assert logits.shape == (60, 2, 3)
    assert (logits.mean(1).argmax(1) == dataset.test.labels).mean() > 0.8
    without = training.fit(fresh("single"), dataset, dataclasses.replace(recipe, epochs=1), seed=0)
    assert without[0]["penalty"] == 0


@pytest.mark.parametrize("schedule", ["constant", "step", "cosine", "one_cycle"])
def test_schedules_start_and_end_where_they_should(schedule):
    recipe = Recipe(epochs=4, batch_size=8, lr=0.08, schedule=schedule, milestones=(2,), factor=0.5)
    lr = [row["lr"] for row in training.fit(fresh(), tiny(), recipe, seed=0)]
    expected = {
        "constant": [0.08] * 4,
        "step": [0.08, 0.08, 0.04, 0.04],
        "cosine": [0.08 * (1 + np.cos(np.pi * epoch / 4)) / 2 for epoch in range(4)],
        "one_cycle": [0.08 / 25, *lr[1:]],
    }
    assert lr == pytest.approx(expected[schedule])
    if schedule == "one_cycle":
        assert lr[1] == max(lr) > 0.07
        assert lr[3] < lr[2]


@pytest.mark.parametrize("schedule", ["constant", "step", "cosine"])
def test_warm_up_rises_to_the_rate_and_the_schedule_takes_the_rest(schedule):
    recipe = Recipe(epochs=3, lr=0.1, schedule=schedule, milestones=(2,), factor=0.5, warmup=4)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=recipe.lr)
    scheduler = training._scheduler(optimizer, recipe, steps_per_epoch=4)
    rates = []
    for _ in range(12):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates[:4] == pytest.approx([0.02, 0.04, 0.06, 0.08])
    after = {
        "constant": [0.1] * 8,
        "step": [0.1] * 4 + [0.05] * 4,
        "cosine": [0.1 * (1 + np.cos(np.pi * step / 8)) / 2 for step in range(8)],
    }
    assert rates[4:] == pytest.approx(after[schedule])
    with pytest.raises(ValueError, match="warmup must be less than the 4 steps of training, not 4"):
        training._scheduler(optimizer, dataclasses.replace(recipe, epochs=1), steps_per_epoch=4)


def test_the_last_batch_is_never_a_single_image():
    assert training._batch_sizes(25, 8) == [8, 8, 9]
    assert training._batch_sizes(24, 8) == [8, 8, 8]
    assert training._batch_sizes(26, 8) == [8, 8, 8, 2]
    assert training._batch_sizes(5, 128) == [5]


def test_equal_seeds_give_equal_weights_and_others_do_not():
    recipe = Recipe(epochs=1, batch_size=8, crop=1, flip=True)

    def weights(seed):
        model = fresh()
        training.fit(model, tiny(), recipe, seed=seed)
        return model.state_dict()

    assert_close(weights(1), weights(1), rtol=0, atol=0)
    assert (weights(2)["backbone.conv1.weight"] - weights(1)["backbone.conv1.weight"]).abs().max() > 1e-4


@pytest.mark.parametrize("broken", [False, True])
def test_the_callers_settings_and_random_states_are_kept(broken):
    torch.set_num_threads(2)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        before = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
        penalty = Penalty(1, die) if broken else Penalty()
        try:
            model = fresh()
            training.fit(model, tiny(), Recipe(epochs=1, batch_size=8), seed=0, penalty=penalty)
            training.predict(model, tiny().test.inputs, tiny())
        except Killed:
            assert broken
        assert random.getstate() == before[0]
        assert (np.random.get_state()[1] == before[1][1]).all()  # noqa: NPY002
        assert np.random.get_state()[2] == before[1][2]  # noqa: NPY002
        assert torch.equal(torch.get_rng_state(), before[2])
        assert torch.get_num_threads() == 2
        assert torch.is_deterministic_algorithms_warn_only_enabled()
        assert torch.tensor(1e-40).mul(1).item() > 0  # denormals are back
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(1)


def test_denormals_are_flushed_in_training_and_prediction():
    seen = []

    class Watch(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(64, 3)

        def forward(self, x):
            seen.append(torch.full((100,), 1e-30).mul(1e-10).max().item())
            return self.fc(x.flatten(1))[:, None]

    model = Watch()
    training.fit(model, tiny(), Recipe(epochs=1, batch_size=25), seed=0)
    training.predict(model, tiny().test.inputs, tiny())
    assert seen == [0.0, 0.0]


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_a_loss_that_is_not_finite_stops_with_its_step(tmp_path, value):
    class Explodes(Penalty):
        def __call__(self, model):
            return super().__call__(model) * (float(value) if self.steps == STEPS + 2 else 1)

    message = rf"the loss became -?{value} at step 4 \(epoch 1, seed 5\)"
    state = tmp_path / "fit.pt"
    with pytest.raises(ValueError, match=message):
        training.fit(fresh(), tiny(), RECIPES["sgd and steps"], seed=5, penalty=Explodes(), state=state)
    kept = torch.load(state, weights_only=True)
    assert len(kept["history"]) == 1
    assert all(tensor.isfinite().all() for tensor in kept["model"].values())


def test_bad_labels_and_single_images_are_refused():
    dataset = tiny()
    dataset.train.labels[4] = 3
    with pytest.raises(ValueError, match=r"labels\[4\] is 3; 3 classes allow 0 … 2"):
        training.fit(fresh(), dataset, Recipe(epochs=1), seed=0)
    with pytest.raises(ValueError, match="cannot train on 1 images"):
        training.fit(fresh(), tiny(1), Recipe(epochs=1), seed=0)


def test_bfloat16_is_used_in_training_and_leaves_a_float32_model():
    model, dtypes = fresh(), []
    for training_mode in (True, False):
        model.train(training_mode)(torch.rand(3, 1, 8, 8))  # proves folding
    model.backbone.fc.register_forward_hook(lambda *arguments: dtypes.append(arguments[2].dtype))
    # Between two runs in float32: accelerate would keep the precision of the first.
    for precision in ("no", "bf16", "no"):
        recipe = Recipe(epochs=1, batch_size=25, precision=precision)
        history = training.fit(model, tiny(), recipe, seed=0)
        training.predict(model, tiny().test.inputs, tiny())
        assert np.isfinite(history[0]["cross_entropy"])
    assert dtypes == [torch.float32] * 2 + [torch.bfloat16] + [torch.float32] * 3
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("content", [b"", b"no checkpoint", None])
def test_a_damaged_state_is_ignored(tmp_path, content):
    state = tmp_path / "fit.pt"
    training.fit(fresh(), tiny(), RECIPES["sgd and steps"], seed=5, penalty=Penalty(), state=state)
    state.write_bytes(state.read_bytes()[:-100] if content is None else content)
    model = fresh()
    history = training.fit(model, tiny(), RECIPES["sgd and steps"], seed=5, penalty=Penalty(), state=state)
    assert_same((model.state_dict(), history), uninterrupted("sgd and steps"))


def test_a_state_with_a_flipped_bit_is_ignored(tmp_path):
    state = tmp_path / "fit.pt"
    training.fit(fresh(), tiny(), RECIPES["sgd and steps"], seed=5, penalty=Penalty(), state=state)
    whole = state.read_bytes()
    weight = next(iter(torch.load(state, weights_only=True)["model"].values()))
    at = whole.index(weight.numpy().tobytes()) + 2
    state.write_bytes(whole[:at] + bytes([whole[at] ^ 64]) + whole[at + 1 :])
    model = fresh()
    history = training.fit(model, tiny(), RECIPES["sgd and steps"], seed=5, penalty=Penalty(), state=state)
    assert_same((model.state_dict(), history), uninterrupted("sgd and steps"))


@pytest.mark.parametrize("content", [[1, 2], torch.zeros(3)])
def test_a_state_that_holds_something_else_is_ignored(tmp_path, content):
    state = tmp_path / "fit.pt"
    torch.save(content, state)
    model = fresh()
    history = training.fit(model, tiny(), RECIPES["sgd and steps"], seed=5, penalty=Penalty(), state=state)
    assert_same((model.state_dict(), history), uninterrupted("sgd and steps"))


def test_a_full_disk_is_named_with_the_state_and_an_earlier_one_stays(tmp_path, full_disk):
    state = tmp_path / "fit.pt"
    state.write_bytes(b"earlier")
    with pytest.raises(OSError, match=r"cannot write the training state: File too large: '.*fit\.pt'"), full_disk():
        training.fit(fresh(), tiny(), RECIPES["sgd and steps"], seed=5, penalty=Penalty(), state=state)
    assert [path.name for path in tmp_path.iterdir()] == ["fit.pt"]
    assert state.read_bytes() == b"earlier"


def final_weights(seed):
    model = fresh(seed=seed)
    training.fit(model, tiny(), Recipe(epochs=1, batch_size=8), seed=seed)
    return {name: tensor.numpy() for name, tensor in model.state_dict().items()}


def test_side_by_side_is_one_after_the_other():
    together = training.side_by_side(final_weights, (3, 1))
    assert list(together) == [3, 1]
    for seed, weights in together.items():
        for name, array in final_weights(seed).items():
            np.testing.assert_array_equal(weights[name], array)
    with pytest.raises(Killed):
        training.side_by_side(broken_seed, (0, 1))


def sleeping_seed(folder, seed):
    unfinished = Path(folder) / f"{seed}.unfinished"
    unfinished.write_text(str(os.getpid()))
    unfinished.rename(unfinished.with_suffix(".pid"))
    time.sleep(300)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere seeds run one after the other, in one process")
def test_workers_end_with_the_process_that_started_them(tmp_path):
    """A killed stage must not go on writing into the results of the one that takes its place."""
    script = (
        "import functools, sys, test_training; from sigmaens import training;"
        "training.side_by_side(functools.partial(test_training.sleeping_seed, sys.argv[1]), (0, 1))"
    )
    parent = subprocess.Popen([sys.executable, "-c", script, tmp_path], cwd=Path(__file__).parent)
    deadline = time.monotonic() + 120
    while not all((tmp_path / f"{seed}.pid").is_file() for seed in (0, 1)) and time.monotonic() < deadline:
        time.sleep(0.1)
    parent.kill()
    parent.wait()
    workers = [int(file.read_text()) for file in tmp_path.glob("*.pid")]
    assert len(workers) == 2

    def alive(pid):
        status = Path(f"/proc/{pid}/stat")
        return status.is_file() and status.read_text().rpartition(")")[2].split()[0] != "Z"

    while any(map(alive, workers)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(alive, workers))


def broken_seed(seed):
    raise Killed


# Recipes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epoch": 3}, r"unknown \['epoch'\], known .*'batch_size'"),
        ({"epochs": 0}, "epochs must be an integer ≥ 1, not 0"),
        ({"epochs": 2.0}, r"epochs must be an integer ≥ 1, not 2\.0"),
        ({"epochs": True}, "epochs must be an integer ≥ 1, not True"),
        ({"batch_size": 1}, "batch_size must be an integer ≥ 2, not 1"),
        ({"warmup": -1}, "warmup must be an integer ≥ 0, not -1"),
        ({"warmup": 1, "schedule": "one_cycle"}, "warmup must be 0 with one_cycle, which has its own, not 1"),
        ({"crop": -1}, "crop must be an integer ≥ 0, not -1"),
        ({"optimizer": "sdg"}, r"optimizer must be one of \('sgd', 'adam'\), not 'sdg'"),
        ({"schedule": "linear"}, "schedule must be one of .*, not 'linear'"),
        ({"precision": "fp8"}, "precision must be one of .*, not 'fp8'"),
        ({"lr": 0}, "lr must be a number > 0, not 0"),
        ({"lr": "1e-3"}, "lr must be a number > 0, not '1e-3'"),
        ({"lr": float("nan")}, "lr must be a number > 0, not nan"),
        ({"factor": float("inf")}, "factor must be a number > 0, not inf"),
        ({"gamma_multiplier": None}, "gamma_multiplier must be a number > 0, not None"),
        ({"momentum": -0.1}, r"momentum must be a number ≥ 0 and < 1, not -0\.1"),
        ({"weight_decay": True}, "weight_decay must be a number ≥ 0, not True"),
        ({"flip": "false"}, "flip must be true or false, not 'false'"),
        ({"nesterov": 1}, "nesterov must be true or false, not 1"),
        ({"milestones": 3}, "milestones must be a list of epochs > 0, not 3"),
        ({"milestones": [1, 2.5]}, r"milestones must be a list of epochs > 0, not \[1, 2\.5\]"),
        ({"milestones": [0]}, r"milestones must be a list of epochs > 0, not \[0\]"),
    ],
)
def test_settings_that_are_unknown_or_out_of_range_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        Recipe.parse({"epochs": 1, **change})


def test_epochs_are_required_and_the_rest_is_the_papers():
    with pytest.raises(ValueError, match="`epochs` required"):
        Recipe.parse({"lr": 0.1})
    assert Recipe.parse({"epochs": 75, "milestones": [25, 50]}) == Recipe(epochs=75, milestones=(25, 50))
    recipe = Recipe.parse({"epochs": 75})
    assert (recipe.batch_size, recipe.lr, recipe.momentum, recipe.weight_decay) == (128, 0.05, 0.9, 5e-4)
    assert recipe.gamma_multiplier == 100


# Methods


def settings(**changes):
    return {**SETTINGS, "train": {**SETTINGS["train"], "epochs": 1}, **changes}


def test_single_is_the_first_member_of_deep_ensembles(tmp_path):
    dataset = tiny()
    torch.manual_seed(1)
    single, alone = training.train("single", dataset, settings(), seed=2)
    torch.manual_seed(2)
    ensemble, together = training.train("deep_ensembles", dataset, settings(), seed=2, state=tmp_path)
    assert len(ensemble.nets) == 2
    assert_close(single.nets[0].state_dict(), ensemble.nets[0].state_dict(), rtol=0, atol=0)
    assert [row["member"] for row in together] == [0, 1]
    assert together[:1] == alone
    assert (ensemble.nets[0].fc.weight - ensemble.nets[1].fc.weight).abs().max() > 0.01
    assert sorted(file.name for file in tmp_path.iterdir()) == ["fit0.pt", "fit1.pt"]
    other, _ = training.train("single", dataset, settings(), seed=3)
    assert (other.nets[0].fc.weight - single.nets[0].fc.weight).abs().max() > 0.01


def test_predictions_do_not_depend_on_the_batch():
    dataset = tiny()
    model, _ = training.train("sigma", dataset, settings(), seed=0)
    one, all_at_once = (training.predict(model, dataset.test.inputs, dataset, batch_size=b) for b in (1, 25))
    np.testing.assert_allclose(one, all_at_once, rtol=1e-4, atol=1e-5)


def test_a_gpu_predicts_with_a_copy(monkeypatch):
    class Watch(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(64, 3)

        def forward(self, x):
            seen.append((x.device.type, self.fc.weight.device.type))
            return torch.zeros(len(x), 1, 3)

    seen, model = [], Watch()
    monkeypatch.setattr(training, "_gpu", lambda: torch.device("meta"))
    monkeypatch.setattr(training, "_deterministic", contextlib.nullcontext)
    assert training.predict(model, tiny().test.inputs, tiny()).shape == (25, 1, 3)
    assert seen == [("meta", "meta")]
    assert model.fc.weight.device.type == "cpu"
    model.fc.weight.sum().backward()  # which an inference tensor could not


def test_float16_needs_a_gpu():
    if torch.accelerator.is_available():
        pytest.skip("there is one")
    with pytest.raises(ValueError, match="precision fp16 needs a GPU"):
        training.train("sigma", tiny(), settings(train={**SETTINGS["train"], "precision": "fp16"}), seed=0)


def test_members_of_deep_ensembles_predict_as_alone():
    dataset = tiny()
    ensemble, _ = training.train("deep_ensembles", dataset, settings(), seed=0)
    logits = training.predict(ensemble, dataset.test.inputs, dataset)
    for m, net in enumerate(ensemble.nets):
        assert_close(training.predict(baselines.DeepEnsemble([net]), dataset.test.inputs, dataset)[:, 0], logits[:, m])


def test_an_ensemble_is_trained_with_its_penalty():
    dataset = tiny()
    first, history = training.train("sigma", dataset, settings(), seed=0)
    assert isinstance(first, SigmaEnsemble)
    assert history[0]["penalty"] < -1e-3 * 2 * np.log(2) * 4
    free = settings(sigma={**SETTINGS["sigma"], "weight": 0.0})
    second, history = training.train("sigma", dataset, free, seed=0)
    assert history[0]["penalty"] == 0
    assert (first.backbone.stages[0][0].bn2.gamma - second.backbone.stages[0][0].bn2.gamma).abs().max() > 1e-3


def test_fine_tuning_starts_from_the_single_checkpoint(tmp_path, monkeypatch):
    dataset = tiny()
    single, _ = training.train("single", dataset, settings(), seed=0)
    save(single, tmp_path / "single.safetensors")
    started = {}

    def watch(model, *args, **kwargs):
        features = []
        handles = [
            net.fc.register_forward_pre_hook(lambda _, inputs: features.append(inputs[0]))
            for net in (single.nets[0], model.backbone)
        ]
        for net in (single, model):
            training.predict(net, dataset.test.inputs, dataset)
        for handle in handles:
            handle.remove()
        started["features"] = features
        started["recipe"], started["penalty"] = args[1], kwargs["penalty"]
        return fit(model, *args, **kwargs)

    fit = training.fit
    monkeypatch.setattr(training, "fit", watch)
    ensemble, history, exact = training.finetune(tmp_path / "single.safetensors", dataset, settings(), seed=0)
    assert exact < 1e-5
    assert_close(started["features"][-1], started["features"][0].repeat(2, 1), rtol=1e-5, atol=1e-5)
    assert started["recipe"] == Recipe.parse(SETTINGS["finetune"]["train"])
    assert started["penalty"].keywords == {"tau": 0.5, "weight": 1e-4}
    assert [row["epoch"] for row in history] == [0, 1]
    assert ensemble.members == 2
    again, _, _ = training.finetune(tmp_path / "single.safetensors", dataset, settings(), seed=0)
    assert_close(again.state_dict(), ensemble.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("method", ["single", "deep_ensembles", "sigma"])
def test_a_checkpoint_is_restored(tmp_path, method):
    dataset = tiny()
    model = fresh(method)
    save(model, tmp_path / "model.safetensors")
    restored = training.restore(method, tmp_path / "model.safetensors", dataset, SETTINGS)
    logits = [training.predict(net, dataset.test.inputs, dataset) for net in (model, restored)]
    np.testing.assert_array_equal(*logits)


def test_unknown_methods_and_backbones_are_named():
    with pytest.raises(ValueError, match=r"no method 'swag'; there are \('single', 'deep_ensembles', 'sigma'"):
        training.train("swag", tiny(), settings(), seed=0)
    with pytest.raises(ValueError, match="'finetune' starts from a checkpoint"):
        training.train("finetune", tiny(), settings(), seed=0)
    with pytest.raises(ValueError, match=r"no backbone 'vgg'; there are .*'resnet50', .*'wide_resnet'"):
        training.train("single", tiny(), settings(backbone={"name": "vgg"}), seed=0)
    with pytest.raises(ValueError, match=r"backbone 'narrow_resnet': .*'depth'"):
        training.train("single", tiny(), settings(backbone={"name": "narrow_resnet", "depth": 3}), seed=0)


# Backbones


def test_resnet18_has_the_papers_number_of_parameters():
    """Derived counts of the paper's table: 11.17 M for Single; 11.201 M with four heads and gates (10 classes)."""
    net = backbones.resnet18(10)
    assert sum(p.numel() for p in net.parameters()) == 11_173_962
    ens = SigmaEnsemble(net, 4, head="fc")
    assert sum(p.numel() for p in ens.parameters()) == pytest.approx(11.201e6, abs=1e3)


def test_blocks_halve_the_image_and_double_the_channels():
    net = backbones.narrow_resnet(3, 1, width=4)
    shapes = []
    for stage in net.stages:
        stage.register_forward_hook(lambda module, inputs, output: shapes.append(tuple(output.shape[1:])))
    assert net(torch.randn(2, 1, 8, 8)).shape == (2, 3)
    assert shapes == [(4, 8, 8), (8, 4, 4), (16, 2, 2)]


def test_the_loss_of_the_loop_is_the_mean_over_members():
    logits, labels = torch.randn(5, 2, 3), torch.randint(3, (5,))
    each = [F.cross_entropy(logits[:, m], labels) for m in range(2)]
    assert_close(member_cross_entropy(logits, labels), torch.stack(each).mean())


def sentences(rows=41, seed=0):
    """Token ids of 2 to 12 tokens, padded with 0; the class is whether token 7 is among them."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(2, 13, rows)
    ids = rng.integers(10, 30, (rows, 12)) * (np.arange(12) < lengths[:, None])
    labels = np.arange(rows) % 2
    ids[labels == 1, 0] = 7
    split = data.Split(ids.astype(np.int32), labels.astype(np.int64))
    card = {"kind": "text", "pad": 0, "classes": ["no", "yes"], "sha256": f"{rows} sentences"}
    return data.Dataset(split, split, split, ood={}, corrupted={}, card=card)


@pytest.mark.parametrize("method", ["single", "sigma", "lora_ensemble"])
def test_a_network_of_other_tokens_than_the_sentences_is_refused(method, tmp_path):
    from transformers import BertConfig

    dataset = sentences()
    dataset.card["tokenizer"] = "words"

    def build(**options):
        sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
        BertConfig(**sizes, **options).save_pretrained(tmp_path)
        backbone = {"name": "transformer", "model": str(tmp_path), "pretrained": False}
        settings = {"members": 2, "head": "net.classifier", "sigma": {"regularize": "*"}, "backbone": backbone}
        return baselines.build(method, lambda: training._backbone(dataset, settings), settings)

    assert build(vocab_size=30)(dataset.tensor(dataset.test.inputs[:3])).shape[::2] == (3, 2)
    with pytest.raises(ValueError, match=f"'words' and network '{tmp_path}' .* ids up to 29, .* knows 0 … 28"):
        build(vocab_size=29)
    with pytest.raises(ValueError, match=f"'words' and network '{tmp_path}' .* padded with 0, .* takes 1"):
        build(vocab_size=30, pad_token_id=1)


class Reader(torch.nn.Module):
    """Mean of embeddings over what is not padding, a norm and a head; counts the tokens it reads."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(30, 8)
        self.norm = torch.nn.LayerNorm(8)
        self.head = torch.nn.Linear(8, 2)
        self.read = []

    def forward(self, ids):
        mask = ids != 0
        self.read.append(int(mask.any(0).sum()) * len(ids))
        mean = (self.embedding(ids) * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return self.head(self.norm(mean))


def readers(members=2):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return SigmaEnsemble(Reader(), members, head="head")


def test_sentences_are_learned_and_a_broken_off_run_goes_on(tmp_path):
    recipe = training.Recipe.parse(
        {"epochs": 6, "batch_size": 8, "optimizer": "adam", "lr": 0.02, "schedule": "constant"}
    )
    whole = readers()
    history = training.fit(whole, sentences(), recipe, seed=1, penalty=Penalty())
    assert history[-1]["cross_entropy"] < 0.5 * history[0]["cross_entropy"]
    with pytest.raises(Killed):
        training.fit(readers(), sentences(), recipe, seed=1, penalty=Penalty(14, die), state=tmp_path / "fit.pt")
    again = readers()
    resumed = training.fit(again, sentences(), recipe, seed=1, penalty=Penalty(), state=tmp_path / "fit.pt")
    assert_same((again.state_dict(), resumed), (whole.state_dict(), history))


def test_every_sentence_is_in_one_batch_of_an_epoch_with_others_of_its_length():
    sizes, lengths = [8] * 40 + [5], torch.randint(2, 60, (325,), generator=torch.Generator().manual_seed(0))
    batches = training._batches(sizes, torch.Generator().manual_seed(3), lengths)
    assert sorted(torch.cat(batches).tolist()) == list(range(325))
    assert sorted(map(len, batches)) == sorted(sizes)
    spread = np.mean([np.ptp(lengths[batch].numpy()) for batch in batches])
    assert spread < 0.25 * np.mean([np.ptp(lengths[batch].numpy()) for batch in torch.randperm(325).split(8)])
    others = training._batches(sizes, torch.Generator().manual_seed(4), lengths)
    assert {tuple(sorted(b.tolist())) for b in others} != {tuple(sorted(b.tolist())) for b in batches}
    means = [lengths[batch].float().mean() for batch in batches]
    assert abs(np.corrcoef(means, range(len(means)))[0, 1]) < 0.5  # long batches do not come last


def test_prediction_puts_sentences_back_in_their_order_and_reads_little_padding():
    dataset, model = sentences(), readers()
    inputs = dataset.test.inputs
    logits = training.predict(model, inputs, dataset, batch_size=4)
    one_by_one = np.concatenate([training.predict(model, row[None], dataset) for row in inputs])
    assert_close(logits, one_by_one, rtol=1e-5, atol=1e-6)
    model.backbone.read.clear()
    training.predict(model, inputs, dataset, batch_size=4)
    tokens = 2 * (inputs != 0).sum()
    assert tokens <= sum(model.backbone.read) < 1.3 * tokens < 0.9 * 2 * inputs.size


def test_conversion_error_is_that_of_the_worst_member(monkeypatch):
    dataset, net, convert = sentences(), Reader(), SigmaEnsemble.from_pretrained
    assert training.conversion_error(net, dataset, 3) < 1e-6

    def spoiled(*arguments):
        ens = convert(*arguments)
        with torch.no_grad():
            ens.backbone.norm.gamma[1] -= 3
        return ens

    monkeypatch.setattr(SigmaEnsemble, "from_pretrained", spoiled)
    assert training.conversion_error(net, dataset, 3) > 0.1


def test_a_method_may_have_a_recipe_of_its_own():
    settings = {**SETTINGS, "peers": {"mc_dropout": {"rate": 0.1, "train": {"epochs": 1}}}}
    assert len(training.train("mc_dropout", tiny(), settings, seed=0)[1]) == 1
    assert len(training.train("sigma", tiny(), settings, seed=0)[1]) == SETTINGS["train"]["epochs"]
