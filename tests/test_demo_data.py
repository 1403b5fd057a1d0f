"""The demonstration's data: seeds, rendering, encoding, scores."""

import itertools
import json
from random import Random

import numpy as np
import pytest
import torch
from speceyes.scripts.demo import alignment, batches, documents, evaluate, model, samples, tasks, tokenizer
from speceyes.scripts.demo.canvas import ALPHABET, Canvas, Pen
from speceyes.scripts.demo.muon import orthogonalise
from speceyes.scripts.demo.sample import Sample, Turn


@pytest.fixture(scope="module")
def learned():
    return tokenizer.train()


@pytest.mark.parametrize("task", tasks.TASKS)
def test_sample_repeats_by_seed(task):
    first, again, other = (tasks.sample(task, "test", i) for i in (7, 7, 8))
    assert first.turns == again.turns
    for one, two in zip(first.canvases, again.canvases, strict=True):
        assert np.array_equal(one.image, two.image)
        assert np.array_equal(one.labels, two.labels)
    assert first.turns != other.turns


def test_splits_share_no_seed():
    ordered = sorted(tasks.SPLITS.values(), key=lambda seeds: seeds.start)
    assert set(tasks.SPLITS) == {"training", "validation", "test"}
    for earlier, later in itertools.pairwise(ordered):
        assert earlier.stop <= later.start


def test_sample_beyond_its_split_is_refused():
    with pytest.raises(IndexError):
        tasks.sample("scene", "training", 10**9)


@pytest.mark.parametrize("layout", documents.LAYOUTS)
def test_document_fits_the_page_and_its_reading_is_json(layout):
    for seed in range(200):
        sample = documents.document(Random(seed), layout=layout)
        reading = json.loads(sample.turns[0].answer)
        assert evaluate.leaves(sample.turns[0].answer) and isinstance(reading, dict)
        assert sample.canvases[0].image.size == (192, 192)


def test_rows_of_a_document_fit_the_columns(monkeypatch):
    seen = []
    monkeypatch.setattr(documents, "render", lambda rng, rows: seen.append(rows) or Canvas())
    for seed in range(1000):
        documents.document(Random(seed))
    assert max(len(row) for rows in seen for row in rows) <= documents.COLUMNS
    assert max(sum(row != "-" for row in rows) for rows in seen) <= documents.LINES


def test_labels_name_the_characters_of_a_patch():
    canvas = Canvas()
    canvas.text(0, 15, "AB7", Pen())
    expected = [ALPHABET.index(c) + 1 for c in "AB7"]
    assert canvas.labels[0, 0, :2].tolist() == expected[:2]
    assert canvas.labels[0, 1, :2].tolist() == [expected[2], 0]
    assert canvas.labels[1:].sum() == 0


def test_answers_are_aligned_with_where_they_are_written():
    canvas = Canvas()
    canvas.text(0, 15, "NAME: ADA", Pen())
    canvas.text(0, 47, "SEAT: 7", Pen())
    sample = Sample((canvas,), ())
    assert alignment.spots(sample, Turn("?", "ADA", "document/badge")) == [(0, 1, 2), (0, 1, 3), (0, 2, 0)]
    reading = Turn("?", '{"name":"ADA","place":"7"}', "fields/badge")
    found = alignment.spots(sample, reading)
    beginnings = [found[reading.answer.index(text)] for text in ("name", "ADA", "place", "7")]
    assert beginnings == [(0, 0, 0), (0, 1, 2), (0, 6, 0), (0, 7, 2)]
    assert alignment.spots(sample, Turn("?", "A", "document/badge")) == [None]


def test_words_of_a_clip_are_aligned_with_their_shape():
    frames = (Canvas(), Canvas())
    for frame, x in zip(frames, (20, 150), strict=True):
        frame.shape("star", "red", x, 100, 18)
    turn = Turn("Summarise the clip.", "The red star moves right.", "clip")
    found = alignment.spots(Sample(frames, (turn,)), turn)
    assert [found[turn.answer.index(word)] for word in ("red", "star")] == [(0, 18, -1)] * 2
    assert [found[turn.answer.index(word)] for word in ("moves", "right")] == [(1, 22, -1)] * 2


