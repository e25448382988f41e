"""The adapter for Trainer and pipelines: its loss and logits, what it takes from the backbone, and the page on it."""

import copy
import inspect
import math
import pickle
import re

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

import sigmaens as sn
from sigmaens import paths
from sigmaens.trainer import ForTrainer

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
WORDS = ["[PAD]", "[UNK]", "a", "the", "film", "good", "great", "bad", "dull"]
LABELS = {0: "worse", 1: "better", 2: "other"}


def bert(**options):
    from transformers import BertConfig, BertForSequenceClassification

    options = {"num_labels": 3, "id2label": LABELS, "initializer_range": 0.2, "vocab_size": 9, **SMALL, **options}
    return BertForSequenceClassification(BertConfig(**options))


def vit():
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"image_size": 16, "patch_size": 8, **SMALL}
    return ViTForImageClassification(ViTConfig(num_labels=3, id2label=LABELS, initializer_range=0.2, **sizes))


def adapter(backbone, weight=1e-3, **options):
    return ForTrainer(sn.SigmaEnsemble(backbone, members=3, head="classifier", **options), tau=0.1, weight=weight)


def plain(weight=1e-2, **options):
    net = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 3))
    return ForTrainer(sn.SigmaEnsemble(net, members=4, head="3", **options), tau=0.1, weight=weight)


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]")


def sentences():
    """Rows as a dataset gives them: with a column that no model takes, and of two lengths, to be padded."""
    pairs = [("a good film", 1), ("the bad film", 0), ("great", 1), ("dull", 0)] * 4
    return [{**tokenizer()(text), "labels": label, "number": i} for i, (text, label) in enumerate(pairs)]


def trainer(model, folder, rows=None, steps=24, optimizer=None, text=True, **options):
    from transformers import Trainer, TrainingArguments

    rows = sentences() if rows is None else rows
    options = {"learning_rate": 1e-3, "save_strategy": "no", "report_to": "none", "logging_steps": 4} | options
    options |= {"use_cpu": True, "dataloader_pin_memory": False, "disable_tqdm": True, "max_steps": steps}
    arguments = TrainingArguments(str(folder), per_device_train_batch_size=8, **options)
    data = {"train_dataset": rows, "eval_dataset": rows, "processing_class": tokenizer() if text else None}
    return Trainer(model, arguments, **data, optimizers=(optimizer, None))


def groups(model, **options):
    return torch.optim.AdamW(sn.parameter_groups(model, lr=1e-3, **options))


# Loss and logits


def test_logits_are_the_log_of_the_mean_probability():
    model, x = plain().eval(), torch.randn(5, 8)
    logits = model(x).logits
    assert_close(logits, model.ensemble(x).softmax(2).mean(1).log())
    assert_close(logits.softmax(1), model.ensemble.predict_proba(x))


def test_logits_of_a_sigmoid_link_are_the_logit_of_the_mean():
    model, x = plain(link="sigmoid").eval(), torch.randn(5, 8)
    assert_close(model(x).logits, model.ensemble(x).sigmoid().mean(1).logit())
    assert_close(model(x).logits.sigmoid(), model.ensemble.predict_proba(x))


@pytest.mark.parametrize("link", ["softmax", "sigmoid"])
def test_far_logits_stay_finite(link):
    model = plain(link=link)
    far = torch.tensor([[[800.0, -800.0, -900.0]] * 2])
    logits = model._mean(far)
    assert logits.isfinite().all()
    assert_close(logits, far[:, 0] if link == "sigmoid" else far[:, 0] - 800)


def test_half_precision_is_mixed_in_single():
    model = plain().eval().half()
    logits = model(torch.randn(5, 8).half()).logits
    assert logits.dtype == torch.float32
    assert_close(logits.exp().sum(1), torch.ones(5))


def test_training_loss_is_the_members_and_the_regulariser():
    model, x, y = plain().train(), torch.randn(5, 8), torch.tensor([0, 1, 2, 0, 1])
    members = F.cross_entropy(model.ensemble(x).flatten(0, 1), y.repeat_interleave(4))
    assert_close(model(x, labels=y).loss, members + sn.diversity_loss(model.ensemble, tau=0.1, weight=1e-2))


