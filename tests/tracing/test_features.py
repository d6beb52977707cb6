"""Each chain of a model that does something awkward does what its model does."""

import pytest
import torch
from awkward_models import BLOCKS, MODELS, BatchArithmetic, ChangedInput, Convolutions, Dropout, TiedThrice, X

from plait.chain import Chain


@pytest.mark.parametrize("kind", MODELS, ids=lambda kind: kind.__name__)
def test_the_chain_does_what_the_model_does(kind, same):
    args, kwargs = MODELS[kind]
    chain = same(kind, args, kwargs)
    assert len(chain) >= BLOCKS.get(kind, 1)


def test_at_every_batch_size(same):
    same(BatchArithmetic, X, batches=(1, 2, 3, 7))


def test_traced_with_one_row(same):
    same(BatchArithmetic, X[:1], batches=(1, 3))


def test_dropout_draws_what_the_model_draws(same):
    chain = same(Dropout, X, evaluates=False)
    chain.eval()
    chain.model.eval()
    assert torch.equal(chain(X), chain.model(X))


@pytest.mark.parametrize("kind", [TiedThrice, Convolutions], ids=lambda kind: kind.__name__)
def test_in_double_precision(kind, same):
    args, _ = MODELS[kind]
    chain = same(lambda: kind().double(), args.double())
    assert {value.dtype for value in chain.values.values()} == {"float64"}


def test_the_shared_things_are_shared_across_blocks():
    """What the tests above stand on: the weight and the tensor are used in three blocks."""
    chain = Chain.trace(TiedThrice(), X)
    assert len(chain.tied["b.weight"]) >= 2
    readers = [block.name for block in chain if "a" in block.reads]
    assert len(readers) >= 3, readers


def test_an_input_is_left_as_it_was():
    chain, given = Chain.trace(ChangedInput(), X), X.clone()
    chain(given)
    assert torch.equal(given, X)