def test_batch_points_at_the_characters_that_the_answer_is_read_off(learned):
    sample = tasks.sample("lines", "validation", 1)
    batch = batches.Encoder(learned).batch([sample])
    read = batch.slots[0] >= 0
    assert bool((batch.ids[0, batch.places[0, read]] == learned.convert_tokens_to_ids(tokenizer.IMAGE)).all())
    for target, slot, shown in zip(batch.targets[0, read], batch.slots[0, read], batch.shown[0, read], strict=True):
        character = learned.decode([int(target)])
        assert shown[slot] == (0 if character == " " else ALPHABET.index(character) + 1)


@pytest.mark.parametrize("task", ["document", "scene", "clip"])
def test_encoding_equals_the_processor(task, learned):
    processor = model.processor(learned)
    sample = tasks.sample(task, "validation", 3)
    turn = sample.turns[0]
    images = [canvas.image for canvas in sample.canvases]
    content = [*({"type": "image"} for _ in images), {"type": "text", "text": turn.question}]
    prompt = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    expected = processor(text=prompt, images=images, add_special_tokens=False, return_tensors="pt")

    encoder = batches.Encoder(learned)
    question, answer = encoder.turn(turn)
    assert expected["input_ids"][0].tolist() == encoder.prefix(len(images)) + question
    assert learned.decode(answer) == turn.answer + tokenizer.END
    assert torch.equal(expected["pixel_values"][0], batches.pixels(list(sample.canvases)))
    assert bool(expected["pixel_attention_mask"].all())


def test_turns_see_the_pictures_and_themselves_only(learned):
    batch = batches.Encoder(learned).batch([tasks.sample("scene", "validation", 0)])
    seen = batch.mask()[0, 0] == 0
    turns = batch.turns[0]
    for query in range(len(turns)):
        allowed = {0, int(turns[query])}
        assert {int(turns[key]) for key in seen[query].nonzero()} <= allowed
        assert not seen[query, query + 1 :].any()
        assert int(seen[query].sum()) == int(batch.positions[0, query]) + 1


def test_tokenizer_spells_values_and_encodes_any_text(learned):
    assert len(learned.encode("TOMATO 3.40", add_special_tokens=False)) == len("TOMATO 3.40")
    for text in ("What is the total?", "¿Cuánto cuesta? 値段は 🍅", '{"a":"\\n"}'):
        assert learned.decode(learned.encode(text, add_special_tokens=False)) == text


def test_orthogonalise_evens_the_singular_values():
    spread = torch.linalg.svdvals(orthogonalise(torch.randn(2, 48, 24, generator=torch.Generator().manual_seed(0))))
    assert spread.min() > 0.5 and spread.max() < 1.3


def test_fields_f1_counts_leaves():
    expected = '{"a":"1","b":{"c":"2","d":"3"}}'
    assert evaluate.fields_f1([(expected, expected)]) == 1.0
    assert evaluate.fields_f1([(expected, '{"a":"1","b":{"c":"0"}}')]) == pytest.approx(2 * 1 / (3 + 2))
    assert evaluate.fields_f1([(expected, '{"a":"1"')]) == 0.0


def test_exact_match_and_score_of_a_perfect_and_of_a_blind_answer():
    assert evaluate.exact_match([("red", " red "), ("red", "blue")]) == 0.5
    known = {}
    for suite in ("questions", "clips"):
        for item in evaluate.items(suite, 12):
            known[(item.images[0].tobytes(), item.question)] = item.answer
    report = evaluate.score(lambda images, q: known.get((images[0].tobytes(), q), ""), 12, ("questions", "clips"))
    assert [report[suite]["score"] for suite in report] == [1.0, 1.0]
    assert [report[suite]["blank"] for suite in report] == [0.0, 0.0]


def test_samples_are_small_and_complete(tmp_path):
    samples.write(tmp_path / "samples")
    entries = json.loads((tmp_path / "samples" / "samples.json").read_text())
    files = {path.name: path.stat().st_size for path in (tmp_path / "samples").glob("*.png")}
    assert {name for entry in entries for name in entry["images"]} == set(files)
    assert len(files) >= 30 and sum(files.values()) < 1_500_000
    assert {entry["kind"].partition("/")[0] for entry in entries} >= {"fields", "document", "chart", "shapes", "clip"}