def test_evaluation_loss_is_that_of_the_mean_prediction():
    model, x, y = plain().eval(), torch.randn(5, 8), torch.tensor([0, 1, 2, 0, 1])
    loss = model(x, labels=y).loss
    assert_close(loss, -model.ensemble.predict_proba(x)[range(5), y].log().mean())
    assert loss < sn.member_cross_entropy(model.ensemble(x), y)


def test_sigmoid_losses():
    model, x, y = plain(link="sigmoid"), torch.randn(5, 8), torch.randint(2, (5, 3)).float()
    members = sn.member_cross_entropy(model.ensemble(x), y, link="sigmoid")
    assert_close(model.train()(x, labels=y).loss, members + sn.diversity_loss(model.ensemble, 0.1, 1e-2))
    mean = model.ensemble.predict_proba(x)
    assert_close(model.eval()(x, labels=y).loss, sn.member_cross_entropy(mean.logit()[:, None], y, link="sigmoid"))


def test_soft_labels_pass():
    model, x, y = plain(), torch.randn(5, 8), torch.rand(5, 3).softmax(1)
    members = sn.member_cross_entropy(model.ensemble(x), y)
    assert_close(model.train()(x, labels=y).loss, members + sn.diversity_loss(model.ensemble, 0.1, 1e-2))
    assert_close(model.eval()(x, labels=y).loss, -(y * model.ensemble.predict_proba(x).log()).sum(1).mean())


def test_labels_are_taken_wherever_they_stand():
    """By keyword, by position, or in a tokenizer's batch; and the result is a tuple where one asks for it."""
    model, y = adapter(bert()).eval(), torch.tensor([0, 1])
    ids = torch.randint(2, 9, (2, 5))
    loss = model(ids, labels=y).loss
    assert_close(model(ids, None, None, None, None, y).loss, loss)
    assert_close(model({"input_ids": ids, "labels": y}).loss, loss)
    first, logits = model(input_ids=ids, labels=y, return_dict=False)
    assert_close(first, loss)
    assert_close(logits, model(input_ids=ids)["logits"])
    assert model(ids).loss is None
    assert "loss" not in model(ids)


def test_the_backbone_gets_neither_labels_nor_return_dict():
    model = adapter(bert())
    seen = []
    model.ensemble.backbone.register_forward_pre_hook(lambda *call: seen.append(call[2]), with_kwargs=True)
    model(input_ids=torch.randint(2, 9, (2, 5)), labels=torch.tensor([0, 1]), return_dict=True)
    assert seen
    assert all(set(kwargs) == {"input_ids"} for kwargs in seen)


def test_outputs_that_are_no_class_logits_are_refused():
    net = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 1))
    with pytest.raises(ValueError, match="no logits of classes"):
        ForTrainer(sn.SigmaEnsemble(net, members=2), tau=0.1)(torch.randn(5, 8))


@pytest.mark.parametrize(
    ("options", "error"),
    [({"tau": 0}, ValueError), ({"tau": 0.1, "weight": -1.0}, ValueError), ({"tau": True}, ValueError)],
)
def test_settings_are_checked_at_once(options, error):
    with pytest.raises(error):
        ForTrainer(plain().ensemble, **options)


def test_only_an_ensemble_is_wrapped_and_not_copied():
    ens = plain().ensemble.eval()
    model = ForTrainer(ens, tau=0.1)
    assert model.ensemble is ens
    assert not model.training
    assert ForTrainer(ens.train(), tau=0.1).training
    with pytest.raises(TypeError, match="dict"):
        ForTrainer(ens.gates(), tau=0.1)


@pytest.mark.parametrize(
    ("config", "link", "match"),
    [
        ({"problem_type": "multi_label_classification"}, "softmax", 'link="sigmoid"'),
        ({"num_labels": 1, "id2label": None}, "softmax", 'link="sigmoid"'),
        ({}, "sigmoid", "problem_type"),
        ({"problem_type": "regression"}, "softmax", "regression"),
    ],
)
def test_a_link_that_pipelines_would_not_apply_is_refused(config, link, match):
    with pytest.raises(ValueError, match=match):
        adapter(bert(**config), link=link)
    adapter(bert(problem_type="multi_label_classification"), link="sigmoid")


