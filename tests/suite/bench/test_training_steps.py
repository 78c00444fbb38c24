"""Tests the benchmark of training on a CPU with a tiny model: the steps run, and their parts are measured."""

import pytest
import torch

from flashproof.impls import catalogue
from flashproof.nn import Configuration
from flashproof.tests.bench import test_training_speed as speed

TINY = Configuration(layers=1, heads=2, width=32, vocabulary=61, context=48)


def test_a_training_is_measured() -> None:
    found = speed.fitting(TINY, catalogue.load("tiled.fa2"), 2, "cpu")
    assert found
    assert (found.batch, len(found.seconds), len(found.attention_seconds)) == (16384 // 48, 2, 2)


def test_the_batch_is_halved_until_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def training(*arguments: object) -> speed.Measured:
        tried.append(arguments[2])
        if arguments[2] != 3:
            raise torch.OutOfMemoryError
        return speed.Measured([2.0], [1.0], 7, 3)

    monkeypatch.setattr(speed, "training", training)
    monkeypatch.setattr(speed, "TOKENS", 48 * 12)
    found = speed.fitting(TINY, catalogue.load("tiled.fa2"), 2, "cpu")
    assert found
    assert (tried, found.tokens_per_second(48), found.share) == ([12, 6, 3], 72.0, 0.5)
    monkeypatch.setattr(speed, "TOKENS", 48 * 2)
    assert speed.fitting(TINY, catalogue.load("tiled.fa2"), 2, "cpu") is None
