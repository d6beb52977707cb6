"""The chain against unmodified Hugging Face models, bit for bit: three steps, every gradient."""

import copy
import warnings

import pytest
import torch

from plait.chain import Chain
from plait.visit import Walk

pytest.importorskip("transformers")
TOKENS = 100


def tokens(rows=2, length=24):
    return torch.randint(0, TOKENS, (rows, length), generator=torch.Generator().manual_seed(0))


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=TOKENS, n_positions=32, n_embd=32, n_layer=3, n_head=4, bos_token_id=0, eos_token_id=0
    )
    return GPT2LMHeadModel(config), {"input_ids": tokens(), "labels": tokens()}


def bert():
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=TOKENS, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64
    )
    mask = torch.ones(2, 24, dtype=torch.long)
    mask[1, 20:] = 0
    return BertForMaskedLM(config), {"input_ids": tokens(), "attention_mask": mask, "labels": tokens()}


def t5():
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=TOKENS, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    return T5ForConditionalGeneration(config), {"input_ids": tokens(), "labels": tokens(length=12)}


def vit():
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, image_size=16,
        patch_size=4, hidden_dropout_prob=0.1, num_labels=5,
    )  # fmt: skip
    return ViTForImageClassification(config), {
        "pixel_values": torch.randn(2, 3, 16, 16),
        "labels": torch.tensor([1, 3]),
    }


def resnet():
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(embedding_size=8, hidden_sizes=[16, 32], depths=[2, 2], num_labels=5)
    images = {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.tensor([1, 3])}
    return ResNetForImageClassification(config), images


MODELS = {make.__name__: make for make in (gpt2, bert, t5, vit, resnet)}


@pytest.fixture(scope="module", params=MODELS)
def twins(request):
    """A model, and a chain of an equal one."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, inputs = MODELS[request.param]()
        model.train()
        return model, Chain.trace(copy.deepcopy(model), inputs)


def same_gradients(model, chain):
    for (name, one), (other_name, other) in zip(
        model.named_parameters(), chain.named_parameters(), strict=True
    ):
        assert name == other_name
        assert (one.grad is None) == (other.grad is None), name
        assert one.grad is None or torch.equal(one.grad, other.grad), name


@pytest.mark.parametrize("way", ["whole", "block by block", "joined", "carried"])
def test_three_steps_are_bit_equal(twins, way):
    model, chain = twins
    cuts = [len(chain) // 3, 2 * len(chain) // 3]
    used = {"joined": chain.cut(cuts), "carried": chain.cut(cuts, carry=True)}.get(way, chain)
    walk = Walk(used)
    chain.load_state_dict(copy.deepcopy(model.state_dict()))
    optimizers = [torch.optim.AdamW(owner.parameters(), lr=1e-2) for owner in (model, chain)]
    for step in range(3):
        for half in range(2):  # gradients are accumulated over two parts
            _, inputs = chain.example(3 + half)
            torch.manual_seed(10 * step + half)
            expected = model(**inputs).loss
            expected.backward()
            torch.manual_seed(10 * step + half)
            if way == "block by block":
                loss = walk.forward(**inputs).loss
                walk.backward(loss)
            else:
                loss = used(**inputs).loss
                loss.backward()
            assert torch.equal(loss, expected)
            same_gradients(model, chain)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, chain.state_dict()[name]), name


def test_evaluation_is_bit_equal_and_training_comes_back(twins):
    model, chain = twins
    chain.load_state_dict(copy.deepcopy(model.state_dict()))
    _, inputs = chain.example(1)
    model.eval()
    chain.eval()
    with torch.no_grad():
        assert torch.equal(model(**inputs).logits, chain(**inputs).logits)
    model.train()
    chain.train()
    _, inputs = chain.example(5)
    torch.manual_seed(1)
    expected = model(**inputs).logits
    torch.manual_seed(1)
    assert torch.equal(chain(**inputs).logits, expected)


def test_what_crosses_a_cut_is_known_in_bytes(twins):
    _, chain = twins
    for batch in (1, 4):
        args, kwargs = chain.example(batch)
        values = chain.start(*args, **kwargs)
        for place, block in enumerate(chain):
            if place:
                crossing = [values[name] for name in chain.live(place)]
                assert chain.cut_bytes(batch)[place - 1] == sum(value.nbytes for value in crossing)
            given = block(*(values[name] for name in block.reads))
            values.update(zip(block.writes, given, strict=True))