# What it takes from the backbone


def names(function):
    return list(inspect.signature(function).parameters)


def copies():
    def pickled(model):
        return pickle.loads(pickle.dumps(model))

    def replicated(model):
        return model._replicate_for_data_parallel()

    return [copy.copy, copy.deepcopy, pickled, replicated, lambda model: model.to(torch.float64)]


@pytest.mark.parametrize("copied", copies())
@pytest.mark.parametrize("build", [bert, vit])
def test_the_signature_is_the_backbones_in_copies_too(build, copied):
    backbone = build()
    model = copied(adapter(backbone))
    assert names(model.forward) == names(backbone.forward)
    assert model.forward.__self__ is model
    assert "labels" in names(ForTrainer.forward)  # Trainer reads the names of the labels there


def test_labels_are_added_where_the_backbone_takes_none():
    assert names(plain().forward) == ["input", "labels"]

    class Net(nn.Sequential):
        def forward(self, x, *, scale=1.0, **others):
            return super().forward(x * scale)

    model = ForTrainer(sn.SigmaEnsemble(Net(nn.Linear(8, 4), nn.LayerNorm(4)), members=2), tau=0.1)
    assert names(model.forward) == ["x", "scale", "labels", "others"]


def test_a_deep_copy_runs_its_own_ensemble():
    model, ids = adapter(bert()).eval(), torch.randint(2, 9, (2, 5))
    other = copy.deepcopy(model)
    before = model(ids).logits
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert_close(model(ids).logits, before)
    assert_close(other(ids).logits, torch.full((2, 3), -math.log(3)))


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_the_signature_survives_accelerate(precision):
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)
    backbone = bert()
    accelerator = Accelerator(mixed_precision=precision, cpu=True)
    model = accelerator.prepare(adapter(backbone))
    assert names(model.forward) == names(backbone.forward)
    output = model(input_ids=torch.randint(2, 9, (2, 5)), labels=torch.tensor([0, 1]))
    assert output.loss.dtype == torch.float32
    unwrapped = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    assert names(unwrapped.forward) == names(backbone.forward)
    AcceleratorState._reset_state(True)


def test_the_backbone_answers_for_the_adapter():
    model = adapter(vit())
    backbone = model.ensemble.backbone
    assert model.config is backbone.config
    assert model.main_input_name == "pixel_values"
    assert model.device == torch.device("cpu")
    assert model.to(torch.float64).dtype == torch.float64
    assert model.name_or_path == backbone.name_or_path
    assert model.can_generate() is False
    assert model.accepts_loss_kwargs is False


def test_modules_own_names_come_first_and_unknown_ones_name_both():
    model = adapter(bert())
    assert "ensemble" in dict(model.named_children())
    assert model.named_parameters.__self__ is model
    with pytest.raises(AttributeError, match=r"neither ForTrainer nor its backbone BertFor.* 'colour'"):
        _ = model.colour
    with pytest.raises(AttributeError, match="'ForTrainer' object"):  # as in a copy that is not yet filled
        _ = ForTrainer.__new__(ForTrainer).config
    for name in ("save_pretrained", "push_to_hub", "from_pretrained"):  # a plain backbone could not load these weights
        assert hasattr(model.ensemble.backbone, name)
        assert not hasattr(model, name)


# Where a graph ends, torch looks at tensors in a way that it warns of.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_it_can_be_compiled():
    model, x, y = plain().train(), torch.randn(5, 8), torch.tensor([0, 1, 2, 0, 1])
    eager = model(x, labels=y)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)(x)
    assert_close(compiled.logits, eager.logits)
    # On CPU the labels are checked, which ends a graph.
    assert_close(torch.compile(model, backend="eager")(x, labels=y).loss, eager.loss)


def test_the_adapter_needs_no_transformers():
    source = inspect.getsource(inspect.getmodule(ForTrainer))
    assert set(re.findall(r"^\s*(?:import|from) (\w+)", source, re.M)) <= {
        "__future__", "collections", "functools", "inspect", "math", "torch", "types", "typing",
    }  # fmt: skip


# Trainer


def test_trainer_learns_moves_the_gates_and_predicts(tmp_path):
    model = adapter(bert(hidden_dropout_prob=0.0))
    before = {name: gates.detach().clone() for name, gates in model.ensemble.gates().items()}
    run = trainer(model, tmp_path, steps=48, optimizer=groups(model.ensemble))
    first = run.evaluate()["eval_loss"]
    run.train()
    losses = [entry["loss"] for entry in run.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0]
    assert all((gates - before[name]).abs().max() > 0.05 for name, gates in model.ensemble.gates().items())
    last = run.evaluate()["eval_loss"]
    assert last < first / 2
    result = run.predict(sentences())
    with torch.no_grad():
        batch = tokenizer().pad([{k: v for k, v in row.items() if k != "number"} for row in sentences()])
        batch = {k: torch.tensor(v) for k, v in batch.items() if k != "labels"}
    probabilities = model.ensemble.predict_proba(**batch)
    assert_close(torch.tensor(result.predictions).softmax(1), probabilities, atol=1e-5, rtol=1e-4)
    labels = [row["labels"] for row in sentences()]
    assert np.array_equal(result.label_ids, labels)
    assert last == pytest.approx(-probabilities[range(16), labels].log().mean().item(), rel=1e-4)


@pytest.mark.parametrize("bf16", [False, True])
def test_columns_reach_the_backbone_and_others_do_not(tmp_path, bf16):
    model = adapter(bert())
    seen = set()
    model.ensemble.backbone.register_forward_pre_hook(lambda *call: seen.add(tuple(call[2])), with_kwargs=True)
    run = trainer(model, tmp_path, steps=2, optimizer=groups(model.ensemble), bf16=bf16)
    run.train()
    run.evaluate()
    assert {frozenset(names) for names in seen} == {frozenset({"input_ids", "attention_mask"})}


def test_images_train_too(tmp_path):
    rows = [{"pixel_values": torch.full((3, 16, 16), float(i % 2)), "labels": i % 2, "name": "x"} for i in range(16)]
    model = adapter(vit())
    run = trainer(model, tmp_path, rows, steps=12, optimizer=groups(model.ensemble), text=False)
    first = run.evaluate()["eval_loss"]
    run.train()
    assert run.evaluate()["eval_loss"] < first / 2


def test_the_gates_learn_a_hundred_times_faster(tmp_path):
    """Trainer's schedule scales every group alike, and the groups are those of `parameter_groups`."""
    model = adapter(bert())
    run = trainer(model, tmp_path, steps=4, optimizer=groups(model.ensemble, weight_decay=0.01), warmup_steps=2)
    rates = []

    from transformers import TrainerCallback

    class Record(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, **kwargs):
            rates.append([group["lr"] for group in run.optimizer.param_groups])

    run.add_callback(Record())
    run.train()
    others, gates = run.optimizer.param_groups
    assert {id(p) for p in gates["params"]} == {id(p) for n, p in model.named_parameters() if n.endswith("gamma")}
    assert len(others["params"]) + len(gates["params"]) == len(list(model.parameters()))
    assert (others["weight_decay"], gates["weight_decay"]) == (0.01, 0.0)
    assert max(rates)[0] == 1e-3
    for other, gate in rates:
        assert gate == pytest.approx(100 * other)


def test_accumulated_batches_give_the_step_of_one(tmp_path):
    """Bert takes any keyword, so Trainer would leave the scaling of the loss to it, did the adapter not say no."""
    moved = []
    for size, accumulated in ((8, 1), (4, 2)):
        torch.manual_seed(0)
        model = adapter(bert(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = trainer(
            model, tmp_path, steps=1, optimizer=optimizer, gradient_accumulation_steps=accumulated, max_grad_norm=0.0
        )
        run.args.per_device_train_batch_size = run._train_batch_size = size
        run.train()
        moved.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert_close(moved[0], moved[1], atol=1e-5, rtol=1e-4)


def test_activation_checkpointing_reaches_the_backbone(tmp_path):
    model = adapter(bert())
    run = trainer(model, tmp_path, steps=1, optimizer=groups(model.ensemble), activation_checkpointing=True)
    run.train()
    assert model.ensemble.backbone.is_activation_checkpointing


def test_checkpoints_are_saved_and_resumed(tmp_path):
    """Six steps in one go end where three and then three more do, in a new adapter."""
    options = {"save_strategy": "steps", "save_steps": 3, "lr_scheduler_type": "constant"}
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    whole = adapter(bert(**quiet))
    start = copy.deepcopy(whole.state_dict())
    trainer(whole, tmp_path / "whole", steps=6, optimizer=groups(whole), **options).train()
    again = adapter(bert(**quiet))
    run = trainer(again, tmp_path / "whole", steps=6, optimizer=groups(again), **options)
    run.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    assert run.state.global_step == 6
    for name, tensor in whole.state_dict().items():
        assert_close(again.state_dict()[name], tensor, msg=name)
    assert any((tensor - start[name]).abs().max() > 0.01 for name, tensor in whole.state_dict().items())
    from safetensors.torch import load_file

    saved = load_file(tmp_path / "whole" / "checkpoint-6" / "model.safetensors")
    assert saved.keys() == whole.state_dict().keys()
    for name, tensor in saved.items():
        assert_close(tensor, whole.state_dict()[name])


# Pipelines


def by_label(scores):
    return {score["label"]: score["score"] for score in scores}


def expected(row):
    return pytest.approx(dict(zip(LABELS.values(), row.tolist(), strict=True)), rel=1e-4)


@pytest.mark.parametrize("batch_size", [1, 2])
def test_text_pipeline_gives_the_mean_probabilities(batch_size):
    from transformers import pipeline

    model = adapter(bert()).eval()
    texts = ["a good film", "the dull film", "great film bad"]
    classify = pipeline(
        "text-classification", model=model, tokenizer=tokenizer(), top_k=None, device="cpu", batch_size=batch_size
    )
    probabilities = model.ensemble.predict_proba(**tokenizer()(texts, return_tensors="pt"))
    for scores, row in zip(classify(texts), probabilities, strict=True):
        assert by_label(scores) == expected(row)


def test_text_pipeline_of_several_labels_gives_the_mean_sigmoids():
    from transformers import pipeline

    model = adapter(bert(problem_type="multi_label_classification"), link="sigmoid").eval()
    classify = pipeline("text-classification", model=model, tokenizer=tokenizer(), top_k=None, device="cpu")
    row = model.ensemble.predict_proba(**tokenizer()(["a good film"], return_tensors="pt"))[0]
    assert by_label(classify(["a good film"])[0]) == expected(row)


def test_image_pipeline_gives_the_mean_probabilities():
    from PIL import Image
    from transformers import ViTImageProcessor, pipeline

    model = adapter(vit()).eval()
    processor = ViTImageProcessor(size={"height": 16, "width": 16})
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (20, 20, 3), dtype=np.uint8))
    classify = pipeline("image-classification", model=model, image_processor=processor, top_k=3, device="cpu")
    row = model.ensemble.predict_proba(**processor(image, return_tensors="pt"))[0]
    assert by_label(classify(image)) == expected(row)


# The page


@pytest.mark.filterwarnings("ignore:`isinstance")  # Lightning's own
def test_the_page_runs(tmp_path, monkeypatch, capsys):
    text = (paths.root() / "docs" / "trainers.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)
    assert len(blocks) == 4
    monkeypatch.chdir(tmp_path)
    space = {"__name__": "page"}
    for block in blocks:
        exec(compile(block, "docs/trainers.md", "exec"), space)
    assert space["scores"]["eval_loss"] > 0
    assert_close(space["probabilities"].sum(1), torch.ones(8))
    assert [group["initial_lr"] for group in space["trainer"].optimizer.param_groups] == pytest.approx([1e-3, 0.1])
    (tmp_path / "checkpoints" / "checkpoint-3" / "model.safetensors").stat()
    assert space["lit"].global_step == 20
    x, y = space["x"], (space["x"][:, 0] > 0).long()
    untrained = sn.SigmaEnsemble(space["net"], members=4, head="3").eval()
    lit = space["lit"].ens.eval()
    assert sn.member_cross_entropy(lit(x), y) < sn.member_cross_entropy(untrained(x), y)
